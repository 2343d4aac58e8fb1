"""Images of prompts: read from rows, checked, and written into prompts as placeholders.

Images are input that nobody has looked at.  A file is opened only if it is of a known format and
says that it is small; what it decodes to is never larger than that.

H, W height and width in pixels   m tokens of a prompt
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from groupwise.data.sources import BadRow, Row
from groupwise.errors import ConfigError
from groupwise.utils.files import expanded
from groupwise.utils.spelling import counted

COLUMNS = ("images", "image")
"""Columns that hold the images of a row: a list, or one."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are opened; of several frames the first is read."""
MOST_BYTES = 32 << 20
"""Bytes of an image file."""
MOST_PIXELS = 1 << 25
"""Pixels of an image: 32 million, which decode to 100 MB."""
MOST_IMAGES = 64
"""Images of a prompt."""
WIDE_MODES = ("I", "F")
"""PIL's modes, beside those that begin with `I;`, whose pixels are no bytes."""
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")
UNREAD = "with an image that cannot be read"
UNCOUNTED = "with other numbers of images and of image parts"
NO_PLACE = "with images and a prompt that is a text alone"
NO_GAP = "with images that no text parts"
NO_READER = "with images, which the model does not read"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a prompt, as its file has it."""

    data: bytes = field(repr=False)
    """The bytes of the file; empty where a run's folder names the image alone."""
    digest: str
    """SHA-256 of the bytes, the first 32 hexadecimal digits."""
    height: int = 0
    width: int = 0

    def open(self) -> Any:
        """Decode the image (PIL, RGB).  Raises ConfigError where only its digest is known."""
        if not self.data:
            raise ConfigError(
                f"the image {self.digest} of a recorded prompt is not there: a run's folder holds"
                " small copies for the viewer; take the prompts from the data"
            )
        return _decoded(self.data)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt, in the order of its placeholders."""

    pictures: tuple[Picture, ...]
    tokens: np.ndarray
    """int64 (m,): the prompt, with a placeholder for each embedding of an image."""

    @property
    def key(self) -> tuple[str, ...]:
        """What decides the embeddings of the images."""
        return tuple(picture.digest for picture in self.pictures)


@dataclass(frozen=True, slots=True)
class NoImages:
    """A model that reads no images, or whose images are not read."""

    reason: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the checkpoint that describe its image processor, by name."""


NO_MODEL = NoImages("no model is named that reads any")


