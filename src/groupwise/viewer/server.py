"""The pages over HTTP, to browsers on this machine and to nobody else.

It listens on the loopback interface, answers GET only, and serves a fixed list of its own files: no
address is ever turned into a path.  A request that names another host (DNS rebinding) or comes from
another site's page is refused, and the pages may load and send nothing but what comes from here:
what a completion says cannot run, and if it did it could not get out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from groupwise.errors import DataError
from groupwise.utils.http import Handler, Refused, Server
from groupwise.utils.terminal import logger
from groupwise.viewer.pages import Pages
from groupwise.viewer.sources import open_sources

log = logger(__name__)

SCRIPTS = ("vendor/uPlot.iife.min.js", "base.js", "tokens.js", "charts.js", "views.js", "app.js")
"""Scripts of the application, in the order in which they are run."""
STYLES = ("vendor/uPlot.min.css", "app.css")
TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".txt": "text/plain",
    ".svg": "image/svg+xml",
    ".csv": "text/csv",
}
DRAWN, TABLE = "/figure.svg", "/figure.csv"
"""Where a curve is saved from."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src"
    " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
PATIENCE = 10.0
"""Seconds in which a request must have come; a connection that waits for its next one is closed,
too.
"""
SMALL = 1400
"""Bytes that fit into one packet and are not worth compressing."""


def asset(name: str) -> bytes:
    """A file of the application."""
    return (resources.files("groupwise.viewer") / "static" / name).read_bytes()


def page() -> str:
    """The application's page, which loads its scripts and styles."""
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">\n' for name in STYLES)
    scripts = "".join(f'<script defer src="/static/{name}"></script>\n' for name in SCRIPTS)
    return (
        asset("index.html")
        .decode()
        .replace("<!--styles-->", styles)
        .replace("<!--scripts-->", scripts)
    )


class Viewer(Server):
    """The server of one set of pages.  Use it as a context manager, or call `close`."""

    def __init__(self, pages: Pages, port: int = 0) -> None:
        """port: 0 takes a free one.  Raises ConfigError if the port is taken."""
        super().__init__("127.0.0.1", port, _PageHandler, seconds=PATIENCE)
        self.pages = pages
        served = {
            f"/static/{name}": asset(name)
            for name in (*SCRIPTS, *STYLES, "vendor/uPlot.LICENSE.txt", "icon.svg")
        }
        self.files = {"/": page().encode(), **served}
        self.pages.start()

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://127.0.0.1:{self.port}/"

    def close(self) -> None:
        """Stop serving."""
        super().close()
        self.pages.stop()


class _PageHandler(Handler):
    server: Viewer
    longest_address = 8192

    def do_GET(self) -> None:
        if self.has_body:
            self._send(HTTPStatus.BAD_REQUEST, b"this request has a body\n", "text/plain")
            return
        try:
            where = urlsplit(self.path)
            parameters = dict(parse_qsl(where.query, max_num_fields=64))
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, b"this is no address\n", "text/plain")
            return
        try:
            self.check_address()
            self._check_site(where.path)
        except Refused as refused:
            self._send(refused.status, f"{refused}\n".encode(), "text/plain")
            return
        if where.path in self.server.files:
            kind = TYPES[Path(where.path).suffix or ".html"]
            self._send(HTTPStatus.OK, self.server.files[where.path], kind)
        elif where.path.startswith("/api/"):
            self._answer(where.path.removeprefix("/api/"), parameters)
        elif where.path in (DRAWN, TABLE):
            self._figure(where.path, parameters)
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain")

    do_HEAD = do_GET

    def _check_site(self, path: str) -> None:
        """Raise Refused for what the page of another site asks for.

        A link from elsewhere may open the application; nothing but the application may ask for
        data.
        """
        origin = self.headers.get("Origin")
        own = origin is None or origin in {f"http://{host}" for host in self.server.hosts}
        site = self.headers.get("Sec-Fetch-Site", "none")
        if not own or (site not in ("same-origin", "none") and path != "/"):
            raise Refused("pages of other sites are not served", HTTPStatus.FORBIDDEN)

    def _answer(self, name: str, parameters: dict[str, str]) -> None:
        status, body = HTTPStatus.OK, b""
        try:
            body = _json(self.server.pages.answer(name, parameters))
        except KeyError:
            status, body = HTTPStatus.NOT_FOUND, _json({"error": "there is no such page"})
        except DataError as error:
            status, body = HTTPStatus.UNPROCESSABLE_ENTITY, _json({"error": str(error)})
        except Exception as error:  # one bad file must not take the viewer away
            log.exception("the page %s failed", name)
            status, body = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                _json({"error": f"{type(error).__name__}: {error}"}),
            )
        self._send(status, body, "application/json")

    def _figure(self, path: str, parameters: dict[str, str]) -> None:
        """Send a curve as a file to be saved."""
        try:
            figure = self.server.pages.figure(parameters, smooth=path == DRAWN)
            text = figure.svg() if path == DRAWN else figure.csv()
        except DataError as error:
            message = f"{error}\n".encode()
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, message, "text/plain")
            return
        suffix = Path(path).suffix
        saved = f'attachment; filename="{figure.name}{suffix}"'
        self._send(HTTPStatus.OK, text.encode(), TYPES[suffix], {"Content-Disposition": saved})

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        compressed = len(body) > SMALL and "gzip" in (self.headers.get("Accept-Encoding") or "")
        if compressed:
            body = gzip.compress(body, compresslevel=1)
        self.send_response(status)
        for name, value in {**HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.drop_body()


def _json(answer: object) -> bytes:
    return json.dumps(answer, allow_nan=False, separators=(",", ":")).encode()


def serve(paths: Sequence[str | Path], port: int = 8765) -> Viewer:
    """A viewer of runs and files, serving in a thread.  Raises DataError for what is neither,
    ConfigError for a taken port.
    """
    return Viewer(Pages(open_sources(paths)), port).start()
