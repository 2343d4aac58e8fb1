"""Runs of every kind, each step of which is replayed bit for bit.  Some in the suite, all of them by

python tests/runs/replay_runs.py --steps 20
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from groupwise.config.recipes import load_recipe
from groupwise.inspection.replay import Replay, replay
from groupwise.runs.run import train

BASE: dict[str, Any] = {
    "seed": 3,
    "objective": "grpo",
    "steps": 3,
    "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
    "data": {"task": "addition", "limit": 64, "eval_limit": 2},
    "rewards": [{"function": "regex", "args": {"pattern": "[0-4]"}}, {"function": "repetition", "args": {"n": 1}, "weight": 0.5}],
    "rollout": {"max_new_tokens": 8},
    "group": {"prompts_per_step": 4, "group_size": 3},
    "optimizer": {"lr": 1e-2},
    "eval": {"k": 2, "at_start": False},
    "save": {"every": 1},
}

CASES: dict[str, dict[str, Any]] = {
    "packing": {"optimizer": {"tokens_per_microbatch": 24}},
    "adapter": {"model": {"lora": {"rank": 4}, "scratch": None}, "group": {"beta": 0.05}},
    "kl": {"group": {"beta": 0.05}},
    "passes": {"group": {"updates_per_rollout": 3}},
    "minibatches": {
        "group": {"minibatches": 2, "updates_per_rollout": 2, "beta": 0.05, "surrogate": {"name": "clipped", "high": 0.28}}
    },
    "refill": {"objective": "dapo", "optimizer": {"lr": 1e-3}},
    "refresh": {"group": {"beta": 0.05, "reference_refresh": 2, "reference_mix": 0.5}},
    "ahead": {"rollout": {"engine": {"name": "native", "ahead": 1}}, "group": {"minibatches": 2}},
    "support": {"rollout": {"top_p": 0.8, "temperature": 0.7}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "entropy": {"group": {"entropy_bonus": 0.01, "entropy_quantile": 0.5}},
    "adaptive": {"group": {"entropy_target": 9.0, "entropy_bonus": 0.01, "updates_per_rollout": 2}},
    "completion": {"objective": "gspo", "group": {"off_policy_delta": 0.1, "updates_per_rollout": 2}},
    "reward_kl": {"objective": "rloo", "group": {"beta": 0.05}},
    "bonus": {"group": {"entropy_bonus": 0.01}},
    "whitened": {"objective": "reinforce_pp", "group": {"beta": 0.05}},
    "schedule": {"optimizer": {"schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}, "save": {"every": 2}},
    "single": {"model": {"attention": "single"}, "rollout": {"engine": "transformers"}},
    "episodes": {
        "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 128, "tokenizer": "arithmetic"}},
        "data": {"task": "guessing", "task_args": {"highest": 14}, "chat": True, "limit": None},
        "environment": {"factory": "groupwise.environments.playground:Guess", "max_turns": 4, "runs": "thread"},
        "rollout": {"max_new_tokens": 48},
        "group": {"beta": 0.05, "minibatches": 2},
    },
    "recompute": {"model": {"gradient_checkpointing": True}, "group": {"weights": "token_mean"}},
}
"""What each run changes of `BASE`, merged one level deep."""


def recorded(root: Path, name: str, **changes: Any) -> Path:
    """Train a small run and return its folder."""
    tree = json.loads(json.dumps(BASE | {"name": name, "runs": str(root)}))
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
    if tree["model"]["scratch"] is None:
        base = root / "base"
        tree["model"]["path"] = str((base if base.is_dir() else recorded(root, "base", steps=1)) / "final")
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    for _ in train(load_recipe(path)):
        pass
    return root / name


def wrong(found: Replay) -> list[str]:
    """What keeps a replay from being bit for bit and whole."""
    problems = [f"{figure.name} differs by {figure.difference}" for figure in found.figures if not figure.same]
    names = {figure.name for figure in found.figures}
    if found.begun is None:
        problems.append("without a model")
    if found.apart is not None:
        problems.append(f"not bit for bit: {found.apart}")
    if not names >= {"rewards, added up", "advantages", "log-probs", "loss", "grad_norm"}:
        problems.append(f"only {sorted(names)} compared")
    problems += [note for note in found.notes if "no closed form" not in note]
    return problems


def main() -> int:
    """Train every case and replay every step of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in given.cases:
            folder = recorded(Path(temporary), name, steps=given.steps, **CASES[name])
            replays = {n: replay(folder, n) for n in range(1, given.steps + 1)}
            problems = {n: found for n, one in replays.items() if (found := wrong(one))}
            live = sum(one.recorded.metrics["grad_norm"] > 0 for one in replays.values())
            failed += bool(problems)
            same = given.steps - len(problems)
            print(f"{name:12} {same} of {given.steps} steps bit for bit, {live} with a gradient {problems or ''}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
