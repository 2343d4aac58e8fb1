"""Countdown: reach a target from given numbers, each used exactly once.  Many answers are right, so it brings its own reward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from groupwise.data.tasks.base import Generated, Row, check_count, check_share
from groupwise.data.tasks.expressions import apply, evaluate, numbers_in, parse


@dataclass(frozen=True, kw_only=True)
class Countdown(Generated):
    r"""`make 26 from 3 5 7`: a right box holds an expression, `\boxed{3*7+5}`.  Rows carry the target as `answer`, and `numbers`.

    Demonstrators reach a target of their own with probability `slip`.
    The reward is `groupwise.data.tasks.countdown:solved`; `accuracy` would accept the bare target.
    """

    count: int = 3
    below: int = 20
    slip: float = 0.5

    def __post_init__(self) -> None:
        check_count("count", self.count, 2, 6)
        check_count("below", self.below, 2, 1000)
        check_share("slip", self.slip)

    def question(self, rng: random.Random) -> Row:
        """A target that some way of combining the numbers reaches."""
        numbers = [rng.randint(1, self.below - 1) for _ in range(self.count)]
        _, _, target = _combine(numbers, rng)
        return {"prompt": f"make {target} from {' '.join(map(str, numbers))}", "answer": str(target), "numbers": numbers}

    def completion(self, row: Row, rng: random.Random) -> str:
        """One way of combining the numbers, step by step: a right one (searched for), or any one."""
        steps, text, value = _combine(row["numbers"], rng)
        if rng.random() >= self.slip:
            while str(value) != row["answer"]:
                steps, text, value = _combine(row["numbers"], rng)
        return f"<think>{','.join(steps)}</think>\\boxed{{{text}}}"


def solved(completions: Sequence[str], answer: Sequence[str], numbers: Sequence[Sequence[int]], **_: object) -> list[float]:
    r"""1 where the last `\boxed{...}` holds an expression that uses each number once and equals the answer, else 0.

    >>> solved([r"\boxed{3*7+5}", r"\boxed{26}", "3*7+5"], ["26"] * 3, [[3, 5, 7]] * 3)
    [1.0, 0.0, 0.0]
    """
    rows = zip(completions, answer, numbers, strict=True)
    return [float(_solves(_text(completion), target, given)) for completion, target, given in rows]


def _solves(completion: str, target: str, numbers: Sequence[int]) -> bool:
    _, found, boxed = completion.rpartition("\\boxed{")
    if not found or "}" not in boxed:
        return False
    try:
        expression = parse(boxed[: boxed.index("}")][:200])
        return evaluate(expression) == Fraction(target) and sorted(numbers_in(expression)) == sorted(map(Fraction, numbers))
    except (ValueError, ZeroDivisionError):  # what a model writes need not be arithmetic
        return False


def _text(completion: object) -> str:
    """A completion is a string, or a list of messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])  # type: ignore[index]


def _combine(numbers: Sequence[int], rng: random.Random) -> tuple[list[str], str, int]:
    """A random way of combining all numbers: its steps, its expression and its value; values stay whole and not negative."""
    left = [(str(number), number) for number in numbers]
    steps = []
    while len(left) > 1:
        (text_a, a), (text_b, b) = (left.pop(rng.randrange(len(left))) for _ in range(2))
        if a < b:
            text_a, a, text_b, b = text_b, b, text_a, a
        operators = ["+", "-", "*", *(["/"] if b and a % b == 0 else [])]
        operator = rng.choice(operators)
        value = int(apply(operator, Fraction(a), Fraction(b)))
        steps.append(f"{a}{operator}{b}={value}")
        left.append((f"({text_a}{operator}{text_b})", value))
    text, value = left[0]
    return steps, text[1:-1], value
