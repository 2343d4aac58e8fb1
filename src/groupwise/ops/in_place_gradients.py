"""Gradients of matrices, summed where the optimizer reads them.

The head's gradient is as large as its matrix; where the embedding is the same matrix, autograd
makes its gradient just as large, adds the two, and adds their sum to that of the micro-batches
before: three or four matrices of V x D, and as many passes over them.  Inside `summed_in_place` the
head's products and the embedding's rows are added to the parameter's `.grad` itself, and so are the
weight gradients of linear layers: made of bfloat16 numbers for a float32 matrix, they are then
never rounded.

V vocabulary, or another matrix's rows   D width
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_open: ContextVar[bool] = ContextVar("summed_in_place", default=False)


@contextmanager
def summed_in_place(on: bool = True) -> Iterator[None]:
    """Backward passes of what is computed inside end in `.grad`, whichever thread runs them.

    `torch.autograd.grad` does too, and then finds nothing of what is summed here.  Not for weights
    that are spread over processes.
    """
    before = _open.set(on)
    try:
        yield
    finally:
        _open.reset(before)


def summing() -> bool:
    """True inside `summed_in_place`; asked in a forward pass."""
    return _open.get()


def is_summed(weight: Tensor, on: bool) -> bool:
    """Return True if gradients of `weight`, a parameter or the first rows of one, are summed in
    place.

    on: what `summing` said in the forward pass.   Those that others listen to (hooks), or whose
        gradients are summed in another precision, are left to autograd."""
    parameter = weight if weight._base is None else weight._base
    plain = isinstance(parameter, nn.Parameter) and parameter.requires_grad and parameter.is_leaf
    if not on or not plain or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    place = (weight.data_ptr(), weight.shape[1:], weight.stride())
    return place == (parameter.data_ptr(), parameter.shape[1:], parameter.stride())


def gradient_of(weight: Tensor, on: bool) -> tuple[Tensor | None, bool]:
    """Return the sum that a gradient of `weight` may be added to, or None (see `is_summed`), and
    whether that sum still holds nothing but noise.
    """
    if not is_summed(weight, on):
        return None, False
    parameter = weight if weight._base is None else weight._base
    rows = weight.shape[0]
    total = parameter.grad
    if total is not None:
        return total[:rows], False
    total = parameter.grad = torch.empty_like(parameter)
    if rows < parameter.shape[0]:
        total[rows:] = 0.0
    return total[:rows], True
