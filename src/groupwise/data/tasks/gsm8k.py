r"""The arithmetic of GSM8K's own solutions: real input for a small model.

Its solutions mark every calculation: `48/2 = <<48/2=24>>24`.  An expression is the prompt, the
value that the annotation gives is the gold answer.  The train file's expressions are divided by a
hash: one part is demonstrated, the rest are prompts for GRPO; the test file's expressions are held
out.  Rows carry `operator` (+ - * / of one operation, `mixed` of several) and `seen` (`seen` if the
train file has the same expression, else `unseen`), so that accuracy can be told apart by both.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from groupwise.data.sources import missing_column, read_rows
from groupwise.data.split import hash_share
from groupwise.data.tasks.base import Row
from groupwise.data.tasks.expressions import decimal, operator_of
from groupwise.data.tasks.scratchpads import taught
from groupwise.errors import ConfigError, DataError
from groupwise.utils.built_in import built_in

HUB = "openai/gsm8k:main"

_ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")


@built_in("gsm8k_arithmetic")
@dataclass(frozen=True, kw_only=True)
class Gsm8kArithmetic:
    """Prompts are expressions (`48/2`), completions are school methods, by demonstrators as
    careless as those of `addition`.

    Where there is no written method, or it is longer than `longest` characters, the demonstrator
    blurts the answer."""

    breakdown: ClassVar = ("operator", "seen")
    ranges: ClassVar = {"longest": (1, 10_000)}

    train: str = HUB
    """GSM8K's train.jsonl, or a hub name (its split `train` is read)."""
    test: str = HUB
    """GSM8K's test.jsonl, or a hub name (its split `test` is read)."""
    demonstrated: float = 0.5
    """Share of the train expressions that demonstrations are made of; the others are prompts."""
    held_out_rows: str = "all"
    """`all` expressions of the test file, or only the `unseen` ones."""
    blurt: float = 0.3
    slip: float = 0.6
    longest: int = 80

    def __post_init__(self) -> None:
        if self.held_out_rows not in ("all", "unseen"):
            raise ConfigError(
                f"task argument held_out_rows must be all or unseen, got {self.held_out_rows!r}"
            )

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """`n` rows over and over the demonstrated expressions, in a new order and with new slips
        each time.
        """
        rng = random.Random(f"demonstrations/{seed}")
        rows = [row for row in self._train if self._is_demonstrated(row)]
        if not rows:
            raise DataError(
                f"{self.train}: no expression is demonstrated: raise task_args.demonstrated"
                f" ({self.demonstrated})"
            )
        demonstrations: list[Row] = []
        while len(demonstrations) < n:
            rng.shuffle(rows)
            demonstrations += [
                row | {"completion": self.completion(row, rng)}
                for row in rows[: n - len(demonstrations)]
            ]
        return demonstrations

    def prompts(self, n: int, seed: int) -> list[Row]:
        """At most `n` of the train expressions that are not demonstrated, shuffled."""
        rows = [row for row in self._train if not self._is_demonstrated(row)]
        random.Random(f"prompts/{seed}").shuffle(rows)
        return rows[:n]

    def held_out(self, n: int) -> list[Row]:
        """At most `n` distinct expressions of the test file, in the order of their hashes."""
        rows = [row for row in self._test if self.held_out_rows == "all" or row["seen"] == "unseen"]
        return sorted(rows, key=lambda row: hash_share(f"held out/{row['prompt']}"))[:n]

    def completion(self, row: Row, rng: random.Random) -> str:
        """What a careless demonstrator writes."""
        return taught(row, rng, blurt=self.blurt, slip=self.slip, longest=self.longest)

    def _is_demonstrated(self, row: Row) -> bool:
        return hash_share(f"demonstrated/{row['prompt']}") < self.demonstrated

    @cached_property
    def _train(self) -> list[Row]:
        return [row | {"seen": "seen"} for row in expressions_of(self.train, "train")]

    @cached_property
    def _test(self) -> list[Row]:
        known = {row["prompt"] for row in self._train}
        return [
            row | {"seen": "seen" if row["prompt"] in known else "unseen"}
            for row in expressions_of(self.test, "test")
        ]


def annotations_of(path: str, split: str) -> Iterator[tuple[str, str]]:
    """(expression, value) of every annotation in a GSM8K file, as written; `split` is that of a hub
    name.

    Raises DataError for an unreadable one.
    """
    rows = read_rows(path, split)
    for i, row in enumerate(rows):
        if not isinstance(row.get("answer"), str):
            raise DataError(missing_column("answer", row, rows.where(i)))
        yield from _ANNOTATION.findall(row["answer"])


def expressions_of(path: str, split: str) -> list[Row]:
    """One row per distinct expression, with prompt, answer and operator.

    The answer is the value most often given for it, without needless zeros.
    """
    values: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for expression, value in annotations_of(path, split):
        values[expression][decimal(Fraction(value))] += 1
    return [
        {
            "prompt": expression,
            "answer": counts.most_common(1)[0][0],
            "operator": operator_of(expression),
        }
        for expression, counts in values.items()
    ]
