"""Keys laid over keys, before they are checked: stages over a recipe, `key=value` over both.

Precedence, low to high: the defaults, the file's own keys, the stage's keys, `key=value`, `stages.NAME.key=value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from groupwise.config import schema
from groupwise.config.settings import BY_NAME
from groupwise.config.strict_yaml import Node, Problem, parse_value
from groupwise.config.validation import STAGE

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
"""Where a stage starts from: an override that is meant for all stages leaves one that starts from an earlier stage alone."""


def read_overrides(overrides: Iterable[str], problems: list[Problem]) -> list[tuple[tuple[str, ...], Node]]:
    """`a.b=1` -> (("a", "b"), node).  Later ones win."""
    found = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip().removeprefix("--")
        where = f"override {key}={text}" if equals else f"override {override}"
        if not equals or not key:
            problems.append(Problem(where, "an override is written key=value, e.g. optimizer.lr=1e-5"))
            continue
        node, wrong = parse_value(text, where)
        problems += wrong
        if not wrong:
            found.append((tuple(key.split(".")), node))
    return found


def stage_trees(root: Node, changes: Sequence[tuple[tuple[str, ...], Node]], problems: list[Problem]) -> dict[str, Node]:
    """The tree of each stage with its overlay and the overrides in it; one tree, called "", without stages."""
    assert isinstance(root.value, dict)
    base = in_full(Node({key: node for key, node in root.value.items() if key != "stages"}, root.where))
    stages = root.value.get("stages")
    trees: dict[str, Node] = {}
    if stages is None:
        trees[""] = base.copy()
    elif not isinstance(stages.value, dict) or not stages.value:
        problems.append(Problem(stages.where, "stages must be a mapping of a stage's name to its keys"))
        return {}
    else:
        for stage, overlay in stages.value.items():
            if not re.fullmatch(r"\w[\w+-]*", stage):
                problems.append(Problem(overlay.where, f"a stage's name is made of letters, digits, _ + and -; got {stage!r}"))
            if overlay.value is None:
                overlay = Node({}, overlay.where)
            if not isinstance(overlay.value, dict):
                problems.append(
                    Problem(
                        overlay.where, f"stages.{stage} must be a mapping of keys to values, got {schema.show(overlay.plain())}"
                    )
                )
                overlay = Node({}, overlay.where)
            trees[stage] = overlaid(base.copy(), in_full(overlay))
        _check_own_data(stages.value, changes, problems)
    for path, node in sorted(changes, key=lambda change: change[0][0] == "stages"):
        if path[0] != "stages":
            for tree in trees.values():
                _set(tree, path, node, problems, every=stages is not None)
        elif stages is None:
            problems.append(Problem(node.where, "this recipe holds no stages"))
        elif len(path) < 3 or path[1] not in trees:
            near = schema.closest(path[1], list(trees)) if len(path) > 1 else ""
            problems.append(Problem(node.where, f"write stages.NAME.key=value with one of the stages {', '.join(trees)}{near}"))
        else:
            _set(trees[path[1]], path[2:], node, problems)
    return trees


def in_full(node: Node, key: str = "") -> Node:
    """The tree of `key` (dotted; "": of a recipe) in its longest form.

    A section or a reward that is its name alone becomes `{name: ...}` or `{function: ...}`; a number where the setting is a text
    (`name: 007`) becomes the text as it is written.
    """
    setting, value = schema.settings_table().get(schema.normal(key)), node.value
    if key == "rewards" and isinstance(value, str | list):
        entries = [node] if isinstance(value, str) else value
        return Node([in_full(one, f"{key}.{place}") for place, one in enumerate(entries)], node.where)
    if schema.normal(key) == "rewards.N" and isinstance(value, str):
        return Node({"function": node}, node.where)
    if setting is not None and setting.section in BY_NAME and isinstance(value, str):
        return Node({"name": node}, node.where)
    if isinstance(value, dict) and (not key or schema.normal(key) == "rewards.N" or (setting is not None and setting.section)):
        return Node({name: in_full(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}, node.where)
    if setting is not None and setting.expected in TEXTS and type(value) in (int, float) and node.text:
        return Node(node.text, node.where)
    return node


TEXTS = ("text", "text, or null")


def overlaid(base: Node, overlay: Node, prefix: str = "") -> Node:
    """`overlay` on `base`: sections are merged key by key, except those that name another one; everything else is replaced."""
    assert isinstance(base.value, dict) and isinstance(overlay.value, dict)
    _take_away(base, overlay, prefix)
    merged = dict(base.value)
    for key, node in overlay.value.items():
        below, setting = merged.get(key), schema.settings_table().get(prefix + key)
        is_section = setting is not None and setting.section is not None
        another = setting is not None and setting.section in BY_NAME and isinstance(node.value, dict) and "name" in node.value
        if is_section and not another and below is not None and isinstance(below.value, dict) and isinstance(node.value, dict):
            node = overlaid(below, node, f"{prefix}{key}.")
        merged[key] = node
    return Node(merged, base.where)


def _take_away(base: Node, overlay: Node, prefix: str) -> None:
    """Removes from `base` the alternatives of what `overlay` sets."""
    assert isinstance(base.value, dict) and isinstance(overlay.value, dict)
    for key, node in overlay.value.items():
        for other in ALTERNATIVES.get(prefix + key, ()) if node.value is not None else ():
            name = other.removeprefix(prefix)
            if name not in overlay.value:
                base.value.pop(name, None)


def _check_own_data(stages: Mapping[str, Node], changes: Sequence[tuple[tuple[str, ...], Node]], problems: list[Problem]) -> None:
    """Adds a problem for every override of all stages' data that would replace what a stage says of its own."""
    said = {path[1] for path, _ in changes if path[0] == "stages" and path[2:] in DATA}
    own = {}
    for stage, overlay in stages.items():
        source = next((found for path in DATA if isinstance((found := overlay.find(path)).value, str)), None)
        if source is not None and stage not in said and not _from_stage(source):
            own[stage] = source.plain()
    theirs = ", ".join(f"{stage} ({source})" for stage, source in own.items())
    for key, node in ((".".join(path), node) for path, node in changes if own and path in DATA):
        message = f"{key} of every stage would replace the data that stages have of their own: {theirs}"
        problems.append(Problem(node.where, f"{message}; say it of single stages: stages.{next(iter(own))}.{key}=..."))


