"""`groupwise config`: what the keys of a recipe mean."""

from __future__ import annotations

import argparse

EXAMPLES = (
    "groupwise config group.group_size     a key; a section such as `group` lists its keys",
    "groupwise config num_generations      a name of TRL's",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="a key, a section or a TRL argument; without it all keys",
    )
    command.add_argument("--markdown", action="store_true", help="all keys as a Markdown page")


def run(options: argparse.Namespace) -> int:
    """Print."""
    from groupwise.config.schema import (
        describe,
        first_sentence,
        knobs,
        lookup,
        reference,
        settings_table,
    )
    from groupwise.trl.table import TABLE, explain

    if options.markdown:
        print(reference(), end="")
    elif options.key is not None:
        foreign = options.key in TABLE and lookup(options.key) is None
        print(explain(options.key) if foreign else describe(options.key))
    else:
        width = max(map(len, knobs()))
        for key in knobs():
            print(f"{key:{width}}  {first_sentence(settings_table()[key].meaning)}")
    return 0
