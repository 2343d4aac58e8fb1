r"""Whether an answer is the gold: by the gold's kind and by our own rules, before a library is
asked.

math-verify takes 0.0000001 for 0.0000002 (it rounds to six decimals), `81 + 14` for 95 (it works
the question out itself), "no" for "on" (it multiplies letters).  So numbers, words, options, dates,
and what is made of them, are decided here, and it is asked only about expressions that differ, and
never about words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from groupwise.rewards.answer_shapes import (
    AnswerShape,
    as_interval,
    exact_side,
    labelled,
    shape_of,
)
from groupwise.rewards.answers import LONGEST_ANSWER
from groupwise.rewards.expressions import Node, numbers_equal, parse
from groupwise.rewards.gold_forms import (
    clean,
    figures_equal,
    form_of,
    option_of,
    squeezed_words,
    wordy,
)
from groupwise.rewards.quantities import (
    Quantity,
    based_number,
    digits_alone,
    quantity_of,
    units_differ,
    without_fonts,
)
from groupwise.rewards.restatement import squeezed

MOST_PARTS = 40
"""Members of a set that are compared one by one."""

Library = Callable[[str, str | None], float | None]
"""math-verify's verdict on (gold, answer): 1.0, 0.0, None where it cannot read the gold."""

_WORD_OR_NUMERAL = re.compile(
    r"(?![a-z][A-Z])"  # aN: no word is written so
    r"(?i:ad|ah|am|an|as|at|be|by|do|go|ha|he|hi|id|if|in|is|it|me|my|no|of|oh|ok|on|or|ox|so"
    r"|to|up|us|we|[ivx]{2})"
)
_CAPITALS = re.compile(r"[A-Z]{2}")
"""A state, a side of a figure, a product of matrices."""
_PRODUCT_SIGN = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[\s*]")
_ONE_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?%?(?!\w)")
_NEGATION = re.compile(
    r"\b(?:not|no|never|neither|without|hardly|at (?:least|most)|(?:more|less|fewer|greater)"
    r" than)\b|n['’]t\b",
    re.IGNORECASE,
)
_OPERATION = re.compile(r"[=+*^<>\\]|\d\s*/")
_WORD = re.compile(r"(?<!\\)(?<![^\W\d_])[^\W\d_]{3,}")
_UNDONE = re.compile(r"\d\s*(?:[-+*]|\\times(?!\s*10\s*\^)|\\cdot(?!\s*10\s*\^)|\\div)\s*\d")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")


class Undecided(Exception):
    """Raised where our own rules leave it open, and no library is at hand."""


def no_library(gold: str, answer: str | None) -> float | None:
    """Stand in for the library in a process that has not loaded it.  Raises Undecided."""
    raise Undecided


def decide(gold: str, answer: str | None, library: Library = no_library) -> float | None:
    r"""Return 1.0 if the answer is the gold, 0.0 if it is not, None if the gold is no mathematics.

    answer: None: there is none.

    >>> decide("95", r"95.0"), decide("95", "81 + 14"), decide(r"\frac{1}{2}", "0.5")
    (1.0, 0.0, 1.0)
    >>> decide("the word listen", "silent") is None
    True
    >>> decide("no", "on"), decide("xy", "yx"), decide("5", r"\text{5 apples}")
    (0.0, 1.0, 1.0)
    """
    form = form_of(gold)
    if form.kind == "none":
        return None
    text = None if answer is None else clean(answer)
    if form.kind == "unread":
        if text is not None and wordy(text, form.text):
            text = None
        return library(form.text, text)
    if answer is None or text is None:
        return 0.0
    if form.kind == "words":
        return float(squeezed_words(answer) == squeezed_words(form.text))
    if form.kind == "option":
        return float(option_of(text) == form.parts[0])
    if form.kind == "figures":
        return float(figures_equal(form.parts, text))
    if len(text) > LONGEST_ANSWER:
        return 0.0
    return float(_Comparison(library).equal(form.text, text))


