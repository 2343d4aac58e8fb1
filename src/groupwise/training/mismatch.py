"""The mismatch meter: why the sampler's log-probs differ from the scorer's.

A few sequences are computed again, one at a time, in float32, by the model's own forward pass.  The one of sampler and scorer that
is farther from it is taken for the faulty one.  Then one possible cause at a time is applied to the float32 computation: another
temperature, another truncation, half precision, older weights.  The first that explains 90 % of the difference is named.

n tokens of a completion   N tokens of all that is looked at   V vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.records import Rollout, Sampling
from groupwise.rollout.sampling import draw
from groupwise.training.samples import unbranched

SEQUENCES, TOKENS = 4, 256
"""What is looked at: the completions that differ most, and the first tokens of each."""
ENOUGH = 0.9
"""Share of a difference that its cause must explain."""
ROUNDING_MARGIN = 1.5
"""Factor by which rounding errors of two programs that compute the same may differ in size."""
TRUNCATIONS = (Sampling(top_k=50), Sampling(top_k=20), Sampling(top_p=0.95), Sampling(top_p=0.9), Sampling(top_p=0.8))
"""What engines and checkpoints truncate by where nobody asked for it; beside what the model's own generation config says."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A possible cause that was tried, and how much of the difference it explains."""

    name: str
    says: str
    explained: float
    """1: the difference is gone; 0 or less: it is no smaller."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of the mismatch meter: which side differs from float32, by how much, and why."""

    side: str
    """`sampler` or `scorer`: which is farther from one sequence at a time in float32."""
    gap: float
    """Its mean |difference| from that, nats."""
    cause: Cause | None
    """None if none of those that were tried explains it."""
    tried: tuple[Cause, ...]

    def __str__(self) -> str:
        base = f"the {self.side}'s log-probs are {self.gap:.2g} nats away from one sequence at a time in float32"
        if self.cause is not None:
            return f"{base}; {self.cause.name} explains {self.cause.explained:.0%} of it: {self.cause.says}"
        best = max(self.tried, key=lambda cause: cause.explained, default=None)
        nearest = f" (the nearest, {best.name}, explains {max(best.explained, 0.0):.0%})" if best is not None else ""
        return f"{base}; none of the usual causes explains it{nearest}"


@torch.no_grad()
def diagnose(
    policy: Policy,
    rollouts: Sequence[Rollout],
    scored: Sequence[np.ndarray],
    *,
    older: Mapping[str, Policy] | None = None,
) -> Diagnosis | None:
    """The cause of a difference between what was sampled and `scored`; None if nothing was sampled.

    policy: with the weights that scored.   scored: per rollout (n,), nats.
    older: weights that the sampler may have kept, by what they are called.
    """
    parts = [part for rollout, logp in zip(rollouts, scored, strict=True) for part in _stretches(rollout, logp)]
    parts = [(rollout, logp) for rollout, logp in parts if rollout.trained.any()]
    if not parts:
        return None
    parts.sort(key=lambda part: float(np.abs(part[0].behavior_logp - part[1])[part[0].trained].mean()), reverse=True)
    meter = _Meter(policy, [rollout for rollout, _ in parts[:SEQUENCES]])
    sides = {
        "scorer": meter.trained([logp for _, logp in parts[:SEQUENCES]]),
        "sampler": meter.trained([rollout.behavior_logp for rollout in meter.rollouts]),
    }
    side = max(sides, key=lambda name: _gap(sides[name], meter.truth_N))
    measured_N, gap = sides[side], _gap(sides[side], meter.truth_N)
    noise = _gap(meter.low(), meter.truth_N) if policy.autocast or policy.dtype in (torch.bfloat16, torch.float16) else 0.0
    tried: list[Cause] = []
    stale = [
        ("stale weights", f"the weights are {name}", lambda old=old: meter.alone(meter.exact(old)))
        for name, old in (older or {}).items()
    ]
    for name, says, compute in (*meter.causes(measured_N), *stale):
        left = max(0.0, _gap(measured_N, compute()) - noise)
        tried.append(Cause(name, says, 1.0 - left / gap if gap else 0.0))
        if tried[-1].explained >= ENOUGH:
            return Diagnosis(side, gap, tried[-1], tuple(tried))
    tried += meter.roundings(gap)
    return Diagnosis(side, gap, next((cause for cause in tried if cause.explained >= ENOUGH), None), tuple(tried))


def _stretches(rollout: Rollout, logp: np.ndarray) -> list[tuple[Rollout, np.ndarray]]:
    """What was drawn behind one context as a rollout, with its part of numbers per token (n,)."""
    parts = unbranched(rollout)
    return list(zip(parts, np.split(logp, np.cumsum([len(part) for part in parts])[:-1]), strict=True))


Candidate = tuple[str, str, Callable[[], np.ndarray]]
"""A cause's name, how it shows, and the log-probs (N,) that it would give."""


