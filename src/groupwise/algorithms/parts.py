"""What the parts of an algorithm have in common: options, facts, and checks of what a part of your
own gives.

A part of ours is a frozen dataclass: its fields are its options, its class attributes its facts,
and it is called with what its kind is called with (`INPUTS`).  Yours may be one too, or any
function, `partial` or object that can be called; it declares its
facts as attributes, as ours do: `my_credit.reads = ("value",)`.  Importing this file does not
import torch.

M trained tokens of one micro-batch   R completions of the optimizer step   n tokens of a completion
"""

from __future__ import annotations

import inspect
import linecache
import re
import reprlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Optional, cast, get_type_hints

import numpy as np
from annotated_types import Ge, Gt, Le

from groupwise.errors import ConfigError, GroupwiseError
from groupwise.records import RolloutGroup
from groupwise.utils.spelling import closest, counted

if TYPE_CHECKING:
    from torch import Tensor


NotNegative = Annotated[float, Ge(0.0)]
Positive = Annotated[float, Gt(0.0)]
Share = Annotated[float, Ge(0.0), Le(1.0)]
# `|` of annotated types is for type checkers no value.
MaybeNotNegative = Optional[NotNegative]  # noqa: UP045
MaybeAboveOne = Optional[Annotated[float, Gt(1.0)]]  # noqa: UP045
MaybeShare = Optional[Share]  # noqa: UP045
MaybeCount = Optional[Annotated[int, Gt(0)]]  # noqa: UP045


class Part:
    """A part of ours, with the facts of one that declares none."""

    __call__: Any

    name: ClassVar[str] = ""
    """In a recipe: the class's name in small letters."""
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
    of_demonstrations: ClassVar[Any] = False
    """Extra term: True if it is about demonstrations alone."""

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
    """`losses.Terms` -> the loss of each token, added to the surrogate's with a weight of its own."""


class Divergence(Part):
    """Log-probs of student and teacher over the vocabulary -> the distance of each row."""


INPUTS = {
    "credit": ("groups",),
    "ratio": ("logp_M", "old_logp_M", "segment_M", "segments"),
    "surrogate": ("terms",),
    "weights": ("tokens_R", "prompt_R"),
    "divergence": ("log_q_CV", "log_p_CV"),
    "filter": ("group",),
    "kl": ("logp_M", "reference_logp_M", "log_ratio_M"),
    "extra": ("terms",),
}
"""What each kind of part is called with."""
READS = ("value", "teacher_logp", "process")
"""What a credit may read beside rewards; an extra term also `teacher`."""
UNFILLED = (
    ": a field of Terms is None that nothing needs: reference_logp_M without a KL in the loss"
    " (group.beta), value_M and divergence unless an extra term reads `value` or `teacher`"
)
"""A hint for messages about None."""


def fact(part: Callable[..., Any], name: str) -> Any:
    """What a part declares, or the default (`Part`).

    >>> def surrogate(terms, *, width=1.0): ...
    >>> surrogate.per_token = True
    >>> fact(partial(surrogate, width=2.0), "per_token"), fact(surrogate, "reads_logp")
    (True, True)
    """
    value = getattr(bare(part), name, getattr(Part, name))
    return (value,) if name == "reads" and isinstance(value, str) else value


def bare(part: Callable[..., Any]) -> Callable[..., Any]:
    """The function (or object) inside of partials."""
    while isinstance(part, partial):
        part = part.func
    return part


def name_of(part: Callable[..., Any]) -> str:
    """The name of a part: ours as a recipe names it; of another object its type's."""
    function = bare(part)
    known = function if isinstance(function, type) else type(function)
    return known.name if issubclass(known, Part) else getattr(function, "__name__", known.__name__)


def options(part: Callable[..., Any]) -> dict[str, Any]:
    """The options of a part (`parameters`) with the values that it will be called with.

    >>> options(partial(lambda terms, *, low=0.2, high=0.2: None, high=0.28))
    {'low': 0.2, 'high': 0.28}
    """
    return {
        name: one.default for name, one in parameters(part).items() if one.default is not one.empty
    }


