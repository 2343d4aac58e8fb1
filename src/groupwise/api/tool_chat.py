"""A trained policy talks, and an environment answers its turns: tools in `groupwise chat`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from groupwise.api.loaded_policy import LoadedPolicy
from groupwise.config.recipes import read_environment
from groupwise.config.settings import EnvironmentSettings
from groupwise.data.templates import Template
from groupwise.data.wording import ReadRow
from groupwise.models.loading import Blueprint
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.environments import make_environment, make_runtime, tools_of
from groupwise.runs.origin import Origin


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """A policy whose turns an environment answers."""

    policy: LoadedPolicy
    engine: NativeEngine
    template: Template
    length: int

    @classmethod
    def of(
        cls,
        policy: LoadedPolicy,
        origin: Origin | None,
        environment: Mapping[str, Any] | None,
        length: int,
        ends: ExitStack,
    ) -> Answered | None:
        """A policy with its environment; None without an environment, or where a harness drives the
        episodes.
        """
        settings = EnvironmentSettings()
        if environment is not None:
            settings = read_environment(environment)
        elif origin is not None and not origin.recipe.environment.named(("factory", "openenv")):
            settings = origin.recipe.environment  # a game is no conversation
        source = make_runtime(settings)
        if source is None:
            return None
        ends.callback(source.close)
        data = dataclasses.replace(policy.data, chat=True, template=None)
        sampling = Sampling(max_new_tokens=length)
        made = make_environment(settings, data, Blueprint.of(policy), source, sampling)
        if made is None:
            return None
        ends.callback(made.close)
        prove(policy, sampler=dataclasses.replace(NATIVE, conversations=True), train=False)
        template = Template.build(data, policy.tokenizer, tools_of(source))
        return cls(policy, NativeEngine(policy, max_rows=1, environment=made), template, length)

    def turn(self, messages: Sequence[Mapping[str, Any]], temperature: float, seed: int) -> Rollout:
        """One episode after the messages: turns of the policy and answers of its environment."""
        opened = self.template.opened([dict(message) for message in messages])
        assert not isinstance(opened, str)
        (question,) = self.template.ask([ReadRow({}, "the conversation", opened)])
        prompt = Prompt(
            id="chat",
            tokens=question.tokens,
            text=question.text,
            row={"prompt": opened},
            messages=tuple(opened),
        )
        sampling = Sampling(temperature=temperature, max_new_tokens=self.length)
        ((rollout,),) = self.engine.generate([prompt], group_size=1, sampling=sampling, seed=seed)
        return rollout
