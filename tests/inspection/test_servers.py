"""What `groupwise check` says of the servers that a recipe names."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from scripted_vllm import Scripted, Server, free_port, handler

from groupwise.inspection.servers import ServerState, look_at_servers
from groupwise.models.policy import Policy


@pytest.fixture(scope="module")
def policy(tiny_policy: Callable[..., Policy]) -> Policy:
    """One that vLLM's attention on a CPU knows."""
    return tiny_policy("llama", hidden=64, heads=2, kv_heads=1)


@pytest.fixture
def start(policy: Policy, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Start a server, and return its address.   facts: what it says of itself that a fit one does not."""
    made: list[Server] = []

    def begin(answers: type[BaseHTTPRequestHandler]) -> str:
        made.append(Server(("127.0.0.1", 0), answers))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{made[-1].server_address[1]}"

    def make(answers: type[BaseHTTPRequestHandler] | None = None, **facts: Any) -> str:
        if answers is not None:
            return begin(answers)
        options = {"model": None, "vocabulary": policy.model.config.vocab_size, "rows": 8, "context": 64, "tokens": 8, "delay": 0.0}
        scripted = Scripted(argparse.Namespace(mirror=tmp_path / f"mirror-{len(made)}", **options))
        said = scripted.facts() | facts
        scripted.facts = lambda: said  # type: ignore[method-assign]
        return begin(handler(scripted))

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


class NoPlugin(BaseHTTPRequestHandler):
    """A vLLM that somebody has started by hand."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.send_error(404)


def router(workers: list[str] | None, ready: int) -> type[BaseHTTPRequestHandler]:
    """A vllm-router of these servers; None: something else listens there.   ready: its status at /readiness."""

    class Answers(NoPlugin):
        def do_GET(self) -> None:
            if self.path == "/readiness":
                self.send_error(ready) if ready != 200 else super().do_GET()
                return
            if workers is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            listed = ",".join(f'{{"url": "{url}"}}' for url in workers)
            self.wfile.write(f'{{"workers": [{listed}]}}'.encode())

    return Answers


def test_a_server_that_can_sample_is_described(start: Callable[..., str], policy: Policy) -> None:
    url = start()
    named, state = look_at_servers([url], policy)
    assert named == ServerState(True, "1 named")
    assert state.good
    text = "decodes 8 completions at a time, of up to 64 tokens, in float32; its weights are default"
    assert state.text == f"the vLLM server at {url} {text}"


UNFIT = {
    "another model": ({"vocabulary": 7}, "has a vocabulary of 7"),
    "log-probs before temperature": ({"logprobs": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
    "another version of the plug-in": ({"format": 0}, "was started by another version of Groupwise"),
    "no plug-in": ({"answers": NoPlugin}, "runs without Groupwise's plug-in"),
}


@pytest.mark.parametrize(("changes", "says"), UNFIT.values(), ids=UNFIT)
def test_an_unfit_server_is_a_finding_beside_a_fit_one(
    changes: dict[str, Any], says: str, start: Callable[..., str], policy: Policy
) -> None:
    url, fit = start(**changes), start()
    named, wrong, right = look_at_servers([url, fit], policy)
    assert named.good and right.good
    assert not wrong.good and url in wrong.text and says in wrong.text


def test_a_server_that_is_not_there_is_a_finding(policy: Policy) -> None:
    named, state = look_at_servers([f"http://127.0.0.1:{free_port()}"], policy)
    assert named.good and not state.good
    assert "does not exist: the connection is refused; start one with `groupwise serve MODEL`" in state.text


def test_a_list_that_cannot_be_is_one_finding(policy: Policy) -> None:
    (state,) = look_at_servers(["http://a:1", "http://A:1/"], policy)
    assert not state.good and "named twice" in state.text


LISTS = {"missing": (None, "cannot be read"), "no address": ("localhost 8000\n", "a server is written http://host:port")}


@pytest.mark.parametrize(("content", "says"), LISTS.values(), ids=LISTS)
def test_a_file_of_servers_that_cannot_be_read_is_one_finding(
    content: str | None, says: str, policy: Policy, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "servers.txt").write_text(content)
    (state,) = look_at_servers(str(tmp_path / "servers.txt"), policy)
    assert not state.good and says in state.text


def test_an_empty_file_of_servers_is_a_finding(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "servers.txt").write_text("# none yet\n")
    (state,) = look_at_servers(str(tmp_path / "servers.txt"), policy)
    assert not state.good and "0 named in" in state.text


def test_every_server_of_a_file_is_asked(start: Callable[..., str], policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "servers.txt").write_text(f"{start()}\n# a remark\n\n{start(vocabulary=7)}\n")
    named, first, second = look_at_servers(str(tmp_path / "servers.txt"), policy)
    assert named.good and "2 named in" in named.text and "read again during a run" in named.text
    assert first.good and not second.good


ROUTERS = {
    "ready": (200, True, "is ready, 1 named"),
    "without a healthy server": (503, False, "has no healthy server"),
}


@pytest.mark.parametrize(("status", "good", "says"), ROUTERS.values(), ids=ROUTERS)
def test_a_router_and_the_servers_behind_it_are_asked(
    status: int, good: bool, says: str, start: Callable[..., str], policy: Policy
) -> None:
    address = start(router([start()], status))
    named, behind = look_at_servers({"router": address}, policy)
    assert named.good is good and address in named.text and says in named.text
    assert behind.good


def test_what_is_no_router_is_one_finding(start: Callable[..., str], policy: Policy) -> None:
    (state,) = look_at_servers({"router": start(router(None, 200))}, policy)
    assert not state.good and "does not list its servers at /workers" in state.text
