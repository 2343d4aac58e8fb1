"""The documentation is true: its code runs, its numbers are the code's, its links lead somewhere, its generated parts are current."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from groupwise.algorithms import resolve
from groupwise.data.tokenizers import make_tokenizer
from groupwise.models.policy import Policy, make_policy
from groupwise.models.scratch import scratch_model
from groupwise.online import train_online
from groupwise.optim import Optimizer
from groupwise.records import Prompt, Sampling
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native import NativeEngine
from groupwise.rollout.sampling import stream_keys, uniforms
from groupwise.settings import GroupSettings, OptimizerSettings, RewardSettings, ScratchSettings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found  # dataclasses look their module up there
    spec.loader.exec_module(found)
    return found


# ---------------------------------------------------------------- GRPO in one file


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    return module(DOCS / "grpo_in_one_file.py")


def same_weights(small: torch.nn.Module, gpt2: torch.nn.Module) -> None:
    """Copy the one file's transformer into transformers' GPT-2, whose matrices are stored transposed."""
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    theirs = dict(gpt2.named_parameters())
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            top, *rest = name.split(".")
            if top == "blocks":
                number, part, kind = rest
                value = parameter.T if kind == "weight" and "norm" not in part else parameter
                theirs.pop(f"transformer.h.{number}.{names[part]}.{kind}").copy_(value)
            else:
                theirs.pop(f"transformer.{ {'tokens': 'wte', 'positions': 'wpe', 'norm': 'ln_f'}[top] }.{rest[0]}").copy_(parameter)
    assert not theirs


def library_policy(small: torch.nn.Module) -> Policy:
    tokenizer = make_tokenizer("arithmetic")
    gpt2 = scratch_model(
        ScratchSettings(family="gpt2", hidden=32, layers=2, heads=4, context=16),
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),  # type: ignore[arg-type]
        pad_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
    ).to(torch.float64)
    same_weights(small, gpt2)
    return make_policy(gpt2, tokenizer)


STEPS = 10


def drawn(step: int) -> list[list[int]]:
    """Three ragged prompts a step."""
    rng = np.random.default_rng(step)
    return [rng.integers(5, 30, size=n).tolist() for n in (1, 4, 2)]


@pytest.mark.parametrize(("mu", "beta", "temperature"), [(1, 0.0, 1.0), (2, 0.0, 0.7), (3, 0.05, 1.2)])
def test_ten_steps_of_the_one_file_are_the_librarys(
    one_file: ModuleType, mu: int, beta: float, temperature: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    longest, group_size, seed = 5, 6, 3
    torch.manual_seed(0)
    small = one_file.GPT(len(make_tokenizer("arithmetic"))).double()
    with torch.no_grad():
        small.tokens.weight.mul_(2)  # sharper than an almost uniform start: clipping then has something to do
    policy = library_policy(small)
    (eos,) = policy.eos_ids
    (tmp_path / "thirds.py").write_text(
        "def reward(prompt_ids, completion_ids):\n"
        "    return [sum((7 * id + place) % 3 == 0 for place, id in enumerate(ids)) / 5 for ids in completion_ids]\n"
    )
    monkeypatch.chdir(tmp_path)

    def stream(group: str, index: int, token: int) -> float:
        return float(uniforms(stream_keys(seed, group, [index]), token + 1)[0, token])

    ours = list(
        one_file.train(
            small, drawn, module(tmp_path / "thirds.py").reward,
            eos=eos, steps=STEPS, group_size=group_size, longest=longest, lr=2e-3, mu=mu, beta=beta, temperature=temperature,
            draw=stream,
        )
    )  # fmt: skip
    step = iter(range(STEPS))

    def draw(count: int) -> list[Prompt]:
        number = next(step)
        rows = drawn(number)
        assert len(rows) == count
        return [Prompt(id=f"{number}/{i}", tokens=np.array(row), text="") for i, row in enumerate(rows)]

    settings = GroupSettings(prompts_per_step=3, group_size=group_size, updates_per_rollout=mu, beta=beta)
    with build_rewards([RewardSettings(function="thirds.py:reward")], columns=[]) as rewards:
        theirs = list(
            train_online(
                policy,
                resolve("grpo", settings, longest),
                engine=NativeEngine(policy, max_rows=7),
                rewards=rewards,
                draw=draw,
                optimizer=Optimizer(policy.model, OptimizerSettings(lr=2e-3), STEPS * mu),
                group=settings,
                sampling=Sampling(temperature=temperature, max_new_tokens=longest),
                budget=40,
                steps=STEPS,
                reference=policy.frozen_copy() if beta else None,
                seed=seed,
            )
        )
    for name in ("reward", "loss", "grad_norm", "progress"):
        expected = [found.metrics[name] for found in theirs]
        np.testing.assert_allclose([found[name] for found in ours], expected, rtol=1e-6, atol=1e-9, err_msg=name)
    assert len({round(found["reward"], 6) for found in ours}) > 5, "a curve that does not move compares nothing"
    assert mu == 1 or any(found.metrics["clip/high"] > 0 for found in theirs), "nothing was clipped"


def test_the_toy_of_the_one_file_is_learnt(one_file: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_file.main() >= 0.95
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step  1  reward +0.0")
    assert len((DOCS / "grpo_in_one_file.py").read_text(encoding="utf-8").splitlines()) <= 210
