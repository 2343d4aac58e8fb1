"""Every normalisation is a weight: what one trained token of each completion counts in `loss =
sum(weight x per-token loss)`.

Each part takes the completions of one optimizer step, all ranks together (a minibatch is cut first
and weighted second): `tokens_R`, trained tokens of each (0 if it is empty or masked), and
`prompt_R`, the index of its group; and returns float64 (R,). R counts every completion of the step,
also empty, masked and skipped ones, so neither skipping what has no gradient nor the cut into
micro-batches and ranks can change an update.  A completion without trained tokens has weight 0.

R completions of the step   n_i trained tokens of completion i   N their sum
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from groupwise.algorithms.parts import MaybeCount, Weights


@dataclass(frozen=True)
class SequenceMean(Weights):
    """`1 / (R n_i)`: every completion counts the same, whatever its length (GRPO, 2402.03300, eq.
    3).

    >>> SequenceMean()([4, 1, 0], [0, 0, 1]).round(3).tolist()
    [0.083, 0.333, 0.0]
    """

    def __call__(self, tokens_R: ArrayLike, prompt_R: ArrayLike) -> np.ndarray:
        n_R = np.asarray(tokens_R)
        return _one_over(n_R.size * n_R, n_R)


@dataclass(frozen=True)
class TokenMean(Weights):
    """`1 / N`: every token of the step counts the same (CISPO 2506.13585; DAPO 2503.14476 as TRL
    and verl implement it).
    """

    def __call__(self, tokens_R: ArrayLike, prompt_R: ArrayLike) -> np.ndarray:
        n_R = np.asarray(tokens_R)
        return _one_over(n_R.sum(), n_R)


@dataclass(frozen=True)
class Constant(Weights):
    """`1 / (R length)`, length = longest allowed completion: no length bias at all (Dr. GRPO,
    2503.20783).
    """

    length: MaybeCount = None
    """None: `rollout.max_new_tokens`, which `config.resolve.resolve` fills in; the row of the
    table cannot run before.
    """

    def __call__(self, tokens_R: ArrayLike, prompt_R: ArrayLike) -> np.ndarray:
        n_R = np.asarray(tokens_R)
        assert self.length is not None, "Constant needs the longest allowed completion"
        return _one_over(n_R.size * self.length, n_R)


@dataclass(frozen=True)
class SequenceSum(Weights):
    """`1 / R`: a completion counts in proportion to its length (LUSPO)."""

    def __call__(self, tokens_R: ArrayLike, prompt_R: ArrayLike) -> np.ndarray:
        n_R = np.asarray(tokens_R)
        return _one_over(n_R.size, n_R)


@dataclass(frozen=True)
class PromptMean(Weights):
    """`1 / (prompts x tokens of the prompt's group)`: every prompt counts the same (ScaleRL
    2510.13786; DAPO's eq. 8).

    >>> PromptMean()([1, 3, 2, 2], [7, 7, 9, 9]).tolist()
    [0.125, 0.125, 0.125, 0.125]
    """

    def __call__(self, tokens_R: ArrayLike, prompt_R: ArrayLike) -> np.ndarray:
        n_R = np.asarray(tokens_R)
        prompts, group_R = np.unique(np.asarray(prompt_R), return_inverse=True)
        tokens = np.bincount(group_R, weights=n_R)
        return _one_over(prompts.size * tokens[group_R], n_R)


def _one_over(denominator: np.ndarray | int, n_R: np.ndarray) -> np.ndarray:
    """1 / denominator where a completion has trained tokens (and the denominator is at least 1),
    else 0.
    """
    return np.where(n_R > 0, 1.0 / np.maximum(denominator, 1), 0.0)
