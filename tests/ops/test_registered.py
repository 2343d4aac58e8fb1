"""What is registered with `torch.library`: schemas, fakes and gradients are what the operations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.ops import functional
from groupwise.ops.attention import StreamAttention
from groupwise.ops.kernels import absence
from groupwise.records import Layout

pytestmark = pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")

LAYOUT = Layout(start=(0, 5, 9, 15), length=(5, 4, 6, 7), prefix=(-1, 0, 0, -1), total=25)
"""A prompt with two completions, a segment of its own, and three positions of filler."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return made.requires_grad_(grad)


def heads(count: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    """(1, H, T, W) with tokens first in memory, as projections give them."""
    return normal(1, LAYOUT.total, count, 32, dtype=dtype).transpose(1, 2).detach().requires_grad_(grad)


def calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operation that is registered."""
    families = StreamAttention(LAYOUT).stretches.tensors
    query, key, value = heads(4, dtype, True), heads(2, dtype, True), heads(2, dtype, True)
    with torch.no_grad():
        out, lse = torch.ops.groupwise.attention(query, key, value, *families, 0.25)
    x, weight = normal(3, 7, 32, dtype=dtype, grad=True), normal(32, grad=True)
    with torch.no_grad():
        _, scale = torch.ops.groupwise.rms_norm(x, weight, 1e-5, dtype)
    angle = torch.arange(LAYOUT.total)[:, None] / torch.arange(1, 17).tile(2)
    return {
        "attention": (query, key, value, *families, 0.25),
        "attention_backward": (out.detach(), *(t.detach() for t in (query, key, value)), out, lse, *families, 0.25),
        "rms_norm": (x, weight, 1e-5, dtype),
        "rms_norm_backward": (x.detach(), x.detach(), weight.detach(), scale),
        "rotary": (query, angle.cos()[None, None], angle.sin()[None, None], 1.0),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["attention", "attention_backward", "rms_norm", "rms_norm_backward", "rotary"])
def test_an_operation_is_what_it_is_registered_as(name: str, dtype: torch.dtype) -> None:
    torch.library.opcheck(
        getattr(torch.ops.groupwise, name).default,
        calls(dtype)[name],
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x, weight = normal(4, 32, grad=True), normal(32, grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(functional.rms_norm(x, weight, 1e-5, torch.float32).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["attention", "rms_norm", "rotary"])
def test_what_a_kernel_does_not_take_is_refused_before_memory_is_touched(name: str) -> None:
    x, *others = calls(torch.float32)[name]
    narrow = x[..., :8].contiguous()
    with pytest.raises(ValueError, match="the kernel takes"):
        getattr(torch.ops.groupwise, name)(narrow, *others)
