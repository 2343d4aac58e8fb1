"""What may go wrong between a trainer and its servers, and does not show at once: a disk or a memory that is full, an answer that
is lost.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from groupwise.config.settings import LoraSettings
from groupwise.errors import EngineError, PeerError, StorageError
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy
from groupwise.rollout.vllm import pool
from groupwise.rollout.vllm.addresses import Router
from groupwise.rollout.vllm.client import RefusedRequest
from groupwise.rollout.vllm.plugin.groupwise_versions import Mirror, VersionSource, WrongVersion
from groupwise.rollout.vllm.published import VersionedServer
from groupwise.rollout.vllm.publisher import AdapterPublisher, BlockFile, Publisher

from .test_engine import FakeServer, adapted_engine, draw, engine_of, server, until

__all__ = ["adapted_engine", "engine_of", "server"]
NO_ROOM = "the version takes 9.00 GB, and /dev/shm has 0.06 GB free: make /dev/shm larger (docker run --shm-size)"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "POLL", 0.05)
    monkeypatch.setattr(pool, "RETRY_SECONDS", 0.02)


def has_no_room(server: FakeServer) -> None:
    """Let a server's shared memory be too small for any version."""

    def go_to(*_: Any) -> None:
        raise WrongVersion(NO_ROOM)

    server.mirror.go_to = go_to  # type: ignore[method-assign]


# ---- weights that a server cannot read


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_server_with_too_little_shared_memory_ends_the_run_at_its_start(in_flight: bool, server, engine_of) -> None:
    """It could not read the weights however often they were written, and the run would wait until its patience is over."""
    has_no_room(server)
    engine = engine_of(server, in_flight=in_flight, patience=3600.0)
    with pytest.raises(EngineError, match=r"cannot take version 0 of the weights: .*docker run --shm-size"):
        engine.send_weights(0)
    assert len(server.deliveries) == pool.UNREADABLE


def test_a_server_that_loses_its_room_later_is_left_out_and_named_once(server, engine_of, prompts_of, caplog) -> None:
    """All weights are written for it once, not for each of its tries."""
    other = FakeServer()
    engine = engine_of(server, other)
    engine.send_weights(0)
    until(lambda: len(engine.servers.present) == 2)
    has_no_room(other)
    written: list[int] = []
    publish_full = Publisher.publish_full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "publish_full", lambda self: (written.append(self.last.version), publish_full(self))[1])
        for version in range(1, 5):
            engine.send_weights(version)
            tries = len(other.deliveries) + 3
            until(lambda tries=tries: len(other.deliveries) >= tries)
            assert len(draw(engine, prompts_of(4, 5))) == 2
    assert len(written) == 1
    assert sum("of the weights: the version takes 9.00 GB" in record.getMessage() for record in caplog.records) == 1
    assert other.label.endswith(":0") and server.label.endswith(":4")
    other.close()


def test_the_patience_of_a_run_names_the_server_that_cannot_read_its_weights(server, engine_of) -> None:
    """It joins alone, after the one before has gone."""
    engine = engine_of(server)
    engine.send_weights(0)
    engine.servers.patience = 1.0
    server.label = "default"
    has_no_room(server)
    until(lambda: engine.servers._failure is not None)
    with pytest.raises(PeerError, match=r"no server has answered for 1 s: .*docker run --shm-size"):
        engine.send_weights(1)


def test_weights_that_are_read_for_longer_than_the_patience_are_waited_for(server, engine_of, monkeypatch) -> None:
    """A server that fetches a large model has not failed."""
    go_to = VersionedServer.go_to
    begun, over = threading.Event(), threading.Event()

    def read_long(self: Any, published: Any, *, keep: bool) -> Any:
        begun.set()
        assert over.wait(300)
        return go_to(self, published, keep=keep)

    monkeypatch.setattr(VersionedServer, "go_to", read_long)
    engine = engine_of(server)
    sending = threading.Thread(target=engine.send_weights, args=(0,))
    sending.start()
    assert begun.wait(300)
    engine.servers.patience = 0.3
    looks = server.calls.count("/metrics") + 20  # one every 0.05 s
    until(lambda: server.calls.count("/metrics") >= looks or not sending.is_alive())
    over.set()
    sending.join(300)
    engine.servers.raise_failure()
    assert server.label.endswith(":0")


# ---- answers that are lost


