"""Whether two mathematical answers are equal: by our own rules at once, else by math-verify in
worker processes that can be killed.

sympy evaluates what it reads: `9^{9^{9^{9}}}` or a nest of 3,000 braces takes it hours or
gigabytes, its own timeouts need the main thread's SIGALRM, and 11 of 31 hostile strings never
return in any other thread.  Here every comparison has a deadline in processor time (the same
verdict on a loaded machine), a wall-clock one behind it, and 2 GiB of memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from groupwise.errors import RewardError
from groupwise.rewards.answers import LONGEST_ANSWER
from groupwise.rewards.equality import Undecided, decide
from groupwise.rewards.gold_forms import form_of
from groupwise.utils.processes import Died, NotStarted, Pool

CPU_SECONDS = 2.0
"""Processor time for one comparison.  An ordinary one takes 1 to 30 ms."""
WALL_SECONDS = 5.0
"""Wall-clock deadline of one comparison, for what waits instead of computing."""
MEMORY = 2 << 30
DIGITS = 30
"""Digits to which constants are compared."""
MAX_CALLS = 2_000
"""Comparisons after which a worker retires: sympy's caches only grow (Math-Verify #63)."""
CACHED = 100_000
"""Verdicts of math-verify that are remembered."""
LONGEST_GOLD = 20_000
"""Characters; a longer gold cannot be read."""

Pair = tuple[str, str | None]
_UNKNOWN: Any = object()


