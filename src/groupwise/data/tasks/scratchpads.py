"""Arithmetic as it is taught at school: column by column, with what is carried written into the
next column.

Every function takes `slip`, which is asked once for each thing carried and answers whether it is
forgotten.  A careless writer's single equations are still true; only what should have been carried
is missing, and so the result is wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from fractions import Fraction

from groupwise.data.tasks.expressions import Expression, Number, decimal, parse

Slip = Callable[[], bool]


def careful() -> bool:
    """The `slip` of one who never forgets."""
    return False


def add(a: int, b: int, slip: Slip = careful) -> tuple[str, int]:
    """Column addition of a, b >= 0: its columns from the right, and the sum.

    >>> add(654, 990)
    ('4+0=4,5+9=14,6+9+1=16', 1644)
    """
    columns, total, carry, place = [], 0, 0, 1
    for x, y in _columns(a, b):
        column = x + y + carry
        columns.append(f"{x}+{y}+1={column}" if carry else f"{x}+{y}={column}")
        last = a < 10 * place and b < 10 * place
        total += place * (column if last else column % 10)
        carry = int(not last and column >= 10 and not slip())
        place *= 10
    return ",".join(columns), total


def subtract(a: int, b: int, slip: Slip = careful) -> tuple[str, int]:
    """Column subtraction of a >= b >= 0: a digit that is too small gets 10, and 1 is taken from the
    next column.

    >>> subtract(52, 17)
    ('12-7=5,5-1-1=3', 35)
    """
    columns, total, borrowed, place = [], 0, 0, 1
    for x, y in _columns(a, b):
        lent = 10 if x - y - borrowed < 0 else 0
        column = x + lent - y - borrowed
        columns.append(f"{x + lent}-{y}-1={column}" if borrowed else f"{x + lent}-{y}={column}")
        total += place * column
        borrowed = int(lent > 0 and not slip())
        place *= 10
    return ",".join(columns), total


def work(expression: Expression, slip: Slip = careful) -> tuple[str, Fraction] | None:
    """The scratchpad of a whole expression, one operation after the other, and the value it arrives
    at.

    None where there is no written method: a product, a quotient, or an operand below zero.

    >>> from groupwise.data.tasks.expressions import parse
    >>> work(parse("0.5+20"))
    ('5+0=5,0+0=0,0+2=2', Fraction(41, 2))
    >>> work(parse("(20+11)-5"))
    ('20+11:0+1=1,2+1=3>31;31-5:11-5=6,3-0-1=2', Fraction(26, 1))
    """
    steps: list[tuple[str, str, Fraction]] = []
    value = _collect(expression, slip, steps)
    if value is None or not steps:
        return None
    if len(steps) == 1:
        return steps[0][1], value
    *before, (last_task, last_text, _) = steps
    parts = [f"{task}:{text}>{decimal(result)}" for task, text, result in before]
    return ";".join([*parts, f"{last_task}:{last_text}"]), value


def taught(
    row: Mapping[str, str],
    rng: random.Random,
    *,
    blurt: float,
    slip: float,
    longest: float = math.inf,
) -> str:
    """What a careless demonstrator writes for the expression `row["prompt"]`: thinking, and a box.

    blurt: chance of `row["answer"]` without thinking, which also stands where there is no written
        method, or one longer than `longest` characters.  slip: chance of forgetting each thing
        carried.
    """
    blurted = rng.random() < blurt
    done = None if blurted else work(parse(row["prompt"]), lambda: rng.random() < slip)
    if done is None or len(done[0]) > longest:
        return f"\\boxed{{{row['answer']}}}"
    text, value = done
    return f"<think>{text}</think>\\boxed{{{decimal(value)}}}"


def _collect(
    expression: Expression, slip: Slip, steps: list[tuple[str, str, Fraction]]
) -> Fraction | None:
    """Appends (operation, scratchpad, result) for each operation, operands first."""
    if isinstance(expression, Number):
        return expression.value
    left = _collect(expression.left, slip, steps)
    right = _collect(expression.right, slip, steps)
    if left is None or right is None:
        return None
    done = _operate(expression.operator, left, right, slip)
    if done is None:
        return None
    text, value = done
    steps.append((f"{decimal(left)}{expression.operator}{decimal(right)}", text, value))
    return value


def _operate(
    operator: str, left: Fraction, right: Fraction, slip: Slip
) -> tuple[str, Fraction] | None:
    """One operation on decimals, as an operation on integers and a shift of the point."""
    if left < 0 or right < 0 or operator not in ("+", "-"):
        return None
    scale = 10 ** max(_places(left), _places(right))
    a, b = int(left * scale), int(right * scale)
    if operator == "+":
        text, total = add(a, b, slip)
        return text, Fraction(total, scale)
    text, difference = subtract(max(a, b), min(a, b), slip)
    return text, Fraction(difference if a >= b else -difference, scale)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digits of both from the right, the shorter one filled with zeros."""
    width = max(len(str(a)), len(str(b)))
    return [
        (int(x), int(y))
        for x, y in zip(reversed(f"{a:0{width}d}"), reversed(f"{b:0{width}d}"), strict=True)
    ]


def _places(value: Fraction) -> int:
    """Decimals that `value` needs."""
    text = decimal(value)
    return len(text.partition(".")[2])
