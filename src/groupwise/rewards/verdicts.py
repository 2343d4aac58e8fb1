r"""Whether an answer is the gold: by the gold's kind and by our own rules, before a library is
asked.

math-verify takes 0.0000001 for 0.0000002 (it rounds to six decimals), `81 + 14` for 95 (it works
the question out itself) and "Pairs" for "Paris" (it multiplies letters).  So numbers, words,
options, dates, and what is made of them, are decided here, and it is asked only about expressions
that differ, and never about words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from groupwise.rewards.answers import LONGEST_ANSWER, QUOTES, clause, statement
from groupwise.rewards.expressions import DEEPEST, NAMES, Node, numbers_equal, parse, plain
from groupwise.rewards.units import units_differ, without_unit

MOST_PARTS = 40
"""Members of a set that are compared one by one."""

Library = Callable[[str, str | None], float | None]
"""math-verify's verdict on (gold, answer): 1.0, 0.0, None where it cannot read the gold."""


class Undecided(Exception):
    """Our own rules leave it open, and no library is at hand."""


def no_library(gold: str, answer: str | None) -> float | None:
    """In a process that has not loaded it.  Raises Undecided."""
    raise Undecided


def decide(gold: str, answer: str | None, library: Library = no_library) -> float | None:
    r"""1.0 if the answer is the gold, 0.0 if it is not, None if the gold is no mathematics.
    answer: None: there is none.

    >>> decide("95", r"95.0"), decide("95", "81 + 14"), decide(r"\frac{1}{2}", "0.5"), decide("listen", "silent")
    (1.0, 0.0, 1.0, None)
    """
    form = form_of(gold)
    if form.kind == "none":
        return None
    if form.kind == "unread":
        return library(
            form.text, None if answer is None or wordy(clean(answer), form.text) else clean(answer)
        )
    if answer is None:
        return 0.0
    if form.kind == "words":
        return float(_squeezed_words(answer) == _squeezed_words(form.text))
    text = clean(answer)
    if form.kind == "option":
        match = _OPTION.fullmatch(_without_fonts(text))
        return float(match is not None and match[1].upper() == form.parts[0])
    if form.kind == "figures":
        return float(_figures_equal(form.parts, text))
    if len(text) > LONGEST_ANSWER:
        return 0.0
    return float(_equal(form.text, text, library))


def is_words(gold: str) -> bool:
    """Whether a gold is text in words, which has no place in mathematics."""
    return bool(gold.strip()) and form_of(gold).kind == "none"


@dataclass(frozen=True)
class GoldForm:
    """A gold answer as it is compared."""

    kind: str
    """none (empty or words), words (of LaTeX), option (A), figures (a date, a time, a ratio), math,
    unread (math-verify may).
    """
    text: str = ""
    parts: tuple[Any, ...] = ()


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
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SPAN = re.compile(r"\$\$?([^$]+)\$\$?|\\\(([^\\]*(?:\\[^)][^\\]*)*)\\\)")
_COMMAND = re.compile(r"\\(?:begin|end)\{\w*\*?\}|\\[A-Za-z]+")


def clean(text: str) -> str:
    """`plain`, without marks, quotes, full stops and words like "about" around it.

    >>> clean("**42**."), clean("about $42$"), clean("“42”")
    ('42', '42', '42')
    """
    text = plain(text).strip("*`_ \t\n")
    while (len(text) > 1 and text[-1] in ".,;:?\\") or (
        text and unicodedata.category(text[-1]) in ("So", "Sk")
    ):
        text = text[:-1].rstrip("*`_ \t\n")
    while len(text) > 1 and text[0] in QUOTES and text[-1] in QUOTES:
        text = text[1:-1].strip(" .")
    return _NOISE.sub("", text).strip()


