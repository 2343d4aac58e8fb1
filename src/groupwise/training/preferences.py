"""Objectives that compare completions: reward models (Bradley-Terry), DPO and IPO, and process
reward models.

The two sides of a pair are one group: their prompt is computed once, and they share a micro-batch.
A sample's weight is its pair's share of the step; how its tokens make up one number (pooling) is a
column of its own.

n tokens of a completion   M read positions of a micro-batch   S its segments   R pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from groupwise.algorithms import pair_losses
from groupwise.algorithms.losses import segment_mean, segment_sum
from groupwise.config.settings import PairSettings, RewardModelSettings
from groupwise.data.encoding import Pair, Solution
from groupwise.errors import ConfigError
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.models.reward_head import Pooling, head_scores, pool_weights, readout
from groupwise.ops.linear_cross_entropy import chosen_logprobs
from groupwise.records import Batch, RolloutGroup, Sample, alike
from groupwise.training.offline import Objective
from groupwise.training.passes import Assessment, score, seen_by
from groupwise.utils.statistics import proportion

PAIR_HEADLINES = {"held-out loss": "loss", "pair accuracy": "accuracy", "margin": "margin"}
BINS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Edges of the reliability curve: probability of what the model prefers."""


# ---- reward model


def reward_objective(settings: RewardModelSettings) -> Objective[Pair]:
    """Bradley-Terry on pooled scores, with the data's margins, optional centring and a
    language-model loss on both sides.
    """
    return Objective(
        samples=partial(
            reward_samples, pooling=settings.pooling, lm_coefficient=settings.lm_coefficient
        ),
        loss=partial(reward_loss, centering=settings.centering, lm=settings.lm_coefficient > 0.0),
        measure=lambda rows, assessment: compared(*_sides(pooled(assessment))),
        examine=lambda rows, assessment: examined(*_sides(pooled(assessment)), rows),
        headlines=PAIR_HEADLINES,
        whole_groups=True,
    )


def reward_samples(
    rows: Sequence[Pair], *, pooling: Pooling, lm_coefficient: float = 0.0
) -> list[Sample]:
    """Chosen and rejected side of each pair, in turn: `pool` weighs each token's number, `lm` each
    token's log-prob.
    """
    spoken = lm_coefficient / max(sum(row.chosen.size + row.rejected.size for row in rows), 1)
    samples = []
    for i, row in enumerate(rows):
        for completion in (row.chosen, row.rejected):
            n = completion.size
            pool, lm = np.append(0.0, pool_weights(pooling, n)), np.append(np.full(n, spoken), 0.0)
            weight = np.where((pool != 0) | (lm != 0), 1.0 / len(rows), 0.0)
            margin = np.full(n + 1, row.margin)
            samples.append(
                readout(
                    f"{row.id}#{i}", row.prompt, completion, weight, pool=pool, lm=lm, margin=margin
                )
            )
    return samples


def reward_loss(passed: BatchPass, *, centering: float, lm: bool) -> tuple[Tensor, Tensor]:
    """The pairs' weighted loss, and every read token's number (M,)."""
    policy, batch, rows_M, hidden_MD = passed.policy, passed.batch, passed.rows_M, passed.hidden_MD
    score_M = head_scores(policy, hidden_MD)
    score_S = segment_sum(
        batch.extra_P["pool"][rows_M] * score_M, batch.segment_P[rows_M], batch.layout.segments
    )
    chosen, rejected, end_R = _pairs_of(batch)
    loss_R = pair_losses.bradley_terry(
        score_S[chosen], score_S[rejected], batch.extra_P["margin"][end_R], centering=centering
    )
    value = (batch.weight_P[end_R] * loss_R).sum() + passed.router_loss
    if lm:
        lm_M = batch.extra_P["lm"][rows_M]
        spoken = torch.nonzero(lm_M)[:, 0]
        with policy.precision():
            logp, _ = chosen_logprobs(
                hidden_MD[spoken],
                policy.head,
                batch.target_P[rows_M][spoken],
                batch.temperature_P[rows_M][spoken],
            )
        value = value - (lm_M[spoken] * logp).sum()
    return value, score_M


