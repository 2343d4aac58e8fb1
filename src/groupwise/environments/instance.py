"""Tools and environments on the side where they run: in a worker process (`runtime.py`), or in a
thread of this one.

It imports little: every worker process starts with it, and to import asyncio takes as long as the
    rest of that start.  Requests come as tuples, answers are plain values that JSON holds.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import json
import math
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.rewards.user_functions import asynchronous
from groupwise.sandbox.server import SandboxFailed
from groupwise.sandbox.tools import SANDBOX_TOOLS, SandboxSettings, SandboxTools
from groupwise.utils.imports import imported
from groupwise.utils.process_main import described

RESERVED = ("reset", "step", "close", "get_reward")
"""Public methods of an environment that are no tools."""
STATE_BYTES = 65_536
"""Most bytes of an attribute that reward functions may read, as JSON."""


class MissingColumn(Exception):
    """Raised where `reset` asks for a column that the data do not have."""


class Instance:
    """Tools, and perhaps one environment, that answer the policy in one episode."""

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        factory: Callable[..., Any] | None,
        args: Mapping[str, Any],
        sandbox: Any = None,
    ) -> None:
        """sandbox: the object whose methods some of the tools are; it ends with the episode."""
        self._functions, self._factory, self._args = dict(tools), factory, args
        self._sandbox = sandbox
        self.home: str | None = None
        """Where every turn's calls begin; None: where the process is."""
        self._object: Any = None
        self._loop: Any = None
        """The event loop: one for all calls, so that sessions, locks and semaphores stay valid."""

    def answer(self, what: str, *request: Any) -> Any:
        """`describe`, `reset`, `call`, `step`, `end`: see the methods of these names.  `call`
        answers once for each call.
        """
        return getattr(self, what)(*request)

    def describe(self, name: str) -> dict[str, Any]:
        """What `runtime.EnvironmentKind` says of an environment.

        name: the environment's, for messages.   Raises ConfigError.
        """
        from groupwise.environments.schemas import name_of, schema_of

        functions = list(self._functions.items())
        facts: dict[str, Any] = {
            "steps": False,
            "rewarded": False,
            "resets": self._factory is not None or self._sandbox is not None,
            "title": "tools",
        }
        if self._factory is not None:
            made = self._object = self._factory(**self._args)
            what = f"the environment {name!r} ({type(made).__name__})"
            if not _has_method(made, "reset"):
                raise ConfigError(f"{what} has no method reset()")
            steps = _has_method(made, "step")
            rewarded = steps or _has_method(made, "get_reward")
            facts |= {"title": type(made).__name__, "steps": steps, "rewarded": rewarded}
            if not steps:
                functions += [(tool, getattr(made, tool)) for tool in _methods(made)]
            self.end(False)
            if not functions and not steps:
                raise ConfigError(
                    f"{what} has nothing that the policy can do: give it step(text), or public"
                    " methods with type hints and docstrings, which are its tools"
                )
        schemas = [schema_of(function, tool) for tool, function in functions]
        names = [name_of(schema) for schema in schemas]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"two tools are called {name!r}; the policy tells them apart by name"
                )
        return facts | {
            "schemas": schemas,
            "asynchronous": [tool for tool, function in functions if asynchronous(function)],
        }

    def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Make the environment and begin its episode; return its observation, or None."""
        if self._sandbox is not None and row.get("files"):
            self._sandbox.place(row["files"])
        if self._factory is None:
            return None
        self._object = self._factory(**self._args)
        row = copy.deepcopy(dict(row))  # in a thread it is the caller's
        observation = self._awaited(self._object.reset(**_arguments(self._object.reset, row, seed)))
        if isinstance(observation, tuple) and len(observation) == 2:
            text, info = observation
            if isinstance(info, Mapping):  # Gymnasium's
                return as_text(text)
        return as_text(observation)

    def call(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Carry calls out, in their order; neighbours that are asynchronous go on side by side,
        each for at most `seconds`.

        Each is answered as soon as those before it are: one that cannot be cancelled costs none
        before it.
        """
        for waits, together in itertools.groupby(calls, self._waits):
            if waits:
                loop = self._event_loop()
                tasks = [loop.create_task(self._in_time(*call, seconds)) for call in together]
                yield from map(loop.run_until_complete, tasks)
            else:
                for call in together:
                    yield self._plainly(*call)
        if self.home is not None:
            with contextlib.suppress(OSError):  # somebody has removed it
                os.chdir(self.home)

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """The environment's answer to what the policy wrote: observation, reward, whether the
        episode is over.
        """
        stepped = self._awaited(self._object.step(text))
        if not isinstance(stepped, tuple) or len(stepped) not in (3, 5):
            kind = type(stepped).__name__
            if isinstance(stepped, tuple):
                kind = f"a tuple of {len(stepped)}"
            raise EnvironmentFailure(
                f"it returned {kind}, expected (observation, reward, done) or Gymnasium's "
                "(observation, reward, terminated, truncated, info)"
            )
        done = bool(stepped[2]) or (len(stepped) == 5 and bool(stepped[3]))
        return as_text(stepped[0]) or "", _number(stepped[1]), done

    def end(
        self, judged: bool
    ) -> tuple[float | None, dict[str, Any] | None, dict[str, str] | None]:
        """Close the environment.  If `judged`, its reward and its public attributes; and what
        `close` raised.
        """
        made, self._object = self._object, None
        reward = state = unclosed = None
        try:
            if judged and made is not None:
                if _has_method(made, "get_reward"):
                    reward = _number(self._awaited(made.get_reward()))
                state = attributes_of(made)
            if judged and self._sandbox is not None:
                state = (state or {}) | {"files": self._sandbox.files()}
        finally:
            if made is not None and _has_method(made, "close"):
                try:
                    self._awaited(made.close())
                except BaseException as error:  # everything has been said by then
                    unclosed = described(error)
            if self._sandbox is not None:
                self._sandbox.close()
        return reward, state, unclosed

    # ---- inside

    def _tool(self, name: str) -> Callable[..., Any]:
        if name in self._functions:
            return self._functions[name]
        return getattr(self._object, name)

    def _waits(self, call: tuple[str, Mapping[str, Any]]) -> bool:
        return asynchronous(self._tool(call[0]))

    def _plainly(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"result": result_text(self._awaited(self._tool(name)(**arguments)))}
        except SandboxFailed:  # a fault of the machine: the policy has nothing to learn from it
            raise
        except BaseException as error:  # whatever a tool raises, the policy is told
            return described(error)

    async def _in_time(
        self, name: str, arguments: Mapping[str, Any], seconds: float
    ) -> dict[str, Any]:
        import asyncio

        try:
            async with asyncio.timeout(seconds) as limit:
                return {"result": result_text(await self._tool(name)(**arguments))}
        except BaseException as error:  # whatever a tool raises, the policy is told
            if isinstance(error, TimeoutError) and limit.expired():
                return {"late": True}
            return described(error)

    def _awaited(self, value: Any) -> Any:
        async def wait() -> Any:
            return await value

        if not inspect.isawaitable(value):
            return value
        return self._event_loop().run_until_complete(wait())

    def _event_loop(self) -> Any:
        if self._loop is None:
            import asyncio  # most tools and environments are not asynchronous

            self._loop = asyncio.new_event_loop()
        return self._loop


