"""The HTTP server that the viewer, the endpoint and the Tinker server share: the standard
library's, with limits of time and number.

A request must arrive within `Server.seconds` of its connection's being ready for it, however slowly
it trickles.  A body that the handler does not read is never taken for the next request: the
connection ends with the answer.

A server on a loopback address answers requests that name a host of this machine: a page of another
site may reach it under a name of its own (DNS rebinding).  What else a handler refuses it raises as
`Refused`.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import select
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from groupwise.errors import ConfigError
from groupwise.utils import threads
from groupwise.utils.terminal import logger

log = logger(__name__)

NOTICED = 0.05
"""Seconds within which a server notices that it is to stop."""
DRAINED = 8 << 20
"""Bytes of an unread body that are dropped behind the answer, so that a client that is still
sending hears it.
"""


NO_HEADERS: Mapping[str, str] = MappingProxyType({})
RESET = 50
"""Milliseconds that the reset of a client that has gone is waited for."""


class Refused(Exception):
    """A request that is answered with an error.  Codes from 400 on that OpenAI's client does not
    send again by itself.
    """

    def __init__(
        self,
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        *,
        param: str | None = None,
        code: str = "",
    ) -> None:
        """param: the parameter that is wrong.   code: for programs."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Server(ThreadingHTTPServer):
    """One thread for each connection, at most `connections` at a time.  Use it as a context
    manager, or `start` and `close`.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[Handler],
        *,
        connections: int = 2048,
        seconds: float = 30.0,
    ) -> None:
        """port: 0 takes a free one.   connections: further ones are closed at once.   seconds: for
        a request to arrive, and for its answer to be taken.   Raises ConfigError for an address
        that cannot be listened on.
        """
        self.seconds = seconds
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = threading.BoundedSemaphore(connections)
        self._serving = False
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{host}:{port} cannot be listened on ({error}); name another port, or 0 for any"
            ) from error
        self.host, self.port = host, int(self.server_address[1])
        self.local = is_loopback(host)
        self.hosts = {
            f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]", host, f"[{host}]")
        }
        """What the header Host of this machine's clients may say."""

    def start(self) -> Any:
        """Serve in a thread; returns the server."""
        self._serving = True
        threads.begin(lambda: self.serve_forever(NOTICED), type(self).__name__.lower())
        return self

    def close(self) -> None:
        """Stop serving; harmless if called again."""
        if self._serving:
            self._serving = False
            self.shutdown()
        self.server_close()

    def __enter__(self) -> Any:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, as long as there are not too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no event."""
        log.debug("a request ended early", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One connection.  A subclass has `do_GET` ... as usual, calls `check_address` first,
    `await_body` before it reads a body, and `drop_body` when it has answered."""

    server: Server
    server_version, sys_version = "groupwise", ""
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    longest_address = 2048
    """Characters of an address."""

    def setup(self) -> None:
        """Read under a time limit."""
        super().setup()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """The next request of the connection, within the limit."""
        self._incoming.deadline = time.monotonic() + self.server.seconds
        self.has_body = self._probed = False
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Unless its body is read, the connection ends with the request."""
        if not super().parse_request():
            return False
        lengths = self.headers.get_all("Content-Length", [])
        self.has_body = "Transfer-Encoding" in self.headers or any(
            length.strip() != "0" for length in lengths
        )
        self._keep = not self.close_connection
        self.close_connection |= self.has_body
        self.connection.settimeout(self.server.seconds)  # of the answer
        return True

    def check_address(self) -> None:
        """Raise Refused for an overlong address, and for the name of another host where only this
        machine may ask.
        """
        if len(self.path) > self.longest_address:
            raise Refused("the address is too long", HTTPStatus.REQUEST_URI_TOO_LONG)
        if self.server.local and self.headers.get("Host", "").lower() not in self.server.hosts:
            raise Refused("the request names another host", HTTPStatus.MISDIRECTED_REQUEST)

    def check_no_page(self) -> None:
        """Raise Refused for a request that a browser sends for a page."""
        site = self.headers.get("Sec-Fetch-Site", "none")
        if self.headers.get("Origin") is not None or site != "none":
            raise Refused("web pages are not served", HTTPStatus.FORBIDDEN)

    def length_of_body(self, largest: int) -> int:
        """Return the bytes that the body will have.  largest: that are read.   Raises Refused for
        a request that does not say, and for more.
        """
        lengths = self.headers.get_all("Content-Length", [])
        length = lengths[0] if len(set(lengths)) == 1 else ""
        if self.headers.get("Transfer-Encoding") or not length.isascii() or not length.isdigit():
            raise Refused(
                "the length of the body must be given (Content-Length)", HTTPStatus.LENGTH_REQUIRED
            )
        if len(length) > 12 or int(length) > largest:
            raise Refused(
                f"the body has {length[:20]} bytes; at most {largest} are read",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        return int(length)

    def await_body(self, length: int) -> bytes:
        """The body, as many bytes as the request has announced.  Raises ConnectionError if the
        client ends earlier.
        """
        self._incoming.deadline = time.monotonic() + self.server.seconds
        data = self.rfile.read(length)
        if len(data) < length:
            raise ConnectionError("the client has closed the connection within its request")
        self.connection.settimeout(self.server.seconds)
        self.has_body, self.close_connection = False, not self._keep
        return data

    def drop_body(self) -> None:
        """Read on for a moment: a client that is still sending would lose the answer with the
        connection.
        """
        self.wfile.flush()
        if not self.has_body:
            return
        left, end = DRAINED, time.monotonic() + 1.0
        self.connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            while left > 0 and time.monotonic() < end and (data := self.connection.recv(1 << 16)):
                left -= len(data)

    def send_answer(
        self, status: HTTPStatus, data: bytes, kind: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> None:
        """Send an answer that no client may keep.  kind: of the data.   headers: further ones."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)
        self.drop_body()

    def hung_up(self) -> bool:
        """Return True if the client has gone: it closed its connection, not only its half of it.

        Both look the same until something is sent.  So the first time the client is sent a status
        that HTTP/1.1 has it skip: a client that has gone answers with a reset.
        """
        look = select.poll()  # select() knows no descriptors above 1023
        look.register(self.connection, select.POLLIN)
        try:
            if not look.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b"":
                return False
            if (
                not self._probed and self.request_version != "HTTP/1.0"
            ):  # which knows no such status
                self._probed = True
                self.send_response_only(HTTPStatus.CONTINUE)
                self.end_headers()
                self.wfile.flush()
            look.modify(self.connection, 0)  # errors alone
            return bool(look.poll(RESET))
        except OSError:
            return True

    def log_message(self, format: str, *arguments: object) -> None:
        """For those who debug."""
        log.debug(format, *arguments)


class _Incoming(io.RawIOBase):
    """What a client sends, up to a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.deadline = connection, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if (left := self.deadline - time.monotonic()) <= 0.0:
            raise TimeoutError("the request took too long to arrive")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


def is_loopback(host: str) -> bool:
    """True if nobody but this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