def pooled(assessment: Assessment) -> np.ndarray:
    """The pooled score of every sample: the sum over its tokens of pooling weight x number."""
    return np.array(
        [
            float(sample.extra["pool"] @ seen)
            for sample, seen in zip(assessment.samples, assessment.seen, strict=True)
        ]
    )


# ---- DPO and IPO


@dataclass(frozen=True, slots=True, eq=False)
class Anchored:
    """A pair with its tokens' log-probs under the reference, computed once because the reference is
    frozen.
    """

    pair: Pair
    chosen_logp: np.ndarray
    rejected_logp: np.ndarray

    def __len__(self) -> int:
        return len(self.pair)


def anchored(
    reference: Policy, pairs: Sequence[Pair], *, max_tokens_per_microbatch: int
) -> list[Anchored]:
    """Pairs with the log-probs of `reference` as it is now."""
    samples = []
    for i, pair in enumerate(pairs):
        for completion in (pair.chosen, pair.rejected):
            samples.append(_spoken(f"{i}", pair, completion, 1.0))
    logp = score(reference, samples, max_tokens_per_microbatch=max_tokens_per_microbatch).logp
    return list(map(Anchored, pairs, logp[0::2], logp[1::2]))


def dpo_objective(settings: PairSettings) -> Objective[Anchored]:
    """DPO's logistic or IPO's squared loss on log-ratios to the reference; their difference is the
    implicit reward.
    """
    rewards = partial(implicit_rewards, beta=settings.beta, mean=settings.loss == "ipo")
    return Objective(
        samples=dpo_samples,
        loss=partial(pair_loss, settings=settings),
        measure=lambda rows, assessment: compared(*_sides(rewards(assessment))),
        examine=lambda rows, assessment: examined(
            *_sides(rewards(assessment)), [row.pair for row in rows]
        ),
        headlines=PAIR_HEADLINES,
        whole_groups=True,
    )


def dpo_samples(rows: Sequence[Anchored]) -> list[Sample]:
    """Chosen and rejected side of each pair, in turn, with the reference's log-probs."""
    samples = []
    for i, row in enumerate(rows):
        pair, weight = row.pair, 1.0 / len(rows)
        group = f"{pair.id}#{i}"
        samples.append(_spoken(group, pair, pair.chosen, weight, row.chosen_logp))
        samples.append(_spoken(group, pair, pair.rejected, weight, row.rejected_logp))
    return samples


def pair_loss(passed: BatchPass, *, settings: PairSettings) -> tuple[Tensor, Tensor]:
    """DPO's or IPO's weighted loss of pairs, whose sides are in one batch, and the log-probs of
    their tokens (M,).
    """
    batch, head = passed.batch, passed.head(fused=False)
    assert batch.reference_logp_P is not None
    segment_M, segments = batch.segment_P[passed.rows_M], batch.layout.segments
    formula, pool = pair_losses.dpo, segment_sum
    if settings.loss == "ipo":
        formula, pool = pair_losses.ipo, segment_mean
    logp_S = pool(head.logp_M, segment_M, segments)
    reference_S = pool(batch.reference_logp_P[passed.rows_M], segment_M, segments)
    chosen, rejected, end_R = _pairs_of(batch)
    loss_R = formula(
        logp_S[chosen],
        logp_S[rejected],
        reference_S[chosen],
        reference_S[rejected],
        beta=settings.beta,
    )
    return (batch.weight_P[end_R] * loss_R).sum() + passed.router_loss, seen_by(head)


def implicit_rewards(assessment: Assessment, *, beta: float, mean: bool) -> np.ndarray:
    """`beta (l - ref)` of every sample, on sums (or means) over its tokens."""
    ratios = []
    for sample, seen in zip(assessment.samples, assessment.seen, strict=True):
        log_ratio_n = seen - sample.reference_logp
        if mean:
            ratios.append(log_ratio_n.mean())
        else:
            ratios.append(log_ratio_n.sum())
    return beta * np.array(ratios)


