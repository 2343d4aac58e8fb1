"""The kernels as operations of torch: schemas are what they do, and what they do not take is refused before memory is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.ops import functional
from groupwise.ops.attention import StreamAttention
from groupwise.ops.operations import absence
from groupwise.records import Layout

decoding = pytest.importorskip("groupwise_cpu.decoding")
kernels = pytest.importorskip("groupwise_cpu.compiled")
operations = kernels.operations
needs_kernels = pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")

LAYOUT = Layout(start=(0, 5, 9, 15), length=(5, 4, 6, 7), prefix=(-1, 0, 0, -1), total=25)
"""A prompt with two completions, a segment of its own, and three positions of filler."""
NAMES = (
    *("attention", "attention_backward", "rms_norm", "rms_norm_backward", "add_rms_norm", "add_layer_norm"),
    *("head_norm", "rotary", "gated", "gated_backward", "gelu", "gelu_backward", "read_logits", "logits_gradient", "draw_tokens"),
    *("gemm", "pack_weight", "linear", "keep_entries", "decode_attention"),
)
"""All but `decode_tokens`, which takes a whole model: tests/rollout/native/test_forward.py."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return made.requires_grad_(grad)


def heads(count: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    """(1, H, T, W) with tokens first in memory, as projections give them."""
    return normal(1, LAYOUT.total, count, 32, dtype=dtype).transpose(1, 2).detach().requires_grad_(grad)


def calls(dtype: torch.dtype) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of every operation."""
    families = kernels.segments(StreamAttention(LAYOUT).families)
    query, key, value = heads(4, dtype, True), heads(2, dtype, True), heads(2, dtype, True)
    x, weight, like = normal(3, 7, 32, dtype=dtype, grad=True), normal(32, grad=True), normal(7, 32, dtype=dtype)
    with torch.no_grad():
        out, lse = operations.attention(query, key, value, *families, 0.25)
        _, scale = operations.rms_norm(x, weight, 1e-5, dtype)
    angle = torch.arange(LAYOUT.total)[:, None] / torch.arange(1, 17).tile(2)
    logits, target = normal(4, 11, dtype=dtype), torch.tensor([0, 3, 10, 3])
    rows_C = [normal(4) for _ in range(4)]
    one = normal(3, 2, 32, dtype=dtype)
    own, prompt = ([torch.zeros(3, 2, 1, decoding.BLOCK * 32, dtype=dtype) for _ in range(2)] for _ in range(2))
    rows = decoding.RowsOfPrompts([[0, 1], [2]], [4, 5])
    decoded = (one.repeat(1, 2, 1), one, one.clone(), *own, *prompt, rows.part_N3, rows.prompt_length_P, rows.order_R)
    matrix = normal(24, 32, dtype=dtype)
    found: dict[str, Any] = {
        "attention": (query, key, value, *families, 0.25),
        "attention_backward": (out.detach(), *(t.detach() for t in (query, key, value)), out, lse, *families, 0.25),
        "rms_norm": (x, weight, 1e-5, dtype),
        "rms_norm_backward": (x.detach(), normal(3, 7, 32), weight.detach(), scale),
        "add_rms_norm": (normal(7, 32), like, weight.detach(), 1e-5, dtype),
        "add_layer_norm": (normal(7, 32), like, weight.detach(), 1e-5, normal(32), dtype),
        "head_norm": (normal(7, 3, 32, dtype=dtype)[:, :2], normal(2, 32), 1e-5),
        "rotary": (query[0].detach().transpose(0, 1).requires_grad_(), angle.cos(), angle.sin()),
        "gated": (like, normal(7, 32, dtype=dtype)),
        "gated_backward": (like.clone(), like, normal(7, 32, dtype=dtype)),
        "gelu": (like,),
        "gelu_backward": (like.clone(), like),
        "read_logits": (logits, rows_C[0], target, *rows_C[1:]),
        "logits_gradient": (logits.clone(), rows_C[0], target, *rows_C[1:], None),
        "draw_tokens": (logits, torch.linspace(0, 0.9, 4, dtype=torch.float64), 0.7),
        "gemm": (matrix, matrix.T, normal(24, 24)),
        "pack_weight": (normal(24, 32), dtype),
        "linear": (like, operations.pack_weight(matrix, dtype), normal(24), 24),
        "keep_entries": (normal(2, 9, 2, 32, dtype=dtype), normal(2, 9, 2, 32, dtype=dtype), *(t.clone() for t in own), 1),
        "decode_attention": (*decoded, torch.ones(3, dtype=torch.int64), 0.25, 0),
    }
    named = {"gemm": {"bias": normal(24), "add": False}}
    return {name: (arguments, named.get(name, {})) for name, arguments in found.items()}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_changes_what_its_schema_says(name: str, dtype: torch.dtype) -> None:
    arguments, named = calls(dtype)[name]
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
    torch.library.opcheck(getattr(operations, name).default, arguments, named, test_utils="test_schema")


@needs_kernels
def test_a_second_derivative_is_refused_not_wrong() -> None:
    x, weight = normal(4, 32, grad=True), normal(32, grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(functional.rms_norm(x, weight, 1e-5, torch.float32).sum(), x, create_graph=True)


@needs_kernels
@pytest.mark.parametrize("wrong", ["width", "type", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_kernel_does_not_take_is_refused_before_memory_is_touched(name: str, wrong: str) -> None:
    (x, *others), named = calls(torch.float32)[name]
    if wrong == "width":
        if name == "pack_weight":
            pytest.skip("it takes every width")
        x = x[..., :8]
    x = x.double() if wrong == "type" else x.to("meta") if wrong == "device" else x
    with pytest.raises((ValueError, NotImplementedError)):
        getattr(operations, name)(x, *others, **named)
