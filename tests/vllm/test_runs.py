"""Whole runs on a vLLM server of their own: 20 updates without a mismatch, a server that is killed, two processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_states import running
from safetensors.torch import load_file

from groupwise.config.recipes import load_recipe, load_stages
from groupwise.config.settings import EngineSettings, ModelSettings, Recipe
from groupwise.models.loading import load_policy
from groupwise.rollout.vllm.engine import PATIENCE
from groupwise.runs.job import make_job
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_files import read_step
from groupwise.runs.run import train
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

from .conftest import REWARD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
STEPS = 20


@pytest.fixture(scope="module")
def recipe(write_vllm_recipe: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Writes a recipe into the working directory."""
    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, **changes: Any) -> str:
        return str(write_vllm_recipe(folder, name, **({"steps": STEPS} | changes)))

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield make


def run_folder(path: str) -> Path:
    return Path(path).parent / "runs" / Path(path).stem


def lines(path: str) -> list[dict[str, Any]]:
    """The steps of a run's log, without its evaluations."""
    file = run_folder(path) / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in found if "reward" in line]


def weights(path: str) -> dict[str, torch.Tensor]:
    return load_file(run_folder(path) / "final" / "model.safetensors")


def ours() -> set[int]:
    """Everything that stems from this test run."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found, todo = set(), [os.getpid()]
    while todo:
        found |= set(below := children.get(todo.pop(), []))
        todo += below
    return found


def serving(pids: set[int]) -> set[int]:
    """Those of them that belong to a vLLM server."""
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in living(pids)}
    return {pid for pid, file in commands.items() if file.exists() and re.search(rb"groupwise_vllm|VLLM::", file.read_bytes())}


def living(pids: set[int]) -> set[int]:
    return set(filter(running, pids))


def all_end(pids: set[int]) -> bool:
    """Wait for their end: a server notices that its trainer is gone, and gives its own processes some seconds."""
    end = time.monotonic() + 600.0
    while living(pids) and time.monotonic() < end:
        time.sleep(0.2)
    return not living(pids)


@pytest.fixture(scope="module")
def undisturbed(recipe: Callable[..., str]) -> str:
    """A run of 20 updates."""
    path = recipe("undisturbed")
    for _ in train(load_recipe(path)):
        pass
    assert not serving(ours()), "the server outlives its run"
    return path


def test_twenty_updates_sample_what_they_score(undisturbed: str) -> None:
    """In float32 every token's log-prob agrees to 1e-4, from a policy that moves; every push of the weights is timed."""
    found = lines(undisturbed)
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert max(line["mismatch/bounded"] for line in found) == 0.0
    assert min(line["ratio/min"] for line in found) == max(line["ratio/max"] for line in found) == 1.0
    assert all(0.0 < line["time/sync"] < 5.0 for line in found)
    assert sum(line["reward"] for line in found[-5:]) > sum(line["reward"] for line in found[:5]) + 0.2, "nothing was learnt"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command `groupwise train`; what still runs after the test is ended."""
    made: list[subprocess.Popen[str]] = []

    def run(path: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "groupwise", "train", path, "--quiet", *options]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return made[-1]

    yield run
    for process in made:
        process.kill()


def servers(process: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Id and address of the HTTP server below a run."""
    table = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    found = [(int(pid), args) for pid, parent, args in rows if int(parent) == process.pid and "groupwise_vllm.py" in args]
    return [(pid, "http://127.0.0.1:" + re.findall(r"--port (\d+)", args)[0]) for pid, args in found]


