"""Decoding on a GPU by CUDA graphs: one launch draws a token of every row, where Python would launch a thousand kernels.

A graph repeats recorded operations on the same memory.  So rows, prompts and the rows of a prompt are filled up to a few sizes, and
everything that changes between tokens lies in tensors that stay where they are.  A size is recorded at its second token.

R rows   P prompts   N most rows of a prompt   T tokens of a completion
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.rollout.native.attention import Decode
from groupwise.rollout.native.decode import NextToken, TokenDecode
from groupwise.rollout.native.forward import SpecialisedForward
from groupwise.rollout.native.kv_cache import KVCache

DEVICES = ("cuda",)
"""Devices that repeat recorded operations."""
MANY = 8
"""Above so many rows sizes are its multiples; below, powers of two."""


def recorded(step: Callable[[], None], beside: Any = None) -> Any:
    """Record the operations of a step; `replay()` of what is returned repeats them.   beside: a record whose memory it shares."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile: the one that trains, or reward models.
    with torch.cuda.graph(graph, pool=None if beside is None else beside.pool(), capture_error_mode="thread_local"):
        step()
    return graph


def filled(count: int, most: int) -> int:
    """The size that so many rows are filled up to, at most `most`.

    >>> [filled(count, 30) for count in (1, 3, 8, 9, 25)]
    [1, 4, 8, 16, 30]
    """
    size = -(-count // MANY) * MANY if count > MANY else 1 << (count - 1).bit_length()
    return min(size, most)


class FixedDecode(Decode):
    """`Decode` of a fixed size, whose facts are numbers on the device at fixed places."""

    def __init__(self, prompts: KVCache, own: KVCache, device: torch.device, size: tuple[int, int, int]) -> None:
        """size: rows R, prompts P, rows of a prompt N."""
        super().__init__(prompts, own, device)
        rows, entries, members = self.size = size
        counts = (rows, rows, rows, rows, entries, entries * members)
        self.numbers = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        self._length_R, self.position_R, self._entry_R, self._member_place_R, self._ends_P, member_PN = self.numbers.split(counts)
        self._members_PN = member_PN.view(entries, members)
        self.rows_P, self.prompt_length_P = [[] for _ in range(entries)], [0]  # shorter than what is read: always hidden by a bias
        self.longest_prompt, self.longest = prompts.capacity[1], own.capacity[1]
        self.places, self._uniform = self.longest, False

    def arrange(self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]) -> None:
        """See `Decode`.  Rows without a completion write into entries of their own, which nobody reads."""
        rows, entries, members = self.size
        row_of: list[list[int]] = [[] for _ in range(entries)]
        place_R = []
        for row, entry in enumerate(entry_R):
            place_R.append(len(row_of[entry]))
            row_of[entry].append(row)
        position_R = [prompt_length_P[entry] + length - 1 for entry, length in zip(entry_R, length_R, strict=True)]
        columns = (
            *((length_R, rows, 0), (position_R, rows, -1), (entry_R, rows, 0), (place_R, rows, 0), (prompt_length_P, entries, 1)),
            *((row, members, 0) for row in row_of),
        )
        numbers = [number for column, size, filler in columns for number in (*column, *[filler] * (size - len(column)))]
        self.numbers.copy_(torch.tensor(numbers))

    def next(self) -> Tensor:
        """See `Decode`; capacity is there."""
        self._length_R += 1
        self.position_R += 1
        self._own_bias, self._prompt_bias, self._index = {}, {}, {}
        return self.position_R

    def _member_PN(self) -> Tensor:
        return self._members_PN

    def _place_R2(self) -> tuple[Tensor, Tensor]:
        return self._entry_R, self._member_place_R

    def _length_P(self) -> Tensor:
        return self._ends_P


