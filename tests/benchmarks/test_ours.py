"""Our side of the benchmark against a peer: its check finds equal what is equal, and its steps follow the schedule."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The modules `_workload` and `_ours`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("_workload"), importlib.import_module("_ours")
    for name in [name for name, module in sys.modules.items() if str(BENCHMARKS) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def peer(workload: Any, folder: Path, path: Path) -> dict[str, Any]:
    """GRPO's first update from its definition, one completion at a time, as TRL's side of the comparison tells it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    rng = np.random.default_rng(5)
    completions = [rng.integers(2, workload.vocab, int(n)) for n in workload.schedule().flat]
    rewards = rng.random(len(completions))
    grouped = rewards.reshape(workload.prompts, workload.group)
    advantages = ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)).ravel()
    logps = []
    for i, completion in enumerate(completions):
        prompt = workload.prompt_ids()[i // workload.group]
        ids = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        logits = model(input_ids=ids).logits[0, prompt.size - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[0, prompt.size :, None])[:, 0]
        (-(advantages[i] * (logp - logp.detach()).exp()).mean() / len(completions)).backward()
        logps.append(logp.detach().numpy())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    np.savez(path, **{name: parameter.grad.numpy() for name, parameter in model.named_parameters()})
    return {"completions": completions, "logp": logps, "rewards": rewards, "gradients": path}


@pytest.mark.parametrize(("objective", "group"), [("grpo", 4), ("distill", 4), ("distill", 1), ("sft", 1), ("reward", 2)])
def test_steps_are_taken_by_the_schedule(parts: tuple[Any, Any], tmp_path: Path, objective: str, group: int) -> None:
    workloads, ours = parts
    workload = replace(tiny(workloads), objective=objective, group=group)
    side = ours.Ours(workload, workloads.model_folder(workload, tmp_path))
    assert side.step()["wall"]["step"] > 0


def test_a_step_on_pictures_encodes_each_picture_once(parts: tuple[Any, Any], tmp_path: Path) -> None:
    """Pictures are others at every step, so that none is remembered."""
    workloads, ours = parts
    shape = {"family": "qwen3_vl", "image": 64, "prompt": 12, "group": 3}
    workload = replace(tiny(workloads), **shape)
    side = ours.Ours(workload, workloads.model_folder(workload, tmp_path))
    steps = [side.step() for _ in range(2)]
    assert [step["tower"] for step in steps] == [workload.prompts] * 2


def test_the_check_is_equal_to_a_peer_and_sees_a_difference(parts: tuple[Any, Any], tmp_path: Path) -> None:
    workloads, ours = parts
    workload = tiny(workloads)
    folder = workloads.model_folder(workload, tmp_path)
    found = peer(workload, folder, tmp_path / "gradients.npz")
    side = ours.Ours(workload, folder)
    checked = side.check(found)
    assert checked["gradient_relative"] < 2e-5 and checked["logp_largest"] < 2e-5
    other = side.check({**found, "rewards": found["rewards"][::-1]})
    assert other["gradient_relative"] > 0.1


def test_the_check_of_a_distillation_is_equal_to_a_peer_and_sees_a_difference(parts: tuple[Any, Any], tmp_path: Path) -> None:
    workloads, ours = parts
    workload = replace(tiny(workloads), objective="distill")
    folder = workloads.model_folder(workload, tmp_path)
    found = distilled(workloads, workload, folder, tmp_path / "gradients.npz")
    side = ours.Ours(workload, folder)
    checked = side.check(found)
    assert checked["gradient_relative"] < 2e-5 and checked["loss_difference"] < 2e-5
    other = side.check({**found, "completions": found["completions"][::-1]})
    assert other["gradient_relative"] > 0.1


def distilled(workloads: Any, workload: Any, folder: Path, path: Path) -> dict[str, Any]:
    """The reverse KL to a teacher of twice the width, from its definition, one completion at a time: a mean over all tokens."""
    wider = workloads.teacher_of(workload)
    assert (wider.hidden, wider.heads, wider.kv_heads) == (2 * workload.hidden, 2 * workload.heads, 2 * workload.kv_heads)
    student = AutoModelForCausalLM.from_pretrained(folder)
    teacher = AutoModelForCausalLM.from_pretrained(workloads.model_folder(wider, path.parent))
    rng = np.random.default_rng(5)
    completions = [rng.integers(2, workload.vocab, int(n)) for n in workload.schedule().flat]
    loss = torch.zeros(())
    for i, completion in enumerate(completions):
        prompt = workload.prompt_ids()[i // workload.group]
        ids = torch.from_numpy(np.concatenate([prompt, completion]))[None]
        log_q, log_p = (torch.log_softmax(m(input_ids=ids).logits[0, prompt.size - 1 : -1], -1) for m in (student, teacher))
        loss = loss + (log_q.exp() * (log_q - log_p.detach())).sum() / sum(map(len, completions))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    np.savez(path, **{name: parameter.grad.numpy() for name, parameter in student.named_parameters()})
    return {"completions": completions, "loss": float(loss.detach()), "gradients": path}


def tiny(workloads: Any) -> Any:
    return workloads.Workload(hidden=32, layers=1, heads=2, kv_heads=1, vocab=64, prompt=6, completion=8, group=4, prompts=2)
