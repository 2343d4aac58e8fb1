"""Whole runs from recipes: SFT, reward model and GRPO against it; process supervision by one key; DPO; resuming; bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from groupwise.api.planning import plan_recipe
from groupwise.api.stages import train_recipe
from groupwise.config.recipes import parse_stages
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, OptimizerSettings, ReplaySettings, RewardSettings
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, Sampling
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.prepared import plan_of
from groupwise.runs.run import train
from groupwise.training.groups import SampledRollouts
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer

RECIPE = """
name: tiny
model: {{scratch: {{family: llama, hidden: 32, layers: 1, heads: 2, context: 64, tokenizer: arithmetic}}}}
data: {{path: {path}, template: "{{instruction}}=", eval_fraction: 0.25}}
runs: {runs}
save: {{every: 2}}
stages:
  sft: {{objective: sft, steps: 3, batch_size: 8, optimizer: {{lr: 1.0e-2}}, eval: {{at_start: false}}}}
  reward:
    objective: reward
    model: {{path: "stage:sft"}}
    steps: 4
    batch_size: 8
    optimizer: {{lr: 1.0e-2}}
    reward_model: {{pooling: mean}}
    eval: {{every: 2, batches: 1}}
  grpo:
    objective: grpo
    model: {{path: "stage:sft"}}
    steps: 2
    rewards: [{{function: model, args: {{path: "stage:reward", steps: regex, pattern: "[0-9+]"}}}}]
    group: {{prompts_per_step: 2, group_size: 4}}
    rollout: {{max_new_tokens: 12}}
    optimizer: {{lr: 1.0e-3}}
    eval: {{k: 2, prompts: 4}}
