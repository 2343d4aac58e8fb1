"""Images of rows: every form they come in, what is refused with its row, and their places in prompts."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_models import checkpoint, png, tokenizer
from PIL import Image

from groupwise.data import images
from groupwise.data.encoding import DEMONSTRATIONS, PAIRS, PLAIN_PAIRS, PROMPTS, Demonstration, Pair, RecordKind, encode
from groupwise.data.images import ImageEncoder, NoImages, PatchEncoder, pictures_of
from groupwise.data.sources import BadRow, SourceRows
from groupwise.data.templates import Template
from groupwise.errors import ConfigError, DataError
from groupwise.models.vision import read_encoder
from groupwise.records import Prompt

PNG = png(0)
COUNT = 24 * 16 // 8**2
"""Embeddings of an image of `png`: squares of 8 x 8 pixels."""


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 64, "longest_edge": 1024}
    processor = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return PatchEncoder(processor, begin="", token="<|image_pad|>", end="", mark="<|image_pad|>")


def read(encoder: ImageEncoder | NoImages, *rows: Any, **settings: Any) -> list[Prompt]:
    template = Template(tokenizer=tokenizer(), images=encoder, **settings)
    prompts, _ = encode(PROMPTS.read(SourceRows("t.jsonl", rows), template), template, PROMPTS, limit=200, limited_by="a limit")
    return prompts


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


HERE, WHAT = {"type": "image"}, {"type": "text", "text": "what?"}
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
FORMS = {
    "images": {"prompt": user(HERE, WHAT), "images": [PNG]},
    "image": {"prompt": user(HERE, WHAT), "image": {"bytes": PNG, "path": None}},
    "PIL": {"prompt": user(HERE, WHAT), "images": [Image.open(io.BytesIO(PNG))]},
    "data URL": {"prompt": user(HERE, WHAT), "images": [URL]},
    "text alone, as in TRL": {"prompt": [{"role": "user", "content": "what?"}], "images": [PNG]},
    "in the part": {"prompt": user({"type": "image", "image": PNG}, WHAT)},
    "of OpenAI": {"prompt": user({"type": "image_url", "image_url": {"url": URL}}, WHAT)},
    "columnar, without a type": {"prompt": user(HERE, {"type": None, "text": "what?"}), "images": [PNG]},
    "columnar": {"prompt": user({"type": "image", "text": None}, {**WHAT, "image": None}), "images": [{"bytes": PNG}]},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_prompt(form: str, encoder: ImageEncoder) -> None:
    (prompt,) = read(encoder, FORMS[form])
    (picture,) = prompt.images.pictures
    assert np.array_equal(np.asarray(picture.open()), np.asarray(Image.open(io.BytesIO(PNG))))
    marks = tokenizer().convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    places = [mark for mark in prompt.tokens.tolist() if mark in marks]
    assert places == [marks[0], *[marks[1]] * COUNT, marks[2]]
    assert prompt.text == "<|user|><|vision_start|><|image_pad|><|vision_end|>what?<|end|><|assistant|>"
    assert prompt.row["images"] == [picture.digest]
    assert np.array_equal(prompt.images.tokens, prompt.tokens)


def test_images_stand_in_the_order_of_their_parts(encoder: ImageEncoder) -> None:
    row = {"prompt": user(HERE, WHAT, HERE), "images": [PNG, png(1, 16, 16)]}
    (prompt,) = read(encoder, row)
    runs = "".join("i" if token == tokenizer().convert_tokens_to_ids("<|image_pad|>") else "." for token in prompt.tokens)
    assert [len(run) for run in runs.replace(".", " ").split()] == [COUNT, 4]
    assert [picture.height for picture in prompt.images.pictures] == [24, 16]


def test_the_same_words_about_two_images_are_two_prompts(encoder: ImageEncoder) -> None:
    template = Template(tokenizer=tokenizer(), images=encoder)
    rows = [template.read({"prompt": user(HERE, WHAT), "images": [png(seed)]}) for seed in (1, 2, 1)]
    keys = [template.key(row.content) for row in rows]
    assert keys[0] == keys[2] != keys[1]


def test_a_rotated_photo_stands_upright(tmp_path: Path, encoder: ImageEncoder) -> None:
    photo = Image.new("RGB", (32, 16))
    exif = photo.getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    photo.save(tmp_path / "photo.jpg", exif=exif)
    path = tmp_path / "photo.jpg"
    for image in (str(path), Image.open(path)):
        (prompt,) = read(encoder, {"prompt": user(HERE, WHAT), "image": image})
        assert (prompt.images.pictures[0].height, prompt.images.pictures[0].width) == (32, 16)


def bomb(side: int) -> bytes:
    """A small file that says that it has so many pixels in both directions."""
    header = bytearray(PNG)
    header[16:24] = side.to_bytes(4, "big") * 2
    import zlib

    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    return bytes(header)


DEPTHS = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)


def as_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


REFUSED = {
    "16 bits": ({"image": DEPTHS}, "a pixel is no byte (PIL's mode 'I;16'), and values above 255 would be cut off: scale them"),
    "16 bits in a file": ({"image": as_png(DEPTHS)}, "a pixel is no byte (PIL's mode 'I;16')"),
    "32 bits": ({"image": DEPTHS.convert("I")}, "a pixel is no byte (PIL's mode 'I')"),
    "floats": ({"image": Image.fromarray(np.eye(8, dtype=np.float32))}, "a pixel is no byte (PIL's mode 'F')"),
    "no file": (
        {"images": ["nowhere.png"]},
        "images[0]: an image cannot be read: no such file: 'nowhere.png': a text is a path",
    ),
    "a text": ({"image": "a red square"}, "image: an image cannot be read: no such file: 'a red square': a text is a path"),
    "no image": ({"images": [b"GIF89a not"]}, "an image cannot be read: its 10 bytes are none of PNG, JPEG"),
    "damaged": ({"images": [PNG[: len(PNG) // 2]]}, "images[0]: an image cannot be read: image file is truncated"),
    "decompression bomb": ({"images": [bomb(7_000)]}, "it is 7000 x 7000: at most 33,554,432 pixels are read: make it smaller"),
    "a larger one": ({"images": [bomb(70_000)]}, "it has more than 33,554,432 pixels: make it smaller"),
    "a data URL without base64": (
        {"image": "data:image/png,xx"},
        "'data:image/png,xx' is no data: URL of an image: write data:image",
    ),
    "an address": ({"images": ["https://example.com/cat.png"]}, "is not fetched: download it"),
    "a number": ({"images": [3]}, "images[0]: an image cannot be read: an object of int is no image: give one of PIL"),
    "an array": ({"images": [np.zeros((4, 4, 3))]}, "an object of ndarray is no image: give one of PIL (PIL.Image.fromarray makes"),
    "None": ({"images": [None]}, "images[0]: an image cannot be read: it is None: give the image, or leave it out"),
    "the second is None": ({"images": [PNG, None]}, "images[1]: an image cannot be read: it is None"),
    "an empty cell": ({"image": {"bytes": None, "path": None}}, "image: an image cannot be read: it has neither bytes nor a path"),
    "in a part": (
        {"prompt": user({"type": "image", "image": 3.5}, WHAT)},
        "image 1 of the messages: an image cannot be read: an object of",
    ),
    "a type that is no text": (
        {"prompt": user(HERE, {"type": ["text"], "text": "what?"}), "images": [PNG]},
        "holds a part of content of type ['text']: only text can be read here",
    ),
    "two for one part": (
        {"images": [PNG, PNG]},
        "2 images, and its messages have 1 part of type image: give an image for each",
    ),
    "none for a part": ({}, "the row has 0 images, and its messages have 1 part of type image: give an image for each part"),
    "one for two parts": (
        {"prompt": user(HERE, WHAT, HERE), "image": PNG},
        "the row has 1 image, and its messages have 2 parts of type",
    ),
    "too many": ({"images": [PNG] * 65}, "at most 64"),
    "another format": (
        {"images": [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]},
        "bytes are none of PNG, JPEG, WEBP, GIF, BMP",
    ),
    "too narrow": ({"images": [png(0, 1, 300)]}, "absolute aspect ratio must be smaller than 200"),
}
"""Rows, and what is said of each behind the name of the file and the row."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_names_its_row(case: str, encoder: ImageEncoder) -> None:
    row, reason = REFUSED[case]
    with pytest.raises(DataError, match=r"t\.jsonl row 1") as raised:
        read(encoder, {"prompt": user(HERE, WHAT), **row})
    assert reason in str(raised.value)