class ImageEncoder:
    """How a family of models writes images into its prompts."""

    def __init__(self, processor: Any, *, begin: str, token: str, end: str, mark: str) -> None:
        """processor: transformers' image processor of the checkpoint.

        mark: what the chat template writes for an image.   begin, token, end: what is put in its
            place: `token` as often as the image has embeddings, between the other two.
        """
        self.processor = processor
        self.begin, self.token, self.end, self.mark = begin, token, end, mark
        self.files: Mapping[str, bytes] = {}
        """Files of the checkpoint that describe the processor, by name."""

    def embeddings(self, picture: Picture) -> int:
        """Count the embeddings of an image.  Raises ValueError for one that has none."""
        raise NotImplementedError

    def arrays(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """What the tower reads of some images: tensors by the names of the model's arguments."""
        images = [picture.open() for picture in pictures]
        features = self.processor(images=images, return_tensors="pt")
        return {name: features[name] for name in self.inputs}

    inputs: tuple[str, ...] = ("pixel_values",)
    """Names of what the tower reads."""

    def resized(self, picture: Picture) -> Any:
        """Return an image (PIL) in the size that the processor gives it."""
        raise NotImplementedError

    def written(self, text: str, pictures: Sequence[Picture], where: str) -> str:
        """Put an image's placeholders where the chat template has written its mark.

        Raises BadRow if there are more marks than images, or fewer.
        """
        parts = re.split(f"(?<!{MARKED}){re.escape(self.mark)}", text)
        if len(parts) != len(pictures) + 1:
            raise BadRow(
                UNCOUNTED,
                f"{where}: the prompt has {len(pictures)} images, and its text holds"
                f" {len(parts) - 1} times {self.mark!r}: leave that out of the messages, or set"
                " model.chat_template to one that writes images",
            )
        if not self.begin + self.end and "" in parts[1:-1]:
            raise BadRow(
                NO_GAP,
                f"{where}: the chat template writes two images with nothing between them: set"
                " model.chat_template to one that marks where each begins",
            )
        whole = [parts[0]]
        for picture, part in zip(pictures, parts[1:], strict=True):
            try:
                count = self.embeddings(picture)
            except ValueError as error:
                raise BadRow(UNREAD, f"{where}: image {picture.digest}: {error}") from None
            whole += [self.begin, self.token * count, self.end, part]
        return "".join(whole)


MARKED = "\U000ffffc"
"""Stands before a control token that is text, as in `templates`."""


class PatchEncoder(ImageEncoder):
    """Qwen's families: an embedding for each square of merged patches, as many as the size asks."""

    inputs = ("pixel_values", "image_grid_thw")

    def __init__(self, processor: Any, **texts: str) -> None:
        """See `ImageEncoder`."""
        super().__init__(processor, **texts)
        self._grids: dict[str, Any] = {}

    def arrays(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """See `ImageEncoder`.  The grids of patches are kept."""
        arrays = super().arrays(pictures)
        digests = [picture.digest for picture in pictures]
        self._grids |= zip(digests, arrays["image_grid_thw"].tolist(), strict=True)
        return arrays

    def resized(self, picture: Picture) -> Any:
        """Return an image (PIL) in the size in which the processor cuts it into patches."""
        (_, rows, columns), *_ = self.grids([picture])
        side = self.processor.patch_size
        size = (columns * side, rows * side)
        return picture.open().resize(size, resample=self.processor.resample)

    def grids(self, pictures: Sequence[Picture]) -> list[list[int]]:
        """Patches of each image in time, height and width."""
        unknown = [picture for picture in pictures if picture.digest not in self._grids]
        if unknown:
            self.arrays(unknown)
        return [self._grids[picture.digest] for picture in pictures]

    def embeddings(self, picture: Picture) -> int:
        """Count the embeddings of an image."""
        processor = self.processor
        patches = processor.get_number_of_image_patches(picture.height, picture.width, {})
        return int(patches) // processor.merge_size**2


class FixedEncoder(ImageEncoder):
    """Gemma 3: every image is resized to one size, and has as many embeddings."""

    def __init__(self, processor: Any, count: int, **texts: str) -> None:
        """count: embeddings of an image."""
        super().__init__(processor, **texts)
        self.count = count

    def embeddings(self, picture: Picture) -> int:
        """Count the embeddings of an image."""
        return self.count


@cache
def pillow() -> ModuleType:
    """The module `PIL.Image`.  Raises ConfigError where Pillow is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ConfigError(
            f"images are read by Pillow, which cannot be imported ({error}): pip install pillow"
        ) from error
    return PIL


def pictures_of(row: Row, where: str) -> tuple[Picture, ...]:
    """Read the images in the columns of a row.  Raises BadRow, which names the column."""
    found: dict[str, Any] = {}
    for column in COLUMNS:
        value = row.get(column)
        if isinstance(value, list | tuple):
            found |= {f"{column}[{place}]": one for place, one in enumerate(value)}
        elif value is not None:
            found[column] = value
    if len(found) > MOST_IMAGES:
        raise BadRow(UNREAD, f"{where}: {len(found)} images: a prompt has at most {MOST_IMAGES}")
    return tuple(picture_of(value, f"{where}, {place}") for place, value in found.items())


def holds_images(row: Row) -> bool:
    """True if a column holds an image itself; the text of a path may mean something else."""
    for column in COLUMNS:
        value = row.get(column)
        for one in value if isinstance(value, list | tuple) else [value]:
            in_memory = isinstance(one, bytes) or _is_image(one)
            if in_memory or (isinstance(one, Mapping) and {"bytes", "path"} & one.keys()):
                return True
    return False


def _is_image(value: object) -> bool:
    """True for an image of PIL, which need not be installed."""
    return any(kind.__module__ == "PIL.Image" for kind in type(value).__mro__)


def picture_of(value: object, where: str) -> Picture:
    """Read an image: one of PIL, the bytes of a file, its path, a `data:` URL, or `{bytes, path}`.

    Raises BadRow for anything else, and for a file that is no image, is damaged or too large.
    """
    try:
        data = _bytes_of(value)
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has {len(data):,} bytes, and at most {MOST_BYTES:,} are read")
        image = _decoded(data)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file makes a decoder raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadRow(UNREAD, f"{where}: an image cannot be read: {reason:.300}") from error
    digest = hashlib.sha256(data).hexdigest()[:32]
    return Picture(data, digest, height=image.height, width=image.width)


def _bytes_of(value: object) -> bytes:
    """The bytes of a file that a value stands for.  Raises ValueError, OSError."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path") or value.get("url")
        if value is None:
            raise ValueError("it has neither bytes nor a path: fill them in, or leave the row out")
    if value is None:
        raise ValueError("it is None: give the image, or leave it out of the list")
    if _is_image(value):
        return _written(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _read(value)
    raise ValueError(
        f"an object of {type(value).__name__} is no image: give one of PIL (PIL.Image.fromarray"
        " makes one of an array), the path of a file, or its bytes"
    )


def _written(image: Any) -> bytes:
    """The bytes of an image of PIL, as PNG."""
    file = io.BytesIO()
    _upright(image).save(file, "PNG")
    return file.getvalue()


def _read(text: str) -> bytes:
    """The bytes that a path or a `data:` URL stands for.  Raises ValueError, OSError."""
    url = DATA_URL.match(text)
    if url is not None:
        try:
            return base64.b64decode(text[url.end() :], validate=True)
        except binascii.Error as error:
            raise ValueError(f"the data: URL is no base64: {error}") from None
    if text.startswith("data:"):
        raise ValueError(
            f"{text[:80]!r} is no data: URL of an image: write data:image/png;base64,..."
        )
    if "://" in text:
        raise ValueError(f"{text[:80]!r} is not fetched: download it, and give its path")
    path = Path(expanded(text))
    if not path.is_file():
        raise ValueError(
            f"no such file: {text[:100]!r}: a text is a path, here from {str(Path.cwd())!r}"
        )
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{text[:200]!r} has more than {MOST_BYTES:,} bytes")
    return path.read_bytes()


def _decoded(data: bytes) -> Any:
    """The first frame of an image file, upright, in RGB.  Raises what PIL raises."""
    library = pillow()
    try:
        opened = library.Image.open(io.BytesIO(data), formats=FORMATS)
    except library.UnidentifiedImageError:
        raise ValueError(f"its {len(data):,} bytes are none of {', '.join(FORMATS)}") from None
    except library.Image.DecompressionBombError:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels: make it smaller") from None
    with opened as image:
        return _upright(image)


def _upright(image: Any) -> Any:
    """An image of PIL in RGB, turned as its EXIF data say.

    Raises ValueError for one that would decode to too much, or lose what it shows.
    """
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(
            f"it is {width} x {height}: at most {MOST_PIXELS:,} pixels are read: make it smaller"
        )
    if image.mode in WIDE_MODES or image.mode.startswith("I;"):
        raise ValueError(
            f"a pixel is no byte (PIL's mode {image.mode!r}), and values above 255 would be cut"
            " off: scale them to 8 bits"
        )
    return pillow().ImageOps.exif_transpose(image).convert("RGB")


def small_png(picture: Picture, side: int) -> bytes:
    """A copy of an image whose longer side has at most so many pixels, as PNG."""
    image = picture.open()
    image.thumbnail((side, side))
    return _written(image)


def read_images(row: Row, content: Any, where: str) -> tuple[Any, tuple[Picture, ...], Row]:
    """Read what a row asks with its images: its messages, the images, and the row without them.

    Images stand in the parts of messages themselves, or in the columns.  The row that is kept has
    digests in their place, by which a run's folder names them.  Raises BadRow.
    """
    messages = [] if isinstance(content, str) else content
    inside = []
    for place, value in enumerate(inline_images(messages)):
        inside.append(picture_of(value, f"{where}, image {place + 1} of the messages"))
    pictures = tuple(inside) or pictures_of(row, where)
    if not pictures and not parts_with_images(content):
        return content, (), row
    if isinstance(content, str):
        raise BadRow(NO_PLACE, f"{where}: images need chat messages: set data.chat: true")
    kept = {name: value for name, value in row.items() if name not in COLUMNS}
    kept["images"] = [picture.digest for picture in pictures]
    content = with_images(content, pictures, where)
    for column in ("prompt", "messages"):
        if parts_with_images(kept.get(column)):
            kept[column] = content
    return content, pictures, kept


def parts_with_images(content: object) -> int:
    """Count the parts of messages that stand for images."""
    count = 0
    for message in _list_of(content):
        if isinstance(message, Mapping):
            count += sum(map(is_image_part, _list_of(message.get("content"))))
    return count


def with_images(
    messages: list[dict[str, Any]], pictures: Sequence[Picture], where: str
) -> list[dict[str, Any]]:
    """Messages in which every image part names its image's digest.

    Where no message has an image part, the images stand before the text of the first message of
    the user, as in TRL.  Raises BadRow where parts and images are not as many.
    """
    parts = parts_with_images(messages)
    if parts == 0:
        messages = _with_parts(messages, len(pictures), where)
    elif parts != len(pictures):
        raise BadRow(
            UNCOUNTED,
            f"{where}: the row has {counted(len(pictures), 'image')}, and its messages have"
            f" {counted(parts, 'part')} of type image: give an image for each part",
        )
    named, digests = [], iter(picture.digest for picture in pictures)
    for message in messages:
        if isinstance(message["content"], list):
            content = []
            for part in message["content"]:
                if is_image_part(part):
                    part = {"type": "image", "image": next(digests)}
                content.append(part)
            message = {**message, "content": content}
        named.append(message)
    return named


def _with_parts(messages: list[dict[str, Any]], count: int, where: str) -> list[dict[str, Any]]:
    """Messages with so many image parts before the first text of the user."""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            text = {"type": "text", "text": message["content"]}
            content = [*({"type": "image"} for _ in range(count)), text]
            return [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]
    raise BadRow(NO_PLACE, f"{where}: no message of the user, before which images could stand")


def inline_images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images that stand in the parts of messages themselves, in order."""
    found = []
    for message in messages:
        for part in filter(is_image_part, _list_of(message["content"])):
            value = next((part[key] for key in INLINE if part.get(key) is not None), None)
            if isinstance(value, Mapping) and "url" in value:  # OpenAI's form
                value = value["url"]
            if value is not None:
                found.append(value)
    return found


INLINE = ("image", "image_url", "url", "path")
"""Keys of a part that may hold its image."""


def _list_of(content: object) -> list[Any]:
    return content if isinstance(content, list) else []


def is_image_part(part: object) -> bool:
    """True for a part of a message's content that stands for an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def text_of(content: object) -> str:
    """The text of a message's content, without its images."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content)
