"""Tools and environments on the side where they run: in a worker process (`runtime.py`), or in a thread of this one.

It imports little: every worker process starts with it.  Requests come as tuples, answers are plain values that JSON holds.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.rewards.user_functions import asynchronous, find_named
from groupwise.utils.process_main import described

if TYPE_CHECKING:
    from groupwise.environments.side_by_side import CallLoop

OWN = ("reset", "step", "close", "get_reward")
"""Public methods of an environment that are no tools."""
STATE_BYTES = 65_536
"""Of one attribute that reward functions may read, as JSON."""


class MissingColumn(Exception):
    """Raised where `reset` asks for a column that the data do not have."""


class Instance:
    """Tools, and perhaps one environment, that answer the policy in one episode."""

    def __init__(
        self, tools: Mapping[str, Callable[..., Any]], factory: Callable[..., Any] | None, args: Mapping[str, Any]
    ) -> None:
        self._functions, self._factory, self._args = dict(tools), factory, args
        self.home: str | None = None
        """Where every turn's calls begin; None: where the process is."""
        self._object: Any = None
        self._loop: CallLoop | None = None

    @property
    def shared(self) -> bool:
        """True if calls of several episodes may come, one after the other."""
        return self._factory is None

    def answer(self, what: str, *request: Any) -> Any:
        """`describe`, `reset`, `call`, `step`, `end`: see the methods of these names.  `call` answers once for each call."""
        return {"describe": self.describe, "reset": self.reset, "call": self.call, "step": self.step, "end": self.end}[what](
            *request
        )

    def describe(self, name: str, interface: str | None) -> dict[str, Any]:
        """What `runtime.EnvironmentKind` says of an environment, and which of its tools are asynchronous.

        name: the environment's, for messages.   Raises ConfigError.
        """
        from groupwise.environments.schemas import name_of, schema_of

        functions = list(self._functions.items())
        facts: dict[str, Any] = {"steps": False, "rewarded": False, "resets": self._factory is not None, "title": name}
        if self._factory is not None:
            made = self._make()
            facts |= {"title": type(made).__name__, "rewarded": callable(getattr(made, "get_reward", None))}
            for method in ("reset",) if interface != "step" else ("reset", "step"):
                if not callable(getattr(made, method, None)):
                    raise ConfigError(f"the environment {name!r} ({type(made).__name__}) has no method {method}()")
            facts["steps"] = interface == "step" or (interface is None and callable(getattr(made, "step", None)))
            facts["rewarded"] |= facts["steps"]
            functions += [] if facts["steps"] else [(tool, getattr(made, tool)) for tool in _methods(made, interface)]
            self.end(False)
            if not functions and not facts["steps"]:
                raise ConfigError(
                    f"the environment {name!r} ({type(made).__name__}) has nothing that the policy can do: give it step(text), or "
                    "public methods with type hints and docstrings, which are its tools"
                )
        schemas = [schema_of(function, tool) for tool, function in functions]
        names = [name_of(schema) for schema in schemas]
        if twice := next((one for one in names if names.count(one) > 1), None):
            raise ConfigError(f"two tools are called {twice!r}; the policy tells them apart by name")
        return facts | {"schemas": schemas, "asynchronous": [tool for tool, function in functions if asynchronous(function)]}

    def reset(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Make the environment and begin its episode; `observation` is None where it says nothing."""
        self._make()
        row = copy.deepcopy(dict(row))  # in a thread it is the caller's
        named, everything = _parameters(self._object.reset)
        arguments = dict(row) if everything else {key: row[key] for key in named if key in row}
        if "row" in named and "row" not in row:
            arguments["row"] = row
        if "seed" in named and "seed" not in row:
            arguments["seed"] = seed
        for key, parameter in inspect.signature(self._object.reset).parameters.items():
            if key not in arguments and parameter.default is parameter.empty and parameter.kind in _NAMED:
                columns = ", ".join(row) or "none"
                raise MissingColumn(f"reset() asks for {key!r}, which the data do not have; columns: {columns} (row: all of them)")
        observation = self._awaited(self._object.reset(**arguments))
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], Mapping):  # Gymnasium's
            observation = observation[0]
        return {"observation": as_text(observation)}

    def call(self, calls: Sequence[tuple[str, Mapping[str, Any]]], seconds: float) -> Iterator[dict[str, Any]]:
        """Carry calls out, in their order; neighbours that are asynchronous go on side by side, each for at most `seconds`."""
        place = 0
        while place < len(calls):
            together = [place]
            while self._is_async(calls[place][0]) and together[-1] + 1 < len(calls) and self._is_async(calls[together[-1] + 1][0]):
                together.append(together[-1] + 1)
            if self._is_async(calls[place][0]):
                awaited = [partial(self._answered, *calls[one]) for one in together]
                yield from self._event_loop().side_by_side(awaited, seconds)
            else:
                yield self._plainly(*calls[place])
            place = together[-1] + 1
        if self.home is not None:
            with contextlib.suppress(OSError):  # somebody has removed it
                os.chdir(self.home)

    def step(self, text: str) -> dict[str, Any]:
        """The environment's answer to what the policy wrote: observation, reward, whether the episode is over."""
        stepped = self._awaited(self._object.step(text))
        if not isinstance(stepped, tuple) or len(stepped) not in (3, 5):
            kind = f"a tuple of {len(stepped)}" if isinstance(stepped, tuple) else type(stepped).__name__
            raise EnvironmentFailure(
                f"it returned {kind}, expected (observation, reward, done) or Gymnasium's "
                "(observation, reward, terminated, truncated, info)"
            )
        done = bool(stepped[2]) or (len(stepped) == 5 and bool(stepped[3]))
        return {"observation": as_text(stepped[0]) or "", "reward": _number(stepped[1]), "done": done}

    def end(self, judged: bool) -> dict[str, Any]:
        """Close the environment.  judged: give its reward and its public attributes too.   `unclosed`: what `close` raised."""
        made, self._object = self._object, None
        ended: dict[str, Any] = {"reward": None, "state": None, "unclosed": None}
        try:
            if judged and made is not None:
                if callable(getattr(made, "get_reward", None)):
                    ended["reward"] = _number(self._awaited(made.get_reward()))
                ended["state"] = attributes_of(made)
        finally:
            if callable(close := getattr(made, "close", None)):
                try:
                    self._awaited(close())
                except BaseException as error:  # everything has been said by then
                    ended["unclosed"] = described(error)
        return ended

    # ---- inside --------------------------------------------------------------------------------------------------------------

    def _make(self) -> Any:
        assert self._factory is not None, "there are tools only"
        self._object = self._factory(**self._args)
        return self._object

    def _find(self, name: str) -> Callable[..., Any]:
        return self._functions[name] if name in self._functions else getattr(self._object, name)

    def _is_async(self, name: str) -> bool:
        return asynchronous(self._find(name))

    def _plainly(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"result": result_text(self._awaited(self._find(name)(**arguments)))}
        except BaseException as error:  # whatever a tool raises is something that the policy is told
            return described(error)

    async def _answered(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"result": result_text(await self._find(name)(**arguments))}

    def _event_loop(self) -> CallLoop:
        if self._loop is None:
            from groupwise.environments.side_by_side import CallLoop  # most tools and environments are not asynchronous

            self._loop = CallLoop()
        return self._loop

    def _awaited(self, value: Any) -> Any:
        return self._event_loop().run(value) if inspect.isawaitable(value) else value


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names that a method takes, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in _NAMED], any(p.kind is p.VAR_KEYWORD for p in parameters)


