"""How many bytes a version of the weights takes for the servers, against all of them, by learning rate and algorithm.

    python benchmarks/version_bytes.py --out version_bytes.json

SmolLM2-135M (`groupwise get smollm2`) answers sums; every completion is worth its share of digits, so that each step learns.  After
each update the weights are published for servers in bfloat16 (`--float32`: in float32 too), and the adapter alone where there is
one.  A mirror follows the versions: its bits are those that were published, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import groupwise as gw
from groupwise.config.settings import GroupSettings, LoraSettings, ModelSettings, OptimizerSettings
from groupwise.models.loading import load_policy
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.plugin.groupwise_versions import Manifest, Mirror, VersionSource
from groupwise.rollout.vllm.publisher import AdapterPublisher, Publisher
from groupwise.training.loss import step_loss
from groupwise.training.passes import update
from groupwise.training.samples import weigh

SAMPLING = gw.Sampling(max_new_tokens=8)
GROUP = 4
PROMPTS = 2
POSITIONS = 512


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    algorithm: str
    lr: float
    lora: bool = False


CASES = (
    *(Case("grpo", lr) for lr in (1e-6, 1e-5, 1e-4)),
    *(Case("grpo", lr, lora=True) for lr in (1e-6, 1e-5, 1e-4)),
    *(Case("gspo", lr) for lr in (1e-6, 1e-5, 1e-4)),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--float32", action="store_true", help="servers in float32 too")
    parser.add_argument("--steps", type=int, default=3, help="updates of each case (default %(default)s)")
    parser.add_argument("--model", default="smollm2", help="a checkpoint (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a file for the rows, as JSON")
    options = parser.parse_args()
    rows = []
    types = ("bfloat16", "float32") if options.float32 else ("bfloat16",)
    for case in CASES:
        row = measure(case, options.model, options.steps, types)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


def measure(case: Case, model: str, steps: int, types: tuple[str, ...]) -> dict[str, Any]:
    """The medians over the updates of one case."""
    policy = load_policy(ModelSettings(path=model))
    if case.lora:
        policy = adapt(policy, LoraSettings(rank=16, alpha=32.0), base=model)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        served = {name: Followed(Path(folder), name) for name in types}
        adapters = AdapterPublisher(Path(folder) / "adapter", "adapter", torch.bfloat16)
        for version in versions(policy, case, steps):
            for name, one in served.items():
                for key, number in one.follow(policy, version).items():
                    found.setdefault(f"{name}/{key}", []).append(number)
            if case.lora:
                files = adapters.publish(policy, version).adapter
                found.setdefault("adapter/bytes", []).append(sum(file.size for file in files))
    row: dict[str, Any] = {"algorithm": case.algorithm, "lr": case.lr, "lora": case.lora}
    for key, numbers in found.items():
        row[key] = median(numbers[1:])  # the first version is all weights
    return row


class Followed:
    """A publisher for servers of one type, and the mirror of a server."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.publisher = Publisher(folder / dtype, dtype, getattr(torch, dtype), full_every=1000)
        self.mirror = Mirror(folder / f"mirror-{dtype}")
        self.source = VersionSource(str(folder / dtype))

    def follow(self, policy: Policy, version: int) -> dict[str, float]:
        """Publish and fetch a version: bytes without the manifest, share of changed numbers, seconds."""
        begin = time.process_time()
        manifest = self.publisher.publish(policy, version)
        published = time.process_time() - begin
        begin = time.process_time()
        self.mirror.go_to(self.source, version)
        fetched = time.process_time() - begin
        self.compare(manifest)
        numbers = sum(one.stop - one.start for one in manifest.ranges)
        changed = sum(block.count for file in manifest.patch for block in file.blocks)
        width = self.publisher.dtype.itemsize
        return {
            "bytes": sum(file.size for file in manifest.patch),
            "dense": numbers * width,
            "changed": changed / numbers,
            "publish_seconds": published,
            "fetch_seconds": fetched,
        }

    def compare(self, manifest: Manifest) -> None:
        """See that the mirror has every bit that was published."""
        held = self.mirror.tensors(manifest)
        for snapshot in self.publisher._snapshots:
            one = snapshot.range
            assert np.array_equal(held[one.tensor][one.start : one.stop], snapshot.bits), one.tensor


def versions(policy: Policy, case: Case, steps: int) -> Iterator[int]:
    """Train, and yield the number of updates before the first and after each."""
    engine = gw.NativeEngine(policy, max_rows=PROMPTS * GROUP)
    optimizer = gw.Optimizer(policy.model, OptimizerSettings(lr=case.lr), total_steps=steps)
    algorithm = gw.resolve(case.algorithm, GroupSettings(group_size=GROUP), max_new_tokens=SAMPLING.max_new_tokens)
    yield 0
    for step in range(steps):
        groups = []
        for rollouts in engine.generate(prompts(policy, step), group_size=GROUP, sampling=SAMPLING, seed=0):
            reward = np.array([sum(map(str.isdigit, rollout.text)) / len(rollout) for rollout in rollouts])
            groups.append(gw.RolloutGroup(rollouts=rollouts, names=("digits",), rewards=reward[:, None], reward=reward))
        samples = weigh(groups, algorithm.advantages(groups), algorithm)
        loss = step_loss(policy, algorithm, samples, max_tokens_per_microbatch=POSITIONS)
        update(policy, loss, loss.samples, optimizer, max_tokens_per_microbatch=POSITIONS)
        engine.send_weights(optimizer.taken)
        yield step + 1


def prompts(policy: Policy, step: int) -> list[gw.Prompt]:
    """Sums of two-digit numbers."""
    asked = []
    for index in range(PROMPTS):
        text = f"What is {17 + 3 * step + index} + {25 + step}? Answer: "
        tokens = np.array(policy.tokenizer(text)["input_ids"])
        asked.append(gw.Prompt(id=f"{step}/{index}", tokens=tokens, text=text))
    return asked


if __name__ == "__main__":
    main()
