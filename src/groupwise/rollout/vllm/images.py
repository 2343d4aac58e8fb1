"""Prompts with images, as vLLM takes them: the prompt's ids with one placeholder for each image,
and the images.

vLLM writes an image's placeholders in the place of the one, and answers with the ids that it has
computed: they must be those of the prompt.  An image is sent in the size that the trainer's image
processor gives it, so that a server resizes nothing.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from groupwise.data.images import Picture, PromptImages
from groupwise.errors import EngineError
from groupwise.models.vision import Vision
from groupwise.records import Prompt

PNG = "data:image/png;base64,"


def image_request(images: PromptImages, vision: Vision) -> dict[str, Any]:
    """What the body of a request says of a prompt with images."""
    parts = [{"type": "image_url", "url": _url(one, vision)} for one in images.pictures]
    return {
        "token_ids": _with_single_placeholders(images, vision),
        "content_parts": parts,
        "return_token_ids": True,
    }


def _with_single_placeholders(images: PromptImages, vision: Vision) -> list[int]:
    """The prompt's ids with one placeholder for each image."""
    counts = [vision.encoder.embeddings(picture) for picture in images.pictures]
    tokens = images.tokens.tolist()
    ids = []
    place = 0
    while place < len(tokens):
        ids.append(tokens[place])
        place += counts.pop(0) if tokens[place] == vision.token else 1
    return ids


def _url(picture: Picture, vision: Vision) -> str:
    """An image in the size that the tower reads, as a `data:` URL."""
    file = io.BytesIO()
    vision.encoder.resized(picture).save(file, "PNG")
    return PNG + base64.b64encode(file.getvalue()).decode()


def local_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of a request's body, for a vLLM in this process."""
    from PIL import Image

    prompt: dict[str, Any] = {"prompt_token_ids": body["token_ids"]}
    images = []
    for part in body.get("content_parts", ()):
        data = base64.b64decode(part["url"].removeprefix(PNG))
        images.append(Image.open(io.BytesIO(data)))
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def check_tokens(who: str, prompt: Prompt, answer: Mapping[str, Any]) -> None:
    """Raises EngineError for an answer to other ids than the prompt's."""
    tokens, computed = prompt.tokens.tolist(), answer.get("prompt_token_ids")
    if computed == tokens:
        return
    if computed is None:
        raise EngineError(
            f"{who} does not say which tokens of {prompt.place} it has read, so that nobody knows"
            " whether its images are those of the trainer: start it with `groupwise serve MODEL`"
        )
    difference = f"the trainer has {len(tokens)} tokens and the server has read {len(computed)}"
    if len(computed) == len(tokens):
        at = next(i for i, (a, b) in enumerate(zip(tokens, computed, strict=True)) if a != b)
        difference = f"token {at} is {tokens[at]} in the trainer and {computed[at]} in the server"
    raise EngineError(
        f"{who} does not read the images of {prompt.place} as the trainer does: {difference}."
        " What it samples would be answers to another prompt. Serve the folder of the policy's own"
        " model: the sizes of images are in its preprocessor_config.json"
    )