def _methods(made: Any, interface: str | None) -> list[str]:
    """Public methods of an environment's class that are tools.  Properties are not evaluated."""
    reserved = [name for name in OWN if name != "step" or interface != "tools"]
    members = inspect.getmembers(type(made), predicate=lambda one: inspect.isfunction(one) or inspect.ismethod(one))
    return [name for name, _ in members if not name.startswith("_") and name not in reserved]


def as_text(value: Any) -> str | None:
    """What a tool or an environment returned, for a message: text as it is, text blocks joined, anything else by `str`.

    Raises EnvironmentFailure for blocks that are no text, and for objects whose text is their address.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(block, Mapping) and "type" in block for block in value):
        if other := next((block for block in value if block["type"] != "text"), None):
            raise EnvironmentFailure(f"a content block of type {other['type']!r} cannot be shown to a language model: give text")
        return "".join(str(block["text"]) for block in value)
    if (other := _without_text(value)) is not None:
        raise EnvironmentFailure(f"a {type(other).__name__} has no text: return text, numbers, or lists and mappings of them")
    return str(value)


def _without_text(value: Any) -> Any:
    """What is or holds an object that Python writes as its address, which is another one in every process; None if nothing does."""
    if value is None or isinstance(value, str | int | float | bytes):
        return None
    if isinstance(value, Mapping | list | tuple | set):
        inner = [*value, *value.values()] if isinstance(value, Mapping) else value
        return next((textless for one in inner if (textless := _without_text(one)) is not None), None)
    return value if re.search(r" at 0x[0-9a-f]+>$", str(value)) else None


def result_text(value: Any) -> str:
    """What a tool returned, as TRL shows it: nothing is `None`."""
    text = as_text(value)
    return str(value) if text is None else text


def attributes_of(made: Any) -> dict[str, Any]:
    """The public attributes of an object whose values JSON holds."""
    attributes: dict[str, Any] = {}
    for name, value in list(getattr(made, "__dict__", {}).items()):
        if name.startswith("_"):
            continue
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(value, allow_nan=False)
            if len(text) <= STATE_BYTES:
                attributes[name] = json.loads(text)
    return attributes


def _number(value: Any) -> float | None:
    """A reward; None says nothing.  Raises EnvironmentFailure for what is no finite number."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise EnvironmentFailure(f"it gave the reward {value!r:.60} ({type(value).__name__}), expected a number") from None
    if not math.isfinite(number):
        raise EnvironmentFailure(f"it gave the reward {number:g}, expected a finite number")
    return number


