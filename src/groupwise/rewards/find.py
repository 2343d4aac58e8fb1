"""Reward functions by name: imported, their signatures compared with the data's columns, and the arguments of a call.

N completions of a step, in order, whatever their groups
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from groupwise.config.settings import RewardSettings
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.registry import BUILTINS, GOLD_COLUMNS, MAKERS
from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.trainer_state import TOLD
from groupwise.utils.spelling import nearest

OFFERED = (
    "prompts",
    "completions",
    "prompt_ids",
    "completion_ids",
    "finish_reasons",
    "environments",
    "environment_rewards",
)
"""What a function may ask for by name, beside the columns of the data; these names win over columns of the same name."""
SINGULAR = {
    "prompt": "prompts",
    "completion": "completions",
    "finish_reason": "finish_reasons",
    "environment_state": "environments",
    "environment_reward": "environment_rewards",
}
"""What a function of one completion calls them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """The arguments of reward functions: N completions with every column that they may ask for, one entry per completion."""

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
    written_ids: Sequence[Sequence[int]] | None = None
    """Of `completion_ids` those that the policy wrote: what built-in functions count."""
    finish_reasons: Sequence[str] | None = None
    environments: Sequence[Any] | None = None
    """The final `EnvironmentState` of each completion; None where it had no environment."""
    environment_rewards: Sequence[float | None] | None = None
    """The rewards that environments gave."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What a function asks for, and how it is called."""

    asks: tuple[str, ...]
    """What it is given by name: of `OFFERED` (or `SINGULAR`), `TOLD`, columns, or `gold`."""
    named: tuple[str, ...]
    """Its own parameters; what else it asks for is taken by its `**keywords`."""
    single: bool
    """True: it takes one completion and returns one number.  False: TRL's signature."""
    asynchronous: bool
    process: bool
    """True: it returns step rewards (see `step_rewards.py`)."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON, to be sent from a worker process."""
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Signature:
        """The signature that `as_dict` wrote."""
        found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
        return cls(**found)


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
    """Built-ins that run in this process: the function itself.  None: it is called elsewhere, by its `spec`."""
    gold: str | None = None
    """The column behind `gold`, for built-ins that compare with one."""
    builtin: bool = False
    timeout: float | None = None
    """Seconds of one call: of a completion where it takes one, else of all that are scored at once."""
    live: LiveReward | None = None
    """Where the function was given itself."""

    def keywords(self, batch: Completions) -> dict[str, Any]:
        """The keyword arguments of a call on all N completions.  Raises RewardError for what this batch does not hold."""
        given: dict[str, Any] = {}
        for name in self.signature.asks:
            if name in self.arguments or name in TOLD:
                continue
            wanted = SINGULAR.get(name, name) if self.signature.single else name
            if wanted == "gold" and self.gold is not None:
                given[name] = list(batch.columns[self.gold])
            elif self.builtin and wanted in ("prompts", "completions"):
                given[name] = list(batch.prompt_texts if wanted == "prompts" else batch.texts)
            elif self.builtin and wanted == "completion_ids" and batch.written_ids is not None:
                given[name] = list(batch.written_ids)
            elif wanted in OFFERED:
                value = getattr(batch, wanted)
                if value is None and name not in self.signature.named:
                    continue  # its **keywords would have taken it; it did not ask for it by name
                if value is None:
                    raise RewardError(f"the reward {self.name!r} asks for {wanted!r}, which these completions do not come with")
                given[name] = list(value)
            else:
                given[name] = list(batch.columns[wanted])
        return given


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveReward:
    """A reward function that exists only in this process: a lambda, a closure, a bound method, a function of a notebook.

    `runs: fork` (the default) calls it on the main thread of a fork of this process, made when the rewards are built.  It sees
    everything as it was then; what it changes stays in the fork, from call to call, and is not seen here.  Like a function of a
    file it can use signals, can be killed, and may hold the interpreter without holding up Ctrl-C.  A fork has no other thread of
    this process: locks that they held stay locked, torch computes on one thread, and CUDA cannot be used.  A lock that blocks it
    for ever shows as a call without a result.  Build rewards before models are loaded, and there is little to inherit.  After its
    end (a timeout) it is forked again, from the process as it is then.

    `runs: here` calls it in this process, always in the same thread, which is not the main one.  It sees and changes the
    program's own objects (its arguments are still copies), may use CUDA, and cannot be stopped: a `timeout` is refused unless it is
    asynchronous, `signal.alarm` raises, and while it holds the interpreter the whole program stands still.
    """

    function: Callable[..., Any]
    weight: float = 1.0
    name: str | None = None
    """Name in the log; default: the function's."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Extra keyword arguments."""
    timeout: float | None = None
    """Seconds after which a call counts as None, as in `RewardSettings`."""
    runs: Literal["fork", "here"] = "fork"

    def settings(self) -> RewardSettings:
        """The same as an entry of a recipe, apart from the function."""
        inner = self.function.function if isinstance(self.function, ProcessReward) else self.function
        name = self.name or getattr(inner, "__name__", type(inner).__name__)
        if self.timeout is not None and not (math.isfinite(self.timeout) and self.timeout > 0.0):
            raise ConfigError(f"the reward {name!r} has the timeout {self.timeout}; it is a number of seconds above 0")
        if self.runs not in ("fork", "here"):
            raise ConfigError(f"the reward {name!r} runs 'fork' or 'here', got {self.runs!r}")
        if self.timeout is not None and self.runs == "here" and not asynchronous(inner):
            raise ConfigError(
                f"the reward {name!r} runs in this process and cannot be stopped: leave timeout out, or let it run 'fork'"
            )
        return RewardSettings(function=f"live:{name}", weight=self.weight, name=name, args=self.args, timeout=self.timeout)