# ---- process reward model


def process_samples(rows: Sequence[Solution]) -> list[Sample]:
    """Return solutions read at the ends of their steps; every step of the optimizer step weighs
    the same.
    """
    steps = sum(row.ends.size for row in rows)
    samples = []
    for i, row in enumerate(rows):
        weight, label = np.zeros(row.completion.size + 1), np.zeros(row.completion.size + 1)
        weight[row.ends + 1], label[row.ends + 1] = 1.0 / steps, row.labels
        samples.append(readout(f"{row.id}#{i}", row.prompt, row.completion, weight, label=label))
    return samples


def process_loss(passed: BatchPass) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of the steps' labels, and the logit of each step (M,)."""
    batch, rows_M = passed.batch, passed.rows_M
    logit_M = head_scores(passed.policy, passed.hidden_MD)
    loss_M = binary_cross_entropy_with_logits(
        logit_M, batch.extra_P["label"][rows_M], reduction="none"
    )
    return (batch.weight_P[rows_M] * loss_M).sum() + passed.router_loss, logit_M


def _step_metrics(rows: Sequence[Solution], assessment: Assessment) -> dict[str, float]:
    right = [
        (seen[row.ends + 1] > 0) == (row.labels > 0.5)
        for row, seen in zip(rows, assessment.seen, strict=True)
    ]
    hits = np.concatenate(right)
    return {
        "accuracy": float(hits.mean()),
        "accuracy/half_width": proportion(float(hits.sum()), hits.size).half,
        "accuracy/whole_solutions": float(np.mean([steps.all() for steps in right])),
        "right_steps": float(np.mean(np.concatenate([row.labels > 0.5 for row in rows]))),
    }


PROCESS: Objective[Solution] = Objective(
    samples=process_samples,
    loss=process_loss,
    measure=_step_metrics,
    headlines={"held-out loss": "loss", "step accuracy": "accuracy", "right steps": "right_steps"},
)
"""A process reward model: the probability that a step is right, read at its last token (PRM800K,
2305.20050).
"""


# ---- what is measured of pairs


def compared(chosen_R: np.ndarray, rejected_R: np.ndarray) -> dict[str, float]:
    """Share of pairs in the right order (a tie is half right), and the mean scores."""
    gap_R = chosen_R - rejected_R
    return {
        "accuracy": _accuracy(gap_R),
        "margin": float(gap_R.mean()),
        "score/chosen": float(chosen_R.mean()),
        "score/rejected": float(rejected_R.mean()),
    }


def examined(
    chosen_R: np.ndarray, rejected_R: np.ndarray, rows: Sequence[Pair]
) -> dict[str, float]:
    """The 95 % interval of pair accuracy, accuracy by which side is longer, and the calibration of
    the probabilities.
    """
    gap_R = chosen_R - rejected_R
    longer_R = np.sign([row.chosen.size - row.rejected.size for row in rows])
    metrics = {"accuracy/half_width": proportion(_accuracy(gap_R) * gap_R.size, gap_R.size).half}
    for name, sign in (("shorter", -1), ("same_length", 0), ("longer", 1)):
        if (longer_R == sign).any():
            metrics[f"accuracy/chosen_{name}"] = _accuracy(gap_R[longer_R == sign])
    return metrics | calibration(gap_R)


