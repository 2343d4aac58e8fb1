"""Weak scaling over processes on one machine, and what they send each other, beside the formula.

    python benchmarks/parallel.py                # 1 and 2 processes, a core each; writes `parallel` into benchmarks/results
    python benchmarks/parallel.py --processes 1 2 4 --shape S

Every process gets the same work whatever their number: P prompts each.  With perfect scaling a step takes as long on n processes as
on one.  Two counts of what is sent: numbers in collectives (each operation counted as a ring moves it, one step of its own, because
counting takes time), and bytes on the wire (loopback of a network namespace that holds nothing else, where that is allowed).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from _machine import median, save, significant
from _workload import Workload, add_options, model_folder, workload

MODES = ("ddp", "zero2", "zero3")
NAMESPACE = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']


def worker(work: Workload, mode: str, folder: Path, steps: int, out: Path) -> None:
    """What each process does; the first one writes."""
    import torch
    from _ours import load, optimizer_settings

    from groupwise.config.settings import ParallelSettings, RolloutSettings
    from groupwise.distributed import comm, layout, process_group
    from groupwise.models.shape import Shape
    from groupwise.models.sharded import shard
    from groupwise.runs.job import make_engine
    from groupwise.training.optimizer import Optimizer

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    here = process_group.join(600.0, cuda=False)
    policy = load(work, folder)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    shape = Shape.of(policy.model.config.to_dict(), parameters, dtype="float32")
    parallel = layout.decided(ParallelSettings(name=mode), parameters, here.size)
    if here.size > 1 and parallel.name != "ddp":
        policy = shard(policy, parallel, policy.device)
    rows = work.prompts * work.group
    engine = scheduled(make_engine(policy, RolloutSettings(max_rows=rows)), work)
    loop = run(work, policy, engine, Optimizer(policy.model, optimizer_settings(work), 10**6), here.size)
    next(loop)
    found, wire = [], []
    for _ in range(steps):
        comm.wait()
        before, processor = loopback(), time.process_time()
        step = next(loop)
        processor = time.process_time() - processor
        comm.wait()
        wire.append(loopback() - before)
        found.append({**step.timings, "processor": processor, "imbalance": step.metrics.get("ranks/imbalance", 1.0)})
    with Counter() as counter:
        step = next(loop)
    update = micro_batches(step, work, policy, here.size)
    if here.first:
        result = {
            "seconds": {name: median([one[name] for one in found]) for name in ("rollout", "update")},
            "processor": median([one["processor"] for one in found]),
            "imbalance": median([one["imbalance"] for one in found]),
            "waiting": [median([one[f"waiting/rank{rank}"] for one in found]) for rank in range(here.size) if here.size > 1],
            "parameters": parameters,
            "micro_batches": update,
            "expected": expected(shape, mode, update, here.size),
            "counted": counter.numbers,
            "wire_bytes": significant(median(wire) / here.size),
        }
        out.write_text(json.dumps(result))
    process_group.leave()


def scheduled(engine: Any, work: Workload) -> Any:
    """The engine (the one inside, of a sharded policy) with the lengths of completions fixed."""
    from _ours import Scheduled

    inner = getattr(engine, "inner", engine)
    fixed = Scheduled(inner.policy, max_rows=inner.max_rows)
    fixed.lengths = work.schedule()
    if inner is engine:
        return fixed
    engine.inner = fixed
    return engine


def run(work: Workload, policy: Any, engine: Any, optimizer: Any, size: int) -> Iterator[Any]:
    """Endless steps of size x P prompts."""
    from _ours import positions, prompts_of

    from groupwise.config.resolve import resolve
    from groupwise.config.settings import GroupSettings, RewardSettings
    from groupwise.records import Sampling
    from groupwise.rewards.compose import build_rewards
    from groupwise.training.groups import SampledRollouts
    from groupwise.training.online import train_online

    visits = iter(range(10**6))
    group = GroupSettings(group_size=work.group, prompts_per_step=work.prompts)
    engine.send_weights(0)
    yield from train_online(
        policy,
        resolve("grpo", group, work.completion),
        SampledRollouts(
            algorithm=resolve("grpo", group, work.completion),
            engine=engine,
            rewards=build_rewards([RewardSettings(function="_workload:reward")], columns=["dead"]),
            draw=lambda count: prompts_of(work, next(visits))[:count],
            sampling=Sampling(max_new_tokens=work.completion),
            steps=10**6,
            group=group,
        ),
        optimizer,
        group=group,
        max_tokens_per_microbatch=positions(work, policy),
    )


def micro_batches(step: Any, work: Workload, policy: Any, size: int) -> int:
    """Micro-batches of each process in the step's update."""
    from _ours import positions

    from groupwise.config.resolve import resolve
    from groupwise.config.settings import GroupSettings
    from groupwise.data.packing import pack
    from groupwise.distributed.comm import World
    from groupwise.training.samples import weigh

    algorithm = resolve("grpo", GroupSettings(group_size=work.group, prompts_per_step=work.prompts), work.completion)
    samples = [s for s in weigh(step.groups, step.advantages, algorithm) if s.advantage.any()]
    return len(pack(samples, positions(work, policy), world=World(0, size), even=True))


