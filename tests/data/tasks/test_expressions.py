import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.tasks.expressions import decimal, evaluate, operators_in, parse

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def python_value(text):
    """Python's own reading of the expression, in fractions."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        return Fraction(ast.get_source_segment(text, node))

    return value(ast.parse(text, mode="eval").body)


numbers = st.one_of(st.integers(0, 9999).map(str), st.decimals(0, 99, places=2).map(str), st.sampled_from([".5", "3.", "0.125"]))
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " - ", "* "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        inner.map("+{}".format),
    ),
    max_leaves=8,
)


@given(expressions)
def test_it_reads_arithmetic_as_python_does(text):
    try:
        expected = python_value(text)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(parse(text))
    else:
        assert evaluate(parse(text)) == expected


@given(st.text(alphabet="0123456789.+-*/() ", max_size=12))
def test_what_python_refuses_is_refused(text):
    # `**` is Python's power and no operation here; leading zeros are fine here and an error there
    try:
        parsed = parse(text)
    except ValueError:
        return
    assert all(sign in ("+", "-", "*", "/", "//") for sign in operators_in(parsed))
    assert "**" not in text.replace(" ", "")


@pytest.mark.parametrize("text", ["", "2+", "(2", "2)", "2**3", "two", "__import__('os')", "1,2", "2 3", "1e5", "1_000", "²"])
def test_anything_else_is_a_value_error(text):
    with pytest.raises(ValueError):
        parse(text)


@pytest.mark.parametrize("text", ["(" * 100 + "1" + ")" * 100, "-" * 100 + "1"])
def test_depth_is_bounded(text):
    with pytest.raises(ValueError, match="more than 50"):
        parse(text)


def test_rounding_down():
    assert evaluate(parse("7//2")) == 3
    assert evaluate(parse("560//10")) == 56


@given(st.fractions(max_denominator=50), st.integers(0, 6))
def test_decimals_are_rounded_to_the_places_asked_for(value, places):
    assert abs(Fraction(decimal(value, places)) - value) <= Fraction(1, 2 * 10**places)


@given(st.decimals(-1000, 1000, places=4))
def test_decimals_are_exact_and_have_no_needless_zeros(value):
    text = decimal(Fraction(value))
    assert Fraction(text) == Fraction(value)
    assert "." not in text or text[-1] not in "0."


def test_an_endless_decimal_needs_its_places():
    assert decimal(Fraction(1, 3), 2) == "0.33"
    with pytest.raises(ValueError, match="how many places"):
        decimal(Fraction(1, 3))
