"""A pool of servers in processes of their own: one is killed, frozen, late, or joins in the middle, and no completion is lost.

What vLLM itself does is tested with real servers in tests/vllm.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_vllm import Process, free_port

from groupwise.errors import ConfigError, EngineError, PeerError
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.vllm import member, pool
from groupwise.rollout.vllm.addresses import AddressFile, Router, addresses_of
from groupwise.rollout.vllm.engine import VllmEngine

SAMPLING = Sampling(temperature=0.7, max_new_tokens=9)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are visited often, and are silent after a second."""
    monkeypatch.setattr(pool, "POLL", 0.2)
    monkeypatch.setattr(pool, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(member, "ANSWER_SECONDS", 1.0)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Start scripted servers, which end with the test."""
    made: list[Process] = []

    def make(**options: Any) -> Process:
        made.append(Process(**options))
        return made[-1]

    yield make
    for process in made:
        process.close()


@pytest.fixture
def engine_of(policy_of) -> Iterator[Callable[..., VllmEngine]]:
    made: list[VllmEngine] = []

    def make(servers: Any, **options: Any) -> VllmEngine:
        policy = policy_of(dtype=torch.float32, num_attention_heads=1, num_key_value_heads=1)
        made.append(VllmEngine(policy, servers=servers, **({"patience": 30.0} | options)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class Drawing:
    """Groups that are drawn in a thread beside."""

    def __init__(self, engine: VllmEngine, prompts: list[Prompt], size: int = 3) -> None:
        self.groups: list[tuple[Rollout, ...]] = []
        self.error: Exception | None = None
        self._engine, self._prompts, self._size = engine, prompts, size
        self._thread = threading.Thread(target=self._draw)
        self._thread.start()

    def _draw(self) -> None:
        try:
            for group in self._engine.generate(self._prompts, group_size=self._size, sampling=SAMPLING, seed=5):
                self.groups.append(group)
        except Exception as error:
            self.error = error

    def result(self) -> list[tuple[Rollout, ...]]:
        """All groups, each once and whole."""
        self._thread.join(300)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert sorted(group[0].prompt.id for group in self.groups) == sorted(prompt.id for prompt in self._prompts)
        for group in self.groups:
            assert [rollout.index for rollout in group] == list(range(self._size))
        return self.groups


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another process."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def busy(*servers: Process) -> None:
    """Wait until every server samples."""
    until(lambda: all(server.count("num_requests_running") > 0 for server in servers))


def tokens_of(groups: list[tuple[Rollout, ...]]) -> dict[str, list[list[int]]]:
    return {group[0].prompt.id: [rollout.tokens.tolist() for rollout in group] for group in groups}


# ---- servers that are lost


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_requests_of_a_server_that_is_lost_go_to_others(blow: int, start, engine_of, prompts_of) -> None:
    servers = [start(delay=0.03).wait() for _ in range(2)]
    engine, prompts = engine_of([server.url for server in servers]), prompts_of(*[4] * 16)
    engine.send_weights(3)
    until(lambda: len(engine.servers.present) == 2)
    drawing = Drawing(engine, prompts)
    busy(*servers)
    servers[0].signal(blow)
    groups = drawing.result()
    assert {int(version) for group in groups for rollout in group for version in rollout.version} == {3}
    metrics = engine.metrics()
    assert metrics["servers/alive"] == 1.0 and metrics["servers/retries"] > 0
    servers[0].signal(signal.SIGCONT)
    undisturbed = Drawing(engine, prompts).result()
    assert tokens_of(groups) == tokens_of(undisturbed), "a request that is sent again is another one"


@pytest.mark.slow
def test_a_frozen_server_that_goes_on_gets_requests_again(start, engine_of, prompts_of) -> None:
    servers = [start(delay=0.02).wait() for _ in range(2)]
    engine = engine_of([server.url for server in servers])
    engine.send_weights(0)
    until(lambda: len(engine.servers.present) == 2)
    drawing = Drawing(engine, prompts_of(*[4] * 8))
    busy(*servers)
    servers[0].signal(signal.SIGSTOP)
    drawing.result()
    engine.send_weights(1)  # it misses a version
    servers[0].signal(signal.SIGCONT)
    until(lambda: [one.version for one in engine.servers.present] == [1, 1])
    assert servers[0].label().endswith(":1")
    computed = servers[0].count("generation_tokens_total")
    groups = Drawing(engine, prompts_of(*[4] * 8)).result()
    assert {int(version) for group in groups for rollout in group for version in rollout.version} == {1}
    assert servers[0].count("generation_tokens_total") > computed


@pytest.mark.slow
def test_a_server_that_was_started_anew_is_brought_to_the_newest_version(start, engine_of, prompts_of) -> None:
    """All that it was told before is gone; its first label is nobody's."""
    server = start(delay=0.02).wait()
    engine = engine_of([server.url])
    for version in range(3):
        engine.send_weights(version)
    drawing = Drawing(engine, prompts_of(*[4] * 4))
    busy(server)
    server.kill()
    server.start()
    groups = drawing.result()
    assert {int(version) for group in groups for rollout in group for version in rollout.version} == {2}
    assert server.label().endswith(":2")


@pytest.mark.slow
def test_the_run_ends_when_no_server_answers_for_longer_than_patience(start, engine_of, prompts_of) -> None:
    servers = [start(delay=0.03).wait() for _ in range(2)]
    engine = engine_of([server.url for server in servers], patience=1.0)
    engine.send_weights(0)
    drawing = Drawing(engine, prompts_of(*[4] * 8))
    busy(*servers)
    for server in servers:
        server.kill()
    with pytest.raises(PeerError, match="no server has answered for 1 s: ") as failure:
        drawing.result()
    for server in servers:
        assert f"{server.url} does not exist" in str(failure.value)
    assert "groupwise serve MODEL" in str(failure.value) and "rollout.engine.patience" in str(failure.value)
    with pytest.raises(PeerError, match="no server has answered"):
        engine.send_weights(1)


@pytest.mark.slow
def test_weights_are_published_and_conversations_begun_while_no_server_is_there(
    start, engine_of, prompts_of, scripted_environment
) -> None:
    server = start().wait()
    engine = engine_of([server.url], in_flight=True)
    engine.send_weights(0)
    server.kill()
    until(lambda: not engine.servers.known)
    engine.send_weights(1)
    engine.environment = scripted_environment(cut=0.0, delays=0)
    drawing = Drawing(engine, prompts_of(8, 8))
    server.start()
    drawing.result()
    assert server.label().endswith(":1")


# ---- servers that are late, or join


@pytest.mark.slow
def test_a_run_begins_with_the_servers_that_are_there(start, engine_of, prompts_of) -> None:
    server, port = start(delay=0.03).wait(), free_port()
    engine = engine_of([server.url, f"http://127.0.0.1:{port}"])
    engine.send_weights(0)
    drawing = Drawing(engine, prompts_of(*[4] * 8))
    busy(server)
    late = start(port=port, delay=0.03)
    drawing.result()
    late.wait()
    until(lambda: len(engine.servers.present) == 2)
    Drawing(engine, prompts_of(*[4] * 30)).result()
    assert late.count("generation_tokens_total") > 0, "the late one got no requests"
    assert late.label() == server.label()


@pytest.mark.slow
def test_a_server_that_a_file_names_joins_and_one_that_it_names_no_more_leaves(
    start, engine_of, prompts_of, tmp_path: Path
) -> None:
    first, second = start(delay=0.03).wait(), start(delay=0.03).wait()
    named = tmp_path / "servers.txt"
    named.write_text(f"# of the first rack\n\n{first.url}\n")
    engine = engine_of(str(named))
    engine.send_weights(0)
    drawing = Drawing(engine, prompts_of(*[4] * 30))
    busy(first)
    assert second.count("generation_tokens_total") == 0
    named.write_text(f"{first.url}\nnonsense\n")  # half written: the list stays as it is
    named.write_text(f"{second.url}\n")
    until(lambda: second.count("num_requests_running") > 0)
    until(lambda: first.count("num_requests_running") == 0)
    drawing.result()
    assert engine.metrics()["servers/alive"] == 1.0


@pytest.mark.slow
def test_a_server_that_is_late_gets_only_requests_that_may_be_so_old(start, engine_of, prompts_of, monkeypatch) -> None:
    """It holds version 1 while the others go to 2: what was begun with 1 may still be asked of it, what begins with 2 may not."""
    servers = [start(delay=0.02).wait() for _ in range(2)]
    engine = engine_of([server.url for server in servers], in_flight=True)
    engine.send_weights(1)
    until(lambda: len(engine.servers.present) == 2)
    slow, go_on = servers[0], threading.Event()
    go = pool.VersionedServer.go_to

    def go_late(self: Any, published: Any, *, keep: bool) -> Any:
        if self.client.url == slow.url:
            assert go_on.wait(60)
        return go(self, published, keep=keep)

    monkeypatch.setattr(pool.VersionedServer, "go_to", go_late)
    older = Drawing(engine, prompts_of(*[4] * 20))
    busy(*servers)
    engine.send_weights(2)
    until(lambda: servers[1].label().endswith(":2"))
    older_rollouts = [rollout for group in older.result() for rollout in group]
    assert {int(rollout.version[-1]) for rollout in older_rollouts} == {1, 2}
    computed = slow.count("generation_tokens_total")
    newer = [rollout for group in Drawing(engine, prompts_of(*[4] * 8)).result() for rollout in group]
    assert {int(version) for rollout in newer for version in rollout.version} == {2}
    assert slow.count("generation_tokens_total") == computed
    go_on.set()
    until(lambda: slow.label().endswith(":2"))


@pytest.mark.slow
def test_a_server_of_another_kind_that_joins_is_left_out(start, engine_of, prompts_of, tmp_path: Path) -> None:
    first, other = start(delay=0.03).wait(), start(vocabulary=99).wait()
    named = tmp_path / "servers.txt"
    named.write_text(f"{first.url}\n")
    engine = engine_of(str(named))
    engine.send_weights(0)
    named.write_text(f"{first.url}\n{other.url}\n")
    until(lambda: "a vocabulary of 99" in "".join(one.trouble for one in engine.servers.members.values()))
    Drawing(engine, prompts_of(*[4] * 8)).result()
    assert other.count("generation_tokens_total") == 0


# ---- who gets a request


@pytest.mark.slow
def test_a_conversation_stays_with_its_server_and_new_ones_go_to_the_least_loaded(
    start, engine_of, prompts_of, scripted_environment
) -> None:
    servers = [start(delay=0.002, tokens=4).wait() for _ in range(2)]
    engine = engine_of([server.url for server in servers])
    engine.send_weights(0)
    until(lambda: len(engine.servers.present) == 2)
    engine.environment = scripted_environment(cut=0.0, delays=0)
    groups = list(engine.generate(prompts_of(8, 8, 8, 8), group_size=4, sampling=Sampling(max_new_tokens=40), seed=5))
    turns = [len(rollout.episode.turns) for group in groups for rollout in group]
    assert max(turns) > 1
    engine.servers.wake()
    until(
        lambda: sum(one.counters.queries for one in engine.servers.present) == sum(s.count("prompt_tokens_total") for s in servers)
    )
    hits, queries = (sum(server.count(f"prefix_cache_{name}_total") for server in servers) for name in ("hits", "queries"))
    assert engine.metrics()["servers/prefix_hits"] == pytest.approx(hits / queries)
    assert hits / queries > 0.5
    shares = [server.count("prompt_tokens_total") for server in servers]
    assert min(shares) > 0.2 * sum(shares)


# ---- addresses


def test_a_file_of_addresses_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = tmp_path / "servers.txt"
    with pytest.raises(ConfigError, match=r"cannot be read .*a file with the address of one server a line"):
        AddressFile(str(named))
    named.write_text("http://a:1\n\n# http://b:2\n  http://C:3  \n")
    found = addresses_of(str(named))
    assert found.read() == ("http://a:1", "http://c:3")
    named.write_text("http://a:1\nhttp://\n")
    assert found.read() == ("http://a:1", "http://c:3")
    assert "a server is written http://host:port, got 'http://'" in caplog.text
    named.write_text("")
    assert found.read() == ("http://a:1", "http://c:3"), "it is being written"
    named.write_text("http://b:2\n")
    assert [found.read(), found.read()] == [("http://a:1", "http://c:3"), ("http://b:2",)]


def test_a_file_of_servers_that_is_half_written_names_nobody_new(tmp_path: Path) -> None:
    """Its beginning may be addresses too: of fewer servers, and one of another port."""
    named = tmp_path / "servers.txt"
    whole = "http://a:8000\nhttp://b:8000\nhttp://c:8000\n"
    named.write_text(whole.replace("c", "d"))
    before = AddressFile(str(named)).read()
    for length in range(len(whole)):
        found = AddressFile(str(named))
        named.write_text(whole[:length])
        assert found.read() == before
        named.write_text(whole)
        found.read()
        assert found.read() == ("http://a:8000", "http://b:8000", "http://c:8000")
        named.write_text(whole.replace("c", "d"))


def test_a_server_of_two_names_is_refused(start, engine_of) -> None:
    """Two threads would bring it to versions at the same time."""
    server = start().wait()
    engine = engine_of([server.url, server.url.replace("127.0.0.1", "localhost")])
    with pytest.raises(EngineError, match=r"is the one at http://.*: name each server once"):
        engine.send_weights(0)


def test_what_is_no_router_is_refused(start) -> None:
    server = start().wait()
    with pytest.raises(EngineError, match=r"does not list its servers at /workers .*name a running vllm-router"):
        Router(server.url).read()


@pytest.mark.slow
def test_a_late_server_is_not_taken_for_one_with_the_version_of_a_run_that_has_gone_back(start, engine_of, prompts_of) -> None:
    """It has a version of the number that the run goes back to, by the name of before."""
    late, other = (start().wait() for _ in range(2))
    engine = engine_of([late.url, other.url])
    engine.send_weights(3)
    until(lambda: late.label() == other.label())
    before = late.label()
    late.signal(signal.SIGSTOP)
    try:
        engine.send_weights(4)
        engine.send_weights(3)
        draw = Drawing(engine, prompts_of(*[4] * 4)).result()
    finally:
        late.signal(signal.SIGCONT)
    assert {int(version) for group in draw for rollout in group for version in rollout.version} == {3}
    assert before != other.label() and other.label().endswith(":3")
    until(lambda: late.label() == other.label())
    until(lambda: len(engine.servers.present) == 2)
