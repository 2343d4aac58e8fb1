"""Whole runs on a task that is learnt in seconds: the folder, resume bit for bit, stages, bad input."""

from __future__ import annotations

import io
import json
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from finished import untimed_metrics
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.api import stages
from groupwise.api.stages import closing_table, train_recipe
from groupwise.config.recipes import load_recipe, load_stages
from groupwise.data.vocabulary import from_table
from groupwise.errors import ConfigError, DataError, GroupwiseError
from groupwise.models.saving import save
from groupwise.runs import rollout_files
from groupwise.runs.folder import choose_folder
from groupwise.runs.rollout_files import read_step
from groupwise.runs.run import Run, RunResult, judged_before, train
from groupwise.runs.run_files import RunFiles
from groupwise.training.evaluate import Evaluation
from groupwise.training.offline import Validation
from groupwise.utils.statistics import Estimate
from groupwise.viewer.report import export

TINY = {
    "seed": 3,
    "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
    "data": {"task": "addition", "limit": 64, "eval_limit": 8},
    "rewards": [{"function": "accuracy"}, {"function": "think_format", "weight": 0.5}],
    "rollout": {"max_new_tokens": 12},
    "eval": {"k": 2, "at_start": False},
    "optimizer": {"lr": 1e-3},
}
GRPO = {"objective": "grpo", "steps": 5, "group": {"prompts_per_step": 4, "group_size": 3}}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes a recipe; keywords are merged one level deep."""

    def make(**changes: object) -> Path:
        tree = json.loads(json.dumps(TINY | {"runs": str(tmp_path / "runs")}))
        for key, value in changes.items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) and isinstance(tree.get(key), dict) else value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return make


def test_p27_no_kl_without_a_reference(recipe: Callable, tmp_path: Path) -> None:
    steps = list(train(load_recipe(recipe(name="plain", **(GRPO | {"steps": 1})))))
    assert not [key for key in steps[-1].metrics if "kl" in key.split("/")[0]]
    assert not (tmp_path / "runs" / "plain" / "reference").exists()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(recipe: Callable, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        list(train(load_recipe(recipe(name=name, **(GRPO | {"steps": 2, "seed": seed})))))
    a, b, c = (untimed_metrics(tmp_path / "runs" / name) for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.slow
def test_stages_follow_one_another_and_the_final_model_is_a_plain_folder(recipe: Callable, tmp_path: Path) -> None:
    path = recipe(
        name="two",
        stages={
            "sft": {"objective": "sft", "steps": 2, "batch_size": 4},
            "grpo": GRPO | {"steps": 2, "model": {"path": "stage:sft", "scratch": None}},
        },
    )
    assert train_recipe(path, quiet=True) == 0
    folder = tmp_path / "runs" / "two" / "grpo" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits
    assert logits.shape[-1] == len(tokenizer)
    card = (folder / "README.md").read_text()
    assert "objective `grpo`" in card
    assert "stage:sft" in card
    assert "None" not in card.split("## Recipe")[0]
    first, second = (stage for stage in load_stages(path).values())
    assert (first.name, second.name) == ("two/sft", "two/grpo")
    # A finished run is not run again.
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert train_recipe(path, quiet=True) == 0
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_models_of_a_stage_are_freed_before_the_next_one_loads_its_own(
    recipe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[weakref.ref] = []
    alive_at_start: list[int] = []

    class Watched(Run):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            alive_at_start.append(sum(model() is not None for model in trained))
            super().__init__(*arguments, **options)
            trained.append(weakref.ref(self.job.policy.model))

    monkeypatch.setattr(stages, "Run", Watched)
    lora = {"scratch": None, "lora": {"rank": 2}}
    path = recipe(
        name="freed",
        stages={
            "sft": {"objective": "sft", "steps": 1, "batch_size": 8, "rewards": [], "verdict": None},
            "first": GRPO | {"steps": 1, "model": {"path": "stage:sft", "scratch": None}},
            "second": GRPO | {"steps": 1, "model": {"path": "stage:first", **lora}},
            "third": GRPO | {"steps": 1, "model": {"path": "stage:second", "scratch": None}},
        },
    )
    assert train_recipe(path, quiet=True) == 0
    assert alive_at_start == [0, 0, 0, 0]


def test_p65_rollouts_are_on_disk_with_every_number(recipe: Callable, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    steps = list(train(load_recipe(recipe(name="seen", **(GRPO | {"steps": 1})))))
    (file,) = (tmp_path / "runs" / "seen" / "rollouts").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    rollouts = [rollout for group in steps[-1].groups for rollout in group.rollouts]
    assert len(rows) == len(rollouts) == 12
    for row, rollout in zip(rows, rollouts, strict=True):
        assert row["completion_ids"] == rollout.tokens.tolist()
        np.testing.assert_allclose(row["behavior_logp"], rollout.behavior_logp)


def test_recorded_completions_can_be_scored_again(recipe: Callable, tmp_path: Path) -> None:
    from groupwise.inspection.score import score_file

    steps = list(train(load_recipe(recipe(name="again", **(GRPO | {"steps": 2})))))
    folder = tmp_path / "runs" / "again"
    for where in (folder, folder / "rollouts" / "000002.parquet"):
        report = score_file(["accuracy", "think_format"], where)
        expected = np.concatenate([group.rewards for group in steps[-1].groups])
        np.testing.assert_array_equal(report.rewards, expected)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 4], ids=["no recorded row has an answer", "the newest step's row has none"])
def test_completions_of_rows_without_an_answer_can_be_scored_again(steps: int, recipe: Callable, tmp_path: Path) -> None:
    from groupwise.inspection.score import score_file

    rows = [{"prompt": "1+1=", "answer": "2"}] * 3 + [{"prompt": "1+2="}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (rows if steps > 1 else [rows[0], rows[3]])))
    data = {"task": None, "path": str(tmp_path / "rows.jsonl"), "limit": None, "eval_limit": None, "chat": False, "shuffle": False}
    named = recipe(name="some", **(GRPO | {"steps": steps, "group": {"prompts_per_step": 1, "group_size": 2}, "data": data}))
    list(train(load_recipe(named, ["rewards=[{function: accuracy}]"])))
    folder = tmp_path / "runs" / "some"
    if steps == 1:  # what remains of the run holds no row with the column
        table = pq.read_table(folder / "rollouts/000001.parquet")
        bare = pa.array([json.dumps({"prompt": "1+2="})] * len(table))
        place = table.schema.get_field_index("row")
        pq.write_table(table.set_column(place, "row", bare), folder / "rollouts/000001.parquet")
        (folder / "checksums.txt").unlink()
    report = score_file(["accuracy"], folder)
    assert report.rewards.shape == (2, 1) and np.isnan(report.rewards).all()


def test_p08_p14_the_first_update_sees_ratio_one(recipe: Callable) -> None:
    teaches = [{"function": "repetition", "args": {"n": 1, "penalty": -1.0}}]
    steps = list(train(load_recipe(recipe(name="alarm", **(GRPO | {"rewards": teaches})))))
    live = [step.metrics for step in steps if "mismatch/max" in step.metrics]
    assert live, "no step had a group that teaches: nothing was compared"
    for metrics_ in live:
        assert metrics_["mismatch/max"] < 1e-4
        assert metrics_["ratio/min"] == pytest.approx(1.0, abs=1e-4)


def test_p05_a_step_says_more_than_a_loss_of_zero(recipe: Callable) -> None:
    path = recipe(name="told", **(GRPO | {"rewards": [{"function": "think_format"}], "data": {"limit": 16}}))
    recipe_ = load_recipe(path, ["rewards.0.function=repetition", "rewards.0.args={n: 1, penalty: -1.0}"])
    metrics_ = [step.metrics for step in train(recipe_)]
    assert any(abs(m["loss"]) < 1e-6 and abs(m["progress"]) > 1e-6 and m["grad_norm"] > 0 for m in metrics_)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"data": {"limit": 2}}, ConfigError, r"prompts_per_step is 4, but the data has only"),
        ({"rewards": [{"function": "accuracy", "args": {"column": "gold"}}]}, ConfigError, "gold"),
    ],
)
def test_bad_recipes_die_in_one_sentence(
    changes: dict, error: type[Exception], says: str, recipe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = {
        key: GRPO.get(key, {}) | value if isinstance(value, dict) and key in GRPO else value for key, value in changes.items()
    }
    with pytest.raises(error, match=says):
        list(train(load_recipe(recipe(name="bad", **(GRPO | merged)))))


def test_a_checkpoint_with_nan_is_refused_by_name(recipe: Callable, tmp_path: Path, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    save(policy, tmp_path / "nan")
    path = recipe(name="nan", **(GRPO | {"model": {"path": str(tmp_path / "nan"), "scratch": None}}))
    with pytest.raises(GroupwiseError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        list(train(load_recipe(path)))


def test_a_tokenizer_larger_than_the_model_is_refused(recipe: Callable, tmp_path: Path, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    policy.model.resize_token_embeddings(20)
    save(policy, tmp_path / "small")
    path = recipe(name="small", **(GRPO | {"model": {"path": str(tmp_path / "small"), "scratch": None}}))
    (tmp_path / "small" / "model.safetensors").write_bytes(b"")  # it is refused before weights are read
    with pytest.raises(DataError, match=r"tokens but the model's vocabulary has only 20"):
        list(train(load_recipe(path)))


def test_no_eos_is_refused(recipe: Callable, tmp_path: Path, tiny_policy: Callable) -> None:
    policy = tiny_policy()
    save(policy, tmp_path / "endless")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"):
        file = tmp_path / "endless" / name
        if file.exists():
            tree = {k: v for k, v in json.loads(file.read_text()).items() if not k.startswith("eos_token")}
            file.write_text(json.dumps(tree))
    path = recipe(name="endless", **(GRPO | {"model": {"path": str(tmp_path / "endless"), "scratch": None}}))
    with pytest.raises(DataError, match="EOS"):
        list(train(load_recipe(path)))


def test_evaluations_change_nothing_of_training(
    recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def length(completions, **_): return [float(len(text) % 7) for text in completions]")
    changes = GRPO | {"steps": 3, "rewards": [{"function": "mine.py:length"}]}
    trained = []
    for name, evaluation in (("often", {"every": 1, "at_start": True}), ("never", {"every": 0, "at_start": False})):
        steps = list(train(load_recipe(recipe(**changes, name=name, eval={"k": 2} | evaluation))))
        assert steps[-1].metrics["grad_norm"] > 0
        trained.append(load_file(tmp_path / "runs" / name / "final" / "model.safetensors"))
    often, never = trained
    assert all(torch.equal(often[name], never[name]) for name in often)


def test_the_closing_table_fits_and_says_what_it_is_about(recipe: Callable) -> None:
    console = Console(file=io.StringIO(), width=80)
    changes = GRPO | {"steps": 1, "eval": {"k": 2, "at_start": True, "prompts": 3, "max_new_tokens": 4}}
    assert train_recipe(recipe(name="seen", **changes), console=console) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    table = text[text.index("held out  ") :]
    for figure in ("greedy accuracy", "sampled accuracy", "pass@2", "mean reward", "accuracy", "think_format", "tokens"):
        assert re.search(rf"^{figure} +[\d.]+", table, re.MULTILINE), figure
    assert "before grpo: the first 3 of 8 prompts" in " ".join(table.split())
    assert "groupwise score " in text


@pytest.mark.parametrize("objective", ["grpo", "sft", "reward"])
def test_a_resumed_run_knows_its_first_evaluation(recipe: Callable, tmp_path: Path, objective: str) -> None:
    """Of prompts the figures of the reward functions, of rows the loss, of pairs also what plain rules get."""
    sides = {"sft": ("completion",), "reward": ("chosen", "rejected")}.get(objective, ())
    lines = [{"prompt": f"{n}+1"} | {side: f"{n + 1}{side[:i]}" for i, side in enumerate(sides)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {"rewards": [], "data": {"task": None, "path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0.4, "eval_limit": None}}
    if objective == "reward":
        rows["data"] |= {"eval_fraction": {"validation": 0.2, "test": 0.2}}
    changes = GRPO if objective == "grpo" else {"objective": objective} | rows
    path = recipe(name="left", **changes | {"steps": 2, "eval": {"at_start": True, "max_new_tokens": 4}})
    for step in train(load_recipe(path)):
        if step.number == 1:
            break
    with Run(load_recipe(path), path.parent / "runs" / "left") as run:
        assert [step.number for step in run.steps()] == [2]
        assert run.before is not None and run.after is not None
    line = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    logged = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
    assert {name: value for name, value in logged.items() if name not in run.before.metrics()} == {}
    assert run.before.summary().keys() == run.after.summary().keys()


def test_an_evaluation_comes_back_from_the_log_with_every_interval(recipe: Callable) -> None:
    shares = {name: Estimate(0.5, 0.1 + i / 100) for i, name in enumerate(("greedy", "sampled", "pass_at_k", "reward"))}
    functions = {"accuracy": Estimate(0.5, 0.11), "brief": Estimate(-0.25, 0.125)}
    rest = {"greedy_reward": Estimate(0.4, 0.2), "length": 4.0, "truncated": 0.0, "none": {"brief": 0.25}, "by_column": {}}
    after = Evaluation(prompts=8, k=2, verdict="accuracy", by_function=functions, **shares, **rest)
    line = {f"eval/{name}": value for name, value in after.metrics().items()}
    before = judged_before(line, load_recipe(recipe(**GRPO)), after)
    assert before is not None and before.summary() == after.summary() and "brief" in before.summary()


def test_the_closing_table_has_no_note_on_a_row_that_it_leaves_out(recipe: Callable) -> None:
    one = Estimate(0.5, 0.1)
    shares = dict.fromkeys(("greedy", "sampled", "pass_at_k", "greedy_reward", "reward"), one)
    after = Evaluation(prompts=8, k=2, verdict=None, length=4.0, truncated=0.0, by_function={}, none={}, by_column={}, **shares)
    outcomes = {
        "sft": RunResult(folder=Path("runs/two/sft"), before=None, after=after, steps=1),
        "grpo": RunResult(folder=Path("runs/two/grpo"), before=replace(after, prompts=3), after=after, steps=1),
    }
    console = Console(file=io.StringIO(), width=80)
    closing_table(outcomes, dict.fromkeys(outcomes, load_recipe(recipe(name="two", **GRPO))), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "after sft" in text and "after grpo" in text
    assert "before grpo" not in text


def test_the_closing_table_compares_what_is_one_objective_s(recipe: Callable) -> None:
    """A reward model and DPO have figures of the same names."""
    plain = {"held-out loss": "0.7", "pair accuracy": "0.5"}
    begin, end = (Validation(rows=8, figures={}, shown=shown) for shown in (plain, plain | {"margin": "0.4"}))
    outcomes = {
        name: RunResult(folder=Path(f"runs/three/{name}"), before=begin, after=begin if name == "dpo" else end, steps=1)
        for name in ("rm", "other", "dpo")
    }
    stages = {name: load_recipe(recipe(name=name, objective="dpo" if name == "dpo" else "reward", steps=1)) for name in outcomes}
    console = Console(file=io.StringIO(), width=80)
    closing_table(outcomes, stages, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    tables = [[line[:10].split(" 0")[0].strip() for line in table.splitlines()[1:]] for table in text.split("held out ")[1:]]
    assert [[name for name in table if name.startswith(("before", "after"))] for table in tables] == [
        ["before rm", "after rm", "after othe"],
        ["before dpo", "after dpo"],
    ]
    assert "margin" in text and text.count("held-out loss") == 2


def test_score_is_no_next_command_where_nothing_was_recorded(recipe: Callable) -> None:
    console = Console(file=io.StringIO(), width=80)
    assert train_recipe(recipe(name="unseen", **GRPO | {"steps": 1, "save": {"rollouts_every": 0}}), console=console) == 0
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "groupwise eval " in text
    assert "groupwise score " not in text


def test_two_processes_cannot_share_a_run(recipe: Callable) -> None:
    loaded = load_recipe(recipe(name="locked", **GRPO))
    folder = choose_folder(loaded)
    with Run(loaded, folder), pytest.raises(ConfigError, match="in use"):
        Run(loaded, folder)


@pytest.mark.parametrize(("said", "named", "used"), [(None, None, 1), (2, None, 2), (None, "3", 3)])
def test_a_small_model_trains_in_one_thread_where_nobody_says_otherwise(
    said: int | None, named: str | None, used: int, recipe: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever had set another number finds it again."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if named is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    torch.set_num_threads(3)
    try:
        steps = train(load_recipe(recipe(**GRPO | {"steps": 2, "threads": said})))
        next(steps)
        assert torch.get_num_threads() == used
        steps.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_records_what_the_viewer_shows_and_ends_with_a_report(recipe: Callable, tmp_path: Path) -> None:
    """Token texts, what the updates did, held-out completions, one page; a report that fails is said and the run is whole."""
    path = recipe(name="shown", **GRPO)
    assert train_recipe(path, quiet=True, report=lambda folder: export([folder], folder / "report.html")) == 0
    folder = tmp_path / "runs" / "shown"
    step = read_step(folder, 2)
    assert {"weight", "entropy", "clipped"} <= set(step.columns)
    known = from_table(pq.read_table(folder / "tokens.parquet"))
    for rollout in (rollout for group in step.groups for rollout in group.rollouts):
        said = [text for text, token in zip(known.texts(rollout.tokens), rollout.tokens, strict=True) if token not in known.special]
        assert "".join(said) == rollout.text
    assert list(rollout_files.steps(RunFiles(folder), rollout_files.EVALUATIONS)[0]) == [5]
    assert "think_format" in (folder / "report.html").read_text(encoding="utf-8")

    def failing(folder: Path) -> None:
        raise DataError("no room")

    console = Console(file=io.StringIO(), width=100)
    assert train_recipe(recipe(name="unreported", **GRPO), console=console, report=failing) == 0
    assert "no report: no room" in console.file.getvalue()  # type: ignore[attr-defined]


DATED = (
    "{{ strftime_now('%Y%m%d%H%M%S') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_resumed_run_writes_the_date_of_its_first_start(recipe: Callable, tmp_path: Path) -> None:
    model = TINY["model"] | {"chat_template": DATED}
    dated = load_recipe(recipe(**GRPO, name="dated", model=model, data={"chat": True, "limit": 8, "eval_limit": 2}))
    folder = tmp_path / "runs" / "dated"

    def prompts() -> set[str]:
        with Run(dated, folder) as run:
            next(run.steps())
            return {prompt.text.split("<")[0] for prompt in run.job.prompts}

    def written(moment: float) -> set[str]:
        return {time.strftime("%Y%m%d%H%M%S", time.gmtime(moment))}

    first = prompts()
    record = json.loads((folder / "environment.json").read_text())
    assert first == written(record["attempts"][0]["time"])
    record["attempts"][0]["time"] -= 86400 * 400
    (folder / "environment.json").write_text(json.dumps(record))
    (folder / "checksums.txt").unlink()
    assert prompts() == written(record["attempts"][0]["time"])
    attempts = json.loads((folder / "environment.json").read_text())["attempts"]
    assert len(attempts) == 2 and attempts[1]["time"] > attempts[0]["time"] + 86400 * 400


def test_an_evaluation_says_how_far_it_is(recipe: Callable[..., Path]) -> None:
    path = recipe(name="watched", **GRPO | {"steps": 1, "eval": {"at_start": True, "prompts": 3, "k": 1}})
    calls: list[tuple[int, int]] = []
    with Run(load_recipe(path), path.parent / "runs" / "watched") as run:
        run.job.watch = lambda done, count: calls.append((done, count))
        next(iter(run.steps()))
    count = calls[-1][1]
    assert calls == [(done, count) for done in range(1, count + 1)] * 2
