"""The settings of a recipe: every key with its meaning, type, range, default and TRL's name for it.

Nothing is written down twice: keys, types, ranges and defaults come from the dataclasses in
`settings.py` (and one of `algorithms/losses.py`), meanings from the text below each field there,
TRL's names from `trl_names.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Union

from annotated_types import Ge, Gt, Le, Lt, MinLen

from groupwise.algorithms import losses
from groupwise.algorithms.table import PARTS
from groupwise.config import cluster, objectives, settings
from groupwise.config.trl_names import LORA_LACKING, TRL_KEYS, TRL_NAMES
from groupwise.errors import ConfigError
from groupwise.utils.spelling import nearest

STAGES = (
    "Several runs in one file, in order: each entry overlays the keys above it (`stages: {sft:"
    " {...}, grpo: {...}}`)."
)


NAMES: dict[str, Collection[str]] = {
    "objective": objectives.OBJECTIVES,
    "rewards.N.function": tuple(settings.REWARDS),
    "data.task": tuple(settings.TASKS),
    "environment.factory": tuple(settings.FACTORIES),
    **{
        f"group.{kind}": tuple(PARTS[kind])
        for kind in ("credit", "ratio", "surrogate", "weights", "divergence")
    },
}
"""Keys that take the name of something built in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One key of a recipe, or a section of them."""

    key: str
    """Dotted name; an entry of `rewards` is written `N`."""
    hint: Any
    default: Any
    """`dataclasses.MISSING` where a recipe must say it."""
    meaning: str

    @property
    def section(self) -> type | None:
        """The dataclass that holds its keys, if it is a section or a list of them."""
        return _dataclass_in(self.hint)

    @property
    def prefix(self) -> str:
        """What the names of the keys inside a section begin with."""
        if typing.get_origin(self.hint) is tuple:
            return f"{self.key}.N."
        return f"{self.key}."

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        return expected(self.hint)

    def expected_of(self, key: str) -> str:
        """What the value of a key must be, in words: of this setting, or of one inside of its
        mapping.
        """
        if normal(key) == self.key:
            return self.expected
        for member in _members(self.hint)[0]:
            if typing.get_origin(member) is Mapping and Any not in typing.get_args(member):
                return expected(typing.get_args(member)[1])
        return self.expected

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a value may be; none where it may be others."""
        for member in _members(self.hint)[0]:
            if typing.get_origin(member) is typing.Literal:
                return typing.get_args(member)
        return ()

    @property
    def trl(self) -> tuple[str, ...]:
        """TRL's names for it."""
        return tuple(TRL_NAMES.get(self.key, "").split())


