"""Decoding in shapes that stay, for GPUs: the step of one token is recorded once, as a CUDA graph, and replayed for the others.

A step is hundreds of small operations, which a host launches more slowly than a GPU runs them.  A recording is launched at once,
but it reads and writes the same places, in the same shapes, every time.  So whatever a step reads lies in buffers that stay; rows,
prompts and the capacity for own tokens are filled up to one of a few sizes.  What is not there is hidden from attention, and what
filler rows draw nobody reads.  `decode.TokenDecode` is the plain version.

R rows, filler included   P prompts, filler included   N most rows of a prompt   K key-value heads   S tokens of a look
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.ops.linear_cross_entropy import chunk_rows
from groupwise.records import Sampling
from groupwise.rollout import sampling as draws
from groupwise.rollout.native.attention import over_both, own_bias, prompt_bias
from groupwise.rollout.native.decode import ManyTokens, NextToken
from groupwise.rollout.native.forward import RolloutForward
from groupwise.rollout.native.kv_cache import KVCache

GPU_TOKENS_PER_SYNC = 8
"""Most tokens that are drawn before the host looks at any."""
LEAST_ROWS, LEAST_PROMPTS, LEAST_CAPACITY = 8, 2, 64
"""What rows, prompts and capacities are filled up to multiples of: fewer cost a GPU as much, and would need a recording each."""
LOGITS = 1 << 25
"""Most logits at a time, where that leaves 128 rows: 128 MB in float32.  Every part of them reads the head anew."""


class BufferShape(NamedTuple):
    """What a recording holds for.  Capacities only grow, and a recording made before they did never fits again."""

    rows: int
    prompts: int
    own: int
    """Places for own tokens that attention reads."""
    prompt: int
    capacities: tuple[int, ...]
    """Of both stores, as they lie in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """What a step reads and writes, always in the same places."""

    token_R: Tensor
    """The newest tokens."""
    length_R: Tensor
    """Own tokens whose keys are kept; filler has none when rows are arranged."""
    position_R: Tensor
    prompt_length_P: Tensor
    member_PN: Tensor
    to_prompt: Tensor
    """Rows x heads -> prompts x heads x members."""
    from_prompt: Tensor
    """And back."""
    turn_1: Tensor
    """Which token of a look is drawn."""
    uniform_SR: Tensor
    token_SR: Tensor
    logp_SR: Tensor
    who: Tensor
    """`token_R` to `turn_1` in one piece: they are written in one transfer."""

    @classmethod
    def of(cls, shape: BufferShape, members: int, heads: int, device: torch.device) -> Buffers:
        """Filled with zeros."""
        rows, prompts = shape.rows, shape.prompts
        sizes = [rows, rows, rows, prompts, prompts * members, prompts * members * heads, rows * heads, 1]
        who = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        token_R, length_R, position_R, prompt_length_P, member_PN, to_prompt, from_prompt, turn_1 = who.split(sizes)
        return cls(
            token_R,
            length_R,
            position_R,
            prompt_length_P,
            member_PN.view(prompts, members),
            to_prompt,
            from_prompt,
            turn_1,
            torch.zeros(GPU_TOKENS_PER_SYNC, rows, dtype=torch.float64, device=device),
            torch.zeros(GPU_TOKENS_PER_SYNC, rows, dtype=torch.int64, device=device),
            torch.zeros(GPU_TOKENS_PER_SYNC, rows, dtype=torch.float32, device=device),
            who,
        )


