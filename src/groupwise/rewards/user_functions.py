"""What a reward function is, for trainer and worker alike: it is found by name, its signature says
what it is called with, and its values are checked.

Calls are made by `functions.py` in a worker, which `calls.py` asks for them.

It imports little: worker processes start with it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.step_rewards import ProcessReward, checked_steps
from groupwise.rewards.trainer_state import RUN_PARAMETERS
from groupwise.utils.spelling import counted

OFFERED = (
    "prompts",
    "completions",
    "prompt_ids",
    "completion_ids",
    "finish_reasons",
    "environments",
    "environment_rewards",
)
"""What a function may ask for by name, beside the columns of the data; these names win over columns
of the same name.
"""
SINGULAR = {
    "prompt": "prompts",
    "completion": "completions",
    "finish_reason": "finish_reasons",
    "environment_state": "environments",
    "environment_reward": "environment_rewards",
}
"""What a function of one completion calls them."""
LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""A reward beyond this is taken for an accident: single precision cannot hold it."""
NO_COLUMN = "which the data do not have"
"""Every message about a missing column says this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What a function asks for, and how it is called."""

    asks: Sequence[str]
    """What it is given by name: of `OFFERED` (or `SINGULAR`), `RUN_PARAMETERS`, columns, or `gold`.
    """
    named: Sequence[str]
    """The parameters that it names; what else it asks for is taken by its `**keywords`."""
    optional: Sequence[str]
    """Parameters with a default: what the completions do not come with is left out."""
    single: bool
    """True: it takes one completion and returns one number.  False: TRL's signature."""
    asynchronous: bool
    process: bool
    """True: it returns step rewards (see `step_rewards.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """The arguments of reward functions: N completions with every column that they may ask for, one
    entry per completion.
    """

    labels: Sequence[str]
    """Name each completion in messages (`Rollout.place`)."""
    prompts: Sequence[Any]
    """TRL's convention: messages if the row's prompt was messages, else its text
    (`completions.prompt_of`).
    """
    prompt_texts: Sequence[str]
    """The text that the policy continues, chat template applied."""
    completions: Sequence[Any]
    """TRL's convention: `[{"role": "assistant", "content": text}]` if the prompt was messages, else
    the text.
    """
    texts: Sequence[str]
    prompt_messages: Sequence[Sequence[Mapping[str, Any]] | None] | None = None
    """What the policy's chat template was given (`Prompt.messages`)."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    completion_ids: Sequence[Sequence[int]] | None = None
    written_ids: Sequence[Sequence[int]] | None = None
    """The ids that the policy wrote, which built-in functions count."""
    finish_reasons: Sequence[str] | None = None
    environments: Sequence[Any] | None = None
    """The final `EnvironmentState` of each completion; None where it had no environment."""
    environment_rewards: Sequence[float | None] | None = None
    """The rewards that environments gave."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def chat(self) -> bool:
        """Return True if completions are messages."""
        return any(not isinstance(completion, str) for completion in self.completions)

    def offered(
        self, reads: Literal["rows", "texts", "messages"]
    ) -> dict[str, Sequence[Any] | None]:
        """What a function may ask for by name.   reads: as `Reward.reads`."""
        names = {name: getattr(self, name) for name in OFFERED}
        if reads == "texts":
            names |= {"prompts": self.prompt_texts, "completions": self.texts}
            names["completion_ids"] = self.written_ids or self.completion_ids
        elif reads == "messages" and self.prompt_messages is not None:
            names["prompts"] = [
                chat or text for chat, text in zip(self.prompt_messages, self.prompts, strict=True)
            ]
        return {**self.columns, **names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward function that has been found and whose signature the data can satisfy."""

    name: str
    weight: float
    spec: str
    signature: Signature
    arguments: Mapping[str, Any]
    """Fixed keyword arguments."""
    function: Callable[..., Any] | None = None
    """Built-ins that run in this process: the function itself.  None: it is called elsewhere, by
    its `spec`.
    """
    gold: str | None = None
    """The column behind `gold`, for built-ins that compare with one."""
    reads: Literal["rows", "texts", "messages"] = "rows"
    """Prompts and completions as the rows have them (a user's function), always as text (a
    built-in), or as the messages that the policy's chat template was given (a model)."""
    timeout: float | None = None
    """Seconds of one call: of a completion where it takes one, else of all that are scored at once.
    """

    def keywords(self, batch: Completions) -> dict[str, Any]:
        """The keyword arguments of a call on all N completions.  Raises RewardError for what this
        batch does not hold.
        """
        signature, offered = self.signature, batch.offered(self.reads)
        if self.gold is not None:
            offered["gold"] = batch.columns[self.gold]
        keywords: dict[str, Any] = {}
        for name in signature.asks:
            wanted = SINGULAR.get(name, name) if signature.single else name
            values = offered.get(wanted)
            if values is not None:
                keywords[name] = list(values)
            elif name in signature.named and name not in (*signature.optional, *RUN_PARAMETERS):
                raise RewardError(
                    f"the reward {self.name!r} asks for {wanted!r}, which these completions do not"
                    " come with"
                )
        return keywords

    def checked(self, values: Any, labels: Sequence[str]) -> list[Any]:
        """What the function returned for these completions: numbers, or steps of a process reward.
        Raises RewardError.
        """
        if self.signature.process:
            return checked_steps(self.name, values, labels)
        return checked(self.name, values, labels)


