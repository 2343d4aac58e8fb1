"""Tools that a user gets wrong, or that do what nobody expects."""

import asyncio
import enum
import functools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal, Optional


def give(what: str) -> object:
    """Return something odd.

    Args:
        what: Which.
    """
    return {
        "bytes": b"caf\xc3\xa9",
        "huge": "x" * 20_000_000,
        "none": None,
        "nan": float("nan"),
        "nested": {"a": [1, {"b": None}]},
        "surrogate": "bad \ud800 end",
        "zero": "a\0b",
        "unprintable": Unprintable(),
        "generator": (n for n in range(3)),
        "object": [object()],
        "printed": {"stdout": "<function f at 0x7f2a10>"},
    }[what]


def later(text: str) -> object:
    """Return what is only to be awaited.

    Args:
        text: What it comes to.
    """

    async def wait() -> str:
        await asyncio.sleep(0)
        return text

    return wait()


def bit_by_bit(count: int):
    """Yield numbers.

    Args:
        count: How many.
    """
    yield from range(count)


def several(*values: int, **named: int) -> int:
    """Add up.

    Args:
        values: Numbers.
        named: More of them.
    """
    return sum(values) + sum(named.values())


class Unprintable:
    """Cannot be shown."""

    def __str__(self):
        raise ValueError("no words for it")


async def cancelled(text: str) -> str:
    """Raise what asyncio cancels with.

    Args:
        text: Its message.
    """
    raise asyncio.CancelledError(text)


def leave(status: int) -> str:
    """Say something and exit.

    Args:
        status: Of the program.
    """
    print("printed by a tool")
    sys.exit(status)


def move(folder: str) -> str:
    """Change the working directory.

    Args:
        folder: Where to.
    """
    os.chdir(folder)
    return os.getcwd()


def here() -> str:
    """Name the working directory."""
    return os.getcwd()


def add(a: int, b: int) -> int:
    """Another tool of that name.

    Args:
        a: The first.
        b: The second.
    """
    return a - b


minus = add
less = functools.partial(add, b=1)


def doubled(function):
    """A decorator that keeps no name."""

    def wrapper(*, a: int, b: int = 0) -> int:
        """Twice of it.

        Args:
            a: The first.
            b: The second.
        """
        return 2 * function(a, b)

    return wrapper


twice = doubled(add)


class Subtract:
    """From a number that it has."""

    def __init__(self, start):
        self.start = start

    def __call__(self, a: int) -> int:
        """Take it away.

        Args:
            a: How much.
        """
        return self.start - a


subtract = Subtract(10)


class Desk:
    """Its tools belong to it, to its class, and to nothing."""

    twice = staticmethod(twice)
    again = twice

    def reset(self, **row):
        pass

    @classmethod
    def named(cls) -> str:
        """Say its name."""
        return cls.__name__

    def undone(self, a: int) -> int:
        """Give it back.

        Args:
            a: What.
        """
        return a

    redone = undone


class Deck:
    """Takes the first card from the row itself."""

    def reset(self, row):
        self.card = row["decks"][0].pop(0)

    def step(self, text):
        return "", 1.0, True

    def close(self):
        raise OSError(f"the table of {self.card} is gone")


class Secret(Deck):
    """Names one column."""

    def reset(self, secret):
        self.card = secret


class Colour(enum.Enum):
    """Some."""

    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    """A place."""

    x: int
    y: int


def paint(colour: Colour) -> str:
    """Paint.

    Args:
        colour: Which.
    """
    return repr(colour)


def place(point: Point) -> int:
    """Place.

    Args:
        point: Where.
    """
    return point.x


def every(
    words: list[str],
    counts: dict[str, int],
    mode: Literal["up", "down"] = "up",
    limit: Optional[int] = None,  # noqa: UP045
) -> str:
    """Take arguments of many kinds.

    Args:
        words: Some.
        counts: By word.
        mode: Which way.
        limit: The most.
    """
    return repr((words, counts, mode, limit))


class BadReset:
    """Fails before it has begun."""

    def reset(self, **row):
        return self.questions[row["number"]]

    def look(self) -> str:
        """Look."""
        return "nothing"


def fork_and_hang(path: str) -> str:
    """Leave processes behind, and hang.

    Args:
        path: Where their numbers go.
    """
    for session in (False, True):
        child = subprocess.Popen(["sleep", "3600"], start_new_session=session)
        with open(path, "a") as file:
            print(child.pid, file=file)
    if os.fork() == 0:
        time.sleep(3600)
    time.sleep(3600)
    return ""
