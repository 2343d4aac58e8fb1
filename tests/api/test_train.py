"""Training from Python: the same run as from a file, with objects where a file has names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import peft
import pytest
import torch
import yaml
from encoders import encode_prompts
from rich.console import Console
from transformers import AutoModelForCausalLM

import groupwise as gw
from groupwise.api import train as api
from groupwise.api.loaded_policy import LoadedPolicy
from groupwise.cli.commands import main
from groupwise.config import settings
from groupwise.config.live_objects import Live
from groupwise.config.recipes import load_recipe
from groupwise.config.texts import demand_values
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.errors import ConfigError, DataError
from groupwise.models.saving import save
from groupwise.models.scratch import scratch_model
from groupwise.records import Prompt
from groupwise.rewards.code import proved_isolation
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.origin import Origin
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
STAMPS = ("time/", "wall", "tokens/per_second", "flops/per_second")


def digits(completion: str) -> float:
    return sum(char.isdigit() for char in completion) / 6


class Scale:
    def __call__(self, completion: str) -> float:
        return digits(completion)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def call(tiny_policy: Callable[..., gw.Policy]) -> Callable[..., gw.Training]:
    """`gw.train` of two small steps; keywords replace the given ones."""
    policy = tiny_policy()

    def train(**changes: Any) -> gw.Training:
        given = {
            "objective": "grpo",
            "model": policy,
            "data": ROWS,
            "rewards": [digits],
            "steps": 2,
            "group": {"prompts_per_step": 2, "group_size": 3},
            "rollout": {"max_new_tokens": 6},
            "optimizer": {"lr": 1e-3},
            "eval": {"at_start": False, "k": 2},
            "name": "mine",
        }
        return gw.train(**{key: value for key, value in (given | changes).items() if value is not None})

    return train


def metrics(name: str = "mine") -> list[dict[str, Any]]:
    lines = read_metrics(Path("runs", name))
    return [{key: value for key, value in line.items() if not key.startswith(STAMPS)} for line in lines]


# ---------------------------------------------------------------- objects


@pytest.mark.slow
def test_objects_give_the_run_that_files_give(call: Callable, tiny_policy: Callable) -> None:
    """The same rows, weights and reward, once as objects and once as files: the same numbers, to the bit."""
    list(call())
    policy = tiny_policy()
    save(policy, Path("start"))
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("mine.py").write_text(inspect.getsource(digits))
    list(call(model="start", data="rows.jsonl", rewards={"function": "mine.py:digits"}, name="files"))
    assert metrics() == metrics("files")
    assert metrics()[-1]["step"] == 2


@pytest.mark.slow
def test_a_dataset_a_list_and_a_file_are_the_same_rows(call: Callable) -> None:
    list(call(data=datasets.Dataset.from_list(ROWS), name="dataset"))
    list(call(name="list"))
    assert metrics("dataset") == metrics("list")
    assert call(data=datasets.Dataset.from_list(ROWS)).recipe == call().recipe


@pytest.mark.slow
def test_held_out_rows_are_objects_too(call: Callable) -> None:
    steps = list(call(data={"path": ROWS[:6], "eval_path": ROWS[6:]}, eval={"k": 2}))
    assert steps[0].number == 0
    assert steps[-1].evaluation is not None


@pytest.mark.slow
def test_the_loaded_model_stays_as_it_is(call: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    implementation = policy.model.config._attn_implementation
    list(call(model=policy.model, tokenizer=policy.tokenizer))
    after = policy.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert policy.model.config._attn_implementation == implementation
    trained = AutoModelForCausalLM.from_pretrained("runs/mine/final").state_dict()
    assert any(not torch.equal(trained[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_a_lambda_and_a_closure_reward(call: Callable) -> None:
    wanted = "7"
    training = call(rewards=[lambda completion: float(wanted in completion), gw.LiveReward(function=digits, weight=0.5)])
    assert [reward.name for reward in training.recipe.rewards] == ["reward_1", "digits"]
    steps = list(training)
    for group in steps[-1].groups:
        assert group.names == ("reward_1", "digits")
        for rollout, row in zip(group.rollouts, group.rewards, strict=True):
            assert row.tolist() == [float("7" in rollout.text), digits(rollout.text)]


@pytest.mark.slow
def test_two_runs_in_one_process(call: Callable) -> None:
    """Also at the same time: one is iterated while the other one goes on."""
    alone = [step.metrics["reward"] for step in call(name="alone")]
    first, second = iter(call(name="first")), iter(call(name="second", seed=1))
    rewards = [(one.metrics["reward"], other.metrics["reward"]) for one, other in zip(first, second, strict=True)]
    assert [one for one, _ in rewards] == alone
    assert len(rewards) == 2


@pytest.mark.slow
def test_an_adapter_on_a_loaded_model(call: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    for stop in (1, 9):  # the second goes on with the adapter of the first
        for step in call(model={"path": policy, "lora": {"rank": 2}}, save={"every": 1}):
            if step.number == stop:
                break
    assert not hasattr(policy.model, "peft_config")
    assert Path("runs/mine/final/adapter").is_dir()
    assert [line["step"] for line in metrics()] == [1, 2]


@pytest.mark.slow
def test_data_set_objectives_take_objects(call: Callable) -> None:
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(8)]
    sft = call(objective="sft", data=rows, rewards=None, group=None, batch_size=4)
    assert [step.number for step in sft] == [1, 2]
    pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "x"} for i in range(8)]
    dpo = call(objective="dpo", data=pairs, rewards=None, group=None, batch_size=4, name="dpo")
    assert [step.number for step in dpo] == [1, 2]


# ---------------------------------------------------------------- the folder, and going on


@pytest.mark.slow
def test_the_folder_names_the_objects(call: Callable) -> None:
    list(call(rewards=[digits, "accuracy"]))
    written = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert re.fullmatch(r"live:LlamaForCausalLM \([0-9a-f]{8}\)", written["model"]["path"])
    assert re.fullmatch(r"live:8 rows \([0-9a-f]{8}\)", written["data"]["path"])
    assert [reward["function"] for reward in written["rewards"]] == ["live:digits", "accuracy"]
    card = Path("runs/mine/final/README.md").read_text()
    assert "base_model" not in card
    assert "live:LlamaForCausalLM" in card


@pytest.mark.slow
def test_the_same_call_resumes_to_the_same_bits(call: Callable) -> None:
    list(call(name="straight", steps=4))
    for step in call(steps=4):
        if step.number == 2:
            break
    numbers = [step.number for step in call(steps=4)]
    assert numbers == [3, 4]
    assert metrics() == metrics("straight")
    left, right = (AutoModelForCausalLM.from_pretrained(f"runs/{name}/final").state_dict() for name in ("mine", "straight"))
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "told"),
    [
        ("model", "model.path 'live:LlamaForCausalLM (.*)' stands for an object .* as model="),
        ("data", r"data.path 'live:8 rows \(.*\)' stands for an object .* as data="),
        ("rewards", "rewards.0.function 'live:digits' stands for an object .* as rewards="),
    ],
)
def test_resuming_asks_for_the_objects(part: str, told: str, call: Callable, tiny_policy: Callable) -> None:
    for step in call():
        if step.number == 1:
            break
    objects = {"model": tiny_policy(), "data": ROWS, "rewards": [digits]}
    del objects[part]
    with pytest.raises(ConfigError, match=told):
        list(gw.train("runs/mine/config.yaml", **objects))
    assert [step.number for step in gw.train("runs/mine/config.yaml", model=tiny_policy(), data=ROWS, rewards=[digits])] == [2]


@pytest.mark.slow
def test_resuming_with_other_objects_is_refused(call: Callable, tiny_policy: Callable) -> None:
    for step in call():
        if step.number == 1:
            break
    with pytest.raises(ConfigError, match=r"data.path: 'live:8 rows \(.*\)' -> 'live:7 rows"):
        list(call(data=ROWS[1:]))
    with pytest.raises(ConfigError, match=r"model.path: 'live:Llama.*' -> 'live:Llama"):
        list(call(model=tiny_policy(seed=1)))
    changed = lambda completion: 1.0 - digits(completion)  # noqa: E731
    with pytest.raises(ConfigError, match=r"rewards.0.function: 'live:digits' -> 'live:reward_1'"):
        list(call(rewards=[changed]))
    changed.__name__ = "digits"  # what a function does is not looked at
    assert [step.number for step in call(rewards=[changed])] == [2]


@pytest.mark.slow
def test_what_is_trained_on_are_the_rows_of_the_call(call: Callable) -> None:
    def measured(completions: list[str], answer: list[list[str]], **_: Any) -> list[float]:
        return [float(len(one[0])) for one in answer]

    def rows() -> list[dict[str, Any]]:
        return [{"prompt": row["prompt"], "answer": ["2"]} for row in ROWS]

    given = rows()
    training = call(data=given, rewards=[gw.LiveReward(function=measured, runs="here")])
    for row in given:
        row["prompt"] = "9+9="
    del given[0]
    seen = set()
    for step in training:
        seen |= {group.prompt.text for group in step.groups}
        assert {value for group in step.groups for value in group.reward.tolist()} == {1.0}
        for row in given:
            row["answer"][0] = "22222"
    assert seen <= {row["prompt"] for row in ROWS}
    assert call(data=rows()).recipe.data.path == training.recipe.data.path


@pytest.mark.slow
def test_a_model_that_changes_between_call_and_first_step_is_refused(call: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    training = call(model=policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    with pytest.raises(ConfigError, match=r"has changed since `train` was called \(live:Llama.* then, live:Llama.* now\)"):
        next(iter(training))
    assert not Path("runs").exists()
    assert next(iter(call(model=tiny_policy()))).number == 1


@pytest.mark.slow
def test_fresh_takes_the_next_name(call: Callable) -> None:
    list(call(steps=1))
    assert call(steps=1, fresh=True).folder == Path("runs/mine-2")


@pytest.mark.slow
def test_a_run_that_has_finished_says_so_and_trains_on_with_more_steps(call: Callable, caplog: pytest.LogCaptureFixture) -> None:
    assert [step.number for step in call(steps=1)] == [1]
    assert not caplog.messages
    assert list(call(steps=1)) == []
    assert call(steps=1).run(quiet=True).steps == 0
    told = "runs/mine finished at step 1: nothing is left to train; fresh=True starts anew, more steps continue it"
    assert caplog.messages == [told, told]
    caplog.clear()
    assert [step.number for step in call(steps=2)] == [2]
    assert not caplog.messages


# ---------------------------------------------------------------- a recipe with keywords over it


def test_a_file_with_keywords_over_it(call: Callable) -> None:
    Path("r.yaml").write_text(
        "objective: grpo\nsteps: 5\nname: file\nmodel: {scratch: {hidden: 32}}\ndata: {task: sums}\n"
        "rewards: [{function: accuracy}]\noptimizer: {lr: 1.0e-4, schedule: cosine}\n"
    )
    made = gw.train("r.yaml", steps=2, optimizer={"lr": 1e-3}, data=ROWS).recipe
    assert (made.steps, made.optimizer.lr, made.optimizer.schedule, made.data.task) == (2, 1e-3, "cosine", None)
    assert made.rewards == load_recipe("r.yaml").rewards
    assert gw.train("r.yaml").recipe == load_recipe("r.yaml")
    assert gw.train(load_recipe("r.yaml"), epochs=None, seed=3).recipe.seed == 3
    over = gw.train(gw.train("r.yaml", data=ROWS).recipe, seed=3).recipe  # objects of the recipe stay
    assert isinstance(over.data.path, Live)


def test_stages_are_taken_one_by_one() -> None:
    with pytest.raises(ConfigError, match="holds the stages sft, grpo: load_stages gives them one by one"):
        gw.train("demo")
    stage = gw.load_stages("demo")["grpo"]
    assert gw.train(stage).recipe == stage
    assert gw.train(stage, steps=3).recipe.model.path == "stage:sft"


def test_sections_as_their_dataclasses_and_numbers_of_numpy(call: Callable) -> None:
    made = call(optimizer=settings.OptimizerSettings(lr=1e-4), steps=np.int64(3), runs=Path("elsewhere")).recipe
    assert (made.optimizer.lr, made.steps, made.runs) == (1e-4, 3, "elsewhere")


# ---------------------------------------------------------------- what was given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"lr": 1e-4}, r"unknown key 'lr' \(did you mean optimizer.lr\?\)"),
        ({"rewards": [{"function": digits, "wieght": 2.0}]}, r"rewards.0.wieght' \(did you mean rewards.N.weight\?\)"),
        ({"reward_funcs": digits}, r"unknown key 'reward_funcs' \(TRL name; here it is rewards\)"),
        ({"train_dataset": ROWS}, r"here it is data.path"),
        ({"environment_factory": Scale}, r"here it is environment.factory"),
        ({"peft_config": Scale()}, r"here it is model.lora"),
        ({"args": Scale()}, r"unknown key 'args'"),
        (
            {"model": {"scratch": {}, "lora": peft.LoraConfig(r=8)}},
            "model.lora is a LoraConfig, which no recipe can hold: give plain values, e.g. model=.*'rank'",
        ),
        ({"steps": 1e3}, r"steps must be a whole number at least 1, or null; got 1000.0 \(write 1000\)"),
        ({"model": 3}, "model is a checkpoint's folder .*, got an int: 3"),
        ({"model": torch.nn.Linear(2, 2)}, "got a Linear"),
        ({"data": 3}, "data is a list of mappings or a datasets.Dataset, got an int: 3"),
        ({"data": iter(ROWS)}, r"got a list_iterator: give list\(...\)"),
        ({"data": {0, 1}}, r"got a set: .*: give list\(...\)"),
        ({"data": {"prompt": ["1", "2"], "answer": ["1", "2"]}}, r"columns 'prompt', 'answer': give rows, .*from_dict\(data\)"),
        ({"data": []}, "data holds no rows"),
        ({"data": [ROWS[0], "2+2="]}, "data row 2 is a str: '2\\+2=': a row is a mapping"),
        ({"data": [{"prompt": "\ud83d"}]}, "data row 1: half of a character"),
        ({"data": datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})}, r"DatasetDict with the splits 'train'"),
        ({"data": pd.DataFrame(ROWS)}, r"got a DataFrame: give frame.to_dict\('records'\)"),
        ({"data": {"path": ROWS, "eval_path": 3}}, "eval_data is a list of mappings .* got an int: 3"),
        ({"rewards": 3}, "rewards is a function, its name, or a list of them, got an int: 3"),
        ({"rewards": [3]}, "rewards.0 is a function, .* got an int: 3"),
        ({"rewards": [Scale]}, "rewards.0 is the class Scale: give an instance of it"),
        ({"rewards": [digits, digits]}, "two rewards are called 'digits'"),
        ({"rewards": {"function": digits, "args": {"x": object()}}}, r"rewards.0.args.x is an object, which no recipe can hold"),
    ],
)  # fmt: skip
def test_wrong_keywords_say_what_was_given(given: dict[str, Any], told: str, call: Callable) -> None:
    with pytest.raises((ConfigError, DataError), match=told):
        call(**given)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_wrong_models_say_what_was_given(call: Callable, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    with pytest.raises(ConfigError, match=r"a loaded model needs its tokenizer: .*; got None"):
        call(model=policy.model)
    with pytest.raises(ConfigError, match="a Policy has its tokenizer"):
        call(tokenizer=policy.tokenizer)
    with pytest.raises(ConfigError, match="a checkpoint brings its own"):
        call(model="some/model", tokenizer=policy.tokenizer)
    half = tiny_policy().model.half()
    with pytest.raises(ConfigError, match="the model's weights are float16: say in which type"):
        call(model=half, tokenizer=policy.tokenizer)
    assert call(model={"path": half, "dtype": "float32"}, tokenizer=policy.tokenizer).plan()
    with pytest.raises(ConfigError, match=r"a recipe is a file's path, .* got a dict: .* keywords"):
        gw.train({"objective": "sft"})  # type: ignore[arg-type]
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(policy.model, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"got a PeftModel.*: merge its adapter first"):
        call(model=adapted, tokenizer=policy.tokenizer)


def test_all_mistakes_at_once(call: Callable) -> None:
    with pytest.raises(ConfigError) as error:
        call(steps=0, optimizer={"lr": "fast"}, grup={"group_size": 2})
    assert all(told in str(error.value) for told in ("steps must be", "optimizer.lr must be", "'grup' (did you mean group?)"))


# ---------------------------------------------------------------- plan and screen


def test_a_plan_shows_itself_as_the_command_prints_it() -> None:
    plan = api.RunPlan([("data", "64 prompts"), ("a step", "9 completions")])
    assert repr(plan) == "data    64 prompts\na step  9 completions"
    assert plan == [("data", "64 prompts"), ("a step", "9 completions")]


@pytest.mark.slow
def test_the_plan_is_the_runs_own_and_run_shows_it(call: Callable) -> None:
    training = call(data={"path": ROWS, "eval_fraction": 0.3})
    plan = dict(training.plan())
    assert not Path("runs").exists(), "a plan writes nothing"
    assert plan["in all"].startswith("2 steps, 12 completions")
    said = io.StringIO()
    outcome = training.run(console=Console(file=said, width=200))
    assert outcome.steps == 2
    assert outcome.after is not None
    assert plan["a step"] in said.getvalue()
    assert "runs/mine/final" in said.getvalue()
    assert "held out" in said.getvalue()
    assert "groupwise view runs/mine" in said.getvalue()
    assert training.run(quiet=True, console=Console(file=io.StringIO())).steps == 0, "a finished run is not trained on"


# ---------------------------------------------------------------- evaluated


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


@pytest.mark.slow
def test_a_run_of_objects_is_evaluated_on_objects(call: Callable) -> None:
    training = call(data={"path": ROWS, "eval_fraction": 0.4}, rewards=[right])
    outcome = training.run(quiet=True, console=Console(file=io.StringIO()))
    found = gw.evaluate("runs/mine", data=ROWS, rewards=[right]).evaluation
    assert outcome.after is not None
    assert found.prompts == outcome.after.prompts < len(ROWS), "what the run held out of these rows"
    assert str(found.greedy) == str(outcome.after.greedy)
    others = [{"prompt": "1+2=", "answer": "3"}]
    for rewards in (right, [gw.LiveReward(function=right, name="mine")], {"function": right, "weight": 2.0}, "accuracy"):
        assert gw.evaluate("runs/mine", data=others, rewards=rewards, k=1).evaluation.prompts == 1
    assert gw.evaluate("runs/mine/final", data=datasets.Dataset.from_list(others), rewards=right, k=1).evaluation.prompts == 1
    for given, said in (
        ({}, r"evaluated on rows of the program that trained it \(live:8 rows .*\): give data=ROWS"),
        ({"data": others}, r"judged by a function of the program that trained it \(live:right\): give rewards=\[FUNCTION\]"),
        ({"data": 3, "rewards": right}, "data is a list of mappings"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            gw.evaluate("runs/mine", **given)


@pytest.mark.slow
def test_errors_speak_the_words_of_whoever_called(call: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    list(call(steps=1))
    with pytest.raises(ConfigError, match=r"undo the change, choose another name=..., or start anew with fresh=True"):
        list(call(steps=1, seed=5))
    assert main(["train", "runs/mine/config.yaml", "seed=5"]) == 2
    assert "or start anew with --fresh" in capsys.readouterr().err
    assert main(["eval", "runs/mine"]) == 2
    assert "give --data FILE" in capsys.readouterr().err


@pytest.mark.slow
def test_a_function_that_raised_may_come_back_repaired(call: Callable) -> None:
    def reward(completion: str) -> float:
        if Path("broken").exists():
            raise ValueError("no number")
        return digits(completion)

    def repaired(completion: str) -> float:
        return digits(completion)

    repaired.__name__ = "reward"
    steps = iter(call(rewards=[reward], steps=3, save={"every": 1}))
    assert next(steps).number == 1
    Path("broken").touch()
    place = r"ValueError: no number .*on completion \d of row \d+ \(epoch \d+\); the completion: '"
    with pytest.raises(gw.GroupwiseError, match=place) as caught:
        next(steps)
    assert not any("accept_changes" in note for note in caught.value.__notes__), "of an object only the name counts"
    assert [step.number for step in call(rewards=[repaired], steps=3, save={"every": 1})] == [2, 3]


# ---------------------------------------------------------------- a trained policy


@pytest.mark.slow
def test_generate_is_the_engines_and_score_the_scorers(call: Callable) -> None:
    list(call())
    policy = gw.load_policy("runs/mine")
    assert isinstance(policy, gw.Policy)
    asked = ["1+1=", "12+30=", "1+1="]
    sampling = gw.Sampling(temperature=0.7, max_new_tokens=5)
    encoded = [Prompt(id=str(i), tokens=np.array(policy.tokenizer(text)["input_ids"]), text=text) for i, text in enumerate(asked)]
    drawn = gw.NativeEngine(policy, max_rows=8).generate(encoded, group_size=1, sampling=sampling, seed=4)
    rollouts = {rollout.prompt.id: rollout for (rollout,) in drawn}
    texts = policy.generate(asked, max_new_tokens=5, temperature=0.7, seed=4)
    assert texts == [rollouts[str(i)].text for i in range(3)]
    assert policy.generate(asked[0], max_new_tokens=5, temperature=0.7, seed=4) == texts[0]
    greedy = policy.generate([asked[0], asked[0]], max_new_tokens=5, temperature=0)
    assert greedy[0] == greedy[1]

    samples = [sample_of(rollouts[str(i)]) for i in range(3)]
    expected = score(policy, samples, max_tokens_per_microbatch=1000).logp
    found = policy.score(asked, [rollout.tokens for rollout in (rollouts[str(i)] for i in range(3))], temperature=0.7)
    for one, other, rollout in zip(found, expected, (rollouts[str(i)] for i in range(3)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(one, rollout.behavior_logp, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_score_is_the_models_own_log_probs(call: Callable) -> None:
    list(call())
    policy = gw.load_policy("runs/mine/final")
    model = AutoModelForCausalLM.from_pretrained("runs/mine/final")
    prompt, completion = (policy.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1+1=", "23"))
    ids = [*prompt, *completion, policy.eos_ids[0]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :, : policy.vocabulary]
    logp = torch.log_softmax(logits, -1)[range(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].numpy()
    np.testing.assert_allclose(policy.score("1+1=", "23", end=True), logp, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(policy.score("1+1=", "23"), logp[:-1], rtol=1e-4, atol=1e-5)
    assert policy.score("1+1=", "").shape == (0,)


@pytest.mark.slow
def test_a_loaded_policy_asks_as_its_run_did(call: Callable) -> None:
    list(call(data={"path": ROWS, "chat": True, "system": "12+3"}, save={"every": 1}))
    for path in ("runs/mine", "runs/mine/final", "runs/mine/checkpoints/000002"):
        policy = gw.load_policy(path)
        assert (policy.data.chat, policy.data.system) == (True, "12+3"), path
        messages = [{"role": "user", "content": "2+2="}]
        as_text, as_messages = policy.generate("2+2=", max_new_tokens=4), policy.generate(messages, max_new_tokens=4)
        assert as_text == as_messages
        np.testing.assert_array_equal(policy.score("2+2=", "4"), policy.score(messages, "4"))
    shutil.copytree("runs/mine/final", "elsewhere")
    assert not gw.load_policy("elsewhere").data.chat
    bare, chat = gw.load_policy("elsewhere").score("2+2=", "4"), gw.load_policy("runs/mine").score("2+2=", "4")
    assert abs(float(bare[0] - chat[0])) > 1e-6


@pytest.mark.slow
def test_a_loaded_policy_and_an_evaluation_write_the_date_of_their_run(call: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    dated = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    scratch = {"hidden": 16, "context": 64, "tokenizer": "arithmetic"}
    model = {"scratch": scratch, "chat_template": dated}
    list(call(model=model, data={"path": ROWS, "chat": True}, steps=1))
    record = json.loads(Path("runs/mine/environment.json").read_text())
    record["attempts"][0]["time"] = 86400.0 * 366 * 10
    Path("runs/mine/environment.json").write_text(json.dumps(record))
    Path("runs/mine/checksums.txt").unlink()
    policy = gw.load_policy("runs/mine")
    assert policy._questions(["2+2="])[0].text == "19802+2="
    evaluate = importlib.import_module("groupwise.api.evaluate")
    texts: list[str] = []

    inner = evaluate.evaluate_prompts

    def watched(recipe: Any, rewards: Any, engine: Any, prompts: Any, *rest: Any) -> Any:
        texts.extend(prompt.text for prompt in prompts)
        return inner(recipe, rewards, engine, prompts, *rest)

    monkeypatch.setattr(evaluate, "evaluate_prompts", watched)
    gw.evaluate("runs/mine", task="addition", limit=2, k=1, rewards=["accuracy"])
    assert len(texts) == 2 and all(text.startswith("1980") for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("control", ["warn", "plain"])
def test_a_loaded_policy_shows_tools_and_writes_control_tokens_as_its_run_did(
    control: str, tiny_policy: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    rows = [{"prompt": "1<|end|>+1=", "tools": [tool]}, {"prompt": "2+2="}]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if tools %}{{ tools | length }}{% endif %}" + tokenizer.chat_template
    template = Template(tokenizer=tokenizer, chat=True, control_tokens=control)
    trained, _ = encode_prompts(SourceRows("f", rows), template, max_tokens=99)
    own = LoadedPolicy.of(tiny_policy())
    asking = settings.DataSettings(chat=True, control_tokens=control)
    loaded = dataclasses.replace(own, tokenizer=tokenizer, data=asking)
    asked = loaded._questions(rows)
    assert [question.tokens.tolist() for question in asked] == [prompt.tokens.tolist() for prompt in trained]
    renamed = dataclasses.replace(loaded, data=dataclasses.replace(asking, columns={"prompt": "question", "tools": "functions"}))
    (asked_so,) = renamed._questions([{"question": rows[0]["prompt"], "functions": [tool]}])
    assert asked_so.tokens.tolist() == trained[0].tokens.tolist()
    assert "cannot be read" not in caplog.text
    loaded._questions([{"prompt": "1+1=", "tools": "not a list"}])
    assert "prompt 0: the tools in its row cannot be read" in caplog.text
    with pytest.raises(DataError, match="prompt 0 is empty"):
        loaded.generate({"messages": [{"role": "assistant", "content": "1"}]})


def test_what_a_run_has_lost_of_its_prompts_is_told(tiny_policy: Callable, caplog: pytest.LogCaptureFixture) -> None:
    """The file of a run holds no secrets; a prompt without one of its words is another prompt."""
    recipe = settings.Recipe(name="r", objective="grpo", data=settings.DataSettings(task="addition", system="be brief"))
    LoadedPolicy.of(tiny_policy(), Origin(folder=Path("r"), recipe=recipe, config=""))
    assert not caplog.records
    cut = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, system="the password: [redacted], tell nobody"))
    LoadedPolicy.of(tiny_policy(), Origin(folder=Path("r"), recipe=cut, config=""))
    assert "data.system was taken for a secret, and is [redacted] in the run" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.system is 'the password: \[redacted\], tell nobody': a run's"):
        demand_values(cut.data, "data")


@pytest.mark.parametrize(("environment", "conversed"), [({"tool_timeout": 5.0}, False), ({"tools": ("my_tools.py:add",)}, True)])
def test_a_policy_of_single_turns_is_not_taken_for_a_conversing_one(
    environment: dict[str, Any], conversed: bool, tiny_policy: Callable
) -> None:
    recipe = settings.Recipe(name="r", objective="grpo", environment=settings.EnvironmentSettings(**environment))
    policy = LoadedPolicy.of(tiny_policy(), Origin(folder=Path("r"), recipe=recipe, config=""))
    assert policy.conversed == conversed
    assert policy.data.chat == conversed, "rows of an environment may hold messages without data.chat"


@pytest.mark.slow
def test_wrong_questions_say_what_was_given(call: Callable) -> None:
    list(call())
    policy = gw.load_policy(Path("runs/mine"))
    with pytest.raises(DataError, match=r"a prompt is a text, .* got an int: 3"):
        policy.generate(3)  # type: ignore[call-overload]
    with pytest.raises(DataError, match=r"prompt 1 is a text, a row or a list of chat messages, got an int: 3"):
        policy.generate(["1+1=", 3])  # type: ignore[list-item]
    for given in ("", ["1+1=", ""]):
        with pytest.raises(DataError, match=r"prompt \d is empty"):
            policy.generate(given)  # type: ignore[call-overload]
    with pytest.raises(gw.GroupwiseError, match=r"temperature is a number from 0 .* got a str: 'hot'"):
        policy.generate("1", temperature="hot")  # type: ignore[call-overload]
    with pytest.raises(DataError, match="got 1 of 2"):
        policy.score(["1", "2"], ["3"])
    with pytest.raises(DataError, match="outside the vocabulary"):
        policy.score("1", [10**6])
    with pytest.raises(DataError, match="more than the context of 96"):
        policy.score("1", "1" * 200)
    for temperature in (0, math.nan, math.inf):
        with pytest.raises(DataError, match="finite temperature above 0"):
            policy.score("1", "1", temperature=temperature)
    with pytest.raises(ConfigError, match=r"from model.path; `scratch` makes one"):
        gw.load_policy(settings.ModelSettings(scratch=settings.ScratchSettings()))
    with pytest.raises(gw.GroupwiseError, match=r"no such|neither"):
        gw.load_policy("runs/none")


# ---------------------------------------------------------------- types


def test_the_signature_has_every_setting() -> None:
    """And each section's own dataclass among its types."""
    recipe = {field.name: str(field.type) for field in fields(settings.Recipe)}
    keys = {name: str(kind) for name, kind in api.RecipeKeys.__annotations__.items()}
    assert list(keys) == list(recipe)
    for name, kind in recipe.items():
        if kind.endswith("Settings"):
            assert kind in keys[name], name


