"""Exact attention for packed streams whose prompts stand once per group, for unmodified Hugging Face models.

transformers lets a model's attention be replaced by name.  Under the name `groupwise` every attention layer hands its queries,
keys and values to the object that the forward pass runs inside of (`attending`); that object alone knows who may look at whom.
It is not an argument of the forward pass: not every family hands unknown arguments down to its layers.
Training uses `PackedAttention` below; the rollout engine brings its own, which also keep keys and values.  No mask of P x P is
ever made, no cache object is used, and positions are always given explicitly.

T positions of the stream   H query heads   K key-value heads   D head width   S segments
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.masks import REMEDY, Reach, note_reach, reach_of
from groupwise.ops.autograd import first_derivative
from groupwise.ops.cpu import kernels
from groupwise.ops.functional import again
from groupwise.records import Layout

NAME = "groupwise"


class Attend(Protocol):
    """Who may look at whom, for one forward pass."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
        chunk: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Queries (1, H, T, D), keys (1, K, T, D), rotated already, and values (1, K, T, E) -> outputs (1, T, H, E).

        window, chunk: see `masks.Reach`.   sinks_H: score of a key beside all others, which has no value (gpt-oss).
        """
        ...


_stream: ContextVar[tuple[Attend, Tensor] | None] = ContextVar("stream", default=None)


@contextmanager
def attending(attend: Attend, position_T: Tensor) -> Iterator[None]:
    """Forward passes of packed streams run inside: their attention asks `attend`, their rotary embeddings for its lengths.

    position_T: of each token in its own sequence.
    """
    before = _stream.set((attend, position_T))
    try:
        yield
    finally:
        _stream.reset(before)


def attended() -> Attend | None:
    """What a forward pass runs inside of; None in an ordinary one."""
    stream = _stream.get()
    return None if stream is None else stream[0]


def recomputation() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch's checkpoint for blocks of packed streams."""
    return again(_stream)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer.  Dropout is left out on purpose: the policy that is scored is the
    policy that sampled.  Windows are those of the model's masks (`masks.Reach`), whatever a layer says besides."""
    stream = _stream.get()
    if stream is None or attention_mask is not None:
        raise ConfigError(
            "this model runs packed streams (attention 'groupwise'), which take no attention mask; "
            "for an ordinary forward or generate use `with plain_attention(model):`"
        )
    if position_bias is not None:
        raise ConfigError(f"{type(module).__name__} adds a bias to its scores, which packed streams do not know; {REMEDY}")
    attend, position_T = stream
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "attn_temperature_tuning", False):
        query = _tempered(module, query, position_T)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings leave queries and keys in float32 while values are in bfloat16; a kernel takes one type.
        lower = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(lower), key.to(lower), value.to(lower)
    reach, layer = reach_of(module), module.layer_idx
    if s_aux is None and reach.chunk is None:
        return attend(layer, query, key, value, scale, softcap, reach.window), None  # type: ignore[arg-type]
    return attend(layer, query, key, value, scale, softcap, reach.window, reach.chunk, s_aux), None  # type: ignore[arg-type]


