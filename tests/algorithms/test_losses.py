"""Losses against loops transcribed from the formulas, the worked examples, and the ends of the number range."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms import kl_estimators, losses, pair_losses
from groupwise.algorithms.losses import LIMIT, Terms
from groupwise.algorithms.table import PARTS

RATIOS = ["token", "sequence_mean", "sequence_sum", "sequence_token"]
SURROGATES = {
    "clipped": losses.Clipped(),
    "clip_higher": losses.Clipped(low=0.2, high=0.28),
    "two_sided": losses.Clipped(delta=1.5),
    "dual": losses.Clipped(dual=3.0),
    "cispo": losses.Cispo(),
    "sapo": losses.Sapo(),
    "vespo": losses.Vespo(),
    "geometric": losses.Geometric(),
    "reinforce": losses.Reinforce(),
}


def rows_of(terms: Terms):
    """Per completion the lists (l, b, A)."""
    columns = (terms.logp_M.tolist(), terms.old_logp_M.tolist(), terms.advantage_M.tolist())
    rows = [([], [], []) for _ in range(terms.segments)]
    for segment, *values in zip(terms.segment_M.tolist(), *columns, strict=True):
        for column, value in zip(rows[segment], values, strict=True):
            column.append(value)
    return rows


def literal_log_ratios(name, terms):
    found = []
    for l, b, _ in rows_of(terms):
        gaps = [x - y for x, y in zip(l, b, strict=True)]
        if name == "token":
            found += gaps
        elif name == "sequence_sum":
            found += [sum(gaps)] * len(gaps)
        else:
            found += [sum(gaps) / len(gaps)] * len(gaps)
    return found


def clip(x, low, high):
    return min(max(x, low), high)


def literal_loss(name, terms):
    """The formulas, token by token; the ratio is the token's."""
    found = []
    for l, b, advantages in rows_of(terms):
        n = len(l)
        gaps = [x - y for x, y in zip(l, b, strict=True)]
        for t in range(n):
            a, rho = advantages[t], math.exp(gaps[t])
            if name in ("clipped", "two_sided", "dual", "clip_higher"):
                high, delta = (0.28 if name == "clip_higher" else 0.2), (1.5 if name == "two_sided" else math.inf)
                gain = min(min(rho, delta) * a, clip(rho, 0.8, 1 + high) * a)
                if name == "dual" and a < 0:
                    gain = max(gain, 3.0 * a)
                found.append(-gain)
            elif name == "cispo":
                found.append(-min(rho, 5.0) * a * l[t])
            elif name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                found.append(-(4 / tau) / (1 + math.exp(-tau * (rho - 1))) * a)
            elif name == "vespo":
                k, lam = (2, 3) if a >= 0 else (3, 2)
                s = clip(sum(clip(gap, -20, 20) for gap in gaps), math.log(1e-8), 20)
                found.append(-math.exp(lam + k * s - lam * math.exp(s)) * a * l[t])
            elif name == "geometric":
                bounded = [min(gap, 0.4) if x > 0 else max(gap, -0.4) for gap, x in zip(gaps, advantages, strict=True)]
                found.append(-math.exp(sum(bounded) / n) * a)
            else:
                found.append(-a * l[t])
    return found


def grown(terms, factor):
    """The same terms with log-ratios `factor` times as large, so that every branch is visited."""
    logp_M = (terms.old_logp_M + factor * (terms.logp_M - terms.old_logp_M)).detach().requires_grad_()
    return replace(terms, logp_M=logp_M, log_ratio_M=logp_M - terms.old_logp_M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RATIOS)
def test_ratio_levels_against_loops(random_terms, name, dtype):
    terms = random_terms(dtype=dtype)
    found = PARTS["ratio"][name]()(terms.logp_M, terms.old_logp_M, terms.segment_M, terms.segments)
    assert found.dtype == dtype
    assert found.tolist() == pytest.approx(literal_log_ratios(name, terms), rel=1e-5 if dtype == torch.float32 else 1e-12)


