"""Tools and environments as a user writes them."""

import asyncio
import os
import random
import time
from pathlib import Path


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def echo(value: str, flag: bool = False, number: float = 0.0, nothing: str | None = None) -> str:
    """Say what was given.

    Args:
        value: A text.
        flag: Yes or no.
        number: A number.
        nothing: Perhaps nothing.
    """
    return f"{value!r} {flag!r} {number!r} {nothing!r}"


async def later(text: str, seconds: float) -> str:
    """Say something later.

    Args:
        text: What.
        seconds: When.
    """
    await asyncio.sleep(seconds)
    return text


def fail(why: str) -> str:
    """Raise.

    Args:
        why: The message.
    """
    raise ValueError(why)


def hang() -> str:
    """Never come back."""
    while True:
        time.sleep(0.05)


def die() -> str:
    """End the process."""
    os._exit(3)


def long(size: int) -> str:
    """Say much.

    Args:
        size: Characters.
    """
    return "é" * size


def undocumented(a: int) -> int:
    return a


def unhinted(a) -> str:
    """No hint.

    Args:
        a: Something.
    """
    return str(a)


class Counter:
    """In the style of TRL's documentation."""

    def __init__(self):
        self.count = 0
        self.secret = object()

    def reset(self, **kwargs) -> str | None:
        self.start = kwargs.get("start", 0)
        self.count = self.start
        self.drawn = random.random()
        import numpy  # as late as a user may

        self.drawn_late = float(numpy.random.random())
        return f" Start at {self.start}." if self.start else None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.count += step
        return self.count

    def wait_forever(self) -> str:
        """Never come back."""
        while True:
            time.sleep(0.05)

    def get_reward(self) -> float:
        return float(self.count)

    def close(self) -> None:
        if "CLOSED" in os.environ:
            with Path(os.environ["CLOSED"]).open("a") as file:
                file.write("x")


class Guess:
    """With `step`."""

    def reset(self, row):
        self.secret = row["secret"]
        return " Guess."

    def step(self, text):
        guess = int(text)
        return "higher" if guess < self.secret else "lower", float(guess == self.secret), guess == self.secret


class Greeter(Guess):
    """Begins with what the row says."""

    def reset(self, row):
        super().reset(row)
        return row["greeting"]


class Gym:
    """Gymnasium's signatures."""

    def reset(self, *, seed=None, options=None):
        self.random = random.Random(seed)
        return f" {self.random.randrange(1000)}", {}

    def step(self, action):
        return self.random.randrange(1000), 0.5, False, action == "stop", {}


class Fragile:
    """Fails when asked."""

    def reset(self, row):
        if row.get("broken"):
            raise RuntimeError("no table")

    def step(self, text):
        return "no tuple"


class Idle:
    """Says something, and hears nothing."""

    def reset(self) -> str:
        return "Begin."

    def get_reward(self) -> float:
        return 1.0
