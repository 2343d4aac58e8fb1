"""`groupwise compare`: groups of runs, with intervals over seeds and over held-out prompts."""

from __future__ import annotations

import argparse

from groupwise.errors import ConfigError

EXAMPLES = (
    "groupwise compare 'runs/mine-lr=1e-6-*' 'runs/mine-lr=3e-6-*'   two settings, several seeds",
    "groupwise compare runs/base runs/mine --metric eval/reward      two runs",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "groups",
        nargs="+",
        metavar="RUNS",
        help="a run folder, or a pattern in quotes: the runs of one setting",
    )
    command.add_argument(
        "--metric",
        metavar="NAME",
        help="what to compare, e.g. eval/greedy (default: the first known)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the comparison."""
    from rich.console import Console

    from groupwise.inspection.comparison import check_apart, choose_metric, compare, read_group

    if len(options.groups) < 2:
        raise ConfigError(
            f"compare takes two groups of runs or more, got only {options.groups[0]}: a pattern"
            " stands in quotes, or the shell makes many groups of it"
        )
    groups = [read_group(pattern) for pattern in options.groups]
    check_apart(groups)
    compare(groups, choose_metric(groups, options.metric), Console())
    return 0
