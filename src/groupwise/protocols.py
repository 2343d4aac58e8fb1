"""What training asks of what is handed to it: rewards, and servers that score tokens.

Packages that implement a protocol and packages that call it both import it from here, and not from
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from groupwise.records import Rollout, RolloutGroup


class Grader(Protocol):
    """The rewards that loops and evaluation need.  `Rewards` implements it; a loop of your own may
    bring another.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """K names, the columns of `RolloutGroup.rewards`."""
        ...

    def score(self, groups: Sequence[Sequence[Rollout]], /) -> list[RolloutGroup]:
        """Each group with its rewards, in the same order.  It may be called from any thread, also
        from several at once.
        """
        ...


class TokenScorer(Protocol):
    """Gives the log-probs of tokens that others have drawn, as a teacher's servers do
    (`scoring.ScoringServers`).
    """

    def logp(self, texts: Sequence[tuple[np.ndarray, np.ndarray]], /) -> list[np.ndarray]:
        """The log-prob (n,) in nats of each completion's tokens.

        texts: pairs of context (m,) and completion (n,), ids.
        """
        ...
