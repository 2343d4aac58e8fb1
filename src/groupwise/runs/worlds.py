"""From the section `environment` of a recipe to what answers the policy, and to the lines of the plan about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from groupwise.config.live import LIVE, Live, missing
from groupwise.config.settings import EnvironmentSettings, Recipe, RewardSettings
from groupwise.data.templates import Template, Tools
from groupwise.environments import procedural
from groupwise.environments.environment import Source
from groupwise.environments.episodes import EpisodeWorld, kind_of
from groupwise.environments.housing import Rooms
from groupwise.environments.schemas import name_of
from groupwise.models.policy import Blueprint
from groupwise.runs.plan import Lines


def furnished(recipe: Recipe) -> Recipe:
    """The recipe with what its environment brings: rows and a scorer of a procedural data set.  Raises ConfigError."""
    return procedural.furnished(recipe)


def make_source(settings: EnvironmentSettings) -> Source | None:
    """What makes the environments of a recipe; None if nobody answers.

    Raises ConfigError for what cannot be found or described.
    """
    if not settings.talks:
        return None
    factories = settings.factory if isinstance(settings.factory, Mapping) else {"": settings.factory} if settings.factory else {}
    named = {f"tools.{place}": tool for place, tool in enumerate(settings.tools)}
    named |= {f"factory.{name}".rstrip("."): spec for name, spec in factories.items()}
    given: dict[str, Any] = {}
    for key, spec in named.items():
        if isinstance(spec, Live):
            given[str(spec)] = spec.value
        elif spec.startswith(LIVE):
            raise missing(spec, f"environment.{key}")
    return Rooms(
        settings.tools,
        factories,
        settings.args if factories else {},
        interface=settings.interface,
        runs=settings.runs or ("thread" if given else "process"),
        given=given,
    )


def tools_of(source: Source | None) -> Tools | None:
    """What the prompts of rows show; None if no environment has tools."""
    if source is None or not any(kind.schemas for kind in source.kinds.values()):
        return None
    return lambda row: kind_of(source, row, "a row").schemas


def make_world(recipe: Recipe, blueprint: Blueprint, source: Source | None) -> EpisodeWorld | None:
    """What engines ask for conversations; None if nobody answers.  Raises ConfigError."""
    if source is None:
        return None
    template = Template.build(recipe.data, blueprint.tokenizer, tools_of(source))
    return EpisodeWorld(source, recipe.environment, template, tuple(blueprint.eos_ids))


def with_own_reward(recipe: Recipe, source: Source | None) -> Recipe:
    """The recipe with the environment's own reward, where it gives one and no reward is named."""
    if recipe.rewards or source is None or not any(kind.rewarded for kind in source.kinds.values()):
        return recipe
    return replace(recipe, rewards=(RewardSettings(function="environment"),))


def world_lines(recipe: Recipe, source: Source | None) -> Lines:
    """What answers the policy and what ends its episodes, for the plan."""
    if source is None:
        return []
    settings = recipe.environment
    lines: Lines = []
    for kind in source.kinds.values():
        name = f"{kind.name} ({kind.title})" if kind.name else kind.title if kind.resets else "tools"
        acts = ", ".join(map(name_of, kind.schemas)) + (", " if kind.schemas and kind.steps else "") + ("step" * kind.steps)
        lines.append(("environment", f"{name}: {acts}" + ("; gives a reward" if kind.rewarded else "")))
        if kind.rewarded and not any(reward.function == "environment" for reward in recipe.rewards):
            lines.append(("warning", f"the reward of {name} is not used: name it, rewards: [{{function: environment}}]"))
    lines.append(
        (
            "episodes",
            f"at most {settings.max_turns} turns and {settings.episode_timeout:g} s; a call {settings.tool_timeout:g} s; an answer "
            f"{settings.max_observation_tokens:,} tokens",
        )
    )
    return lines