def read_signature(
    function: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any],
    columns: Collection[str],
    gold: str | None = None,
) -> Signature:
    """What the function asks for by name, and how it is called.  Raises ConfigError for what the
    data cannot satisfy.
    """
    process = isinstance(function, ProcessReward)
    if isinstance(function, ProcessReward):
        function = function.function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the reward {name!r}: the signature of {function!r} cannot be read ({error})"
        ) from error
    named: dict[str, inspect.Parameter] = {}
    everything = False
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            everything = True
        elif p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            named[p.name] = p
        elif p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise ConfigError(
                f"the reward {name!r} has the positional-only parameter {p.name!r}; it is called"
                " by keyword"
            )
    unknown = [key for key in arguments if key not in named and not everything]
    if unknown:
        raise ConfigError(
            f"the reward {name!r} has no argument {unknown[0]!r}; it takes:"
            f" {listed(_options(named, columns))}"
        )
    single = "completion" in named and "completions" not in named
    offered = [*OFFERED, *RUN_PARAMETERS]
    if single:
        offered = [*SINGULAR, "prompt_ids", "completion_ids", *RUN_PARAMETERS]
    elif gold is not None:
        offered.append("gold")
    available = {*offered, *columns}
    needed = [p.name for p in named.values() if p.default is p.empty and p.name not in arguments]
    missing = [key for key in needed if key not in available]
    if missing:
        raise ConfigError(
            f"the reward {name!r} asks for {listed(missing)}, {NO_COLUMN}; columns:"
            f" {listed(columns)} (beside them: {', '.join(offered)}); data.columns: {{{missing[0]}:"
            f" YOURS}} renames one, args: {{{missing[0]}: VALUE}} sets it"
        )
    asks = [key for key in named if key in available and key not in arguments]
    if everything:  # as TRL: finish_reasons and prompt_ids only for those who name them
        usual = ("prompt", "completion") if single else ("prompts", "completions", "completion_ids")
        for key in (*usual, *columns):
            if key in available and key not in asks and key not in arguments:
                asks.append(key)
    if not {"completion", "completions", "completion_ids"}.intersection(asks):
        raise ConfigError(
            f"the reward {name!r} takes neither completions nor completion_ids: is it a reward"
            " function?"
        )
    optional = tuple(p.name for p in named.values() if p.default is not p.empty)
    return Signature(
        asks=tuple(asks),
        named=tuple(named),
        optional=optional,
        single=single,
        asynchronous=asynchronous(function),
        process=process,
    )


def _options(named: Mapping[str, inspect.Parameter], columns: Collection[str]) -> list[str]:
    known = {*OFFERED, *SINGULAR, *RUN_PARAMETERS, *columns, "gold"}
    return [key for key in named if key not in known]


def listed(names: Collection[str]) -> str:
    """Names in a message."""
    return ", ".join(map(repr, names)) or "none"


def asynchronous(function: Callable[..., Any]) -> bool:
    """True if calling it gives something to be awaited."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def checked(name: str, values: Any, labels: Sequence[str]) -> list[float | None]:
    """What a reward function returned, as one float or None per completion.

    Lists, tuples, and one-dimensional arrays and tensors of numbers and bools are taken; all else
    raises RewardError.

    >>> import numpy as np
    >>> checked("f", np.array([True, False]), ["0#0", "0#1"])
    [1.0, 0.0]
    """
    expected = f"expected a list of {len(labels)}: a number, or None, for each completion"
    if _is_array(values):
        if values.ndim != 1:
            raise RewardError(
                f"the reward function {name!r} returned an array of shape {tuple(values.shape)},"
                f" {expected}"
            )
        values = values.tolist()
    if not isinstance(values, list | tuple):
        hint = ""
        if isinstance(values, Awaitable):
            hint = "; is it an async function? declare it with async def"
        if inspect.iscoroutine(values):
            values.close()
        raise RewardError(
            f"the reward function {name!r} returned {_kind(values)}, {expected}{hint}"
        )
    if len(values) != len(labels):
        numbers = f"{counted(len(values), 'reward')} for {counted(len(labels), 'completion')}"
        raise RewardError(f"the reward function {name!r} returned {numbers}, {expected}")
    return [as_reward(name, value, label) for value, label in zip(values, labels, strict=True)]


def as_reward(name: str, value: Any, label: str) -> float | None:
    """One reward as a float.  Raises RewardError for what is not a number, and for a number that is
    not finite.
    """
    number = value.tolist() if _is_array(value) else value
    if number is None:
        return None
    if not isinstance(number, bool | int | float):
        raise RewardError(
            f"the reward function {name!r} returned {_kind(value)} for completion {label}, expected"
            " a number or None"
        )
    reward = float(number)
    if not math.isfinite(reward) or abs(reward) > LARGEST:
        raise RewardError(
            f"the reward function {name!r} returned {reward:g} for completion {label}: a reward is"
            " finite (within single precision); return None where it does not apply"
        )
    return reward


def _is_array(value: Any) -> bool:
    """Whether it is an array, a tensor or a number of theirs; to import numpy would make a worker's
    start twice as long.
    """
    return hasattr(value, "ndim") and hasattr(value, "tolist")


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, str | int | float | bool):
        return f"{type(value).__name__} {repr(value)[:60]}"
    return type(value).__name__
