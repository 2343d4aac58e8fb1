"""What a part of an algorithm is: its kind, its options, and the facts that it declares.

A part of ours is a frozen dataclass.  Its fields are its options, its class attributes its facts,
and it is called with what its kind is called with (`user_parts.INPUTS`).  Yours may be one too, or
any function, `partial` or object that can be called.  It declares its facts as attributes, as ours
do: `my_credit.reads = ("value",)`.  Importing this file does not import torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Optional, cast, get_type_hints

from annotated_types import Ge, Gt, Le

NotNegative = Annotated[float, Ge(0.0)]
Positive = Annotated[float, Gt(0.0)]
Share = Annotated[float, Ge(0.0), Le(1.0)]
# `|` of annotated types is for type checkers no value.
MaybeNotNegative = Optional[NotNegative]  # noqa: UP045
MaybeAboveOne = Optional[Annotated[float, Gt(1.0)]]  # noqa: UP045
MaybeShare = Optional[Share]  # noqa: UP045
MaybeCount = Optional[Annotated[int, Gt(0)]]  # noqa: UP045

Parameters = Mapping[str, inspect.Parameter]


class Part:
    """A part of ours, with the facts of one that declares none."""

    __call__: Any

    name: ClassVar[str] = ""
    """The name in a recipe: the class's name in small letters."""
    reads: ClassVar[Any] = ()
    """Credit, extra term: names of the signals that it reads beside rewards: `value` (a critic is
    then trained), `teacher_logp` (a teacher scores what was drawn), `process` (rewards of steps);
    of a term also `teacher` (the teacher's distributions)."""
    needs_reward: ClassVar[Any] = True
    """Credit: False if it never looks at a reward."""
    compares_siblings: ClassVar[Any] = False
    """Credit: True if a group of one completion would get no advantage."""
    per_token: ClassVar[Any] = False
    """Ratio, surrogate, extra term: True if a token's loss depends on that token alone: its
    gradient is then taken while the log-probs of the other tokens do not exist yet."""
    ratio_level: ClassVar[Any] = None
    """Surrogate: name of the ratio level that it is looked at by, where it does not read
    `Terms.log_ratio_M`.
    """
    folds_mismatch: ClassVar[Any] = False
    """Surrogate: True if the weights of a sampler mismatch are in its own weight; all others are
    multiplied by them.
    """
    reads_logp: ClassVar[Any] = True
    """Surrogate: False if its loss does not depend on log-probs."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


class Credit(Part):
    """Rewards of groups -> advantages."""


class Ratio(Part):
    """Log-probs -> the log of each token's importance ratio.  A recipe names `SequenceMeanRatio` as
    `sequence_mean`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.name = cls.name.removesuffix("_ratio")


class Surrogate(Part):
    """`losses.Terms` -> the loss of each token."""


class Weights(Part):
    """Lengths of completions -> the weight of each completion's tokens."""


class Kl(Part):
    """Log-probs, those of the reference, log-ratios -> the estimated KL of each token."""


class Term(Part):
    """`losses.Terms` -> the loss of each token, added to the surrogate's."""


class Divergence(Part):
    """Log-probs of student and teacher over the vocabulary -> the distance of each row."""


class CheckedPart:
    """A part of your own with a check of what it gives (`user_parts`)."""

    part: Callable[..., Any]

    __call__: Any


def bare(part: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function (or object) inside of partials and checks."""
    while isinstance(part, (CheckedPart, partial)):
        part = part.part if isinstance(part, CheckedPart) else part.func
    return part


def is_built_in(part: Callable[..., Any]) -> bool:
    """Return True if a part is one of ours."""
    return str(getattr(bare(part), "__module__", "")).startswith("groupwise.")


def fact(part: Callable[..., Any], name: str) -> Any:
    """Return what a part declares, or the default (`Part`).

    >>> def surrogate(terms, *, width=1.0): ...
    >>> surrogate.per_token = True
    >>> fact(partial(surrogate, width=2.0), "per_token"), fact(surrogate, "reads_logp")
    (True, True)
    """
    value = getattr(bare(part), name, getattr(Part, name))
    if name == "reads" and isinstance(value, str):
        return (value,)
    return value


def name_of(part: Callable[..., Any]) -> str:
    """Return the name of a part: ours as a recipe names it; of another object its type's."""
    function = bare(part)
    kind = function if isinstance(function, type) else type(function)
    if issubclass(kind, Part):
        return kind.name
    return getattr(function, "__name__", kind.__name__)


def options(part: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a part (`parameters`) with the values that it will be called with.

    >>> options(partial(lambda terms, *, low=0.2, high=0.2: None, high=0.28))
    {'low': 0.2, 'high': 0.28}
    """
    values = {}
    for name, parameter in parameters(part).items():
        if parameter.default is not parameter.empty:
            values[name] = parameter.default
    return values


def parameters(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what a recipe may set of a part: a class's parameters, an object's fields if its class
    is a dataclass; a function's keyword-only parameters, and those with a default.

    Their annotations are types, or texts where these are not known.
    """
    if isinstance(part, CheckedPart):
        return parameters(part.part)
    if isinstance(part, type):
        return dict(_parameters_of_class(part))
    if is_dataclass(part):
        fields = {}
        for name, parameter in _parameters_of_class(type(part)).items():
            fields[name] = parameter.replace(default=getattr(part, name))
        return fields
    settable = {}
    for name, parameter in _signature(part).items():
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty:
            settable[name] = parameter
    return settable


_UNREAD = (NameError, AttributeError, TypeError, SyntaxError)
"""Errors of reading an annotation that is written as a text and means nothing at run time."""


def _signature(part: Callable[..., Any]) -> Parameters:
    try:
        named = inspect.signature(part, eval_str=True).parameters
    except _UNREAD:  # names that are there for type checkers alone
        named = inspect.signature(part).parameters
    settable = {}
    for name, parameter in named.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            settable[name] = parameter
    return settable


@cache
def _parameters_of_class(kind: type) -> Parameters:
    named = _signature(kind)
    if not is_dataclass(kind):
        return named
    try:
        # A field that a class inherits is annotated where its parent is.
        types = get_type_hints(kind, include_extras=True)
    except _UNREAD:
        return named
    return {name: one.replace(annotation=types[name]) for name, one in named.items()}


def with_options(part: Callable[..., Any], chosen: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the part with options changed; of a class its object."""
    if isinstance(part, CheckedPart):
        return cast(Any, replace)(part, part=with_options(part.part, chosen))
    if isinstance(part, type):
        return part(**chosen)
    if is_dataclass(part):
        return cast(Any, replace)(part, **chosen)
    return partial(part, **chosen) if chosen else part


def describe(part: Callable[..., Any]) -> str:
    """Return a part as one would write it, without what is off: `clipped(low=0.2, high=0.28)`."""
    shown = []
    for name, value in options(part).items():
        if isinstance(value, (Part, CheckedPart)):
            value = describe(value)
        if value is not None:
            shown.append(f"{name}={value}")
    return f"{name_of(part)}({', '.join(shown)})" if shown else name_of(part)
