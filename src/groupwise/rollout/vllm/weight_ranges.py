"""The ranges of a policy's weights that one process publishes, by their checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from groupwise.distributed import comm, fsdp, layout
from groupwise.models.policy import Policy
from groupwise.models.saving import merged
from groupwise.models.sharded import gathered

LONGEST_RANGE = 1 << 24
"""Numbers of the longest range, so that what is computed of one takes little memory."""
BITS = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
"""The integers that hold the bits of a number, by its bytes: torch's, and numpy's."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightRange:
    """Neighbouring numbers of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    """Where the numbers begin in the flat tensor."""
    numbers: Tensor
    """(n,): in the type and on the device of the policy."""

    def bits(self, dtype: torch.dtype) -> np.ndarray:
        """(n,): the bits of the numbers in another type, as integers in host memory."""
        signed, unsigned = BITS[dtype.itemsize]
        rounded = self.numbers.to(dtype).contiguous().view(signed)
        return rounded.cpu().numpy().view(unsigned)


@contextmanager
def own_ranges(policy: Policy) -> Iterator[Iterator[WeightRange]]:
    """The ranges that this process publishes, in the same order every time; all processes together
    have each number of the weights once.

    Processes that shard a model publish what they hold, and nothing is gathered; processes that
    all have it share the tensors out.  A sharded model is gathered where its weights are not those
    of its checkpoint: under an adapter, which is merged, where experts lie stacked, and where
    processes split matrices between them.
    """
    shards = policy.shards
    if policy.adapter is None and shards is not None and not policy.split:
        names = _checkpoint_names(policy.model)
        if names is not None:
            fsdp.reshard(policy.model)
            yield _split(_sharded_ranges(policy.model, names))
            return
    with gathered(policy) as whole:
        yield _split(_shared_out(whole))


def _split(ranges: Iterator[WeightRange]) -> Iterator[WeightRange]:
    """Ranges of at most `LONGEST_RANGE` numbers."""
    for one in ranges:
        for begin in range(0, one.numbers.numel(), LONGEST_RANGE):
            part = one.numbers[begin : begin + LONGEST_RANGE]
            yield WeightRange(one.name, one.shape, one.start + begin, part)


def _checkpoint_names(model: PreTrainedModel) -> dict[str, str] | None:
    """Names of parameters in a checkpoint; None where it holds other tensors than the model."""
    empty: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        empty[name] = torch.empty(parameter.shape, device="meta")
    origin = {id(tensor): name for name, tensor in empty.items()}
    names = {}
    for stored, tensor in revert_weight_conversion(model, dict(empty)).items():
        if id(tensor) not in origin:
            return None
        names[origin[id(tensor)]] = stored
    return names


def _sharded_ranges(model: PreTrainedModel, names: dict[str, str]) -> Iterator[WeightRange]:
    """The rows that this process holds of every parameter."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if not layout.is_first_copy(tensor):
            continue
        rows = layout.own_rows(tensor)
        width = tensor.numel() // max(tensor.shape[0], 1)
        own = fsdp.own(tensor).reshape(-1)
        yield WeightRange(names[name], tuple(tensor.shape), rows.start * width, own)


def _shared_out(policy: Policy) -> Iterator[WeightRange]:
    """Every tensor of a whole policy whose turn is this process's; adapters are merged."""
    model = merged(policy)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = revert_weight_conversion(model, parameters)
    for name, tensor in comm.share(list(weights.items())):
        yield WeightRange(name, tuple(tensor.shape), 0, tensor.reshape(-1))
