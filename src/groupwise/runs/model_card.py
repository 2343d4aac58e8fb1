"""The model card of a finished run: base, data, method and the figures that were measured."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from groupwise.config.live_objects import LIVE
from groupwise.config.recipes import dump, run_folder
from groupwise.config.settings import Recipe
from groupwise.config.validation import STAGE
from groupwise.runs.job import Judged
from groupwise.runs.origin import origin_of
from groupwise.runs.plan import Lines
from groupwise.utils import files
from groupwise.utils.secrets import scrubbed


def write_card(folder: Path, recipe: Recipe, plan: Lines, after: Judged | None) -> None:
    """Write `README.md` into the folder of the final model."""
    files.write(folder / "README.md", card(recipe, plan, after).encode())


RANDOM = "random weights"
LONGEST = 20
"""Runs that are followed back."""


def base_of(recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """The base model, which no run has trained, and the runs between it and this one, the oldest
    first.

    A hub name, a folder, the name of an object, or `random weights (FAMILY)`.
    """
    way: list[str] = []
    for _ in range(LONGEST):
        path = recipe.model.path
        if path is None:
            family = "?" if recipe.model.scratch is None else recipe.model.scratch.family
            return f"{RANDOM} ({family})", tuple(reversed(way))
        place = path
        if path.startswith(STAGE):
            place = str(run_folder(recipe).parent / path.removeprefix(STAGE))
        origin = None if path.startswith(LIVE) else origin_of(place)
        if origin is None:
            return _under_adapter(path), tuple(reversed(way))
        way.append(str(origin.folder))
        recipe = origin.recipe
    return way.pop(), tuple(reversed(way))


def _under_adapter(path: str) -> str:
    """The base of an adapter's folder; any other model is its own."""
    try:
        base = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError):
        return path
    return base if isinstance(base, str) and base else path


def card(recipe: Recipe, plan: Lines, after: Judged | None) -> str:
    """The text of the card: base, data, method, held-out figures and the recipe itself, secrets
    redacted.
    """
    text = dump(recipe)
    base, way = base_of(recipe)
    published = "" if Path(base).exists() or base.startswith((LIVE, RANDOM)) else base
    start = f"{base}, by way of {', '.join(way)}" if way else base
    data = recipe.data.path or f"built-in task `{recipe.data.task}`"
    lines = [
        "---",
        "library_name: transformers",
        "tags: [groupwise]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        (
            f"Trained with Groupwise {version('groupwise')}, objective `{recipe.objective}`, from"
            f" {start}, on {data}."
        ),
        f"Recipe {hashlib.sha256(text.encode()).hexdigest()[:12]} (below).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {value} |" for label, value in plan),
        "",
        "## Held-out results",
        "",
    ]
    if published:
        lines.insert(2, f"base_model: {published}")
    if after is None:
        lines += ["Not evaluated: the recipe holds out nothing."]
    else:
        figures = after.summary()
        lines += [
            "On what training never saw; ± is half of a 95% interval.",
            "",
            f"| {' | '.join(figures)} |",
            "|" + "---|" * len(figures),
            f"| {' | '.join(figures.values())} |",
        ]
    return scrubbed("\n".join([*lines, "", "## Recipe", "", "```yaml", text.rstrip(), "```", ""]))
