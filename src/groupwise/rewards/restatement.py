"""Whether an answer only says the question again: `81 + 14` to the prompt "What is 81 + 14?"."""

from __future__ import annotations

import re
from functools import lru_cache

from groupwise.rewards.answer_shapes import labelled, shape_of
from groupwise.rewards.answers import LONGEST_ANSWER
from groupwise.rewards.expressions import parse, plain
from groupwise.rewards.gold_forms import clean

_FRACTION_PARTS = re.compile(r"\}\s*\{")
_PRODUCT = re.compile(r"\\(?:cdot|times)(?![A-Za-z])")
_DIVISION = re.compile(r"\\div(?![A-Za-z])")
_SILENT = re.compile(r"\\frac(?![A-Za-z])|[\s(){}\[\]\\$]")


def restated(answer: str, gold: str, prompt: str) -> bool:
    r"""Return True if an answer is an expression of the prompt, letter by letter, that is not the
    gold's own.

    >>> restated(r"\frac{48}{2}", "24", "What is 48/2?"), restated("24", "24", "Is it 24?")
    (True, False)
    """
    text, right = clean(answer), clean(gold)
    if len(text) > LONGEST_ANSWER:
        return False
    side = labelled(text).value
    words = squeezed(side)
    if shape_of(side).kind not in ("scalar", "relation"):
        return False
    if (
        len(words) < 3
        or words.isalpha()
        or words == squeezed(right)
        or _in_the_form_of(side, right)
    ):
        return False
    pattern = re.escape(words)
    if words[0].isdigit():
        pattern = rf"(?<![\d.]){pattern}"
    if words[-1].isdigit():
        pattern = rf"{pattern}(?!\d)"
    return re.search(pattern, _squeezed_prompt(prompt)) is not None


def _in_the_form_of(side: str, gold: str) -> bool:
    """Return True for a plain number, and for what has the gold's own form."""
    node, right = parse(side), parse(gold)
    if node is None:
        return False
    if node.kind in ("number", "negative"):
        return True
    if right is None:
        return False
    if node.value is None:
        return node.key == right.key
    return node.literal and right.kind == node.kind


@lru_cache(maxsize=64)
def _squeezed_prompt(prompt: str) -> str:
    return squeezed(plain(prompt))


def squeezed(text: str) -> str:
    r"""Return an expression without spaces and brackets, with one sign for each operation.

    >>> squeezed(r"\frac{48}{2} \times (3 + x)"), squeezed("x ** 2")
    ('48/2*3+x', 'x^2')
    """
    text = _FRACTION_PARTS.sub("/", text)
    text = _PRODUCT.sub("*", text.replace("**", "^"))
    return _SILENT.sub("", _DIVISION.sub("/", text))
