"""Every preset learns a world of 32 tokens, and a tie to the reference holds the policy near it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from groupwise.algorithms import ALGORITHMS
from groupwise.models.policy import Policy
from groupwise.rollout.native import NativeEngine
from groupwise.scoring import sample_of, score

STEPS = 30


@pytest.mark.parametrize("preset", ALGORITHMS)
def test_every_preset_learns_to_say_the_next_word(preset: str, say: Callable) -> None:
    """By chance alone the reward is 0.03: one word of 32, stopping with the same luck."""
    rewards = [step.metrics["reward"] for step in say(lr=1e-2).train(preset, STEPS, prompts_per_step=8, group_size=16, updates_per_rollout=2)]
    print(preset, np.round(rewards[::5], 2), np.round(np.mean(rewards[-5:]), 3))
    assert rewards[0] < 0.1
    assert np.mean(rewards[-5:]) > 0.8
