"""Imports without collections in between."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from groupwise.utils.imports import uncollected


@pytest.fixture(autouse=True)
def thawed():
    """What a test freezes is collected again."""
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_importing_and_what_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.unfreeze()
    with uncollected():
        assert not gc.isenabled()
        monkeypatch.setitem(sys.modules, "just_imported", ModuleType("just_imported"))
    assert gc.isenabled() and gc.get_freeze_count() > 1000


def test_without_an_import_no_object_is_frozen() -> None:
    gc.unfreeze()
    with uncollected():
        pass
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_collecting_begins_again_behind_an_error_and_stays_off_where_it_was_off() -> None:
    with pytest.raises(ImportError), uncollected():
        raise ImportError("no such module")
    assert gc.isenabled()
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
