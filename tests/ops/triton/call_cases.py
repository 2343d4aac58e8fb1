"""Where the Triton kernels are called: a model trained and sampled with them, and what a GPU is asked with them and without.

Run by `test_kernels.py`, as `kernel_cases.py` is."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import flash_attention
import launch_counts
import numpy as np
import pytest
import torch
from launches import MEMORY, VIEWS
from planted import TOKENIZER
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GlmConfig, GlmForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from triton_launches import launches_heard

from groupwise.config.settings import ModelSettings
from groupwise.data.packing import pack
from groupwise.models.backbone import checkpointing
from groupwise.models.loading import make_policy
from groupwise.models.passes import BatchPass, forward, packed_for, packed_pass
from groupwise.models.policy import Policy
from groupwise.ops import operations as operations_module
from groupwise.ops.attention import StreamAttention
from groupwise.ops.cuda import stream_attention, varlen_attention
from groupwise.ops.decoding import Buffers
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import chosen_logprobs
from groupwise.ops.operations import Operations
from groupwise.ops.triton.operations import TritonOperations
from groupwise.records import Sample, Sampling
from groupwise.rollout.native.decode_attention import Decode, DecodeSize, LiveRows
from groupwise.rollout.native.forward import SpecialisedForward
from groupwise.rollout.native.kv_cache import KVCache
from groupwise.rollout.sampling import draw

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
MODELS = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
LATER_MODELS = {"glm": (GlmForCausalLM, partial(GlmConfig, pad_token_id=0, eos_token_id=1))}
"""Models that are not decoded here.  GLM rotates a part of each head, so that its queries lie head by head."""
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter launches")


def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the kernels, as where the package for CPUs is not installed."""
    monkeypatch.setattr(operations_module, "_chosen", TritonOperations(Operations(), DEVICE))


class Launched(TorchDispatchMode):
    """Counts torch's operations that launch a kernel, and the interpreter's launches, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name not in VIEWS and name not in MEMORY:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def heard(counter: Launched) -> Any:
    """Have the interpreter's launches counted, where it is the interpreter."""
    if not INTERPRETED:
        return nullcontext()
    return launches_heard(lambda name, _: counter.names.append(name))


def policy_of(kind: str, layers: int, dtype: Any = "float32", device: Any = DEVICE) -> Policy:
    """A random model."""
    torch.manual_seed(0)
    model, config = (MODELS | LATER_MODELS)[kind]
    made = model(config(vocab_size=launch_counts.VOCABULARY, num_hidden_layers=layers, **launch_counts.WIDE))
    policy = make_policy(made.to(device), TOKENIZER, ModelSettings(device=device, dtype=dtype))
    return replace(policy, vocabulary=launch_counts.VOCABULARY)


