"""From the section `environment` of a recipe to what answers the policy, and to the lines of the
plan about it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from groupwise.config.live_objects import object_of
from groupwise.config.settings import (
    FACTORIES,
    DataSettings,
    EnvironmentSettings,
    Recipe,
    RewardSettings,
)
from groupwise.data.sources import live_rows
from groupwise.data.templates import Template, Tools
from groupwise.distributed import comm
from groupwise.environments import procedural
from groupwise.environments.agent_harness import AgentHarness
from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.conversation import Environment
from groupwise.environments.harness import FunctionHarness, Harness, OutsideHarness, ProgramHarness
from groupwise.environments.harness_episodes import HarnessEnvironment, SideRule, no_side
from groupwise.environments.runtime import ToolRuntime
from groupwise.environments.schemas import name_of
from groupwise.environments.tool_episodes import ToolEnvironment
from groupwise.environments.verifiers import VerifiersHarness
from groupwise.errors import ConfigError
from groupwise.models.loading import Blueprint
from groupwise.records import Sampling
from groupwise.runs.plan import Lines
from groupwise.utils.imports import imported
from groupwise.utils.redaction import redacted_command
from groupwise.utils.secrets import TOKEN
from groupwise.utils.spelling import counted


def with_environment_data(recipe: Recipe) -> Recipe:
    """The recipe with what its environment brings: rows and a scorer of a procedural data set, the
    tasks of a taskset.

    Raises ConfigError.
    """
    settings = recipe.environment
    if settings.verifiers is not None and recipe.data.path is None:
        rows = _taskset(settings.verifiers, json.dumps(settings.args, sort_keys=True)).rows(
            recipe.data.limit
        )
        return replace(
            recipe,
            data=replace(recipe.data, path=live_rows(rows, f"verifiers {settings.verifiers}")),
        )
    return procedural.with_procedural_data(recipe)


@cache
def _taskset(name: str, arguments: str) -> VerifiersHarness:
    """A taskset that is loaded once: it takes seconds.  arguments: JSON."""
    return VerifiersHarness(name, json.loads(arguments))


def make_runtime(settings: EnvironmentSettings) -> ToolRuntime | None:
    """What makes the environments of a recipe; None if nobody answers.

    Raises ConfigError for what cannot be found or described.
    """
    if not settings.talks:
        return None
    factory, arguments = settings.factory, dict(settings.args)
    if settings.openenv is not None:
        factory, arguments = "openenv", {"url": settings.openenv, **arguments}
    factories = factory or {}
    if not isinstance(factories, Mapping):
        factories = {"": factories}
    factories = {name: FACTORIES.get(spec, spec) for name, spec in factories.items()}
    named = {f"tools.{place}": tool for place, tool in enumerate(settings.tools)}
    named |= {f"factory.{name}".rstrip("."): spec for name, spec in factories.items()}
    objects: dict[str, Any] = {}
    for key, spec in named.items():
        made = object_of(spec, f"environment.{key}")
        if made is not None:
            objects[str(spec)] = made
    return ToolRuntime(
        settings.tools,
        factories,
        arguments if factories else {},
        sandbox=settings.sandbox,
        runs=settings.runs or ("thread" if objects else "process"),
        objects=objects,
    )


def tools_of(runtime: ToolRuntime | None) -> Tools | None:
    """What the prompts of rows show: the tools of their environment, none where it has none; None
    if there is no environment.
    """
    if runtime is None:
        return None
    some = any(kind.schemas for kind in runtime.kinds.values())
    return lambda row: runtime.kind_of(row, "a row").schemas if some else ()


def make_environment(
    settings: EnvironmentSettings,
    data: DataSettings,
    blueprint: Blueprint,
    runtime: ToolRuntime | None,
    sampling: Sampling,
) -> Environment | None:
    """What engines ask for conversations; None if nobody answers.  sampling: of the run.   Raises
    ConfigError.
    """
    if settings.asks:
        vocabulary = min(
            len(blueprint.tokenizer),
            int(blueprint.config.get("vocab_size", len(blueprint.tokenizer))),
        )
        host, _, port = settings.listen.rpartition(":")
        listen = f"{host}:{int(port) and int(port) + comm.world().rank}"  # each process has its own
        codec = ChatCodec(blueprint.tokenizer, blueprint.eos_ids, data.chat_template_kwargs)
        return HarnessEnvironment(
            _harness(settings),
            codec,
            replace(settings, listen=listen),
            sampling,
            context=blueprint.context,
            vocabulary=vocabulary,
            token=os.environ.get(TOKEN) or None,
            is_side=_side_rule(settings.side_calls),
        )
    if runtime is None:
        return None
    template = Template.build(data, blueprint.tokenizer, tools_of(runtime))
    return ToolEnvironment(runtime, settings, template, tuple(blueprint.eos_ids))


def _side_rule(named: str) -> SideRule | None:
    """Return the rule that a recipe names; None for the one that looks at tools.

    Raises ConfigError for a function that is not there.
    """
    if named == "without_tools":
        return None
    if named == "none":
        return no_side
    function = object_of(named, "environment.side_calls")
    if function is None:
        function = imported(f"side_calls {named!r}", named, callable_only=True)
    return function


def _harness(settings: EnvironmentSettings) -> Harness:
    """Return what drives the episodes.  Raises ConfigError for a function that is not there."""
    if settings.verifiers is not None:
        return _taskset(settings.verifiers, json.dumps(settings.args, sort_keys=True))
    if settings.agent is not None:
        return AgentHarness(settings.agent, settings.args, settings.sandbox)
    named = settings.harness
    if named == "outside":
        return OutsideHarness()
    if isinstance(named, tuple):
        return ProgramHarness(named)
    assert named is not None
    function: Callable[..., Any] = object_of(named, "environment.harness")
    if function is None:
        function = imported(f"harness {named!r}", named, callable_only=True)
    if settings.args:
        try:
            inspect.signature(function).bind_partial(**settings.args)
        except TypeError as error:
            raise ConfigError(
                f"environment.args: the harness {named!r} cannot be called with"
                f" {', '.join(settings.args)}: {error}"
            ) from None
        function = functools.partial(function, **settings.args)
    return FunctionHarness(function)


def with_own_reward(recipe: Recipe, runtime: ToolRuntime | None) -> Recipe:
    """The recipe with the environment's own reward, where it gives one and no reward is named."""
    gives = recipe.environment.asks and recipe.environment.agent is None
    if runtime is not None:
        gives = gives or any(kind.rewarded for kind in runtime.kinds.values())
    if recipe.rewards or not gives:
        return recipe
    return replace(recipe, rewards=(RewardSettings(function="environment"),))