@lru_cache(maxsize=8192)
def form_of(gold: str) -> GoldForm:
    """How a gold is compared."""
    text = clean(gold) if len(gold) <= LONGEST_ANSWER else gold.strip()
    if not text:
        return GoldForm("none")
    if len(text) > LONGEST_ANSWER:
        return GoldForm("unread", text)
    bare = _without_fonts(text)
    option = _OPTION_GOLD.fullmatch(bare)
    if option:
        return GoldForm("option", text, (option[1] or option[2],))
    figures = figures_of(bare)
    if figures is not None:
        return GoldForm("figures", text, figures)
    if _in_words(text):
        return _within_words(gold, text)
    if any(
        _TEXT.search(_quantity(part).rest) for part in _members(text)
    ):  # neither a unit nor "and"
        return GoldForm("words", text)
    return GoldForm("math" if _readable(text) else "unread", text)


def _within_words(gold: str, text: str) -> GoldForm:
    """Of a gold that is a sentence: the formula in it, or what it says the answer is."""
    answer = statement(gold)
    inner = clause(gold.rsplit("\n", 1)[-1] if answer is None else answer)
    if inner == gold or _in_words(clean(inner)) or not any(char.isdigit() for char in inner):
        spans = [match[1] or match[2] for match in _SPAN.finditer(gold)]
        inner = spans[-1] if spans else None
    if inner is None or inner.strip() == gold.strip():
        return GoldForm("none", text)
    return form_of(inner)


