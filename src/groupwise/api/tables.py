"""A run's metrics and completions as tables for pandas.

Importing this file does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.errors import DataError
from groupwise.runs import metrics_log, rollout_files
from groupwise.runs.origin import run_of
from groupwise.runs.rollout_table import COLUMNS, FAMILIES
from groupwise.runs.run_files import RunFiles
from groupwise.utils.spelling import closest

if TYPE_CHECKING:
    import pandas


def read_metrics(run: str | Path) -> pandas.DataFrame:
    """Return the metrics of a run: one row for each step, one column for each metric.

    run: a run folder.  A metric that a step does not have is NaN.  Raises RunError, DataError.
    """
    import pandas

    folder = run_of(run).folder
    lines = metrics_log.read_metrics(folder)
    if not lines:
        raise DataError(f"{folder} has no metrics yet")
    return pandas.DataFrame(lines).set_index("step").sort_index()


def read_rollouts(
    run: str | Path,
    steps: Sequence[int] | None = None,
    *,
    held_out: bool = False,
    columns: Sequence[str] | None = None,
) -> pandas.DataFrame:
    """Return recorded completions of a run: one row for each.

    run: a run folder.  steps: by default all that were recorded.  held_out: the completions of the
        evaluations in place of those of training.
    columns: `completion_text`, `reward` ...; `rewards/` means all that begin so; by default all.
    Lists have one entry for each token of the completion.  Raises RunError, DataError.
    """
    import pandas

    if isinstance(columns, str):
        raise DataError(f"columns is a list, e.g. [{columns!r}]; got {columns!r}")
    files = RunFiles(run_of(run).folder)
    kind = rollout_files.EVALUATIONS if held_out else rollout_files.ROLLOUTS
    chosen = rollout_files.steps(files, kind)[0] if steps is None else steps
    wanted = None if columns is None else ["step", *columns]
    tables = [rollout_files.table(files, step, wanted, kind).to_pandas() for step in chosen]
    if not tables:
        raise DataError(f"{files.folder / kind} holds no completions")
    rows = pandas.concat(tables, ignore_index=True)
    _check_columns(columns or (), list(rows.columns))
    return rows


def _check_columns(wanted: Sequence[str], present: Sequence[str]) -> None:
    """Raise DataError for a name that is no column: one that a run may lack is none of these."""
    known = (*COLUMNS, *FAMILIES, *present)
    for name in wanted:
        if name not in known:
            raise DataError(f"completions have no column {name!r}{closest(name, known)}")
