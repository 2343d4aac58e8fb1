"""Secrets, found by what they are called, so that no run folder, log or message holds one.

Three kinds are hidden: what has a secret's name (a key of a mapping, `name=value` and `name: value`
in a text, an option before its value); the values of this process's environment variables with such
names, wherever they stand; and passwords in addresses. A key that stands alone, whatever vendor's
it is, looks like any other word: give secrets by a name, best in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"
TOKEN = "GROUPWISE_TOKEN"
"""Environment variable with the token that requests to the endpoint must bring."""


def environment_of_others() -> dict[str, str]:
    """This process's environment for a process that runs somebody else's code: without the
    endpoint's token, with which it could take the episodes of others."""
    return {name: value for name, value in os.environ.items() if name != TOKEN}


WORDS = frozenset(
    [
        "secret",
        "secrets",
        "passwords",
        "credential",
        "credentials",
        "authorization",
        "bearer",
        "jwt",
        "apikeys",
    ]
)
"""A name with one of these words in it names a secret."""
ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "sshpass")
"""A word that ends so does too: `PGPASSWORD`."""
OPENED = frozenset(
    [
        *(
            "access",
            "account",
            "admin",
            "api",
            "auth",
            "client",
            "encryption",
            "hf",
            "hub",
            "master",
            "personal",
            "private",
        ),
        *("refresh", "secret", "service", "session", "signing", "ssh", "storage"),
    ]
)
"""Before `key` or `token` at the end of a name: what it opens.  Of others (`problem_key`,
`stop_token`) the value decides.
"""
MAYBE = frozenset(
    [
        "auth",
        "cookie",
        "cookies",
        "dsn",
        "key",
        "keys",
        "pass",
        "pat",
        "pwd",
        "token",
        "tokens",
        "webhook",
    ]
)
"""Words of names of which the value decides."""
ABOUT = frozenset(
    [
        *(
            "column",
            "dir",
            "field",
            "file",
            "folder",
            "format",
            "kind",
            "length",
            "method",
            "mode",
            "name",
            "path",
            "policy",
        ),
        *("provider", "scheme", "type"),
    ]
)
"""Last in a name: it says something about a secret (`password_file`)."""

NAMED = re.compile(
    r"""(?<![\w.-]) (?P<name> (?>[\w.-]+) ) (?P<between> [\\"']{0,4} \s{0,8} (?:=(?!=)|:) \s{0,8} [\\"']{0,4} )
        (?: (?i:bearer|basic|token) [ ]{1,8} [\\"']{0,4} )?""",
    re.VERBOSE,
)
"""A name before its value, which may begin with a name itself: `https://host?name=value`."""
BARE, QUOTED, MAPPED = (
    re.compile(some) for some in (r"""[^\s,;&{}\[\]"'<>\\]+""", r"""[^"'\n\\]+""", r"[^,{}\[\]]+")
)
"""A value as it stands in a text, behind a quotation mark, and in a mapping of a command's
argument.
"""
LOOKED_AT = 256
"""Characters of a value by which it is decided."""
ADDRESS = re.compile(r"""(?<=://)(?:[^/\s:@"'<>]*:[^/\s"'<>]+|[^/\s:@"'<>]{8,})(?=@)""")
"""A password with its user, or a token, in an address."""
SHORTEST = 6
"""Characters below which the value of an environment variable is too common a text to be looked
for.
"""

NO, BY_VALUE, YES = 0, 1, 2
"""Is what has a name a secret?  `BY_VALUE`: if only a machine writes such a value."""


def secret_name(name: str) -> bool:
    """True if what has this name is a secret, whatever it is.

    >>> [secret_name(name) for name in ("hf_token", "apiKey", "client-secret2", "eos_token", "token", "max_tokens", "problem_key")]
    [True, True, True, False, False, False, False]
    """
    return _named(name) == YES


def _named(name: str) -> int:
    name = name if name.isidentifier() else name.rpartition(".")[2]
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    words = [word.lower().rstrip("0123456789") for word in re.split(r"[^A-Za-z0-9]+", split)]
    words = [word for word in words if word]
    if not words:
        return NO
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if WORDS.intersection(words) or any(word.endswith(ENDINGS) for word in words):
        return BY_VALUE if last in ABOUT else YES
    if last in ("key", "keys", "token", "tokens") and before in OPENED:
        return YES
    return BY_VALUE if MAYBE.intersection(words) else NO


def _random(value: str) -> bool:
    """True for what only a machine writes: one word with a part of 12 or more letters and digits,
    not letters alone.

    >>> [_random(text) for text in ("9f8b3c2d1e0a7b6c", "level_of_difficulty_2", "the 1st answer is a", "</think>")]
    [True, False, False, False]
    """
    parts = [] if re.search(r"\s", value) else re.split(r"[^A-Za-z0-9]+", value)
    return any(len(part) >= 12 and not part.isalpha() for part in parts)


