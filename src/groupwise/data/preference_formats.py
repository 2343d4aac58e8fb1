"""Preference data as they are published -> rows with `prompt`, `chosen` and `rejected`.

| columns | known from | the pair |
|---|---|---|
| `chosen`, `rejected`, `prompt` in any form | TRL, UltraFeedback (binarized) | as it stands |
| `chosen`, `rejected`: messages, the prompt repeated in both | UltraFeedback (binarized), HH as
messages | the last turns |
| `chosen`, `rejected`: strings `\\n\\nHuman: ... \\n\\nAssistant: ...` | hh_rlhf | the last turns |
| `instruction` (or `prompt`), `completions` with `response` and a score | UltraFeedback | the best
and the worst by score |
| `context`, `response1`, `response2`, `overall_preference` | HelpSteer3 | by the sign: negative
prefers the first |
| `prompt`, `response_1`, `response_2`, `preference_strength` | HelpSteer2, preferences | by the
sign: negative prefers the first |
| `prompt`, `response`, `helpfulness`, rows of one prompt in sequence | HelpSteer2, ratings | the
most and the least helpful |
| `prompt`, `completion`, `label` | KTO | a good and a bad completion of the same prompt |
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from groupwise.data.messages import (
    CONTRADICTS,
    Messages,
    before_the_answer,
    is_blank,
    joined,
    openings,
)
from groupwise.data.sources import BadRow, LeftOut, Row, SourceRows, missing_column
from groupwise.data.wording import SEVERAL, Wording, checked_turns
from groupwise.errors import DataError

Pairs = Iterable[tuple[int, Row | LeftOut]]
"""Places in the source, each with its pair or with why there is none."""

ASKED_IN = ("prompt", "messages", "instruction")
"""Columns in which a prompt may stand."""
JOINED = "joined with another row into a pair"
SPEAKERS = {"Human": "user", "Assistant": "assistant", "User": "user"}
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_EXTRA_ID_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
SCORES = ("fine-grained_score", "overall_score", "score")
"""Of an UltraFeedback completion; the first that all of a row's completions have.  The first is the
mean of four ratings.
"""


@dataclass(frozen=True, slots=True)
class PairForm:
    """One way in which preferences are written."""

    columns: tuple[str, ...]
    """What it needs, the prompt aside where that may have several names."""
    read: Callable[[Row, str, Wording], Row | LeftOut] | None = None
    """(row, where it is, how its prompt is worded) -> its pair."""
    join: Callable[[SourceRows, Wording], Pairs] | None = None
    """Instead, where a pair stands in several rows: (rows, how their prompts are worded) -> pairs.
    """

    def pairs(self, rows: SourceRows, wording: Wording) -> Pairs:
        """The pairs of a source."""
        if self.join is not None:
            yield from self.join(rows, wording)
            return
        assert self.read is not None
        for i, row in enumerate(rows):
            absent = next((column for column in self.columns if column not in row), None)
            yield (
                i,
                (
                    LeftOut(f"without {absent}", rows.where(i))
                    if absent
                    else self.read(row, rows.where(i), wording)
                ),
            )


def as_pairs(rows: SourceRows, wording: Wording) -> SourceRows:
    """The pairs of a source in one form.  Rows that hold none are in `left_out`, with the reason.

    Where `wording.chat` says so, strings that hold several turns become messages.
    Raises DataError, naming the column that is missing, if the source is in none of the forms
    above.
    """
    if not len(rows):
        return rows
    columns = {column for row in rows for column in row}
    form = _form_of(rows, columns)
    if (
        form is FORMS[0]
        and wording.format is None
        and columns.isdisjoint(ASKED_IN)
        and not _holds_its_prompt(rows)
    ):
        raise DataError(missing_column("prompt", rows[0], rows.where(0)))
    places, pairs, left_out = [], [], list(rows.left_out)
    for place, pair in form.pairs(rows, wording):
        if not isinstance(pair, LeftOut):
            try:
                pair = _shared(pair, rows.where(place), wording)
            except DataError as error:
                pair = LeftOut.of(error)
        if isinstance(pair, LeftOut):
            left_out.append(replace(pair, number=rows.numbers[place]))
        else:
            places.append(place)
            pairs.append(pair)
    return replace(rows.subset(places), rows=pairs, left_out=tuple(left_out))


def _form_of(rows: SourceRows, columns: set[str]) -> PairForm:
    """The form whose columns are all there, else the error of the one that comes closest."""
    for form in FORMS:
        if columns.issuperset(form.columns):
            return form
    nearest = max(
        FORMS,
        key=lambda form: sum(column in columns for column in form.columns) / len(form.columns),
    )
    absent = next(column for column in nearest.columns if column not in columns)
    raise DataError(missing_column(absent, rows[0], rows.where(0)))


def _holds_its_prompt(rows: SourceRows) -> bool:
    """True if some `chosen` is a conversation: messages, or a string with turns."""
    return any(isinstance(row.get("chosen"), list) or _turns_of(row.get("chosen")) for row in rows)


# ---- one row, one pair
# -------------------------------------------------------------------------------------------------------


def _chosen_and_rejected(row: Row, where: str, wording: Wording) -> Row | LeftOut:
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if wording.chat and isinstance(prompt, str) and (turns := _turns_of(prompt)):
        row = {
            **row,
            "prompt": (
                turns[:-1]
                if not turns[-1]["content"] and turns[-1]["role"] == "assistant"
                else turns
            ),
        }
    spoken = [_turns_of(side) for side in (chosen, rejected)]
    if not all(spoken):
        has_prompt = any(column in row for column in ASKED_IN)
        one_sided = (
            any(spoken) and not has_prompt and isinstance(chosen, str) and isinstance(rejected, str)
        )
        return LeftOut("in which one side is no conversation", where) if one_sided else row
    if any(turns[-1]["role"] != "assistant" for turns in spoken):
        return LeftOut("that do not end with a turn of the assistant", where)
    if wording.chat:
        return {**row, "chosen": spoken[0], "rejected": spoken[1]}
    assert isinstance(chosen, str) and isinstance(rejected, str)
    cuts = [side.rindex("\n\nAssistant:") + len("\n\nAssistant:") for side in (chosen, rejected)]
    if chosen[: cuts[0]] != rejected[: cuts[1]]:
        return _diverging(where)
    whole = chosen[: cuts[0]]
    if (
        isinstance(prompt, str)
        and not whole.startswith(prompt)
        and _turns_of(whole)[:-1] != _turns_of(prompt)
    ):
        first = _turns_of(whole)[0]
        if prompt.strip() != first["content"]:
            return LeftOut(CONTRADICTS, where)
    return {**row, "prompt": whole, "chosen": chosen[cuts[0] :], "rejected": rejected[cuts[1] :]}


def _shared(row: Row, where: str, wording: Wording) -> Row | LeftOut:
    """The pair whose prompt holds all that was said before the last turns of its sides.

    Sides may repeat the prompt or go on from it.  Where `wording.format` writes the prompt, they
    keep messages of the system.
    Raises DataError for what is no conversation.
    """
    sides = [row["chosen"], row["rejected"]]
    if not any(isinstance(side, list) and len(side) > 1 for side in sides):
        return row
    turns = []
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        side_turns = checked_turns(side, name, where)
        turns.append(
            [{"role": "assistant", "content": side_turns}]
            if isinstance(side_turns, str)
            else side_turns
        )
    before = [
        before_the_answer(side_turns, name, where)
        for name, side_turns in zip(("chosen", "rejected"), turns, strict=True)
    ]
    last = {"chosen": turns[0][-1:], "rejected": turns[1][-1:]}
    if wording.format is not None:
        if any(len(some) - len(openings(some)) > 1 for some in before):
            raise BadRow(
                SEVERAL,
                f"{where}: data.template writes one prompt, and chosen and rejected hold several"
                " turns",
            )
        answers = {
            name: [*openings(some), *last[name]] for name, some in zip(last, before, strict=True)
        }
        return {**row, **answers} if before[0] == before[1] else _diverging(where)
    prompt = _prompt_of(row, where, wording)
    both = [
        joined(prompt, some, name, where, str(last[name][0]["content"]))
        for name, some in zip(last, before, strict=True)
    ]
    if both[0] != both[1] or not both[0]:
        return _diverging(where)
    return {**row, "prompt": both[0], **last}


def _prompt_of(row: Row, where: str, wording: Wording) -> Messages:
    """What the row's own column asks, as messages; none if it asks nothing."""
    if all(row.get(column) is None for column in ASKED_IN):
        return []
    columns = {
        column: value
        for column, value in row.items()
        if column not in ASKED_IN or value is not None
    }
    content = replace(wording, chat=True).unopened_content(columns, where)
    return [] if isinstance(content, str) or is_blank(content) else content


