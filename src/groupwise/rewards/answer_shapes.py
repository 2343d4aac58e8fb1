r"""How an answer is put together: a scalar, list, set, tuple or relation, and its parts as text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from groupwise.rewards.expressions import DEEPEST, parse

_BRACKET = r"(?P<open>\\\{|[(\[{]|\\begin\{)|(?P<close>\\\}|[)\]}])"
_BRACKETED = re.compile(r"(\\\{)(.+)(\\\})|(\{)(.+)(\})|([(\[])(.+)([)\]])", re.DOTALL)
_LISTING = re.compile(
    rf"{_BRACKET}|(?P<mark>,?\s*\\text\{{\s*,?\s*(?:and|or)\s*,?\s*\}}"
    r"|,?\s*(?<![^\W\d_])(?:and|or)(?![^\W\d_])|\\lor(?![a-zA-Z])|;"
    r"|,(?:\s*(?:and|or)(?![^\W\d_]))?|\n)"
)
_RELATION = re.compile(
    rf"{_BRACKET}|(?P<mark>\\(?:le|ge|lt|gt|ne|neq|approx|equiv|implies|Rightarrow|to|rightarrow)"
    r"(?![A-Za-z])|<=|>=|!=|==|=|<|>)"
)
_APPROXIMATION = re.compile(rf"{_BRACKET}|(?P<mark>\\approx(?![A-Za-z]))")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
_SIGNS = {
    r"\lt": "<", r"\gt": ">", "<=": r"\le", ">=": r"\ge", "!=": r"\ne", r"\neq": r"\ne",
    "==": "=", r"\approx": "=",
    r"\implies": "=", r"\Rightarrow": "=", r"\to": "=", r"\rightarrow": "=",
}  # fmt: skip
_MIRRORED = {">": "<", r"\ge": r"\le"}
_MEMBER = re.compile(r"^[A-Za-z](?:_\{?\w\}?)?\s*\\in(?![A-Za-z])\s*")
_INDEX = re.compile(r"_(?:\{[^{}]*\}|\w)|(?<=[A-Za-z}])\([^()]*\)|\^\{?-1\}?|\\text\{[^{}]*\}")
_NOT_IN_A_NAME = re.compile(r"[-\d+*^<>=]")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w\}?)?")
_KINDS = {"\\{": "set", "{": "list"}


@dataclass(frozen=True)
class AnswerShape:
    """What an answer is made of."""

    kind: str
    """scalar, list, set, tuple, relation."""
    parts: tuple[str, ...]
    marks: tuple[str, ...] = ()
    """The brackets of a tuple, the signs of a relation."""

    @property
    def is_equation(self) -> bool:
        """Return True for a relation with equals signs alone."""
        return self.kind == "relation" and set(self.marks) == {"="}


@dataclass(frozen=True)
class Divided:
    """A text between the marks that divide it."""

    parts: list[str]
    marks: list[str]


def _divided(text: str, pattern: re.Pattern[str]) -> Divided:
    """Divide a text at marks outside of all brackets; not at all where brackets do not close."""
    parts, marks = list[str](), list[str]()
    depth = begin = 0
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
            return Divided([text], [])
    if depth:
        return Divided([text], [])
    return Divided([*parts, text[begin:].strip()], marks)


def _without_commas(match: re.Match[str]) -> str:
    return match.group().replace(",", "")


def members_of(text: str) -> list[str]:
    """Return the members of a list without brackets; commas between thousands do not part them."""
    if "," in text:
        text = _THOUSANDS.sub(_without_commas, text)
    members = [part for part in _divided(text, _LISTING).parts if part]
    return members or [text]


@lru_cache(maxsize=8192)
def shape_of(text: str) -> AnswerShape:
    """Return how a text is put together, from the outside."""
    text = _MEMBER.sub("", text.strip())
    members = members_of(text)
    if len(members) > 1:
        return AnswerShape("list", tuple(members))
    relation = _divided(text, _RELATION)
    if relation.marks:
        signs = [_SIGNS.get(sign, sign) for sign in relation.marks]
        return AnswerShape("relation", tuple(relation.parts), tuple(signs))
    return _bracketed(text)


def _bracketed(text: str) -> AnswerShape:
    match = _BRACKETED.fullmatch(text)
    if match is not None:
        opening, inner, closing = (group for group in match.groups() if group is not None)
        members = [part for part in _divided(inner.strip(), _LISTING).parts if part]
        if len(members) > 1:
            kind = _KINDS.get(opening, "tuple")
            return AnswerShape(kind, tuple(members), (opening, closing))
    if text.count(r"\pm") == 1:
        both = text.replace(r"\pm", "+").lstrip("+ "), text.replace(r"\pm", "-")
        return AnswerShape("list", both)
    return AnswerShape("scalar", (text,))


@dataclass(frozen=True)
class Labelled:
    """An answer and the name that it is given: `x = 5`."""

    name: str | None
    value: str


@lru_cache(maxsize=8192)
def labelled(text: str) -> Labelled:
    r"""Part the name before an equals sign from the last side: `x = 5`, `f(2) = 3 + 4 = 7`.

    There is no name in an equation, and in what is no relation.
    """
    relation = _divided(text, _RELATION)
    sides = relation.parts
    signs = {_SIGNS.get(sign, sign) for sign in relation.marks}
    if signs != {"="} or not sides[-1]:
        return Labelled(None, text)
    if is_name(sides[0]):
        return Labelled(sides[0], sides[-1])
    if len(sides) == 2 and _VARIABLE.fullmatch(sides[1]):
        return Labelled(sides[1], sides[0])  # 5 = x
    return Labelled(None, text)


def is_name(side: str) -> bool:
    """Return True if a side of an equation names the other: x, f(2), the area, and not 2x + 1."""
    if not any(char.isalpha() for char in side) or _NOT_IN_A_NAME.search(_INDEX.sub(" ", side)):
        return False
    node = parse(side)
    return node is None or bool(node.symbols)


def exact_side(text: str) -> str | None:
    r"""Return the side that `\frac{1}{3} \approx 0.33` rounds; None where nothing is rounded."""
    rounding = _divided(text, _APPROXIMATION)
    if not rounding.marks or is_name(rounding.parts[0]):
        return None
    return rounding.parts[0]


def as_interval(shape: AnswerShape) -> AnswerShape:
    r"""Return an inequality as an interval: `-2 \le x < 7`; other relations as they are."""
    parts, marks = shape.parts, shape.marks
    if marks[0] in (">", r"\ge"):
        parts = parts[::-1]
        marks = tuple(_MIRRORED.get(mark, mark) for mark in reversed(marks))
    if len(parts) != 3 or not set(marks) <= {"<", r"\le"} or not is_name(parts[1]):
        return shape
    opening = "(" if marks[0] == "<" else "["
    closing = ")" if marks[1] == "<" else "]"
    return AnswerShape("tuple", (parts[0], parts[2]), (opening, closing))
