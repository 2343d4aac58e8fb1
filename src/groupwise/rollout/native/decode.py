"""What the engine's live rows are decoded with: one token of each after another, or many in one
call of the compiled kernels.

On a GPU a CUDA graph draws a token of every row by one launch, where Python would launch a thousand
kernels.  It repeats recorded operations on the same memory.  So rows, prompts and the rows of a
prompt are filled up to a few sizes, and everything that changes between tokens lies in tensors that
stay where they are.  A size is recorded at its second token.

R rows (completions being decoded)   P live prompts   D model width   V vocabulary   N tokens of a
call, or most rows of a prompt T tokens of a completion
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.ops import decoding
from groupwise.ops.linear_cross_entropy import chunk_rows, slices
from groupwise.records import Sampling
from groupwise.rollout.native.attention import Decode, KVCache
from groupwise.rollout.native.forward import RolloutForward, SpecialisedForward
from groupwise.rollout.sampling import RowSupport, draw

DEVICES = ("cuda",)
"""Devices that repeat recorded operations."""
MANY = 64
"""Above so many rows sizes are its multiples; below, powers of two.  Rows that nobody reads cost
less than another record: the weights are read once for all rows."""


def recorded(step: Callable[[], None], beside: Any = None) -> Any:
    """Record the operations of a step; `replay()` of what is returned repeats them.   beside: a
    record whose memory it shares.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile: the one that trains, or reward models.
    with torch.cuda.graph(
        graph, pool=None if beside is None else beside.pool(), capture_error_mode="thread_local"
    ):
        step()
    return graph


