"""Secrets, found by what they are called and by what they look like, so that no run folder, log or message holds one.

A name is read as words (`clientSecret`, `client-secret` and `CLIENT_SECRET` are the same two).  The values of this process's
environment variables with such names are secrets wherever they stand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"

WORDS = frozenset(
    [
        "secret",
        "secrets",
        "password",
        "passwords",
        "passwd",
        "passphrase",
        "passcode",
        "pwd",
        "pw",
        "credential",
        "credentials",
        "cred",
        "creds",
        "authorization",
        "auth",
        "cookie",
        "cookies",
        "bearer",
        "apikey",
        "apikeys",
        "accesskey",
        "privatekey",
        "secretkey",
        "authkey",
        "authtoken",
        "accesstoken",
        "hftoken",
        "apitoken",
        "jwt",
    ]
)
"""A name with one of these words in it names a secret."""
KEY_OF = frozenset(
    [
        "api",
        "access",
        "private",
        "secret",
        "signing",
        "encryption",
        "auth",
        "ssh",
        "session",
        "account",
        "client",
        "master",
        "subscription",
        "license",
        "storage",
        "service",
        "deploy",
        "shared",
        "host",
        "rsa",
        "pgp",
        "gpg",
        "webhook",
        "wandb",
        "hf",
        "huggingface",
        "openai",
        "anthropic",
        "aws",
        "azure",
        "gcp",
        "google",
        "gemini",
        "github",
        "gitlab",
        "comet",
        "neptune",
        "mlflow",
        "mistral",
        "cohere",
        "groq",
        "together",
        "openrouter",
        "deepseek",
        "replicate",
        "trackio",
        "swanlab",
    ]
)
"""Before `key` or `keys` at the end of a name."""
OWN_TOKENS = frozenset(
    [
        "eos",
        "bos",
        "observation",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "special",
        "control",
        "stop",
        "end",
        "start",
        "think",
        "image",
        "new",
        "max",
        "min",
        "num",
        "prompt",
        "completion",
        "output",
        "input",
        "extra",
        "added",
        "additional",
        "keep",
        "reserved",
        "language",
        "total",
        "n",
        "per",
        "of",
    ]
)
"""Before `token` or `tokens`: those of a tokenizer, or a number of them."""

SHAPES = re.compile(
    r"""
      \b(?: hf_[A-Za-z0-9]{8,} | api_org_[A-Za-z0-9]{8,}                          # Hugging Face
          | sk-[A-Za-z0-9_-]{8,} | gsk_[A-Za-z0-9]{16,} | xai-[A-Za-z0-9]{16,}     # OpenAI, Anthropic, others
          | (?:AKIA|ASIA)[0-9A-Z]{12,} | AIza[0-9A-Za-z_-]{20,}                    # AWS, Google
          | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,} | glpat-[A-Za-z0-9_-]{16,}
          | xox[abeoprs]-[A-Za-z0-9-]{8,} | npm_[A-Za-z0-9]{20,} | pypi-[A-Za-z0-9_-]{20,} | dop_v1_[0-9a-f]{32,}
          | (?:Bearer|Basic)\s+[A-Za-z0-9+/=._~-]{8,}
          | eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*             # a JSON web token
        )
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.|\n)*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | (?<=://)[^/\s:@]*:[^/\s@]+(?=@)                                             # a password in an address
    """,
    re.VERBOSE,
)
PAIRS = re.compile(
    r"""(?P<name> (?<![\w.-]) [\w.-]+ ) (?P<between> ["']? \s* [=:] \s* ) (?P<value> "[^"]*" | '[^']*' | [^\s,;&{}\[\]"']+ )""",
    re.VERBOSE,
)
"""`name=value` and `name: value` inside a text."""
SHORTEST = 6
"""Characters below which the value of an environment variable is too common a text to be looked for."""

FOLDERS = ("PWD", "OLDPWD")
"""The shell's working folders, which are no passwords."""


def secret_name(name: str) -> bool:
    """True if what has this name is a secret.

    >>> [secret_name(name) for name in ("hf_token", "apiKey", "client-secret", "wandb_key", "eos_token", "max_tokens", "key")]
    [True, True, True, True, False, False, False]
    """
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2] if not name.isidentifier() else name)
    words = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", split) if word]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("token", "tokens"):
        return before not in OWN_TOKENS
    if last == "pass":
        return True
    return bool(WORDS.intersection(words)) or (last in ("key", "keys") and before in KEY_OF)


