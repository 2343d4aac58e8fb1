"""Generated tokens per processor second, on a GPU per second: the native engine, `generate`, continuous batching, and vLLM.

    python benchmarks/vs_engines.py --shape M --dtype bfloat16
    python benchmarks/vs_engines.py --shape S --vllm-python path/to/vllm-env/bin/python

Every engine runs in a process of its own, on the same model file and prompts, one after the other, several times round.  The native
engine and `generate` follow the schedule of lengths; continuous batching and vLLM have one length for all, so for them the native
engine is measured with that too (`full`).  vLLM needs an environment of its own (its pins differ): without `--vllm-python` it is
left out and said so.  The native engine's log-probs are compared with those of the model's own forward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _machine import median, save, significant
from _side import Side, SideEnded
from _workload import Workload, add_options, model_folder, workload


def now(work: Workload) -> float:
    """Processor seconds; of a GPU seconds, once it has done what it was given."""
    if work.device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _native(work: Workload, folder: Path) -> Callable[[], dict[str, float]]:
    import torch
    from _ours import Scheduled, load, prompts_of

    from groupwise.models.attention import plain_attention
    from groupwise.records import Sampling

    policy = load(work, folder)
    engine = Scheduled(policy, max_rows=work.prompts * work.group)
    engine.lengths = work.schedule()

    def run() -> dict[str, float]:
        engine.send_weights(engine.version + 1)
        start = now(work)
        groups = list(
            engine.generate(prompts_of(work), group_size=work.group, sampling=Sampling(max_new_tokens=work.completion), seed=0)
        )
        spent = now(work) - start
        rollout = groups[0][0]
        ids = torch.tensor([[*rollout.prompt.tokens.tolist(), *rollout.tokens.tolist()]], device=policy.device)
        with torch.no_grad(), plain_attention(policy.model) as model, policy.precision():
            logits = model(input_ids=ids, use_cache=False).logits[0, work.prompt - 1 : -1].float()
        logp = logits.log_softmax(-1).gather(1, ids[0, work.prompt :, None])[:, 0]
        far = (logp.cpu() - torch.from_numpy(rollout.behavior_logp)).abs().max()
        return {"tokens": sum(len(r) for g in groups for r in g), "seconds": spent, "logp_difference": float(far)}

    return run


def _inputs(work: Workload) -> Any:
    import torch

    return torch.from_numpy(work.prompt_ids()).repeat_interleave(work.group, 0).to(work.device)


def _model(work: Workload, folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, work.dtype)).to(work.device).eval()


def _generate(work: Workload, folder: Path) -> Callable[[], dict[str, float]]:
    import torch
    from _trl import Schedule
    from transformers import GenerationConfig, LogitsProcessorList

    model, inputs = _model(work, folder), _inputs(work)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=work.completion, eos_token_id=work.eos, pad_token_id=1)
    schedule = LogitsProcessorList([Schedule(work.schedule(), work.prompt, work.eos)])

    @torch.no_grad()
    def run() -> dict[str, float]:
        start = now(work)
        model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config, logits_processor=schedule)
        return {"tokens": int(work.schedule().sum()), "seconds": now(work) - start}

    return run


def _continuous(work: Workload, folder: Path) -> Callable[[], dict[str, float]]:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    model = _model(work, folder)
    # By default it takes most of the machine's memory for its cache.
    batching = ContinuousBatchingConfig(max_memory_percent=0.1)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=work.completion, eos_token_id=-1, pad_token_id=1)

    def run() -> dict[str, float]:
        start = now(work)
        outputs = model.generate_batch(
            _inputs(work).tolist(), generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
        return {"tokens": sum(len(o.generated_tokens) for o in outputs.values()), "seconds": now(work) - start}

    return run


ENGINES = {"native": _native, "generate": _generate, "continuous batching": _continuous}


def _serve(connection: Any, name: str, work: Workload, folder: Path) -> None:
    import torch

    torch.set_num_threads(work.threads)
    try:
        run = ENGINES[name](work, folder)
        connection.send("ready")
        while connection.recv() == "run":
            connection.send(run())
    except Exception as error:  # whatever an engine dies of is its result
        connection.send(f"{type(error).__name__}: {error}")


def _answer(ask: Callable[..., Any], *command: Any) -> Any:
    """Return an engine's answer; a text says what it has died of."""
    try:
        return ask(*command)
    except SideEnded as ended:
        return f"{ended}, most likely for its memory"


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model, dtype, length, rounds, prompts, options = json.loads(sys.argv[1])
    llm = LLM(model=model, dtype=dtype, skip_tokenizer_init=True, **options)
    sampling = SamplingParams(temperature=1.0, max_tokens=length, min_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        print("RESULT", json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}), flush=True)
