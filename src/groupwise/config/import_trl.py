"""A configuration of TRL as a recipe: read line by line, and of every line it is said what becomes of it.

    imported = import_trl("grpo.yaml")       # YAML, JSON, a script with GRPOConfig(...) in it, or a shell script that starts TRL
    print(imported.render())                # the recipe, each key with the argument that it is from

What the file says is read by `trl_files.py`, which runs nothing.  TRL's defaults that differ from ours are written into the recipe,
so that it means what the configuration meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.config.trl import FATES, TABLE, Converter
from groupwise.config.trl_arguments import ADAPTER, ADAPTER_HAS, KINDS, ROLLED, Configuration, Fate, Line, flow, short
from groupwise.config.trl_convert import Need, Note, Value, Write
from groupwise.config.trl_files import SHELL_SCRIPTS, read_arguments
from groupwise.config.trl_scripts import OPEN
from groupwise.errors import ConfigError
from groupwise.utils.files import expanded
from groupwise.utils.spelling import closest

DEFAULT = "TRL's default"
"""How the comment of a key begins that no argument says."""
SECTIONS = {
    **dict.fromkeys(("rollout", "group", "rewards", "environment"), ROLLED),
    "reward_model": ("RewardConfig",),
    "pairs": ("DPOConfig",),
}
"""Sections of a recipe that only these of TRL's classes have."""
FIRST = ("objective", "name", "seed", "steps", "epochs", "batch_size", "parallel")
"""Keys that stand before the sections."""


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
        return {title: here for fate, title in titles.items() if (here := [line for line in self.lines if line.fate == fate])}

    def summary(self) -> str:
        """How many lines came to what, and each line that is lost or means something else."""
        fates = self.by_fate()
        lines = [
            f"{self.source}: {self.kind}, {len(self.lines)} arguments: " + ", ".join(f"{len(v)} {k}" for k, v in fates.items())
        ]
        for title in (FATES["changed"], FATES["missing"], "not read"):
            lines += [f"  {title}: {line}" for line in fates.get(title, ())]
        return "\n".join([*lines, *(f"  still to say: {one}" for one in self.needed)])

    def render(self) -> str:
        """The recipe as YAML: at its head what became of each argument, behind each key where it is from."""
        lines = [f"# From TRL's {self.kind} in {Path(self.source).name}, by `groupwise recipes import-trl`."]
        for title, here in self.by_fate().items():
            lines += [f"# {title}:", *(f"#   {_one_line(line)}" for line in here)]
        lines += ["# still to say:", *(f"#   {one}" for one in self.needed)] if self.needed else []
        return "\n".join([*lines, *self._rendered(self.tree(), "")]) + "\n"

    def _rendered(self, tree: Mapping[str, Any], prefix: str, indent: str = "") -> Iterator[str]:
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict) and key not in self.keys:
                yield f"{indent}{name}:"
                yield from self._rendered(value, f"{key}.", f"{indent}  ")
            else:
                comment = self.comments.get(key, "")
                yield f"{indent}{name}: {flow(value)}" + (f"  # {_one_line(comment)}" if comment else "")


def import_trl(path: str | Path, *, devices: int = 1, kind: str | None = None) -> Imported:
    """Read a configuration: YAML or JSON with arguments by name, a Python script that makes one of the classes, or a shell script
    (.sh) with the command that starts TRL.

    devices: on how many TRL ran, which makes its batches larger; a launcher's `--num_processes` goes before it.
    kind: TRL's class; default: the one that a script makes, that a command names, or whose arguments a file holds.
    Raises ConfigError for a file that cannot be read, or that holds no configuration.
    """
    file = expanded(path)
    if devices < 1:
        raise ConfigError(f"the number of devices is at least 1, got {devices}")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"TRL's class is one of {', '.join(KINDS)}; got {kind!r}{closest(kind, list(KINDS))}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    name, arguments, unread, needed = read_arguments(text, file, kind)
    if isinstance(processes := arguments.get("num_processes"), int) and processes > 0 and file.suffix in SHELL_SCRIPTS:
        devices = processes
    return translated(Configuration(kind=name, arguments=arguments, devices=devices, file=file), unread, needed)


