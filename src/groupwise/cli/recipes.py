"""`groupwise recipes`: the bundled recipes, and TRL's configurations made into recipes."""

from __future__ import annotations

import argparse
from pathlib import Path

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError
from groupwise.utils import files

EXAMPLES = (
    "groupwise recipes copy demo my.yaml             a bundled recipe, to edit it",
    "groupwise recipes import-trl trl.yaml new.yaml  TRL's configuration as a recipe, line by line",
)
ACTIONS = ("list", "copy", "show", "import-trl")


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    action = "a bundled recipe, or an action; without it a list of all recipes"
    command.add_argument(
        "action", nargs="?", default="list", metavar="NAME | copy | show | import-trl", help=action
    )
    name = "with copy or show: a bundled recipe; with import-trl: a YAML, JSON or Python file"
    command.add_argument("name", nargs="?", metavar="NAME", help=name)
    command.add_argument(
        "to",
        nargs="?",
        metavar="TO",
        help="with copy and import-trl: the new file (default: NAME.yaml; standard output)",
    )
    command.add_argument(
        "--devices",
        type=typed.positive,
        metavar="N",
        help="with import-trl: number of devices of the TRL run (default 1)",
    )
    command.add_argument(
        "--as",
        dest="kind",
        metavar="CLASS",
        help="with import-trl: GRPOConfig, RLOOConfig, SFTConfig, RewardConfig or DPOConfig",
    )


def run(options: argparse.Namespace) -> int:
    """List, tell, show, copy or translate."""
    from groupwise.config.bundled import bundled_recipes, find_recipe, header
    from groupwise.config.schema import first_sentence

    bundled = bundled_recipes()
    if options.action == "list":
        wide = max(map(len, bundled), default=0)
        for name, path in bundled.items():
            print(f"{name:{wide}}  {first_sentence(header(path))}")
        return 0
    if options.action not in ACTIONS:
        if options.name is not None:
            raise ConfigError(
                "groupwise recipes takes the name of one recipe, or copy, show or import-trl; got"
                f" {options.action!r}"
            )
        print(header(options.action))
        return 0
    if options.action == "import-trl":
        return _import(options.name, options.to, options.devices or 1, options.kind)
    if options.devices is not None or options.kind is not None:
        raise ConfigError("--devices and --as belong to groupwise recipes import-trl FILE")
    if options.name is None:
        raise ConfigError(
            f"groupwise recipes {options.action} needs a NAME: one of {', '.join(bundled)}"
        )
    source = find_recipe(options.name)
    if options.action == "show":
        print(source.read_text(encoding="utf-8"), end="")
        return 0
    target = Path(options.to or source.name)
    if target.is_dir():
        target /= source.name
    _write(target, source.read_bytes(), f"copy {options.name}")
    print(f"{target}: edit it, then run `groupwise train {target}`")
    return 0


def _write(target: Path, content: bytes, action: str) -> None:
    """Write a new file.   action: what was typed, for the message of one that is there."""
    if target.exists():
        raise ConfigError(
            f"{target} exists already; name another file: groupwise recipes {action} OTHER.yaml"
        )
    try:
        files.write(target, content)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; name another file") from error


def _import(name: str | None, to: str | None, devices: int, kind: str | None) -> int:
    from groupwise.trl.recipe import import_trl

    if name is None:
        raise ConfigError(
            "groupwise recipes import-trl needs a file: TRL's YAML or JSON, or a script that makes"
            " a GRPOConfig"
        )
    imported = import_trl(name, devices=devices, kind=kind)
    if to is None:
        print(imported.render(), end="")
        return 0
    _write(Path(to), imported.render().encode(), f"import-trl {name}")
    print(imported.summary())
    print(f"{to}: read its comments, then run `groupwise train {to} --dry-run`")
    return 0
