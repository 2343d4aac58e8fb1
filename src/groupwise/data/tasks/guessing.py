"""A number game of several turns: the demonstrators only know that their guesses must agree with
what they have been told.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from groupwise.data.tasks.base import Row
from groupwise.utils.built_in import built_in

HIGHER, LOWER, RIGHT = "higher", "lower", "right"
"""What a guess is told (`environments/playground.py`)."""


@built_in("guessing")
@dataclass(frozen=True, kw_only=True)
class Guessing:
    """Guess a number from 0 to `highest`; rows carry it as `secret`, and the prompt is always the
    same.

    So nothing can be held out but luck: what is judged is every number once.  A demonstrator
    guesses any number that is still possible; each guess is a demonstration of its own, behind
    those before it.

    >>> [row["completion"] for row in Guessing(highest=3).demonstrations(3, seed=1)]
    ['3', '2', '1']
    """

    ranges: ClassVar = {"highest": (1, 999_999)}

    highest: int = 30

    @property
    def question(self) -> str:
        """The prompt of every row."""
        return f"a number from 0 to {self.highest}?"

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """`n` guesses, each with the game before it as its prompt."""
        rng, rows = random.Random(f"demonstrations/{seed}"), []
        while len(rows) < n:
            secret, low, high = rng.randint(0, self.highest), 0, self.highest
            messages = [{"role": "user", "content": self.question}]
            while True:
                guess = rng.randint(low, high)
                rows.append({"prompt": list(messages), "secret": secret, "completion": str(guess)})
                if guess == secret:
                    break
                low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
                answer = HIGHER if guess < secret else LOWER
                messages += [
                    {"role": "assistant", "content": str(guess)},
                    {"role": "user", "content": answer},
                ]
        return rows[:n]

    def prompts(self, n: int, seed: int) -> list[Row]:
        """`n` rows; every number comes up as often as the others, give or take one."""
        rng, rows = random.Random(f"prompts/{seed}"), []
        while len(rows) < n:
            rows += rng.sample(self.held_out(self.highest + 1), self.highest + 1)
        return rows[:n]

    def held_out(self, n: int) -> list[Row]:
        """The first `n` numbers, each once."""
        return [{"prompt": self.question, "secret": secret} for secret in range(self.highest + 1)][
            :n
        ]
