"""The policy over HTTP, for agent harnesses and environments that ask for its turns: token ids, or OpenAI's chat messages.

| route | what |
|---|---|
| `POST .../inference/v1/generate` | token ids in; ids, log-probs and the version of the weights out (vLLM's form) |
| `POST .../v1/chat/completions` | messages in, a message out (OpenAI's form) |
| `GET .../v1/models` | the model's name and `max_model_len` |
| `GET /health` | an empty object |

`...` is empty, or `/episodes/ID` in a training run: everything that is asked for there belongs to one episode.  A client that can
only be told a key, or the name of a model, brings the episode's id as that.

On a loopback address, requests must name a host of this machine (DNS rebinding) and must not come from a browser's page; on any
other address each must bring the token as well, or an episode's id.  One thread waits for each request (`utils.http`); threads that
wait cost nothing.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from groupwise.environments.chat_tokens import Asking, Speech, Told
from groupwise.environments.requests import (
    Asked,
    ChatRequest,
    Refused,
    SampledTokens,
    read_chat_request,
    read_token_request,
    token_answer,
)
from groupwise.errors import ConfigError
from groupwise.utils.http import Handler, Server, is_loopback
from groupwise.utils.terminal import logger

log = logger(__name__)

LARGEST = 32 << 20
"""Bytes of a request's body."""
POLL_SECONDS = 0.5
"""Seconds between two looks whether a client that waits is still there."""
LONGEST = 2048
"""Characters of an address."""


class Line(Protocol):
    """Answers the requests of one episode, or those that belong to none."""

    speech: Speech

    def ask(self, request: ChatRequest) -> Asking:
        """What a chat request's turn is drawn behind.  Raises Refused."""
        ...

    def draw(self, context: np.ndarray, asked: Asked, asking: Asking | None = None) -> Future[Sequence[SampledTokens]]:
        """Completions behind ids; they may fail with Refused.  asking: of a chat request.  Raises Refused."""
        ...

    def tell(self, request: ChatRequest, asking: Asking, drawn: SampledTokens) -> Told:
        """A turn as a message."""
        ...


class Desk(Protocol):
    """The queue from which harnesses in other processes take episodes, and to which they report the end."""

    def claim(self, seconds: float, there: Callable[[], bool]) -> Mapping[str, Any] | None:
        """The next episode, as JSON; None if there is none within so many seconds.  Raises Refused where the run queues none.

        there: False once the process that asked has hung up; it is given none then.
        """
        ...

    def report(self, episode: str, reward: float | None, failure: str) -> None:
        """The end of an episode.  Raises Refused for one that nobody has claimed."""
        ...