def test_a_large_file_is_not_read(encoder: ImageEncoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "MOST_BYTES", len(PNG) - 1)
    (tmp_path / "a.png").write_bytes(PNG)
    for value in (PNG, str(tmp_path / "a.png")):
        with pytest.raises(BadRow, match="bytes"):
            pictures_of({"image": value}, "row 1")


def test_a_message_that_writes_a_placeholder_itself_is_refused(encoder: ImageEncoder) -> None:
    """Else the image would stand in the place that an attacker chose."""
    row = {"prompt": user({"type": "text", "text": "<|image_pad|>"}, HERE), "images": [PNG]}
    with pytest.raises(DataError, match=r"has 1 images, and its text holds 2 times '<\|image_pad\|>'"):
        read(encoder, row)
    (prompt,) = read(encoder, row, control_tokens="plain")
    assert (prompt.tokens == tokenizer().convert_tokens_to_ids("<|image_pad|>")).sum() == COUNT


def test_images_side_by_side_are_refused(encoder: ImageEncoder) -> None:
    """The model's function of positions would take the placeholders of both for one image."""
    tokens = tokenizer()
    tokens.chat_template = "{% for part in messages[0].content %}{{ part.text or '<|image_pad|>' }}{% endfor %}"
    template = Template(tokenizer=tokens, images=encoder)
    row = {"prompt": user(HERE, HERE, WHAT), "images": [PNG, png(1)]}
    with pytest.raises(DataError, match=r"two images with nothing between them: set model\.chat_template"):
        encode(PROMPTS.read(SourceRows("t.jsonl", [row]), template), template, PROMPTS, limit=200, limited_by="a limit")


