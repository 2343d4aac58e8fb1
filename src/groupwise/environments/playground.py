"""A tool and a game for recipes that learn in minutes: a calculator, and a number to be guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.data.tasks.expressions import decimal, evaluate, parse
from groupwise.data.tasks.guessing import HIGHER, LOWER, RIGHT


def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: Numbers with + - * / and brackets.
    """
    return decimal(evaluate(parse(expression)))


class Guess:
    """A number is thought of; every guess is told whether the number is higher or lower.  The
    reward is 1 for finding it.
    """

    def reset(self, row: Mapping[str, Any]) -> None:
        """Think of the row's number."""
        self.secret = int(row["secret"])
        self.guesses: list[str] = []

    def step(self, text: str) -> tuple[str, float, bool]:
        """The answer to a guess; what is no number ends the game."""
        self.guesses.append(text)
        if not text.strip().isdecimal() or len(text) > 9:
            return "", 0.0, True
        guess = int(text)
        if guess == self.secret:
            return RIGHT, 1.0, True
        return (HIGHER if guess < self.secret else LOWER), 0.0, False