class _Size:
    """What tokens of one size are drawn in, and their record.  It does not refer to who draws, or memory would outlive its use."""

    def __init__(self, prompts: KVCache, own: KVCache, device: torch.device, size: tuple[int, int, int]) -> None:
        """size: see `FixedDecode`."""
        rows = size[0]
        self.attend = FixedDecode(prompts, own, device, size)
        self.token_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logp_R = torch.zeros(rows, device=device)
        self.uniform_RT = torch.zeros(rows, own.most_tokens, dtype=torch.float64, device=device)
        self.drawn = 0
        """Tokens of every row."""
        self.graph: Any = None


class GraphDecode(TokenDecode):
    """`TokenDecode` by graphs, where the forward pass is one whose every step is known and sampling is not truncated."""

    def __init__(self, *parts: Any, vocabulary: int) -> None:
        """parts: as of `TokenDecode`."""
        super().__init__(*parts, vocabulary=vocabulary)
        known = isinstance(self.forward, SpecialisedForward) and not self.sampling.truncates
        self.records = known and self.attend.device.type in DEVICES
        self.sizes: dict[tuple[int, ...], _Size] = {}
        self.size: _Size | None = None
        """Of the live rows; None after they have changed."""

    def arrange(self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]) -> None:
        """See `TokenDecode`."""
        self.size, self.facts = None, (list(prompt_length_P), list(entry_R), list(length_R))
        if not self.recordable:
            super().arrange(prompt_length_P, entry_R, length_R)

    @property
    def recordable(self) -> bool:
        """States of recurrent layers are copied by what Python knows of the rows."""
        return self.records and not self.attend.prompts.states

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, steps: int) -> list[NextToken]:
        """See `TokenDecode`."""
        if not self.recordable:
            return super().draw(newest_R, uniform_RT, steps)
        (lengths, entries, kept), (prompts, own), rows = self.facts, (self.attend.prompts, self.attend.own), newest_R.shape[0]
        own.reserve(rows, min(max(kept) + steps, own.most_tokens))
        capacity = (*prompts.capacity, *own.capacity)
        if self.size is None or self.capacity != capacity:
            if self.sizes and self.capacity != capacity:
                self.sizes = {}  # their records read memory that is gone
            self.capacity = capacity
            members = max(map(entries.count, set(entries)))
            size = (filled(rows, own.capacity[0]), filled(len(lengths), prompts.capacity[0]), filled(members, rows))
            self.size = self.sizes.get(size) or self.sizes.setdefault(size, _Size(prompts, own, self.attend.device, size))
            self.size.attend.arrange(*self.facts)
            self.size.uniform_RT[:rows, : uniform_RT.shape[1]] = uniform_RT
        size = self.size
        size.token_R[:rows] = newest_R
        drawn = []
        for _ in range(steps):
            self._next(size)
            drawn.append(NextToken(size.token_R[:rows].clone(), size.logp_R[:rows].clone()))
        self.facts = (lengths, entries, [length + steps for length in kept])
        return drawn

    def _next(self, size: _Size) -> None:
        """Draw a token of every row.  The first is drawn as it is: libraries prepare themselves.  The second is recorded."""
        if size.drawn == 1:
            others = (one.graph for one in self.sizes.values() if one.graph is not None)
            try:
                size.graph = recorded(partial(self._step, size), next(others, None))
            except RuntimeError as error:
                warnings.warn(f"tokens are drawn without CUDA graphs, more slowly: {error}", stacklevel=2)
        size.drawn += 1
        if size.graph is None:
            self._step(size)
        else:
            size.graph.replay()

    def _step(self, size: _Size) -> None:
        """What is recorded."""
        hidden_RD = self.forward.hidden(size.token_R, size.attend.next(), size.attend)
        uniform_R = size.uniform_RT.gather(1, size.attend.drawn_R[:, None])[:, 0]
        drawn = self._drawn(lambda chunk: self.forward.logits(hidden_RD[chunk]), uniform_R)
        size.token_R.copy_(drawn.token_R)
        size.logp_R.copy_(drawn.logp_R)