def test_a_text_prompt_needs_a_chat(encoder: ImageEncoder) -> None:
    row = {"prompt": "what?", "images": [PNG]}
    with pytest.raises(DataError, match=r"images need chat messages: set data\.chat: true"):
        read(encoder, row)
    assert read(encoder, row, chat=True)[0].images is not None


@pytest.mark.parametrize("row", [{"prompt": user(HERE, WHAT)}, {"prompt": user(WHAT), "images": [PNG]}], ids=["part", "column"])
def test_a_model_without_eyes_refuses_images(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="the prompt has images, and the model reads none"):
        read(NoImages("the model reads none"), row)


SAID = [{"role": "assistant", "content": "red"}]
ANSWERED = {
    "a text": FORMS["images"] | {"completion": "red"},
    "a message": FORMS["images"] | {"completion": SAID},
    "a conversation, as in TRL": {"messages": [*user(HERE, WHAT), *SAID], "images": [PNG]},
    "the conversation beside its prompt": FORMS["images"] | {"messages": [*user(HERE, WHAT), *SAID]},
    "words alone": FORMS["text alone, as in TRL"] | {"completion": "red"},
    "in the part": {"messages": [*FORMS["in the part"]["prompt"], *SAID]},
}


def demonstrations(images: ImageEncoder | NoImages, *rows: Any, **settings: Any) -> list[Demonstration]:
    template = Template(tokenizer=tokenizer(), images=images, **settings)
    read = DEMONSTRATIONS.read(SourceRows("t.jsonl", rows), template)
    eos = [int(tokenizer().eos_token_id)]
    return encode(read, template, DEMONSTRATIONS, limit=200, limited_by="a limit", eos_ids=eos)[0]


@pytest.mark.parametrize("form", ANSWERED)
def test_an_answer_stands_behind_the_images_of_its_prompt(form: str, encoder: ImageEncoder) -> None:
    """The prompt is the one that the policy is asked, and its images are those of a prompt."""
    (shown,) = demonstrations(encoder, ANSWERED[form])
    (asked,) = read(encoder, FORMS["images"])
    assert np.array_equal(shown.prompt, asked.tokens)
    assert shown.images is not None
    assert shown.images.key == asked.images.key
    assert np.array_equal(shown.images.tokens, shown.prompt)
    assert tokenizer().decode(shown.completion, skip_special_tokens=True) == "red"


def test_a_demonstration_without_images_has_none(encoder: ImageEncoder) -> None:
    words, pictured = demonstrations(encoder, {"prompt": user(WHAT), "completion": "red"}, ANSWERED["a text"])
    assert words.images is None
    assert np.array_equal(words.completion, pictured.completion)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([{"role": "assistant", "content": [{"type": "image", "image": PNG}]}], "part of content of type 'image'"),
        ("<|image_pad|>", "its text holds 2 times '<|image_pad|>'"),
    ],
    ids=["an image", "a placeholder"],
)
def test_an_answer_has_no_images(answer: Any, reason: str, encoder: ImageEncoder) -> None:
    with pytest.raises(DataError, match=re.escape(reason)):
        demonstrations(encoder, FORMS["images"] | {"completion": answer})


BETTER = {"chosen": [{"role": "assistant", "content": [{"type": "text", "text": "red"}]}], "rejected": "blue"}
ASKED = user(HERE, WHAT)
COMPARED = {
    "texts": FORMS["images"] | {"chosen": "red", "rejected": "blue"},
    "messages, as in TRL": FORMS["images"] | BETTER,
    "words alone": FORMS["text alone, as in TRL"] | BETTER,
    "in the part": FORMS["in the part"] | BETTER,
    "the prompt repeated in both": {
        "images": [PNG],
        "chosen": [*ASKED, *SAID],
        "rejected": [*ASKED, {"role": "assistant", "content": "blue"}],
    },
    "the prompt in its column too": FORMS["images"] | {"chosen": [*ASKED, *SAID], "rejected": "blue"},
}


