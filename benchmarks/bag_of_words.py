"""A bag of words tells a pair's better text without a language model: what a reward model has to beat.

R pairs   W words
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from groupwise.algorithms.pair_losses import bradley_terry
from groupwise.data.encoding import Pair
from groupwise.models.policy import Policy

WORD = re.compile(r"\w+|[^\w\s]")
WORDS = 3000


Texts = Sequence[tuple[str, str]]
"""Chosen and rejected."""


def texts_of(policy: Policy, pairs: Sequence[Pair]) -> Texts:
    """The completions of pairs as texts."""
    return [(policy.decode(pair.chosen.tolist()), policy.decode(pair.rejected.tolist())) for pair in pairs]


def bag_of_words(train: Texts, held_out: Texts) -> np.ndarray:
    """Score of the chosen less that of the rejected side, for each held-out pair.

    Bradley-Terry on counts of the 3,000 most frequent words and marks, lower case (Adam 0.05, 300
    full steps, L2 1e-3)."""
    counts = Counter(word for pair in train for text in pair for word in _words(text))
    place = {word: i for i, (word, _) in enumerate(counts.most_common(WORDS))}
    x_RW = torch.from_numpy(np.stack([_difference(pair, place) for pair in train]))
    weight_W = torch.zeros(len(place), requires_grad=True)
    adam = torch.optim.Adam([weight_W], lr=0.05)
    for _ in range(300):
        adam.zero_grad()
        (bradley_terry(x_RW @ weight_W, torch.zeros(len(train))).mean() + 1e-3 * weight_W.square().sum()).backward()
        adam.step()
    return np.stack([_difference(pair, place) for pair in held_out]) @ weight_W.detach().numpy()


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _difference(pair: tuple[str, str], place: Mapping[str, int]) -> np.ndarray:
    """float32 (W,): how much more often each word stands in the chosen text."""
    counts = np.zeros(len(place), np.float32)
    for text, sign in zip(pair, (1.0, -1.0), strict=True):
        for word in _words(text):
            if word in place:
                counts[place[word]] += sign
    return counts
