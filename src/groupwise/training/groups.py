"""What an online loop trains on, step after step: scored groups that are sampled now, or ahead of
training.  (`recorded_rollouts` reads groups that were recorded.)

The loop cannot tell which: it iterates, and says after each step how many optimizer steps the
policy has taken.

Dynamic sampling (DAPO, 2503.14476): with `group.dead_groups: refill` groups that teach nothing are
replaced by further prompts.

Ahead of training (`rollout.engine.ahead`): rollout j is begun as soon as step j - 1 - `ahead` has
been taken, and not before, so no token is older than that.  Every token carries the version of the
weights that drew it and the log-prob that it was drawn with; the importance weight of
`Algorithm.correction` does the rest.  In turn: an engine in the trainer's process samples rollout k
+ `ahead`, then step k is trained.  Nothing is gained in time, but it is the same run every time.
Beside: servers sample while the trainer computes, and new weights reach completions that are half
done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol, runtime_checkable

import numpy as np

from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.distributed import comm
from groupwise.errors import EngineError, RewardError
from groupwise.protocols import Grader
from groupwise.records import Prompt, Rollout, RolloutGroup, Sampling
from groupwise.rollout.engine import Engine
from groupwise.utils import threads

IDLE_STEPS = 3
"""Steps in a row without a single reward, or without a single completion that is trained, after
which a run ends.
"""
MAX_REFILLS = 4
"""Times `prompts_per_step` further prompts that `dead_groups: refill` draws for a step, at most."""
Collected = tuple[list[RolloutGroup], int]
"""The groups of a step, and the number of prompts that were drawn for them."""
Draw = Callable[[int], Sequence[Prompt]]
"""The next k prompts of the data's order."""


@runtime_checkable
class ObservingDraw(Protocol):
    """A `Draw` that takes note of what became of its prompts, also of those that no step keeps."""

    def __call__(self, count: int, /) -> Sequence[Prompt]:
        """The next prompts."""
        ...

    def seen(self, groups: Sequence[RolloutGroup], /) -> None:
        """Take note of groups, in the order in which their prompts were drawn; on every process all
        of them are seen.
        """


