"""A language of one word and an end: only ending at the right place is rewarded.

A completion is right if it says the word three times and then ends.  Four tokens are allowed and truncated completions are left
out of the loss, so whether the fourth token is an end can only be learnt from ends themselves: a library that drops the EOS token
from its loss (as masking by the pad token's value does where pad == eos) learns to go on instead.  The positions are GPT-2's
learned ones: among words that are all the same, rotary attention could not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest

from groupwise.errors import RewardError
from groupwise.records import Finish, Prompt, Rollout, Sampling, Step
from groupwise.rollout.engine import Engine
from groupwise.rollout.native.engine import NativeEngine

WORD, EOS = 1, 0


def right(rollout: Rollout) -> float:
    return float(rollout.tokens.tolist() == [WORD, WORD, WORD, EOS])


@dataclass
class WithoutEnds:
    """An engine that says of every end that the policy did not write it: the planted fault."""

    engine: Engine

    @property
    def version(self) -> int:
        return self.engine.version

    def send_weights(self, version: int) -> None:
        self.engine.send_weights(version)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        for group in self.engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed):
            yield tuple(replace(rollout, trained=rollout.tokens != EOS) for rollout in group)


def learn(world: Callable, plant: bool) -> tuple[list[float], float]:
    """Mean reward of every step, and the share of completions that the limit ended in the last five."""
    made = world(["a"], [[WORD]], right, 4, lr=1e-2, family="gpt2")
    assert made.policy.tokenizer.pad_token_id == made.policy.tokenizer.eos_token_id == EOS
    engine = NativeEngine(made.policy, max_rows=256)
    steps: list[Step] = []
    sampler = WithoutEnds(engine) if plant else engine
    with pytest.raises(RewardError, match="was truncated and left") if plant else nullcontext():
        steps.extend(made.train("grpo", 40, engine=sampler, prompts_per_step=4, group_size=16, truncated="mask"))
    late = [rollout for step in steps[-5:] for group in step.groups for rollout in group.rollouts]
    return [step.metrics["reward"] for step in steps], float(np.mean([rollout.finish is Finish.LENGTH for rollout in late]))


@pytest.mark.slow
def test_stopping_at_the_right_place_is_learnt(world: Callable) -> None:
    rewards, truncated = learn(world, plant=False)
    assert rewards[0] < 0.25
    assert np.mean(rewards[-5:]) > 0.9
    assert truncated < 0.1


@pytest.mark.slow
def test_p17_with_the_end_excluded_from_the_loss_it_is_not(world: Callable) -> None:
    """Policies that never end are learnt, until no completion is left to train."""
    rewards, truncated = learn(world, plant=True)
    assert np.mean(rewards[-5:]) < 0.25
    assert truncated > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dapo", "rloo", "reinforce_pp"])
def test_other_presets_learn_to_stop_too(preset: str, world: Callable, learnt: Callable) -> None:
    made = world(["a"], [[WORD]], right, 4, lr=1e-2, family="gpt2")
    rewards = [step.metrics["reward"] for step in learnt(made.train(preset, 40, prompts_per_step=4, group_size=16), 0.9)]
    assert np.mean(rewards[-5:]) > 0.9
