"""Draws against exact distributions, and truncation against transformers' own warpers."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from groupwise.ops import operations as ops
from groupwise.records import Sampling
from groupwise.rollout.sampling import draw, stream_keys, uniforms


def warped(z, sampling):
    """transformers' processors in the order in which its generate applies them."""
    z = TemperatureLogitsWarper(float(sampling.temperature))(None, z)
    if sampling.top_k:
        z = TopKLogitsWarper(sampling.top_k)(None, z)
    if sampling.top_p < 1.0:
        z = TopPLogitsWarper(sampling.top_p)(None, z)
    if sampling.min_p:
        z = MinPLogitsWarper(sampling.min_p)(None, z)
    return z


SETTINGS = [
    *(Sampling(temperature=t) for t in (0.5, 0.7, 1.0, 1.3)),
    *(Sampling(temperature=t, top_k=4) for t in (0.5, 1.3)),
    *(Sampling(temperature=t, top_p=0.8) for t in (0.7, 1.0)),
    *(Sampling(temperature=t, min_p=0.1) for t in (0.7, 1.0)),
    Sampling(temperature=1.3, top_k=9, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_p13_exp_logp_is_the_frequency(sampling):
    size, count = 12, 100_000
    torch.manual_seed(3)
    z = 1.5 * torch.randn(1, size)
    u = torch.from_numpy(uniforms(stream_keys(5, "a", [0, 1]), count // 2)).flatten()
    token, logp, support = draw(z.expand(count, size), u, sampling)
    expected = warped(z.double(), sampling).softmax(-1)[0]
    assert (logp.exp() - expected[token]).abs().max() < 1e-6
    counts = np.bincount(token.numpy(), minlength=size)
    alive = expected.numpy() > 0
    assert counts[~alive].sum() == 0
    assert chisquare(counts[alive], count * expected.numpy()[alive]).pvalue > 1e-3
    if sampling.restricts:
        assert set(support.size_R.tolist()) == {alive.sum()}
        kept = support.ids_RC[:, : alive.sum()].sort(-1).values
        assert (kept == torch.from_numpy(np.flatnonzero(alive))).all()
    else:
        assert support is None


@pytest.mark.parametrize("size", [12, 128, 300, 5000])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 5, "ties": True},
        {"top_k": 700},
        {"top_k": 700, "ties": True},
        {"top_p": 0.3},  # which of tied tokens falls to top-p is the sort's own choice: not compared
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 0.2, "ties": True},
        {"top_k": 300, "top_p": 0.95, "min_p": 0.01},
    ],
    ids=str,
)
def test_p13_support_is_what_transformers_keeps(size, options):
    torch.manual_seed(0)
    z = torch.randn(9, size, dtype=torch.float64)
    if options.get("ties"):
        z = z.mul(2).round()
    options = {name: value for name, value in options.items() if name != "ties"}
    sampling = Sampling(temperature=0.9, **options)
    token, logp, support = draw(z, torch.rand(9, dtype=torch.float64), sampling)
    expected = warped(z, sampling).log_softmax(-1)
    for row in range(9):
        kept = support.ids_RC[row, : support.size_R[row]]
        assert sorted(kept.tolist()) == expected[row].isfinite().nonzero()[:, 0].tolist()
        assert abs(logp[row] - expected[row, token[row]]) < 1e-10


@pytest.mark.parametrize("size", [1, 12, 128, 129, 256, 300, 5000])
def test_draw_is_the_inverse_of_the_cumulative_distribution(size):
    torch.manual_seed(1)
    z = 3 * torch.randn(64, size, dtype=torch.float64)
    u = torch.rand(64, dtype=torch.float64)
    token, logp, _ = draw(z, u, Sampling(temperature=0.8))
    p = (z / 0.8).softmax(-1).numpy()
    expected = [int(np.searchsorted(row.cumsum(), x, side="right")) for row, x in zip(p, u.numpy(), strict=True)]
    assert token.tolist() == expected
    assert np.allclose(logp.numpy(), np.log(p[np.arange(64), expected]), atol=1e-12)


@pytest.mark.parametrize("size", [12, 300])
@pytest.mark.parametrize("u", [0.0, np.nextafter(1.0, 0.0)])
def test_impossible_tokens_are_never_drawn_not_even_at_the_ends(size, u):
    z = torch.full((1, size), -torch.inf)
    z[0, size // 2 : size // 2 + 3] = torch.tensor([0.0, 20.0, -1.0])
    for sampling in (Sampling(), Sampling(top_p=0.999999), Sampling(top_k=size)):
        token, logp, _ = draw(z, torch.tensor([u], dtype=torch.float64), sampling)
        assert size // 2 <= int(token) < size // 2 + 3
        assert torch.isfinite(logp).all()


def test_greedy_takes_the_likeliest_and_reports_temperature_one():
    z = torch.randn(5, 300)
    token, logp, support = draw(z, torch.zeros(5, dtype=torch.float64), Sampling(temperature=0.0, top_k=3))
    assert token.tolist() == z.argmax(-1).tolist()
    assert support is None
    torch.testing.assert_close(logp, z.log_softmax(-1).amax(-1))


def test_near_greedy_temperature_draws_the_likeliest_with_finite_logp():
    torch.manual_seed(2)
    z = 5 * torch.randn(50, 300)
    for temperature in (1e-2, 1e-4, 1e-6):
        token, logp, _ = draw(z, torch.rand(50, dtype=torch.float64), Sampling(temperature=temperature))
        assert torch.isfinite(logp).all()
        if temperature <= 1e-4:
            assert token.tolist() == z.argmax(-1).tolist()
            assert float(logp.abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_of_drawing_agree(dtype, monkeypatch):
    """The compiled kernel's and torch's; between neighbours a number at their border may fall either way."""
    torch.manual_seed(4)
    z, u = (4 * torch.randn(500, 1000)).to(dtype), torch.rand(500, dtype=torch.float64)
    one = draw(z, u, Sampling(temperature=0.9))
    monkeypatch.setattr(ops, "_chosen", ops.Operations())
    other = draw(z, u, Sampling(temperature=0.9))
    same = one[0] == other[0]
    assert int(same.sum()) >= 498
    torch.testing.assert_close(one[1][same], other[1][same], rtol=0, atol=3e-6)


def test_low_precision_logits_are_drawn_and_scored_in_float32():
    z = torch.randn(4, 300).bfloat16()
    token, logp, _ = draw(z, torch.rand(4, dtype=torch.float64), Sampling(temperature=0.7))
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, (z.float() / 0.7).log_softmax(-1).gather(1, token[:, None])[:, 0], rtol=0, atol=2e-6)


def test_streams_are_uniform_independent_and_extend_each_other():
    block = uniforms(stream_keys(0, "a", range(50)), 2000)
    assert block.min() >= 0.0
    assert block.max() < 1.0
    assert kstest(block.ravel(), "uniform").pvalue > 1e-3
    neighbours = [(block[:-1], block[1:]), (block[:, :-1], block[:, 1:])]
    neighbours += [(block, uniforms(stream_keys(s, p, range(50)), 2000)) for s, p in ((1, "a"), (0, "b"))]
    assert all(abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.015 for x, y in neighbours)
    assert np.array_equal(uniforms(stream_keys(0, "a", [7]), 10)[0], block[7, :10])


def test_numbers_that_are_not_finite_come_out_as_such():
    z = torch.full((2, 300), torch.nan)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.5)):
        assert not torch.isfinite(draw(z, torch.rand(2, dtype=torch.float64), sampling)[1]).any()
