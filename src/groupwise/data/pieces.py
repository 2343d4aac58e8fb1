"""Pieces of texts that a tokenizer encodes as it would within the text: of many texts each piece is
encoded once.

A byte-level tokenizer (GPT-2, Llama 3, Qwen, SmolLM2) first cuts a text into words by the kinds of
its characters, and encodes each word by itself.  `PIECES` cuts at some of the places where all of
these cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from string import punctuation
from typing import Any

PIECES = re.compile(
    r"""\s*+ (?:
        [A-Za-z]++ (?![^\s!-&(-~])  # a word, which no apostrophe or other letter follows
      | [0-9]++ (?![^\s!-~])        # a number
      | (?: [!-/:-~]++ (?![^\s!-~]) | \S++ )  # anything else up to a number or white space,
        (?: (?!\n[^\s/]) [^\S ] \s*+ \S*+ )*+ \n?  # and further, unless a space or the end of one line is next
      ) | \s+""",
    re.VERBOSE,
)
"""Cuts a text before spaces, around numbers, and behind words and lines: where byte-level
tokenizers (GPT-2, Llama 3, Qwen, SmolLM2, our own) cut it, whatever else they do.  GPT-4o's takes a
slash to the line before it."""
KINDS = (
    "a",
    "B",
    "'s",
    "é",
    "中",
    "12345",
    "²",
    "٣",
    ".",
    ",",
    "'",
    '"',
    "(",
    "-",
    "_",
    "/",
    "$",
    "<",
    "\0",
)
"""Of characters, as tokenizers tell them apart."""
BETWEEN = ("", " ", "  ", "\n", "\n\n", "\n ", " \n", "\t")
LEFT, RIGHT = ("a", "B", "1", "000"), ("a", "B", "000", "0000", " ")
SIGNS = [
    "".join((left, sign, right, sign, left))
    for left, sign, right in product(LEFT, punctuation, RIGHT)
]
CLASSES = re.compile(r"\\p\{\^?\w+\}|\\[A-Za-z]|\S-\w|'[A-Za-z]{1,2}|\{[\d,]+\}|\(\?i?[:!=]")
"""The letters and digits in a regular expression that knows characters by their kinds, and the ends
of English contractions.
"""
KNOWN = ("ByteLevel", "Digits", "Punctuation", "NFC", "NFD", "NFKC", "NFKD")
"""Steps before a tokenizer's model that look at kinds of characters, or at one character and the
marks behind it.
"""


def find_cut(core: Any) -> Callable[[str], list[str]] | None:
    """What cuts a text into pieces whose ids, one behind the other, are those of the text.

    core: a `tokenizers.Tokenizer`.   None if it normalises texts, if it knows words by their
        letters, or if it does not itself cut
    where `PIECES` does: a text with the kinds of characters beside each other shows that.
    """
    trial = " ".join(["".join(map("".join, product(KINDS, BETWEEN, KINDS))), *SIGNS])

    def words(text: str) -> list[str]:
        return [word for word, _ in core.pre_tokenizer.pre_tokenize_str(text)]

    if (
        core is None
        or core.pre_tokenizer is None
        or not all(map(_knows_kinds, (core.pre_tokenizer, core.normalizer)))
    ):
        return None
    if core.normalizer is not None and core.normalizer.normalize_str(trial) != trial:
        return None
    if words(trial) != [word for piece in PIECES.findall(trial) for word in words(piece)]:
        return None
    added = core.get_added_tokens_decoder().values()
    # Added tokens that would be cut, or that depend on what stands beside them.
    whole = any_of(
        token.content
        for token in added
        if token.lstrip
        or token.rstrip
        or token.single_word
        or len(PIECES.findall(token.content)) > 1
    )
    return lambda text: [text] if whole.search(text) else PIECES.findall(text)


def _knows_kinds(part: Any) -> bool:
    """True if a normalizer or pre-tokenizer, if there is one, knows characters by their kinds
    alone.
    """
    if part is None:
        return True
    try:
        steps = list(_steps(json.loads(part.__getstate__())))
    except Exception:  # the only class that it raises, for one that is written in Python
        return False
    patterns = [step["pattern"].get("Regex", "a") for step in steps if step["type"] == "Split"]
    known = all(step["type"] in (*KNOWN, "Split") for step in steps)
    return known and not any(re.search(r"[^\W_]", CLASSES.sub("", pattern)) for pattern in patterns)


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The steps of a sequence, or the one."""
    if part["type"] != "Sequence":
        yield part
    for step in part.get("pretokenizers", part.get("normalizers", ())):
        yield from _steps(step)


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds each of these, the longest first.  Tokens share their beginnings: Gemma has 6,200 that
    begin with `<`.

    >>> any_of(["<a>", "<ab>", "[X]", "<a>>"]).findall("<ab><a>>[X]<a> <b>")
    ['<ab>', '<a>>', '[X]', '<a>']
    """
    return re.compile(_alternatives(sorted(set(tokens) - {""})) or r"\A(?!)")


def _alternatives(tokens: Sequence[str]) -> str:
    """A pattern of sorted texts, as a tree of their beginnings."""
    branches = []
    for _, group in groupby(tokens, key=lambda token: token[:1]):
        alike = list(group)
        first, last = alike[0], alike[-1]
        shared = first[
            : next(
                (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first)
            )
        ]
        rest = [token[len(shared) :] for token in alike if token != shared]
        behind = f"(?:{_alternatives(rest)})" + "?" * (len(rest) < len(alike)) if rest else ""
        branches.append(re.escape(shared) + behind)
    return "|".join(branches)
