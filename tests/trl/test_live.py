"""TRL's own objects make the run that TRL would have made: every value, function and row is the object's."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from image_models import checkpoint, png, processor, tokenizer
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForImageTextToText, TrainingArguments
from trl_objects import FIELDS, config

import groupwise as gw
from groupwise.errors import ConfigError, DataError
from groupwise.trl.recipe import import_trl

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(32)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def length(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def accuracy_reward(completion: str, answer: str) -> float:
    return float(answer in completion)


def test_a_value_of_another_type_is_named() -> None:
    args = config("GRPOConfig", num_generations=None)
    with pytest.raises(ConfigError, match=r"^num_generations=None: no value that TRL takes"):
        gw.from_trl(args, model="m", reward_funcs=length, train_dataset=ROWS)
    args = config("GRPOConfig", max_steps=1, reward_weights=[1.0])
    with pytest.raises(ConfigError, match=r"1 weight for 2 reward functions"):
        gw.from_trl(args, model="m", reward_funcs=[length, accuracy_reward], train_dataset=ROWS)


def test_a_run_has_the_values_of_the_objects() -> None:
    args = config("GRPOConfig", per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2,
                  learning_rate=2e-6, epsilon_high=0.28, num_train_epochs=2, lr_scheduler_type="cosine", bf16=False)  # fmt: skip
    adapter = LoraConfig(lora_alpha=16, target_modules=["v_proj", "q_proj"])
    training = gw.from_trl(args, model="m/m", reward_funcs=[length, accuracy_reward], train_dataset=ROWS, peft_config=adapter)
    recipe = training.recipe
    assert (recipe.objective, recipe.name, recipe.seed, recipe.model.path) == ("bnpo", "mine", 42, "m/m")
    assert (recipe.group.group_size, recipe.group.prompts_per_step, recipe.steps) == (4, 2, 32)  # 2 epochs of 32 rows / 2 prompts
    assert (recipe.optimizer.lr, recipe.optimizer.schedule, recipe.model.dtype) == (2e-6, "cosine", "float32")
    assert recipe.group.surrogate == {"name": "clipped", "low": 0.2, "high": 0.28}
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha, recipe.model.lora.targets) == (8, 16.0, ("q_proj", "v_proj"))
    assert [reward.function for reward in recipe.rewards] == ["live:length", "live:accuracy_reward"]
    assert str(recipe.data.path).startswith("live:32 rows")
    assert "32 rows" in training.summary() and "[{" not in training.summary().split("train_dataset")[1].split("\n")[0]


def test_the_summary_lists_no_argument_that_only_trl_has_filled_in() -> None:
    args = config("GRPOConfig", per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2, bf16=None)
    args.bf16, args.steps_per_generation, args.generation_batch_size = True, 2, 8  # as GRPOConfig.__post_init__ does
    training = gw.from_trl(args, model="m/m", reward_funcs=length, train_dataset=ROWS)
    names = {line.name for line in training.imported.lines}
    assert names == {
        *("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "output_dir", "use_cpu"),
        *("train_dataset", "reward_funcs", "model_name_or_path"),
    }
    assert training.recipe.model.dtype == "autocast"
    args.steps_per_generation, args.generation_batch_size = 4, 16
    lines = gw.from_trl(args, model="m/m", reward_funcs=length, train_dataset=ROWS).imported.lines
    assert {line.name for line in lines} - names == {"steps_per_generation", "generation_batch_size"}


def test_it_is_what_the_import_of_the_same_file_is() -> None:
    arguments = {"num_generations": 8, "max_steps": 40, "beta": 0.04, "loss_type": "dr_grpo", "warmup_steps": 4,
                 "save_steps": 20, "temperature": 0.7, "num_iterations": 2}  # fmt: skip
    live = gw.from_trl(config("GRPOConfig", **arguments), model="m/m", reward_funcs=[length], train_dataset=ROWS).imported.keys
    Path("trl.yaml").write_text(json.dumps({**arguments, "model_name_or_path": "m/m", "dataset_name": "d", "output_dir": "mine"}))
    assert {key: value for key, value in live.items() if key not in ("rewards", "data.path", "model.device")} == {
        key: value for key, value in import_trl("trl.yaml").keys.items() if key != "data.path"
    }


@pytest.mark.parametrize("kind", ["SFTConfig", "DPOConfig", "RewardConfig", "RLOOConfig"])
def test_every_class_of_trl_makes_a_run(kind: str) -> None:
    rows = [
        {"prompt": "1+1=", "completion": "2"} if kind == "SFTConfig" else {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    ] * 8
    functions = length if kind == "RLOOConfig" else None
    recipe = gw.from_trl(config(kind, max_steps=3), model="m/m", train_dataset=rows, reward_funcs=functions).recipe
    assert recipe.objective == kind.removesuffix("Config").lower()
    assert recipe.optimizer.lr == ast.literal_eval(FIELDS[kind]["learning_rate"])


def test_what_sft_trains_follows_from_the_rows(caplog: pytest.LogCaptureFixture) -> None:
    args = config("SFTConfig", max_steps=3)
    talk = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 8
    for rows, part in ((talk, "all"), ([{"prompt": "1+1=", "completion": "2"}] * 8, "completion")):
        recipe = gw.from_trl(args, model="m/m", train_dataset=rows).recipe
        assert (recipe.data.train_on, recipe.data.max_tokens) == (part, 1024)
    assert not caplog.text
    gw.from_trl(config("SFTConfig", max_steps=3, packing=True), model="m/m", train_dataset=talk)
    assert "still to set" in caplog.text and "batch_size: 8 x 1,024 tokens" in caplog.text


def test_what_is_lost_is_said(caplog: pytest.LogCaptureFixture) -> None:
    args = config("GRPOConfig", max_steps=3, repetition_penalty=1.1)
    lost = {"callbacks": [print], "optimizers": (None, None), "rollout_func": print, "nonsense": 3}
    adapter = LoraConfig(r=4, lora_dropout=0.1, use_dora=True)
    training = gw.from_trl(args, model="m/m", reward_funcs=length, train_dataset=ROWS, peft_config=adapter, **lost)
    fates = {line.name: line.fate for line in training.imported.lines}
    missing = {name for name, fate in fates.items() if fate == "missing"}
    assert missing == {"repetition_penalty", "rollout_func", "peft_config.use_dora"}
    assert fates["callbacks"] == "elsewhere" and "not done here: callbacks" in training.summary()
    assert fates["nonsense"] is None and "optimizers" not in fates
    assert "repetition_penalty: 1.1" in caplog.text and "use_dora" in caplog.text


def test_tools_and_an_environment_are_the_objects() -> None:
    def search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return query

    class Room:
        def reset(self, **_: Any) -> str:
            return "hello"

        def look(self) -> str:
            """Look around."""
            return "a wall"

    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    given = {"model": "m/m", "reward_funcs": "my/judge", "train_dataset": rows, "tools": [search], "environment_factory": Room}
    recipe = gw.from_trl(config("GRPOConfig", max_steps=3, max_tool_calling_iterations=3), **given).recipe
    assert recipe.environment.tools == ("live:search",) and recipe.environment.factory == "live:Room"
    assert recipe.environment.max_turns == 4
    assert (recipe.rewards[0].function, recipe.rewards[0].args) == ("model", {"path": "my/judge"})


def test_functions_without_a_name_are_told_apart() -> None:
    class Judge:
        def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return [1.0] * len(completions)

    functions = [lambda completion: 1.0, lambda completion: 2.0, Judge(), Judge(), length]
    args = config("GRPOConfig", max_steps=3, reward_weights=[1.0, 2.0, 3.0, 4.0, 5.0])
    rewards = gw.from_trl(args, model="m/m", reward_funcs=functions, train_dataset=ROWS).recipe.rewards
    assert [reward.name for reward in rewards] == ["reward_1", "reward_2", "Judge", "Judge_4", "length"]
    assert [reward.weight for reward in rewards] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_what_is_none_of_trls_objects_is_refused() -> None:
    for args in ({"learning_rate": 1e-6}, TrainingArguments(output_dir="x", use_cpu=True)):
        with pytest.raises(ConfigError, match="args is one of TRL's GRPOConfig, "):
            gw.from_trl(args, model="m/m", train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        gw.from_trl(config("GRPOConfig", max_steps=3), model="m/m", reward_funcs=length)


@pytest.mark.slow
def test_a_loaded_model_is_trained(tiny_policy: Callable[..., Any]) -> None:
    policy = tiny_policy()
    args = config("GRPOConfig", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=4, bf16=False)
    given = {"reward_funcs": length, "train_dataset": ROWS}
    steps = list(gw.from_trl(args, model=policy.model, processing_class=policy.tokenizer, **given))
    assert [step.number for step in steps if step.number] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tokenizer", "processor"])
def test_a_loaded_model_reads_images_by_its_processor(place: str, tmp_path: Path) -> None:
    """It computes what its folder does: the same rollouts.   place: who has the chat template, as checkpoints do it."""
    folder = checkpoint(tmp_path / "model")
    reads = processor()
    if place == "tokenizer":
        reads.tokenizer.chat_template = reads.chat_template
        reads.chat_template = None
    rows = []
    for seed in range(4):
        picture = Image.open(io.BytesIO(png(seed)))
        rows.append({"prompt": [{"role": "user", "content": "what?"}], "images": [picture]})
    model = AutoModelForImageTextToText.from_pretrained(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sampled = {}
    for name, given in {"loaded": {"model": model, "processing_class": reads}, "named": {"model": str(folder)}}.items():
        args = config(
            "GRPOConfig", max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=4, bf16=False
        )
        args.output_dir = f"runs/{name}"
        training = gw.from_trl(args, **given, reward_funcs=sevens, train_dataset=rows)
        tokens = []
        for step in training:
            for group in step.groups:
                tokens += [rollout.tokens.tolist() for rollout in group.rollouts]
        sampled[name] = tokens
        assert (Path("runs") / name / "final/preprocessor_config.json").is_file()
    assert sampled["loaded"] == sampled["named"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def sevens(completion_ids: Any, **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.mark.slow
def test_images_of_a_loaded_model_without_a_processor_are_refused(tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint(tmp_path / "model"))
    rows = [{"prompt": [{"role": "user", "content": "what?"}], "images": [png(0)]}]
    args = config("GRPOConfig", max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=4, bf16=False)
    training = gw.from_trl(args, model=model, processing_class=tokenizer(), reward_funcs=sevens, train_dataset=rows)
    with pytest.raises(DataError, match=r"needs its processor to read them: give AutoProcessor\.from_pretrained"):
        list(training)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["image", "images", "parts"])
def test_multimodal_rows_are_read_as_they_are(form: str, tmp_path: Path) -> None:
    """TRL's data sets have images of PIL, in `image` or `images`; its trainer adds parts to a plain message."""

    def varied(completion_ids: Any, images: Any, **_: Any) -> list[float]:
        assert all(len(digest) == 32 for of_row in images for digest in of_row)
        return [float(sum(ids) % 7) for ids in completion_ids]

    content: Any = "what?"
    if form == "parts":
        content = [{"type": "image"}, {"type": "text", "text": "what?"}]
    pictures = [Image.open(io.BytesIO(png(seed))) for seed in range(4)]
    rows = []
    for picture in pictures:
        columns = {"image": picture} if form == "image" else {"images": [picture]}
        rows.append({"prompt": [{"role": "user", "content": content}], **columns})
    args = config("GRPOConfig", max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=4, bf16=False)
    folder = str(checkpoint(tmp_path / "model"))
    training = gw.from_trl(args, model=folder, processing_class=object(), reward_funcs=varied, train_dataset=rows)
    steps = [step for step in training if step.number]
    assert len(steps) == 2
    assert all(step.metrics["grad_norm"] > 0 for step in steps)
    read = set()
    for file in Path("runs/mine/rollouts").glob("*.parquet"):
        for digests in pq.read_table(file).column("prompt_images").to_pylist():
            read.update(digests)
    assert len(read) == 4
