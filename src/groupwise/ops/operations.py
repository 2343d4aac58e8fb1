"""The operations that a package may compute faster than torch: one protocol, and torch's own way.

`Operations` computes everything with torch's public operations, on any device.  The package
`groupwise-cpu` subclasses it and overrides the methods that it has kernels for.
`ops/triton` does so for CUDA devices.  `operations()` is the only place that asks which of them are
there.

A method that answers None says that torch's operations are to be used, as the caller writes them.

T positions of a stream   R rows   D model width   H heads   K key-value heads   W head width
V vocabulary   M, N sides of a product   P prompts
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from groupwise.ops.decoding import DecodeOperations
from groupwise.ops.query import PackedStream, Query

SWITCH = "GROUPWISE_KERNELS"
INSTALL = "pip install --no-build-isolation ./packages/groupwise-cpu"

PART_NUMBERS = 1 << 20
"""Most elements of a partial product on a CPU, before it is added to a total of a wider type."""


class BlockedAttention(Protocol):
    """Attention of decoded tokens over keys and values that lie block by block."""

    block: int
    """Tokens that lie together."""

    def keep_entries(
        self, key_NMKW: Tensor, value_NMKW: Tensor, slab: tuple[Tensor, Tensor], first: int
    ) -> None:
        """Write tokens 0 .. M - 1 of N entries from `first` on."""
        ...

    def rows(self, rows_P: Sequence[Sequence[int]], prompt_length_P: Sequence[int]) -> Any:
        """Describe which rows belong to which prompt, for `decode`."""
        ...

    def decode(
        self,
        query: Query,
        own: tuple[Tensor, Tensor],
        prompt: tuple[Tensor, Tensor],
        rows: Any,
        length_R: Tensor,
    ) -> Tensor:
        """Attend with one new token per row, (R, H, W).  Its key and value are written into `own`.

        Before its first token an entry may hold anything.   length_R: own tokens, the new one
        included (int64).
        """
        ...


class DecodedRows(NamedTuple):
    """Rows that draw their next token: which prompt each is behind, and how long all are."""

    length_R: Tensor
    """Own tokens, the new one included."""
    position_R: Tensor
    """Positions of the new tokens."""
    first_R: Tensor | None
    """The first position that each new token sees; None: all before it."""
    entry_R: Tensor
    """The prompt of each row."""
    place_R: Tensor
    """The place of each row among those of its prompt."""
    member_PN: Tensor
    """The rows of each prompt, up to N; others there may be any."""
    end_P: Tensor
    """Tokens of prompts."""
    most_own: int
    """No row has more own tokens than this, which takes no look at the device."""
    most_prompt: int
    """No prompt has more tokens than this."""


DecodeAttention = Callable[
    [Query, tuple[Tensor, Tensor], tuple[Tensor, Tensor], DecodedRows], Tensor
]
"""Attends with one new token for each row: query, the rows' own keys and values (entries, K,
tokens, D), those of prompts, rows -> (R, H, E).

The new key and value are written into the rows' own.
"""


class LogitsReader(Protocol):
    """Reads a chunk of logits in one pass, for what takes torch many."""

    least_rows: int
    """Rows that a chunk has at least, where there are as many."""

    def measure(
        self,
        raw_CV: Tensor,
        factor_C: Tensor,
        target_C: Tensor,
        lse_C: Tensor,
        logp_C: Tensor,
        entropy_C: Tensor | None,
    ) -> None:
        """Fill log-sum-exps, log-probs of the targets and entropies (nats) of `factor * raw`."""
        ...

    def gradient(
        self,
        raw_CV: Tensor,
        factor_C: Tensor,
        target_C: Tensor,
        lse_C: Tensor,
        entropy_C: Tensor,
        grad_logp_C: Tensor,
        grad_entropy_C: Tensor | None,
    ) -> None:
        """Overwrite the logits with their gradient."""
        ...


class AttentionCall(NamedTuple):
    """An autograd Function that attends in a packed stream, and what it is given.

    The first three arguments are queries, keys and values, (1, heads, T, D) on a CPU.  The
    Function saves these, its output and its log-sum-exps (1, H, T) in this order, and then whatever
    else it reads.
    """

    function: Any
    arguments: tuple[Any, ...]


TokenSampler = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Logits (R, V), uniform numbers (R,) float64 in [0, 1), temperature -> ids and log-probs (R,).

A token is the first at which the cumulative probability passes the uniform number, never one of
probability 0.  At temperature 0 it is the likeliest (the first of several), and its log-probability
that at temperature 1.
"""


