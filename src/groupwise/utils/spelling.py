"""Words in messages: how many of something there are, and what a misspelt word may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "row"), counted(2000, "row")
    ('1 row', '2,000 rows')
    """
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The word that is the fewest slips of a finger away, or None if none is near.

    A slip is a letter too much, too few, another one, or two in the wrong order
    (Damerau-Levenshtein, restricted).  One slip for three letters is near; beyond that a word with
    enough of the same letters in order is taken (`difflib`, `cutoff`).

    >>> nearest("gpro", ["gspo", "grpo"]), nearest("trian", ["train", "chat"]), nearest("zzz", ["train"])
    ('grpo', 'train', None)
    """
    known = list(dict.fromkeys(words))
    typed = word.lower()
    alike = {one: difflib.SequenceMatcher(None, typed, one.lower()).ratio() for one in known}
    slips = {one: distance(typed, one.lower()) for one in known}
    near = [
        one
        for one in known
        if slips[one] <= max(1, len(typed) // 3) and slips[one] < max(len(typed), len(one))
    ]
    if near:
        return min(near, key=lambda one: (slips[one], -alike[one]))
    likely = [one for one in known if alike[one] >= cutoff]
    return max(likely, key=lambda one: alike[one]) if likely else None


def closest(word: str, words: Iterable[str]) -> str:
    """` (did you mean ...?)` for a misspelt choice, or an empty string."""
    near = nearest(word, words)
    return "" if near is None else f" (did you mean {near}?)"


def near_path(path: Path) -> str:
    """` (did you mean ...?)` for a path that does not exist: what lies beside it under a similar
    name; or an empty string.
    """
    try:
        near = (
            None
            if path.exists()
            else nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        )
    except OSError:
        return ""
    return "" if near is None else f" (did you mean {path.parent / near}?)"


def distance(first: str, second: str) -> int:
    """Slips between two words.

    >>> distance("gpro", "grpo"), distance("gpro", "gspo"), distance("", "ab")
    (1, 2, 2)
    """
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
            if i > 1 and j > 1 and a == second[j - 2] and first[i - 2] == b:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
