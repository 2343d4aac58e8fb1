"""Rewards for being right: mathematical equality, equality as text, and GSM8K's final number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from groupwise.rewards.answers import (
    alike,
    final_number,
    find_answer,
    find_gold,
    last_number,
    tidy,
)
from groupwise.rewards.final_message import final_message
from groupwise.rewards.gold_forms import is_words
from groupwise.rewards.math_checker import shared_checker
from groupwise.rewards.restatement import restated
from groupwise.utils.built_in import built_in
from groupwise.utils.terminal import logger

log = logger(__name__)

CUT = "length"
"""The finish reason of a completion that the token limit ended."""

_warned = set[str]()
"""Gold answers that could not be read and were warned about."""


@built_in("accuracy")
def accuracy(
    completions: Sequence[str],
    gold: Sequence[Any],
    prompts: Sequence[str] | None = None,
    finish_reasons: Sequence[str] | None = None,
) -> list[float | None]:
    r"""1.0 if the completion's answer is mathematically equal to the gold answer, else 0.0.  None
    if the gold answer is unreadable, or words.

    The answer is what `answers.find_answer` finds: the last `\boxed{}` of the final message,
    `####` or `<answer>`, else what follows "answer is".  A truncated completion has an answer only
    if it is marked.  Numbers, sets, intervals, units, options and dates are compared by rules of
    our own (`verdicts.decide`): a number wants a number, with no operation left to do, and an
    expression one that is not the prompt's own.  Only expressions that differ are left to
    math-verify 0.9 in worker processes.  An answer that it cannot compare in two seconds of
    processor time, or that is longer than 2,000 characters, is not equal.

    >>> accuracy([r"<think>3*4</think>\boxed{1,012.0}", "#### 7", "Well."], ["so 12 + 1000\n#### 1012", r"\boxed{8}", "4"])
    [1.0, 0.0, 0.0]
    >>> accuracy(["The answer is 81 + 14."], ["95"])
    [0.0]
    """
    pairs = []
    blank = [""] * len(completions)
    for text, row, prompt, reason in zip(
        completions, gold, prompts or blank, finish_reasons or blank, strict=True
    ):
        right, answer = find_gold(as_text(row)) or "", find_answer(text, cut=reason == CUT)
        pairs.append(
            (right, None if answer and prompt and restated(answer, right, prompt) else answer)
        )
    verdicts = shared_checker().compare(pairs)
    unread = {
        right
        for (right, _), verdict in zip(pairs, verdicts, strict=True)
        if verdict is None and right
    } - _warned
    if unread:
        _warned.update(unread)
        first, others = min(unread), f", like {len(unread) - 1} more" if len(unread) > 1 else ""
        log.warning(
            "accuracy gives None: the gold answer %r %s%s", first[:60], _unreadable(first), others
        )
    return verdicts


@built_in("exact")
def exact(
    completions: Sequence[str],
    gold: Sequence[Any],
    finish_reasons: Sequence[str] | None = None,
    *,
    ignore_case: bool = False,
) -> list[float | None]:
    """1.0 if the completion's answer equals the gold answer, except for white space at both ends,
    else 0.0.  None if the gold answer is empty.

    A completion without a marked answer (a box, `####`, `<answer>`, "answer is") is compared as a
    whole, without its reasoning; one that is truncated is not.  How quotes, accents, line
    ends and minus signs are encoded makes no difference.

    >>> exact(["<think>sort</think>1 2 3", "The answer is B."], ["1 2 3", "b"])
    [1.0, 0.0]
    """
    rewards: list[float | None] = []
    for text, row, reason in zip(
        completions, gold, finish_reasons or [""] * len(completions), strict=True
    ):
        right, cut = find_gold(alike(as_text(row))), reason == CUT
        text = alike(text)
        answer = find_answer(text, cut=cut) or ""
        candidates = {
            answer,
            answer.strip("$ "),
            answer.rstrip(" !?"),
            "" if cut else final_message(text).strip(),
        } - {""}
        rights = (
            {right, tidy(right)} | ({str(row)} if isinstance(row, float) else set())
            if right
            else set()
        )
        if ignore_case:
            rights, candidates = (
                {one.casefold() for one in rights},
                {one.casefold() for one in candidates},
            )
        rewards.append(None if right is None else float(not rights.isdisjoint(candidates)))
    return rewards


@built_in("number")
def number(
    completions: Sequence[str], gold: Sequence[Any], finish_reasons: Sequence[str] | None = None
) -> list[float | None]:
    """1.0 if the completion's last number is the gold answer's, else 0.0.  None if the gold answer
    has no number.

    GSM8K's convention (2110.14168): the number behind `####`, commas and dollar signs aside.
    Without a marked answer the last number written counts, so a completion need not follow any
    format; a truncated one must have marked its answer.

    >>> number(["She pays 18 dollars.", "#### 17", "eighteen"], ["9 * 2 = <<9*2=18>>18\\n#### 18"] * 3)
    [1.0, 0.0, 0.0]
    """
    rewards: list[float | None] = []
    for text, row, reason in zip(
        completions, gold, finish_reasons or [""] * len(completions), strict=True
    ):
        right = last_number(as_text(row))
        answer = final_number(text, cut=reason == CUT)
        rewards.append(
            None if right is None else float(type(answer) is type(right) and answer == right)
        )
    return rewards


def check_gold(gold: Sequence[Any]) -> list[str | None]:
    """For each gold answer None if it scores 1.0 against itself by computation, else why not: to be
    asked before training.

    >>> check_gold([r"#### 1,234", "", None, "forty two"])
    [None, 'holds no answer', 'holds no answer', 'is words, not mathematics: `exact` compares words']
    """
    golds = [find_gold(as_text(g)) for g in gold]
    verdicts = shared_checker().recompute([g or "" for g in golds])
    problems = {0.0: "is not equal to itself when computed"}
    return [
        "holds no answer" if g is None else None if v == 1.0 else problems.get(v) or _unreadable(g)  # type: ignore[arg-type]
        for g, v in zip(golds, verdicts, strict=True)
    ]


def _unreadable(gold: str) -> str:
    if is_words(gold):
        return "is words, not mathematics: `exact` compares words"
    return "cannot be read as mathematics, or not in time"


def as_text(value: Any) -> str:
    """A gold cell as text: data sets hold numbers as often as strings.

    A float is written out, with the fifteen digits that are its own; NaN, as tables have it for an
    empty cell, is no text.

    >>> as_text(1e-05), as_text(4.0), as_text(0.1 + 0.2), as_text(float("nan")), as_text(None)
    ('0.00001', '4', '0.3', '', '')
    """
    if value is None or value != value:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{Decimal(format(value, '.15g')):f}"
    return str(value)
