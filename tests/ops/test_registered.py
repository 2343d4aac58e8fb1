"""What is registered with `torch.library`: schemas, fakes, gradients and mutations are what the operations do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.ops import functional
from groupwise.ops.attention import StreamAttention
from groupwise.ops.cpu import decoding, interface, kernels, library
from groupwise.ops.cpu.library import absence
from groupwise.ops.cpu.registered import REGISTERED
from groupwise.records import Layout

needs_kernels = pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")

LAYOUT = Layout(start=(0, 5, 9, 15), length=(5, 4, 6, 7), prefix=(-1, 0, 0, -1), total=25)
"""A prompt with two completions, a segment of its own, and three positions of filler."""
UNREGISTERED = {
    "has_tiles": "asks the processor",
    "has_gemm": "asks the processor",
    "decode_tokens": "takes structures that point to a whole model",
}
"""Functions of the kernels' interface that no registered operation calls, and why."""
WITH_GRADIENTS = ("attention", "rms_norm", "rotary")


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return made.requires_grad_(grad)


def heads(count: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    """(1, H, T, W) with tokens first in memory, as projections give them."""
    return normal(1, LAYOUT.total, count, 32, dtype=dtype).transpose(1, 2).detach().requires_grad_(grad)


def calls(dtype: torch.dtype) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of every operation that is registered."""
    families = StreamAttention(LAYOUT).stretches.tensors
    query, key, value = heads(4, dtype, True), heads(2, dtype, True), heads(2, dtype, True)
    x, weight, like = normal(3, 7, 32, dtype=dtype, grad=True), normal(32, grad=True), normal(7, 32, dtype=dtype)
    with torch.no_grad():
        out, lse = kernels.attention(query, key, value, *families, 0.25)
        _, scale = kernels.rms_norm(x, weight, 1e-5, dtype)
    angle = torch.arange(LAYOUT.total)[:, None] / torch.arange(1, 17).tile(2)
    logits, target = normal(4, 11, dtype=dtype), torch.tensor([0, 3, 10, 3])
    rows_C = [normal(4) for _ in range(4)]
    one = normal(3, 2, 32, dtype=dtype)
    own, prompt = ([torch.zeros(3, 2, 1, decoding.BLOCK * 32, dtype=dtype) for _ in range(2)] for _ in range(2))
    rows = decoding.Rows([[0, 1], [2]], [4, 5])
    decoded = (one.repeat(1, 2, 1), one, one.clone(), *own, *prompt, rows.part_N3, rows.prompt_length_P, rows.order_R)
    matrix = normal(24, 32, dtype=dtype)
    found: dict[str, Any] = {
        "attention": (query, key, value, *families, 0.25),
        "attention_backward": (out.detach(), *(t.detach() for t in (query, key, value)), out, lse, *families, 0.25),
        "rms_norm": (x, weight, 1e-5, dtype),
        "rms_norm_of_sum": (normal(3, 7, 32), x.detach(), weight.detach(), 1e-5, dtype),
        "rms_norm_backward": (x.detach(), normal(3, 7, 32), weight.detach(), scale, normal(3, 7, 32)),
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
        "linear": (like, decoding.pack_weight(matrix, dtype), normal(24), 24),
        "keep_entries": (normal(2, 9, 2, 32, dtype=dtype), normal(2, 9, 2, 32, dtype=dtype), *(t.clone() for t in own), 1),
        "decode_attention": (*decoded, torch.ones(3, dtype=torch.int64), 0.25, 0),
    }
    named = {"gemm": {"bias_N": normal(24), "add": False}}
    return {name: (arguments, named.get(name, {})) for name, arguments in found.items()}


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", REGISTERED)
def test_an_operation_is_what_it_is_registered_as(name: str, dtype: torch.dtype) -> None:
    arguments, named = calls(dtype)[name]
    torch.library.opcheck(
        getattr(torch.ops.groupwise, name).default,
        arguments,
        named,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@needs_kernels
def test_every_kernel_is_reached_through_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of the interface, but for a few with their reasons."""
    reached = set()

    def noted(name: str, *arguments: Any) -> None:
        reached.add(name)
        library.call(name, *arguments)

    for module in (kernels, decoding):
        monkeypatch.setattr(module, "call", noted)
    for name, (arguments, named) in calls(torch.float32).items():
        with torch.no_grad():
            REGISTERED[name](*arguments, **named)
    declared = set(interface.declarations(interface.HEADER.read_text())[1])
    assert reached.isdisjoint(UNREGISTERED) and reached | set(UNREGISTERED) == declared


def test_kernels_are_called_by_operations_alone() -> None:
    """No public function of tensors calls a kernel past its operation."""
    for module in (kernels, decoding):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and "call" in function.__code__.co_names:
                assert name == "_add_rms_norm", name  # what three operations share


@needs_kernels
@pytest.mark.parametrize("name", REGISTERED)
def test_torch_counts_what_an_operation_changes(name: str) -> None:
    """Else a gradient that reads a tensor from before would be silently wrong."""
    arguments, named = calls(torch.float32)[name]
    operation = getattr(torch.ops.groupwise, name).default
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    changed = [
        spec.alias_info is not None
        for spec, given in zip(operation._schema.arguments, arguments, strict=False)
        if isinstance(given, Tensor)
    ]
    before = [tensor._version for tensor in tensors]
    with torch.no_grad():
        operation(*arguments, **named)
    assert [tensor._version > version for tensor, version in zip(tensors, before, strict=True)] == changed


@needs_kernels
def test_a_gradient_that_is_not_written_out_is_refused() -> None:
    x = normal(7, 32, grad=True)
    with pytest.raises(RuntimeError, match="groupwise::gelu has no gradient"):
        kernels.gelu(x)
    with torch.no_grad():
        kernels.gelu(x)


@needs_kernels
def test_a_second_derivative_is_refused_not_wrong() -> None:
    x, weight = normal(4, 32, grad=True), normal(32, grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(functional.rms_norm(x, weight, 1e-5, torch.float32).sum(), x, create_graph=True)


@needs_kernels
@pytest.mark.parametrize("name", ["attention", "rms_norm", "rotary", "gated", "gelu", "linear", "read_logits", "add_rms_norm"])
def test_what_a_kernel_does_not_take_is_refused_before_memory_is_touched(name: str) -> None:
    (x, *others), named = calls(torch.float32)[name]
    with pytest.raises(ValueError, match="the kernel takes"), torch.no_grad():
        getattr(torch.ops.groupwise, name)(x[..., :8], *others, **named)


@needs_kernels
@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_are_traced_through_shapes_alone(name: str) -> None:
    """As a compiler does: forward and backward pass with fakes, dynamic shapes, against the operation itself."""
    arguments, named = calls(torch.float32)[name]
    operation = getattr(torch.ops.groupwise, name).default
    torch.library.opcheck(operation, arguments, named, test_utils=("test_aot_dispatch_dynamic",))


def test_an_operation_without_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    monkeypatch.setattr(library, "absence", lambda: "GROUPWISE_KERNELS=off")
    with pytest.raises(RuntimeError, match="no compiled kernels: GROUPWISE_KERNELS=off"):
        library.call("gelu", 0, torch.zeros(16), torch.zeros(16), 16, 1)
