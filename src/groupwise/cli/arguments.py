"""Values on the command line: what several commands read in the same way."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from groupwise.errors import ConfigError


def recipe(
    command: argparse.ArgumentParser, text: str = "a YAML file or the name of a bundled recipe"
) -> None:
    """The arguments `RECIPE [KEY=VALUE ...]`."""
    command.add_argument("recipe", metavar="RECIPE", help=text)
    what = "override a key, e.g. optimizer.lr=1e-6, stages.sft.steps=100"
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=what)


def positive(text: str) -> int:
    """A whole number from 1."""
    return _at_least(text, 1)


def count(text: str) -> int:
    """A whole number from 0."""
    return _at_least(text, 0)


def share(text: str) -> float:
    """A number above 0, at most 1."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return number


def seed(text: str) -> int:
    """A seed of random numbers."""
    if (number := _at_least(text, 0)) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"must be less than {1 << 63}, got {number}")
    return number


def port(text: str, least: int = 1) -> int:
    """The number of a port; with `least` 0 any that is free is 0."""
    if (number := _at_least(text, least)) > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, got {number}")
    return number


def _at_least(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
    return number


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """`KEY=VALUE` options, each value read as YAML.  Raises ConfigError."""
    from groupwise.config.strict_yaml import parse_value

    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        document, problems = parse_value(value, f"{option} {text}")
        if not equals or problems:
            raise ConfigError(
                str(problems[0]) if problems else f"{option} is written KEY=VALUE, got {text!r}"
            )
        values[key] = document.values
    return values


def texts(options: Sequence[str], option: str) -> dict[str, str]:
    """`KEY=VALUE` options whose values are text.  Raises ConfigError."""
    return {key: str(value) for key, value in pairs(options, option).items()}


def environment(command: argparse.ArgumentParser) -> None:
    """`--environment KEY=VALUE`."""
    what = (
        "a key of environment, as in a recipe: tools=[my_tools.py:search] (default: the run's"
        " environment)"
    )
    command.add_argument(
        "--environment", action="append", default=[], metavar="KEY=VALUE", help=what
    )
