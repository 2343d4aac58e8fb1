"""Several reward functions as one: built from a recipe before any model is loaded, then groups in, scored groups out.

G completions of a prompt   K reward functions   N completions of a step
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np

from groupwise.config.settings import RewardSettings
from groupwise.errors import ConfigError, RewardError
from groupwise.records import Rollout, Scored
from groupwise.rewards.calls import describe_failure, described, start, worker_pool
from groupwise.rewards.find import Completions, Reward, find_reward
from groupwise.rewards.process import step_signal
from groupwise.rewards.workers import Loop, Outcome

log = logging.getLogger(__name__)

LATE_SHARE = 0.1
"""A function that runs out of time in more of its calls than this, and more than once, is broken."""
RESERVED = ("prompt", "completion")
"""Columns that are not passed on: they would be the recipe's demonstration, not the policy's words."""


def build_rewards(settings: Sequence[RewardSettings], *, columns: Collection[str], tokenizer: Any = None) -> Rewards:
    """Find and check every function that a recipe names; `columns` are those of the data rows, `tokenizer` is the policy's.

    A function is a built-in (`registry.BUILTINS`), `module:function` or `path/to/file.py:function`, with TRL's signature
    `f(prompts, completions, **columns) -> list[float | None]` or `f(completion, answer) -> float | None`, plain or `async`.

    Raises ConfigError: no function, an unknown one, two of the same name, a weight that is not finite, a bad argument, or a
    parameter that the data have no column for.

    >>> rewards = build_rewards([RewardSettings(function="exact"), RewardSettings(function="think_format", weight=0.1)],
    ...                         columns=["prompt", "answer"])
    >>> rewards.names, rewards.weights
    (('exact', 'think_format'), (1.0, 0.1))
    """
    if not settings:
        raise ConfigError("there is no reward function; name at least one under rewards:, e.g. `- function: accuracy`")
    offered = [column for column in columns if column not in RESERVED]
    rewards = [find_reward(one, offered, tokenizer) for one in settings]
    names = [reward.name for reward in rewards]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"two reward functions have the name {twice[0]!r}; give one of them another by name:")
    return Rewards(rewards, offered)


class Rewards:
    """Reward functions and their weights.  Use it as a context manager, or call `close`, to end its workers early."""

    def __init__(self, rewards: Sequence[Reward], columns: Collection[str]) -> None:
        """Use `build_rewards`."""
        self._rewards = tuple(rewards)
        self._columns = tuple(columns)
        self._loop = Loop()
        self._lock = threading.Lock()
        self._pools = {r.name: worker_pool(r) for r in rewards if r.timeout is not None and not r.asynchronous}
        self.seconds: dict[str, float] = {}
        """How long each function took in the last call of `score`."""
        self._calls = dict.fromkeys(self.names, 0)
        self._late = dict.fromkeys(self.names, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """K names, in the order of the recipe."""
        return tuple(reward.name for reward in self._rewards)

    @property
    def weights(self) -> tuple[float, ...]:
        """K weights."""
        return tuple(reward.weight for reward in self._rewards)

    @property
    def process(self) -> bool:
        """True if some function rewards steps: groups then come with the signal `process`."""
        return any(reward.process for reward in self._rewards)

    def __enter__(self) -> Rewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and end the loop of asynchronous functions."""
        self._loop.close()
        for pool in self._pools.values():
            pool.close()

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[Scored]:
        """Score every completion of every group, in one call per function; groups and completions keep their order.

        Every `reward` is the weighted sum over the functions that apply; it is NaN where none does.
        Raises RewardError if a function raises, is stopped at its timeout too often, or returns what is not one number or None
        each.
        """
        rollouts = [rollout for group in groups for rollout in group]
        if not rollouts:
            return []
        if not self._rewards:  # a teacher is learnt from
            return [unjudged(group) for group in groups]
        with self._lock:  # rollouts ahead of training come from several threads, and a function need not bear that
            values = self.call(self._completions(rollouts))
        rewards = self.matrix(values)
        combined = combine(rewards, self.weights)
        process = self._process(rollouts, values)
        scored, end = [], 0
        for group in groups:
            begin, end = end, end + len(group)
            scored.append(
                Scored(
                    rollouts=tuple(group),
                    names=self.names,
                    rewards=rewards[begin:end],
                    reward=combined[begin:end],
                    weights=self.weights,
                    signals={} if process is None else {"process": tuple(process[begin:end])},
                )
            )
        return scored

    def call(self, batch: Completions) -> list[list[Any]]:
        """K lists of N results: floats and None, or steps for process rewards.  All functions that can run side by side do."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._pools))) as threads:
            waits = [start(reward, batch, self._loop, self._pools.get(reward.name)) for reward in self._rewards]
            waits = [threads.submit(w).result if r.name in self._pools else w for r, w in zip(self._rewards, waits, strict=True)]
            # Those that this thread computes come first: the others go on meanwhile.
            done = {w: w() for r, w in zip(self._rewards, waits, strict=True) if r.name not in self._pools and not r.asynchronous}
            outcomes = [done[wait] if wait in done else wait() for wait in waits]
        self.seconds = {name: outcome.seconds for name, outcome in zip(self.names, outcomes, strict=True)}
        return [self._settle(r, outcome, batch) for r, outcome in zip(self._rewards, outcomes, strict=True)]

    def matrix(self, values: Sequence[Sequence[Any]]) -> np.ndarray:
        """float64 (N, K): what `call` returned as numbers, None as NaN, step rewards as their sum."""
        return np.stack([_column(reward, column) for reward, column in zip(self._rewards, values, strict=True)], axis=1)

    def _settle(self, reward: Reward, outcome: Outcome, batch: Completions) -> list[Any]:
        """The one place that decides what a failed reward means.  A failure is not a wrong answer: scoring it 0 would teach the
        policy to fail.  It ends the run, except that a call that ran out of time says nothing (None) as long as such calls are few.
        """
        if outcome.failure not in (None, "timeout"):
            _refuse(reward, outcome, batch)
        late = tuple(range(len(batch))) if outcome.failure == "timeout" else outcome.late
        self._calls[reward.name] += len(batch) if reward.single else 1
        if not late:
            return outcome.value
        self._late[reward.name] += len(late) if reward.single else 1
        said = f"{self._late[reward.name]} of {self._calls[reward.name]} calls of the reward function {reward.name!r} had no result"
        said = f"{said} within {reward.timeout:g} s; the last on {described([batch.labels[index] for index in late])}"
        if self._late[reward.name] > max(1.0, LATE_SHARE * self._calls[reward.name]):
            raise RewardError(f"{said}; give it more time (timeout:) or make it faster")
        log.warning("%s; they count as None", said)
        return outcome.value if outcome.failure is None else [[] if reward.process else None for _ in late]

    def _completions(self, rollouts: Sequence[Rollout]) -> Completions:
        chat = [isinstance(rollout.prompt.row.get("prompt"), list) for rollout in rollouts]
        return Completions(
            labels=[f"{rollout.prompt.id}#{rollout.index}" for rollout in rollouts],
            prompts=[r.prompt.row["prompt"] if c else r.prompt.text for r, c in zip(rollouts, chat, strict=True)],
            prompt_texts=[rollout.prompt.text for rollout in rollouts],
            completions=[as_messages(r.text) if c else r.text for r, c in zip(rollouts, chat, strict=True)],
            texts=[rollout.text for rollout in rollouts],
            prompt_ids=[rollout.prompt.tokens.tolist() for rollout in rollouts],
            completion_ids=[rollout.tokens.tolist() for rollout in rollouts],
            finish_reasons=[rollout.finish.value for rollout in rollouts],
            columns={column: [rollout.prompt.row.get(column) for rollout in rollouts] for column in self._columns},
        )

    def _process(self, rollouts: Sequence[Rollout], values: Sequence[Sequence[Any]]) -> list[np.ndarray] | None:
        """Per completion (n,): weighted step rewards at the tokens that end a step, summed over the process functions, else NaN."""
        columns = [(reward, column) for reward, column in zip(self._rewards, values, strict=True) if reward.process]
        if not columns:
            return None
        signals = []
        for index, rollout in enumerate(rollouts):
            label = f"{rollout.prompt.id}#{rollout.index}"
            parts = [step_signal(reward.name, column[index], len(rollout), label) for reward, column in columns]
            signals.append(combine(np.stack(parts, axis=1), tuple(reward.weight for reward, _ in columns)))
        return signals


def unjudged(group: Sequence[Rollout]) -> Scored:
    """A group that no reward function has looked at."""
    return Scored(rollouts=tuple(group), names=(), rewards=np.zeros((len(group), 0)), reward=np.full(len(group), np.nan))


def combine(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """`r = nansum_k(w_k R_k)` of rewards (N, K), NaN where every function says None.

    >>> combine(np.array([[1.0, np.nan], [np.nan, np.nan]]), [2.0, 1.0])
    array([ 2., nan])
    """
    return np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards * np.asarray(weights), axis=1))


def as_messages(text: str) -> list[dict[str, str]]:
    """A completion as the chat message that it is."""
    return [{"role": "assistant", "content": text}]


def _column(reward: Reward, values: Sequence[Any]) -> np.ndarray:
    """(N,): the results of a function as numbers, None as NaN, steps as their sum."""
    if reward.process:
        values = [sum(r for _, r in steps) if steps else None for steps in values]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _refuse(reward: Reward, outcome: Outcome, batch: Completions) -> NoReturn:
    raise RewardError(describe_failure(reward.name, batch.labels, outcome)) from outcome.cause
