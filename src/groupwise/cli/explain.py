"""`groupwise explain`: one step of an algorithm worked through in numbers."""

from __future__ import annotations

import argparse

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError

EXAMPLES = (
    "groupwise explain --preset dr_grpo --rewards 1,0,0,0.5     made-up rewards",
    "groupwise explain runs/demo/grpo --step 3                  a group that a run recorded",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "run_folder",
        nargs="?",
        metavar="RUN",
        help="a group that a run recorded, with its own numbers",
    )
    command.add_argument(
        "--step",
        type=typed.positive,
        metavar="N",
        help="of a run: a recorded step (default: the newest)",
    )
    rewards = "reward of each completion, or none (default 1,0,0.5)"
    command.add_argument("--rewards", type=_rewards, metavar="R,R,...", help=rewards)
    command.add_argument(
        "--lengths", type=_lengths, metavar="N,N,...", help="tokens of each completion"
    )
    command.add_argument("--preset", metavar="NAME", help="an online algorithm (default grpo)")
    command.add_argument(
        "--mu", type=typed.positive, metavar="N", help="passes over the rollout (default 2)"
    )
    command.add_argument(
        "--beta",
        type=float,
        metavar="B",
        help="weight of the KL to the reference (default: the preset's)",
    )
    command.add_argument(
        "--lr",
        type=float,
        metavar="LR",
        help="step on the toy policy (default 5)",
    )


def run(options: argparse.Namespace) -> int:
    """Work a step through and print it."""
    if options.run_folder is None and options.step is not None:
        raise ConfigError("--step is one of a run: groupwise explain RUN --step N")
    if options.preset is not None:
        from groupwise.algorithms.table import ALGORITHMS
        from groupwise.config.objectives import DATASET
        from groupwise.utils.spelling import closest

        known = options.preset in (*ALGORITHMS, *DATASET)
        if not known and ":" not in options.preset:  # refused before torch is imported
            near = closest(options.preset, ALGORITHMS)
            raise ConfigError(
                f"there is no online algorithm {options.preset!r}{near}; there are"
                f" {', '.join(ALGORITHMS)}"
            )
    from groupwise.inspection.explain import render, work, work_of_run

    typed_in = {}
    for name in ("rewards", "lengths", "preset", "mu", "beta", "lr"):
        if getattr(options, name) is not None:
            typed_in[name] = getattr(options, name)
    if options.run_folder is None:
        example = work(**typed_in)
    else:
        about, example = work_of_run(options.run_folder, options.step, **typed_in)
        print(about)
    print(render(example))
    return 0


def _rewards(text: str) -> list[float | None]:
    try:
        return [None if part.strip().lower() == "none" else float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be numbers or none with commas between them, got {text!r}"
        ) from error


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers with commas between them, got {text!r}"
        ) from error
