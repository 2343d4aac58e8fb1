"""A configuration of TRL as a recipe, and of every argument what becomes of it.

    imported = import_trl("grpo.yaml")       # YAML, JSON, a script with GRPOConfig(...) in it, or a
    shell script that starts TRL print(imported.render())                # the recipe, each key with
    the argument that it is from

What the file says is read by `trl_files.py`, which runs nothing; what it comes to says the table in
`trl.py`.  TRL's defaults that differ from ours are written into the recipe, so that it means what
the configuration meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.schema import settings_table
from groupwise.config.trl import FATES, TABLE, convert
from groupwise.config.trl_arguments import (
    ADAPTER,
    KINDS,
    OPEN,
    Configuration,
    Fate,
    Line,
    flow,
    short,
)
from groupwise.config.trl_files import read_configuration
from groupwise.errors import ConfigError
from groupwise.utils.files import expanded
from groupwise.utils.spelling import closest, counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A configuration of TRL as a recipe."""

    source: str
    kind: str
    """TRL's class."""
    lines: tuple[Line, ...]
    """Every argument that the user wrote, in its order."""
    keys: Mapping[str, Any]
    """The recipe: dotted key -> value."""
    comments: Mapping[str, str]
    """Dotted key -> where it is from."""
    needed: tuple[str, ...]
    """What the recipe still has to say, because the configuration does not."""

    def tree(self) -> dict[str, Any]:
        """The recipe as nested mappings."""
        root: dict[str, Any] = {}
        for key, value in self.keys.items():
            *sections, last = key.split(".")
            here = root
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        return root

    def by_fate(self) -> dict[str, list[Line]]:
        """The lines by what became of them, in words."""
        titles = {**FATES, None: "not read"}
        return {
            title: here
            for fate, title in titles.items()
            if (here := [line for line in self.lines if line.fate == fate])
        }

    def summary(self) -> str:
        """How many lines came to what, and each line that is lost or means something else."""
        fates = self.by_fate()
        counts = ", ".join(f"{len(lines)} {title}" for title, lines in fates.items())
        source = "" if self.source == self.kind else f"{self.source}: "
        lines = [f"{source}{self.kind}, {counted(len(self.lines), 'argument')}: {counts}"]
        for title in (FATES["changed"], FATES["missing"], "not read"):
            lines += [f"  {title}: {line}" for line in fates.get(title, ())]
        return "\n".join([*lines, *(f"  still to set: {one}" for one in self.needed)])

    def render(self) -> str:
        """The recipe as YAML: at its head what became of each argument, behind each key where it is
        from.
        """
        lines = [
            f"# From TRL's {self.kind} in {Path(self.source).name}, by `groupwise recipes"
            " import-trl`."
        ]
        for title, here in self.by_fate().items():
            lines += [f"# {title}:", *(f"#   {_one_line(line)}" for line in here)]
        lines += ["# still to set:", *(f"#   {one}" for one in self.needed)] if self.needed else []
        return "\n".join([*lines, *self._rendered(self.tree(), "")]) + "\n"

    def _rendered(self, tree: Mapping[str, Any], prefix: str, indent: str = "") -> Iterator[str]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in self.keys:
                yield f"{indent}{name}:"
                yield from self._rendered(value, f"{key}.", f"{indent}  ")
            else:
                comment = self.comments.get(key, "")
                yield f"{indent}{name}: {flow(value)}" + (
                    f"  # {_one_line(comment)}" if comment else ""
                )


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def import_trl(path: str | Path, *, devices: int = 1, kind: str | None = None) -> Imported:
    """Read a configuration: YAML or JSON with arguments by name, a Python script that makes one of
    the classes, or a shell script (.sh) with the command that starts TRL.

    devices: on how many TRL ran, which makes its batches larger; a launcher's `--num_processes`
        goes before it.
    kind: TRL's class; default: the one that a script makes, that a command names, or whose
        arguments a file holds.
    Raises ConfigError for a file that cannot be read, or that holds no configuration.
    """
    file = expanded(path)
    if devices < 1:
        raise ConfigError(f"the number of devices is at least 1, got {devices}")
    if kind is not None and kind not in KINDS:
        raise ConfigError(
            f"TRL's class is one of {', '.join(KINDS)}; got {kind!r}{closest(kind, list(KINDS))}"
        )
    return translated(read_configuration(file, kind, devices))


def translated(trl: Configuration) -> Imported:
    """The recipe of a configuration.  Raises ConfigError for a value of another type than TRL has
    there.
    """
    convert(trl)
    if any(
        line.name == OPEN for line in trl.unread
    ):  # arguments that are not known may say otherwise than TRL's defaults
        default = [key for key, one in trl.keys.items() if one.default and one.names]
        values = ", ".join(f"{key} {flow(trl.keys.pop(key).value)}" for key in default)
        if values:
            trl.need(f"what {OPEN} sets of these, which are TRL's where it sets nothing: {values}")
    for key in [key for key, one in trl.keys.items() if trl.lost.intersection(one.names)]:
        trl.need(f"{key}, which follows from {', '.join(trl.keys.pop(key).names)}")
    order = list(settings_table())
    keys = {key: trl.keys[key] for key in sorted(trl.keys, key=order.index)}
    return Imported(
        source=str(trl.file or trl.kind),
        kind=trl.kind,
        lines=(*(_line(trl, name, value) for name, value in trl.arguments.items()), *trl.unread),
        keys={key: one.value for key, one in keys.items()},
        comments={key: one.comment for key, one in keys.items()},
        needed=tuple(trl.needed),
    )


def _line(trl: Configuration, name: str, value: Any) -> Line:
    """What became of one argument."""
    row, written = TABLE.get(name), {key: one for key, one in trl.keys.items() if name in one.names}
    if name in trl.notes:
        return Line(name, value, *trl.notes[name])
    if name.startswith(ADAPTER):
        return Line(name, value, "missing", "an adapter has rank, alpha and targets")
    if row is None:
        return Line(name, value, None, f"no argument of TRL 1.16{closest(name, list(TABLE))}")
    fates: list[Fate] = [*(one.fate for one in written.values() if one.fate), row.fate]
    fate = fates[0]
    off = [
        None,
        False,
        0,
        0.0,
        "no",
        "none",
        "",
        *([trl.default(name)] if fate == "missing" else []),
    ]
    if not written and (row.convert or fate == "missing") and value in off:
        return Line(name, value, "unneeded", "it is off")
    if row.key is None or row.convert is None:
        return Line(name, value, fate, row.says)
    explained = fate in ("changed", "missing")
    says = [
        f"{key}: {short(flow(one.value))}" + (f", {one.says}" if one.says and explained else "")
        for key, one in written.items()
    ]
    return Line(name, value, fate, ", ".join(says) or f"{row.key}: its default")
