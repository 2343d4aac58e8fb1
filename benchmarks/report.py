"""benchmarks/figures.md from benchmarks/results: nothing on that page is typed in.

python benchmarks/report.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "figures.md"

INTRO = """\
# Figures of the benchmarks

`python benchmarks/report.py` makes this page from `benchmarks/results/`. The benchmark that a section names wrote its figures. Docs
say what they mean for a user: [performance](../docs/performance.md).

`cpu` is the processor time of all threads, `wall` the elapsed time. On a machine that does other work too, processor time is the
steadier of the two. `load` is the machine's load when a result was written. Above the number of cores the figures are rough.

`GROUPWISE_KERNELS=off` runs the same without the compiled kernels. Both sides of a comparison may use pages of 2 MB for large
tensors (`THP_MEM_ALLOC_ENABLE=0` turns them off). TRL is no faster with them and takes more memory.

`--device cuda`, and `--shape 0.5B` or `1.5B` (the shapes of Qwen2.5), measure a GPU.
"""
TRL = """\
## Against TRL

`benchmarks/vs_trl.py` runs Groupwise and TRL 1.16's own trainer in turn (A B A B), on the same model file, prompts and completion
lengths, after both gave the same log-probs and gradients for the same completions. A ratio is TRL's median over ours: 3 means three
times as fast, or a third of the memory (peak above what is resident before the first step).

`distill` is a step of distillation (reverse KL over the whole vocabulary) to a teacher of twice the width, against TRL's
`DistillationTrainer`; instead of log-probs the losses are compared. TRL's trainer knows no groups: to it every completion is a row
of its own. Rows with one completion per prompt have nothing that could be shared.

A row of `qwen3_vl` has a picture of the task `shapes` in front of every prompt, another at every step. Both sides leave the image
encoder as it is. The cell of the step says how many images went through it, TRL's and ours.
"""
LIMITS = """\
## Against the machine

`benchmarks/limits.py` measures what one core reaches with the products' own sizes. The update's share is the time its FLOPs would
take as fast as the fastest of its products ran, torch's or ours, over the time it took; beside it the same at the speed of
torch's product. Its FLOPs are `3 (2 N n + 4 L a c n + 2 V d m)`: N parameters of the blocks for n positions, L layers' attention,
a wide, to c tokens, the head, V x d, for m positions. Decoding is what a rollout takes beyond its first tokens (weights packed,
prompts computed, records written); its bound is, at every step, reading the weights and the live keys and values or its rows'
FLOPs, whichever takes longer. The rollout's bound is that and the prompts' FLOPs. Ceilings and steps are measured in turn; shares
are medians. Rows without decoding's share are older: there ceilings were measured before all steps, attention's FLOPs were not
counted, and the update's ceiling was the column GEMM, and the head's for the head.
"""
ENGINES = """\
## Against other engines

`benchmarks/vs_engines.py`: generated tokens per processor second, every engine in a process of its own. `full`: all completions as
long as the longest, for engines that know no schedule. `log-probs`: largest difference of ours from the model's own forward pass.
"""
SCALING = """\
## Scaling

`benchmarks/scaling.py`: one size is changed at a time. `predicted` scales the first row's update by its FLOPs, with every prompt
counted once and dead groups not at all; `naive` by `prompts x group x (prompt + completion)` positions, padded to the longest.
Memory is the peak above what is resident before the first step; of it, the gradient and the moments of the vocabulary's matrix,
which training it takes; and the peak without them, which should not follow the vocabulary.
"""
MEMORY = """\
## Memory, predicted and measured

`benchmarks/memory.py`: the peak of a step above what is resident once the model is loaded, beside what `--dry-run` says; all
completions as long as they may be.
"""
SHARING = """\
## What sharing prompts gains

`benchmarks/sharing.py`: processor seconds of an update's forward and backward pass over the same completions. `shared`: a prompt
stands once for all its completions. `repeated`: packed, with the prompt before each completion. `alone`: one sequence after
another.
"""
PARALLEL = """\
## Several processes

