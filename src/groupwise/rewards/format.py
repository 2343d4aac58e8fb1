"""Rewards for the form of a completion: a thinking block, tags, a regular expression."""

from __future__ import annotations

from collections.abc import Sequence

import regex as regular

from groupwise.errors import ConfigError, RewardError
from groupwise.utils.built_in import built_in

LONGEST_TEXT = 50_000
"""Characters of a completion that `regex` reads."""
REGEX_SECONDS = 1.0
"""Deadline of one match."""


def opened(prompt: str, tag: str = "think") -> bool:
    """True if the prompt, as the chat template wrote it, ends with `<tag>`: the completion starts
    inside the block.
    """
    return prompt.rstrip().endswith(f"<{tag}>")


@built_in("think_format")
def think_format(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """1.0 if the completion starts with `<think>`, closes it, and opens no second one, else 0.0
    (DeepSeek-R1's format reward, 2501.12948; equal to TRL's `think_format_reward` if the prompt
    does not open the block).

    A `<think>` that the chat template has already opened at the end of the prompt counts as opened.

    >>> think_format(["2+2=", "2+2="], ["<think>four</think> 4", "4"])
    [1.0, 0.0]
    >>> think_format(["2+2=<think>\\n"], ["four</think> 4"])
    [1.0]
    """
    rewards = []
    for prompt, text in zip(prompts, completions, strict=True):
        whole = ("<think>" if opened(prompt) else "") + text
        rewards.append(
            float(
                whole.startswith("<think>") and whole.count("<think>") == 1 and "</think>" in whole
            )
        )
    return rewards


@built_in("tags")
def tags(
    prompts: Sequence[str], completions: Sequence[str], *, tags: Sequence[str] = ("think", "answer")
) -> list[float]:
    """Share of the marks `<tag>` and `</tag>` of all tags that appear exactly once (Open-R1's
    `tag_count_reward`).

    A first tag that the chat template has already opened at the end of the prompt counts as opened.
    Raises ConfigError if `tags` is empty or a string.

    >>> tags(["", ""], ["<think>a</think><answer>4</answer>", "<think>a</think>4</answer>"])
    [1.0, 0.75]
    """
    if isinstance(tags, str) or not tags:
        raise ConfigError(f"the reward 'tags' needs a list of tag names, got {tags!r}")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rewards = []
    for prompt, text in zip(prompts, completions, strict=True):
        whole = (marks[0] if opened(prompt, tags[0]) else "") + text
        rewards.append(sum(whole.count(mark) == 1 for mark in marks) / len(marks))
    return rewards


@built_in("regex")
def regex(
    completions: Sequence[str], *, pattern: str, mode: str = "search", flags: str = ""
) -> list[float]:
    """1.0 if the regular expression is found in the completion (`mode: search`) or covers all of it
    (`mode: fullmatch`), else 0.0.

    `flags` are letters as in `(?ims)`.  Only the first 50,000 characters are read, and a match that
    takes longer than a second (a pattern like `(a+)+$` on a text made for it takes for ever) raises
    RewardError instead of stopping the run silently.
    Raises ConfigError for a pattern that cannot be compiled or an unknown mode.

    >>> regex(["Answer: 4", "4"], pattern=r"answer: \\d+", flags="i")
    [1.0, 0.0]
    """
    try:
        compiled = regular.compile(f"(?{flags}){pattern}" if flags else pattern)
    except (regular.error, TypeError) as error:
        raise ConfigError(
            f"the reward 'regex' cannot compile {pattern!r} with flags {flags!r}: {error}"
        ) from error
    if mode not in ("search", "fullmatch"):
        raise ConfigError(f"the reward 'regex' has mode {mode!r}; it is 'search' or 'fullmatch'")
    match = compiled.search if mode == "search" else compiled.fullmatch
    rewards = []
    for text in completions:
        try:
            rewards.append(float(match(text[:LONGEST_TEXT], timeout=REGEX_SECONDS) is not None))
        except TimeoutError as error:
            raise RewardError(
                f"the reward 'regex' needs more than {REGEX_SECONDS:g} s for {pattern!r} on a"
                f" completion of {len(text)} characters; avoid nested repeats such as (a+)+"
            ) from error
    return rewards