class _Comparison:
    """The rules for mathematics, and the library that they leave the rest to."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def equal(self, gold: str, answer: str) -> bool:
        """Compare two texts (see `clean`)."""
        answer = _asked_side(gold, answer)
        if gold == answer:
            return True
        g, a = shape_of(gold), shape_of(answer)
        if g.kind == "tuple" and a.kind == "relation":
            a = as_interval(a)
        elif g.kind == "relation" and a.kind == "tuple":
            g = as_interval(g)
        if a.is_equation and _contradictory(a.parts):
            return False
        if g.kind == "relation":
            return self._relations_equal(gold, g, answer, a)
        if a.is_equation:  # x = 5, 81 + 14 = 95
            side = labelled(answer).value if labelled(answer).name else a.parts[-1]
            return bool(a.parts[-1]) and self.equal(gold, side)
        return self._shapes_equal(gold, g, answer, a)

    def _shapes_equal(self, gold: str, g: AnswerShape, answer: str, a: AnswerShape) -> bool:
        kinds = {g.kind, a.kind}
        if g.kind == "scalar":
            return a.kind == "scalar" and self._quantities_equal(g.parts[0], a.parts[0])
        if kinds <= {"list", "set"}:
            return self._members_equal(g.parts, a.parts)
        if kinds <= {"list", "tuple"}:
            return _brackets_agree(g, a) and self._parts_equal(g.parts, a.parts)
        if kinds == {"set", "tuple"}:
            return False
        return a.kind != "scalar" and self._by_library(gold, answer)

    def _parts_equal(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        """Compare the members of two tuples in their order."""
        if len(gold) != len(answer):
            return False
        return all(self.equal(*pair) for pair in zip(gold, answer, strict=True))

    def _members_equal(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        """Compare the members of two sets in any order."""
        gold, answer = _without_repeats(gold), _without_repeats(answer)
        if len(gold) != len(answer):
            return False
        if len(gold) > MOST_PARTS:
            return sorted(gold) == sorted(answer)
        left = list(answer)
        for member in gold:
            for place, candidate in enumerate(left):
                if self.equal(member, candidate):
                    del left[place]
                    break
            else:
                return False
        return True

    def _relations_equal(self, gold: str, g: AnswerShape, answer: str, a: AnswerShape) -> bool:
        if labelled(gold).name is not None:
            return self._named_equal(gold, answer, a)
        if g.is_equation and not _has_symbols(g.parts[0]) and not _has_symbols(g.parts[-1]):
            return self.equal(g.parts[-1], answer)
        return a.kind != "scalar" and self._by_library(gold, answer)

    def _named_equal(self, gold: str, answer: str, a: AnswerShape) -> bool:
        """Compare with a gold that gives a value a name: x = 5."""
        g = labelled(gold)
        if a.kind != "relation":
            return self.equal(g.value, answer)
        side = labelled(answer)
        if side.name is None and a.is_equation and not _has_symbols(a.parts[0]):
            return self.equal(g.value, a.parts[-1])  # 81 + 14 = 95
        names_agree = side.name == g.name or "text" in f"{g.name}{side.name}"
        if side.name is not None and names_agree and self.equal(g.value, side.value):
            return True
        return _has_symbols(g.value) and self._by_library(gold, answer)

    def _quantities_equal(self, gold: str, answer: str) -> bool:
        letters = _PRODUCT_SIGN.sub("", without_fonts(answer))
        if letters.isalpha() and _order_counts(gold):
            return _letters_equal(gold, letters)
        based, other = based_number(gold), based_number(answer)
        if based is not None or other is not None:
            return (based or digits_alone(gold)).equals(other or digits_alone(answer))
        g, a = quantity_of(gold), quantity_of(answer)
        if units_differ(g.unit, a.unit):
            return False
        left, right = g.node, a.node
        if left is None:
            return self._by_library(g.rest, a.rest)
        if left.literal:
            return self._is_number(g, left, a, answer)
        if right is None:
            return self._by_library(g.rest, a.rest)
        if left.symbols != right.symbols:
            return False
        if not left.symbols and right.undone and not left.undone:
            return False
        if left.value is not None and right.value is not None:
            return _numbers_equal(g, a)
        if left.key == right.key:
            return True
        if left.symbols and (left.tiny or right.tiny):  # all of these are 0 to math-verify
            return False
        return not wordy(a.rest, g.rest) and self._library(g.rest, a.rest) == 1.0

    def _is_number(self, g: Quantity, left: Node, a: Quantity, answer: str) -> bool:
        """Compare with a gold that is a plain number: the answer leaves nothing to do."""
        if a.node is None or a.node.symbols:
            number = _number_of_a_sentence(answer)
            if number is not None:
                a = quantity_of(number)
        right = a.node
        if right is None:
            return False
        if right.kind == "factorial" and answer.endswith("!") and right.args[0].literal:
            right = right.args[0]  # an exclamation mark
            a = replace(a, node=right)
        if right.undone or right.symbols:
            return False
        if right.value is not None:
            return _numbers_equal(g, a)
        return left.decimals >= 6 and self._by_library(g.rest, a.rest)

    def _by_library(self, gold: str, answer: str) -> bool:
        """Ask math-verify, but never about words, nor about work that is left undone."""
        if wordy(answer, gold):
            return False
        undone = _UNDONE.search(answer) and not _UNDONE.search(gold)
        if undone and not _LETTER.search(gold):
            return False
        return self._library(gold, answer) == 1.0


def _asked_side(gold: str, answer: str) -> str:
    r"""Return the side of `\frac{1}{3} \approx 0.33` that the gold asks for.

    It is the rounded one if the gold is a whole number or decimal.
    """
    exact = exact_side(answer)
    if exact is None:
        return answer
    node = quantity_of(labelled(gold).value).node
    if node is not None and node.kind == "number":
        return answer
    return exact


def _without_repeats(members: Sequence[str]) -> list[str]:
    return list({squeezed(member): member for member in members}.values())


def _brackets_agree(g: AnswerShape, a: AnswerShape) -> bool:
    if g.kind == a.kind:
        return g.marks == a.marks
    return len(g.parts) > 2 or ("(", ")") in (g.marks, a.marks)


def _contradictory(sides: Sequence[str]) -> bool:
    """Return True if the sides of an equation are numbers that differ: `6 * 9 = 42`."""
    nodes = [parse(side) for side in sides]
    values = [node.value for node in nodes if node is not None and node.value is not None]
    return any(abs(value - values[-1]) * 100 > abs(values[-1]) for value in values)


def _has_symbols(text: str) -> bool:
    """Return True if a side of an equation holds variables; what cannot be read may."""
    shape = shape_of(text)
    if shape.kind == "scalar":
        node = quantity_of(text).node
        return node is None or bool(node.symbols)
    return any(_has_symbols(part) for part in shape.parts if part != text)


# ------------------------------------------------------------------------------------------------
# letters and numbers


def _order_counts(gold: str) -> bool:
    """Return True if a gold is letters that no product is: no, is it, IV, AB."""
    if not gold.replace(" ", "").isalpha():
        return False
    if _CAPITALS.fullmatch(gold):
        return True
    return any(_WORD_OR_NUMERAL.fullmatch(part) for part in gold.split())


def _letters_equal(gold: str, letters: str) -> bool:
    if _CAPITALS.fullmatch(gold) and not _WORD_OR_NUMERAL.fullmatch(gold):
        return letters == gold
    return letters.casefold() == gold.replace(" ", "").casefold()


def _number_of_a_sentence(text: str) -> str | None:
    """Return the number of a sentence that has one, as it is written: she has 3 apples left."""
    numbers = _ONE_NUMBER.findall(text)
    if len(numbers) != 1 or _NEGATION.search(text) or _OPERATION.search(text):
        return None
    return numbers[0] if _WORD.search(text) else None


def _numbers_equal(g: Quantity, a: Quantity) -> bool:
    """Compare two numbers.  Hundredths equal the number that they are, and a gold of per cent the
    number of hundredths.
    """
    gold, answer = g.node, a.node
    assert gold is not None and gold.value is not None and answer is not None
    if numbers_equal(gold, answer):
        return g.percent == a.percent or abs(gold.value) >= 1 or g.percent
    if g.percent == a.percent:
        return False
    if g.percent:
        return numbers_equal(_hundredth(gold), answer)
    return numbers_equal(gold, _hundredth(answer))


def _hundredth(node: Node) -> Node:
    assert node.value is not None
    return replace(node, value=node.value / 100, decimals=max(node.decimals, 0) + 2)