`benchmarks/parallel.py`: each process has the work of one. Efficiency is the time of one process over that of several, elapsed and
of the processor. `imbalance`: the fullest process's positions over the mean. `sent`: elements of a process, counted and by the
formula of [scaling](../docs/scaling.md).
"""
PROFILE = """\
## Where a step's time goes

`benchmarks/profiling.py`: own time of each operation over that of all operations of one step, under torch's profiler.
There the kernels of a decoded token are called one by one from Python; without it one call draws up to 16 tokens of all rows.
"""
WHY = {
    "kernels::gemm": "products of the update: forward, gradients of inputs and weights",
    "kernels::linear": "decoding's and prefill's products, weights packed",
    "kernels::decode_attention": "attention of decoded tokens",
    "kernels::attention_forward": "attention of the update and the prefill",
    "kernels::attention_backward": "its gradients",
    "kernels::gated": "the MLP's gate",
    "kernels::gated_backward": "its gradients; the activation is made again instead of kept",
    "kernels::gelu": "GPT-2's activation",
    "kernels::gelu_backward": "its gradients; the activation is made again instead of kept",
    "kernels::add_rms_norm": "residual sums and norms",
    "kernels::rms_norm_backward": "their gradients",
    "kernels::read_logits": "the head's log-probs",
    "kernels::logits_gradient": "the head's gradients",
    "kernels::rotate": "rotary positions, forward and back",
    "aten::mm": "products of the update: forward, gradients of inputs and weights",
    "aten::addmm": "the update's products with a bias",
    "aten::addmm_": "the update's products, summed in place",
    "mkl::_mkl_linear": "decoding's and prefill's products, weights packed",
    "mkldnn::_linear_pointwise": "decoding's and prefill's products, weights packed",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention: two calls a layer and decoded token; training, by segments",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention's gradients; float32 where it is the faster kernel",
    "aten::copy_": "changes of type in bfloat16, keys and values kept, stretches of attention put together",
    "aten::mul": "norms and rotary positions",
    "aten::mul_": "norms, gated MLPs in blocks, the head's gradients",
    "aten::silu": "the MLP's activation, made again in the backward pass instead of kept",
    "aten::addcmul_": "rotary positions and norms",
    "aten::silu_backward": "the MLP's gradients",
    "aten::_log_softmax": "the head's normaliser",
    "aten::select": "rows of small products",
    "_SharedBackward": "the attention's loop over segments, in Python",
    "_Shared": "the attention's loop over segments, in Python",
    "aten::slice": "views of segments and rows",
    "aten::add_": "residual stream, sums of gradients",
    "aten::add": "residual stream",
    "aten::logsumexp": "the head's normaliser",
    "aten::_softmax": "the sampled distribution",
    "aten::_fused_adamw_": "the optimizer",
    "everything else": "many operations below half a percent, and their dispatch",
}
"""What the larger operations are."""
KINDS = {
    "amx": "Processors with matrix tiles (AMX)",
    "avx512": "Processors with AVX-512 and without matrix tiles",
    "zen4": "AMD's Zen 4, whose AVX-512 is computed in halves",
    "avx2": "Processors with AVX2 and no longer vectors",
    "other": "Other processors",
    "gpu": "GPUs",
}
"""Files of results, as `_machine.kind_of` names them."""


def results(kind: str, begins: str = "") -> list[dict[str, Any]]:
    """Results of machines of one kind whose names begin so, by name."""
    held = json.loads((RESULTS / f"{kind}.json").read_text(encoding="utf-8"))
    return [held[name] for name in sorted(held) if name.startswith(begins)]


def table(head: str, rows: Iterator[list[str]]) -> list[str]:
    """A table; nothing without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    columns = head.count("|") + 1
    return [f"| {head} |", "|" + "---|" * columns, *lines, ""] if lines else []


def workload(work: dict[str, Any]) -> list[str]:
    """Model, step and type of a workload, as cells."""
    model = f"{work['family']} {work['hidden']} x {work['layers']}, vocabulary {work['vocab']:,}"
    step = f"{work['prompts']} x {work['group']}, prompt {work['prompt']}, completion {work['completion']} ({work['lengths']})"
    step += ", checkpointing" if work.get("checkpointing") else ""
    step += f", a picture of {work['image']} pixels" if work.get("image") else ""
    return [model, step, work["dtype"]]


