"""`groupwise check`: a minute of sampling and scoring before hours of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from groupwise.cli import arguments as typed

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.config.settings import Recipe
    from groupwise.inspection.check import Finding, Lines
    from groupwise.runs.origin import Origin

EXAMPLES = (
    "groupwise check my.yaml                  before training",
    "groupwise check runs/demo/grpo           what a run has trained, with the run's own settings",
)
MARKS = {True: ("ok  ", "green"), False: ("FAIL", "red"), None: ("note", "yellow")}
"""Marks of a finding and their styles, by `Finding.good`."""


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    typed.recipe(command, "a YAML file, the name of a bundled recipe, or a run")


def run(options: argparse.Namespace) -> int:
    """Check and print; 1 if something is wrong."""
    from groupwise.runs.origin import is_config_of, origin_of

    path, origin = options.recipe, origin_of(options.recipe)
    if origin is not None and path.endswith((".yaml", ".yml")):
        if is_config_of(path, origin):
            path = str(origin.folder)
        else:
            origin = None
    if origin is not None:
        from groupwise.runs.trust import demand_trust

        demand_trust(origin)
        return check_run(origin, path, options.overrides)
    return check_recipe(options.recipe, options.overrides)


def check_recipe(
    path: str, overrides: Sequence[str] = (), *, console: Console | None = None
) -> int:
    """Check every stage of a recipe and print a line for each finding.

    Returns 0 if nothing is wrong, else 1.   Raises ConfigError for a recipe that cannot be read.
    """
    from groupwise.config.recipes import load_stages, with_lines

    wrong = 0
    for stage, recipe in load_stages(path, overrides).items():
        lines = partial(with_lines, path, overrides, stage)
        wrong += _print_findings(recipe.name, recipe, lines, console)
    return _print_end(wrong, console)


def check_run(
    origin: Origin, path: str, overrides: Sequence[str] = (), *, console: Console | None = None
) -> int:
    """Check a run's recipe with the model at `path` in place of the one that it started from."""
    from groupwise.api.loaded_policy import model_folder, settings_of
    from groupwise.runs.origin import overridden

    recipe = overridden(origin, overrides).recipe
    trained = settings_of(recipe.model, model_folder(path))
    title = f"{origin.folder}, after step {origin.step}"
    wrong = _print_findings(title, replace(recipe, model=trained), nullcontext, console)
    return _print_end(wrong, console)


def _print_findings(title: str, recipe: Recipe, lines: Lines, console: Console | None) -> int:
    """Print the findings of one stage, and return how many of them are wrong."""
    from rich.text import Text

    from groupwise.api.progress import make_console
    from groupwise.inspection.check import check_stage

    console = console or make_console()
    console.print(Text(f"{title} ({recipe.objective})", style="bold"))
    wrong = 0
    for finding in check_stage(recipe, lines):
        console.print(_line(finding))
        if finding.good is False:
            wrong += 1
    return wrong


def _line(finding: Finding) -> object:
    from rich.text import Text

    from groupwise.api.progress import safe
    from groupwise.utils.secrets import scrubbed

    name = (f"{finding.name:<12}", "bold")
    return Text.assemble(MARKS[finding.good], "  ", name, safe(scrubbed(finding.text)))


def _print_end(wrong: int, console: Console | None) -> int:
    from groupwise.api.progress import make_console

    text = f"{wrong} of the checks failed" if wrong else "nothing is wrong"
    (console or make_console()).print(text, style="bold")
    return 1 if wrong else 0
