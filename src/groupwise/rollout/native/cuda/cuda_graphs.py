"""CUDA graphs of decoding: a token of every row by one launch, where Python would launch a thousand
kernels.

A graph repeats recorded operations on the same memory.  So rows, prompts and the rows of a prompt
are filled up to a few sizes, and everything that changes between tokens lies in tensors that stay
where they are.  A size is recorded at its second token.

R rows (completions being decoded)   T tokens of a completion
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.rollout.native.decode import NextToken
from groupwise.rollout.native.decode_attention import Decode, DecodeSize, LiveRows
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.sampling import RowSupport

MANY = 64
"""Above so many rows sizes are its multiples; below, powers of two.  Rows that nobody reads cost
less than another record: the weights are read once for all rows."""
FEWEST_PLACES = 64
"""Places of an entry that are read at least."""


DecodeStep = Callable[[Tensor, Decode, Tensor], NextToken]
"""One token of every row: newest tokens (R,), attention, uniform numbers (R, T) -> the next."""


def copied(drawn: NextToken, count: int) -> NextToken:
    """Copy the tokens of the first rows out of the buffers that are written next."""
    support = []
    for chunk, rows in drawn.support:
        stop = min(chunk.stop, count)
        kept = stop - chunk.start
        if kept > 0:
            ids_RC = rows.ids_RC[:kept].clone()
            size_R = rows.size_R[:kept].clone()
            of_rows = RowSupport(ids_RC, size_R)
            support.append((slice(chunk.start, stop), of_rows))
    token_R = drawn.token_R[:count].clone()
    logp_R = drawn.logp_R[:count].clone()
    return NextToken(token_R, logp_R, tuple(support))


def recorded(step: Callable[[], None], beside: Any = None) -> Any:
    """Record the operations of a step; `replay()` of the result repeats them.

    beside: a record whose memory the new one shares.
    """
    graph = torch.cuda.CUDAGraph()
    pool = None if beside is None else beside.pool()
    # Other threads may use the device meanwhile: the one that trains, or reward models.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph


def filled(count: int, most: int) -> int:
    """The size that so many rows are filled up to, at most `most`.

    >>> [filled(count, 150) for count in (1, 3, 9, 64, 65, 130)]
    [1, 4, 16, 64, 128, 150]
    """
    if count > MANY:
        size = -(-count // MANY) * MANY
    else:
        size = 1 << (count - 1).bit_length()
    return min(size, most)


def places(tokens: int, most: int) -> int:
    """The places of an entry that are read for so many tokens, at most `most`.

    >>> [places(tokens, 150) for tokens in (1, 64, 65, 129)]
    [64, 64, 128, 150]
    """
    power_of_two = 1 << (tokens - 1).bit_length()
    size = max(FEWEST_PLACES, power_of_two)
    return min(size, most)


class RecordedDraw:
    """The buffers of one size, and the graph that draws a token of every row in them.

    It does not refer to who draws: a circle would keep its memory until garbage is collected.
    """

    def __init__(
        self,
        prompts: KVCache,
        own: KVCache,
        device: torch.device,
        size: DecodeSize,
        uniform_RT: Tensor,
    ) -> None:
        """Make the buffers of a size.   prompts, own: the caches of prompts and completions.
        uniform_RT: the rows' uniform numbers, which all sizes share.
        """
        self.size = size
        self.attend = Decode(prompts, own, device, size)
        self.token_R = torch.zeros(size.rows, dtype=torch.int64, device=device)
        logp_R = torch.zeros(size.rows, device=device)
        self.drawn = NextToken(self.token_R, logp_R)
        """The tokens that were drawn last."""
        self.uniform_RT = uniform_RT[: size.rows]
        self.tokens_drawn = 0
        """Tokens that every row has drawn in these buffers."""
        self.graph: Any = None

    def run(self, step: DecodeStep) -> None:
        """Draw a token of every row into the buffers: the operations that a graph repeats."""
        drawn = step(self.token_R, self.attend, self.uniform_RT)
        self.token_R.copy_(drawn.token_R)
        self.drawn = drawn


class CudaGraphs:
    """Records of draws, one for each size and way to draw, as long as the weights and the caches
    stay where they are.
    """

    def __init__(self, prompts: KVCache, own: KVCache, device: torch.device) -> None:
        """Begin without a record.   prompts, own: the caches of prompts and completions."""
        self.prompts = prompts
        self.own = own
        self.device = device
        self.draws: dict[tuple[DecodeSize, Hashable], RecordedDraw] = {}
        self.current: RecordedDraw | None = None
        """The draw of the live rows; None after they have changed."""
        self.capacity: tuple[int, ...] = ()
        self.addresses: list[int] = []
        self.uniform_RT = torch.empty(0)

    def read_from(self, addresses: list[int]) -> None:
        """Take the places of the prepared weights: records that read others are dropped."""
        if addresses != self.addresses:
            self.draws = {}
            self.addresses = addresses
        self.current = None

    def draw(
        self,
        step: DecodeStep,
        way: Hashable,
        rows: LiveRows,
        newest_R: Tensor,
        uniform_RT: Tensor,
        tokens: int,
    ) -> list[NextToken]:
        """Draw the next tokens of all rows, one after another, the host waiting for none.

        way: names what `step` does with the logits.
        """
        count = newest_R.shape[0]
        columns = uniform_RT.shape[1]
        wanted = max(rows.length_R) + tokens
        longest = min(wanted, self.own.most_tokens)
        self.own.reserve(count, longest)
        self._see_capacity()
        if self.current is None or longest > self.current.size.tokens:
            self.current = self._draw_of(rows, longest, way)
            self.current.attend.arrange(rows)
            self.current.uniform_RT[:count, :columns] = uniform_RT
        draw = self.current
        draw.token_R[:count] = newest_R
        drawn: list[NextToken] = []
        for _ in range(tokens):
            self._next(draw, step)
            drawn.append(copied(draw.drawn, count))
        return drawn

    def _see_capacity(self) -> None:
        """Drop all records if the caches have grown: they read memory that is gone."""
        capacity = (*self.prompts.capacity, *self.own.capacity, self.own.most_tokens)
        if capacity == self.capacity:
            return
        self.draws = {}
        self.current = None
        self.capacity = capacity
        rows = self.own.capacity[0]
        shape = (rows, self.own.most_tokens)
        self.uniform_RT = torch.zeros(shape, dtype=torch.float64, device=self.device)

    def _draw_of(self, rows: LiveRows, longest: int, way: Hashable) -> RecordedDraw:
        """The draw of the size that these rows are filled up to."""
        count = len(rows.entry_R)
        prompts = len(rows.prompt_length_P)
        longest_prompt = max(rows.prompt_length_P)
        most_prompts, most_prompt_tokens = self.prompts.capacity
        most_rows, most_tokens = self.own.capacity
        size = DecodeSize(
            rows=filled(count, most_rows),
            prompts=filled(prompts, most_prompts),
            members=filled(rows.most_members, count),
            prompt_tokens=places(longest_prompt, most_prompt_tokens),
            tokens=places(longest, most_tokens),
        )
        draw = self.draws.get((size, way))
        if draw is None:
            draw = RecordedDraw(self.prompts, self.own, self.device, size, self.uniform_RT)
            self.draws[size, way] = draw
        return draw

    def _next(self, draw: RecordedDraw, step: DecodeStep) -> None:
        """Draw a token of every row.

        The first of a size is drawn as it is, for libraries prepare themselves.  The second is
        recorded.
        """
        if draw.tokens_drawn == 1:
            self._record(draw, step)
        draw.tokens_drawn += 1
        if draw.graph is None:
            draw.run(step)
        else:
            draw.graph.replay()

    def _record(self, draw: RecordedDraw, step: DecodeStep) -> None:
        """Record a draw beside the others, or warn where the device refuses."""
        beside = None
        for recorded_before in self.draws.values():
            if recorded_before.graph is not None:
                beside = recorded_before.graph
                break
        run = partial(draw.run, step)
        try:
            draw.graph = recorded(run, beside)
        except RuntimeError as error:
            warnings.warn(
                f"tokens are drawn without CUDA graphs, more slowly: {error}", stacklevel=2
            )
