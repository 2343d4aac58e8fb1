"""Small programs: a function is described in words, and its hidden tests are calls of it.

The reward is `code`.  Tests and references come from the same description, so a program that passes
all cases does what was asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupwise.data.tasks.base import Generated, Row
from groupwise.data.tasks.chat import WORDS
from groupwise.utils.built_in import built_in

CASES = 8
"""Calls by which a program is tested.  Their results differ: a constant passes at most one."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A function: in words, as the expression that it returns, and as a function of ours."""

    words: str
    expression: str
    reference: Callable[[Any], Any]
    draw: Callable[[random.Random], Any]
    """Draws an argument."""


def _number(rng: random.Random) -> int:
    return rng.randint(-50, 50)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 20) for _ in range(rng.randint(3, 9))]


def _text(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 3)))


def _sum(rng: random.Random) -> _Described:
    a, b = rng.randint(2, 9), rng.randint(1, 99)
    return _Described(
        f"{a} times the number x, plus {b}", f"{a} * x + {b}", lambda x: a * x + b, _number
    )


def _rest(rng: random.Random) -> _Described:
    a, b = rng.randint(9, 19), rng.randint(1, 99)
    words = f"the remainder of the number x plus {b}, divided by {a}"
    return _Described(words, f"(x + {b}) % {a}", lambda x: (x + b) % a, _number)


def _quotient(rng: random.Random) -> _Described:
    a, b = rng.randint(2, 9), rng.randint(1, 99)
    words = f"the number x plus {b}, divided by {a} and rounded down"
    return _Described(words, f"(x + {b}) // {a}", lambda x: (x + b) // a, _number)


def _larger(rng: random.Random) -> _Described:
    a, b = rng.randint(-15, 15), rng.randint(2, 9)
    words = f"a list of the numbers in the list x that are greater than {a}, each multiplied by {b}"
    return _Described(
        words, f"[{b} * n for n in x if n > {a}]", lambda x: [b * n for n in x if n > a], _numbers
    )


def _added(rng: random.Random) -> _Described:
    a = rng.randint(1, 99)
    words = f"the sum of the numbers in the list x, plus {a}"
    return _Described(words, f"sum(x) + {a}", lambda x: sum(x) + a, _numbers)


def _scaled(rng: random.Random) -> _Described:
    a = rng.randint(2, 99)
    words = f"the list x with each number multiplied by {a}"
    return _Described(words, f"[{a} * n for n in x]", lambda x: [a * n for n in x], _numbers)


def _first(rng: random.Random) -> _Described:
    a, word = rng.randint(2, 9), rng.choice(WORDS)
    words = f"the first {a} letters of the text x, followed by {word}"
    return _Described(words, f'x[:{a}] + "{word}"', lambda x: x[:a] + word, _text)


def _length(rng: random.Random) -> _Described:
    b = rng.randint(1, 99)
    words = f"the length of the text x, plus {b}"
    return _Described(words, f"len(x) + {b}", lambda x: len(x) + b, _text)


def _repeated(rng: random.Random) -> _Described:
    a, word = rng.randint(2, 9), rng.choice(WORDS)
    words = f"the text x repeated {a} times, followed by {word}"
    return _Described(words, f'x * {a} + "{word}"', lambda x: x * a + word, _text)


def _joined(rng: random.Random) -> _Described:
    word = rng.choice(WORDS)
    words = f"the text x in capital letters, followed by {word}"
    return _Described(words, f'x.upper() + "{word}"', lambda x: x.upper() + word, _text)


KINDS: tuple[Callable[[random.Random], _Described], ...] = (
    _sum, _rest, _quotient, _larger, _added, _scaled, _first, _length, _repeated, _joined,
)  # fmt: skip


@built_in("programs")
@dataclass(frozen=True, kw_only=True)
class Programs(Generated):
    """`Write a Python function f(x) that returns x % 7` in words, with hidden tests.  The reward is
    `code`.

    >>> (row,) = Programs().held_out(1)
    >>> row["prompt"].startswith("Write a Python function f(x) that returns ")
    True
    """

    def question(self, rng: random.Random) -> Row:
        """Draw a function, and arguments to call it with."""
        described = rng.choice(KINDS)(rng)
        expected: list[Any] = []
        tests = []
        while len(tests) < CASES:
            argument = described.draw(rng)
            result = described.reference(argument)
            if result not in expected:
                expected.append(result)
                tests.append({"call": "f", "args": [argument], "expected": result})
        return {
            "prompt": f"Write a Python function f(x) that returns {described.words}.",
            "answer": f"def f(x):\n    return {described.expression}",
            "tests": json.dumps(tests),
        }

    def completion(self, row: Row, rng: random.Random) -> str:
        """Return the reference, as a block of code."""
        return f"```python\n{row['answer']}\n```"
