"""The policy over HTTP, for agent harnesses and environments that ask for its turns: token ids, or
messages in the form of three APIs.

| route | what |
|---|---|
| `POST .../inference/v1/generate` | token ids in; ids, log-probs, version out (vLLM's form) |
| `POST .../v1/chat/completions` | messages in, a message out (OpenAI's form) |
| `POST .../v1/messages`, `.../count_tokens` | the same in Anthropic's form (`messages_api`) |
| `POST .../v1/responses` | the same in OpenAI's Responses form (`responses_api`) |
| `GET .../v1/models` | the model's name and `max_model_len` |
| `GET /health` | an empty object |

`...` is `/episodes/ID`: every request belongs to one episode.  A client that takes only a key, or
the name of a model, brings the episode's id as that.

On a loopback address, requests must name a host of this machine (DNS rebinding) and must not come
from a browser's page; on any other address each must bring the token as well, or an episode's id.
One thread waits for each request (`utils.http`); threads that wait cost nothing.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import urlsplit

from groupwise.data.sources import too_deep
from groupwise.environments import messages_api, responses_api
from groupwise.environments.chat_codec import ChatCodec, ChatResponse, ServedTurn
from groupwise.environments.harness import Ending, OutsideHarness, reward_of
from groupwise.environments.requests import (
    ChatRequest,
    SampledTokens,
    TurnRequest,
    error_body,
    event_stream,
    read_chat_request,
    read_token_request,
    token_answer,
)
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.utils.http import Handler, Refused, Server, is_loopback
from groupwise.utils.json_text import finite, half_character, no_number
from groupwise.utils.terminal import logger

log = logger(__name__)

LARGEST = 32 << 20
"""Bytes of a request's body."""
POLL_SECONDS = 0.5
"""Seconds between two looks whether a client that waits is still there."""
TOO_DEEP = "the body is not JSON that can be read: it is nested too deeply"
SESSIONS = ("x-claude-code-session-id", "session-id", "x-session-id")
"""Headers in which agents name their session."""
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
"""Paths whose clients read errors in Anthropic's form."""


class RequestedEpisode(Protocol):
    """An episode that clients ask for turns; its methods raise Refused."""

    codec: ChatCodec

    def render(self, request: ChatRequest) -> TurnRequest:
        """Return the turn that a chat request asks for."""
        ...

    def draw(self, request: TurnRequest) -> Future[SampledTokens]:
        """Queue a turn for the engine."""
        ...

    def respond(self, request: ChatRequest, thinking: bool, sampled: SampledTokens) -> ChatResponse:
        """Return the turn as a message, and record it.   thinking: it began in a think block."""
        ...


