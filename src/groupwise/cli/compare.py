"""`groupwise compare`: groups of runs, with intervals over seeds and over held-out prompts."""

from __future__ import annotations

import argparse
from functools import partial

EXAMPLES = (
    "groupwise compare 'runs/mine-lr=1e-6-*' 'runs/mine-lr=3e-6-*'   two settings, several seeds",
    "groupwise compare runs/base runs/mine --metric eval/reward      two runs",
    "groupwise compare runs/base 'runs/mine-lr=*' --svg figure.svg   with a figure for a paper",
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
    command.add_argument(
        "--svg", type=partial(_ends_in, ".svg"), metavar="FILE", help="draw the means as a figure"
    )
    command.add_argument(
        "--csv", type=partial(_ends_in, ".csv"), metavar="FILE", help="write the means as a table"
    )


def _ends_in(suffix: str, text: str) -> str:
    if not text.endswith(suffix):
        raise argparse.ArgumentTypeError(f"expected a file that ends in {suffix}, got {text!r}")
    return text


def run(options: argparse.Namespace) -> int:
    """Print the comparison, and write its figure."""
    from rich.console import Console

    from groupwise.inspection.comparison import compare

    comparison = compare(*options.groups, metric=options.metric)
    comparison.print(Console())
    for file in (options.svg, options.csv):
        if file is not None:
            print(comparison.save(file))
    return 0
