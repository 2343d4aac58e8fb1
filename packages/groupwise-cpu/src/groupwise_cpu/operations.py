"""The operations of `groupwise.ops.operations` by compiled kernels, wherever those take the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.ops.autograd import first_derivative
from groupwise.ops.decoding import DecodeOperations
from groupwise.ops.fused import FusedOperations
from groupwise.ops.operations import AttentionCall, TokenSampler
from groupwise.ops.query import EVERYTHING, PackedStream, Query
from groupwise_cpu import compiled, matmul
from groupwise_cpu.decoding import (
    CompiledBlockedAttention,
    CompiledOperations,
    PackedOperations,
    draw_tokens,
)


class CpuOperations(FusedOperations):
    """Compiled kernels on a CPU, in fused blocks; everything else by torch's operations."""

    def product(self, a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """See `Operations`."""
        return matmul.product(a_MK, b_KN, bias_N, out=out)

    def add_product(self, total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, fresh: bool) -> None:
        """See `Operations`."""
        matmul.add_product(total_MN, a_MK, b_KN, fresh=fresh)

    def stream_function(self, stream: PackedStream, query: Query) -> AttentionCall | None:
        """See `Operations`."""
        plain = query.cap is None and query.sinks_H is None
        reach = query.reach.within(stream.longest)
        if not plain or reach != EVERYTHING:
            return None
        if not compiled.worth_attention(stream.longest, *query.heads):
            return None
        if stream.prepared is None:
            stream.prepared = compiled.segments(stream.families)
        return AttentionCall(_StreamAttention, (*query.heads, *stream.prepared, query.scale))

    def logits_reader(self, raw_CV: Tensor) -> CompiledLogitsReader | None:
        """See `Operations`."""
        if compiled.fits(raw_CV, width=compiled.WIDTHS):
            return CompiledLogitsReader()
        return None

    def token_sampler(self, logits_RV: Tensor) -> TokenSampler | None:
        """See `Operations`."""
        return draw_tokens if compiled.draws(logits_RV) else None

    def block_kernels(self, *tensors: Tensor, width: int | None = None) -> CompiledBlockKernels | None:
        """See `Operations`."""
        return CompiledBlockKernels() if compiled.fits(*tensors, width=width) else None

    def blocked_attention(self, key_TKW: Tensor) -> CompiledBlockedAttention | None:
        """See `Operations`."""
        return CompiledBlockedAttention() if compiled.fits(key_TKW) else None

    def decode_operations(self, tables: Sequence[Tensor], widths: Sequence[int], *, dtype: torch.dtype) -> DecodeOperations:
        """See `Operations`.  Between products either all is compiled or all is torch's."""
        first = tables[0]
        if first.device.type != "cpu" or dtype not in compiled.TYPES:
            return DecodeOperations(dtype)
        wide = all(compiled.fits(first, width=width) for width in widths)
        if first.dtype == torch.float32 and compiled.fits(*tables) and wide:
            return CompiledOperations(dtype)
        return PackedOperations(dtype)


class CompiledBlockKernels:
    """Compiled kernels of what lies between a block's products."""

    rounds_first = False
    """A weight in a lower precision multiplies what is not rounded yet."""

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the norm of rows, and `1 / sqrt(mean(x^2) + eps)` of each."""
        return compiled.operations.rms_norm(x, weight_D, eps, dtype)

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, weight_D: Tensor, scale_T: Tensor, needs_weight: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `x` and of the weight, which costs no pass of its own."""
        return compiled.operations.rms_norm_backward(grad, x, weight_D, scale_T)

    def rotary(self, x_THW: Tensor, cos_TW: Tensor, sin_TW: Tensor, sign: float) -> Tensor:
        """Return heads rotated by the angles of their positions; -1 rotates back."""
        return compiled.operations.rotary(x_THW, cos_TW, sin_TW, sign)

    def gated(self, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        """Return silu(gate) * up."""
        return compiled.operations.gated(gate_TI, up_TI)

    def gated_backward(self, grad_TI: Tensor, gate_TI: Tensor, up_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return silu(gate) * up and the gradient of up; `grad` becomes the gradient of gate."""
        return compiled.operations.gated_backward(grad_TI, gate_TI, up_TI)

    def gelu(self, x_TI: Tensor) -> Tensor:
        """Return GELU's tanh form."""
        return compiled.operations.gelu(x_TI)

    def gelu_backward(self, grad_TI: Tensor, x_TI: Tensor) -> Tensor:
        """Return GELU's tanh form again; `grad` becomes the gradient of x."""
        return compiled.operations.gelu_backward(grad_TI, x_TI)


class CompiledLogitsReader:
    """Reads logits in one pass of the compiled kernel."""

    least_rows = 1
    """More rows make no product faster on a CPU."""

    def measure(
        self,
        raw_CV: Tensor,
        factor_C: Tensor,
        target_C: Tensor,
        lse_C: Tensor,
        logp_C: Tensor,
        entropy_C: Tensor | None,
    ) -> None:
        """Fill log-sum-exps, log-probs of the targets and entropies."""
        compiled.operations.read_logits(raw_CV, factor_C, target_C, lse_C, logp_C, entropy_C)

    def gradient(
        self,
        raw_CV: Tensor,
        factor_C: Tensor,
        target_C: Tensor,
        lse_C: Tensor,
        entropy_C: Tensor,
        grad_logp_C: Tensor,
        grad_entropy_C: Tensor | None,
    ) -> None:
        """Overwrite the logits with their gradient."""
        if grad_entropy_C is not None:
            grad_entropy_C = grad_entropy_C.contiguous()
        compiled.operations.logits_gradient(raw_CV, factor_C, target_C, lse_C, entropy_C, grad_logp_C.contiguous(), grad_entropy_C)


class _StreamAttention(torch.autograd.Function):
    """Attention without windows, caps and sinks by the compiled kernel.

    first_F, segment_N4, end: `compiled.segments`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        first_F: Tensor,
        segment_N4: Tensor,
        end: int,
        scale: float,
    ) -> Tensor:
        """Attend; save what the backward pass reads."""
        out, lse = compiled.operations.attention(query, key, value, first_F, segment_N4, end, scale)
        ctx.save_for_backward(query, key, value, out, lse, first_F, segment_N4)
        ctx.end, ctx.scale = end, scale
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        query, *saved = ctx.saved_tensors
        (grad_out,) = grads
        if grad_out.stride(-1) != 1 or grad_out.dtype != query.dtype:
            grad_out = grad_out.to(query.dtype).contiguous()
        inputs = compiled.operations.attention_backward(grad_out, query, *saved, ctx.end, ctx.scale)
        return (*inputs, None, None, None, None)
