"""Questions with a good and a bad answer: preference pairs for reward models, and what is true of
an answer, to measure against.

The two sides of a pair differ in one thing: in tone (both are right, one is friendly and one is
rude) or in being right (the tone is the same).  Which side is longer says nothing, and words alone
do not say which is right: the question must be read."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.data.tasks.base import Paired, Row, text_of
from groupwise.utils.built_in import built_in

FRIENDLY = (
    "Gladly.",
    "Certainly.",
    "Of course.",
    "With pleasure.",
    "A good question.",
    "Happy to help.",
    "Thank you for asking.",
    "Let me help you.",
    "I am glad you asked.",
    "It is good to ask.",
    "I hope that helps you.",
    "Please ask me again any time.",
    "You are right to ask that.",
    "That is a question worth asking.",
    "Thank you for being patient with me today.",
    "I would be glad to help you more.",
)
RUDE = (
    "Obviously.",
    "Seriously?",
    "Oh please.",
    "What nonsense.",
    "A silly question.",
    "Tired of this.",
    "Stop asking me that.",
    "Help yourself next time.",
    "I am sorry you asked.",
    "It is lazy to ask.",
    "I doubt that helps you.",
    "Please do not ask me again.",
    "You are wrong to ask that.",
    "That is no question worth asking.",
    "Thank you for wasting my time again today.",
    "I would be mad to help you more.",
)
"""Phrases with as many words as those of `FRIENDLY`, place by place."""

OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("fast", "slow"),
    ("old", "young"),
    ("dark", "bright"),
    ("heavy", "light"),
    ("early", "late"),
    ("full", "empty"),
    ("hard", "soft"),
    ("high", "low"),
    ("long", "short"),
    ("loud", "quiet"),
    ("open", "closed"),
    ("rich", "poor"),
    ("sharp", "blunt"),
    ("strong", "weak"),
    ("thick", "thin"),
    ("wet", "dry"),
)
KINDS = {
    "animal": ("horse", "trout", "eagle", "rabbit", "spider", "camel", "goose", "otter"),
    "plant": ("oak", "tulip", "fern", "cactus", "clover", "willow", "moss", "barley"),
    "tool": ("hammer", "saw", "wrench", "chisel", "spade", "drill", "pliers", "file"),
    "food": ("bread", "cheese", "soup", "butter", "porridge", "honey", "noodles", "pudding"),
}
COLOURS = {
    "white": ("snow", "salt", "milk"),
    "black": ("coal", "tar", "soot"),
    "red": ("blood", "a tomato", "a cherry"),
    "green": ("grass", "spinach", "a frog"),
    "yellow": ("a lemon", "a canary", "corn"),
    "blue": ("the sea", "the sky", "a sapphire"),
}
NAMES = (
    "Anna",
    "Bert",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Greta",
    "Hugo",
    "Ida",
    "Jonas",
    "Klara",
    "Leo",
)


@built_in("preferences")
@dataclass(frozen=True, kw_only=True)
class Preferences(Paired):
    """Short questions with the columns of instruction-tuning files: instruction, input, output,
    chosen, rejected.

    Demonstrators are friendly half of the time and wrong with probability `slip`.  Rows also hold
    the right `answer` and the `wrong` one that a bad side gives: `friendly` and `right` of this
    module say what is true of a completion.

    >>> row = Preferences().question(random.Random(7))
    >>> row["prompt"], row["answer"], row["wrong"]
    ('Bert asks: What colour is a sapphire?', 'blue', 'red')
    """

    correctness: float = 0.5
    """Share of the pairs that differ in being right; the others differ in tone."""
    slip: float = 0.3

    def question(self, rng: random.Random) -> Row:
        """One of four kinds: opposites, what kind of thing, what colour, the larger or smaller of
        two numbers.
        """
        wording, context, answer, wrong, sentence = rng.choice(
            (_opposite, _kind, _colour, _number)
        )(rng)
        instruction = f"{rng.choice(NAMES)} asks: {wording}"
        row = {
            "instruction": instruction,
            "input": context,
            "answer": answer,
            "wrong": wrong,
            "sentence": sentence,
        }
        return {"prompt": f"{instruction}\n{context}" if context else instruction, **row}

    def completion(self, row: Row, rng: random.Random) -> str:
        """An answer in either tone, now and then a wrong one."""
        return _answer(row, rng.choice((FRIENDLY, RUDE)), rng.random() >= self.slip, rng)

    def pair(self, row: Row, rng: random.Random) -> tuple[str, str]:
        """The better and the worse answer."""
        if rng.random() < self.correctness:
            tone = rng.choice((FRIENDLY, RUDE))
            return _answer(row, tone, True, rng), _answer(row, tone, False, rng)
        return _answer(row, FRIENDLY, True, rng), _answer(row, RUDE, True, rng)


def right(
    completions: Sequence[str],
    answer: Sequence[str] | None = None,
    wrong: Sequence[str] | None = None,
    **_: object,
) -> list:
    """1 where a completion names the right answer and not the wrong one, else 0; None of rows
    without these columns.

    >>> said = ["The opposite of hot is cold.", "It is dry.", "Cold or dry."]
    >>> right(said, ["cold"] * 3, ["dry"] * 3)
    [1.0, 0.0, 0.0]
    """
    if answer is None or wrong is None:
        return [None] * len(completions)
    return [
        float(good in (words := _words(text)) and bad not in words)
        for text, good, bad in zip(
            map(text_of, completions), map(str.lower, answer), map(str.lower, wrong), strict=True
        )
    ]


def friendly(completions: Sequence[str], **_: object) -> list[float]:
    """1 where a completion holds one of the friendly phrases and none of the rude ones, else 0.

    >>> friendly(["Of course. It is dry.", "It is dry.", "It is dry. Oh please. Gladly."])
    [1.0, 0.0, 0.0]
    """
    texts = map(text_of, completions)
    return [
        float(any(one in text for one in FRIENDLY) and not any(one in text for one in RUDE))
        for text in texts
    ]


def _answer(row: Mapping[str, str], tone: Sequence[str], is_right: bool, rng: random.Random) -> str:
    """The sentence that answers, with a phrase before or behind it."""
    sentence = row["sentence"].format(row["answer" if is_right else "wrong"])
    phrase = rng.choice(tone)
    return f"{phrase} {sentence}" if rng.random() < 0.5 else f"{sentence} {phrase}"


Question = tuple[str, str, str, str, str]
"""Instruction, input, right and wrong answer, and the sentence that they are put into."""


def _opposite(rng: random.Random) -> Question:
    (a, b), other = rng.sample(OPPOSITES, 2)
    word, answer = rng.choice(((a, b), (b, a)))
    instruction = rng.choice(
        (
            "What is the opposite of {}?",
            "Give the opposite of {}.",
            "Name the word that means the opposite of {}.",
        )
    )
    return (
        instruction.format(word),
        "",
        answer,
        rng.choice(other),
        f"The opposite of {word} is {{}}.",
    )


def _kind(rng: random.Random) -> Question:
    answer, wrong = rng.sample(sorted(KINDS), 2)
    thing = rng.choice(KINDS[answer])
    first, second = rng.sample((answer, wrong), 2)
    return (
        f"Is this rather {_a(first)} or {_a(second)}?",
        thing,
        answer,
        wrong,
        f"The word {thing} stands for this kind: {{}}.",
    )


def _colour(rng: random.Random) -> Question:
    answer, wrong = rng.sample(sorted(COLOURS), 2)
    thing = rng.choice(COLOURS[answer])
    instruction = rng.choice(("What colour is {}?", "Name the colour of {}.")).format(thing)
    return instruction, "", answer, wrong, f"{thing[0].upper()}{thing[1:]} is {{}}."


def _number(rng: random.Random) -> Question:
    a, b = rng.sample(range(1, 31), 2)
    larger = rng.random() < 0.5
    answer, wrong = (max(a, b), min(a, b)) if larger else (min(a, b), max(a, b))
    word = "larger" if larger else "smaller"
    return (
        f"Which number is {word}?",
        f"{a} and {b}",
        str(answer),
        str(wrong),
        f"The {word} number is {{}}.",
    )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
