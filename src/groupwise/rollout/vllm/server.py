"""vLLM servers in an environment of their own: where it is, how it is made, and how a server is
started and ended in it.

vLLM pins its own torch and transformers, so it never shares the trainer's environment: trainer and
server speak over HTTP.  Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from groupwise.config.packaged_models import is_packaged, packaged_folder
from groupwise.config.validation import wrong_model
from groupwise.data.tokenizers import has_tokenizer
from groupwise.errors import ConfigError, PeerError
from groupwise.models.gguf import gguf_file
from groupwise.utils.files import expanded, temporary_folder

if TYPE_CHECKING:
    from groupwise.models.shape import Shape

ENVIRONMENT = "GROUPWISE_VLLM"
"""Environment variable that names the folder of the virtual environment with vLLM in it."""
FOLDER = ".venv-vllm"
"""Where it is looked for, and made, unless told otherwise."""
PLUGIN = Path(__file__).with_name("plugin")
"""Folder of what runs in vLLM's environment: `groupwise_vllm.py`."""
LOCK = PLUGIN / "vllm-cpu.txt"
"""The exact set for machines without a GPU."""
GPU = "vllm==0.32.0"
"""For machines with one; it brings the rest."""
MODEL = "policy"
"""The name that a server gives to its model."""
BATCH_TOKENS = 1024
"""Tokens of a completion with its prompt that a vLLM of the run makes room for, on average."""
LEAST_CACHE = 64 << 20
"""Fewest bytes of keys and values."""
CANDIDATES = 256
"""Most likely tokens that a server may be asked for beside each drawn one: the support of a
truncated distribution.
"""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that `vllm serve --max-lora-rank` takes."""
ADAPTERS = 2
"""Adapters that a server computes with at the same time: the newest version, and the one before it
for completions that have begun with it."""
WITHOUT_ADAPTERS = ("bloom", "dbrx", "falcon", "gpt2", "gptj", "mamba", "mamba2", "stablelm")
"""Types of models for which vLLM 0.32 takes no adapters; it says so when it has loaded them."""
WITH_TORCHVISION = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
"""Types of models whose code in vLLM 0.32 imports torchvision, for prompts without images too."""
TORCHVISION = "torchvision==0.28.0"
"""Goes with the torch of `LOCK`.  Its build on PyPI is one for CUDA; what prepares images works
without its compiled part."""
ADAPTER_OPTIONS = ("--enable-lora", "--max-lora-rank", "--max-loras", "--max-cpu-loras")
"""Options of vLLM that follow from the rank of the adapters."""
NO_ADAPTERS = "--no-enable-lora"
PIXELS_BEFORE = "--no-mm-device-do-normalize"
"""Has pixels normalised before they reach the model.  Inside of it `--load-format dummy` gives the
mean and the deviation random numbers, which no run replaces: they are in no checkpoint."""
START_SECONDS = 600.0
"""A server that has not answered by then does not start."""
END_SECONDS = 10.0
"""A server that has not ended by then is killed."""


def cache_bytes(shape: Shape, context: int, rows: int, width: int) -> int:
    """Bytes of keys and values that so many rows need on average, and one of the longest at least.

    context: of the model, tokens.   width: bytes of a number.
    """
    tokens = max(context, rows * min(context, BATCH_TOKENS))
    cache = 2 * shape.layers * shape.kv_heads * shape.head_width * width * tokens
    return max(LEAST_CACHE, int(1.1 * cache))


def find_python() -> Path:
    """The Python of vLLM's environment: from GROUPWISE_VLLM, or `.venv-vllm` here.  Raises
    ConfigError with what to do.
    """
    named = os.environ.get(ENVIRONMENT)
    folder = expanded(named or FOLDER).absolute()
    python = folder / "bin" / "python"
    if python.exists():
        return python
    where = (
        f"{ENVIRONMENT} names {named!r}"
        if named
        else f"there is no folder {FOLDER} here, and {ENVIRONMENT} is not set"
    )
    raise ConfigError(
        f"no environment with vLLM in it ({where}): `groupwise install-vllm` makes one in {FOLDER}"
    )


def install(folder: Path, *, gpu: bool = False) -> None:
    """Make an environment with vLLM in it: its CPU build, exactly as locked, or `gpu`: what pip
    resolves for its CUDA build.

    The CPU build's companions torchvision, torchaudio and torchcodec exist as CUDA builds only;
    with them in place transformers cannot even import a text model, so the lock leaves them out and
    pip must not add them.
    Raises ConfigError if pip fails.
    """
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    wanted = [GPU] if gpu else ["--no-deps", "-r", str(LOCK)]
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        *wanted,
    ]
    if subprocess.run(pip).returncode != 0:
        raise ConfigError(f"pip could not install vLLM into {folder}: its message is above")


def command(
    model: str,
    *,
    python: Path,
    host: str,
    port: int,
    rows: int,
    dtype: str,
    cache: str | None = None,
    lora_rank: int = 0,
    quantization: str | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """The command that serves a model the way rollouts need it.

    rows: completions decoded at the same time.   cache: room for keys and values, as vLLM writes
        it; default: 512M on a CPU, vLLM's own on a GPU.
    lora_rank: of adapters that come alone, without the weights under them; 0: none do.
    quantization: how vLLM quantises the weights that it is given, such as `fp8`.
    more: further arguments of `vllm serve`; they win over those here.
    Raises ConfigError for a model that takes no adapters, for options that contradict the rank, and
    for a model that reads images where torchvision is missing.
    """
    if NO_ADAPTERS in more:
        lora_rank = 0
    _check_adapters(model, lora_rank, more)
    _check_torchvision(model, python)
    arguments: dict[str, str | None] = {
        "--host": host,
        "--port": str(port),
        "--served-model-name": MODEL,
        "--dtype": dtype,
        "--max-num-seqs": str(rows),
        "--kv-cache-memory-bytes": cache,
        "--quantization": quantization,
        # The log-probs of the distribution that was drawn from; vLLM's default are those at
        # temperature 1.
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": str(CANDIDATES),
        # The checkpoint's own sampling defaults must not leak into requests.
        "--generation-config": "vllm",
        "--weight-transfer-config": json.dumps({"backend": "groupwise"}),
        "--worker-extension-cls": "groupwise_vllm.Extension",
        "--seed": "0",
    }
    if lora_rank:
        arguments["--max-lora-rank"] = str(_vllm_rank(lora_rank))
        arguments["--max-loras"] = str(ADAPTERS)
        arguments["--max-cpu-loras"] = str(2 * ADAPTERS)
    options = [
        text for name, value in arguments.items() if value is not None for text in (name, value)
    ]
    switches = ["--enable-prefix-caching", "--enable-scale-out", "--disable-uvicorn-access-log"]
    if lora_rank:
        switches.append("--enable-lora")
    if "vision_config" in _config(model) and _begins_with_random(more):
        switches.append(PIXELS_BEFORE)
    return [str(python), str(PLUGIN / "groupwise_vllm.py"), model, *options, *switches, *more]


def _begins_with_random(more: Sequence[str]) -> bool:
    """Return True if options of vLLM ask for random weights, for which a run sends its own."""
    words = " ".join(more).replace("=", " ").split()
    names = [word.replace("_", "-") for word in words]
    return ("--load-format", "dummy") in pairwise(names)


def _check_adapters(model: str, lora_rank: int, more: Sequence[str]) -> None:
    """Raise ConfigError for what vLLM would refuse after it has loaded the model, or misread."""
    for word in more:
        option = word.partition("=")[0].replace("_", "-")
        if option in ADAPTER_OPTIONS:
            raise ConfigError(
                f"{option} follows from --lora-rank (--max-loras is {ADAPTERS}): leave it out, and"
                " set --lora-rank before --"
            )
    if lora_rank and not takes_adapters(model):
        raise ConfigError(
            f"vLLM takes no adapters for models of type {_config(model)['model_type']}: leave"
            " --lora-rank out, and runs send adapters merged into the weights"
        )


def _check_torchvision(model: str, python: Path) -> None:
    """Raise ConfigError where vLLM would load all but the model, and then miss torchvision."""
    config = _config(model)
    if "vision_config" not in config or config.get("model_type") not in WITH_TORCHVISION:
        return
    probe = "import importlib.util; assert importlib.util.find_spec('torchvision')"
    if subprocess.run([str(python), "-c", probe], stderr=subprocess.DEVNULL).returncode != 0:
        raise ConfigError(
            f"vLLM serves models of type {config['model_type']} with torchvision, which is not in"
            f" its environment: {python} -m pip install --no-deps {TORCHVISION}"
        )


def takes_adapters(model: str) -> bool:
    """Return False for a model of which vLLM can compute no adapters, as far as that is known
    before it is fetched.
    """
    return _config(model).get("model_type") not in WITHOUT_ADAPTERS


def _vllm_rank(rank: int) -> int:
    """The rank that vLLM makes room for.  Raises ConfigError for more than it can."""
    for known in LORA_RANKS:
        if rank <= known:
            return known
    raise ConfigError(f"vLLM knows adapters up to rank {LORA_RANKS[-1]}, not {rank}")


def environment() -> dict[str, str]:
    """The variables that a server needs, over those that are set."""
    needed = {
        "PYTHONPATH": str(
            PLUGIN
        ),  # and not the trainer's, whose packages are those of another environment
        "VLLM_SERVER_DEV_MODE": "1",  # the routes for new weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # those for adapters
        "VLLM_NO_USAGE_STATS": "1",
    }
    # vLLM would bind its threads to cores, also to those that the trainer computes on.
    return os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | needed


def demand_servable(model: str) -> None:
    """Raise ConfigError for a model that no server can load, with the words of `model.path`.

    model: folder, hub name, GGUF file or packaged model.
    """
    wrong = wrong_model(model)
    folder = expanded(model)
    if wrong is None and folder.is_dir() and gguf_file(folder) is None:
        wrong = _wrong_folder(folder)
    if wrong is not None:
        raise ConfigError(f"model.path: {wrong}")


def _wrong_folder(folder: Path) -> str | None:
    """Why a folder with a model is none that a server can load, or None."""
    config = folder / "config.json"
    if not config.is_file():
        return (
            f"{str(folder)!r} holds an adapter alone, and servers load whole models: name the"
            " merged model (final/ of its run), or the model that it was trained on"
        )
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{config} is not JSON ({error}): fetch or copy it again"
    if not has_tokenizer(folder):
        return (
            f"{str(folder)!r} holds no tokenizer (tokenizer.json, tokenizer_config.json): copy the"
            " tokenizer files of the model that it was made from into it"
        )
    return None


def stored_dtype(model: str) -> str:
    """The type of a checkpoint's weights, where it is on this machine and says so.  vLLM's `auto`
    would round float32 to bfloat16.
    """
    known = _config(model)
    return str(known.get("dtype") or known.get("torch_dtype") or "auto")


def _config(model: str) -> dict[str, Any]:
    """Return the config.json of a model: a folder, a packaged model, or a hub name whose file lies
    in Hugging Face's cache; empty for one that is not on this machine.
    """
    folder = packaged_folder(model) if is_packaged(model) else expanded(model)
    config = folder / "config.json"
    if not folder.exists():
        config = _cached_config(model)
    if config is None or not config.is_file():
        return {}
    return json.loads(config.read_text(encoding="utf-8"))


def _cached_config(name: str) -> Path | None:
    """Return the config.json of a hub name in Hugging Face's cache, where it is."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path of which nothing is here
        return None
    return Path(file) if isinstance(file, str) else None