# ---------------------------------------------------------------- a process of its own


def serve_environments(
    tools: Sequence[str],
    factories: Mapping[str, str],
    args: Mapping[str, Any],
    objects: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """In a process: imports what is named.  The process is forked, and each fork is asked first to `begin`: from then on an
    `Instance` answers.

    objects: functions and classes that are not found by name.
    """
    import numpy.random  # every fork seeds it, also for what imports numpy only when it is called  # noqa: F401

    known = dict(objects or {})
    functions = {spec.rpartition(":")[2]: find_named(spec, "tool", known) for spec in tools}
    makers = {name: find_named(spec, "environment", known) for name, spec in factories.items()}
    if any(map(_waits, [*functions.values(), *makers.values()])):
        import groupwise.environments.side_by_side  # here, not in every fork  # noqa: F401
    begun: list[Instance] = []

    def answer(what: str, *request: Any) -> Any:
        if what != "begin":
            return begun[0].answer(what, *request)
        name, seed = request
        _seed(seed)
        instance = Instance(functions, makers.get(name), args if name in makers else {})
        if instance.shared:
            with contextlib.suppress(OSError):
                instance.home = os.getcwd()
        begun.append(instance)
        return None

    return answer


def _waits(function: Callable[..., Any]) -> bool:
    """True of an asynchronous tool, and of a class with an asynchronous method."""
    bases = function.__mro__ if inspect.isclass(function) else ()
    return asynchronous(function) or any(inspect.iscoroutinefunction(one) for base in bases for one in vars(base).values())


def _seed(seed: int) -> None:
    """The generators of the whole process: forks would all go on from the same state."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
