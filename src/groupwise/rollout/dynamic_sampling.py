"""Dynamic sampling (DAPO, 2503.14476): the scored groups of a step, without those whose rewards have zero variance.

Prompts are drawn, sampled and scored; with `group.dead_groups: refill` groups that teach nothing are replaced by further prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from groupwise.algorithms.table import Algorithm
from groupwise.config.settings import GroupSettings
from groupwise.distributed import comm
from groupwise.records import Prompt, Rollout, Sampling, Scored
from groupwise.rewards.compose import Judge
from groupwise.rewards.step_rewards import with_turns
from groupwise.rollout.engine import Engine
from groupwise.utils import threads

Draw = Callable[[int], Sequence[Prompt]]
"""The next k prompts of the data's order."""


@runtime_checkable
class ObservingDraw(Protocol):
    """A `Draw` that takes note of what became of its prompts, also of those that no step keeps."""

    def __call__(self, count: int, /) -> Sequence[Prompt]:
        """The next prompts."""
        ...

    def seen(self, groups: Sequence[Scored], /) -> None:
        """Scored groups, in the order in which their prompts were drawn; on every process all of them."""


Collected = tuple[list[Scored], int]
"""The groups of a step, and the number of prompts that were drawn for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSampler:
    """All that it takes to sample and score the groups of a step."""

    engine: Engine
    rewards: Judge
    draw: Draw
    algorithm: Algorithm
    group: GroupSettings
    sampling: Sampling
    seed: int = 0

    def prompts(self) -> list[Prompt]:
        """The prompts that a step begins with."""
        return list(self.draw(self.group.prompts_per_step))

    def sample(self, prompts: Sequence[Prompt]) -> list[Scored]:
        """This process's share of the prompts as scored groups; finished ones are scored while others are still being sampled."""
        finished: SimpleQueue[tuple[Rollout, ...] | None] = SimpleQueue()
        scored = threads.begin(
            lambda: [self._whole(one) for rollouts in iter(finished.get, None) for one in self.rewards.score([rollouts])], "rewards"
        )
        mine = comm.share(prompts)
        try:
            for rollouts in self.engine.generate(mine, group_size=self.group.group_size, sampling=self.sampling, seed=self.seed):
                finished.put(rollouts)
                if scored.done():  # it failed
                    break
        finally:
            finished.put(None)
        return scored.result()

    def _whole(self, group: Scored) -> Scored:
        """A scored group with what the credit reads beside its rewards."""
        return with_turns(group) if self.algorithm.needs_steps else group

    def collect(self, prompts: Sequence[Prompt] = (), own: Callable[[], list[Scored]] | None = None) -> Collected:
        """Scored groups for one step.  Of several processes each samples and scores its share, and each gets all groups.

        With `dead_groups: refill` (dynamic sampling, 2503.14476) prompts whose rewards teach nothing are replaced by further ones,
        at most `max_refills` x `prompts_per_step` of them; a step that stays short is trained as it is.

        prompts: drawn for it already.   own: what `sample` gives for them, where that has been begun already.
        """
        refill = self.algorithm.dead_groups == "refill"
        wanted = self.group.prompts_per_step
        limit = wanted * (1 + self.group.max_refills) if refill else wanted
        live: list[Scored] = []
        dead: list[Scored] = []
        prompts = prompts or self.prompts()
        while True:
            scored = comm.together(own or (lambda prompts=prompts: self.sample(prompts)))
            found = {one.prompt.id: one for one in scored}
            if isinstance(self.draw, ObservingDraw):
                self.draw.seen([found[prompt.id] for prompt in prompts])
            for prompt in prompts:
                (dead if refill and not self.algorithm.teaches(found[prompt.id]) else live).append(found[prompt.id])
            more = min(wanted - len(live), limit - len(live) - len(dead))
            if more <= 0:
                return live or dead[:wanted], len(live) + len(dead)
            prompts, own = self.draw(more), None
