"""Keys laid over keys, before they are checked: stages over a recipe, `key=value` over both.

Precedence, low to high: the defaults, the file's own keys, the stage's keys, `key=value`,
`stages.NAME.key=value`."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from groupwise.config import schema
from groupwise.config.settings import BY_NAME
from groupwise.config.strict_yaml import Document, Path, Place, Problem, parse_value
from groupwise.config.validation import STAGE
from groupwise.utils.spelling import closest

ALTERNATIVES = {
    "model.path": ("model.scratch",),
    "model.scratch": ("model.path",),
    "data.path": ("data.task", "data.task_args"),
    "data.task": ("data.path", "data.task_args"),
    "reward_model.replay.path": ("reward_model.replay.task",),
    "reward_model.replay.task": ("reward_model.replay.path",),
    "steps": ("epochs",),
    "epochs": ("steps",),
}
"""Keys of which one at most is set: an overlay that sets the first takes the others away."""
DATA = (("data", "path"), ("data", "task"))
SOURCES = (("model", "path"), ("model", "scratch"), *DATA)
"""Where a stage starts from: an override that is meant for all stages leaves one that starts from
an earlier stage alone.
"""


Change = tuple[tuple[str, ...], Document]
"""A path, as an override writes it, and the value that goes there."""


def read_overrides(overrides: Iterable[str], problems: list[Problem]) -> list[Change]:
    """`a.b=1` -> (("a", "b"), document).  Later ones win."""
    changes = []
    words = list(overrides)
    for number, override in enumerate(words):
        key, equals, text = override.partition("=")
        key = key.strip().removeprefix("--")
        if not equals or not key:
            message = "an override is written key=value, e.g. optimizer.lr=1e-5"
            problems.append(Problem(f"override {override}", message))
            continue
        where = f"override {key}={text}"
        document, wrong = parse_value(text, where)
        if wrong and _goes_on(words, number):
            message = f"the shell cut this value at a space: put it in quotes, '{key}=...'"
            problems.append(Problem(where, message))
            break  # the next words are the rest of this value
        problems += wrong
        if not wrong:
            changes.append((tuple(key.split(".")), document))
    return changes


def _goes_on(words: Sequence[str], number: int) -> bool:
    """Return True if the word behind one of a command line is no override itself."""
    return number + 1 < len(words) and "=" not in words[number + 1]


def stage_documents(
    root: Document, changes: Sequence[Change], problems: list[Problem]
) -> dict[str, Document]:
    """The keys of each stage with its overlay and the overrides in it; one document, called "",
    without stages.
    """
    base = Document(dict(root.values), dict(root.places))
    stages = base.values.pop("stages", None)
    base = in_full(base)
    if stages is None:
        for path, change in changes:
            if path[0] == "stages":
                problems.append(Problem(change.place(()).where, "this recipe holds no stages"))
            else:
                _set(base, path, change, problems)
        return {"": base}
    if not isinstance(stages, dict) or not stages:
        message = "stages must be a mapping of a stage's name to its keys"
        problems.append(Problem(root.place(("stages",)).where, message))
        return {}
    documents = {}
    for stage, keys in stages.items():
        overlay = root.part(("stages", stage))
        where = overlay.place(()).where
        if not re.fullmatch(r"\w[\w+-]*", stage):
            message = f"a stage's name is made of letters, digits, _ + and -; got {stage!r}"
            problems.append(Problem(where, message))
        if not isinstance(keys, dict | None):
            got = schema.show(keys)
            message = f"stages.{stage} must be a mapping of keys to values, got {got}"
            problems.append(Problem(where, message))
        if not isinstance(keys, dict):
            overlay.values = {}
        if "cluster" in overlay.values:
            message = "cluster is for all stages: write it above them"
            problems.append(Problem(overlay.place(("cluster",)).where, message))
        documents[stage] = overlaid(base, in_full(overlay))
    _check_own_data(root, changes, problems)
    for path, change in changes:
        if path[0] != "stages":
            for document in documents.values():
                if not _starts_from_a_stage(document, path):
                    _set(document, path, change, problems)
    for path, change in changes:
        if path[0] == "stages":
            _set_in_stage(documents, path, change, problems)
    return documents


def _starts_from_a_stage(document: Document, path: tuple[str, ...]) -> bool:
    """Return whether a path names the source of a stage that starts from an earlier one."""
    source = str(document.get((path[0], "path")))
    return path[:2] in SOURCES and source.startswith(STAGE)


def _set_in_stage(
    documents: dict[str, Document],
    path: tuple[str, ...],
    change: Document,
    problems: list[Problem],
) -> None:
    """Put the value of `stages.NAME.key` into that stage."""
    if len(path) > 2 and path[1] in documents:
        _set(documents[path[1]], path[2:], change, problems)
        return
    message = f"write stages.NAME.key=value with one of the stages {', '.join(documents)}"
    if len(path) > 1:
        message += closest(path[1], list(documents))
    problems.append(Problem(change.place(()).where, message))


TEXTS = ("text", "text, or null")


def in_full(document: Document, at: Path = ()) -> Document:
    """The document in its longest form.   at: its path in the recipe.

    A section or a reward that is its name alone becomes `{name: ...}` or `{function: ...}`; one
    dashboard (`report_to: wandb`) becomes a list; a number where the setting is a text (`name:
    007`) becomes the text as it is written.
    """

    def full(value: Any, path: Path) -> Any:
        key = schema.normal(_dotted((*at, *path)))
        setting = schema.settings_table().get(key)
        if key == "rewards" and isinstance(value, str):
            return [{"function": value}]
        if key == "rewards" and isinstance(value, list):
            return [full(entry, (*path, place)) for place, entry in enumerate(value)]
        if key == "rewards.N" and isinstance(value, str):
            return {"function": value}
        if key == "save.report_to" and isinstance(value, str):
            return [value]
        if setting is not None and setting.section in BY_NAME and isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and (
            not key or key == "rewards.N" or (setting is not None and setting.section)
        ):
            return {name: full(inner, (*path, name)) for name, inner in value.items()}
        if type(value) in (int, float) and setting is not None and setting.expected in TEXTS:
            return document.place(path).text or value
        return value

    return Document(full(document.values, ()), document.places)


def overlaid(base: Document, overlay: Document) -> Document:
    """`overlay` on `base`: sections are merged key by key, except those that name another one;
    everything else is replaced.
    """
    merged = Document(copy.deepcopy(base.values), dict(base.places))
    for path in _leaves(overlay, ()):
        empty = _section_at(path) is not None and overlay.get(path) == {}
        if not empty or not isinstance(merged.get(path), dict):
            _set(merged, path, overlay.part(path), [], overlay)
    return merged


def _leaves(overlay: Document, at: Path) -> Iterator[Path]:
    """Where the values of an overlay stand: all but sections with something in them.   at: the
    section to look in.
    """
    for key, value in overlay.get(at).items():
        path = (*at, key)
        section = _section_at(path)
        if section is None or not isinstance(value, dict) or not value:
            yield path
            continue
        names_another = section in BY_NAME and "name" in value
        if names_another:
            yield path
        else:
            yield from _leaves(overlay, path)


def _section_at(path: Path) -> type | None:
    """Return the section that stands at a path, if the setting there is one."""
    setting = schema.settings_table().get(_dotted(path))
    if setting is None:
        return None
    return setting.section


def _check_own_data(root: Document, changes: Sequence[Change], problems: list[Problem]) -> None:
    """Adds a problem for every override of all stages' data that would replace the data that a
    stage names.
    """
    overridden = {path[1] for path, _ in changes if path[0] == "stages" and path[2:] in DATA}
    sources_of = {}
    for stage in root.values["stages"]:
        if stage in overridden:
            continue
        for path in DATA:
            source = root.get(("stages", stage, *path))
            if isinstance(source, str) and not source.startswith(STAGE):
                sources_of.setdefault(stage, source)
    if not sources_of:
        return
    listed = ", ".join(f"{stage} ({source})" for stage, source in sources_of.items())
    first = next(iter(sources_of))
    for path, change in changes:
        if path in DATA:
            key = ".".join(path)
            message = (
                f"{key} of every stage would replace the data that stages have of their own:"
                f" {listed}; say it of single stages: stages.{first}.{key}=..."
            )
            problems.append(Problem(change.place(()).where, message))


def _set(
    document: Document,
    path: Path,
    change: Document,
    problems: list[Problem],
    overlay: Document | None = None,
) -> None:
    """Put a value into a document, making the sections on the way.   overlay: what it is part of,
    if it is no override.
    """
    where, here = change.place(()).where, ()
    for key in path:
        holder, prefix = document.get(here), _dotted(here)
        if holder is None:
            document.put(
                here,
                Document({}, {(): overlay.place(here) if overlay is not None else Place(where)}),
            )
        elif (
            isinstance(holder, str)
            and (setting := schema.lookup(prefix))
            and "`name`" in setting.expected
        ):
            document.put(
                here, Document({"name": holder}, document.part(here).places)
            )  # a function by its name gets a keyword
        elif isinstance(holder, list) and not (str(key).isdigit() and int(key) < len(holder)):
            message = (
                f"{prefix} is a list of {len(holder)} (from 0); {key!r} is not one of its places"
            )
            problems.append(Problem(where, message))
            return
        elif not isinstance(holder, dict | list):
            problems.append(
                Problem(
                    where, f"{prefix} is {schema.show(holder)}, there is no {_dotted(path)} in it"
                )
            )
            return
        here = (*here, int(key) if isinstance(holder, list) else key)
        if change.values is None:
            continue
        for other in ALTERNATIVES.get(_dotted(here), ()):
            alternative = tuple(other.split("."))
            if overlay is None or not overlay.holds(alternative):
                document.drop(alternative)
    document.put(here, in_full(change, here))


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
