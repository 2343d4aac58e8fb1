"""What an update gains where a prompt stands once for all its completions, by the length of the prompt.

    python benchmarks/sharing.py --shape H

Forward and backward pass over the same random completions: with shared prompts, packed with the prompt before each completion, and
one sequence after another.  Processor seconds of all threads, the least of `--times`; the gradients are those of one loss.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace

from _in_process import ours
from _machine import save, significant
from _workload import add_options, workload

PROMPTS = (32, 128, 512)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--times", type=int, default=2, help="of which the least counts (default: 2)")
    options = parser.parse_args()
    work = workload(options)
    rows: list[dict[str, float]] = []
    for prompt in PROMPTS:
        here = replace(work, prompt=prompt)
        side = ours(here)

        from _ours import positions

        from groupwise.data.packing import pack
        from groupwise.models.passes import BatchPass
        from groupwise.ops.operations import operations
        from groupwise.training.loss import Loss

        completions = [ids.tolist() for ids in here.completion_ids()]
        columns = {"rewards": [float(len(ids) % 2) for ids in completions], "logp": [[-9.0] * len(ids) for ids in completions]}
        samples = side._samples({"completions": completions} | columns)
        loss = Loss(algorithm=side.algorithm, samples=samples)

        def update(streams: list, loss: Loss = loss, policy=side.policy) -> float:
            begin = time.process_time()
            with operations().fused_modules(policy.model):
                for batch in streams:
                    loss(BatchPass(policy, batch))[0].backward()
            policy.model.zero_grad(set_to_none=True)
            return time.process_time() - begin

        max_tokens_per_microbatch = positions(here, side.policy)
        ways = {
            "shared": pack(samples, max_tokens_per_microbatch),
            "repeated": pack(samples, max_tokens_per_microbatch, share=False),
            "alone": [batch for sample in samples for batch in pack([sample], max_tokens_per_microbatch)],
        }
        seconds = {name: significant(min(update(streams) for _ in range(options.times))) for name, streams in ways.items()}
        rows.append({"prompt": prompt} | seconds)
        print(f"prompt {prompt:5d}  " + "  ".join(f"{name} {value:8.3f} s" for name, value in seconds.items()), flush=True)
    save(f"sharing_{options.shape}_{work.dtype}_threads_{work.threads}", {"workload": asdict(work), "rows": rows})


if __name__ == "__main__":
    main()