def _diverging(where: str) -> LeftOut:
    return LeftOut("whose conversations differ before the last turn", where)


def _turns_of(text: object) -> list[dict[str, Any]]:
    r"""The messages of a string in hh_rlhf's form; none if it is in another.

    >>> _turns_of("\n\nHuman: Hi\n\nAssistant: Hello")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
    """
    if not isinstance(text, str) or not _HH_TURN.match(text):
        return []
    parts = _HH_TURN.split(text)[1:]
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": words.strip()} for speaker, words in turns]


def _ultrafeedback(row: Row, where: str, _wording: Wording) -> Row | LeftOut:
    completions = row["completions"]
    if not isinstance(completions, list) or not all(
        isinstance(one, Mapping) and "response" in one for one in completions
    ):
        return LeftOut("whose completions have no response", where)
    if len(completions) < 2:
        return LeftOut("with fewer than two completions", where)
    score = next(
        (name for name in SCORES if all(_is_number(one.get(name)) for one in completions)), None
    )
    if score is None:
        return LeftOut("whose completions have no score", where)
    pair = _extremes([(float(one[score]), one["response"]) for one in completions], where)
    if isinstance(pair, LeftOut):
        return pair
    prompt = row["prompt"] if "prompt" in row else row.get("instruction")
    return {**row, "prompt": prompt, "chosen": pair[0], "rejected": pair[1]}


