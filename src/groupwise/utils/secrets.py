"""Secrets, found by what they are called and by what they look like, so that no run folder, log or message holds one.

A name is read as words (`clientSecret`, `client-secret` and `CLIENT_SECRET2` are the same two).  It counts as a key of a mapping,
as the first of two in a list, as an option before its value, and inside of every text (`name=value`, `name: value`, a header).
The values of this process's environment variables with such names are secrets wherever they stand.
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
        "dsn",
        "webhook",
    ]
)
"""A name with one of these words in it names a secret."""
OWN_KEYS = frozenset(
    [
        "answer",
        "audio",
        "cache",
        "chosen",
        "class",
        "column",
        "completion",
        "config",
        "content",
        "context",
        "data",
        "dataset",
        "dict",
        "document",
        "environment",
        "eval",
        "example",
        "feature",
        "field",
        "file",
        "gold",
        "grade",
        "group",
        "hash",
        "id",
        "image",
        "index",
        "info",
        "input",
        "item",
        "json",
        "label",
        "lookup",
        "map",
        "mapping",
        "message",
        "meta",
        "metadata",
        "metric",
        "name",
        "output",
        "partition",
        "primary",
        "foreign",
        "prompt",
        "public",
        "query",
        "question",
        "reference",
        "rejected",
        "response",
        "result",
        "reward",
        "role",
        "row",
        "score",
        "sort",
        "solution",
        "source",
        "state",
        "step",
        "system",
        "tag",
        "target",
        "task",
        "text",
        "title",
        "tool",
        "type",
        "unique",
        "value",
        "video",
        "word",
        "num",
        "n",
        "max",
        "min",
        "total",
        "per",
        "required",
        "optional",
        "allowed",
        "ignored",
        "ignore",
        "drop",
        "keep",
        "skip",
        "exclude",
        "include",
        "missing",
        "extra",
        "known",
        "key",
    ]
)
"""Before `key` or `keys` at the end of a name, also in the plural: names of columns and the like.  Any other opens something."""
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
          | (?:[sr]k_(?:live|test)_|nvapi-|tvly-|r8_|csk-)[A-Za-z0-9_-]{8,}        # Stripe, NVIDIA, Tavily, Replicate, Cerebras
          | (?:pplx-|fw_)(?=[A-Za-z]*\d|[a-z]*[A-Z])[A-Za-z0-9]{10,}               # Perplexity, Fireworks
          | SG\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)?                             # SendGrid
          | (?:AKIA|ASIA)[0-9A-Z]{12,} | AIza[0-9A-Za-z_-]{20,}                    # AWS, Google
          | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,} | glpat-[A-Za-z0-9_-]{16,}
          | xox[abeoprs]-[A-Za-z0-9-]{8,} | npm_[A-Za-z0-9]{20,} | pypi-[A-Za-z0-9_-]{20,} | dop_v1_[0-9a-f]{32,}
          | (?i:bearer)\s+[A-Za-z0-9+/=._~-]{8,}
          | (?i:basic)\s+(?=[A-Za-z+/]*[\d=]|[A-Za-z+/]*[a-z+/][A-Z])[A-Za-z0-9+/=._~-]{8,}
          | eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*             # a JSON web token
        )
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.|\n)*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | (?<=://)(?:[^/\s:@]*:[^/\s@]+|[^/\s:@]{8,})(?=@)                             # a password, or a token, in an address
    | (?<=hooks\.slack\.com/)[^\s"']+ | (?<=/api/webhooks/)[^\s"']+                # Slack, Discord
    """,
    re.VERBOSE,
)
PAIRS = re.compile(
    r"""(?P<name> (?<![\w.-]) [\w.-]+ ) (?P<between> ["']? \s* [=:] \s* )
        (?:(?i:token|bearer|basic|digest|apikey|api-key|key)[ ]+)? (?P<value> "[^"\n]*" | '[^'\n]*' | [^\s,;&{}\[\]"'<>]+ )""",
    re.VERBOSE,
)
"""`name=value` and `name: value` inside a text, also `Authorization: token VALUE`."""
TELLING = re.compile(r"""(?=\S{4}) (?: \S*\d | \S*[a-z]\S*[A-Z] | \S*[A-Z]{2}\S*[a-z] | \S{20})""", re.VERBOSE)
"""What no word of a sentence looks like.  `password: nobody` in a prompt stays as it is, `password: hunter2` does not."""
SHORTEST = 6
"""Characters below which the value of an environment variable is too common a text to be looked for."""

FOLDERS = ("PWD", "OLDPWD")
"""The shell's working folders, which are no passwords."""