def test_sequence_token_has_the_gradient_of_its_own_token(random_terms):
    """d rho_t / d l_s is s_i for t = s and 0 otherwise; for sequence_mean it is s_i / n for all tokens of the completion."""
    terms = random_terms((3,))
    arguments = (terms.old_logp_M, terms.segment_M, terms.segments)
    for name, expected in (("sequence_token", torch.eye(3)), ("sequence_mean", torch.full((3, 3), 1 / 3))):
        level = PARTS["ratio"][name]()
        jacobian = torch.autograd.functional.jacobian(lambda l, level=level: level(l, *arguments).exp(), terms.logp_M.detach())
        value = math.exp(literal_log_ratios(name, terms)[0])
        torch.testing.assert_close(jacobian, value * expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", SURROGATES)
@given(seed=st.integers(0, 1000), factor=st.sampled_from([0.0, 0.3, 1.0, 4.0]))
def test_surrogates_against_loops(random_terms, name, per_token, dtype, seed, factor):
    terms = grown(random_terms(seed=seed, per_token=per_token, dtype=dtype), factor)
    found = SURROGATES[name](terms)
    assert found.dtype == dtype
    assert found.tolist() == pytest.approx(literal_loss(name, terms), rel=1e-4 if dtype == torch.float32 else 1e-10, abs=1e-6)


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_every_surrogate_is_the_policy_gradient(random_terms, name):
    """At rho = 1 the gradient with respect to l is -A (GMPO's: -mean of A over the completion, times 1/n per token)."""
    terms = grown(random_terms(), 0.0)
    SURROGATES[name](terms).sum().backward()
    torch.testing.assert_close(terms.logp_M.grad, -terms.advantage_M)


@pytest.mark.parametrize(
    ("rho", "advantage", "gradient"), [(1.3, 1, 0), (1.3, -1, 1.3), (0.7, 1, -0.7), (0.7, -1, 0), (1.1, 1, -1.1)]
)
def test_clipping_stops_the_gradient_only_where_it_would_go_further(random_terms, rho, advantage, gradient):
    terms = random_terms((1,))
    terms = replace(terms, logp_M=(terms.old_logp_M + math.log(rho)).requires_grad_(), advantage_M=torch.tensor([float(advantage)]))
    terms = replace(terms, log_ratio_M=terms.logp_M - terms.old_logp_M)
    losses.Clipped()(terms).sum().backward()
    assert terms.logp_M.grad.item() == pytest.approx(gradient)


def test_cispo_caps_the_ratio_itself_and_keeps_the_gradient(random_terms):
    terms = random_terms((1,))
    for rho, factor in ((2.0, 2.0), (5.5, 5.0), (0.1, 0.1)):
        logp_M = (terms.old_logp_M + math.log(rho)).detach().requires_grad_()
        losses.Cispo()(replace(terms, logp_M=logp_M, log_ratio_M=logp_M - terms.old_logp_M)).sum().backward()
        torch.testing.assert_close(logp_M.grad, -factor * terms.advantage_M)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", SURROGATES)
def test_extreme_ratios_stay_finite_forward_and_backward(random_terms, name, ratio, dtype):
    """exp overflows float32 at 89; a clipped branch would then be 0 x inf = NaN in the backward pass."""
    terms = random_terms(dtype=dtype)
    old_M = terms.old_logp_M
    for gap, advantage in itertools.product((-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4), (-1.0, 0.0, 1.0)):
        logp_M = (old_M + gap).detach().requires_grad_()
        log_ratio_M = PARTS["ratio"][ratio]()(logp_M, old_M, terms.segment_M, terms.segments)
        advantage_M = torch.full_like(old_M, advantage)
        loss_M = SURROGATES[name](replace(terms, logp_M=logp_M, log_ratio_M=log_ratio_M, advantage_M=advantage_M))
        loss_M.sum().backward()
        assert torch.isfinite(loss_M).all(), (gap, advantage)
        assert torch.isfinite(logp_M.grad).all(), (gap, advantage)
        if advantage == 0.0:
            assert not logp_M.grad.any(), gap


@given(st.floats(-60, 60))
def test_guarded_exp_is_exp_then_its_tangent(x):
    value = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    found = losses.guarded_exp(value)
    found.backward()
    inside = min(x, LIMIT)
    assert found.item() == pytest.approx(math.exp(inside) * (1 + x - inside), rel=1e-12)
    assert value.grad.item() == pytest.approx(math.exp(inside), rel=1e-12)


# ---- KL -----------------------------------------------------------------------------------------------------------------------


def kl_of(name, l, reference, b=None):
    logp = torch.tensor([l], dtype=torch.float64, requires_grad=True)
    behavior = logp.detach() if b is None else torch.tensor([b], dtype=torch.float64)
    value = PARTS["kl"][name]()(logp, torch.tensor([reference], dtype=torch.float64), logp - behavior)
    value.sum().backward()
    return value.item(), logp.grad.item()


def test_p28_every_estimator_has_its_number():
    """At l = -1, ref = -1.5, on-policy.  The gradients of k3 and k3_ratio are +0.3935 and +0.5."""
    assert kl_of("k1", -1.0, -1.5) == pytest.approx((0.5, 1.0))
    assert kl_of("k2", -1.0, -1.5) == pytest.approx((0.125, 0.5))
    assert kl_of("k3", -1.0, -1.5) == pytest.approx((math.exp(-0.5) - 0.5, 0.393469340287), rel=1e-9)
    assert kl_of("k3_ratio", -1.0, -1.5) == pytest.approx((math.exp(-0.5) - 0.5, 0.5), rel=1e-9)


@given(st.floats(-8, 0), st.floats(-8, 0), st.floats(-8, 0))
def test_kl_estimators_against_the_formulas(l, reference, b):
    k3 = math.exp(reference - l) - (reference - l) - 1
    assert kl_of("k3", l, reference)[0] == pytest.approx(k3, abs=1e-12, rel=1e-12)
    assert kl_of("k3", l, reference)[1] == pytest.approx(1 - math.exp(reference - l), abs=1e-12, rel=1e-12)
    assert kl_of("k3_ratio", l, reference, b)[0] == pytest.approx(math.exp(l - b) * k3, abs=1e-12, rel=1e-12)
    assert kl_of("k3", l, reference)[0] >= 0.0


def test_the_estimators_of_the_loss_estimate_the_kl():
    """Over a vocabulary of 5, summed exactly: k1 and k3 have its value, k2 its gradient, k3_ratio both, off-policy too."""
    generator = torch.Generator().manual_seed(0)
    z, q, mu = (torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(3))
    reference, behavior = q.log_softmax(0), mu.log_softmax(0)

    def expected(estimator, sampler):
        logits = z.clone().requires_grad_()
        logp = logits.log_softmax(0)
        weights = logp.detach().exp() if sampler is None else sampler.exp()
        base = logp.detach() if sampler is None else sampler
        value = (weights * estimator(logp, reference, logp - base)).sum()
        value.backward()
        return value.item(), logits.grad

    logits = z.clone().requires_grad_()
    p = logits.log_softmax(0)
    kl = (p.exp() * (p - reference)).sum()
    kl.backward()
    assert expected(kl_estimators.K1(), None)[0] == pytest.approx(kl.item())
    assert expected(kl_estimators.K3(), None)[0] == pytest.approx(kl.item())
    assert expected(kl_estimators.K3Ratio(), behavior)[0] == pytest.approx(kl.item())
    torch.testing.assert_close(expected(kl_estimators.K3Ratio(), behavior)[1], logits.grad)
    torch.testing.assert_close(expected(kl_estimators.K2(), None)[1], logits.grad)
    assert expected(kl_estimators.K1(), None)[1].abs().max() < 1e-12  # k1 in a loss does nothing on average


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3_ratio"])
@pytest.mark.parametrize("gap", [-1e4, -100.0, 100.0, 1e4])
def test_p26_a_gap_of_100_nats_is_finite_and_pulls_the_right_way(name, gap, dtype):
    logp_M = torch.tensor([-100.0 - gap, -1.0], dtype=dtype, requires_grad=True)
    reference_M = torch.tensor([-100.0, -1.0], dtype=dtype)
    kl_M = PARTS["kl"][name]()(logp_M, reference_M, logp_M - logp_M.detach())
    kl_M.sum().backward()
    assert torch.isfinite(kl_M).all()
    assert torch.isfinite(logp_M.grad).all()
    if name != "k1":
        assert kl_M[0] > 10.0
        assert torch.sign(logp_M.grad[0]) == -math.copysign(1, gap)
        assert logp_M.grad[1] == 0.0


def test_k3_keeps_its_digits_in_float32():
    """exp(x) - x - 1 cancels for small gaps: at 1e-3 the naive float32 form loses most of its digits."""
    found = kl_estimators.K3()(torch.tensor([-1.001]), torch.tensor([-1.0]), torch.zeros(1))
    gap = float(torch.tensor(-1.0) - torch.tensor(-1.001))
    assert found.item() == pytest.approx(math.expm1(gap) - gap, rel=2e-4)


# ---- masks and corrections ----------------------------------------------------------------------------------------------------


def test_off_policy_keep_against_a_loop(random_terms):
    for seed in range(20):
        terms = random_terms(seed=seed, spread=1.0)
        expected = []
        for l, b, advantages in rows_of(terms):
            drift = sum(y - x for x, y in zip(l, b, strict=True)) / len(l)
            expected += [a >= 0 or drift <= 0.1 for a in advantages]
        assert losses.off_policy_keep(terms, delta=0.1).tolist() == expected
        sampled = replace(terms, behavior_logp_M=terms.logp_M.detach())
        assert losses.off_policy_keep(sampled, delta=0.1).all()


@given(st.lists(st.floats(0, 5, width=32), min_size=1, max_size=40), st.floats(0, 1))
def test_entropy_threshold_is_torch_quantile(values, quantile):
    entropy_N = torch.tensor(values, dtype=torch.float64)
    expected = torch.quantile(entropy_N, quantile)
    torch.testing.assert_close(losses.entropy_threshold(entropy_N, quantile), expected, rtol=1e-12, atol=1e-12)


def test_the_entropy_mask_keeps_the_tokens_above_its_quantile():
    entropy_N = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.4, 0.8])
    assert losses.forking(entropy_N, 0.75).nonzero().flatten().tolist() == [1, 7]
    assert losses.entropy_threshold(torch.zeros(0), 0.5).item() == math.inf
    assert losses.forking(torch.zeros(0), 0.5).tolist() == []
    sure = torch.linspace(0.0, 2e-5, 100)
    assert losses.forking(sure, 0.8).sum() <= 21, "of a policy that is sure of everything no more are kept"