"""


def vllm(python: str, work: Workload, folder: Path, rounds: int) -> list[dict[str, float]]:
    """vLLM in its own environment: of its CPU build wall seconds times threads (its workers are processes of their own).

    On a GPU wall seconds, with its CUDA graphs, and with half of the memory: the other engines are loaded too.
    """
    on_cpu = work.device == "cpu"
    options = {"enforce_eager": True} if on_cpu else {"gpu_memory_utilization": 0.5}
    request = [str(folder), work.dtype, work.completion, rounds, _inputs(work).tolist(), options]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run([python, "-c", VLLM, json.dumps(request)], env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line.split(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not found:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-2000:]}")
    return [one | {"seconds": one["seconds"] * (work.threads if on_cpu else 1)} for one in found[1:]]


def main() -> None:
    """Measure the engines in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm-python", help="the python of an environment with vLLM's CPU build")
    options = parser.parse_args()
    base = workload(options)
    os.environ |= {"OMP_NUM_THREADS": str(base.threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    full = replace(base, lengths="full")
    plan = {"native": ("native", base), "generate": ("generate", base), "native, full": ("native", full)}
    plan["continuous batching, full"] = ("continuous batching", full)
    rates: dict[str, list[float]] = {}
    far = 0.0
    with tempfile.TemporaryDirectory(prefix="groupwise-bench-") as scratch:
        folder = model_folder(base, Path(scratch))
        live: dict[str, Side] = {}
        for name, (engine, work) in plan.items():
            side = Side(name, _serve, engine, work, folder)
            answer = _answer(side.receive)
            if answer != "ready":
                print(f"{name}: left out ({answer})")
                continue
            live[name] = side
        for turn in range(options.rounds + 1):
            for name, side in list(live.items()):
                found = _answer(side.ask, "run")
                if isinstance(found, str):
                    print(f"{name}: left out ({found})")
                    del live[name]
                elif turn:  # the first is a warm-up
                    rates.setdefault(name, []).append(found["tokens"] / found["seconds"])
                    far = max(far, found.get("logp_difference", 0.0))
        for side in live.values():
            side.end()
        if options.vllm_python:
            turns = vllm(options.vllm_python, full, folder, options.rounds)
            rates["vllm, full"] = [turn["tokens"] / turn["seconds"] for turn in turns]
        else:
            print("vllm: left out (no environment with vLLM's CPU build was named: --vllm-python)")
    medians = {name: median(values) for name, values in rates.items()}
    unit = "processor second" if base.device == "cpu" else "second"
    for name, value in medians.items():
        print(f"{name:28s}{value:10.0f} tokens per {unit}")
    print(f"largest difference of the native engine's log-probs from the model's own forward pass: {far:.2g}")
    pairs = {"generate": "native", "continuous batching, full": "native, full", "vllm, full": "native, full"}
    ratios = {other: significant(medians[ours] / medians[other]) for other, ours in pairs.items() if other in medians}
    result = {"workload": asdict(base), "rounds": options.rounds, "tokens_per_second": medians, "ratios": ratios, "logp": far}
    save(f"vs_engines_{options.shape}_{base.dtype}_threads_{base.threads}", result)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
