"""Finding the answer in a text, and numbers that need no computer algebra: linear time, no process, no sympy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

LONGEST_ANSWER = 2_000
"""Characters.  A longer one is compared as text only: nothing that is still an answer is that long, much that is hostile is."""

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BOXES = re.compile(r"\\f?boxed\s*\{")
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;]|[,;]?\s*(?:and|or))[\s$]*", re.IGNORECASE)
_PHRASE = re.compile(r"answer\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_ANY_NUMBER = re.compile(rf"(?<![\d.])[-+]?\s?\$?\s?(?:{_NUMBER})")
_DECIMAL = re.compile(rf"([-+]?)\s*({_NUMBER})")
_FRACTION = re.compile(
    r"([-+]?)\s*(?:(\d{1,12})\s*/\s*(\d{1,12})|\\[dt]?frac\s*\{\s*([-+]?\d{1,12})\s*\}\s*\{\s*([-+]?\d{1,12})\s*\})"
)


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text if there is none."""
    return text[text.rfind("</think>") + len("</think>") :] if "</think>" in text else text


def boxes(text: str) -> Iterator[tuple[int, int, str]]:
    r"""Start, end and content of every `\boxed{...}` in order, braces balanced; one that is never closed ends with the text.

    >>> [content for _, _, content in boxes(r"\boxed{1}, then \boxed{\frac{1}{2}}")]
    ['1', '\\frac{1}{2}']
    """
    end = 0
    for match in _BOXES.finditer(text):
        if match.start() < end:
            continue  # a box inside a box
        depth, end = 1, match.end()
        for brace in _BRACES.finditer(text, match.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                end = brace.end()
                break
        if depth:
            yield match.start(), len(text), text[match.end() :]
            return
        yield match.start(), end, text[match.end() : end - 1]


def find_answer(text: str) -> str | None:
    r"""The final answer that a completion gives, as text; None if it gives none.

    Looked for after the last `</think>`: the last `\boxed{}` (several in a row, joined by commas or "and", are one set of
    answers), else what follows the last `####`, else what follows the last "answer is" or "answer:" up to the end of the
    line, else the whole text if it is a single line of at most 100 characters.

    >>> find_answer(r"<think>maybe \boxed{3}</think> It is \boxed{4}.")
    '4'
    >>> find_answer("2 + 2 = 4\n#### 4"), find_answer("So the answer is $x = 4$."), find_answer("Let me see.\nHm.")
    ('4', '$x = 4$', None)
    """
    text = after_thinking(text)
    answer = marked(text)
    if answer is None:
        phrases = list(_PHRASE.finditer(text))
        if phrases:
            answer = text[phrases[-1].end() :].split("\n", 1)[0]
        elif len(text.strip()) <= 100 and "\n" not in text.strip():
            answer = text
        else:
            return None
    return answer.rstrip(" .\t\r\n").strip() or None


def find_gold(text: str) -> str | None:
    r"""The answer that a data row gives: what follows its last `####`, else its last `\boxed{}`, else all of it.

    >>> find_gold("He pays 3 * 4 = <<3*4=12>>12 dollars.\n#### 1,012"), find_gold(r" \frac{1}{2}"), find_gold(" ")
    ('1,012', '\\frac{1}{2}', None)
    """
    answer = marked(text)
    return (text if answer is None else answer).strip() or None


def marked(text: str) -> str | None:
    """The answer that stands in a box or behind `####`, whichever comes last; None if neither is there."""
    hashes = text.rfind("####")
    found = list(boxes(text))
    if found and found[-1][0] > hashes:
        answers = [found[-1][2]]
        for (_, end, content), (start, _, _) in zip(reversed(found[:-1]), reversed(found), strict=False):
            if start - end > 20 or not _BETWEEN_BOXES.fullmatch(text, end, start):
                break
            answers.append(content)
        return ", ".join(reversed(answers))
    if hashes >= 0:
        return text[hashes + 4 :].strip().split("\n", 1)[0]
    return None


class Value(NamedTuple):
    """An exact number as it was written."""

    exact: Fraction
    decimals: int
    """Digits behind the point, trailing zeros aside; -1 for a fraction or a whole number."""


def read_number(text: str) -> Value | None:
    r"""A whole number, decimal or simple fraction, with thousands commas, a sign and a dollar sign; None for all else.

    >>> read_number("$1,234.50"), read_number(r"-\frac{6}{4}"), read_number("12,34"), read_number("2^3")
    (Value(exact=Fraction(2469, 2), decimals=1), Value(exact=Fraction(-3, 2), decimals=-1), None, None)
    """
    if len(text) > 60:
        return None
    text = text.strip().replace("{,}", ",").replace("\\!", "")
    if text.startswith("\\(") and text.endswith("\\)"):
        text = text[2:-2].strip()
    if len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = text.removeprefix("\\$").removeprefix("$").strip()
    if not text.isascii():
        return None  # other digits and minus signs: leave them to the parser
    whole = _DECIMAL.fullmatch(text)
    if whole:
        digits = whole.group(2).replace(",", "")
        behind = digits.partition(".")[2].rstrip("0")
        if len(digits) > 30 or (behind and len(digits) > 15):
            return None  # more than a float holds: what equality means is the checker's business
        return Value(Fraction(Decimal(whole.group(1) + digits)), len(behind) if "." in digits else -1)
    parts = _FRACTION.fullmatch(text)
    if parts:
        above, below = int(parts.group(2) or parts.group(4)), int(parts.group(3) or parts.group(5))
        sign = -1 if parts.group(1) == "-" else 1
        return Value(Fraction(sign * above, below), -1) if below else None
    return None


def numbers_equal(gold: Value, answer: Value) -> bool | None:
    """Whether two numbers are equal as math-verify sees it: exactly, or to six decimals where a decimal meets a fraction.

    None where its rounding of floats would decide (more than six decimals, or a tie): ask it.

    >>> half, third = read_number("1/2"), read_number("1/3")
    >>> numbers_equal(half, read_number("0.50")), numbers_equal(third, read_number("0.333333")), numbers_equal(third, half)
    (True, True, False)
    """
    if gold.exact == answer.exact:
        return True
    if gold.decimals < 0 and answer.decimals < 0:
        return False
    if max(gold.decimals, answer.decimals) > 6:
        return None
    if max(abs(gold.exact), abs(answer.exact)) >= 10**8:
        return None
    scaled = [value.exact * 10**6 for value in (gold, answer)]
    if any(abs((number % 1) - Fraction(1, 2)) < Fraction(1, 1000) for number in scaled):
        return None
    return round(scaled[0]) == round(scaled[1])


def last_number(text: str) -> Decimal | None:
    """The final number of a text: in its box or behind its `####` if it has one, else the last number written.

    >>> last_number("She has 3 bags.\\n#### 1,234"), last_number("that makes $12.50."), last_number("none")
    (Decimal('1234'), Decimal('12.50'), None)
    """
    answer = marked(text)
    found = _ANY_NUMBER.findall(text if answer is None else answer)
    if not found:
        return None
    return Decimal(re.sub(r"[\s$,]", "", found[-1]))
