"""Divergences against TRL's numbers, against loops over the definition, and what chunks and heads must not change."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.ops.distillation import head_divergence, jsd, with_tail
from groupwise.ops.linear_cross_entropy import Head

CASES = json.loads((Path(__file__).parents[1] / "fixtures" / "divergence_cases.json").read_text())["cases"]


def head_of(width: int, vocabulary: int, seed: int, **options: object) -> Head:
    generator = torch.Generator().manual_seed(seed)
    return Head(weight_VD=torch.randn(vocabulary, width, generator=generator, dtype=torch.float64), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"beta{case['beta']}-T{case['temperature']}-k{case['top_k']}")
def test_values_and_gradients_are_trl_s(case: dict) -> None:
    """TRL 1.16: compute_divergence, generalized_jsd_loss, and the top-k form with add_tail_bucket."""
    student = torch.tensor(case["student"], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(case["teacher"], dtype=torch.float64)
    identity = Head(weight_VD=torch.eye(11, dtype=torch.float64))
    temperature = torch.full((6,), case["temperature"], dtype=torch.float64)
    divergence = partial(jsd, beta=case["beta"], top_k=case["top_k"])
    found = head_divergence(student, identity, teacher, identity, temperature, divergence, chunk_numbers=22)
    np.testing.assert_allclose(found.detach(), case["divergence"], rtol=1e-12, atol=1e-12)
    if case["generalized_jsd_sum"] is not None:
        assert float(found.detach().sum()) == pytest.approx(case["generalized_jsd_sum"], rel=1e-12)
    (torch.tensor(case["weight"], dtype=torch.float64) * found).sum().backward()
    tolerance = 1e-12 if case["top_k"] is None else 1e-10  # a tail is 1 less what is kept: its last digits are rounded away
    np.testing.assert_allclose(student.grad, case["gradient"], rtol=tolerance, atol=tolerance)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_the_definition_written_out(seed: int, beta: float) -> None:
    rng = np.random.default_rng(seed)
    q, p = (rng.dirichlet(np.full(7, 0.4)) + 1e-12 for _ in range(2))
    q, p = q / q.sum(), p / p.sum()
    if beta in (0.0, 1.0):
        first, second = (p, q) if beta == 0.0 else (q, p)
        expected = sum(a * (math.log(a) - math.log(b)) for a, b in zip(first, second, strict=True))
    else:
        m = (1 - beta) * q + beta * p
        expected = beta * sum(p * np.log(p / m)) + (1 - beta) * sum(q * np.log(q / m))
    found = jsd(torch.from_numpy(q).log()[None], torch.from_numpy(p).log()[None], beta=beta)
    assert float(found) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)
    assert float(found) >= -1e-12


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(beta: float, top_k: int | None) -> None:
    head = head_of(5, 13, seed=0)
    hidden = torch.randn(9, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    divergence = partial(jsd, beta=beta, top_k=top_k)
    found = head_divergence(hidden, head, hidden, head, torch.full((9,), 0.8, dtype=torch.float64), divergence)
    assert float(found.detach().abs().max()) < 1e-14
    found.sum().backward()
    assert float(hidden.grad.abs().max()) < 1e-14


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 2.0, "scale": 1.5}])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_chunks_and_heads_change_nothing(beta: float, options: dict) -> None:
    """Against all logits at once and autograd's own gradient, for the student's states, weights and bias."""
    rows, generator = 300, torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    bias, hidden, other = draw(13).requires_grad_(), draw(rows, 5).requires_grad_(), draw(rows, 8)
    weight, temperature = draw(13, 5).requires_grad_(), 0.5 + torch.rand(rows, generator=generator, dtype=torch.float64)
    head = Head(weight_VD=weight, bias_V=bias, **options)
    teacher = head_of(8, 13, seed=3, **options)
    weights = torch.rand(rows, generator=generator, dtype=torch.float64)

    def logits(states: torch.Tensor, side: Head) -> torch.Tensor:
        z = states @ side.weight_VD.T + (0 if side.bias_V is None else side.bias_V)
        z = z * options.get("scale", 1.0)
        return z if "softcap" not in options else options["softcap"] * torch.tanh(z / options["softcap"])

    sides = ((hidden, head), (other, teacher))
    whole = jsd(*(torch.log_softmax(logits(h, side) / temperature[:, None], -1) for h, side in sides), beta=beta)
    expected = torch.autograd.grad((weights * whole).sum(), (hidden, weight, bias))
    for numbers in (13, 13 * 128 * 2, 1 << 22):
        found = head_divergence(hidden, head, other, teacher, temperature, partial(jsd, beta=beta), chunk_numbers=numbers)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((weights * found).sum(), (hidden, weight, bias))
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_two_whole_matrices_never_exist() -> None:
    """The largest tensor of forward and backward is a chunk's."""
    rows, vocabulary = 2048, 512
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor))
            return out

    head, teacher = head_of(4, vocabulary, 0), head_of(4, vocabulary, 1)
    hidden = torch.randn(rows, 4, dtype=torch.float64).requires_grad_()
    with Watch():
        found = head_divergence(hidden, head, hidden, teacher, torch.ones(rows, dtype=torch.float64), chunk_numbers=1 << 16)
        found.sum().backward()
    assert max(largest) <= rows * vocabulary / 8


def test_the_sampled_token_form_averages_to_the_exact_gradient() -> None:
    """E over y of (log q(y) - log p(y)) d log q(y) is the gradient of KL(q || p); 200,000 draws, five standard errors."""
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(1, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    log_p = torch.randn(1, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_q = z.log_softmax(-1)
    (exact,) = torch.autograd.grad(jsd(log_q, log_p, beta=1.0).sum(), z)
    drawn = torch.multinomial(log_q.detach().exp()[0], 200_000, replacement=True, generator=generator)
    gap = (log_q - log_p).detach()[0, drawn]
    each = gap[:, None] * (torch.nn.functional.one_hot(drawn, 6) - log_q.detach().exp())
    error = each.std(0) / math.sqrt(len(each))
    assert float(((each.mean(0) - exact[0]).abs() / error).max()) < 5
    assert float(exact.abs().max()) > 100 * float(error.max())


def test_the_tail_holds_what_is_left() -> None:
    log = torch.randn(4, 9, dtype=torch.float64).log_softmax(-1)
    kept = with_tail(log[:, :3])
    torch.testing.assert_close(kept.exp().sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(kept[:, -1].exp(), log[:, 3:].exp().sum(-1))
