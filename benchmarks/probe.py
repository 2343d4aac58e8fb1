"""What the proof at load costs: processor seconds for the small copies of published models, and its share of a load at shape M.

    python benchmarks/probe.py                # every published shape, then shape M
    python benchmarks/probe.py --only gemma

A load is `groupwise.models.loading.load_policy` and the engine's proof in a process of its own, imports and all: first with a cache
of proofs that is empty, then with what the first one kept.  The proof is what the first takes longer after the imports, which are
the same in both and vary by more.  Beside it stands what `groupwise train` takes until its first rollout, proof and all.
Processor seconds on one thread, medians of `--times`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _machine import median, save, significant
from _workload import SHAPES, model_folder
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from groupwise.models import probe
from groupwise.models.small_copy import small_model
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.probe import sampled

PUBLISHED: dict[str, PretrainedConfig] = {
    "Llama-3-8B": LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336),
    "Qwen2.5-7B": Qwen2Config(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, intermediate_size=18944),
    "Mistral-7B": MistralConfig(sliding_window=4096),
    "Gemma-2-9B": Gemma2Config(hidden_size=3584, num_hidden_layers=42, num_attention_heads=16, num_key_value_heads=8),
    "Gemma-3-4B": Gemma3TextConfig(
        hidden_size=2560,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=10240,
        head_dim=256,
        sliding_window=1024,
    ),
    "Phi-3-mini": Phi3Config(),
    "Mixtral-8x7B": MixtralConfig(),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24),
    "DeepSeek-V3": DeepseekV3Config(),
}
"""Models as they are published; what is not said is the family's own."""
LOAD = """
import sys, time
from groupwise.config.settings import ModelSettings
from groupwise.models.loading import load_policy
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.probe import prove_engine
imported = time.process_time()
prove_engine(load_policy(ModelSettings(path=sys.argv[1])), NativeEngine)
print(time.process_time(), time.process_time() - imported)
"""


COMMAND = """
import os, sys, time
from groupwise.cli import main
from groupwise.rollout.native.engine import NativeEngine
generate = NativeEngine.generate
def told(self, *args, **kwargs):
    if self.policy.model.num_parameters() < 10_000_000:  # a small copy
        return generate(self, *args, **kwargs)
    print(time.process_time(), flush=True)
    os._exit(0)
NativeEngine.generate = told
main(["train", sys.argv[1], "--fresh", "--quiet"])
"""
RECIPE = """
objective: grpo
model: {path: %s}
data: {path: rows.jsonl}
rewards: exact
steps: 1
rollout: {max_new_tokens: 128}
eval: {at_start: false}
"""


def proof_of(config: PretrainedConfig, dtype: str) -> Callable[[], None]:
    """Everything that a run with these products is proven by, on a small copy that is made anew."""
    kind: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore[assignment]

    def run() -> None:
        model = small_model(kind, config)
        probe.prove(model, paths=("scoring", "training", "router"), dtype=dtype)
        sampled(probe.wrapped(model, "shared"), NativeEngine, dtype=dtype)

    return run


def cpu_seconds(run: Callable[[], None], times: int) -> float:
    """The median."""
    found = []
    for _ in range(times):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return median(found)


def load_seconds(times: int) -> dict[str, float]:
    """Processor seconds of loading shape M: nothing proven before, proven before, the proof, and the command."""
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        folder = model_folder(SHAPES["M"], Path(scratch))
        Path(scratch, "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(64))
        )
        Path(scratch, "command.yaml").write_text(RECIPE % folder)
        found: dict[str, list[float]] = {"first": [], "again": []}
        proofs, commands = [], []
        for number in range(times):
            where = {"XDG_CACHE_HOME": str(Path(scratch) / f"cache{number}"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run(
                [sys.executable, "-c", "from groupwise.ops.cpu.library import absence; absence()"], env=os.environ | where
            )
            asked = {"cwd": scratch, "env": os.environ | where, "check": True, "capture_output": True, "text": True}
            after_imports = []
            for column in found.values():
                answer = subprocess.run([sys.executable, "-c", LOAD, str(folder)], **asked)
                whole, load = map(float, answer.stdout.split()[-2:])
                column.append(whole)
                after_imports.append(load)
            proofs.append(after_imports[0] - after_imports[1])
            shutil.rmtree(Path(scratch, f"cache{number}", "groupwise", "proofs"))
            commands.append(float(subprocess.run([sys.executable, "-c", COMMAND, "command.yaml"], **asked).stdout.split()[-1]))
    return {name: median(column) for name, column in (found | {"proof": proofs, "command": commands}).items()}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="how often each is timed (default: 3)")
    parser.add_argument("--only", default="", help="part of a published model's name; leaves shape M out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, dict[str, float]] = {}
    for name, config in PUBLISHED.items():
        if options.only.lower() not in name.lower():
            continue
        result[name] = {
            dtype: significant(cpu_seconds(proof_of(config, dtype), options.times)) for dtype in ("float32", "bfloat16")
        }
        print(f"{name:14s}" + "".join(f"   {dtype} {seconds:5.2f} s" for dtype, seconds in result[name].items()), flush=True)
    if not options.only:
        seconds = load_seconds(options.times)
        result["M"] = {name: significant(value) for name, value in seconds.items()}
        print(f"load at M: {seconds['first']:.2f} s the first time, {seconds['again']:.2f} s from then on")
        print(
            f"the proof: {seconds['proof']:.2f} s, {seconds['proof'] / seconds['first']:.1%} of it, and "
            f"{seconds['proof'] / seconds['command']:.1%} of the {seconds['command']:.2f} s until `groupwise train` samples"
        )
        save("probe", {"seconds": result})


if __name__ == "__main__":
    main()
