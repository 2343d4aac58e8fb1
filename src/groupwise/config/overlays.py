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
        where = f"override {key}={text}" if equals else f"override {override}"
        if not equals or not key:
            problems.append(
                Problem(where, "an override is written key=value, e.g. optimizer.lr=1e-5")
            )
            continue
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
    documents: dict[str, Document] = {}
    base = Document(
        {key: value for key, value in root.values.items() if key != "stages"}, dict(root.places)
    )
    stages = root.values.get("stages")
    if stages is None:
        documents[""] = in_full(base)
    elif not isinstance(stages, dict) or not stages:
        problems.append(
            Problem(
                root.place(("stages",)).where,
                "stages must be a mapping of a stage's name to its keys",
            )
        )
        return {}
    else:
        base = in_full(base)
        for stage, keys in stages.items():
            overlay = root.part(("stages", stage))
            where = overlay.place(()).where
            if not re.fullmatch(r"\w[\w+-]*", stage):
                problems.append(
                    Problem(
                        where,
                        f"a stage's name is made of letters, digits, _ + and -; got {stage!r}",
                    )
                )
            if not isinstance(keys, dict | None):
                message = (
                    f"stages.{stage} must be a mapping of keys to values, got {schema.show(keys)}"
                )
                problems.append(Problem(where, message))
            documents[stage] = overlaid(
                base, in_full(overlay if isinstance(keys, dict) else Document({}, overlay.places))
            )
        _check_own_data(root, changes, problems)
    for path, change in sorted(changes, key=lambda change: change[0][0] == "stages"):
        if path[0] != "stages":
            for document in documents.values():
                comes_from_a_stage = path[:2] in SOURCES and str(
                    document.get((path[0], "path"))
                ).startswith(STAGE)
                if stages is None or not comes_from_a_stage:
                    _set(document, path, change, problems)
        elif stages is None:
            problems.append(Problem(change.place(()).where, "this recipe holds no stages"))
        elif len(path) < 3 or path[1] not in documents:
            near = closest(path[1], list(documents)) if len(path) > 1 else ""
            message = (
                f"write stages.NAME.key=value with one of the stages {', '.join(documents)}{near}"
            )
            problems.append(Problem(change.place(()).where, message))
        else:
            _set(documents[path[1]], path[2:], change, problems)
    return documents


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
        if key == "rewards" and isinstance(value, str | list):
            return [
                full(entry, (*path, place))
                for place, entry in enumerate([value] if isinstance(value, str) else value)
            ]
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
        section = schema.settings_table().get(_dotted(path))
        if overlay.get(path) != {} or not (
            section and section.section and isinstance(merged.get(path), dict)
        ):
            _set(merged, path, overlay.part(path), [], overlay)
    return merged


def _leaves(overlay: Document, at: Path) -> Iterator[Path]:
    """Where the values of an overlay stand: all but sections with something in them.   at: the
    section to look in.
    """
    for key, value in overlay.get(at).items():
        path = (*at, key)
        setting = schema.settings_table().get(_dotted(path))
        section = (
            setting.section if setting is not None and isinstance(value, dict) and value else None
        )
        if section is None or (section in BY_NAME and "name" in value):
            yield path
        else:
            yield from _leaves(overlay, path)


def _check_own_data(root: Document, changes: Sequence[Change], problems: list[Problem]) -> None:
    """Adds a problem for every override of all stages' data that would replace the data that a
    stage names.
    """
    overridden = {path[1] for path, _ in changes if path[0] == "stages" and path[2:] in DATA}
    sources_of = {}
    for stage in root.values["stages"]:
        sources = (root.get(("stages", stage, *path)) for path in DATA)
        source = next((one for one in sources if isinstance(one, str)), None)
        if source is not None and stage not in overridden and not source.startswith(STAGE):
            sources_of[stage] = source
    theirs = ", ".join(f"{stage} ({source})" for stage, source in sources_of.items())
    for key, change in (
        (".".join(path), change) for path, change in changes if sources_of and path in DATA
    ):
        message = (
            f"{key} of every stage would replace the data that stages have of their own: {theirs}"
        )
        message += f"; say it of single stages: stages.{next(iter(sources_of))}.{key}=..."
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
        for other in ALTERNATIVES.get(_dotted(here), ()) if change.values is not None else ():
            if overlay is None or not overlay.holds(tuple(other.split("."))):
                document.drop(tuple(other.split(".")))
    document.put(here, in_full(change, here))


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
