"""The texts that `groupwise launch --dry-run` prints: files to read beside this one, run by bash with commands that only note what
they were given, and read by the loaders and schemas of their systems.

`WRITE_GOLDEN=1 pytest tests/launch/test_texts.py` writes the files anew."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from groupwise.cli import commands
from groupwise.errors import ConfigError
from groupwise.launch.commands import launch_job
from groupwise.launch.local import commands_of
from groupwise.launch.submit import text_of

GOLDEN = Path(__file__).parent / "golden"
OVERRIDES = ["optimizer.lr=1e-5", 'data.system=It\'s $HOME; $(briefly) `now` "\\"$port']
ALONE = "cluster.samplers.nodes=0"
ONE_MACHINE = ["cluster.trainers={nodes: 1, gpus: 4}"]
ONE_MACHINE += [f"cluster.samplers.{said}" for said in ("nodes=1", "gpus=4", "tensor_parallel=2")]
FILES = {"slurm": "slurm.sh", "skypilot": "skypilot.yaml", "kubernetes": "kubernetes.yaml", "local": "local.sh"}


@pytest.fixture(autouse=True)
def beside_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # the recipe's model is a hub name, which nothing here fetches
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def text(system: str, *words: str) -> str:
    if system != "local":
        return text_of(launch_job("my.yaml", [*OVERRIDES, *words]), system)
    return commands_of(launch_job("my.yaml", [*OVERRIDES, *ONE_MACHINE, *words])).text()


@pytest.mark.parametrize("words", [(), (ALONE,)], ids=["servers", "trainers"])
@pytest.mark.parametrize("system", FILES)
def test_the_text_is_the_one_of_the_file(system: str, words: tuple[str, ...]) -> None:
    file = GOLDEN / (f"trainers-{FILES[system]}" if words else FILES[system])
    made = text(system, *words)
    if "WRITE_GOLDEN" in os.environ:
        file.write_text(made, encoding="utf-8")
    assert made == file.read_text(encoding="utf-8")


def scripts(system: str, *words: str) -> list[str]:
    """Shell scripts of a text, as the machines run them."""
    made = text(system, *words)
    if system in ("slurm", "local"):
        return [made]
    documents = list(yaml.safe_load_all(made))
    if system == "skypilot":
        return [document["run"] for document in documents if "run" in document]
    return [pod(spec)["command"][2].replace("$$(", "$(") for spec in job_specs(documents)]


def job_specs(documents: list[Any]) -> list[Any]:
    """The specification of each Job, also of those in a JobSet."""
    specs = []
    for document in documents:
        if document["kind"] == "Job":
            specs.append(document["spec"])
        elif document["kind"] == "JobSet":
            specs += [job["template"]["spec"] for job in document["spec"]["replicatedJobs"]]
    return specs


def pod(spec: Any) -> Any:
    (container,) = spec["template"]["spec"]["containers"]
    return container


STUB = """#!{python}
import json, os, sys
with open(os.environ["NOTED"], "a") as file:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    file.write(json.dumps([os.path.basename(sys.argv[0]), visible, *sys.argv[1:]]) + "\\n")
"""
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
for task in $(seq 0 ${TASKS:-0}); do SLURM_LOCALID=$task "$@"; done
"""


