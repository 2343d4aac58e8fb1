"""How a gold answer is compared: as a date, an option, mathematics or words."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from groupwise.rewards.answer_shapes import labelled, members_of, shape_of
from groupwise.rewards.answers import LONGEST_ANSWER, QUOTES, clause, statement
from groupwise.rewards.expressions import NAMES, parse, plain
from groupwise.rewards.quantities import based_number, quantity_of, without_fonts

_NOISE = re.compile(
    r"^(?:(?:exactly|approximately|about|roughly|around|equal"
    r" to|equals|is)\s+|\\approx\s*|\\sim\s*|=\s*)",
    re.IGNORECASE,
)
_OPTION_GOLD = re.compile(
    r"[(\[]?([A-Z])[)\]]?[.:]?|[(\[]?([A-Z])(?:[)\]][.:]?|[.:])\s+\S.*", re.DOTALL
)
_OPTION = re.compile(
    r"(?:(?i:the )?(?i:correct"
    r" )?(?i:option|choice|answer|letter)\s*(?i:is\b)?[:\s]*)?[(\[{]?\s*([A-Za-z])\s*"
    r"(?:[)\]}]\s*[.:,]?(?:\s.*)?|[.:](?:\s.*)?|\s+[-–—]\s.*)?",
    re.DOTALL,
)
_DATE = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})|(\d{1,2})([-/.])(\d{1,2})\5(\d{4}|\d{2})")
_COLON = re.compile(r"(\d{1,6}(?:\s*:\s*\d{1,6})+)(?:\s*([ap])\.?\s?m\b\.?)?", re.IGNORECASE)
_LETTERS = re.compile(r"(?<!\\)(?<![^\W\d_])[^\W\d_]{3,}")
_OPERATOR = re.compile(r"[\^_=+*/<>|\\]|(?<=\S)\s*-|\d\(")
_TEXT = re.compile(r"\\text\{[^{}]*\}")
_ALL_TEXT = re.compile(r"\\text\{(\s*[-+$£€]?\.?\d[^{}]*|[^{}]*=[^{}]*)\}")
"""A quantity or an equation that is set as text: 5 apples, x = 5."""
_SPAN = re.compile(r"\$\$?([^$]+)\$\$?|\\\(([^\\]*(?:\\[^)][^\\]*)*)\\\)")
_COMMAND = re.compile(r"\\(?:begin|end)\{\w*\*?\}|\\[A-Za-z]+")
_ENDINGS = ".,;:?\\"
_KEPT_SIGNS = "+-=<>/^%"


@dataclass(frozen=True)
class GoldForm:
    """A gold answer as it is compared."""

    kind: str
    """none (empty or words), words (of LaTeX), option (A), figures (a date, a time, a ratio), math,
    unread (math-verify may).
    """
    text: str = ""
    parts: tuple[Any, ...] = ()


def clean(text: str) -> str:
    r"""Return `plain` text without marks, quotes, full stops and words like "about" around it.

    >>> clean("**42**."), clean("about $42$"), clean("“42”"), clean(r"\text{42 apples}")
    ('42', '42', '42', '42 apples')
    """
    text = plain(text).strip("*`_ \t\n")
    while _ends_with_a_mark(text):
        text = text[:-1].rstrip("*`_ \t\n")
    while len(text) > 1 and text[0] in QUOTES and text[-1] in QUOTES:
        text = text[1:-1].strip(" .")
    text = _NOISE.sub("", text).strip()
    inner = _ALL_TEXT.fullmatch(text)
    if inner is not None and not _in_words(inner[1].strip()):
        return clean(inner[1])
    return text


def _ends_with_a_mark(text: str) -> bool:
    if not text:
        return False
    if len(text) > 1 and text[-1] in _ENDINGS:
        return True
    return unicodedata.category(text[-1]) in ("So", "Sk")


@lru_cache(maxsize=8192)
def form_of(gold: str) -> GoldForm:
    """Return how a gold is compared."""
    text = clean(gold) if len(gold) <= LONGEST_ANSWER else gold.strip()
    if not text:
        return GoldForm("none")
    if len(text) > LONGEST_ANSWER:
        return GoldForm("unread", text)
    bare = without_fonts(text)
    option = _OPTION_GOLD.fullmatch(bare)
    if option:
        return GoldForm("option", text, (option[1] or option[2],))
    figures = figures_of(bare)
    if figures is not None:
        return GoldForm("figures", text, figures)
    if _in_words(text):
        return _within_words(gold, text)
    for part in members_of(text):
        if _TEXT.search(quantity_of(part).rest):  # neither a unit nor "and"
            return GoldForm("words", text)
    return GoldForm("math" if _readable(text) else "unread", text)


def is_words(gold: str) -> bool:
    """Return True if a gold is text in words, which has no place in mathematics."""
    return bool(gold.strip()) and form_of(gold).kind == "none"


def _within_words(gold: str, text: str) -> GoldForm:
    """Return the form of the formula in a sentence, or of what it says the answer is."""
    answer = statement(gold)
    inner: str | None = clause(gold.rsplit("\n", 1)[-1] if answer is None else answer)
    assert inner is not None
    has_digits = any(char.isdigit() for char in inner)
    if inner == gold or not has_digits or _in_words(clean(inner)):
        spans = [match[1] or match[2] for match in _SPAN.finditer(gold)]
        inner = spans[-1] if spans else None
    if inner is None or inner.strip() == gold.strip():
        return GoldForm("none", text)
    return form_of(inner)


def _in_words(text: str) -> bool:
    """Return True if a gold, apart from LaTeX's text, is written in words.

    A number with its unit, and `a x + b`, are not.
    """
    has_operator = _OPERATOR.search(text) is not None
    for part in members_of(text):
        quantity = quantity_of(part)
        if quantity.node is not None and (quantity.unit or quantity.node.literal):
            continue
        value = _COMMAND.sub(" ", _TEXT.sub(" ", labelled(part).value))
        for letters in _LETTERS.findall(value):
            symbols = has_operator and (len(letters) < 4 or letters.isupper())  # the square ABCD
            if letters not in NAMES and not symbols:
                return True
    return False


@lru_cache(maxsize=8192)
def _readable(text: str) -> bool:
    shape = shape_of(text)
    if shape.kind == "scalar":
        return quantity_of(text).node is not None or based_number(text) is not None
    return all(part != text and _readable(part) for part in shape.parts)


def wordy(text: str, gold: str) -> bool:
    """Return True if an answer holds words, and not only products of the gold's letters."""
    known = set(gold)
    words = [
        letters for letters in _LETTERS.findall(_COMMAND.sub(" ", text)) if letters not in NAMES
    ]
    return any(not set(word) <= known for word in words)


