"""The blocks of a model as torch.compile makes them: an alternative to the forms of
`models/fused.py`, where the host's time decides.

A block is one graph, without breaks and for streams of any length.  Its attention is one operation
(`ops.stream_operation`), whose forward and backward passes are those of uncompiled blocks.
Embedding, last norm and head stay as they are elsewhere.  Sampling and the model's own pass run no
compiled block.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from groupwise.models.attention import (
    NAME,
    PackedAttention,
    attended,
    packed_attention,
    tokens_first,
)
from groupwise.models.backbone import can_recompute, layers, replaced_forwards
from groupwise.models.moe import router_coefficient
from groupwise.models.policy import Policy
from groupwise.models.quantized import quantized_layers
from groupwise.models.reach import reach_of
from groupwise.models.recurrence import is_numbered
from groupwise.ops import stream_operation
from groupwise.ops.operations import operations
from groupwise.ops.query import EVERYTHING
from groupwise.ops.stream_operation import StreamNumbers, numbered_streams

MOST_GRAPHS = 64
"""Graphs of a block: one for each type, with gradients and without, with an adapter on and off, for
a first block whose input has no gradient, and for each kind of block."""
COMPILER = "clang++" if sys.platform == "darwin" else "g++"
"""The C++ compiler that torch.compile calls on a CPU where `CXX` names none."""


class CompiledBlocks:
    """Runs the blocks of models in packed passes, compiled when they are first called."""

    def __init__(self, backend: str = "inductor") -> None:
        config: Any = torch._dynamo.config  # type: ignore[attr-defined]
        config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
        AttentionInterface.register(NAME, attention)
        self.run = torch.compile(_run_block, fullgraph=True, dynamic=True, backend=backend)

    @contextmanager
    def fused_modules(self, policy: Policy) -> Iterator[None]:
        """Run a policy's blocks compiled while inside, and what lies outside of them fused.

        Backward passes must be inside too.
        """
        blocks = layers(policy)
        inside = set[nn.Module]()
        for block in blocks:
            inside.update(block.modules())
        fused = operations().fused_modules(policy.model, keep=not policy.sharded, apart=inside)
        with fused, numbered_streams() as numbers:
            forwards = dict[nn.Module, Callable[..., Any]]()
            for block in blocks:
                forwards[block] = self._forward(block, numbers)
            with replaced_forwards(forwards):
                yield

    def _forward(self, block: Any, numbers: StreamNumbers) -> Callable[..., Any]:
        """Return a block's `forward`; computed again in a backward pass if the one before was."""
        compiled = partial(self._run, block, numbers)
        forward = block.forward
        if isinstance(forward, partial):  # `backbone.checkpointing`
            return partial(forward.func, compiled)
        return compiled

    def _run(self, block: Any, numbers: StreamNumbers, *inputs: Any, **named: Any) -> Any:
        """Run a block in the stream of its pass."""
        attend = attended()
        if not isinstance(attend, PackedAttention) or not _takes(inputs[0]):
            return type(block).forward(block, *inputs, **named)
        return self.run(block, numbers.of(attend.attention), *inputs, **named)


def _run_block(block: Any, number: Tensor, *inputs: Any, **named: Any) -> Any:
    """Run a block; what torch.compile sees."""
    return type(block).forward(block, *inputs, stream_number=number, **named)


def _takes(hidden_states: Tensor) -> bool:
    """True if compiled blocks compute states of this type: on a GPU those of flash attention."""
    if hidden_states.device.type != "cuda":
        return True
    return hidden_states.dtype != torch.float32 or torch.is_autocast_enabled("cuda")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    stream_number: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as `packed_attention` does; inside a compiled block by one operation.

    stream_number: what a compiled block hands down to its attention.
    """
    if stream_number is None:
        columns = query, key, value, attention_mask, scaling, softcap
        return packed_attention(module, *columns, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reach = reach_of(module)
    width = value.shape[-1]
    wide = max(query.shape[-1], width)
    heads = []
    for x in tokens_first(query, key, value):
        if x.shape[-1] < wide:
            x = F.pad(x, (0, wide - x.shape[-1]))
        heads.append(x.contiguous())  # written so by what computes it
    out_THD, _ = stream_operation.packed_attention(
        *heads, stream_number, scale, softcap, reach.window, reach.chunk
    )
    return out_THD[..., :width].unsqueeze(0), None


def refusal_of(policy: Policy) -> str | None:
    """Return why a policy's blocks cannot be compiled, as far as it is known before it is tried."""
    model = policy.model
    if policy.sharded or policy.context_group is not None:
        return "weights or streams are spread over processes (parallel), which gather inside blocks"
    if policy.attention == "single":
        return "model.attention is 'single', which runs no packed streams"
    if policy.vision is not None:
        return "the model reads images"
    if quantized_layers(model):
        return "the base is quantised (model.quantize), and its weights are unpacked inside blocks"
    if router_coefficient(policy) > 0.0:
        return "the loss that balances experts reads what routers say inside blocks"
    if not can_recompute(policy):
        return f"{type(model).__name__} shows no blocks"
    for module in model.modules():
        reason = _refusal_of_module(module, policy)
        if reason is not None:
            return reason
    return _without_tools(policy.device)


def _refusal_of_module(module: nn.Module, policy: Policy) -> str | None:
    """Return why a block with such a module cannot be compiled."""
    if is_numbered(module):
        return "recurrent layers of hybrid models read states of the stream inside blocks"
    if getattr(module, "attn_temperature_tuning", False):
        return "attention scales queries by their position in the stream"
    if hasattr(module, "sinks"):
        return "attention has sinks, which the compiled operation does not know"
    for dropout in getattr(module, "lora_dropout", {}).values():
        if type(dropout) is not nn.Identity:
            return "the adapter has dropout (lora.dropout), which is drawn by sequence"
    if policy.device.type != "cuda" or not hasattr(module, "layer_idx"):
        return None
    capped = getattr(module, "attn_logit_softcapping", None) is not None
    if capped or reach_of(module) != EVERYTHING:
        return "windows, chunks and soft caps run by FlexAttention, which is compiled by itself"
    if policy.dtype == torch.float32 and not policy.autocast:
        return "model.dtype float32 runs by FlexAttention, which is compiled by itself"
    return None


def _without_tools(device: torch.device) -> str | None:
    """Return what torch.compile lacks here."""
    if device.type == "cuda":
        if find_spec("triton") is None:
            return "torch.compile needs Triton on a GPU, which is not installed"
        return None
    compiler = os.environ.get("CXX", COMPILER)
    if shutil.which(compiler) is not None:
        return None
    return (
        f"torch.compile needs a C++ compiler on a CPU, and {compiler!r} was not found (install it,"
        " or set CXX to the path of another)"
    )
