"""The bundled recipes and the built-in tasks: each runs from its rows to its final model."""

from __future__ import annotations

import json
import math
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from scripted_judge import Server
from transformers import AutoTokenizer

from groupwise.api.evaluate import evaluate
from groupwise.api.stages import train_recipe
from groupwise.cli.commands import main
from groupwise.config.packaged_models import PACKAGED_MODELS
from groupwise.config.recipes import load_stages
from groupwise.config.settings import ScratchSettings
from groupwise.data.sources import read_rows
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError
from groupwise.models.scratch import scratch_model
from groupwise.rewards.code import proved_isolation
from groupwise.runs.metrics_log import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SMALL = ("model.scratch.hidden=32", "model.scratch.heads=4", "model.scratch.layers=1", "data.eval_limit=6", "eval.k=2")
SFT_AND_GRPO = (
    "stages.sft.steps=2",
    "stages.sft.optimizer.warmup_steps=1",
    "stages.sft.batch_size=4",
    "stages.sft.data.limit=16",
    "stages.grpo.steps=2",
    "stages.grpo.group.prompts_per_step=2",
    "stages.grpo.group.group_size=3",
    "stages.grpo.data.limit=16",
)


def run(recipe: Path, folder: Path, overrides: Sequence[str]) -> str:
    """Train every stage; what was printed."""
    console = Console(record=True, width=200, quiet=False, file=(folder / "printed").open("w"))
    assert train_recipe(recipe, [f"runs={folder / 'runs'}", *overrides], console=console) == 0
    return console.export_text()


def steps_of(folder: Path) -> list[dict]:
    return read_metrics(folder)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder: a recipe names no file that a user would have to bring."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # a hub name is then taken on trust; nothing is fetched here
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in PACKAGED_MODELS:  # as `groupwise get` leaves them
        folder = tmp_path / "groupwise/models" / name
        folder.mkdir(parents=True, mode=0o700)
        for file in ("config.json", "model.safetensors"):
            (folder / file).touch()
    stages = load_stages(path)
    assert all(recipe.name.split("/")[0] == path.stem for recipe in stages.values())
    assert path.read_text().startswith("# "), "`groupwise recipes` lists a recipe by the comment at its head"


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "dapo", "rloo"])
def test_demo(objective: str, tmp_path: Path) -> None:
    """Both stages, another algorithm by one override, the closing table with commands that work, and a model to chat with."""
    printed = run(ROOT / "recipes/demo.yaml", tmp_path, [*SMALL, *SFT_AND_GRPO, f"stages.grpo.objective={objective}"])
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("after ")] == [["after", "sft"], ["after", "grpo"]]
    _, _, commands = printed.partition("Next:")
    typed = {words[1]: words[1:] for line in commands.splitlines() if (words := shlex.split(line))}
    assert typed["chat"] == ["chat", str(tmp_path / "runs/demo/grpo")]
    assert main([*typed["eval"], "--limit", "3", "--k", "2"]) == main(typed["score"]) == 0
    for stage in ("sft", "grpo"):
        last = steps_of(tmp_path / "runs/demo" / stage)[-1]
        assert last["step"] == 2
        assert 0.0 <= last["eval/greedy"] <= 1.0 and last["eval/greedy/half_width"] > 0.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs/demo/grpo/final")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "1+2"}], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>1+2<|end|><|assistant|>"
    assert list((tmp_path / "runs/demo/grpo/rollouts").iterdir())


@pytest.mark.slow
def test_shapes(tmp_path: Path) -> None:
    """SFT, then GRPO, on pictures; accuracies are told apart by the kind of the question."""
    overrides = [*SFT_AND_GRPO, "model.scratch.hidden=32", "stages.sft.data.limit=2000", "stages.sft.data.eval_limit=6", "eval.k=2"]
    overrides += ["stages.grpo.data.limit=40", "stages.grpo.data.eval_limit=30", "stages.grpo.eval.prompts=6"]
    printed = run(ROOT / "recipes/shapes.yaml", tmp_path, overrides)
    assert "after grpo" in printed
    last = steps_of(tmp_path / "runs/shapes/grpo")[-1]
    assert {f"eval/greedy/kind={kind}" for kind in ("count", "name", "compare")} <= set(last)
    assert list((tmp_path / "runs/shapes/grpo/images").glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["distill", "hints"])
