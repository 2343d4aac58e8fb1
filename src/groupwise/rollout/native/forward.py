"""The specialised forward pass of models that `models/layers.py` describes: the same mathematics, without their modules.

Decoding a few rows through a small or medium model is bound by how fast matrices are read and by the work around the products.
Here the weights are prepared once per `generate` in the layout that few-row products run fastest in (see `ops.decoding.product`),
projections of the same input are joined, and a layer is 10 operations instead of 80 (25 without the compiled kernels).  Where
`ops.decoding` has a decoder for all of it, one call draws several tokens of all rows.
Nothing can be stale: what was prepared is dropped with the call, and prepared again when the engine's version changes.

Only what is exactly known runs here; anything else (another class, adapters, hooks, other activations) takes the modules.

T positions of a stream   D model width   H query heads   K key-value heads   W head width   V vocabulary   O, I sides of a matrix
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from groupwise.models.attention import Attend
from groupwise.models.layers import MLP, MODELS, Attention, Norm, describe, matrix_of, stack_of
from groupwise.models.masks import reach_of
from groupwise.models.policy import Policy
from groupwise.ops import decoding
from groupwise.ops.attention import Query
from groupwise.ops.decoding import Filler, Operations, PreparedLayer


class RolloutForward(Protocol):
    """A forward pass as rollouts need it: tokens in, hidden states and logits out."""

    decoder: decoding.Decoder | None
    """Draws several tokens in one call, where there is one."""

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states (T, D) of a flat stream."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits (R, V)."""
        ...


def is_known(policy: Policy) -> bool:
    """True if the policy is exactly one whose every step is known here.

    float64 is left to the modules: transformers normalises in float32 there, and to copy that would help nobody.
    """
    model, head = policy.model, policy.head
    if policy.device.type not in ("cpu", "cuda") or policy.dtype not in (torch.float32, torch.bfloat16):
        return False
    if head.scale != 1.0 or head.softcap is not None:
        return False
    if any(_altered(module, policy.dtype, policy.device) for module in model.modules()):
        return False
    return type(model) in MODELS and _as_configured(model) and stack_of(model) is not None


