r"""Units behind a number: parted from it, and compared where both are known: `18 \text{ m}`, `5
miles per hour`, `90^\circ`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from groupwise.rewards.expressions import NAMES

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_AFTER = re.compile(r"\s*(?:[€£¥₹₩₽₿¢]|\\?%\s*(?:points?)?)$")
_DEGREES = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*(?:\\text\{\s*([CFK])\w*\s*\}|([CFK]))?$"
)
_UNIT_TEXT = re.compile(
    r"(?:\\text\{[^{}]*\}|\^\s*(?:\{\s*-?\d\s*\}|\d)|/|\\cdot(?![A-Za-z])|[\s.])+"
)
_RAISED = re.compile(r"\s*\^\s*\{?\s*([23])\s*\}?$")
_UNIT_WORDS = re.compile(r"[^\W\d_][^\W\d_\s./'’-]*(?:[\s./'’-]+[^\W\d_]*)*")
_SMALL_WORDS = frozenset({"per", "of", "a", "an", "in", "at", "by"})
_SAME_UNIT = {
    name: line.split()[0]
    for line in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre", "in inch inche",
        "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram gm gramme", "kg kilogram kilo", "lb", "oz ounce",
        "t ton tonne",
        "s sec second", "min minute", "h hr hour", "day", "week wk", "month", "year yr", "ml milliliter millilitre",
        "l liter litre", "gal gallon", "degree deg", "c celsius", "f fahrenheit", "k kelvin", "radian rad", "n newton", "j joule",
        "kj kilojoule", "w watt", "kw kilowatt", "v volt", "hz hertz", "pa pascal", "mol mole", "cent", "dollar usd", "euro eur",
    )
    for name in line.split()
}  # fmt: skip


def without_unit(text: str) -> tuple[str, str]:
    """A quantity's number and its unit, both as text."""
    after = _AFTER.search(text)
    if after and after.start():
        return text[: after.start()].strip(), after.group().strip(" \\")
    degrees = _DEGREES.search(text)
    if degrees and degrees.start():
        return text[: degrees.start()].strip(), (degrees[1] or degrees[2] or "degree").lower()
    begin = text.find("\\text{")
    if begin > 0 and _UNIT_TEXT.fullmatch(text, begin):
        return text[:begin].strip(), _TEXT.sub(r"\1", text[begin:]).strip()
    raised = _RAISED.search(text)
    end = len(text) if raised is None else raised.start()
    begin = max(text.rfind(char, 0, end) for char in "0123456789)}%") + 1
    words = text[begin:end].strip()
    if (
        begin
        and _UNIT_WORDS.fullmatch(words)
        and _is_unit(words, apart=text[begin : begin + 1] == " ")
    ):
        return text[:begin].strip(), words + ("" if raised is None else f"^{raised[1]}")
    return text, ""


def _is_unit(words: str, *, apart: bool) -> bool:
    parts = re.findall(r"[^\W\d_]+", words)
    if len(parts) == 1 and len(parts[0]) == 1:
        return apart and _unit_name(parts[0]) is not None
    return all(
        part not in NAMES
        and part.lower() not in ("and", "or")
        and (len(part) > 2 or part in _SMALL_WORDS or _unit_name(part) is not None)
        for part in parts
    )


def _unit_name(word: str) -> str | None:
    word = word.lower()
    return (
        _SAME_UNIT.get(word)
        or _SAME_UNIT.get(word.removesuffix("s"))
        or _SAME_UNIT.get(word.removesuffix("es"))
    )


@lru_cache(maxsize=1024)
def _unit_parts(unit: str) -> tuple[tuple[str, int], ...] | None:
    """A unit of the table as its parts and powers; None for one that is not in it."""
    names = []
    unit = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h"}.get(
        unit.lower().strip(" ."), unit
    )
    for side in re.split(r"/|\bper\b", unit):
        power = 1
        for word in re.findall(r"[^\W\d_]+|\^\s*\{?\s*\d", side):
            if word.lower() in ("square", "sq", "cubic", "cu"):
                power = 2 if word.lower().startswith("s") else 3
            elif word.startswith("^"):
                names[-1:] = [(name, int(word[-1])) for name, _ in names[-1:]]
            elif (name := _unit_name(word)) is not None:
                names.append((name, power))
            else:
                return None
    return tuple(names) or None


def units_differ(gold: str, answer: str) -> bool:
    """Whether both are units of the table and not the same: 5 cm is not 5 m, and 5 apples may be 5
    fruits.
    """
    g, a = _unit_parts(gold) if gold else None, _unit_parts(answer) if answer else None
    return g is not None and a is not None and g != a
