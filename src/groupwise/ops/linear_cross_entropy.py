"""Log-probabilities and entropies of chosen tokens from hidden states, a chunk of rows at a time:
(M, V) never exists.

The head's logits are by far the largest tensor of a training step (M x V; a vocabulary of 150,000
makes 0.6 MB per token in float32).  Here they live for one chunk only.  `chosen_logprobs`
recomputes them in its backward pass (4 products with the head per row); `FusedLoss` lets the caller
compute the loss of the chunk while its logits are at hand and takes the gradient in the same visit
(3 products), which is possible whenever a token's loss depends on no other token.

M rows   D width   V vocabulary   C rows of a chunk   E ids of all supports
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from groupwise.ops.autograd import first_derivative
from groupwise.ops.in_place_gradients import gradient_of, summing
from groupwise.ops.onednn_shapes import filled, tiled
from groupwise.ops.operations import LogitsReader, operations

CHUNK_NUMBERS = 1 << 22
"""Most logits of a chunk (rows x vocabulary) where that leaves it rows enough: 16 MB in float32."""
MOST_ROWS = 512
"""More rows to a chunk make no product faster."""
MIN_ROWS = 128
"""Every chunk reads the head twice and its gradient once: with fewer rows it would spend its time
on that.  Above 32,768 ids a chunk is larger instead."""
BLOCK_NUMBERS = 1 << 18
"""What lies between a chunk's products is done on so many of its logits at a time: 1 MB in float32,
which stays in a core's cache. A chunk exists once, in the type of the products; only a block of it
is ever widened to float32."""
NOTHING = -1e30
"""Stands for -inf where it is multiplied by its probability 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """The map from hidden states to logits: `softcap * tanh(scale * (W h + b) / softcap)`.

    `weight_VD` holds the vocabulary's rows only: embedding rows that pad a checkpoint's matrix are
    never sampled or scored."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionSupport:
    """Ids that could have been drawn, per row: `ids_E[begin_M[i]:begin_M[i + 1]]`; an empty span
    means all of them.
    """

    ids_E: Tensor
    begin_M: Tensor
    """(M + 1,) on the host."""


def chunk_rows(vocabulary: int, width: int, deep: int = 0, numbers: int = CHUNK_NUMBERS) -> int:
    """Rows of a chunk whose logits have `width` bytes: `numbers` is meant for float32, a lower
    precision has more for its bytes.

    deep: the width of a head that may be trained: its gradient is read and written once for every
        chunk, so where the chunk stays below half of it, rows are added.  Scoring and a frozen head
        take the same chunks.

    >>> chunk_rows(512, 4), chunk_rows(50257, 4), chunk_rows(50257, 2)
    (512, 128, 166)
    >>> chunk_rows(50257, 4, 768), chunk_rows(150_000, 4)
    (384, 128)
    """
    return max(MIN_ROWS, min(MOST_ROWS, max(numbers * 4 // max(width, 2) // vocabulary, deep // 2)))


def slices(start: int, stop: int, size: int) -> list[slice]:
    """Rows from `start` to `stop`, so many at a time."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def head_logits(hidden_CD: Tensor, head: Head) -> Tensor:
    """Logits (C, V) in the compute type of the head's product, before temperature."""
    logits_CV = F.linear(hidden_CD, head.weight_VD, head.bias_V)
    logits_CV = logits_CV if head.scale == 1.0 else logits_CV * head.scale
    return (
        logits_CV if head.softcap is None else head.softcap * torch.tanh(logits_CV / head.softcap)
    )


def chosen_logprobs(
    hidden_MD: Tensor,
    head: Head,
    target_M: Tensor,
    temperature_M: Tensor,
    support: PositionSupport | None = None,
    *,
    entropy: bool = False,
    chunk_numbers: int = CHUNK_NUMBERS,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature)[target] of every row (M,), and its entropy (M,) if asked
    for; nats, differentiable.

    With a support the softmax is over the ids of the row's support only (what top-k, top-p and
    min-p sampled from)."""
    logp_M, entropy_M = _Chosen.apply(
        hidden_MD,
        head.weight_VD,
        head.bias_V,
        head,
        target_M,
        temperature_M,
        support,
        entropy,
        chunk_numbers,
    )  # type: ignore[misc]
    return logp_M, entropy_M if entropy else None


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows of a batch whose logits are at hand; whoever visits it sets its loss."""

    rows: slice
    logp_C: Tensor
    """Differentiable."""
    entropy_C: Tensor | None
    """Differentiable; None unless asked for."""
    loss: Tensor | None = None
    """The weighted sum of the rows' losses, a scalar."""