def _by_sign(
    first: str, second: str, sign: str, prompt: str
) -> Callable[[Row, str, Wording], Row | LeftOut]:
    """Reads two responses and a number that is negative where the first is better."""

    def read(row: Row, where: str, wording: Wording) -> Row | LeftOut:
        preference = row[sign]
        if not _is_number(preference):
            return LeftOut(f"whose {sign} is no number", where)
        if preference == 0:
            return LeftOut("without a preference", where)
        better, worse = (row[first], row[second]) if preference < 0 else (row[second], row[first])
        return {
            **row,
            "prompt": _with_turns(row[prompt], wording.chat),
            "chosen": better,
            "rejected": worse,
        }

    return read


def _with_turns(prompt: object, chat: bool) -> object:
    """HelpSteer2 writes earlier turns into the prompt's string, behind `<extra_id_1>`."""
    if not chat or not isinstance(prompt, str) or not _EXTRA_ID_TURN.search(prompt):
        return prompt
    first, *parts = _EXTRA_ID_TURN.split(prompt)
    later = zip(parts[::2], parts[1::2], strict=True)
    return [
        {"role": "user", "content": first},
        *({"role": SPEAKERS[who], "content": text} for who, text in later),
    ]


# ---- several rows, one pair
# --------------------------------------------------------------------------------------------------


def _rated(rows: SourceRows, wording: Wording) -> Pairs:
    """Of neighbouring rows with the same prompt, the most and the least helpful."""
    for _, group in groupby(range(len(rows)), key=lambda i: _key(rows[i], wording)):
        places = list(group)
        rated = [i for i in places if _is_number(rows[i].get("helpfulness"))]
        yield from (
            (i, LeftOut("whose helpfulness is no number", rows.where(i)))
            for i in places
            if i not in rated
        )
        if len(rated) < 2:
            yield from (
                (i, LeftOut("without a second response to the prompt", rows.where(i)))
                for i in rated
            )
            continue
        scores = {i: float(rows[i]["helpfulness"]) for i in rated}
        best, worst = max(rated, key=scores.__getitem__), min(rated, key=scores.__getitem__)
        if scores[best] == scores[worst]:
            yield from (
                (i, LeftOut("whose completions are rated alike", rows.where(i))) for i in rated
            )
            continue
        sides = {"chosen": rows[best].get("response"), "rejected": rows[worst].get("response")}
        yield best, {**rows[best], **_prompt_column(rows[best], wording), **sides}
        yield worst, LeftOut(JOINED, rows.where(worst))
        others = (i for i in rated if i not in (best, worst))
        yield from (
            (i, LeftOut("between the best and the worst of a prompt", rows.where(i)))
            for i in others
        )


def _labelled(rows: SourceRows, wording: Wording) -> Pairs:
    """The first good completion of a prompt with its first bad one, the second with the second, and
    so on.
    """
    waiting: dict[str, tuple[list[int], list[int]]] = {}
    for i, row in enumerate(rows):
        label = row.get("label")
        if label not in (True, False):
            yield i, LeftOut("whose label is neither true nor false", rows.where(i))
            continue
        waiting.setdefault(_key(row, wording), ([], []))[0 if label else 1].append(i)
    for good, bad in waiting.values():
        for better, worse in zip(good, bad, strict=False):
            yield (
                better,
                {
                    **rows[better],
                    "chosen": rows[better].get("completion"),
                    "rejected": rows[worse].get("completion"),
                },
            )
            yield worse, LeftOut(JOINED, rows.where(worse))
        for i in good[len(bad) :] + bad[len(good) :]:
            yield i, LeftOut("whose prompt has no completion with the other label", rows.where(i))


def _extremes(scored: Sequence[tuple[float, Any]], where: str) -> tuple[Any, Any] | LeftOut:
    """What has the highest and what has the lowest score; of equals the first."""
    best, worst = max(scored, key=lambda one: one[0]), min(scored, key=lambda one: one[0])
    return (
        (best[1], worst[1])
        if best[0] > worst[0]
        else LeftOut("whose completions are rated alike", where)
    )


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def _key(row: Row, wording: Wording) -> str:
    """Names the prompt of a row; rows without a readable one are each on their own."""
    try:
        return wording.key(wording.content(row))
    except DataError:
        return f"\0{id(row)}"


def _prompt_column(row: Row, wording: Wording) -> Row:
    return {"prompt": _with_turns(row["prompt"], wording.chat)} if "prompt" in row else {}


_HELPSTEER2 = ("response_1", "response_2", "preference_strength", "prompt")
_HELPSTEER3 = ("response1", "response2", "overall_preference", "context")
FORMS = (
    PairForm(("chosen", "rejected"), _chosen_and_rejected),
    PairForm(("completions",), _ultrafeedback),
    PairForm(_HELPSTEER3, _by_sign(*_HELPSTEER3)),
    PairForm(_HELPSTEER2, _by_sign(*_HELPSTEER2)),
    PairForm(("response", "helpfulness"), join=_rated),
    PairForm(("completion", "label"), join=_labelled),
)
"""In the order in which they are looked for."""
