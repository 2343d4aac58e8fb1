"""The routes of the Tinker SDK 0.38 that train, sample and save.

| route | what |
|---|---|
| `POST .../client/config`, `.../client/dynamic_config` | settings of the client |
| `POST .../create_session`, `.../session_heartbeat`, `.../sessions/ID/finish` | one client |
| `GET .../get_server_capabilities`, `.../healthz` | the model that is here |
| `POST .../create_model`, `.../get_info` | a model to train |
| `POST .../forward_backward`, `.../optim_step` | its gradient, and a step |
| `POST .../save_weights`, `.../save_weights_for_sampler`, `.../load_weights` | checkpoints |
| `POST .../create_sampling_session`, `.../asample`, `GET .../samplers/ID` | completions |
| `POST .../retrieve_future` | the result of a request, once it is there |
| `POST .../telemetry` | is answered, and not kept |

`...` is `/api/v1`.  Every other route is refused by name.

On a loopback address requests must name a host of this machine and must not come from a browser's
page; on any other address each must bring the server's token as its key.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from groupwise.errors import ConfigError
from groupwise.tinker.bodies import (
    CreateModelBody,
    CreateSamplerBody,
    LoadBody,
    ModelBody,
    NumberedBody,
    OptimStepBody,
    PromiseBody,
    SampleBody,
    SaveBody,
    SaveForSamplerBody,
    SessionBody,
    read_body,
)
from groupwise.tinker.service import TinkerService
from groupwise.utils.http import Handler, Refused, Server, is_loopback
from groupwise.utils.terminal import logger

log = logger(__name__)

ROOT = "/api/v1"
LARGEST = 64 << 20
"""Bytes of a request's body; the SDK splits batches at 5 MB."""
WAITING = 40.0
"""Seconds that a request for a result is held; the SDK waits for 45."""
CLIENT = {"sample_max_concurrent_requests": 512}
"""Settings of the client: each request that waits has a connection."""
KEY = "tml-"
"""What a key of the SDK begins with."""
PROTOBUF, JSON = "application/x-protobuf", "application/json"


