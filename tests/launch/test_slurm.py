"""`groupwise launch --on slurm` on a real Slurm of two nodes, where its programs are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from groupwise.models.saving import save
from groupwise.runs.metrics_log import read_metrics

SOURCE = Path(__file__).parents[2] / "src"
spec = importlib.util.spec_from_file_location("slurm_lab", Path(__file__).with_name("slurm_lab.py"))
assert spec is not None and spec.loader is not None
slurm_lab = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slurm_lab)

STEPS = 8
RECIPE = f"""\
objective: grpo
steps: {STEPS}
name: tiny
model: {{scratch: {{hidden: 32, layers: 1, context: 64}}, device: cpu}}
data: {{task: sums, eval_limit: 4}}
rewards: [accuracy, {{function: "slow.py:slow", weight: 0}}]
rollout: {{max_new_tokens: 8}}
group: {{prompts_per_step: 4, group_size: 4}}
optimizer: {{lr: 1e-3}}
cluster:
  trainers: {{nodes: 2, gpus: 0}}
  time: 00:30:00
"""
SLOW = """\
import time

def slow(completions):
    time.sleep(0.5)
    return [0.0] * len(completions)
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    absence = slurm_lab.absence()
    if absence is not None:
        pytest.skip(absence)
    slurm = slurm_lab.Slurm(tmp_path_factory.mktemp("slurm"))
    yield slurm
    slurm.close()


def environment(lab: Any) -> dict[str, str]:
    """Variables of who submits: his commands, this source, and one thread, as the run that is compared has."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return lab.environment | {"PATH": path, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launch(folder: Path, variables: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "groupwise", "launch", "my.yaml", *words]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def wait(reached: Callable[[], bool], what: Callable[[], str], seconds: float = 1800.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def write_recipe(folder: Path) -> None:
    folder.mkdir()
    (folder / "my.yaml").write_text(RECIPE)
    (folder / "slow.py").write_text(SLOW)


def test_an_interrupted_job_queues_again_and_ends_with_the_weights_of_an_undisturbed_run(lab: Any, tmp_path: Path) -> None:
    """The signal is the one that `--signal` sends before the time limit."""
    disturbed, alone = tmp_path / "disturbed", tmp_path / "alone"
    write_recipe(disturbed)
    write_recipe(alone)
    variables = environment(lab)
    said = launch(disturbed, variables, "--on", "slurm")
    assert "#SBATCH --signal=B:USR1@120" in said
    number = said.split()[-1]
    log, metrics = disturbed / f"slurm-{number}.out", disturbed / "runs" / "tiny" / "metrics.jsonl"

    def state() -> str:
        return lab.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")

    def story() -> str:
        return f"{state()}\n{log.read_text() if log.exists() else ''}"

    wait(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, story)
    lab.run("scancel", "--batch", "--signal=USR1", number)
    wait(lambda: state() in ("PENDING", "COMPLETED"), story)
    done = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert state() == "PENDING" and max(done) < STEPS, story()
    assert "ended by SIGUSR1" in log.read_text()
    # Else it waits for two minutes.  A node refuses a job that begins in the seconds in which it ended there.
    lab.run("scontrol", "update", f"JobId={number}", "StartTime=now+8")
    wait(lambda: state() in ("COMPLETED", "FAILED"), story)
    assert state() == "COMPLETED", story()
    launch(alone, variables, "--on", "local", "cluster.trainers={nodes: 1, gpus: 0, processes: 2}")
    weights = [load_file(folder / "runs" / "tiny" / "final" / "model.safetensors") for folder in (disturbed, alone)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert tensor.equal(weights[1][name]), name


def test_jobs_end_with_their_lab(tmp_path: Path) -> None:
    """A test that breaks off leaves them behind."""
    absence = slurm_lab.absence()
    if absence is not None:
        pytest.skip(absence)
    lab = slurm_lab.Slurm(tmp_path)
    try:
        file = tmp_path / "job"
        lab.run("sbatch", f"--chdir={tmp_path}", f"--wrap=echo $$ > {file}.new; mv {file}.new {file}; sleep 900")
        wait(file.exists, lambda: lab.run("squeue"))
    finally:
        lab.close()
    assert not Path("/proc", file.read_text().strip()).exists()


SAMPLED = """\
objective: grpo
steps: 6
name: sampled
model: {path: model, dtype: float32, device: cpu}
data: {task: sums, eval_limit: 4}
rewards: [{function: "slow.py:slow", weight: 0}, {function: "ids.py:small"}]
rollout: {max_new_tokens: 8, max_rows: 16, engine: {name: vllm, patience: 3600}}
group: {prompts_per_step: 4, group_size: 4}
optimizer: {lr: 1e-3}
eval: {at_start: false, every: 0}
cluster:
  trainers: {nodes: 1, gpus: 0}
  samplers: {nodes: 1, gpus: 0, arguments: [--max-model-len, "64", --kv-cache-memory-bytes, 64M]}
  setup: 'scontrol() { if [ "$1" = show ]; then printf "localhost\\nlocalhost\\n"; else command scontrol "$@"; fi; }'
