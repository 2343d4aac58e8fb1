"""Calling a reward function on completions: here, in a worker or in the asyncio loop, and what it returned, checked."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.errors import RewardError
from groupwise.rewards.find import Completions, Reward, find_function
from groupwise.rewards.process import ProcessReward, checked_steps
from groupwise.rewards.workers import Loop, Outcome, Pool, failed, raised_at

LARGEST = float(np.finfo(np.float32).max)
"""A reward beyond this is taken for an accident: single precision cannot hold it."""


def start(reward: Reward, batch: Completions, loop: Loop, pool: Pool | None) -> Callable[[], Outcome]:
    """Begin a call on all N completions; calling what this returns waits for its outcome, whose value is checked.

    Asynchronous functions run at once, beside everything else; functions with a timeout in a worker process of their own, so that
    they can be killed; the others in the calling thread, when they are waited for.
    """
    if reward.asynchronous and reward.single:
        return functools.partial(_with_late, loop.submit(_gathered(reward, batch), None), reward, batch)
    if reward.asynchronous:
        return loop.submit(_awaited(reward, batch), reward.timeout)
    if pool is not None and reward.single:
        return functools.partial(_one_by_one, reward, batch, pool)
    if pool is not None:
        return functools.partial(pool.run, list(batch.labels), reward.keywords(batch))
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
    except (Exception, SystemExit) as error:  # whatever a user's function raises is an outcome, judged in one place
        return failed(error, began)
    return Outcome(value=value, seconds=time.monotonic() - began)


def _one_by_one(reward: Reward, batch: Completions, pool: Pool) -> Outcome:
    """A function of one completion in a worker: each call has the deadline to itself, and one that is late costs no other."""
    values, late, seconds = [], [], 0.0
    for index, (label, row) in enumerate(zip(batch.labels, reward.rows(batch), strict=True)):
        outcome = pool.run([label], [row])
        seconds += outcome.seconds
        if outcome.failure == "timeout":
            late.append(index)
        elif outcome.failure is not None:
            return dataclasses.replace(outcome, seconds=seconds)
        values.append(outcome.value[0] if outcome.failure is None else _nothing(reward))
    return Outcome(value=values, late=tuple(late), seconds=seconds)


async def _awaited(reward: Reward, batch: Completions) -> Any:
    values = await _contained(reward, reward.keywords(batch))
    return _settled(reward.name, values, batch.labels, reward.process)


async def _contained(reward: Reward, given: Mapping[str, Any]) -> Any:
    """What the function returns; its SystemExit, which would end the loop's thread, is an error like others."""
    try:
        return await reward.function(**given, **reward.arguments)
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}").with_traceback(error.__traceback__) from error


async def _gathered(reward: Reward, batch: Completions) -> list[Any]:
    """What a function of one completion returned for each, all awaited side by side; `_LATE` where its deadline passed."""

    async def one(label: str, row: dict[str, Any]) -> Any:
        task = asyncio.ensure_future(_contained(reward, row))
        await asyncio.wait([task], timeout=reward.timeout)
        if not task.done():
            task.cancel()
            return _LATE
        try:
            return task.result()
        except Exception as error:
            raise _Located(label, error) from error

    return await asyncio.gather(*(one(label, row) for label, row in zip(batch.labels, reward.rows(batch), strict=True)))


def _with_late(wait: Callable[[], Outcome], reward: Reward, batch: Completions) -> Outcome:
    """The outcome of `_gathered`, checked, with its late rows named."""
    outcome = wait()
    if outcome.failure is not None:
        return outcome
    late = tuple(index for index, value in enumerate(outcome.value) if value is _LATE)
    values = [_nothing(reward) if value is _LATE else value for value in outcome.value]
    try:
        values = _settled(reward.name, values, batch.labels, reward.process)
    except RewardError as error:
        return failed(error, time.monotonic() - outcome.seconds)
    return dataclasses.replace(outcome, value=values, late=late)


def _nothing(reward: Reward) -> Any:
    """The result of a completion that a function has nothing to say of."""
    return [] if reward.process else None


_LATE = object()


def _each(function: Callable[..., Any], arguments: Mapping[str, Any], label: str, row: Mapping[str, Any]) -> Any:
    try:
        return function(**row, **arguments)
    except (Exception, SystemExit) as error:
        raise _Located(label, error) from error


class _Located(Exception):
    """What a function of one completion raised, and on which."""

    def __init__(self, label: str, error: BaseException) -> None:
        super().__init__(label)
        self.label, self.error = label, error

    @property
    def said(self) -> dict[str, Any]:
        error = self.error
        return {"message": str(error), "kind": type(error).__name__, "where": raised_at(error), "cause": error}


def describe_failure(name: str, labels: Sequence[str], outcome: Outcome) -> str:
    """The message of a call that did not end with a value: function, what happened, where, on which completions."""
    if isinstance(outcome.cause, _Located):
        return describe_failure(name, [outcome.cause.label], Outcome(failure="error", **outcome.cause.said))
    if outcome.kind == "RewardError":
        return outcome.message
    raised = f"raised {outcome.kind}: {outcome.message}" + (f" ({outcome.where})" if outcome.where else "")
    happened = {"error": raised, "died": f"did not return: {outcome.message}"}
    return f"the reward function {name!r} {happened[outcome.failure or 'error']}; on {described(labels)}"


def described(labels: Sequence[str]) -> str:
    """Completions in a message.

    >>> described(["0#0", "0#1", "1#0", "1#1"])
    '0#0, 0#1, 1#0 ... (4 completions)'
    """
    return ", ".join(labels[:3]) + (f" ... ({len(labels)} completions)" if len(labels) > 3 else "")


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
