"""What a run of prompts with images asks of its parts, before anything is trained."""

from __future__ import annotations

from typing import Any

from groupwise.config.settings import Recipe, engine_traits
from groupwise.data.images import FixedEncoder, ImageEncoder, NoImages
from groupwise.data.load import Data, holds_images
from groupwise.errors import ConfigError
from groupwise.models.fp8_blocks import refusal
from groupwise.models.policy import Policy


def images_needed(
    images: ImageEncoder | NoImages, *data: Data[Any] | None
) -> ImageEncoder | NoImages:
    """The encoder of a model, if some prompt has images: a run without them reads none."""
    for records in data:
        if records is not None and holds_images(records):
            return images
    return NoImages("no prompt has any", images.files)


def check_settings(recipe: Recipe, images: ImageEncoder | NoImages) -> None:
    """Raises ConfigError for settings under which no images are read."""
    if isinstance(images, NoImages):
        return
    engine = recipe.rollout.engine
    traits = engine_traits(engine.name)
    if traits.sends_images and isinstance(images, FixedEncoder):
        raise ConfigError(
            "rollout.engine: prompts have images, and vLLM writes those of Gemma 3 into a prompt in"
            " its own way: leave the engine out, or take a model of Qwen's",
            key="rollout.engine",
        )
    if not traits.sends_images and not traits.own_weights:
        raise ConfigError(
            f"rollout.engine: prompts have images, and {engine.name} is sent the ids of prompts"
            " alone: it would sample from placeholders without their images; leave the engine out",
            key="rollout.engine",
        )
    if engine.ahead:
        raise ConfigError(
            "rollout.engine.ahead: prompts have images, which a checkpoint does not hold: set 0",
            key="rollout.engine.ahead",
        )
    if recipe.model.fp8 is not None:
        raise refusal("prompts have images, which no blocks in FP8 read")
    if recipe.parallel.context > 1:
        raise ConfigError(
            "parallel.context: prompts have images, whose tokens are not split over processes:"
            " leave context out",
            key="parallel.context",
        )
    if recipe.environment.talks or recipe.environment.asks:
        raise ConfigError(
            "environment: prompts have images, which are read in single turns alone: leave the"
            " environment out",
            key="environment",
        )
    for name in ("hint", "servers"):
        if getattr(recipe.teacher, name):
            raise ConfigError(
                f"teacher.{name}: prompts have images, which a teacher reads with their prompts as"
                " they are, in this process: leave it out",
                key=f"teacher.{name}",
            )


def check_models(images: ImageEncoder | NoImages, **policies: Policy | None) -> None:
    """Raises ConfigError for a model of a run with images that reads none."""
    if isinstance(images, NoImages):
        return
    for name, policy in policies.items():
        if policy is None:
            continue
        if policy.sharded:
            raise ConfigError(
                "parallel: weights that are spread over processes read no images: set parallel: ddp"
            )
        if policy.vision is None:
            raise ConfigError(
                f"{name}.path: {type(policy.model).__name__} reads no images, and prompts have"
                " some: take a model that does"
            )
