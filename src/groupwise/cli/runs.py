"""`groupwise runs`: the run folders and how they stand."""

from __future__ import annotations

import argparse
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.utils.spelling import near_path
from groupwise.utils.terminal import escaped

EXAMPLES = (
    "groupwise runs                the runs in runs/",
    "groupwise runs elsewhere      those in another folder",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "folder", nargs="?", default="runs", metavar="FOLDER", help="default: runs"
    )


def run(options: argparse.Namespace) -> int:
    """Print a line a run."""
    from groupwise.errors import RunError
    from groupwise.runs.folder import list_runs, standing
    from groupwise.runs.metrics_log import last_metrics
    from groupwise.runs.run_files import RunFiles

    root = Path(options.folder)
    if not root.is_dir():
        raise ConfigError(f"no such folder: {root}{near_path(root)}")
    rows = []
    for folder in list_runs(root):
        run, last = RunFiles(folder), {}
        state, why = standing(run)
        try:
            last = last_metrics(run)
        except RunError as error:
            why = "; ".join(filter(None, [why, str(error)]))
        reward = f"reward {last['reward']:.3f}" if isinstance(last.get("reward"), float) else ""
        shown = "running" if state == "live" else state
        rows.append(
            (str(folder.relative_to(root)), shown, f"step {last.get('step', 0)}", reward, why)
        )
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(5)]
    for row in rows:
        print(
            escaped(
                "  ".join(
                    f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
        )
    if not rows:
        print(f"{root} holds no runs")
    return 0
