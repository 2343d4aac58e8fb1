"""`groupwise push`: the final model of a run on the Hugging Face hub."""

from __future__ import annotations

import argparse

EXAMPLES = (
    "groupwise push runs/mine me/mine-1.7b             upload final/ with its card",
    "groupwise push runs/mine me/mine-1.7b --private   into a private repository",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument("run_folder", metavar="RUN", help="the folder of a finished run")
    command.add_argument(
        "repository", metavar="ORG/NAME", help="the repository; it is made if it is not there"
    )
    command.add_argument(
        "--private", action="store_true", help="make a private repository, if it makes one"
    )
    command.add_argument("--message", metavar="TEXT", help="the message of the commit")


def run(options: argparse.Namespace) -> int:
    """Upload, and print the address."""
    from groupwise.api.publish import push

    print(
        push(
            options.run_folder,
            options.repository,
            private=options.private,
            message=options.message,
        )
    )
    return 0
