"""Arithmetic expressions without `eval`: numbers, + - * / // (rounded down), brackets and signs,
computed in exact fractions.

What is parsed here was written by a model or by a data set: nothing else is understood, and the
depth is bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DEEPEST = 50
"""Brackets and signs within each other."""

_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(//|[-+*/()]))")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Operation:
    """`left operator right`; the sign of a bracket is an operation with 0 on the left."""

    operator: str
    left: Number | Operation
    right: Number | Operation


Expression = Number | Operation


def parse(text: str) -> Expression:
    """The expression that `text` writes, operators of equal rank from the left.

    Raises ValueError, with the place, if it is anything else.

    >>> evaluate(parse("2+3*(4-1)/.5"))
    Fraction(20, 1)
    """
    parser = _Arithmetic(text)
    expression = parser.sum(0)
    parser.end()
    return expression


def evaluate(expression: Expression) -> Fraction:
    """Compute the exact value.  Raises ZeroDivisionError."""
    if isinstance(expression, Number):
        return expression.value
    operator, left, right = (
        expression.operator,
        evaluate(expression.left),
        evaluate(expression.right),
    )
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return Fraction(left // right) if operator == "//" else left / right


def operators_in(expression: Expression) -> list[str]:
    """The operators, from the left."""
    if isinstance(expression, Number):
        return []
    return [*operators_in(expression.left), expression.operator, *operators_in(expression.right)]


def decimal(value: Fraction, places: int | None = None) -> str:
    """`value` as people write it: no needless zeros.  Rounded to `places` decimals where it does
    not end by itself.

    >>> decimal(Fraction(5, 2)), decimal(Fraction(-1200)), decimal(Fraction(10, 3), 2)
    ('2.5', '-1200', '3.33')
    """
    digits = 0
    while (value * 10**digits).denominator != 1:
        if digits == places:
            break
        digits += 1
        if digits > 60:
            raise ValueError(f"{value} has no finite decimal form: say how many places to keep")
    scaled = value * 10**digits
    whole = scaled.numerator if scaled.denominator == 1 else round(scaled)
    text = f"{abs(whole):0{digits + 1}d}"
    text = f"{text[:-digits]}.{text[-digits:]}".rstrip("0").rstrip(".") if digits else text
    return f"-{text}" if whole < 0 else text


def operator_of(expression: str) -> str:
    """The operator of a single operation, or `mixed`.  Raises ValueError if it is no expression.

    >>> operator_of("48/2"), operator_of("48+24+2")
    ('/', 'mixed')
    """
    operators = operators_in(parse(expression))
    return operators[0].replace("//", "/") if len(operators) == 1 else "mixed"


class _Arithmetic:
    """Recursive descent: sum -> product -> factor -> number or bracket."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def sum(self, depth: int) -> Expression:
        left = self.product(depth)
        while (operator := self.take("+", "-")) is not None:
            left = Operation(operator, left, self.product(depth))
        return left

    def product(self, depth: int) -> Expression:
        left = self.factor(depth)
        while (operator := self.take("*", "/", "//")) is not None:
            left = Operation(operator, left, self.factor(depth))
        return left

    def factor(self, depth: int) -> Expression:
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets or signs within each other")
        if (sign := self.take("+", "-")) is not None:
            operand = self.factor(depth + 1)
            if sign == "+":
                return operand
            return (
                Number(-operand.value)
                if isinstance(operand, Number)
                else Operation("-", Number(Fraction(0)), operand)
            )
        if self.take("(") is not None:
            inside = self.sum(depth + 1)
            if self.take(")") is None:
                raise ValueError(f"a bracket is not closed at {self.place} of {self.text!r:.80}")
            return inside
        match = _TOKEN.match(self.text, self.place)
        if match is None or match[1] is None:
            raise ValueError(f"expected a number at {self.place} of {self.text!r:.80}")
        self.place = match.end()
        return Number(Fraction(match[1].rstrip(".")))

    def take(self, *operators: str) -> str | None:
        """The next operator or bracket if it is one of `operators`."""
        match = _TOKEN.match(self.text, self.place)
        if match is None or match[2] not in operators:
            return None
        self.place = match.end()
        return match[2]

    def end(self) -> None:
        if self.text[self.place :].strip():
            raise ValueError(f"expected an operator at {self.place} of {self.text!r:.80}")