class GraphDecode:
    """A `RowDecoder` where nothing is read back within a token: known models, all of the vocabulary."""

    many: ManyTokens | None = None

    def __init__(
        self,
        forward: RolloutForward,
        sampling: Sampling,
        prompts: KVCache,
        own: KVCache,
        device: torch.device,
        *,
        members: int,
        vocabulary: int,
    ) -> None:
        """members: most rows of a prompt.   A recording reads the weights of `forward` where they lie: others need another one."""
        self.forward, self.sampling, self.prompts, self.own = forward, sampling, prompts, own
        self.members, self.device = members, device
        self.rows_at_once = chunk_rows(vocabulary, 4, numbers=LOGITS)
        self._buffers: dict[BufferShape, Buffers] = {}
        self._replays: dict[BufferShape, Callable[[], None] | None] = {}
        self._recorder = Recorder(device)
        self._arranged: BufferShape | None = None

    def arrange(self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]) -> None:
        """See `RowDecoder`."""
        self.prompt_length_P, self.entry_R, self.length_R = list(prompt_length_P), list(entry_R), list(length_R)
        self._arranged = None

    def draw(self, newest_R: Tensor, uniform_RT: Tensor, steps: int) -> list[NextToken]:
        """See `RowDecoder`; at most `GPU_TOKENS_PER_SYNC`."""
        assert steps <= GPU_TOKENS_PER_SYNC
        live = len(self.length_R)
        shape = self._fit(max(self.length_R) + steps)
        if shape not in self._buffers:
            self._buffers[shape] = Buffers.of(shape, self.members, self._heads, self.device)
        buffers = self._buffers[shape]
        if shape != self._arranged:
            buffers.who.copy_(torch.from_numpy(self._who(shape)))
            self._arranged = shape
        buffers.token_R[:live] = newest_R
        buffers.turn_1.zero_()
        place_RS = buffers.length_R[:live, None] + torch.arange(1, steps + 1, device=self.device)
        buffers.uniform_SR[:steps, :live] = uniform_RT.gather(1, place_RS).T
        for _ in range(steps):
            self._one(shape, buffers)
        self.length_R = [length + steps for length in self.length_R]
        tokens_SR, logp_SR = (column[:steps, :live].clone() for column in (buffers.token_SR, buffers.logp_SR))
        return [NextToken(token_R, logp_R) for token_R, logp_R in zip(tokens_SR, logp_SR, strict=True)]

    def _one(self, shape: BufferShape, buffers: Buffers) -> None:
        """The first token of a shape runs as it is, for kernels are loaded when they are first called; then it is recorded."""
        if shape not in self._replays:
            self._replays[shape] = None
            self._step(shape, buffers)
            return
        if self._replays[shape] is None:
            self._replays[shape] = self._recorder.record(partial(self._step, shape, buffers))
        replay = self._replays[shape] or partial(self._step, shape, buffers)
        replay()

    def _fit(self, longest: int) -> BufferShape:
        """The shape of the rows that live, and capacity in the stores for it.  longest: own tokens that there will be."""
        places = min(rounded_up(longest, LEAST_CAPACITY), self.own.most_tokens)
        self.own.reserve(len(self.length_R), places)
        return BufferShape(
            min(rounded_up(len(self.length_R), LEAST_ROWS), self.own.capacity[0]),
            min(rounded_up(len(self.prompt_length_P), LEAST_PROMPTS), self.prompts.capacity[0]),
            places,
            min(rounded_up(max(self.prompt_length_P), LEAST_CAPACITY), self.prompts.capacity[1]),
            (*self.own.capacity, *self.prompts.capacity),
        )

    @property
    def _heads(self) -> int:
        return self.prompts.layers[0].like.shape[-2]

    def _who(self, shape: BufferShape) -> np.ndarray:
        """Who is where, as `Buffers.who` has it.  Filler rows have a prompt and no tokens; absent members are row 0."""
        live, prompts, heads = len(self.length_R), len(self.prompt_length_P), self._heads
        length_R, entry_R, place_R = (np.zeros(shape.rows, dtype=np.int64) for _ in range(3))
        prompt_length_P = np.zeros(shape.prompts, dtype=np.int64)
        member_PN = np.zeros((shape.prompts, self.members), dtype=np.int64)
        length_R[:live], entry_R[:live], prompt_length_P[:prompts] = self.length_R, self.entry_R, self.prompt_length_P
        count_P = [0] * prompts
        for row, entry in enumerate(self.entry_R):
            place_R[row] = count_P[entry]
            member_PN[entry, count_P[entry]] = row
            count_P[entry] += 1
        position_R = np.where(np.arange(shape.rows) < live, prompt_length_P[entry_R] + length_R - 1, 0)
        head_K = np.arange(heads)
        to_prompt_PKN = member_PN[:, None] * heads + head_K[None, :, None]
        from_prompt_RK = (entry_R[:, None] * heads + head_K) * self.members + place_R[:, None]
        known = (length_R, position_R, prompt_length_P, member_PN, to_prompt_PKN, from_prompt_RK)
        newest_R, turn_1 = np.zeros_like(length_R), np.zeros(1, dtype=np.int64)
        return np.concatenate([column.ravel() for column in (newest_R, *known, turn_1)])

    def _step(self, shape: BufferShape, buffers: Buffers) -> None:
        """Draw one token for every row.  This is what is recorded: it reads nothing back, and all it leaves is in the buffers."""
        buffers.length_R.add_(1)
        buffers.position_R.add_(1)
        hidden_RD = self.forward.hidden(buffers.token_R, buffers.position_R, _Attend(self, shape, buffers))
        uniform_R = buffers.uniform_SR.index_select(0, buffers.turn_1)[0]
        for first in range(0, shape.rows, self.rows_at_once):
            chunk = slice(first, first + self.rows_at_once)
            token_C, logp_C, _ = draws.draw(self.forward.logits(hidden_RD[chunk]), uniform_R[chunk], self.sampling)
            buffers.token_R[chunk] = token_C
            buffers.token_SR[:, chunk].index_copy_(0, buffers.turn_1, token_C[None])
            buffers.logp_SR[:, chunk].index_copy_(0, buffers.turn_1, logp_C[None])
        buffers.turn_1.add_(1)


