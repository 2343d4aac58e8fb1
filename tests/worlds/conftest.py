"""Toy worlds: a vocabulary, prompts, a rule that says what is right, and a policy so small that it learns in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from rule_rewards import Rule, RuleRewards
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from groupwise.algorithms.losses import Correction
from groupwise.config.resolve import resolve
from groupwise.config.settings import CriticSettings, GroupSettings, OptimizerSettings
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Rollout, Sampling, Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.critics import Critic
from groupwise.training.groups import PrefetchedRollouts, SampledRollouts
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.teachers import Teacher

EOS = 0


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Id 0 ends a completion and is the pad token too; the words follow."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eos>", *words])}, unk_token="<eos>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


@dataclass
class World:
    """A policy among prompts and a rule; `train` runs the library's own loop."""

    policy: Policy
    prompts: Sequence[Sequence[int]]
    rule: Rule
    sampling: Sampling
    lr: float = 3e-3
    scorer: Policy | None = None
    drawn: int = field(default=0, init=False)

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts, round and round."""
        places = range(self.drawn, self.drawn + count)
        self.drawn += count
        return [
            Prompt(
                id=f"{place // len(self.prompts)}/{row}",
                tokens=np.array(self.prompts[row], dtype=np.int64),
                text="",
                row={"n": row},
            )
            for place in places
            for row in [place % len(self.prompts)]
        ]

    def train(
        self,
        preset: str,
        steps: int,
        *,
        engine: object = None,
        reference: Policy | None = None,
        teacher: Teacher | None = None,
        ahead: int = 0,
        **group: object,
    ) -> Iterator[Step]:
        """The steps of `train_online`, one after the other; with rollouts so many steps ahead, corrected for it."""
        settings = GroupSettings(**group)  # type: ignore[arg-type]
        updates = steps * settings.updates_per_rollout * settings.minibatches
        algorithm = resolve(preset, settings, self.sampling.max_new_tokens)
        yield from train_online(
            self.policy,
            replace(algorithm, correction=Correction()) if ahead else algorithm,
            SampledRollouts(
                algorithm=replace(algorithm, correction=Correction()) if ahead else algorithm,
                engine=engine or NativeEngine(self.policy, max_rows=256),
                rewards=RuleRewards(self.rule),
                draw=self.draw,
                sampling=self.sampling,
                steps=steps,
                ahead=PrefetchedRollouts(ahead),
                group=settings,
            ),
            Optimizer(self.policy.model, OptimizerSettings(lr=self.lr, betas=(0.9, 0.99)), updates),
            group=settings,
            max_tokens_per_microbatch=4096,
            reference=reference,
            critic=self.critic(updates) if algorithm.needs.critic else None,
            teacher=teacher,
        )

    def critic(self, updates: int) -> Critic:
        """On the policy's backbone, or on that of `scorer`."""
        settings, optimizer = CriticSettings(lr=self.lr), OptimizerSettings(betas=(0.9, 0.99))
        if self.scorer is None:
            return Critic.on(self.policy, settings, optimizer, updates)
        return Critic.of(self.scorer, settings, optimizer, updates)


def until_learnt(steps: Iterable[Step], above: float) -> list[Step]:
    """The steps of a run, up to the first five in a row whose rewards are above `above` on average."""
    taken: list[Step] = []
    for step in steps:
        taken.append(step)
        if np.mean([one.metrics["reward"] for one in taken[-5:]]) > above and len(taken) >= 5:
            break
    return taken


@pytest.fixture
def learnt() -> Callable[[Iterable[Step], float], list[Step]]:
    return until_learnt


@pytest.fixture
def world(tiny_policy: Callable) -> Callable[..., World]:
    """`world(words, prompts, rule, max_new_tokens, ...)`: see `World`."""

    def make(
        words: Sequence[str],
        prompts: Sequence[Sequence[int]],
        rule: Callable[[Rollout], float | None],
        max_new_tokens: int,
        *,
        lr: float = 3e-3,
        seed: int = 0,
        family: str = "llama",
        hidden: int = 32,
        **sampling: object,
    ) -> World:
        policy = tiny_policy(family, tokenizer=word_tokenizer(words), seed=seed, context=16, layers=1, hidden=hidden)
        return World(policy, prompts, rule, Sampling(max_new_tokens=max_new_tokens, **sampling), lr)  # type: ignore[arg-type]

    return make


@pytest.fixture
def say(world: Callable[..., World]) -> Callable[..., World]:
    """32 tokens, half of which end a completion, and a few prompts: end with the token that answers the prompt, 1 in 16 by chance;
    an answer that ignores the prompt is right once in as many prompts as there are."""

    def make(prompts: int = 8, **options: object) -> World:
        made = world(
            [f"w{i}" for i in range(1, 32)],
            [[i] for i in range(1, prompts + 1)],
            lambda rollout: float(rollout.tokens[-1] == rollout.prompt.tokens[0] + 16),
            3,
            **options,
        )
        made.policy = replace(made.policy, eos_ids=tuple(range(16, 32)))
        return made

    return make
