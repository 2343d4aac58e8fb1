"""Where the time of one of our steps goes, operation by operation.

    python benchmarks/profiling.py --shape M --dtype bfloat16

A few steps warm up and give the time without a profiler; then torch's profiler watches one.  An operation's share is of the
processor time of all operations in that step, its own time only; what is left of the step without a profiler is Python.  On a GPU
(`--shape 0.5B`) it is of the GPU's time in all kernels; what is left of the step is the time in which it waits.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from _in_process import ours
from _machine import median, save, significant
from _workload import add_options, workload

LEAST = 0.005
"""Operations with a smaller share are added up as `everything else`."""


def main() -> None:
    """Profile one workload and print the operations by share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=3, help="steps without the profiler (default: 3)")
    options = parser.parse_args()
    work = workload(options)
    side = ours(work)
    from torch.profiler import ProfilerActivity, profile

    from groupwise.rollout.native.forward import SpecialisedForward

    side.step()
    on_cpu = work.device == "cpu"
    steps = [side.step()["cpu" if on_cpu else "wall"] for _ in range(options.steps)]
    seconds = {phase: median([step[phase] for step in steps]) for phase in ("step", "rollout", "update") if phase in steps[0]}
    SpecialisedForward._decoder = lambda _: None  # kernel by kernel, to see each  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU] if on_cpu else [ProfilerActivity.CUDA]) as watched:
        side.step()
    own = {
        event.key: ((event.self_cpu_time_total if on_cpu else event.self_device_time_total) * 1e-6, event.count)
        for event in watched.key_averages()
        if on_cpu or not event.is_user_annotation  # a range that an optimizer names stands there beside its kernels
    }
    total = sum(time for time, _ in own.values())
    if not total:
        raise SystemExit("the profiler saw nothing on the GPU: it needs CUPTI, and the right to use it")
    operations = [
        {"name": name, "share": significant(time / total), "calls": calls}
        for name, (time, calls) in sorted(own.items(), key=lambda item: -item[1][0])
        if time / total >= LEAST
    ]
    rest = 1.0 - sum(operation["share"] for operation in operations)
    operations.append({"name": "everything else", "share": significant(rest), "calls": sum(calls for _, calls in own.values())})
    print(f"a step {seconds['step']:.3f} s; operations under the profiler {total:.3f} s")
    for operation in operations:
        print(f"  {operation['share']:6.1%}  {operation['calls']:6d}  {operation['name']}")
    result = {"workload": asdict(work), "seconds": seconds, "profiled": significant(total), "operations": operations}
    save(f"profile_{options.shape}_{work.dtype}_threads_{work.threads}", result)
    print(json.dumps({operation["name"]: operation["share"] for operation in operations[:5]}))


if __name__ == "__main__":
    main()