def _altered(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """True for a module that does more than its class says, or holds parameters of another type, on another device, or that are
    not plain tensors (sharded, quantised)."""
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return bool(hooks) or any(
        type(parameter) is not nn.Parameter or parameter.dtype != dtype or parameter.device != device
        for parameter in module._parameters.values()
        if parameter is not None
    )


NUMBERS = (
    *("eps", "variance_epsilon", "scaling", "attention_scaling", "max_norm", "sliding_window", "nf", "in_features", "out_features"),
    *("head_dim", "num_heads", "num_key_value_groups", "embed_dim", "split_size"),
)
"""What forward passes of the known families read of their modules."""


def _as_configured(model: Any) -> bool:
    """True if the model is what its class makes of its config: modules, their numbers, the shapes of parameters.

    Pruned layers are not, nor modules of other classes in place of the usual ones, nor a bias more or less.
    """
    says = model.config.to_dict()
    if model not in _CONFIGURED or _CONFIGURED[model][0] != says:
        _CONFIGURED[model] = says, _configured(model)
    return _CONFIGURED[model][1] == _described(model)


_CONFIGURED: WeakKeyDictionary[nn.Module, tuple[dict[str, Any], list[Any] | None]] = WeakKeyDictionary()
"""The configs of models, and what they make, as `_described`."""


def _configured(model: Any) -> list[Any] | None:
    """What the model's config makes, as `_described`; None if nothing."""
    config = deepcopy(model.config)
    config.pad_token_id = None  # may lie outside of what is left of an embedding, and nothing here is padded
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            return _described(type(model)(config))
    except Exception:  # a config that was changed later may make no model at all
        return None


def _described(model: nn.Module) -> list[Any]:
    """Classes and numbers of all modules, and shapes of all parameters, by name; what stands in two places, twice."""
    modules = [
        (name, type(module), [vars(module).get(key) for key in NUMBERS])
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return [*modules, *((name, parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False))]


class SpecialisedForward:
    """A `RolloutForward` of a policy that `is_known`."""

    def __init__(self, policy: Policy, positions: int) -> None:
        """The weights as they are now, for up to `positions` tokens."""
        stack = stack_of(policy.model)
        assert stack is not None
        self.embedding_VD, self.position_PD = stack.embedding_VD, stack.position_PD
        _, attention, _, mlp = stack.layers[0]
        self.heads, self.shared, self.width = attention.heads, attention.shared, attention.width
        self.dtype = torch.bfloat16 if policy.autocast else policy.dtype
        tables = [table for table in (self.embedding_VD, self.position_PD) if table is not None]
        inner = matrix_of(mlp.inputs[0])[0].shape[0]
        self.operations = Operations(tables, (self.width // 2 if attention.rotary else self.width, inner), dtype=self.dtype)
        self.activation = self.operations.gated if mlp.gated else self.operations.gelu
        self.rotary: decoding.PreparedRotary | None = None
        if stack.rotary is not None:
            place_P = torch.arange(positions, device=self.embedding_VD.device)
            cos, sin = stack.rotary(self.embedding_VD[:1], place_P[None])
            self.rotary = self.operations.rotary(cos[0], sin[0])
        self.layers = [self._layer(*parts) for parts in stack.layers]
        self.norm = self._norm(stack.norm)
        self.head = self.operations.product([policy.head.weight_VD], [policy.head.bias_V])
        self.decoder = self._decoder()

    def _layer(self, norm: Norm, attention: Attention, mlp_norm: Norm, mlp: MLP) -> PreparedLayer:
        return PreparedLayer(
            norm=self._norm(norm),
            qkv=self._product(*attention.inputs, rotated=2),
            head_norm=self._head_norm(attention),
            out=self._product(attention.output),
            mlp_norm=self._norm(mlp_norm),
            up=self._product(*mlp.inputs),
            down=self._product(mlp.output),
            scale=attention.scale,
            reach=reach_of(attention.module),
        )

    def _product(self, *linears: nn.Module, rotated: int = 0) -> Any:
        """Linear layers side by side.   rotated: so many of them give heads that are rotated, where positions are rotary."""
        weights, biases = zip(*map(matrix_of, linears), strict=True)
        if self.rotary is None:
            rotated = 0

        def reordered(columns: Any) -> list[Any]:
            return [*map(self._reordered, columns[:rotated]), *columns[rotated:]]

        return self.operations.product(reordered(weights), biases if biases[0] is None else reordered(biases))

    def _reordered(self, column: Tensor) -> Tensor:
        """Rows (O, ...) of heads in the order in which they are rotated."""
        assert self.rotary is not None
        return column.view(-1, self.width, *column.shape[1:])[:, self.rotary.order_W].flatten(0, 1)

    def _norm(self, norm: Norm) -> decoding.PreparedNorm:
        return self.operations.norm(norm.weight_D, norm.eps, norm.bias_D)

    def _head_norm(self, attention: Attention) -> decoding.PreparedNorm | None:
        if attention.head_norms is None:
            return None
        query, key = (describe(module) for module in attention.head_norms)
        assert isinstance(query, Norm) and isinstance(key, Norm)
        weight_HW = torch.cat([query.weight_D.expand(self.heads, -1), key.weight_D.expand(self.shared, -1)])
        if self.rotary is not None:
            weight_HW = weight_HW[:, self.rotary.order_W]
        return self.operations.norm(weight_HW, query.eps)

    def _decoder(self) -> decoding.Decoder | None:
        positions = self.rotary if self.position_PD is None else self.position_PD
        if not self.operations.compiled or positions is None:
            return None
        heads = (self.heads, self.shared, self.width)
        return decoding.Decoder(self.layers, self.norm, self.head, self.embedding_VD, positions, heads)

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """See `RolloutForward`."""
        count, heads, both = tokens_T.shape[0], self.heads, self.heads + self.shared
        filler = Filler(tokens_T, self.dtype)
        x_TD, add_TD = F.embedding(filler.add(tokens_T), self.embedding_VD), None
        if self.position_PD is not None:
            x_TD += F.embedding(filler.add(position_T), self.position_PD)
        rotate = None if self.rotary is None else self.rotary.at(position_T)
        for i, layer in enumerate(self.layers):
            qkv = filler.drop(layer.qkv(layer.norm(x_TD, add_TD))).view(count, -1, self.width)
            qk = qkv[:, :both]
            if layer.head_norm is not None:
                qk = layer.head_norm(qk)
            if rotate is not None:
                qk = rotate(qk)
            seen = attend(Query(i, qk[:, :heads], qk[:, heads:], qkv[:, both:], layer.scale, None, layer.reach))
            add_TD = layer.out(filler.add(seen.reshape(count, heads * self.width)))
            add_TD = layer.down(self.activation(layer.up(layer.mlp_norm(x_TD, add_TD))))
        return filler.drop(self.norm(x_TD, add_TD))

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `RolloutForward`."""
        filler = Filler(hidden_RD, self.dtype)
        return filler.drop(self.head(filler.add(hidden_RD)))
