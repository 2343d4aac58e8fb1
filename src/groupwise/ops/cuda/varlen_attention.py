"""Flash attention of a packed stream in two calls, exact, with no key copied.

The first call is causal: each segment sees itself, and a prompt with its first completion is one
sequence, a text as it was written.  In the second the other completions see their prompt.  The
softmax over both follows from the outputs and log-sum-exps of the parts, as in ring attention, and
the backward pass of each part takes the output and log-sum-exp of the union: exp(score - lse) is
then the weight in the union, and rowsum(dO * O) is the same for both.

T tokens of the stream   H query heads   K key-value heads   D head width
N sequences of a call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.operations import AttentionCall, operations
from groupwise.ops.query import Query, families_of
from groupwise.records import Layout

FLASH_TYPES = (torch.bfloat16, torch.float16)
FLASH_WIDTHS = range(8, 257, 8)
"""Widths of heads that the kernel takes."""
WIDE_HEAD = 192
"""The backward pass of wider heads needs the shared memory of the GPUs in `DATA_CENTER`."""
DATA_CENTER = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of A100, H100 and H200, B200 and B300."""

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceEnds:
    """Where the sequences of both calls end: ascending numbers in int32, the first of them 0.

    A sequence of the second call may have queries without keys, or keys without queries.
    """

    ends: Tensor
    """All three lists, one behind the other."""
    own: int
    """Length of the first list: queries and keys of the causal call."""
    longest_own: int
    longest_query: int
    longest_key: int
    """Tokens of the longest sequence of the first call, and of the longest queries and keys of the
    second, those without the other included: behind them the kernel writes nothing.  0: nobody
    shares a prompt, and there is no second call.
    """

    @classmethod
    def of(cls, layout: Layout) -> SequenceEnds:
        """Read the sequences off the families of a stream; filler behind them sees itself."""
        own, query, key = [0], [0], [0]
        shared = False
        for family in families_of(layout):
            own += [end for _, end in family.causal]
            (prefix_start, prefix_end), (rest_start, rest_end) = family.prefix, family.rest
            # Queries without keys; the other completions over the prompt; keys without queries.
            query += [rest_start, rest_end, rest_end]
            key += [prefix_start, prefix_end, rest_end]
            shared = shared or rest_end > rest_start
        key.append(key[-1])  # filler, as queries without keys, then as keys without queries
        query.append(layout.total)
        for ends in (own, query, key):
            ends.append(layout.total)
        return cls(
            ends=torch.tensor([*own, *query, *key], dtype=torch.int32),
            own=len(own),
            longest_own=_longest(own),
            longest_query=_longest(query) if shared else 0,
            longest_key=_longest(key) if shared else 0,
        )

    def to(self, device: torch.device | str) -> SequenceEnds:
        """Copy the lists to a device without waiting for it."""
        ends = self.ends
        if torch.cuda.is_available():
            ends = ends.pin_memory()
        return replace(self, ends=ends.to(device, non_blocking=True))

    @property
    def causal_call(self) -> tuple[Tensor, Tensor, int, int]:
        """What the kernel is given of the first call: ends of queries and keys, longest of both."""
        own = self.ends[: self.own]
        return own, own, self.longest_own, self.longest_own

    @property
    def prefix_call(self) -> tuple[Tensor, Tensor, int, int]:
        """What the kernel is given of the second call."""
        query, key = self.ends[self.own :].chunk(2)
        return query, key, self.longest_query, self.longest_key


def _longest(ends: Sequence[int]) -> int:
    """The most tokens between two ends.

    At least 2: told of 1, the kernel takes every sequence for one query, also those without any.
    """
    longest = 2
    for start, end in pairwise(ends):
        longest = max(longest, end - start)
    return longest


def flash_takes(query: Query) -> bool:
    """Return True if the kernel takes such heads on their device."""
    width = query.query_THD.shape[-1]
    if query.cap is not None or query.value_TKE.shape[-1] != width:
        return False
    if query.query_THD.dtype not in FLASH_TYPES or width not in FLASH_WIDTHS:
        return False
    return has_flash(query.query_THD.device, width)


