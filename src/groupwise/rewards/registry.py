"""The table of built-in reward functions: name -> function.  A new one is a pure function and one row here.

Their parameters are looked up by name: `prompts` and `completions` (strings, the chat template applied), `prompt_ids`,
`completion_ids`, `finish_reasons`, `environment_rewards`, `gold`, or any column of the data.  Keyword-only parameters are what a
recipe's `args` set; a function refuses bad ones even when it is called with no completions, which is how they are checked before
a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from groupwise.rewards.accuracy import accuracy, exact, number
from groupwise.rewards.environment import environment
from groupwise.rewards.format import regex, tags, think_format
from groupwise.rewards.length import cosine_length, soft_overlong
from groupwise.rewards.model import model_reward
from groupwise.rewards.repetition import repetition

GOLD_COLUMNS = ("answer", "solution")
"""Where `gold` is taken from: the first of these that the data have, or the column that `args: {column: ...}` names."""

BUILTINS: Mapping[str, Callable[..., list[Any]]] = MappingProxyType(
    {
        "accuracy": accuracy,
        "exact": exact,
        "number": number,
        "think_format": think_format,
        "tags": tags,
        "regex": regex,
        "soft_overlong": soft_overlong,
        "cosine_length": cosine_length,
        "repetition": repetition,
        "environment": environment,
    }
)

MAKERS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType({"model": model_reward})
"""Built-ins that are made once from a recipe's `args` and the policy's tokenizer, and then called like anybody's function."""