class _Meter:
    """A few completions, and log-probs of their N tokens that the policy wrote, under one cause at a time."""

    def __init__(self, policy: Policy, rollouts: Sequence[Rollout]) -> None:
        self.policy, self.rollouts = policy, list(rollouts)
        self.model = self.exact(policy)
        self.logits = [self._logits(self.model, rollout) for rollout in self.rollouts]
        self.truth_N = self.read()

    def exact(self, policy: Policy) -> Policy:
        """A policy in float32, or in float64 if that is what it computes in."""
        dtype = torch.promote_types(policy.dtype, torch.float32)
        same = policy.dtype == dtype and not policy.autocast
        return policy if same else replace(policy, model=_converted(policy.model, dtype), autocast=False)

    def trained(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Of numbers per token those of the first tokens that the policy wrote."""
        return np.concatenate([one[:TOKENS][r.trained[:TOKENS]] for one, r in zip(columns, self.rollouts, strict=True)])

    def low(self, dtype: torch.dtype = torch.bfloat16) -> np.ndarray:
        """By a model that computes in half precision."""
        return self.alone(replace(self.policy, model=_converted(self.policy.model, dtype), autocast=False))

    def alone(self, policy: Policy) -> np.ndarray:
        """One sequence at a time."""
        return self.trained([self._chosen(rollout, self._logits(policy, rollout)) for rollout in self.rollouts])

    def read(self, temperature: float | None = None, support: bool = True, truncated: Sampling | None = None) -> np.ndarray:
        """The logits at another temperature, over the whole vocabulary (`support` False), or over another support."""
        pairs = zip(self.rollouts, self.logits, strict=True)
        return self.trained([self._chosen(rollout, logits, temperature, support, truncated) for rollout, logits in pairs])

    def causes(self, measured_N: np.ndarray) -> Iterator[Candidate]:
        """Temperature, support, dtype."""
        stated = self.rollouts[0].sampling
        if stated.temperature != 1.0:
            yield "temperature", "they are those of temperature 1", lambda: self.read(1.0)
        fitted = self._fitted(measured_N)
        yield "temperature", f"they fit temperature {fitted:.3g}, not {stated.temperature:g}", lambda: self.read(fitted)
        if stated.truncates:
            says = f"they are over the whole vocabulary, not over the tokens that {_cut(stated)} leaves"
            yield "truncated support", says, lambda: self.read(support=False)
        else:
            for other in (*self._of_the_model(), *TRUNCATIONS):
                says = f"they are over what {_cut(other)} leaves, which nobody asked for"
                yield "truncated support", says, lambda other=other: self.read(truncated=other)
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
            if self.policy.dtype != dtype:
                yield "dtype", f"they are computed in {name}", lambda dtype=dtype: self.low(dtype)

    def roundings(self, gap: float) -> Iterator[Cause]:
        """Half precision, by the size of its errors: other kernels round otherwise, so the errors themselves are unknown."""
        for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
            size = _gap(self.low(dtype), self.truth_N)
            if self.policy.dtype != dtype and gap >= size / ROUNDING_MARGIN:
                says = f"rounding to {name} makes {size:.2g} nats"
                yield Cause("dtype", says, 1.0 - max(0.0, gap - ROUNDING_MARGIN * size) / gap)

    def _of_the_model(self) -> Iterator[Sampling]:
        """The truncation of the model's own generation config."""
        config = getattr(self.policy.model, "generation_config", None)
        own = {name: getattr(config, name, None) for name in ("top_k", "top_p", "min_p")}
        sampling = Sampling(top_k=int(own["top_k"] or 0), top_p=float(own["top_p"] or 1.0), min_p=float(own["min_p"] or 0.0))
        if sampling.truncates:
            yield sampling

    def _fitted(self, measured_N: np.ndarray) -> float:
        """The temperature whose log-probs are nearest."""
        low, high = 0.1, 10.0
        best = 1.0
        for _ in range(4):
            grid = np.geomspace(low, high, 15)
            place = int(np.argmin([_gap(measured_N, self.read(float(t))) for t in grid]))
            best = float(grid[place])
            low, high = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, len(grid) - 1)])
        return best

    def _logits(self, policy: Policy, rollout: Rollout) -> Tensor:
        """(n, V) float32 on the host: of a completion's first tokens."""
        prompt = rollout.prompt.tokens
        ids = torch.from_numpy(np.concatenate([prompt, rollout.tokens[:TOKENS]])).to(policy.device)
        with plain_attention(policy.model) as model, policy.precision():
            out = model(input_ids=ids[None], use_cache=False)
            logits = out.logits[0, prompt.size - 1 : -1, : policy.vocabulary]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).cpu()

    def _chosen(
        self,
        rollout: Rollout,
        logits: Tensor,
        temperature: float | None = None,
        support: bool = True,
        truncated: Sampling | None = None,
    ) -> np.ndarray:
        z = logits / (temperature or rollout.sampling.temperature or 1.0)
        ids = rollout.tokens[: z.shape[0]]
        kept = [torch.from_numpy(s) for s in rollout.support[: z.shape[0]]] if support and rollout.support is not None else None
        if truncated is not None:
            _, _, cut = draw(z, torch.zeros(z.shape[0], dtype=torch.float64), truncated)
            assert cut is not None
            kept = [row[:count] for row, count in zip(cut.ids_RC, cut.size_R.tolist(), strict=True)]
        chosen = z[torch.arange(len(ids)), torch.from_numpy(ids)]
        if kept is None:
            return (chosen - z.logsumexp(-1)).numpy()
        total = torch.stack([row[ids_].logsumexp(-1) for row, ids_ in zip(z, kept, strict=True)])
        inside = torch.tensor([bool((ids_ == token).any()) for ids_, token in zip(kept, ids.tolist(), strict=True)])
        return torch.where(inside, chosen - total, -torch.inf).numpy()


def _converted(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy that computes in another type."""
    return cast(PreTrainedModel, cast(nn.Module, copy.deepcopy(model)).to(dtype))


def _cut(sampling: Sampling) -> str:
    parts = {
        "top_k": sampling.top_k or None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "min_p": sampling.min_p or None,
    }
    return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)


def _gap(ours_N: np.ndarray, other_N: np.ndarray) -> float:
    """Mean |difference| over the tokens of which both say something."""
    gap_N = np.abs(ours_N - other_N)
    return float(np.nanmean(gap_N)) if not np.isnan(gap_N).all() else 0.0