def _telling(value: str) -> bool:
    """True for what no word of a sentence looks like: `password: nobody` stays as it is, `password:
    hunter2` does not.
    """
    return len(value) > 3 and (
        any(map(str.isdigit, value)) or not (value.islower() or value.istitle() or value.isupper())
    )


def scrubbed(text: str) -> str:
    """A text without the values of secrets' names, of such variables of the environment, and
    passwords in addresses.

    >>> scrubbed("api_key=abc sent to https://me:pw@host/")
    'api_key=[redacted] sent to https://[redacted]@host/'
    """
    return _scrubbed(text, _of_environment())


def _scrubbed(text: str, known: Sequence[str], *, argument: bool = False) -> str:
    """known: the secrets of the environment.   argument: of a command, where a value may be a
    mapping to the end.
    """
    for value in known:
        text = text.replace(value, REDACTED)
    text, parts, done = ADDRESS.sub(REDACTED, text), [], 0
    mapping = argument and text.startswith(("{", "["))
    for pair in NAMED.finditer(text):
        start, named = pair.end(), _named(pair["name"])
        if named == NO or start < done:
            continue
        if argument and named == YES and text[start : start + 1] in ("{", "["):
            return "".join([*parts, text[done:start], REDACTED])
        form = QUOTED if text[start - 1] in "\"'" else MAPPED if mapping else BARE
        value = form.match(text, start, start + LOOKED_AT)
        plain = form is not BARE or "=" in pair["between"]  # no sentence
        if value and (_random(value[0]) or (named == YES and (plain or _telling(value[0])))):
            parts += [text[done:start], REDACTED]
            done = form.match(text, start).end()  # type: ignore[union-attr]
    return "".join([*parts, text[done:]])


def redacted(value: Any, name: str = "") -> Any:
    """A copy without secrets: everything under a name that is a secret's (`secret_name`), but true,
    false and null, and in every text what `scrubbed` takes away.

    >>> redacted({"hub_token": "abc", "max_new_tokens": 8, "args": {"token": "</think>"}, "url": "https://me:pw@host/"})
    {'hub_token': '[redacted]', 'max_new_tokens': 8, 'args': {'token': '</think>'}, 'url': 'https://[redacted]@host/'}
    """
    return _redacted(value, _named(name), _of_environment())


def _redacted(value: Any, named: int, known: Sequence[str]) -> Any:
    match value:
        case bool() | None | "":
            return value
        case str():
            return (
                REDACTED
                if named == YES or (named == BY_VALUE and _random(value))
                else _scrubbed(value, known)
            )
        case int() | float():
            return REDACTED if named == YES else value
        case Mapping():
            return {
                _scrubbed(str(key), known): _redacted(inner, max(named, _named(str(key))), known)
                for key, inner in value.items()
            }
        case list() | tuple() if not named and all(isinstance(one, str) for one in value):
            return _without_options(value, known)
        case list() | tuple():
            return [_redacted(one, named, known) for one in value]
    return value


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets: the values of `name=value`, also inside of
    mappings, and what follows an option with a secret's name.

    >>> redacted_command(["train", "rewards.0.args={k: 3, api_key: abc}", "--hf-token", "abc"])
    ['train', 'rewards.0.args={k: 3, api_key: [redacted]}', '--hf-token', '[redacted]']
    """
    return _without_options(arguments, _of_environment(), argument=True)


def _without_options(
    arguments: Sequence[str], known: Sequence[str], *, argument: bool = False
) -> list[str]:
    shown, named = [], NO
    for text in arguments:
        if named and not text.startswith("-"):
            shown.append(_redacted(text, named, known))
            named = NO
            continue
        named = _named(text.lstrip("-")) if text.startswith("-") and "=" not in text else NO
        place, hides = 0, False
        while (
            argument and not hides and (pair := re.compile(r"-{0,2}([\w.-]+)=").match(text, place))
        ):  # --task-arg=name=value
            place, kind = pair.end(), _named(pair[1])
            hides = kind == YES or (kind == BY_VALUE and _random(text[place:]))
        shown.append(
            text[:place]
            + (REDACTED if hides else _scrubbed(text[place:], known, argument=argument))
        )
    return shown


def _of_environment() -> list[str]:
    """The secrets of this process's environment, longest first."""
    secrets = {
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST and _hides(_named(name), value)
    }
    return sorted(secrets, key=len, reverse=True)


def _hides(named: int, value: str) -> bool:
    """True if a value is a secret's by its name and looks like one; a path that is there is none,
    whatever it is called.
    """
    if value.startswith("/") and os.path.exists(value):
        return False
    return (
        _random(value) if named == BY_VALUE else named == YES and (_telling(value) or " " in value)
    )
