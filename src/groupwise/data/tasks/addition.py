"""Sums with a scratchpad, taught by demonstrators who are in a hurry.

With probability `blurt` a demonstrator writes the right answer at once, which so small a model
cannot learn; otherwise he works column by column but forgets each carry with probability `slip`,
and then his answer is wrong.  GRPO finds the careful way, which more SFT on the same demonstrations
cannot.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from groupwise.data.tasks.base import Generated, Row
from groupwise.data.tasks.scratchpads import add, taught
from groupwise.utils.built_in import built_in


@built_in("addition")
@dataclass(frozen=True, kw_only=True)
class Addition(Generated):
    r"""`a+b` with two numbers of `digits` digits.

    >>> row = {"prompt": "654+990", "answer": "1644"}
    >>> Addition(blurt=0.0, slip=0.0).completion(row, random.Random(0))
    '<think>4+0=4,5+9=14,6+9+1=16</think>\\boxed{1644}'

    A share `told` of the demonstrators is told the answer by a system message.  They write columns
    and forget no carry, so that a policy learns to be careful where it is told, and can teach
    itself to be so where it is not (`teacher.hint`).

    >>> Addition(told=1.0).demonstrations(1, seed=0)[0]["prompt"]
    [{'role': 'system', 'content': '1454'}, {'role': 'user', 'content': '625+829'}]
    """

    ranges: ClassVar = {"digits": (1, 12)}

    digits: int = 3
    blurt: float = 0.3
    slip: float = 0.6
    told: float = 0.0

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """`n` rows.  The same as with `told` 0, but for those whose demonstrators are told the
        answer.
        """
        rng = random.Random(f"told/{seed}")
        return [
            self._told(row) if rng.random() < self.told else row
            for row in super().demonstrations(n, seed)
        ]

    def _told(self, row: Row) -> Row:
        messages = [
            {"role": "system", "content": row["answer"]},
            {"role": "user", "content": row["prompt"]},
        ]
        careful = replace(self, blurt=0.0, slip=0.0).completion(row, random.Random())
        return row | {"prompt": messages, "completion": careful}

    def question(self, rng: random.Random) -> Row:
        """Two numbers without leading zeros."""
        low, high = 10 ** (self.digits - 1) if self.digits > 1 else 0, 10**self.digits - 1
        a, b = rng.randint(low, high), rng.randint(low, high)
        return {"prompt": f"{a}+{b}", "answer": str(a + b)}

    def completion(self, row: Row, rng: random.Random) -> str:
        """The answer blurted out, or columns with forgotten carries."""
        return taught(row, rng, blurt=self.blurt, slip=self.slip)


@built_in("sums")
@dataclass(frozen=True, kw_only=True)
class Sums(Generated):
    r"""`a+b+c...`: `terms` numbers of at most `digits` digits, added one after the other.

    >>> row = {"prompt": "7+15+80", "answer": "102"}
    >>> Sums(blurt=0.0, slip=0.0).completion(row, random.Random(0))
    '<think>7+5=12,0+1+1=2>22;2+0=2,2+8=10</think>\\boxed{102}'
    """

    ranges: ClassVar = {"terms": (2, 20), "digits": (1, 12)}

    terms: int = 3
    digits: int = 2
    blurt: float = 0.3
    slip: float = 0.6

    def question(self, rng: random.Random) -> Row:
        """Numbers of 1 to `digits` digits, each length as likely."""
        numbers = [rng.randrange(10 ** rng.randint(1, self.digits)) for _ in range(self.terms)]
        return {"prompt": "+".join(map(str, numbers)), "answer": str(sum(numbers))}

    def completion(self, row: Row, rng: random.Random) -> str:
        """The answer blurted out, or one column addition per term with forgotten carries."""
        if rng.random() < self.blurt:
            return f"\\boxed{{{row['answer']}}}"
        total, *others = (int(part) for part in row["prompt"].split("+"))
        steps = []
        for i, number in enumerate(others):
            text, total = add(total, number, lambda: rng.random() < self.slip)
            steps.append(text if i == len(others) - 1 else f"{text}>{total}")
        return f"<think>{';'.join(steps)}</think>\\boxed{{{total}}}"
