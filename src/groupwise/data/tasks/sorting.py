"""Sorting numbers by repeated selection of the smallest, taught by demonstrators who sometimes take the second smallest."""

from __future__ import annotations

import random
from dataclasses import dataclass

from groupwise.data.tasks.base import Generated, Row, check_count, check_share


@dataclass(frozen=True, kw_only=True)
class Sorting(Generated):
    r"""`sort 52 7 31`: `length` different numbers below `below`.  The answer is compared as text: use the reward `exact`.

    >>> Sorting(blurt=0.0, slip=0.0).completion({"prompt": "sort 52 7 31", "answer": "7 31 52"}, random.Random(0))
    '<think>7:52 31;31:52;52:</think>\\boxed{7 31 52}'
    """

    length: int = 4
    below: int = 100
    blurt: float = 0.3
    slip: float = 0.2

    def __post_init__(self) -> None:
        check_count("length", self.length, 2, 50)
        check_count("below", self.below, self.length, 10**9)
        check_share("blurt", self.blurt)
        check_share("slip", self.slip)

    def question(self, rng: random.Random) -> Row:
        """Numbers in random order."""
        numbers = rng.sample(range(self.below), self.length)
        return {"prompt": f"sort {_join(numbers)}", "answer": _join(sorted(numbers))}

    def completion(self, row: Row, rng: random.Random) -> str:
        """The answer blurted out, or `smallest:what remains` until nothing remains, with the second smallest taken now and then."""
        if rng.random() < self.blurt:
            return f"\\boxed{{{row['answer']}}}"
        rest = [int(part) for part in row["prompt"].split()[1:]]
        taken, steps = [], []
        while rest:
            second = len(rest) > 1 and rng.random() < self.slip
            taken.append(sorted(rest)[int(second)])
            rest.remove(taken[-1])
            steps.append(f"{taken[-1]}:{_join(rest)}")
        return f"<think>{';'.join(steps)}</think>\\boxed{{{_join(taken)}}}"


def _join(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
