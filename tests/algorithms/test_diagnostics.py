"""Diagnostics: their numbers on small vectors, and that a metric without data has no key."""

import math

import pytest
import torch

from groupwise.algorithms import diagnostics, kl_estimators, losses
from groupwise.algorithms.table import ALGORITHMS


def test_ratio_on_policy_is_one():
    found = diagnostics.ratio(torch.zeros(4), torch.zeros(4, dtype=torch.bool))
    assert found == {
        "ratio/mean": 1.0,
        "ratio/min": 1.0,
        "ratio/max": 1.0,
        "ratio/kl": 0.0,
        "ratio/ess": 1.0,
        "clip/low": 0.0,
        "clip/high": 0.0,
    }


def test_ratio_against_the_definitions():
    ratios = [0.5, 0.9, 1.5, 1.5]
    found = diagnostics.ratio(torch.tensor(ratios, dtype=torch.float64).log(), torch.tensor([True, False, True, False]))
    assert found["clip/low"] == found["clip/high"] == 0.25
    assert found["ratio/mean"] == pytest.approx(1.1)
    assert found["ratio/kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert found["ratio/ess"] == pytest.approx(sum(ratios) ** 2 / (4 * sum(r * r for r in ratios)))
    assert "clip/low" not in diagnostics.ratio(torch.zeros(1))


def test_clip_fractions_count_the_tokens_without_gradient(random_terms):
    terms = random_terms((40, 30, 30), spread=0.5, per_token=True)
    losses.Clipped()(terms).sum().backward()
    found = diagnostics.ratio(terms.log_ratio_M, ALGORITHMS["grpo"].cut(terms))
    silent = float((terms.logp_M.grad == 0).double().mean())
    assert found["clip/low"] + found["clip/high"] == pytest.approx(silent)
    assert silent > 0.2


def test_p05_progress_is_not_the_loss(random_terms):
    """On-policy with centred advantages the loss is 0 whatever the policy learns; the progress number moves with it."""
    terms = random_terms((2, 2), spread=0.0)
    advantage_M = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    assert float(-advantage_M.mean()) == 0.0
    before = diagnostics.progress(terms.logp_M, advantage_M)["progress"]
    after = diagnostics.progress(terms.logp_M + 0.1 * advantage_M, advantage_M)["progress"]
    assert before == pytest.approx((advantage_M * terms.logp_M).mean().item())
    assert after - before == pytest.approx(0.1)


def test_p26_wide_gaps_are_counted():
    logp_N, reference_N = torch.tensor([-1.0, -101.0, -1.0]), torch.tensor([-1.0, -1.0, -101.0])
    kl_N = kl_estimators.K3()(logp_N, reference_N, torch.zeros(3))
    found = diagnostics.reference_kl(kl_N, logp_N, reference_N)
    assert found["kl/guarded"] == 2.0
    assert found["kl/max"] == float(kl_N.max())
    assert all(math.isfinite(value) for value in found.values())


def test_mismatch_is_zero_when_sampled_is_scored():
    logp_N = torch.tensor([-1.0, -2.0])
    assert diagnostics.mismatch(logp_N, logp_N) == {"mismatch/mean": 0.0, "mismatch/max": 0.0, "mismatch/kl": 0.0}
    found = diagnostics.mismatch(logp_N + torch.tensor([0.1, -0.3]), logp_N)
    assert found["mismatch/mean"] == pytest.approx(0.2, abs=1e-6)
    assert found["mismatch/max"] == pytest.approx(0.3, abs=1e-6)
    assert found["mismatch/kl"] == pytest.approx((math.expm1(0.1) - 0.1 + math.expm1(-0.3) + 0.3) / 2, abs=1e-6)


def test_dropped_is_the_share_of_zeros():
    assert diagnostics.dropped(torch.tensor([0.0, 1.0, 2.0, 0.0])) == 0.5
    assert diagnostics.dropped(torch.tensor([True, False, True, True])) == 0.25


def test_p27_nothing_to_look_at_has_no_key():
    none = torch.zeros(0)
    assert diagnostics.ratio(none, none.bool()) == {}
    assert diagnostics.progress(none, none) == diagnostics.mismatch(none, none) == diagnostics.reference_kl(none, none, none) == {}
