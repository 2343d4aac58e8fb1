"""The limit meter: which share of a step's work was useful, and how long an ideal step would take on this machine.

Of a step with groups g, whose prompts have m tokens and whose completions i have n tokens, w of them written by the policy:

    limit/shared            sum_g (G - 1) m: prompt tokens that siblings did not compute again when they were sampled
    limit/dead              tokens of completions that no update trained
    limit/recomputed        completion tokens of forward passes of the policy that had been made before: scoring ahead of the
                            updates, entropies for a mask, activations recomputed for the backward pass
    limit/useful            useful FLOPs over spent FLOPs
    limit/bytes_per_token   bytes that ideal decoding reads, per token that it decodes
    time/ideal              seconds that the step takes at the machine's ceiling

FLOPs of a forward pass over positions p, each of which sees c_p tokens, with logits at k of them:
`2 B |p| + 4 L a sum_p c_p + 2 V d k` (B parameters of the blocks, L layers, attention a wide, V tokens in the vocabulary, d the
model's width).

    sampling    each prompt once (m positions, logits at the last), then w - 1 positions of every completion, logits at each
    an update   three forward passes over each trained group's m - 1 prompt positions, once, and n of each completion
    reference   one forward pass over the same positions of every group
    useful      sampling and reference of what was trained, and the updates
    spent       sampling and reference of everything, the updates, and what was recomputed

An ideal step computes prompts, reference and updates at the ceiling's FLOPs per second, and decodes all completions side by side:
each of its steps reads the weights and the live keys and values once (a prompt's once for its group) at the ceiling's bytes per
second, or takes its FLOPs' time, whichever is longer.  Rewards, and everything between, take it no time.  Several processes share
it evenly.  How a step was really cut into micro-batches is left out of what it spent.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.ops import matmul
from groupwise.records import Step
from groupwise.utils import files
from groupwise.utils.cache import cache_folder

CEILINGS = "ceilings.json"
"""What machines were measured at, in the user's cache; delete it to measure anew."""
REPEATS = 5
"""Of each measurement; the fastest counts."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the square matrices that are multiplied."""
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes that are copied."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The highest speeds that were measured on a machine."""

    flops: float
    """Per second, in matrix products of the model's type."""
    bytes: float
    """Per second, read and written by a copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meter:
    """Measures steps of one run."""

    shape: Shape
    ceiling: Ceiling
    updates: int = 1
    """Passes over each rollout."""
    recompute: bool = False
    """Activations are computed again for the backward pass."""
    threshold: bool = False
    """Entropies are computed ahead of each pass."""
    processes: int = 1

    def read(self, step: Step) -> Step:
        """The step with the meter's metrics; as it is where no completion was sampled."""
        if not step.groups:
            return step
        work = _work_of(self.shape, step)
        passed = self.updates * (int(self.recompute) + int(self.threshold))
        computed = work.sampled + work.looked * work.references + self.updates * 3 * work.update
        spent = computed + work.scored + passed * work.update
        useful = work.sampled_trained + work.looked_trained * work.references + self.updates * 3 * work.update
        bytes_read, decoding = _decoding(self.shape, self.ceiling, step)
        decoded = sum(int(rollout.trained.sum()) for group in step.groups for rollout in group.rollouts)
        passes = (computed - work.decoded) / self.ceiling.flops
        measured = {
            "limit/shared": float(sum((len(group.rollouts) - 1) * group.prompt.tokens.size for group in step.groups)),
            "limit/dead": float(work.tokens - work.tokens_trained),
            "limit/recomputed": float(work.tokens_scored + passed * work.tokens_trained),
            "limit/useful": useful / spent if spent else 0.0,
            "limit/bytes_per_token": bytes_read / max(decoded, 1),
        }
        ideal = (passes + decoding) / self.processes
        return replace(step, metrics={**step.metrics, **measured}, timings={**step.timings, "ideal": ideal})


def meter_of(policy: Policy, ceiling: Ceiling, *, updates: int, recompute: bool, threshold: bool, processes: int) -> Meter | None:
    """The meter of a run; None for a mixture of experts, each of whose tokens takes a part of the weights."""
    config = policy.model.config.to_dict()
    if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    return Meter(
        shape=Shape.of_policy(policy),
        ceiling=ceiling,
        updates=updates,
        recompute=recompute,
        threshold=threshold,
        processes=processes,
    )


# ---------------------------------------------------------------- FLOPs


def forward_flops(shape: Shape, positions: float, seen: float, logits: float) -> float:
    """FLOPs of a forward pass.   seen: tokens that the positions see, added up.   logits: positions that get them."""
    blocks = shape.parameters - shape.outside
    attention = 4 * shape.layers * shape.heads * shape.head_width
    return 2.0 * blocks * positions + attention * seen + 2.0 * shape.vocabulary * shape.hidden * logits


def stretch(begin: int, count: int) -> float:
    """Tokens that `count` positions see, added up, the first of which stands behind `begin` others.

    >>> stretch(3, 2)  # the fourth sees 4, the fifth 5
    9.0
    """
    return count * begin + count * (count + 1) / 2.0