class OwnServer:
    """A server that this process has started, and that ends with it."""

    def __init__(
        self,
        write: Callable[[Path], None],
        *,
        rows: int,
        dtype: str,
        cache: str,
        lora_rank: int = 0,
        more: Sequence[str] = (),
    ) -> None:
        """Returns at once, long before the server answers.  write: puts a config and a tokenizer,
        or a whole model, into a folder.

        Raises ConfigError where there is no vLLM.
        """
        python = find_python()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.folder = temporary_folder("vllm")
        self.log = self.folder / "server.log"
        model = self.folder / "model"
        model.mkdir()
        write(model)
        line = command(
            str(model),
            python=python,
            host="127.0.0.1",
            port=port,
            rows=rows,
            dtype=dtype,
            cache=cache,
            lora_rank=lora_rank,
            more=more,
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                line,
                env=environment() | {"GROUPWISE_SERVER_WITH_PARENT": "1"},
                # closes when this process is gone, however it went: then the server ends too
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises PeerError if it has ended."""
        status = self.process.poll()
        if status is None:
            return
        how = (
            f"was killed by signal {-status} ({signal.Signals(-status).name})"
            if status < 0
            else f"ended with status {status}"
        )
        self.log = self._keep_log()
        raise PeerError(f"the vLLM server {how}; its log is {self.log}{self._first_error()}")

    def _keep_log(self) -> Path:
        """The log of a server that failed outlives the run."""
        copied = Path(tempfile.gettempdir()) / f"{self.folder.name}.log"
        if self.log.exists() and self.log != copied:
            shutil.copyfile(self.log, copied)
        return copied

    def _first_error(self) -> str:
        lines = (
            self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if self.log.exists()
            else []
        )
        errors = [
            match[0]
            for line in lines
            if (match := re.search(r"\b[A-Z]\w*Error: .*", line)) and "EngineDead" not in match[0]
        ]
        return f", which says: {errors[0][:300]}" if errors else ""

    def close(self) -> None:
        """End it and all that it started."""
        group = self.process.pid  # it leads its own session
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)  # one that was stopped could not hear it
            deadline = time.monotonic() + END_SECONDS
            while self.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def serve(
    model: str,
    *,
    host: str,
    port: int,
    rows: int,
    dtype: str | None,
    cache: str | None,
    lora_rank: int = 0,
    quantization: str | None = None,
    more: Sequence[str],
) -> NoReturn:
    """Become a server: replaces this process.  dtype: default the checkpoint's.  lora_rank,
    quantization: see `command`.   Raises ConfigError without vLLM.
    """
    line = command(
        model,
        python=find_python(),
        host=host,
        port=port,
        rows=rows,
        dtype=dtype or stored_dtype(model),
        cache=cache,
        lora_rank=lora_rank,
        quantization=quantization,
        more=more,
    )
    sys.stdout.flush()
    os.execve(line[0], line, environment())
