"""`loss_terms` builds the `Terms` that a loss reads, from a packed batch or from a recorded step.

M tokens
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Terms
from groupwise.records import Batch
from groupwise.training.samples import SIGNALS


class TokenColumns(Protocol):
    """Numbers of the tokens that a loss is about, by the names that `Sample` has for them."""

    @property
    def segment_M(self) -> Tensor:
        """The completion of each token, int64 (M,), 0 .. segments - 1."""
        ...

    @property
    def segments(self) -> int:
        """At least the number of completions: a number that no token has is an empty segment."""
        ...

    def column(self, name: str) -> Tensor | None:
        """Return a number for each token (M,), or None where no sample has the column."""
        ...


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Some rows of a packed batch, as a loss reads them."""

    batch: Batch
    rows_M: Tensor
    """Positions of the batch, int64 (M,)."""

    @property
    def segment_M(self) -> Tensor:
        """The completion of each token, int64 (M,)."""
        return self.batch.sequence_P[self.rows_M]

    @property
    def segments(self) -> int:
        """The number of segments in the whole batch."""
        return self.batch.layout.segments

    def column(self, name: str) -> Tensor | None:
        """Return a number for each row (M,), or None where no sample has the column."""
        values_P = self.batch.column(name)
        return None if values_P is None else values_P[self.rows_M]


def loss_terms(
    algorithm: Algorithm, tokens: TokenColumns, logp_M: Tensor, entropy_M: Tensor | None
) -> Terms:
    """Build the inputs of an algorithm's loss for M tokens.

    logp_M: current log-probs, nats.   entropy_M: entropies, nats; None if the caller has none.
    """
    sampler_M, segment_M = tokens.column("behavior_logp"), tokens.segment_M
    advantage_M = tokens.column("advantage")
    assert sampler_M is not None and advantage_M is not None
    before_M = tokens.column("scored_logp")
    if before_M is None:
        # A rollout with one update, or without correction, is not scored beforehand: the current
        # log-probs stand for the old policy's.
        before_M = logp_M.detach()
    old_M, mismatch = algorithm.old_logp(before_M, sampler_M, segment_M, tokens.segments)
    forking_M = tokens.column("forking") if algorithm.needs.forking else None
    signals = {}
    for name in SIGNALS:
        values_M = tokens.column(name)
        if values_M is not None:
            signals[name] = values_M
    return Terms(
        logp_M=logp_M,
        old_logp_M=old_M,
        behavior_logp_M=sampler_M,
        mismatch=mismatch,
        advantage_M=advantage_M,
        segment_M=segment_M,
        segments=tokens.segments,
        reference_logp_M=tokens.column("reference_logp"),
        entropy_M=entropy_M,
        forking_M=None if forking_M is None else forking_M > 0,
        signals=signals,
    )
