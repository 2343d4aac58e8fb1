"""Recurrent layers in packed streams, for unmodified Hugging Face models: gated DeltaNet, Mamba-2,
short convolutions.

transformers' recurrent layers make their steps by functions of their modeling files, which have the
same names in every family (`OPERATIONS`).  There `use_packed_recurrence` puts others of the same
names.  They ask the stream that a forward pass runs inside of (`attention.attending`) for its
segments; outside of streams, and for any other model, they call transformers' own.  A layer that
calls other functions computes as if the stream were one text: the proof refuses it.

T positions of the stream   D channels   W width of a convolution   H heads   K key width
V value width
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from groupwise.models.attention import attended
from groupwise.ops.operations import operations
from groupwise.ops.recurrence import Recurrence, chunk_size

PLACE = "groupwise_place"
"""Attribute of a recurrent layer that numbers it among those of its model."""


_layer: ContextVar[list[int] | None] = ContextVar("layer", default=None)
"""The number of the layer that is computed, and how many operations it has made."""


def _here() -> tuple[Recurrence, tuple[int, int]] | None:
    """What the layer that is computed asks, and for which state; None outside of streams."""
    layer, attend = _layer.get(), attended()
    if layer is None or attend is None:
        return None
    layer[1] += 1
    return attend.recurrent, (layer[0], layer[1])


def _numbered(self: Any, *inputs: Any, **named: Any) -> Any:
    """A recurrent layer's `forward`, which knows its number."""
    before = _layer.set([vars(self)[PLACE], 0])
    try:
        return type(self).forward(self, *inputs, **named)
    finally:
        _layer.reset(before)


def _convolution(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **named: Any,
    ) -> Tensor:
        here = _here()
        if here is None:
            return plain(hidden_states, weight, bias, activation=activation, **named)
        recurrent, place = here
        silu = activation == "silu"
        y_TD = recurrent.convolve(
            place, hidden_states[0].T.to(weight.dtype), weight, bias, silu=silu
        )
        if activation is not None and not silu:
            y_TD = ACT2FN[activation](y_TD)
        return y_TD.T[None].to(hidden_states.dtype)

    return causal_conv1d_fn


def _delta_rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **named: Any,
    ) -> tuple[Tensor, None]:
        here = _here()
        if here is None:
            return plain(
                query,
                key,
                value,
                g=g,
                beta=beta,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **named,
            )
        columns = (query[0], key[0], value[0], g[0], beta[0])
        return delta_rule(*here, *columns, unit=use_qk_l2norm_in_kernel)[None].to(value.dtype), None

    return chunk_gated_delta_rule


def delta_rule(
    recurrent: Recurrence,
    place: tuple[int, int],
    query_TJK: Tensor,
    key_TJK: Tensor,
    value_THV: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    *,
    unit: bool = True,
) -> Tensor:
    """The gated delta rule as transformers scales it: J heads of queries and keys, each of which
    serves as many of the H of values.

    unit: queries and keys are divided by their lengths.
    """
    wide = torch.promote_types(query_TJK.dtype, torch.float32)
    width = query_TJK.shape[-1]

    def scaled(x: Tensor, scale: float) -> Tensor:
        x = x.to(wide)
        if unit:
            weight_W = x.new_full((width,), scale * width**-0.5)
            x = operations().rms_norm(x, weight_W, 1e-6 / width, wide)
        elif scale != 1.0:
            x = x * scale
        return x

    query, key = scaled(query_TJK, width**-0.5), scaled(key_TJK, 1.0)
    return recurrent.rule(place, query, key, value_THV, decay_TH, beta_TH)


def _scan(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **named: Any,
    ) -> Any:
        here = _here()
        if here is None:
            named |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return plain(hidden_states, dt, A, B, C, chunk_size, **named)
        recurrent, place = here
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        step_TH = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0]
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        x_THV, step_TH = hidden_states[0].to(wide), step_TH.to(wide)
        query, key = C[0].to(wide), B[0].to(wide)
        out = recurrent.rule(place, query, key, x_THV * step_TH[..., None], A.to(wide) * step_TH)
        return (out if D is None else out + D[:, None] * x_THV)[None]

    return mamba2_chunk_scan


def _fused_block(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def mamba2_split_conv1d_scan_combined(*inputs: Any, **named: Any) -> Any:
        """None: the layer then makes its steps one by one."""
        return plain(*inputs, **named) if _layer.get() is None or attended() is None else None

    return mamba2_split_conv1d_scan_combined


OPERATIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _fused_block,
}
"""Functions of transformers' modeling files, and what stands in their place in a stream."""


UNFOLLOWED = frozenset({"mamba_selective_scan", "chunk_kimi_delta_attention"})
"""Functions of transformers' modeling files that pass states on, and have nothing in their place:
those of Mamba-1, and of Kimi Delta Attention."""


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The modules whose forward pass calls one of the operations."""
    return [module for module in model.modules() if _calls(type(module))]


def unfollowed_layers(model: nn.Module) -> list[nn.Module]:
    """The modules, towers excepted, that pass states or inputs on by other functions: those that
    are known, and convolutions over positions.
    """
    layers = []
    for module in model.modules():
        convolved = any(isinstance(child, nn.Conv1d) for child in module.children())
        other = convolved and not _calls(type(module))
        if _names(type(module)) & UNFOLLOWED:
            other = True
        if other and any(parameter.requires_grad for parameter in module.parameters()):
            layers.append(module)
    return layers


def _calls(kind: type) -> frozenset[str]:
    """Names of operations that a class's forward pass calls, its parents' included."""
    return _names(kind) & OPERATIONS.keys()


@cache
def _names(kind: type) -> frozenset[str]:
    """Names that a class's forward pass reads, its parents' included."""
    names = set[str]()
    for parent in kind.__mro__:
        if "forward" in vars(parent):
            code = getattr(inspect.unwrap(vars(parent)["forward"]), "__code__", None)
            if code is not None:
                names.update(code.co_names)
    return frozenset(names)


def is_numbered(module: nn.Module) -> bool:
    """True if the module's `forward` is its class's, but for the number that
    `use_packed_recurrence` has given it.
    """
    return getattr(vars(module).get("forward"), "__func__", None) is _numbered


def use_packed_recurrence(model: nn.Module) -> None:
    """Let the recurrent layers of a model follow the segments of packed streams."""
    for place, module in enumerate(recurrent_layers(model)):
        for parent in type(module).__mro__:
            file = sys.modules.get(parent.__module__)
            for name in _calls(type(module)):
                plain = getattr(file, name, None)
                if plain is not None and not hasattr(plain, PLACE):
                    ours = OPERATIONS[name](plain)
                    setattr(ours, PLACE, None)
                    setattr(file, name, ours)
        setattr(module, PLACE, place)
        if "forward" not in vars(module):
            module.forward = MethodType(_numbered, module)


def changes(model: nn.Module) -> set[int]:
    """Lengths at which the recurrent layers of a model compute otherwise: the widths of their
    convolutions, and of chunks.
    """
    layers = recurrent_layers(model)
    widths = {
        child.kernel_size[0]
        for layer in layers
        for child in layer.modules()
        if isinstance(child, nn.Conv1d)
    }
    chunked = any(_calls(type(layer)) - {"causal_conv1d_fn"} for layer in layers)
    return widths | {chunk_size(next(model.parameters()).device)} if chunked else widths