def _from_stage(source: Node) -> bool:
    """True for a model or data that come from an earlier stage."""
    return isinstance(source.value, str) and source.value.startswith(STAGE)


def _set(tree: Node, path: tuple[str, ...], node: Node, problems: list[Problem], every: bool = False) -> None:
    """Puts an override into a tree, making the sections on the way.  every: it was meant for all stages."""
    dotted = ".".join(path)
    if every and path[:2] in SOURCES and _from_stage(tree.find((path[0], "path"))):
        return
    here = tree
    for depth, key in enumerate(path):
        last, prefix = depth == len(path) - 1, ".".join(path[:depth])
        if here.value is None:
            here.value = {}
        if isinstance(here.value, str) and (setting := schema.lookup(prefix)) and "`name`" in setting.expected:
            here.value = {"name": Node(here.value, here.where)}  # a function by its name, which gets a keyword
        if isinstance(here.value, dict):
            if node.value is not None:
                _take_away(here, Node({key: node}, node.where), f"{prefix}." if prefix else "")
            if last:
                here.value[key] = in_full(node.copy(), dotted)
                return
            here = here.value.setdefault(key, Node({}, node.where))
        elif isinstance(here.value, list) and key.isdigit() and int(key) < len(here.value):
            if last:
                here.value[int(key)] = in_full(node.copy(), dotted)
                return
            here = here.value[int(key)]
        elif isinstance(here.value, list):
            problems.append(
                Problem(node.where, f"{prefix} is a list of {len(here.value)} (from 0); {key!r} is not one of its places")
            )
            return
        else:
            problems.append(Problem(node.where, f"{prefix} is {schema.show(here.plain())}, there is no {dotted} in it"))
            return
