r"""Reading LaTeX and plain mathematics as far as numbers, roots, powers, products and sums go:
`\frac{1+\sqrt{5}}{2}`.

What it reads is compared by our own rules; what it does not read (functions, indices, matrices,
words) is None, and left to others. One pass over at most 2,000 characters; nothing is evaluated
that a plain number does not need.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from groupwise.rewards.answers import MINUS

DEEPEST = 60
"""Brackets within brackets, exponents on exponents, fractions of fractions."""
LARGEST = 20_000
"""Bits of a number that is worked out."""

_LETTERS = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho
sigma tau upsilon phi varphi chi
psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar infty emptyset
"""
_FUNCTIONS = """
sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh asin acos atan log ln lg exp max min
gcd lcm det arg mod
sqrt frac inf infinity cdot times div abs
"""
GREEK = frozenset(_LETTERS.split())
NAMES = GREEK | frozenset(_FUNCTIONS.split())
"""Words that are mathematics."""
_CLOSING = {"(": ")", "{": "}", "[": "]", r"\{": r"\}"}
_BEGINNING = {*_CLOSING, r"\sqrt", r"\frac"}
"""What begins a factor, beside numbers and symbols."""
CONSTANTS = frozenset({"pi", "e", "i", "infty", "emptyset"})

_UNICODE = str.maketrans(
    {
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*",
        "÷": r"\div ", "⁄": "/", "∕": "/", "√": r"\sqrt ", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
        "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
        "∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
        "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ",
        "φ": r"\phi ", "ω": r"\omega ", "°": r"^\circ ",
        "º": r"^\circ ", "…": r"\ldots ", "′": "'",
    }
)  # fmt: skip
_SAME = [(rf"\{letter}frac", r"\frac") for letter in "dtc"]
_SAME += [(mark, "") for mark in (r"\$", "$", r"\(", r"\)", r"\[", r"\]")]
_SAME += [(r"\varnothing", r"\emptyset"), (r"\{\}", r"\emptyset"), (r"\{ \}", r"\emptyset")]
_SAME += [(r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\langle", "("), (r"\rangle", ")")]
_SAME += [(r"\leqslant", r"\le"), (r"\geqslant", r"\ge"), (r"\leq", r"\le"), (r"\geq", r"\ge")]
_TABULAR = re.compile(r"\\begin\{(?:\wmatrix|array|cases|aligned?)")
_DOUBLED = re.compile(r"\\(?=\\[A-Za-z])")
_POWER = re.compile(r"(?<=[\w)])\*\*(?=[\w(-])")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_RAISED_TO = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_TEXT = (
    r"text(?:rm|bf|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|hbox|operatorname|boldsymbol|bm"
    r"|emph|underline|mathop"
)
_STYLED = re.compile(rf"\\(?:{_TEXT})\*?\s*\{{([^{{}}]*)\}}")
_WORDS_IN = r"\s*\{\s*\\(?:text|textrm|mathrm)\s*\{((?:[^\W\d_]| )+)\}((?:\^\d)?)\s*\}"
_UNIT_FRACTION = re.compile(rf"(?<=[\d}})])(\s*)\\frac{_WORDS_IN}{_WORDS_IN}")
_SILENT = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|nolimits|rm|bf|it"
    r"|phantom\{[^{}]*\})(?![A-Za-z])\.?|\\color\{\w*\}"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\,(?=\d{3}(?!\d)))\s*(?=\d{3})")
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad(?![A-Za-z])|\\hspace\*?\{[^{}]*\}|\s+")
_GROUPED = re.compile(r"(?<![\d.,^_{\\/])\d{1,3}(?: \d{3})+(?![\d/])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:(\d)\s*(\d)|(\d)\s*(?=\{))")
_REPEATING = re.compile(r"(\d{0,30})\.(\d{0,30})\\(?:overline|bar)\s*(?:\{(\d{1,30})\}|(\d))")
_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,4}(?!\w))?"
    r"|\\(?P<command>[A-Za-z]+|\S)|(?P<letters>[^\W\d_]+)|(?P<sign>\*\*|\S)|\s+"
)


