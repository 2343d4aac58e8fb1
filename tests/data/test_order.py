import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.order import Order
from groupwise.errors import CheckpointError, DataError

sizes, seeds = st.integers(1, 30), st.integers(0, 2**63)


@given(sizes, seeds, st.booleans(), st.integers(1, 4))
def test_every_epoch_visits_each_row_exactly_once(n, seed, shuffle, epochs):
    visits = Order(n, seed, shuffle).take(n * epochs)
    for epoch in range(epochs):
        part = visits[epoch * n : (epoch + 1) * n]
        assert {e for e, _ in part} == {epoch}
        assert sorted(row for _, row in part) == list(range(n))


@given(sizes, seeds, st.booleans(), st.lists(st.integers(0, 12), max_size=8), st.integers(0, 8))
def test_p44_resuming_anywhere_continues_the_same_order(n, seed, shuffle, takes, stop):
    straight = Order(n, seed, shuffle)
    interrupted = Order(n, seed, shuffle)
    expected, seen = [straight.take(k) for k in takes], []
    for i, k in enumerate(takes):
        if i == stop:
            state = json.loads(json.dumps(interrupted.state()))
            interrupted = Order(n, seed, shuffle)
            interrupted.restore(state)
        seen.append(interrupted.take(k))
    assert seen == expected


def test_epochs_and_seeds_differ_and_the_order_is_pinned():
    order = Order(50, seed=1)
    first, second = ([row for _, row in order.take(50)] for _ in range(2))
    assert first != second
    assert first != [row for _, row in Order(50, seed=2).take(50)]
    assert first != [row for _, row in Order(50, seed=1 + 2**32).take(50)]
    assert [row for _, row in Order(8, seed=0).take(8)] == PINNED  # a resumed run must not depend on library versions
    assert [row for _, row in Order(4, seed=9, shuffle=False).take(6)] == [0, 1, 2, 3, 0, 1]


PINNED = [2, 6, 0, 4, 1, 3, 5, 7]


@pytest.mark.parametrize(("name", "value"), [("rows", 11), ("seed", 4), ("shuffle", False)])
def test_a_state_of_other_data_is_refused(name, value):
    order = Order(10, seed=3)
    with pytest.raises(CheckpointError, match=f"saved with {name} = {value}"):
        order.restore(order.state() | {name: value})
    with pytest.raises(CheckpointError, match="fields"):
        order.restore({"drawn": 3})


def test_no_rows_no_order():
    with pytest.raises(DataError, match="no rows"):
        Order(0, seed=0)
