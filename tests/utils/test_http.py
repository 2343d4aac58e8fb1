"""The server of the viewer, the endpoint and Tinker: who may ask, what arrives too slowly, and too many at once."""

from __future__ import annotations

import socket
import threading
import time
from http import HTTPStatus

import pytest

from groupwise.errors import ConfigError
from groupwise.utils.http import Handler, Refused, Server

WAIT = 30.0


class Hello(Handler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"hi")
        self.drop_body()

    def do_POST(self) -> None:
        self.await_body(int(self.headers["Content-Length"]))
        self.do_GET()


def line(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)


def ended(one: socket.socket) -> bool:
    """True when the server has closed the connection, whatever it has answered before."""
    while one.recv(4096):
        pass
    return True


HALVES = [b"", b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf"]


@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_does_not_arrive_ends_its_connection(half):
    with Server("127.0.0.1", 0, Hello, seconds=0.1) as server, line(server) as one:
        one.sendall(half)
        assert ended(one)


@pytest.mark.slow
def test_a_request_that_trickles_has_no_more_time():
    with Server("127.0.0.1", 0, Hello, seconds=0.5) as server, line(server) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        over = threading.Event()
        threading.Thread(target=lambda: ended(one) and over.set(), daemon=True).start()
        for _ in range(int(WAIT / 0.05)):
            if over.wait(0.05):
                break
            try:
                one.sendall(b"x")  # more often than any limit on silence
            except OSError:
                break
        assert over.wait(WAIT)


def test_half_requests_leave_no_thread():
    with Server("127.0.0.1", 0, Hello, seconds=0.3) as server:
        before = threading.active_count()
        lines = [line(server) for _ in range(40)]
        for one in lines:
            one.sendall(b"GET / HTTP/1.1\r\n")
        for one in lines:
            assert ended(one)
            one.close()
        end = time.monotonic() + WAIT
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() <= before


def test_the_time_of_a_request_begins_with_each():
    with Server("127.0.0.1", 0, Hello, seconds=WAIT) as server, line(server) as one:
        for _ in range(3):
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(4096).endswith(b"hi")
        one.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody")
        assert one.recv(4096).endswith(b"hi")
        one.sendall(b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /")
        assert ended(one)


def test_too_many_connections_are_closed_at_once():
    with Server("127.0.0.1", 0, Hello, connections=2, seconds=WAIT) as server:
        lines = [line(server) for _ in range(2)]
        for one in lines:
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert one.recv(4096)
        with line(server) as third:
            assert ended(third)
        for one in lines:
            one.close()


def test_a_port_that_cannot_be_is_told():
    for port in (99999, -1):
        with pytest.raises(ConfigError, match="another port"):
            Server("127.0.0.1", port, Hello)


class Guarded(Handler):
    """Answers as the servers do that a program asks."""

    def do_POST(self) -> None:
        try:
            self.check_address()
            self.check_no_page()
            self.await_body(self.length_of_body(8))
        except Refused as refused:
            self.send_answer(refused.status, str(refused).encode(), "text/plain")
            return
        self.send_answer(HTTPStatus.OK, b"hi", "text/plain")

    do_GET = do_POST


ASKED = {
    "as it should be": (b"/", b"Host: LocalHost:PORT\r\nContent-Length: 4\r\n", 200),
    "the same length twice": (b"/", b"Host: localhost:PORT\r\nContent-Length: 4\r\nContent-Length: 4\r\n", 200),
    "an address that is as long as it may be": (b"/" + b"x" * 2047, b"Host: localhost:PORT\r\nContent-Length: 4\r\n", 200),
    "an address that is longer": (b"/" + b"x" * 2048, b"Host: localhost:PORT\r\nContent-Length: 4\r\n", 414),
    "no host": (b"/", b"Content-Length: 4\r\n", 421),
    "a host of another port": (b"/", b"Host: localhost\r\nContent-Length: 4\r\n", 421),
    "the host of another site": (b"/", b"Host: evil.example:PORT\r\nContent-Length: 4\r\n", 421),
    "a page": (b"/", b"Host: localhost:PORT\r\nOrigin: http://localhost:PORT\r\nContent-Length: 4\r\n", 403),
    "a page without an origin": (b"/", b"Host: localhost:PORT\r\nSec-Fetch-Site: same-origin\r\nContent-Length: 4\r\n", 403),
    "no length": (b"/", b"Host: localhost:PORT\r\n", 411),
    "two lengths": (b"/", b"Host: localhost:PORT\r\nContent-Length: 4\r\nContent-Length: 5\r\n", 411),
    "a length with a sign": (b"/", b"Host: localhost:PORT\r\nContent-Length: +4\r\n", 411),
    "chunks": (b"/", b"Host: localhost:PORT\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n", 411),
    "too long a body": (b"/", b"Host: localhost:PORT\r\nContent-Length: 9\r\n", 413),
    "a length of many digits": (b"/", b"Host: localhost:PORT\r\nContent-Length: " + b"9" * 4400 + b"\r\n", 413),
}


@pytest.mark.parametrize("case", ASKED)
def test_who_may_ask_and_how_much(case):
    path, headers, status = ASKED[case]
    with Server("127.0.0.1", 0, Guarded) as server, line(server) as one:
        headers = headers.replace(b"PORT", b"%d" % server.port)
        one.sendall(b"POST " + path + b" HTTP/1.1\r\n" + headers + b"\r\nbody")
        assert one.recv(4096).split(b" ")[1] == b"%d" % status


def test_a_host_is_checked_where_only_this_machine_may_ask():
    with Server("0.0.0.0", 0, Guarded) as server, line(server) as one:
        one.sendall(b"POST / HTTP/1.1\r\nHost: a.name.of.this.machine\r\nContent-Length: 4\r\n\r\nbody")
        assert one.recv(4096).endswith(b"hi")
