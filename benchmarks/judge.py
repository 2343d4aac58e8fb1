"""The time of a step beside a judge that takes a second an answer, with sampling ahead of training and without.

python benchmarks/judge.py                   # a scripted judge and a scripted vLLM server, both over HTTP, and a real trainer
python benchmarks/judge.py --seconds 0.5 --steps 12
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import median

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/fixtures"))
GROUPS, COMPLETIONS, TOKENS = 2, 8, 24
TOKEN_SECONDS = 0.02
"""Of the sampling server."""
MODEL = {"hidden": 128, "layers": 4, "heads": 4, "context": 96, "tokenizer": "arithmetic"}


def recipe(url: str, judge: str, name: str, ahead: int, steps: int, folder: Path) -> dict[str, Any]:
    """A run whose completions come from a server and whose rewards come from a judge."""
    return {
        "name": name,
        "runs": str(folder / "runs"),
        "objective": "grpo",
        "steps": steps,
        "model": {"scratch": MODEL},
        "data": {"task": "addition", "limit": 1024, "eval_limit": 4},
        "rewards": [{"function": "judge", "args": {"url": judge, "model": "scripted", "mode": "rank"}}],
        "rollout": {"max_new_tokens": TOKENS, "engine": {"name": "vllm", "servers": [url], "ahead": ahead}},
        "group": {"prompts_per_step": GROUPS, "group_size": COMPLETIONS},
        "eval": {"every": 0, "at_start": False},
        "save": {"every": 0},
    }


def describe(folder: Path) -> int:
    """Write the model's configuration for the server; returns the size of its vocabulary."""
    from groupwise.config.settings import ScratchSettings
    from groupwise.data.tokenizers import make_tokenizer
    from groupwise.models.scratch import scratch_model

    tokenizer = make_tokenizer("arithmetic", ())
    settings = ScratchSettings(**MODEL)
    model = scratch_model(
        settings,
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
        bos_id=tokenizer.bos_token_id,
        seed=0,
    )
    model.config.save_pretrained(folder)
    return model.config.vocab_size


def step_seconds(tree: dict[str, Any]) -> list[float]:
    """Train all steps except the last, behind which there is an evaluation; return how long each took after the first two."""
    import groupwise as gw

    ends = []
    training = iter(gw.train(**tree))
    for _ in range(tree["steps"] - 1):
        next(training)
        ends.append(time.perf_counter())
    training.close()
    return [end - begin for begin, end in itertools.pairwise(ends[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="of an answer of the judge (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of each run (default %(default)s)")
    given = parser.parse_args()
    from scripted_judge import Server, by_digest
    from scripted_vllm import Process

    def slowly(answers: dict[str, str], body: dict[str, Any]) -> str:
        time.sleep(given.seconds)
        return by_digest(answers, body)

    judge = Server(slowly)
    with tempfile.TemporaryDirectory(prefix="judge-") as name:
        folder = Path(name)
        vocabulary = describe(folder / "model")
        print(f"{GROUPS} groups of {COMPLETIONS} a step, a call of the judge each, which takes {given.seconds:g} s")
        for ahead in (0, 1):
            server = Process(model=folder / "model", vocabulary=vocabulary, context=96, rows=16, tokens=TOKENS, delay=TOKEN_SECONDS)
            try:
                server.wait()
                seconds = step_seconds(recipe(server.url, judge.url, f"ahead-{ahead}", ahead, given.steps, folder))
            finally:
                server.close()
            print(f"ahead {ahead}: {median(seconds):.2f} s a step ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