def sampled(kind: str, layers: int, *, fixed: bool, steps: int) -> tuple[list[torch.Tensor], list[str]]:
    """Log-probs of tokens that rows of two prompts draw, and what the last token launches."""
    policy = policy_of(kind, layers)
    device, size = torch.device(DEVICE), DecodeSize(4, 2, 2, 16, 64) if fixed else None
    logps = []
    with torch.no_grad():
        forward = SpecialisedForward(policy, 64)
        prompts, own = KVCache(2, 16, most_tokens=16), KVCache(4, 64, most_tokens=64)
        generator = torch.Generator().manual_seed(1)
        for number in range(layers):
            for cache in (prompts, own):
                shape = (*cache.capacity, forward.shared, forward.width)
                numbers = torch.randn(shape, generator=generator).to(device, forward.dtype)
                slab = cache.layer(number, numbers)
                slab.write(0, numbers[..., forward.order_W], numbers)
        attend = Decode(prompts, own, device, size)
        attend.arrange(LiveRows([9, 16], [0, 0, 1], [3, 0, 5]))
        token_R = torch.arange(4 if fixed else 3, device=device)
        uniform_R = torch.tensor([0.1, 0.5, 0.9, 0.3], dtype=torch.float64, device=device)[: len(token_R)]
        for _ in range(steps):
            counter = Launched()
            with counter, heard(counter):
                hidden_RD = forward.hidden(token_R, attend.next(), attend)
                token_R, logp_R, _ = draw(forward.logits(hidden_RD), uniform_R, Sampling(max_new_tokens=8))
            logps.append(logp_R[:3])
    return logps, counter.names


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_draws_what_it_draws_without_them(kind: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for triton in (False, True):
        monkeypatch.setattr(operations_module, "_chosen", Operations())
        if triton:
            chosen(monkeypatch)
        logps, _ = sampled(kind, 2, fixed=fixed, steps=3)
        results.append(torch.stack(logps))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@needs_interpreter
@pytest.mark.parametrize(("kind", "launches"), [("qwen2", 10), ("qwen3", 11)])
def test_a_decoded_token_is_few_launches_a_layer(kind: str, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is the difference between a model of two and of one."""
    chosen(monkeypatch)
    (_, one), (_, two) = (sampled(kind, layers, fixed=True, steps=2) for layers in (1, 2))
    assert len(two) - len(one) == launches, (one, two)
    assert one.count("draw_kernel") == 1


def trained(kind: str, dtype: str) -> list[torch.Tensor]:
    """The loss of some rows and its gradients, in the fused forms."""
    policy = policy_of(kind, 1, dtype)
    (batch,) = pack(launch_counts.samples(), 10_000, device=DEVICE)
    with operations_module.operations().fused_modules(policy.model), summed_in_place(), policy.precision():
        hidden_MD = forward(policy, batch).hidden_PD[:40]
        target_M, temperature_M = batch.tokens_P[1:41], torch.full((40,), 0.8, device=DEVICE)
        logp_M, entropy_M = chosen_logprobs(hidden_MD, policy.head, target_M, temperature_M, entropy=True)
        assert entropy_M is not None
        (logp_M.sum() + 0.1 * entropy_M.sum()).backward()
    return [logp_M.detach(), *(parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None)]


@needs_interpreter
@pytest.mark.parametrize("kind", ["qwen3", *LATER_MODELS])
def test_attention_of_a_gpu_trains_as_that_of_a_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention is here its definition, which takes float32 too; its outputs lie as its queries do."""
    monkeypatch.setattr(operations_module, "_chosen", Operations())
    expected = trained(kind, "float32")
    chosen(monkeypatch)
    monkeypatch.setattr(varlen_attention, "FLASH_TYPES", (torch.float32,))
    monkeypatch.setattr(varlen_attention, "_flash", flash_attention.forward)
    monkeypatch.setattr(varlen_attention, "_flash_backward", flash_attention.backward)
    monkeypatch.setattr(StreamAttention, "__call__", stream_attention.attend)
    counter = Launched()
    with heard(counter):
        ours = trained(kind, "float32")
    assert "merge_parts_kernel" in counter.names
    for one, exact in zip(ours, expected, strict=True):
        assert (one - exact).norm() < 1e-4 * exact.norm()


def long_samples() -> list[Sample]:
    """Groups whose prompts and completions are longer than a block of flash attention, and one of two short completions."""
    rng, made = np.random.default_rng(0), []
    for group, (prompt, counts) in enumerate([(300, (200, 150, 7, 260)), (40, (500, 90)), (700, (1, 2))]):
        ids = rng.integers(2, launch_counts.VOCABULARY, prompt)
        for count in counts:
            ones = np.ones(count)
            completion = rng.integers(2, launch_counts.VOCABULARY, count)
            made.append(
                Sample(group=str(group), prompt=ids, completion=completion, weight=ones, advantage=ones, behavior_logp=-ones)
            )
    return made


def updated(kind: str, dtype: str, device: str, recompute: bool) -> list[torch.Tensor]:
    """The log-probs of long streams in an update's pass, and the gradients of their sum."""
    policy = policy_of(kind, 2, dtype, device)

    def loss(passed: BatchPass) -> tuple[torch.Tensor, torch.Tensor]:
        head = passed.head(fused=True)
        for chunk in head:
            chunk.loss = chunk.logp_C.sum() / 1000.0  # however the rows are cut into chunks
        return head.total(), head.logp_M

    with checkpointing(policy, recompute):
        result = packed_pass(policy, loss, packed_for(policy, long_samples(), 4096), learn=True)
    gradients = [parameter.grad for parameter in policy.model.parameters() if parameter.grad is not None]
    return [seen_P.cpu().double() for seen_P in (*(seen_P for _, seen_P in result.columns), *gradients)]


@pytest.mark.skipif(INTERPRETED, reason="compares the kernels of a GPU with a CPU")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [*MODELS, *LATER_MODELS])
def test_long_streams_are_trained_on_a_gpu_as_on_a_cpu(kind: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 by all of a GPU's kernels, in float32 by a CPU's operations."""
    monkeypatch.setattr(operations_module, "_chosen", Operations())
    expected = updated(kind, "float32", "cpu", False)
    chosen(monkeypatch)
    ours = updated(kind, "autocast", DEVICE, recompute)
    assert len(ours) == len(expected) > 20
    for one, exact in zip(ours, expected, strict=True):
        assert (one - exact).norm() < 5e-2 * exact.norm()


KERNELS = {"float32": "rotary_kernel", "autocast": "heads_backward_kernel"}
"""A kernel that training launches: where weights have a copy in another type, products are joined."""


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_trained_as_without_them(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_module, "_chosen", Operations())
    expected = trained(kind, dtype)
    chosen(monkeypatch)
    counter = Launched()
    with heard(counter):
        ours = trained(kind, dtype)
    assert len(ours) == len(expected) > 10
    assert not INTERPRETED or {KERNELS[dtype], "gated_backward_kernel"} < set(counter.names), "the blocks are fused"
    for one, exact in zip(ours, expected, strict=True):
        difference = (one - exact).norm() / exact.norm()
        assert difference < (1e-4 if dtype == "float32" else 4e-2), difference


def test_weights_that_are_prepared_again_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded operations read the new ones."""
    chosen(monkeypatch)
    policy, buffers = policy_of("qwen3", 1), Buffers(copy_all=True)
    with torch.no_grad():
        first = SpecialisedForward(policy, 16, buffers=buffers)
        before = (first.norm.weight, first.layers[0].norm.weight, first.rotary.cos_PW)
        policy.model.model.norm.weight.fill_(2.0)
        second = SpecialisedForward(policy, 16, buffers=buffers)
    after = (second.norm.weight, second.layers[0].norm.weight, second.rotary.cos_PW)
    assert [x.data_ptr() for x in before] == [x.data_ptr() for x in after]
    assert bool((before[0] == 2.0).all())
