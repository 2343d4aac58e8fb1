"""Rollouts ahead of training: what a step trains on has been begun up to so many steps before it.

Rollout j is begun as soon as step j - 1 - `steps` has been taken, and not before, so no token is older than that.  Every token
carries the version of the weights that drew it and the log-prob that it was drawn with; the importance weight of
`Algorithm.correction` does the rest.  With `steps` = 0 a rollout is begun when it is wanted: the synchronous loop.

In turn: an engine in the trainer's process samples rollout k + steps, then step k is trained.  Nothing is gained in time, but it is
the same run every time.  Beside: servers sample while the trainer computes, and new weights reach completions that are half done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.data.rollout_table import groups_from_bytes, groups_to_bytes
from groupwise.errors import EngineError
from groupwise.records import Prompt
from groupwise.rollout.dynamic_sampling import Collected, GroupSampler
from groupwise.utils import threads


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingRollout:
    """A rollout that has been begun."""

    step: int
    """That will train on it."""
    version: int
    """Optimizer steps that had been taken when it was begun: none of its tokens may be older."""
    prompts: tuple[Prompt, ...]
    """That it was begun with; empty where it is complete."""
    result: Callable[[], Collected]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: all of it, or of one that is still being sampled the ids of its prompts."""
        if self.prompts:
            return {"step": self.step, "prompts": [prompt.id for prompt in self.prompts]}
        groups, drawn = self.result()
        return {"step": self.step, "version": self.version, "drawn": drawn, "groups": groups_to_bytes(groups)}


class PrefetchedRollouts:
    """The rollouts that have been begun.  All processes make the same calls."""

    def __init__(self, steps: int = 0, *, beside: bool = False, find: Callable[[str], Prompt] | None = None) -> None:
        """steps: that sampling may be ahead.   beside: sample in threads; the engine must allow it.

        find: a prompt by its id, to begin again what a checkpoint names.
        """
        self.steps, self.beside, self._find = steps, beside, find
        self._begun: deque[PendingRollout] = deque()
        self._again: dict[int, tuple[Prompt, ...]] = {}

    def take(self, step: int, last: int, source: GroupSampler) -> Collected:
        """The groups that a step trains on; what may be begun by now has been begun.  last: the last step that there will be.

        Raises EngineError for a token that is older than `steps` allow, and what sampling or scoring it raised.
        """
        if not self.steps:
            return source.collect()
        for number in range(self._begun[-1].step + 1 if self._begun else step, min(step + self.steps, last) + 1):
            self._begun.append(self._begin(number, source))
        begun = self._begun.popleft()
        assert begun.step == step, f"rollouts come in the order of their steps: {begun.step}, not {step}"
        groups, drawn = begun.result()
        oldest = min((int(r.version.min()) for group in groups for r in group.rollouts if len(r)), default=begun.version)
        if oldest < begun.version:
            raise EngineError(
                f"step {step}: a token was drawn by the weights after {oldest} optimizer steps, though its rollout was begun after "
                f"{begun.version}: whoever samples has not taken the newer weights"
            )
        return groups, drawn

    def _begin(self, step: int, source: GroupSampler) -> PendingRollout:
        prompts, version = self._again.pop(step, ()), source.engine.version
        if not self.beside:
            collected = source.collect(prompts)
            return PendingRollout(step=step, version=version, prompts=(), result=lambda: collected)
        prompts = prompts or tuple(source.prompts())
        own = threads.begin(lambda: source.sample(prompts), f"rollout-{step}")
        return PendingRollout(step=step, version=version, prompts=prompts, result=lambda: source.collect(prompts, own.result))

    def pending(self) -> tuple[PendingRollout, ...]:
        """What has been begun and not been trained on."""
        return tuple(self._begun)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the states of `pending`: what was complete is used as it was, the rest begun again with the same prompts."""
        for state in states:
            if "groups" not in state:
                assert self._find is not None
                self._again[state["step"]] = tuple(self._find(name) for name in state["prompts"])
                continue
            whole = groups_from_bytes(state["groups"]), int(state["drawn"])
            self._begun.append(
                PendingRollout(step=state["step"], version=state["version"], prompts=(), result=lambda whole=whole: whole)
            )
