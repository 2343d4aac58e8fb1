"""What a user writes: type checkers read it (checkers.py), tests/runs/test_api.py runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import groupwise as gw


def short(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(gold in text) - 0.01 * len(text) for text, gold in zip(completions, answer, strict=True)]


def main(runs: Path) -> str:
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    training = gw.train(
        objective="grpo",
        model={"scratch": {"hidden": 32, "context": 64}},
        data={"path": rows, "eval_fraction": 0.25},
        rewards=[short, "accuracy", {"function": lambda completion: -float(len(completion)), "weight": 0.01, "name": "brief"}],
        steps=2,
        group={"prompts_per_step": 2, "group_size": 2},
        rollout={"max_new_tokens": 6},
        optimizer={"lr": 1e-3, "schedule": "cosine", "betas": (0.9, 0.95)},
        eval=gw.settings.EvalSettings(k=2),
        runs=str(runs),
        name="script",
    )
    rewards: list[float] = []
    for step in training:
        if step.number:
            rewards.append(step.metrics["reward"])
    recipe: gw.Recipe = training.recipe
    again: gw.Training = gw.train(recipe, name="again")
    outcome = again.run(quiet=True)
    policy = gw.load_policy(outcome.folder)
    text: str = policy.generate("1+1=", max_new_tokens=4)
    texts: list[str] = policy.generate(["1+1=", "2+2="], max_new_tokens=4, temperature=0.0)
    logp: np.ndarray = policy.score("1+1=", "2", end=True)
    return f"{len(rewards)} {outcome.steps} {len(texts)} {logp.shape} {len(text) > 0}"