class Rollouts(Protocol):
    """Groups to train on."""

    def __iter__(self) -> Iterator[tuple[int, Collected]]:
        """The number of each step, and its groups with the number of prompts drawn for them."""
        ...

    def sync(self, version: int) -> None:
        """The policy has taken so many optimizer steps: what is sampled from now on is sampled with
        its weights.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRollout:
    """A rollout that has been begun for a step, and is not trained yet."""

    step: int
    """The step that will train on it."""
    version: int
    """Optimizer steps that had been taken when it was begun: none of its tokens may be older."""
    prompts: tuple[Prompt, ...] = ()
    """The prompts that it was begun with; empty where it is complete."""
    collect: Callable[[], Collected]
    """Waits for its groups."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: all of it, or of one that is still being sampled the ids
        of its prompts.
        """
        if self.prompts:
            return {"step": self.step, "prompts": [prompt.id for prompt in self.prompts]}
        groups, drawn = self.collect()
        return {"step": self.step, "version": self.version, "drawn": drawn, "groups": groups}

    def groups(self) -> Collected:
        """Wait for the groups.  Raises EngineError for a token that older weights have drawn, and
        what sampling or scoring it raised.
        """
        groups, drawn = self.collect()
        for group in groups:
            for rollout in group.rollouts:
                if len(rollout) and int(rollout.version.min()) < self.version:
                    raise EngineError(
                        f"step {self.step}: a token was drawn by the weights after"
                        f" {int(rollout.version.min())} optimizer steps, though its rollout was"
                        f" begun after {self.version}: whoever samples has not taken the newer"
                        " weights"
                    )
        return groups, drawn


class PrefetchedRollouts:
    """The rollouts that have been begun, in the order of their steps.

    All processes make the same calls.
    """

    def __init__(
        self, steps: int = 0, *, beside: bool = False, find: Callable[[str], Prompt] | None = None
    ) -> None:
        """steps: that sampling may be ahead.   beside: sample in threads; the engine must allow it.

        find: a prompt by its id, to begin again what a checkpoint names.
        """
        self.steps, self.beside, self._find = steps, beside, find
        self._begun: deque[PendingRollout] = deque()
        self._prompts: dict[int, tuple[Prompt, ...]] = {}
        """Prompts of the steps whose rollout a checkpoint had begun, and not completed."""

    def take(self, step: int, last: int, source: SampledRollouts) -> Collected:
        """Return the groups that a step trains on, and begin before what may be begun by now.

        last: the last step that there will be.  Raises as `PendingRollout.groups`.
        """
        if not self.steps:
            return source.collect()
        begin = self._begun[-1].step + 1 if self._begun else step
        for number in range(begin, min(step + self.steps, last) + 1):
            self._begun.append(self._begin(number, source))
        pending = self._begun.popleft()
        assert pending.step == step, (
            f"rollouts come in the order of their steps: {pending.step}, not {step}"
        )
        return pending.groups()

    def _begin(self, step: int, source: SampledRollouts) -> PendingRollout:
        """Begin the rollout of a step: in a thread, or at once and whole."""
        prompts, version = self._prompts.pop(step, ()), source.engine.version
        if not self.beside:
            return _complete(step, version, source.collect(prompts))
        prompts = prompts or tuple(source.prompts())
        sampling = threads.begin(lambda: source.sample(prompts), f"rollout-{step}")
        return PendingRollout(
            step=step,
            version=version,
            prompts=prompts,
            collect=partial(source.collect, prompts, sampling.result),
        )

    def pending(self) -> tuple[PendingRollout, ...]:
        """Return what has been begun and not been trained on."""
        return tuple(self._begun)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of `pending`: what was complete is used as it was, the rest begun
        again with the same prompts.
        """
        for state in states:
            if "groups" in state:
                collected = state["groups"], int(state["drawn"])
                self._begun.append(_complete(state["step"], state["version"], collected))
            else:
                assert self._find is not None
                self._prompts[state["step"]] = tuple(map(self._find, state["prompts"]))


