"""Work in a thread beside."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from groupwise.utils.background import begin


def test_work_is_done_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an interpreter that ends, from Python 3.12 on."""

    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert begin(lambda: threading.current_thread().name, "beside").result() == threading.current_thread().name
    with pytest.raises(ZeroDivisionError):
        begin(lambda: 1 / 0, "beside").result()
