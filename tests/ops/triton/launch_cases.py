"""What a GPU is asked with the Triton kernels and without, counted on the stand-in, which wants a process of its own.

The kernels are not run: a launch leaves whatever memory held, which changes no count."""

from __future__ import annotations

from typing import Any

import launch_counts
import pytest
import stand_in_device
from stand_in_device import NAME
from transformers import Qwen2Config, Qwen2ForCausalLM
from triton_launches import launches_heard

from groupwise.ops import operations as operations_module
from groupwise.ops.triton.head import TritonLogitsReader
from groupwise.ops.triton.operations import TritonOperations


def test_dropping_the_kernels_in_takes_launches_from_a_layer_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(name: str, args: Any) -> None:
        for listener in stand_in_device.listeners:
            listener(name, args, {}, None)

    monkeypatch.setattr(TritonLogitsReader, "least_rows", 1)  # as many chunks as without them
    counts = []
    rest = operations_module._for_cpus()[0]
    with stand_in_device.stand_in(), launches_heard(hear, compute=False):
        for chosen in (rest, TritonOperations(rest, NAME)):
            monkeypatch.setattr(operations_module, "_chosen", chosen)
            counts.append((launch_counts.layer(Qwen2ForCausalLM, Qwen2Config), launch_counts.chunk()))
    (torch_layer, torch_chunk), (layer, chunk) = counts
    assert layer["forward"] < torch_layer["forward"] - 20 and layer["backward"] < torch_layer["backward"] - 20, counts
    assert chunk["launches"] < torch_chunk["launches"] - 15 and chunk["bytes a logit"] < torch_chunk["bytes a logit"] / 4, counts
