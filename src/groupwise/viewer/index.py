"""A few numbers of every completion of a run, gathered in the background, newest step first.

What a page needs of one step is read when it is asked for; what asks about all of them (the same
prompt through training, which steps can hold what a search looks for) asks here.  640,000
completions take some 20 MB.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from groupwise.errors import DataError
from groupwise.utils import threads
from groupwise.viewer.groups import PROMPT, groups_in, key_of, numbers
from groupwise.viewer.sources import CompletionSource

PAUSE = 2.0
"""Seconds between two looks for new steps."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The completions of one step, in the order of their table."""

    group: np.ndarray
    """int32 (R,)."""
    reward: np.ndarray
    """float32 (R,), NaN where there is none."""
    finish: frozenset[str]
    """The finish reasons that occur."""
    prompts: dict[int, str]
    """Key of each group's prompt."""


class Index:
    """The entries of a source, as far as they have been read."""

    def __init__(self, source: CompletionSource) -> None:
        self.source = source
        self._entries: dict[int, Entry] = {}
        self._by_prompt: dict[str, dict[int, int]] = {}
        self._damaged: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._reading: Future[None] | None = None
        self.total = 0
        self.busy = 0
        """Pages that are being answered; reading on waits for them."""

    def start(self) -> None:
        """Read on in a thread, for as long as the viewer runs."""
        if self._reading is None:
            self._reading = threads.begin(self._read_on, f"index of {self.source.name}")

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._reading is not None:
            self._reading.exception()

    def _read_on(self) -> None:
        while not self._stop.is_set():
            self.refresh()
            self._stop.wait(PAUSE)

    def refresh(self) -> None:
        """Read every step that is not here yet; forget those that a resumed run has taken away."""
        present = self.source.steps()
        self.total = len(present)
        for step in self._entries.keys() - set(present):
            self._forget(step)
        self._damaged &= set(present)
        for step in reversed(present):
            if self._stop.is_set():
                return
            if step not in self._entries and step not in self._damaged:
                while self.busy and not self._stop.wait(0.01):
                    pass
                try:
                    self.add(step)
                except DataError:
                    self._damaged.add(step)

    def add(self, step: int) -> Entry:
        """Read one step."""
        table = self.source.table(step, ("group", *PROMPT, "reward", "finish"))
        entry = Entry(
            group=numbers(table, "group").astype(np.int32),
            reward=numbers(table, "reward").astype(np.float32),
            finish=frozenset(
                table.column("finish").unique().to_pylist()
                if "finish" in table.column_names
                else ()
            ),
            prompts={group: key_of(prompt) for group, _, prompt in groups_in(table)},
        )
        with self._lock:
            self._entries[step] = entry
            for group, key in entry.prompts.items():
                self._by_prompt.setdefault(key, {})[step] = group
        return entry

    def _forget(self, step: int) -> None:
        with self._lock:
            for key in self._entries.pop(step).prompts.values():
                self._by_prompt.get(key, {}).pop(step, None)

    def entry(self, step: int) -> Entry | None:
        """A step, if it has been read."""
        return self._entries.get(step)

    @property
    def read(self) -> int:
        """Steps that have been read."""
        return len(self._entries)

    def visits(self, key: str) -> list[tuple[int, int, np.ndarray]]:
        """(step, group, rewards) of every group of a prompt, in the order of training, as far as
        steps have been read.
        """
        with self._lock:
            groups = sorted(self._by_prompt.get(key, {}).items())
        entries = [(step, group, self._entries.get(step)) for step, group in groups]
        return [
            (step, group, entry.reward[entry.group == group])
            for step, group, entry in entries
            if entry is not None
        ]