def _complete(step: int, version: int, collected: Collected) -> PendingRollout:
    """Return a rollout whose groups are there."""
    return PendingRollout(step=step, version=version, collect=lambda: collected)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRollouts:
    """Groups that are sampled and scored when it is their step's turn, or ahead of it."""

    engine: Engine
    rewards: Grader
    draw: Draw
    algorithm: Algorithm
    group: GroupSettings
    sampling: Sampling
    seed: int = 0
    steps: int
    """The last step's number, which bounds what is sampled ahead."""
    numbers: range | None = None
    """Numbers of the steps to give groups for; None: all."""
    ahead: PrefetchedRollouts = field(default_factory=PrefetchedRollouts)
    """What has been sampled already."""

    def __iter__(self) -> Iterator[tuple[int, Collected]]:
        """Yield number and groups of each step.

        Raises RewardError after IDLE_STEPS steps in a row without any verdict, and after as many
        (or all, of a shorter run) whose completions are all masked.
        """
        silent = masked = 0
        limit = min(IDLE_STEPS, self.steps)
        numbers = range(1, self.steps + 1) if self.numbers is None else self.numbers
        for number in numbers:
            groups, drawn = self.ahead.take(number, self.steps, self)
            silent = silent + 1 if _is_silent(groups) else 0
            masked = masked + 1 if self._is_masked(groups) else 0
            if silent >= IDLE_STEPS:
                raise RewardError(
                    f"the reward functions ({', '.join(groups[0].names)}) said None for every"
                    f" completion of {IDLE_STEPS} steps: nothing can be learnt; try them with"
                    " `groupwise score` on completions that they should reward"
                )
            if masked >= limit:
                raise RewardError(
                    f"since step {number - masked + 1} every completion was truncated and left out"
                    " of the loss (group.truncated: mask): nothing can be learnt; raise"
                    " rollout.max_new_tokens, or set group.truncated: keep"
                )
            yield number, (groups, drawn)

    def _is_masked(self, groups: Sequence[RolloutGroup]) -> bool:
        """Return True if every completion is left out of the loss."""
        masks = self.algorithm.masks
        return all(masks(rollout) for group in groups for rollout in group.rollouts)

    def sync(self, version: int) -> None:
        """Hand the policy's weights to the engine."""
        self.engine.send_weights(version)

    def prompts(self) -> list[Prompt]:
        """The prompts that a step begins with."""
        return list(self.draw(self.group.prompts_per_step))

    def sample(self, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """This process's share of the prompts as scored groups; finished ones are scored while
        others are still being sampled.
        """
        finished: SimpleQueue[tuple[Rollout, ...] | None] = SimpleQueue()
        scored = threads.begin(lambda: self._score(finished), "rewards")
        share = comm.share(prompts)
        try:
            for rollouts in self.engine.generate(
                share, group_size=self.group.group_size, sampling=self.sampling, seed=self.seed
            ):
                finished.put(rollouts)
                if scored.done():  # it failed
                    break
        finally:
            finished.put(None)
        return scored.result()

    def _score(self, finished: SimpleQueue[tuple[Rollout, ...] | None]) -> list[RolloutGroup]:
        """Score groups as they are finished, until None comes."""
        groups = []
        for rollouts in iter(finished.get, None):
            (group,) = self.rewards.score([rollouts])
            if self.algorithm.needs.steps:
                group = with_turn_rewards(group)
            groups.append(group)
        return groups

    def collect(
        self,
        prompts: Sequence[Prompt] = (),
        sampled: Callable[[], list[RolloutGroup]] | None = None,
    ) -> Collected:
        """Return the groups of one step.  Of several processes each samples and scores its share,
        and each gets all groups.

        With `dead_groups: refill` (dynamic sampling, 2503.14476) prompts whose rewards teach
        nothing are replaced by further ones, at most `MAX_REFILLS` x `prompts_per_step` of them; a
        step that stays short is trained as it is.
        prompts: drawn for it already.
        sampled: waits for what `sample` gives for them, where that has been begun already.
        """
        refill = self.algorithm.dead_groups == "refill"
        wanted = self.group.prompts_per_step
        limit = wanted * (1 + MAX_REFILLS) if refill else wanted
        live: list[RolloutGroup] = []
        dead: list[RolloutGroup] = []
        prompts = prompts or self.prompts()
        while True:
            scored = comm.together(sampled or partial(self.sample, prompts))
            by_id = {group.prompt.id: group for group in scored}
            groups = [by_id[prompt.id] for prompt in prompts]
            if isinstance(self.draw, ObservingDraw):
                self.draw.seen(groups)
            for group in groups:
                if refill and not self.algorithm.teaches(group):
                    dead.append(group)
                else:
                    live.append(group)
            lacking = min(wanted - len(live), limit - len(live) - len(dead))
            if lacking <= 0:
                return live or dead[:wanted], len(live) + len(dead)
            prompts, sampled = self.draw(lacking), None


def with_turn_rewards(group: RolloutGroup) -> RolloutGroup:
    """Return the group with the rewards that environments gave for turns, in the signal `process`.

    Each stands at its turn's last token, and is added to what process reward functions gave there.
    A group without an episode is returned as it is.
    """
    if all(rollout.episode is None for rollout in group.rollouts):
        return group
    columns = [np.full(len(rollout), np.nan) for rollout in group.rollouts]
    if "process" in group.signals:
        columns = [np.array(column, np.float64) for column in group.signals["process"]]
    for rollout, column in zip(group.rollouts, columns, strict=True):
        if rollout.episode is None:
            continue
        for turn in rollout.episode.turns:
            if turn.end > turn.begin and turn.reward is not None:
                column[turn.end - 1] = np.nansum([column[turn.end - 1], turn.reward])
    return replace(group, signals={**group.signals, "process": tuple(columns)})


def _is_silent(groups: Sequence[RolloutGroup]) -> bool:
    """Return True if no reward function scored any completion."""
    if not any(groups[0].weights):
        return False
    return all(np.isnan(group.reward).all() for group in groups)
