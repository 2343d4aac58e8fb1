"""vLLM in the trainers' own processes: runs by the Python of vLLM's environment.  On a CPU it cannot sleep, and is not told to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.cli import commands
from groupwise.config.settings import ModelSettings
from groupwise.models.loading import load_policy
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_files import read_step
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

from .conftest import REWARD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
Train = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def recipe(write_vllm_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(**engine: Any) -> str:
        rollout = {"engine": {"name": "vllm", "colocated": True} | engine, "top_k": 20}
        changes = {"rollout": rollout, "optimizer": {"lr": 3e-3}, "eval": {"at_start": True}}
        return str(write_vllm_recipe(tmp_path, "run", steps=6, **changes))

    return write


@pytest.fixture
def train(environment: Path, tmp_path: Path) -> Train:
    """Runs `groupwise train` beside vLLM; skips where vLLM's environment lacks what the trainer needs."""
    python = str(environment / "bin" / "python")
    installed = tmp_path / "groupwise-0.dist-info"  # what `pip install groupwise` would leave beside the source
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: groupwise\nVersion: 0\n")
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    missing = subprocess.run([python, "-c", "import groupwise.runs.run"], env=variables, capture_output=True, text=True)
    if missing.returncode:
        pytest.skip(f"the environment of vLLM does not hold what the trainer needs: {missing.stderr.strip().splitlines()[-1]}")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "groupwise", "train", *arguments]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3000)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


def trained(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if line["step"]]


def test_what_is_sampled_in_the_same_process_is_what_is_scored(recipe: Callable[..., str], train: Train, tmp_path: Path) -> None:
    """Six updates of a policy that moves; then the same command has nothing left to do, and no server has ever been there."""
    path = recipe()
    train(path, "--quiet")
    found = trained(tmp_path / "runs" / "run")
    assert [line["step"] for line in found] == list(range(1, 7))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert found[-1]["reward"] > found[0]["reward"] + 0.05, "the policy has not moved"
    assert train(path, "--quiet").stdout.count("finished at step 6") == 1


@pytest.mark.parametrize(("parallel", "together"), [("ddp", 1), ("zero2", 2), ("zero3", 1)])
def test_every_process_samples_its_share_with_its_own_weights(
    parallel: str, together: int, recipe: Callable[..., str], train: Train, tmp_path: Path
) -> None:
    """Three prompts on two processes, with a vLLM each or with one that both hold: every token's log-prob is the trainer's."""
    path = recipe(tensor_parallel=together)
    train(path, "--quiet", "--nproc", "2", "--timeout", "1800", f"parallel={parallel}", "group.prompts_per_step=3")
    folder = tmp_path / "runs" / "run"
    found = trained(folder)
    assert [line["step"] for line in found] == list(range(1, 7))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert found[-1]["reward"] > found[0]["reward"] + 0.05, "the policy has not moved"
    for step in range(1, 7):
        groups = read_step(folder, step).groups
        assert len({group.prompt.id for group in groups}) == 3
        assert {int(version) for group in groups for rollout in group.rollouts for version in rollout.version} == {step - 1}


def test_each_turn_of_an_episode_is_sampled_behind_the_ids_before_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calculator recipe on two processes, shortened: after 300 steps of SFT the policy calls the tool."""
    monkeypatch.chdir(tmp_path)
    Path("judges.py").write_text(REWARD)  # a policy that was taught so shortly has nothing right, and all of it equally
    short = [
        "runs=runs",
        "data.eval_limit=4",
        "eval.k=1",
        "stages.sft.steps=300",
        "stages.grpo.steps=3",
        "stages.grpo.eval.every=0",
    ]
    colocated = ["rollout.engine={name: vllm, colocated: true}", "rollout.max_rows=16", "group.prompts_per_step=4"]
    colocated += ["group.group_size=4", "rewards=[{function: accuracy}, {function: 'judges.py:judge'}]"]
    recipe = str(ROOT / "recipes" / "calculator.yaml")
    train(recipe, "--quiet", "--nproc", "2", "--timeout", "1800", *short, *(f"stages.grpo.{one}" for one in colocated))
    (grpo,) = tmp_path.glob("runs/*/grpo")
    assert [line["step"] for line in trained(grpo)] == [1, 2, 3]
    assert max(line["mismatch/max"] for line in trained(grpo)) < 1e-4
    rollouts = [rollout for group in read_step(grpo, 1).groups for rollout in group.rollouts]
    assert sum(not call.failure for one in rollouts for turn in one.episode.turns for call in turn.calls) >= 4
    policy = load_policy(ModelSettings(path=str(grpo.parent / "sft" / "final")))  # what drew the first step
    scored = score(policy, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=4096).logp
    for rollout, logp in zip(rollouts, scored, strict=True):
        assert rollout.trained.sum() == sum(turn.end - turn.begin for turn in rollout.episode.turns)
        assert np.abs(logp - rollout.behavior_logp)[rollout.trained].max() < 1e-4


@pytest.mark.parametrize("command", ["train", "check"])
def test_without_vllm_beside_the_trainer_it_says_what_to_do(
    command: str, recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = commands.main([command, recipe(), *(["--quiet"] if command == "train" else [])])
    said = " ".join("".join(capsys.readouterr()).split())
    assert code == (2 if command == "train" else 1)
    assert f"colocated needs vLLM in the environment of the trainer ({sys.executable}), and it is not there" in said
    assert "leave colocated out" in said