def _without_fonts(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip()


def _in_words(text: str) -> bool:
    """Whether a gold, apart from LaTeX's text, is written in words: a number with its unit, and `a
    x + b`, are not.
    """
    for part in _members(text):
        quantity = _quantity(part)
        if quantity.node is not None and (quantity.unit or quantity.node.literal):
            continue
        for letters in _LETTERS.findall(_COMMAND.sub(" ", _TEXT.sub(" ", _labelled(part)[1]))):
            symbolic = _OPERATOR.search(text) and (
                len(letters) < 4 or letters.isupper()
            )  # a b c, the square ABCD
            if letters not in NAMES and not symbolic:
                return True
    return False


def _squeezed_words(text: str) -> str:
    text = _without_fonts(plain(text))
    return "".join(
        char
        for char in unicodedata.normalize("NFKC", text).casefold()
        if char.isalnum() or char in "+-=<>/^%"
    )


def wordy(text: str, gold: str) -> bool:
    """Whether an answer holds words, and not only products of the gold's letters."""
    known = set(gold)
    return any(
        letters not in NAMES and not set(letters) <= known
        for letters in _LETTERS.findall(_COMMAND.sub(" ", text))
    )


# ------------------------------------------------------------------------------------------------
# dates, times, ratios


def figures_of(text: str) -> tuple[Any, ...] | None:
    """A date, a time or a ratio as its figures; None for anything else."""
    if date := _DATE.fullmatch(text):
        return ("date", *(int(date[n]) for n in ((1, 2, 3) if date[1] else (4, 6, 7))))
    if colon := _COLON.fullmatch(text):
        return ("colon", *map(int, colon[1].split(":")), (colon[2] or "").lower())
    return None


def _figures_equal(gold: tuple[Any, ...], text: str) -> bool:
    figures, node = figures_of(_without_fonts(_labelled(text)[1])), parse(text)
    if figures is not None and gold[0] == figures[0] == "colon":
        return gold[:-1] == figures[:-1] and (
            gold[-1] == figures[-1] or not (gold[-1] and figures[-1])
        )
    if figures is None and node is not None and node.kind == "quotient":  # 3:2 is 3/2 too
        return gold == ("colon", *(part.value for part in node.args), "")
    return gold == figures


# ------------------------------------------------------------------------------------------------
# sets, tuples, relations

_BRACKET = r"(?P<open>\\\{|[(\[{]|\\begin\{)|(?P<close>\\\}|[)\]}])"
_BRACKETED = re.compile(r"(\\\{)(.+)(\\\})|(\{)(.+)(\})|([(\[])(.+)([)\]])", re.DOTALL)
_LISTING = re.compile(
    rf"{_BRACKET}|(?P<mark>,?\s*\\text\{{\s*,?\s*(?:and|or)\s*,?\s*\}}|,?\s*(?<![^\W\d_])(?:and|or)(?![^\W\d_])|\\lor(?![a-zA-Z])|;"
    r"|,(?:\s*(?:and|or)(?![^\W\d_]))?|\n)"
)
_RELATION = re.compile(
    rf"{_BRACKET}|(?P<mark>\\(?:le|ge|lt|gt|ne|neq|approx|equiv|implies|Rightarrow|to|rightarrow)(?![A-Za-z])|<=|>=|!=|==|=|<|>)"
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
_APPROXIMATION = re.compile(rf"{_BRACKET}|(?P<mark>\\approx(?![A-Za-z]))")
_SIGNS = {
    r"\lt": "<",
    r"\gt": ">",
    "<=": r"\le",
    ">=": r"\ge",
    "!=": r"\ne",
    r"\neq": r"\ne",
    "==": "=",
    r"\approx": "=",
}
_SIGNS |= dict.fromkeys([r"\implies", r"\Rightarrow", r"\to", r"\rightarrow"], "=")
_MIRRORED = {">": "<", r"\ge": r"\le"}
_MEMBER = re.compile(r"^[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![A-Za-z])\s*")
_INDEX = re.compile(r"_(?:\{[^{}]*\}|\w)|(?<=[A-Za-z}])\([^()]*\)|\^\{?-1\}?|\\text\{[^{}]*\}")
_NOT_IN_A_NAME = re.compile(r"[-\d+*^<>=]")


def _split(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts between marks outside of all brackets, and the marks; one part where brackets do
    not close.
    """
    parts, marks, depth, begin = list[str](), list[str](), 0, 0
    for match in pattern.finditer(text):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth -= 1
        elif depth == 0:
            parts.append(text[begin : match.start()].strip())
            marks.append(match["mark"].strip())
            begin = match.end()
        if not 0 <= depth <= DEEPEST:
            return [text], []
    return ([text], []) if depth else ([*parts, text[begin:].strip()], marks)


def _members(text: str) -> list[str]:
    """The members of a list without brackets, where commas between thousands do not part them."""
    if "," in text:
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    return [part for part in _split(text, _LISTING)[0] if part] or [text]


@dataclass(frozen=True)
class AnswerShape:
    """What an answer is made of."""

    kind: str
    """scalar, list, set, tuple, relation."""
    parts: tuple[str, ...]
    marks: tuple[str, ...] = ()
    """The brackets of a tuple, the signs of a relation."""


@lru_cache(maxsize=8192)
def shape_of(text: str) -> AnswerShape:
    """How a text is put together, from the outside."""
    text = _MEMBER.sub("", text.strip())
    if len(members := _members(text)) > 1:
        return AnswerShape("list", tuple(members))
    sides, signs = _split(text, _RELATION)
    if signs:
        return AnswerShape(
            "relation", tuple(sides), tuple(_SIGNS.get(sign, sign) for sign in signs)
        )
    return _bracketed(text)


def _bracketed(text: str) -> AnswerShape:
    if match := _BRACKETED.fullmatch(text):
        opening, inner, closing = (group for group in match.groups() if group is not None)
        members = [part for part in _split(inner.strip(), _LISTING)[0] if part]
        if len(members) > 1:
            return AnswerShape(
                {"\\{": "set", "{": "list"}.get(opening, "tuple"),
                tuple(members),
                (opening, closing),
            )
    if text.count("\\pm") == 1:
        return AnswerShape(
            "list", (text.replace("\\pm", "+").lstrip("+ "), text.replace("\\pm", "-"))
        )
    return AnswerShape("scalar", (text,))


@lru_cache(maxsize=8192)
def _labelled(text: str) -> tuple[str | None, str]:
    r"""The name before an equals sign, and the last side: `x = 5`, `f(2) = 3 + 4 = 7`.  No name: an
    equation, or no relation.
    """
    sides, signs = _split(text, _RELATION)
    if not signs or any(_SIGNS.get(sign, sign) != "=" for sign in signs) or not sides[-1]:
        return None, text
    if _is_name(sides[0]):
        return sides[0], sides[-1]
    if len(sides) == 2 and re.fullmatch(r"[A-Za-z](?:_\{?\w\}?)?", sides[1]):
        return sides[1], sides[0]  # 5 = x
    return None, text


def _is_name(side: str) -> bool:
    """Whether a side of an equation is a name for the other: x, f(2), AB, the area, and not 2x + 1."""
    inner = _INDEX.sub(" ", side)
    named = any(char.isalpha() for char in side) and not _NOT_IN_A_NAME.search(inner)
    node = parse(side)
    return named and (node is None or bool(node.symbols))


def _exact_side(text: str, gold: str) -> str:
    r"""Of `\frac{1}{3} \approx 0.33` the side that the gold asks for: the rounded one if it is a
    whole number or decimal.
    """
    sides, signs = _split(text, _APPROXIMATION)
    if not signs:
        return text
    node = _quantity(gold).node
    if node is not None and node.kind == "number":
        return text
    return text if _is_name(sides[0]) else sides[0]


@lru_cache(maxsize=8192)
def _readable(text: str) -> bool:
    shape = shape_of(text)
    if shape.kind == "scalar":
        return _quantity(text).node is not None or _based(text) is not None
    return all(part != text and _readable(part) for part in shape.parts)


def _equal(gold: str, answer: str, library: Library) -> bool:
    answer = _exact_side(answer, _labelled(gold)[1])
    g, a = shape_of(gold), shape_of(answer)
    if (g.kind, a.kind) == ("tuple", "relation"):
        a = _interval(a)
    elif (g.kind, a.kind) == ("relation", "tuple"):
        g = _interval(g)
    if gold == answer:
        return True
    if a.kind == "relation" and set(a.marks) == {"="} and _contradictory(a.parts):
        return False
    if g.kind == "relation":
        return _relations_equal(gold, g, answer, a, library)
    if a.kind == "relation" and set(a.marks) == {"="}:  # x = 5, 81 + 14 = 95
        return bool(a.parts[-1]) and _equal(
            gold, _labelled(answer)[1] if _labelled(answer)[0] else a.parts[-1], library
        )
    if g.kind == "scalar":
        return a.kind == "scalar" and _quantities_equal(g.parts[0], a.parts[0], library)
    if g.kind in ("list", "set") and a.kind in ("list", "set"):
        return _unordered(g.parts, a.parts, library)
    if {g.kind, a.kind} <= {"list", "tuple"}:
        brackets = (
            g.marks == a.marks
            if g.kind == a.kind
            else len(g.parts) > 2 or ("(", ")") in (g.marks, a.marks)
        )
        return (
            brackets
            and len(g.parts) == len(a.parts)
            and all(map(_equal, g.parts, a.parts, [library] * len(g.parts)))
        )
    if {g.kind, a.kind} == {"set", "tuple"}:
        return False
    return a.kind != "scalar" and _by_library(gold, answer, library)


def _interval(shape: AnswerShape) -> AnswerShape:
    r"""An inequality as the interval that it is: `-2 \le x < 7`; other relations as they are."""
    parts, marks = shape.parts, shape.marks
    if marks[0] in (">", r"\ge"):
        parts, marks = parts[::-1], tuple(_MIRRORED.get(mark, mark) for mark in reversed(marks))
    if len(parts) == 3 and set(marks) <= {"<", r"\le"} and _is_name(parts[1]):
        return AnswerShape(
            "tuple",
            (parts[0], parts[2]),
            ("(" if marks[0] == "<" else "[", ")" if marks[1] == "<" else "]"),
        )
    return shape


def _unordered(gold: Sequence[str], answer: Sequence[str], library: Library) -> bool:
    """Whether the members of two sets are equal one by one."""
    gold, answer = (
        list({_squeezed(member): member for member in members}.values())
        for members in (gold, answer)
    )
    if len(gold) != len(answer) or len(gold) > MOST_PARTS:
        return len(gold) == len(answer) and sorted(gold) == sorted(answer)
    left = list(answer)
    for member in gold:
        same = next((n for n, other in enumerate(left) if _equal(member, other, library)), None)
        if same is None:
            return False
        del left[same]
    return True


def _relations_equal(
    gold: str, g: AnswerShape, answer: str, a: AnswerShape, library: Library
) -> bool:
    name, value = _labelled(gold)
    if name is not None:
        constant = not _symbols(value)
        if a.kind != "relation":
            return _equal(value, answer, library)
        other, side = _labelled(answer)
        if other is not None and (name == other or "text" in name + other):
            if _equal(value, side, library):
                return True
        elif other is None and set(a.marks) == {"="} and not _symbols(a.parts[0]):
            return _equal(value, a.parts[-1], library)  # 81 + 14 = 95
        return not constant and _by_library(gold, answer, library)
    if set(g.marks) == {"="} and not _symbols(g.parts[0]) and not _symbols(g.parts[-1]):
        return _equal(g.parts[-1], answer, library)
    return a.kind != "scalar" and _by_library(gold, answer, library)


def _contradictory(sides: Sequence[str]) -> bool:
    """Whether an equation says that two numbers are equal which differ by more than rounding: `6 *
    9 = 42`.
    """
    nodes = [parse(side) for side in sides]
    values = [node.value for node in nodes if node is not None and node.value is not None]
    return any(abs(value - values[-1]) * 100 > abs(values[-1]) for value in values)


def _symbols(text: str) -> bool:
    """Whether a side of an equation holds variables; what cannot be read may."""
    shape = shape_of(text)
    if shape.kind == "scalar":
        node = _quantity(text).node
        return node is None or bool(node.symbols)
    return any(_symbols(part) for part in shape.parts if part != text)


# ------------------------------------------------------------------------------------------------
# numbers and expressions

_BASED = re.compile(
    r"\(?([0-9A-Za-z]+)\)?\s*_\s*\{?\s*\(?\s*(\d{1,2})\s*\)?\s*\}?|([0-9A-Fa-f]+)\s+(?:in\s+)?\(?base\s+(\d{1,2})\)?"
)
_CURRENCY = re.compile(
    r"^([-+]?)\s*(?:(?:US|CA|AU|NZ|HK)?\s?[€£¥₹₩₽₿¢]|(?:USD|EUR|GBP|CHF|JPY|INR|CNY|RMB|Rs\.?)(?=[\s\d]))\s*"
)


_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}


@dataclass(frozen=True)
class Quantity:
    """A number or expression with its unit."""

    node: Node | None
    unit: str = ""
    percent: bool = False
    rest: str = ""
    """Without its unit, as text."""


@lru_cache(maxsize=8192)
def _quantity(text: str) -> Quantity:
    text = _CURRENCY.sub(r"\1", _labelled(text)[1])
    rest, unit = without_unit(text)
    inner = parse(rest)
    if unit and (
        inner is None
        or (inner.symbols and "\\text" not in text)
        or (len(unit) == 1 and inner.kind == "sum")
    ):
        return Quantity(parse(text), rest=text)
    scale, _, counted = unit.partition(" ")
    if (
        (times := _SCALES.get(scale.lower()))
        and inner is not None
        and inner.literal
        and inner.value is not None
    ):
        inner, unit = Node("number", value=inner.value * times, literal=True), counted
        rest = str(inner.value)
    return Quantity(inner, unit, unit.startswith(("percent", "pct", "%")), rest)


def _based(text: str) -> tuple[str, int] | None:
    """A number of another base: 1010_2."""
    match = _BASED.fullmatch(_without_fonts(text))
    digits, base = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
    if not digits or (not digits[0].isdigit() and len(digits) < 2):
        return None
    return digits.lstrip("0").upper() or "0", int(base)


def _quantities_equal(gold: str, answer: str, library: Library) -> bool:
    if _based(gold) or _based(answer):
        one, other = (
            _based(text) or (text.strip("() ").lstrip("0").upper(), 0) for text in (gold, answer)
        )
        return one[0] == other[0] and (one[1] == other[1] or 0 in (one[1], other[1]))
    g, a = _quantity(gold), _quantity(answer)
    if units_differ(g.unit, a.unit):
        return False
    left, right = g.node, a.node
    if (
        left is not None
        and left.literal
        and (right is None or right.symbols)
        and (only := _only_number(answer))
    ):
        a = _quantity(only)
        right = a.node
    if left is None or right is None:
        return (left is None or not left.literal) and _by_library(g.rest, a.rest, library)
    if left.literal:
        if right.kind == "factorial" and answer.endswith("!") and right.args[0].literal:
            right = right.args[0]  # an exclamation mark
        if right.undone or right.symbols:
            return False
        if right.value is not None:
            return _numbers_equal(g, a, left, right)
        return left.decimals >= 6 and _by_library(g.rest, a.rest, library)
    if left.symbols != right.symbols or (not left.symbols and right.undone and not left.undone):
        return False
    if left.value is not None and right.value is not None:
        return _numbers_equal(g, a, left, right)
    if left.tiny or right.tiny or (not left.symbols and left.key == right.key):
        return left.key == right.key
    return _by_library(g.rest, a.rest, library)


def _only_number(text: str) -> str | None:
    """The number of a sentence that has one, as it is written: she has 3 apples left."""
    numbers = _NUMBER.findall(text)
    if (
        len(numbers) != 1
        or _NEGATION.search(text)
        or _SIGNED.search(text)
        or not _LETTERS.search(text)
    ):
        return None
    return numbers[0]


def _numbers_equal(g: Quantity, a: Quantity, left: Node, right: Node) -> bool:
    assert left.value is not None and right.value is not None
    if numbers_equal(left, right):
        return g.percent == a.percent or abs(left.value) >= 1 or g.percent
    if g.percent == a.percent:
        return False

    def hundredth(node: Node) -> Node:
        assert node.value is not None
        return replace(node, value=node.value / 100, decimals=max(node.decimals, 0) + 2)

    return (
        numbers_equal(hundredth(left), right)
        if g.percent
        else numbers_equal(left, hundredth(right))
    )


def _by_library(gold: str, answer: str, library: Library) -> bool:
    """math-verify's word, where our own rules say neither yes nor no; never on words, nor on work
    that is left undone.
    """
    if wordy(answer, gold) or (
        _UNDONE.search(answer) and not _UNDONE.search(gold) and not _LETTER.search(gold)
    ):
        return False
    return library(gold, answer) == 1.0


_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?%?(?!\w)")
_NEGATION = re.compile(
    r"\b(?:not|no|never|neither|without|hardly|at (?:least|most)|(?:more|less|fewer|greater)"
    r" than)\b|n['’]t\b",
    re.IGNORECASE,
)
_SIGNED = re.compile(r"[=+*^<>\\]|\d\s*/")
_UNDONE = re.compile(r"\d\s*(?:[-+*]|\\times(?!\s*10\s*\^)|\\cdot(?!\s*10\s*\^)|\\div)\s*\d")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")


# ------------------------------------------------------------------------------------------------
# the question said again


def restated(answer: str, gold: str, prompt: str) -> bool:
    r"""Whether an answer is an expression of the prompt, letter by letter, that is not the gold's
    own.

    >>> restated(r"\frac{48}{2}", "24", "What is 48/2?"), restated("24", "24", "Is it 24?")
    (True, False)
    """
    text, right = clean(answer), clean(gold)
    if len(text) > LONGEST_ANSWER:
        return False
    side = _labelled(text)[1]
    node, other, squeezed = parse(side), parse(right), _squeezed(side)
    if (
        shape_of(side).kind not in ("scalar", "relation")
        or len(squeezed) < 3
        or squeezed.isalpha()
        or squeezed == _squeezed(right)
    ):
        return False
    if node is not None and node.kind in ("number", "negative"):
        return False
    if (
        node is not None
        and other is not None
        and (
            node.key == other.key
            if node.value is None
            else node.literal and other.kind == node.kind
        )
    ):
        return False  # the gold's own form
    before, after = (
        (r"(?<![\d.])" if squeezed[0].isdigit() else ""),
        (r"(?!\d)" if squeezed[-1].isdigit() else ""),
    )
    return re.search(before + re.escape(squeezed) + after, _squeezed_prompt(prompt)) is not None


@lru_cache(maxsize=64)
def _squeezed_prompt(prompt: str) -> str:
    return _squeezed(plain(prompt))


def _squeezed(text: str) -> str:
    text = re.sub(r"\}\s*\{", "/", text)
    text = re.sub(
        r"\\(?:cdot|times)(?![A-Za-z])|\*\*?",
        lambda match: "^" if match.group() == "**" else "*",
        text,
    )
    return re.sub(
        r"\\(?:frac|div)(?![A-Za-z])|[\s(){}\[\]\\$]",
        lambda match: "/" if match.group() == r"\div" else "",
        text,
    )
