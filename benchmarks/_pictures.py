"""Pictures in the prompts of a `Workload`: a Qwen3-VL with random weights, and pictures of the task `shapes`."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _workload import Workload

    from groupwise.data.images import Picture

PATCH, MERGE, FRAMES = 16, 2, 2
"""Pixels of a patch's side, patches of an embedding's side, and frames of a patch: those of Qwen3-VL."""
CELL = 32
"""Pixels of a side of a picture's cells."""
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Control tokens, behind EOS and PAD."""
VISITS = 16
"""Steps after which the pictures repeat; a comparison takes fewer."""
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}" + "".join(MARKS[:3]) + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def embeddings(work: Workload) -> int:
    """Placeholders of a picture."""
    return (work.image // (PATCH * MERGE)) ** 2


@cache
def all_pictures(work: Workload) -> list[Picture]:
    """The pictures of all visits."""
    from groupwise.data.images import picture_of
    from groupwise.data.tasks import make_task

    task = make_task("shapes", {"scenes": "alike", "side": work.image // CELL, "cell": CELL})
    rows = task.prompts(work.prompts * VISITS, work.seed)
    return [picture_of(row["images"][0], row["prompt"]) for row in rows]


def pictures(work: Workload, visit: int) -> list[Picture]:
    """The pictures of a step, one for each prompt: those of every visit are others."""
    first = visit % VISITS * work.prompts
    return all_pictures(work)[first : first + work.prompts]


def image_model(work: Workload, tokenizer: Any) -> Any:
    """A Qwen3-VL in the proportions of its small checkpoints: an encoder of half the width, and as many layers."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    from groupwise.models.scratch import image_ids_of

    width = work.hidden // work.heads
    third = width // 2 // 3
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}
    rope |= {"mrope_section": [width // 2 - 2 * third, third, third]}
    text = {"hidden_size": work.hidden, "num_hidden_layers": work.layers, "num_attention_heads": work.heads, "head_dim": width}
    text |= {"num_key_value_heads": work.kv_heads or work.heads, "intermediate_size": work.inner or 3 * work.hidden}
    text |= {"vocab_size": work.vocab, "max_position_embeddings": 4096, "rope_parameters": rope}
    text |= {"eos_token_id": 0, "pad_token_id": 1, "tie_word_embeddings": True}
    tower = {"hidden_size": work.hidden // 2, "intermediate_size": 2 * work.hidden, "num_heads": work.heads, "depth": work.layers}
    tower |= {"out_hidden_size": work.hidden, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": FRAMES}
    tower |= {"num_position_embeddings": (work.image // PATCH) ** 2, "deepstack_visual_indexes": [0, work.layers // 2]}
    parts = {"text_config": text, "vision_config": tower, "tie_word_embeddings": True}
    config = AutoConfig.for_model("qwen3_vl", **parts, **image_ids_of(tokenizer))
    torch.manual_seed(work.seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=1, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    return model


def save_processor(work: Workload, folder: Path) -> None:
    """Write the image processor beside a model."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": work.image**2}
    shape = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES}
    Qwen2VLImageProcessorPil(size=size, **shape).save_pretrained(folder)


def load_processor(folder: Path, tokenizer: Any) -> Any:
    """The processor as TRL takes it, without its part for videos, which asks for torchvision."""
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideos(Qwen3VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return WithoutVideos(image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template)


def rows_for_trl(work: Workload, text: list[str], dead: list[bool]) -> list[dict[str, Any]]:
    """The rows of all visits, in TRL's form."""
    from PIL import Image

    rows = []
    for visit in range(VISITS):
        for picture, words, out in zip(pictures(work, visit), text, dead, strict=True):
            image = Image.open(io.BytesIO(picture.data)).convert("RGB")
            rows.append({"prompt": [{"role": "user", "content": words}], "images": [image], "dead": out})
    return rows


class Counted:
    """Counts the images that go through a model's encoder."""

    def __init__(self, tower: Any) -> None:
        self.images = 0
        tower.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        self.images += len(grids)

    def read(self) -> int:
        """Images since the last call."""
        images, self.images = self.images, 0
        return images
