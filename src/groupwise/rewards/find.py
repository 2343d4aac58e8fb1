"""Reward functions as the trainer has them: built-ins by name, functions of the running program, and the arguments of a call.

N completions of a step, in order, whatever their groups
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.config.settings import RewardSettings
from groupwise.errors import ConfigError
from groupwise.rewards.registry import BUILTINS, GOLD_COLUMNS, MAKERS
from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.user_functions import NO_COLUMN, Reward, asynchronous, listed, read_signature
from groupwise.utils.spelling import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """The arguments of reward functions: N completions with every column that they may ask for, one entry per completion."""

    labels: Sequence[str]
    """Name each completion in messages: `prompt id#index`."""
    prompts: Sequence[Any]
    """TRL's convention: messages if the row's prompt was messages, else its text (`compose.prompt_of`)."""
    prompt_texts: Sequence[str]
    """The text that the policy continues, chat template applied."""
    completions: Sequence[Any]
    """TRL's convention: `[{"role": "assistant", "content": text}]` if the prompt was messages, else the text."""
    texts: Sequence[str]
    prompt_messages: Sequence[Sequence[Mapping[str, Any]] | None] | None = None
    """What the policy's chat template was given (`Prompt.messages`)."""
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


def find_builtin(settings: RewardSettings, columns: Collection[str], tokenizer: Any = None) -> Reward:
    """The built-in that the settings name, its arguments checked.  tokenizer: the policy's.

    Raises ConfigError for bad arguments or a column that the data lack.
    """
    name, arguments, gold = settings.name or settings.function, dict(settings.args), None
    if settings.function in MAKERS:
        function, arguments = _made(settings, name, tokenizer), {}
    else:
        function = builtin_function(settings.function)
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
        model=settings.function in MAKERS,
        timeout=settings.timeout,
    )


def _made(settings: RewardSettings, name: str, tokenizer: Any) -> Callable[..., Any]:
    maker = MAKERS[settings.function]
    known = [p.name for p in inspect.signature(maker).parameters.values() if p.kind is p.KEYWORD_ONLY]
    required = [p.name for p in inspect.signature(maker).parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for key in settings.args:
        if key not in known:
            raise ConfigError(f"the reward {name!r} has no argument {key!r}; it takes: {listed(known)}")
    for key in required:
        if key not in settings.args:
            raise ConfigError(f"the reward {name!r} needs args: {{{key}: ...}}")
    if settings.timeout is not None:
        raise ConfigError(f"the reward {name!r} runs in this process, beside the policy, and cannot be stopped: leave timeout out")
    return maker(tokenizer, **settings.args)


def builtin_function(name: str) -> Callable[..., Any]:
    """The function behind `accuracy`.  Raises ConfigError."""
    if name in BUILTINS:
        return BUILTINS[name]
    named = [*BUILTINS, *MAKERS]
    near = nearest(name, named)
    hint = f"did you mean {near!r}?" if near is not None else f"built-in: {', '.join(named)}; your own: module:function"
    raise ConfigError(f"there is no reward function {name!r}; {hint}")


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
        f"columns: {listed(columns)}; name yours by args: {{column: ...}}"
    )