def test_distillation(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage, the teacher's with its own size; what the policy learns from is not the reward.

    benchmarks/distillation.py has the teacher write as many tokens as were distilled, and not a completion more.
    """
    path = ROOT / "recipes" / f"{recipe}.yaml"
    stages = load_stages(path)
    small = [text for name in stages for text in (f"stages.{name}.steps=2", f"stages.{name}.batch_size=4")]
    taught = "stages.distill.group.prompts_per_step=2"
    printed = run(path, tmp_path, [*SMALL, *small, taught, "optimizer.warmup_steps=0", "data.limit=16"])
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("after ")] == list(stages)
    steps = [step for step in steps_of(tmp_path / "runs" / recipe / "distill") if step["step"]]
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 and step["reward"] == 0.0 for step in steps)
    if recipe == "distill":
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        import distillation  # type: ignore[import-not-found]

        found = distillation.imitate(tmp_path / "runs" / recipe)
        tokens = sum(int(step["tokens/trained"]) for step in steps)
        written, _, trained, updates = (float(part.split()[0]) for part in found.note.split(", "))
        assert tokens <= trained < tokens + 40 and updates == math.ceil(written / 4)
        assert 0.0 <= found.row()["sampled"] <= 1.0


@pytest.mark.slow
def test_arithmetic(tmp_path: Path) -> None:
    """Accuracy by operator."""
    run(ROOT / "recipes/arithmetic.yaml", tmp_path, [*SMALL, *SFT_AND_GRPO, "data.eval_limit=60"])
    for stage in ("sft", "grpo"):
        last = steps_of(tmp_path / "runs/arithmetic" / stage)[-1]
        assert {f"eval/greedy/operator={operator}" for operator in ("+", "-", "mixed")} <= set(last)


@pytest.fixture(scope="session")
def checkpoint(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 of 50,000 weights as a Hugging Face folder, with a tokenizer learnt from GSM8K and a chat template."""
    texts = (row["question"] for row in read_rows(str(gsm8k / "test.jsonl")).first(200))
    tokenizer = make_tokenizer("bpe:500", texts)
    model = scratch_model(
        ScratchSettings(family="qwen2", hidden=32, layers=2, heads=4, context=2048),
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
        bos_id=None,
        seed=0,
        kv_heads=2,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_gsm8k_runs_its_whole_path(checkpoint: Path, gsm8k: Path, tmp_path: Path) -> None:
    """Chat template and system prompt, three rewards, evaluation before and after, export; then `eval` reads what it wrote."""
    questions = str(gsm8k / "test.jsonl")
    run(
        ROOT / "recipes/gsm8k.yaml",
        tmp_path,
        [
            f"model.path={checkpoint}",
            f"data.path={questions}",
            "data.eval_path=null",
            "data.eval_fraction=0.1",
            "data.eval_limit=5",
            "steps=2",
            "optimizer.warmup_steps=1",
            "rollout.max_new_tokens=24",
            "group.prompts_per_step=3",
            "group.group_size=4",
            "eval.k=2",
        ],
    )
    folder = tmp_path / "runs/gsm8k"
    first, *steps = steps_of(folder)
    assert first["step"] == 0 and [step["step"] for step in steps] == [1, 2]
    assert {"eval/greedy", "eval/pass@2"} <= set(first) and {"eval/greedy", "eval/pass@2"} <= set(steps[-1])
    for step in steps:
        assert {"rewards/accuracy/mean", "rewards/think_format/mean", "rewards/soft_overlong/mean"} <= set(step)
        assert math.isfinite(step["reward"]) and math.isfinite(step["loss"]) and step["skipped_updates"] == 0
    before, after = (load_file(place / "model.safetensors") for place in (checkpoint, folder / "final"))
    assert all(torch.isfinite(weight).all() for weight in after.values())
    assert set(before) == set(after)
    report = evaluate(str(folder), data=questions, columns={"prompt": "question"}, chat=True, limit=3, k=2, max_new_tokens=8)
    assert report.evaluation.prompts == 3
    assert "<|user|>" in report.evaluation.answers[0].prompt.text and "Janet" in report.evaluation.answers[0].prompt.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "json", "words", "tools", "hints"])
