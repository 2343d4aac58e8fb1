"""Sequences that are being decoded, and the prefixes that they are decoded behind.

A prefix is computed once for all sequences behind it: `PromptCache` holds those that are prefilled.
`LiveSequences` holds the sequences that decode now.  Both keep their keys and values in a
`KVCache`, where each has the entry of its number.

R live sequences   D model width   T tokens
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.environments.conversation import Stream
from groupwise.models.attention import Attend
from groupwise.records import ImageSpan
from groupwise.rollout.native.decode_attention import Extend, Prefill, sent
from groupwise.rollout.native.forward import RolloutForward
from groupwise.rollout.native.kv_cache import KVCache, SavedEntry
from groupwise.utils.batching import batch_by_size

PREFILL_TOKENS = 8192
"""Most tokens of one prefill pass (a longer prompt has a pass of its own): bounds the memory of its
activations.
"""


@dataclass(slots=True, eq=False)
class Prefix:
    """The tokens that sequences are decoded behind: a prompt, or a context that an environment
    named.
    """

    tokens: np.ndarray
    users: int
    """Sequences behind it that have not ended, waiting ones included."""
    entry: int = -1
    """Entry of the prompt cache; -1 before the prefill and after the last sequence."""
    hidden_D: Tensor | None = None
    """Final hidden state of its last token, while it has an entry."""
    images: Any = None
    """`Prompt.images` of its prompt."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Stream):
    """A completion that is decoded, or waits to be."""

    prefix: Prefix
    cached: int = 0
    """Own tokens whose keys and values are in `saved`, while the sequence has no place."""
    saved: SavedEntry | None = None

    @property
    def uncached(self) -> int:
        """Own tokens whose keys and values have to be computed before it draws another; 0 for a
        sequence that begins.
        """
        return self.own - self.cached


