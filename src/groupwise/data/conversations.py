"""A whole conversation as the chat template writes it, in which the policy's text keeps the ids that were sampled.

Some templates write earlier turns in another form once a conversation continues: they drop old reasoning, close turns otherwise,
format arguments.  The next turn can then be drawn after that form, as it will be at inference.  Text of the policy that is still in
it keeps its ids; only what the template or the environment wrote is encoded, and what the template changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from groupwise.data.rendering import Chat, Refusal, render_chats
from groupwise.data.templates import CLOSE, OPEN, Messages, Template
from groupwise.data.turns import Turns
from groupwise.errors import DataError


@dataclass(frozen=True, slots=True)
class Written:
    """A turn of the policy."""

    tokens: tuple[int, ...]
    """As sampled."""
    ended: bool
    """True if its last id ends a completion."""
    message: Mapping[str, Any]
    """The turn as a chat message."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of the rendering that is, character by character, text of the policy."""

    begin: int
    end: int
    turn: int
    """Which turn's."""
    place: int
    """Where it begins in the turn's own text."""


def rewritten(
    turns: Turns, template: Template, opening: Messages, said: Sequence[Written | Mapping[str, Any]]
) -> tuple[np.ndarray, str]:
    """int64 ids that the next turn is drawn behind, and their text.

    template: with `control_tokens: plain`.   opening: the prompt's messages, as `Template.marked` gives them.   said: what
    followed, in order, with the environment's messages at the end.   Raises DataError if the template refuses the conversation.
    """
    messages = [
        *opening,
        *(dict(one.message) if isinstance(one, Written) else template.shielded(one) for one in said),
    ]
    asked = Chat(messages, "the conversation", add_generation_prompt=True, tools=turns.tools, variables=turns.variables)
    ((chat, found),) = template.shown([asked])
    if isinstance(found, Refusal):
        raise DataError(str(found))
    texts = [_Text.of(turns, one) for one in said if isinstance(one, Written)]
    places = [len(opening) + place for place, one in enumerate(said) if isinstance(one, Written)]
    stretches = _stretches(found, turns, chat.messages, {place: turn for turn, place in enumerate(places)}, texts)
    ids: list[int] = []
    end = 0
    for stretch in stretches:
        kept, begin, stop = texts[stretch.turn].whole_tokens(stretch.place, stretch.place + stretch.end - stretch.begin)
        if not kept:
            continue
        at = stretch.begin - stretch.place
        ids += template.encode([found[end : at + begin]], plain=[False])[0].tolist()
        ids += kept
        end = at + stop
    ids += template.encode([found[end:]], plain=[False])[0].tolist()
    return np.asarray(ids, dtype=np.int64), found.replace(OPEN, "").replace(CLOSE, "")


@dataclass(frozen=True, slots=True)
class _Text:
    """A turn's own text, with the place at which each of its tokens ends."""

    text: str
    tokens: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, turns: Turns, one: Written) -> _Text:
        tokens = one.tokens[:-1] if one.ended else one.tokens

        def decoded(ids: Sequence[int]) -> str:
            return str(turns.tokenizer.decode(list(ids), skip_special_tokens=False))

        whole = decoded(tokens)
        ends, so_far = [], 0
        for count in range(1, len(tokens) + 1):
            text = decoded(tokens[:count])
            # A token that ends inside a character reaches as far as the one that completes it.
            so_far = max(so_far, len(text)) if whole.startswith(text) else so_far
            ends.append(so_far)
        if ends:
            ends[-1] = len(whole)
        for place in range(len(ends) - 2, -1, -1):
            ends[place] = min(ends[place], ends[place + 1])
        return cls(whole, tuple(tokens), tuple(ends))

    def whole_tokens(self, begin: int, end: int) -> tuple[list[int], int, int]:
        """The tokens that lie inside of a stretch of the text, and where they begin and end in it.

        Tokens that end at the same place make a character together: all of them are kept, or none.
        """
        starts = (0, *self.ends[:-1])
        inside = [
            place for place, (start, stop) in enumerate(zip(starts, self.ends, strict=True)) if begin <= start and stop <= end
        ]
        while inside and inside[-1] + 1 < len(self.ends) and self.ends[inside[-1]] == starts[inside[-1]]:
            inside.pop()  # the beginning of a character whose rest is outside
        if not inside:
            return [], begin, begin
        assert all(b == a + 1 for a, b in pairwise(inside)), "tokens of a stretch stand side by side"
        return [self.tokens[place] for place in inside], starts[inside[0]], self.ends[inside[-1]]


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a mark stands for in the second rendering."""

    text: str
    turn: int | None
    """None: the world's."""
    after: int = 0
    """Place in the turn's own text behind which the words stand."""


