"""The built-in reward functions by name.  A new one is a pure function and one row of `settings.REWARDS`.

Their parameters are looked up by name: `prompts` and `completions` (strings, the chat template applied), `prompt_ids`,
`completion_ids`, `finish_reasons`, `environment_rewards`, `gold`, or any column of the data.  Keyword-only parameters are what a
recipe's `args` set; a function refuses bad ones even when it is called with no completions, which is how they are checked before
a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from groupwise.config.settings import REWARDS
from groupwise.rewards.model import model_reward

GOLD_COLUMNS = ("answer", "solution")
"""Where `gold` is taken from: the first of these that the data have, or the column that `args: {column: ...}` names."""

MAKERS: Mapping[str, Callable[..., Callable[..., Any]]] = MappingProxyType({"model": model_reward})
"""Built-ins that are made once from a recipe's `args` and the policy's tokenizer, and then called like anybody's function."""

BUILTINS: Mapping[str, Callable[..., list[Any]]] = MappingProxyType(
    {name: getattr(import_module(f"groupwise.rewards.{module}"), name) for name, module in REWARDS.items() if name not in MAKERS}
)