"""
"""Nodes of the lab have names that nothing resolves: both are this machine."""
SMALL_IDS = """\
def small(completion_ids, **_):
    return [-sum(ids) / len(ids) / 60 for ids in completion_ids]
"""
"""A reward by which every group learns."""


@pytest.mark.timeout(7200)
@pytest.mark.skipif("GROUPWISE_VLLM" not in os.environ, reason="no environment with vLLM in it: set GROUPWISE_VLLM")
def test_trainers_and_vllm_servers_of_one_job_are_interrupted_queue_again_and_end(
    lab: Any, tmp_path: Path, tiny_policy: Callable[..., Any]
) -> None:
    """On one node vLLM samples, on the other the trainer publishes a version after every step."""
    folder = tmp_path / "job"
    write_recipe(folder)
    (folder / "my.yaml").write_text(SAMPLED)
    (folder / "ids.py").write_text(SMALL_IDS)
    save(tiny_policy("llama", hidden=64, heads=2, kv_heads=1), folder / "model")
    said = launch(folder, environment(lab), "--on", "slurm")
    number = said.split()[-1]
    run = folder / "runs" / "sampled"

    def state() -> str:
        return lab.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")

    def story() -> str:
        logs = [path.read_text(errors="replace")[-3000:] for path in folder.glob("slurm-*")]
        return "\n".join([state(), *logs])

    def steps() -> list[dict[str, float]]:
        return [line for line in read_metrics(run) if "reward" in line] if run.exists() else []

    wait(lambda: len(steps()) >= 2 or state() in ("FAILED", "COMPLETED"), story, seconds=3600)
    lab.run("scancel", "--batch", "--signal=USR1", number)
    wait(lambda: state() in ("PENDING", "FAILED", "COMPLETED"), story, seconds=600)
    before = len(steps())
    assert state() == "PENDING" and 2 <= before < 6, story()
    lab.run("scontrol", "update", f"JobId={number}", "StartTime=now+8")
    wait(lambda: state() in ("COMPLETED", "FAILED"), story, seconds=3600)
    assert state() == "COMPLETED", story()
    found = steps()
    assert [line["step"] for line in found] == list(range(1, 7))
    assert [line["servers/version/localhost:8000"] for line in found[:5]] == [1, 2, 3, 4, 5]
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert (run / "final" / "model.safetensors").is_file()
    assert not list((folder / "runs").glob("sampled-weights/*")), "versions are left"


STUB = """#!{python}
import json, os, sys, time
name = os.path.basename(sys.argv[0])
seen = {{key: os.environ.get(key) for key in ("CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME")}}
with open(f"{{name}}-{{os.environ['SLURM_STEP_ID']}}-{{os.environ['SLURM_PROCID']}}", "w") as file:
    json.dump([seen, sys.argv[1:]], file)
while name == "groupwise":  # a server, until Slurm ends it
    time.sleep(1)
while len([file for file in os.listdir() if file.startswith("groupwise-")]) < 2:
    time.sleep(0.1)
"""


def test_servers_get_their_gpus_and_trainers_their_addresses(lab: Any, tmp_path: Path) -> None:
    """torchrun and groupwise only note here what they were started with; GPUs are other devices."""
    write_recipe(tmp_path / "job")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("torchrun", "groupwise"):
        (programs / name).write_text(STUB.format(python=sys.executable))
        (programs / name).chmod(0o755)
    (tmp_path / "job" / "model").mkdir()
    (tmp_path / "job" / "model" / "config.json").write_text("{}")
    (tmp_path / "job" / "model" / "tokenizer.json").write_text("{}")
    setup = f"cluster.setup='export PATH={programs}:$PATH'"
    sizes = ["cluster.trainers={nodes: 1, gpus: 2}", "cluster.samplers={nodes: 1, gpus: 2}"]
    said = launch(tmp_path / "job", environment(lab), "--on", "slurm", *sizes, setup, "model={path: model}")
    number = said.split()[-1]

    def state() -> str:
        return lab.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")

    def story() -> str:
        logs = [path.read_text() for path in (tmp_path / "job").glob("slurm-*")]
        return "\n".join([state(), *logs])

    wait(lambda: state() in ("COMPLETED", "FAILED"), story)
    assert state() == "COMPLETED", story()
    ((seen, words),) = [json.loads(path.read_text()) for path in (tmp_path / "job").glob("torchrun-*")]
    servers = [json.loads(path.read_text()) for path in (tmp_path / "job").glob("groupwise-*")]
    assert seen == {"CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_NODENAME": "n1"}
    file = tmp_path / "job" / "runs" / "tiny-servers.txt"
    assert f"rollout.engine.servers={file}" in words
    assert file.read_text().split() == ["http://n2:8000", "http://n2:8001"]
    assert sorted(seen["CUDA_VISIBLE_DEVICES"] for seen, _ in servers) in (["0", "0"], ["0", "1"])
    ports = [word for _, words in servers for word in words if word.startswith("--port")]
    assert sorted(ports) == ["--port=8000", "--port=8001"]
    assert {seen["SLURMD_NODENAME"] for seen, _ in servers} == {"n2"}
