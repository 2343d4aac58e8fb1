"""`groupwise replay`: a recorded step computed again."""

from __future__ import annotations

import argparse
import json

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError

EXAMPLES = (
    (
        "groupwise replay runs/demo/grpo --step 3                             compare with the"
        " recorded numbers"
    ),
    (
        "groupwise replay runs/demo/grpo --step 3 --set objective=dr_grpo     the same step with"
        " another objective"
    ),
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("folder", metavar="RUN", help="a run folder")
    command.add_argument(
        "--step", type=typed.positive, required=True, metavar="N", help="a recorded step"
    )
    changed = (
        "recompute the step with a change too: objective=dr_grpo, group.surrogate.high=0.28,"
        " optimizer.lr=1e-5 ..."
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help=changed
    )
    command.add_argument(
        "--no-model",
        action="store_true",
        help="compute only advantages, loss and its gradient, without the model",
    )
    reach = (
        "largest number of recorded steps to train again from the nearest checkpoint (default 20)"
    )
    command.add_argument("--reach", type=typed.count, metavar="N", help=reach)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--tokens", action="store_true", help="with --json: also the gradient of every log-prob"
    )
    command.epilog = "The exit code is 0 if all numbers equal the recorded ones, else 1."


def run(options: argparse.Namespace) -> int:
    """Replay and print; 1 if a number differs."""
    from groupwise.inspection.replay import REACH, replay
    from groupwise.inspection.replay_report import as_dict, render, token_gradients
    from groupwise.utils.terminal import escaped

    if options.tokens and not options.json:
        raise ConfigError("--tokens is a part of the JSON: say --json too")
    reach = REACH if options.reach is None else options.reach
    replayed = replay(
        options.folder, options.step, options.changes, model=not options.no_model, reach=reach
    )
    if not options.json:
        print(escaped(render(replayed)))
    elif options.tokens:
        print(
            json.dumps({**as_dict(replayed), "tokens": token_gradients(replayed)}, allow_nan=False)
        )
    else:
        print(json.dumps(as_dict(replayed), indent=1, allow_nan=False))
    return 0 if replayed.same else 1
