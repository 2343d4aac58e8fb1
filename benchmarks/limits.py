"""How close a step comes to what this machine can do: measured ceilings, and the share of them that each phase reaches.

    python benchmarks/limits.py --shape M --dtype bfloat16

Ceilings are measured here and now, on the products' own sizes: matrix products (GEMM) with as many rows as the update packs and
with as few as decoding has, reading and copying memory, and attention.  The update's share is the time that its products' FLOPs
would take at the GEMM ceiling (the faster of torch's products and ours) over the time it took; decoding is bound at every step by
reading the weights and the live keys and values, or by the products of its live rows, whichever takes longer.  FLOPs are counted
as in docs/performance.md: `2 N n + 4 L a c n + 2 V d m` forward, twice that backward.  Processor seconds throughout.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median as middle
from typing import Any

from _machine import save, significant
from _workload import Workload, add_options, ours, workload


def seconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """Median processor seconds of a call, after one to warm up."""
    run()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return max(middle(found), 1e-9)


def ceilings(work: Workload, rows: int, few: int, parameters: int) -> dict[str, float]:
    """GFLOP/s and GB/s, per processor second; reading is of as much as the weights are, which a cache may hold or not."""
    import torch
    from torch.nn import functional as F

    from groupwise.kernels import matrices
    from groupwise.rollout.pieces import product as prepared

    dtype = getattr(torch, work.dtype)
    wide = 4 * work.hidden

    def torchs(m: int, k: int, n: int) -> float:
        x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        return 2e-9 * m * k * n / seconds(lambda: F.linear(x, w))

    def product(m: int, k: int, n: int) -> float:
        """The fastest here: torch's, or the compiled kernel's."""
        x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        return max(torchs(m, k, n), 2e-9 * m * k * n / seconds(lambda: matrices.product(x, w.T)))

    def slopes(m: int, k: int, n: int) -> float:
        x, grad, total = torch.randn(m, k, dtype=dtype), torch.randn(m, n, dtype=dtype), torch.zeros(n, k)
        return 2e-9 * m * k * n / seconds(lambda: matrices.add_product(total, grad.T, x, fresh=False))

    def packed(m: int, k: int, n: int) -> float:
        """The same with few rows, for which weights are packed beforehand."""
        x, found = torch.randn(m, k, dtype=dtype), prepared(torch.randn(n, k), None, dtype)
        return max(product(m, k, n), 2e-9 * m * k * n / seconds(lambda: found(x)))

    numbers = torch.randn(parameters * dtype.itemsize // 4)
    into = torch.empty_like(numbers)
    length, width = 128, work.hidden // work.heads
    q, k, v = (torch.randn(8, work.heads, length, width, dtype=dtype) for _ in range(3))
    attention = 4e-9 * 8 * work.heads * length * length * width / 2
    return {
        "gemm": product(rows, work.hidden, wide),
        "gemm_torch": torchs(rows, work.hidden, wide),
        "gemm_weight_gradient": slopes(rows, work.hidden, wide),
        "gemm_head": product(min(rows, 512), work.hidden, work.vocab),
        "gemm_few_rows": packed(few, work.hidden, wide),
        "read": 1e-9 * numbers.nbytes / seconds(lambda: numbers.sum()),
        "copy": 2e-9 * numbers.nbytes / seconds(lambda: into.copy_(numbers)),
        "attention": attention / seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    }


def update_flops(work: Workload, body: int) -> dict[str, float]:
    """GFLOP of the update's forward and backward passes by kind, dead groups left out.  `body`: parameters of the blocks."""
    lengths = work.schedule()[~work.dead_prompts()]
    prompts, own = lengths.shape[0], lengths.sum()
    positions = prompts * (work.prompt - 1) + own
    seen = (lengths * (work.prompt - 1) + lengths * (lengths + 1) / 2).sum() + prompts * work.prompt**2 / 2
    return {
        "products": 3 * 2e-9 * body * float(positions),
        "attention": 3 * 4e-9 * work.layers * work.hidden * float(seen),
        "head": 3 * 2e-9 * work.vocab * work.hidden * float(own),
    }


def decode_bound(work: Workload, parameters: int, found: dict[str, float]) -> float:
    """Least seconds of decoding: each step reads the weights and the live keys and values, or is bound by its rows' products.

    A prompt's keys and values are read once for all of its completions.
    """
    size = 2 if work.dtype == "bfloat16" else 4
    lengths = work.schedule()
    token = 2 * work.layers * (work.hidden // work.heads) * (work.kv_heads or work.heads)
    total = 0.0
    for step in range(1, work.completion):
        live = lengths > step
        rows, prompts = int(live.sum()), int(live.any(1).sum())
        if rows:
            numbers = parameters + token * (rows * step + prompts * work.prompt)
            total += max(1e-9 * numbers * size / found["read"], 2e-9 * parameters * rows / max(found["gemm_few_rows"], 1e-9))
    return total


def main() -> None:
    """Measure ceilings, then a few steps, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    work = workload(options)
    side = ours(work)
    import torch

    parameters = sum(p.numel() for p in side.policy.model.parameters())
    embedded = sum(m.weight.numel() for m in side.policy.model.modules() if isinstance(m, torch.nn.Embedding))
    lengths = work.schedule()
    rows = int(work.prompts * (work.prompt - 1) + lengths.sum())
    limit = ceilings(work, rows, int((lengths > work.completion // 2).sum()), parameters)
    side.step()
    steps = [side.step()["cpu"] for _ in range(options.steps)]
    rollout, update = (middle([step[phase] for step in steps]) for phase in ("rollout", "update"))
    work_done = update_flops(work, parameters - embedded)
    at_limit = work_done["products"] / limit["gemm"] + work_done["head"] / limit["gemm_head"]
    prefill = 2e-9 * (parameters - embedded) * work.prompts * work.prompt / limit["gemm"]
    # Tied embeddings are read as the head, so every parameter is read once a step; learned positions and the input rows are not.
    bound = prefill + decode_bound(work, parameters, limit)
    shares = {
        "update_of_gemm": significant(at_limit / update),
        "update_of_torch": significant((work_done["products"] + work_done["head"]) / limit["gemm_torch"] / update),
        "rollout_of_bound": significant(bound / rollout),
    }
    print("ceilings (per processor second)")
    for name, value in limit.items():
        print(f"  {name:22s}{value:10.1f} {'GB/s' if name in ('read', 'copy') else 'GFLOP/s'}")
    print(f"update   {update:8.3f} s, its products at the ceiling {at_limit:8.3f} s: {shares['update_of_gemm']:.0%}", end="")
    print(f" ({shares['update_of_torch']:.0%} at the speed of torch's own)")
    print(f"rollout  {rollout:8.3f} s, its bound {bound:8.3f} s: {shares['rollout_of_bound']:.0%}")
    result = {
        "workload": asdict(work),
        "ceilings": {name: significant(value) for name, value in limit.items()},
        "gflop": {name: significant(value) for name, value in work_done.items()},
        "seconds": {"update": significant(update), "rollout": significant(rollout)},
        "shares": shares,
    }
    save(f"limits_{options.shape}_{work.dtype}_threads_{work.threads}", result)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
