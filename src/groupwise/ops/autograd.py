"""What autograd refuses of its own operations, and ours must refuse themselves: gradients would be
silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def first_derivative(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """An operation's `backward` that cannot be differentiated again, and says so:
    `create_graph=True` raises RuntimeError.

    torch's `once_differentiable` raises only where what comes in needs a gradient itself; a sum's
    gradient does not, and what is found is then taken for a constant.
    """

    @wraps(backward)
    def guarded(ctx: Any, *grads: Tensor | None) -> Gradients:
        if torch.is_grad_enabled():  # in a backward pass: with create_graph alone
            raise RuntimeError("no second derivative is written out here: leave create_graph out")
        return backward(ctx, *grads)

    return guarded


def version(tensor: Tensor | None) -> int | None:
    """How often a tensor was changed in place, as far as torch counts: not through `.data`, nor in
    inference mode (None).
    """
    return None if tensor is None or tensor.is_inference() else tensor._version


def unchanged(tensors: tuple[Tensor | None, ...], versions: list[int | None]) -> None:
    """Raise RuntimeError if one of the tensors has been counted as changed since the forward pass,
    as torch's operations do.
    """
    if versions != [version(tensor) for tensor in tensors]:
        raise RuntimeError(
            "a weight was changed in place between a forward pass and its backward pass"
        )