def scrubbed(text: str) -> str:
    """A text without what looks like a secret, or is the value of an environment variable that has a secret's name.

    >>> scrubbed("pushed with hf_abcdefghijkl to https://me:pw@host/")
    'pushed with [redacted] to https://[redacted]@host/'
    """
    return _scrubbed(text, _of_environment())


def _scrubbed(text: str, known: Sequence[str]) -> str:
    """known: the secrets of the environment."""
    for value in known:
        text = text.replace(value, REDACTED)
    return SHAPES.sub(REDACTED, text)


def redacted(value: Any, name: str = "") -> Any:
    """A copy without secrets: everything under a name that is a secret's (`secret_name`), but true, false and null and, of tokens,
    numbers; and in every text what `scrubbed` takes away.

    >>> redacted({"hub_token": "abc", "max_new_tokens": 8, "url": "https://me:pw@host/"})
    {'hub_token': '[redacted]', 'max_new_tokens': 8, 'url': 'https://[redacted]@host/'}
    """
    return _redacted(value, secret_name(name), name, _of_environment())


def _redacted(value: Any, secret: bool, name: str, known: Sequence[str]) -> Any:
    match value:
        case bool() | None | "":
            return value
        case str():
            return REDACTED if secret else _scrubbed(value, known)
        case int() | float():
            return REDACTED if secret and not name.lower().endswith(("token", "tokens")) else value
        case Mapping():
            return {
                _scrubbed(str(key), known): _redacted(inner, secret or secret_name(str(key)), str(key), known)
                for key, inner in value.items()
            }
        case list() | tuple():
            return [_redacted(inner, secret, name, known) for inner in value]
    return value


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets: the values of `name=value` and `name: value`, also inside of mappings and lists,
    and what follows an option with a secret's name.

    >>> redacted_command(["train", "rewards.0.args={api_key: abc, k: 3}", "--hf-token", "abc"])
    ['train', 'rewards.0.args={api_key: [redacted], k: 3}', '--hf-token', '[redacted]']
    """
    found, secret = [], False
    for argument in arguments:
        if secret and not argument.startswith("-"):
            found.append(REDACTED)
            secret = False
            continue
        secret = argument.startswith("-") and "=" not in argument and secret_name(argument.lstrip("-"))
        found.append(scrubbed(_without_pairs(argument)))
    return found


def _without_pairs(text: str) -> str:
    name, equals, value = text.partition("=")
    if equals and secret_name(name.lstrip("-")):  # all of it, also where it is a mapping or holds spaces
        return f"{name}={REDACTED}"
    if equals and re.fullmatch(r"--?[\w-]+", name):  # --task-arg=name=value
        return f"{name}={_without_pairs(value)}"

    def hide(pair: re.Match[str]) -> str:
        if not secret_name(pair["name"]):
            return pair[0]
        return f"{pair['name']}{pair['between']}{REDACTED}"

    nested = re.compile(r"""([\w.-]+)(["']?\s*[:=]\s*)(\{[^{}]*\}|\[[^\[\]]*\])""")
    text = nested.sub(lambda found: f"{found[1]}{found[2]}{REDACTED}" if secret_name(found[1]) else found[0], text)
    return PAIRS.sub(hide, text)


def _of_environment() -> list[str]:
    """The secrets of this process's environment, longest first."""
    named = ((name, value) for name, value in os.environ.items() if name not in FOLDERS and len(value) >= SHORTEST)
    found = {value for name, value in named if secret_name(name) and not _plain(value)}
    return sorted(found, key=len, reverse=True)


def _plain(value: str) -> bool:
    """True for what is no secret whatever it is called: a path that is there, a number, an address without a password, a switch."""
    return value.isdigit() or value.lower() in ("enabled", "disabled") or (value.startswith("/") and os.path.exists(value))
