"""The model card of a finished run: what it was made from, how, and what it can do.  Nothing that was not measured."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

from groupwise.config.live import LIVE
from groupwise.config.recipes import dump
from groupwise.config.settings import Recipe
from groupwise.runs.build import Judged
from groupwise.runs.plan import Lines
from groupwise.utils import files
from groupwise.utils.secrets import scrubbed


def write_card(folder: Path, recipe: Recipe, plan: Lines, after: Judged | None) -> None:
    """Write `README.md` into the folder of the final model."""
    files.write(folder / "README.md", card(recipe, plan, after).encode())


def card(recipe: Recipe, plan: Lines, after: Judged | None) -> str:
    """The text of the card: base, data, method, held-out figures and the recipe itself, secrets redacted."""
    text = dump(recipe)
    published = recipe.model.path is not None and not recipe.model.path.startswith(LIVE) and not Path(recipe.model.path).exists()
    base = recipe.model.path or f"random weights ({recipe.model.scratch.family if recipe.model.scratch else '?'})"
    data = recipe.data.path or f"built-in task `{recipe.data.task}`"
    lines = [
        "---",
        "library_name: transformers",
        *([f"base_model: {recipe.model.path}"] if published else []),
        "tags: [groupwise]",
        "---",
        "",
        f"# {recipe.name}",
        "",
        f"Trained with Groupwise {version('groupwise')}, objective `{recipe.objective}`, from {base}, on {data}.",
        f"Recipe {hashlib.sha256(text.encode()).hexdigest()[:12]} (below).",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {value} |" for label, value in plan),
        "",
        "## Held-out results",
        "",
    ]
    if after is None:
        lines += ["Not evaluated: the recipe holds out nothing."]
    else:
        figures = after.summary()
        lines += [
            "On what training never saw; ± is half of a 95 % interval.",
            "",
            f"| {' | '.join(figures)} |",
            "|" + "---|" * len(figures),
            f"| {' | '.join(figures.values())} |",
        ]
    return scrubbed("\n".join([*lines, "", "## Recipe", "", "```yaml", text.rstrip(), "```", ""]))
