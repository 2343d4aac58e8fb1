"""The mismatch meter: why the sampler's log-probs differ from the scorer's.

A few sequences are computed again, one at a time, in float32, by the model's own forward pass.  The
one of sampler and scorer that is farther from it is taken for the faulty one.  Then one possible
cause at a time is applied to the float32 computation: another temperature, another truncation, half
precision, older weights.  The first that explains 90 % of the difference is named.

n tokens of a completion   N tokens of all that is looked at   V vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
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
TRUNCATIONS = (
    Sampling(top_k=50),
    Sampling(top_k=20),
    Sampling(top_p=0.95),
    Sampling(top_p=0.9),
    Sampling(top_p=0.8),
)
"""What engines and checkpoints truncate by where nobody asked for it; beside what the model's own
generation config says.
"""


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
        base = (
            f"the {self.side}'s log-probs are {self.gap:.2g} nats away from one sequence at a time"
            " in float32"
        )
        if self.cause is not None:
            return (
                f"{base}; {self.cause.name} explains {self.cause.explained:.0%} of it:"
                f" {self.cause.says}"
            )
        best = max(self.tried, key=lambda cause: cause.explained, default=None)
        nearest = (
            f" (the nearest, {best.name}, explains {max(best.explained, 0.0):.0%})"
            if best is not None
            else ""
        )
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
    parts = [
        (part, values)
        for rollout, logp in zip(rollouts, scored, strict=True)
        for part, values in zip(unbranched(rollout), np.split(logp, _ends(rollout)), strict=True)
        if part.trained.any()
    ]
    if not parts:
        return None
    parts = sorted(
        parts,
        key=lambda part: -_gap(part[0].behavior_logp[part[0].trained], part[1][part[0].trained]),
    )[:SEQUENCES]
    meter = _Meter(policy, [rollout for rollout, _ in parts])
    sides = {
        "scorer": meter.trained([logp for _, logp in parts]),
        "sampler": meter.trained([rollout.behavior_logp for rollout, _ in parts]),
    }
    side = max(sides, key=lambda name: _gap(sides[name], meter.exact_N))
    measured_N, gap = sides[side], _gap(sides[side], meter.exact_N)
    noise = (
        meter.rounding(torch.bfloat16)
        if policy.autocast or policy.dtype in (torch.bfloat16, torch.float16)
        else 0.0
    )
    tried: list[Cause] = []
    for name, says, logp_N in meter.candidates(measured_N, older or {}):
        left = max(0.0, _gap(measured_N, logp_N) - noise)
        tried.append(Cause(name, says, 1.0 - left / gap if gap else 0.0))
        if tried[-1].explained >= ENOUGH:
            return Diagnosis(side, gap, tried[-1], tuple(tried))
    # Of half precision the size of the errors must do: other kernels round otherwise, so the errors
    # themselves are unknown.
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        if policy.dtype != dtype and gap >= (size := meter.rounding(dtype)) / ROUNDING_MARGIN:
            explained = 1.0 - max(0.0, gap - ROUNDING_MARGIN * size) / gap
            tried.append(
                Cause(
                    "dtype",
                    f"they are computed in {name}, whose rounding makes {size:.2g} nats",
                    explained,
                )
            )
    return Diagnosis(
        side, gap, next((cause for cause in tried if cause.explained >= ENOUGH), None), tuple(tried)
    )


def _ends(rollout: Rollout) -> np.ndarray:
    """Where all stretches of a rollout but the last end."""
    return np.cumsum([len(part) for part in unbranched(rollout)])[:-1]


class _Meter:
    """A few completions, and log-probs of their N tokens that the policy wrote, under one cause at
    a time.
    """

    def __init__(self, policy: Policy, rollouts: Sequence[Rollout]) -> None:
        self.policy, self.rollouts = policy, rollouts
        self.logits = self._logits(policy)
        self.exact_N = self._logp()

    def trained(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Of numbers per token those of the first tokens that the policy wrote."""
        return np.concatenate(
            [
                one[:TOKENS][r.trained[:TOKENS]]
                for one, r in zip(columns, self.rollouts, strict=True)
            ]
        )

    def rounding(self, dtype: torch.dtype) -> float:
        """Mean |difference| that a model makes which computes in half precision, nats."""
        return _gap(self._logp(self._logits(self.policy, dtype)), self.exact_N)

    def candidates(
        self, measured_N: np.ndarray, older: Mapping[str, Policy]
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """Causes by name, how they show, and the log-probs (N,) that they would give."""
        stated = self.rollouts[0].sampling
        if stated.temperature != 1.0:
            yield "temperature", "they are those of temperature 1", self._logp(temperature=1.0)
        fitted = self._fitted(measured_N)
        yield (
            "temperature",
            f"they fit temperature {fitted:.3g}, not {stated.temperature:g}",
            self._logp(temperature=fitted),
        )
        if stated.truncates:
            says = (
                f"they are over the whole vocabulary, not over the tokens that {_cut(stated)}"
                " leaves"
            )
            yield "truncated support", says, self._logp(truncation=Sampling())
        else:
            config = getattr(self.policy.model, "generation_config", None)
            top_k, top_p, min_p = (
                getattr(config, name, None) for name in ("top_k", "top_p", "min_p")
            )
            for other in (
                Sampling(top_k=top_k or 0, top_p=top_p or 1.0, min_p=min_p or 0.0),
                *TRUNCATIONS,
            ):
                if other.truncates:
                    says = f"they are over what {_cut(other)} leaves, which nobody asked for"
                    yield "truncated support", says, self._logp(truncation=other)
        for name, old in older.items():
            yield "stale weights", f"the weights are {name}", self._logp(self._logits(old))

    def _fitted(self, measured_N: np.ndarray) -> float:
        """The temperature whose log-probs are nearest."""
        low, high, best = 0.1, 10.0, 1.0
        for _ in range(4):
            grid = np.geomspace(low, high, 15)
            place = int(
                np.argmin([_gap(measured_N, self._logp(temperature=float(t))) for t in grid])
            )
            best = float(grid[place])
            low, high = float(grid[max(place - 1, 0)]), float(grid[min(place + 1, len(grid) - 1)])
        return best

    def _logits(self, policy: Policy, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Of each completion's first tokens (n, V), on the host: one sequence at a time, by a model
        that computes in a type, by default float32, or float64 if that is what it computes in."""
        exact = torch.promote_types(policy.dtype, torch.float32)
        dtype = dtype or exact
        if policy.dtype != dtype or policy.autocast:
            model = cast(PreTrainedModel, cast(nn.Module, copy.deepcopy(policy.model)).to(dtype))
            policy = replace(policy, model=model, autocast=False)
        every = []
        with plain_attention(policy.model) as model, policy.precision():
            for rollout in self.rollouts:
                prompt = rollout.prompt.tokens
                ids = torch.from_numpy(np.concatenate([prompt, rollout.tokens[:TOKENS]])).to(
                    policy.device
                )
                logits = model(input_ids=ids[None], use_cache=False).logits[
                    0, prompt.size - 1 : -1, : policy.vocabulary
                ]
                every.append(logits.to(exact).cpu())
        return every

    def _logp(
        self,
        logits: Sequence[Tensor] | None = None,
        *,
        temperature: float | None = None,
        truncation: Sampling | None = None,
    ) -> np.ndarray:
        """Log-probs (N,) by logits, by default the exact ones, at another temperature or over what
        another truncation leaves.
        """
        columns = []
        for rollout, logits_nV in zip(self.rollouts, logits or self.logits, strict=True):
            z_nV = logits_nV / (temperature or rollout.sampling.temperature or 1.0)
            token_n1 = torch.from_numpy(rollout.tokens[: len(z_nV)])[:, None]
            support = rollout.support
            if truncation is not None:
                _, _, kept = draw(z_nV, torch.zeros(len(z_nV), dtype=torch.float64), truncation)
                sizes = (
                    ()
                    if kept is None
                    else zip(kept.ids_RC.numpy(), kept.size_R.tolist(), strict=True)
                )
                support = tuple(ids[:size] for ids, size in sizes) or None
            if support is not None:
                inside_nV = torch.zeros_like(z_nV, dtype=torch.bool)
                for row, ids in zip(inside_nV, support, strict=False):
                    row[torch.from_numpy(ids)] = True
                z_nV = z_nV.masked_fill(~inside_nV, -torch.inf)
            columns.append((z_nV.gather(1, token_n1)[:, 0] - z_nV.logsumexp(-1)).numpy())
        return self.trained(columns)


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
