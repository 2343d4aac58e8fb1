"""Who is answered and who is not; and that the viewer needs no torch."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from groupwise.errors import ConfigError
from groupwise.viewer import server
from groupwise.viewer.pages import Pages
from groupwise.viewer.server import Viewer
from groupwise.viewer.sources import open_sources

Start = Callable[..., Viewer]


def get(viewer: Viewer, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {
        "Host": f"127.0.0.1:{viewer.port}",
        **{key.replace("_", "-"): value for key, value in headers.items()},
    }.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def test_pages_carry_a_strict_policy(viewer: Start, run_folder: Path) -> None:
    own = viewer(run_folder)
    for path in ("/", "/static/app.js", "/static/app.css", "/api/runs", "/nothing"):
        _, headers, _ = get(own, path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';"), policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Access-Control-Allow-Origin"] is None
        assert "Python" not in headers["Server"]


def test_nothing_reads_on_behind_a_viewer_that_is_closed(run_folder: Path) -> None:
    own = Viewer(Pages(open_sources([run_folder]))).start()
    get(own, "/api/runs")
    own.close()
    assert all(index._reading is None or index._reading.done() for index in own.pages.indexes)


def test_the_page_names_no_other_host(viewer: Start, run_folder: Path) -> None:
    own = viewer(run_folder)
    for path in own.files:
        status, _, body = get(own, path)
        assert status == 200
        if "vendor" not in path:
            text = body.decode().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text, path
            assert "https://" not in text, path


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil.example"])
def test_other_host_names_are_refused(viewer: Start, run_folder: Path, host: str) -> None:
    """A page that has its own name point here (DNS rebinding) may not read anything."""
    assert get(viewer(run_folder), "/api/runs", Host=host)[0] == 421


def test_loopback_names_are_answered(viewer: Start, run_folder: Path) -> None:
    own = viewer(run_folder)
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert get(own, "/api/runs", Host=f"{name}:{own.port}")[0] == 200


def test_requests_from_other_sites_are_refused(viewer: Start, run_folder: Path) -> None:
    own = viewer(run_folder)
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ):
        assert get(own, "/api/runs", **headers)[0] == 403, headers
    assert get(own, "/api/runs", Origin=f"http://127.0.0.1:{own.port}", Sec_Fetch_Site="same-origin")[0] == 200
    assert get(own, "/", Sec_Fetch_Site="cross-site")[0] == 200, "a link in a mail may open the application"


def test_web_sockets_and_other_methods_are_refused(viewer: Start, run_folder: Path) -> None:
    own = viewer(run_folder)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert get(own, "/api/runs", method)[0] == 501, method
    status, headers, _ = get(own, "/api/runs", Connection="Upgrade", Upgrade="websocket", Origin="http://evil.example")
    assert status == 403
    assert headers["Upgrade"] is None


@pytest.mark.parametrize("path", ["http://[", "/api/runs?" + "&".join(f"a{i}=1" for i in range(65))])
def test_what_is_no_address_is_answered_too(viewer: Start, run_folder: Path, path: str) -> None:
    assert get(viewer(run_folder), path)[0] == 400


@pytest.mark.parametrize("number", ["x", "1.5", "nan"])
def test_a_number_that_is_none_is_no_other(viewer: Start, run_folder: Path, number: str) -> None:
    """A mistyped run is not the first one."""
    status, _, body = get(viewer(run_folder), f"/api/curves?run={number}")
    assert status != 200
    assert f"run is '{number}'" in json.loads(body)["error"]


PATHS = [
    "/../config.yaml", "/static/../../pages.py", "/static/..%2f..%2fpages.py", "/static/%2e%2e/pages.py", "/static/%252e%252e/x",
    "/static//etc/passwd", "//etc/passwd", "/etc/passwd", "/static/..\\..\\pages.py", "/static/app.js%00.html", "/static/",
    "/config.yaml", "/rollouts/000001.parquet", "/api/../config.yaml", "/api/", "/api/__class__", "/api/answer", "/api/sources",
    "/static/./app.js", "/file:///etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_address_is_a_path(viewer: Start, run_folder: Path, path: str) -> None:
    status, _, body = get(viewer(run_folder), path)
    assert status == 404
    assert b"root:" not in body
    assert b"import" not in body


@pytest.mark.parametrize(
    "query", ["run=9", "run=-1", "run=0&step=x&group=1", "run=0&step=1&group=77", "run=0&step=1", "run=1e9", "run=nan"]
)
def test_what_is_not_there_is_said_and_not_guessed(viewer: Start, run_folder: Path, query: str) -> None:
    status, _, body = get(viewer(run_folder), f"/api/group?{query}")
    assert status == 422
    assert json.loads(body)["error"]


def test_a_link_out_of_the_folder_is_only_a_damaged_step(viewer: Start, made, tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "linked", 2)
    (folder / "rollouts/000003.parquet").symlink_to("/etc/passwd")
    status, _, body = get(viewer(folder), "/api/step?run=0&step=3")
    assert status == 422
    assert b"root:" not in body


def test_a_taken_port_is_an_error_that_says_what_to_do(viewer: Start, run_folder: Path) -> None:
    own = viewer(run_folder)
    with pytest.raises(ConfigError, match="another port"):
        Viewer(Pages(open_sources([run_folder])), own.port)


def test_it_listens_on_the_loopback_interface_only(viewer: Start, run_folder: Path) -> None:
    assert viewer(run_folder).server_address[0] == "127.0.0.1"


def test_the_viewer_imports_no_torch() -> None:
    code = (
        "import sys, groupwise.viewer.report, groupwise.viewer.server; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'tokenizers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_request_that_does_not_come_has_an_end(run_folder: Path, viewer: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half a request, nor one that comes a byte at a time, nor a connection without one holds a thread."""
    monkeypatch.setattr(server, "PATIENCE", 0.2)
    port, before = viewer(run_folder).port, threading.active_count()
    sockets = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(40)]
    for i, one in enumerate(sockets):
        one.sendall(b"GET /api/runs HTTP/1.1\r\nHost: 127" if i % 2 else b"")
    for one in sockets:
        while one.recv(4096):  # closed by the server
            pass
        one.close()
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


@pytest.mark.parametrize("head", ["Content-Length: {}", "Transfer-Encoding: chunked"])
def test_a_body_is_no_second_request(head: str, run_folder: Path, viewer: Start) -> None:
    port = viewer(run_folder).port
    inner = f"GET /api/config?run=0 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
    outer = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{head.format(len(inner))}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
        one.sendall((outer + inner).encode())
        answer = b""
        while part := one.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens inside, nobody waits for the process for ever."""
    try:
        yield
    finally:
        process.kill()


def test_the_command_serves_and_ends_with_control_c(run_folder: Path) -> None:
    import signal

    command = [sys.executable, "-m", "groupwise", "view", str(run_folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ended(process):
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        port = int(address.rsplit(":", 1)[1].strip("/"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/runs")
        assert json.loads(connection.getresponse().read())["runs"][0]["name"] == "alpha"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