def expected(shape: Any, mode: str, micro: int, size: int) -> float:
    """Numbers that a process sends in a step with one update of `micro` micro-batches, all four bytes wide.

    A ring moves (size - 1) / size of a tensor for a gather or a sum that is then divided, twice that for an all-reduce.  Sharded
    weights are gathered for every micro-batch (`zero3`: the blocks once more, to go back) and once to sample; gradients are
    reduced as often.
    """
    part = (size - 1) / size
    if mode == "ddp" or size == 1:
        return 2 * part * shape.parameters
    again = shape.parameters - shape.outside if mode == "zero3" else 0
    return part * (micro * (2 * shape.parameters + again) + shape.parameters)


class Counter:
    """Numbers that this process sends in collectives of tensors while open, as a ring moves them."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        counter = self
        self.numbers = 0.0

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                counter.numbers += sent(str(func), args)
                return result

        self.mode = Mode()

    def __enter__(self) -> Counter:
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


def sent(name: str, args: Any) -> float:
    """Numbers of one operation; an all-reduce is a reduce-scatter and an all-gather.  Sums of a few numbers are left out."""
    import torch.distributed as dist

    match name.split(".")[:2]:
        case ["c10d", "allreduce_"]:
            size = dist.ProcessGroup.unbox(args[1]).size()
            return sum(2 * (size - 1) / size * tensor.numel() for tensor in args[0] if tensor.is_floating_point())
        case ["c10d", "_allgather_base_"]:
            return (args[0].numel() - args[1].numel()) * args[0].is_floating_point()
        case ["c10d", "_reduce_scatter_base_"]:
            return args[1].numel() - args[0].numel()
        case ["_c10d_functional", "all_gather_into_tensor"]:
            return args[0].numel() * (args[1] - 1)
    return 0.0


def loopback() -> int:
    """Bytes sent over this namespace's loopback so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def launch(work: Workload, *, mode: str, size: int, steps: int, scratch: Path, alone: bool) -> dict[str, Any]:
    """One measurement, in processes of its own."""
    out = scratch / "found.json"
    grown = replace(work, prompts=work.prompts * size)
    arguments = [json.dumps(asdict(grown)), mode, str(model_folder(work, scratch)), str(steps), str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-addr", "127.0.0.1",
               "--master-port", "29511", __file__, "--worker", *arguments]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*(NAMESPACE if alone else []), *command], check=True, env=environment)
    return json.loads(out.read_text())


def main() -> None:
    """Measure and save."""
    if sys.argv[1:2] == ["--worker"]:
        shape, mode, folder, steps, out = sys.argv[2:]
        worker(Workload(**json.loads(shape)), mode, Path(folder), int(steps), Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    work = workload(options)
    alone = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
    measure = partial(launch, work, steps=options.steps, alone=alone)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"processes": size, "mode": mode, **measure(mode=mode, size=size, scratch=Path(folder))}
            for size in options.processes
            for mode in (MODES if size > 1 else ("ddp",))
        ]
    measured = {"workload": asdict(work), "namespace": alone, "rows": rows}
    save("parallel", measured)
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
