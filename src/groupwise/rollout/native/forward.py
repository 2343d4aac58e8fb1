"""The specialised forward pass of models that `models/layers.py` describes: the same mathematics,
without their modules.

Decoding a few rows through a small or medium model is bound by how fast matrices are read and by
the work around the products.  Here the weights are prepared once per `generate`
(`ops.decoding.DecodeOperations`), and projections of the same input are joined.  Where there is a
decoder for all of it, one call draws several tokens of all rows.  Nothing can be stale: weights are
prepared at every call, and again when the engine's version changes.  On a GPU they are copied to
where they were before (`cuda/workspace.py`).

Only a model whose every step is known runs here.  Another class, hooks or other activations take
the modules.  An adapter is merged when the weights are prepared (`plain_weights`).

T positions of a stream   D model width   N outputs of a layer's first product   H query heads
W head width   V vocabulary   O, I sides of a matrix
Of a DeltaNet: K key width   V value width   D channels of its convolution
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from groupwise.models.attention import Attend
from groupwise.models.layers import (
    MLP,
    MODELS,
    Attention,
    DeltaNet,
    Norm,
    class_name,
    describe,
    matrix_of,
    stack_of,
)
from groupwise.models.policy import Policy
from groupwise.models.reach import copy_reach, reach_of
from groupwise.models.recurrence import delta_rule, is_numbered
from groupwise.ops.decoding import (
    Buffers,
    Decoder,
    PreparedLayer,
    PreparedNorm,
    PreparedRotary,
)
from groupwise.ops.operations import operations
from groupwise.ops.query import EVERYTHING, Query
from groupwise.records import ImageSpan


class RolloutForward(Protocol):
    """A forward pass as rollouts need it: tokens in, hidden states and logits out."""

    decoder: Decoder | None
    """Draws several tokens in one call, where there is one."""

    def hidden(
        self, tokens_T: Tensor, position_T: Tensor, attend: Attend, images: Sequence[ImageSpan] = ()
    ) -> Tensor:
        """Final hidden states (T, D) of a flat stream.   images: see `Batch`."""
        ...

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits (R, V)."""
        ...


def is_known(policy: Policy) -> bool:
    """True if the policy is exactly one whose every step is known here.

    float64 is left to the modules: transformers normalises in float32 there, and to copy that would
    help nobody.
    """
    model, head = policy.model, policy.head
    devices = ("cpu", "cuda") if policy.vision is None else ("cpu",)
    if policy.device.type not in devices:
        return False
    if policy.dtype not in (torch.float32, torch.bfloat16):
        return False
    if head.scale != 1.0 or head.softcap is not None:
        return False
    for module in model.modules():
        if _altered(module, policy.dtype, policy.device):
            return False
    if class_name(type(model)) not in MODELS:
        return False
    return _as_configured(model) and stack_of(model) is not None


def is_hooked(module: nn.Module) -> bool:
    """True for a module that does more than its class says."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    return "forward" in vars(module) and not is_numbered(module)


def _altered(module: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """True for a module that does more than its class says, or holds parameters of another type, on
    another device, or that are not plain tensors (sharded, quantised)."""
    if is_hooked(module):
        return True
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if type(parameter) is not nn.Parameter:
            return True
        if parameter.dtype != dtype or parameter.device != device:
            return True
    return False


NUMBERS = (
    "eps", "variance_epsilon", "scaling", "attention_scaling", "max_norm", "sliding_window", "nf",
    "in_features", "out_features", "head_dim", "num_heads", "num_key_value_groups", "embed_dim",
    "split_size", "block_type", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim",
    "value_dim", "conv_kernel_size", "activation",
)  # fmt: skip
"""What forward passes of the known families read of their modules."""


def _as_configured(model: Any) -> bool:
    """True if the model is what its class makes of its config: modules, their numbers, the shapes
    of parameters.

    Pruned layers are not, nor modules of other classes in place of the usual ones, nor a bias more
    or less.
    """
    config = model.config.to_dict()
    known = _CONFIGURED.get(model)
    if known is None or known.config != config:
        known = _Configured(config, _configured(model))
        _CONFIGURED[model] = known
    return known.described == _described(model)


class _Configured(NamedTuple):
    """A config, and what it makes."""

    config: dict[str, Any]
    described: list[Any] | None
    """See `_described`; None: the config makes no model."""


_CONFIGURED: WeakKeyDictionary[nn.Module, _Configured] = WeakKeyDictionary()
"""The configs of models."""


def _configured(model: Any) -> list[Any] | None:
    """What the model's config makes, as `_described`; None if nothing."""
    config = deepcopy(model.config)
    # It may lie outside of what is left of an embedding, and nothing here is padded.
    config.pad_token_id = None
    config._attn_implementation = "eager"
    try:
        with torch.device("meta"):
            return _described(type(model)(config))
    except Exception:  # a config that was changed later may make no model at all
        return None