@cache
def has_flash(device: torch.device, width: int) -> bool:
    """Return True if torch was built with the kernel, and the GPU, which is Ampere or newer, takes
    heads of this width forward and backward.
    """
    if device.type != "cuda":
        return True  # the stand-ins of tests
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    if width > WIDE_HEAD:
        return capability in DATA_CENTER
    return capability >= (8, 0)


def varlen_attention(query: Query, ends: SequenceEnds) -> Tensor:
    """Attend in a packed stream without a window, (T, H, D), differentiable once."""
    call = varlen_call(query, ends)
    return call.function.apply(*call.arguments)


def varlen_call(query: Query, ends: SequenceEnds) -> AttentionCall:
    """Return the call that attends; its tensors are (T, heads, D), and log-sum-exps (H, T)."""
    heads = query.query_THD, query.key_TKD, query.value_TKE
    return AttentionCall(_Varlen, (*heads, query.sinks_H, ends, query.scale))


class _Varlen(torch.autograd.Function):
    """Attention to a segment and its prefix, each by one call of the kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        ends: SequenceEnds,
        scale: float,
    ) -> Tensor:
        """Attend; save what the backward pass reads."""
        heads = query_THD, key_TKD, value_TKD
        out_THD, lse_HT, *state, _ = _flash(
            *heads, *ends.causal_call, 0.0, True, False, scale=scale
        )
        if ends.longest_key:
            prefix_out_THD, prefix_lse_HT, *_ = _flash(
                *heads, *ends.prefix_call, 0.0, False, False, scale=scale
            )
            kernels = operations().gpu_kernels(out_THD)
            merge = merged if kernels is None else kernels.merge_parts
            out_THD, lse_HT = merge(out_THD, lse_HT, prefix_out_THD, prefix_lse_HT)
        if sinks_H is not None:
            union_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
            share_TH1 = (lse_HT - union_HT).exp().T[..., None]
            out_THD, lse_HT = (out_THD * share_TH1).to(out_THD.dtype), union_HT
        ctx.save_for_backward(*heads, out_THD, lse_HT, *state, sinks_H)
        ctx.ends, ctx.scale = ends, scale
        return out_THD

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and sinks."""
        *heads, out_THD, lse_HT, seed, offset, sinks_H = ctx.saved_tensors
        ends: SequenceEnds = ctx.ends
        grad_out_THD = grads[0].contiguous()
        saved = grad_out_THD, *heads, out_THD, lse_HT
        gradients = _flash_backward(
            *saved, *ends.causal_call, 0.0, True, seed, offset, scale=ctx.scale
        )
        if ends.longest_key:
            of_prefix = _flash_backward(
                *saved, *ends.prefix_call, 0.0, False, seed, offset, scale=ctx.scale
            )
            torch._foreach_add_(gradients, of_prefix)  # type: ignore[attr-defined]
        grad_sinks_H = None
        if sinks_H is not None:
            along_HT = (grad_out_THD * out_THD).sum(-1, dtype=lse_HT.dtype).T
            weight_HT = (sinks_H.to(lse_HT.dtype)[:, None] - lse_HT).exp()
            grad_sinks_H = -(weight_HT * along_HT).sum(1).to(sinks_H.dtype)
        return (*gradients, grad_sinks_H, None, None)


def merged(
    out_THD: Tensor, lse_HT: Tensor, prefix_out_THD: Tensor, prefix_lse_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the softmax over both sets of keys, and its log-sum-exps.

    The kernel gives +inf for rows without keys.  Sums are float32, and rounded once.
    """
    prefix_lse_HT = prefix_lse_HT.nan_to_num(nan=torch.nan, posinf=-torch.inf)
    union_HT = torch.logaddexp(lse_HT, prefix_lse_HT)
    own_TH1 = (lse_HT - union_HT).exp().T[..., None]
    prefix_TH1 = (prefix_lse_HT - union_HT).exp().T[..., None]
    return (out_THD * own_TH1 + prefix_out_THD * prefix_TH1).to(out_THD.dtype), union_HT