def trl_row(found: dict[str, Any]) -> list[str]:
    """One comparison with TRL."""
    work, wall, cpu = found["workload"], found["ratios"], found["cpu_ratios"]

    def pair(name: str) -> str:
        return f"{wall[name]:.2f} / {cpu[name]:.2f}" if name in wall and name in cpu else ""

    model, step, dtype = workload(work)
    if "tower" in found["trl"]:
        step += f" ({found['trl']['tower']:.0f} and {found['groupwise']['tower']:.0f} images encoded)"
    return [
        work["objective"], model, step, dtype, f"{work['beta']:g}", f"{work['dead']:g}", str(work["threads"]),
        pair("step"), pair("rollout"), pair("update"), f"{wall['memory']:.2f}" if wall.get("memory") else "",
        str(found["pairs"]), f"{found['machine']['load_1min']:.1f}",
    ]  # fmt: skip


SHARES = ("update_of_gemm", "update_of_torch", "rollout_of_bound", "decode_of_bound")


def limits_row(found: dict[str, Any]) -> list[str]:
    """One measurement of ceilings and shares."""
    limit, shares = found["ceilings"], found["shares"]
    gemm = [f"{limit[name]:,.0f}" for name in ("gemm", "gemm_torch", "gemm_weight_gradient", "gemm_head", "gemm_few_rows")]
    return [
        *workload(found["workload"]), *gemm, f"{limit['read']:.1f}",
        *(f"{shares[name]:.0%}" if name in shares else "" for name in SHARES),
        f"{found['machine']['load_1min']:.1f}",
    ]  # fmt: skip


def engine_row(found: dict[str, Any]) -> list[str]:
    """One comparison of engines."""
    rates = found["tokens_per_second"]
    cells = [f"{rates[name]:,.0f}" if name in rates else "" for name in ("native", "generate", "native, full")]
    cells += [f"{rates[name]:,.0f}" if name in rates else "" for name in ("continuous batching, full", "vllm, full")]
    return [*workload(found["workload"]), *cells, f"{found['logp']:.1e}", f"{found['machine']['load_1min']:.1f}"]


def scaling(kind: str, found: dict[str, Any]) -> Iterator[str]:
    """The axes of one scaling run."""
    yield " ".join(["Around", ", ".join(workload(found["workload"])) + ":"]) + "\n"
    for axis, points in found["axes"].items():
        first = points[0]
        rows = (
            [
                f"{point['at']:,g}", f"{point['update']:.3f}", f"{first['update'] * point['gflop'] / first['gflop']:.3f}",
                f"{first['update'] * point['naive_positions'] / first['naive_positions']:.3f}", f"{point['rollout']:.3f}",
                f"{point['peak_mb']:,.0f}", f"{point['head_state_mb']:,.0f}", f"{point['peak_mb'] - point['head_state_mb']:,.0f}",
            ]
            for point in points
        )  # fmt: skip
        yield from table(f"{axis} | update s | predicted | naive | rollout s | peak MB | of it vocabulary | without", rows)
        plot = PAGE.parent / "images" / f"scaling_S_{axis}_{kind}.png"
        if plot.exists():
            yield f"![update against {axis}](images/{plot.name})\n"


def memory_row(found: dict[str, Any]) -> list[str]:
    """One step's peak beside the plan's."""
    work = found["workload"]
    figures = [f"{found['predicted_mb']:,.0f}", f"{found['peak_mb']:,.0f}", f"{found['ratio']:.2f}"]
    return [*workload(work), f"{work['beta']:g}", *figures]


def sharing(found: dict[str, Any]) -> Iterator[str]:
    """The lengths of prompt of one run."""
    yield ", ".join(workload(found["workload"])) + ":\n"
    rows = ([f"{row['prompt']:,}", *(f"{row[way]:.1f}" for way in ("shared", "repeated", "alone"))] for row in found["rows"])
    yield from table("prompt | shared s | repeated s | alone s", rows)


