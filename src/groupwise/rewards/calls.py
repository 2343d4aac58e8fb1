"""One reward function and how it is called: found by name, its signature checked, its result checked.

N completions of a step, in order, whatever their groups
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.process import ProcessReward, checked_steps
from groupwise.rewards.registry import BUILTINS, GOLD_COLUMNS, MAKERS
from groupwise.rewards.workers import Loop, Outcome, Pool, failed
from groupwise.settings import RewardSettings

OFFERED = ("prompts", "completions", "prompt_ids", "completion_ids", "finish_reasons")
"""What a function may ask for by name, beside the columns of the data; these names win over columns of the same name."""
SINGULAR = {"prompt": "prompts", "completion": "completions", "finish_reason": "finish_reasons"}
"""What a function of one completion calls them."""
LARGEST = float(np.finfo(np.float32).max)
"""A reward beyond this is taken for an accident: single precision cannot hold it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """What reward functions look at: N completions with everything that they may ask for, one entry per completion."""

    labels: Sequence[str]
    """Name each completion in messages: `prompt id#index`."""
    prompts: Sequence[Any]
    """TRL's convention: the row's messages if its prompt was messages, else its text."""
    prompt_texts: Sequence[str]
    """The text that the policy continues, chat template applied."""
    completions: Sequence[Any]
    """TRL's convention: `[{"role": "assistant", "content": text}]` if the prompt was messages, else the text."""
    texts: Sequence[str]
    prompt_ids: Sequence[Sequence[int]] | None = None
    completion_ids: Sequence[Sequence[int]] | None = None
    finish_reasons: Sequence[str] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A reward function that has been found and whose signature the data can satisfy."""

    name: str
    weight: float
    spec: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Fixed keyword arguments."""
    asks: tuple[str, ...]
    """What it is given by name: of `OFFERED` (or `SINGULAR`), columns, or `gold`."""
    gold: str | None
    """The column behind `gold`, for built-ins that compare with one."""
    builtin: bool
    single: bool
    """True: it takes one completion and returns one number.  False: TRL's signature."""
    asynchronous: bool
    process: bool
    """True: it returns step rewards (see `process.py`)."""
    timeout: float | None
    """Seconds of one call."""

    def keywords(self, batch: Completions) -> dict[str, Any]:
        """The keyword arguments of a call on all N completions.  Raises RewardError for what this batch does not hold."""
        given: dict[str, Any] = {}
        for name in self.asks:
            if name in self.arguments:
                continue
            wanted = SINGULAR.get(name, name) if self.single else name
            if wanted == "gold" and self.gold is not None:
                given[name] = list(batch.columns[self.gold])
            elif self.builtin and wanted in ("prompts", "completions"):
                given[name] = list(batch.prompt_texts if wanted == "prompts" else batch.texts)
            elif wanted in OFFERED:
                value = getattr(batch, wanted)
                if value is None and name not in inspect.signature(self.function).parameters:
                    continue  # its **keywords would have taken it; it did not ask for it by name
                if value is None:
                    raise RewardError(f"the reward {self.name!r} asks for {wanted!r}, which these completions do not come with")
                given[name] = list(value)
            else:
                given[name] = list(batch.columns[wanted])
        return given

    def rows(self, batch: Completions) -> list[dict[str, Any]]:
        """For a function of one completion: the keyword arguments of each of its N calls."""
        given = self.keywords(batch)
        return [{name: values[n] for name, values in given.items()} for n in range(len(batch))]


def find_reward(settings: RewardSettings, columns: Collection[str], tokenizer: Any = None) -> Reward:
    """Find the function that the settings name and check that the data can satisfy its signature.  tokenizer: the policy's.

    Raises ConfigError for an unknown name, a function that cannot be loaded, a column that the data lack, or bad arguments.
    """
    name = settings.name or settings.function.rpartition(":")[2]
    if not math.isfinite(settings.weight):
        raise ConfigError(f"the reward {name!r} has weight {settings.weight}; a weight is a finite number")
    arguments = dict(settings.args)
    if settings.function in MAKERS:
        function, builtin, arguments = _made(settings, name, tokenizer), False, {}
    else:
        function, builtin = find_function(settings.function)
    process = isinstance(function, ProcessReward)
    inner = function.function if isinstance(function, ProcessReward) else function
    gold = _gold_column(name, inner, arguments, columns) if builtin else None
    asks, single = _signature(name, inner, arguments, columns, gold)
    reward = Reward(
        name=name,
        weight=float(settings.weight),
        spec=settings.function,
        function=inner,
        arguments=arguments,
        asks=asks,
        gold=gold,
        builtin=builtin,
        single=single,
        asynchronous=_asynchronous(inner),
        process=process,
        timeout=settings.timeout,
    )
    if builtin:
        inner(**{ask: [] for ask in asks}, **arguments)  # refuses bad arguments now
    return reward


