"""Switches a model to packed streams: reads what a query of each attention layer sees from the
masks that transformers itself builds, and replaces the attention.

A model's window stands in its config, in its attention modules or in neither, but the mask of its
own forward pass always knows it. `note_reach` runs that forward pass once, over two tokens, with an
implementation of attention that gets no mask but the rule that the mask would be made by, and notes
on every attention module what the rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.attention import NAME, set_attention
from groupwise.models.output_head import backbone_of
from groupwise.models.reach import ATTRIBUTE, REMEDY
from groupwise.ops.query import Reach

TRACE = "groupwise_trace"
"""Name of the implementation of attention that only looks at the rules of masks."""


class Rule:
    """What an attention layer is given in place of a mask while the model is traced."""

    def __init__(self, reach: Reach | None) -> None:
        self.reach = reach

    def __getitem__(self, _: Any) -> Rule:
        return self

    def to(self, *_: Any, **__: Any) -> Rule:
        """Itself, whatever type or device a mask would be moved to."""
        return self


def _rule(mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Rule:
    """What transformers calls instead of building a mask."""
    kinds = (
        [Reach()]
        if local_size is None
        else [Reach(window=int(local_size)), Reach(chunk=int(local_size)), Reach()]
    )
    sizes = [1 << k for k in range(2, 18)] + [
        int(local_size or 1) * n // 2 for n in (1, 2, 3, 4, 6)
    ]
    near = sorted({max(size + step, 0) for size in [0, 63, *sizes] for step in (-1, 0, 1, 2)})
    query_Q, back_K = torch.tensor(near)[:, None], torch.tensor([-2, *near])[None]
    key_QK = (query_Q - back_K).clamp(min=0)  # some of them ahead
    zero = torch.zeros((), dtype=torch.int64)
    seen_QK = mask_function(zero, zero, query_Q, key_QK).expand(key_QK.shape)
    for kind in kinds:
        if bool(((key_QK <= query_Q) & (key_QK >= kind.first(query_Q))).eq(seen_QK).all()):
            return Rule(kind)
    return Rule(None)


_seen: dict[nn.Module, Rule | None] = {}


def _trace(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
) -> tuple[Tensor, None]:
    _seen[module] = attention_mask
    return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(TRACE, _trace)
AttentionMaskInterface.register(TRACE, _rule)


@torch.no_grad()
def note_reach(
    model: PreTrainedModel,
    *,
    backbone: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> None:
    """Read what each attention module sees, and write it to the module.  Raises ConfigError.

    backbone, device: what runs the model's backbone, and where, of a sharded model.
    """
    run, device = backbone or backbone_of(model), device or model.device
    name, tokens = type(model).__name__, torch.zeros(1, 2, dtype=torch.int64, device=device)
    with _tracing(model):
        try:
            run(
                input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False
            )
        except Exception as error:  # a model's own code, which has met something else than a mask
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{name} cannot be asked what its attention sees ({reason}); {REMEDY}"
            ) from error
        rules = dict(_seen)
    if not rules:
        raise ConfigError(f"{name} does not let its attention be replaced; {REMEDY}")
    for module, rule in rules.items():
        if isinstance(rule, Tensor):
            raise ConfigError(f"{name} builds the masks of its attention itself; {REMEDY}")
        if rule is not None and rule.reach is None:
            raise ConfigError(
                f"{name} has attention masks that are neither causal, nor a window, nor chunks;"
                f" {REMEDY}"
            )
        setattr(module, ATTRIBUTE, Reach() if rule is None else rule.reach)


@contextmanager
def _tracing(model: PreTrainedModel) -> Iterator[None]:
    before = str(model.config._attn_implementation)
    set_attention(model, TRACE)
    _seen.clear()
    try:
        yield
    finally:
        _seen.clear()
        set_attention(model, before)


def use_packed_attention(
    model: PreTrainedModel,
    *,
    backbone: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> None:
    """Switch a model to packed streams.  Raises ConfigError for a model whose attention cannot be
    replaced.

    backbone, device: see `note_reach`.
    """
    try:
        note_reach(model, backbone=backbone, device=device)
        set_attention(model, NAME)
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(model).__name__} does not let its attention be replaced ({error}); {REMEDY}"
        ) from error