def _members(hint: Any) -> tuple[list[Any], bool]:
    """The alternatives of a type, and whether None is one of them."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        inner = typing.get_args(hint)
        return [member for member in inner if member is not type(None)], type(None) in inner
    return [hint], False


@cache
def _dataclass_in(hint: Any) -> type | None:
    for member in _members(hint)[0]:
        inner = typing.get_args(member)[0] if typing.get_origin(member) is tuple else member
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            return inner
    return None


def _range(bounds: Sequence[Any]) -> str:
    words = []
    for bound in bounds:
        match bound:
            case Gt(gt):
                words.append(f"greater than {gt:g}")
            case Ge(ge):
                words.append(f"at least {ge:g}")
            case Lt(lt):
                words.append(f"less than {lt}" if isinstance(lt, int) else f"less than {lt:g}")
            case Le(le):
                words.append(f"at most {le}" if isinstance(le, int) else f"at most {le:g}")
    return " and ".join(words)


@cache
def _at_least(bound: Any) -> Any:
    """Return the bound of a whole number that stands above another one, as its least value."""
    return Ge(int(bound.gt) + 1) if isinstance(bound, Gt) else bound  # type: ignore[arg-type]


def expected(hint: Any) -> str:
    """A type and its range in words.

    >>> expected(settings.Positive | None), expected(settings.Fraction)
    ('a whole number at least 1, or null', 'a number at least 0 and at most 1')
    """
    if hint == settings.Part:
        return "a name, or a mapping with `name` and its arguments"
    if hint in settings.BY_NAME:
        return "a name, or a section (a mapping)"
    members, optional = _members(hint)
    if optional:
        inner = Union[tuple(members)]  # noqa: UP007 - the members are only known at run time
        return f"{expected(inner)}, or null"
    if typing.get_origin(hint) is typing.Annotated:
        base, *bounds = typing.get_args(hint)
        if base is int:
            bounds = [_at_least(bound) for bound in bounds]
        if any(isinstance(bound, MinLen) for bound in bounds):
            article, _, rest = expected(base).partition("a ")
            return f"a non-empty {rest}" if rest and not article else f"non-empty {expected(base)}"
        return f"{expected(base)} {_range(bounds)}"
    if len(members) > 1:
        return " or ".join(expected(member) for member in members)
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return "one of " + ", ".join(map(str, arguments))
        case origin if origin is tuple and arguments[-1] is Ellipsis:
            if _dataclass_in(hint):
                return "a list of sections"
            return f"a list, each {expected(arguments[0])}"
        case origin if origin is tuple:
            return f"a list of {len(arguments)}, each {expected(arguments[0])}"
        case origin if origin is not None and issubclass(origin, Mapping):
            return "a mapping"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(hint, "a section (a mapping)")


@cache
def _meanings() -> dict[tuple[str, str], str]:
    """Read the text below each field, by class and field; that of a class stands under ""."""
    meanings: dict[tuple[str, str], str] = {}
    parts: list[ast.stmt] = []
    for module in (settings, losses, cluster):
        parts += ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    for part in parts:
        if not isinstance(part, ast.ClassDef):
            continue
        meanings[part.name, ""] = ast.get_docstring(part) or ""
        for line, below in zip(part.body, part.body[1:], strict=False):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(below, ast.Expr)
            ):
                text = below.value.value if isinstance(below.value, ast.Constant) else ""
                meanings[part.name, line.target.id] = " ".join(str(text).split())
    return meanings


@cache
def settings_table() -> dict[str, Setting]:
    """Every key of a recipe by dotted name, sections included, in the order of settings.py; behind
    them those of `cluster.py`.
    """
    table = {setting.key: setting for setting in _settings_in(settings.Recipe, "")}
    for setting in _settings_in(cluster.LaunchSettings, ""):
        table[setting.key] = setting
    return table


def _settings_in(section: type, prefix: str) -> Iterator[Setting]:
    """Yield the keys of a section, each followed by those inside it."""
    hints = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        key, hint = prefix + field.name, hints[field.name]
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        inner = _dataclass_in(hint)
        meaning = _meanings().get((section.__name__, field.name), "")
        if not meaning and inner:
            meaning = _meanings()[inner.__name__, ""]
        meaning = " ".join(meaning.split())
        if key in NAMES:
            meaning += f" Built in: {', '.join(NAMES[key])}."
        setting = Setting(key, hint, default, meaning)
        yield setting
        if inner:
            yield from _settings_in(inner, setting.prefix)


def knobs() -> list[str]:
    """The dotted names that hold a value (no sections): what a user can set."""
    return [key for key, setting in settings_table().items() if setting.section is None]


def normal(key: str) -> str:
    """A key as the table writes it: list positions become N.

    >>> normal("rewards.0.weight")
    'rewards.N.weight'
    """
    return ".".join("N" if part.isdigit() else part for part in key.split("."))


def lookup(key: str) -> Setting | None:
    """The setting of a dotted name; positions in lists, and whatever lies inside a free mapping,
    are understood.
    """
    table, parts = settings_table(), normal(key).split(".")
    for end in range(len(parts), 0, -1):
        setting = table.get(".".join(parts[:end]))
        if setting is None:
            continue
        inside = parts[end:]
        if not inside:
            return setting
        if setting.section is not None:
            return None
        if "mapping" in setting.expected or ("list" in setting.expected and inside == ["N"]):
            return setting
        return None
    return None


MOST_MEANT = 3
"""Keys that a suggestion names at most."""


def _ends(names: Iterable[str]) -> dict[str, str]:
    """The last part of a dotted key -> the key, the first one where several end so."""
    return {name.rsplit(".", 1)[-1]: name for name in reversed(list(names))}


def key_meant(name: str) -> str | None:
    """The key that a name without its section means: its own last part, or TRL's name for it; else
    the nearest one.

    >>> key_meant("lr"), key_meant("num_generations"), key_meant("temprature"), key_meant("qqq")
    ('optimizer.lr', 'group.group_size', 'rollout.temperature', None)
    """
    if name in knobs():
        return name
    meant = TRL_KEYS | _ends(key for key in knobs() if ".N." not in key)
    return meant.get(nearest(name.rsplit(".", 1)[-1].lower(), meant, cutoff=0.7) or "")


def suggestion(key: str) -> str:
    """What an unknown dotted key may have meant: ` (did you mean ...?)`, or where the keys that
    exist are listed.

    >>> suggestion("num_generations")
    ' (TRL name; here it is group.group_size)'
    >>> suggestion("group.lr"), suggestion("optimizer.learing_rate")
    (' (did you mean optimizer.lr?)', ' (did you mean optimizer.lr?)')
    >>> suggestion("group.size"), suggestion("size")
    (' (did you mean group.group_size?)', ' (did you mean batch_size or group.group_size?)')
    """
    section, _, leaf = key.lower().rpartition(".")
    if section == "model.lora" and leaf in LORA_LACKING:
        return f" ({LORA_LACKING[leaf]})"
    everywhere, inside = _ends(settings_table()), normal(section)
    here = _ends(name for name in settings_table() if name.rpartition(".")[0] == inside)
    if TRL_KEYS.get(leaf, normal(key)) != normal(key) and leaf not in everywhere:
        return f" (TRL name; here it is {TRL_KEYS[leaf]})"
    if leaf in everywhere:
        return f" (did you mean {everywhere[leaf]}?)"
    joined = {name.replace("_", ""): key for name, key in everywhere.items()}
    if leaf.replace("-", "") in joined:
        return f" (did you mean {joined[leaf.replace('-', '')]}?)"
    for names in (here, everywhere, TRL_KEYS):
        near = nearest(leaf, names, cutoff=0.7)
        if near is not None:
            return f" (did you mean {names[near]}?)"
    for names in (here, everywhere) if section else (everywhere,):
        meant = sorted(names[name] for name in names if leaf in name.split("_"))
        if 0 < len(meant) <= MOST_MEANT:
            return f" (did you mean {' or '.join(meant)}?)"
    if here and inside:
        return f" (`groupwise config {inside.removesuffix('.N')}` lists the keys)"
    return " (`groupwise config` lists all keys)"


def keys_about(word: str) -> list[str]:
    """Return the keys whose name, meaning or name in TRL holds a word, whatever its capitals.

    >>> keys_about("clip")
    ['group.surrogate', 'optimizer.clip_norm']
    """
    word = word.lower()
    keys = []
    for key in knobs():
        setting = settings_table()[key]
        if word in " ".join((key, *setting.trl, setting.meaning)).lower():
            keys.append(key)
    return keys


def first_sentence(text: str) -> str:
    """For one line of a list.

    >>> first_sentence("Sums with a model of 0.4M\\nparameters.  Two minutes.")
    'Sums with a model of 0.4M parameters.'
    """
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].replace("\n", " ")


def show(value: Any) -> str:
    """A default or a wrong value as one would write it in YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case str():
            return repr(value) if len(value) <= 80 else repr(value[:77]) + "..."
        case list() | tuple():
            return "[" + ", ".join(map(show, value)) + "]"
        case Mapping():
            return "{" + ", ".join(f"{key}: {show(inner)}" for key, inner in value.items()) + "}"
    return str(value)


