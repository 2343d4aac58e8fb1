"""The trainer's HTTP server of published versions, for servers that do not see its folders."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from http import HTTPStatus
from pathlib import Path

from groupwise.utils.http import Handler, Server

FILE = re.compile(r"/((?:base/)?v\d{6,12})/([A-Za-z0-9_][A-Za-z0-9_.-]{0,99})")
"""The path of a file of a version, or of the weights under adapters."""
SECONDS = 120.0
"""A server that takes nothing for so long is hung up on."""


class VersionServer(Server):
    """Hands the files of a folder of versions to whoever knows its secret."""

    def __init__(self, folder: Path, host: str) -> None:
        """folder: of versions.   host: the address to listen on, at a free port."""
        self.folder = folder
        self.token = secrets.token_urlsafe(24)
        super().__init__(host, 0, VersionHandler, seconds=SECONDS)
        self.url = f"http://{host}:{self.port}"


class VersionHandler(Handler):
    """Answers GET alone, and nothing but files of versions."""

    server: VersionServer

    def do_GET(self) -> None:
        """Send a file."""
        given = self.headers.get("Authorization", "")
        if not secrets.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._refuse(HTTPStatus.UNAUTHORIZED)
            return
        wanted = FILE.fullmatch(self.path)
        path = self.server.folder / wanted[1] / wanted[2] if wanted else None
        if path is None or not path.is_file():
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with path.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 1 << 20)
        self.drop_body()

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        self.drop_body()