def parallel(found: dict[str, Any]) -> Iterator[str]:
    """One process, then several in each mode."""
    alone = next(row for row in found["rows"] if row["processes"] == 1)

    def cells(row: dict[str, Any]) -> list[str]:
        seconds, several = row["seconds"], row["processes"] > 1
        elapsed = sum(alone["seconds"].values()) / sum(seconds.values())
        return [
            str(row["processes"]), row["mode"] if several else "", f"{seconds['rollout']:.2f}", f"{seconds['update']:.2f}",
            f"{elapsed:.0%}, {alone['processor'] / row['processor']:.0%}", f"{row['imbalance']:.3f}",
            f"{row['counted']:,.0f}, {row['expected']:,.0f}" if several else "",
        ]  # fmt: skip

    work = found["workload"]
    yield f"{work['prompts']} prompts x {work['group']} for each process, {found['rows'][0]['parameters']:,} parameters:\n"
    yield from table("processes | `parallel` | rollout s | update s | efficiency | imbalance | sent", map(cells, found["rows"]))


def profile(found: dict[str, Any]) -> Iterator[str]:
    """One profiled step."""
    seconds = ", ".join(f"{phase} {value:.3f} s" for phase, value in found["seconds"].items())
    yield ", ".join(workload(found["workload"])) + f" ({seconds}):\n"
    operations = [one for one in found["operations"] if one["share"] >= 0.02]
    rows = ([f"{one['share']:.1%}", f"{one['calls']:,}", f"`{one['name']}`", WHY.get(one["name"], "")] for one in operations)
    yield from table("share | calls | operation | what it is", rows)


def sections(kind: str) -> Iterator[tuple[str, list[str]]]:
    """What was measured on machines of one kind, by section."""
    yield (
        TRL,
        table(
            "objective | model | a step | type | beta | dead | threads | step wall / cpu | rollout | update | memory | "
            "pairs | load",
            map(trl_row, results(kind, "vs_trl_")),
        ),
    )
    yield (
        LIMITS,
        table(
            "model | a step | type | GEMM GFLOP/s | torch's | of weight gradients | of the head | small batch | read GB/s | "
            "update | at torch's | rollout | decoding | load",
            map(limits_row, results(kind, "limits_")),
        ),
    )
    yield (
        ENGINES,
        table(
            "model | a step | type | native | generate | native, full | continuous batching, full | vLLM, full | log-probs | load",
            map(engine_row, results(kind, "vs_engines_")),
        ),
    )
    yield SCALING, [line for one in results(kind, "scaling_") for line in scaling(kind, one)]
    yield (
        MEMORY,
        table("model | a step | type | beta | predicted MB | measured MB | ratio", map(memory_row, results(kind, "memory_"))),
    )
    yield SHARING, [line for one in results(kind, "sharing_") for line in sharing(one)]
    yield PARALLEL, [line for one in results(kind, "parallel") for line in parallel(one)]
    yield PROFILE, [line for one in results(kind, "profile_") for line in profile(one)]


def machines(kind: str) -> list[str]:
    """The machines of a kind that results are of."""
    found = (one["machine"] for one in results(kind) if "machine" in one)
    return sorted(
        {f"{m['gpu'] + ', ' if 'gpu' in m else ''}{m['cpu']}, {m['cpus']} cores, torch {m['torch']}, {m['date']}" for m in found}
    )


def page() -> str:
    """The whole page."""
    kinds = [kind for kind in KINDS if (RESULTS / f"{kind}.json").is_file()]
    lines = [INTRO]
    for kind in kinds:
        lines += [f"**{KINDS[kind]}** are", *(f"- {machine}" for machine in machines(kind)), ""]
    for parts in zip(*map(sections, kinds), strict=True):
        lines += [parts[0][0]] if any(found for _, found in parts) else []
        for kind, (_, found) in zip(kinds, parts, strict=True):
            lines += [f"{KINDS[kind]}:\n", *found] if found else []
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
