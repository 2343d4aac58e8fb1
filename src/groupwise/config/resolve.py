"""From a recipe to an algorithm: the row that it names, with the parts and numbers that its `group`
replaces.

Importing this file does not import torch: a recipe's algorithm is built, and its facts are read,
when the recipe is checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import TeacherDivergence, ValueLoss
from groupwise.algorithms.parts import (
    bare,
    describe,
    fact,
    name_of,
    options,
    parameters,
    with_options,
)
from groupwise.algorithms.table import ALGORITHMS, PARTS
from groupwise.algorithms.user_parts import registered
from groupwise.config.live_objects import object_of
from groupwise.config.settings import GroupSettings, Part
from groupwise.errors import ConfigError
from groupwise.utils.imports import imported
from groupwise.utils.spelling import closest

KLS_IN_REWARD = ("k1", "k3")
"""Estimators that a credit with the option `kl` can subtract from the reward."""
KINDS = ("credit", "ratio", "surrogate", "weights", "kl")
"""The parts that every algorithm has."""
SETTINGS = {"beta", "kl"}
"""Options of parts that are settings of their own."""


def resolve(objective: str, group: GroupSettings, max_new_tokens: int) -> Algorithm:
    """The algorithm of a recipe: the row `objective` with the parts and numbers of `group`.

    max_new_tokens: the longest completion, for weights that divide by it.
    Raises ConfigError for an unknown name, part or option, a value out of range, and settings that
    exclude each other.

    >>> from groupwise.config.settings import GroupSettings
    >>> group = GroupSettings(surrogate={"high": 0.28}, beta=0.04)
    >>> algorithm = resolve("grpo", group, max_new_tokens=256)
    >>> describe(algorithm.surrogate), algorithm.beta, algorithm.token_level
    ('clipped(low=0.2, high=0.28)', 0.04, True)
    """
    row = row_of(objective)
    algorithm = with_group(row, group, max_new_tokens)
    for keys, message in conflicts(algorithm, row, group):
        raise ConfigError(message, key=keys[0])
    return with_checks(algorithm)


def with_checks(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with a check around each part that is not built in (`user_parts`).

    Raises ConfigError for a part that cannot be called with what its kind is called with.
    """
    parts: dict[str, Any] = {}
    for kind in KINDS:
        parts[kind] = registered(kind, getattr(algorithm, kind))
    terms = []
    for term in algorithm.extra:
        if isinstance(term, TeacherDivergence):
            term = replace(term, function=registered("divergence", term.function))
        terms.append(registered("extra", term))
    return replace(algorithm, extra=tuple(terms), **parts)


def row_of(objective: str) -> Algorithm:
    """The row of the table that an objective names, or somebody's own.  Raises ConfigError."""
    if ":" not in objective:
        if objective in ALGORITHMS:
            return ALGORITHMS[objective]
        near = closest(objective, ALGORITHMS)
        raise ConfigError(
            f"there is no online algorithm {objective!r}{near}; there are {', '.join(ALGORITHMS)}"
        )
    row = imported("objective", objective)
    if not isinstance(row, Algorithm):
        raise ConfigError(
            f"objective: {objective!r} is not an Algorithm but {type(row).__name__}",
            key="objective",
        )
    for kind in KINDS:
        if not callable(part := getattr(row, kind)):
            shown = repr(part) if isinstance(part, str) else f"an object of {type(part).__name__}"
            raise ConfigError(
                f"objective: {kind} of {objective!r} is {shown}: give the function or object"
                " itself",
                key="objective",
            )
    if not isinstance(row.extra, tuple | list) or not all(map(callable, row.extra)):
        raise ConfigError(
            f"objective: extra of {objective!r} is {row.extra!r}: give a tuple, extra=(my_term,)",
            key="objective",
        )
    return row


