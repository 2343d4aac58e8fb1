r"""A number or expression with its unit: `18 \text{ m}`, `5 miles per hour`, `90^\circ`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from groupwise.rewards.answer_shapes import labelled
from groupwise.rewards.expressions import NAMES, Node, parse

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_CURRENCY = re.compile(
    r"^([-+]?)\s*(?:(?:US|CA|AU|NZ|HK)?\s?[€£¥₹₩₽₿¢]"
    r"|(?:USD|EUR|GBP|CHF|JPY|INR|CNY|RMB|Rs\.?)(?=[\s\d]))\s*"
)
_SIGN_BEHIND = re.compile(r"\s*(?:[€£¥₹₩₽₿¢]|\\?%\s*(?:points?)?)$")
_DEGREES = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:\\text\{\s*([CFK])\w*\s*\}|([CFK]))?$"
)
_TEXT_BEHIND = re.compile(
    r"(?:\\text\{[^{}]*\}|\^\s*(?:\{\s*-?\d\s*\}|\d)|/|\\cdot(?![A-Za-z])|[\s.])+"
)
_RAISED = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?$")
_WORDS_BEHIND = re.compile(r"[^\W\d_][^\W\d_\s./'’-]*(?:[\s./'’-]+[^\W\d_]*)*")
_WORD = re.compile(r"[^\W\d_]+")
_UNIT_PART = re.compile(r"[^\W\d_]+|\^\s*\{?\s*\d")
_BASED = re.compile(
    r"\(?([0-9A-Za-z]+)\)?\s*_\s*\{?\s*\(?\s*(\d{1,2})\s*\)?\s*\}?"
    r"|([0-9A-Fa-f]+)\s+(?:in\s+)?\(?base\s+(\d{1,2})\)?"
)

_SMALL_WORDS = frozenset({"per", "of", "a", "an", "in", "at", "by"})
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SPEEDS = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h"}
_UNITS = (
    "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre",
    "km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile",
    "mg milligram", "g gram gm gramme", "kg kilogram kilo", "lb", "oz ounce", "t ton tonne",
    "s sec second", "min minute", "h hr hour", "day", "week wk", "month", "year yr",
    "ml milliliter millilitre", "l liter litre", "gal gallon", "degree deg", "c celsius",
    "f fahrenheit", "k kelvin", "radian rad", "n newton", "j joule", "kj kilojoule", "w watt",
    "kw kilowatt", "v volt", "hz hertz", "pa pascal", "mol mole", "cent", "dollar usd",
    "euro eur",
)  # fmt: skip
"""Units that are told apart, each with its other names."""
_SAME_UNIT = {name: names.split()[0] for names in _UNITS for name in names.split()}


def without_fonts(text: str) -> str:
    r"""Return a text with the content of `\text{...}` in its place."""
    return _TEXT.sub(r"\1", text).strip()


@dataclass(frozen=True)
class Quantity:
    """A number or expression with its unit."""

    node: Node | None
    rest: str
    """The text without its unit."""
    unit: str = ""

    @property
    def percent(self) -> bool:
        """Return True for a number of hundredths."""
        return self.unit.startswith(("percent", "pct", "%"))


@lru_cache(maxsize=8192)
def quantity_of(text: str) -> Quantity:
    """Read a text, without a name before it, as a number or expression with its unit."""
    text = _CURRENCY.sub(r"\1", labelled(text).value)
    rest, unit = _without_unit(text)
    node = parse(rest)
    if unit and not _takes_unit(node, text, unit):
        return Quantity(parse(text), text)
    scale, _, counted = unit.partition(" ")
    times = _SCALES.get(scale.lower())
    if times is not None and node is not None and node.literal and node.value is not None:
        scaled = Node("number", value=node.value * times, literal=True)
        return Quantity(scaled, str(node.value), counted)
    return Quantity(node, rest, unit)


def _takes_unit(node: Node | None, text: str, unit: str) -> bool:
    """Return True if what stands before a unit is a number: `2x \\text{ m}`, and not `2x + 1 m`."""
    if node is None or (len(unit) == 1 and node.kind == "sum"):
        return False
    return not node.symbols or "\\text" in text


def _without_unit(text: str) -> tuple[str, str]:
    """Part a quantity's number from its unit, both as text."""
    sign = _SIGN_BEHIND.search(text)
    if sign and sign.start():
        return text[: sign.start()].strip(), sign.group().strip(" \\")
    degrees = _DEGREES.search(text)
    if degrees and degrees.start():
        scale = degrees[1] or degrees[2] or "degree"
        return text[: degrees.start()].strip(), scale.lower()
    begin = text.find("\\text{")
    if begin > 0 and _TEXT_BEHIND.fullmatch(text, begin):
        return text[:begin].strip(), without_fonts(text[begin:])
    return _without_words(text)


