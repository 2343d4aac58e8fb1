"""A run on a hybrid: it learns, goes on to the same bits, and what it leaves behind is transformers' own model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.api.loaded_policy import load_policy
from groupwise.config.recipes import load_recipe
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.run import train

RECIPE = {
    "seed": 0,
    "threads": 1,
    "model": {"scratch": {"family": "qwen3_5", "hidden": 64, "layers": 3, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
    "data": {"task": "addition", "task_args": {"digits": 1}, "chat": True, "limit": 400},
    "rewards": [{"function": "accuracy"}],
    "rollout": {"max_new_tokens": 24},
    "eval": {"k": 2, "at_start": False},
}


def recipe(folder: Path, name: str, **changes: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"runs": str(folder / "runs"), "name": name} | changes))
    return path


@pytest.mark.slow
def test_a_hybrid_learns_resumes_to_the_bit_and_is_loaded_by_transformers(tmp_path: Path) -> None:
    sft = {"objective": "sft", "steps": 240, "batch_size": 16, "optimizer": {"lr": 3e-3, "warmup_steps": 10}}
    losses = [step.metrics["loss"] for step in train(load_recipe(recipe(tmp_path, "sft", **sft)))]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    grpo = {
        "objective": "grpo",
        "model": {"path": str(tmp_path / "runs" / "sft" / "final")},
        "steps": 6,
        "group": {"prompts_per_step": 8, "group_size": 4},
        "optimizer": {"lr": 3e-4},
        "save": {"every": 1},
    }
    for name, stops in (("straight", ()), ("broken", (2, 3))):
        for stop in (*stops, 99):
            for step in train(load_recipe(recipe(tmp_path, name, **grpo))):
                if step.number == stop:
                    break
    straight, broken = (tmp_path / "runs" / name for name in ("straight", "broken"))
    expected, found = (load_file(folder / "final" / "model.safetensors") for folder in (straight, broken))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    rewards = [line["reward"] for line in read_metrics(straight) if "reward" in line]
    assert np.mean(rewards) > 0.2, "what was learnt from demonstrations is there"
    policy = load_policy(straight)
    tokenizer = AutoTokenizer.from_pretrained(straight / "final")
    model = AutoModelForCausalLM.from_pretrained(straight / "final").eval()
    ours = policy.score("3+4=", "7")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "3+4="}], add_generation_prompt=True, tokenize=False)
    before, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, "7"))
    with torch.no_grad():
        logp = model(torch.tensor([before + answer])).logits[0, len(before) - 1 : -1].log_softmax(-1)
    theirs = logp.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert np.allclose(np.asarray(ours)[: len(answer)], theirs.numpy(), atol=1e-5)