def with_group(row: Algorithm, group: GroupSettings, max_new_tokens: int) -> Algorithm:
    """A row with what `group` replaces.  Raises ConfigError for the first part that is wrong."""
    beta = row.beta if group.beta is None else group.beta
    estimator = {"kl": group.kl} if group.kl in KLS_IN_REWARD else {}
    in_reward = {"beta": beta, **estimator} if row.kl_place == "reward" else {"beta": 0.0}
    credit = chosen("credit", group.credit, row.credit, in_reward)
    return replace(
        row,
        credit=credit,
        ratio=chosen("ratio", group.ratio, row.ratio),
        surrogate=chosen("surrogate", group.surrogate, row.surrogate),
        weights=chosen("weights", group.weights, row.weights, {"length": max_new_tokens}),
        kl=chosen("kl", group.kl, row.kl),
        extra=tuple(_extra(row, group, credit)),
        beta=beta,
        dead_groups=group.dead_groups or row.dead_groups,
        truncated=group.truncated or row.truncated,
        entropy_bonus=group.entropy_bonus,
        entropy_target=group.entropy_target,
        entropy_step=group.entropy_step,
        entropy_quantile=group.entropy_quantile,
        off_policy_delta=group.off_policy_delta,
    )


def _extra(row: Algorithm, group: GroupSettings, credit: Callable) -> Iterator[Callable]:
    """A row's extra terms with what a recipe replaces, and those that its other parts bring: the
    value loss that trains the critic of a credit, and the divergence that it names."""
    terms = list(row.extra)
    has_value_loss = any("value" in fact(term, "reads") for term in terms)
    if "value" in fact(credit, "reads") and not has_value_loss:
        terms.append(ValueLoss())
    if group.divergence is not None and row.divergence is None:
        terms.append(TeacherDivergence())
    for term in terms:
        if isinstance(term, TeacherDivergence):
            yield replace(term, function=chosen("divergence", group.divergence, term.function))
        else:
            yield term


def conflicts(
    algorithm: Algorithm, row: Algorithm, group: GroupSettings
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What cannot work together in an algorithm that a recipe asks for: the keys, and a message."""
    in_reward = row.kl_place == "reward"
    if algorithm.beta > 0.0 and in_reward and "beta" not in options(algorithm.credit):
        yield (
            ("group.beta",),
            (
                f"group.beta: {row.name!r} subtracts the KL from the reward, which the credit"
                f" {describe(algorithm.credit)} cannot do; use beta: 0, or objective: grpo with"
                " this credit"
            ),
        )
    estimators = KLS_IN_REWARD if "kl" in options(algorithm.credit) else ("k1",)
    if in_reward and group.kl not in (None, *estimators):
        yield (
            ("group.kl",),
            (
                f"group.kl: {row.name!r} takes the KL from the reward, as"
                f" {' or '.join(estimators)}, so it cannot be {group.kl!r}; for a KL in the loss"
                f" use objective: grpo with group.credit: {name_of(row.credit)}"
            ),
        )
    level = fact(algorithm.surrogate, "ratio_level")
    if level is not None and group.ratio is not None and name_of(algorithm.ratio) != level:
        yield (
            ("group.ratio", "group.surrogate"),
            (
                f"group.ratio: the surrogate {describe(algorithm.surrogate)} does not use a ratio"
                f" level, so {group.ratio!r} would change nothing; leave it out, or use the"
                " surrogate clipped, cispo or sapo"
            ),
        )
    if fact(algorithm.credit, "compares_siblings") and group.group_size < 2:
        yield (
            ("group.group_size",),
            (
                f"group.group_size must be at least 2 for {row.name!r} (its advantages compare"
                f" siblings), got {group.group_size}"
            ),
        )
    if algorithm.dead_groups == "drop" and not fact(algorithm.surrogate, "reads_logp"):
        yield (
            ("group.dead_groups",),
            (
                f"group.dead_groups: {row.name!r} learns from no advantages, so drop would leave"
                " out every group: leave the key out"
            ),
        )


def chosen(
    kind: str,
    setting: Part | None,
    preset: Callable | None,
    supplied: Mapping[str, Any] | None = None,
) -> Callable:
    """Return the part that a recipe names, with its options checked.

    supplied: options that follow from other settings.  Raises ConfigError.
    """
    read = read_part(kind, setting, preset, supplied or {})
    for key, message in read.problems:
        raise ConfigError(message, key=key)
    needed = []
    for name, parameter in parameters(read.part).items():
        if parameter.default is parameter.empty and name not in read.options:
            needed.append(name)
    if needed:
        raise ConfigError(
            f"group.{kind}: {name_of(read.part)} needs a value for {', '.join(needed)}",
            key=f"group.{kind}",
        )
    return with_options(read.part, read.options)


@dataclass
class ReadPart:
    """A part as a recipe names it, its options, and what is wrong with them."""

    part: Any
    options: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Keys and messages."""


def part_problems(
    kind: str,
    setting: Part | None,
    preset: Callable | None,
    supplied: Mapping[str, Any] | None = None,
) -> list[tuple[str, str]]:
    """Return what is wrong with a part of a recipe and its options: the key, and a message.

    Somebody's own part is imported for it.
    """
    return read_part(kind, setting, preset, supplied or {}).problems


def read_part(
    kind: str, setting: Part | None, preset: Callable | None, supplied: Mapping[str, Any]
) -> ReadPart:
    """Read the part that a setting names, and its options."""
    at = f"group.{kind}"
    try:
        part, keywords = _named(kind, setting, preset)
    except ConfigError as error:
        return ReadPart(part=None, problems=[(error.key or at, str(error))])
    read = ReadPart(part=part)
    known = parameters(part)
    for name, value in keywords.items():
        key = f"{at}.{name}"
        if name in supplied and name in SETTINGS:
            message = f"{at}: {name} is a setting of its own, group.{name}; got {value!r} here"
            read.problems.append((key, message))
        elif name not in known:
            read.problems.append((key, f"{key}: {_no_such_option(part, name)}"))
        else:
            try:
                read.options[name] = TypeAdapter(_type_of(known[name])).validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].lower()
                read.problems.append((key, f"{key}: {reason}, got {value!r}"))
    for name, value in supplied.items():
        if read.options.get(name) is None and _leaves_open(part, name):
            read.options[name] = value
    return read


