"""Whole runs on images: trained, resumed to the bit, exported, evaluated; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from image_models import checkpoint, png, policy_of, prompt
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForImageTextToText

import groupwise as gw
from groupwise.cli.check import check_recipe
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.inspection.replay import replay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


def rows(count: int) -> list[dict[str, Any]]:
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    return [{"prompt": [{"role": "user", "content": parts}], "images": [png(i)], "answer": str(i)} for i in range(count)]


def length(completion_ids: Any, images: Any, **_: Any) -> list[float]:
    """A reward that differs within a group; it is given the digest of each image."""
    assert all(len(digest) == 32 for of_row in images for digest in of_row)
    return [float(sum(ids) % 7) for ids in completion_ids]


SETTINGS: dict[str, Any] = {
    "objective": "grpo",
    "group": {"prompts_per_step": 2, "group_size": 3},
    "rollout": {"max_new_tokens": 5},
    "optimizer": {"lr": 1e-3},
    "eval": {"at_start": False},
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(folder: Path, **changes: Any) -> list[Any]:
    settings = {"name": "run", "model": {"path": str(folder)}, "data": rows(6), "rewards": length, "steps": 2}
    return list(gw.train(**{**settings, **SETTINGS, **changes}))


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_run_trains_and_its_model_is_whole(engine: str, folder: Path) -> None:
    steps = train(folder, rollout={"max_new_tokens": 5, "engine": engine})
    assert all(step.metrics["grad_norm"] > 0 for step in steps)
    final = Path("runs/run/final")
    assert (final / "preprocessor_config.json").read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    table = pq.read_table(next(Path("runs/run/rollouts").glob("*.parquet")))
    assert all(len(digests) == 1 for digests in table.column("prompt_images").to_pylist())
    report = gw.evaluate(str(final), data=rows(3), rewards=length, max_new_tokens=4)
    assert "reward" in str(report)


WORDS: list[dict[str, Any]] = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(6)]


def words(completion_ids: Any, **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["whole", "adapter"])
def test_a_model_that_was_trained_on_words_alone_still_reads_images(lora: dict[str, int] | None, folder: Path) -> None:
    """Without the files of its image processor nobody could."""
    model = {"path": str(folder), "lora": lora}
    train(folder, model=model, data=WORDS, rewards=words, save={"every": 1})
    for saved in ("final", *(["checkpoints/000002/policy"] if lora is None else [])):
        written = Path("runs/run") / saved / "preprocessor_config.json"
        assert written.read_bytes() == (folder / "preprocessor_config.json").read_bytes()
    gw.load_policy("runs/run/final").save(Path("again"))
    report = gw.evaluate("again", data=rows(3), rewards=length, max_new_tokens=4)
    assert "reward" in str(report)


def test_a_model_from_scratch_reads_pictures_in_both_stages() -> None:
    """Demonstrations have words alone; what is held out, and the second stage, have pictures."""
    shape = {"family": "qwen3_vl", "hidden": 32, "layers": 1, "context": 96}
    common: dict[str, Any] = {"data": {"task": "shapes", "chat": True, "limit": 40, "eval_limit": 6}, "rewards": "exact"}
    common |= {"optimizer": {"lr": 1e-3}, "rollout": {"max_new_tokens": 5}, "steps": 2}
    list(gw.train(name="sft", objective="sft", model={"scratch": shape}, batch_size=8, eval={"at_start": False}, **common))
    grouped = {"prompts_per_step": 2, "group_size": 8}
    steps = list(gw.train(name="grpo", objective="grpo", model="runs/sft/final", group=grouped, eval={"at_start": False}, **common))
    assert len(steps) == 2
    table = pq.read_table(next(Path("runs/grpo/rollouts").glob("*.parquet")))
    assert all(len(digests) == 1 for digests in table.column("prompt_images").to_pylist())
    report = gw.evaluate("runs/grpo")
    assert "data task shapes" in str(report)


def answered(*colours: str) -> list[dict[str, Any]]:
    """One question about as many images, each with an answer."""
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    prompt = [{"role": "user", "content": parts}]
    return [{"prompt": prompt, "images": [png(i)], "completion": colour} for i, colour in enumerate(colours)]


def test_sft_learns_what_only_the_images_tell(folder: Path) -> None:
    """Blindly both answers are as likely: of two tokens, the letter and the end, the loss would be log(2) / 2 = 0.35 at least."""
    settings = {"optimizer": {"lr": 0.01}, "batch_size": 4, "steps": 30, "eval": {"at_start": False}}
    steps = list(gw.train(name="run", objective="sft", model=str(folder), data=answered("a", "b", "a", "b"), **settings))
    assert steps[-1].metrics["loss"] < 0.1
    assert (Path("runs/run/final") / "preprocessor_config.json").exists()


def compared(*colours: str) -> list[dict[str, Any]]:
    """One question about as many images, each with the answer that is preferred and the other one."""
    pairs = []
    for row in answered(*colours):
        chosen = row.pop("completion")
        pairs.append(row | {"chosen": chosen, "rejected": "b" if chosen == "a" else "a"})
    return pairs


@pytest.mark.parametrize("lora", [None, {"rank": 8}], ids=["whole", "adapter"])
def test_dpo_learns_what_only_the_images_tell(lora: dict[str, int] | None, folder: Path) -> None:
    """Blindly no more than half of the pairs are in the right order, and the loss stays log 2 = 0.69 at least."""
    settings = {"optimizer": {"lr": 0.01}, "batch_size": 4, "steps": 30, "eval": {"at_start": False}}
    model = {"path": str(folder), "lora": lora}
    steps = list(gw.train(name="run", objective="dpo", model=model, data=compared("a", "b", "a", "b"), **settings))
    assert steps[0].metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[-1].metrics["loss"] < (0.3 if lora is None else 0.6)
    assert steps[-1].metrics["accuracy"] > 0.5
    assert (Path("runs/run/final") / "preprocessor_config.json").exists()


def test_dpo_on_images_resumes_to_the_bit(folder: Path) -> None:
    settings = {"objective": "dpo", "model": str(folder), "data": compared("a", "b", "a", "b"), "optimizer": {"lr": 0.01}}
    settings |= {"batch_size": 2, "steps": 3, "eval": {"at_start": False}, "save": {"every": 1}}
    list(gw.train(name="whole", **settings))
    steps = iter(gw.train(name="cut", **settings))
    next(steps)
    steps.close()
    list(gw.train(name="cut", **settings))
    whole, cut = (Path(f"runs/{name}/final/model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_a_reward_model_reads_no_images(folder: Path) -> None:
    with pytest.raises(GroupwiseError, match="the row has images, and they are read by sft, by dpo and where the policy samples"):
        list(gw.train(name="run", objective="reward", model=str(folder), data=compared("a", "b"), steps=1, batch_size=2))


def test_sft_on_the_whole_text_of_a_picture_is_refused(folder: Path) -> None:
    data = {"path": answered("a", "b"), "train_on": "all"}
    with pytest.raises(ConfigError, match=r"data\.train_on: prompts have images, whose placeholders are not learnt"):
        list(gw.train(name="run", objective="sft", model=str(folder), data=data, steps=1, batch_size=2))


def test_a_run_resumes_to_the_bit(folder: Path) -> None:
    train(folder, name="whole", save={"every": 1})
    training = gw.train(
        name="cut", model={"path": str(folder)}, data=rows(6), rewards=length, steps=2, save={"every": 1}, **SETTINGS
    )
    steps = iter(training)
    next(steps)
    steps.close()
    train(folder, name="cut", save={"every": 1})
    whole, cut = (Path(f"runs/{name}/final/model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_an_adapter_is_trained_and_the_reference_reads_images_too(folder: Path) -> None:
    lora = {"path": str(folder), "lora": {"rank": 2}}
    steps = train(folder, model=lora, group={**SETTINGS["group"], "beta": 0.1})
    assert steps[-1].metrics["grad_norm"] > 0


def test_a_trained_adapter_is_the_merged_model_on_images(folder: Path) -> None:
    """peft on the base, and the merged `final/`, give the same logits behind an image; both differ from the base."""
    train(folder, model={"path": str(folder), "lora": {"rank": 2}}, optimizer={"lr": 0.05})
    final = Path("runs/run/final")
    policy = policy_of(folder)
    asked = prompt(policy, "a", [3])
    ids_1m = torch.from_numpy(asked.tokens)[None]
    inputs = policy.vision.arguments(policy, ids_1m, [asked.images])
    models = [AutoModelForImageTextToText.from_pretrained(path) for path in (folder, final, folder)]
    models[2] = PeftModel.from_pretrained(models[2], final / "adapter")
    with torch.no_grad():
        base, merged, adapted = (model(input_ids=ids_1m, **inputs).logits for model in models)
    assert (adapted - merged).abs().max() < 1e-4
    assert (base - merged).abs().max() > 1e-2


def test_a_model_that_reads_images_has_no_gguf(folder: Path) -> None:
    train(folder, steps=1)
    with pytest.raises(ConfigError, match="qwen3_vl"):
        gw.export_gguf("runs/run", "f32")


def look(color: str) -> str:
    """Look closer.

    Args:
        color: that is looked for.
    """
    return color


def solve(row: dict[str, object], base_url: str) -> float:
    return 0.0


REFUSED = {
    "sampled ahead": ({"rollout": {"engine": {"name": "native", "ahead": 1}}}, "rollout.engine.ahead: prompts have images"),
    "tools": ({"environment": {"tools": [look]}}, "prompts have images, which are read in single turns alone"),
    "a harness": ({"environment": {"harness": solve}}, "prompts have images, which are read in single turns alone"),
    "streams over processes": ({"parallel": {"context": 2}}, "parallel.context: prompts have images, whose tokens are not split"),
    "in FP8": ({"model": {"fp8": "rowwise"}}, "model.fp8: prompts have images, which no blocks in FP8 read; leave model.fp8 out"),
    "one by one": (
        {"model": {"attention": "single"}, "rollout": {"engine": "transformers"}},
        "model.attention 'single' reads no images",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_read_images_is_refused(case: str, folder: Path) -> None:
    if case == "in FP8":
        pytest.importorskip("torchao")
    changes, reason = REFUSED[case]
    if "model" in changes:
        changes = changes | {"model": {"path": str(folder), **changes["model"]}}
    with pytest.raises(ConfigError, match=reason):
        train(folder, **changes)


def test_vllm_samples_no_completions_of_gemma_3_behind_images(tmp_path: Path) -> None:
    gemma = checkpoint(tmp_path / "gemma", "gemma3")
    with pytest.raises(ConfigError, match="vLLM writes those of Gemma 3 into a prompt in its own way"):
        train(gemma, rollout={"engine": {"name": "vllm", "servers": ["http://127.0.0.1:1"]}})


def test_a_recorded_prompt_is_not_computed_without_its_images(folder: Path) -> None:
    """Its placeholders would be read as words."""
    train(folder)
    with pytest.raises(GroupwiseError, match=r"the image \w{32} of a recorded prompt is not there"):
        replay(Path("runs/run"), 2, ())


def test_a_recipe_on_images_is_checked(folder: Path) -> None:
    """The chat template is shown a question where the first prompt has images, which are digests by then."""
    Path("red.png").write_bytes(png(0))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    Path("rows.jsonl").write_text(json.dumps({"prompt": messages, "images": ["red.png"], "answer": "r"}) + "\n")
    tree = {"objective": "grpo", "model": {"path": str(folder)}, "data": {"path": "rows.jsonl"}, "steps": 1}
    tree |= {"rewards": [{"function": "accuracy"}], "group": {"prompts_per_step": 1, "group_size": 2}}
    Path("recipe.yaml").write_text(yaml.safe_dump(tree | {"rollout": {"max_new_tokens": 4}}))
    console = Console(width=500)
    with console.capture() as captured:
        check_recipe("recipe.yaml", console=console)
    assert "BadRow" not in captured.get()
    assert "log-probs" in captured.get()
