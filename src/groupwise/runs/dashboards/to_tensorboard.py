"""TensorBoard: event files in the run folder, made anew from the log at every start.  It has no tables."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.runs.dashboards.base import About

REMEDY = "see that its folder can be written"


def begin(about: About) -> TensorboardBoard:
    """Open an event file in the run folder."""
    return TensorboardBoard(about)


class TensorboardBoard:
    """One event file."""

    identity = None

    def __init__(self, about: About) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder = about.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = EventFileWriter(str(folder))
        self.address = f"tensorboard --logdir {folder}"

    def write(self, step: int, wall: float, values: Mapping[str, float]) -> None:
        """Append the metrics to the event file."""
        summary = self._summary(value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(self._event(step=step, wall_time=wall, summary=summary))
        self._writer.flush()

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: it has no tables."""

    def close(self, finished: bool) -> None:
        """Close the event file."""
        self._writer.close()
