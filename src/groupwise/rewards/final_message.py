"""The final message of a completion: what follows a model's reasoning."""

from __future__ import annotations

import re

_TAGS = "think|thinking|thought|reasoning|seed:think|longcat_think"
_REASONING_BEGINS = re.compile(
    rf"<(?:{_TAGS})>|\[THINK\]|◁think▷|<\|channel>|<\|inner_prefix\|>|<\|START_THINKING\|>"
    r"|<\|begin_of_thought\|>",
    re.IGNORECASE,
)
_REASONING_ENDS = re.compile(
    rf"</(?:{_TAGS})>|\[/THINK\]|◁/think▷|<channel\|>|<\|inner_suffix\|>|<\|END_THINKING\|>"
    r"|<\|end_of_thought\|>|\[BEGIN FINAL RESPONSE\]|Here(?:'s| is) my response:",
    re.IGNORECASE,
)
"""Most families use tags.  Mistral, Kimi, Gemma 4, Apertus, Command, OpenThinker, Apriel and
Granite follow.
"""

_FRAME = re.compile(
    r"<\|(?:START|END)_RESPONSE\|>|<\|(?:begin|end)_of_solution\|>|</?response>"
    r"|\[END FINAL RESPONSE\]",
    re.IGNORECASE,
)
"""Marks around the final message itself."""

_CHANNEL = "<|channel|>"
_FINAL_CHANNEL = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_MESSAGE_END = re.compile(r"<\|(?:end|return|call|start)\|>")
"""gpt-oss parts its messages by channels: analysis, commentary and final."""
_UNMARKED_CHANNEL = re.compile(r"(?:analysis|commentary|final)(?=[^\sa-z:.,;-])")
_UNMARKED_FINAL = "assistantfinal"
"""Where special tokens are left out of the text, the names of roles and channels remain."""


def final_message(text: str) -> str:
    """Return what a completion says behind its reasoning; all of it where it has none.

    It is empty where the reasoning does not end: what a model only thought is no answer.

    >>> final_message("<think>5?</think>It is 7."), final_message("It is 7.")
    ('It is 7.', 'It is 7.')
    >>> final_message("[THINK]Maybe 5"), final_message("<|channel|>analysis<|message|>Maybe 5")
    ('', '')
    >>> final_message("<|channel|>final<|message|>It is 7.<|return|>")
    'It is 7.'
    >>> final_message("analysisMaybe 5.assistantfinalIt is 7.")
    'It is 7.'
    """
    if _CHANNEL in text:
        return _final_channel(text)
    if _UNMARKED_CHANNEL.match(text.lstrip()) or _UNMARKED_FINAL in text:
        return _unmarked_final(text.lstrip())
    end = 0
    for mark in _REASONING_ENDS.finditer(text):
        end = mark.end()
    unfinished = _REASONING_BEGINS.search(text, end)
    message = text[end:] if unfinished is None else text[end : unfinished.start()]
    return _FRAME.sub("", message) if end else message


def _final_channel(text: str) -> str:
    begin = len(text)
    for mark in _FINAL_CHANNEL.finditer(text):
        begin = mark.end()
    end = _MESSAGE_END.search(text, begin)
    return text[begin:] if end is None else text[begin : end.start()]


def _unmarked_final(text: str) -> str:
    if _UNMARKED_FINAL in text:
        return text.rpartition(_UNMARKED_FINAL)[2]
    return text.removeprefix("final") if text.startswith("final") else ""
