"""Recipes in and out: strict YAML and dotted overrides <-> the dataclasses of `settings.py`.

A recipe is checked as a whole before anything is loaded, in two rounds: all values that no recipe
can have, and, once there are none, all that do not go together.  Each mistake has its line and,
where one is near, what was probably meant.  A recipe may hold `stages`: runs that follow one
another, each an overlay on the keys above them (`overlays.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from groupwise.config import schema
from groupwise.config.bundled import find_recipe
from groupwise.config.cluster import ClusterSettings, LaunchSettings, cluster_findings
from groupwise.config.live_objects import Live, object_of
from groupwise.config.objectives import is_online
from groupwise.config.overlays import in_full, overlaid, read_overrides, stage_documents
from groupwise.config.settings import EnvironmentSettings, Recipe
from groupwise.config.strict_yaml import Document, Problem, parse
from groupwise.config.strict_yaml import dump as dump_yaml
from groupwise.config.texts import with_texts
from groupwise.config.validation import (
    STAGE,
    policy_updates,
    validate_environment,
    validate_recipe,
)
from groupwise.errors import ConfigError, GroupwiseError, Problems
from groupwise.utils.files import expanded
from groupwise.utils.json_text import half_character
from groupwise.utils.redaction import redacted
from groupwise.utils.spelling import closest

NEUTRAL = ("save.", "parallel.", "runs.", "name.", "threads.")
"""Beginnings of keys that may change when a run is resumed: they do not say what is computed."""


Section = TypeVar("Section")
"""A recipe, or a part of one."""


# ---------------------------------------------------------------- loading


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The run of a recipe file, or of a bundled recipe by name.  The recipe must hold one run.

    overrides: `key.sub=value`, each value written as in YAML.
    Raises ConfigError with every mistake of the first round that has one, also if the recipe holds
    several stages."""
    recipes = load_stages(path, overrides)
    if len(recipes) > 1:
        raise ConfigError(
            f"{path} holds the stages {', '.join(recipes)}, where a recipe with one run is needed"
        )
    return next(iter(recipes.values()))


