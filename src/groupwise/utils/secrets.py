"""Secrets, found by what they are called and by what they look like, so that no run folder, log or message holds one.

A name is read as words (`clientSecret`, `client-secret` and `CLIENT_SECRET2` are the same two).  It counts as a key of a mapping,
as the first of two in a list, as an option before its value, and inside of every text (`name=value`, `name: value`, a header).
The values of this process's environment variables with such names are secrets wherever they stand, unless one reads like a word
of a sentence (`AUTH_MODE=github`, and a password of a few small letters too).
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"
TOKEN = "GROUPWISE_TOKEN"
"""Environment variable with the token that requests to the endpoint must bring."""


def environment_of_others() -> dict[str, str]:
    """This process's environment for a process that runs somebody else's code: without the endpoint's token, with which it could
    take the episodes of others."""
    return {name: value for name, value in os.environ.items() if name != TOKEN}


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
ENDINGS = ("password", "passwd", "passphrase", "secret", "apikey", "accesskey", "secretkey", "sshpass")
"""A word that ends so is one of them, written together: `PGPASSWORD`."""
KEY_OF = frozenset(
    [
        *(
            "api",
            "access",
            "private",
            "secret",
            "signing",
            "encryption",
            "decryption",
            "auth",
            "ssh",
            "session",
            "account",
            "client",
        ),
        *("master", "subscription", "license", "storage", "service", "deploy", "deployment", "shared", "host", "rsa", "pgp", "gpg"),
        *(
            "webhook",
            "admin",
            "root",
            "hmac",
            "ssl",
            "tls",
            "judge",
            "grader",
            "endpoint",
            "server",
            "proxy",
            "gateway",
            "wandb",
            "hf",
        ),
        *("huggingface", "openai", "anthropic", "claude", "aws", "azure", "gcp", "google", "gemini", "vertex", "github", "gitlab"),
        *("comet", "neptune", "mlflow", "mistral", "cohere", "groq", "together", "openrouter", "deepseek", "replicate", "trackio"),
        *("swanlab", "serpapi", "serper", "serp", "tavily", "brave", "bing", "exa", "jina", "firecrawl", "perplexity", "fireworks"),
        *(
            "cerebras",
            "nvidia",
            "nim",
            "ngc",
            "xai",
            "grok",
            "dashscope",
            "qwen",
            "moonshot",
            "zhipu",
            "langsmith",
            "langfuse",
            "e2b",
        ),
        *("modal", "runpod", "datadog", "sentry", "stripe", "sendgrid", "twilio", "slack", "discord", "telegram", "pinecone", "db"),
    ]
)
"""Before `key` or `keys` at the end of a name: what such a key opens.  Of others (`problem_key`) the value decides."""
TOKEN_OF = KEY_OF | frozenset(
    ["hub", "bearer", "refresh", "oauth", "csrf", "jwt", "personal", "pat", "bot", "user", "login", "gh", "git", "npm", "pypi"]
)
"""Before `token` or `tokens`; of others (`step_token`, `eos_token`) the value decides."""
ABOUT = frozenset(
    [
        *("mode", "type", "kind", "method", "scheme", "provider", "backend", "policy", "enabled", "timeout", "length", "format"),
        *("file", "path", "dir", "folder", "column", "field", "name"),
    ]
)
"""Last in a name: it says something about a secret (`auth_mode`); the value decides."""

SHAPES = re.compile(
    r"""
      \b(?: (?:hf_|api_org_)[A-Za-z0-9]{30,}                                       # Hugging Face
          | (?<![\w-])sk-(?=[\w-]*?(?=[A-Za-z0-9]{0,14}\d[A-Za-z])(?=[A-Z0-9]{0,15}[a-z])[A-Za-z0-9]{16})[A-Za-z0-9_-]+  # OpenAI...
          | (?<![\w-])sk-(?=[\w-]{22}(?![\w-]))(?=[A-Za-z_-]*\d)(?=(?:[\w-]*?[a-z][A-Z]){2})[A-Za-z0-9_-]{22}  # LiteLLM
          | [ps]k-lf-[0-9a-f]{8}-[0-9a-f-]{20,}                                    # Langfuse
          | (?:gsk_|xai-|pplx-|csk-|r8_|rpa_)[A-Za-z0-9]{30,}                      # Groq, xAI, Perplexity, Cerebras, Replicate...
          | nvapi-[A-Za-z0-9_-]{50,} | fw_[A-Za-z0-9]{20,}                         # NVIDIA, Fireworks
          | tvly-(?:dev-|prod-)?(?:[A-Za-z0-9]{4,8}-)?[A-Za-z0-9]{20,}[A-Za-z0-9_-]*  # Tavily
          | jina_[A-Za-z0-9]{30,}[A-Za-z0-9_-]* | fc-[0-9a-f]{32}(?![0-9a-f])      # Jina, Firecrawl
          | lsv2_(?:pt|sk)_[A-Za-z0-9]{30,}\w* | wandb_v1_[A-Za-z0-9]{20,}_[A-Za-z0-9]{30,}  # LangSmith, Weights & Biases
          | e2b_[0-9a-f]{32,} | pcsk_[A-Za-z0-9]{4,8}_[A-Za-z0-9]{40,}             # E2B, Pinecone
          | [sr]k_(?:live|test)_[A-Za-z0-9]{16,} | SG\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{40,}  # Stripe, SendGrid
          | (?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Z]) | AIza[0-9A-Za-z_-]{30,} | ya29\.(?:[a-z]\.)?[A-Za-z0-9_-]{30,}  # AWS, Google
          | gh[pousr]_[A-Za-z0-9]{16,} | github_pat_[A-Za-z0-9_]{16,}
          | glpat-[A-Za-z0-9_-]{16,} | gldt-(?=[a-z0-9_-]{0,19}[A-Z])[A-Za-z0-9_-]{20,}
          | (?:xoxe\.)?xox[abceoprs]-(?:\d{9,}-|\d-[A-Za-z0-9]{20})[A-Za-z0-9-]+ | xapp-\d-[A-Z0-9]{8,}-\d{9,}-\w+  # Slack
          | npm_[A-Za-z0-9]{20,} | pypi-AgE[A-Za-z0-9_-]{16,} | dckr_[po]at_[A-Za-z0-9_-]{20,}
          | dop_v1_[0-9a-f]{32,} | dapi[0-9a-f]{32}(?:-\d)?                        # DigitalOcean, Databricks
          | hv[bs]\.(?:CAESI[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{24,}[A-Za-z0-9_-]*|[A-Za-z0-9_-]{90,})  # Vault
          | (?i:bearer)\s+(?=[A-Za-z+/=._~-]*\d|(?:[^\sa-z]*[a-z][^\sA-Z]*[A-Z]){2}|\S{32})[A-Za-z0-9+/=._~-]{8,}
          | (?i:basic)\s+(?P<user>[A-Za-z0-9+/]{6,})=*                             # base64 of user:password
          | (?<!-)eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*       # a JSON web token
        )
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    | (?<=://)(?:[^/\s:@"'<>]*:[^/\s"'<>]+|[^/\s:@]{8,})(?=@)                      # a password, or a token, in an address
    | (?<=hooks\.slack\.com/)[^\s"']+ | (?<=/api/webhooks/)[^\s"']+                # Slack, Discord
    | (?<=[?&;]sig=)[A-Za-z0-9%+/=_-]{30,}                                         # a signed address of Azure
    """,
    re.VERBOSE,
)
"""As long and unbroken as the keys are: `sk-` also begins Slovak data, and `r8_` a run of rank 8."""
NAMED = re.compile(r"""(?P<name> (?<![\w.-]) [\w.-]+ ) (?P<between> \\* ["']? \s* (?:=(?!=)|:) \s* )""", re.VERBOSE)
SCHEME = re.compile(
    r"(?:(?:token|bearer|basic|digest|apikey|api-key|api-token|key|ssws|splunk|negotiate|oauth|dpop) +)?", re.IGNORECASE
)
VALUE = re.compile(
    r"""\\+"[^"\\\n]*\\+" | "(?:[^"\\\n]|\\.)*" | '[^'\n]*' | (?P<bare> [^\s,;&{}\[\]"'<>]+ )""",
    re.VERBOSE,
)
"""`name=value` and `name: value` inside a text, also `Authorization: token VALUE`."""
APART = re.compile(
    r"""(?<![\w-]) (?P<name> --?[A-Za-z][\w-]* ) ["']?,?[ ]+["']? (?P<value> [^\s"',]+ )
      | (["']) (?P<header> [A-Za-z][\w-]* ) \3,[ ]*b?(["']) (?!-) (?P<second> [^"'\n]+ ) \5""",
    re.VERBOSE,
)
"""`--name value` and `('name', 'value')` inside a text, as in the error of a command that failed."""
_COOKIE, _HEADER = re.compile(r"[\w-]+="), re.compile(r"""[^\n"']*""")
_ARGUMENT = re.compile(r"-{0,2}(?P<name>[\w.-]+)=")
TELLING = re.compile(r"""(?=\S{4}) (?: \S{20} | [^\s\d]*\d | [^\sa-z]*[a-z][^\sA-Z]*[A-Z] | \S*[A-Z]{2}\S*[a-z])""", re.VERBOSE)
"""What no word of a sentence looks like.  `password: nobody` in a prompt stays as it is, `password: hunter2` does not."""
SHORTEST = 6
"""Characters below which the value of an environment variable is too common a text to be looked for."""
LARGE, SENTENCE = 8, 12
"""Digits of a number, and characters of several words, from which on such a value is one."""

FOLDERS = ("PWD", "OLDPWD")
"""The shell's working folders, which are no passwords."""


NO, BY_VALUE, YES = 0, 1, 2
"""Is what has a name a secret?  `BY_VALUE`: if it looks like one."""


def secret_name(name: str) -> bool:
    """True if what has this name is a secret, whatever it is.

    >>> [secret_name(name) for name in ("hf_token", "apiKey", "client-secret2", "eos_token", "max_tokens", "key", "problem_key")]
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
    if last in ("token", "tokens"):
        return YES if not before or before in TOKEN_OF else BY_VALUE
    if last in ("key", "keys"):
        return YES if before in KEY_OF else BY_VALUE
    if last == "pass" or (before, last) in (("connection", "string"), ("conn", "str")):
        return YES
    inside = pairwise(words)  # OPENAI_API_KEY_PROD
    return BY_VALUE if any((one in KEY_OF and two == "key") or (one in TOKEN_OF and two == "token") for one, two in inside) else NO


def _random(value: str) -> bool:
    """True for what only a machine writes: one word with a part of 12 or more letters and digits mixed.

    >>> [_random(text) for text in ("9f8b3c2d1e0a7b6c", "level_of_difficulty_2", "the 1st answer is a")]
    [True, False, False]
    """
    if re.search(r"\s", value):
        return False
    return any(len(part) >= 12 and not part.isalpha() and not part.isdigit() for part in re.split(r"[^A-Za-z0-9]+", value))


def scrubbed(text: str) -> str:
    """A text without what looks like a secret, or is the value of an environment variable that has a secret's name.

    >>> scrubbed("pushed with sk-abcdefghijkl1mnop to https://me:pw@host/")
    'pushed with [redacted] to https://[redacted]@host/'
    """
    return _scrubbed(text, _of_environment())


def _scrubbed(text: str, known: Sequence[str]) -> str:
    """known: the secrets of the environment."""
    for value in known:
        text = text.replace(value, REDACTED)
    text = SHAPES.sub(_hidden, text)
    return APART.sub(_hidden_apart, _without_pairs(text) if "=" in text or ":" in text else text)


def _without_pairs(text: str) -> str:
    """In linear time: a value is read only behind a name that may be a secret's, and not again from a name inside of it."""
    found, done, place, plain = [], 0, 0, 0
    while pair := NAMED.search(text, place):
        place = pair.end()  # what follows may begin with a name itself: https://host?name=value
        start = SCHEME.match(text, place).end()  # type: ignore[union-attr]
        named, end = _named(pair["name"]), 0
        if pair["name"].lower().endswith("cookie") and _COOKIE.match(text, start):  # several, to the end of the header
            end = _HEADER.match(text, start).end()  # type: ignore[union-attr]
        elif named == YES or (named == BY_VALUE and start >= plain):
            value = VALUE.match(text, start) or VALUE.match(text, place)
            if value and _may_be_secret(pair, value[0], named):
                end = value.end()
            elif value and value["bare"] and named == BY_VALUE:
                plain = value.end()
        if end:
            found += [text[done:place], REDACTED]
            done = place = end
    return "".join([*found, text[done:]])


def _hidden_apart(pair: re.Match[str]) -> str:
    name, value = pair["name"] or pair["header"], pair["value"] or pair["second"]
    telling = TELLING.match(value) is not None if pair["name"] else _second(name, value)
    return pair[0].replace(value, REDACTED) if telling and _named(name.lstrip("-")) == YES else pair[0]


def _hidden(shape: re.Match[str]) -> str:
    """In place of what has a secret's shape.  `Basic` before a word stays; before base64 of `user:password` it does not."""
    if (user := shape["user"]) is not None:
        try:
            return REDACTED if ":" in base64.b64decode(user[: len(user) // 4 * 4]).decode() else shape[0]
        except ValueError:
            return shape[0]
    return REDACTED


def _may_be_secret(pair: re.Match[str], given: str, named: int) -> bool:
    """Of a pair inside a text: False for a switch, so many tokens, a share that passes, and the next word of a sentence."""
    value = given.strip("\"'")
    if value.lower() in ("", "true", "false", "null", "none"):
        return False
    if named == BY_VALUE:
        return _random(value)
    if re.fullmatch(r"[\d._]+", value) and _counts(pair["name"], value):
        return False
    return "=" in pair["between"] or value != given or TELLING.match(value) is not None


def _counts(name: str, number: str) -> bool:
    """True for a number that is no secret under a secret's name: of tokens, and a small one or a share under `pass`."""
    last = name.lower()
    return last.endswith(("token", "tokens")) or (last.endswith("pass") and len(number.partition(".")[0]) <= 3)


def redacted(value: Any, name: str = "") -> Any:
    """A copy without secrets: everything under a name that is a secret's (`secret_name`), but true, false and null and, of tokens,
    numbers; and in every text what `scrubbed` takes away.

    >>> redacted({"hub_token": "abc", "max_new_tokens": 8, "url": "https://me:pw@host/", "headers": [["X-Api-Key", "abc"]]})
    {'hub_token': '[redacted]', 'max_new_tokens': 8, 'url': 'https://[redacted]@host/', 'headers': [['X-Api-Key', '[redacted]']]}
    """
    return _redacted(value, _named(name), name, _of_environment())


def _redacted(value: Any, named: int, name: str, known: Sequence[str]) -> Any:
    match value:
        case bool() | None | "":
            return value
        case str():
            return REDACTED if named == YES or (named == BY_VALUE and _random(value)) else _structured(value, known, named)
        case int() | float():
            return REDACTED if named == YES and not _counts(name, str(value)) else value
        case Mapping():
            called = next((value[key] for key in ("name", "key", "header") if isinstance(value.get(key), str)), "")
            return {
                _scrubbed(str(key), known): _redacted(
                    inner, max(named, _named(str(key)), _named(called) if key == "value" else NO), str(key), known
                )
                for key, inner in value.items()
            }
        case list() | tuple():
            return _redacted_list(list(value), named, name, known)
    return value


def _redacted_list(values: list[Any], named: int, name: str, known: Sequence[str]) -> list[Any]:
    """Also of a list of pairs what stands behind a secret's name, of a pair alone if it looks like one, and behind an option."""
    found: list[Any] = []
    for place, value in enumerate(values):
        before = values[place - 1] if place and isinstance(values[place - 1], str) else ""
        option = _named(before.lstrip("-")) if before.startswith("-") and "=" not in before else NO
        if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str) and secret_name(value[0]):
            found.append([_scrubbed(value[0], known), _redacted(value[1], YES, value[0], known)])
        elif len(values) == 2 and isinstance(value, str) and secret_name(before) and _second(before, value):
            found.append(REDACTED)
        else:
            found.append(_redacted(value, max(named, option), name, known))
    return found


def _second(name: str, value: str) -> bool:
    """True if the second of a pair looks like a secret; behind a column's name it may be another column (`user_id2`)."""
    return _random(value) if re.fullmatch(r"[a-z_]+", name) else TELLING.match(value) is not None


def redacted_command(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command without secrets: the values of `name=value` and `name: value`, also inside of mappings and lists,
    and what follows an option with a secret's name.

    >>> redacted_command(["train", "rewards.0.args={api_key: abc, k: 3}", "--hf-token", "abc"])
    ['train', 'rewards.0.args={api_key: [redacted], k: 3}', '--hf-token', '[redacted]']
    """
    found: list[str] = []
    option = NO
    for argument in arguments:
        if option and not argument.startswith("-"):
            found.append(_redacted(argument, option, "", _of_environment()))
            option = NO
            continue
        option = _named(argument.lstrip("-")) if argument.startswith("-") and "=" not in argument else NO
        found.append(_redacted_argument(argument))
    return found


def _redacted_argument(text: str) -> str:
    place = 0
    while pair := _ARGUMENT.match(text, place):  # --task-arg=name=value
        place = pair.end()
        named = _named(pair["name"].lstrip("-"))
        if named == YES or (named == BY_VALUE and _random(text[place:])):  # all of it, also where it is a mapping or holds spaces
            return text[:place] + REDACTED
    return text[:place] + _structured(text[place:], _of_environment())


def _structured(text: str, known: Sequence[str], named: int = NO) -> str:
    """A text without secrets, also where it is a mapping or a list as YAML or JSON writes it."""
    if not text.lstrip().startswith(("{", "[")):
        return _scrubbed(text, known)
    import yaml  # only here: few texts are one

    try:
        given = yaml.safe_load(text)
        kept = _redacted(given, named, "", known)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        return _scrubbed(text, known)
    if kept == given or not isinstance(given, dict | list):
        return _scrubbed(text, known)
    return yaml.safe_dump(kept, default_flow_style=True, sort_keys=False, width=1 << 20).strip().replace(f"'{REDACTED}'", REDACTED)


def _of_environment() -> list[str]:
    """The secrets of this process's environment, longest first."""
    named = ((name, value) for name, value in os.environ.items() if name not in FOLDERS and len(value) >= SHORTEST)
    found = {value for name, value in named if _of_name(name, value) and not _plain(value)}
    return sorted(found, key=len, reverse=True)


def _of_name(name: str, value: str) -> bool:
    """True if a value is a secret's by its name and looks like one: `AUTH_MODE=github` hides no folder of that name."""
    named = _named(name)
    telling = TELLING.match(value) is not None or value.isdigit() or (len(value) >= SENTENCE and " " in value)
    return (named == YES and telling) or (named == BY_VALUE and _random(value))


def _plain(value: str) -> bool:
    """True for what is no secret whatever it is called: a path that is there, a small number, a switch."""
    if value.isdigit():
        return len(value) < LARGE
    return value.lower() in ("enabled", "disabled") or (value.startswith("/") and os.path.exists(value))