def _made(settings: RewardSettings, name: str, tokenizer: Any) -> Callable[..., Any]:
    maker = MAKERS[settings.function]
    known = [p.name for p in inspect.signature(maker).parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in inspect.signature(maker).parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for key in settings.args:
        if key not in known:
            raise ConfigError(f"the reward {name!r} has no argument {key!r}; it takes: {_listed(known)}")
    for key in required:
        if key not in settings.args:
            raise ConfigError(f"the reward {name!r} needs args: {{{key}: ...}}")
    if settings.timeout is not None:
        raise ConfigError(f"the reward {name!r} runs in this process, beside the policy, and cannot be stopped: leave timeout out")
    return maker(tokenizer, **settings.args)


def find_function(spec: str) -> tuple[Callable[..., Any], bool]:
    """The function behind `accuracy`, `module:function` or `path/to/file.py:function`, and whether it is built in.

    Modules are those that are installed, or lie in the working directory; files must lie in the working directory (a recipe from
    elsewhere cannot name code from anywhere).  Raises ConfigError.
    """
    place, colon, name = spec.rpartition(":")
    if not colon:
        if spec in BUILTINS:
            return BUILTINS[spec], True
        named = [*BUILTINS, *MAKERS]
        close = difflib.get_close_matches(spec, named, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"built-in: {', '.join(named)}; your own: module:function"
        raise ConfigError(f"there is no reward function {spec!r}; {hint}")
    module = _file(spec, place) if place.endswith(".py") else _module(spec, place)
    function = vars(module).get(name)
    if not callable(function):
        functions = [
            key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        close = difflib.get_close_matches(name, functions, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"its functions: {', '.join(functions) or 'none'}"
        raise ConfigError(f"reward function {spec!r}: {place} has no function {name!r}; {hint}")
    return function, False


def _module(spec: str, place: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file here cannot stand in for an installed module
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(
            f"reward function {spec!r}: cannot import {place!r} ({error}); looked for among the installed modules and in {here}"
        ) from error


def _file(spec: str, place: str) -> Any:
    here, path = Path.cwd().resolve(), Path(place).resolve()
    if not path.is_relative_to(here):
        raise ConfigError(f"reward function {spec!r}: the file must lie in the working directory, {here}")
    if not path.is_file():
        raise ConfigError(f"reward function {spec!r}: there is no file {path.relative_to(here)} in the working directory, {here}")
    name = f"groupwise_reward_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"  # one per file, whatever the working directory
    if name in sys.modules:
        return sys.modules[name]
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses and pickles of the file look it up there
    try:
        description.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _gold_column(name: str, function: Callable[..., Any], arguments: dict[str, Any], columns: Collection[str]) -> str | None:
    """The column that a built-in's `gold` is taken from; takes `column` out of the arguments."""
    if "gold" not in inspect.signature(function).parameters:
        return None
    chosen = arguments.pop("column", None)
    wanted = GOLD_COLUMNS if chosen is None else (chosen,)
    for column in wanted:
        if column in columns:
            return column
    raise ConfigError(
        f"the reward {name!r} compares with the column {' or '.join(map(repr, wanted))}, which the data do not have; "
        f"columns: {_listed(columns)}; name yours by args: {{column: ...}}"
    )


def _signature(
    name: str, function: Callable[..., Any], arguments: Mapping[str, Any], columns: Collection[str], gold: str | None
) -> tuple[tuple[str, ...], bool]:
    """What the function asks for by name, and whether it takes one completion at a time.  Raises ConfigError."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the reward {name!r}: the signature of {function!r} cannot be read ({error})") from error
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise ConfigError(f"the reward {name!r} has the positional-only parameter {positional[0]!r}; it is called by keyword")
    unknown = [key for key in arguments if key not in named and not everything]
    if unknown:
        raise ConfigError(f"the reward {name!r} has no argument {unknown[0]!r}; it takes: {_listed(_options(named, columns))}")
    single = "completion" in named and "completions" not in named
    offered = [*OFFERED, *([] if gold is None else ["gold"])]
    offered = [*SINGULAR, "prompt_ids", "completion_ids"] if single else offered
    available = [*offered, *(column for column in columns if column not in offered)]
    missing = [p.name for p in named.values() if p.name not in available and p.name not in arguments and p.default is p.empty]
    if missing:
        raise ConfigError(
            f"the reward {name!r} asks for {_listed(missing)}, which the data do not have; columns: {_listed(columns)} (beside "
            f"them: {', '.join(offered)}); rename a column by data.columns: {{{missing[0]}: yours}}, or set it by args"
        )
    asks = [key for key in named if key in available and key not in arguments]
    if everything:  # as TRL: finish_reasons and prompt_ids only for those who name them
        usual = ("prompt", "completion") if single else ("prompts", "completions", "completion_ids")
        asks += [key for key in (*usual, *columns) if key in available and key not in asks and key not in arguments]
    if not any(ask in ("completion", "completions", "completion_ids") for ask in asks):
        raise ConfigError(f"the reward {name!r} takes neither completions nor completion_ids: is it a reward function?")
    return tuple(asks), single


def _options(named: Mapping[str, inspect.Parameter], columns: Collection[str]) -> list[str]:
    given = {*OFFERED, *SINGULAR, *columns, "gold"}
    return [key for key in named if key not in given]


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _asynchronous(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# ------------------------------------------------------------------------------------------------------------ calling


def start(reward: Reward, batch: Completions, loop: Loop, pool: Pool | None) -> Callable[[], Outcome]:
    """Begin a call on all N completions; calling what this returns waits for its outcome, whose value is checked.

    Asynchronous functions run at once, beside everything else; functions with a timeout in a worker process of their own, so that
    they can be killed; the others in the calling thread, when they are waited for.
    """
    if reward.asynchronous:
        return loop.submit(_gathered(reward, batch), reward.timeout)
    if pool is not None:
        given = reward.rows(batch) if reward.single else reward.keywords(batch)
        return functools.partial(pool.run, list(batch.labels), given)
    return functools.partial(_here, reward, batch)


def worker_pool(reward: Reward) -> Pool:
    """The process of a function with a timeout."""
    assert reward.timeout is not None
    setup = (reward.spec, reward.name, dict(reward.arguments), reward.single, reward.process)
    return Pool("groupwise.rewards.calls:in_worker", setup=setup, size=1, seconds=reward.timeout)


def in_worker(spec: str, name: str, arguments: dict[str, Any], single: bool, process: bool) -> Callable[..., Any]:
    """In a worker: find the function and return what calls it."""
    function, _ = find_function(spec)
    inner = function.function if isinstance(function, ProcessReward) else function

    def call(labels: list[str], given: Any) -> Any:
        try:
            if single:
                values = [_each(inner, arguments, label, row) for label, row in zip(labels, given, strict=True)]
            else:
                values = inner(**given, **arguments)
        except _Located as located:
            raise RewardError(describe_failure(name, [located.label], Outcome(failure="error", **located.said))) from None
        return _settled(name, values, labels, process)

    return call


def _here(reward: Reward, batch: Completions) -> Outcome:
    began = time.monotonic()
    try:
        if reward.single:
            values = []
            for label, row in zip(batch.labels, reward.rows(batch), strict=True):
                values.append(_each(reward.function, reward.arguments, label, row))
        else:
            values = reward.function(**reward.keywords(batch), **reward.arguments)
        value = _settled(reward.name, values, batch.labels, reward.process)
    except Exception as error:  # whatever a user's function raises is an outcome, judged in one place
        return failed(error, began)
    return Outcome(value=value, seconds=time.monotonic() - began)


async def _gathered(reward: Reward, batch: Completions) -> Any:
    async def one(label: str, row: dict[str, Any]) -> Any:
        try:
            return await reward.function(**row, **reward.arguments)
        except Exception as error:
            raise _Located(label, error) from error

    if reward.single:
        values = await asyncio.gather(*(one(label, row) for label, row in zip(batch.labels, reward.rows(batch), strict=True)))
    else:
        values = await reward.function(**reward.keywords(batch), **reward.arguments)
    return _settled(reward.name, values, batch.labels, reward.process)


def _each(function: Callable[..., Any], arguments: Mapping[str, Any], label: str, row: Mapping[str, Any]) -> Any:
    try:
        return function(**row, **arguments)
    except Exception as error:
        raise _Located(label, error) from error


class _Located(Exception):
    """What a function of one completion raised, and on which."""

    def __init__(self, label: str, error: Exception) -> None:
        super().__init__(label)
        self.label, self.error = label, error

    @property
    def said(self) -> dict[str, Any]:
        return {"message": str(self.error), "kind": type(self.error).__name__, "cause": self.error}


def describe_failure(name: str, labels: Sequence[str], outcome: Outcome) -> str:
    """The message of a call that did not end with a value: function, what happened, where, on which completions."""
    if isinstance(outcome.cause, _Located):
        return describe_failure(name, [outcome.cause.label], Outcome(failure="error", **outcome.cause.said))
    if outcome.kind == "RewardError":
        return outcome.message
    raised = f"raised {outcome.kind}: {outcome.message}" + (f" ({' '.join(outcome.where.split())})" if outcome.where else "")
    happened = {"error": raised, "timeout": f"was stopped: {outcome.message}", "died": f"did not return: {outcome.message}"}
    shown = ", ".join(labels[:3]) + (f" ... ({len(labels)} completions)" if len(labels) > 3 else "")
    return f"the reward function {name!r} {happened[outcome.failure or 'error']}; on {shown}"


# ----------------------------------------------------------------------------------------------------------- checking


def _settled(name: str, values: Any, labels: Sequence[str], process: bool) -> list[Any]:
    if process:
        return checked_steps(name, values, labels)
    return checked(name, values, labels)


def checked(name: str, values: Any, labels: Sequence[str]) -> list[float | None]:
    """What a reward function returned, as one float or None per completion.

    Lists, tuples and one-dimensional numpy arrays and torch tensors of numbers and bools are taken; all else raises RewardError.

    >>> checked("f", np.array([True, False]), ["0#0", "0#1"])
    [1.0, 0.0]
    """
    expected = f"expected a list of {len(labels)} numbers or None, one per completion"
    values = _array(values)
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise RewardError(f"the reward function {name!r} returned an array of shape {values.shape}, {expected}")
    if not isinstance(values, list | tuple | np.ndarray):
        hint = "; is it an async function? declare it with async def" if isinstance(values, Awaitable) else ""
        if inspect.iscoroutine(values):
            values.close()
        raise RewardError(f"the reward function {name!r} returned {_kind(values)}, {expected}{hint}")
    if len(values) != len(labels):
        raise RewardError(f"the reward function {name!r} returned {len(values)} rewards for {len(labels)} completions, {expected}")
    return [as_reward(name, value, label) for value, label in zip(values, labels, strict=True)]


def as_reward(name: str, value: Any, label: str) -> float | None:
    """One reward as a float.  Raises RewardError for what is not a number, and for a number that is not finite."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) or type(value).__module__ == "torch":
        array = np.asarray(_array(value))
        value = array.item() if array.ndim == 0 else value
    if not isinstance(value, bool | int | float | np.number | np.bool_) or isinstance(value, np.complexfloating):
        raise RewardError(f"the reward function {name!r} returned {_kind(value)} for completion {label}, expected a number or None")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise RewardError(
            f"the reward function {name!r} returned {number:g} for completion {label}: a reward is finite "
            "(within single precision); return None where it does not apply"
        )
    return number


def _array(values: Any) -> Any:
    """A torch tensor as a numpy array, without importing torch; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach().cpu().double().numpy()
    return values


def _kind(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float | bool | None) else ""
    return f"{type(value).__name__} {text[:60]}".strip() if value is not None else "None"
