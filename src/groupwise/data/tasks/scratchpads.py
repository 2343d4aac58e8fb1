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


def multiply(a: int, b: int, slip: Slip = careful) -> tuple[str, int]:
    """Long multiplication of a, b >= 0: a row of columns for each digit of the shorter factor, then
    the rows are added.

    Trailing zeros are set aside.  A row ends with `>` and its value where there are several.

    >>> multiply(48, 7)
    ('8*7=56,4*7+5=33', 336)
    >>> multiply(48, 25)
    ('8*5=40,4*5+4=24>240;8*2=16,4*2+1=9>960;0+0=0,4+6=10,2+9+1=12', 1200)
    """
    a, a_zeros = _without_zeros(a)
    b, b_zeros = _without_zeros(b)
    if _digits(a) < _digits(b):
        a, b = b, a
    rows, values = [], []
    for place, digit in enumerate(reversed(str(b))):
        if digit == "0" and b:
            continue
        text, value = _row(a, int(digit), slip)
        rows.append(text)
        values.append(value * 10**place)
    if len(rows) > 1:
        rows = [f"{text}>{value}" for text, value in zip(rows, values, strict=True)]
    total = values[0]
    for value in values[1:]:
        text, total = add(total, value, slip)
        rows.append(text)
    return ";".join(rows), total * 10 ** (a_zeros + b_zeros)


def divide(a: int, b: int, slip: Slip = careful, places: int = 4) -> tuple[str, Fraction] | None:
    """Short division of a >= 0 by b > 0: what remains stands before the next digit, and zeros
    follow behind the decimal point.

    None if it does not end within `places` decimals.

    >>> divide(75, 3), divide(5, 2)
    (('7/3=2r1,15/3=5', Fraction(25, 1)), ('5/2=2r1,10/2=5', Fraction(5, 2)))
    """
    if (Fraction(a, b) * 10**places).denominator != 1:
        return None
    while a % 10 == 0 and b % 10 == 0 and a:
        a, b = a // 10, b // 10
    digits = str(a)
    start = next((i for i in range(1, len(digits)) if int(digits[:i]) >= b), len(digits))
    steps, quotient, current, decimals = [], 0, int(digits[:start]), 0
    following = list(digits[start:])
    while True:
        q, r = divmod(current, b)
        steps.append(f"{current}/{b}={q}r{r}" if r else f"{current}/{b}={q}")
        quotient = 10 * quotient + q
        if r and slip():
            r = 0
        if not following and (r == 0 or decimals == places):
            return ",".join(steps), Fraction(quotient, 10**decimals)
        decimals += not following
        current = 10 * r + int(following.pop(0) if following else 0)


def work(expression: Expression, slip: Slip = careful) -> tuple[str, Fraction] | None:
    """The scratchpad of a whole expression, one operation after the other, and the value it arrives
    at.

    None where there is no written method: an operand below zero, or a quotient that does not end.

    >>> from groupwise.data.tasks.expressions import parse
    >>> work(parse("0.5*20"))
    ('5*2=10', Fraction(10, 1))
    >>> work(parse("(2*111)-50"))
    ('2*111:1*2=2,1*2=2,1*2=2>222;222-50:2-0=2,12-5=7,2-0-1=1', Fraction(172, 1))
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
    if (
        left < 0
        or right < 0
        or (operator in ("/", "//") and right == 0)
        or (operator == "//" and (left / right).denominator != 1)
    ):
        return None
    shift = max(_places(left), _places(right))
    a, b = int(left * 10**shift), int(right * 10**shift)
    if operator == "+":
        text, total = add(a, b, slip)
        return text, Fraction(total, 10**shift)
    if operator == "-":
        text, difference = subtract(max(a, b), min(a, b), slip)
        return text, Fraction(difference if a >= b else -difference, 10**shift)
    if operator in ("/", "//"):
        return divide(a, b, slip)
    a, b = int(left * 10 ** _places(left)), int(right * 10 ** _places(right))
    text, product = multiply(a, b, slip)
    return text, Fraction(product, 10 ** (_places(left) + _places(right)))


def _row(a: int, digit: int, slip: Slip) -> tuple[str, int]:
    """a times one digit."""
    columns, total, carry, place = [], 0, 0, 1
    for x in reversed([int(character) for character in str(a)]):
        column = x * digit + carry
        columns.append(f"{x}*{digit}+{carry}={column}" if carry else f"{x}*{digit}={column}")
        last = a < 10 * place
        total += place * (column if last else column % 10)
        carry = 0 if last or column < 10 or slip() else column // 10
        place *= 10
    return ",".join(columns), total


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digits of both from the right, the shorter one filled with zeros."""
    width = max(len(str(a)), len(str(b)))
    return [
        (int(x), int(y))
        for x, y in zip(reversed(f"{a:0{width}d}"), reversed(f"{b:0{width}d}"), strict=True)
    ]


def _digits(n: int) -> int:
    """Digits that need a row of their own."""
    return sum(character != "0" for character in str(n))


def _without_zeros(n: int) -> tuple[int, int]:
    """n without its trailing zeros, and how many there were."""
    zeros = len(str(n)) - len(str(n).rstrip("0")) if n else 0
    return n // 10**zeros, zeros


def _places(value: Fraction) -> int:
    """Decimals that `value` needs."""
    text = decimal(value)
    return len(text.partition(".")[2])
