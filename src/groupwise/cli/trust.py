"""`groupwise trust`: let commands run the code that a run folder from elsewhere names."""

from __future__ import annotations

import argparse

from groupwise.utils.terminal import escaped

EXAMPLES = (
    (
        "groupwise trust runs/theirs           print the code of its recipe, and allow eval, chat,"
        " replay ... to run it"
    ),
    "groupwise trust runs/theirs --show    only print the code",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("folder", metavar="RUN", help="a run folder")
    command.add_argument("--show", action="store_true", help="only print the code of its recipe")
    command.epilog = (
        "Trust applies to the current recipe, your user and this machine. Your own runs need no"
        " trust."
    )


def run(options: argparse.Namespace) -> int:
    """Print, and seal."""
    from groupwise.runs.origin import run_of
    from groupwise.runs.trust import named_code, seal

    origin = run_of(options.folder, "; only what a recipe names needs trust")
    for key, text in named_code(origin.recipe):
        print(escaped(f"{key}: {text}"))
    if not options.show:
        seal(origin.folder, origin.config)
        print(f"{origin.folder} is trusted")
    return 0
