"""Preference pairs made from a run's recorded completions: the file that the next reward model of an iteration learns from."""

from __future__ import annotations

import json
from pathlib import Path

from groupwise.errors import DataError
from groupwise.runs.folder import list_rollouts, read_step
from groupwise.training.preferences import preference_rows
from groupwise.utils import files


def recorded_pairs(folder: Path, judge: str | None = None) -> Path:
    """Write `preference_rows` of all that a run recorded (`rollouts/`) into a file of the run's folder, which is returned.

    Raises DataError if the run recorded nothing, or nothing with a difference.
    """
    steps = list_rollouts(folder)
    rows = [row for step in steps for row in preference_rows(read_step(folder, step).groups, judge)]
    if not rows:
        raise DataError(
            f"{folder} holds no pair: {len(steps)} steps are recorded there (save.rollouts_every), none with a difference"
        )
    path = folder / f"pairs{'' if judge is None else f'-{judge}'}.jsonl"
    files.write(path, "".join(json.dumps(row, default=str) + "\n" for row in rows).encode())
    return path