def noted(script: str, folder: Path) -> list[list[Any]]:
    """What a script hands to torchrun and groupwise: the command, the GPUs that it sees, its arguments."""
    programs = folder / "programs"
    programs.mkdir()
    stub = STUB.format(python=sys.executable)
    for name, content in {
        "torchrun": stub,
        "groupwise": stub,
        "srun": SRUN,
        "scontrol": "#!/bin/bash\nprintf '%s\\n' n1 n2 n3 n4\n",
        "source": "",
    }.items():
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    script = script.replace("source /opt/groupwise/bin/activate", "true").replace("cd '/project/my work'", "true")
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "NOTED": str(folder / "noted"), "HOME": "/nowhere"}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "64", "SLURM_JOB_NODELIST": "n[1-4]", "SKYPILOT_TASK_ID": "t"}
    variables |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    command = ["bash", "-u", "-c", script + "\nwait"]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [json.loads(line) for line in (folder / "noted").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("system", FILES)
def test_every_value_arrives_as_it_was_typed(system: str, tmp_path: Path) -> None:
    """Quotes, dollars and backticks of an override, in a shell, in YAML, and where Kubernetes reads $(...)."""
    found = []
    for number, script in enumerate(scripts(system)):
        (tmp_path / str(number)).mkdir()
        found += noted(script, tmp_path / str(number))
    (trainers,) = (words for words in found if words[0] == "torchrun")
    assert trainers[trainers.index("my.yaml") + 1 :][: len(OVERRIDES)] == OVERRIDES
    given: Any = get_args_parser().parse_args(trainers[2:])
    assert given.module and given.training_script == "groupwise"
    typed = commands._parse(given.training_script_args)
    assert typed.command == "train" and typed.recipe == "my.yaml" and typed.overrides[: len(OVERRIDES)] == OVERRIDES
    servers = [words for words in found if words[0] == "groupwise"]
    for words in servers:
        served = commands._parse(words[2:])
        assert served.command == "serve" and served.model == "Qwen/Qwen3-8B"
        assert served.more[-2:] == ["--max-model-len", "8192"] and "--tensor-parallel-size" in served.more
    keys = dict(override.split("=", 1) for override in typed.overrides)
    said = keys["rollout.engine.servers"]
    addresses = Path(said).read_text().split() if system == "slurm" else said.strip("[]").split(",")
    assert keys.get("rollout.engine.weights_folder", "/").startswith("/")
    expected = {"slurm": 4, "skypilot": 4, "kubernetes": 4, "local": 2}[system]
    assert len(set(addresses)) == expected and all(address.startswith("http://") for address in addresses)
    if system == "local":
        assert trainers[1] == "0,1,2,3" and sorted(words[1] for words in servers) == ["4,5", "6,7"]
    if system == "skypilot":
        assert sorted(words[1] for words in servers) == ["0,1,2,3"] * 2 + ["4,5,6,7"] * 2


SECRET = "hunter2-hunter2"
WRONG = {
    "secret override": (["rewards.0.args={api_key: abc}"], "slurm", "environment variable"),
    "secret of the environment": ([f"cluster.setup=export X={SECRET}"], "slurm", "holds a secret"),
    "password in an address": ([f"data.system=https://me:{SECRET}@host/"], "slurm", "holds a secret"),
    "value in the place of a name": ([f"cluster.variables=[HF_TOKEN={SECRET}]"], "slurm", "names of environment variables"),
    "several machines here": (["cluster.trainers.nodes=2", "cluster.samplers.nodes=0"], "local", "--on local is one machine"),
    "no image": (["cluster.image=null"], "kubernetes", "cluster.image is missing"),
    "no volume": (["cluster.storage=null"], "kubernetes", "cluster.storage is missing"),
    "no kind of GPU": (["cluster.accelerator=null"], "skypilot", "cluster.accelerator is missing"),
    "a bucket for several": (["cluster.storage=s3://runs"], "skypilot", "is a bucket"),
    "no checkpoint for servers": (["model={scratch: {}, dtype: float32}"], "slurm", "model.scratch is none"),
    "nothing is sampled": (["objective=sft", "rollout={}"], "slurm", "samples nothing"),
    "uneven servers": (["cluster.samplers.tensor_parallel=3"], "slurm", "must divide cluster.samplers.gpus"),
    "a time that is none": (["cluster.time=two days"], "slurm", "hours:minutes:seconds"),
    "a time shorter than the save": (["cluster.time=2:00"], "slurm", "must be longer than cluster.grace"),
    "a home of another machine": (["cluster.folder=~/work"], "slurm", "write '~/work' whole"),
    "an engine without servers": (["rollout.engine.colocated=true", "rollout.engine.ahead=0"], "slurm", "colocated"),
    "a line in a word": ([r'cluster.partition="a\n#SBATCH --uid=0"'], "slurm", "must be one word"),
    "an option that is none": (["cluster.options=[qos]"], "slurm", "--qos=high"),
    "a key that is none": (["cluster.trainers.gpu=8"], "slurm", "did you mean cluster.trainers.gpus"),
}


@pytest.mark.parametrize(("words", "system", "said"), WRONG.values(), ids=WRONG)
def test_what_is_refused(words: list[str], system: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """And nothing is printed of a secret."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    assert commands.main(["launch", "my.yaml", *words, "--on", system, "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and not printed.out and SECRET not in printed.err


@pytest.mark.parametrize("words", [(), (ALONE,)], ids=["servers", "trainers"])
def test_a_name_of_digits_is_one_that_kubernetes_takes(words: tuple[str, ...]) -> None:
    """Names of Services, which are names of hosts, begin with a letter."""
    for document in yaml.safe_load_all(text("kubernetes", "name=2026-11-28", *words)):
        assert document["metadata"]["name"] == "run-2026-11-28"


@pytest.mark.slow
def test_runs_at_home_are_at_home(tmp_path: Path) -> None:
    """Inside of quotes the shell replaces no ~."""
    home = tmp_path / "home"
    noted(f"HOME={shlex.quote(str(home))}\n" + text("slurm", "runs=~/my runs"), tmp_path)
    assert (home / "my runs" / "mine-servers.txt").is_file() and not (tmp_path / "~").exists()


def test_stages_share_their_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stages = """\
stages:
  first: {objective: sft, steps: 3, rollout: {engine: {ahead: 0}}}
  second: {steps: 4, model: {path: 'stage:first'}, cluster: {time: '1'}}
"""
    Path("my.yaml").write_text((GOLDEN / "my.yaml").read_text() + stages)
    with pytest.raises(ConfigError, match="cluster is for all stages: write it above them"):
        launch_job("my.yaml", [])
    Path("my.yaml").write_text(Path("my.yaml").read_text().replace(", cluster: {time: '1'}", ""))
    job = launch_job("my.yaml", [])
    assert job.name == "mine" and job.model == "Qwen/Qwen3-8B"


RANKS = {
    "an adapter": (["model.lora={rank: 24}"], 24),
    "other ranks of some layers": (["model.lora={rank: 8, rank_pattern: {q_proj: 64}}"], 64),
    "all weights": ([], 0),
    "an embedding beside it": (["model.lora={modules_to_save: [embed_tokens]}"], 0),
    "more than vLLM takes": (["model.lora={rank: 1024}"], 0),
}


@pytest.mark.parametrize("system", FILES)
@pytest.mark.parametrize(("words", "rank"), RANKS.values(), ids=RANKS)
def test_servers_have_room_for_the_recipes_adapter(words: list[str], rank: int, system: str) -> None:
    """Where they can take it alone; without room they would get all weights, merged."""
    made = text(system, *words)
    found = {int(said) for said in re.findall(r"--lora-rank=(\d+)", made)}
    assert found == ({rank} if rank else set())


def test_servers_of_a_model_without_adapters_get_merged_weights(tmp_path: Path) -> None:
    """vLLM would end when it has loaded the model."""
    model_folder("a model", tmp_path / "m")
    for kind, found in (("llama", True), ("gpt2", False)):
        (tmp_path / "m" / "config.json").write_text(f'{{"model_type": "{kind}"}}')
        made = text("slurm", f"model.path={tmp_path / 'm'}", "model.lora={rank: 8}")
        assert ("--lora-rank=8" in made) == found


@pytest.mark.parametrize("key", ["rollout.engine={patience: 900}", "rollout.engine={full_every: 20}"])
def test_keys_of_running_servers_are_for_launched_ones_too(key: str) -> None:
    """A large model takes longer to load than the default patience."""
    assert key in text("slurm", key).replace("'", "")
    with pytest.raises(ConfigError, match=r"rollout\.engine"):
        text("slurm", key, ALONE)


def model_folder(kind: str, folder: Path) -> None:
    if kind == "no model":
        folder.mkdir()
    elif kind != "no folder":
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
        (folder / "config.json").write_text("{}")
    if kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "no JSON":
        (folder / "config.json").write_text("{")
    elif kind == "an adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")


FOLDERS = {
    "no folder": "no such folder",
    "no model": "holds no config.json",
    "no tokenizer": "holds no tokenizer",
    "no JSON": "config.json is not JSON",
    "an adapter": "holds an adapter alone",
}


@pytest.mark.parametrize(("kind", "says"), FOLDERS.items(), ids=FOLDERS)
def test_a_folder_that_no_server_can_load_is_refused_wherever_it_is_named(
    kind: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `launch` on every system alike, before anything starts, and by `serve`."""
    model_folder(kind, tmp_path / "m")
    said = {}
    for system in FILES:
        machines = ONE_MACHINE if system == "local" else []
        words = ["my.yaml", "--on", system, "--dry-run", *machines, f"model.path={tmp_path}/m"]
        assert commands.main(["launch", *words]) == 2
        printed = capsys.readouterr()
        assert not printed.out
        said[system] = printed.err
    assert says in said["local"] and len(set(said.values())) == 1, said
    assert commands.main(["serve", f"{tmp_path}/m"]) == 2
    assert says in capsys.readouterr().err


PYTHON = os.environ.get("GROUPWISE_LAUNCH_PYTHON", sys.executable)
"""A Python with skypilot 0.14 and kubernetes-validate in it, which the tests do not install."""
LOAD = """
import sys
from sky.utils import dag_utils
dag = dag_utils.load_job_group_from_yaml_str(open(sys.argv[1]).read())
print([(task.name, task.num_nodes) for task in dag.tasks], dag.primary_tasks)
"""
VALIDATE = """
import json, sys, kubernetes_validate
for document in json.load(open(sys.argv[1])):
    kubernetes_validate.validate(document, "1.37", strict=True)
    print(document["kind"])
"""


def read_by(package: str, program: str, content: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if subprocess.run([PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(f"no {package} here: GROUPWISE_LAUNCH_PYTHON=PYTHON names a Python that has it")
    (folder / "content").write_text(content)
    variables = os.environ | {"HOME": str(folder)}
    command = [PYTHON, "-c", program, str(folder / "content")]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_skypilot_loads_the_group(tmp_path: Path) -> None:
    done = read_by("sky", LOAD, text("skypilot"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[('trainers', 2), ('samplers-0', 1), ('samplers-1', 1)] ['trainers']" in done.stdout
    done = read_by("sky", LOAD, text("skypilot").replace("num_nodes:", "nodes:"), tmp_path)
    assert done.returncode != 0 and "nodes" in done.stderr


@pytest.mark.slow
def test_kubernetes_takes_the_objects(tmp_path: Path) -> None:
    """Also each Job in a JobSet; that of JobSet itself is no schema of Kubernetes."""
    alone = list(yaml.safe_load_all(text("kubernetes", ALONE)))
    inside = job_specs(list(yaml.safe_load_all(text("kubernetes"))))
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": spec} for spec in inside]
    done = read_by("kubernetes_validate", VALIDATE, json.dumps([*alone, *jobs]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Service", "Job", "Job", "Job"]
    jobs[0]["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    assert read_by("kubernetes_validate", VALIDATE, json.dumps(jobs), tmp_path).returncode != 0


def test_what_a_job_set_names_is_in_it() -> None:
    """Addresses that pods are known by, and the jobs that end the set."""
    (document,) = yaml.safe_load_all(text("kubernetes"))
    name, spec = document["metadata"]["name"], document["spec"]
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    assert spec["successPolicy"]["targetReplicatedJobs"] == ["trainers"] and set(jobs) == {"trainers", "samplers"}
    assert spec["network"]["subdomain"] == name
    script = pod(jobs["trainers"])["command"][2]
    assert f"--rdzv-endpoint={name}-trainers-0-0.{name}:29500" in script
    for place in range(jobs["samplers"]["completions"]):
        assert f"http://{name}-samplers-0-{place}.{name}:8000" in script
    assert jobs["samplers"]["completions"] == 4 and pod(jobs["samplers"])["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert jobs["trainers"]["completions"] == 2 and pod(jobs["trainers"])["resources"]["limits"] == {"nvidia.com/gpu": 8}