"""


def rows(count: int = 60) -> list[dict[str, str]]:
    """Sums whose chosen answer says `yes` and whose rejected one says `no`, with a line in between."""
    found = []
    for i in range(count):
        chosen, rejected = f"{i}+1\n{i + 1} yes", f"{i}+1\n{i + 1} no"
        found.append({"instruction": f"{i}+1", "input": "", "output": chosen, "chosen": chosen, "rejected": rejected})
    return found


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "pairs.json").write_text(json.dumps(rows()))
    return RECIPE.format(path=tmp_path / "pairs.json", runs=tmp_path / "runs")


def stages_of(recipe: str, *overrides: str) -> dict[str, Any]:
    return parse_stages(recipe, "recipe", list(overrides))


def metrics(tmp_path: Path, run: str) -> list[dict[str, Any]]:
    return read_metrics(tmp_path / "runs" / run)


@pytest.mark.slow
def test_sft_reward_model_and_grpo_in_one_command(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe)
    out = StringIO()
    assert plan_recipe(tmp_path / "recipe.yaml", console=Console(file=out, width=200)) == 0
    assert "other models" in out.getvalue()  # the memory plan, before any model exists
    out = StringIO()
    assert train_recipe(tmp_path / "recipe.yaml", console=Console(file=out, width=200)) == 0
    text = out.getvalue()
    for words in ("pair accuracy", "before grpo", "after grpo", "mean reward"):
        assert words in text, words
    assert "greedy accuracy" not in text  # a score of a model is not a verdict
    log = metrics(tmp_path, "tiny/reward")
    assert {"eval/accuracy", "eval/loss", "eval/margin", "eval/calibration/error"} <= {key for line in log for key in line}
    card = (tmp_path / "runs/tiny/reward/final/README.md").read_text()
    assert "pair accuracy" in card


@pytest.mark.slow
def test_process_supervision_is_one_key(recipe: str) -> None:
    found = {}
    first = stages_of(recipe)
    list(train(first["sft"]))
    list(train(first["reward"]))
    for credit in ("standardized", "process"):
        stage = stages_of(recipe, f"stages.grpo.group.credit={credit}")["grpo"]
        found[credit] = next(iter(train(replace(stage, name=f"tiny/{credit}", eval=replace(stage.eval, at_start=False)))))
    for outcome, process in zip(found["standardized"].groups, found["process"].groups, strict=True):
        np.testing.assert_array_equal(outcome.reward, process.reward)
    for group, advantages in zip(found["process"].groups, found["process"].advantages, strict=True):
        for signal, advantage in zip(group.signals["process"], advantages, strict=True):
            ends = np.flatnonzero(~np.isnan(signal))
            assert set(np.flatnonzero(np.diff(advantage))) <= set(ends[:-1])  # it changes only behind a step's last token
    assert any(np.ptp(a) > 0 for group in found["process"].advantages for a in group if a.size)
    assert not any(np.ptp(a) > 0 for group in found["standardized"].advantages for a in group if a.size)


def test_process_credit_needs_step_rewards(recipe: str, tmp_path: Path) -> None:
    stage = stages_of(recipe, "stages.grpo.group.credit=process")["grpo"]
    stage = replace(stage, model=replace(stages_of(recipe)["sft"].model), rewards=(RewardSettings(function="repetition"),))
    with pytest.raises(ConfigError, match=r"group\.credit reads rewards of steps, but none of the rewards"):
        list(train(stage))


@pytest.mark.slow
def test_a_reward_model_goes_on_with_new_pairs_and_a_share_of_old_ones(recipe: str, tmp_path: Path) -> None:
    stages = stages_of(recipe)
    first = replace(stages["reward"], model=stages["sft"].model, name="first")
    list(train(first))
    new = [{**row, "instruction": row["instruction"].replace("+1", "+2")} for row in rows(30)]
    (tmp_path / "new.json").write_text(json.dumps(new))
    second = replace(
        first,
        name="second",
        model=replace(first.model, path=str(tmp_path / "runs/first/final"), scratch=None),
        data=replace(first.data, path=str(tmp_path / "new.json")),
        reward_model=replace(first.reward_model, replay=ReplaySettings(path=str(tmp_path / "pairs.json"), share=0.25)),
    )
    last = list(train(second))[-1]
    assert last.evaluation is not None and last.evaluation["accuracy"] > 0.5
    with pytest.raises(ConfigError, match="pools 'mean'"):
        list(train(replace(second, name="third", reward_model=replace(second.reward_model, pooling="last"))))


@pytest.mark.slow
def test_a_process_reward_model_from_labelled_steps(tmp_path: Path, recipe: str) -> None:
    data = []
    for i in range(40):
        ok = i % 2 == 0
        data.append({"prompt": f"{i}+1=", "completions": [f"{i}+1", "yes" if ok else "no"], "labels": [True, ok]})
    (tmp_path / "steps.json").write_text(json.dumps(data))
    base = stages_of(recipe)["sft"]
    prm = replace(
        base, objective="prm", name="prm", steps=30, data=replace(base.data, path=str(tmp_path / "steps.json"), template=None)
    )
    assert list(train(prm))[-1].evaluation["accuracy"] > 0.9  # type: ignore[index]


def test_gpt2_with_dropout_scores_what_it_sampled_p08_p09(tiny_policy: Callable[..., Policy]) -> None:
    """Dropout 0.1, learning rate 0, several updates per rollout: every ratio 1, every KL 0, nothing clipped."""
    policy = tiny_policy("gpt2")
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(policy.model.config, name, 0.1)
    group = GroupSettings(prompts_per_step=3, group_size=4, beta=0.1, updates_per_rollout=2, minibatches=3)
    rewards = build_rewards([RewardSettings(function="repetition", args={"n": 1})], columns=[])

    def draw(count: int) -> Sequence[Prompt]:
        return [Prompt(id=f"0/{i}", tokens=np.array([10 + i, 20, 12]), text="", row={}) for i in range(count)]

    steps = train_online(
        policy,
        resolve("grpo", group, 12),
        SampledRollouts(
            algorithm=resolve("grpo", group, 12),
            engine=NativeEngine(policy, max_rows=8),
            rewards=rewards,
            draw=draw,
            sampling=Sampling(max_new_tokens=12),
            steps=2,
            group=group,
        ),
        Optimizer(policy.model, OptimizerSettings(lr=0.0), 12),
        group=group,
        max_tokens_per_microbatch=64,
        reference=frozen_copy(policy),
    )
    for step in steps:
        found = step.metrics
        assert found["ratio/max"] == pytest.approx(1.0, abs=1e-4) and found["ratio/min"] == pytest.approx(1.0, abs=1e-4)
        assert found["kl"] < 1e-6 and found["clip/low"] == 0.0 and found["clip/high"] == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": None}, "chosen"),
        ({"instruction": None}, "instruction"),
        ({"margin": "big"}, "margin is 'big'"),
    ],
)
def test_pairs_that_cannot_be_read_are_counted(recipe: str, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    row = {key: value for key, value in {**rows(1)[0], **change}.items() if value is not None}
    (tmp_path / "pairs.json").write_text(json.dumps([*rows(8), row]))
    plan = plan_of(replace(stages_of(recipe)["reward"], model=stages_of(recipe)["sft"].model))
    assert message in dict(plan)["read"]


@pytest.mark.slow
def test_pairs_that_cannot_be_used_are_counted(recipe: str, tmp_path: Path) -> None:
    good = rows(40)
    bad = [
        {**good[0], "instruction": "a", "chosen": ""},
        {**good[0], "instruction": "b", "chosen": "same", "rejected": "same"},
        {**good[0], "instruction": "c", "rejected": "1" * 100},
    ]
    (tmp_path / "pairs.json").write_text(json.dumps([*good, *bad]))
    stage = replace(stages_of(recipe, "data.eval_fraction=0.0")["reward"], model=stages_of(recipe)["sft"].model, steps=1)
    list(train(stage))
    card = (tmp_path / "runs/tiny/reward/final/README.md").read_text()
    for words in ("40 of 43 rows", "1 with an empty completion", "1 with chosen = rejected", "1 longer than"):
        assert words in card, words


def test_a_reward_model_cannot_be_the_policy(recipe: str, tmp_path: Path, tiny_policy: Callable[..., Policy]) -> None:
    from groupwise.models.reward_head import add_head

    causal = tiny_policy()
    model = add_head(causal.model, causal.tokenizer, causal.eos_ids, "last", seed=0)
    model.save_pretrained(tmp_path / "reward")
    causal.tokenizer.save_pretrained(tmp_path / "reward")
    stage = stages_of(recipe)["sft"]
    with pytest.raises(GroupwiseError, match="reward model"):
        list(train(replace(stage, model=replace(stage.model, path=str(tmp_path / "reward"), scratch=None))))


def test_the_validation_part_is_not_the_part_reported_at_the_end(recipe: str, tmp_path: Path) -> None:
    """Three parts: evaluation while training reads `validation`, the figures at the end and in the card are of `test`."""
    stage = stages_of(recipe, "data.eval_fraction={test: 0.3, validation: 0.2}")["reward"]
    stage = replace(stage, model=stages_of(recipe)["sft"].model, eval=replace(stage.eval, every=1, batches=None))
    steps = list(train(stage))
    counts = [sum(n for name, n in step.evaluation.items() if name.endswith("/pairs")) for step in steps if step.evaluation]
    card = (tmp_path / "runs/tiny/reward/final/README.md").read_text()
    found = re.search(r"(\d+) rows to train on .*?(\d+) for validation, (\d+) held out", card)
    assert found is not None
    trained, watched, reported = map(int, found.groups())
    assert counts == [reported, *[watched] * 3, reported] and trained + watched + reported == 60
