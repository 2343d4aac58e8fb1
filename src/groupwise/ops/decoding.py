"""What decoding computes with, in torch's operations: products of few rows, norms behind residual
sums, rotary embeddings.

A package may derive its own `DecodeOperations`, with weights laid out for its kernels, and a
`Decoder` that draws many tokens in one call.  Streams are changed in place.

T positions of a stream   R rows   P prompts   D model width   H heads   K key-value heads
W head width   V vocabulary   O, I sides of a matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.query import Reach

Product = Callable[[Tensor], Tensor]
"""`x -> x W^T + b` of rows (R, I) -> (R, O)."""


class PreparedNorm(Protocol):
    """A norm of rows, or of heads."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Add `add` to `x` in place, then return the norm of it.  Heads may be changed in place."""
        ...


class PreparedRotary(Protocol):
    """PreparedRotary embeddings of whole heads."""

    cos_PW: Tensor
    sin_PW: Tensor
    order_W: Tensor
    """The order of a head's numbers that `at` takes.  Queries and keys may be reordered together,
    their products stay.
    """

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the rotary embedding of these positions: a function of heads (T, H, W), which it
        may change in place.
        """
        ...


class TorchNorm:
    """An RMSNorm, or with a bias a layer norm, behind a residual sum; with weights (H, W) RMSNorms
    of heads, each by its own.
    """

    def __init__(
        self, weight: Tensor, eps: float, bias: Tensor | None, *, dtype: torch.dtype
    ) -> None:
        """dtype: the type of the result."""
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.eps = eps
        self.dtype = dtype
        width = weight.shape[-1]
        self.gain = self.weight.float() * width**0.5
        self.floor = torch.tensor([(width * eps) ** 0.5], device=weight.device)

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Add `add` to `x` in place, then return its norm; an RMSNorm is computed in float32."""
        if add is not None:
            x += add
        if self.bias is not None:
            return F.layer_norm(x, self.bias.shape, self.weight, self.bias, self.eps).to(self.dtype)
        # Four operations where `F.rms_norm` is nine.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(length, self.floor)).mul_(self.gain).to(self.dtype)


class TorchRotary:
    """Rotary embeddings with the two numbers of a pair side by side, for one complex product."""

    def __init__(self, cos_PW: Tensor, sin_PW: Tensor) -> None:
        """Take float32 tables of all positions, which pair number i of a head with i + W/2."""
        self.cos_PW, self.sin_PW = cos_PW, sin_PW
        half = cos_PW.shape[1] // 2
        self.rotation_PW = torch.complex(cos_PW[:, :half], sin_PW[:, :half])
        place_W = torch.arange(2 * half, device=cos_PW.device)
        self.order_W = place_W.view(2, half).T.flatten()

    def at(self, position_T: Tensor) -> Callable[[Tensor], Tensor]:
        """See `PreparedRotary`."""
        rotation_T1W = self.rotation_PW.index_select(0, position_T)[:, None]

        def rotate(heads_THW: Tensor) -> Tensor:
            pairs = torch.view_as_complex(heads_THW.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs.mul_(rotation_T1W)).flatten(-2).to(heads_THW.dtype)

        return rotate


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PreparedLayer:
    """A decoder layer as it is decoded with; its operations are made by `DecodeOperations`."""

    norm: PreparedNorm
    qkv: Product
    """Query, key and value heads side by side; rotary query and key heads in the order of
    `PreparedRotary.order_W`."""
    head_norm: PreparedNorm | None
    """Norms of query and key heads (Qwen3)."""
    out: Product
    mlp_norm: PreparedNorm
    up: Product
    """The MLP's first product: gate beside up, or up alone."""
    down: Product
    scale: float
    reach: Reach


