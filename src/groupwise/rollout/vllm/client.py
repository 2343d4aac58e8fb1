"""Plain JSON over HTTP/1.1 to a server that may die, stall or refuse: every failure names the
server and what happened.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

from groupwise.errors import ConfigError, EngineError, PeerError

FRESH = 1.0
"""Seconds for which a connection is used again; a server hangs up on one that is idle (uvicorn
after five).
"""
DEAD = ("EngineCore", "EngineDead")
"""What a server says when the process that computes has ended."""


BUSY = (429, 502, 503, 504)
"""What a server answers that cannot work at the moment, and what stands before one that is not
there yet.
"""


class RefusedRequest(EngineError):
    """A server that answers a request with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """True if the server may answer soon."""
        return self.status in BUSY


class Client:
    """One connection, kept open between calls.  `close` from another thread ends a call that is
    waiting.
    """

    def __init__(self, url: str) -> None:
        """url: `http://host:port`.  Raises ConfigError for anything else."""
        match = re.fullmatch(r"http://([\w.-]+)(?::(\d+))?/?", url)
        host, port = (match[1].lower(), int(match[2] or 80)) if match else ("", 0)
        if not 0 < port < 1 << 16:
            raise ConfigError(f"a server is written http://host:port, got {url!r}")
        self.url = f"http://{host}:{port}"
        self.name = f"the vLLM server at {self.url}"
        self._address = (host, port)
        self._open: http.client.HTTPConnection | None = None
        self._used = 0.0

    def own_address(self) -> str:
        """The address by which the server can reach this process.  Nothing is sent."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(self._address)
            except OSError as error:
                raise PeerError(f"{self.name} {_cause(error, 0.0)}") from error
            return str(probe.getsockname()[0])

    def get(self, path: str, *, timeout: float) -> Any:
        """The answer to GET, read as JSON; None if it is empty."""
        return self._read(path, self._call("GET", path, None, timeout))

    def text(self, path: str, *, timeout: float) -> str:
        """The answer to GET, as it is."""
        return self._call("GET", path, None, timeout).decode(errors="replace")

    def post(
        self,
        path: str,
        body: Any = None,
        *,
        timeout: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The answer to POST, read as JSON; None if it is empty.

        timeout: seconds without a sign of the server; None: whoever calls watches it otherwise.
        Raises PeerError if it is gone or silent, RefusedRequest if it says no, EngineError for an
        answer that is not JSON.
        """
        text = json.dumps({} if body is None else body).encode()
        return self._read(path, self._call("POST", path, text, timeout, headers))

    def order(self, path: str, *, timeout: float) -> None:
        """POST without a body; the answer is not read.  Raises as `post`."""
        self._call("POST", path, b"", timeout)

    def tell(self, path: str, body: Any, *, timeout: float) -> str:
        """The answer to POST, as it is.  Raises as `post`."""
        answer = self._call("POST", path, json.dumps(body).encode(), timeout)
        return answer.decode(errors="replace")

    def _read(self, path: str, text: bytes) -> Any:
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:  # of what is nested too deep
            raise EngineError(
                f"{self.name} answers {path} with what is not JSON: {text[:200]!r}"
            ) from error

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float | None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        sent = dict(headers or {})
        if body:
            sent["Content-Type"] = "application/json"
        if time.monotonic() - self._used > FRESH:
            self.close()
        line = self._open = self._open or http.client.HTTPConnection(
            *self._address, timeout=timeout
        )
        try:
            if line.sock is None:
                line.connect()
            used: socket.socket = line.sock  # type: ignore[assignment]
            used.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            used.settimeout(timeout)
            line.request(method, path, body, sent)
            answer = line.getresponse()
            text = answer.read()
            self._used = time.monotonic()
        except (
            OSError,
            http.client.HTTPException,
            AttributeError,
        ) as error:  # AttributeError: closed by another thread meanwhile
            self.close()
            raise PeerError(f"{self.name} {_cause(error, timeout)} ({method} {path})") from error
        if answer.status != 200:
            answer_text = " ".join(text.decode(errors="replace").split())[:500]
            message = (
                f"{self.name} answers {method} {path} with {answer.status}:"
                f" {answer_text or answer.reason}"
            )
            if any(word in answer_text for word in DEAD):
                raise PeerError(message)
            raise RefusedRequest(message, answer.status)
        return text

    def close(self) -> None:
        """Hang up."""
        line, self._open = self._open, None
        if line is not None:
            if line.sock is not None:
                with contextlib.suppress(OSError):
                    line.sock.shutdown(
                        socket.SHUT_RDWR
                    )  # wakes a thread that waits for an answer; close() would not
            line.close()


def _cause(error: Exception, timeout: float | None) -> str:
    """What happened, as the end of a sentence about the server."""
    match error:
        case ConnectionRefusedError():
            return (
                "does not exist: the connection is refused; start one with `groupwise serve MODEL`"
            )
        case TimeoutError():
            return f"has given no answer for {timeout:.0f} s"
        case socket.gaierror():
            return "has a name that no address is known for"
        case ConnectionError() | http.client.HTTPException():
            return f"broke the connection off ({type(error).__name__}): it was ended or killed"
    return f"cannot be reached ({error})"
