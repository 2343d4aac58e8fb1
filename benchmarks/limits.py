"""How close a step comes to what this machine can do: measured ceilings, and the share of them that each phase reaches.

    python benchmarks/limits.py --shape M --dtype bfloat16

Ceilings are measured in turn with the steps: matrix products (GEMM) of the update's sizes and of decoding's, with its few rows,
reading and copying memory, and attention.  The update's ceiling is the fastest of its products, torch's or ours.  Decoding is what
a rollout takes beyond its first tokens (weights packed, prompts computed, records written); at every step it is bound by reading
the weights and the live keys and values, or by the FLOPs of its live rows, whichever takes longer; a rollout's bound is that and
its prompts' FLOPs.  A ceiling is what one product was measured at, not what the processor could do at its best.

FLOPs are counted as `2 N n + 4 L a c n + 2 V d m` forward, twice that backward: products, attention (N parameters of the blocks,
L layers, attention a wide over c tokens, n positions) and the head (V tokens, d wide, on m positions).  Processor seconds
throughout, on a GPU elapsed ones (`--shape 0.5B`).  Every figure is the median of the steps', a share's too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import median as middle
from typing import Any

from _in_process import ours
from _machine import Meter, save, significant
from _workload import Workload, add_options, workload


def seconds(device: str, run: Callable[[], Any], repeats: int = 3) -> float:
    """Median processor seconds of a call, after one to warm up; of a GPU's, seconds, of as many calls as take it some 20 ms."""
    run()
    meter = Meter(device)

    def once(calls: int) -> float:
        with meter.phase("calls"):
            for _ in range(calls):
                run()
        return max(meter.read()[clock(device)]["calls"] / calls, 1e-9)

    calls = 1 if device == "cpu" else max(1, int(0.02 / once(1)))
    return middle([once(calls) for _ in range(repeats)])


def clock(device: str) -> str:
    """The clock that counts."""
    return "cpu" if device == "cpu" else "wall"