def test_the_recipes_of_a_chat_model_run_and_show_their_answers(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every recipe of SmolLM2 with another model in its place; `groupwise examples` shows answers before and after."""
    small = [
        "steps=2",
        "rollout.max_new_tokens=8",
        "group.prompts_per_step=2",
        "group.group_size=3",
        "data.eval_limit=4",
        "eval.k=2",
    ]
    run(ROOT / f"recipes/smollm2-{name}.yaml", tmp_path, [f"model.path={checkpoint}", *small])
    assert {"eval/greedy", "eval/pass@2"} <= set(steps_of(tmp_path / f"runs/smollm2-{name}")[-1])
    assert main(["examples", str(tmp_path / f"runs/smollm2-{name}"), "-n", "3"]) == 0
    head, _, *rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert head == ["prompt", "reward", "before", "training", "reward", "step", "2"]
    assert len(rows) == 3


@pytest.mark.slow
def test_a_chat_model_learns_from_programs(checkpoint: Path, tmp_path: Path) -> None:
    """SFT and GRPO of smollm2-programs with another model in its place."""
    try:
        proved_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    few = [f"stages.{stage}.steps=2" for stage in ("sft", "grpo")]
    few += ["stages.grpo.group.prompts_per_step=2", "stages.grpo.group.group_size=3", "rollout.max_new_tokens=8"]
    run(ROOT / "recipes/smollm2-programs.yaml", tmp_path, [f"model.path={checkpoint}", "data.eval_limit=4", *few])
    last = steps_of(tmp_path / "runs/smollm2-programs/grpo")[-1]
    assert last["log/code_not_judged"] == 0.0 and "rewards/code/mean" in last


@pytest.mark.slow
def test_a_chat_model_learns_on_a_base_in_few_bits(checkpoint: Path, tmp_path: Path) -> None:
    """smollm2-nf4 with another model in its place, whose rows are too short for NF4; the second stage goes on with the adapter."""
    few = [f"stages.{stage}.steps=2" for stage in ("sft", "grpo")]
    few += ["stages.grpo.group.prompts_per_step=2", "stages.grpo.group.group_size=3"]
    small = [f"model.path={checkpoint}", "model.quantize=int8", "data.eval_limit=4", *few]
    run(ROOT / "recipes/smollm2-nf4.yaml", tmp_path, small)
    sft, grpo = (steps_of(tmp_path / "runs/smollm2-nf4" / stage) for stage in ("sft", "grpo"))
    assert sft[-1]["step"] == grpo[-1]["step"] == 2
    assert {"eval/greedy", "eval/pass@4"} <= set(grpo[-1])


@pytest.mark.slow
def test_a_chat_model_learns_through_an_agent(checkpoint: Path, tmp_path: Path) -> None:
    """SFT and GRPO of smollm2-agent with another model in its place, and a program that talks as the agent does."""
    isolation = "bubblewrap"
    try:
        proved_isolation("bubblewrap", tools=True)
    except ConfigError:
        isolation = "none"
    program = tmp_path / "mini"
    stand_in = ROOT / "tests/environments/endpoint/stand_in_agent.py"
    program.write_text("#!/usr/bin/env python3\n" + stand_in.read_text())
    program.chmod(0o755)
    few = [f"stages.{stage}.steps=2" for stage in ("sft", "grpo")]
    few += ["stages.grpo.group.prompts_per_step=2", "stages.grpo.group.group_size=3", "rollout.max_new_tokens=8"]
    few += [f"stages.grpo.environment.args.program={program}", f"stages.grpo.environment.sandbox.isolation={isolation}"]
    run(ROOT / "recipes/smollm2-agent.yaml", tmp_path, [f"model.path={checkpoint}", "data.eval_limit=4", *few])
    last = steps_of(tmp_path / "runs/smollm2-agent/grpo")[-1]
    assert last["log/code_not_judged"] == 0.0 and "rewards/code/mean" in last
    assert last["episodes/errors"] == 0.0


@pytest.mark.slow
def test_a_chat_model_learns_from_a_judge(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """smollm2-judge without a server is planned, and refused before it begins; with one it trains."""
    server = Server(prefers_the_longer)
    path = tmp_path / "judge.yaml"
    small = [f"runs={tmp_path / 'runs'}", f"model.path={checkpoint}", "steps=2", "rollout.max_new_tokens=8"]
    small += ["group.prompts_per_step=2", "group.group_size=3", "data.limit=32", "data.eval_limit=4", "save.every=2"]
    recipe = yaml.safe_load((ROOT / "recipes/smollm2-judge.yaml").read_text())
    judge = recipe["rewards"][0]["args"]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        judge |= {"url": f"http://127.0.0.1:{nobody.getsockname()[1]}/v1", "cache": str(tmp_path / "answers.sqlite")}
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        assert main(["train", str(path), *small, "--dry-run"]) == 0
        for command, status in (("check", 1), ("train", 2)):
            capsys.readouterr()
            assert main([command, str(path), *small]) == status
            said = " ".join("".join(capsys.readouterr()).split())
            assert "nothing answers at" in said and "groupwise serve MODEL" in said
            assert ("ok model proven" in said) == (command == "check"), "the later checks alone need the server"
        assert not (tmp_path / "runs/smollm2-judge").exists()
    judge["url"] = server.url
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    assert main(["train", str(path), *small]) == 0
    server.shutdown()
    server.server_close()
    last = steps_of(tmp_path / "runs/smollm2-judge")[-1]
    assert last["step"] == 2 and last["log/judge_failed"] == 0.0
    assert last["rewards/judge/mean"] == pytest.approx(0.5), "of each pair one wins"


def prefers_the_longer(answers: dict[str, str], body: dict) -> str:
    """A judge of pairs."""
    return json.dumps({"better": max(answers, key=lambda name: (len(answers[name]), answers[name]))})


@pytest.mark.slow
def test_a_chat_model_learns_from_pairs(checkpoint: Path, tmp_path: Path) -> None:
    """SFT, reward model and GRPO of smollm2-preference with another model in its place."""
    few = [f"stages.{stage}.steps=2" for stage in ("sft", "reward", "grpo")]
    few += [f"stages.{stage}.optimizer.warmup_steps=0" for stage in ("sft", "reward")]
    few += ["stages.grpo.group.prompts_per_step=2", "stages.grpo.group.group_size=3", "stages.grpo.rollout.max_new_tokens=8"]
    small = [f"model.path={checkpoint}", "data.limit=32", "data.eval_limit=4", "eval.k=2", *few]
    run(ROOT / "recipes/smollm2-preference.yaml", tmp_path, small)
    assert {"eval/rewards/reward", "eval/rewards/friendly", "eval/rewards/right"} <= set(
        steps_of(tmp_path / "runs/smollm2-preference/grpo")[-1]
    )


@pytest.mark.slow
def test_the_task_that_no_recipe_uses_trains(tmp_path: Path) -> None:
    """A few steps of SFT and GRPO; the weights move, every reward is a number."""
    recipe = {
        "name": "try",
        "model": {"scratch": {"context": 256}},
        "data": {"task": "sums", "chat": True},
        "rewards": [{"function": "accuracy"}],
        "rollout": {"max_new_tokens": 30},
        "optimizer": {"lr": 1e-3},
        "stages": {
            "sft": {"objective": "sft", "steps": 2},
            "grpo": {"objective": "grpo", "steps": 2, "model": {"path": "stage:sft", "scratch": None}},
        },
    }
    path = tmp_path / "try.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    run(path, tmp_path, [*SMALL, *SFT_AND_GRPO])
    sft, grpo = ([step for step in steps_of(tmp_path / "runs/try" / stage) if step["step"]] for stage in ("sft", "grpo"))
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in sft)
    assert all(0.0 <= step["reward"] <= 1.0 and math.isfinite(step["loss"]) for step in grpo)
    assert 0.0 <= grpo[-1]["eval/sampled"] <= 1.0


@pytest.mark.slow
def test_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with more SFT and with rejection sampling, on a reward that every completion with a letter gets."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import baselines  # type: ignore[import-not-found]

    easy = "rewards=[{function: regex, args: {pattern: '[0-9a-z]'}}]"
    overrides = [*SMALL, *SFT_AND_GRPO, easy, "verdict=regex", "rollout.max_new_tokens=8"]
    results = list(baselines.compare(str(ROOT / "recipes/demo.yaml"), overrides, 0, [2], tmp_path))
    assert [result.method for result in results] == ["sft (the start)", "grpo", "more sft", "rejection sampling, 2 rounds"]
    assert all(0.0 <= result.row()["greedy"] <= 1.0 for result in results)
    samples, kept, steps = (int(part.split()[0]) for part in results[-1].note.split(", "))
    assert 0 < kept <= samples and steps >= 2
