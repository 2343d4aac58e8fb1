"""Small tasks in plain words for a language model that chats: a sum, an object in JSON, a word
game.  Each is scored by a program.

There are no demonstrators: the model that is trained can speak already.  Rows are asked as chat
messages (`data.chat: true`)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

from groupwise.data.tasks.base import Generated, Row, text_of
from groupwise.utils.built_in import built_in

NAMES, CITIES, WORDS = (
    text.split()
    for text in (
        (
            "Anna Ben Carla David Emma Frank Greta Hugo Iris Jonas Karen Leo Maria Nick Olga Paul"
            " Rosa Simon Tina Victor Alice Bruno Clara Daniel Eva Felix Grace Henry Irene Jack"
            " Laura Martin Nora Oscar Peter Ruth Sarah Thomas Vera Walter"
        ),
        (
            "Paris London Rome Berlin Madrid Vienna Lisbon Dublin Athens Oslo Prague Warsaw Tokyo"
            " Cairo Lima Boston"
        ),
        (
            "apple beach bread candy chair cloud dance dream eagle flame garden grape green heart"
            " horse house island juice kitchen lemon light money mouse music night ocean orange"
            " paper piano plant queen river robot salad stone storm sugar table tiger train uncle"
            " valley voice water window yellow zebra"
        ),
    )
)


class _Spoken(Generated):
    """A task without demonstrators: what it shows is the answer alone."""

    def completion(self, row: Row, rng: random.Random) -> str:
        """The answer."""
        return str(row["answer"])


@built_in("chat_sums")
@dataclass(frozen=True, kw_only=True)
class ChatSums(_Spoken):
    """`What is 17 + 25?`, with numbers of `digits` digits.  The reward is
    `groupwise.data.tasks.chat:same_number`.

    >>> ChatSums().held_out(1)
    [{'prompt': 'What is 30 + 90?', 'answer': '120'}]
    """

    ranges: ClassVar = {"digits": (1, 6)}

    digits: int = 2

    def question(self, rng: random.Random) -> Row:
        """Two numbers without leading zeros."""
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        a, b = rng.randint(low, high), rng.randint(low, high)
        return {"prompt": f"What is {a} + {b}?", "answer": str(a + b)}


@built_in("chat_json")
@dataclass(frozen=True, kw_only=True)
class ChatJson(_Spoken):
    """A sentence about a person, to be given as JSON.  The reward is
    `groupwise.data.tasks.chat:same_object`.
    """

    def question(self, rng: random.Random) -> Row:
        """A name, an age and a city."""
        person = {"name": rng.choice(NAMES), "age": rng.randint(5, 90), "city": rng.choice(CITIES)}
        sentence = f"{person['name']} is {person['age']} years old and lives in {person['city']}."
        prompt = f"{sentence} Answer with JSON only, with the keys name, age and city."
        return {"prompt": prompt, "answer": json.dumps(person)}


@built_in("chat_words")
@dataclass(frozen=True, kw_only=True)
class ChatWords(_Spoken):
    """Which of `count` words comes first in the alphabet.  The reward is
    `groupwise.data.tasks.chat:same_word`.
    """

    ranges: ClassVar = {"count": (2, 10)}

    count: int = 3

    def question(self, rng: random.Random) -> Row:
        """Different words in random order."""
        words = rng.sample(WORDS, self.count)
        return {
            "prompt": f"Which of these words comes first in the alphabet: {', '.join(words)}?",
            "answer": min(words),
        }


_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")


def same_number(
    completions: Sequence[Any], answer: Sequence[str], finish_reasons: Sequence[str] | None = None
) -> list[float]:
    """Give 1 where the last number of a completion equals the answer, and 0 where the token limit
    cut it.

    It is looser than `accuracy`, which wants a marked answer or nothing else: an untrained model
    earns something now and then.  So it still pays "It is not 42" and "Between 40 and 42".

    >>> same_number(["17 + 25 = 42.", "It is 42.0, a nice number", "17 + 25", "No."], ["42"] * 4)
    [1.0, 1.0, 0.0, 0.0]
    >>> same_number(["3.42", "-42", "17 + 25 = 42"], ["42"] * 3, ["eos", "eos", "length"])
    [0.0, 0.0, 0.0]
    >>> call, result = {"role": "assistant", "content": ""}, {"role": "tool", "content": "42"}
    >>> said = {"role": "assistant", "content": "It is 42."}
    >>> same_number([[call, result], [call, result, said]], ["42"] * 2)
    [0.0, 1.0]
    """
    rewards = []
    reasons = finish_reasons or ["eos"] * len(completions)
    for completion, gold, reason in zip(completions, answer, reasons, strict=True):
        numbers = _NUMBER.findall(text_of(completion).replace(",", "").replace("\u2212", "-"))
        right = bool(numbers) and Decimal(numbers[-1]) == Decimal(gold)
        rewards.append(float(right and reason != "length"))
    return rewards


def same_object(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """1 for a completion that is the answer's JSON object and nothing else, 0.2 for one that holds
    it among other text.

    A fence of ``` around the object counts as nothing else.

    >>> texts = ['{"age": 7, "name": "Eva"}', 'Sure! {"name": "Eva", "age": 7}', "Eva, 7"]
    >>> same_object(texts, ['{"name": "Eva", "age": 7}'] * 3)
    [1.0, 0.2, 0.0]
    """
    return [
        _object_score(text_of(one), json.loads(gold))
        for one, gold in zip(completions, answer, strict=True)
    ]


def _object_score(text: str, gold: Any) -> float:
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip())
    for part, score in ((text, 1.0), (text[text.find("{") : text.rfind("}") + 1], 0.2)):
        try:
            if json.loads(part) == gold:
                return score
        except (ValueError, RecursionError):
            continue
    return 0.0


def same_word(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """1 where the last of the game's words that a completion names is the answer, and no more than
    two are named.

    >>> texts = ["The first word is apple.", "apple, beach, bread", "**beach**", ""]
    >>> same_word(texts, ["apple"] * 4)
    [1.0, 0.0, 0.0, 0.0]
    """
    known = set(WORDS)
    named = [
        [word for word in re.findall(r"[a-z]+", text_of(one).lower()) if word in known]
        for one in completions
    ]
    return [
        float(bool(words) and len(words) <= 2 and words[-1] == gold)
        for words, gold in zip(named, answer, strict=True)
    ]
