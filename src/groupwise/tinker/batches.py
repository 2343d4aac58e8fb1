"""Batches of the SDK as the trainer's samples and losses.

A datum of n positions is a sequence of n + 1 tokens: what the model reads, and behind it the last
target.  All positions have the weight 1, so that their log-probs are known.  What the SDK
multiplies a position with is the sample's advantage, and a batch is a sum over positions.

| loss | a position's loss, with l its log-prob and b the sampler's |
|---|---|
| `cross_entropy` | `-weight l` |
| `importance_sampling` | `-rho A`, rho = exp(l - b) |
| `ppo` | `-min(rho A, clip(rho, low, high) A)` |
| `cispo` | `-sg[clip(rho, low, high)] A l` |

Their formulas are the surrogates of `algorithms/losses.py`.

n positions of a datum
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from groupwise.algorithms import losses
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.table import ALGORITHMS
from groupwise.models.policy import Policy
from groupwise.records import Sample
from groupwise.tinker.wire import Datum
from groupwise.utils.http import Refused

LOW, HIGH = 0.8, 1.2
"""Bounds of the ratio where the request names none."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The settings `clip_low_threshold` and `clip_high_threshold` of a loss."""

    low: float = LOW
    high: float = HIGH


@dataclass(frozen=True)
class BoundedCispo(losses.Cispo):
    """`-sg[clip(rho, low, cap)] A l`: CISPO with the SDK's lower bound of the weight."""

    low: float = LOW

    def __call__(self, terms: losses.Terms) -> Tensor:
        weight_M = losses.guarded_exp(terms.log_ratio_M.detach()).clamp(self.low, self.cap)
        return -weight_M * terms.advantage_M * terms.logp_M


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLossRow:
    """One loss that the SDK can name."""

    factor: str
    """The column that multiplies a position's loss."""
    sampled: bool
    """True if it reads `logprobs`, those of the sampler."""
    clips: bool
    """True if it reads the bounds."""
    surrogate: Callable[[Bounds], Callable[..., Any]]

    @property
    def columns(self) -> set[str]:
        """The columns that a datum must have."""
        names = {"target_tokens", self.factor}
        if self.sampled:
            names.add("logprobs")
        return names


def _cross_entropy(bounds: Bounds) -> losses.Reinforce:
    return losses.Reinforce()


def _importance_sampling(bounds: Bounds) -> losses.Importance:
    return losses.Importance(drop=1.0)  # nothing is too stale


def _ppo(bounds: Bounds) -> losses.Clipped:
    return losses.Clipped(low=1.0 - bounds.low, high=bounds.high - 1.0)


def _cispo(bounds: Bounds) -> BoundedCispo:
    return BoundedCispo(low=bounds.low, cap=bounds.high)


LOSSES = {
    "cross_entropy": BatchLossRow(
        factor="weights", sampled=False, clips=False, surrogate=_cross_entropy
    ),
    "importance_sampling": BatchLossRow(
        factor="advantages", sampled=True, clips=False, surrogate=_importance_sampling
    ),
    "ppo": BatchLossRow(factor="advantages", sampled=True, clips=True, surrogate=_ppo),
    "cispo": BatchLossRow(factor="advantages", sampled=True, clips=True, surrogate=_cispo),
}
"""The losses by the names that the SDK has for them."""
UNUSED = {"mask", "weights", "advantages", "logprobs"}
"""Columns that a datum may have for another loss, or for the script itself."""


def row_of(name: str) -> BatchLossRow:
    """Return a loss by its name.  Raises Refused for one that is not offered."""
    if name not in LOSSES:
        raise Refused(f"the loss {name[:80]!r} is not offered here: use {', '.join(LOSSES)}")
    return LOSSES[name]


def algorithm_of(name: str, config: Mapping[str, float | str]) -> Algorithm:
    """Return a loss as a row of the table of algorithms.   config: the settings of the request.

    Raises Refused for a loss, a setting or a value that is not offered.
    """
    row = row_of(name)
    bounds = _bounds(name, config) if row.clips else _no_settings(name, config)
    return replace(ALGORITHMS["grpo"], surrogate=row.surrogate(bounds))


def _no_settings(name: str, config: Mapping[str, float | str]) -> Bounds:
    if config:
        raise Refused(f"{name} has no setting {next(iter(config))[:80]!r}: leave it out")
    return Bounds()


def _bounds(name: str, config: Mapping[str, float | str]) -> Bounds:
    known = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
    for key, value in config.items():
        if key not in known:
            raise Refused(f"{name} has no setting {key[:80]!r}: it reads {', '.join(known)}")
        if isinstance(value, str):
            raise Refused(f"{key} must be a number, got {value[:80]!r}")
        known[key] = value
    low, high = known.values()
    if not 0.0 < low <= 1.0:
        raise Refused(f"clip_low_threshold must be above 0 and at most 1, got {low:g}")
    if not 1.0 < high < float("inf"):
        raise Refused(f"clip_high_threshold must be above 1, got {high:g}")
    return Bounds(low, high)