def _no_such_option(part: Callable, name: str) -> str:
    """Return the message about an option that a part does not have."""
    settable = [option for option in parameters(part) if option != "beta"]
    takes = f"it takes {', '.join(settable)}" if settable else "it takes none"
    return f"{name_of(part)} has no such keyword ({takes}){closest(name, settable)}"


def _type_of(parameter: inspect.Parameter) -> Any:
    """Return the type of an option; Any where it has none that means something at run time."""
    if parameter.annotation is parameter.empty or isinstance(parameter.annotation, str):
        return Any
    return parameter.annotation


def _leaves_open(part: Any, name: str) -> bool:
    """Return True if a part has an option, and its class or function has the same default."""
    origin: Any = bare(part)
    if is_dataclass(origin) and not isinstance(origin, type):
        origin = type(origin)
    unset = parameters(origin)
    return name in unset and parameters(part)[name].default == unset[name].default


def _named(
    kind: str, setting: Part | None, preset: Callable | None
) -> tuple[Callable, dict[str, Any]]:
    """The part, or its class, that a setting names, and the options beside the name; options alone
    are of the preset's part.
    """
    keywords: dict[str, Any] = (
        {"name": setting} if isinstance(setting, str) else dict(setting or {})
    )
    names, at = PARTS[kind], f"group.{kind}"
    if "name" not in keywords:
        if preset is not None and (keywords or setting is None):
            return preset, keywords
        raise ConfigError(
            f"{at}: a mapping needs `name`, e.g. {{name: {next(iter(names), 'module:function')}}}",
            key=at,
        )
    name = keywords.pop("name")
    if not isinstance(name, str):
        raise ConfigError(f"{at}: `name` is that of a function, got {name!r}", key=at)
    if name in names:
        return names[name], keywords
    if ":" not in name:
        others = [f"group.{other}" for other, known in PARTS.items() if name in known]
        hint = f" (which is one of {' and '.join(others)})" if others else closest(name, names)
        ours = f"one of {', '.join(names)} or module:function" if names else "module:function"
        raise ConfigError(f"{at}: must be {ours}; got {name!r}{hint}", key=at)
    try:
        part = object_of(name, at)
        if part is None:
            part = imported(at, name)
    except ConfigError as error:
        error.key = error.key or at
        raise
    if not callable(part):
        raise ConfigError(f"{at}: {name!r} is not a function but {type(part).__name__}", key=at)
    return part, keywords
