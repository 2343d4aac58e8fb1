"""Secrets, found by what they are called, so that no run folder, log or message holds one.

Three rules: what stands under a key with a secret's name; the values of this process's environment
variables with such names, wherever they stand; and passwords in addresses.  A key that stands in a
text, whatever vendor's it is, looks like any other word: give secrets by a name, best in the
environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

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
"""What a secret opens, before `key` or `token` at the end of a name; `problem_key` and `stop_token`
name none.
"""
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
OF_VARIABLES = ("_KEY", "_TOKEN", "_PASS", "_PWD", "_PAT")
"""Ends of names of environment variables that hold secrets, whatever stands before them."""
ADDRESS = re.compile(r"""(?<=://)(?:[^/\s:@"'<>]*:[^/\s"'<>]+|[^/\s:@"'<>]{8,})(?=@)""")
"""A password with its user, or a token, in an address."""
SHORTEST = 8
"""Characters below which the value of a variable is too common a text to be looked for."""


def secret_name(name: str) -> bool:
    """Return True if what has this name is a secret.

    >>> names = ("hf_token", "apiKey", "client-secret2", "eos_token", "max_tokens", "problem_key")
    >>> [secret_name(name) for name in names]
    [True, True, True, False, False, False]
    """
    leaf = name if name.isidentifier() else name.rpartition(".")[2]
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", leaf)
    words = [word.lower().rstrip("0123456789") for word in re.split(r"[^A-Za-z0-9]+", parted)]
    words = [word for word in words if word]
    if not words or words[-1] in ABOUT:
        return False
    if WORDS.intersection(words) or any(word.endswith(ENDINGS) for word in words):
        return True
    return words[-1] in ("key", "keys", "token", "tokens") and bool(OPENED.intersection(words[-2:]))


def scrubbed(text: str) -> str:
    """Return a text without the secrets of the environment and without passwords in addresses.

    >>> scrubbed("sent to https://me:pw@host/")
    'sent to https://[redacted]@host/'
    """
    return without_secrets(text, environment_secrets())


def without_secrets(text: str, known: Sequence[str]) -> str:
    """Return a text without known secrets and without passwords in addresses."""
    for value in known:
        text = text.replace(value, REDACTED)
    return ADDRESS.sub(REDACTED, text)


def environment_secrets() -> list[str]:
    """Return the secrets of this process's environment, longest first."""
    secrets = set()
    for name, value in os.environ.items():
        named = secret_name(name) or name.upper().endswith(OF_VARIABLES)
        a_file = value.startswith("/") and os.path.exists(value)
        if named and len(value) >= SHORTEST and not a_file:
            secrets.add(value)
    return sorted(secrets, key=len, reverse=True)