def secret_name(name: str) -> bool:
    """True if what has this name is a secret.

    >>> [secret_name(name) for name in ("hf_token", "apiKey", "client-secret2", "eos_token", "max_tokens", "key", "answer_key")]
    [True, True, True, False, False, False, False]
    """
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2] if not name.isidentifier() else name)
    words = [word.lower().rstrip("0123456789") for word in re.split(r"[^A-Za-z0-9]+", split)]
    words = [word for word in words if word]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in ("token", "tokens"):
        return before not in OWN_TOKENS
    if last in ("key", "keys"):
        return (before != "" and not OWN_KEYS.intersection((before, before.removesuffix("s")))) or bool(WORDS.intersection(words))
    return bool(WORDS.intersection(words)) or last == "pass" or (before, last) in (("connection", "string"), ("conn", "str"))


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
    text = SHAPES.sub(REDACTED, text)
    found, done, place = [], 0, 0
    while ("=" in text or ":" in text) and (pair := PAIRS.search(text, place)):
        place = pair.end("between")  # what follows may begin with a name itself: https://host?name=value
        if secret_name(pair["name"]) and _may_be_secret(pair):
            found += [text[done : pair.end("between")], REDACTED]
            done = place = pair.end()
    return "".join([*found, text[done:]])


def _may_be_secret(pair: re.Match[str]) -> bool:
    """Of a pair inside a text under a secret's name: False for a switch, so many tokens, and the next word of a sentence."""
    value = pair["value"].strip("\"'")
    if value.lower() in ("", "true", "false", "null", "none"):
        return False
    if pair["name"].lower().endswith(("token", "tokens")) and value.replace(".", "").replace("_", "").isdigit():
        return False
    return "=" in pair["between"] or value != pair["value"] or TELLING.match(value) is not None


def redacted(value: Any, name: str = "") -> Any:
    """A copy without secrets: everything under a name that is a secret's (`secret_name`), but true, false and null and, of tokens,
    numbers; and in every text what `scrubbed` takes away.

    >>> redacted({"hub_token": "abc", "max_new_tokens": 8, "url": "https://me:pw@host/", "headers": [["X-Api-Key", "abc"]]})
    {'hub_token': '[redacted]', 'max_new_tokens': 8, 'url': 'https://[redacted]@host/', 'headers': [['X-Api-Key', '[redacted]']]}
    """
    return _redacted(value, secret_name(name), name, _of_environment())


def _redacted(value: Any, secret: bool, name: str, known: Sequence[str]) -> Any:
    match value:
        case bool() | None | "":
            return value
        case str():
            return REDACTED if secret else _structured(value, known)
        case int() | float():
            return REDACTED if secret and not name.lower().endswith(("token", "tokens")) else value
        case Mapping():
            called = next((value[key] for key in ("name", "key", "header") if isinstance(value.get(key), str)), "")
            return {
                _scrubbed(str(key), known): _redacted(
                    inner, secret or secret_name(str(key)) or (key == "value" and secret_name(called)), str(key), known
                )
                for key, inner in value.items()
            }
        case list() | tuple():
            return _redacted_list(list(value), secret, name, known)
    return value


def _redacted_list(values: list[Any], secret: bool, name: str, known: Sequence[str]) -> list[Any]:
    """Also of a list of pairs what stands behind a secret's name, of a pair alone if it looks like one, and behind an option."""
    found: list[Any] = []
    for place, value in enumerate(values):
        before = values[place - 1] if place and isinstance(values[place - 1], str) else ""
        option = before.startswith("-") and "=" not in before and secret_name(before.lstrip("-"))
        pair = len(values) == 2 and secret_name(before) and isinstance(value, str) and TELLING.match(value)
        if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and secret_name(value[0]):
            found.append([_scrubbed(value[0], known), _redacted(value[1], True, value[0], known)])
        else:
            found.append(_redacted(value, secret or bool(option or pair), name, known))
    return found


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
        found.append(_redacted_argument(argument))
    return found


def _redacted_argument(text: str) -> str:
    name, equals, value = text.partition("=")
    if equals and re.fullmatch(r"-{0,2}[\w.-]+", name):
        if secret_name(name.lstrip("-")):  # all of it, also where it is a mapping or holds spaces
            return f"{name}={REDACTED}"
        return f"{name}={_redacted_argument(value)}"  # --task-arg=name=value
    return _structured(text, _of_environment())


def _structured(text: str, known: Sequence[str]) -> str:
    """A text without secrets, also where it is a mapping or a list as YAML or JSON writes it."""
    if not text.lstrip().startswith(("{", "[")):
        return _scrubbed(text, known)
    import yaml  # only here: few texts are one

    try:
        given = yaml.safe_load(text)
        kept = _redacted(given, False, "", known)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        return _scrubbed(text, known)
    if kept == given or not isinstance(given, dict | list):
        return _scrubbed(text, known)
    return yaml.safe_dump(kept, default_flow_style=True, sort_keys=False, width=1 << 20).strip().replace(f"'{REDACTED}'", REDACTED)


def _of_environment() -> list[str]:
    """The secrets of this process's environment, longest first."""
    named = ((name, value) for name, value in os.environ.items() if name not in FOLDERS and len(value) >= SHORTEST)
    found = {value for name, value in named if secret_name(name) and not _plain(value)}
    return sorted(found, key=len, reverse=True)


def _plain(value: str) -> bool:
    """True for what is no secret whatever it is called: a path that is there, a number, an address without a password, a switch."""
    return value.isdigit() or value.lower() in ("enabled", "disabled") or (value.startswith("/") and os.path.exists(value))
