"""An engine for a policy whose weights are sharded: it gathers them once per call of `generate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from groupwise.models.policy import Policy
from groupwise.models.sharded import gathered, whole_policy
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.engine import Engine, InProcess


class GatheredEngine(InProcess):
    """Implements `engine.Engine` for a sharded policy: one gather of the weights per call of
    `generate`.
    """

    def __init__(self, policy: Policy, make: Callable[[Policy], Engine]) -> None:
        """make: the engine to sample with, of a policy without shards."""
        self.policy, self.inner = policy, make(whole_policy(policy))

    def send_weights(self, version: int) -> None:
        """Pass the version on to the engine inside."""
        self.version = version
        self.inner.send_weights(version)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """Sample with gathered weights; every process must call it, also one without prompts."""
        # What the engine keeps between two calls may hold gathered weights, which go now.
        with gathered(self.policy), closing(self.inner):
            yield from self.inner.generate(
                prompts, group_size=group_size, sampling=sampling, seed=seed
            )
