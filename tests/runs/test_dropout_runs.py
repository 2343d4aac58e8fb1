"""Whole runs with `model.dropout`: resumed to the bit, replayed, planned; and refused where it cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from groupwise.config.recipes import load_recipe
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError
from groupwise.runs.build import make_job
from groupwise.runs.replay import replay
from groupwise.runs.run import train


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A small GPT-2 that drops a tenth of everything."""
    tokenizer = make_tokenizer("arithmetic")
    torch.manual_seed(0)
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=96, vocab_size=len(tokenizer), **ids)).save_pretrained(
        tmp_path / "gpt2"
    )
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


@pytest.fixture(autouse=True)
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that differs within a group of random completions."""
    (tmp_path / "judges.py").write_text("def judge(completions, **_):\n    return [float(len(text)) for text in completions]\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "sft"])
def test_a_broken_run_equals_a_straight_one_to_the_bit(
    objective: str, checkpoint: str, tmp_path: Path, write_recipe: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"steps": 3, "objective": objective, "model": {"scratch": None, "path": checkpoint, "dropout": True}}
    changes |= {} if objective == "grpo" else {"batch_size": 4, "group": {}, "rewards": []}
    for name, stops in (("straight", []), ("broken", [1, 2])):
        path = write_recipe(tmp_path, name, **changes)
        for stop in [*stops, 99]:
            for step in train(load_recipe(path)):
                if step.number == stop:
                    break
    expected, found = (weights(tmp_path / "runs" / name) for name in ("straight", "broken"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    without = write_recipe(tmp_path, "without", **changes | {"model": {"scratch": None, "path": checkpoint}})
    for _ in train(load_recipe(without)):
        pass
    other = weights(tmp_path / "runs" / "without")
    assert any(not torch.equal(other[name], expected[name]) for name in expected)
    if objective == "grpo":
        again = replay(tmp_path / "runs" / "straight", 2)
        assert again.same, again


def test_the_plan_says_what_is_dropped_and_by_which_path(checkpoint: str, tmp_path: Path, write_recipe: Callable) -> None:
    path = write_recipe(tmp_path, "run", model={"scratch": None, "path": checkpoint, "dropout": True})
    job = make_job(load_recipe(path))
    job.close()
    said = dict(job.plan)
    assert (
        "in updates only: resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1; attention runs in its explicit form" in said["dropout"]
    )
    assert any(label == "warning" and "ratios are not 1" in text for label, text in job.plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"dropout": True}}, "the checkpoint's configuration drops nothing"),
        ({"rollout": {"engine": {"name": "native", "ahead": 1}}}, "older weights have sampled"),
    ],
)
def test_what_cannot_be_right_is_refused_before_weights_are_read(
    changes: dict[str, Any], said: str, checkpoint: str, tmp_path: Path, write_recipe: Callable
) -> None:
    given = {"model": {"scratch": None, "path": checkpoint, "dropout": True}}
    with pytest.raises(ConfigError, match=said):
        make_job(load_recipe(write_recipe(tmp_path, "run", **given | changes)))
