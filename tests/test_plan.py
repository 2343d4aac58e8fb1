"""The memory plan against what a backward pass really keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from groupwise.models.fused import fused_modules
from groupwise.models.policy import Policy
from groupwise.packing import pack
from groupwise.plan import Shape, kept_per_block, memory, microbatch
from groupwise.records import Batch


def kept(policy: Policy, batch: Batch) -> int:
    """Bytes of different storages that the blocks of a forward pass keep, parameters and their casts left out."""
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    model = policy.model
    shapes = {shape for parameter in model.parameters() for shape in (parameter.shape, parameter.shape[::-1])}
    with fused_modules(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.forward(batch)
    return sum(size for size, tensor in found.values() if tensor.shape not in shapes)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_block_keeps_is_predicted(family: str, autocast: bool, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = replace(tiny_policy(family), autocast=autocast)
    batch = pack(random_samples(groups=5), 1 << 20)[0]
    shape = Shape.of_policy(policy)
    predicted = batch.layout.total * shape.layers * kept_per_block(shape)
    assert kept(policy, batch) == pytest.approx(predicted, rel=0.15)


def test_micro_batches_follow_the_model_and_not_below_a_floor() -> None:
    config = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 1000}
    small, large = (Shape.of(config, parameters, dtype="float32") for parameters in (10**5, 10**8))
    assert microbatch(small) < microbatch(large)
    room = 64 << 20
    assert microbatch(small) == room // (8 * kept_per_block(small)), "a small model is given 64 MB"
    assert microbatch(Shape.of(config, 10**8, dtype="bfloat16")) > microbatch(large)


def test_rows_of_the_rollout_and_of_the_head_are_not_mixed_up() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    shape = Shape.of(config, 10**5, dtype="float32")
    found = memory(shape, microbatch=5000, rows=8, prompts=2, prompt_tokens=16, completion_tokens=32)
    assert found.cache == 2 * 2 * 64 * (2 * 16 + 8 * 32) * 4 + 8 * 100 * 12
    assert memory(shape, microbatch=5000).cache == 0