def pairs(images: ImageEncoder | NoImages, *rows: Any) -> list[Pair]:
    template = Template(tokenizer=tokenizer(), images=images)
    read = PLAIN_PAIRS.read(SourceRows("t.jsonl", rows), template)
    eos = [int(tokenizer().eos_token_id)]
    return encode(read, template, PLAIN_PAIRS, limit=200, limited_by="a limit", eos_ids=eos)[0]


@pytest.mark.parametrize("form", COMPARED)
def test_both_sides_of_a_pair_stand_behind_the_images_of_their_prompt(form: str, encoder: ImageEncoder) -> None:
    (compared,) = pairs(encoder, COMPARED[form])
    (asked,) = read(encoder, FORMS["images"])
    assert np.array_equal(compared.prompt, asked.tokens)
    assert compared.images is not None
    assert compared.images.key == asked.images.key
    assert np.array_equal(compared.images.tokens, compared.prompt)
    sides = [tokenizer().decode(side, skip_special_tokens=True) for side in (compared.chosen, compared.rejected)]
    assert sides == ["red", "blue"]


def test_the_sides_of_a_pair_have_no_images(encoder: ImageEncoder) -> None:
    seen = [{"role": "assistant", "content": [{"type": "image", "image": PNG}]}]
    for side in ("chosen", "rejected"):
        with pytest.raises(DataError, match="part of content of type 'image'"):
            pairs(encoder, COMPARED["texts"] | {side: seen})


@pytest.mark.parametrize("kind", [PLAIN_PAIRS, DEMONSTRATIONS], ids=["pairs", "demonstrations"])
def test_an_image_in_a_turn_that_a_template_leaves_out_is_refused(kind: RecordKind[Any], encoder: ImageEncoder) -> None:
    template = Template(tokenizer=tokenizer(), images=encoder, format="{question}", chat=True)
    turns = [*FORMS["in the part"]["prompt"], *SAID]
    row = {"question": "what?", "messages": turns, "chosen": turns, "rejected": "blue"}
    with pytest.raises(DataError, match="part of content of type 'image'"):
        kind.read(SourceRows("t.jsonl", [row]), template)


def test_sides_about_different_images_are_no_pair(encoder: ImageEncoder) -> None:
    sides = {}
    for side, seed in (("chosen", 1), ("rejected", 2)):
        sides[side] = [*user({"type": "image", "image": png(seed)}, WHAT), {"role": "assistant", "content": side}]
    with pytest.raises(DataError, match="whose conversations differ before the last turn"):
        pairs(encoder, sides)


@pytest.mark.parametrize("kind", [PAIRS, DEMONSTRATIONS], ids=["pairs", "demonstrations"])
def test_rows_whose_images_are_not_read_are_refused(kind: RecordKind[Any]) -> None:
    template = Template(tokenizer=tokenizer(), images=NoImages("here are none"))
    row = FORMS["images"] | {"prompt": user(WHAT), "completion": "a", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match="the row has images, and here are none"):
        kind.read(SourceRows("t.jsonl", [row]), template)


def test_a_prompt_with_images_is_never_cut(encoder: ImageEncoder) -> None:
    template = Template(tokenizer=tokenizer(), images=encoder)
    rows = PROMPTS.read(SourceRows("t.jsonl", [FORMS["images"]]), template)
    with pytest.raises(DataError, match="longer than 9 tokens"):
        encode(rows, template, PROMPTS, limit=9, limited_by="a limit", too_long="truncate_left")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama"}, "the model (llama) reads none"),
        ({"model_type": "idefics3", "vision_config": {}}, "those of a idefics3 model are not read, only of Qwen2.5-VL, Qwen3-VL"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, "has no preprocessor_config.json"),
    ],
)
def test_models_whose_images_are_not_read_are_named(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    found = read_encoder(str(tmp_path), config, tokenizer())
    assert isinstance(found, NoImages)
    assert reason in found.reason


@pytest.mark.slow
def test_without_pillow_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ConfigError("images are read by Pillow, which cannot be imported: pip install pillow")

    monkeypatch.setattr("groupwise.models.vision.pillow", absent)
    folder = checkpoint(tmp_path)
    found = read_encoder(str(folder), {"model_type": "qwen3_vl", "vision_config": {}}, tokenizer())
    assert isinstance(found, NoImages)
    assert "pip install pillow" in found.reason