@given(st.integers(0, 2**31), st.floats(0, 1))
def test_ties_are_kept_or_left_together_however_they_were_rounded(seed, quantile):
    """First tokens of a group have one distribution, whose entropy every packing rounds in its own way."""
    rng = np.random.default_rng(seed)
    once = rng.uniform(0, 3, size=6).repeat(rng.integers(1, 5, size=6)).astype(np.float32)
    other = once + rng.uniform(-3e-7, 3e-7, size=once.size).astype(np.float32)
    kept, again = (losses.forking(torch.from_numpy(values), quantile) for values in (once, other))
    assert torch.equal(kept, again)
    for value in np.unique(once):
        assert kept[torch.from_numpy(once == value)].unique().numel() == 1


@pytest.mark.parametrize("level", ["token", "sequence_sum", "sequence_mean"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_mismatch_against_a_loop(random_terms, level, mode):
    terms = random_terms((3, 1, 4), spread=2.0, seed=3)
    old_M, sampler_M = terms.logp_M, terms.old_logp_M
    found = losses.Correction(level=level, mode=mode, low=0.5, high=2.0)(old_M, sampler_M, terms.segment_M, terms.segments)
    expected, logs = [], []
    for row in rows_of(terms):
        gaps = [x - y for x, y in zip(row[0], row[1], strict=True)]
        whole = sum(gaps) / (len(gaps) if level == "sequence_mean" else 1)
        ratios = [math.exp(gap if level == "token" else whole) for gap in gaps]
        kept = [clip(w, 0.5, 2.0) if mode == "truncate" else (w if 0.5 <= w <= 2.0 else 0.0) for w in ratios]
        expected += kept
        each = [math.log(max(w, 1e-8)) for w in kept]
        logs.append(sum(each) if level == "token" else each[0])
    assert found.weight_M.tolist() == pytest.approx(expected)
    assert found.log_weight_S.tolist() == pytest.approx(logs)
    assert not found.weight_M.requires_grad
    assert (0.0 if mode == "mask" else 2.0) in expected


def test_a_divergence_counts_by_how_likely_a_token_was_drawn(random_terms):
    """Also where another engine drew it: ratios are then taken to other log-probs than the sampler's."""
    terms = random_terms((3, 2), seed=3)
    sampler_M = terms.old_logp_M - 0.5
    elsewhere = replace(terms, behavior_logp_M=sampler_M, divergence=lambda function: torch.ones_like(terms.logp_M))
    counted = losses.TeacherDivergence(importance=True)
    torch.testing.assert_close(counted(elsewhere), (terms.logp_M - sampler_M).exp().detach())
    here = replace(elsewhere, behavior_logp_M=None)
    torch.testing.assert_close(counted(here), (terms.logp_M - terms.old_logp_M).exp().detach())


# ---- entropy, pairs -------------------------------------------------------------------------------------------------------------


def test_mean_entropy_adds_up_over_micro_batches():
    entropy_N = torch.tensor([1.0, 2.0, 3.0, 4.0])
    parts = [losses.mean_entropy(part, tokens=4) for part in (entropy_N[:1], entropy_N[1:])]
    assert sum(parts).item() == 2.5
    assert losses.mean_entropy(entropy_N, tokens=2, keep_M=entropy_N > 2).item() == 3.5


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@given(*[st.floats(-5, 5)] * 4, st.floats(0.01, 2))
def test_pair_losses_against_the_formulas(chosen, rejected, chosen_reference, rejected_reference, beta):
    policy = [torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected)]
    reference = [torch.tensor([x], dtype=torch.float64) for x in (chosen_reference, rejected_reference)]
    gap = (chosen - chosen_reference) - (rejected - rejected_reference)
    assert pair_losses.dpo(*policy, *reference, beta=beta).item() == pytest.approx(-math.log(sigmoid(beta * gap)))
    assert pair_losses.ipo(*policy, *reference, beta=beta).item() == pytest.approx((gap - 1 / (2 * beta)) ** 2)
    assert pair_losses.bradley_terry(*policy).item() == pytest.approx(-math.log(sigmoid(chosen - rejected)))
    found = pair_losses.bradley_terry(*policy, torch.tensor([0.5], dtype=torch.float64), centering=0.01)
    expected = -math.log(sigmoid(chosen - rejected - 0.5)) + 0.01 * (chosen + rejected) ** 2
    assert found.item() == pytest.approx(expected)


def test_pair_losses_at_the_start():
    """Policy = reference: DPO and Bradley-Terry begin at log 2, IPO at (1 / 2 beta)^2."""
    zero = torch.zeros(1)
    assert pair_losses.dpo(zero, zero, zero, zero, beta=0.1).item() == pytest.approx(math.log(2))
    assert pair_losses.bradley_terry(zero, zero).item() == pytest.approx(math.log(2))
    assert pair_losses.ipo(zero, zero, zero, zero, beta=0.1).item() == pytest.approx(25.0)
    far = pair_losses.bradley_terry(torch.tensor([-1e4]), torch.tensor([1e4]))
    assert torch.isfinite(far).all()
