"""`groupwise push`, against a server on this machine that answers as the hub's API does."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.errors import CheckpointError, ConfigError, StorageError

TOKEN = "hf_of_a_test"


class Hub(BaseHTTPRequestHandler):
    """The calls of a client that uploads a folder: make a repository, how to upload, commit."""

    def do_POST(self) -> None:
        hub = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.calls.append(self.path)  # type: ignore[attr-defined]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, {"error": "Invalid user token."})
        if hub.broken and "/commit/" in self.path:  # type: ignore[attr-defined]
            return self.answer(507, {"error": "the disk of the hub is full"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            hub.private = asked.get("private") or asked.get("visibility") == "private"  # type: ignore[attr-defined]
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            return self.answer(200, {"url": f"{hub.address}/{name}", "name": name})  # type: ignore[attr-defined]
        if "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        if "/commit/" in self.path:
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    hub.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])  # type: ignore[attr-defined]
                if entry["key"] == "header":
                    hub.message = entry["value"]["summary"]  # type: ignore[attr-defined]
            commit = {"commitUrl": f"{hub.address}/me/mine/commit/abc", "commitOid": "abc", "success": True}  # type: ignore[attr-defined]
            return self.answer(200, commit)
        return self.answer(200, {"errors": [], "warnings": []})  # the card's header is looked at

    def do_GET(self) -> None:
        if "/revision/" in self.path or self.path.count("/") == 4:
            return self.answer(200, {"id": "me/mine", "sha": "0" * 40, "siblings": []})
        return self.answer(404, {"error": "not there"})

    def answer(self, status: int, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.calls, server.broken, server.private, server.message = {}, [], False, None, ""  # type: ignore[attr-defined]
    server.address = f"http://127.0.0.1:{server.server_address[1]}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def pushed(hub: ThreadingHTTPServer, *arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the client reads its environment when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.address, "HF_HOME": "no-such-folder", "HF_HUB_DISABLE_XET": "1"}  # type: ignore[attr-defined]
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-P", "-m", "groupwise", "push", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_pushed_model_is_loaded_back_with_equal_log_probs(hub: ThreadingHTTPServer, finished: Path, tmp_path: Path) -> None:
    run = finished / "runs/demo/grpo"
    done = pushed(hub, str(run), "me/mine", "--private")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("/me/mine/commit/abc")
    assert hub.private and "Step 3" in hub.message  # type: ignore[attr-defined]
    for name, data in hub.files.items():  # type: ignore[attr-defined]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert "README.md" in hub.files  # type: ignore[attr-defined]
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("Q: 1+2= A:")["input_ids"]])
    logp = []
    for folder in (tmp_path, run / "final"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logp.append(model(ids).logits.log_softmax(-1))
    assert torch.equal(*logp)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repository", "token", "broken", "status", "words"),
    [
        ("me/mine", None, False, ConfigError.exit_code, "hf auth login"),
        ("me/mine", "hf_wrong", False, ConfigError.exit_code, "right to write"),
        ("me/no good", TOKEN, False, ConfigError.exit_code, "names no repository"),
        ("me/mine", TOKEN, True, StorageError.exit_code, "failed"),
    ],
)
def test_what_the_hub_refuses_is_said(
    hub: ThreadingHTTPServer, finished: Path, repository: str, token: str | None, broken: bool, status: int, words: str
) -> None:
    hub.broken = broken  # type: ignore[attr-defined]
    done = pushed(hub, str(finished / "runs/demo/grpo"), repository, token=token)
    assert done.returncode == status, done.stderr
    assert words in done.stderr and TOKEN not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_hub_that_does_not_answer_and_a_folder_of_runs_are_said(hub: ThreadingHTTPServer, finished: Path) -> None:
    done = pushed(hub, str(finished / "runs"), "me/mine")
    assert done.returncode == ConfigError.exit_code and "no run folder" in done.stderr, done.stderr
    hub.address = "http://127.0.0.1:9"  # type: ignore[attr-defined]
    done = pushed(hub, str(finished / "runs/demo/grpo"), "me/mine")
    assert done.returncode == StorageError.exit_code and "failed" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_run_without_a_whole_final_model_is_not_pushed(hub: ThreadingHTTPServer, finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/demo/grpo"
    shutil.copytree(finished / "runs/demo/grpo", run)
    (run / "final/config.json").unlink()
    done = pushed(hub, str(run), "me/mine")
    assert done.returncode == CheckpointError.exit_code and "final/config.json" in done.stderr
    assert not hub.calls  # type: ignore[attr-defined]