class TinkerServer(Server):
    """The server.  Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self, service: TinkerService, *, host: str = "127.0.0.1", port: int = 0, token: str = ""
    ) -> None:
        """port: 0 takes a free one.   token: what requests must bring as their key, needed where
        others reach the address.

        Raises ConfigError for a port that is taken, and for a token that is missing or that the SDK
        would not send.
        """
        self.service, self.token = service, token
        if not is_loopback(host) and not token:
            raise ConfigError(
                f"{host} is reached from other machines: give a token that requests must bring"
                " (GROUPWISE_TINKER_TOKEN), or take 127.0.0.1"
            )
        if token and not token.startswith(KEY):
            raise ConfigError(f"the token must begin with {KEY}: the SDK sends no other key")
        super().__init__(host, port, _TinkerHandler)


class _TinkerHandler(Handler):
    server: TinkerServer

    def do_GET(self) -> None:
        self._serve(
            {
                "/get_server_capabilities": self._capabilities,
                "/healthz": lambda _: {"status": "ready"},
            }
        )

    def do_POST(self) -> None:
        self._serve(
            {
                "/asample": self._sample,
                "/client/config": lambda _: CLIENT,
                "/client/dynamic_config": lambda _: {},
                "/create_model": self._create_model,
                "/create_sampling_session": self._create_sampler,
                "/create_session": lambda _: self.server.service.create_session(),
                "/forward_backward": self.server.service.forward_backward,
                "/get_info": self._get_info,
                "/load_weights": self._load_weights,
                "/optim_step": self._optim_step,
                "/retrieve_future": self._retrieve,
                "/save_weights": self._save_weights,
                "/save_weights_for_sampler": self._save_for_sampler,
                "/session_heartbeat": self._heartbeat,
                "/telemetry": lambda _: {"status": "accepted"},
            }
        )

    def _serve(self, routes: Mapping[str, Callable[[bytes], Any]]) -> None:
        """Answer a request by its path, or say what is wrong with it."""
        body = b""
        try:
            self.check_address()
            self.check_no_page()
            self._check_token()
            path = urlsplit(self.path).path
            if self.command == "POST":
                body = self._read(path)
            answer = self._route(path, routes)(body)
        except Refused as refused:
            self._leave_out(body)
            self._refuse(str(refused), refused.status)
            return
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # one bad request must not take the server away
            log.exception("%s %s failed", self.command, self.path)
            self._refuse(f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        if isinstance(answer, bytes):
            self.send_answer(HTTPStatus.OK, answer, PROTOBUF)
        else:
            self.send_answer(HTTPStatus.OK, json.dumps(answer).encode(), JSON)

    # ---- who asks, and for what

    def _check_token(self) -> None:
        """Refuse who does not bring the server's token."""
        key = self.headers.get("X-API-Key", "").strip()
        if self.server.token and not secrets.compare_digest(
            key.encode(), self.server.token.encode()
        ):
            raise Refused("bring the server's token as TINKER_API_KEY", HTTPStatus.UNAUTHORIZED)

    def _route(
        self, path: str, routes: Mapping[str, Callable[[bytes], Any]]
    ) -> Callable[[bytes], Any]:
        """Return what answers a path.  Raises Refused for one that is not offered."""
        place = path.removeprefix(ROOT)
        if path.startswith(ROOT) and place in routes:
            return routes[place]
        parts = place.split("/")
        if self.command == "POST" and parts[1:2] == ["sessions"] and parts[3:] == ["finish"]:
            return lambda _: self.server.service.finish(parts[2])
        if self.command == "GET" and parts[1:2] == ["samplers"] and len(parts) == 3:
            return lambda _: self.server.service.samplers.describe(parts[2])
        raise Refused(
            f"{self.command} {path[:200]} is not offered by groupwise serve --tinker",
            HTTPStatus.NOT_FOUND,
        )

    def _read(self, path: str) -> bytes:
        """Return the body.  Raises Refused for a size or a type that is not read."""
        length = self.length_of_body(LARGEST)
        kind = PROTOBUF if path == f"{ROOT}/forward_backward" else JSON
        encoding = self.headers.get("Content-Encoding", "identity")
        if self.headers.get_content_type() != kind or encoding != "identity":
            raise Refused(
                f"the body must be {kind}, and not compressed", HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            )
        return self.await_body(length)

    def _leave_out(self, body: bytes) -> None:
        """Take the place of a refused request among those of its model, if its body says it."""
        if self.headers.get_content_type() != JSON:
            return
        try:
            self.server.service.leave_out(read_body(NumberedBody, body))
        except Refused:
            return

    # ---- routes

    def _capabilities(self, _: bytes) -> Any:
        service = self.server.service
        model = {
            "model_name": service.name,
            "max_context_length": service.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def _heartbeat(self, body: bytes) -> Any:
        return self.server.service.heartbeat(read_body(SessionBody, body).session_id)

    def _create_model(self, body: bytes) -> Any:
        return self.server.service.create_model(read_body(CreateModelBody, body))

    def _get_info(self, body: bytes) -> Any:
        return self.server.service.get_info(read_body(ModelBody, body).model_id)

    def _optim_step(self, body: bytes) -> Any:
        return self.server.service.optim_step(read_body(OptimStepBody, body))

    def _save_weights(self, body: bytes) -> Any:
        return self.server.service.save_weights(read_body(SaveBody, body))

    def _save_for_sampler(self, body: bytes) -> Any:
        return self.server.service.save_for_sampler(read_body(SaveForSamplerBody, body))

    def _load_weights(self, body: bytes) -> Any:
        return self.server.service.load_weights(read_body(LoadBody, body))

    def _create_sampler(self, body: bytes) -> Any:
        return self.server.service.create_sampler(read_body(CreateSamplerBody, body))

    def _sample(self, body: bytes) -> Any:
        return self.server.service.samplers.sample(read_body(SampleBody, body))

    def _retrieve(self, body: bytes) -> Any:
        return self.server.service.retrieve(read_body(PromiseBody, body).request_id, WAITING)

    # ---- answers

    def _refuse(self, message: str, status: HTTPStatus) -> None:
        """Send an error in the form that the SDK shows to its user."""
        self.send_answer(status, json.dumps({"detail": message}).encode(), JSON)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send what the standard library refuses by itself: lines that are no HTTP, unknown
        methods.
        """
        self.close_connection = True
        status = HTTPStatus(code)
        self._refuse(message or status.phrase, status)
