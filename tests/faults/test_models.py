"""Models, checkpoints and numbers that other trainers stumble over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import final_weights

from groupwise.algorithms.advantages import Standardized
from groupwise.config.recipes import load_recipe
from groupwise.errors import ConfigError
from groupwise.models.saving import save
from groupwise.runs import checkpoint
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train


def finish(path: Path) -> Path:
    for _ in train(load_recipe(path)):
        pass
    return Path("runs") / path.stem


def changed(file: Path, **keys: Any) -> None:
    """A JSON file with other values; None takes a key away."""
    found = json.loads(file.read_text()) | keys
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def test_huge_rewards_have_finite_advantages(scored_group: Callable) -> None:
    (advantages,) = Standardized()([scored_group([1e38, -1e38, 3e38])])
    found = np.array([float(one[0]) for one in advantages])
    assert np.isfinite(found).all()
    assert np.abs(found).max() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("pad", [None, "eos"])
def test_pad_does_not_matter(pad: str | None, recipe: Callable, tiny_policy: Callable) -> None:
    model = Path("model").absolute()
    save(tiny_policy(), model)
    settings = {"model": {"path": str(model), "scratch": None}, "steps": 2}
    clean = finish(recipe("clean", **settings))
    other = Path("other")
    shutil.copytree(model, other)
    tokens = json.loads((other / "tokenizer_config.json").read_text())
    changed(other / "tokenizer_config.json", pad_token=None if pad is None else tokens["eos_token"])
    eos = json.loads((other / "config.json").read_text())["eos_token_id"]
    changed(other / "config.json", pad_token_id=None if pad is None else eos if isinstance(eos, int) else eos[0])
    ours, theirs = (
        final_weights(finish(recipe("other_pad", model={"path": str(other), "scratch": None}, steps=2))),
        final_weights(clean),
    )
    # torch gives the row of an embedding's `padding_idx` no gradient where its token is read: nothing else knows of PAD.
    row = [eos, json.loads((model / "config.json").read_text())["pad_token_id"]]
    for found in (ours, theirs):
        found["model.embed_tokens.weight"][row] = 0.0
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_passed_over(begun_run: Callable, caplog: pytest.LogCaptureFixture) -> None:
    path = begun_run(3)
    newest = checkpoint.latest(Path("runs/r"))
    assert newest is not None
    assert checkpoint.step_of(newest) == 2
    file = newest / "policy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    folder = finish(path)
    assert any("000002" in said and "going on from 000001" in said for said in caplog.messages)
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3]


def test_a_checkpoint_holds_no_pickle(recipe: Callable) -> None:
    next(iter(train(load_recipe(recipe("r", steps=1)))))
    newest = checkpoint.latest(Path("runs/r"))
    assert newest is not None
    kinds = {file.suffix for file in newest.rglob("*") if file.is_file()}
    assert kinds <= {".json", ".safetensors", ".jinja", ".txt", ".md", ""}
    (newest / "trainer" / "optimizer.pt").write_bytes(b"\x80\x04")
    assert "does not belong" in str(checkpoint.damage(newest))


def test_a_learning_rate_of_1e30_is_out_of_range(recipe: Callable) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        load_recipe(recipe("r", optimizer={"lr": 1e30}))
