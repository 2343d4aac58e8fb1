"""The recipes that come with Groupwise: where they lie, what they are called, and what their
headers say.
"""

from __future__ import annotations

import sys
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.utils.files import expanded
from groupwise.utils.spelling import closest, near_path


def recipe_folder() -> Path:
    """Where the recipes that come with Groupwise lie: `recipes/` of a checkout, else of the
    installed distribution.
    """
    checkout = Path(__file__).resolve().parents[3] / "recipes"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "groupwise" / "recipes"


def bundled_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with Groupwise."""
    return {file.stem: file for file in sorted(recipe_folder().glob("*.yaml"))}


def find_recipe(path: str | Path) -> Path:
    """The file of a recipe, by path or by the name of a bundled one.  Raises ConfigError with what
    is near.
    """
    file = expanded(path)
    if file.is_file():
        return file
    bundled = bundled_recipes()
    if str(path) in bundled:
        return bundled[str(path)]
    if file.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; a recipe is a .yaml file")
    near = closest(str(path), list(bundled)) or near_path(file)
    raise ConfigError(
        f"no such recipe {str(path)!r}: neither a file nor one of"
        f" {', '.join(bundled) or 'the bundled ones'}{near}"
    )


def header(path: str | Path) -> str:
    """The comment lines at the top of a recipe: what it does, its expected result and its cost."""
    lines = []
    for line in find_recipe(path).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines).strip()
