"""Exact attention for packed streams whose prompts stand once per group, for unmodified Hugging Face models.

transformers lets a model's attention be replaced by name.  Under the name `groupwise` every attention layer hands its queries,
keys and values to the object that the forward pass runs inside of (`attending`); that object alone knows who may look at whom.
It is not an argument of the forward pass: not every family hands unknown arguments down to its layers.
Training uses `PackedAttention` below; the rollout engine brings its own, which also keep keys and values.  No mask of P x P is
ever made, no cache object is used, and positions are always given explicitly.

T positions of the stream   H query heads   K key-value heads   D head width   S segments
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.masks import REMEDY, Reach, note_reach, reach_of
from groupwise.ops.attention import StreamAttention
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

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Tokens of the sequence that each position belongs to; of a shared prompt the longest that begins with it."""
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
    """What transformers calls in every attention layer.  Windows are those of the model's masks (`masks.Reach`), whatever a layer
    says besides; nothing is dropped."""
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


def use_packed_attention(
    model: PreTrainedModel, *, backbone: Callable[..., Any] | None = None, device: torch.device | None = None
) -> None:
    """Switch a model to packed streams.  Raises ConfigError for a model whose attention cannot be replaced.

    backbone, device: see `note_reach`.
    """
    try:
        note_reach(model, backbone=backbone, device=device)
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
    """Causal attention inside each segment, and from each segment to the whole of its prefix: `ops.attention`.

    Soft caps, windows and chunks shorter than the sequence, sinks, and values of another width take the explicit form.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.attention = StreamAttention(layout)
        self.longest = self.attention.longest

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
            return explicit_attention(self.layout, query, key, value, scale, softcap, window, chunk, sinks_H, form=quick_attention)
        return self.attention(query, key, value, scale)

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Longest sequence that each position belongs to: its segment and the prompt before it (T,)."""
        layout, longest = self.layout, list(self.layout.length)
        for s, prefix in enumerate(layout.prefix):
            if prefix >= 0:
                longest[s] += layout.length[prefix]
                longest[prefix] = max(longest[prefix], longest[s])
        filler = layout.total - sum(layout.length)
        counts = torch.tensor([*layout.length, filler], device=position_T.device)
        return torch.tensor([*longest, 1], device=position_T.device).repeat_interleave(counts)


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
    form: Callable[..., Tensor] | None = None,
) -> Tensor:
    """The definition, one segment at a time: scores, soft cap, causal mask and window, softmax.  Any device, any autograd.

    The plain version that the fast paths are tested against, and the only one that knows soft caps, windows, chunks, sinks, and
    values of another width than keys.   form: `quick_attention` in the place of `last_attention`.
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
        outputs.append((form or last_attention)(query[0, :, a:b], keys, values, scale, softcap, Reach(window, chunk), sinks_H))
    filler = layout.total - (layout.start[-1] + layout.length[-1] if layout.segments else 0)
    outputs.append(query.new_zeros(heads, filler, value.shape[-1]))
    return torch.cat(outputs, 1).transpose(0, 1)[None].contiguous()


ROWS = 256
"""Queries of a long text that are computed at a time, with those keys alone that one of them sees."""


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
    wide, outputs = torch.promote_types(query_HQD.dtype, torch.float32), []
    for rows, keys in _blocks(queries, places, reach):
        scores = query_HQD[:, rows] @ key_HTD[:, keys].transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~_seen(rows, keys, places - queries, reach, query_HQD.device), -torch.inf)
        if sinks_H is not None:
            scores = torch.cat([scores, sinks_H.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weight_HQT = scores.softmax(-1, dtype=wide)[..., : keys.stop - keys.start].to(value_HTE.dtype)
        outputs.append(weight_HQT @ value_HTE[:, keys])
    return torch.cat(outputs, 1)


def quick_attention(
    query_HQD: Tensor,
    key_HTD: Tensor,
    value_HTE: Tensor,
    scale: float,
    softcap: float | None = None,
    reach: Reach = Reach(),  # noqa: B008  (frozen)
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`last_attention` by torch's kernels, whose scores are in float32 whatever the queries are; they know no cap and no sinks."""
    if softcap is not None or sinks_H is not None:
        return last_attention(query_HQD, key_HTD, value_HTE, scale, softcap, reach, sinks_H)
    queries, places, outputs = query_HQD.shape[1], key_HTD.shape[1], []
    for rows, keys in _blocks(queries, places, reach):
        heads = query_HQD[None, :, rows], key_HTD[None, :, keys], value_HTE[None, :, keys]
        seen_QT = _seen(rows, keys, places - queries, reach, query_HQD.device)
        outputs.append(F.scaled_dot_product_attention(*heads, attn_mask=seen_QT, scale=scale)[0])
    return torch.cat(outputs, 1)


def _blocks(queries: int, places: int, reach: Reach) -> list[tuple[slice, slice]]:
    """Some of the last `queries` of `places` positions, and the positions between the first and the last that one of them sees."""
    ends, before = [(a, min(a + ROWS, queries)) for a in range(0, queries, ROWS)], places - queries
    return [(slice(a, b), slice(max(int(reach.first(before + a)), 0), before + b)) for a, b in ends]


def _seen(rows: slice, keys: slice, before: int, reach: Reach, device: torch.device) -> Tensor:
    """bool: which of a block's keys each of its queries sees; the first query of all is at position `before`."""
    place_Q = torch.arange(before + rows.start, before + rows.stop, device=device)
    place_T = torch.arange(keys.start, keys.stop, device=device)
    seen_QT = place_T[None] <= place_Q[:, None]
    return seen_QT if reach == Reach() else seen_QT & (place_T[None] >= reach.first(place_Q)[:, None])  # type: ignore[index]
