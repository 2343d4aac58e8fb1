"""What a run does about an engine that samples what the trainer does not score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Sampling, Scored, Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.engines import agreeing, why_apart
from groupwise.training.passes import score
from groupwise.training.samples import sample_of


def test_a_run_that_stops_for_a_mismatch_says_where_it_comes_from(tiny_policy: Callable[..., Policy]) -> None:
    policy = tiny_policy("llama", scale=4.0)
    engine = NativeEngine(policy, max_rows=8)
    engine.tolerance = 0.05
    prompts = [Prompt(id=f"0/{i}", tokens=np.array([9, 8, 7 + i]), text="") for i in range(2)]
    drawn = list(engine.generate(prompts, group_size=2, sampling=Sampling(max_new_tokens=12), seed=0))
    drawn = [tuple(replace(r, sampling=replace(r.sampling, temperature=0.5)) for r in group) for group in drawn]
    groups = [Scored(rollouts=group, names=("r",), rewards=np.zeros((2, 1)), reward=np.zeros(2)) for group in drawn]
    current = [score(policy, [sample_of(r) for r in group], budget=100).logp for group in drawn]
    step = Step(number=4, metrics={"mismatch/mean": 0.4}, groups=groups, current_logp=current)
    why = "temperature explains 100% of it: they are those of temperature 1"
    with pytest.raises(EngineError, match=f"step 4: .* By the weights after the step the sampler's log-probs .*{why}"):
        list(agreeing(iter([step]), engine, lambda step: why_apart(step, policy, None)))
    fine = replace(step, metrics={"mismatch/mean": 0.04})
    assert list(agreeing(iter([fine]), engine, lambda step: pytest.fail("nobody asked"))) == [fine]
