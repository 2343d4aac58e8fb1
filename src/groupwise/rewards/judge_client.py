"""Calls of a judge: retried, counted, within a budget, and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from groupwise.errors import ConfigError, RewardError
from groupwise.utils.terminal import escaped

Read = TypeVar("Read")

REFUSED = (401, 403, 404)
"""Statuses that no retry mends: the key, the address or the model is wrong."""
UNREAD = (ValueError, KeyError, TypeError, IndexError)
"""What reading an answer of another form raises."""
LARGEST = 8 << 20
"""Bytes of an answer that are read."""
LONGEST_TEXT = 1 << 16
"""Characters of an answer, its last ones, in which its JSON is looked for."""
WAIT = 0.5
"""Seconds before the first retry; each further one waits twice as long."""
LONGEST_WAIT = 20.0
PROBE = 10.0
"""Seconds for the question whether a server is there."""
LONGEST_PAUSE = 120.0
"""Seconds that a server can ask for by `Retry-After`: a step does not wait for hours."""


class JudgeFailed(Exception):
    """A call had no answer that can be used."""


class BudgetSpent(JudgeFailed):
    """No further call may be made for these groups."""


class Budget:
    """What may be spent on groups, and has been spent."""

    def __init__(self, *, calls: int | None = None, tokens: int | None = None) -> None:
        """calls, tokens: limits for one group."""
        self._calls, self._tokens = calls, tokens
        self._lock = threading.Lock()
        self.begin(1)

    def begin(self, groups: int) -> None:
        """Begin to judge so many groups, which share their limits."""
        self._groups = groups
        self.calls_made = self.tokens_read = self.tokens_written = self.cached = self.failed = 0
        self.seconds = 0.0
        """Seconds of all calls together."""

    def take(self) -> None:
        """Count a call that is to be made.  Raises BudgetSpent where no further one may be."""
        with self._lock:
            tokens = self.tokens_read + self.tokens_written
            if self._calls is not None and self.calls_made >= self._groups * self._calls:
                raise BudgetSpent(f"calls_per_group: {self._calls} is reached")
            if self._tokens is not None and tokens >= self._groups * self._tokens:
                raise BudgetSpent(f"tokens_per_group: {self._tokens} is reached")
            self.calls_made += 1

    def spend(self, usage: Mapping[str, Any], seconds: float) -> None:
        """Count what a call used."""
        with self._lock:
            self.tokens_read += _count(usage.get("prompt_tokens"))
            self.tokens_written += _count(usage.get("completion_tokens"))
            self.seconds += seconds

    def count(self, *, cached: int = 0, failed: int = 0) -> None:
        """Count answers that were known, and questions without an answer."""
        with self._lock:
            self.cached += cached
            self.failed += failed


def _count(number: Any) -> int:
    return number if isinstance(number, int) and number > 0 else 0


class JudgeClient:
    """A server with OpenAI's chat completions."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None,
        seconds: float,
        retries: int,
        options: Mapping[str, Any],
        cache: str | None,
    ) -> None:
        self._base = url.rstrip("/")
        self._url, self._model, self._key = f"{self._base}/chat/completions", model, key
        self._seconds, self._retries, self._options = seconds, retries, dict(options)
        self._known = None if cache is None else _KeptAnswers(cache)
        self._schemas = True
        """Whether the server takes a JSON schema, as far as is known."""
        self._closed = threading.Event()
        self._pause_ends = 0.0
        """When the server takes calls again, by the clock of `time.monotonic`."""
        self.last_failure = "none was made"

    def close(self) -> None:
        """Make no further call, and close the file of answers."""
        self._closed.set()
        if self._known is not None:
            self._known.close()

    def reach_server(self) -> None:
        """Ask the server for its list of models.  Raises ConfigError if it does not answer.

        An answer that refuses the question is one, too: not every server has the list.
        """
        try:
            urllib.request.urlopen(f"{self._base}/models", timeout=PROBE).close()
        except urllib.error.HTTPError as error:
            error.close()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"the reward 'judge': nothing answers at {self._base}"
                f" ({getattr(error, 'reason', None) or error}). Start the judge first, for example"
                " by `groupwise serve MODEL --port PORT` in another terminal, or correct the"
                " reward's url"
            ) from None

    def ask(
        self,
        prompt: str,
        schema: Mapping[str, Any],
        read: Callable[[Any], Read],
        budget: Budget,
    ) -> Read:
        """Return what `read` makes of the answer's JSON.

        Raises JudgeFailed after the last retry or where the budget is spent; RewardError where no
        retry can help.
        """
        name = json.dumps([self._url, self._model, self._options, prompt])
        text = None if self._known is None else self._known.find(name)
        if text is not None:
            with contextlib.suppress(*UNREAD):  # a file that another program has changed
                value = read(_json_in(text))
                budget.count(cached=1)
                return value
        why = ""
        try:
            for attempt in range(self._retries + 1):
                self._wait(attempt)
                if self._closed.is_set():
                    raise JudgeFailed("the judge was closed")
                text = ""
                try:
                    text = self._call(prompt, schema, budget)
                    value = read(_json_in(text))
                except BudgetSpent:
                    raise
                except JudgeFailed as error:
                    why = str(error)
                    continue
                except UNREAD as error:
                    why = f"{type(error).__name__}: {error}; the answer: {text[-200:]!r}"
                    continue
                if self._known is not None:
                    self._known.keep(name, text)
                return value
            raise JudgeFailed(why)
        except JudgeFailed as error:
            budget.count(failed=1)
            self.last_failure = escaped(str(error), keep="")[:300]
            raise JudgeFailed(self.last_failure) from None

    def _wait(self, attempt: int) -> None:
        """Wait before a retry, and until the server takes calls again."""
        wait = self._pause_ends - time.monotonic()
        if attempt:
            wait = max(wait, min(WAIT * 2 ** (attempt - 1), LONGEST_WAIT))
        if wait > 0.0:
            self._closed.wait(wait)

    def _call(self, prompt: str, schema: Mapping[str, Any], budget: Budget) -> str:
        """Return the text of an answer.  Raises JudgeFailed, or RewardError."""
        body = {"model": self._model, "messages": [{"role": "user", "content": prompt}]}
        body |= self._options
        if self._schemas:
            body["response_format"] = schema
        status, said = self._post(body, budget)
        if status in (400, 422) and "response_format" in body:
            del body["response_format"]
            status, said = self._post(body, budget)
            if status == 200:  # the schema was what it did not take
                self._schemas = False
        if status in REFUSED:
            raise RewardError(
                f"the judge at {self._url} answers {status}: {str(said)[:200]}; check the reward's"
                " url, model and the environment variable that key names"
            )
        if status != 200:
            raise JudgeFailed(f"{self._url} answers {status}: {str(said)[:200]}")
        try:
            budget.spend(said.get("usage") or {}, 0.0)
            return str(said["choices"][0]["message"]["content"])
        except (AttributeError, KeyError, IndexError, TypeError):
            raise JudgeFailed(f"{self._url}: no answer in {str(said)[:200]}") from None

    def _post(self, body: Mapping[str, Any], budget: Budget) -> tuple[int, Any]:
        budget.take()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                status, data = answer.status, _within(answer, began + self._seconds)
        except urllib.error.HTTPError as error:
            with error:
                status, data = error.code, error.read(LARGEST)
            pause = min(seconds_until(error.headers.get("Retry-After")), LONGEST_PAUSE)
            self._pause_ends = max(self._pause_ends, time.monotonic() + pause)
        except (OSError, http.client.HTTPException) as error:
            raise JudgeFailed(f"{self._url}: {error or type(error).__name__}") from None
        finally:
            budget.spend({}, time.monotonic() - began)
        try:
            return status, json.loads(data)
        except (ValueError, RecursionError):
            return status, data.decode(errors="replace")