def parameters(part: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """What a recipe may set of a part: a class's parameters, an object's fields if its class is a
    dataclass; a function's keyword-only parameters, and those with a default.  Their annotations
    are types, or texts where these are not known."""
    if isinstance(part, type):
        return dict(_of_class(part))
    if is_dataclass(part):
        return {n: p.replace(default=getattr(part, n)) for n, p in _of_class(type(part)).items()}
    return {
        n: p
        for n, p in _signature(part).items()
        if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
    }


_UNREAD = (NameError, AttributeError, TypeError, SyntaxError)
"""What reading an annotation raises that is written as a text and means nothing at run time."""


def _signature(part: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        named = inspect.signature(part, eval_str=True).parameters
    except _UNREAD:  # names that are there for type checkers alone
        named = inspect.signature(part).parameters
    return {n: p for n, p in named.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@cache
def _of_class(kind: type) -> Mapping[str, inspect.Parameter]:
    named = _signature(kind)
    if not is_dataclass(kind):
        return named
    try:
        types = get_type_hints(
            kind, include_extras=True
        )  # a field that a class inherits is annotated where its parent is
    except _UNREAD:
        return named
    return {n: p.replace(annotation=types[n]) for n, p in named.items()}


def with_options(part: Callable[..., Any], chosen: Mapping[str, Any]) -> Callable[..., Any]:
    """The part with options changed; of a class its object."""
    if isinstance(part, type):
        return part(**chosen)
    if is_dataclass(part):
        return cast(Any, replace)(part, **chosen)
    return partial(part, **chosen) if chosen else part


def describe(part: Callable[..., Any]) -> str:
    """A part as one would write it, without what is off: `clipped(low=0.2, high=0.28)`."""
    shown = {
        name: describe(value) if isinstance(value, Part) else value
        for name, value in options(part).items()
    }
    settings = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
    return f"{name_of(part)}({settings})" if settings else name_of(part)


# ---------------------------------------------------------------- parts of one's own


def label(kind: str, part: Callable[..., Any]) -> str:
    """A part in a message, with file and line where it is not built in: `the credit 'rank'
    (my_adv.py:12)`.
    """
    code, kind = _code(part), "extra term" if kind == "extra" else kind
    place = (
        ""
        if code is None or is_built_in(part)
        else f" ({_near(code.co_filename)}:{code.co_firstlineno})"
    )
    return f"the {kind} {name_of(part)!r}{place}"


def is_built_in(part: Callable[..., Any]) -> bool:
    """True if a part is one of ours."""
    return str(getattr(bare(part), "__module__", "")).startswith("groupwise.")


def refused(kind: str, part: Callable[..., Any], message: str) -> ConfigError:
    """The error about a part, with its key of the recipe.   message: what the part does wrong,
    behind its name.
    """
    return ConfigError(f"{label(kind, part)} {message}", key=_key(kind))


def _key(kind: str) -> str:
    """The key of a recipe that a kind of part comes from."""
    return "objective" if kind == "extra" else f"group.{kind}"


def check_inputs(kind: str, part: Callable[..., Any]) -> None:
    """Raises ConfigError if a part cannot be called with what its kind is called with, or reads a
    signal that there is not.
    """
    names, key = INPUTS[kind], _key(kind)
    if not callable(part):
        value = (
            f"{part!r}"
            if isinstance(part, str)
            else f"an object of {type(part).__name__}, which has no method __call__"
        )
        raise ConfigError(
            f"{key}: the {kind} is {value}: give a function, or an object that can be called",
            key=key,
        )
    try:
        inspect.signature(part).bind(*names)
    except TypeError as error:
        message = (
            f"{key}: {label(kind, part)} is called with {', '.join(names)} and nothing else:"
            f" {error}"
        )
        raise ConfigError(message, key=key) from None
    signals = (*READS, "teacher") if kind == "extra" else READS
    for name in fact(part, "reads") if kind in ("credit", "extra") else ():
        if name in ("reference_logp", "scored_logp"):
            raise refused(kind, part, f"reads {name!r}, which needs no declaration: leave it out")
        if name not in signals:
            raise refused(
                kind,
                part,
                f"reads {name!r}, which is no signal{closest(name, signals)}: there are"
                f" {', '.join(signals)}",
            )


def called(kind: str, part: Callable[..., Any], *inputs: Any) -> Any:
    """What a part gives, inside of `naming`."""
    with naming(kind, part):
        return part(*inputs)


@contextmanager
def naming(kind: str, part: Callable[..., Any]) -> Iterator[None]:
    """What a part of your own raises inside is a ConfigError that names the part and the line."""
    try:
        yield
    except GroupwiseError:
        raise
    except Exception as error:  # whatever somebody's function raises
        if is_built_in(part):
            raise
        message = (
            f"raised {type(error).__name__}:"
            f" {error}{_raised_at(part, error)}{_remedy(kind, part, error)}"
        )
        raise refused(kind, part, message) from error


def _remedy(kind: str, part: Callable[..., Any], error: Exception) -> str:
    """For what a part raised because it read what was not computed for it."""
    if kind in ("surrogate", "extra") and "NoneType" in str(error):
        return UNFILLED
    if isinstance(error, AttributeError) and error.name == "behavior_logp_M":
        return (
            ": Terms.old_logp_M is what the ratio divides by, Terms.sampler_logp_M what the sampler"
            " drew with"
        )
    name = str(error.args[0]) if isinstance(error, KeyError) and error.args else ""
    name = "value" if name == "return" else name
    if kind in ("credit", "extra") and name in READS and name not in fact(part, "reads"):
        return f": declare that it reads it: {name_of(part)}.reads = ({name!r},)"
    return ""


def checked_advantages(
    credit: Callable[..., Any], output: Any, groups: Sequence[RolloutGroup]
) -> list[list[np.ndarray]]:
    """What a credit gave as one float64 array (n,) for each completion of each group; a number for
    a completion is broadcast.

    A completion without a reward may have NaN, which is 0.  Raises ConfigError for all else.
    """
    expected = "expected, for each group, a number or an array for each completion"
    advantages = []
    for group, row in zip(
        groups, _entries(credit, output, len(groups), "group", "", expected), strict=True
    ):
        rows = _entries(
            credit, row, len(group.rollouts), "completion", f" of {group.prompt.place}", expected
        )
        advantages.append([_advantage(credit, value, group, i) for i, value in enumerate(rows)])
    return advantages


def _entries(
    credit: Callable[..., Any], output: Any, count: int, what: str, where: str, expected: str
) -> Any:
    if output is None:
        raise refused("credit", credit, f"gave None, {expected}: is there a return?")
    try:
        size = len(output)
    except TypeError:
        raise refused("credit", credit, f"gave {_described(output)}, {expected}") from None
    if size != count:
        raise refused(
            "credit",
            credit,
            f"gave {counted(size, 'value')} for {counted(count, what)}{where}, {expected}",
        )
    return output


def _advantage(credit: Callable[..., Any], output: Any, group: RolloutGroup, i: int) -> np.ndarray:
    rollout, value_n = group.rollouts[i], _numbers(output)
    whose = f"completion {rollout.place} ({counted(len(rollout), 'token')})"
    if value_n.ndim == 0:
        value_n = np.full(len(rollout), value_n)
    if value_n.shape != (len(rollout),):
        raise refused(
            "credit",
            credit,
            f"gave {_described(output)} for {whose}: give one number, or one for each token",
        )
    if np.isfinite(value_n).all():
        return value_n
    reward = float(group.reward[i])
    if np.isnan(reward) and not np.isinf(value_n).any():
        return np.nan_to_num(value_n)
    wrong = value_n[~np.isfinite(value_n)][0]
    raise refused(
        "credit",
        credit,
        f"gave {wrong:g} for {whose}, whose reward is {reward:g}: give finite numbers",
    )


def checked_loss(
    kind: str,
    part: Callable[..., Any],
    value_M: Any,
    logp_M: Tensor,
    *,
    critic_M: Tensor | None = None,
) -> Tensor:
    """What a ratio, a surrogate, a KL, a divergence or a term gave: a number for each token (M,),
    differentiable, and not NaN where the log-probs are not.

    critic_M: the critic's values, which a term that reads them must depend on.
    An infinite one may be an overflow of any loss: the optimizer leaves such a step out.
    """
    import torch

    if not isinstance(value_M, torch.Tensor) or value_M.shape != logp_M.shape:
        hint = ": is there a return?" if value_M is None else ""
        expected = f"expected a tensor of shape {tuple(logp_M.shape)}, a number for each token"
        raise refused(kind, part, f"gave {_described(value_M)}, {expected}{hint}")
    if is_built_in(part):
        return value_M
    if (
        fact(part, "reads_logp")
        and logp_M.requires_grad
        and torch.is_grad_enabled()
        and not value_M.requires_grad
    ):
        raise refused(
            kind,
            part,
            "gave numbers without a gradient: compute them from the log-probs, undetached",
        )
    if (
        critic_M is not None
        and critic_M.requires_grad
        and torch.is_grad_enabled()
        and not value_M.requires_grad
    ):
        raise refused(
            kind,
            part,
            "gave numbers without a gradient: compute them from terms.value_M, undetached",
        )
    wrong_M = value_M.detach().isnan() & ~logp_M.detach().isnan()
    if wrong_M.any():
        logp = float(logp_M.detach()[wrong_M][0])
        raise refused(kind, part, f"gave nan for a token whose log-prob is {logp:g}: give numbers")
    return value_M


def checked_weights(part: Callable[..., Any], output: Any, completions: int) -> np.ndarray:
    """What weights gave: a finite number for each completion, 0 or more, float64 (R,)."""
    weight_R = _numbers(output)
    if weight_R.shape != (completions,):
        hint = ": is there a return?" if output is None else ""
        expected = f"expected a number for each of the {completions} completions"
        raise refused("weights", part, f"gave {_described(output)}, {expected}{hint}")
    wrong_R = ~(np.isfinite(weight_R) & (weight_R >= 0))
    if wrong_R.any():
        place = int(np.flatnonzero(wrong_R)[0])
        raise refused(
            "weights",
            part,
            f"gave {weight_R[place]:g} for completion {place}: give finite numbers, 0 or more",
        )
    return weight_R


def checked_verdict(part: Callable[..., Any], verdict: Any) -> bool:
    """What a filter gave: True or False."""
    if not isinstance(verdict, bool | np.bool_):
        output = f"{reprlib.repr(verdict)} (a {type(verdict).__name__})"
        message = (
            f"group.filter: {name_of(part)} returned {output} for a group: it must return True or"
            " False"
        )
        raise ConfigError(message, key="group.filter")
    return bool(verdict)


def _numbers(output: Any) -> np.ndarray:
    """What a part gave as float64, a tensor too; without a shape that anybody expects if it is
    something else.
    """
    try:
        return np.asarray(
            output.detach().cpu() if hasattr(output, "detach") else output, dtype=np.float64
        )
    except (TypeError, ValueError):
        return np.zeros((0, 0))


def _described(value: Any) -> str:
    if value is None:
        return "None"
    if hasattr(value, "shape"):
        return (
            f"{'an array' if isinstance(value, np.ndarray) else 'a tensor'} of shape"
            f" {tuple(value.shape)}"
        )
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {str(value)[:60]}"


def _code(part: Callable[..., Any]) -> Any:
    function = inspect.unwrap(bare(part))
    return getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))


def _near(file: str) -> str:
    """A file's path from the working directory, if it lies below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _raised_at(part: Callable[..., Any], error: Exception) -> str:
    """The last line of the part's own file that was reached."""
    code = _code(part)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if code is not None and frame.filename == code.co_filename
    ]
    if not frames:
        return ""
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip()
    return f" ({_near(frames[-1].filename)}:{frames[-1].lineno}: {line})"
