"""Environments behind OpenEnv's WebSocket: its messages are spoken here, its package is not needed.

A session is one connection: `{"type": "reset", "data": {...}}` and `{"type": "step", "data":
ACTION}` are answered by `{"type": "observation", "data": {"observation": {...}, "reward": ...,
"done": ...}}`, or by `{"type": "error", ...}`.

Needs the extra `openenv`.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from groupwise.environments.schemas import is_kind, kinds_of
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.utils.built_in import built_in

LARGEST = 16 << 20
"""Bytes of one message."""
POLICYS = ("INVALID_JSON", "VALIDATION_ERROR", "EXECUTION_ERROR")
"""Errors that an action may cause; all others are the environment's."""
FULL = "CAPACITY_REACHED"


@built_in("openenv")
class OpenEnv:
    """One session, in the form of an environment with `reset` and `step`.

    What the policy writes is the action: a JSON object, or the text of the action's only required
    field.
    """

    def __init__(self, url: str = "", *, field: str | None = None, seconds: float = 30.0) -> None:
        """url: `ws://host:port`, where a server answers at `/ws`.   field: of the action, that a
        text which is no JSON object goes into; default: the only one that the server's schema
        requires.   seconds: for one answer, and for a free session.

        Raises ConfigError for another kind of address, or without the extra.
        """
        parts = urlsplit(str(url))
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ConfigError(
                "the address of an OpenEnv server (environment.openenv, or environment.args.url)"
                f" is written ws://host:port, got {url!r}"
            )
        try:
            from websockets.sync.client import connect
        except ImportError as error:
            raise ConfigError(
                f"openenv needs a package: pip install websockets ({error})"
            ) from error
        base = parts.path.rstrip("/").removesuffix("/ws")
        self.url = urlunsplit((parts.scheme, parts.netloc, f"{base}/ws", parts.query, ""))
        self._schema = urlunsplit(
            ("https" if parts.scheme == "wss" else "http", parts.netloc, f"{base}/schema", "", "")
        )
        self._connect, self._field, self._seconds = connect, field, seconds
        self._kinds: list[str] | None = None
        """The JSON types of the field that a text goes into; None: not asked for yet."""
        self._line: Any = None

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin with the row's column `reset`, a mapping, or with its `seed`.  Raises
        EnvironmentFailure.
        """
        options = row.get("reset") or ({"seed": row["seed"]} if row.get("seed") is not None else {})
        if not isinstance(options, Mapping):
            raise EnvironmentFailure(
                f"the column reset holds {options!r:.80}: expected a mapping, what OpenEnv's reset"
                " takes"
            )
        until, pause = time.monotonic() + self._seconds, 0.05
        while True:
            kind, data = self._ask("reset", dict(options))
            if kind == "observation":
                return self._read(data)[0]
            self.close()
            if data.get("code") != FULL or time.monotonic() + pause > until:
                raise EnvironmentFailure(
                    f"{self.url} does not begin an episode: {_message_in(data)}"
                )
            time.sleep(pause)  # other episodes have all sessions; one of them ends
            pause = min(2 * pause, 1.0)

    def step(self, text: str) -> tuple[str, Any, bool]:
        """Observation, reward, whether it is over.  An action that the environment refuses is told.
        Raises EnvironmentFailure.
        """
        kind, data = self._ask("step", self._action(text))
        if kind == "observation":
            return self._read(data)
        if data.get("code") in POLICYS:
            return f"error: {_message_in(data)}", None, False
        raise EnvironmentFailure(f"{self.url} does not go on: {_message_in(data)}")

    def close(self) -> None:
        """End the session."""
        line, self._line = self._line, None
        if line is not None:
            with suppress(Exception):  # it has ended already
                line.send(json.dumps({"type": "close"}))
            line.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The answer to a message: its type and its data."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            if self._line is None:
                self._line = self._connect(
                    self.url, open_timeout=self._seconds, max_size=LARGEST, proxy=None
                )
            with suppress(
                ConnectionClosed
            ):  # a full server may have said so and hung up: that is read below
                self._line.send(json.dumps({"type": kind, "data": data}))
            message = json.loads(self._line.recv(timeout=self._seconds))
        except TimeoutError as error:
            raise EnvironmentFailure(
                f"{self.url} has given no answer to {kind} for {self._seconds:g} s"
            ) from error
        except (OSError, WebSocketException, ValueError) as error:
            raise EnvironmentFailure(f"{self.url}: {kind} failed: {error}") from error
        if not isinstance(message, Mapping) or not isinstance(message.get("data"), Mapping):
            raise EnvironmentFailure(
                f"{self.url} answers {kind} with {message!r:.200}: is it an OpenEnv server?"
            )
        return str(message.get("type")), message["data"]

    def _action(self, text: str) -> dict[str, Any]:
        """Return what the policy wrote as an action: an object, or the value of one field."""
        body = text.strip()
        if body.startswith("```") and body.endswith("```") and "\n" in body:
            body = body[body.index("\n") : -3].strip()
        try:
            written = json.loads(body)
        except (ValueError, RecursionError):
            written = body
        if isinstance(written, dict):
            return written
        if self._kinds is None:
            self._field, self._kinds = self._text_field()
        field = str(self._field)
        if "string" not in self._kinds and any(is_kind(kind, written) for kind in self._kinds):
            return {field: written}
        return {field: body}

    def _text_field(self) -> tuple[str, list[str]]:
        """Return the name and the JSON types of the field that a text goes into.

        A server whose schema cannot be read gets the text as it is in a field that was named.
        Raises EnvironmentFailure where no field was named.
        """
        try:
            schema = self._action_schema()
        except (OSError, ValueError, LookupError, TypeError) as error:
            if self._field is not None:
                return self._field, ["string"]
            raise EnvironmentFailure(
                f"{self._schema} does not say what an action is ({error}): set"
                " environment.args.field"
            ) from error
        required = schema.get("required", [])
        if self._field is None and len(required) != 1:
            raise EnvironmentFailure(
                f"an action of {self.url} needs {required}: let the policy write JSON, or set"
                " environment.args.field"
            )
        name = str(required[0]) if self._field is None else self._field
        fields = schema.get("properties") or {}
        return name, kinds_of(fields.get(name), schema)

    def _action_schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of an action.

        Raises OSError, ValueError, LookupError and TypeError.
        """
        # No proxy: the address is the user's own, and a session would not go through one either.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._schema, timeout=self._seconds) as answer:
            schema = json.loads(answer.read(LARGEST))["action"]
        if not isinstance(schema, Mapping):
            raise TypeError(f"action is {schema!r:.80}, expected a JSON schema")
        return schema

    def _read(self, data: Mapping[str, Any]) -> tuple[str, Any, bool]:
        """Return the observation as text, the reward as it was sent, and whether it is over."""
        observation = data.get("observation", data)
        if isinstance(observation, Mapping):
            shown = {
                key: value
                for key, value in observation.items()
                if key not in ("done", "reward", "metadata")
            }
            texts = [value for value in shown.values() if isinstance(value, str)]
            text = (
                texts[0] if len(shown) == len(texts) == 1 else json.dumps(shown, ensure_ascii=False)
            )
        else:
            text = str(observation)
        return text, data.get("reward"), bool(data.get("done"))


def _message_in(data: Mapping[str, Any]) -> str:
    return f"{data.get('message', data)}"[:500]