class WholeLoss:
    """The loss of log-probs (and entropies) that are there: all rows are one chunk, and autograd
    takes the gradient.
    """

    def __init__(self, logp_M: Tensor, entropy_M: Tensor | None) -> None:
        self.logp_M, self.entropy_M = logp_M, entropy_M
        self._chunk = Chunk(slice(0, logp_M.shape[0]), logp_M, entropy_M)

    def __iter__(self) -> Iterator[Chunk]:
        yield self._chunk

    def total(self) -> Tensor:
        """The loss, differentiable."""
        assert self._chunk.loss is not None, "the chunk has a loss when it has been visited"
        return self._chunk.loss


class FusedLoss:
    """The sum of token losses over a batch, its gradient taken chunk by chunk while the logits are
    at hand.

    `for chunk in fused: chunk.loss = ...`, then `fused.total()`.
    """

    def __init__(
        self,
        hidden_MD: Tensor,
        head: Head,
        target_M: Tensor,
        temperature_M: Tensor,
        support: PositionSupport | None = None,
        *,
        entropy: bool = False,
        as_is: bool = False,
        chunk_numbers: int = CHUNK_NUMBERS,
    ) -> None:
        """as_is: the caller differentiates the loss as it is returned, multiplied by nothing; its
        gradient may then be summed in place.   entropy: see `Chunk.entropy_C`.
        """
        self._inputs = hidden_MD, head.weight_VD, head.bias_V
        self._visits = _Visits(
            hidden_MD, head, target_M, temperature_M, support, entropy, chunk_numbers
        )
        needs = tuple(one is not None and one.requires_grad for one in self._inputs)
        self._sums = _Gradients(self._visits, needs, in_place=as_is and summing())
        self._total = self._visits.logp_M.new_zeros(())
        self.logp_M = self._visits.logp_M
        self.entropy_M = self._visits.entropy_M if entropy else None

    def __iter__(self) -> Iterator[Chunk]:
        for rows, raw_CV in self._visits.products():
            self._visits.measure(rows, raw_CV)
            leaves = [
                column[rows].clone().requires_grad_()
                for column in (self.logp_M, self.entropy_M)
                if column is not None
            ]
            chunk = Chunk(rows, leaves[0], leaves[1] if len(leaves) == 2 else None)
            yield chunk
            assert chunk.loss is not None, "each chunk has a loss when it has been visited"
            grads = (None, None)
            if chunk.loss.requires_grad:
                grads = (*torch.autograd.grad(chunk.loss, leaves, allow_unused=True), None)[:2]
            self._total += chunk.loss.detach()
            self._sums.add(
                rows,
                raw_CV,
                torch.zeros_like(leaves[0]) if grads[0] is None else grads[0],
                grads[1],
            )

    def total(self) -> Tensor:
        """The loss, differentiable with respect to hidden states and head; `logp_M` and `entropy_M`
        are constants.

        It is differentiated once, even where the graph is kept (RuntimeError); `chosen_logprobs`
        may be as often as asked."""
        return _Fused.apply(*self._inputs, self._total, self._sums)  # type: ignore[return-value]


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        target_M: Tensor,
        temperature_M: Tensor,
        support: PositionSupport | None,
        entropy: bool,
        chunk_numbers: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(
            False
        )  # entropies that are only looked at cost nothing on the way back
        visits = _Visits(hidden_MD, head, target_M, temperature_M, support, entropy, chunk_numbers)
        for rows, raw_CV in visits.products():
            visits.measure(rows, raw_CV)
        ctx.save_for_backward(
            visits.hidden_MD, visits.weight_VD, bias_V, visits.target_M, visits.temperature_M
        )
        ctx.visits, ctx.summing = visits, summing()
        return (
            visits.logp_M.clone(),
            visits.entropy_M.clone(),
        )  # what is returned refers to ctx, and ctx to the visits

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        visits: _Visits = ctx.visits
        grad_logp_M = torch.zeros_like(visits.logp_M) if grads[0] is None else grads[0]
        grad_entropy_M = grads[1] if visits.entropy else None
        _ = ctx.saved_tensors  # what the visits read again: autograd sees whether it has changed
        sums = _Gradients(visits, ctx.needs_input_grad, in_place=ctx.summing)
        for rows, raw_CV in visits.products():
            sums.add(
                rows,
                raw_CV,
                grad_logp_M[rows],
                None if grad_entropy_M is None else grad_entropy_M[rows],
            )
        return *sums.gradients, None, None, None, None, None, None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        total: Tensor,
        sums: _Gradients,
    ) -> Tensor:
        ctx.sums = sums
        return total.clone()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError(
                "a fused loss is differentiated once: its gradient was made with it, and has been"
                " given away"
            )
        scale, gradients = grads[0], sums.gradients
        # The weight's gradient is as large as the head: the pass over it is left out where asking
        # costs nothing.
        if scale.is_cuda or float(scale) != 1.0:
            if sums.in_place:
                assert scale.is_cuda, "a loss that was to be differentiated as it is was multiplied"
                scale = torch.where(
                    scale == 1.0, scale, torch.nan
                )  # nobody waits for a GPU's answer, but the step is not taken
            gradients = [None if grad is None else grad.mul_(scale) for grad in gradients]
        return (*gradients, None, None)


