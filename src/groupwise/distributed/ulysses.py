"""Context parallelism: the positions of a packed stream are split over processes, each of which
attends with a part of the heads (Ulysses, 2309.14509).

A process runs a model's blocks on its own positions.  Before attention all-to-all exchanges
positions for heads, and behind it back again: each process attends over the whole stream, as it is
packed, with some of the heads.  Final hidden states are gathered, and each process computes the
same loss of them.

C processes   T positions of the stream, filled up to a multiple of C   t = T / C of a process
H query heads   K key-value heads   W width of a head   D width of the model   E experts
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from groupwise.errors import ConfigError
from groupwise.ops.query import Query


class ContextGroup:
    """Processes that hold the positions of the same streams."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def part(self, tokens_P: Tensor, position_P: Tensor, attend: Any) -> StreamPart:
        """Return what this process computes of a stream.   attend: sees all of the stream."""
        return StreamPart(self, tokens_P, position_P, attend)

    def own_share(self, loss: Tensor) -> Tensor:
        """Return the part of a loss that this process differentiates: all have the same loss, and
        their gradients are summed.
        """
        return loss / self.size

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes."""
        dist.all_reduce(tensor, group=self.group)


class StreamPart:
    """A process's part of a stream."""

    def __init__(
        self, context: ContextGroup, tokens_P: Tensor, position_P: Tensor, attend: Any
    ) -> None:
        self.context, self.positions = context, tokens_P.shape[0]
        self.width = -(-self.positions // context.size)
        self.tokens_T = self.own(tokens_P)
        self.position_T = self.own(position_P)
        self.attend = ExchangedHeads(self, attend)

    def own(self, column_P: Tensor) -> Tensor:
        """Return this process's positions of a column, zeros behind its end."""
        filler = self.width * self.context.size - self.positions
        begin = self.context.rank * self.width
        return F.pad(column_P, (0, filler))[begin : begin + self.width]

    def whole(self, outputs: Any) -> Any:
        """Return a model's outputs of all positions."""
        outputs.last_hidden_state = self._gathered(outputs.last_hidden_state[0])[None]
        if outputs.get("router_logits") is not None:
            logits = []
            for layer in outputs.router_logits:
                if layer is not None:
                    logits.append(self._gathered(layer.view(self.width, -1)))
            outputs.router_logits = tuple(logits)
        return outputs

    def _gathered(self, part_TD: Tensor) -> Tensor:
        gathered: Any = _Gathered.apply(part_TD, self.context)
        return gathered[: self.positions]


class ExchangedHeads:
    """Attention of a process's positions, by the processes that have the heads (`Attend`)."""

    def __init__(self, part: StreamPart, attend: Any) -> None:
        self.part, self.attend = part, attend

    @property
    def recurrent(self) -> Any:
        """What recurrent layers ask: there is nobody who passes their states on."""
        raise ConfigError(
            "parallel.context: a recurrent layer passes its state from position to position, which"
            " processes do not hand on: leave context out"
        )

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Return the tokens of each position's sequence."""
        return self.part.own(self.attend.sequence_lengths(position_T))

    def __call__(self, query: Query) -> Tensor:
        """Attend, (t, H, W of values)."""
        part, context = self.part, self.part.context
        copies = context.size // math.gcd(query.key_TKD.shape[1], context.size)
        key_TKD = query.key_TKD.repeat_interleave(copies, 1)
        value_TKE = query.value_TKE.repeat_interleave(copies, 1)
        sinks_H = query.sinks_H
        if sinks_H is not None:
            sinks_H = sinks_H.chunk(context.size)[context.rank]
        of_heads = query._replace(
            query_THD=self._all_positions(query.query_THD),
            key_TKD=self._all_positions(key_TKD),
            value_TKE=self._all_positions(value_TKE),
            sinks_H=sinks_H,
        )
        out = self.attend(of_heads)
        filler = part.width * context.size - part.positions
        return self._all_heads(F.pad(out, (0, 0, 0, 0, 0, filler)))

    def _all_positions(self, x_THW: Tensor) -> Tensor:
        """Give other processes' heads for this one's at all positions: (t, H, W) to (T, H/C, W)."""
        context = self.part.context
        t, heads, width = x_THW.shape
        parts = x_THW.view(t, context.size, heads // context.size, width).transpose(0, 1)
        exchanged: Any = _AllToAll.apply(parts, context.group)
        return exchanged.flatten(0, 1)[: self.part.positions]

    def _all_heads(self, x_THW: Tensor) -> Tensor:
        """Do the reverse: (T, H/C, W) to (t, H, W)."""
        context = self.part.context
        parts = x_THW.view(context.size, self.part.width, *x_THW.shape[1:])
        exchanged: Any = _AllToAll.apply(parts, context.group)
        return exchanged.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Row j goes to process j, and row i of what comes is process i's."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Gathered(torch.autograd.Function):
    """Rows of all processes.  All have the same gradient of them, each a share (`own_share`): the
    sum of the shares is this process's times their number.
    """

    @staticmethod
    def forward(ctx: Any, part_TD: Tensor, context: ContextGroup) -> Tensor:
        ctx.context, ctx.rows = context, part_TD.shape[0]
        parts = [torch.empty_like(part_TD) for _ in range(context.size)]
        dist.all_gather(parts, part_TD.contiguous(), group=context.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        begin = ctx.context.rank * ctx.rows
        return grads[0][begin : begin + ctx.rows] * ctx.context.size, None
