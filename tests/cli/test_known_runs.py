"""Commands that are given a run know how it asked and judged."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import groupwise as gw
from groupwise.api.evaluate import evaluate
from groupwise.cli import commands
from groupwise.cli.commands import main
from groupwise.cli.score import steps_of
from groupwise.config.recipes import parse_recorded
from groupwise.errors import ConfigError, DataError
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.model_card import base_of
from groupwise.runs.origin import origin_of

RUN = "runs/demo/grpo"

# ---------------------------------------------------------------- where a run is found


@pytest.mark.parametrize(
    "inside", ["", "final", "checkpoints", "checkpoints/000002", "checkpoints/000002/policy", "rollouts", "config.yaml"]
)
def test_any_path_inside_a_run_names_that_run(there: Path, inside: str) -> None:
    found = origin_of(Path(RUN) / inside)
    assert found is not None
    assert (found.folder.resolve(), found.recipe.data.template, found.step) == (there / RUN, "Q: {prompt} A:", 3)


def test_a_path_of_several_stages_means_the_last_one(there: Path, tmp_path: Path) -> None:
    assert origin_of("runs/demo").folder == Path(RUN)  # type: ignore[union-attr]
    assert origin_of("runs") is None and origin_of("nosuch") is None and origin_of(tmp_path) is None
    (tmp_path / "config.yaml").write_text("window: {width: 3}\n")  # somebody else's
    assert origin_of(tmp_path) is None
    (tmp_path / "config.yaml").write_text("objective: [\n")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        origin_of(tmp_path)


def test_examples_of_a_path_of_several_stages_are_those_of_the_last_one(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["examples", "runs/demo"]) == 0
    shown = capsys.readouterr().out
    assert main(["examples", RUN]) == 0
    assert "before training" in shown and shown == capsys.readouterr().out
    assert "Q: " in shown, "the prompt is shown as the data have it, not as the policy read it"


def test_examples_of_a_run_with_one_evaluation_show_it_once(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = tmp_path / "once"
    shutil.copytree(there / RUN, once)
    for later in sorted((once / "evaluations").iterdir())[1:]:
        later.unlink()
    assert main(["examples", str(once), "-n", "1"]) == 0
    head, *_ = capsys.readouterr().out.strip().splitlines()
    assert head.split() == ["prompt", "reward", "before", "training"]
    shutil.rmtree(once / "evaluations")
    assert main(["examples", str(once)]) == 2
    assert "holds no evaluation: train on, or set eval.every or eval.at_start" in capsys.readouterr().err


# ---------------------------------------------------------------- eval


@pytest.mark.slow
def test_eval_says_what_the_run_said(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same prompts, rewards, template, length, samples and seed give the same numbers."""
    done = json.loads((there / RUN / "done.json").read_text())
    found = evaluate(RUN).evaluation.metrics()
    assert {name: done[name] for name in found} == found
    assert {"rewards/digits", "rewards/short", "greedy_reward"} <= set(found)
    few = evaluate(RUN, limit=1)  # of one prompt a mean has no half width: JSON has no NaN
    assert "NaN" not in few.to_json()
    assert main(["eval", RUN]) == 0
    said = capsys.readouterr().out
    assert "rows.jsonl, held out; rewards digits, short; at most 5 tokens; template 'Q: {prompt} A:'" in said
    assert said.startswith(f"{RUN}: ")