def plain(text: str) -> str:
    r"""The same mathematics with fewer ways to write it: no unicode signs, no spacing or sizes,
    `\text` for every font of words.

    >>> plain("−3\u202f×\u202fx²"), plain(r"\dfrac12\,\mathrm{cm}")
    ('-3 \\times x^{2}', '\\frac{1}{2} \\text{cm}')
    >>> plain(r"\left(1{,}000,\ 2\right)")
    '(1000, 2)'
    """
    if not text.isascii():
        text = _RAISED.sub(_lowered, text.translate(MINUS).translate(_UNICODE))
        text = "".join(map(_ascii, text))
    if not _TABULAR.search(text):
        text = _DOUBLED.sub("", text)
    text = _POWER.sub("^", text)
    for one, other in _SAME:
        text = text.replace(one, other)
    text = _SPACES.sub(" ", _THOUSANDS.sub("", _SILENT.sub("", text)))
    text = _STYLED.sub(_unstyled, _UNIT_FRACTION.sub(r"\1\\text{\2\3/\4\5}", text))
    text = _SHORT_FRACTION.sub(_braced, text)
    return _GROUPED.sub(_ungrouped, text).strip()


def _lowered(match: re.Match[str]) -> str:
    return f"^{{{match.group().translate(_RAISED_TO)}}}"


def _ungrouped(match: re.Match[str]) -> str:
    return match.group().replace(" ", "")


def _braced(match: re.Match[str]) -> str:
    if match[2]:
        return rf"\frac{{{match[1]}}}{{{match[2]}}}"
    return rf"\frac{{{match[3]}}}"


def _ascii(char: str) -> str:
    """A character of another width, a digit of another script, half a fraction; others as they are,
    invisible ones not at all.
    """
    kind = unicodedata.category(char)
    if char.isascii() or unicodedata.decomposition(char).startswith(("<sub>", "<super>")):
        return char
    if kind in ("Cf", "Cc") or char == "\ufe0f":
        return ""
    if kind == "Nd":
        return str(unicodedata.digit(char))
    same = unicodedata.normalize("NFKC", char)
    above, slash, below = same.partition("\u2044")
    if not slash:
        return same
    return rf"\frac{{{above}}}{{{below or 1}}}"


def _unstyled(match: re.Match[str]) -> str:
    inner = match[1].strip()
    before = match.string[max(0, match.start() - 3) : match.start()].rstrip()
    if len(inner) == 1 and inner not in "eid" and before[-1:] and before[-1] in "0123456789})":
        return rf"\text{{{inner}}}"  # 5 m
    if len(inner) <= 1 or not any(char.isalpha() for char in inner):
        return inner
    return rf"\text{{{inner}}}"


