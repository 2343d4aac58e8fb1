"""AdamW whose moments lie elsewhere between two steps: in 8 bits a number, or in host memory.

A step goes through the weights piece by piece.  It makes the moments of a piece in float32 where
the weights are, takes torch's own step with them, and puts them away again.

N numbers of a parameter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from groupwise.models.quantized import bitsandbytes
from groupwise.training.optimizer import AdamW

PIECE = 1 << 22
"""Numbers of a piece, whose moments exist in float32 at a time: 32 MiB."""
BLOCK = 256
"""Numbers that share a scale in 8 bits (2110.02861), a divisor of `PIECE`."""
LEAST = 4096
"""Numbers of the smallest parameter whose moments are kept in 8 bits, as in bitsandbytes."""
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALE = "scale"


class StoredAdamW(AdamW):
    """AdamW that keeps moments in a form of its own."""

    def opened(self, kind: str, state: Mapping[str, Tensor], piece: slice, like: Tensor) -> Tensor:
        """Return a piece of a moment in float32 (N,), where the weights are.

        kind: one of `MOMENTS`.   like: the piece of the weights.
        """
        raise NotImplementedError

    def put(self, kind: str, state: Mapping[str, Tensor], piece: slice, moment_N: Tensor) -> None:
        """Put a piece of a moment away."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take torch's fused step, piece by piece."""
        for group in self.param_groups:
            for master in group["params"]:
                self._step_of(master, group)

    def _step_of(self, master: Tensor, group: Mapping[str, Any]) -> None:
        """Take a step with one parameter."""
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), device=master.device)
            state.update(self.zeros(master))
        assert master.grad is not None
        weight_N, gradient_N = master.detach().view(-1), master.grad.reshape(-1)
        beta1, beta2 = group["betas"]
        count = state["step"].clone()
        for begin in range(0, weight_N.numel(), PIECE):
            piece = slice(begin, min(begin + PIECE, weight_N.numel()))
            moments = [self.opened(kind, state, piece, weight_N[piece]) for kind in MOMENTS]
            count = state["step"].clone()  # the step counts itself
            adamw(
                [weight_N[piece]],
                [gradient_N[piece]],
                [moments[0]],
                [moments[1]],
                [],
                [count],
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for kind, moment_N in zip(MOMENTS, moments, strict=True):
                self.put(kind, state, piece, moment_N)
        state["step"].copy_(count)


class HostAdamW(StoredAdamW):
    """AdamW whose moments lie in the memory of the host."""

    def zeros(self, master: Tensor) -> dict[str, Tensor]:
        """See `AdamW`."""
        pinned = master.is_cuda
        return {kind: torch.zeros(master.shape, pin_memory=pinned) for kind in MOMENTS}

    def opened(self, kind: str, state: Mapping[str, Tensor], piece: slice, like: Tensor) -> Tensor:
        """See `StoredAdamW`."""
        return state[kind].view(-1)[piece].to(like.device, copy=True)

    def put(self, kind: str, state: Mapping[str, Tensor], piece: slice, moment_N: Tensor) -> None:
        """See `StoredAdamW`."""
        state[kind].view(-1)[piece].copy_(moment_N)


class EightBitAdamW(StoredAdamW):
    """AdamW whose moments are kept in 8 bits a number, with a scale for every 256 (2110.02861).

    The numbers are those of bitsandbytes' `AdamW8bit`.  Parameters of fewer than 4,096 numbers keep
    theirs in float32.
    """

    def zeros(self, master: Tensor) -> dict[str, Tensor]:
        """See `AdamW`."""
        moments: dict[str, Tensor] = {}
        for kind in MOMENTS:
            none = torch.zeros_like(master.detach())
            if master.numel() < LEAST:
                moments[kind] = none
                continue
            blocks = -(-master.numel() // BLOCK)
            moments[kind] = torch.full_like(none, _code_of_zero(kind), dtype=torch.uint8)
            moments[f"{kind}_{SCALE}"] = torch.zeros(blocks, device=master.device)
        return moments

    def opened(self, kind: str, state: Mapping[str, Tensor], piece: slice, like: Tensor) -> Tensor:
        """See `StoredAdamW`."""
        stored = state[kind].view(-1)[piece]
        if stored.dtype != torch.uint8:
            return stored
        return bitsandbytes().dequantize_blockwise(
            stored,
            absmax=state[f"{kind}_{SCALE}"][_blocks(piece)],
            code=_numbers(kind, like.device),
            blocksize=BLOCK,
        )

    def put(self, kind: str, state: Mapping[str, Tensor], piece: slice, moment_N: Tensor) -> None:
        """See `StoredAdamW`."""
        stored = state[kind].view(-1)[piece]
        if stored.dtype != torch.uint8:
            return  # the step has changed it in place
        code = _numbers(kind, moment_N.device)
        codes, quantized = bitsandbytes().quantize_blockwise(moment_N, code=code, blocksize=BLOCK)
        stored.copy_(codes)
        state[f"{kind}_{SCALE}"][_blocks(piece)] = quantized.absmax


def _blocks(piece: slice) -> slice:
    """The scales of a piece."""
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))


@cache
def _numbers(kind: str, device: torch.device) -> Tensor:
    """The 256 numbers that codes stand for: of squares none is below 0.

    They are made once: a step asks for them four times a piece, and a GPU would wait for each copy.
    """
    return bitsandbytes().create_dynamic_map(signed=kind == MOMENTS[0]).to(device)


def _code_of_zero(kind: str) -> int:
    return int(_numbers(kind, torch.device("cpu")).abs().argmin())


def moment_bytes(state: str | None, sizes: Sequence[int]) -> int:
    """Bytes of the moments of parameters of so many numbers.   state: `optimizer.state`."""
    total = 0
    for size in sizes:
        if state == "8bit" and size >= LEAST:
            total += 2 * (size + 4 * -(-size // BLOCK))
        else:
            total += 8 * size
    return total


STATES: Mapping[str | None, type[AdamW]] = {None: AdamW, "host": HostAdamW, "8bit": EightBitAdamW}
"""The kinds of AdamW by their names in a recipe."""
