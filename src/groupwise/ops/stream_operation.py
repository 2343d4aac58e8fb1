"""Attention of a packed stream as one operation of torch's library, for blocks that are compiled.

A compiler takes the operation as it is and looks no further: lengths, families and kernels are the
stream's, which the operation finds by its number.  A number is a tensor on the host, so that one
compiled block serves every stream.

The operation calls the forward and backward passes of the same autograd Functions that attend
elsewhere (`ops.attention`, `ops.cuda`).

T positions of the stream   H query heads   K key-value heads   D head width
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.attention import StreamAttention
from groupwise.ops.operations import AttentionCall, operations
from groupwise.ops.query import Query, Reach

ARGUMENTS = "Tensor stream, float scale, float? cap, int? window, int? chunk"
NAME = "groupwise::packed_attention"
BACKWARD = "groupwise::packed_attention_backward"


class Context:
    """What a Function is given in place of autograd's own context."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep what the backward pass reads."""
        self.saved_tensors = tensors


@dataclass(frozen=True, slots=True, eq=False)
class OpenStream:
    """A stream that blocks attend in, and what the backward passes of its layers share.

    Tensors that differ by layer are inputs and outputs of the operation, and are not kept here.
    """

    attention: StreamAttention
    contexts: dict[tuple[Any, ...], tuple[Any, Context]] = field(default_factory=dict)
    """A Function and its context, by what tells calls apart."""


_streams: dict[int, OpenStream] = {}
_numbers = count()


class StreamNumbers:
    """The numbers of the streams of one pass, forward and backward."""

    def __init__(self) -> None:
        self._tensors: dict[StreamAttention, Tensor] = {}

    def of(self, attention: StreamAttention) -> Tensor:
        """Return a stream's number, int64 on the host."""
        if attention not in self._tensors:
            number = next(_numbers)
            _streams[number] = OpenStream(attention)
            self._tensors[attention] = torch.tensor(number)
        return self._tensors[attention]

    def close(self) -> None:
        """Forget the streams."""
        for number in self._tensors.values():
            del _streams[int(number)]
        self._tensors.clear()


@contextmanager
def numbered_streams() -> Iterator[StreamNumbers]:
    """Give out numbers that hold while inside; backward passes must end inside too."""
    numbers = StreamNumbers()
    try:
        yield numbers
    finally:
        numbers.close()


def _call(stream: OpenStream, query: Query) -> AttentionCall:
    """Return the Function that attends, and what it is given."""
    attention = stream.attention
    if query.query_THD.is_cuda:
        from groupwise.ops.cuda.stream_attention import flash_call

        return flash_call(attention, query)
    call = operations().stream_function(attention, query)
    if call is None:
        reach = query.reach.within(attention.longest)
        call = attention.pieces_call(query.heads, query, reach)
    return call


def _heads_first(x_THD: Tensor) -> Tensor:
    """Return (1, heads, T, D)."""
    return x_THD.transpose(0, 1)[None]


def _tokens_first(x_1HTD: Tensor) -> Tensor:
    """Return (T, heads, D), as it is promised to the compiler."""
    return x_1HTD[0].transpose(0, 1).contiguous()


def _attend(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    stream: Tensor,
    scale: float,
    cap: float | None,
    window: int | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs (T, H, D) and log-sum-exps (H, T)."""
    here = _streams[int(stream)]
    reach = Reach(window=window, chunk=chunk)
    call = _call(here, Query(0, query_THD, key_TKD, value_TKD, scale, cap, reach))
    context = Context()
    out = call.function.forward(context, *call.arguments)
    *_, lse = context.saved_tensors[:5]
    assert lse is not None
    context.saved_tensors = context.saved_tensors[5:]
    here.contexts[query_THD.dtype, scale, cap, reach] = call.function, context
    if query_THD.is_cuda:
        return out.contiguous(), lse
    return _tokens_first(out), lse[0]


def _attend_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    stream: Tensor,
    scale: float,
    cap: float | None,
    window: int | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    reach = Reach(window=window, chunk=chunk)
    kind = query_THD.dtype, scale, cap, reach
    function, shared = _streams[int(stream)].contexts[kind]
    context = Context()
    vars(context).update(vars(shared))
    tensors = [query_THD, key_TKD, value_TKD, out_THD]
    if grad_THD.is_cuda:
        context.saved_tensors = *tensors, lse_HT, *shared.saved_tensors
        grads = function.backward(context, grad_THD)
        return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
    tensors = [_heads_first(x) for x in tensors]
    context.saved_tensors = *tensors, lse_HT[None], *shared.saved_tensors
    grads = function.backward(context, _heads_first(grad_THD))
    return _tokens_first(grads[0]), _tokens_first(grads[1]), _tokens_first(grads[2])


def _empty(query_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return tensors like those of `_attend`."""
    tokens, heads = query_THD.shape[:2]
    wide = torch.float64 if query_THD.dtype == torch.float64 else torch.float32
    return query_THD.new_empty(query_THD.shape), query_THD.new_empty(heads, tokens, dtype=wide)


def _empty_gradients(
    grad_THD: Tensor, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those of `_attend_backward`."""
    query, key, value = (x.new_empty(x.shape) for x in (query_THD, key_TKD, value_TKD))
    return query, key, value


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass of the operation is given."""
    *heads, stream, scale, cap, window, chunk = inputs
    ctx.save_for_backward(*heads, *output, stream)
    ctx.options = scale, cap, window, chunk
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Call the operation of the backward pass."""
    saved = ctx.saved_tensors
    grads = packed_attention_backward(grad_THD.contiguous(), *saved, *ctx.options)
    return (*grads, None, None, None, None, None)


packed_attention = torch.library.custom_op(
    NAME,
    _attend,
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {ARGUMENTS}) -> (Tensor, Tensor)",
)
packed_attention_backward = torch.library.custom_op(
    BACKWARD,
    _attend_backward,
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
        f" {ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
    ),
)
packed_attention.register_fake(_empty)
packed_attention_backward.register_fake(_empty_gradients)
packed_attention.register_autograd(_backward, setup_context=_save)