Anchor = tuple[int, int, int, int]
"""Begin and end in the rendering, turn, place in the turn's own text."""


def _stretches(
    rendering: str, turns: Turns, messages: Sequence[Mapping[str, Any]], own: Mapping[int, int], texts: Sequence[_Text]
) -> list[_Stretch]:
    """Where in the rendering the policy's own words stand.   own: of a message its turn, for the policy's.

    Places come from a second rendering, in which every text is a mark: so words that the world said too are not taken for the
    policy's.  From there a stretch reaches as far as both texts agree.
    """
    marks: dict[str, _Mark] = {}
    marked = []
    for number, message in enumerate(messages):
        turn, shown = own.get(number), dict(message)
        for key in ("reasoning_content", "content"):
            if isinstance(text := message.get(key), str) and text:
                after = texts[turn].text.find("</think>") if turn is not None and key == "content" else 0
                name = f"zq{number}{key[0]}mark"
                marks[name], shown[key] = _Mark(text, turn, max(after, 0)), name
        marked.append(shown)
    chat = Chat(marked, "the conversation", add_generation_prompt=True, tools=turns.tools, variables=turns.variables)
    (skeleton,) = render_chats(turns.tokenizer, [chat])
    if isinstance(skeleton, Refusal):
        return []
    anchors, literals = _aligned(rendering, re.split(f"({'|'.join(marks)})", skeleton), marks, texts)
    calling = [turn for number, turn in own.items() if messages[number].get("tool_calls")]
    anchors += _calls(rendering, literals, calling, texts, anchors)
    stretches: list[_Stretch] = []
    for begin, end, turn, place in sorted(anchors):
        floor = stretches[-1].end if stretches else 0
        if begin < floor:
            continue
        text = texts[turn].text
        while begin > floor and place > 0 and rendering[begin - 1] == text[place - 1]:
            begin, place = begin - 1, place - 1
        while end < len(rendering) and place + end - begin < len(text) and rendering[end] == text[place + end - begin]:
            end += 1
        stretches.append(_Stretch(begin, end, turn, place))
    return stretches


def _aligned(
    rendering: str, pieces: Sequence[str], marks: Mapping[str, _Mark], texts: Sequence[_Text]
) -> tuple[list[Anchor], list[tuple[int, int]]]:
    """The parts of turns that the template writes letter by letter, perhaps without white space around them; and what it writes
    between all parts, as begin and end."""
    anchors: list[Anchor] = []
    literals: list[tuple[int, int]] = []
    at = 0
    for piece, behind in zip(pieces, [*pieces[1:], ""], strict=True):
        mark = marks.get(piece)
        if mark is None:
            begin = at if rendering.startswith(piece, at) else rendering.find(piece, at)
            if begin < 0:
                break  # what stands here depends on what the marks stand for: places behind are not known
            at = begin + len(piece)
            literals.append((begin, at))
            continue
        form = next((one for one in _forms(mark.text) if rendering.startswith(one + behind, at)), "")
        if mark.turn is not None and form and (place := texts[mark.turn].text.find(form, mark.after)) >= 0:
            anchors.append((at, at + len(form), mark.turn, place))
        at += len(form)
    return anchors, literals


def _forms(text: str) -> list[str]:
    """How a template may write a text: as it is, without white space around it, or as JSON."""
    bare = (text, text.strip("\n"), text.lstrip("\n"), text.rstrip("\n"), text.strip(), text.lstrip(), text.rstrip())
    return list(dict.fromkeys([*bare, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]]))


_SECTIONS = (
    re.compile(r"<tool_call>.*</tool_call>", re.DOTALL),
    re.compile(r"(?<=<\|message\|>)(?:(?!<\|message\|>).)*$", re.DOTALL),
)


def _calls(
    rendering: str, literals: Sequence[tuple[int, int]], calling: Sequence[int], texts: Sequence[_Text], anchors: Sequence[Anchor]
) -> list[Anchor]:
    """Calls that the template writes letter by letter as the policy did, in the order of the turns."""
    calls: list[Anchor] = []
    for turn in calling:
        text = texts[turn].text
        whole = (text.strip(), text.find(text.strip()))
        sections = [(one[0], one.start()) for pattern in _SECTIONS if (one := pattern.search(text)) is not None]
        floor = max((end for _, end, other, _ in (*anchors, *calls) if other <= turn), default=0)
        ceiling = min((begin for begin, _, other, _ in anchors if other > turn), default=len(rendering))
        for section, place in (whole, *sections):
            spots = (rendering.find(section, max(begin, floor), min(end, ceiling)) for begin, end in literals)
            at = next((spot for spot in spots if spot >= 0), -1) if section else -1
            if at >= 0:
                calls.append((at, at + len(section), turn, place))
                break
    return calls