@pytest.mark.slow
def test_options_given_replace_those_of_the_run(there: Path) -> None:
    rows = [{"question": "7+7=", "answer": "14"}, {"question": "9+9=", "answer": "18"}]
    Path("other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluate(RUN, data="other.jsonl", k=3, max_new_tokens=2, rewards="accuracy", seed=4)
    assert [answer.prompt.text for answer in found.evaluation.answers] == ["Q: 7+7= A:", "Q: 9+9= A:"]
    assert {len(rollout) <= 2 for group in found.evaluation.groups for rollout in group.rollouts} == {True}
    assert (found.evaluation.k, tuple(found.evaluation.by_function)) == (3, ("accuracy",))
    assert evaluate(RUN, limit=2).evaluation.prompts == 2
    asked = evaluate(RUN, data="other.jsonl", template="{prompt}", limit=1).evaluation.answers
    assert [answer.prompt.text for answer in asked] == ["7+7="]


@pytest.mark.slow
def test_eval_names_what_has_changed_since_the_run_was_trained(there: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(text.replace("Q", "q") + "\n")
    try:
        evaluate(RUN, limit=1)
        assert "data.path rows.jsonl: its content has changed" in caplog.text
        caplog.clear()
        evaluate(RUN, data="rows.jsonl", limit=1)
        assert "changed" not in caplog.text, "what is given is not what the run was trained on"
    finally:
        Path("rows.jsonl").write_text(text)


def test_an_unfinished_run_names_the_checkpoint_that_was_used(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    shutil.copytree(there / RUN, half)
    (half / "done.json").unlink()
    for folder in ("final", "rollouts"):
        shutil.rmtree(half / folder)
    newest = int((half / "latest").read_text())
    assert evaluate(half, limit=2).about.startswith(f"the checkpoint of step {newest}, the run has not finished; data ")
    assert evaluate(half / "checkpoints" / f"{newest:06d}", limit=2).about.startswith("data "), "that is what was asked for"
    assert main(["score", "exact", str(half)]) == 2
    assert f"{half} is a run without recorded completions" in capsys.readouterr().err


def test_options_that_neither_run_nor_user_gives_are_asked_for(
    there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(there / RUN / "final", tmp_path / "model")
    assert main(["eval", str(tmp_path / "model")]) == 2
    assert "give --data FILE or --task NAME" in capsys.readouterr().err
    held = tmp_path / "run"
    shutil.copytree(there / RUN, held)
    config = (held / "config.yaml").read_text()
    (held / "checksums.txt").unlink()
    for old, new, says in (
        ("eval_fraction: 0.3", "eval_fraction: 0.0", "held nothing out of rows.jsonl"),
        ("path: rows.jsonl", "path: live:25 rows (00000000)", "rows of the program that trained it"),
        ("my_rewards.py:digits", "live:digits", "function of the program that trained it (live:digits): give --reward NAME"),
        ("objective: grpo", "objective: reward", "writes no completions"),
    ):
        (held / "config.yaml").write_text(config.replace(old, new))
        assert main(["trust", str(held)]) == 0
        assert main(["eval", str(held)]) == 2
        assert says in capsys.readouterr().err


# ---------------------------------------------------------------- score, chat, check, explain


def test_score_says_which_steps_it_reads(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", RUN, "--rows", "0"]) == 0
    said = capsys.readouterr().out
    assert "12 completions of runs/demo/grpo, step 3 (recorded are 3 steps from 1 to 3; --steps chooses)" in said
    assert "\ndigits: " in said and "\nshort: " in said
    for steps, count in (("all", 36), ("1,3", 24), ("1-2", 24), ("2", 12)):
        assert main(["score", "accuracy", RUN, "--steps", steps, "--rows", "0"]) == 0
        assert capsys.readouterr().out.startswith(f"{count} completions of {RUN}, ")
    assert main(["score", "accuracy", RUN, "--steps", "9"]) == 2
    assert "has no such step; recorded are 3 steps from 1 to 3" in capsys.readouterr().err
    assert main(["score", "accuracy", "rows.jsonl", "--steps", "1"]) == 2
    assert main(["score", "rows.jsonl"]) == 2
    assert "name a reward function" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_whose_row_has_no_answer_is_scored(
    write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}, {"prompt": "1+3=", "answer": None}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = write_recipe(
        tmp_path,
        "r",
        data={"path": "rows.jsonl", "task": None, "eval_limit": None},
        steps=3,
        group={"prompts_per_step": 1},
        rewards=[{"function": "accuracy"}],
    )
    assert main(["train", str(recipe), "--quiet"]) == 0
    for step in ("1", "2", "3"):
        capsys.readouterr()
        assert main(["score", "runs/r", "--steps", step]) == 0
        assert "completions of runs/r, step" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "x", "3-1", "1-", "-1", "1;2"])
def test_malformed_ranges_of_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--steps is written"):
        steps_of(text)


def test_chat_asks_as_the_run_did(there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["2+2=", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", RUN]) == 0
    shown = capsys.readouterr().out
    assert "put into 'Q: {prompt} A:'; at most 5 tokens" in shown
    bare = _with_template(gw.load_policy(RUN), None)
    assert bare.generate("Q: 2+2= A:", seed=0, max_new_tokens=5).strip() in shown


def test_a_loaded_policy_asks_as_the_run_did(there: Path) -> None:
    policy = gw.load_policy(RUN)
    assert (policy.data.template, policy.max_new_tokens, policy.dtype) == ("Q: {prompt} A:", 5, policy.model.dtype)
    answer = _with_template(policy, None).generate("Q: 2+2= A:", seed=3, max_new_tokens=5)
    for prompt in ("2+2=", {"prompt": "2+2="}, {"question": "2+2="}):
        assert policy.generate(prompt, seed=3) == answer
    assert len(policy.tokenizer(policy.generate("2+2="))["input_ids"]) <= 5 * 4
    with pytest.raises(DataError, match="reads a, b: give a row"):
        gw.LoadedPolicy.generate(_with_template(policy, "{a} {b}"), "2+2=")


def _with_template(policy: gw.LoadedPolicy, template: str | None) -> gw.LoadedPolicy:
    import dataclasses

    return dataclasses.replace(policy, data=dataclasses.replace(policy.data, template=template))


@pytest.mark.slow
def test_check_looks_at_what_the_run_trained(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", RUN])
    said = capsys.readouterr().out
    assert said.startswith(f"{RUN}, after step 3 (grpo)")
    assert "sampled = scored at temperature 1" in said
    assert status == ("FAIL" in said)
    assert main(["check", RUN, "rollout.temperature=0.5"]) in (0, 1)
    assert "at temperature 0.5" in capsys.readouterr().out


def test_explain_works_a_recorded_step_through(there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from groupwise.runs.rollout_files import read_step

    assert main(["explain", RUN, "--step", "2"]) == 0
    said = capsys.readouterr().out
    groups = read_step(there / RUN, 2).groups
    group = next((group for group in groups if not group.equal_rewards), groups[0])
    assert f"the group of {group.prompt.place} in step 2 (recorded are steps 1 to 3" in said
    shown = next(line for line in said.splitlines() if line.startswith("  reward"))
    assert shown.split()[1:] == [f"{reward:g}" for reward in group.reward]
    assert main(["explain", RUN, "--preset", "dr_grpo", "--rewards", "1,0"]) == 0
    assert "dr_grpo: " in capsys.readouterr().out
    assert main(["explain", "--step", "2"]) == 2
    assert main(["explain", "rows.jsonl"]) == 2


# ---------------------------------------------------------------- going on, and not beginning


@pytest.mark.slow
def test_more_steps_go_on_or_it_is_said_why_not(there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "my.yaml", "--quiet", "steps=1", f"runs={tmp_path}"]) == 0
    assert main(["train", "my.yaml", "--quiet", "steps=2", f"runs={tmp_path}"]) == 0
    assert "finished at step 1; it continues to step 2" in capsys.readouterr().out
    assert [step["step"] for step in read_metrics(tmp_path / "demo/grpo")] == [0, 1, 2]
    linear = ["optimizer.schedule=linear", f"runs={tmp_path / 'linear'}", "--quiet"]
    assert main(["train", "my.yaml", "steps=1", *linear]) == 0
    assert main(["train", "my.yaml", "steps=2", *linear]) == 2
    said = capsys.readouterr().err
    assert "steps: 1 -> 2" in said
    assert "every step's learning rate depends on the last one" in said and "model.path=" in said


@pytest.mark.parametrize(
    "change",
    [
        "data.path=nosuch.jsonl",
        "rewards=[{function: nosuch}]",
        "rewards=[{function: my_rewards.py:nosuch}]",
        "rewards=[{function: accuracy, args: {column: nosuch}}]",
        "data.template={nosuch}",
        "rollout.max_new_tokens=64",
        "model.scratch.heads=5",
        "model.scratch.tokenizer=arithmetic",
        "group.surrogate={name: clipped, hgih: 0.3}",
    ],
)
def test_a_refused_configuration_leaves_no_folder(there: Path, tmp_path: Path, change: str) -> None:
    assert main(["train", "my.yaml", change, f"runs={tmp_path / 'deep' / 'runs'}", "name=refused"]) == 2
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the card


def test_the_card_names_the_model_that_nobody_of_ours_trained(there: Path, tmp_path: Path) -> None:
    text = (there / RUN / "config.yaml").read_text()
    recipe = origin_of(RUN).recipe  # type: ignore[union-attr]
    assert base_of(recipe) == ("random weights (llama)", ())

    def run(name: str, path: str) -> None:
        (tmp_path / name).mkdir(parents=True)
        scratch = text.partition("  scratch:")[2].partition("  dtype:")[0]
        assert scratch
        changed = text.replace(f"  scratch:{scratch}", "  scratch: null\n").replace("  path: null", f'  path: "{path}"', 1)
        changed = changed.replace("runs: runs", f"runs: {tmp_path}", 1).replace("name: demo/grpo", f"name: {name}", 1)
        (tmp_path / name / "config.yaml").write_text(changed)

    run("chain/sft", "owner/base")
    run("chain/grpo", "stage:sft")
    run("more", str(tmp_path / "chain/grpo"))
    more = parse_recorded((tmp_path / "more/config.yaml").read_text(), "more")
    base, way = base_of(more)
    assert base == "owner/base"
    assert [Path(place).name for place in way] == ["sft", "grpo"]


# ---------------------------------------------------------------- the examples of --help

ELSEWHERE = {
    "serve": "it needs vLLM in an environment of its own",
    "install-vllm": "it fetches 2.5 GB",
    "get": "it fetches 93 MB",
    "push": "it uploads to a hub",
    "export": "it needs a tokenizer with merges; tests/cli/test_export.py runs it",
}
"""Commands whose examples no test runs, and why."""


@pytest.fixture
def shop(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the examples name."""
    shutil.copytree(finished, tmp_path / "shop")
    monkeypatch.chdir(tmp_path / "shop")
    from groupwise.config import bundled as bundled_recipes

    bundled = tmp_path / "bundled"
    bundled.mkdir()
    text = (finished / "my.yaml").read_text()
    (bundled / "demo.yaml").write_text(text.replace("name: demo/grpo", "name: again").replace("steps: 3", "steps: 1"))
    monkeypatch.setattr(bundled_recipes, "recipe_folder", lambda: bundled)
    rows = [{"question": "7+7=", "answer": "14", "prompt": "7+7=", "completion": "14"}]
    for name in ("test.jsonl", "completions.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("trl.yaml").write_text("num_generations: 4\nmax_steps: 3\n")
    Path("elsewhere").mkdir()
    for name in ("theirs", "base", "mine", "mine-lr=1e-6-seed=0", "mine-lr=3e-6-seed=0"):
        shutil.copytree(RUN, f"runs/{name}")
    monkeypatch.setattr("builtins.input", lambda _: "")
    return Path.cwd()


def examples() -> list[str]:
    import importlib

    found = []
    for name in commands.COMMANDS:
        module = importlib.import_module(f"groupwise.cli.{name.replace('-', '_')}")
        assert len(module.EXAMPLES) in (2, 3), name
        found += [re.split(r"\s{2,}", example)[0] for example in module.EXAMPLES if name not in ELSEWHERE]
    return found + [re.split(r"\s{2,}", example)[0] for example in commands.EXAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("example", dict.fromkeys(examples()))
def test_the_examples_of_help_run(
    example: str, shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if example.startswith("eval "):
        shell = example.replace("groupwise", f"{sys.executable} -m groupwise")
        done = subprocess.run(["bash", "-c", f"{shell}; declare -F _groupwise"], capture_output=True, text=True, check=True)
        assert "_groupwise" in done.stdout
        return
    words = shlex.split(example.partition(" > ")[0])
    assert words.pop(0) == "groupwise"
    if words == ["recipes", "copy", "demo", "my.yaml"]:
        Path("my.yaml").unlink()
    if words[0] == "view" and "--export" not in words:

        def interrupted(_: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("groupwise.cli.view.time.sleep", interrupted)
    if words[0] == "launch":  # the recipe here names no image or storage, and has no checkpoint for servers
        words += ["--dry-run", "cluster.image=me/groupwise:1", "cluster.storage=runs", "cluster.samplers={nodes: 0, gpus: 0}"]
    allowed = (0, 1) if words[0] == "check" else (0,)  # a model of 3 steps may well fail a check
    assert main(words) in allowed
    assert capsys.readouterr().out
