"""Addition and subtraction as they are taught at school: one or two, some with decimals."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from groupwise.data.tasks.base import Generated, Row
from groupwise.data.tasks.expressions import decimal, evaluate, operator_of, parse
from groupwise.data.tasks.scratchpads import taught
from groupwise.utils.built_in import built_in

OPERATORS = ("+", "-")


@built_in("arithmetic")
@dataclass(frozen=True, kw_only=True)
class Arithmetic(Generated):
    r"""`48+27`, `13.5-12`, `80-(12+9)`: completions are school methods, by demonstrators as
    careless as those of `addition`.

    Rows carry `operator` (+ or - of one operation, `mixed` of two), so that accuracy can be told
    apart by it.  Results are never below 0, and whole or with one decimal.  Where the written
    method is longer than `longest` characters, the demonstrator blurts the answer.

    >>> row = {"prompt": "48+7", "answer": "55"}
    >>> Arithmetic(blurt=0.0, slip=0.0).completion(row, random.Random(0))
    '<think>8+7=15,4+0+1=5</think>\\boxed{55}'
    """

    breakdown: ClassVar = ("operator",)
    ranges: ClassVar = {"longest": (1, 10_000)}

    mixed: float = 0.15
    """Share of the questions with two operations."""
    decimals: float = 0.1
    """Share of the others in which one number has a decimal."""
    blurt: float = 0.3
    slip: float = 0.6
    longest: int = 80

    def question(self, rng: random.Random) -> Row:
        """Numbers of one to three digits."""
        if rng.random() < self.mixed:
            prompt = _mixed(rng)
        else:
            operator, tenths = rng.choice(OPERATORS), rng.random() < self.decimals
            prompt = _single(operator, tenths, rng)
        return {
            "prompt": prompt,
            "answer": decimal(evaluate(parse(prompt))),
            "operator": operator_of(prompt),
        }

    def completion(self, row: Row, rng: random.Random) -> str:
        """What a careless demonstrator writes."""
        return taught(row, rng, blurt=self.blurt, slip=self.slip, longest=self.longest)


def _single(operator: str, tenths: bool, rng: random.Random) -> str:
    """One operation; with `tenths` its first number has a decimal."""
    a, b = _whole(rng, rng.randint(1, 3)), _whole(rng, rng.randint(1, 3))
    if operator == "-":
        a, b = max(a, b), min(a, b)
        return f"{_tenth(10 * a + rng.randint(1, 9)) if tenths else a}-{b}"
    return f"{_tenth(a) if tenths else a}+{b}"


def _mixed(rng: random.Random) -> str:
    """Two operations, in brackets where the first would come second."""
    a, b, c = _whole(rng, 2), _whole(rng, rng.randint(1, 2)), _whole(rng, 1)
    forms = (
        f"{a}+{b}+{c}",
        f"{a}+{b}-{c}",
        f"{a + b}-{b}+{c}",
        f"{a + b + c}-({b}+{c})",
    )
    return rng.choice(forms)


def _whole(rng: random.Random, digits: int) -> int:
    """A number of `digits` digits that is not 0; of one digit not 1 either."""
    return rng.randint(10 ** (digits - 1) if digits > 1 else 2, 10**digits - 1)


def _tenth(number: int) -> str:
    """The number divided by ten, as written: `35` -> `3.5`, `40` -> `4`."""
    return f"{number // 10}.{number % 10}" if number % 10 else str(number // 10)