def calibration(gap_R: np.ndarray) -> dict[str, float]:
    """Reliability curve: of pairs whose preferred side has a probability in a bin, the share that
    is in the right order.

    `calibration/error` is the mean distance between the two, weighted by pairs.

    >>> metrics = calibration(np.array([2.0, 2.0, -2.0, 2.0]))
    >>> round(metrics["calibration/0.8-0.9/predicted"], 3)
    0.881
    >>> metrics["calibration/0.8-0.9/observed"]
    0.75
    """
    sure_R = 1.0 / (1.0 + np.exp(-np.minimum(np.abs(gap_R), 50.0)))
    right_R = np.where(gap_R == 0, 0.5, gap_R > 0)
    place_R = np.clip(np.digitize(sure_R, BINS) - 1, 0, len(BINS) - 2)
    metrics, error = {}, 0.0
    for place, (low, high) in enumerate(pairwise(BINS)):
        inside_R = place_R == place
        if not inside_R.any():
            continue
        predicted, observed = float(sure_R[inside_R].mean()), float(right_R[inside_R].mean())
        metrics[f"calibration/{low}-{high}/predicted"] = predicted
        metrics[f"calibration/{low}-{high}/observed"] = observed
        metrics[f"calibration/{low}-{high}/pairs"] = float(inside_R.sum())
        error += inside_R.mean() * abs(predicted - observed)
    return {"calibration/error": float(error)} | metrics


# ---- iterating


def preference_rows(
    groups: Iterable[RolloutGroup], judge: str | None = None
) -> list[dict[str, Any]]:
    """New pairs from a policy's own completions: the best and the worst of each group by a judge.

    judge: the name of one of the groups' reward functions; None: their weighted sum.
    Groups without a difference beyond rounding, with equal or with empty texts, give none.  A row
    keeps its prompt's columns, so that the template of the old data fits: the reward model
    continues learning from the new pairs with a share of the old ones (`reward_model.replay`), as
    in DeepSeekMath's Algorithm 1 (2402.03300).  Raises ConfigError for an unknown judge."""
    rows = []
    for group in groups:
        scores = group.reward
        if judge is not None:
            if judge not in group.names:
                names = ", ".join(group.names)
                raise ConfigError(f"no reward is called {judge!r}; there are: {names}")
            scores = group.rewards[:, group.names.index(judge)]
        if np.isnan(scores).all():
            continue
        best, worst = int(np.nanargmax(scores)), int(np.nanargmin(scores))
        chosen, rejected = group.rollouts[best].text, group.rollouts[worst].text
        if not alike(scores) and chosen != rejected and chosen.strip() and rejected.strip():
            prompt: Any = group.prompt.text
            if group.prompt.messages is not None:
                prompt = list(group.prompt.messages)
            rows.append(
                {"prompt": prompt, **group.prompt.row, "chosen": chosen, "rejected": rejected}
            )
    return rows


def with_replay(new: Sequence[Pair], old: Sequence[Pair], share: float, seed: int) -> list[Pair]:
    """New pairs and as many seeded ones of the old as make up `share` of the whole.

    >>> with_replay([], [], 0.1, seed=0)
    []
    """
    count = min(round(share / (1.0 - share) * len(new)), len(old))
    picked = np.random.default_rng(seed).choice(len(old), size=count, replace=False)
    return [*new, *(old[int(i)] for i in picked)]


# ---- building blocks


def _spoken(
    group: str,
    pair: Pair,
    completion: np.ndarray,
    weight: float,
    reference_logp: np.ndarray | None = None,
) -> Sample:
    """Return one side of a pair, with every token weighed alike."""
    weight_n = np.full(completion.size, weight)
    return Sample(
        group=group,
        images=pair.images,
        prompt=pair.prompt,
        completion=completion,
        weight=weight_n,
        reference_logp=reference_logp,
    )


def _pairs_of(batch: Batch) -> tuple[list[int], list[int], list[int]]:
    """Segments of the chosen and of the rejected sides, and the last position of each chosen one.

    Samples alternate, chosen first; a pair is never cut.
    """
    segment = {sample: s for s, sample in enumerate(batch.samples) if sample >= 0}
    chosen, rejected, ends = [], [], []
    for sample, s in segment.items():
        if sample % 2 == 0:
            chosen.append(s)
            rejected.append(segment[sample + 1])
            ends.append(batch.layout.start[s] + batch.layout.length[s] - 1)
    return chosen, rejected, ends


def _sides(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values[0::2], values[1::2]


def _accuracy(gap_R: np.ndarray) -> float:
    return float(np.where(gap_R == 0, 0.5, gap_R > 0).mean())