def check_name(settings: RewardSettings) -> str:
    """Its name in the log.  Raises ConfigError for a weight that is not finite."""
    name = settings.name or settings.function.rpartition(":")[2]
    if not math.isfinite(settings.weight):
        raise ConfigError(f"the reward {name!r} has weight {settings.weight}; a weight is a finite number")
    return name


def find_builtin(settings: RewardSettings, columns: Collection[str], tokenizer: Any = None) -> Reward:
    """The built-in that the settings name, its arguments checked.  tokenizer: the policy's.

    Raises ConfigError for bad arguments or a column that the data lack.
    """
    name, arguments, gold = settings.name or settings.function, dict(settings.args), None
    if settings.function in MAKERS:
        function, arguments = _made(settings, name, tokenizer), {}
    else:
        function, _ = find_function(settings.function)
        gold = _gold_column(name, function, arguments, columns)
    signature = read_signature(function, name, arguments, columns, gold)
    inner = function.function if isinstance(function, ProcessReward) else function
    builtin = settings.function in BUILTINS
    if builtin:
        inner(**{ask: [] for ask in signature.asks}, **arguments)  # refuses bad arguments now
    return Reward(
        name=name,
        weight=float(settings.weight),
        spec=settings.function,
        signature=signature,
        arguments=arguments,
        function=inner if settings.timeout is None else None,
        gold=gold,
        builtin=builtin,
        timeout=settings.timeout,
    )


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
    if ":" not in spec:
        if spec in BUILTINS:
            return BUILTINS[spec], True
        named = [*BUILTINS, *MAKERS]
        near = nearest(spec, named)
        hint = f"did you mean {near!r}?" if near is not None else f"built-in: {', '.join(named)}; your own: module:function"
        raise ConfigError(f"there is no reward function {spec!r}; {hint}")
    return find_named(spec, "reward function"), False