def wait_for_requests(url: str) -> None:
    """Until the server is sampling."""
    while True:
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            running = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        if running and float(running[1]) > 0:
            return


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_p2_a_server_that_is_lost_while_it_samples_ends_the_run_with_its_name(
    blow: signal.Signals, undisturbed: str, recipe: Callable[..., str], start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Status 8 at once, a checkpoint of the last whole step, no process left; the same command goes on to the same model."""
    path = recipe(f"lost-{blow.name.lower()}")
    process = start(path)
    while process.poll() is None and len(lines(path)) < 7:
        time.sleep(0.05)
    seen = ours()
    ((server, url),) = servers(process)
    wait_for_requests(url)
    os.kill(server, blow)
    begin = time.monotonic()
    output, _ = process.communicate(timeout=3000)
    took, done = time.monotonic() - begin, len(lines(path))
    assert process.returncode == 8, output
    cause = "was killed by signal 9 .SIGKILL." if blow is signal.SIGKILL else "has given no answer for"
    assert re.search(f"PeerError: the vLLM server .*{cause}", output), output
    assert took < PATIENCE, "a server of one's own is not waited for"
    assert all_end(seen)
    assert int((run_folder(path) / "latest").read_text()) == done >= 7
    if blow is signal.SIGKILL:
        again = start(path)
        output, _ = again.communicate(timeout=3000)
        assert again.returncode == 0, output
        assert [line["step"] for line in lines(path)] == list(range(1, STEPS + 1))
        expected, found = weights(undisturbed), weights(path)
        assert all(torch.allclose(found[name], expected[name], atol=1e-4) for name in expected)


@pytest.mark.parametrize("processes", [1, 2])
def test_sampling_ahead_trains_on_the_versions_it_names(
    processes: int, recipe: Callable[..., str], start: Callable[..., subprocess.Popen[str]]
) -> None:
    """None is older than a step, what the newest weights drew agrees to 1e-4, and a run that is told to end skips no prompt."""
    changes: dict[str, Any] = {"name": "vllm", "ahead": 1}
    length = {"max_new_tokens": 60, "temperature": 0.8, "max_rows": 16}
    path = recipe(f"ahead-{processes}", steps=8, rollout=length | {"engine": changes}, save={"every": 0})
    options = ["--nproc", str(processes), "--timeout", "1800"] if processes > 1 else []
    process = start(path, *options)
    while process.poll() is None and len(lines(path)) < 3:
        time.sleep(0.05)
    seen = ours()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=3000)
    assert process.returncode == (143 if processes == 1 else 1), output
    assert all_end(seen)
    done = int((run_folder(path) / "latest").read_text())
    assert 3 <= done < 8
    again = start(path, *options)
    output, _ = again.communicate(timeout=3000)
    assert again.returncode == 0, output
    found = lines(path)
    assert [line["step"] for line in found] == list(range(1, 9))
    ages = [line.get("staleness/max", 0.0) for line in found]
    assert max(ages) == 1.0
    assert ages[0] == ages[done] == 0.0, "the first step of a start trains on what was sampled for it"
    assert sum(age > 0 for age in ages) >= 4, "training waited for sampling"
    assert max(line.get("mismatch/max", 0.0) for line in found) < 1e-4
    names = [group.prompt.id for step in range(1, 9) for group in read_step(run_folder(path), step).groups]
    assert len(names) == 8 * 4
    assert sorted(set(names), key=names.index) == [f"0/{row}" for row in visited(load_recipe(path))], "a prompt was skipped"
    assert not serving(ours())


def visited(recipe: Recipe) -> list[str]:
    """The rows of the first eight steps in the data's order."""
    prompts = make_job(replace(recipe, rollout=replace(recipe.rollout, engine=EngineSettings()))).order.take(32)
    return [str(row) for _, row in prompts]


def test_two_processes_share_one_server(recipe: Callable[..., str], start: Callable[..., subprocess.Popen[str]]) -> None:
    """Each asks for its share, the first sends the weights; sharded weights are gathered to be sent."""
    path = recipe("two", steps=3, parallel="zero3")
    process = start(path, "--nproc", "2", "--timeout", "1800")
    output, _ = process.communicate(timeout=3000)
    assert process.returncode == 0, output
    assert max(line["mismatch/max"] for line in lines(path)) < 1e-4
    assert not serving(ours())


def test_the_calculator_recipe_samples_what_it_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened: after 300 steps of SFT the policy calls the tool; each of its turns is a request of its own to the server."""
    short = ["data.eval_limit=4", "eval.k=1", "stages.sft.steps=300", "stages.grpo.steps=3", "stages.grpo.eval.every=0"]
    served = ["rollout.engine=vllm", "rollout.max_rows=16", "group.prompts_per_step=4", "group.group_size=4"]
    monkeypatch.chdir(tmp_path)
    Path("judges.py").write_text(REWARD)  # a policy that was taught so shortly has nothing right, and all of it equally
    served += ["rewards=[{function: accuracy}, {function: 'judges.py:judge'}]"]
    overrides = ["runs=runs", *short, *(f"stages.grpo.{one}" for one in served)]
    stages = load_stages(ROOT / "recipes" / "calculator.yaml", overrides)
    for stage in stages.values():
        for _ in train(stage):
            pass
    assert not serving(ours())
    sft, grpo = (Path("runs") / recipe.name for recipe in stages.values())
    found = read_metrics(grpo)
    assert [line["step"] for line in found if line["step"]] == [1, 2, 3]
    assert max(line["mismatch/max"] for line in found if line["step"]) < 1e-4
    rollouts = [rollout for group in read_step(grpo, 1).groups for rollout in group.rollouts]
    assert sum(not call.failure for one in rollouts for turn in one.episode.turns for call in turn.calls) >= 4
    policy = load_policy(ModelSettings(path=str(sft / "final")))  # what drew the first step
    scored = score(policy, [sample_of(rollout) for rollout in rollouts], max_tokens_per_microbatch=4096).logp
    for rollout, logp in zip(rollouts, scored, strict=True):
        assert rollout.trained.sum() == sum(turn.end - turn.begin for turn in rollout.episode.turns)
        assert np.abs(logp - rollout.behavior_logp)[rollout.trained].max() < 1e-4
