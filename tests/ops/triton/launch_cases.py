"""What a GPU is asked with the Triton kernels, counted on the stand-in, which wants a process of its own.

The kernels are not run: a launch leaves whatever memory held, which changes no count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import launch_counts
import pytest
import stand_in_device
from stand_in_device import NAME
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from triton_launches import launches_heard

from groupwise.ops import operations as operations_module
from groupwise.ops.operations import Operations
from groupwise.ops.triton.head import TritonLogitsReader
from groupwise.ops.triton.operations import TritonOperations

BUDGETS: dict[str, dict[str, int]] = {
    "layer of Qwen2": {"forward": 13, "forward bytes": 18_102, "backward": 22, "backward bytes": 29_183},
    "layer of Qwen3": {"forward": 13, "forward bytes": 17_965, "backward": 22, "backward bytes": 29_692},
    "layer of Qwen3 computed again": {"forward": 13, "forward bytes": 17_965, "backward": 32, "backward bytes": 39_461},
    "layer of Qwen3 with an adapter": {"forward": 33, "forward bytes": 26_228, "backward": 54, "backward bytes": 37_421},
    "chunk of the head": {"launches": 12, "bytes a logit": 16},
}
"""Launches, and bytes a position of the stream or a logit, as `test_launches.py` counts them without the kernels.

Asked were 14 launches forward and 25 backward for a layer, and 10 for a chunk.  Of a chunk's 12 four are the loss that this count
is given: its sum, its gradient (two) and its part of the total.  Eight are the head's: three products and the sum of one of them,
what is read off the logits, their gradient, and copies of the log-probs and entropies that the loss is differentiated by.  Of the
bytes 6 are those kernels', the others the products'."""
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "layer of Qwen2": lambda: launch_counts.layer(Qwen2ForCausalLM, Qwen2Config),
    "layer of Qwen3": lambda: launch_counts.layer(Qwen3ForCausalLM, Qwen3Config),
    "layer of Qwen3 computed again": lambda: launch_counts.layer(Qwen3ForCausalLM, Qwen3Config, recompute=True),
    "layer of Qwen3 with an adapter": lambda: launch_counts.layer(Qwen3ForCausalLM, Qwen3Config, rank=4),
    "chunk of the head": launch_counts.chunk,
}


@pytest.mark.parametrize("part", BUDGETS)
def test_a_gpu_is_asked_for_as_much_as_the_budget_says(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget above the count would let the next change spend the difference."""

    def hear(name: str, args: Any) -> None:
        for listener in stand_in_device.listeners:
            listener(name, args, {}, None)

    monkeypatch.setattr(TritonLogitsReader, "least_rows", 1)  # chunks of as many rows as without them
    with stand_in_device.stand_in(), launches_heard(hear, compute=False):
        monkeypatch.setattr(operations_module, "_chosen", TritonOperations(Operations(), NAME))
        assert PARTS[part]() == BUDGETS[part]
