"""Attention of packed streams on a CUDA device: which kernel attends, and what it reads of the
stream on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.ops.cuda.flex_attention import flex_attend, flex_block_mask
from groupwise.ops.cuda.varlen_attention import (
    SequenceEnds,
    flash_takes,
    varlen_attention,
    varlen_call,
)
from groupwise.ops.operations import AttentionCall
from groupwise.ops.query import EVERYTHING, PackedStream, Query, Reach
from groupwise.records import Layout


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStream:
    """What the kernels read of a packed stream."""

    ends: SequenceEnds
    blocks: dict[Reach, Any] = field(default_factory=dict)
    """FlexAttention's block masks, made when the first layer asks for one."""


def prepare_stream(layout: Layout, device: torch.device | str) -> DeviceStream:
    """Make the lists of sequences that flash attention reads, and copy them to the device.

    The copy is one, of pinned memory, so that the host does not wait for it.
    """
    return DeviceStream(SequenceEnds.of(layout).to(device))


def flash_call(stream: PackedStream, query: Query) -> AttentionCall:
    """Return the call of flash attention, which takes the query.

    Raises ConfigError for a query that it does not take.
    """
    if query.reach.within(stream.longest) != EVERYTHING or not flash_takes(query):
        raise ConfigError(
            "compiled blocks attend by flash attention, which takes no window, no soft cap and no"
            f" {query.query_THD.dtype}; set model.compile to off"
        )
    return varlen_call(query, _prepared(stream, query).ends)


def _prepared(stream: PackedStream, query: Query) -> DeviceStream:
    """Return what the kernels read of a stream, which is made once."""
    if stream.prepared is None:
        stream.prepared = prepare_stream(stream.layout, query.query_THD.device)
    return stream.prepared


def attend(stream: PackedStream, query: Query) -> Tensor:
    """Attend in a packed stream, (T, H, E), differentiable once."""
    prepared = _prepared(stream, query)
    reach = query.reach.within(stream.longest)
    if reach == EVERYTHING and flash_takes(query):
        return varlen_attention(query, prepared.ends)
    if reach not in prepared.blocks:
        prepared.blocks[reach] = flex_block_mask(stream.layout, query.query_THD.device, reach)
    out = flex_attend(*query.heads, query.scale, query.cap, prepared.blocks[reach], query.sinks_H)
    return out.squeeze(0).transpose(0, 1)
