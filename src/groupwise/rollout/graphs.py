"""Decoding in shapes that stay, for GPUs: the step of one token is recorded once, as a CUDA graph, and replayed for the others.

A step is hundreds of small operations, which a host launches more slowly than a GPU runs them.  A recording is launched at once,
but it reads and writes the same places, in the same shapes, every time.  So whatever a step reads lies in buffers that stay; rows,
prompts and the room for own tokens are filled up to one of a few sizes.  What is not there is hidden from attention, and what
filler rows draw nobody reads.  `attention.Decode` is the plain version.

R rows, filler included   P prompts, filler included   N most rows of a prompt   K key-value heads   S tokens of a look
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.objective.logprobs import chunk_rows
from groupwise.records import Sampling
from groupwise.rollout import sampling as draws
from groupwise.rollout.attention import ALIGNED, over_both, own_bias, prompt_bias
from groupwise.rollout.kvcache import Store
from groupwise.rollout.lean import Forward

LOOK = 8
"""Most tokens that are drawn before the host looks at any."""
LEAST_ROWS, LEAST_PROMPTS, LEAST_ROOM = 8, 2, 64
LOGITS = 1 << 27
"""Most logits that exist at the same time: half a gigabyte in float32.  Every part of them reads the head anew."""


class Shape(NamedTuple):
    """What a recording holds for.  Rooms only grow, and a recording made before they did never fits again."""

    rows: int
    prompts: int
    own: int
    """Room for own tokens that attention reads."""
    prompt: int
    rooms: tuple[int, ...]
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
    """All integers above but the last, in one piece: they are written in one transfer."""

    @classmethod
    def of(cls, shape: Shape, members: int, heads: int, device: torch.device) -> Buffers:
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
            torch.zeros(LOOK, rows, dtype=torch.float64, device=device),
            torch.zeros(LOOK, rows, dtype=torch.int64, device=device),
            torch.zeros(LOOK, rows, dtype=torch.float32, device=device),
            who,
        )


class GraphDecode:
    """Takes the place of `attention.Decode` where nothing is read back within a token: known models, all of the vocabulary."""

    def __init__(self, prompts: Store, own: Store, device: torch.device, *, members: int, vocabulary: int) -> None:
        """members: most rows of a prompt."""
        self.prompts, self.own, self.members, self.device = prompts, own, members, device
        self.rows_at_once = chunk_rows(vocabulary, 4, numbers=LOGITS)
        self._forward: Forward | None = None
        self._buffers: dict[Shape, Buffers] = {}
        self._replays: dict[Shape, Callable[[], None]] = {}
        self._record = recorder(device)
        self._arranged: Shape | None = None

    def arrange(self, prompt_length_P: Sequence[int], entry_R: Sequence[int], length_R: Sequence[int]) -> None:
        """The live rows have changed: row r belongs to prompt entry `entry_R[r]` and has kept `length_R[r]` own tokens."""
        self.prompt_length_P, self.entry_R, self.length_R = list(prompt_length_P), list(entry_R), list(length_R)
        self._arranged = None

    def draw(
        self, forward: Forward, newest_R: Tensor, uniform_RT: Tensor, sampling: Sampling, steps: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The next tokens of the live rows and their log-probs, (R,) each; at most `LOOK`.

        newest_R: their newest tokens.   uniform_RT: uniform numbers for all of their tokens.
        """
        if forward is not self._forward:
            self._forward = forward
            self._replays.clear()
        live = len(self.length_R)
        shape = self._fit(max(self.length_R) + steps)
        # A shape may not come again: only one that does is worth a recording.
        seen_before = shape in self._buffers
        buffers = self._buffers[shape] if seen_before else self._make(shape)
        if shape != self._arranged:
            buffers.who.copy_(torch.from_numpy(self._who(shape)))
            self._arranged = shape
        buffers.token_R[:live] = newest_R
        buffers.turn_1.zero_()
        place_RS = buffers.length_R[:live, None] + torch.arange(1, steps + 1, device=self.device)
        buffers.uniform_SR[:steps, :live] = uniform_RT.gather(1, place_RS).T
        step = self._replays.get(shape) or partial(self._step, forward, shape, buffers, sampling)
        if seen_before and shape not in self._replays:
            step = self._replays[shape] = self._record(step)
        for _ in range(steps):
            step()
        self.length_R = [length + steps for length in self.length_R]
        tokens_SR, logp_SR = (column[:steps, :live].clone() for column in (buffers.token_SR, buffers.logp_SR))
        return list(zip(tokens_SR, logp_SR, strict=True))

    def _fit(self, longest: int) -> Shape:
        """The shape of the rows that live, and room in the stores for it."""
        room = min(filled(longest, LEAST_ROOM), self.own.most_tokens)
        self.own.reserve(len(self.length_R), room)
        return Shape(
            min(filled(len(self.length_R), LEAST_ROWS), self.own.room[0]),
            min(filled(len(self.prompt_length_P), LEAST_PROMPTS), self.prompts.room[0]),
            room,
            self.prompts.room[1],
            (*self.own.room, *self.prompts.room),
        )

    @property
    def _heads(self) -> int:
        return self.prompts.slabs[0].like.shape[-2]

    def _make(self, shape: Shape) -> Buffers:
        buffers = self._buffers[shape] = Buffers.of(shape, self.members, self._heads, self.device)
        return buffers

    def _who(self, shape: Shape) -> np.ndarray:
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

    def _step(self, forward: Forward, shape: Shape, buffers: Buffers, sampling: Sampling) -> None:
        """Draw one token for every row.  This is what is recorded: it reads nothing back, and all it leaves is in the buffers."""
        buffers.length_R.add_(1)
        buffers.position_R.add_(1)
        hidden_RD = forward.hidden(buffers.token_R, buffers.position_R, _Attend(self, shape, buffers))  # type: ignore[arg-type]
        uniform_R = buffers.uniform_SR.index_select(0, buffers.turn_1)[0]
        for first in range(0, shape.rows, self.rows_at_once):
            chunk = slice(first, first + self.rows_at_once)
            token_C, logp_C, _ = draws.draw(forward.logits(hidden_RD[chunk]), uniform_R[chunk], sampling)
            buffers.token_R[chunk] = token_C
            buffers.token_SR[:, chunk].index_copy_(0, buffers.turn_1, token_C[None])
            buffers.logp_SR[:, chunk].index_copy_(0, buffers.turn_1, logp_C[None])
        buffers.turn_1.add_(1)


class _Attend:
    """Attention of one step; `lean.RowAttention`."""

    def __init__(self, decode: GraphDecode, shape: Shape, buffers: Buffers) -> None:
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
        prompt = self.decode.prompts.slabs[layer]
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


def filled(count: int, least: int) -> int:
    """`count` rounded up to a multiple of `least`, and to at most four sizes between a power of two and the next.

    >>> [filled(n, 8) for n in (1, 9, 33, 130, 512, 513)], filled(1000, 64)
    ([8, 16, 40, 160, 512, 640], 1024)
    """
    step = max(least, 1 << max(count - 1, 1).bit_length() >> 3)
    return -(-count // step) * step


def whole(tokens: int) -> int:
    """Tokens rounded up to what the GPU's kernels read at once."""
    return -(-tokens // ALIGNED) * ALIGNED


def recorder(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What turns a step that has run before into one that is launched at once.

    Recordings share their scratch memory, because they run one after another.  A step that cannot be recorded stays as it is.
    """
    if device.type != "cuda":
        return lambda step: step
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (training, while rollouts are sampled ahead) may go on.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            warnings.warn(f"decoding goes on without a CUDA graph, at a fraction of its speed: {error}", stacklevel=2)
            return step
        return graph.replay

    return record