def squeezed_words(text: str) -> str:
    """Return words in lower case without spaces and most signs."""
    text = unicodedata.normalize("NFKC", without_fonts(plain(text))).casefold()
    return "".join(char for char in text if char.isalnum() or char in _KEPT_SIGNS)


def option_of(text: str) -> str | None:
    """Return the letter of an option that an answer chooses; None for anything else."""
    match = _OPTION.fullmatch(without_fonts(text))
    return None if match is None else match[1].upper()


# ------------------------------------------------------------------------------------------------
# dates, times, ratios


def figures_of(text: str) -> tuple[Any, ...] | None:
    """Return a date, a time or a ratio as its figures; None for anything else."""
    date = _DATE.fullmatch(text)
    if date is not None:
        figures = date.group(1, 2, 3) if date[1] else date.group(4, 6, 7)
        return ("date", *map(int, figures))
    colon = _COLON.fullmatch(text)
    if colon is not None:
        half = (colon[2] or "").lower()
        return ("colon", *map(int, colon[1].split(":")), half)
    return None


def figures_equal(gold: tuple[Any, ...], text: str) -> bool:
    """Return True if an answer is the date, time or ratio of a gold."""
    figures, node = figures_of(without_fonts(labelled(text).value)), parse(text)
    if figures is None and node is not None and node.kind == "quotient":  # 3:2 is 3/2 too
        return gold == ("colon", *(part.value for part in node.args), "")
    if figures is None or not gold[0] == figures[0] == "colon":
        return gold == figures
    halves_agree = gold[-1] == figures[-1] or not (
        gold[-1] and figures[-1]
    )  # 3 pm is 3 and no 3 am
    return gold[:-1] == figures[:-1] and halves_agree
