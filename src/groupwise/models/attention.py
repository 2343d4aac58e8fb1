"""Exact attention for packed streams whose prompts stand once per group, for unmodified Hugging
Face models.

transformers lets a model's attention be replaced by name.  Under the name `groupwise` every
attention layer hands its queries, keys and values to the object that the forward pass runs inside
of (`attending`); that object alone knows who may look at whom. It is not an argument of the forward
pass: not every family hands unknown arguments down to its layers.
Training uses `PackedAttention` below; the rollout engine brings its own, which also keep keys and
values.  No mask of P x P is ever made, no cache object is used, and positions are always given
explicitly.

T positions of the stream   H query heads   K key-value heads   D head width   E width of values
S segments
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.reach import REMEDY, reach_of
from groupwise.ops.attention import StreamAttention
from groupwise.ops.query import Query
from groupwise.ops.recurrence import Recurrence, Segments
from groupwise.records import Layout

NAME = "groupwise"


class Attend(Protocol):
    """Who may look at whom, for one forward pass."""

    @property
    def recurrent(self) -> Any:
        """What recurrent layers ask: `ops.recurrence.Recurrence`."""
        ...

    def __call__(self, query: Query) -> Tensor:
        """(T, H, E)."""
        ...

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Tokens of the sequence that each position belongs to; of a shared prompt the longest that
        begins with it.
        """
        ...


_stream: ContextVar[tuple[Attend, Tensor] | None] = ContextVar("stream", default=None)


@contextmanager
def attending(attend: Attend, position_T: Tensor) -> Iterator[None]:
    """Forward passes of packed streams run inside: their attention asks `attend`, their rotary
    embeddings for its lengths.

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
    """What transformers calls in every attention layer.  Windows are those of the model's masks
    (`ops.query.Reach`), whatever a layer says besides; nothing is dropped."""
    stream = _stream.get()
    if stream is None or attention_mask is not None:
        raise ConfigError(
            "this model runs packed streams (attention 'groupwise'), which take no attention mask; "
            "for an ordinary forward or generate use `with plain_attention(model):`"
        )
    if position_bias is not None:
        raise ConfigError(
            f"{type(module).__name__} adds a bias to its scores, which packed streams do not know;"
            f" {REMEDY}"
        )
    attend, position_T = stream
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if getattr(module, "attn_temperature_tuning", False):
        query = _tempered(module, query, position_T)
    query_THD, key_TKD, value_TKE = tokens_first(query, key, value)
    layer: Any = module.layer_idx
    return (
        attend(
            Query(layer, query_THD, key_TKD, value_TKE, scale, softcap, reach_of(module), s_aux)
        ).unsqueeze(0),
        None,
    )


def tokens_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (T, heads, D) of (1, heads, T, D), in one type.

    Under autocast rotary embeddings leave queries and keys in float32 while values are in bfloat16;
    a kernel takes one type.
    """
    if torch.is_autocast_enabled(query.device.type):
        value = value.to(torch.get_autocast_dtype(query.device.type))
    query, key = query.to(value.dtype), key.to(value.dtype)
    return (
        query.squeeze(0).transpose(0, 1),
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
    )


def _tempered(module: Any, query: Tensor, position_T: Tensor) -> Tensor:
    """Llama 4's layers without rotary embeddings scale a query by its place in the stream; here by
    its place in its sequence.
    """
    if module.use_rope:
        return query

    def factor(place_T: Tensor) -> Tensor:
        return (
            torch.log1p(torch.floor((place_T.float() + 1.0) / module.floor_scale))
            * module.attn_scale
            + 1.0
        )

    right_T, wrong_T = (
        factor(position_T),
        factor(torch.arange(position_T.shape[0], device=position_T.device)),
    )
    return query * (right_T / wrong_T)[:, None].to(query.dtype)


AttentionInterface.register(NAME, packed_attention)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Have all of a model's layers run the attention of this name.

    transformers 5.17 gives the model inside of a sequence classifier a copy of its config, and sets
    the classifier's alone."""
    model.set_attn_implementation(name)
    for module in model.modules():
        if (
            isinstance(module, PreTrainedModel)
            and module.config is not model.config
            and type(module.config) is type(model.config)
        ):
            module.set_attn_implementation(name)


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The model's own attention for ordinary calls (padded batches with masks, `generate`),
    restored afterwards.
    """
    before = str(model.config._attn_implementation)
    # Every architecture has eager.  transformers' sdpa knows no soft caps; older versions leave
    # them out in silence.
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    set_attention(model, "sdpa" if model._supports_sdpa and not capped else "eager")
    try:
        yield model
    finally:
        set_attention(model, before)


class PackedAttention:
    """Causal attention inside each segment, and from each segment to the whole of its prefix:
    `ops.attention`.
    """

    def __init__(self, layout: Layout, prepared: Any = None) -> None:
        """prepared: what was made of the layout with the batch (`Batch.prepared`)."""
        self.layout = layout
        self.attention = StreamAttention(layout, prepared)

    @cached_property
    def recurrent(self) -> Recurrence:
        """States and convolutions of the same segments."""
        return Recurrence(Segments.of(self.layout))

    def __call__(self, query: Query) -> Tensor:
        """See `Attend`."""
        return self.attention(query)

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """Longest sequence that each position belongs to: its segment and the prompt before it
        (T,).
        """
        layout, longest = self.layout, list(self.layout.length)
        for s, prefix in enumerate(layout.prefix):
            if prefix >= 0:
                longest[s] += layout.length[prefix]
                longest[prefix] = max(longest[prefix], longest[s])
        filler = layout.total - sum(layout.length)
        counts = torch.tensor([*layout.length, filler], device=position_T.device)
        return torch.tensor([*longest, 1], device=position_T.device).repeat_interleave(counts)