def find_named(spec: str, kind: str) -> Callable[..., Any]:
    """What is behind `module:name` or `path/to/file.py:name`, by the rules of `find_function`.

    kind: what it is called in messages.   Raises ConfigError.
    """
    place, _, name = spec.rpartition(":")
    what = f"{kind} {spec!r}"
    module = _file(what, place) if place.endswith(".py") else _module(what, place)
    found = vars(module).get(name)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
        ]
        near = nearest(name, own)
        hint = f"did you mean {near!r}?" if near is not None else f"there are: {', '.join(own) or 'none'}"
        raise ConfigError(f"{what}: {place} has no function {name!r}; {hint}")
    return found


def _module(what: str, place: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that a file here cannot stand in for an installed module
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise ConfigError(
            f"{what}: cannot import {place!r} ({error}); looked for among the installed modules and in {here}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_unimportable(what, place, error)) from error


def _file(what: str, place: str) -> Any:
    here, path = Path.cwd().resolve(), Path(place).resolve()
    if not path.is_relative_to(here):
        raise ConfigError(f"{what}: the file must lie in the working directory, {here}")
    if not path.is_file():
        raise ConfigError(f"{what}: there is no file {path.relative_to(here)} in the working directory, {here}")
    name = f"groupwise_reward_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"  # one per file, whatever the working directory
    if name in sys.modules:
        return sys.modules[name]
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses and pickles of the file look it up there
    try:
        description.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception | SystemExit):
            raise ConfigError(_unimportable(what, place, error)) from error
        raise
    return module


def _unimportable(what: str, place: str, error: BaseException) -> str:
    """What happened while a user's module ran for the first time, and the last line of it that was reached."""
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    reached = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).stem == stem]
    line = f" (line {reached[-1].lineno})" if reached else ""
    return f"{what}: {place} cannot be imported: {type(error).__name__}: {error}{line}"


NO_COLUMN = "which the data do not have"
"""In every message about a column that is missing."""


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
        f"the reward {name!r} compares with the column {' or '.join(map(repr, wanted))}, {NO_COLUMN}; "
        f"columns: {_listed(columns)}; name yours by args: {{column: ...}}"
    )


def read_signature(
    function: Callable[..., Any], name: str, arguments: Mapping[str, Any], columns: Collection[str], gold: str | None = None
) -> Signature:
    """What the function asks for by name, and how it is called.  Raises ConfigError for what the data cannot satisfy."""
    process = isinstance(function, ProcessReward)
    function = function.function if isinstance(function, ProcessReward) else function
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
    offered = [*OFFERED, *TOLD, *([] if gold is None else ["gold"])]
    offered = [*SINGULAR, "prompt_ids", "completion_ids", *TOLD] if single else offered
    available = [*offered, *(column for column in columns if column not in offered)]
    missing = [p.name for p in named.values() if p.name not in available and p.name not in arguments and p.default is p.empty]
    if missing:
        raise ConfigError(
            f"the reward {name!r} asks for {_listed(missing)}, {NO_COLUMN}; columns: {_listed(columns)} (beside "
            f"them: {', '.join(offered)}); rename a column by data.columns: {{{missing[0]}: yours}}, or set it by args"
        )
    asks = [key for key in named if key in available and key not in arguments]
    if everything:  # as TRL: finish_reasons and prompt_ids only for those who name them
        usual = ("prompt", "completion") if single else ("prompts", "completions", "completion_ids")
        asks += [key for key in (*usual, *columns) if key in available and key not in asks and key not in arguments]
    if not any(ask in ("completion", "completions", "completion_ids") for ask in asks):
        raise ConfigError(f"the reward {name!r} takes neither completions nor completion_ids: is it a reward function?")
    return Signature(asks=tuple(asks), named=tuple(named), single=single, asynchronous=asynchronous(function), process=process)


def _options(named: Mapping[str, inspect.Parameter], columns: Collection[str]) -> list[str]:
    given = {*OFFERED, *SINGULAR, *TOLD, *columns, "gold"}
    return [key for key in named if key not in given]


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def asynchronous(function: Callable[..., Any]) -> bool:
    """True if calling it gives something to be awaited."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