def describe(key: str) -> str:
    """What a key means: type, range, default and TRL's name; for a section also the keys in it.

    key: a dotted name (`group.group_size`), a section (`group`), or a name of TRL's
        (`num_generations`).
    Raises ConfigError for an unknown one, with a suggestion.
    """
    if key == "stages" or key.startswith("stages."):
        return f"stages\n  {STAGES}"
    setting = lookup(key)
    if setting is None and key in TRL_KEYS:
        setting = settings_table()[TRL_KEYS[key]]
    if setting is None:
        raise ConfigError(f"there is no setting {key!r}{suggestion(key)}")
    lines = [setting.key, f"  {setting.meaning}"]
    if setting.section:
        inside = [name for name in settings_table() if name.startswith(setting.prefix)]
        width = max(map(len, inside))
        for name in inside:
            lines.append(f"    {name:{width}}  {first_sentence(settings_table()[name].meaning)}")
        return "\n".join(lines)
    default = "none, it must be said"
    if setting.default is not dataclasses.MISSING:
        default = show(setting.default)
    lines += [f"  value    {setting.expected}", f"  default  {default}"]
    lines += [f"  TRL      {name}" for name in setting.trl]
    return "\n".join(lines)


def reference() -> str:
    """All settings as a Markdown page."""
    about = (
        "`groupwise config KEY` shows one of these keys, and what TRL calls it. A default that is"
        " not shown is null."
    )
    lines = ["# Settings", "", about, ""]
    lines += [f"`stages`: {STAGES}"]
    top = ["", "| key | meaning | value (default) |", "|---|---|---|"]
    sections: dict[str, list[Setting]] = {}
    for key, setting in settings_table().items():
        if setting.section is None:
            sections.setdefault(key.rpartition(".")[0], []).append(setting)
    for prefix, inside in sections.items():
        title, meaning = "The recipe", str(settings.Recipe.__doc__)
        if prefix:
            title, meaning = prefix, settings_table()[prefix.removesuffix(".N")].meaning
        lines += ["", f"## {title}", "", meaning, *top]
        lines += [_row(setting) for setting in inside]
    return "\n".join(lines) + "\n"


SIGNS = (
    ("a whole number", "integer"), ("a number", "number"), ("at least ", "≥"),
    ("greater than ", ">"), ("at most ", "≤"),
    ("less than ", "<"), (" and ", ", "), ("one of ", ""), ("9223372036854775808", "2^63"),
    ("a name, or a mapping with `name`, its arguments", "name or mapping"),
)  # fmt: skip
"""How the page shortens the words of messages."""


def _row(setting: Setting) -> str:
    """A setting's line in the page."""
    value = setting.expected
    if setting.default is None:
        value = value.removesuffix(", or null")
    for words, sign in SIGNS:
        value = value.replace(words, sign)
    if setting.default is dataclasses.MISSING:
        value += " (required)"
    elif setting.default is not None:
        value += f" (`{show(setting.default)}`)"
    cells = [cell.replace("|", "\\|") for cell in (f"`{setting.key}`", setting.meaning, value)]
    return f"| {' | '.join(cells)} |"
