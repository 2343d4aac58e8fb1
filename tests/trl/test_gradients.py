"""One optimizer step after another, TRL's trainer and what `gw.from_trl` makes of its arguments have the same gradient.

TRL's gradients are recorded (`tests/fixtures/trl_gradients.py`).  Where TRL is installed they are computed again.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from trl_gradients import FILE, LOSSES, PROMPTS, SINGLE, configurations, difference, our_gradients, shared, trl_gradients
from trl_objects import config

import groupwise as gw

CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["cases"]
NAMES = ["-".join(str(value) for value in case["arguments"].values()) for case in CASES]
EQUAL = 1e-3
"""Relative distance below which two float32 gradients are the same."""


def constant(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def other(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def training_of(arguments: dict[str, Any]) -> Any:
    rows = [{"prompt": text} for text in PROMPTS]
    args = config("GRPOConfig", **shared(arguments))
    return gw.from_trl(args, model="some/model", reward_funcs=[constant, other], train_dataset=rows)


def test_the_record_holds_every_configuration() -> None:
    assert [case["arguments"] for case in CASES] == list(configurations())
    assert len(CASES) >= 60
    assert {case["arguments"]["loss_type"] for case in CASES} == set(LOSSES)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_step_has_trls_gradient_or_the_summary_names_the_difference(
    case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    training = training_of(case["arguments"])
    gradients = our_gradients(training.recipe)
    assert len(gradients) == len(case["gradients"])
    distance = max(difference(ours, theirs) for ours, theirs in zip(gradients, case["gradients"], strict=True))
    named = [text for arguments, text in SINGLE if text and arguments == case["arguments"]]
    assert (distance > EQUAL) == bool(named), distance
    assert all(text in training.summary() for text in named)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_trls_trainer_has_the_recorded_gradients(case: dict[str, Any]) -> None:
    gradients = trl_gradients(case["arguments"])
    assert len(gradients) == len(case["gradients"])
    for computed, recorded in zip(gradients, case["gradients"], strict=True):
        assert difference(computed, recorded) < EQUAL
