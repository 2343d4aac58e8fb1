"""What a built-in task is, and the part that all generated ones share.

Rows carry `prompt`, `answer` (what stands in the box of a right completion) and, for
demonstrations, `completion`."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import islice
from typing import Any, Protocol

from groupwise.data.split import hash_share
from groupwise.errors import ConfigError, DataError

Row = dict[str, Any]

HELD_OUT = 26 / 256
"""A subject, most often a prompt, is held out when the first byte of its MD5 is below 26: about a
tenth, the same whatever the seed.
"""


class Task(Protocol):
    """A source of rows.  The same arguments give the same rows.  It may have `breakdown`: names of
    columns, for whose values evaluations report accuracies of their own."""

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """`n` rows with prompt, completion and answer; prompts and answers may repeat, completions
        may be wrong.
        """
        ...

    def prompts(self, n: int, seed: int) -> list[Row]:
        """At most `n` rows with distinct prompts that are not held out."""
        ...

    def held_out(self, n: int) -> list[Row]:
        """At most `n` rows with distinct held-out prompts, always the same."""
        ...


class Generated(ABC):
    """A task whose questions are drawn at random and split by a hash of what they are about."""

    @abstractmethod
    def question(self, rng: random.Random) -> Row:
        """A row with prompt and answer."""

    @abstractmethod
    def completion(self, row: Row, rng: random.Random) -> str:
        """What a careless demonstrator writes for it."""

    def subject(self, row: Row) -> str:
        """What decides on which side of the split a row is: its prompt, unless a task has more."""
        return row["prompt"]

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """`n` drawn questions with completions; prompts may repeat."""
        rng = random.Random(f"demonstrations/{seed}")
        rows = islice(self._questions(rng, held_out=False), n)
        return [row | {"completion": self.completion(row, rng)} for row in rows]

    def prompts(self, n: int, seed: int) -> list[Row]:
        """At most `n` distinct prompts of the training side of the split."""
        rows = self._questions(random.Random(f"prompts/{seed}"), held_out=False)
        return list(islice(self._distinct(rows), n))

    def held_out(self, n: int) -> list[Row]:
        """At most `n` distinct prompts of the held-out side, always the same."""
        rows = self._questions(random.Random("held out"), held_out=True)
        return list(islice(self._distinct(rows), n))

    def _questions(self, rng: random.Random, *, held_out: bool) -> Iterator[Row]:
        """Endless; ends with a DataError if no question falls on this side of the split."""
        misses = 0
        while True:
            row = self.question(rng)
            if is_held_out(self.subject(row)) is held_out:
                misses = 0
                yield row
            elif (misses := misses + 1) > 10_000:
                side = "held out" if held_out else "for training"
                raise DataError(
                    f"{type(self).__name__} has no question {side}: give it larger arguments"
                )

    def _distinct(self, rows: Iterator[Row]) -> Iterator[Row]:
        """Rows that did not occur before; ends when nothing new comes for long (a small task is
        exhausted).
        """
        seen: set[tuple[str, str]] = set()
        repeats = 0
        for row in rows:
            key = (self.subject(row), row["prompt"])
            if key not in seen:
                seen.add(key)
                repeats = 0
                yield row
            elif (repeats := repeats + 1) > 1000 + 10 * len(seen):
                return


class Paired(Generated):
    """A generated task that also has preference pairs: rows with `chosen` and `rejected`."""

    @abstractmethod
    def pair(self, row: Row, rng: random.Random) -> tuple[str, str]:
        """A better and a worse completion of the row's prompt."""

    def pairs(self, n: int, seed: int) -> list[Row]:
        """`n` rows whose prompts are not held out; prompts may repeat."""
        rng = random.Random(f"pairs/{seed}")
        return [
            self._with_sides(row, rng) for row in islice(self._questions(rng, held_out=False), n)
        ]

    def held_out_pairs(self, n: int) -> list[Row]:
        """At most `n` rows, one for each of `held_out`, always the same."""
        rng = random.Random("held-out pairs")
        return [self._with_sides(row, rng) for row in self.held_out(n)]

    def _with_sides(self, row: Row, rng: random.Random) -> Row:
        chosen, rejected = self.pair(row, rng)
        return row | {"chosen": chosen, "rejected": rejected}


def is_held_out(subject: str) -> bool:
    """True if the first byte of the subject's MD5 is below 26."""
    return hash_share(subject) < HELD_OUT


def check_arguments(task: type[Any], arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError for an argument that a task's dataclass cannot have: a float is a share,
    an int lies in its `ranges`, a str is one of its `choices`.
    """
    kinds = {field.name: field.type for field in fields(task)}
    for name, value in arguments.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if kinds[name] == "float" and not (is_number and 0.0 <= value <= 1.0):
            raise ConfigError(f"task argument {name} must be a number from 0 to 1, got {value!r}")
        if kinds[name] == "int":
            least, most = task.ranges[name]
            if not is_number or isinstance(value, float) or not least <= value <= most:
                raise ConfigError(
                    f"task argument {name} must be an integer from {least} to {most}, got {value!r}"
                )
        if kinds[name] == "str" and value not in task.choices[name]:
            known = ", ".join(task.choices[name])
            raise ConfigError(f"task argument {name} must be one of {known}, got {value!r}")


def text_of(completion: Any) -> str:
    """A completion's text; of messages that of the model's last turn, since what only a tool has
    said is not its answer.
    """
    if isinstance(completion, str):
        return completion
    return next(
        (str(one["content"] or "") for one in reversed(completion) if one["role"] == "assistant"),
        "",
    )