class Endpoint(Server):
    """The server.  Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self,
        find: Callable[[str | None], Line | None],
        *,
        name: str,
        context: int,
        vocabulary: int,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        desk: Desk | None = None,
    ) -> None:
        """find: returns the `Line` of an episode id (None: requests of no episode), or None.   name: of the model.   context: most
        tokens of a sequence.   port: 0 takes a free one.   token: that requests must bring, needed where others reach the address.

        Raises ConfigError for a port that is taken, and for an address that others reach without a token.
        """
        self.find, self.name, self.context, self.vocabulary = find, name, context, vocabulary
        self.token, self.desk, self.local, self.begun = token, desk, is_loopback(host), int(time.time())
        if not self.local and not token:
            raise ConfigError(f"{host} is reached from other machines: give a token that requests must bring, or take 127.0.0.1")
        super().__init__(host, port, _Handler)

    @property
    def url(self) -> str:
        """Where clients find it, without a path."""
        everywhere = self.host in ("0.0.0.0", "::", "")
        host = socket.gethostname() if everywhere else f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class _Handler(Handler):
    server: Endpoint

    def do_GET(self) -> None:
        self._serve({"/health": lambda _: {}, "/v1/models": self._models})

    def do_POST(self) -> None:
        self._serve(
            {
                "/v1/chat/completions": self._chat,
                "/inference/v1/generate": self._generate,
                "/episodes": self._claim,
                "/end": self._report,
            }
        )

    def _serve(self, routes: Mapping[str, Callable[[str | None], Any]]) -> None:
        """Answer a request by its path, or say what is wrong with it."""
        self._body: Any = None
        try:
            self._check_origin()
            episode, path = self._where()
            self._check_token(episode)
            if self.command == "POST":
                self._body = self._read()
            if path not in routes:
                raise Refused(f"there is no {self.command} {path}", HTTPStatus.NOT_FOUND)
            found = routes[path](episode)
        except Refused as refused:
            self._send(refused.status, refused.body())
            return
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # one bad request must not take the server away
            log.exception("%s %s failed", self.command, self.path)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._send(status, Refused(f"{type(error).__name__}: {error}", status).body())
            return
        if isinstance(found, bytes):
            self._write(HTTPStatus.OK, found, "text/event-stream")
        else:
            self._send(HTTPStatus.NO_CONTENT if found is None else HTTPStatus.OK, found)

    # ---- who asks, and for what ----------------------------------------------------------------------------------------------

    def _check_origin(self) -> None:
        """Refuses other hosts' names, web pages, and overlong addresses."""
        if len(self.path) > LONGEST:
            raise Refused("the address is too long", HTTPStatus.REQUEST_URI_TOO_LONG)
        if self.server.local and self.headers.get("Host", "").lower() not in self.server.hosts:
            raise Refused("the request names another host", HTTPStatus.MISDIRECTED_REQUEST)
        if self.headers.get("Origin") is not None or self.headers.get("Sec-Fetch-Site", "none") != "none":
            raise Refused("web pages are not served", HTTPStatus.FORBIDDEN)

    def _where(self) -> tuple[str | None, str]:
        """The episode that a request belongs to, and the path behind it."""
        path = urlsplit(self.path).path
        parts = path.split("/", 3)
        if parts[:2] == ["", "episodes"] and len(parts) == 4:
            return parts[2], f"/{parts[3]}"
        key = self._key()
        return (key if key and self.server.find(key) is not None else None), path

    def _key(self) -> str:
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else ""

    def _check_token(self, episode: str | None) -> None:
        """Refuses who brings neither the server's token nor, as key, the id of the episode that is asked for."""
        if self.server.token is None:
            return
        given, known = self._key().encode(), [self.server.token.encode()]
        if episode is not None and self.server.find(episode) is not None:
            known.append(episode.encode())
        if not any(secrets.compare_digest(given, one) for one in known):
            raise Refused("bring the server's token: Authorization: Bearer TOKEN", HTTPStatus.UNAUTHORIZED, code="invalid_api_key")

    def _read(self) -> Mapping[str, Any]:
        """The body, a JSON object.  Raises Refused."""
        lengths = self.headers.get_all("Content-Length", [])
        length = lengths[0] if len(set(lengths)) == 1 else ""
        if self.headers.get("Transfer-Encoding") or not length.isascii() or not length.isdigit():
            raise Refused("the length of the body must be given (Content-Length)", HTTPStatus.LENGTH_REQUIRED)
        if len(length) > 12 or int(length) > LARGEST:
            raise Refused(f"the body has {length[:20]} bytes; at most {LARGEST} are read", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if self.headers.get_content_type() != "application/json":
            raise Refused("the body must be JSON (Content-Type: application/json)", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        data = self.await_body(int(length))
        try:
            body = json.loads(data, parse_constant=_no_number)
        except RecursionError:
            raise Refused("the body is not JSON that can be read: it is nested too deeply") from None
        except ValueError as error:
            raise Refused(f"the body is not JSON: {error}") from None
        if not isinstance(body, Mapping):
            raise Refused("the body must be a JSON object")
        if b"\\u" in data:
            try:
                json.dumps(body, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                raise Refused(f"the body cannot be read: {half!a} is half of a character") from None
        return body

    # ---- routes --------------------------------------------------------------------------------------------------------------

    def _models(self, episode: str | None) -> Any:
        if episode is not None:
            self._line(episode)
        model = {"id": self.server.name, "object": "model", "created": self.server.begun, "owned_by": "groupwise"}
        return {"object": "list", "data": [model | {"max_model_len": self.server.context}]}

    def _generate(self, episode: str | None) -> Any:
        line = self._line(episode)
        request = read_token_request(
            self._body, vocabulary=self.server.vocabulary, eos_ids=line.speech.eos_ids, session=self._session
        )
        return token_answer(f"generate-{secrets.token_hex(8)}", self._wait(line.draw(request.context, request.asked)))

    def _chat(self, episode: str | None) -> Any:
        line = self._line(episode)
        request = read_chat_request(self._body, session=self._session)
        asking = line.ask(request)
        drawn = self._wait(line.draw(asking.context, request.asked, asking))
        told = [line.tell(request, asking, one) for one in drawn]
        answer = chat_answer(request, asking, drawn, told, line.speech)
        return as_stream(answer, usage=request.usage) if request.stream else answer

    def _claim(self, episode: str | None) -> Any:
        if self.server.desk is None or episode is not None:
            raise Refused("no episodes are given away here", HTTPStatus.NOT_FOUND)
        return self.server.desk.claim(10.0, lambda: not self.hung_up())

    def _report(self, episode: str | None) -> Any:
        if self.server.desk is None or episode is None:
            raise Refused("no episodes are given away here", HTTPStatus.NOT_FOUND)
        reward, failure = self._body.get("reward"), self._body.get("failure") or ""
        if isinstance(reward, bool) or not isinstance(reward, int | float | None) or not isinstance(failure, str):
            raise Refused("reward must be a number or null, failure a string", param="reward")
        self.server.desk.report(episode, None if reward is None else float(reward), failure)
        return {}

    @property
    def _session(self) -> str:
        return str(self.headers.get("X-Session-ID", ""))

    def _line(self, episode: str | None) -> Line:
        model = None if self._body is None else self._body.get("model")
        if episode is None and isinstance(model, str) and self.server.find(model) is not None:
            episode = model
        line = self.server.find(episode)
        if line is not None and episode is None and model is not None and model != self.server.name:
            raise Refused(
                f"there is no model {model!r:.200}: {self.server.name!r} is served here", HTTPStatus.NOT_FOUND, param="model",
                code="model_not_found",
            )  # fmt: skip
        if line is None:
            where = "requests must name their episode: /episodes/ID/v1/..." if episode is None else "it is over, or never was one"
            raise Refused(f"there is no such episode: {where}", HTTPStatus.NOT_FOUND, code="episode_over")
        return line

    def _wait(self, drawn: Future[Sequence[SampledTokens]]) -> Sequence[SampledTokens]:
        """What is being drawn.  Raises ConnectionError if the client hangs up before; what nobody waits for is not begun."""
        while True:
            try:
                return drawn.result(timeout=POLL_SECONDS)
            except NotYet:
                if self.hung_up():
                    drawn.cancel()
                    raise ConnectionAbortedError("the client has closed the connection") from None
            except CancelledError:
                raise Refused("the server is closing", HTTPStatus.GONE) from None

    # ---- answers -------------------------------------------------------------------------------------------------------------

    def _send(self, status: HTTPStatus, body: Any) -> None:
        self._write(status, b"" if body is None else json.dumps(body, allow_nan=False).encode(), "application/json")

    def _write(self, status: HTTPStatus, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.drop_body()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself: lines that are no HTTP, unknown methods."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._send(status, Refused(message or status.phrase, status).body())


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def chat_answer(
    request: ChatRequest, asking: Asking, drawn: Sequence[SampledTokens], told: Sequence[Told], speech: Speech
) -> dict[str, Any]:
    """What `POST /v1/chat/completions` answers.  Log-probs are of all tokens, those of a stop string among them."""
    choices = []
    for place, (one, turn) in enumerate(zip(drawn, told, strict=True)):
        choice: dict[str, Any] = {
            "index": place,
            "message": dict(turn.message),
            "finish_reason": turn.finish_reason,
            "logprobs": None,
        }
        if request.logprobs:
            entries = []
            for token, logp in zip(one.tokens, one.logp, strict=True):
                text = speech.decode([token])
                entries.append({"token": text, "logprob": float(logp), "bytes": list(text.encode()), "top_logprobs": []})
            choice["logprobs"] = {"content": entries, "refusal": None}
        choices.append(choice)
    context, written = int(asking.context.size), sum(len(one.tokens) for one in drawn)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"version-{drawn[0].version}",
        "choices": choices,
        "usage": {"prompt_tokens": context, "completion_tokens": written, "total_tokens": context + written},
    }


def as_stream(answer: Mapping[str, Any], *, usage: bool) -> bytes:
    """The same as server-sent events, all at once.  usage: with a last event of the token counts."""
    head = {"id": answer["id"], "object": "chat.completion.chunk", "created": answer["created"], "model": answer["model"]}
    chunks: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        delta, index = dict(choice["message"]), choice["index"]
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        said = {"index": index, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        chunks += [{**head, "choices": [said]}, {**head, "choices": [end]}]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return b"".join(b"data: " + json.dumps(chunk, allow_nan=False).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