def _without_words(text: str) -> tuple[str, str]:
    """Part a number from the words of a unit behind it: 5 km, 5 square feet, 5 m^2."""
    raised = _RAISED.search(text)
    end = len(text) if raised is None else raised.start()
    begin = max(text.rfind(char, 0, end) for char in "0123456789)}%") + 1
    words = text[begin:end].strip()
    apart = text[begin : begin + 1] == " "
    if not begin or not _WORDS_BEHIND.fullmatch(words) or not _is_unit(words, apart):
        return text, ""
    if raised is not None:
        words += f"^{raised[1]}"
    return text[:begin].strip(), words


def _is_unit(words: str, apart: bool) -> bool:
    """Return True if words behind a number can be a unit.   apart: a space stands before them."""
    parts = _WORD.findall(words)
    if len(parts) == 1 and len(parts[0]) == 1:
        return apart and _unit_name(parts[0]) is not None
    for part in parts:
        if part in NAMES or part.lower() in ("and", "or"):
            return False
        if len(part) <= 2 and part not in _SMALL_WORDS and _unit_name(part) is None:
            return False
    return True


def _unit_name(word: str) -> str | None:
    word = word.lower()
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _SAME_UNIT:
            return _SAME_UNIT[form]
    return None


@lru_cache(maxsize=1024)
def _unit_parts(unit: str) -> tuple[tuple[str, int], ...] | None:
    """Return a unit of the table as its parts and powers; None for one that is not in it."""
    unit = _SPEEDS.get(unit.lower().strip(" ."), unit)
    parts: list[tuple[str, int]] = []
    for side in re.split(r"/|\bper\b", unit):
        power = 1
        for word in _UNIT_PART.findall(side):
            if word.lower() in _POWERS:
                power = _POWERS[word.lower()]
                continue
            if word.startswith("^"):
                if parts:
                    parts[-1] = (parts[-1][0], int(word[-1]))
                continue
            name = _unit_name(word)
            if name is None:
                return None
            parts.append((name, power))
    return tuple(parts) or None


def units_differ(gold: str, answer: str) -> bool:
    """Return True if both are units of the table and not the same.

    5 cm is not 5 m, and 5 apples may be 5 fruits.
    """
    if not gold or not answer:
        return False
    gold_parts, answer_parts = _unit_parts(gold), _unit_parts(answer)
    if gold_parts is None or answer_parts is None:
        return False
    return gold_parts != answer_parts


@dataclass(frozen=True)
class BasedNumber:
    """The digits of a number and their base: 1010_2."""

    digits: str
    base: int | None

    def equals(self, other: BasedNumber) -> bool:
        """Compare with another number; one without a base has the other's."""
        same = self.base == other.base or self.base is None or other.base is None
        return same and self.digits == other.digits


def based_number(text: str) -> BasedNumber | None:
    """Read a number with its base; None where no base is named."""
    match = _BASED.fullmatch(without_fonts(text))
    if match is None:
        return None
    digits, base = match[1] or match[3], match[2] or match[4]
    if not digits[0].isdigit() and len(digits) < 2:
        return None
    return BasedNumber(digits.lstrip("0").upper() or "0", int(base))


def digits_alone(text: str) -> BasedNumber:
    """Read a text as digits of a base that is not named."""
    return BasedNumber(text.strip("() ").lstrip("0").upper(), None)
