"""Rewards for being right: mathematical equality, equality as text, and GSM8K's final number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.rewards.answers import find_answer, find_gold, last_number
from groupwise.rewards.math_checker import shared_checker


def accuracy(completions: Sequence[str], gold: Sequence[Any]) -> list[float | None]:
    r"""1.0 if the completion's answer is mathematically equal to the gold, 0.0 if it is not or if there is none; None if the gold
    cannot be read: a reward that does not apply leaves the group's statistics.

    The answer is what `answers.find_answer` finds: the last `\boxed{}` after the last `</think>`, else `#### `, else "answer is".
    Whole numbers, decimals and simple fractions are compared here, exactly (to six decimals where a decimal meets a fraction);
    everything else (LaTeX, sets, intervals, equations, units, percentages) by math-verify 0.9 in worker processes.  An answer
    that cannot be compared in two seconds of processor time, or that is longer than 2,000 characters, is not equal.

    >>> accuracy([r"<think>3*4</think>\boxed{1,012.0}", "#### 7", "Well."], ["so 12 + 1000\n#### 1012", r"\boxed{8}", "4"])
    [1.0, 0.0, 0.0]
    """
    pairs = [(find_gold(as_text(g)) or "", find_answer(text)) for text, g in zip(completions, gold, strict=True)]
    return shared_checker().compare(pairs)


def exact(completions: Sequence[str], gold: Sequence[Any], *, ignore_case: bool = False) -> list[float | None]:
    """1.0 if the completion's answer is the gold, character by character, white space at both ends aside; else 0.0; None if the
    gold is empty.

    A completion without a marked answer (a box, `####`, "answer is") is compared as a whole, from its last `</think>` on.

    >>> exact(["<think>sort</think>1 2 3", "The answer is B."], ["1 2 3", "b"])
    [1.0, 0.0]
    """
    rewards: list[float | None] = []
    for text, row in zip(completions, gold, strict=True):
        right, candidates = find_gold(as_text(row)), (find_answer(text), text.rsplit("</think>", 1)[-1].strip())
        if ignore_case:
            right, candidates = right and right.casefold(), tuple(c and c.casefold() for c in candidates)
        rewards.append(None if right is None else float(right in candidates))
    return rewards


def number(completions: Sequence[str], gold: Sequence[Any]) -> list[float | None]:
    """1.0 if the final number of the completion is that of the gold, else 0.0; None if the gold holds no number.

    GSM8K's convention (2110.14168): the number behind `####`, commas and dollar signs aside.  Without `####` or a box the last
    number written counts, so a completion need not follow any format.

    >>> number(["She pays 18 dollars.", "#### 17", "eighteen"], ["9 * 2 = <<9*2=18>>18\\n#### 18"] * 3)
    [1.0, 0.0, 0.0]
    """
    rewards: list[float | None] = []
    for text, row in zip(completions, gold, strict=True):
        right = last_number(as_text(row))
        rewards.append(None if right is None else float(last_number(text) == right))
    return rewards


def check_gold(gold: Sequence[Any]) -> list[str | None]:
    """For each gold answer None if it scores 1.0 against itself by computation, else why not: to be asked before training.

    >>> check_gold([r"#### 1,234", "", None])
    [None, 'holds no answer', 'holds no answer']
    """
    found = [find_gold(as_text(g)) for g in gold]
    verdicts = shared_checker().recompute([g or "" for g in found])
    problems = {None: "cannot be read as mathematics, or not in time", 0.0: "is not equal to itself when computed"}
    return ["holds no answer" if g is None else problems.get(v) for g, v in zip(found, verdicts, strict=True)]


def as_text(value: Any) -> str:
    """A gold cell as text: data sets hold numbers as often as strings."""
    return "" if value is None else str(value)
