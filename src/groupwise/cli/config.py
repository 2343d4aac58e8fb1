"""`groupwise config`: what the keys of a recipe mean."""

from __future__ import annotations

import argparse

EXAMPLES = (
    "groupwise config group.group_size     a key; a section such as `group` lists its keys",
    "groupwise config num_generations      a name of TRL's",
    "groupwise config clip                 a word: the keys that name it",
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "key",
        nargs="?",
        metavar="KEY",
        help="a key, a section, a TRL argument or a word; without it all keys",
    )
    command.add_argument("--markdown", action="store_true", help="all keys as a Markdown page")


def run(options: argparse.Namespace) -> int:
    """Print."""
    from groupwise.config.schema import describe, keys_about, knobs, lookup, reference
    from groupwise.trl.table import FOREIGN, TABLE, explain

    word = options.key
    if options.markdown:
        print(reference(), end="")
    elif word is None:
        show_keys(knobs())
    elif lookup(word) is not None:
        print(describe(word))
    elif word in TABLE or word in FOREIGN:
        print(explain(word))
    elif "." not in word and (keys := keys_about(word)):
        print(f"{word!r} is no key. These name it:\n")
        show_keys(keys)
    else:
        print(describe(word))
    return 0


def show_keys(keys: list[str]) -> None:
    """Print keys with the first sentence of their meaning."""
    from groupwise.config.schema import first_sentence, settings_table

    width = max(map(len, keys))
    for key in keys:
        print(f"{key:{width}}  {first_sentence(settings_table()[key].meaning)}")
