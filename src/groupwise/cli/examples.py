"""`groupwise examples`: held-out prompts with what the policy answered before and after training,
side by side.
"""

from __future__ import annotations

import argparse

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError
from groupwise.utils.terminal import escaped

EXAMPLES = (
    (
        "groupwise examples runs/demo/grpo          ten held-out prompts, at the first evaluation"
        " and at the last"
    ),
    "groupwise examples runs/demo/grpo -n 3     three of them",
)
COLUMNS = ["prompt_id", "prompt_text", "completion_text", "reward", "index"]
LONGEST = 160
"""Characters of a text that are shown."""


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("folder", metavar="RUN", help="a run folder")
    command.add_argument(
        "-n",
        "--count",
        type=typed.positive,
        default=10,
        metavar="N",
        help="prompts to show (default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Print each prompt as the policy read it, with one answer of the first evaluation and one of
    the last, and what each earned.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from groupwise.api.progress import make_console
    from groupwise.runs.origin import run_of
    from groupwise.runs.rollout_files import EVALUATIONS, steps, table
    from groupwise.runs.run_files import RunFiles

    run = RunFiles(run_of(options.folder).folder)
    known, _ = steps(run, EVALUATIONS)
    if not known:
        raise ConfigError(
            f"{options.folder} holds no evaluation: train on, or set eval.every or eval.at_start"
        )
    ends = sorted({min(known), max(known)})
    sides = [
        {
            row["prompt_id"]: row
            for row in reversed(table(run, step, COLUMNS, EVALUATIONS).to_pylist())
        }
        for step in ends
    ]
    shared = [prompt for prompt in reversed(sides[-1]) if prompt in sides[0]][: options.count]
    answers = Table("prompt", box=SIMPLE_HEAD, pad_edge=False)
    for step in ends:
        answers.add_column("reward")
        answers.add_column("before training" if step == 0 else f"step {step}")
    for prompt in shared:
        cells = [
            text
            for side in sides
            for text in (f"{side[prompt]['reward']:.3g}", _short(side[prompt]["completion_text"]))
        ]
        answers.add_row(*map(Text, (_end_of(sides[0][prompt]["prompt_text"]), *cells)))
    make_console().print(answers)
    return 0


def _end_of(text: str) -> str:
    """The end of a prompt, where its question stands."""
    line = " ".join(text.split())
    return escaped(line if len(line) <= LONGEST else f"... {line[-LONGEST:]}")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return escaped(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...")
