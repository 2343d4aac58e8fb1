"""Preference data as they are published -> rows with `prompt`, `chosen` and `rejected`.

| columns | known from | the pair |
|---|---|---|
| `chosen`, `rejected`, `prompt` in any form | TRL, UltraFeedback (binarized) | as it stands |
| `chosen`, `rejected`: messages, the prompt repeated in both | UltraFeedback (binarized), HH as messages | the last turns |
| `chosen`, `rejected`: strings `\\n\\nHuman: ... \\n\\nAssistant: ...` | hh_rlhf | the last turns |
| `instruction` (or `prompt`), `completions` with `response` and a score | UltraFeedback | the best and the worst by score |
| `context`, `response1`, `response2`, `overall_preference` | HelpSteer3 | by the sign: negative prefers the first |
| `prompt`, `response_1`, `response_2`, `preference_strength` | HelpSteer2, preferences | by the sign: negative prefers the first |
| `prompt`, `response`, `helpfulness`, rows of one prompt in sequence | HelpSteer2, ratings | the most and the least helpful |
| `prompt`, `completion`, `label` | KTO | a good and a bad completion of the same prompt |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from groupwise.data.sources import LeftOut, SourceRows, missing_column
from groupwise.data.templates import Wording
from groupwise.errors import DataError

Row = Mapping[str, Any]
Found = Iterable[tuple[int, Row | LeftOut]]
"""Places in the source, each with its pair or with why there is none."""

ASKED_IN = ("prompt", "messages", "instruction")
"""Columns in which a prompt may stand."""
UNREADABLE = "that cannot be read"
SPEAKERS = {"Human": "user", "Assistant": "assistant", "User": "user"}
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_EXTRA_ID_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
SCORES = ("fine-grained_score", "overall_score", "score")
"""Of an UltraFeedback completion; the first that all of a row's completions have.  The first is the mean of four ratings."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which preferences are written."""

    columns: tuple[str, ...]
    """What it needs, the prompt aside."""
    read: Callable[[SourceRows, bool], Found]
    """(rows, whether prompts become messages) -> pairs."""


def as_pairs(rows: SourceRows, wording: Wording) -> SourceRows:
    """The pairs of a source, each with a prompt that `wording` can read.  Rows that hold none are in `left_out`, with the reason.

    Where `wording.chat` says so, strings that hold several turns become messages.
    Raises DataError, naming the column that is missing, if the source is in none of the forms above.
    """
    columns = {column for row in rows for column in row}
    form = _form_of(rows, columns)
    if form is FORMS[0] and wording.format is None and columns.isdisjoint(ASKED_IN) and not _holds_its_prompt(rows):
        raise DataError(missing_column("prompt", rows[0], rows.where(0)))
    places, pairs, left_out = [], [], list(rows.left_out)
    for place, found in form.read(rows, wording.chat):
        if not isinstance(found, LeftOut):
            try:
                wording.content(found, rows.where(place))
            except DataError as error:
                found = LeftOut(UNREADABLE, str(error))
        if isinstance(found, LeftOut):
            left_out.append(found)
        else:
            places.append(place)
            pairs.append(found)
    return replace(rows.subset(places), rows=pairs, left_out=tuple(left_out))


def _form_of(rows: SourceRows, columns: set[str]) -> Form:
    """The form whose columns are all there, else the error of the one that comes closest."""
    for form in FORMS:
        if columns.issuperset(form.columns):
            return form
    nearest = max(FORMS, key=lambda form: sum(column in columns for column in form.columns))
    absent = next(column for column in nearest.columns if column not in columns)
    raise DataError(missing_column(absent, rows[0], rows.where(0)))


def _holds_its_prompt(rows: SourceRows) -> bool:
    """True if some `chosen` is a conversation: messages, or a string with turns."""
    return any(isinstance(row.get("chosen"), list) or _turns_of(row.get("chosen")) for row in rows)


# ---- one row, one pair -------------------------------------------------------------------------------------------------------


def _each(read: Callable[[Row, str, bool], Row | LeftOut], columns: Sequence[str]) -> Callable[[SourceRows, bool], Found]:
    def of(rows: SourceRows, chat: bool) -> Iterator[tuple[int, Row | LeftOut]]:
        for i, row in enumerate(rows):
            absent = next((column for column in columns if column not in row), None)
            if absent is not None:
                yield i, LeftOut(f"without {absent}", rows.where(i))
            else:
                yield i, read(row, rows.where(i), chat)

    return of


def _chosen_and_rejected(row: Row, where: str, chat: bool) -> Row | LeftOut:
    chosen, rejected = row["chosen"], row["rejected"]
    if isinstance(chosen, list) and isinstance(rejected, list) and max(len(chosen), len(rejected)) > 1:
        return _last_turns(row, chosen, rejected, where)
    if any(column in row for column in ASKED_IN):
        return row
    spoken = [_turns_of(side) for side in (chosen, rejected)]
    if not all(spoken):
        return (
            row if chosen is None or rejected is None or not any(spoken) else LeftOut("in which one side is no conversation", where)
        )
    if any(turns[-1]["role"] != "assistant" for turns in spoken):
        return LeftOut("that do not end with a turn of the assistant", where)
    if chat:
        return _last_turns(row, spoken[0], spoken[1], where)
    assert isinstance(chosen, str) and isinstance(rejected, str)
    cuts = [side.rindex("\n\nAssistant:") + len("\n\nAssistant:") for side in (chosen, rejected)]
    if chosen[: cuts[0]] != rejected[: cuts[1]]:
        return _diverging(where)
    return {**row, "prompt": chosen[: cuts[0]], "chosen": chosen[cuts[0] :], "rejected": rejected[cuts[1] :]}


def _last_turns(row: Row, chosen: list[Any], rejected: list[Any], where: str) -> Row | LeftOut:
    """The pair of two conversations that share all but their last turn."""
    if len(chosen) < 2 or chosen[:-1] != rejected[:-1]:
        return _diverging(where)
    return {**row, "prompt": chosen[:-1], "chosen": chosen[-1:], "rejected": rejected[-1:]}


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
    return [{"role": SPEAKERS[speaker], "content": said.strip()} for speaker, said in turns]


def _ultrafeedback(row: Row, where: str, _chat: bool) -> Row | LeftOut:
    completions = row["completions"]
    if not isinstance(completions, list) or not all(isinstance(one, Mapping) and "response" in one for one in completions):
        return LeftOut("whose completions have no response", where)
    if len(completions) < 2:
        return LeftOut("with fewer than two completions", where)
    score = next((name for name in SCORES if all(_is_number(one.get(name)) for one in completions)), None)
    if score is None:
        return LeftOut("whose completions have no score", where)
    pair = _extremes([(float(one[score]), one["response"]) for one in completions], where)
    if isinstance(pair, LeftOut):
        return pair
    prompt = row["prompt"] if "prompt" in row else row.get("instruction")
    return {**row, "prompt": prompt, "chosen": pair[0], "rejected": pair[1]}


def _by_sign(first: str, second: str, sign: str, prompt: str) -> Callable[[Row, str, bool], Row | LeftOut]:
    """Reads two responses and a number that is negative where the first is better."""

    def read(row: Row, where: str, chat: bool) -> Row | LeftOut:
        preference = row[sign]
        if not _is_number(preference):
            return LeftOut(f"whose {sign} is no number", where)
        if preference == 0:
            return LeftOut("without a preference", where)
        better, worse = (row[first], row[second]) if preference < 0 else (row[second], row[first])
        return {**row, "prompt": _asked(row[prompt], chat), "chosen": better, "rejected": worse}

    return read


def _asked(prompt: object, chat: bool) -> object:
    """HelpSteer2 writes earlier turns into the prompt's string, behind `<extra_id_1>`."""
    if not chat or not isinstance(prompt, str) or not _EXTRA_ID_TURN.search(prompt):
        return prompt
    first, *parts = _EXTRA_ID_TURN.split(prompt)
    later = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": "user", "content": first}, *({"role": SPEAKERS[who], "content": said} for who, said in later)]


# ---- several rows, one pair --------------------------------------------------------------------------------------------------


def _rated(rows: SourceRows, chat: bool) -> Found:
    """Of neighbouring rows with the same prompt, the most and the least helpful."""
    for _, group in groupby(range(len(rows)), key=lambda i: _key(rows[i].get("prompt"))):
        places = list(group)
        rated = [i for i in places if _is_number(rows[i].get("helpfulness"))]
        yield from ((i, LeftOut("whose helpfulness is no number", rows.where(i))) for i in places if i not in rated)
        if len(rated) < 2:
            yield from ((i, LeftOut("without a second response to the prompt", rows.where(i))) for i in rated)
            continue
        pair = _extremes([(float(rows[i]["helpfulness"]), rows[i].get("response")) for i in rated], rows.where(rated[0]))
        if isinstance(pair, LeftOut):
            yield rated[0], pair
            continue
        first = rows[rated[0]]
        yield rated[0], {**first, "prompt": _asked(first.get("prompt"), chat), "chosen": pair[0], "rejected": pair[1]}
        yield from ((i, LeftOut("between the best and the worst of a prompt", rows.where(i))) for i in rated[2:])


def _labelled(rows: SourceRows, _chat: bool) -> Found:
    """The first good completion of a prompt with its first bad one, the second with the second, and so on."""
    waiting: dict[str, tuple[list[int], list[int]]] = {}
    for i, row in enumerate(rows):
        label = row.get("label")
        if label not in (True, False):
            yield i, LeftOut("whose label is neither true nor false", rows.where(i))
            continue
        waiting.setdefault(_key(row.get("prompt")), ([], []))[0 if label else 1].append(i)
    for good, bad in waiting.values():
        for better, worse in zip(good, bad, strict=False):
            yield better, {**rows[better], "chosen": rows[better].get("completion"), "rejected": rows[worse].get("completion")}
        for i in good[len(bad) :] + bad[len(good) :]:
            yield i, LeftOut("whose prompt has no completion with the other label", rows.where(i))


def _extremes(scored: Sequence[tuple[float, Any]], where: str) -> tuple[Any, Any] | LeftOut:
    """What has the highest and what has the lowest score; of equals the first."""
    best, worst = max(scored, key=lambda one: one[0]), min(scored, key=lambda one: one[0])
    return (best[1], worst[1]) if best[0] > worst[0] else LeftOut("whose completions are rated alike", where)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _key(prompt: object) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)


_HELPSTEER2 = ("response_1", "response_2", "preference_strength")
_HELPSTEER3 = ("context", "response1", "response2", "overall_preference")
FORMS = (
    Form(("chosen", "rejected"), _each(_chosen_and_rejected, ("chosen", "rejected"))),
    Form(("completions",), _each(_ultrafeedback, ("completions",))),
    Form(_HELPSTEER3, _each(_by_sign("response1", "response2", "overall_preference", "context"), _HELPSTEER3)),
    Form(_HELPSTEER2, _each(_by_sign(*_HELPSTEER2, "prompt"), ("prompt", *_HELPSTEER2))),
    Form(("response", "helpfulness"), _rated),
    Form(("completion", "label"), _labelled),
)
"""In the order in which they are looked for."""
