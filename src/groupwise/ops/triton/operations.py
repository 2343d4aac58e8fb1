"""The operations of `groupwise.ops.operations` by Triton kernels, where those take the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.decoding import DecodeOperations, PreparedNorm
from groupwise.ops.fused import FusedOperations
from groupwise.ops.operations import (
    AttentionCall,
    BlockedAttention,
    DecodeAttention,
    LogitsReader,
    Operations,
    TokenSampler,
)
from groupwise.ops.query import PackedStream, Query
from groupwise.ops.triton import gate, norm, rotary
from groupwise.ops.triton.decode_attention import decode_attention
from groupwise.ops.triton.draw import draw_tokens
from groupwise.ops.triton.head import TritonLogitsReader
from groupwise.ops.triton.heads import Heads
from groupwise.ops.triton.launch import TYPES, fits
from groupwise.ops.triton.merge import merge_parts


class TritonOperations(FusedOperations):
    """Kernels on CUDA devices, in fused blocks; everything else by other operations."""

    def __init__(self, rest: Operations, device: str = "cuda") -> None:
        """rest: the operations for what has no kernel here.   device: the type of devices whose
        tensors the kernels take; Triton's interpreter computes on CPUs.
        """
        self.rest = rest
        self.device = device

    def product(
        self,
        a_MK: Tensor,
        b_KN: Tensor,
        bias_N: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Operations`."""
        return self.rest.product(a_MK, b_KN, bias_N, out=out)

    def add_product(self, total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, fresh: bool) -> None:
        """See `Operations`."""
        self.rest.add_product(total_MN, a_MK, b_KN, fresh=fresh)

    def stream_attention(self, stream: PackedStream, query: Query) -> Tensor | None:
        """See `Operations`."""
        return self.rest.stream_attention(stream, query)

    def stream_function(self, stream: PackedStream, query: Query) -> AttentionCall | None:
        """See `Operations`."""
        return self.rest.stream_function(stream, query)

    def logits_reader(self, raw_CV: Tensor) -> LogitsReader | None:
        """See `Operations`."""
        if fits(self.device, raw_CV):
            return TritonLogitsReader()
        return self.rest.logits_reader(raw_CV)

    def token_sampler(self, logits_RV: Tensor) -> TokenSampler | None:
        """See `Operations`."""
        if fits(self.device, logits_RV) and logits_RV.numel() > 0:
            return draw_tokens
        return self.rest.token_sampler(logits_RV)

    def block_kernels(self, *tensors: Tensor, width: int | None = None) -> Any:
        """See `Operations`."""
        if fits(self.device, *tensors):
            return TritonBlockKernels()
        return self.rest.block_kernels(*tensors, width=width)

    def gpu_kernels(self, x: Tensor) -> Any:
        """See `Operations`."""
        return TritonGpuKernels() if fits(self.device, x) else self.rest.gpu_kernels(x)

    def decode_attention(self, query: Query) -> DecodeAttention | None:
        """See `Operations`."""
        parts = (query.query_THD, query.key_TKD, query.value_TKE)
        if fits(self.device, *parts) and len({part.dtype for part in parts}) == 1:
            return decode_attention
        return self.rest.decode_attention(query)

    def blocked_attention(self, key_TKW: Tensor) -> BlockedAttention | None:
        """See `Operations`.  Slabs on the device lie token by token."""
        return self.rest.blocked_attention(key_TKW)

    def decode_operations(
        self, tables: Sequence[Tensor], widths: Sequence[int], *, dtype: torch.dtype
    ) -> DecodeOperations:
        """See `Operations`."""
        if fits(self.device, *tables) and dtype in TYPES:
            return TritonDecodeOperations(dtype)
        return self.rest.decode_operations(tables, widths, dtype=dtype)


class TritonBlockKernels:
    """Kernels of what lies between a block's products, for training."""

    rounds_first = True
    """A weight in a lower precision multiplies what is rounded already, as transformers does."""

    rms_norm = staticmethod(norm.rms_norm)
    rms_norm_backward = staticmethod(norm.rms_norm_backward)
    rotary = staticmethod(rotary.rotary)
    gated = staticmethod(gate.gated)
    gated_backward = staticmethod(gate.gated_backward)
    gelu = staticmethod(gate.gelu)
    gelu_backward = staticmethod(gate.gelu_backward)


class TritonGpuKernels:
    """Kernels of blocks whose products over one input are joined, and of attention in parts."""

    heads = Heads
    gated = staticmethod(gate.gated)
    joined_gate_backward = staticmethod(gate.joined_gate_backward)
    merge_parts = staticmethod(merge_parts)


class TritonDecodeOperations(DecodeOperations):
    """Torch's products; what lies between them in one kernel each."""

    def norm(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> PreparedNorm:
        """Make a norm behind a residual sum, or of heads; a layer norm is torch's."""
        if bias is not None:
            return super().norm(weight, eps, bias)
        made = norm.TritonNorm(weight, eps, dtype=self.dtype)
        made.weight = self.kept(made.weight)
        return made

    def rotary(self, cos_PW: Tensor, sin_PW: Tensor) -> rotary.TritonRotary:
        """Make rotary embeddings from tables of all positions."""
        return rotary.TritonRotary(self.kept(cos_PW.float()), self.kept(sin_PW.float()))

    def gated(self, inner_TI: Tensor) -> Tensor:
        """Return silu(gate) * up of a gate beside up."""
        gate_TI, up_TI = inner_TI.chunk(2, -1)
        return gate.gated(gate_TI, up_TI)

    def gelu(self, inner_TI: Tensor) -> Tensor:
        """Return GELU's tanh form."""
        return gate.gelu(inner_TI)