def ceilings(work: Workload, rows: int, few: int, parameters: int) -> dict[str, float]:
    """GFLOP/s and GB/s, per processor second; reading is of as much as the weights are, which a cache may hold or not."""
    import torch
    from torch.nn import functional as F

    from groupwise.ops.operations import operations

    dtype = getattr(torch, work.dtype)
    wide = 4 * work.hidden
    randn = partial(torch.randn, device=work.device)
    timed = partial(seconds, work.device)

    def torchs(m: int, k: int, n: int) -> float:
        x, w = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype)
        return 2e-9 * m * k * n / timed(lambda: F.linear(x, w))

    def product(m: int, k: int, n: int) -> float:
        """The fastest here: torch's, or the compiled kernel's."""
        x, w = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype)
        return max(torchs(m, k, n), 2e-9 * m * k * n / timed(lambda: operations().product(x, w.T)))

    def weight_gradient(m: int, k: int, n: int) -> float:
        x, grad, total = randn(m, k, dtype=dtype), randn(m, n, dtype=dtype), torch.zeros(n, k, device=work.device)
        return 2e-9 * m * k * n / timed(lambda: operations().add_product(total, grad.T, x, fresh=False))

    def packed(m: int, k: int, n: int) -> float:
        """The same with few rows, for which weights are packed beforehand."""
        x, weight = randn(m, k, dtype=dtype), randn(n, k)
        found = operations().decode_operations([weight], (), dtype=dtype).product([weight], [None])
        return max(product(m, k, n), 2e-9 * m * k * n / timed(lambda: found(x)))

    numbers = randn(parameters * dtype.itemsize // 4)
    into = torch.empty_like(numbers)
    length, width = 128, work.hidden // work.heads
    q, k, v = (randn(8, work.heads, length, width, dtype=dtype) for _ in range(3))
    attention = 4e-9 * 8 * work.heads * length * length * width / 2
    return {
        "gemm": product(rows, work.hidden, wide),
        "gemm_torch": torchs(rows, work.hidden, wide),
        "gemm_weight_gradient": weight_gradient(rows, work.hidden, wide),
        "gemm_head": product(min(rows, 512), work.hidden, work.vocab),
        "gemm_few_rows": packed(few, work.hidden, wide),
        "read": 1e-9 * numbers.nbytes / timed(lambda: numbers.sum()),
        "copy": 2e-9 * numbers.nbytes / timed(lambda: into.copy_(numbers)),
        "attention": attention / timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
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


def update_bound(flops: dict[str, float], found: dict[str, float]) -> float:
    """Seconds of the update at its ceiling: all of its FLOPs as fast as the fastest of its products."""
    return sum(flops.values()) / max(found[name] for name in ("gemm", "gemm_weight_gradient", "gemm_head"))


def prefill_bound(work: Workload, body: int, found: dict[str, float]) -> float:
    """Seconds of the prompts at the ceiling: their FLOPs, each prompt once for all of its completions."""
    flops = work.prompts * work.prompt * (2 * body + score(work) * work.prompt / 2)
    return 1e-9 * flops / found["gemm"]


def decode_bound(work: Workload, parameters: int, found: dict[str, float]) -> float:
    """Seconds of decoding at its ceilings: a step reads the weights and the live keys and values, or is bound by its FLOPs.

    A prompt's keys and values are read once for all of its completions.  parameters: of the blocks and the head.
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
            flops = rows * (2 * parameters + score(work) * (work.prompt + step))
            total += max(1e-9 * numbers * size / found["read"], 1e-9 * flops / max(found["gemm_few_rows"], 1e-9))
    return total


def score(work: Workload) -> int:
    """FLOPs of a token that sees one other, in all layers."""
    return 4 * work.layers * work.hidden


def first_tokens(work: Workload, side: Any) -> float:
    """Seconds of a rollout that ends with its first tokens: weights prepared, prompts computed, records written."""
    from _ours import prompts_of

    from groupwise.records import Sampling
    from groupwise.rollout.native.engine import NativeEngine

    engine = NativeEngine(side.policy, max_rows=work.prompts * work.group)
    meter = Meter(work.device)
    with meter.phase("all"):
        for _ in engine.generate(prompts_of(work), group_size=work.group, sampling=Sampling(max_new_tokens=1), seed=0):
            pass
    return meter.read()[clock(work.device)]["all"]


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
    body = parameters - embedded
    work_done = update_flops(work, body)
    for _ in range(2):
        side.step()
    limits, spent, bounds = [], [], []
    for _ in range(options.steps):
        limits.append(ceilings(work, rows, int((lengths > work.completion // 2).sum()), parameters))
        side.step()  # its data come back into the caches
        step, first = side.step()[clock(work.device)], first_tokens(work, side)
        spent.append({"update": step["update"], "rollout": step["rollout"], "decode": step["rollout"] - first})
        decode = decode_bound(work, body + work.vocab * work.hidden, limits[-1])
        bounds.append(
            {
                "update": update_bound(work_done, limits[-1]),
                "rollout": prefill_bound(work, body, limits[-1]) + decode,
                "decode": decode,
            }
        )

    def middles(every: list[dict[str, float]]) -> dict[str, float]:
        return {name: middle([one[name] for one in every]) for name in every[0]}

    limit, seconds_of, bound = middles(limits), middles(spent), middles(bounds)
    torchs = [sum(work_done.values()) / found["gemm_torch"] / one["update"] for found, one in zip(limits, spent, strict=True)]
    share = middles([{name: b[name] / s[name] for name in b} for b, s in zip(bounds, spent, strict=True)])
    shares = {
        "update_of_gemm": significant(share["update"]),
        "update_of_torch": significant(middle(torchs)),
        "rollout_of_bound": significant(share["rollout"]),
        "decode_of_bound": significant(share["decode"]),
    }
    print("ceilings (per processor second)")
    for name, value in limit.items():
        print(f"  {name:22s}{value:10.1f} {'GB/s' if name in ('read', 'copy') else 'GFLOP/s'}")
    for name, value in seconds_of.items():
        print(f"{name:9s}{value:8.3f} s, its bound {bound[name]:8.3f} s: {share[name]:.0%}")
    print(f"update, with torch's own product as the ceiling: {shares['update_of_torch']:.0%}")
    result = {
        "workload": asdict(work),
        "ceilings": {name: significant(value) for name, value in limit.items()},
        "gflop": {name: significant(value) for name, value in work_done.items()},
        "seconds": {phase: significant(value) for phase, value in seconds_of.items()},
        "shares": shares,
    }
    save(f"limits_{options.shape}_{work.dtype}_threads_{work.threads}", result)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
