"""What a run does about an engine that samples what the trainer does not score."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Step
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.engines import check_agreement


def test_a_run_stops_for_a_mismatch_that_no_rounding_explains(tiny_policy: Callable[..., Policy]) -> None:
    engine = NativeEngine(tiny_policy("llama"), max_rows=8)
    engine.tolerance = 0.05
    step = Step(number=4, metrics={"mismatch/mean": 0.4})
    with pytest.raises(EngineError, match=r"step 4: .* differ by 0.4 nats .*`groupwise check` tests the servers"):
        check_agreement(step, engine)
    fine = replace(step, metrics={"mismatch/mean": 0.04})
    check_agreement(fine, engine)
