"""Copies of recipes and of command lines without secrets, as a run folder keeps them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.utils.secrets import REDACTED, environment_secrets, secret_name, without_secrets

_PAIR = re.compile(r"-{0,2}([\w.-]+)=")


def redacted(value: Any, name: str = "") -> Any:
    """Return a copy without secrets: without all that stands under a secret's name, but true, false
    and null, and with every text as `scrubbed` returns it.

    >>> redacted({"hub_token": "abc", "max_new_tokens": 8, "url": "https://me:pw@host/"})
    {'hub_token': '[redacted]', 'max_new_tokens': 8, 'url': 'https://[redacted]@host/'}
    """
    return _redacted(value, secret_name(name), environment_secrets())


def _redacted(value: Any, secret: bool, known: Sequence[str]) -> Any:
    match value:
        case bool() | None | "":
            return value
        case str() if not secret:
            return without_secrets(value, known)
        case str() | int() | float() if secret:
            return REDACTED
        case Mapping():
            copy = {}
            for key, inner in value.items():
                under = secret or secret_name(str(key))
                copy[without_secrets(str(key), known)] = _redacted(inner, under, known)
            return copy
        case list() | tuple():
            return [_redacted(inner, secret, known) for inner in value]
    return value


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command without secrets: of `name=value` under a secret's name, and
    of a mapping that holds such a name, the value.

    >>> redacted_command(["train", "args={k: 3, api_key: abc}", "args.api_key=abc", "steps=3"])
    ['train', 'args=[redacted]', 'args.api_key=[redacted]', 'steps=3']
    """
    known = environment_secrets()
    return [_argument(text, known) for text in arguments]


def _argument(text: str, known: Sequence[str]) -> str:
    place, secret = 0, False
    while not secret and (pair := _PAIR.match(text, place)):  # --task-arg=name=value
        place, secret = pair.end(), secret_name(pair[1])
    if place and text.startswith(("{", "["), place):
        secret = secret or any(map(secret_name, re.findall(r"[\w.-]+", text[place:])))
    return text[:place] + (REDACTED if secret else without_secrets(text[place:], known))