def translated(trl: Configuration, unread: Sequence[Line] = (), needed: Sequence[str] = ()) -> Imported:
    """The recipe of a configuration.   unread: what else it says, and what became of that.   needed: what the script needs."""
    keys: dict[str, Any] = {"objective": KINDS[trl.kind]}
    comments: dict[str, str] = {}
    written: dict[str, list[Write]] = {}
    notes: dict[str, Note] = {}
    needed = list(needed)
    for outcome in _outcomes(trl):
        match outcome:
            case Write(key, value, names, says):
                sources = [name for name in names if name in trl.arguments]
                source = ", ".join(sources) or f"{DEFAULT} {names[0]}"
                keys[key], comments[key] = value, f"{source}: {says}" if says else source
                for name in sources:
                    written.setdefault(name, []).append(outcome)
            case Note():
                notes[outcome.name] = outcome
            case Need(says):
                needed.append(says)
    if any(line.name == OPEN for line in unread):  # arguments that are not known may say otherwise than TRL's defaults
        default = [key for key, comment in comments.items() if comment.startswith(DEFAULT)]
        values = ", ".join(f"{key} {flow(keys.pop(key))}" for key in default)
        needed += [f"what {OPEN} sets of these, which are TRL's where it sets nothing: {values}"] if values else []

    def line(name: str, value: Any) -> Line:
        row, writes = TABLE.get(name), {one.key: one for one in written.get(name, ()) if one.key in keys}
        fates: list[Fate | None] = [*(one.fate for one in writes.values() if one.fate), row.fate if row else None]
        if name in notes:
            return Line(name, value, notes[name].fate, notes[name].says)
        if row is None:
            adapter = name.startswith(ADAPTER)
            unknown = f"no argument of TRL 1.16{closest(name, list(TABLE))}"
            return Line(name, value, "missing" if adapter else None, ADAPTER_HAS if adapter else unknown)
        if not writes and (row.convert or row.fate == "missing") and value in (None, False, 0, 0.0, "no", "none", "", row.off):
            return Line(name, value, "unneeded", "it is off")
        if row.key is None or row.convert is None:
            return Line(name, value, fates[0], row.says)
        says = [
            f"{key}: {short(flow(keys[key]))}" + (f", {one.says}" if one.says and fates[0] in ("changed", "missing") else "")
            for key, one in writes.items()
        ]
        return Line(name, value, fates[0], ", ".join(says) or f"{row.key}: nothing to write")

    return Imported(
        source=str(trl.file or trl.kind),
        kind=trl.kind,
        lines=(*(line(name, value) for name, value in trl.arguments.items()), *unread),
        keys={key: keys[key] for key in sorted(keys, key=lambda key: FIRST.index(key) if key in FIRST else len(FIRST))},
        comments=comments,
        needed=tuple(needed),
    )


def _outcomes(trl: Configuration) -> Iterator[Write | Note | Need]:
    """What the rows of the table make of a configuration; a converter of several rows runs once.

    Raises ConfigError for a value of another type than TRL has there.
    """
    done = set()
    for name, row in TABLE.items():
        if row.convert is None or row.convert in done:
            continue
        if not isinstance(row.convert, Value):
            done.add(row.convert)
        try:
            yield from _converted(trl, name, row.convert)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            wrong = trl.last_set
            raise ConfigError(f"{wrong}={trl.get(wrong)!r}: no value that TRL takes ({type(error).__name__}: {error})") from error


def _converted(trl: Configuration, name: str, convert: Value | Converter) -> Iterator[Write | Note | Need]:
    """What one row makes of a configuration."""
    if not isinstance(convert, Value):
        yield from (one for one in convert(trl, name) if not isinstance(one, Write) or _has(trl.kind, one.key))
        return
    value = trl.get(name) if convert.always else trl.written(name)
    key = str(TABLE[name].key)
    if (convert.always or name in trl.arguments) and convert.when(value) and _has(trl.kind, key):
        yield Write(key, convert.kind(value), (name,))


def _has(kind: str, key: str) -> bool:
    """True if runs of TRL's class have a key."""
    return kind in SECTIONS.get(key.partition(".")[0], (kind,))


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
