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
    our own (`equality.decide`): a number wants a number, with no operation left to do, and an
    expression one that is not the prompt's own.  Only expressions that differ are left to
    math-verify 0.9 in worker processes.  An answer that it cannot compare in two seconds of
    processor time, or that is longer than 2,000 characters, is not equal.

    >>> accuracy([r"<think>3*4</think>\boxed{1,012.0}", "Well."], ["so 12 + 1000\n#### 1012", "4"])
    [1.0, 0.0]
    >>> accuracy(["The answer is 81 + 14."], ["95"])
    [0.0]
    """
    pairs = []
    blank = [""] * len(completions)
    for text, row, prompt, reason in zip(
        completions, gold, prompts or blank, finish_reasons or blank, strict=True
    ):
        right, answer = find_gold(as_text(row)) or "", find_answer(text, cut=reason == CUT)
        if answer and prompt and restated(answer, right, prompt):
            answer = None
        pairs.append((right, answer))
    verdicts = shared_checker().compare(pairs)
    unread = set[str]()
    for (right, _), verdict in zip(pairs, verdicts, strict=True):
        if verdict is None and right:
            unread.add(right)
    _warn(unread - _warned)
    return verdicts


def _warn(unread: set[str]) -> None:
    """Warn about gold answers that cannot be read, once about each."""
    if not unread:
        return
    _warned.update(unread)
    first = min(unread)
    message = f"{first[:60]!r} {_unreadable(first)}"
    if len(unread) > 1:
        message += f", like {len(unread) - 1} more"
    log.warning("accuracy gives None: the gold answer %s", message)


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
    reasons = finish_reasons or [""] * len(completions)
    for text, row, reason in zip(completions, gold, reasons, strict=True):
        rights = _gold_forms(row)
        forms = _answer_forms(alike(text), cut=reason == CUT)
        if ignore_case:
            rights = {form.casefold() for form in rights}
            forms = {form.casefold() for form in forms}
        rewards.append(float(not rights.isdisjoint(forms)) if rights else None)
    return rewards


def _gold_forms(row: Any) -> set[str]:
    """Return the texts that a gold cell may be given as; none for an empty one."""
    right = find_gold(alike(as_text(row)))
    if not right:
        return set()
    forms = {right, tidy(right)}
    if isinstance(row, float):
        forms.add(str(row))
    return forms


def _answer_forms(text: str, *, cut: bool) -> set[str]:
    """Return the answer of a completion with and without signs around it, and the final message."""
    answer = find_answer(text, cut=cut) or ""
    forms = {answer, answer.strip("$ "), answer.rstrip(" !?")}
    if not cut:
        forms.add(final_message(text).strip())
    return forms - {""}


@built_in("number")
def number(
    completions: Sequence[str], gold: Sequence[Any], finish_reasons: Sequence[str] | None = None
) -> list[float | None]:
    """1.0 if the completion's last number is the gold answer's, else 0.0.  None if the gold answer
    has no number.

    GSM8K's convention (2110.14168): the number behind `####`, commas and dollar signs aside.
    Without a marked answer the last number written counts, so a completion need not follow any
    format; a truncated one must have marked its answer.

    >>> number(["She pays 18 dollars.", "#### 17", "eighteen"], ["<<9*2=18>>\\n#### 18"] * 3)
    [1.0, 0.0, 0.0]
    """
    rewards: list[float | None] = []
    reasons = finish_reasons or [""] * len(completions)
    for text, row, reason in zip(completions, gold, reasons, strict=True):
        right = last_number(as_text(row))
        if right is None:
            rewards.append(None)
            continue
        answer = final_number(text, cut=reason == CUT)
        rewards.append(float(type(answer) is type(right) and answer == right))
    return rewards


def check_gold(gold: Sequence[Any]) -> list[str | None]:
    """Return for each gold answer None if it scores 1.0 against itself by computation, else why
    not: to be asked before training.

    >>> check_gold([r"#### 1,234", "", None])
    [None, 'holds no answer', 'holds no answer']
    >>> check_gold(["forty two"])
    ['is words, not mathematics: `exact` compares words']
    """
    golds = [find_gold(as_text(cell)) for cell in gold]
    verdicts = shared_checker().recompute([text or "" for text in golds])
    problems: list[str | None] = []
    for text, verdict in zip(golds, verdicts, strict=True):
        if text is None:
            problems.append("holds no answer")
        elif verdict == 1.0:
            problems.append(None)
        elif verdict == 0.0:
            problems.append("is not equal to itself when computed")
        else:
            problems.append(_unreadable(text))
    return problems


def _unreadable(gold: str) -> str:
    if is_words(gold):
        return "is words, not mathematics: `exact` compares words"
    return "cannot be read as mathematics, or not in time"


def as_text(value: Any) -> str:
    """Return a gold cell as text: data sets hold numbers as often as strings.

    A float is written out, with the fifteen digits that are its own; NaN, as tables have it for an
    empty cell, is no text.

    >>> as_text(1e-05), as_text(4.0), as_text(0.1 + 0.2), as_text(float("nan"))
    ('0.00001', '4', '0.3', '')
    """
    if value is None or value != value:
        return ""
    if isinstance(value, float) and math.isfinite(value):
        return f"{Decimal(format(value, '.15g')):f}"
    return str(value)
