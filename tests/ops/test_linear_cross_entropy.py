"""The chunked head against its definition: values, entropies and gradients, for every kind of head (PROBLEMS 30)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from head_losses import reference_logprobs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.ops.linear_cross_entropy import FusedLoss, Head, PositionSupport, chosen_logprobs

M, D, V = 300, 6, 23  # three chunks


def problem(dtype: torch.dtype, bias: bool, softcap: float | None, scale: float) -> tuple[Tensor, Head, Tensor, Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(M, D, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    offset = torch.randn(V, dtype=dtype, requires_grad=True) if bias else None
    head = Head(weight_VD=weight, bias_V=offset, softcap=softcap, scale=scale)
    return hidden, head, torch.randint(0, V, (M,)), torch.rand(M, dtype=dtype) + 0.5


def supports(target: Tensor) -> PositionSupport:
    """Rows with 1 to 5 ids, among them the target; every seventh row is unrestricted."""
    torch.manual_seed(2)
    rows = []
    for i, t in enumerate(target.tolist()):
        others = torch.randperm(V)[: i % 5].tolist()
        rows.append([] if i % 7 == 0 else sorted({t, *others}))
    lengths = torch.tensor([0, *map(len, rows)])
    return PositionSupport(ids_E=torch.tensor(list(itertools.chain(*rows))), begin_M=lengths.cumsum(0))


def loss_of(logp: Tensor, entropy: Tensor | None, rows: slice) -> Tensor:
    weight = torch.linspace(-1, 2, M, dtype=logp.dtype)[rows]
    return (weight * (logp.exp() * 3 + logp.square())).sum() + (0 if entropy is None else (weight * entropy.square()).sum())


def fused_loss(
    hidden: Tensor, head: Head, target: Tensor, temperature: Tensor, loss: Callable, support: Any = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    visited = FusedLoss(hidden, head, target, temperature, support, **options)
    for chunk in visited:
        chunk.loss = loss(chunk.logp_C, chunk.entropy_C, chunk.rows)
    return visited.total(), visited.logp_M, visited.entropy_M


def grads(head: Head, hidden: Tensor, value: Tensor) -> list[Tensor]:
    leaves = [hidden, head.weight_VD] + ([] if head.bias_V is None else [head.bias_V])
    return list(torch.autograd.grad(value, leaves))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_chunked_and_fused_equal_the_definition(
    bias: bool, softcap: float | None, scale: float, restricted: bool, entropy: bool
) -> None:
    hidden, head, target, temperature = problem(torch.float64, bias, softcap, scale)
    support = supports(target) if restricted else None
    logp, true_entropy = reference_logprobs(hidden, head, target, temperature, support)
    value = loss_of(logp, true_entropy if entropy else None, slice(None))
    expected = grads(head, hidden, value)

    chunked, chunked_entropy = chosen_logprobs(hidden, head, target, temperature, support, entropy=entropy, chunk_numbers=1)
    fused, fused_logp, fused_entropy = fused_loss(
        hidden, head, target, temperature, loss_of, support, entropy=entropy, chunk_numbers=1
    )
    torch.testing.assert_close(chunked, logp)
    torch.testing.assert_close(fused_logp, logp)
    torch.testing.assert_close(fused, value)
    assert entropy == (chunked_entropy is not None) == (fused_entropy is not None)
    if entropy:
        torch.testing.assert_close(chunked_entropy, true_entropy)
        torch.testing.assert_close(fused_entropy, true_entropy)
    found = grads(head, hidden, loss_of(chunked, chunked_entropy, slice(None)))
    for expected_gradient, chunk, fuse in zip(expected, found, grads(head, hidden, fused), strict=True):
        torch.testing.assert_close(chunk, expected_gradient, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(fuse, expected_gradient, rtol=1e-9, atol=1e-10)


def test_the_fused_gradient_scales_with_what_stands_behind_it() -> None:
    hidden, head, target, temperature = problem(torch.float64, False, None, 1.0)
    once = grads(head, hidden, fused_loss(hidden, head, target, temperature, loss_of)[0])
    thrice = grads(head, hidden, 3 * fused_loss(hidden, head, target, temperature, loss_of)[0])
    for a, b in zip(once, thrice, strict=True):
        torch.testing.assert_close(3 * a, b)


def test_extreme_logits_stay_finite() -> None:
    hidden, head, target, temperature = problem(torch.float32, False, None, 1.0)
    sharp = Head(weight_VD=head.weight_VD.detach().mul(1e4).requires_grad_())
    logp, entropy = chosen_logprobs(hidden, sharp, target, temperature, entropy=True)
    assert torch.isfinite(logp).all()
    assert torch.isfinite(entropy).all()
    assert all(torch.isfinite(g).all() for g in grads(sharp, hidden, logp.sum() + entropy.sum()))


def test_targets_of_any_integers_and_steps_and_none_outside() -> None:
    hidden, head, target, temperature = problem(torch.float32, False, None, 1.0)
    expected, _ = chosen_logprobs(hidden, head, target, temperature)
    for same in (target.to(torch.int32), target.repeat_interleave(2)[::2]):
        torch.testing.assert_close(chosen_logprobs(hidden, head, same, temperature)[0], expected)
    alike, _ = chosen_logprobs(hidden, head, target[:1].expand(target.shape), temperature)
    torch.testing.assert_close(alike[0], expected[0])
    for wrong in (-100, head.weight_VD.shape[0]):
        with pytest.raises(IndexError, match=str(wrong)):
            chosen_logprobs(hidden, head, torch.full_like(target, wrong), temperature)


def test_no_rows() -> None:
    hidden, head, _, _ = problem(torch.float32, False, None, 1.0)
    nothing = torch.zeros(0, dtype=torch.int64)
    value, logp, _ = fused_loss(hidden[:0], head, nothing, torch.zeros(0), loss_of)
    value.backward()
    assert logp.shape == (0,)
    assert value == 0


@pytest.mark.parametrize("fused", [True, False])
def test_p30_logits_never_exist_as_a_whole(fused: bool) -> None:
    """The largest tensor that the head makes does not grow with the number of rows."""
    vocabulary, width = 5_000, 8

    def largest(rows: int) -> int:
        sizes: list[int] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))
                return out

        hidden = torch.randn(rows, width, requires_grad=True)
        head = Head(weight_VD=torch.randn(vocabulary, width))
        target, temperature = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
        with Watch():
            if fused:
                fused_loss(hidden, head, target, temperature, lambda logp, _e, _r: logp.sum(), chunk_numbers=640_000)[0].backward()
            else:
                chosen_logprobs(hidden, head, target, temperature, chunk_numbers=640_000)[0].sum().backward()
        return max(sizes)

    assert largest(400) == largest(2_000) == 640_000