def test_the_version_is_the_packages() -> None:
    assert gw.__version__ == importlib.metadata.version("groupwise")


def test_the_packages_names_are_the_same_for_type_checkers_and_python() -> None:
    import ast

    tree = ast.parse(Path(gw.__file__).read_text())
    typed = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: f"groupwise.{module}" for name, module in gw._WHERE.items()}
    assert sorted(typed) == sorted(gw.__all__)
    assert all(getattr(gw, name) is not None for name in gw.__all__)
    assert Path(gw.__file__).with_name("py.typed").is_file()


SCRIPT = ROOT / "tests" / "python_api" / "user_script.py"


@pytest.mark.slow
def test_the_users_script_runs(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("user_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(tmp_path / "runs") == "2 2 2 (2,) True"


def test_rows_that_are_left_out_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also to whoever iterates and sees no plan."""
    rows = [{"prompt": "1+1="}, {"prompt": None}, {"x": 1}, {"prompt": ""}, {"prompt": "1+2="}]
    given = {
        "objective": "grpo",
        "name": "few",
        "runs": str(tmp_path),
        "steps": 1,
        "model": {"scratch": {"hidden": 16}},
        "data": rows,
    }
    given |= {"rewards": lambda completions, **_: [float(len(text)) for text in completions], "rollout": {"max_new_tokens": 2}}
    with pytest.raises(ConfigError, match=r"only 2 prompts: .* \(3 of 5 rows of data are left out: .*first: data row"):
        list(gw.train(**given, group={"prompts_per_step": 3, "group_size": 2}))
    list(gw.train(**given, group={"prompts_per_step": 2, "group_size": 2}))
    assert "3 of 5 rows of data are left out" in caplog.text


LEFT = """
import os, sys

import groupwise as gw

training = gw.train(
    objective="grpo", name="left", steps=4, model={"scratch": {"hidden": 16, "layers": 1, "heads": 2, "tokenizer": "arithmetic"}},
    data={"task": "addition", "limit": 8}, rewards=lambda completions, **_: [float(len(text)) for text in completions],
    group={"prompts_per_step": 2, "group_size": 2}, rollout={"max_new_tokens": 4}, eval={"at_start": False},
)
steps = iter(training)
print(next(steps).number, flush=True)
fork = os.fork()
if fork == 0:
    os.close(2)  # what its end prints of what it left
    sys.exit()  # the run is the parent's
os.waitpid(fork, 0)
print(os.path.exists("runs/left/checkpoints"), next(steps).number)
"""


@pytest.mark.slow
def test_a_program_that_ends_between_two_steps_saves_the_last(tmp_path: Path) -> None:
    """Iterated over by `next`, so that nobody has left the loop."""
    ended = subprocess.run([sys.executable, "-c", LEFT], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240)
    assert ended.stdout == "1\nFalse 2\n"
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    assert [path.name for path in (tmp_path / "runs" / "left" / "checkpoints").iterdir()] == ["000002"]


BOARD = """\
import atexit
from groupwise.runs import dashboards

class Board:
    identity, address = None, "here"
    write = table = lambda self, *_: None
    def close(self, finished):
        print("the run closes its board")

def begin(about):
    atexit.register(print, "the board's library ends")
    return Board()

dashboards.BOARDS["tensorboard"] = (begin, "")
"""
PAIR = """\
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
import os
other = os.fork()
os.environ.update(RANK=str(int(not other)), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
"""


@pytest.mark.slow
def test_a_loop_is_left_before_its_dashboards_library_ends(tmp_path: Path) -> None:
    program = BOARD + LEFT.replace('"at_start": False}', '"at_start": False}, save={"report_to": ["tensorboard"]}')
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=240)
    assert ended.stdout.splitlines()[-2:] == ["the run closes its board", "the board's library ends"]


@pytest.mark.slow
def test_the_first_of_several_processes_saves_when_they_end_between_two_steps(tmp_path: Path) -> None:
    program = PAIR + LEFT.partition("fork = ")[0] + "next(steps)\nif other: os.waitpid(other, 0)\n"
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert "Traceback" not in ended.stderr and "Exception" not in ended.stderr
    assert [path.name for path in (tmp_path / "runs" / "left" / "checkpoints").iterdir()] == ["000002"]


def completions(wanted: dict[str, set[str]], folder: Path) -> dict[str, set[str]]:
    """What pyright's language server offers at the end of each text: what an editor shows.   wanted: what is waited for."""
    source = str(Path(gw.__file__).parents[1])
    opened, asked_of = [], []
    for count, text in enumerate(wanted):
        uri = (folder / f"editor_{count}.py").as_uri()
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        place = {"line": text.count("\n"), "character": len(text.rpartition("\n")[2])}
        opened.append({"method": "textDocument/didOpen", "params": {"textDocument": document}})
        asked_of.append({"method": "textDocument/completion", "params": {"textDocument": {"uri": uri}, "position": place}})
    messages = [
        {"id": 1, "method": "initialize", "params": {"processId": os.getpid(), "rootUri": folder.as_uri(), "capabilities": {}}},
        {"method": "initialized", "params": {}},
        *opened,
        {"id": 2} | asked_of[0],
    ]
    found: dict[str, set[str]] = {}
    server = subprocess.Popen(
        [sys.executable, "-m", "pyright.langserver", "--stdio"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
        env=os.environ | {"PYTHONPATH": source, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None

    def send(message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0"} | message).encode()
        server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))  # type: ignore[union-attr]
        server.stdin.flush()  # type: ignore[union-attr]

    try:
        for message in messages:
            send(message)
        while True:
            size = 0
            while (header := server.stdout.readline().strip()) != b"":
                size = int(header.partition(b":")[2]) if header.lower().startswith(b"content-length") else size
            assert size, "the language server has ended"
            message = json.loads(server.stdout.read(size))
            if "method" in message and "id" in message:  # it asks for its settings
                items = message["params"].get("items", []) if isinstance(message["params"], dict) else []
                send({"id": message["id"], "result": [None] * len(items)})
            elif (asked := message.get("id", 0)) >= 2:
                text, offered = list(wanted)[len(found)], message["result"]
                labels = {item["label"].strip("\"'") for item in (offered["items"] if isinstance(offered, dict) else offered)}
                if wanted[text] <= labels or asked > 60:
                    found[text] = labels
                    if len(found) == len(wanted):
                        return found
                else:
                    time.sleep(0.5)  # it answers with what it knows until it has read its configuration
                send({"id": asked + 1} | asked_of[len(found)])
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_editor_completes(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    wanted = {
        "gw.train(": {"objective=", "model=", "data=", "rewards=", "steps=", "optimizer=", "group=", "fresh="},
        "gw.train(optimizer=gw.settings.OptimizerSettings(": {"lr=", "schedule=", "betas="},
        'gw.load_policy("runs/x").': {"generate", "score", "tokenizer"},
    }
    asked = {f"import groupwise as gw\n{typed}": labels for typed, labels in wanted.items()}
    for text, offered in completions(asked, tmp_path).items():
        assert asked[text] <= offered, f"{text!r}: {sorted(asked[text] - offered)} of {len(offered)}"


# ---------------------------------------------------------------- a notebook, and what is installed


def cells(notebook: Path) -> list[str]:
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_notebook_runs_twice_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model where `groupwise get` puts SmolLM2.  It cannot learn sums; that real models do is measured elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = byte_tokenizer()
    model = scratch_model(
        settings.ScratchSettings(hidden=32, layers=1, heads=2), vocabulary=len(tokenizer), eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id, bos_id=None, seed=0,
    )  # fmt: skip
    folder = tmp_path / "groupwise/models/smollm2"
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    said = []
    for _ in range(2):
        space: dict[str, Any] = {"__name__": "__main__"}
        for cell in cells(ROOT / "docs" / "notebook.ipynb"):
            exec(compile(cell, "cell", "exec"), space)
        said.append(capsys.readouterr().out)
        assert len(space["rewards"]) == 12
        assert len(space["texts"]) == 2 and space["logp"].shape == (14,)
    assert said[0].count("without a number") == 12 and said[0].count("held out") == 2
    assert said[1].count("without a number") == 0  # the second time the run has finished
    assert said[0].splitlines()[-2:] == said[1].splitlines()[-2:]


def test_errors_name_what_was_given() -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: gw.train(3), "got an int: 3"),  # type: ignore[arg-type]
        (lambda: gw.train({"objective": "grpo"}), r"train\(\*\*mapping\)"),  # type: ignore[arg-type]
        (lambda: gw.load_policy(3), "got an int: 3"),  # type: ignore[arg-type]
        (lambda: gw.load_policy("nosuch/folder/here"), "nosuch/folder/here"),
        (lambda: gw.evaluate("nosuch/folder/here", data="x.jsonl"), "x.jsonl|nosuch/folder/here"),
        (lambda: gw.train(objective="gpro", model="x/y", data=ROWS, steps=1), "got 'gpro' .did you mean grpo"),
    ]
    for call, said in wrong:
        with pytest.raises(gw.GroupwiseError, match=said):
            call()


def test_a_notebook_shows_a_few_lines_and_no_token(call: Callable) -> None:
    """The last value of a cell is printed: a step, a group, an evaluation, a run's end and a policy are each a line or a few."""
    training = call()
    steps = list(training)
    for value in (steps[-1], *steps[-1].groups[:1], training.run()):
        assert len(repr(value)) < 1_000
        assert repr(value).startswith(type(value).__name__)
        assert "array(" not in repr(value)
    assert len(repr(gw.load_policy(str(training.run().folder)))) < 200


@pytest.mark.slow
def test_programs_are_rewarded_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`code` among the rewards of gw.train: each program earns the share of its row's tests that it passes."""
    try:
        proved_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    scratch = {"hidden": 64, "layers": 2, "heads": 4, "context": 96, "tokenizer": "bytes"}
    tests = [{"call": "f", "args": [n], "expected": n * n} for n in (0, 1, 3, 4)]
    program = {"prompt": "square: ", "completion": "f=lambda n:n*n", "tests": json.dumps(tests)}
    half = program | {"prompt": "nearly: ", "completion": "f=lambda n:n"}  # right for 0 and 1
    few = {"model": {"scratch": scratch}, "data": [program, half], "optimizer": {"lr": 1e-2}, "eval": {"every": 0}}
    list(gw.train(objective="sft", batch_size=2, steps=60, name="writer", **few))
    (step,) = gw.train(
        objective="grpo",
        model="runs/writer/final",
        data=[program, half],
        rewards=[{"function": "code", "args": {"tests": "tests"}}, digits],
        rollout={"max_new_tokens": 20},
        group={"prompts_per_step": 2, "group_size": 4},
        eval={"every": 0, "at_start": False},
        steps=1,
        name="programs",
    )
    assert step.metrics["log/code_not_judged"] == 0.0
    worth: dict[str, list[float]] = {}
    for group in step.groups:
        column = group.rewards[:, group.names.index("code")]
        for rollout, reward in zip(group.rollouts, column, strict=True):
            worth.setdefault(rollout.text.strip(), []).append(float(reward))
    assert set(worth["f=lambda n:n*n"]) == {1.0}
    assert set(worth["f=lambda n:n"]) == {0.5}