def environment_lines(recipe: Recipe, runtime: ToolRuntime | None) -> Lines:
    """What answers the policy and what ends its episodes, for the plan."""
    settings = recipe.environment
    turns = counted(settings.max_turns, "turn")
    if settings.asks:
        named = f"verifiers {settings.verifiers}" if settings.verifiers else settings.harness
        who = " ".join(redacted_command(named)) if isinstance(named, tuple) else named
        asks = f"{who} asks for the policy's turns; gives a reward"
        if settings.agent is not None:
            asks = f"{settings.agent} asks for the policy's turns"
        lines: Lines = [
            ("environment", asks),
            (
                "episodes",
                (
                    f"at most {turns}, {settings.episode_timeout:g} s without sampling,"
                    f" {settings.at_once} at once"
                ),
            ),
        ]
        if settings.sandbox.get("isolation") == "none":
            lines.append(("warning", "what the policy writes runs with the rights of this user"))
        if settings.harness == "outside" and not os.environ.get(TOKEN):
            lines.append(
                (
                    "warning",
                    (
                        "any user of this machine can take the run's episodes and report rewards:"
                        f" set {TOKEN}"
                    ),
                )
            )
        return lines
    if runtime is None:
        return []
    lines = []
    for kind in runtime.kinds.values():
        name = "tools"
        if kind.name:
            name = f"{kind.name} ({kind.title})"
        elif kind.resets:
            name = kind.title
        acts = list(map(name_of, kind.schemas))
        if kind.steps:
            acts.append("step")
        text = f"{name}: {', '.join(acts)}"
        if kind.rewarded:
            text += "; gives a reward"
        lines.append(("environment", text))
        functions = [reward.function for reward in recipe.rewards]
        if kind.rewarded and "environment" not in functions:
            remedy = "name it, rewards: [{function: environment}]"
            lines.append(("warning", f"the reward of {name} is not used: {remedy}"))
    limits = (
        f"at most {turns} and {settings.episode_timeout:g} s without sampling; a call "
        f"{settings.tool_timeout:g} s; an answer {settings.max_observation_tokens:,} tokens"
    )
    lines.append(("episodes", limits))
    return lines
