"""What `gpu_hour.py` measures in its own process: probes, phases of a step, updates and decoding of random models."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from _workload import EOS, PAD
from tokenizers import Tokenizer, models
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, LoraSettings, ModelSettings, OptimizerSettings
from groupwise.errors import ConfigError
from groupwise.models import lora
from groupwise.models.backbone import checkpointing
from groupwise.models.compiled_blocks import CompiledBlocks, refusal_of
from groupwise.models.loading import make_policy
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.loss import step_loss
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import update

PEAK = 989e12
"""FLOP/s of an H100's and an H200's matrix units in bfloat16, as NVIDIA states them; MFU is of this."""
GROUP = 8


@dataclass(frozen=True)
class Shape:
    """The shape of a model with random weights."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    inner: int
    vocabulary: int = 151_936

    @property
    def body(self) -> int:
        """Parameters of the blocks' products."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)


SHAPES = {
    "0.5B": Shape("qwen2", 896, 24, 14, 2, 64, 4864),
    "1.7B": Shape("qwen3", 2048, 28, 16, 8, 128, 6144),
    "4B": Shape("qwen3", 2560, 36, 32, 8, 128, 9728),
}
TINY = Shape("qwen3", 64, 2, 4, 2, 16, 128, 512)


def random_policy(shape: Shape, device: str, *, rank: int = 0, dtype: Any = "autocast") -> Policy:
    """A policy with random weights, made on the device; its EOS cannot be drawn.   rank: of an adapter; 0: none."""
    config = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[shape.family](
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        intermediate_size=shape.inner,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({EOS: 0, PAD: 1}, unk_token=PAD)), eos_token=EOS, pad_token=PAD
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    policy = make_policy(model, tokenizer, ModelSettings(device=device, dtype=dtype))  # type: ignore[arg-type]
    policy = replace(policy, vocabulary=shape.vocabulary, eos_ids=(shape.vocabulary,))
    return lora.adapt(policy, LoraSettings(rank=rank), base="random", seed=0) if rank else policy


def with_compiled_blocks(policy: Policy) -> Policy:
    """The same policy, whose blocks are compiled in updates.  Raises ConfigError where that cannot be."""
    reason = refusal_of(policy)
    if reason is not None:
        raise ConfigError(reason)
    return replace(policy, blocks=CompiledBlocks())


def samples_of(shape: Shape, positions: int, *, prompt: int, seed: int = 0) -> list[Sample]:
    """Groups of 8 completions, together of about so many packed positions, with lengths of their own for every seed."""
    rng = np.random.default_rng(seed)
    groups = max(1, positions // 2048)
    mean = max(2, (positions // groups - prompt) // GROUP)
    made = []
    for group in range(groups):
        ids = rng.integers(2, shape.vocabulary, prompt)
        for member in range(GROUP):
            count = int(rng.integers(mean // 2, mean + mean // 2 + 1))
            made.append(
                Sample(
                    group=str(group),
                    prompt=ids,
                    completion=rng.integers(2, shape.vocabulary, count),
                    weight=np.full(count, 1 / (count * groups * GROUP)),
                    advantage=np.full(count, 1.0 if member % 2 else -1.0),
                    behavior_logp=np.full(count, -np.log(shape.vocabulary)),
                )
            )
    return made


class Updates:
    """Updates of a policy, each on samples of other lengths."""

    def __init__(self, shape: Shape, policy: Policy, positions: int, *, prompt: int, budget: int, recompute: bool) -> None:
        self.shape, self.policy, self.positions, self.prompt = shape, policy, positions, prompt
        self.budget, self.recompute, self.seed = budget, recompute, 0
        self.optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-7), 10**6)
        self.algorithm = resolve("grpo", GroupSettings(group_size=GROUP, prompts_per_step=max(1, positions // 2048)), positions)
        self.adapter = any(not parameter.requires_grad for parameter in policy.model.parameters())
        self.samples: list[Sample] = []

    def __call__(self) -> None:
        """Make one update."""
        self.seed += 1
        self.samples = samples_of(self.shape, self.positions, prompt=self.prompt, seed=self.seed)
        with checkpointing(self.policy, self.recompute):
            loss = step_loss(self.policy, self.algorithm, self.samples, max_tokens_per_microbatch=self.budget)
            update(self.policy, loss, loss.samples, self.optimizer, max_tokens_per_microbatch=self.budget)

    def flops(self) -> float:
        """FLOPs of the last update: 6 a trained weight and position, 4 under an adapter; what is computed again does not count."""
        shape, trained = self.shape, 4 if self.adapter else 6
        lengths = np.array([sample.completion.size for sample in self.samples], dtype=float)
        groups = len(self.samples) // GROUP
        positions = lengths.sum() + groups * (self.prompt - 1)
        seen = (lengths * (self.prompt - 1) + lengths**2 / 2).sum() + groups * self.prompt**2 / 2
        attention = 12 * shape.layers * shape.heads * shape.head * seen
        return trained * (shape.body * positions + shape.vocabulary * shape.hidden * lengths.sum()) + attention


def wait(device: str) -> None:
    """Wait for what a GPU was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def walls(device: str, run: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of several calls, after one to warm up."""
    run()
    found = []
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        run()
        wait(device)
        found.append(time.perf_counter() - begin)
    return found


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
"""How the names of calls begin that launch a kernel, or a graph of them."""


def watched(device: str, run: Callable[[], Any], repeats: int = 3) -> dict[str, Any]:
    """Host or device: wall seconds without a profiler; and under it the kernels' seconds, launches, waits and allocations.

    busy: kernels' seconds over wall seconds; near 1 the device is the limit, far below it the host."""
    wall = median(walls(device, run, repeats))
    on_gpu = device == "cuda"
    allocations = torch.cuda.memory_stats()["num_device_alloc"] if on_gpu else 0
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as watch:
        run()
        wait(device)
    events = watch.key_averages()
    if on_gpu:
        # A range that torch or an optimizer has named stands there beside the kernels inside it.
        on_device = [event for event in events if "CUDA" in str(event.device_type) and not event.is_user_annotation]
        kernels = [(event.key, event.self_device_time_total, event.count) for event in on_device]
    else:
        kernels = [(event.key, event.self_cpu_time_total, event.count) for event in events]
    seconds = 1e-6 * sum(time_ for _, time_, _ in kernels)
    counts = {event.key: event.count for event in events}
    longest = sorted(kernels, key=lambda kernel: -kernel[1])[:15]
    return {
        "wall": wall,
        "kernels": seconds,
        "busy": seconds / wall,
        "launches": sum(count for name, count in counts.items() if not on_gpu or name.startswith(LAUNCHES)),
        "waits": sum(counts.get(name, 0) for name in WAITS),
        "device allocations": torch.cuda.memory_stats()["num_device_alloc"] - allocations if on_gpu else 0,
        "longest": [{"name": name[:120], "seconds": 1e-6 * time_, "calls": count} for name, time_, count in longest],
    }


@contextmanager
def peak(device: str, into: dict[str, Any]) -> Iterator[None]:
    """The most bytes that were allocated and reserved inside, all that was there included."""
    gc.collect()  # what an earlier measurement has left, one that failed above all
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield
    if device == "cuda":
        into["peak allocated"] = torch.cuda.max_memory_allocated()
        into["peak reserved"] = torch.cuda.max_memory_reserved()


def generate(policy: Policy, engine: NativeEngine, rows: int, prompt: int, tokens: int, top_k: int = 0) -> int:
    """Sample `tokens` tokens of so many rows; returns how many were drawn."""
    group = min(rows, GROUP)
    rng = np.random.default_rng(0)
    prompts = []
    for number in range(rows // group):
        ids = rng.integers(2, policy.vocabulary, prompt)
        prompts.append(Prompt(id=f"{number:04}", tokens=ids, text="", row={}))
    engine.send_weights(engine.version + 1)
    drawn = engine.generate(prompts, group_size=group, sampling=Sampling(max_new_tokens=tokens, top_k=top_k), seed=0)
    return sum(len(rollout) for rollouts in drawn for rollout in rollouts)


def decoded(device: str, policy: Policy, rows: int, *, prompt: int, tokens: int, top_k: int = 0) -> dict[str, Any]:
    """Milliseconds a token of a rollout behind its first, and tokens a second of the whole of it."""
    engine = NativeEngine(policy, max_rows=rows)
    engine.send_weights(0)
    whole = median(walls(device, lambda: generate(policy, engine, rows, prompt, tokens, top_k), 3))
    first = median(walls(device, lambda: generate(policy, engine, rows, prompt, 1, top_k), 3))
    return {"ms a token": 1e3 * (whole - first) / (tokens - 1), "first token": first, "tokens a second": rows * tokens / whole}


def probes(device: str) -> dict[str, Callable[[], Any]]:
    """Operations that this device's torch may lack or compute otherwise; each gives numbers or raises."""
    from groupwise.ops.attention import StreamAttention
    from groupwise.ops.operations import Operations
    from groupwise.ops.query import Query
    from groupwise.records import Layout

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def attention() -> dict[str, float]:
        """Two flash calls against float32: values and gradients, relative to their size."""
        layout = Layout(start=(0, 40, 70, 95), length=(40, 30, 25, 20), prefix=(-1, 0, 0, -1), total=115)
        heads = [randn(115, heads, 64).requires_grad_() for heads in (8, 2, 2)]
        wide = [head.detach().float().requires_grad_() for head in heads]
        outs = [StreamAttention(layout)(Query(0, *inputs, 0.125)) for inputs in (heads, wide)]
        weight = torch.randn_like(outs[1])
        gradients = [torch.autograd.grad((out.float() * weight).sum(), x) for out, x in zip(outs, (heads, wide), strict=True)]
        found = {}
        for name, ours, exact in zip(
            ("out", "query", "key", "value"), (outs[0], *gradients[0]), (outs[1], *gradients[1]), strict=True
        ):
            found[name] = float(((ours.float() - exact).norm() / exact.norm()).detach())
        return found

    def wide_product() -> float:
        a, b, total = randn(64, 512), randn(512, 64), torch.zeros(64, 64, device=device)
        Operations().add_product(total, a, b, fresh=True)
        return float((total - a.float() @ b.float()).abs().max())

    def add_into_wide_product() -> float:
        a, b, total = randn(64, 512), randn(512, 64), torch.zeros(64, 64, device=device)
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return float((total - a.float() @ b.float()).abs().max())

    def eager_add() -> float:
        x = torch.zeros(8, device=device)
        return 1e6 * median(walls(device, lambda: [x.add_(1.0) for _ in range(1000)], 3)) / 1000

    def triton_launch() -> float:
        from groupwise.ops.triton.gate import gelu

        x = randn(8, 64)
        return 1e6 * median(walls(device, lambda: [gelu(x) for _ in range(1000)], 3)) / 1000

    def kernel_in_a_graph() -> float:
        from groupwise.rollout.native.cuda.cuda_graphs import recorded

        x = torch.zeros(8, device=device)

        def adds() -> None:
            for _ in range(1000):
                x.add_(1.0)

        graph = recorded(adds)
        return 1e6 * median(walls(device, graph.replay, 3)) / 1000

    found: dict[str, Callable[[], Any]] = {
        "flash attention in two calls, relative errors": attention,
        "product of bfloat16 into float32, error": wide_product,
        "microseconds of an eager add_": eager_add,
    }
    if device == "cuda":
        found["microseconds of a Triton launch"] = triton_launch
        found["microseconds of a kernel in a graph"] = kernel_in_a_graph
        found["addmm of bfloat16 into float32, error"] = add_into_wide_product
    return found
