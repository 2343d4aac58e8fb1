"""Texts within settings: changed one by one, or refused where a run's file holds `[redacted]`.

Importing this file imports nothing that reads recipes: rewards need it while a run goes on.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.errors import ConfigError
from groupwise.utils.secrets import REDACTED

_SENTENCES = re.compile(r"args\.|\.harness|data\.(system|template)|rollout\.stop")
"""Keys of sentences that need every word; in other sentences a part may be `[redacted]`."""


def with_texts(value: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Return settings, or plain values, with every text in them changed.

    change: gives the new text for a dotted key and the text that stands there.   key: of `value`.
    """
    if isinstance(value, str):
        return change(key, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return dataclasses.replace(value, **with_texts(inside, change, key))
    if isinstance(value, Mapping):
        changed = {}
        for name, inner in value.items():
            changed[name] = with_texts(inner, change, _below(key, name))
        return changed
    if isinstance(value, list | tuple):
        items = [with_texts(item, change, _below(key, n)) for n, item in enumerate(value)]
        return type(value)(items)
    return value


def _below(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def demand_values(settings: Any, key: str = "") -> None:
    """Refuse settings with the value `[redacted]`, which the file of a run has in place of secrets.

    key: of the settings in their recipe, if they are not a whole one.   Raises ConfigError.
    """
    with_texts(settings, _demanded, key)


def _demanded(key: str, text: str) -> str:
    if REDACTED not in text:
        return text
    if " " in text and not _SENTENCES.search(key):
        return text
    raise ConfigError(
        f"{key} is {text!r}: a run's config.yaml holds no secrets; give the value again, as an"
        " override KEY=VALUE"
    )