def seconds_until(retry_after: str | None) -> float:
    """Return the seconds in a header `Retry-After`, which holds a number or a date (RFC 9110).

    >>> seconds_until("7"), seconds_until("Wed, 21 Oct 2015 07:28:00 GMT"), seconds_until(None)
    (7.0, 0.0, 0.0)
    """
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return 0.0
    if not seconds > 0.0:
        return 0.0
    return seconds


def _within(answer: Any, deadline: float) -> bytes:
    """Read an answer that may trickle.  Raises JudgeFailed behind the deadline."""
    data = bytearray()
    while part := answer.read1(1 << 16):
        data += part
        if time.monotonic() > deadline:
            raise JudgeFailed("the answer took too long")
        if len(data) > LARGEST:
            raise JudgeFailed("the answer is too long")
    return bytes(data)


class _KeptAnswers:
    """Answers of the judge in a file of SQLite, by a digest of the question."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError for a file that is none of ours."""
        self._lock = threading.Lock()
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (question TEXT PRIMARY KEY, answer TEXT)"
            )
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the reward 'judge' cannot keep answers in {path}: {error}"
            ) from None

    def find(self, question: str) -> str | None:
        """Return the answer to a question; None if it is not known, or cannot be read now."""
        found = None
        with self._lock, contextlib.suppress(sqlite3.Error):
            found = self._file.execute(
                "SELECT answer FROM answers WHERE question = ?", (_digest(question),)
            ).fetchone()
        return None if found is None else str(found[0])

    def keep(self, question: str, answer: str) -> None:
        """Keep an answer.  A file that cannot be written keeps none, and costs a call later."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._file.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (_digest(question), answer)
            )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()


def _json_in(text: str) -> Any:
    """Return the last JSON object in a text.  Raises ValueError where there is none.

    >>> _json_in('I think {so}: {"better": "a"}.')
    {'better': 'a'}
    """
    decoder = json.JSONDecoder()
    text = text[-LONGEST_TEXT:]
    found = None
    place = text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    if found is None:
        raise ValueError("the answer holds no JSON")
    return found