@dataclass(frozen=True, eq=False)
class Node:
    """A part of an expression."""

    kind: str
    """number, symbol, sum, product, quotient, power, root, factorial, percent, call ..."""
    args: tuple[Any, ...] = ()
    value: Fraction | None = None
    """Exact, where it is rational and cheap to work out."""
    decimals: int = -1
    """Digits behind the point of a number that is written as a decimal, trailing zeros aside; -1:
    of any other.
    """
    literal: bool = False
    """A number as it is written down: 12, 1.5, -3/4, 1 1/2, 2 x 10^5."""
    undone: bool = False
    """An operation between plain numbers is left to do: 81 + 14, 6/2, 5!, the root of 16."""

    @cached_property
    def parts(self) -> list[Node]:
        """Return the expressions that it is made of."""
        return [part for part in self.args if isinstance(part, Node)]

    @cached_property
    def symbols(self) -> frozenset[str]:
        """Return the variables in it."""
        if self.kind == "symbol":
            return frozenset({self.args[0]} - CONSTANTS)
        return frozenset().union(*(part.symbols for part in self.parts))

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Equal for expressions that differ in the order of terms and factors alone."""
        if self.value is not None:
            return ("number", self.value)
        if not self.parts:
            return (self.kind, *self.args)
        keys = [part.key for part in self.parts]
        if self.kind in ("sum", "product"):
            keys.sort(key=repr)
        return (self.kind, *keys)

    @cached_property
    def tiny(self) -> bool:
        """It holds a number other than 0 that is nearer to 0 than a millionth: math-verify takes
        all of these for one.
        """
        near = self.value is not None and 0 < abs(self.value) < Fraction(1, 10**6)
        return near or any(part.tiny for part in self.parts)


def numbers_equal(gold: Node, answer: Node) -> bool:
    """Whether two expressions with a value are equal: exactly, or the one with fewer decimals is
    the other one rounded.

    A rounded number has six decimals at least, and four correct digits beside a fraction, root or
    the like, six beside a decimal. What differs only beyond the twelfth of fifteen digits or more
    is equal too: floats as tables write them.

    >>> numbers_equal(parse("1/2"), parse("0.50")), numbers_equal(parse("1/3"), parse("0.333333"))
    (True, True)
    >>> numbers_equal(parse("1/3"), parse("1/2")), numbers_equal(parse("2e-7"), parse("1e-7"))
    (False, False)
    """
    assert gold.value is not None and answer.value is not None
    if gold.value == answer.value:
        return True
    rounded, full = gold, answer
    if gold.decimals < 0 or 0 <= answer.decimals < gold.decimals:
        rounded, full = answer, gold
    assert rounded.value is not None and full.value is not None
    size = abs(full.value)
    apart = abs(gold.value - answer.value)
    if apart * 10**12 <= size and (_is_long(rounded) or _is_long(full)):
        return True
    if rounded.decimals < 6 or rounded.decimals == full.decimals:
        return False
    step = Fraction(1, 10**rounded.decimals)
    enough = Fraction(1, 10**4) if full.decimals < 0 else Fraction(1, 10**5)
    return 2 * apart <= step and step / 2 <= size * enough


def _is_long(number: Node) -> bool:
    """Return True for a decimal of fifteen digits or more."""
    assert number.value is not None
    return number.decimals >= 0 and abs(number.value) * 10**number.decimals >= 10**14


class _Unreadable(Exception):
    pass


@lru_cache(maxsize=8192)
def parse(text: str) -> Node | None:
    r"""The expression that a text (see `plain`) is; None if it is none, or none of those that are
    read here.

    >>> parse(r"\frac{6}{4}").value, parse("81 + 14").undone, parse(r"2\sqrt{3}").undone
    (Fraction(3, 2), True, False)
    """
    try:
        parser = _Parser(text)
        node = parser.sum()
        return node if parser.at is None else None
    except (_Unreadable, RecursionError):
        return None


class _Parser:
    """Recursive descent.  `at` is the next token: a number or symbol, or the text of a sign or
    command; None at the end.
    """

    def __init__(self, text: str) -> None:
        self._tokens = iter(list(_tokens(text)))
        self._depth = 0
        self.at = next(self._tokens, None)

    def _next(self) -> Node | str | None:
        before, self.at = self.at, next(self._tokens, None)
        return before

    def _took(self, *tokens: str) -> bool:
        """Whether the next token is one of these, which is then taken."""
        return self.at in tokens and self._next() is not None

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _Unreadable

    def _signed(self, read: Callable[[], Node]) -> Node:
        """What follows at most one sign."""
        minus = self._took("-")
        if not minus:
            self._took("+")
        node = read()
        return _negative(node) if minus else node

    def sum(self) -> Node:
        self._deeper()
        terms = [self._signed(self._product)]
        while self.at in ("+", "-"):
            terms.append(self._signed(self._product))
        self._depth -= 1
        return _sum(terms)

    def _product(self) -> Node:
        factors = [self._power()]
        while self.at is not None:
            if self._took("*", r"\cdot", r"\times"):
                factors.append(self._signed(self._power))
            elif self._took("/", r"\div"):
                self._deeper()  # x/x/x/... is a chain that later walks go down
                factors = [_quotient(_product(factors), self._signed(self._power))]
            elif isinstance(self.at, Node) or self.at in _BEGINNING:
                factors = self._beside(factors)
            else:
                break
        return _product(factors)

    def _beside(self, factors: list[Node]) -> list[Node]:
        """A factor without a sign before it: 2x, and the mixed number 1 1/2."""
        left, bare = factors[-1], isinstance(self.at, Node) and self.at.kind == "number"
        whole = len(factors) == 1 and left.kind == "number" and left.decimals < 0
        right = self._power()
        if bare and left.kind == "number":
            if not (whole and self._took("/")):
                raise _Unreadable  # "4 5" is no product
            right = _quotient(right, self._power())
        part = right.value if right.kind == "quotient" and right.literal else None
        if whole and part is not None and 0 < part < 1:
            assert left.value is not None
            return [Node("number", value=left.value + part, literal=True)]
        return [*factors, right]

    def _power(self) -> Node:
        node = self._postfix()
        while self._took("^", "**"):
            if not self._took(r"\circ"):  # an angle's degrees stand in its unit
                node = self._postfix(_power(node, self._exponent()))
        return node

    def _exponent(self) -> Node:
        """Behind a sign of power: it goes on to the right."""
        self._deeper()
        node = self._signed(self._tower)
        self._depth -= 1
        return node

    def _tower(self) -> Node:
        node = self._postfix()
        if self._took("^", "**"):
            return _power(node, self._exponent())
        return node

    def _postfix(self, node: Node | None = None) -> Node:
        node = node or self._atom()
        while self.at in ("!", "%", r"\%"):
            self._deeper()
            if self._next() == "!":
                node = Node("factorial", (node,), undone=True)
            else:
                node = Node("percent", (node,), node.value and node.value / 100, undone=node.undone)
        return node

    def _atom(self) -> Node:
        token = self._next()
        if isinstance(token, Node):
            return token
        if token in _CLOSING:
            return self._group(_CLOSING[token])
        if token == r"\frac":
            return _quotient(self._argument(), self._argument())
        if token == r"\sqrt":
            index = Node("number", value=Fraction(2), literal=True)
            if self._took("["):
                index = self._group("]")
            inner = self._argument()
            return Node("root", (inner, index), undone=inner.undone)
        raise _Unreadable

    def _group(self, closing: str) -> Node:
        inner = self.sum()
        if not self._took(closing):
            raise _Unreadable
        return inner

    def _argument(self) -> Node:
        """Read the argument of a command: a group, or one token."""
        self._deeper()
        node = self._atom()
        self._depth -= 1
        return node


def _tokens(text: str) -> Iterator[Node | str]:
    text = _REPEATING.sub(_repeating, text)
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind in ("number", "exponent"):
            yield _literal(match["number"].replace(",", ""), int((match["exponent"] or "e0")[1:]))
        elif kind == "letters" and token not in NAMES:
            for letter in token:
                yield Node("symbol", (letter,))
        elif kind in ("command", "letters"):
            name = match["command"] or {"inf": "infty", "infinity": "infty"}.get(token, token)
            yield Node("symbol", (name,)) if name in GREEK else "\\" + name
        elif kind == "sign":
            yield token


def _repeating(match: re.Match[str]) -> str:
    """0.1666... as a fraction."""
    whole, fixed, period = match[1] or "0", match[2], match[3] or match[4]
    below = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{below}}}"


def _literal(digits: str, exponent: int = 0) -> Node:
    whole, _, behind = digits.partition(".")
    behind = behind.rstrip("0")
    value = Fraction(int((whole or "0") + behind), 10 ** len(behind)) * Fraction(10) ** exponent
    return Node("number", value=value, decimals=_decimals(len(behind), exponent), literal=True)


def _decimals(behind: int, exponent: int) -> int:
    return behind - exponent if behind - exponent > 0 and (behind or exponent) else -1


def _small(value: Fraction) -> Fraction | None:
    return value if _bits(value) <= LARGEST else None


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _negative(node: Node) -> Node:
    value = None if node.value is None else -node.value
    if node.kind == "number":
        return replace(node, value=value)
    kind = "quotient" if node.literal and node.kind == "quotient" else "negative"
    return Node(kind, (node,), value, node.decimals, node.literal, node.undone)


def _undone(parts: list[Node]) -> bool:
    """Return True if a part is left to do, or what parts with values make together."""
    numbers = [part for part in parts if part.value is not None]
    return len(numbers) > 1 or any(part.undone for part in parts)


def _sum(terms: list[Node]) -> Node:
    if len(terms) == 1:
        return terms[0]
    known = [term.value for term in terms if term.value is not None]
    total = _small(sum(known, Fraction(0))) if len(known) == len(terms) else None
    return Node("sum", tuple(terms), total, undone=_undone(terms))


def _product(factors: list[Node]) -> Node:
    if len(factors) == 1:
        return factors[0]
    known = [factor.value for factor in factors if factor.value is not None]
    value = _small(math.prod(known, start=Fraction(1))) if len(known) == len(factors) else None
    first, last = factors[0], factors[-1]
    power_of_10 = last.kind == "power" and last.args[0].value == 10
    if len(factors) == 2 and first.kind == "number" and power_of_10 and value is not None:
        decimals = _decimals(max(first.decimals, 0), int(last.args[1].value))
        return Node("number", value=value, decimals=decimals, literal=True)
    return Node("product", tuple(factors), value, undone=_undone(factors))


def _quotient(above: Node, below: Node) -> Node:
    args, undone = (above, below), above.undone or below.undone
    if above.value is None or below.value is None:
        return Node("quotient", args, undone=undone)
    value = _small(above.value / below.value) if below.value else None
    whole = all(part.kind == "number" and part.decimals < 0 for part in args)
    literal = whole and value is not None and value.denominator > 1
    reduced = value is not None and value.denominator == below.value > 1  # 1/2^10
    return Node("quotient", args, value, literal=literal, undone=undone or not (literal or reduced))


def _power(base: Node, exponent: Node) -> Node:
    value, by = None, exponent.value
    if base.value is not None and by is not None and by.denominator == 1 and (base.value or by > 0):
        small = abs(by) * _bits(base.value) <= LARGEST
        value = base.value ** int(by) if small else None
    undone = base.undone or exponent.undone
    return Node("power", (base, exponent), value, undone=undone)