def _described(model: nn.Module) -> list[Any]:
    """Classes and numbers of all modules, and shapes of all parameters, by name; what stands in two
    places, twice.
    """
    described: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = vars(module)
        numbers = [attributes.get(key) for key in NUMBERS]
        described.append((name, type(module), numbers))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        described.append((name, parameter.shape))
    return described


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeights:
    """A policy without an adapter, and what is added to its weights."""

    policy: Policy
    adapters: Mapping[nn.Module, Callable[[], Tensor]]
    """Functions that compute what an adapter adds to the weight of a linear layer."""

    def matrix(self, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return the weight (O, I) and the bias (O,) of a linear layer, its adapter merged."""
        weight_OI, bias_O = matrix_of(linear)
        if linear not in self.adapters:
            return weight_OI, bias_O
        added = self.adapters[linear]()
        if type(linear) is Conv1D:
            added = added.T
        merged_OI = weight_OI + added
        return merged_OI.to(weight_OI.dtype), bias_O


def plain_weights(policy: Policy) -> PlainWeights:
    """Take a policy with an adapter apart into a plain one and the adapter's layers, if it is
    on.

    The plain model shares the weights under the adapter, which nobody trains, so it is made once.
    What the adapter adds is computed layer by layer at every preparation.
    """
    assert policy.adapter is not None
    adapter = policy.adapter
    model = adapter.plain_model(policy.model, on=policy.adapter_on)
    model.requires_grad_(False)
    copy_reach(policy.model, model)
    adapters: dict[nn.Module, Callable[[], Tensor]] = {}
    if policy.adapter_on:
        added = adapter.added_weights(policy.model)
        for name, added_weight in added.items():
            linear = model.get_submodule(name)
            adapters[linear] = added_weight
    plain = replace(policy, model=model, adapter=None)
    return PlainWeights(plain, adapters)


class DecodedWeights:
    """The weights that decode for a policy, where every step of its model is known."""

    def __init__(self, policy: Policy) -> None:
        """Begin without any."""
        self.policy = policy
        self._plain: PlainWeights | None = None
        self._apart: Tensor | None = None
        """The first parameter of what was taken apart."""

    def _without_adapter(self) -> PlainWeights:
        """Return the weights and the adapter, taken apart; again where a gather has put other
        tensors into the model.
        """
        first = next(self.policy.model.parameters())
        if self._plain is None or self._apart is not first:
            self._plain, self._apart = plain_weights(self.policy), first
        return self._plain

    def drop(self) -> None:
        """Hold none any more."""
        self._plain = self._apart = None

    def known(self) -> PlainWeights | None:
        """Return the weights of a model whose every step is known, else None."""
        if self.policy.adapter is None:
            weights = PlainWeights(self.policy, {})
        elif self.policy.switches or any(map(is_hooked, self.policy.model.modules())):
            return None
        else:
            weights = self._without_adapter()
        return weights if is_known(weights.policy) else None


MatrixReader = Callable[[nn.Module], tuple[Tensor, Tensor | None]]
"""Reads a linear layer: its weight (O, I) and its bias (O,)."""
Rotate = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Attention:
    """Attention between a layer's two products."""

    number: int
    attention: Attention
    layer: PreparedLayer

    def __call__(self, inner_TN: Tensor, rotate: Rotate | None, attend: Attend) -> Tensor:
        """inner_TN: query, key and value heads side by side, behind them the gates of the query
        heads where there are any.
        """
        attention = self.attention
        layer = self.layer
        heads_THW = inner_TN.unflatten(-1, (-1, attention.width))
        values_begin = attention.heads + attention.shared
        gates_begin = values_begin + attention.shared
        qk, value, gate = heads_THW.tensor_split((values_begin, gates_begin), 1)
        if layer.head_norm is not None:
            qk = layer.head_norm(qk)
        if rotate is not None:
            qk = rotate(qk)
        query = qk[:, : attention.heads]
        key = qk[:, attention.heads :]
        asked = Query(self.number, query, key, value, layer.scale, reach=layer.reach)
        out_THW = attend(asked)
        if attention.gated:
            out_THW = out_THW * torch.sigmoid(gate)
        return out_THW.flatten(1)


DELTA_NET_NUMBERS = ("conv1d.weight", "conv1d.bias", "A_log", "dt_bias", "norm.weight")
"""Parameters of a DeltaNet that are no products."""


class _DeltaNet:
    """Convolution, gated delta rule and gated norm between a layer's two products."""

    def __init__(self, number: int, net: DeltaNet) -> None:
        """Read the numbers of a DeltaNet, in float32."""
        module = net.module
        self.number = number
        self.net = net
        self.eps = module.norm.variance_epsilon
        numbers: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if name in DELTA_NET_NUMBERS:
                numbers[name] = parameter.detach().float()
        self.weight_DW = numbers["conv1d.weight"].squeeze(1)
        self.bias_D = numbers.get("conv1d.bias")
        self.rate_H = -numbers["A_log"].exp()
        self.offset_H = numbers["dt_bias"]
        self.gain_V = numbers["norm.weight"]

    def __call__(self, inner_TN: Tensor, rotate: Rotate | None, attend: Attend) -> Tensor:
        """inner_TN: queries, keys and values side by side, then gates, betas and decays of the
        heads.
        """
        net = self.net
        keys = net.shared * net.key_width
        values = net.heads * net.width
        convolved = 2 * keys + values
        dtype = inner_TN.dtype
        inner_TN = inner_TN.float()
        mixed, gate, beta, decay = inner_TN.split([convolved, values, net.heads, net.heads], -1)
        mixed = attend.recurrent.convolve(
            (self.number, 1), mixed, self.weight_DW, self.bias_D, silu=True
        )
        mixed = mixed.to(dtype)
        query, key, value = mixed.split([keys, keys, values], -1)
        step_TH = F.softplus(decay + self.offset_H)
        out_THV = delta_rule(
            attend.recurrent,
            (self.number, 2),
            query.unflatten(-1, (net.shared, net.key_width)),
            key.unflatten(-1, (net.shared, net.key_width)),
            value.unflatten(-1, (net.heads, net.width)),
            self.rate_H * step_TH,
            beta.sigmoid(),
        )
        out_THV = out_THV.float()
        square_TH1 = out_THV.square().mean(-1, keepdim=True)
        out_THV = out_THV * torch.rsqrt(square_TH1 + self.eps)
        out_THV.mul_(self.gain_V)
        gate_THV = F.silu(gate).view_as(out_THV)
        out_THV.mul_(gate_THV)
        return out_THV.flatten(1).to(dtype)


class SpecialisedForward:
    """A `RolloutForward` of a policy that `is_known`."""

    def __init__(
        self,
        policy: Policy,
        positions: int,
        *,
        buffers: Buffers | None = None,
        matrix: MatrixReader = matrix_of,
    ) -> None:
        """Prepare the weights as they are now, for up to `positions` tokens.

        buffers: where they lie, if they are to stay there.   matrix: reads a linear layer.
        """
        self.policy = policy
        self.matrix = matrix
        stack = stack_of(policy.model)
        assert stack is not None
        self.embedding_VD = stack.embedding_VD
        self.position_PD = stack.position_PD
        attention = stack.attention
        self.heads = attention.heads
        self.shared = attention.shared
        self.width = attention.width
        self.dtype = policy.dtype
        if policy.autocast:
            self.dtype = torch.bfloat16
        tables = [self.embedding_VD]
        if self.position_PD is not None:
            tables.append(self.position_PD)
        mlp = stack.layers[0][3]
        up_ID, _ = matrix_of(mlp.inputs[0])
        rotated = self.width
        if attention.rotary:
            rotated //= 2
        widths = (rotated, up_ID.shape[0])
        self.operations = operations().decode_operations(tables, widths, dtype=self.dtype)
        self.operations.buffers = buffers
        if buffers is not None:
            buffers.begin()
            for table in tables:
                buffers.read_in_place(table)
        self.activation = self.operations.gated if mlp.gated else self.operations.gelu
        self.rotary: PreparedRotary | None = None
        if stack.rotary is not None:
            self._prepare_rotary(stack.rotary, positions)
        self.layers: list[PreparedLayer] = []
        self.mixers: list[_Attention | _DeltaNet] = []
        for i, parts in enumerate(stack.layers):
            layer, mixer = self._layer(i, *parts)
            self.layers.append(layer)
            self.mixers.append(mixer)
        self.norm = self._norm(stack.norm)
        self.head = self.operations.product([policy.head.weight_VD], [policy.head.bias_V])
        self.decoder = self._decoder()

    @property
    def cache_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        numbers = self.shared * self.width
        return 2 * len(self.layers) * numbers * self.dtype.itemsize

    def _prepare_rotary(self, rotary: Any, positions: int) -> None:
        """Prepare rotary embeddings of whole heads, by the model's module."""
        self.positions_of = rotary
        place_P = torch.arange(positions, device=self.embedding_VD.device)
        # Of text all three places of a token (time, height, width) are one; transformers 5.17
        # wants each.
        shape = (1, -1)
        if hasattr(rotary, "mrope_section"):
            shape = (3, 1, -1)
        cos_PW, sin_PW, order_W = self._tables(place_P.expand(shape))
        self.rotary = self.operations.rotary(cos_PW, sin_PW)
        self.order_W = order_W[self.rotary.order_W]

    def _tables(self, place_1P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines and sines (P, W) of places, and the order of a head's numbers that they take.

        Where a part of a head is rotated the rest is paired too, and rotated by nothing.
        """
        cos_1PN, sin_1PN = self.positions_of(self.embedding_VD[:1], place_1P)
        rotated = cos_1PN.shape[2] // 2
        order_W = torch.arange(self.width, device=self.embedding_VD.device)
        first, second, rest = order_W.tensor_split((rotated, 2 * rotated))
        first_rest, second_rest = rest.tensor_split(2)
        order_W = torch.cat([first, first_rest, second, second_rest])
        unrotated = (0, self.width // 2 - rotated)
        cos_PH = F.pad(cos_1PN[0, :, :rotated], unrotated, value=1.0)
        sin_PH = F.pad(sin_1PN[0, :, :rotated], unrotated, value=0.0)
        return cos_PH.repeat(1, 2), sin_PH.repeat(1, 2), order_W

    def _layer(
        self, i: int, norm: Norm, mixer: Attention | DeltaNet, mlp_norm: Norm, mlp: MLP
    ) -> tuple[PreparedLayer, _Attention | _DeltaNet]:
        """Prepare layer `i`, and its mixer."""
        head_norm = None
        scale = 1.0
        reach = EVERYTHING
        weights, biases = self._columns(mixer)
        input_norm = self._norm(norm)
        qkv = self.operations.product(weights, biases)
        if isinstance(mixer, Attention):
            head_norm = self._head_norm(mixer)
            scale = mixer.scale
            reach = reach_of(mixer.module)
        prepared = PreparedLayer(
            norm=input_norm,
            qkv=qkv,
            head_norm=head_norm,
            out=self._product(mixer.output),
            mlp_norm=self._norm(mlp_norm),
            up=self._product(*mlp.inputs),
            down=self._product(mlp.output),
            scale=scale,
            reach=reach,
        )
        if isinstance(mixer, DeltaNet):
            return prepared, _DeltaNet(i, mixer)
        return prepared, _Attention(i, mixer, prepared)

    def _product(self, *linears: nn.Module) -> Any:
        """Make one product of linear layers side by side."""
        weights, biases = self._matrices(linears)
        return self.operations.product(weights, biases)

    def _matrices(self, linears: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Read the weights (O, I) and biases (O,) of linear layers."""
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for linear in linears:
            weight_OI, bias_O = self.matrix(linear)
            weights.append(weight_OI)
            biases.append(bias_O)
        return weights, biases

    def _columns(
        self, mixer: Attention | DeltaNet
    ) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Weights and biases of a layer's first product."""
        weights, biases = self._matrices(mixer.inputs)
        if isinstance(mixer, DeltaNet):
            return weights, biases
        weights = self._ordered(weights, mixer.gated)
        present = [bias_O for bias_O in biases if bias_O is not None]
        return weights, self._ordered(present, mixer.gated) if present else biases

    def _ordered(self, columns: Sequence[Tensor], gated: bool) -> Sequence[Tensor]:
        """Columns (O, ...) of queries, keys and values: rotated heads in the order in which they
        are rotated, gates last.
        """
        ordered = list(columns)
        if gated:
            pairs = columns[0].unflatten(0, (-1, 2, self.width))
            query, gate = pairs.unbind(1)
            ordered[0] = query.flatten(0, 1)
            ordered.append(gate.flatten(0, 1))
        if self.rotary is None:
            return ordered
        for place in (0, 1):
            heads = ordered[place].unflatten(0, (-1, self.width))
            rotated = heads[:, self.order_W]
            ordered[place] = rotated.flatten(0, 1)
        return ordered

    def _norm(self, norm: Norm) -> PreparedNorm:
        return self.operations.norm(norm.weight_D, norm.eps, norm.bias_D)

    def _head_norm(self, attention: Attention) -> PreparedNorm | None:
        if attention.head_norms is None:
            return None
        query = describe(attention.head_norms[0])
        key = describe(attention.head_norms[1])
        assert isinstance(query, Norm) and isinstance(key, Norm)
        query_HW = query.weight_D.expand(self.heads, -1)
        key_KW = key.weight_D.expand(self.shared, -1)
        weight_HW = torch.cat([query_HW, key_KW])
        if self.rotary is not None:
            weight_HW = weight_HW[:, self.order_W]
        return self.operations.norm(weight_HW, query.eps)

    def _decoder(self) -> Decoder | None:
        """The decoder of the whole model, where its layers are plain and there is one."""
        positions = self.rotary if self.position_PD is None else self.position_PD
        if positions is None:
            return None
        for mixer in self.mixers:
            if not isinstance(mixer, _Attention) or mixer.attention.gated:
                return None
        heads = (self.heads, self.shared, self.width)
        return self.operations.decoder(
            self.layers, self.norm, self.head, self.embedding_VD, positions, heads
        )

    def hidden(
        self, tokens_T: Tensor, position_T: Tensor, attend: Attend, images: Sequence[ImageSpan] = ()
    ) -> Tensor:
        """See `RolloutForward`."""
        if images:
            return self._hidden_with_images(tokens_T, position_T, attend, images)
        x_TD = F.embedding(tokens_T, self.embedding_VD)
        if self.position_PD is not None:
            x_TD += F.embedding(position_T, self.position_PD)
        rotate = None if self.rotary is None else self.rotary.at(position_T)
        return self._through_layers(x_TD, rotate, attend)

    def _hidden_with_images(
        self, tokens_T: Tensor, position_T: Tensor, attend: Attend, images: Sequence[ImageSpan]
    ) -> Tensor:
        """The same for a stream in which prompts with images begin."""
        stream = (tokens_T, position_T, attend, images)
        _, inputs, attend = self.policy.vision.spliced(self.policy, *stream)
        cos_TW, sin_TW, _ = self._tables(inputs["position_ids"][1:])
        rotate = self.operations.rotary(cos_TW, sin_TW).at(torch.arange(tokens_T.shape[0]))
        deep = inputs.get("deepstack_visual_embeds", ())
        mask_1T = inputs.get("visual_pos_masks")
        return self._through_layers(inputs["inputs_embeds"][0], rotate, attend, mask_1T, deep)

    def _through_layers(
        self,
        x_TD: Tensor,
        rotate: Rotate | None,
        attend: Attend,
        mask_1T: Tensor | None = None,
        deep: Sequence[Tensor] = (),
    ) -> Tensor:
        """Final hidden states of embeddings.

        deep: what is added (N, D) behind each of the first layers, where the mask is true.
        """
        add_TD = None
        for place, (layer, mixer) in enumerate(zip(self.layers, self.mixers, strict=True)):
            inner_TN = layer.qkv(layer.norm(x_TD, add_TD))
            add_TD = layer.out(mixer(inner_TN, rotate, attend))
            up_TI = layer.up(layer.mlp_norm(x_TD, add_TD))
            add_TD = layer.down(self.activation(up_TI))
            if place < len(deep):
                assert mask_1T is not None
                x_TD[mask_1T[0]] += deep[place].to(x_TD.dtype)
        return self.norm(x_TD, add_TD)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """See `RolloutForward`."""
        return self.head(hidden_RD)
