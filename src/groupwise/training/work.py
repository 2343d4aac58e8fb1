"""The work of a step: tokens that were shared, dead and computed again, and the FLOPs per second of
its models.

FLOPs of a forward pass over positions p, each of which sees c_p tokens, with logits at k of them:
`2 B |p| + 4 L a sum_p c_p + 2 V d k` (B parameters of the blocks, L layers, attention a wide, V
tokens in the vocabulary, d the model's width).  A backward pass takes twice that.  A prompt counts
once for its group.  What is computed again to save memory does not count, as in model FLOPs
utilisation; divide the figure by the peak of your device to get that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from groupwise.models.policy import Policy
from groupwise.models.shape import Shape, names_experts
from groupwise.records import Step

Row = tuple[str, int, int, int]
"""A completion: its group, tokens of its prompt, its own, and those with logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Measures the steps of one run."""

    policy: Shape
    critic: Shape | None = None
    """The shape of a critic's own backbone."""
    values: bool = False
    """A critic on the policy's backbone: its values are one more pass of that."""
    teacher: Shape | None = None
    """The shape of a teacher in this process."""
    updates: int = 1
    """Passes over each rollout."""
    diverging: bool = False
    """The teacher's distributions are read in every update."""
    recompute: bool = False
    """Activations are computed again for the backward pass."""
    threshold: bool = False
    """Entropies are computed ahead of each pass."""
    processes: int = 1
    experts: bool = False
    """A mixture of experts: a token takes a part of the weights, and FLOPs are not counted."""

    def read(self, step: Step) -> Step:
        """The step with its work; as it is where no completion was sampled."""
        if not step.groups:
            return step
        weights = step.columns.get("weight", ())
        every: list[Row] = []
        trained: list[Row] = []
        total = used = shared = 0
        for place, group in enumerate(step.groups):
            name, prompt = group.prompt.id, group.prompt.tokens.size
            shared += (len(group.rollouts) - 1) * prompt
            for i, rollout in enumerate(group.rollouts):
                total += len(rollout)
                every.append((name, prompt, len(rollout), int(rollout.trained.sum())))
                if place < len(weights) and weights[place][i].size:
                    used += len(rollout)
                    count = int(np.count_nonzero(weights[place][i]))
                    trained.append((name, prompt, len(rollout), count))
        scored = "scored_logp" in step.groups[0].signals
        again = self.updates * (int(self.recompute) + int(self.threshold))
        metrics = {
            "tokens/shared": float(shared),
            "tokens/dead": float(total - used),
            "tokens/recomputed": float(scored * total + again * used),
        }
        seconds = sum(value for name, value in step.timings.items() if "/" not in name)
        if not self.experts and seconds > 0.0:
            step_flops = self._flops(step, every, trained)
            metrics["flops/per_second"] = step_flops / seconds / self.processes
        return replace(step, metrics={**step.metrics, **metrics})

    def _flops(self, step: Step, every: list[Row], trained: list[Row]) -> float:
        signals = step.groups[0].signals
        passes = int("reference_logp" in signals) + int("scored_logp" in signals) + int(self.values)
        flops = sampling_flops(self.policy, every) + passes * forward_flops(self.policy, every)
        flops += 3 * self.updates * forward_flops(self.policy, trained)
        if self.critic is not None:
            flops += (1 + 3 * self.updates) * forward_flops(self.critic, every)
        if self.teacher is not None:
            flops += int("teacher_logp" in signals) * forward_flops(self.teacher, every)
            flops += int(self.diverging) * self.updates * forward_flops(self.teacher, trained)
        return flops


def has_experts(policy: Policy) -> bool:
    """True for a mixture of experts."""
    return names_experts(policy.model.config.to_dict())


def flops(shape: Shape, positions: float, seen: float, logits: float) -> float:
    """FLOPs of a forward pass.   seen: tokens that the positions see, added up.   logits: positions
    that get them.
    """
    blocks = shape.parameters - shape.outside
    attention = 4 * shape.layers * shape.heads * shape.head_width
    return (
        2.0 * blocks * positions + attention * seen + 2.0 * shape.vocabulary * shape.hidden * logits
    )


def tokens_seen(begin: int, count: int) -> float:
    """Add up the tokens that `count` positions see; the first of them stands behind `begin` others.

    >>> tokens_seen(3, 2)  # the fourth sees 4, the fifth 5
    9.0
    """
    return count * begin + count * (count + 1) / 2.0


def sampling_flops(shape: Shape, rows: Iterable[Row]) -> float:
    """Count each prompt once, with logits at its last token; then each completion's tokens but the
    last.
    """
    prompts, completions = dict[str, float](), 0.0
    for group, m, n, k in rows:
        prompts[group] = flops(shape, m, tokens_seen(0, m), 1)
        positions = max(n - 1, 0)
        completions += flops(shape, positions, tokens_seen(m, positions), max(k - 1, 0))
    return sum(prompts.values()) + completions


def forward_flops(shape: Shape, rows: Iterable[Row]) -> float:
    """A packed pass: of each prompt all tokens but the last once, then each completion behind that
    one.
    """
    prompts, completions = dict[str, float](), 0.0
    for group, m, n, k in rows:
        prompts[group] = flops(shape, m - 1, tokens_seen(0, m - 1), 0)
        completions += flops(shape, n, tokens_seen(m - 1, n), k)
    return sum(prompts.values()) + completions