class Operations:
    """Everything in torch's operations."""

    def product(
        self,
        a_MK: Tensor,
        b_KN: Tensor,
        bias_N: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `a b + bias`, of matrices of one type and in it."""
        if bias_N is None:
            return torch.mm(a_MK, b_KN, out=out)
        return torch.addmm(bias_N, a_MK, b_KN, out=out)

    def add_product(self, total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, fresh: bool) -> None:
        """Add `a b` to a total whose type may be wider than that of the factors.

        fresh: the total is not written yet, so that it becomes the product.
        """
        if total_MN.dtype != a_MK.dtype:
            self._add_in_parts(total_MN, a_MK, b_KN, fresh)
        elif fresh:
            torch.mm(a_MK, b_KN, out=total_MN)
        else:
            total_MN.addmm_(a_MK, b_KN)

    def _add_in_parts(self, total_MN: Tensor, a_MK: Tensor, b_KN: Tensor, fresh: bool) -> None:
        """Add a product of a wider type.

        CUDA's products give it unrounded.  On a CPU some rows at a time exist in the factors' type
        before they are widened.
        """
        if total_MN.is_cuda:
            if fresh:
                torch.mm(a_MK, b_KN, out_dtype=total_MN.dtype, out=total_MN)
            else:
                total_MN.add_(torch.mm(a_MK, b_KN, out_dtype=total_MN.dtype))
            return
        rows = max(1, PART_NUMBERS // total_MN.shape[1])
        for total_PN, a_PK in zip(total_MN.split(rows), a_MK.split(rows), strict=True):
            part_PN = a_PK @ b_KN
            if fresh:
                total_PN.copy_(part_PN)
            else:
                total_PN.add_(part_PN)

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Return `weight * x / sqrt(mean(x^2) + eps)` over the last dimension, computed in float32
        and rounded to `dtype`.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale_T = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale_T).to(dtype) * weight_D

    def fused_modules(
        self, model: nn.Module, *, keep: bool = True, apart: Collection[nn.Module] = ()
    ) -> AbstractContextManager[None]:
        """Run known modules of a model in faster forms while inside: the same functions to
        rounding.

        keep: keep copies of weights in a lower precision.   apart: modules that stay as they are.
        """
        return nullcontext()

    def stream_attention(self, stream: PackedStream, query: Query) -> Tensor | None:
        """Attend in a packed stream, (1, H, T, W), differentiable once; None: not taken."""
        call = self.stream_function(stream, query)
        return None if call is None else call.function.apply(*call.arguments)

    def stream_function(self, stream: PackedStream, query: Query) -> AttentionCall | None:
        """Return what `stream_attention` calls; None: not taken."""
        return None

    def logits_reader(self, raw_CV: Tensor) -> LogitsReader | None:
        """Return a reader of such logits; None: torch's operations read them."""
        return None

    def token_sampler(self, logits_RV: Tensor) -> TokenSampler | None:
        """Return a sampler of tokens from such logits; None: torch's operations sample."""
        return None

    def block_kernels(self, *tensors: Tensor, width: int | None = None) -> Any:
        """Return kernels of what lies between the products of such tensors, without gradients;
        None: torch's operations compute it.

        width: what has to be whole vectors instead of the rows.
        """
        return None

    def gpu_kernels(self, x: Tensor) -> Any:
        """Return kernels of blocks whose products over one input are joined; None: they stay
        apart, and torch's operations compute what lies around them.
        """
        return None

    def decode_attention(self, query: Query) -> DecodeAttention | None:
        """Return the attention of new tokens over such keys and values, token by token; None:
        torch's operations attend.
        """
        return None

    def blocked_attention(self, key_TKW: Tensor) -> BlockedAttention | None:
        """Return the attention that reads such keys, and values like them, block by block; None:
        they lie token by token.
        """
        return None

    def decode_operations(
        self, tables: Sequence[Tensor], widths: Sequence[int], *, dtype: torch.dtype
    ) -> DecodeOperations:
        """Return the operations that one model is decoded with.

        tables: embeddings, of the weights' type and on their device.   widths: lengths of rows
        beside the embeddings': the MLP's inner width, and the head width (half of it for rotary
        positions).   dtype: the type of the products.
        """
        return DecodeOperations(dtype)


_chosen: Operations | None = None
_reason: str | None = None


def operations() -> Operations:
    """Return the package's operations where it is installed, else torch's."""
    global _chosen, _reason
    if _chosen is None:
        _chosen, _reason = _choose()
    return _chosen


def absence() -> str | None:
    """Return why there are no kernels, in words and with the remedy; None if there are."""
    operations()
    return _reason


CUDA = "groupwise.ops.triton.operations"
"""The module of kernels for CUDA devices.  Nothing imports it where there is none."""


def _choose() -> tuple[Operations, str | None]:
    """Load what computes faster here, or say why there is nothing for CPUs."""
    if os.environ.get(SWITCH, "on") == "off":
        return Operations(), f"{SWITCH}=off"
    chosen, reason = _for_cpus()
    if torch.cuda.is_available() and find_spec("triton") is not None:
        chosen = import_module(CUDA).TritonOperations(chosen)
    return chosen, reason


def _for_cpus() -> tuple[Operations, str | None]:
    """Load the package, or say why it is not used."""
    try:
        import groupwise_cpu  # pyright: ignore[reportMissingImports]

        ours, installed = version("groupwise"), version("groupwise-cpu")
    except ModuleNotFoundError:  # also where an empty folder is left of it
        return Operations(), (
            f"the package groupwise-cpu is not installed: with a C++ compiler here, run `{INSTALL}`"
            " in the clone"
        )
    except ImportError as error:
        return Operations(), str(error)
    if ours != installed:
        return Operations(), (
            f"groupwise-cpu is {installed}, and groupwise {ours}: run `{INSTALL}` in the clone"
        )
    make = getattr(groupwise_cpu, "cpu_operations", None)
    if make is None:
        return Operations(), f"groupwise-cpu is older than groupwise: run `{INSTALL}` in the clone"
    return make(), None
