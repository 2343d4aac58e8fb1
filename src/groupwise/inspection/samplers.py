"""Which sampler is the fastest for a recipe on this machine, by arithmetic, for `groupwise check`.

A decoded token reads all weights and the keys and values of all rows, and takes a number of kernels
in a row.  The bytes follow from the model and the recipe; the bandwidth is measured here; the time
of a kernel was measured on an H200.  On a CPU products, not bytes, are the limit, and what was
measured there stands in the place of arithmetic.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from groupwise.models.shape import Shape

RECORDED_KERNEL = 4e-6
"""Seconds of a kernel in a recorded graph, measured on an H200: 3.9 ms a token of 954 kernels."""
LAUNCHED_KERNEL = 18e-6
"""Seconds of a kernel that Python launches, measured there."""
LAYER_KERNELS, LAYER_OPERATIONS = 11, 96
"""Kernels of a decoded token in a layer: of the native engine, counted on a stand-in for a GPU, and
about the same of vLLM; and of a model's own modules with an adapter, counted as well.
"""
DRAW_KERNELS = 5
"""Kernels behind the last layer: its norm, the head and the draw."""
WEIGHT_PASSES = 4
"""Times that weights are read or written until a vLLM has them: laid side by side, then loaded."""
COPIED = 256 << 20
"""Bytes that are copied to measure a bandwidth."""
CPU_RATIOS = "native drew 2.2 to 3.8 times as many tokens as vLLM's CPU build"
"""Three models of 3M to 124M parameters on one core with AVX-512 (docs/performance.md)."""
GENERATE_RATIO = 4.8
"""How much longer a rollout of transformers' `generate` took than native, on an H200
(benchmarks/results/gpu.json); on a CPU it was 3 to 6 times.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingWork:
    """What one process samples for a step."""

    prompts: int
    group: int
    rows: int
    """Completions decoded at the same time."""
    prompt_tokens: float
    completion_tokens: int
    """The longest."""

    @property
    def live(self) -> int:
        """Count the completions that are decoded at the same time."""
        return min(self.rows, self.prompts * self.group)

    @property
    def tokens(self) -> int:
        """Count the tokens that are drawn one after the other.

        They are those of the longest completion, each time that the rows are filled.
        """
        return -(-self.prompts * self.group // self.rows) * self.completion_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTime:
    """The seconds of a rollout by one sampler."""

    token: float
    """Seconds of one token of all rows."""
    tokens: int
    weights: float
    """Seconds until it has the weights of a step."""

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole rollout."""
        return self.tokens * self.token + self.weights


def token_bytes(shape: Shape, work: SamplingWork, *, shared: bool) -> float:
    """Bytes that one token of all rows reads: the weights, and keys and values of half a completion
    on average.

    shared: a prompt's keys and values are read once for its group.
    """
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_width * shape.bytes_per_product
    prompts = work.live
    if shared:
        prompts = -(-work.live // work.group)
    read = prompts * work.prompt_tokens + work.live * work.completion_tokens / 2
    return shape.parameters * shape.bytes_per_product + per_token * read


def native_estimate(
    shape: Shape, work: SamplingWork, bandwidth: float, prepared: int, *, recorded: bool
) -> RolloutTime:
    """The native engine on a GPU.   bandwidth: bytes a second.   prepared: bytes that it lays out.

    recorded: it knows the model's layers, so its kernels are replayed; else Python launches them.
    """
    kernels, kernel = shape.layers * LAYER_OPERATIONS, LAUNCHED_KERNEL
    if recorded:
        kernels, kernel = shape.layers * LAYER_KERNELS + DRAW_KERNELS, RECORDED_KERNEL
    read = token_bytes(shape, work, shared=True) / bandwidth
    return RolloutTime(
        token=max(read, kernels * kernel), tokens=work.tokens, weights=2 * prepared / bandwidth
    )


def vllm_estimate(shape: Shape, work: SamplingWork, bandwidth: float) -> RolloutTime:
    """A colocated vLLM, or a server on a GPU of the same kind.   bandwidth: bytes a second."""
    kernels = shape.layers * LAYER_KERNELS + DRAW_KERNELS
    read = token_bytes(shape, work, shared=False) / bandwidth
    sent = shape.parameters * shape.bytes_per_product
    return RolloutTime(
        token=max(read, kernels * RECORDED_KERNEL),
        tokens=work.tokens,
        weights=WEIGHT_PASSES * sent / bandwidth,
    )


def compare_on_gpu(
    shape: Shape, work: SamplingWork, bandwidth: float, prepared: int, *, recorded: bool
) -> str:
    """Say which sampler is faster on this GPU, and why.   See `native_estimate`."""
    native = native_estimate(shape, work, bandwidth, prepared, recorded=recorded)
    vllm = vllm_estimate(shape, work, bandwidth)
    faster = "native" if native.seconds <= vllm.seconds else "a colocated vLLM"
    shared = token_bytes(shape, work, shared=True)
    each = token_bytes(shape, work, shared=False)
    how = "recorded graphs" if recorded else "launched one by one: its layers are not known"
    return (
        f"{faster} is faster on this GPU, by arithmetic: native"
        f" {native.seconds:.2g} s a rollout ({native.token * 1e3:.2g} ms a token of"
        f" {work.live} rows, {shared / 1e9:.2g} GB, {how}), a colocated vLLM {vllm.seconds:.2g} s"
        f" ({vllm.token * 1e3:.2g} ms, {each / 1e9:.2g} GB, as it reads a prompt for each row; and"
        f" {vllm.weights:.2g} s for new weights), transformers' generate about"
        f" {GENERATE_RATIO * native.seconds:.2g} s. Servers on other GPUs take the time of a"
        " colocated vLLM, beside training with rollout.engine.ahead. Bandwidth"
        f" {bandwidth / 1e12:.2g} TB/s is measured here, {RECORDED_KERNEL * 1e6:.0f} us a kernel on"
        " an H200; vLLM's kernels are assumed to be as many"
    )


def compare_on_cpu(tokens: int, seconds: float, engine: str) -> str:
    """Say which sampler is faster on a CPU.   tokens, seconds: what `engine` has drawn here."""
    drawn = f"{engine} drew {tokens / seconds:,.0f} tokens a second here"
    return (
        f"native is faster on a CPU: {drawn} (measured by this check, with its first calls);"
        f" {CPU_RATIOS}, and 3 to 6 times as many as transformers' generate (measured on another"
        " machine, docs/performance.md). Servers are for GPUs"
    )


def copy_bandwidth(device: torch.device) -> float:
    """Measure bytes a second of a device's memory: what a copy reads and writes."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = float("inf")
    for _ in range(5):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * COPIED / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