@dataclass(frozen=True, slots=True, eq=False)
class PackedData:
    """The data of a batch as the packed pass takes them."""

    samples: list[Sample]
    """One for each datum: what it is trained on, from its first position with a factor on."""
    prompts: list[Sample]
    """What stands before that in several data: it is computed once, and has no gradient."""
    prompt_of: list[int | None]
    """For each datum its place in `prompts`; None: its sample is the whole of it."""

    def logp(
        self, of_samples: Sequence[np.ndarray], of_prompts: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the log-probs of all positions of each datum (n,)."""
        logp = []
        for of_sample, place in zip(of_samples, self.prompt_of, strict=True):
            before = [] if place is None else [of_prompts[place]]
            logp.append(np.concatenate([*before, of_sample]))
        return logp


def packed_data(data: Sequence[Datum], name: str, policy: Policy) -> PackedData:
    """Return a batch as samples.   name: of its loss.

    Data that begin alike, with a factor of 0, share what they begin with: the completions of a
    prompt cost the prompt once.
    Raises Refused for data that the loss cannot read, naming the datum.
    """
    row = row_of(name)
    for place, datum in enumerate(data):
        _check(f"data[{place}]", datum, row, policy)
    beginnings = [_beginning(datum, row) for datum in data]
    count = Counter(tokens.tobytes() for tokens in beginnings)
    prompts: list[Sample] = []
    places: dict[bytes, int] = {}
    packed = PackedData([], prompts, [])
    for index, (datum, tokens) in enumerate(zip(data, beginnings, strict=True)):
        key = tokens.tobytes()
        shared = tokens.size > 1 and count[key] > 1
        if shared and key not in places:
            places[key] = len(prompts)
            prompts.append(
                Sample(
                    group=f"prompt {len(prompts)}",
                    prompt=tokens[:1],
                    completion=tokens[1:],
                    weight=np.ones(tokens.size - 1),
                )
            )
        place = places.get(key) if shared else None
        group = f"datum {index}" if place is None else f"shared {place}"
        before = 0 if place is None else tokens.size - 1
        packed.samples.append(_sample(datum, row, before, group, index))
        packed.prompt_of.append(place)
    return packed


def _beginning(datum: Datum, row: BatchLossRow) -> np.ndarray:
    """Return the tokens before the first target with a factor: the first token where there is no
    such target, or it is the first.
    """
    factor = datum.inputs[row.factor]
    before = int(np.argmax(factor != 0)) if factor.any() else 0
    return datum.tokens[: before + 1]


def _sample(datum: Datum, row: BatchLossRow, before: int, group: str, index: int) -> Sample:
    """Return a datum without its first positions.   before: how many there are."""
    inputs = datum.inputs
    completion = np.append(datum.tokens[1:], inputs["target_tokens"][-1])[before:]
    behavior_logp = None
    if row.sampled:
        behavior_logp = inputs["logprobs"][before:].astype(np.float64)
    return Sample(
        group=group,
        index=index,
        prompt=datum.tokens[: before + 1],
        completion=completion,
        weight=np.ones(completion.size),
        advantage=inputs[row.factor][before:].astype(np.float64),
        behavior_logp=behavior_logp,  # type: ignore[arg-type]
    )


def _check(place: str, datum: Datum, row: BatchLossRow, policy: Policy) -> None:
    """Raise Refused for a datum that the loss cannot read."""
    size, inputs = datum.tokens.size, datum.inputs
    for name in sorted(row.columns - inputs.keys()):
        raise Refused(f"{place} has no {name!r} among its loss_fn_inputs")
    for name in sorted(inputs.keys() - row.columns - UNUSED):
        raise Refused(f"{place}: the loss reads no {name[:80]!r}: leave it out")
    for name in sorted(row.columns):
        column = inputs[name]
        if column.size != size:
            raise Refused(f"{place}: {name} has {column.size} numbers for {size} positions")
        if not np.isfinite(column).all():
            raise Refused(f"{place}: {name} holds a number that is not finite")
    if size + 1 > policy.context:
        raise Refused(
            f"{place} has {size + 1} tokens, the last target included, but the model's context is"
            f" {policy.context}"
        )
    targets = inputs["target_tokens"]
    if targets.dtype.kind != "i":
        raise Refused(f"{place}: target_tokens must be int64")
    check_tokens(place, np.append(datum.tokens, targets), policy)
    if (targets[:-1] != datum.tokens[1:]).any():
        position = int(np.argmax(targets[:-1] != datum.tokens[1:]))
        raise Refused(
            f"{place}: target_tokens[{position}] is {targets[position]}, but the model reads"
            f" {datum.tokens[position + 1]} there: targets must be the input moved by one"
        )


def check_tokens(place: str, tokens: np.ndarray, policy: Policy) -> None:
    """Raise Refused for an id that belongs to no token."""
    wrong = tokens[(tokens < 0) | (tokens >= policy.vocabulary)]
    if wrong.size:
        raise Refused(
            f"{place} holds the id {wrong[0]}, outside the vocabulary, whose ids are 0 to"
            f" {policy.vocabulary - 1}: encode texts with the tokenizer of the trained model"
        )
