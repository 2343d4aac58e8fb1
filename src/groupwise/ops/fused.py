"""Operations whose blocks run fused: what every package of kernels derives its own from.

`ops/functional.py` has the operations of a block, and `models/fused.py` puts them in the place of
its modules.  Neither is imported where torch's operations compute.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from importlib import import_module

import torch
from torch import Tensor, nn

from groupwise.ops.functional import rms_norm
from groupwise.ops.operations import Operations

MODULES = "groupwise.models.fused"
"""The module that knows the classes of models, which are downstream of operations."""


class FusedOperations(Operations):
    """Torch's operations, in fewer passes over a block's activations."""

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """See `Operations`."""
        return rms_norm(x, weight_D, eps, dtype)

    def fused_modules(
        self, model: nn.Module, *, keep: bool = True, apart: Collection[nn.Module] = ()
    ) -> AbstractContextManager[None]:
        """See `Operations`."""
        return import_module(MODULES).fused_modules(model, keep=keep, apart=apart)
