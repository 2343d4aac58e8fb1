"""Words in messages: how many of something there are, and what a misspelt word may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the word that is most alike, or None if none is (`difflib`, `cutoff`).

    Of words that are equally alike one with the same letters comes first.

    >>> nearest("gpro", ["gspo", "grpo"]), nearest("trian", ["train", "chat"])
    ('grpo', 'train')
    """
    typed = word.lower()
    likely: list[tuple[float, bool, str]] = []
    for one in dict.fromkeys(words):
        alike = difflib.SequenceMatcher(None, typed, one.lower()).ratio()
        if alike >= cutoff:
            likely.append((alike, sorted(typed) == sorted(one.lower()), one))
    if not likely:
        return None
    return max(likely, key=itemgetter(0, 1))[2]


def closest(word: str, words: Iterable[str]) -> str:
    """` (did you mean ...?)` for a misspelt choice, or an empty string."""
    near = nearest(word, words)
    return "" if near is None else f" (did you mean {near}?)"


def near_path(path: Path) -> str:
    """` (did you mean ...?)` for a path that does not exist: what lies beside it under a similar
    name; or an empty string.
    """
    try:
        if path.exists():
            return ""
        near = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    except OSError:
        return ""
    return "" if near is None else f" (did you mean {path.parent / near}?)"
