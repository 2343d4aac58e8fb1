import random
import re

from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.tasks.expressions import evaluate, parse
from groupwise.data.tasks.scratchpads import add, subtract, work

whole, seeds = st.integers(0, 10**7), st.integers(0, 10**6)


def always():
    return True


def equations_hold(text):
    """Every `a+b=c` of a scratchpad is true by Python's own arithmetic."""
    found = re.findall(r"([0-9+\-]+)=(\d+)", text)
    assert found, text
    for left, right in found:
        assert evaluate(parse(left)) == int(right), (left, right)
    return True


@given(whole, whole)
def test_the_careful_writer_is_right(a, b):
    text, total = add(a, b)
    assert total == a + b
    assert equations_hold(text)
    text, difference = subtract(max(a, b), min(a, b))
    assert difference == abs(a - b)
    assert equations_hold(text)


@given(whole, whole, seeds)
def test_even_careless_equations_are_true(a, b, seed):
    rng = random.Random(seed)
    assert equations_hold(add(a, b, lambda: rng.random() < 0.5)[0])
    assert equations_hold(subtract(max(a, b), min(a, b), lambda: rng.random() < 0.5)[0])


def test_a_forgotten_carry_is_just_missing():
    assert add(654, 990, always) == ("4+0=4,5+9=14,6+9=15", 1544)
    assert subtract(52, 17, always) == ("12-7=5,5-1=4", 45)


@given(whole, whole, st.integers(0, 5))
def test_a_slip_is_asked_once_for_each_carry(a, b, width):
    asked = []
    add(a, b, lambda: bool(asked.append(1)))
    carries, carry = 0, 0
    digits = max(len(str(a)), len(str(b)))
    for place in range(digits - 1):  # the last column is written out: nothing is carried from it
        carry = int(a // 10**place % 10 + b // 10**place % 10 + carry >= 10)
        carries += carry
    assert len(asked) == carries


operands = st.one_of(st.integers(0, 999), st.decimals(0, 99, places=2)).map(str)


@given(operands, st.sampled_from("+-"), operands, st.sampled_from("+-"), operands)
def test_whole_expressions_arrive_at_their_value(a, first, b, second, c):
    for text in (f"{a}{first}{b}", f"{a}{first}{b}{second}{c}", f"{a}{first}({b}{second}{c})"):
        done = work(parse(text))
        if done is not None:
            assert done[1] == evaluate(parse(text))


def test_expressions_without_a_written_method_give_none():
    assert work(parse("7")) is None
    assert work(parse("10/3")) is None
    assert work(parse("2*3")) is None
    assert work(parse("(3-5)+2")) is None
    assert work(parse("3-5"))[1] == -2