def load_stages(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
    """The runs of a recipe file, in order.

    A recipe without `stages` gives one entry, called by its objective.  With stages each entry's
    `name` is `NAME/STAGE`, so that its run folder is runs/NAME/STAGE; a top-level override holds
    for every stage, except that a model that comes from an earlier stage keeps coming from there,
    and so do data; data that a stage names itself must be overridden in that stage.
    Raises ConfigError with every mistake of the first round that has one.
    """
    return parse_stages(*_read(path), overrides)


def parse_stages(text: str, name: str, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
    """`load_stages` from text; `name` is what its lines are called in messages."""
    root, problems = parse(text, name)
    if not isinstance(root.values, dict):
        problems.append(
            Problem(
                root.place(()).where,
                f"a recipe is a mapping of keys to values, got {schema.show(root.values)}",
            )
        )
        root.values = {}
    if not root.values and problems:
        raise ConfigError(_listed(name, problems))
    documents = stage_documents(root, read_overrides(overrides, problems), problems)
    staged = "stages" in root.values
    recipes = _checked(name, documents, problems, staged=staged)
    named: dict[str, Recipe] = {}
    for stage, recipe in recipes.items():
        if staged:
            named[stage] = dataclasses.replace(recipe, name=f"{recipe.name}/{stage}")
        else:
            named[recipe.objective] = recipe
    return named


def load_cluster(path: str | Path, overrides: Sequence[str] = ()) -> ClusterSettings:
    """The section `cluster` of a recipe, or its defaults.  Raises as `load_stages`."""
    text, name = _read(path)
    root, problems = parse(text, name)
    launched = None
    if isinstance(root.values, dict):
        documents = stage_documents(root, read_overrides(overrides, problems), problems)
        launched = _valid(_cluster_alone(next(iter(documents.values()))), LaunchSettings, problems)
    if launched is None:
        parse_stages(text, name, overrides)
        raise AssertionError(problems)
    return launched.cluster


def _cluster_alone(document: Document) -> Document:
    """Return the part of a document that is not of the run."""
    keys = {}
    if document.holds(("cluster",)):
        keys["cluster"] = document.get(("cluster",))
    return Document(keys, document.places)


def make_recipe(keys: Mapping[str, Any], base: str | Path | Recipe | None = None) -> Recipe:
    """The recipe of keys as they would stand in a file, over those of `base`: a file, a bundled
    recipe's name or a recipe.

    A value may be a `Live` name.   Raises ConfigError with every mistake of the first round that
    has one.

    >>> keys = {"objective": "sft", "steps": 3, "data": {"task": "sums"}, "model": {"scratch": {}}}
    >>> make_recipe(keys).data.task
    'sums'
    """
    if "cluster" in keys:
        raise ConfigError("cluster is read by `groupwise launch` alone, from the file of a recipe")
    name, problems, earlier = "the recipe", [], []
    document = Document({})
    if isinstance(base, Recipe):
        document = Document(_lists(dataclasses.asdict(base)))
        for text in _texts(document.values):
            if text.startswith(STAGE):
                earlier.append(text.removeprefix(STAGE).partition(":")[0])
    elif base is not None:
        text, name = _read(base)
        document, problems = parse(text, name)
        if not isinstance(document.values, dict):
            raise ConfigError(
                f"{name}: a recipe is a mapping of keys to values, got"
                f" {schema.show(document.values)}"
            )
        if "stages" in document.values:
            stages = document.values["stages"]
            named = ", ".join(stages) if isinstance(stages, dict) else ""
            raise ConfigError(
                f"{name} holds the stages {named}: load_stages gives them one by one, each a recipe"
            )
    document = overlaid(in_full(document), in_full(Document(_lists(keys))))
    recipe = _checked(name, {"": document}, problems, earlier)[""]
    return _with_objects(recipe, document)


def read_environment(keys: Mapping[str, Any]) -> EnvironmentSettings:
    """Make a section `environment` of its keys alone, for a model that no run made.

    A value may be a `Live` name.   Raises ConfigError with every mistake of the first round that
    has one.

    >>> read_environment({"openenv": "ws://localhost:8000", "max_turns": 4}).max_turns
    4
    """
    document = in_full(Document({"environment": _lists(keys)}))
    problems: list[Problem] = []
    alone = _valid(document, _EnvironmentAlone, problems)
    if alone is not None:
        problems += [Problem("", message) for message in validate_environment(alone.environment)]
    if alone is None or problems:
        raise ConfigError(_listed("the environment", problems))
    return _with_objects(alone.environment, document)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _EnvironmentAlone:
    """The part of a recipe that is read where nothing is trained."""

    environment: EnvironmentSettings


def _with_objects(settings: Any, document: Document) -> Any:
    """Return settings, which are checked as plain text, with the `Live` names of their document."""
    objects: dict[str, str] = {
        text: text for text in _texts(document.values) if isinstance(text, Live)
    }
    return with_texts(settings, lambda _, text: objects.get(text, text))


def _lists(value: Any) -> Any:
    """Plain values with lists in the place of tuples."""
    if isinstance(value, Mapping):
        return {str(key): _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> list[str]:
    """Every text in plain values."""
    texts: list[str] = []
    with_texts(value, lambda _, text: texts.append(text) or text)
    return texts


_OBJECTS = re.compile(
    r"(model|data)\.(eval_)?path|rewards\.\d+\.function"
    r"|environment\.(tools|factory|harness)(\.\w+)?"
    r"|group\.(credit|ratio|surrogate|weights|kl|divergence)(\.name)?"
)
"""Keys at which the name of an object may stand."""


def demand_objects(recipe: Recipe) -> None:
    """Raises ConfigError for a name of an object without the object: the recipe was read from the
    file of a run.
    """

    def demanded(key: str, text: str) -> str:
        if _OBJECTS.fullmatch(key):
            object_of(text, key)
        return text

    with_texts(recipe, demanded)


def _read(path: str | Path) -> tuple[str, str]:
    """The text of a recipe file, and what its lines are called in messages."""
    file = find_recipe(path)
    try:
        return file.read_text(encoding="utf-8"), str(path) if Path(path).is_file() else file.name
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the recipe {file}: {error}") from error


def parse_recorded(text: str, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a run's `config.yaml`, with overrides.

    What it names elsewhere (its data, its model, an earlier stage) need not be there any more.
    Keys that went since then are left out: they shaped the training alone.
    Raises ConfigError."""
    root, problems = parse(text, name)
    if problems or not isinstance(root.values, dict) or "stages" in root.values:
        raise ConfigError(
            _listed(name, problems or [Problem(name, "not the config.yaml of a run")])
        )
    for key in WENT:
        section, _, last = key.rpartition(".")
        if root.holds(_path(key)):
            del root.get(_path(section))[last]
    changes = read_overrides(overrides, problems)
    changed = tuple(f"{'.'.join(path)}." for path, _ in changes)
    return _checked(name, stage_documents(root, changes, problems), problems, changed=changed)[""]


def _listed(name: str, problems: Sequence[Problem]) -> str:
    """One problem, or several in the order of their lines; stages share those of the keys above
    them.
    """
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        return str(problems[0])

    def place(problem: Problem) -> tuple[int, str]:
        line = problem.where.rpartition(":")[2]
        return (int(line), "") if line.isdigit() else (sys.maxsize, problem.where)

    lines = "\n".join(f"  {problem}" for problem in sorted(problems, key=place))
    return f"{len(problems)} problems in {name}:\n{lines}"


@contextmanager
def with_lines(
    path: str | Path, overrides: Sequence[str] = (), stage: str | None = None
) -> Iterator[None]:
    """Add, to an error about a key of a recipe that is found once its data and functions are read,
    where the key stands.

    stage: of the recipe, if it has stages.
    """
    try:
        yield
    except GroupwiseError as error:
        errors: Sequence[GroupwiseError] = (error,)
        if isinstance(error, Problems):
            errors = error.errors
        elif not error.key:
            raise
        text, name = _read(path)
        documents = stage_documents(parse(text, name)[0], read_overrides(overrides, []), [])
        document = documents.get(stage or "") or next(iter(documents.values()))
        problems = []
        for one in errors:
            problems.append(Problem(document.place(_path(one.key)).where, str(one)))
        error.args = (_listed(name, problems),)
        raise


# ---------------------------------------------------------------- building


def _checked(
    name: str,
    documents: Mapping[str, Document],
    problems: list[Problem],
    earlier: Sequence[str] = (),
    *,
    staged: bool = False,
    changed: tuple[str, ...] | None = None,
) -> dict[str, Recipe]:
    """The recipes of documents by stage.  Raises ConfigError with all wrong values, or, once there
    are none, all broken rules.

    problems: those of the texts.   earlier: stages that run before.   staged: the documents are
        stages, in order.
    changed: only rules about what begins so count; default: all.
    """
    recipes: dict[str, Recipe] = {}
    for stage, document in documents.items():
        launched = _valid(_cluster_alone(document), LaunchSettings, problems)
        trained = {key: value for key, value in document.values.items() if key != "cluster"}
        recipe = _valid(Document(trained, document.places), Recipe, problems)
        if launched is not None:
            for keys, message in cluster_findings(launched.cluster):
                problems.append(Problem(_where(document, keys), message))
        if recipe is not None:
            recipes[stage] = recipe
    if len(recipes) < len(documents):
        raise ConfigError(_listed(name, problems) + _files_beside(name, documents))
    before = list(earlier)
    for stage, recipe in recipes.items():
        prefix = f"stage {stage}: " if len(recipes) > 1 else ""
        for keys, message in validate_recipe(recipe, before):
            if changed is None or any(f"{key}.".startswith(changed) for key in keys):
                where = _where(documents[stage], keys)
                problems.append(Problem(where, prefix + message))
        if staged:
            before.append(stage)
    if problems:
        raise ConfigError(_listed(name, problems) + _files_beside(name, documents))
    return recipes


def _files_beside(name: str, documents: Mapping[str, Document]) -> str:
    """Return a line about files that lie beside a recipe and not in the working directory, where
    files are looked for; or an empty text.

    name: the path of the recipe.
    """
    folder = os.path.dirname(name)
    beside = {}
    for text in _texts([document.values for document in documents.values()]):
        file = text.partition(":")[0]  # my_rewards.py:right
        if os.path.isfile(os.path.join(folder, file)) and not os.path.exists(file):
            beside[file] = None
    if not beside:
        return ""
    return f"\n  beside the recipe: {', '.join(beside)}. Run the command in {folder}"


def _where(document: Document, keys: Sequence[str]) -> str:
    """Return the place of the first of these keys that a document holds."""
    for key in keys:
        if document.holds(_path(key)):
            return document.place(_path(key)).where
    return document.place(_path(keys[0])).where


@cache
def _adapter(section: Any) -> TypeAdapter[tuple[Any]]:
    # A tuple, because pydantic takes a configuration for everything but a dataclass itself, and
    # hands it on to those inside.
    everything: Any = tuple[section]  # pyright: ignore[reportInvalidTypeForm]
    return TypeAdapter(everything, config=ConfigDict(extra="forbid", allow_inf_nan=False))


def _valid(document: Document, section: type[Section], problems: list[Problem]) -> Section | None:
    """Return the recipe of a document, or a part of one.

    None with a problem for every value that no recipe can have.

    JSON's strict mode: a list is a tuple and a mapping a section, but no number is made from text
    or from true.
    """
    if half := half_character(document.values):
        raise ConfigError(f"half of a character, {half}, stands alone in the recipe: mend the text")
    try:
        return _adapter(section).validate_json(json.dumps([document.values]), strict=True)[0]
    except ValidationError as error:
        wrong: dict[tuple[str | int, ...], Problem] = {}
        for item in error.errors(include_url=False):
            path, kind = _known_path(document, item["loc"][1:]), item["type"]
            value = document.get(path) if kind == "missing" else item["input"]
            place = document.place(path)
            message = _message(".".join(map(str, path)), kind, value, place.text)
            wrong.setdefault(path, Problem(place.where, message))
        problems += wrong.values()
        return None


def _known_path(document: Document, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """A path of pydantic's without the union members that it tried, and without places in a list
    that is one value.
    """
    path: tuple[str | int, ...] = ()
    for part in loc:
        setting = schema.settings_table().get(schema.normal(".".join(map(str, (*path, part)))))
        in_list = isinstance(part, int) and schema.normal(".".join(map(str, path))) == "rewards"
        in_mapping = (
            isinstance(part, str)
            and isinstance(document.get(path), dict)
            and document.holds((*path, part))
        )
        if setting is not None or in_list or in_mapping:
            path = (*path, part)
    return path


def _path(key: str) -> tuple[str | int, ...]:
    """A dotted key as a path."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


WENT = {
    "model.dropout": "nothing is dropped, because what is scored is what was sampled; leave it out",
    "model.scratch.kv_heads": (
        "each attention head has keys and values of its own; a checkpoint (model.path) has its"
        " own number of them"
    ),
    "rollout.keep_special_tokens": (
        "reward functions get texts without special tokens, and all tokens as completion_ids"
    ),
    "rollout.engine.args": "set them in the function that makes the engine",
    "environment.interface": (
        "an environment with a method step is stepped, any other is called by its tools; rename"
        " the method"
    ),
    "group.mix": "the policy alone samples; objective distill has a teacher without it",
    "group.filter": (
        "a credit of your own that gives 0 to all completions of a group has dead_groups replace it"
    ),
    "group.max_refills": "a step draws at most 4 times prompts_per_step further prompts",
    "optimizer.max_nonfinite_steps": "the fifth skipped step in a row ends the run",
    "critic.coefficient": (
        "it is 0.1; a row of your own (objective: file.py:NAME) has another in"
        " ValueLoss(coefficient=...)"
    ),
    "critic.clip": (
        "it is 0.2; a row of your own (objective: file.py:NAME) has another in ValueLoss(clip=...)"
    ),
    "teacher.demonstrations": "train on them in a stage of its own before, objective: sft",
    "teacher.ema": (
        "a teacher stays as it is; with teacher.hint and no path it is the policy before its first"
        " step, and stages renew it (teacher.path: stage:NAME)"
    ),
    "eval.temperature": (
        "it is 1 during training; `groupwise eval RUN --temperature T` has another"
    ),
}
"""Keys that recipes had, and what is done in their place."""
WERE: dict[str, Any] = {
    "model.dropout": 0.0,
    "rollout.keep_special_tokens": False,
    "rollout.engine.args": {},
    "group.max_refills": 4,
    "optimizer.max_nonfinite_steps": 5,
    "critic.coefficient": 0.1,
    "critic.clip": 0.2,
    "teacher.ema": 0.0,
    "eval.temperature": 1.0,
}
"""What those keys were where a recipe named none, and what the constants are now; else null."""


def _message(key: str, kind: str, value: Any, text: str = "") -> str:
    """One line about a value that pydantic refused.   text: of a scalar as the file has it."""
    setting = schema.lookup(key)
    if setting is None and key.rpartition(".")[2].isdigit():
        return f"{key} must be a section (a mapping); got {schema.show(value)}"
    if key in WENT:
        return f"{key} is no key any more: {WENT[key]}"
    if kind == "unexpected_keyword_argument" or setting is None:
        return f"unknown key {key!r}{schema.suggestion(key)}"
    if kind == "missing" and setting.default is dataclasses.MISSING:
        return f"{key} is missing. {setting.meaning}"
    shown = schema.show(value)
    if isinstance(value, float):
        shown = text or repr(value)
    got = f"{key} must be {setting.expected_of(key)}; got {shown}"
    if kind == "string_type" and isinstance(value, int):
        return f'{got} (write it in quotes: "{text or value}")'
    if kind.startswith("int_") and isinstance(value, float) and value.is_integer():
        return f"{got} (write {value:.0f})"
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d_]*(\.[\d_]*)?", value) and "_" in value:
        return f"{got} (a number has no _: write {value.replace('_', '')})"
    if (
        kind == "string_type"
        and isinstance(value, (Mapping, list))
        and value
        and "list" not in setting.expected
    ):
        return f"{got} (braces and brackets have a meaning in YAML: write the text in quotes)"
    if value in ("", []) and setting.default not in (dataclasses.MISSING, None):
        return f"{got} (leave it out for the default, {schema.show(setting.default)})"
    return got + closest(value, setting.choices) if isinstance(value, str) else got


# ---------------------------------------------------------------- writing


def run_folder(recipe: Recipe) -> Path:
    """runs/NAME, or runs/NAME/STAGE."""
    return expanded(recipe.runs) / recipe.name


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every key in it; secrets are replaced by `[redacted]`.

    What it prints is read back as the same recipe (unless something was redacted).
    """
    return dump_yaml(redacted(_plain(recipe)))


def dump_stages(stages: Mapping[str, Recipe]) -> str:
    """What `load_stages` reads back as the same stages."""
    plain: dict[str, Any] = {}
    for stage, recipe in stages.items():
        if len(stages) == 1 and stage == recipe.objective:
            return dump(recipe)
        plain[stage] = redacted(_plain(recipe))
        plain[stage]["name"] = recipe.name.removesuffix(f"/{stage}")
    return dump_yaml({"stages": plain})


def _plain(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as dicts, lists and scalars."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


# ---------------------------------------------------------------- resuming


def changes(old: str, new: Recipe) -> list[str]:
    """What differs between a saved config.yaml and a recipe, one line a key: `optimizer.lr: 1e-06
    -> 2e-06`.

    Keys that do not say what is computed (`save`, `parallel`, `runs`, `name`, `threads`) may
    differ.  So may `steps` where no step depends on their number: with `optimizer.schedule:
    constant` and no warm-up that is cut to the steps.  So may `data.max_tokens` of an online
    objective: recipes of today may not name it, earlier ones could, and it did nothing.
    """
    recorded = parse_recorded(old, "config.yaml")
    before, after = _flat(redacted(_plain(recorded))), _flat(redacted(_plain(new)))
    neutral = NEUTRAL
    if _steps_are_neutral(recorded) and _steps_are_neutral(new):
        neutral += ("steps.",)
    if is_online(new.objective):
        neutral += ("data.max_tokens.",)
    root, _ = parse(old, "config.yaml")
    went: list[str] = []
    for key in WENT:
        value = root.get(_path(key))
        if root.holds(_path(key)) and value != WERE.get(key):
            went.append(f"{key}: {schema.show(value)} -> no key any more: {WENT[key]}")
    changed = []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and not f"{key}.".startswith(neutral):
            shown = schema.show(before.get(key)), schema.show(after.get(key))
            changed.append(f"{key}: {shown[0]} -> {shown[1]}")
    return went + changed


def _steps_are_neutral(recipe: Recipe) -> bool:
    """Return whether no step of a run depends on the number of all its steps."""
    whole = recipe.steps is None or recipe.optimizer.warmup_steps <= policy_updates(recipe)
    return recipe.optimizer.schedule == "constant" and whole


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> scalar; empty mappings and null sections vanish."""
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for name, below in value.items():
            flat |= _flat(below, f"{prefix}.{name}".lstrip("."))
        return flat
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return _flat({str(place): item for place, item in enumerate(value)}, prefix)
    return {} if value is None else {prefix: value}
