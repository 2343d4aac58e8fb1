"""Work in a thread beside."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from groupwise.errors import GroupwiseError
from groupwise.utils.background import begin


def test_work_is_done_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an interpreter that ends, from Python 3.12 on."""

    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert begin(lambda: threading.current_thread().name, "beside").result() == threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 / 0, "beside").result()


def test_where_no_further_thread_is_allowed_nobody_goes_on_without_its_work() -> None:
    """Work that is done at once, before what it waits for has begun, would wait for ever."""
    before = threading.stack_size(1 << 47)  # more than a processor can address: the system refuses, as it does at its limit
    try:
        with pytest.raises(GroupwiseError, match=r"can't start new thread.*ulimit -u"):
            begin(lambda: pytest.fail("was run"), "beside")
    finally:
        threading.stack_size(before)