@pytest.mark.parametrize("alone", [False, True])
def test_a_server_that_was_lost_in_its_pause_goes_on(
    alone: bool, server, engine_of, adapted_engine, prompts_of, monkeypatch
) -> None:
    """It has the newest weights, and nobody would tell it to compute."""
    server.facts["lora_rank"] = 8
    engine = adapted_engine(server) if alone else engine_of(server)
    paused = threading.Event()
    answer = server.do

    def do(path: str, body: dict[str, Any]) -> Any:
        if path == "/pause":
            paused.set()
        if path == "/resume":
            paused.clear()
        return answer(path, body)

    server.do = do
    server.hold = lambda body: until(lambda: not paused.is_set())
    resume = VersionedServer.resume
    lost: list[bool] = []

    def lose_the_first(self: VersionedServer) -> None:
        if not lost:
            lost.append(True)
            engine.servers.members[server.url].sampled = True  # as it has, in a run that goes on
            raise PeerError("the connection was broken off")
        resume(self)

    monkeypatch.setattr(VersionedServer, "resume", lose_the_first)
    engine.send_weights(0)
    assert len(draw(engine, prompts_of(4))) == 1
    assert lost and not paused.is_set()


def test_a_server_that_answers_503_at_the_start_is_waited_for(server, engine_of) -> None:
    """As what stands before a server does until it is there."""
    server.status["/health"] = 503
    engine = engine_of(server)
    sending = threading.Thread(target=engine.send_weights, args=(0,))
    sending.start()
    until(lambda: server.calls.count("/health") > 3 or not sending.is_alive())
    server.status["/collective_rpc"] = 503
    server.status["/health"] = 200
    until(lambda: server.calls.count("groupwise_facts") > 1 or not sending.is_alive())
    server.status.clear()
    sending.join(300)
    engine.servers.raise_failure()
    assert server.label.endswith(":0")


def test_a_router_that_answers_503_has_no_servers_yet(server) -> None:
    server.status["/workers"] = 503
    with pytest.raises(PeerError, match="503"):
        Router(server.url).read()


def test_a_server_that_has_not_the_adapter_any_more_is_asked_again(server, adapted_engine, prompts_of) -> None:
    """Between the choice of a server and the request it went on by two versions, or was started anew."""
    server.facts["lora_rank"] = 8
    engine = adapted_engine(server)
    engine.send_weights(0)
    asked: list[str] = []

    def gone_at_first(path: str) -> int:
        if path != "/inference/v1/generate":
            return 200
        asked.append(path)
        return 404 if len(asked) == 1 else 200

    server.status_of = gone_at_first
    assert len(draw(engine, prompts_of(4))) == 1
    assert engine.metrics()["servers/retries"] > 0


# ---- a disk that is full


@pytest.mark.parametrize("kind", ["weights", "all weights of a version", "adapters"])
def test_a_disk_that_is_full_while_a_version_is_published_is_named(
    kind: str, policy_of: Callable[..., Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(dtype=torch.float32)
    publisher: Any = Publisher(tmp_path / "run", "run", torch.bfloat16)
    if kind == "adapters":
        policy = adapt(policy, LoraSettings(rank=2), base="")
        publisher = AdapterPublisher(tmp_path / "run", "run", torch.float32)
    publisher.publish(policy, 0)
    before = sorted(str(path) for path in tmp_path.rglob("*"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir" if kind != "all weights of a version" else "open", full)
    with pytest.raises(StorageError, match=rf"disk full while writing .* to {tmp_path}/run"):
        publisher.publish_full() if kind == "all weights of a version" else publisher.publish(policy, 1)
    monkeypatch.undo()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    if kind != "adapters":
        assert Mirror(tmp_path / "mirror").go_to(VersionSource(str(tmp_path / "run")), 0).full


def test_all_weights_are_written_anew_while_a_server_reads_them(policy_of: Callable[..., Policy], tmp_path: Path) -> None:
    """A server that opens the file in the middle of it reads the whole of the one before."""
    publisher = Publisher(tmp_path / "run", "run", torch.bfloat16)
    publisher.publish(policy_of(dtype=torch.float32), 0)
    found: list[bool] = []
    add = BlockFile.add

    def read_meanwhile(self: BlockFile, *block: Any) -> None:
        add(self, *block)
        if len(found) < 2:
            mirror = Mirror(tmp_path / f"mirror-{len(found)}")
            found.append(mirror.go_to(VersionSource(str(tmp_path / "run")), 0).full)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockFile, "add", read_meanwhile)
        publisher.publish_full()
    assert found == [True, True]


class OpenUpdate:
    """A server's client, in whose server a trainer that was killed has left an update open."""

    def __init__(self) -> None:
        self.open, self.asked = True, list[str]()

    def post(self, path: str, body: Any, *, timeout: float) -> None:
        self.asked.append(path)
        if path == "/start_weight_update" and self.open:
            raise RefusedRequest("start_weight_update called while a weight update is already active", 500)
        if path == "/update_weights":
            self.open = False
            raise RefusedRequest("the mirror does not hold it", 500)


def test_an_update_that_a_killed_trainer_left_open_is_ended() -> None:
    client = OpenUpdate()
    VersionedServer(client)._begin_update()  # type: ignore[arg-type]
    assert client.asked == ["/start_weight_update", "/update_weights", "/start_weight_update"]
