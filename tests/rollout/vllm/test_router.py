"""A pool behind a real vllm-router (`pip install vllm-router`; VLLM_ROUTER or PATH names it), with scripted servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_vllm import Process, free_port

from groupwise.records import Sampling
from groupwise.rollout.vllm import member, pool
from groupwise.rollout.vllm.addresses import Router

from .test_pool import Drawing, busy, engine_of, start, until

__all__ = ["engine_of", "start"]
COMMAND = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="no vllm-router: pip install it anywhere, and name its command in VLLM_ROUTER"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POLL", 0.2)
    monkeypatch.setattr(pool, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(member, "ANSWER_SECONDS", 1.0)


class RunningRouter:
    """A vllm-router that may be killed and started anew at the same address."""

    def __init__(self, urls: list[str], folder: Path) -> None:
        self.port, self._urls, self._folder = free_port(), urls, folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        assert COMMAND is not None
        options = {"host": "127.0.0.1", "port": self.port, "prometheus-port": free_port(), "policy": "sticky_least_loaded"}
        options |= {"health-check-interval-secs": 60, "worker-startup-timeout-secs": 30, "worker-startup-check-interval": 1}
        line = [
            COMMAND,
            "--worker-urls",
            *self._urls,
            *(text for name, value in options.items() for text in (f"--{name}", str(value))),
        ]
        with (self._folder / "router.log").open("ab") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/readiness", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end
                time.sleep(0.1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Callable[..., RunningRouter]]:
    made: list[RunningRouter] = []

    def make(*servers: Process) -> RunningRouter:
        made.append(RunningRouter([server.url for server in servers], tmp_path))
        return made[-1]

    yield make
    for router in made:
        router.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_requests_of_a_server_behind_the_router_go_to_others(blow: int, start, route, engine_of, prompts_of) -> None:
    """The router looks at its servers once a minute: who is lost is taken out of it by the run, and put in again."""
    servers = [start(delay=0.03).wait() for _ in range(2)]
    router = route(*servers)
    engine, prompts = engine_of({"router": router.url}), prompts_of(*[4] * 16)
    engine.send_weights(3)
    until(lambda: len(engine.servers.present) == 2)
    drawing = Drawing(engine, prompts)
    busy(*servers)
    servers[0].signal(blow)
    groups = drawing.result()
    assert {int(version) for group in groups for rollout in group for version in rollout.version} == {3}
    assert engine.metrics()["servers/retries"] > 0
    until(lambda: Router(router.url).read() == (servers[1].url,))
    engine.send_weights(4)
    if blow == signal.SIGKILL:
        servers[0].kill()
        servers[0].start()
    servers[0].signal(signal.SIGCONT)
    until(lambda: sorted(Router(router.url).read()) == sorted(server.url for server in servers))
    assert servers[0].label() == servers[1].label() and servers[0].label().endswith(":4")


def test_a_router_that_is_killed_and_started_again_loses_no_completion(start, route, engine_of, prompts_of) -> None:
    servers = [start(delay=0.03).wait() for _ in range(2)]
    router = route(*servers)
    engine = engine_of({"router": router.url})
    engine.send_weights(0)
    drawing = Drawing(engine, prompts_of(*[4] * 16))
    busy(*servers)
    router.close()
    router.start()
    drawing.result()
    assert engine.metrics()["servers/retries"] > 0


def test_a_server_that_is_added_to_the_router_gets_requests_with_the_newest_version(start, route, engine_of, prompts_of) -> None:
    first, second = start(delay=0.03).wait(), start(delay=0.03).wait()
    router = route(first)
    engine = engine_of({"router": router.url})
    engine.send_weights(0)
    drawing = Drawing(engine, prompts_of(*[4] * 40))
    busy(first)
    Router(router.url).add(second.url)
    groups = drawing.result()
    assert {int(version) for group in groups for rollout in group for version in rollout.version} == {0}
    assert second.label() == first.label()
    assert second.count("generation_tokens_total") > 0


def test_a_conversation_stays_with_its_server_and_is_finished(start, route, engine_of, prompts_of, scripted_environment) -> None:
    servers = [start(delay=0.002, tokens=4).wait() for _ in range(2)]
    router = route(*servers)
    engine = engine_of({"router": router.url})
    finished: list[str] = []
    finish = Router.finish

    def note(self: Router, session: str) -> None:
        finish(self, session)
        finished.append(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "finish", note)
        engine.environment = scripted_environment(cut=0.0, delays=0)
        groups: Any = list(engine.generate(prompts_of(8, 8), group_size=4, sampling=Sampling(max_new_tokens=40), seed=5))
        until(lambda: len(finished) == 8)
    assert len(set(finished)) == 8
    assert max(len(rollout.episode.turns) for group in groups for rollout in group) > 1
    hits, queries = (sum(server.count(f"prefix_cache_{name}_total") for server in servers) for name in ("hits", "queries"))
    assert hits / queries > 0.5
    assert min(server.count("prompt_tokens_total") for server in servers) > 0
