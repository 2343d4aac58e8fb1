"""Weights: what each token counts, and what cannot change it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.algorithms.table import PARTS

STEP = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12)
NAMES = ["sequence_mean", "token_mean", "constant", "sequence_sum", "prompt_mean"]


def weigh(name, tokens, prompts):
    keywords = {"length": 10} if name == "constant" else {}
    return PARTS["weights"][name](**keywords)(np.array(tokens, dtype=np.int64), np.array(prompts, dtype=np.int64))


@pytest.mark.parametrize("name", NAMES)
@given(step=STEP)
def test_weights_equal_the_formulas_of_the_table(name, step):
    tokens, prompts = zip(*step, strict=True)
    count, total = len(tokens), sum(tokens)
    for i, (n, prompt) in enumerate(step):
        if n == 0:
            assert weigh(name, tokens, prompts)[i] == 0.0
            continue
        own = sum(m for m, q in step if q == prompt)
        expected = {
            "sequence_mean": 1 / (count * n),
            "token_mean": 1 / total,
            "constant": 1 / (count * 10),
            "sequence_sum": 1 / count,
            "prompt_mean": 1 / (len(set(prompts)) * own),
        }[name]
        assert weigh(name, tokens, prompts)[i] == pytest.approx(expected, rel=1e-14)


@given(step=STEP)
def test_weights_sum_to_what_each_normalisation_promises(step):
    """The weights of all tokens add up to the share of what has tokens at all."""
    tokens, prompts = map(np.array, zip(*step, strict=True))
    total = lambda name: float(weigh(name, tokens, prompts) @ tokens)  # noqa: E731
    assert total("sequence_mean") == pytest.approx((tokens > 0).mean())
    assert total("token_mean") == pytest.approx(float(tokens.any()))
    assert total("constant") == pytest.approx(tokens.mean() / 10)
    assert total("sequence_sum") == pytest.approx(tokens.mean())
    live = {p for n, p in step if n > 0}
    assert total("prompt_mean") == pytest.approx(len(live) / len(set(prompts.tolist())))


@pytest.mark.parametrize("name", NAMES)
@given(step=STEP, data=st.data())
def test_row_order_is_irrelevant(name, step, data):
    order = data.draw(st.permutations(range(len(step))))
    tokens, prompts = zip(*step, strict=True)
    before = weigh(name, tokens, prompts)
    after = weigh(name, [tokens[i] for i in order], [prompts[i] for i in order])
    np.testing.assert_allclose(after, before[list(order)], rtol=1e-14)


@given(step=STEP, where=st.integers(0, 12))
def test_p04_masking_a_row_is_removing_it_for_token_means(step, where):
    """A truncated row that is masked (0 trained tokens) does not dilute the others' gradient."""
    tokens, prompts = (list(column) for column in zip(*step, strict=True))
    where = min(where, len(tokens))
    masked = weigh("token_mean", [*tokens[:where], 0, *tokens[where:]], [*prompts[:where], 0, *prompts[where:]])
    np.testing.assert_array_equal(np.delete(masked, where), weigh("token_mean", tokens, prompts))


def test_completions_without_tokens_still_count_in_r():
    """Skipping or masking a completion must not make the others louder where the normalisation is per completion."""
    assert weigh("sequence_mean", [4, 0], [0, 0])[0] == 1 / 8
    assert weigh("constant", [4, 0], [0, 0])[0] == 1 / 20
    assert weigh("sequence_sum", [4, 0], [0, 0])[0] == 1 / 2


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_train_is_not_an_error(name):
    assert weigh(name, [0, 0], [0, 1]).tolist() == [0.0, 0.0]
    assert weigh(name, [], []).tolist() == []


@pytest.mark.parametrize("name", NAMES)
def test_p01_p02_micro_batches_cannot_change_the_gradient(name):
    """The weights are fixed before the cut, so any cut sums to the same step; a token mean per micro-batch does not."""
    rng = np.random.default_rng(1)
    tokens, prompts = rng.integers(1, 9, size=8), np.arange(8) // 4
    gradient_RD = rng.normal(size=(8, 3))
    weight_R = weigh(name, tokens, prompts)
    whole = weight_R @ gradient_RD
    for size in (1, 2, 3, 8):
        parts = [slice(start, start + size) for start in range(0, 8, size)]
        np.testing.assert_allclose(sum(weight_R[part] @ gradient_RD[part] for part in parts), whole, rtol=1e-12)
    local = sum(weigh("token_mean", tokens[part], prompts[part]) @ gradient_RD[part] / 4 for part in np.split(np.arange(8), 4))
    assert np.abs(local - weigh("token_mean", tokens, prompts) @ gradient_RD).max() > 1e-3