class _Visits:
    """The rows of a batch, chunk by chunk: their logits, and what is read off them."""

    def __init__(
        self,
        hidden_MD: Tensor,
        head: Head,
        target_M: Tensor,
        temperature_M: Tensor,
        support: PositionSupport | None,
        entropy: bool,
        numbers: int,
    ) -> None:
        self.hidden_MD, self.head, self.support = hidden_MD.detach(), head, support
        self.target_M = target_M.to(torch.int64).contiguous()
        if (
            target_M.is_cpu
            and target_M.numel()
            and not 0 <= int(target_M.min()) <= int(target_M.max()) < head.weight_VD.shape[0]
        ):
            raise IndexError(
                f"targets {int(target_M.min())} to {int(target_M.max())} of a head of"
                f" {head.weight_VD.shape[0]} ids"
            )
        self.weight_VD = head.weight_VD.detach()
        if torch.is_autocast_enabled(hidden_MD.device.type):
            lower = torch.get_autocast_dtype(hidden_MD.device.type)
            self.hidden_MD, self.weight_VD = self.hidden_MD.to(lower), self.weight_VD.to(lower)
        self.precision = torch.promote_types(self.weight_VD.dtype, torch.float32)
        self.temperature_M = temperature_M.to(self.precision)
        self.factor_M = head.scale / self.temperature_M
        # Asking a GPU would cost a wait for it; dividing costs it little.
        self.tempered = hidden_MD.is_cuda or bool((temperature_M != 1.0).any())
        self.entropy = entropy
        (vocabulary, deep), count = head.weight_VD.shape, target_M.shape[0]
        if not hidden_MD.is_cuda and tiled(self.weight_VD.dtype):
            self.hidden_MD = F.pad(self.hidden_MD, (0, 0, 0, filled(count) - count))
        rows = chunk_rows(vocabulary, self.weight_VD.dtype.itemsize, deep, numbers)
        reader = self.reader(self.weight_VD)
        if reader is not None:
            rows = max(rows, reader.least_rows)
        self.chunks = slices(0, count, rows)
        # float32 (float64 for float64 models), filled as the rows are measured; entropies stay 0
        # unless asked for.
        self.lse_M, self.logp_M, self.entropy_M = torch.zeros(
            3, count, dtype=self.precision, device=target_M.device
        )

    def products(self) -> Iterator[tuple[slice, Tensor]]:
        """Every chunk and its logits (C, V) in the type of the head's product, before scale, soft
        cap and temperature.

        Those of filler stand behind.  All lie in one buffer: new pages for each would cost as much
        as a tenth of its products."""
        vocabulary = self.weight_VD.shape[0]
        bias_V = (
            None if self.head.bias_V is None else self.head.bias_V.detach().to(self.weight_VD.dtype)
        )
        every = [self.with_filler(rows) for rows in self.chunks]
        buffer_CV = self.weight_VD.new_empty(
            max((each.stop - each.start for each in every), default=0), vocabulary
        )
        for rows, each in zip(self.chunks, every, strict=True):
            hidden_CD, raw_CV = self.hidden_MD[each], buffer_CV[: each.stop - each.start]
            yield rows, operations().product(hidden_CD, self.weight_VD.T, bias_V, out=raw_CV)

    def reader(self, raw_CV: Tensor) -> LogitsReader | None:
        """The reader of these logits; None: torch's operations read them."""
        if self.head.softcap is not None or self.support is not None:
            return None
        return operations().logits_reader(raw_CV)

    def with_filler(self, rows: slice) -> slice:
        """The last chunk has the filler behind it."""
        return (
            slice(rows.start, self.hidden_MD.shape[0])
            if rows.stop == self.target_M.shape[0]
            else rows
        )

    def blocks(self, rows: slice, raw_CV: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, logits (B, V), tempered logits (B, V) with -inf outside the support) of a chunk's
        blocks; on CUDA one block.

        The tempered logits are the logits themselves where nothing was to be done to them.
        """
        size = (
            rows.stop - rows.start if raw_CV.is_cuda else max(1, BLOCK_NUMBERS // raw_CV.shape[1])
        )
        for block in slices(rows.start, rows.stop, size):
            raw_BV = raw_CV[block.start - rows.start : block.stop - rows.start]
            yield block, raw_BV, self._tempered(block, raw_BV)

    def _tempered(self, rows: slice, raw_BV: Tensor) -> Tensor:
        head = self.head
        z_BV = raw_BV.to(self.precision)
        if head.scale != 1.0:
            z_BV = z_BV * head.scale
        if head.softcap is not None:
            z_BV = torch.tanh(z_BV / head.softcap).mul_(head.softcap)
        if self.tempered:
            z_BV = z_BV / self.temperature_M[rows, None]
        if self.support is not None:
            z_BV = z_BV.masked_fill(
                _outside(self.support, rows.start, *z_BV.shape, z_BV.device), -torch.inf
            )
        return z_BV

    def measure(self, rows: slice, raw_CV: Tensor) -> None:
        """Fill the columns of a chunk: log-sum-exps, log-probs of the targets, entropies if they
        are asked for.
        """
        reader = self.reader(raw_CV)
        if reader is not None:
            reader.measure(
                raw_CV[: rows.stop - rows.start],
                self.factor_M[rows],
                self.target_M[rows],
                self.lse_M[rows],
                self.logp_M[rows],
                self.entropy_M[rows] if self.entropy else None,
            )
            return
        for block, _, z_BV in self.blocks(rows, raw_CV):
            self.lse_M[block] = torch.logsumexp(z_BV, -1)
            self.logp_M[block] = (
                z_BV.gather(1, self.target_M[block, None])[:, 0] - self.lse_M[block]
            )
            if self.entropy:
                logp_BV = z_BV - self.lse_M[block, None]
                self.entropy_M[block] = (
                    logp_BV.exp().mul_(logp_BV.clamp_min_(NOTHING)).sum(-1).neg_()
                )


class _Gradients:
    """Sums of gradients with respect to hidden states and head over the chunks of a batch."""

    def __init__(self, visits: _Visits, needs: tuple[bool, ...], *, in_place: bool) -> None:
        self.visits = visits
        head, hidden_MD = visits.head, visits.hidden_MD
        # The first chunk writes them, so nothing is cleared before; without any chunk there is
        # nothing to write.
        make = torch.empty_like if visits.chunks else torch.zeros_like
        self.hidden_MD = make(hidden_MD) if needs[0] else None
        self.weight_VD, self.fresh = (
            gradient_of(head.weight_VD, in_place) if needs[1] and visits.chunks else (None, True)
        )
        self.in_place = self.weight_VD is not None
        """The weight's gradient is where it belongs already."""
        if needs[1] and not self.in_place:
            self.weight_VD, self.fresh = make(visits.weight_VD, dtype=head.weight_VD.dtype), True
        self.bias_V = (
            torch.zeros_like(head.bias_V) if needs[2] and head.bias_V is not None else None
        )

    @property
    def gradients(self) -> list[Tensor | None]:
        """What autograd is to go on with, for hidden states, weight and bias."""
        hidden_MD = (
            None if self.hidden_MD is None else self.hidden_MD[: self.visits.target_M.shape[0]]
        )
        return [hidden_MD, None if self.in_place else self.weight_VD, self.bias_V]

    def add(
        self, rows: slice, raw_CV: Tensor, grad_logp_C: Tensor, grad_entropy_C: Tensor | None
    ) -> None:
        """Add a measured chunk, given the gradients of the loss in its log-probs and entropies.
        `raw_CV` is overwritten.
        """
        visits = self.visits
        own_CV = raw_CV[: rows.stop - rows.start]
        reader = None if self.bias_V is not None else visits.reader(raw_CV)
        if reader is not None:
            reader.gradient(
                own_CV,
                visits.factor_M[rows],
                visits.target_M[rows],
                visits.lse_M[rows],
                visits.entropy_M[rows],
                grad_logp_C,
                grad_entropy_C,
            )
        else:
            self._logits_gradient(rows, own_CV, grad_logp_C, grad_entropy_C)
        if len(raw_CV) > len(own_CV):
            raw_CV[len(own_CV) :] = 0.0  # filler
        every = visits.with_filler(rows)
        if self.hidden_MD is not None:
            operations().product(raw_CV, visits.weight_VD, out=self.hidden_MD[every])
        if self.weight_VD is not None:
            operations().add_product(
                self.weight_VD, raw_CV.T, visits.hidden_MD[every], fresh=self.fresh
            )
            self.fresh = False

    def _logits_gradient(
        self, rows: slice, raw_CV: Tensor, grad_logp_C: Tensor, grad_entropy_C: Tensor | None
    ) -> None:
        """Overwrite the logits with their gradient in torch's operations, for any head.

        The bias gets its gradient, too.
        """
        head = self.visits.head
        for block, raw_BV, z_BV in self.visits.blocks(rows, raw_CV):
            own = slice(block.start - rows.start, block.stop - rows.start)
            softcap_grad_BV = None
            if head.softcap is not None:
                softcap_grad_BV = (
                    1.0 - torch.tanh(raw_BV.to(z_BV.dtype) * (head.scale / head.softcap)).square()
                )
            grad_BV = self._block(
                block,
                z_BV,
                grad_logp_C[own],
                None if grad_entropy_C is None else grad_entropy_C[own],
            )
            if softcap_grad_BV is not None:
                grad_BV.mul_(softcap_grad_BV)
            if self.bias_V is not None:
                self.bias_V += grad_BV.sum(0)
            if grad_BV is not raw_BV:
                raw_BV.copy_(grad_BV)

    def _block(
        self, rows: slice, z_BV: Tensor, grad_logp_B: Tensor, grad_entropy_B: Tensor | None
    ) -> Tensor:
        """d logp / dz = onehot - p;  dH / dz = -p (log p + H).  In place of the tempered logits."""
        visits = self.visits
        factor_B = visits.factor_M[rows]
        grad_logp_B = grad_logp_B * factor_B
        logp_BV = z_BV.sub_(visits.lse_M[rows, None])
        if grad_entropy_B is None:
            grad_BV = logp_BV.exp_().mul_(-grad_logp_B[:, None])
        else:
            factor_BV = logp_BV.clamp_min(NOTHING).add_(visits.entropy_M[rows, None])
            factor_BV.mul_((grad_entropy_B * factor_B)[:, None]).add_(grad_logp_B[:, None])
            grad_BV = logp_BV.exp_().mul_(factor_BV).neg_()
        index_B = torch.arange(grad_BV.shape[0], device=grad_BV.device)
        grad_BV[index_B, visits.target_M[rows]] += grad_logp_B
        return grad_BV


def _outside(
    support: PositionSupport, start: int, rows: int, vocabulary: int, device: torch.device
) -> Tensor:
    """(C, V) True where a row's support does not reach; rows with an empty span have none."""
    begin = support.begin_M[start : start + rows + 1]
    lengths = begin.diff()
    row = torch.repeat_interleave(torch.arange(rows), lengths).to(device)
    outside = (lengths > 0).to(device)[:, None].expand(rows, vocabulary).clone()
    outside[row, support.ids_E[int(begin[0]) : int(begin[-1])]] = False
    return outside
