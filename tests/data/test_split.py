import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.split import hash_share, part_of
from groupwise.data.tasks.base import is_held_out
from groupwise.errors import ConfigError


@given(st.text())
def test_a_tenth_is_held_out_by_the_first_byte_of_the_md5(prompt):
    assert is_held_out(prompt) == (hashlib.md5(prompt.encode()).digest()[0] < 26)
    assert 0.0 <= hash_share(prompt) < 1.0


def test_shares_are_uniform_and_parts_have_their_sizes():
    parts = [part_of(f"prompt {i}", {"test": 0.2, "validation": 0.1}) for i in range(10_000)]
    # five standard deviations of a binomial share
    assert abs(parts.count("test") / 10_000 - 0.2) < 0.02
    assert abs(parts.count("validation") / 10_000 - 0.1) < 0.015


@given(st.text(), st.floats(0, 0.4), st.floats(0, 0.4), st.floats(0, 0.1))
def test_enlarging_the_last_part_moves_no_key_between_the_others(key, test, validation, more):
    before = part_of(key, {"test": test, "validation": validation})
    after = part_of(key, {"test": test, "validation": validation + more})
    assert after == before or (before, after) == ("train", "validation")


@pytest.mark.parametrize("fractions", [{"test": 0.6, "validation": 0.4}, {"test": -0.1}])
def test_impossible_fractions(fractions):
    with pytest.raises(ConfigError, match="held-out fractions"):
        part_of("x", fractions)
