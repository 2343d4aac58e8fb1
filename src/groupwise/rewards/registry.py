"""The built-in reward functions by name.  A new one is a pure function with the mark
`@built_in("NAME")`.

Their parameters are looked up by name: `prompts` and `completions` (strings, the chat template
applied), `prompt_ids`, `completion_ids`, `finish_reasons`, `environment_rewards`, `gold`, or any
column of the data.  Keyword-only parameters are what a recipe's `args` set; a function refuses bad
ones even when it is called with no completions, which is how they are checked before a model is
loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from groupwise.config.settings import REWARDS, RewardSettings
from groupwise.errors import ConfigError
from groupwise.rewards.step_rewards import ProcessReward
from groupwise.rewards.user_functions import NO_COLUMN, Reward, listed, read_signature
from groupwise.utils.built_in import find_built_in
from groupwise.utils.spelling import nearest

GOLD_COLUMNS = ("answer", "solution")
"""Where `gold` is taken from: the first of these that the data have, or the column that `args:
{column: ...}` names.
"""

MODEL, CODE, JUDGE = "model", "code", "judge"
MADE = (MODEL, CODE, JUDGE)
"""The built-ins that are made once from a recipe's `args`, and then called like anybody's function.
They may ask for the policy's `tokenizer`, for the names of the data's `columns` and for the
reward's own `name`.
"""


def find_builtin(
    settings: RewardSettings, columns: Collection[str], tokenizer: Any = None
) -> Reward:
    """The built-in that the settings name, its arguments checked.  tokenizer: the policy's.

    Raises ConfigError for bad arguments or a column that the data lack.
    """
    name, arguments, gold = settings.name or settings.function, dict(settings.args), None
    made = settings.function in MADE
    if made:
        function, arguments = _made(settings, name, tokenizer, columns), {}
    else:
        function = builtin_function(settings.function)
        gold = _gold_column(name, function, arguments, columns)
    signature = read_signature(function, name, arguments, columns, gold)
    inner = function.function if isinstance(function, ProcessReward) else function
    if not made:
        inner(**{ask: [] for ask in signature.asks}, **arguments)  # refuses bad arguments now
    return Reward(
        name=name,
        weight=float(settings.weight),
        spec=settings.function,
        signature=signature,
        arguments=arguments,
        function=inner if settings.timeout is None else None,
        gold=gold,
        reads="messages" if settings.function == MODEL else "texts",
        timeout=settings.timeout,
    )


def _made(
    settings: RewardSettings, name: str, tokenizer: Any, columns: Collection[str]
) -> Callable[..., Any]:
    make = builtin_function(settings.function)
    parameters = inspect.signature(make).parameters.values()
    known = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    for key in settings.args:
        if key not in known:
            raise ConfigError(
                f"the reward {name!r} has no argument {key!r}; it takes: {listed(known)}"
            )
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in settings.args:
            raise ConfigError(f"the reward {name!r} needs args: {{{key}: ...}}")
    if settings.timeout is not None:
        raise ConfigError(
            f"the reward {name!r} runs in this process, beside the policy, and cannot be stopped:"
            " leave timeout out"
        )
    arguments = settings.args
    if settings.function != MODEL:  # which reads its own
        arguments = _typed(name, make, arguments)
    offered = {"tokenizer": tokenizer, "columns": columns, "name": name}
    asked = [offered[p.name] for p in parameters if p.name in offered]
    return make(*asked, **arguments)


def _typed(name: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as values of the types that a function declares.  Raises ConfigError."""
    hints = get_type_hints(make)
    typed = {}
    for key, value in arguments.items():
        try:
            typed[key] = TypeAdapter(hints[key]).validate_python(value)
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise ConfigError(f"the reward {name!r} has {key}: {value!r}: {why}") from None
    return typed


def builtin_function(name: str) -> Callable[..., Any]:
    """The function behind `accuracy`.  Raises ConfigError."""
    if name in REWARDS:
        return find_built_in("rewards", name)
    near = nearest(name, REWARDS)
    hint = f"built-in: {', '.join(REWARDS)}; your own: module:function"
    if near is not None:
        hint = f"did you mean {near!r}?"
    raise ConfigError(f"there is no reward function {name!r}; {hint}")


def _gold_column(
    name: str, function: Callable[..., Any], arguments: dict[str, Any], columns: Collection[str]
) -> str | None:
    """The column that a built-in's `gold` is taken from; takes `column` out of the arguments."""
    if "gold" not in inspect.signature(function).parameters:
        return None
    chosen = arguments.pop("column", None)
    wanted = GOLD_COLUMNS if chosen is None else (chosen,)
    for column in wanted:
        if column in columns:
            return column
    raise ConfigError(
        f"the reward {name!r} compares with the column {' or '.join(map(repr, wanted))},"
        f" {NO_COLUMN}; columns: {listed(columns)}; name yours by args: {{column: ...}}"
    )
