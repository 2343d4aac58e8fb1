"""Work in a thread beside."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import pytest
import torch

from groupwise.distributed import process_group
from groupwise.errors import GroupwiseError
from groupwise.utils import threads
from groupwise.utils.event_loop import EventLoop
from groupwise.utils.threads import Thread, begin


def test_work_is_done_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an interpreter that ends, from Python 3.12 on."""

    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert begin(lambda: threading.current_thread().name, "beside").result() == threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 / 0, "beside").result()


def test_where_no_further_thread_is_allowed_nobody_goes_on_without_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that is done at once, before what it waits for has begun, would wait for ever."""
    before = threading.stack_size(1 << 47)  # more than a processor can address: the system refuses, as it does at its limit
    try:
        with pytest.raises(GroupwiseError, match=r"can't start new thread.*ulimit -u"):
            begin(lambda: pytest.fail("was run"), "beside")
    finally:
        threading.stack_size(before)


def test_work_that_hangs_holds_up_no_other() -> None:
    free = threading.Event()
    hung = [begin(lambda: free.wait(60), "hangs") for _ in range(20)]
    assert begin(lambda: "done", "quick").result(60) == "done"
    free.set()
    assert all(one.result(60) for one in hung)


def test_a_thread_of_its_own_is_always_the_same_and_ends_when_it_has_finished() -> None:
    thread, free = Thread("own"), threading.Event()
    running = thread.begin(lambda: (free.wait(60), threading.current_thread())[1])
    later = [thread.begin(threading.current_thread) for _ in range(3)]
    thread.close()
    free.set()
    assert {one.result(60) for one in (running, *later)} == {running.result(60)}
    running.result().join(60)
    assert not running.result().is_alive()


def test_threads_compute_on_the_gpu_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread has the first GPU: the reward models of all processes would be loaded there."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: chosen.append((threading.get_ident(), number)))
    monkeypatch.setattr(threads, "_first", [])  # of this test alone
    process_group.use_gpu(3)
    thread = Thread("own")
    places = [threading.get_ident(), thread.begin(threading.get_ident).result(60), begin(threading.get_ident, "beside").result(60)]
    thread.close()
    assert chosen == [(place, 3) for place in places]


def test_what_fails_before_the_work_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is lost, for instance."""
    monkeypatch.setattr(threads, "_first", [lambda: 1 / 0])
    thread = Thread("own")
    for future in (begin(int, "beside"), thread.begin(int)):
        with pytest.raises(ZeroDivisionError):
            future.result(60)
    thread.close()


def test_a_fork_has_threads_of_its_own() -> None:
    """What its parent's threads do before their work, as choosing a GPU, would fail in it."""
    parent, before = os.getpid(), list(threads._first)

    def choose() -> None:
        assert os.getpid() == parent

    try:
        threads.before_work(choose)
        begin(lambda: None, "parent's").result(60)
        if (child := os.fork()) == 0:
            status = 1
            try:
                status -= begin(lambda: 1, "child's").result(60)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        threads._first[:] = before


def test_coroutines_run_side_by_side_and_are_broken_off_at_the_end() -> None:
    ended: list[str] = []

    async def hang(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(name)

    async def meet(one: asyncio.Event, other: asyncio.Event) -> str:
        one.set()
        await other.wait()
        return "met"

    loop = EventLoop("loop")
    first, second = asyncio.Event(), asyncio.Event()
    assert [future.result(60) for future in (loop.begin(meet(first, second)), loop.begin(meet(second, first)))] == ["met"] * 2
    hung = [loop.begin(hang(name)) for name in "ab"]
    assert loop.begin(asyncio.sleep(0)).result(60) is None
    loop.close()
    loop.close()
    assert sorted(ended) == ["a", "b"] and all(one.cancelled() for one in hung)


def test_what_is_open_around_a_loop_is_closed_with_it_and_its_failure_is_raised() -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        seen.append("opened")
        yield
        seen.append("closed")

    EventLoop("loop", around).close()
    assert seen == ["opened", "closed"]

    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise ValueError("no port")
        yield

    with pytest.raises(ValueError, match="no port"):
        EventLoop("loop", broken)