class Endpoint(Server):
    """The server.  Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self,
        find: Callable[[str], RequestedEpisode | None],
        *,
        name: str,
        context: int,
        vocabulary: int,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        episodes: OutsideHarness | None = None,
    ) -> None:
        """find: returns the session of an episode id, or None.   name: of the model.   context:
        most tokens of a sequence.
        port: 0 takes a free one.   token: that requests must bring, needed where others reach the
            address.   episodes: those that harnesses in other processes fetch.

        Raises ConfigError for a port that is taken, and for an address that others reach without a
        token.
        """
        self.find, self.name, self.context, self.vocabulary = find, name, context, vocabulary
        self.token, self.episodes, self.begun = token, episodes, int(time.time())
        if not is_loopback(host) and not token:
            raise ConfigError(
                f"{host} is reached from other machines: give a token that requests must bring, or"
                " take 127.0.0.1"
            )
        self._warned: set[str] = set()
        super().__init__(host, port, _EndpointHandler)

    def warn_of(self, keys: Sequence[str], api: str) -> None:
        """Warn of keys in the body of a request that nobody knows, of each once."""
        for key in keys:
            if key not in self._warned:
                self._warned.add(key)
                log.warning("%s: the unknown parameter %r is ignored", api, key[:80])

    @property
    def url(self) -> str:
        """Where clients find it, without a path."""
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        elif ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}"


class _EndpointHandler(Handler):
    server: Endpoint

    def do_GET(self) -> None:
        self._serve({"/health": lambda _: {}, "/v1/models": self._models})

    def do_POST(self) -> None:
        self._serve(
            {
                "/v1/chat/completions": self._chat,
                "/v1/messages": self._messages,
                "/v1/messages/count_tokens": self._count_tokens,
                "/v1/responses": self._responses,
                "/inference/v1/generate": self._generate,
                "/episodes": self._claim,
                "/end": self._report,
            }
        )

    def _serve(self, routes: Mapping[str, Callable[[str | None], Any]]) -> None:
        """Answer a request by its path, or say what is wrong with it."""
        self._body: Any = None
        try:
            self.check_address()
            self.check_no_page()
            episode, path = self._where()
            self._check_token(episode)
            if self.command == "POST":
                self._body = self._read()
            if path not in routes:
                raise Refused(f"there is no {self.command} {path}", HTTPStatus.NOT_FOUND)
            answer = routes[path](episode)
        except Refused as refused:
            self._refuse(refused)
            return
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # one bad request must not take the server away
            log.exception("%s %s failed", self.command, self.path)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._refuse(Refused(f"{type(error).__name__}: {error}", status))
            return
        if isinstance(answer, bytes):
            self.send_answer(HTTPStatus.OK, answer, "text/event-stream")
        else:
            self._send(HTTPStatus.NO_CONTENT if answer is None else HTTPStatus.OK, answer)

    # ---- who asks, and for what

    def _where(self) -> tuple[str | None, str]:
        """The episode that a request belongs to, and the path behind it."""
        path = urlsplit(self.path).path
        parts = path.split("/", 3)
        if parts[:2] == ["", "episodes"] and len(parts) == 4:
            return parts[2], f"/{parts[3]}"
        key = self._key()
        return (key if key and self.server.find(key) is not None else None), path

    def _key(self) -> str:
        """The key that a client brings, as OpenAI's or as Anthropic's clients do."""
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return key.strip()
        return self.headers.get("x-api-key", "").strip()

    def _check_token(self, episode: str | None) -> None:
        """Refuses who brings neither the server's token nor, as key, the id of the episode that is
        asked for.
        """
        if self.server.token is None:
            return
        key, known = self._key().encode(), [self.server.token.encode()]
        if episode is not None and self.server.find(episode) is not None:
            known.append(episode.encode())
        if not any(secrets.compare_digest(key, one) for one in known):
            raise Refused(
                "bring the server's token: Authorization: Bearer TOKEN",
                HTTPStatus.UNAUTHORIZED,
                code="invalid_api_key",
            )

    def _read(self) -> Mapping[str, Any]:
        """The body, a JSON object.  Raises Refused."""
        length = self.length_of_body(LARGEST)
        if self.headers.get_content_type() != "application/json":
            raise Refused(
                "the body must be JSON (Content-Type: application/json)",
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            )
        data = self.await_body(length)
        try:
            body = json.loads(data.decode(), parse_constant=no_number, parse_float=finite)
        except RecursionError:
            raise Refused(TOO_DEEP) from None
        except ValueError as error:
            raise Refused(f"the body is not JSON: {error}") from None
        if not isinstance(body, Mapping):
            raise Refused("the body must be a JSON object")
        if too_deep(body):
            raise Refused(TOO_DEEP)
        if b"\\u" in data and (half := half_character(body)):
            raise Refused(f"the body cannot be read: {half} is half of a character")
        return body

    # ---- routes

    def _models(self, episode: str | None) -> Any:
        if episode is not None:
            self._episode(episode)
        model = {
            "id": self.server.name,
            "object": "model",
            "created": self.server.begun,
            "owned_by": "groupwise",
        }
        return {"object": "list", "data": [model | {"max_model_len": self.server.context}]}

    def _generate(self, episode: str | None) -> Any:
        session = self._episode(episode)
        context, sampling = read_token_request(
            self._body, vocabulary=self.server.vocabulary, eos_ids=session.codec.eos_ids
        )
        sampled = self._wait(session.draw(TurnRequest(context, sampling)))
        return token_answer(f"generate-{secrets.token_hex(8)}", sampled)

    def _chat(self, episode: str | None) -> Any:
        session = self._episode(episode)
        turn = self._served(session, read_chat_request(self._body))
        answer = chat_answer(turn, session.codec)
        if not turn.request.stream:
            return answer
        return as_stream(answer, usage=turn.request.stream_options.include_usage)

    def _messages(self, episode: str | None) -> Any:
        session = self._episode(episode)
        turn = self._served(session, messages_api.read_messages_request(self._body))
        answer = messages_api.messages_answer(turn)
        if not turn.request.stream:
            return answer
        return event_stream(messages_api.message_events(answer))

    def _count_tokens(self, episode: str | None) -> Any:
        request = messages_api.read_messages_request(self._body)
        turn = self._episode(episode).render(self._noted(request))
        return {"input_tokens": int(turn.context.size)}

    def _responses(self, episode: str | None) -> Any:
        session = self._episode(episode)
        turn = self._served(session, responses_api.read_responses_request(self._body))
        answer = responses_api.responses_answer(turn, self._body)
        if not turn.request.stream:
            return answer
        return event_stream(responses_api.response_events(answer))

    def _served(self, session: RequestedEpisode, request: ChatRequest) -> ServedTurn:
        """The turn that answers a request with messages, recorded."""
        turn = session.render(self._noted(request))
        sampled = self._wait(session.draw(turn))
        response = session.respond(request, turn.thinking, sampled)
        reasoning = session.codec.reasoning_tokens(sampled, response)
        return ServedTurn(request, int(turn.context.size), sampled, response, reasoning)

    def _noted(self, request: ChatRequest) -> ChatRequest:
        """The request with the session that its header names; warns of what nobody knows."""
        self.server.warn_of(request.unknown, urlsplit(self.path).path.rpartition("/v1/")[2])
        for name in SESSIONS:
            request.agent = request.agent or self.headers.get(name, "")
        return request

    def _claim(self, episode: str | None) -> Any:
        if self.server.episodes is None or episode is not None:
            raise Refused("no episodes are given away here", HTTPStatus.NOT_FOUND)
        return self.server.episodes.claim(10.0, lambda: not self.hung_up())

    def _report(self, episode: str | None) -> Any:
        if self.server.episodes is None or episode is None:
            raise Refused("no episodes are given away here", HTTPStatus.NOT_FOUND)
        reward, failure = self._body.get("reward"), self._body.get("failure") or ""
        if not isinstance(failure, str):
            raise Refused("failure must be a string", param="failure")
        ending = EnvironmentFailure(failure) if failure else _ending(reward)
        self.server.episodes.report(episode, ending)
        return {}

    def _episode(self, episode: str | None) -> RequestedEpisode:
        """The episode that a request belongs to, by its address, its key or its model.  Raises
        Refused.
        """
        model = None if self._body is None else self._body.get("model")
        name = episode if episode is not None else model if isinstance(model, str) else None
        session = None if name is None else self.server.find(name)
        if session is None:
            where = (
                "requests must name their episode: /episodes/ID/v1/..."
                if episode is None
                else "it is over, or never was one"
            )
            raise Refused(
                f"there is no such episode: {where}", HTTPStatus.NOT_FOUND, code="episode_over"
            )
        return session

    def _wait(self, sampled: Future[SampledTokens]) -> SampledTokens:
        """What is being drawn.  Raises ConnectionError if the client hangs up before; what nobody
        waits for is not begun.
        """
        while True:
            try:
                return sampled.result(timeout=POLL_SECONDS)
            except NotYet:
                if self.hung_up():
                    sampled.cancel()
                    raise ConnectionAbortedError("the client has closed the connection") from None

    # ---- answers

    def _refuse(self, refused: Refused) -> None:
        """Send an error in the form of the API that was asked for."""
        path = urlsplit(getattr(self, "path", "")).path
        body = messages_api.error_body if path.endswith(MESSAGES) else error_body
        self._send(refused.status, body(refused))

    def _send(self, status: HTTPStatus, body: Any) -> None:
        data = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
        self.send_answer(status, data, "application/json", headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself: lines that are no HTTP, unknown methods."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._refuse(Refused(message or status.phrase, status))


def _ending(reward: Any) -> Ending:
    """Return the ending with this reward.  Raises Refused for what is no finite number or null."""
    try:
        if isinstance(reward, bool):
            raise TypeError
        return Ending(reward_of(reward))
    except (TypeError, EnvironmentFailure):
        raise Refused("reward must be a finite number or null", param="reward") from None


def chat_answer(turn: ServedTurn, codec: ChatCodec) -> dict[str, Any]:
    """Return what `POST /v1/chat/completions` answers.  Log-probs are of all tokens, those of a
    stop string among them.
    """
    request, sampled, response = turn.request, turn.sampled, turn.response
    choice: dict[str, Any] = {
        "index": 0,
        "message": dict(response.message),
        "finish_reason": response.finish_reason,
        "logprobs": None,
    }
    if request.logprobs:
        entries = []
        for token, logp in zip(sampled.tokens, sampled.logp, strict=True):
            text = codec.decode([token])
            entries.append(
                {
                    "token": text,
                    "logprob": float(logp),
                    "bytes": list(text.encode()),
                    "top_logprobs": [],
                }
            )
        choice["logprobs"] = {"content": entries, "refusal": None}
    written = len(sampled.tokens)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"version-{sampled.version}",
        "choices": [choice],
        "usage": {
            "prompt_tokens": turn.context,
            "completion_tokens": written,
            "total_tokens": turn.context + written,
            "completion_tokens_details": {"reasoning_tokens": turn.reasoning},
        },
    }


def as_stream(answer: Mapping[str, Any], *, usage: bool) -> bytes:
    """Return an answer as server-sent events.   usage: a last event has the token counts."""
    head = {
        "id": answer["id"],
        "object": "chat.completion.chunk",
        "created": answer["created"],
        "model": answer["model"],
        "system_fingerprint": answer["system_fingerprint"],
    }
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": place, **call} for place, call in enumerate(delta["tool_calls"])
        ]
    message = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    end = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    chunks = [{**head, "choices": [message]}, {**head, "choices": [end]}]
    if usage:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return (
        b"".join(
            b"data: " + json.dumps(chunk, allow_nan=False).encode() + b"\n\n" for chunk in chunks
        )
        + b"data: [DONE]\n\n"
    )