class _Attend:
    """Attention of one step; a `forward.RowAttention`."""

    def __init__(self, decode: GraphDecode, shape: BufferShape, buffers: Buffers) -> None:
        self.decode, self.shape, self.buffers = decode, shape, buffers
        self._bias: dict[int | None, tuple[Tensor, Tensor]] = {}

    def rows(
        self,
        layer: int,
        query_RHD: Tensor,
        key_RKD: Tensor,
        value_RKD: Tensor,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """(R, H, D) queries, (R, K, D) keys and values of the new tokens -> (R, H, D)."""
        shape, buffers = self.shape, self.buffers
        (rows, heads, width), shared = query_RHD.shape, key_RKD.shape[1]
        if window is not None and window >= shape.prompt + shape.own:
            window = None
        if window not in self._bias:
            position_PN = buffers.position_R[buffers.member_PN]
            self._bias[window] = (
                own_bias(buffers.length_R, shape.own, window, query_RHD.dtype),
                prompt_bias(buffers.prompt_length_P, shape.prompt, position_PN, window, heads // shared, query_RHD.dtype),
            )
        prompt = self.decode.prompts.layers[layer]
        own = self.decode.own.layer(layer, key_RKD)
        own.append(buffers.length_R - 1, key_RKD, value_RKD)
        return over_both(
            query_RHD.reshape(rows, shared, heads // shared, width),
            own.view(rows, shape.own),
            prompt.view(shape.prompts, shape.prompt),
            (buffers.to_prompt, buffers.from_prompt),
            scale,
            softcap,
            *self._bias[window],
        )


def rounded_up(count: int, least: int) -> int:
    """`count` rounded up to a multiple of `least`, and to at most four sizes between a power of two and the next.

    >>> [rounded_up(n, 8) for n in (1, 9, 33, 130, 512, 513)], rounded_up(1000, 64)
    ([8, 16, 40, 160, 512, 640], 1024)
    """
    step = max(least, 1 << max(count - 1, 1).bit_length() >> 3)
    return -(-count // step) * step


class Recorder:
    """Records steps that have run once already, so that each is launched at once.

    Recordings share their scratch memory, because they run one after another.  Stream and pool are this recorder's own while it
    lives: torch forgets the scratch memory of a stream's matrix products with the first of its graphs that goes, and a pool cannot
    be used again once all of its graphs are gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def record(self, step: Callable[[], None]) -> Callable[[], None] | None:
        """What replays the step; None where steps cannot be recorded, which is said once."""
        if self.device.type != "cuda" or self.device in _FAILED:
            return None
        with torch.cuda.device(self.device):
            try:
                return self._recorded(step)
            except RuntimeError as error:
                # Its text alone: the error knows its traceback, and that all that is on the device.
                cause = str(error.__context__ or error)
        _FAILED.add(self.device)
        warnings.warn(f"decoding continues without CUDA graphs, at a fraction of its speed: {cause}", stacklevel=2)
        return None

    def _recorded(self, step: Callable[[], None]) -> Callable[[], None]:
        if self._stream is None:
            free = _FREE.setdefault(self.device, [])
            self._stream, self._pool = free.pop() if free else torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            weakref.finalize(self, free.append, self._stream)
            torch.cuda.empty_cache()  # what earlier rollouts' pools held, which nobody else can use
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not `torch.cuda.graph`: where recording fails it leaves its stream the current one.
        with torch.cuda.stream(self._stream):
            # Other threads (rewards that are scored, NCCL's) may go on.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                try:
                    graph.capture_end()
                except RuntimeError:
                    # Before torch 2.13 the allocator is not told that it is over, and frees nothing from then on.
                    with suppress(RuntimeError):
                        torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)
                    raise
        return graph.replay


_FREE: dict[torch.device, list[torch.cuda.Stream]] = {}
"""Streams of recorders that are gone: torch has 32 of them, and keeps memory for each that has multiplied matrices."""
_FAILED: set[torch.device] = set()
"""Where recording has failed: it is not tried again."""
