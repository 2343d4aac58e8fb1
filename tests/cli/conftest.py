"""A small finished run, and what it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from finished import train_sums

RECIPE = """\
# Sums whose answers are asked for by a template.
objective: grpo
name: demo/grpo
steps: 3
threads: 1
model: {scratch: {hidden: 32, context: 64, tokenizer: bytes}}
data: {path: rows.jsonl, eval_fraction: 0.3, columns: {prompt: question}, template: "Q: {prompt} A:"}
rewards: [{function: "my_rewards.py:digits"}, {function: "my_rewards.py:short", weight: 0.1}]
group: {prompts_per_step: 3, group_size: 4}
rollout: {max_new_tokens: 5}
eval: {k: 2}
save: {every: 2}
"""
REWARDS = """\
def digits(completions, answer, **_):
    return [float(any(c.isdigit() for c in text)) for text in completions]

def short(completion):
    return -len(completion) / 10
"""


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `my.yaml` has run to its end, in runs/demo/grpo."""
    folder = tmp_path_factory.mktemp("finished")
    return train_sums(folder, recipe=RECIPE, rewards=REWARDS, column="question", runs=[[]])


@pytest.fixture
def there(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory is the one of the finished run."""
    monkeypatch.chdir(finished)
    return finished
