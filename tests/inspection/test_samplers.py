"""Which sampler is faster, by numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from groupwise.inspection import samplers
from groupwise.inspection.samplers import SamplingWork, compare_on_gpu, native_estimate, token_bytes, vllm_estimate
from groupwise.models.shape import Shape

QWEN = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True}  # fmt: skip
SHAPE = Shape.of(QWEN, 494_000_000, dtype="bfloat16")
WORK = SamplingWork(prompts=8, group=8, rows=64, prompt_tokens=256.0, completion_tokens=256)
COPY = 4.0e12
"""Bytes a second."""


@pytest.mark.parametrize(("shared", "prompts"), [(True, 8), (False, 64)])
def test_a_token_reads_weights_and_the_keys_and_values_of_all_rows(shared: bool, prompts: int) -> None:
    """24 layers x 2 heads x 64 numbers x 2 bytes, keys and values: 12,288 bytes a token in the cache."""
    assert token_bytes(SHAPE, WORK, shared=shared) == 988_000_000 + 12_288 * (prompts * 256 + 64 * 128)


@pytest.mark.parametrize(
    ("changes", "live", "tokens"),
    [({}, 64, 256), ({"rows": 32}, 32, 512), ({"rows": 48}, 48, 512), ({"rows": 256}, 64, 256), ({"prompts": 1}, 8, 256)],
    ids=str,
)
def test_rows_are_filled_as_often_as_it_takes(changes: dict[str, int], live: int, tokens: int) -> None:
    work = replace(WORK, **changes)
    assert (work.live, work.tokens) == (live, tokens)


def test_small_models_wait_for_kernels_and_large_ones_for_memory() -> None:
    """Half a billion: 24 x 11 + 5 kernels of 4 us take 1.08 ms, its 1.1 GB 0.28 ms; ten times the weights take 2.5 ms."""
    small = native_estimate(SHAPE, WORK, COPY, 0, recorded=True)
    assert small.token == pytest.approx(269 * 4e-6)
    assert small.seconds == pytest.approx(256 * 269 * 4e-6)
    large = native_estimate(replace(SHAPE, parameters=4_940_000_000), WORK, COPY, 0, recorded=True)
    assert large.token == pytest.approx((9_880_000_000 + 12_288 * 10_240) / COPY)


def test_new_weights_are_counted_once_a_rollout() -> None:
    """vLLM: four passes over 988 MB at 4 TB/s; native: what it lays out is read and written."""
    assert vllm_estimate(SHAPE, WORK, COPY).weights == pytest.approx(4 * 988_000_000 / COPY)
    assert native_estimate(SHAPE, WORK, COPY, 400_000_000, recorded=True).weights == pytest.approx(2 * 400_000_000 / COPY)


@pytest.mark.parametrize(
    ("recorded", "prompt", "faster"),
    [(True, 256.0, "native"), (True, 20_000.0, "native"), (False, 256.0, "a colocated vLLM")],
)
def test_the_faster_one_is_named_with_the_source_of_every_number(recorded: bool, prompt: float, faster: str) -> None:
    """Layers that the native engine does not know are launched by Python: 24 x 96 of them take 41 ms a token."""
    text = compare_on_gpu(SHAPE, replace(WORK, prompt_tokens=prompt), COPY, 0, recorded=recorded)
    assert text.startswith(f"{faster} is faster on this GPU, by arithmetic")
    assert ("41 ms a token" in text) == (not recorded)
    for source in ("4 TB/s is measured here", "4 us a kernel on an H200", "are assumed"):
        assert source in text
    if prompt > 256.0:
        assert "3.1 GB" in text and "17 GB" in text, "shared prompts are read once, by vLLM for each row"


@pytest.mark.slow
def test_a_bandwidth_is_measured() -> None:
    """Both what is read and what is written."""
    assert 1e8 < samplers.copy_bandwidth(torch.device("cpu")) < 1e13