def _has_method(made: Any, name: str) -> bool:
    return callable(getattr(made, name, None))


def _arguments(reset: Callable[..., Any], row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return what `reset` asks for by name.  Raises MissingColumn."""
    known = {"row": row, "seed": seed} | row
    arguments: dict[str, Any] = {}
    for one in inspect.signature(reset).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            arguments = row | arguments
        elif one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            if one.name in known:
                arguments[one.name] = known[one.name]
            elif one.default is one.empty:
                raise MissingColumn(
                    f"reset() asks for {one.name!r}, which the data do not have; columns:"
                    f" {', '.join(row) or 'none'} (row: all of them)"
                )
    return arguments


def _methods(made: Any) -> list[str]:
    """Public methods of an environment's class that are tools.  Properties are not evaluated."""
    methods = []
    for name, member in inspect.getmembers(type(made)):
        is_method = inspect.isfunction(member) or inspect.ismethod(member)
        if is_method and name not in RESERVED and not name.startswith("_"):
            methods.append(name)
    return methods


def as_text(value: Any) -> str | None:
    """What a tool or an environment returned, for a message: text as it is, text blocks joined,
    anything else by `str`.

    Raises EnvironmentFailure for blocks that are no text, and for objects whose text is their
    address.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(_is_block, value)):
        return "".join(map(_text_of_block, value))
    textless = _without_text(value)
    if textless is not None:
        raise EnvironmentFailure(
            f"a {type(textless).__name__} has no text: return text, numbers, or lists and mappings"
            " of them"
        )
    return str(value)


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping) and "type" in value


def _text_of_block(block: Mapping[str, Any]) -> str:
    if block["type"] != "text":
        raise EnvironmentFailure(
            f"a content block of type {block['type']!r} cannot be shown to a language model: give"
            " text"
        )
    return str(block["text"])


def _without_text(value: Any) -> Any:
    """What is or holds an object that Python writes as its address, which is another one in every
    process; None if nothing does.
    """
    if value is None or isinstance(value, str | int | float | bytes):
        return None
    if isinstance(value, Mapping):
        return _without_text([*value, *value.values()])
    if isinstance(value, list | tuple | set):
        for member in value:
            textless = _without_text(member)
            if textless is not None:
                return textless
        return None
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
        raise EnvironmentFailure(
            f"it gave the reward {value!r:.60} ({type(value).__name__}), expected a number"
        ) from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise EnvironmentFailure(f"it gave the reward {number:g}, expected a finite number")
    return number


class Instances:
    """Makes the instances of a run, from functions and classes that are found by name."""

    def __init__(
        self,
        tools: Sequence[str],
        factories: Mapping[str, str],
        args: Mapping[str, Any],
        sandbox: Mapping[str, Any],
        objects: Mapping[str, Any] | None = None,
    ) -> None:
        """sandbox: see `SandboxSettings`.   objects: functions and classes that are not found by
        name.   Raises ConfigError, also where no sandbox holds for a tool that needs one.
        """
        self._args = dict(args)
        self._objects = objects or {}
        self._tools = tools
        self.functions = {}
        for spec in tools:
            if spec not in SANDBOX_TOOLS:
                self.functions[spec.rpartition(":")[2]] = self._named(spec, "tool")
        self._make_sandbox: Callable[[], Any] | None = None
        if len(self.functions) < len(tools):
            settings = SandboxSettings.read(sandbox)
            self._make_sandbox = partial(SandboxTools, settings.proved(), settings.limits())
        self.factories = {}
        for name, spec in factories.items():
            self.factories[name] = self._named(spec, "environment")

    def _named(self, spec: str, kind: str) -> Any:
        if spec in self._objects:
            return self._objects[spec]
        return imported(f"{kind} {spec!r}", spec, callable_only=True)

    def make(self, name: str) -> Instance:
        """Make the instance of an environment; of tools alone if there is none of that name."""
        factory = self.factories.get(name)
        if self._make_sandbox is None:
            return Instance(self.functions, factory, self._args)
        sandbox = self._make_sandbox()
        functions = {}
        for spec in self._tools:
            tool = spec.rpartition(":")[2]
            functions[tool] = self.functions.get(tool) or getattr(sandbox, tool)
        return Instance(functions, factory, self._args, sandbox)


def serve_environments(*setup: Any, objects: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import what is named (see `Instances`), in a worker process.  The process is forked, and each
    fork is asked first to `begin`: from then on an `Instance` answers."""
    # Every fork seeds it, also for what imports numpy only when it is called.
    import numpy.random  # noqa: F401

    instances = Instances(*setup, objects=objects)
    if any(map(_waits, [*instances.functions.values(), *instances.factories.values()])):
        import asyncio  # here, not in every fork  # noqa: F401
    begun: list[Instance] = []

    def answer(what: str, *request: Any) -> Any:
        if what != "begin":
            return begun[0].answer(what, *request)
        name, seed = request
        _seed(seed)
        begun.append(instances.make(name))
        if name not in instances.factories:
            # Calls of several episodes may come, one after the other.
            with contextlib.suppress(OSError):
                begun[0].home = os.getcwd()
        return None

    return answer


def _waits(function: Callable[..., Any]) -> bool:
    """True of an asynchronous tool, and of a class with an asynchronous method."""
    if not inspect.isclass(function):
        return asynchronous(function)
    for base in function.__mro__:
        if any(map(inspect.iscoroutinefunction, vars(base).values())):
            return True
    return False


def _seed(seed: int) -> None:
    """The generators of the whole process: forks would all go on from the same state."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
