"""`groupwise score`: reward functions over completions that exist already, before any compute is
spent.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError
from groupwise.utils.files import expanded
from groupwise.utils.spelling import near_path

EXAMPLES = (
    (
        "groupwise score accuracy completions.jsonl                       a built-in over the rows"
        " of a file"
    ),
    (
        "groupwise score my_rewards.py:short runs/demo/grpo --steps all   your own over what a run"
        " sampled"
    ),
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    reward = (
        "built-in name, module:function or file.py:function, separated by commas (default: the"
        " run's)"
    )
    command.add_argument("reward", nargs="?", metavar="REWARD", help=reward)
    file = "rows with prompt, completion and the columns of the functions, or a run"
    command.add_argument("file", metavar="FILE", help=file)
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="keyword argument of the function",
    )
    command.add_argument(
        "--column", action="append", default=[], metavar="OURS=THEIRS", help="rename a column"
    )
    command.add_argument(
        "--steps",
        metavar="N,N-N",
        help="of a run: recorded steps, e.g. 3, 1-10 or all (default: the newest)",
    )
    command.add_argument("--limit", type=typed.positive, metavar="N", help="first rows only")
    command.add_argument(
        "--rows",
        type=typed.count,
        default=10,
        metavar="N",
        help="rows to print (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Score and print."""
    from groupwise.config.settings import RewardSettings
    from groupwise.runs.origin import origin_of
    from groupwise.runs.trust import demand_trust

    keywords = typed.pairs(options.arg, "--arg")
    if options.reward is None:
        origin = origin_of(options.file) if expanded(options.file).is_dir() else None
        if origin is None or not origin.recipe.rewards:
            if not expanded(options.file).exists():
                raise ConfigError(f"there is no {options.file}{near_path(expanded(options.file))}")
            raise ConfigError(
                f"name a reward function: groupwise score REWARD {options.file} (only a run with"
                " rewards brings its own)"
            )
        if keywords:
            raise ConfigError(
                f"--arg belongs to a function that is named: groupwise score REWARD {options.file}"
                " --arg ..."
            )
        demand_trust(origin, ("rewards",))
        functions: Sequence[RewardSettings] = origin.recipe.rewards
    else:
        if expanded(options.reward).exists() and not expanded(options.file).exists():
            raise ConfigError(
                f"{options.reward} is no reward function: groupwise score REWARD {options.reward}"
            )
        functions = [
            RewardSettings(function=name.strip(), args=keywords)
            for name in options.reward.split(",")
        ]
    if keywords and len(functions) > 1:
        raise ConfigError(
            f"--arg belongs to one function, but {len(functions)} are named; score them one by one"
        )
    from groupwise.inspection.score import score_file

    columns, chosen = (
        typed.texts(options.column, "--column"),
        (None if options.steps is None else steps_of(options.steps)),
    )
    report = score_file(functions, options.file, columns=columns, limit=options.limit, steps=chosen)
    print(report.render(rows=options.rows))
    return 0


def steps_of(text: str) -> list[range]:
    """Ranges of steps; `all` is every one.  Raises ConfigError.

    >>> steps_of("3,7-9")
    [range(3, 4), range(7, 10)]
    """
    if text == "all":
        return [range(1 << 62)]
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ConfigError(f"--steps is written 3, 1-10, 1,5,9 or all, got {text!r}")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranges
