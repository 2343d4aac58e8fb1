"""A configuration of TRL as a recipe, and of every argument what becomes of it.

    imported = import_trl("grpo.yaml")  # YAML, JSON, or a script with GRPOConfig(...) in it
    print(imported.render())            # the recipe, each key with the argument that it is from

`files.py` reads what the file holds, and runs nothing; the modules of keys write the recipe.
TRL's defaults that differ from ours are written into it, so that it means what the configuration
meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.schema import settings_table
from groupwise.errors import ConfigError
from groupwise.trl import data_keys, loss_keys, model_keys, rollout_keys, schedule_keys
from groupwise.trl.configuration import KINDS, OPEN, Configuration, Fate, Line
from groupwise.trl.files import read_configuration
from groupwise.trl.table import FATES, FOREIGN, SHOWN, TABLE, Argument
from groupwise.trl.values import flow, short
from groupwise.utils.files import expanded
from groupwise.utils.spelling import closest, counted, nearest
from groupwise.utils.terminal import escaped

CONVERTERS = (
    *model_keys.CONVERTERS,
    *data_keys.CONVERTERS,
    *schedule_keys.CONVERTERS,
    *loss_keys.CONVERTERS,
    *rollout_keys.CONVERTERS,
)
OFF = (None, False, 0, "no", "none", "")
"""Values that leave off what an argument is about."""
MISSPELT = 0.9
"""Likeness of a name to an argument's from which it is taken for a misspelt one."""


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
    """What the recipe still lacks, because the configuration does not hold it."""

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
        titles: dict[Fate | None, str] = {**FATES, None: "not read"}
        lines: dict[str, list[Line]] = {}
        for fate, title in titles.items():
            here = [line for line in self.lines if line.fate == fate]
            if here:
                lines[title] = here
        return lines

    def summary(self) -> str:
        """How many lines came to what, and each line that is lost or means something else."""
        fates = self.by_fate()
        counts = [f"{len(lines)} {title}" for title, lines in fates.items()]
        source = "" if self.source == self.kind else f"{self.source}: "
        total = counted(len(self.lines), "argument")
        lines = [f"{source}{self.kind}, {total}: {', '.join(counts)}"]
        for title in (*[FATES[fate] for fate in SHOWN], "not read"):
            lines += [f"  {title}: {line}" for line in fates.get(title, ())]
        lines += [f"  still to set: {text}" for text in self.needed]
        return escaped("\n".join(lines))

    def render(self) -> str:
        """The recipe as YAML: at its head what became of each argument, behind each key where it is
        from.
        """
        name = _one_line(Path(self.source).name)
        lines = [f"# From TRL's {self.kind} in {name}, by `groupwise recipes import-trl`."]
        for title, here in self.by_fate().items():
            lines.append(f"# {title}:")
            lines += [f"#   {_one_line(line)}" for line in here]
        if self.needed:
            lines.append("# still to set:")
            lines += [f"#   {_one_line(text)}" for text in self.needed]
        lines += self._rendered(self.tree(), "")
        return "\n".join(lines) + "\n"

    def _rendered(self, tree: Mapping[str, Any], prefix: str, indent: str = "") -> Iterator[str]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in self.keys:
                yield f"{indent}{name}:"
                yield from self._rendered(value, f"{key}.", f"{indent}  ")
                continue
            comment = self.comments.get(key, "")
            behind = f"  # {_one_line(comment)}" if comment else ""
            yield f"{indent}{name}: {flow(value)}{behind}"


def _one_line(value: object) -> str:
    return escaped(" ".join(str(value).split()), keep="")


def import_trl(path: str | Path, *, devices: int = 1, kind: str | None = None) -> Imported:
    """Read a configuration: YAML or JSON with arguments by name, or a Python script that makes one
    of the classes.

    devices: on how many TRL ran, which makes its batches larger; a launcher's `num_processes`
        goes before it.
    kind: TRL's class; default: the one that a script makes, or whose arguments a file holds.
    Raises ConfigError for a file that cannot be read, or that holds no configuration.
    """
    if devices < 1:
        raise ConfigError(f"the number of devices is at least 1, got {devices}")
    if kind is not None and kind not in KINDS:
        hint = closest(kind, KINDS)
        raise ConfigError(f"TRL's class is one of {', '.join(KINDS)}; got {kind!r}{hint}")
    return translated(read_configuration(expanded(path), kind, devices))


def translated(trl: Configuration) -> Imported:
    """The recipe of a configuration.  Raises ConfigError for a value of another type than TRL has
    there.
    """
    for convert in CONVERTERS:
        convert(trl)
    _leave_open(trl)
    order = list(settings_table())
    keys = {key: trl.keys[key] for key in sorted(trl.keys, key=order.index)}
    lines = [_line(trl, name, value) for name, value in trl.arguments.items()]
    return Imported(
        source=str(trl.file or trl.kind),
        kind=trl.kind,
        lines=(*lines, *trl.unread),
        keys={key: written.value for key, written in keys.items()},
        comments={key: written.comment for key, written in keys.items()},
        needed=tuple(trl.needed),
    )


def _leave_open(trl: Configuration) -> None:
    """Take back the keys that arguments which could not be read may set."""
    if any(line.name == OPEN for line in trl.unread):  # they may set what TRL's defaults do not
        values = []
        for key, written in list(trl.keys.items()):
            if written.default and written.names:
                values.append(f"{key} {flow(written.value)}")
                del trl.keys[key]
        if values:
            listed = ", ".join(values)
            trl.need(f"what {OPEN} sets of these, which are TRL's where it sets nothing: {listed}")
    for key, written in list(trl.keys.items()):
        if trl.lost.intersection(written.names):
            trl.need(f"{key}, which follows from {', '.join(written.names)}")
            del trl.keys[key]


def _line(trl: Configuration, name: str, value: Any) -> Line:
    """What became of one argument."""
    if name in trl.notes:
        fate, detail = trl.notes[name]
        return Line(name, value, fate, detail)
    row = TABLE.get(name)
    if row is None:
        return Line(name, value, None, _unknown(name))
    if any(name in written.names for written in trl.keys.values()):
        return _carried(trl, name, value, row)
    if value in OFF and row.fate != "unneeded":
        return Line(name, value, "unneeded", "it is off")
    if value == trl.default(name):
        fate = "unneeded" if row.key is None else row.fate
        return Line(name, value, fate, f"{row.key}: its default" if row.key else "TRL's default")
    if row.key is None:
        return Line(name, value, row.fate, row.detail)
    how = f": {row.detail}" if row.detail else ""
    lost = f"a run of {trl.objective} does not take {row.key} from it{how}"
    return Line(name, value, "missing", lost)


def _carried(trl: Configuration, name: str, value: Any, row: Argument) -> Line:
    """The line of an argument that keys of the recipe are from."""
    keys = {key: written for key, written in trl.keys.items() if name in written.names}
    fate = row.fate
    for written in keys.values():
        fate = written.fate or fate
    texts = []
    for key, written in keys.items():
        shown = f"{key}: {short(flow(written.value))}"
        if written.detail and fate in ("changed", "missing"):
            shown += f", {written.detail}"
        texts.append(shown)
    return Line(name, value, fate, ", ".join(texts))


def _unknown(name: str) -> str:
    """What a name may be that is no argument of TRL 1.16."""
    if name in FOREIGN:
        return FOREIGN[name]
    near = nearest(name, TABLE, cutoff=MISSPELT)
    hint = "" if near is None else f" (did you mean {near}?)"
    return f"no argument of TRL 1.16{hint}"