class Buffers:
    """Memory of prepared weights, which stays where it is when they are prepared again: recorded
    operations then read the new ones.

    Tensors are recognised by the order in which they are prepared.
    """

    def __init__(self, *, copy_all: bool = False) -> None:
        """copy_all: a weight that could be read where it is gets a copy all the same, because it
        does not stay there.
        """
        self.copy_all = copy_all
        self.tensors: list[Tensor] = []
        self.addresses: list[int] = []
        """Where the tensors of the last preparation lie, those included that are no copies."""
        self._used = 0

    def begin(self) -> None:
        """Begin a preparation."""
        self.addresses = []
        self._used = 0

    def read_in_place(self, weight: Tensor) -> Tensor:
        """Take a weight as it is; it stays where it is."""
        self.addresses.append(weight.data_ptr())
        return weight

    def copied(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Copy tensors, one behind the other along their first side, to the place that the same
        tensors had before.
        """
        rows = [part.shape[0] for part in parts]
        shape = (sum(rows), *parts[0].shape[1:])
        if self._used < len(self.tensors) and self.tensors[self._used].shape != shape:
            del self.tensors[self._used :]
        if self._used == len(self.tensors):
            self.tensors.append(parts[0].new_empty(shape, dtype=dtype))
        buffer = self.tensors[self._used]
        for place, part in zip(buffer.split(rows), parts, strict=True):
            place.copy_(part)
        self._used += 1
        return self.read_in_place(buffer)

    @property
    def bytes(self) -> int:
        """Memory of the copies."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)


class DecodeOperations:
    """Makes the operations that one model is decoded with."""

    buffers: Buffers | None = None
    """Where prepared weights lie, if they stay for recorded operations."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: the type of the products."""
        self.dtype = dtype

    def product(self, weights_OI: Sequence[Tensor], biases_O: Sequence[Tensor | None]) -> Product:
        """Make a product with these weights, their outputs side by side; all have a bias, or
        none.
        """
        weight_OI = self.joined(weights_OI)
        present = [bias_O for bias_O in biases_O if bias_O is not None]
        bias_O = self.joined(present) if present else None
        return lambda x_RI: F.linear(x_RI, weight_OI, bias_O)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Join weights along their first side, in the type of the products; a single one that has
        it is read where it is.
        """
        if self.buffers is None:
            # They are cast before they are joined: half the memory traffic in bfloat16.
            lower = [part.detach().to(self.dtype) for part in parts]
            return lower[0].contiguous() if len(lower) == 1 else torch.cat(lower)
        first = parts[0].detach()
        as_it_is = len(parts) == 1 and first.dtype == self.dtype and first.is_contiguous()
        if as_it_is and not self.buffers.copy_all:
            return self.buffers.read_in_place(first)
        return self.buffers.copied(parts, self.dtype)

    def kept(self, table: Tensor) -> Tensor:
        """Return a table that was computed of weights, in the place that it had before if prepared
        weights stay.
        """
        return table if self.buffers is None else self.buffers.copied([table], table.dtype)

    def norm(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> PreparedNorm:
        """Make a norm behind a residual sum, or of heads."""
        norm = TorchNorm(weight, eps, bias, dtype=self.dtype)
        if self.buffers is not None:
            norm.weight, norm.gain = self.kept(norm.weight), self.kept(norm.gain)
            norm.floor = self.kept(norm.floor)
            norm.bias = None if norm.bias is None else self.kept(norm.bias)
        return norm

    def rotary(self, cos_PW: Tensor, sin_PW: Tensor) -> PreparedRotary:
        """Make rotary embeddings from tables of all positions."""
        rotary = TorchRotary(self.kept(cos_PW.float()), self.kept(sin_PW.float()))
        rotary.rotation_PW = self.kept(rotary.rotation_PW)
        return rotary

    def gated(self, inner_TI: Tensor) -> Tensor:
        """Return silu(gate) * up of a gate beside up, I = twice the result's."""
        gate_TI, up_TI = inner_TI.chunk(2, -1)
        return F.silu(gate_TI).mul_(up_TI)

    def gelu(self, inner_TI: Tensor) -> Tensor:
        """Return GELU's tanh form."""
        return F.gelu(inner_TI, approximate="tanh")

    def decoder(
        self,
        layers: Sequence[PreparedLayer],
        norm: PreparedNorm,
        head: Product,
        embedding_VD: Tensor,
        positions: PreparedRotary | Tensor,
        heads: tuple[int, int, int],
    ) -> Decoder | None:
        """Make a decoder of all of the model, where there is one.

        norm: the last.   positions: rotary embeddings, or learnt ones (P, D).   heads: H, K, W.
        """
        return None


def joined_bias(biases_O: Sequence[Tensor | None]) -> Tensor | None:
    """Join biases side by side; all are there, or none."""
    present = [bias_O for bias_O in biases_O if bias_O is not None]
    if not present:
        return None
    return present[0] if len(present) == 1 else torch.cat(present)


class Drawn(NamedTuple):
    """Tokens that rows have drawn: the first `count_R[r]` of row r, and their log-probabilities
    (nats, float32).
    """

    token_RN: Tensor
    logp_RN: Tensor
    count_R: Tensor


Slab = tuple[Tensor, Tensor]
"""Keys and values of a layer, (entries, K, blocks, numbers) each."""


class Decoder(Protocol):
    """A whole model that draws several tokens for each row in one call."""

    def __call__(
        self,
        newest_R: Tensor,
        kept_R: Tensor,
        limit_R: Tensor,
        prompt_R: Tensor,
        prompt_length_P: Tensor,
        uniform_RT: Tensor,
        slabs: Sequence[tuple[Slab, Slab]],
        steps: int,
        *,
        temperature: float,
        ending: Sequence[int],
        until_one_ends: bool,
        rows_at_once: int,
    ) -> Drawn:
        """Draw up to `steps` tokens for each row.

        newest_R: the newest token of each.   kept_R: own tokens whose keys and values are kept: all
        but the newest.   limit_R: the most own tokens.   prompt_R: which of the prompts each is
        behind.   prompt_length_P: tokens of prompts.   uniform_RT: float64, one for each own token;
        all others int64.   slabs: keys and values of each layer, the rows' own and the prompts'.
        A row stops behind a token of `ending` and at its limit.   until_one_ends: then all rows
        stop, so that another can take its place.   rows_at_once: rows whose logits exist at the
        same time.
        """
        ...
