"""The protocols of environments: for tools, classes of your own, and adapters to environments of other libraries.

An adapter to another library's environments is a `Source`.  Everything here may block: it is called from threads of the episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from groupwise.environments.schemas import Schema
from groupwise.records import Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One kind of environment: its tools, whether it has `reset` and `step`, and whether it gives rewards."""

    name: str
    """The value of the column `environment` that asks for it; empty where there is only one."""
    title: str
    """Its class, for messages."""
    schemas: tuple[Schema, ...] = ()
    """Tools that the policy may call."""
    steps: bool = False
    """True if a turn without a call goes to `step`; else such a turn ends the episode."""
    resets: bool = False
    """True if an episode begins with `reset`; tools alone need none."""
    rewarded: bool = False
    """True if it gives rewards of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one tool call."""

    text: str
    """What the policy is told."""
    seconds: float = 0.0
    failure: str = ""
    """As of `records.ToolCall`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """An environment's answer to a turn."""

    observation: str
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The reward and the attributes of an environment whose episode is over."""

    reward: float | None = None
    state: Mapping[str, Any] | None = None
    """Its public attributes, as JSON holds them."""


class Broken(Exception):
    """Raised where an environment cannot continue.  `finish`: DEADLINE if it ran out of time, ERROR for any other failure."""

    def __init__(self, why: str, finish: Finish = Finish.ERROR) -> None:
        super().__init__(why)
        self.finish = finish


class Environment(Protocol):
    """Surroundings of one episode.  Used by one thread at a time; `kill` may come from another one meanwhile."""

    def reset(self, row: Mapping[str, Any], *, seed: int, seconds: float) -> str | None:
        """Begin.  What it says is added to the prompt's last message; None: nothing.

        seed: the same for all completions of a prompt.   Raises Broken.
        """
        ...

    def call(self, calls: Sequence[tuple[str, Mapping[str, Any]]], *, seconds: float) -> tuple[list[Result], Finish | None]:
        """Carry out the calls of a turn, each for at most `seconds`; one result for each, in their order.

        Also why the episode cannot go on, where a call that had to be stopped has taken the environment with it.
        """
        ...

    def step(self, text: str, *, seconds: float) -> Stepped:
        """Its answer to what the policy wrote.  Raises Broken."""
        ...

    def end(self, judged: bool, *, seconds: float) -> Ended:
        """The episode is over.  judged: its reward is asked for.  Called once, unless it was killed.  Raises Broken."""
        ...

    def kill(self) -> None:
        """End everything at once, whatever it is doing."""
        ...


class Source(Protocol):
    """Makes environments."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """By name."""
        ...

    def make(self, kind: Kind) -> Environment:
        """A new one.  May be called by several threads at once."""
        ...

    def close(self) -> None:
        """End everything that it has started; harmless if called again."""
        ...
