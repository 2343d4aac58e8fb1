"""Context parallelism: the positions of a packed stream are split over processes, each of which
attends with a part of the heads (Ulysses, 2309.14509).

A process runs a model's blocks on its own positions.  Before attention all-to-all exchanges
positions for heads, and behind it back again: each process attends over the whole stream, as it is
packed, with some of the heads.  Recurrent layers have heads and channels that know nothing of one
another, and exchange them in the same way.  Final hidden states are gathered, and each process
computes the same loss of them.

C processes   T positions of the stream, filled up to a multiple of C   t = T / C of a process
H heads, filled up likewise   K key-value heads   W width of a head   D channels   E experts
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.ops.query import Query
from groupwise.ops.recurrence import Recurrence


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
        filled = _filled(column_P, 0, self.width * self.context.size - self.positions)
        return filled.chunk(self.context.size)[self.context.rank]

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

    def filler(self, heads: int) -> int:
        """Return how many heads of zeros make equal parts of so many."""
        return -heads % self.context.size

    def copies(self, heads: int, served: int) -> int:
        """Return how often each of the heads that serve several others is repeated, so that a
        process has those that serve its own.

        Heads that are added are served by none: where some are, each head gets one of its own.
        """
        if self.filler(served):
            return served // heads
        return self.context.size // math.gcd(heads, self.context.size)

    def own_heads(self, column_H: Tensor) -> Tensor:
        """Return this process's heads of a column (H, ...)."""
        filled = _filled(column_H, 0, self.filler(column_H.shape[0]))
        return filled.chunk(self.context.size)[self.context.rank]

    def all_positions(self, x_TH: Tensor) -> Tensor:
        """Give other processes' heads, or channels, for this one's at all positions:
        (t, H, ...) to (T, H/C, ...).
        """
        context = self.context
        filled = _filled(x_TH, 1, self.filler(x_TH.shape[1]))
        parts = filled.unflatten(1, (context.size, -1)).transpose(0, 1)
        exchanged: Any = _AllToAll.apply(parts, context.group)
        return exchanged.flatten(0, 1)[: self.positions]

    def all_heads(self, x_TH: Tensor, heads: int) -> Tensor:
        """Do the reverse: (T, H/C, ...) to (t, H, ...), without the filled heads."""
        context = self.context
        filled = _filled(x_TH, 0, self.width * context.size - self.positions)
        parts = filled.unflatten(0, (context.size, -1))
        exchanged: Any = _AllToAll.apply(parts, context.group)
        return exchanged.transpose(0, 1).flatten(1, 2)[:, :heads]


class ExchangedHeads:
    """Attention of a process's positions, by the processes that have the heads (`Attend`)."""

    def __init__(self, part: StreamPart, attend: Any) -> None:
        self.part, self.attend = part, attend

    @property
    def recurrent(self) -> ExchangedStates:
        """See `Attend`."""
        return ExchangedStates(self.part, self.attend.recurrent)

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Return the tokens of each position's sequence."""
        return self.part.own(self.attend.sequence_lengths(position_T))

    def __call__(self, query: Query) -> Tensor:
        """Attend, (t, H, W of values)."""
        part, heads = self.part, query.query_THD.shape[1]
        copies = part.copies(query.key_TKD.shape[1], heads)
        key_TKD = query.key_TKD.repeat_interleave(copies, 1)
        value_TKE = query.value_TKE.repeat_interleave(copies, 1)
        sinks_H = query.sinks_H
        if sinks_H is not None:
            sinks_H = part.own_heads(sinks_H)
        of_heads = query._replace(
            query_THD=part.all_positions(query.query_THD),
            key_TKD=part.all_positions(key_TKD),
            value_TKE=part.all_positions(value_TKE),
            sinks_H=sinks_H,
        )
        return part.all_heads(self.attend(of_heads), heads)


class ExchangedStates:
    """Recurrent layers of a process's positions (`ops.recurrence.Recurrence`).

    A state belongs to a head, and the last inputs of a convolution to a channel.  So the processes
    that have these let them pass over the whole stream, and no process waits for the one before it.
    """

    def __init__(self, part: StreamPart, recurrence: Recurrence) -> None:
        self.part, self.recurrence = part, recurrence

    def convolve(
        self,
        place: tuple[int, int],
        x_TD: Tensor,
        weight_DW: Tensor,
        bias_D: Tensor | None,
        *,
        silu: bool,
    ) -> Tensor:
        """Convolve each channel over the segments, (t, D)."""
        part = self.part
        if bias_D is not None:
            bias_D = part.own_heads(bias_D)
        out = self.recurrence.convolve(
            place, part.all_positions(x_TD), part.own_heads(weight_DW), bias_D, silu=silu
        )
        return part.all_heads(out, x_TD.shape[1])

    def rule(self, place: tuple[int, int], *columns: Tensor) -> Tensor:
        """Compute the gated rule of each head, (t, H, V)."""
        query, key, value, *rates = columns
        part, heads = self.part, value.shape[1]
        copies = part.copies(query.shape[1], heads)
        query, key = query.repeat_interleave(copies, 1), key.repeat_interleave(copies, 1)
        of_heads = [part.all_positions(column) for column in (query, key, value, *rates)]
        return part.all_heads(self.recurrence.rule(place, *of_heads), heads)


def _filled(tensor: Tensor, side: int, count: int) -> Tensor:
    """Return a tensor with so many zeros behind it along a side."""
    if count == 0:
        return tensor
    shape = list(tensor.shape)
    shape[side] = count
    return torch.cat([tensor, tensor.new_zeros(shape)], side)


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