class PromptCache:
    """The prefixes that are prefilled, each in the entry of the store that has its number."""

    def __init__(self, store: KVCache) -> None:
        """Begin without a prefix."""
        self.store = store
        self.prefixes: list[Prefix] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prefix."""
        return [prefix.tokens.size for prefix in self.prefixes]

    def prefill(
        self, prefixes: abc.Sequence[Prefix], forward: RolloutForward, device: torch.device
    ) -> None:
        """Compute prefixes in passes of bounded length; their keys and values become entries."""
        batches = batch_by_size(prefixes, lambda prefix: prefix.tokens.size, PREFILL_TOKENS)
        for batch in batches:
            lengths = [prefix.tokens.size for prefix in batch]
            entries = self.store.live + len(batch)
            self.store.reserve(entries, max(lengths))
            tokens_T = np.concatenate([prefix.tokens for prefix in batch])
            stream = torch.from_numpy(tokens_T).to(device)
            starts = [0] * len(batch)
            attend = Prefill(self.store, lengths)
            images = _image_spans(batch)
            hidden_ND = hidden_of_last(forward, stream, starts, lengths, attend, images)
            for prefix, hidden_D in zip(batch, hidden_ND, strict=True):
                prefix.entry = self.store.live
                prefix.hidden_D = hidden_D
                self.store.live += 1
            self.prefixes += batch

    def drop_unused(self) -> None:
        """Remove the prefixes without unfinished sequences, and close their gaps."""
        unused = [entry for entry, prefix in enumerate(self.prefixes) if prefix.users == 0]
        if not unused:
            return
        order = self.store.drop(unused, max(self.lengths))
        for entry in unused:
            prefix = self.prefixes[entry]
            prefix.entry = -1
            prefix.hidden_D = None
        self.prefixes = [self.prefixes[entry] for entry in order]
        for entry, prefix in enumerate(self.prefixes):
            prefix.entry = entry


def _image_spans(prefixes: abc.Sequence[Prefix]) -> list[ImageSpan]:
    """Return where the prefixes with images lie in a stream of all of them."""
    spans: list[ImageSpan] = []
    start = 0
    for prefix in prefixes:
        end = start + prefix.tokens.size
        if prefix.images is not None:
            span = ImageSpan(start, end, 0, prefix.images)
            spans.append(span)
        start = end
    return spans


class LiveSequences:
    """The sequences that decode now, each in the entry of the store that has its number."""

    token_R: Tensor
    """The newest token of each."""
    uniform_RT: Tensor
    """Uniform numbers for the tokens of its turn."""

    def __init__(self, store: KVCache) -> None:
        """Begin without a sequence."""
        self.store = store
        self.live: list[Sequence] = []

    def extend(
        self,
        sequences: abc.Sequence[Sequence],
        prompts: PromptCache,
        forward: RolloutForward,
        device: torch.device,
    ) -> dict[Sequence, Tensor]:
        """Compute what the store lacks of waiting sequences: the last token of a turn, and the
        answer behind it.

        The sequences get the places behind those that live, and are ordered by the number of
        uncached tokens, most first.  Returns the final hidden state of each one's last token.
        """
        hidden: dict[Sequence, Tensor] = {}
        batches = batch_by_size(sequences, lambda sequence: sequence.uncached, PREFILL_TOKENS)
        for batch in batches:
            first = len(self.live) + len(hidden)
            counts = [sequence.uncached for sequence in batch]
            extend = Extend(
                prompts.store,
                self.store,
                first,
                prompts.lengths,
                [sequence.prefix.entry for sequence in batch],
                [sequence.cached for sequence in batch],
                counts,
            )
            tokens: list[int] = []
            starts: list[int] = []
            for place, sequence in enumerate(batch, first):
                if sequence.saved is not None:
                    self.store.put(place, sequence.saved)
                    sequence.saved = None
                first_uncached = sequence.begin + sequence.cached
                tokens += sequence.tokens[first_uncached:]
                start = sequence.prefix.tokens.size + sequence.cached
                starts.append(start)
            tokens_T = torch.tensor(tokens, device=device)
            hidden_ND = hidden_of_last(forward, tokens_T, starts, counts, extend)
            hidden.update(zip(batch, hidden_ND, strict=True))
        return hidden

    def join(self, new: abc.Sequence[Sequence], token_R: Tensor, uniform_RT: Tensor) -> None:
        """Add sequences behind those that live."""
        if self.live:
            longest = max(uniform_RT.shape[1], self.uniform_RT.shape[1])
            before_RT = _widened(self.uniform_RT, longest)
            new_RT = _widened(uniform_RT, longest)
            uniform_RT = torch.cat([before_RT, new_RT])
            token_R = torch.cat([self.token_R, token_R])
        self.token_R = token_R
        self.uniform_RT = uniform_RT
        self.live += new
        self.store.live = len(self.live)
        self.store.reserve(self.store.live, 1)

    def remove(self, ended: abc.Sequence[int], unread: int) -> None:
        """Remove ended sequences, and close their gaps.

        unread: tokens of each that are in the store, and not among its own.
        """
        longest = max((sequence.own for sequence in self.live), default=1)
        cached = longest - 1 + unread
        order = self.store.drop(ended, cached)
        self.live = [self.live[place] for place in order]
        if self.live:
            order_R = sent(order, self.token_R.device)
            self.token_R = self.token_R[order_R]
            self.uniform_RT = self.uniform_RT[order_R]


def _widened(uniform_RT: Tensor, columns: int) -> Tensor:
    """The rows with zeros behind them, up to so many columns."""
    missing = columns - uniform_RT.shape[1]
    return F.pad(uniform_RT, (0, missing))


def hidden_of_last(
    forward: RolloutForward,
    tokens_T: Tensor,
    starts: abc.Sequence[int],
    counts: abc.Sequence[int],
    attend: Attend,
    images: abc.Sequence[ImageSpan] = (),
) -> Tensor:
    """Compute the final hidden states (N, D) of the last token of each segment of a stream.

    starts: positions of the segments' first tokens.   counts: tokens of the segments.
    """
    device = tokens_T.device
    positions = []
    for start, count in zip(starts, counts, strict=True):
        end = start + count
        positions.append(np.arange(start, end))
    joined = np.concatenate(positions)
    position_T = torch.from_numpy(joined).to(device)
    hidden_TD = forward.hidden(tokens_T, position_T, attend, images)
    last = np.cumsum(counts) - 1
    last_N = torch.from_numpy(last).to(device)
    return hidden_TD[last_N]