@dataclass(slots=True)
class _Work:
    """FLOPs and completion tokens of a step, by what they were for; `trained`: those of completions that were trained."""

    sampled: float = 0.0
    sampled_trained: float = 0.0
    decoded: float = 0.0
    """Of `sampled` those behind the first token."""
    looked: float = 0.0
    """One forward pass over everything."""
    looked_trained: float = 0.0
    scored: float = 0.0
    update: float = 0.0
    """One forward pass over what an update trains."""
    references: int = 0
    tokens: int = 0
    tokens_trained: int = 0
    tokens_scored: int = 0


def _work_of(shape: Shape, step: Step) -> _Work:
    work = _Work()
    weights = step.columns.get("weight", ())
    for place, group in enumerate(step.groups):
        m, lengths = group.prompt.tokens.size, [len(rollout) for rollout in group.rollouts]
        written = [int(rollout.trained.sum()) for rollout in group.rollouts]
        used = [bool(place < len(weights) and weights[place][i].size) for i in range(len(lengths))]
        prompt = forward_flops(shape, m, stretch(0, m), 1)
        decoding = [forward_flops(shape, max(n - 1, 0), stretch(m, max(n - 1, 0)), max(w - 1, 0))
                    for n, w in zip(lengths, written, strict=True)]  # fmt: skip
        work.sampled += prompt + sum(decoding)
        work.decoded += sum(decoding)
        logits = [
            int(np.count_nonzero(weights[place][i])) if use else w for i, (use, w) in enumerate(zip(used, written, strict=True))
        ]
        own = [forward_flops(shape, n, stretch(m - 1, n), k) for n, k in zip(lengths, logits, strict=True)]
        before = forward_flops(shape, m - 1, stretch(0, m - 1), 0)
        work.looked += before + sum(own)
        work.tokens += sum(lengths)
        if any(used):
            trained = before + sum(flops for flops, use in zip(own, used, strict=True) if use)
            work.sampled_trained += prompt + sum(flops for flops, use in zip(decoding, used, strict=True) if use)
            work.looked_trained += trained
            work.update += trained
            work.tokens_trained += sum(n for n, use in zip(lengths, used, strict=True) if use)
        if "scored_logp" in group.signals:
            work.scored += before + sum(own)
            work.tokens_scored += sum(lengths)
        work.references = max(work.references, int("reference_logp" in group.signals))
    return work


def _decoding(shape: Shape, ceiling: Ceiling, step: Step) -> tuple[float, float]:
    """Bytes that ideal decoding of a step's completions reads, and its seconds: one step of it after the other."""
    written = [[int(rollout.trained.sum()) for rollout in group.rollouts] for group in step.groups]
    longest = max((max(one) for one in written), default=0)
    if longest < 2:
        return 0.0, 0.0
    weights = (shape.parameters - shape.outside + shape.vocabulary * shape.hidden) * shape.bytes_per_product
    pair = 2 * shape.layers * shape.kv_heads * shape.head_width * shape.bytes_per_product
    at_T = np.arange(1, longest)
    rows_T, prompts_T, seen_T = (np.zeros(longest - 1) for _ in range(3))
    for group, lengths in zip(step.groups, written, strict=True):
        live_T = sum((n > at_T).astype(np.float64) for n in lengths)
        m = group.prompt.tokens.size
        rows_T += live_T
        prompts_T += m * (live_T > 0)
        seen_T += live_T * (m + at_T)
    bytes_T = weights + pair * (rows_T * at_T + prompts_T)
    flops_T = np.array([forward_flops(shape, rows, seen, rows) for rows, seen in zip(rows_T, seen_T, strict=True)])
    seconds = np.maximum(bytes_T / ceiling.bytes, flops_T / ceiling.flops)
    return float(bytes_T.sum()), float(seconds.sum())


# ---------------------------------------------------------------- the ceiling


@cache
def ceiling(device: str, dtype: str) -> Ceiling:
    """The ceiling of this machine, measured once (a fraction of a second) and kept in the user's cache.

    device: `cpu` or `cuda`.   dtype: of products, `float32` or `bfloat16`.   On a CPU, of as many threads as torch now has.
    """
    file = cache_folder() / CEILINGS
    key = f"{_processor(device)}, {torch.get_num_threads()} threads, {dtype}, torch {torch.__version__}"
    known = _known(file)
    try:
        return Ceiling(flops=float(known[key]["flops"]), bytes=float(known[key]["bytes"]))
    except (KeyError, TypeError, ValueError):
        highest = measured(device, getattr(torch, dtype))
        files.write(file, json.dumps({**known, key: {"flops": highest.flops, "bytes": highest.bytes}}, indent=1).encode())
        return highest


def measured(device: str, dtype: torch.dtype) -> Ceiling:
    """Measure the ceiling: the fastest of some products of square matrices, torch's and ours, and of some copies."""
    n = SIDE[device]
    with torch.no_grad():
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        ways: list[Callable[[], Any]] = [lambda: torch.nn.functional.linear(a, b), lambda: matmul.product(a, b.T)]
        product = min(_fastest(way, device) for way in ways)
        one = torch.zeros(COPIED[device] // 4, device=device)
        other = torch.empty_like(one)
        copy = _fastest(lambda: other.copy_(one), device)
    return Ceiling(flops=2.0 * n**3 / product, bytes=2.0 * COPIED[device] / copy)


def _fastest(run: Callable[[], Any], device: str) -> float:
    def once() -> float:
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return max(time.perf_counter() - began, 1e-9)

    once()  # to warm up
    return min(once() for _ in range(REPEATS))


def _known(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _processor(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines: Sequence[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.processor()}, {cores} cores"