class Checker:
    """Answers whether an answer equals the gold: 1.0, 0.0, or None when the gold cannot be read."""

    def __init__(self, *, workers: int | None = None) -> None:
        """`workers`: processes; default: half of the cores, at most four."""
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        else:
            cores = os.cpu_count() or 1
        self.pool = Pool(
            "groupwise.rewards.math_checker:judge",
            size=workers or min(4, max(1, cores // 2)),
            seconds=WALL_SECONDS,
            cpu_seconds=CPU_SECONDS,
            memory=MEMORY,
            max_calls=MAX_CALLS,
            quiet=True,
        )
        self._cache: dict[Pair, float | None] = {}

    def compare(self, pairs: Sequence[Pair]) -> list[float | None]:
        """One verdict per (gold, answer) pair, from any thread; an answer of None is no answer (0.0
        if the gold can be read).

        An answer that cannot be compared within the deadline is not equal; a gold that cannot be
        read within it is None.
        Raises RewardError if no worker can start.
        """
        pairs = [(gold, _compared(gold, answer)) for gold, answer in pairs]
        verdicts = {pair: self._at_once(*pair) for pair in pairs}
        unknown = [pair for pair, verdict in verdicts.items() if verdict is _UNKNOWN]
        readable: dict[str, bool] = {}
        for (gold, answer), outcome in zip(unknown, self._outcomes(unknown), strict=True):
            verdicts[gold, answer] = outcome
            if isinstance(outcome, Exception):
                # Whose fault?  If the gold compares with a 1 in time, the answer's.
                if gold not in readable:
                    readable[gold] = isinstance(self._outcomes([(gold, "1")])[0], float)
                verdicts[gold, answer] = 0.0 if readable[gold] else None
        if len(self._cache) >= CACHED:
            self._cache = {}
        for pair in unknown:
            self._cache[pair] = verdicts[pair]
        return [verdicts[pair] for pair in pairs]

    def recompute(self, golds: Sequence[str]) -> list[float | None]:
        """Whether each gold equals itself, by computation and not by its text; None if it cannot be
        read or compared in time.
        """
        # Equal expressions are recognised without evaluating them, so a gold has to survive a
        # comparison with a 1 too.
        pairs: list[Pair] = []
        for gold in golds:
            pairs += [(gold, form_of(gold).text), (gold, "1")]
        known = {pair: _by_rules(*pair) for pair in pairs}
        unknown = [pair for pair, verdict in known.items() if verdict is _UNKNOWN]
        known |= zip(unknown, self._outcomes(unknown), strict=True)
        verdicts: list[float | None] = []
        for gold in golds:
            itself, one = known[gold, form_of(gold).text], known[gold, "1"]
            readable = isinstance(itself, float) and isinstance(one, float)
            verdicts.append(itself if readable else None)
        return verdicts

    def _outcomes(self, pairs: Sequence[Pair]) -> list[Any]:
        """What the comparisons gave, or raised.  One that died or met the wall clock is made again:
        memory or a machine that stood still may have ended it, and not its answer."""
        try:
            outcomes = self.pool.map(pairs)
            broken = []
            for place, one in enumerate(outcomes):
                if isinstance(one, TimeoutError) or (isinstance(one, Died) and not one.cpu):
                    broken.append(place)
            again = self.pool.map([pairs[place] for place in broken])
            for place, outcome in zip(broken, again, strict=True):
                outcomes[place] = outcome
        except NotStarted as error:
            raise RewardError(
                f"the worker process that compares answers could not start: {error}"
            ) from error.__cause__
        return outcomes

    def _at_once(self, gold: str, answer: str | None) -> Any:
        """The verdict where no sympy is needed, `_UNKNOWN` where it is."""
        verdict = _by_rules(gold, answer)
        if verdict is not _UNKNOWN:
            return verdict
        if answer is not None and gold.strip() == answer.strip():
            return 1.0
        return self._cache.get((gold, answer), _UNKNOWN)


def _compared(gold: str, answer: str | None) -> str | None:
    """Return the answer that is compared: one that is too long is none, unless it is the gold."""
    if answer is None or gold == answer or len(answer) <= LONGEST_ANSWER:
        return answer
    return None


def _by_rules(gold: str, answer: str | None) -> Any:
    """The verdict of our own rules, `_UNKNOWN` where they have none."""
    try:
        return decide(gold, answer) if len(gold) <= LONGEST_GOLD else None
    except Undecided:
        return _UNKNOWN


@cache
def shared_checker() -> Checker:
    """The process's one checker: its workers and its cache serve every reward function."""
    return Checker()


def judge() -> Callable[[str, str | None], float | None]:
    """Import math-verify in a worker, warm it up, and return the function that compares.

    Raises RewardError if math-verify is not installed.
    """
    import logging

    try:
        from math_verify import parse, verify
    except ImportError as missing:
        raise RewardError(
            "the reward 'accuracy' needs the package math-verify: pip install math-verify==0.9.0"
        ) from missing
    logging.disable(logging.CRITICAL)

    def read(text: str) -> list:
        # No timeouts of its own: they would take SIGALRM, and the worker is killed from outside
        # anyway. A bare expression is boxed, which is where math-verify reads LaTeX best; prose is
        # left for it to search.
        bare = (
            "$" not in text.replace("\\$", "")
            and "\n" not in text
            and (len(text) <= 100 or "\\" in text)
        )
        if bare:
            text = f"\\boxed{{{text}}}"
        return parse(text, parsing_timeout=None)  # type: ignore[arg-type]

    def library(gold: str, answer: str | None) -> float | None:
        gold_parsed = read(gold)
        if not gold_parsed:
            return None
        answer_parsed = read(answer) if answer is not None else None
        if not answer_parsed or not verify(gold_parsed, answer_parsed, timeout_seconds=None):
            return 0.0
        return float(not _apart(gold_parsed[0], answer_parsed[0]))

    def compare(gold: str, answer: str | None) -> float | None:
        return decide(gold, answer, library)

    # What the first comparisons load and build takes 0.3 s, which is not to be counted against
    # whoever comes first.
    compare(r"\frac{1}{2}", "x")
    compare(r"\frac{\sqrt{3}}{7}", "1")
    return compare


def _apart(gold: Any, answer: Any) -> bool:
    """Return True if two sympy objects are constants that differ by more than rounding: math-verify
    rounds both to six decimals.

    A float is as exact as it is written, with six decimals at least and four digits that count.
    sympy's own numbers take the place of Python's: 1/2006! is no 0.
    """
    from sympy import Float

    if not (getattr(gold, "is_number", False) and getattr(answer, "is_number", False)):
        return False
    left, right = gold.evalf(DIGITS), answer.evalf(DIGITS)
    size = max(abs(left), abs(right))
    difference = abs(left - right).evalf(DIGITS)
    if not gold.has(Float) and not answer.has(Float):
        return bool(difference > size * 1e-25)
    step = 0.0
    for side in (gold, answer):
        if side.is_Float:
            step = max(step, 10.0 ** -_decimals(side))
    return bool(difference > max(size * 1e-12, min(step / 2, 5e-7, size * 1e-4)))


def _decimals(number: Any) -> int:
    """Return the digits behind the point of a sympy Float, as it was written."""
    return len(str(number).partition(".")[2].rstrip("0"))