def filled(count: int, most: int) -> int:
    """The size that so many rows are filled up to, at most `most`.

    >>> [filled(count, 150) for count in (1, 3, 9, 64, 65, 130)]
    [1, 4, 16, 64, 128, 150]
    """
    size = -(-count // MANY) * MANY if count > MANY else 1 << (count - 1).bit_length()
    return min(size, most)


class NextToken(NamedTuple):
    """The next token of each row."""

    token_R: Tensor
    logp_R: Tensor
    support: tuple[tuple[slice, RowSupport], ...] = ()
    """What truncated sampling drew from, for some rows at a time."""


class _Size:
    """What tokens of one size are drawn in, and their record.  It does not refer to who draws, or
    memory would outlive its use.
    """

    def __init__(
        self, prompts: KVCache, own: KVCache, device: torch.device, size: tuple[int, int, int]
    ) -> None:
        """size: see `attention.Decode`."""
        rows = size[0]
        self.attend = Decode(prompts, own, device, size)
        self.token_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logp_R = torch.zeros(rows, device=device)
        self.uniform_RT = torch.zeros(rows, own.most_tokens, dtype=torch.float64, device=device)
        self.drawn = 0
        """Tokens of every row."""
        self.graph: Any = None


class TokenDecode:
    """Draws tokens for the rows that live, by any forward pass, on any device.

    By graphs where the forward pass is one whose every step is known and sampling is not truncated.
    """

    def __init__(
        self,
        forward: RolloutForward,
        sampling: Sampling,
        prompts: KVCache,
        own: KVCache,
        device: torch.device,
        *,
        vocabulary: int,
    ) -> None:
        self.forward, self.sampling, self.attend = forward, sampling, Decode(prompts, own, device)
        self.rows_at_once = chunk_rows(vocabulary, 4)
        self.records = (
            isinstance(forward, SpecialisedForward)
            and not sampling.truncates
            and device.type in DEVICES
        )
        self.sizes: dict[tuple[int, ...], _Size] = {}
        self.size: _Size | None = None
        """Of the live rows; None after they have changed."""

    def arrange(
        self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]
    ) -> None:
        """The live rows have changed: row r belongs to prompt entry `entry_R[r]` and has kept
        `length_R[r]` own tokens.
        """
        self.size, self.facts = None, (list(prompt_length_P), list(entry_R), list(length_R))
        if not self.recordable:
            self.attend.arrange(prompt_length_P, entry_R, length_R)

    @property
    def recordable(self) -> bool:
        """States of recurrent layers are copied by what Python knows of the rows."""
        return self.records and not self.attend.prompts.states

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, steps: int) -> list[NextToken]:
        """The next tokens, one after another, the host waiting for none.

        newest_R: the rows' newest tokens.   uniform_RT: uniform numbers for all of their tokens.
        """
        if self.recordable:
            return self._repeated(newest_R, uniform_RT, steps)
        drawn: list[NextToken] = []
        for _ in range(steps):
            drawn.append(
                self._step(drawn[-1].token_R if drawn else newest_R, self.attend, uniform_RT)
            )
        return drawn

    def _step(self, token_R: Tensor, attend: Decode, uniform_RT: Tensor) -> NextToken:
        """One token of every row."""
        hidden_RD = self.forward.hidden(token_R, attend.next(), attend)
        uniform_R = uniform_RT.gather(1, attend.drawn_R[:, None])[:, 0]
        return self._drawn(lambda chunk: self.forward.logits(hidden_RD[chunk]), uniform_R)

    def _repeated(self, newest_R: Tensor, uniform_RT: Tensor, steps: int) -> list[NextToken]:
        """The next tokens by the record of their size."""
        (lengths, entries, kept), (prompts, own), rows = (
            self.facts,
            (self.attend.prompts, self.attend.own),
            newest_R.shape[0],
        )
        own.reserve(rows, min(max(kept) + steps, own.most_tokens))
        capacity = (*prompts.capacity, *own.capacity)
        if self.size is None or self.capacity != capacity:
            if self.sizes and self.capacity != capacity:
                self.sizes = {}  # their records read memory that is gone
            self.capacity = capacity
            members = max(map(entries.count, set(entries)))
            size = (
                filled(rows, own.capacity[0]),
                filled(len(lengths), prompts.capacity[0]),
                filled(members, rows),
            )
            self.size = self.sizes.get(size) or self.sizes.setdefault(
                size, _Size(prompts, own, self.attend.device, size)
            )
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
        """Draw a token of every row.  The first is drawn as it is: libraries prepare themselves.
        The second is recorded.
        """
        if size.drawn == 1:
            others = (one.graph for one in self.sizes.values() if one.graph is not None)
            try:
                size.graph = recorded(partial(self._recorded, size), next(others, None))
            except RuntimeError as error:
                warnings.warn(
                    f"tokens are drawn without CUDA graphs, more slowly: {error}", stacklevel=2
                )
        size.drawn += 1
        if size.graph is None:
            self._recorded(size)
        else:
            size.graph.replay()

    def _recorded(self, size: _Size) -> None:
        """What a graph repeats."""
        drawn = self._step(size.token_R, size.attend, size.uniform_RT)
        size.token_R.copy_(drawn.token_R)
        size.logp_R.copy_(drawn.logp_R)

    def first(self, sources: Sequence[Tensor], uniform_R: Tensor) -> NextToken:
        """The first tokens of rows, behind final hidden states (D,): equal objects have their
        logits computed once.
        """

        def logits(chunk: slice) -> Tensor:
            ids = [id(source) for source in sources[chunk]]
            places = {name: place for place, name in enumerate(dict.fromkeys(ids))}
            logits_PV = self.forward.logits(
                torch.stack([sources[chunk][ids.index(name)] for name in places])
            )
            return logits_PV[torch.tensor([places[name] for name in ids], device=logits_PV.device)]

        return self._drawn(logits, uniform_R)

    def _drawn(self, logits: Callable[[slice], Tensor], uniform_R: Tensor) -> NextToken:
        """The next tokens of rows.   logits: of some of them, which stay near the cache, however
        large the vocabulary.
        """
        chunks = slices(0, uniform_R.shape[0], self.rows_at_once)
        tokens, logps, supports = zip(
            *(draw(logits(chunk), uniform_R[chunk], self.sampling) for chunk in chunks), strict=True
        )
        token_R, logp_R = (
            (tokens[0], logps[0]) if len(chunks) == 1 else (torch.cat(tokens), torch.cat(logps))
        )
        support = tuple(
            (chunk, some) for chunk, some in zip(chunks, supports, strict=True) if some is not None
        )
        return NextToken(token_R, logp_R, support)

    @property
    def draws_many(self) -> bool:
        """True if `draw_many` can, with these weights, this sampling and what is kept."""
        kept = self.attend.prompts.layers.values()
        return (
            self.forward.decoder is not None
            and not self.sampling.truncates
            and all(layer.blocked for layer in kept)
        )

    def draw_many(
        self,
        newest_R: Tensor,
        limit_R: Sequence[int],
        uniform_RT: Tensor,
        steps: int,
        *,
        ending: Sequence[int],
        until_one_ends: bool,
    ) -> decoding.Drawn:
        """Many tokens of each row in one call, after which rows are to be arranged again; see
        `decoding.Decoder`.

        newest_R: their newest tokens.   limit_R: the most own tokens.   uniform_RT: uniform numbers
            for all of their tokens."""
        rows, decoder = self.attend, self.forward.decoder
        assert decoder is not None
        rows.own.reserve(len(rows.length_R), min(max(rows.length_R) + steps, rows.own.most_tokens))
        limit, prompt, prompt_length = (
            torch.tensor(column) for column in (limit_R, rows.entry_R, rows.prompt_length_P)
        )
        prompts = [rows.prompts.layers[layer] for layer in range(len(rows.prompts.layers))]
        return decoder(
            newest_R,
            rows.drawn_R,
            limit,
            prompt,
            prompt_length,
            uniform_RT,
            [
                (rows.own.layer(i, kept.like, kept.block).slab, kept.slab)
                for i, kept in enumerate(prompts)
            ],
            steps,
            temperature=self.sampling.temperature,
            ending=ending,
            until_one_ends=until_one_ends,
            rows_at_once=self.rows_at_once,
        )
