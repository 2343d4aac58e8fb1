"""Tensors that travel to processes outside of the run, such as the workers of vLLM."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class BroadcastGroup:
    """Processes outside of the run, such as an engine's workers, that receive what this one
    broadcasts to them.
    """

    def __init__(self, host: str, size: int, *, cuda: bool, timeout: float) -> None:
        """Open the place to meet, `host`:`port`.

        size: how many processes will come.   cuda: by NCCL; else by gloo.   timeout: seconds.
        """
        self.size, self.cuda, self.timeout = size, cuda, timedelta(seconds=timeout)
        self.host = host
        self._group: Any = None
        # On this address alone, where torch would listen on all.
        listener = socket.create_server((host, 0))
        self.port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[reportPrivateImportUsage]
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self.timeout,
            master_listen_fd=listener.detach(),
        )

    def meet(self) -> None:
        """Wait until all have come.  They must be on their way: this blocks."""
        if self.cuda:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._group = dist.ProcessGroupNCCL(self._store, 0, self.size + 1, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.host)]
            options._timeout = self.timeout
            gloo: Any = dist.ProcessGroupGloo
            self._group = gloo(self._store, 0, self.size + 1, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all of them; blocks until it has left."""
        assert self._group is not None, "nobody has been met"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