def _tempered(module: Any, query: Tensor, position_T: Tensor) -> Tensor:
    """Llama 4's layers without rotary embeddings scale a query by its place in the stream; here by its place in its sequence."""
    if module.use_rope:
        return query

    def factor(place_T: Tensor) -> Tensor:
        return torch.log1p(torch.floor((place_T.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    right_T, wrong_T = factor(position_T), factor(torch.arange(position_T.shape[0], device=position_T.device))
    return query * (right_T / wrong_T)[:, None].to(query.dtype)


AttentionInterface.register(NAME, packed_attention)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch a model to packed streams.  Raises ConfigError for a model whose attention cannot be replaced."""
    try:
        note_reach(model)
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"{type(model).__name__} does not let its attention be replaced ({error}); {REMEDY}") from error


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model's own attention for ordinary calls (padded batches with masks, `generate`), restored afterwards."""
    before = str(model.config._attn_implementation)
    # eager is the one implementation that every architecture has and that knows soft caps and windows.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


class PackedAttention:
    """Causal attention inside each segment, and from each segment to the whole of its prefix.

    On a CPU: the compiled kernel; without one torch's flash kernel once per stretch of the stream, merged by log-sum-exp.  In both
    a prompt's keys are read once for all its completions and never copied.  On CUDA: FlexAttention with a block mask.  Soft caps,
    windows and chunks shorter than the sequence, sinks, and values of another width take the explicit form.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.families = tuple(_families(layout))
        before = [layout.length[prefix] if prefix >= 0 else 0 for prefix in layout.prefix]
        self.longest = max((own + prefix for own, prefix in zip(layout.length, before, strict=True)), default=0)
        self.stretches = kernels.Families([family.stretches for family in self.families])
        self._flex: Any = None

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float | None,
        window: int | None,
        chunk: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if window is not None and window >= self.longest:
            window = None
        if chunk is not None and chunk >= self.longest:
            chunk = None
        same = query.shape[-1] == value.shape[-1]
        if softcap is not None or window is not None or chunk is not None or sinks_H is not None or not same:
            return explicit_attention(self.layout, query, key, value, scale, softcap, window, chunk, sinks_H)
        if query.is_cuda:
            return self._flex_attention(query, key, value, scale)
        if kernels.worth_attention(self.longest, query, key, value):
            return _Compiled.apply(query, key, value, self.stretches, scale)  # type: ignore[return-value]
        return _Shared.apply(query, key, value, self.families, scale)  # type: ignore[return-value]

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Tokens of the sequence that each position belongs to; of a shared prompt the longest that begins with it."""
        layout, longest = self.layout, list(self.layout.length)
        for s, prefix in enumerate(layout.prefix):
            if prefix >= 0:
                longest[s] += layout.length[prefix]
                longest[prefix] = max(longest[prefix], longest[s])
        filler = layout.total - sum(layout.length)
        counts = torch.tensor([*layout.length, filler], device=position_T.device)
        return torch.tensor([*longest, 1], device=position_T.device).repeat_interleave(counts)

    def _flex_attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if self._flex is None:
            self._flex = flex_block_mask(self.layout, query.device)
        attend = _compiled_flex() if query.is_cuda else _plain_flex()
        out = attend(query, key, value, block_mask=self._flex, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        return out.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Family:
    """A prefix and its members, one behind the other in the stream; or a single segment."""

    causal: tuple[tuple[int, int], ...]
    """Stretches (from, to) that look at themselves alone.  A prefix and its first member are one: a text as it was written."""
    prefix: tuple[int, int]
    rest: tuple[int, int]
    """The other members, which look at the prefix too."""

    @property
    def stretches(self) -> list[tuple[int, int, int, int]]:
        """(from, to, prefix from, prefix to), member by member."""
        (first, *others), prefix = self.causal, self.prefix
        return [(*first, 0, 0), *((*other, *prefix) for other in others)]


def _families(layout: Layout) -> Iterator[Family]:
    ends = [start + length for start, length in zip(layout.start, layout.length, strict=True)]
    s = 0
    while s < layout.segments:
        last = s + 1
        while last < layout.segments and layout.prefix[last] == s:
            last += 1
        first = min(s + 1, last - 1)
        others = range(first + 1, last)
        yield Family(
            causal=((layout.start[s], ends[first]), *((layout.start[c], ends[c]) for c in others)),
            prefix=(layout.start[s], ends[s]),
            rest=(ends[first], ends[last - 1]),
        )
        s = last


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLOAT_KEYS = 384
"""Over fewer keys the backward kernel is 2 to 5 times faster in float32 than in bfloat16, conversions included."""


class _Compiled(torch.autograd.Function):
    """By the compiled kernel (kernels/attention.cpp): all stretches in one call, with the arithmetic of `_Shared`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: kernels.Families, scale: float) -> Tensor:
        out, lse = kernels.attention(query, key, value, families, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.families, ctx.scale = families, scale
        return out.transpose(1, 2)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grads[0].transpose(1, 2)
        if grad_out.stride(-1) != 1 or grad_out.dtype != query.dtype:
            grad_out = grad_out.to(query.dtype).contiguous()
        return *kernels.attention_backward(grad_out, query, key, value, out, lse, ctx.families, ctx.scale), None, None


class _Shared(torch.autograd.Function):
    """Flash attention by stretches.

    A member's attention is over two sets of keys, its prefix and itself.  Softmax over their union follows from the two
    partial results and their log-sum-exps (as in ring attention); the backward pass needs only the union's output and
    log-sum-exp, because p = exp(score - logsumexp) and rowsum(dO * O) are the same for every key set.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, families: tuple[Family, ...], scale: float) -> Tensor:
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)
        lse = torch.zeros(query.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
        for family in families:
            for a, b in family.causal:
                out[:, :, a:b], lse[:, :, a:b] = _flash(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], 0.0, True, scale=scale)
            (p0, p1), (a, b) = family.prefix, family.rest
            if b > a:
                over_prefix, lse_prefix = _flash(query[:, :, a:b], key[:, :, p0:p1], value[:, :, p0:p1], 0.0, False, scale=scale)
                lse_own = lse[:, :, a:b]
                lse_union = torch.logaddexp(lse_own, lse_prefix)
                out[:, :, a:b] = (
                    out[:, :, a:b] * (lse_own - lse_union).exp()[..., None]
                    + over_prefix * (lse_prefix - lse_union).exp()[..., None]
                ).to(out.dtype)
                lse[:, :, a:b] = lse_union
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.families, ctx.scale = families, scale
        return out.transpose(1, 2)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grads[0].transpose(1, 2)
        # Sums of several stretches, in float32 whatever the products are in.
        sums = torch.promote_types(query.dtype, torch.float32)
        grad_query, grad_key, grad_value = (torch.empty_like(tensor, dtype=sums) for tensor in (query, key, value))

        def back(a: int, b: int, k0: int, k1: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            tensors = (grad_out[:, :, a:b], query[:, :, a:b], key[:, :, k0:k1], value[:, :, k0:k1], out[:, :, a:b])
            if k1 - k0 <= FLOAT_KEYS:
                tensors = tuple(tensor.to(sums) for tensor in tensors)
            return _flash_backward(*tensors, lse[:, :, a:b], 0.0, causal, scale=ctx.scale)

        end = 0
        for family in ctx.families:
            for a, b in family.causal:
                grad_query[:, :, a:b], grad_key[:, :, a:b], grad_value[:, :, a:b] = back(a, b, a, b, True)
                end = b
            (p0, p1), (a, b) = family.prefix, family.rest
            if b > a:
                over_query, over_key, over_value = back(a, b, p0, p1, False)
                grad_query[:, :, a:b] += over_query
                grad_key[:, :, p0:p1] += over_key
                grad_value[:, :, p0:p1] += over_value
        found = (grad_query, grad_key, grad_value)
        for grad in found:
            grad[:, :, end:] = 0.0  # filler
        return *(grad.to(query.dtype) for grad in found), None, None


def explicit_attention(
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    chunk: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The definition, one segment at a time: scores, soft cap, causal mask and window, softmax.  Any device, any autograd.

    The plain version that the fast paths are tested against, and the only one that knows soft caps, windows, chunks, sinks, and
    values of another width than keys.
    """
    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    outputs = []
    for s in range(layout.segments):
        a, b = layout.start[s], layout.start[s] + layout.length[s]
        p = layout.prefix[s]
        p0, p1 = (layout.start[p], layout.start[p] + layout.length[p]) if p >= 0 else (a, a)
        keys = torch.cat([key[0, :, p0:p1], key[0, :, a:b]], 1)
        values = torch.cat([value[0, :, p0:p1], value[0, :, a:b]], 1)
        outputs.append(last_attention(query[0, :, a:b], keys, values, scale, softcap, Reach(window, chunk), sinks_H))
    filler = layout.total - (layout.start[-1] + layout.length[-1] if layout.segments else 0)
    outputs.append(query.new_zeros(heads, filler, value.shape[-1]))
    return torch.cat(outputs, 1).transpose(0, 1)[None].contiguous()


def last_attention(
    query_HQD: Tensor,
    key_HTD: Tensor,
    value_HTE: Tensor,
    scale: float,
    softcap: float | None = None,
    reach: Reach = Reach(),  # noqa: B008  (frozen)
    sinks_H: Tensor | None = None,
) -> Tensor:
    """What the last Q of T positions of one sequence see of it -> (H, Q, E).  Keys and values have as many heads as queries."""
    queries, places = query_HQD.shape[1], key_HTD.shape[1]
    scores = query_HQD @ key_HTD.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~last_seen(queries, places, reach, query_HQD.device), -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.to(scores.dtype)[:, None, None].expand(-1, queries, 1)], -1)
    wide = torch.promote_types(query_HQD.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide)[..., :places].to(value_HTE.dtype) @ value_HTE


def last_seen(queries: int, places: int, reach: Reach, device: torch.device) -> Tensor:
    """bool (Q, T): which positions of a sequence each of its last Q sees."""
    place_T = torch.arange(places, device=device)
    place_Q = place_T[places - queries :]
    seen_QT = place_T[None] <= place_Q[:, None]
    return seen_QT if reach == Reach() else seen_QT & (place_T[None] >= reach.first(place_Q)[:, None])  # type: ignore[index]


FLEX_BLOCK = 128
"""Tokens to a side of FlexAttention's blocks."""


def flex_block_mask(layout: Layout, device: torch.device) -> Any:
    """FlexAttention's block mask of a layout: the same rule as `explicit_attention`, said position by position."""
    from torch.nn.attention.flex_attention import BlockMask

    segment_T = torch.full((layout.total,), -1, dtype=torch.int64)
    prefix_T = torch.full((layout.total,), -2, dtype=torch.int64)
    for s, (start, length, prefix) in enumerate(zip(layout.start, layout.length, layout.prefix, strict=True)):
        segment_T[start : start + length] = s
        prefix_T[start : start + length] = prefix if prefix >= 0 else -2
    segment_T, prefix_T = segment_T.to(device), prefix_T.to(device)

    def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Filler attends to filler before it, so that its softmax has at least one key; nothing reads it.
        own = (segment_T[q] == segment_T[k]) & (q >= k)
        return own | (prefix_T[q] == segment_T[k])

    some_QK, all_QK = blocks_seen(layout)
    # Blocks to be looked at pair by pair, and those to be taken whole: how many for each row, and which, in order.
    columns = []
    for blocks_QK in (some_QK & ~all_QK, all_QK):
        columns += [blocks_QK.sum(-1), blocks_QK.int().argsort(dim=-1, descending=True, stable=True)]
    columns = [column[None, None].to(device, torch.int32) for column in columns]
    return BlockMask.from_kv_blocks(*columns, BLOCK_SIZE=FLEX_BLOCK, mask_mod=seen, seq_lengths=(layout.total, layout.total))


def blocks_seen(layout: Layout) -> tuple[Tensor, Tensor]:
    """(Q, K) on the host: where some query of a block sees some key of another, and where all see all, without a mask of pairs."""
    end = layout.start[-1] + layout.length[-1] if layout.segments else 0
    segments = list(zip(layout.start, layout.length, layout.prefix, strict=True))
    if layout.total > end:
        segments.append((end, layout.total - end, -1))
    size = -(-layout.total // FLEX_BLOCK)
    some_QK, whole_QK = torch.zeros(size, size, dtype=torch.bool), torch.zeros(size, size, dtype=torch.int64)
    for start, length, prefix in segments:
        # A prefix that stands right before is one stretch of keys with what follows it.
        first, last = (layout.start[prefix], layout.start[prefix] + layout.length[prefix]) if prefix >= 0 else (start, start)
        for q in range(start // FLEX_BLOCK, -(-(start + length) // FLEX_BLOCK)):
            a, b = max(start, q * FLEX_BLOCK), min(start + length, (q + 1) * FLEX_BLOCK)
            for from_, to in [(first, b)] if last == start else [(first, last), (start, b)]:  # what the last of them sees
                some_QK[q, from_ // FLEX_BLOCK : -(-to // FLEX_BLOCK)] = True
            for from_, to in [(first, a + 1)] if last == start else [(first, last), (start, a + 1)]:  # what the first does
                whole_QK[q, -(-from_ // FLEX_BLOCK) : to // FLEX_BLOCK] += b - a
    return some_QK, whole_QK == FLEX_BLOCK


def _plain_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


_compiled: Any = None


def _compiled_flex() -> Any:
    """Compiled once per process; packed streams have a new length every time, hence dynamic shapes."""
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(_plain_flex(), dynamic=True)
    return _compiled
