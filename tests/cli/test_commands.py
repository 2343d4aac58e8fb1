"""The command as a user types it: fast, short messages, the right exit codes."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupwise.cli import commands, train
from groupwise.config import bundled
from groupwise.config.recipes import dump_stages, parse_stages
from groupwise.errors import DataError, Diverged, EngineError

RECIPE = """\
# Adds numbers: 0.3 -> 0.99 in a minute.
# One core.

objective: grpo
steps: 3
model: {scratch: {hidden: 64}}
data: {task: addition}
rewards: [{function: accuracy}]
"""

COMMANDS = tuple(commands.COMMANDS)
TORCHLESS = {
    "train": ["train", "r.yaml", "--print-config"],
    "recipes": ["recipes"],
    "one recipe": ["recipes", "demo"],
    "import-trl": ["recipes", "import-trl", "trl.yaml"],
    "config": ["config", "group"],
    "a name of TRL's": ["config", "learning_rate"],
    "runs": ["runs", "."],
    "score": ["score", "exact", "rows.jsonl"],
}
"""What answers without torch, and so within a third of a second of processor time."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "bundled").mkdir()
    (tmp_path / "bundled" / "sums.yaml").write_text(RECIPE)
    monkeypatch.setattr(bundled, "recipe_folder", lambda: tmp_path / "bundled")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple, dict]]:
    """Stands in for the heavy modules and writes down how they are called."""
    made: list[tuple[str, tuple, dict]] = []

    def recorder(name: str, result: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            made.append((name, given, named))
            return result

        return call

    wrong = SimpleNamespace(name="EOS", good=False, text="none")
    report = SimpleNamespace(render=lambda: "rendered", to_json=lambda: '{"a": 1}')
    stand_ins = {
        "groupwise.api.stages": {"train_recipe": recorder("train", 0)},
        "groupwise.api.planning": {"plan_recipe": recorder("plan", 0)},
        "groupwise.api.evaluate": {"evaluate": recorder("eval", report)},
        "groupwise.inspection.check": {"check_stage": recorder("check", [wrong])},
    }
    for name, functions in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    return made


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "groupwise", *arguments], capture_output=True, text=True, check=False)


# ---------------------------------------------------------------- speed and size


def test_help_is_short_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from groupwise.cli.commands import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(*sorted({'torch', 'transformers', 'datasets', 'pydantic', 'rich', 'pyarrow'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    lines = done.stdout.splitlines()
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 100
    assert all(re.search(rf"^    {name}\s", done.stdout, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_two_or_three_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        commands.main([name, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "--debug" in said
    assert len(re.findall(rf"^  \S*.*groupwise {name}\b", said.partition("examples:")[2], re.MULTILINE)) in (2, 3)


def test_help_of_a_command_imports_its_own_file_and_nothing_heavy() -> None:
    code = (
        "import sys\nfrom groupwise.cli.commands import main\n"
        "try:\n    main(['explain', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(*sorted({'torch', 'transformers', 'pyarrow', 'pydantic', 'rich', 'numpy'} & set(sys.modules)),"
        " *sorted(m for m in sys.modules if m.startswith('groupwise.cli.')), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == [f"groupwise.cli.{name}" for name in ("arguments", "commands", "explain")]


@pytest.mark.parametrize("arguments", TORCHLESS.values(), ids=TORCHLESS)
def test_light_commands_import_no_torch(folder: Path, arguments: list[str]) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "completion": "4", "answer": "4"}) + "\n")
    (folder / "trl.yaml").write_text("num_generations: 4\n")
    heavy = {"torch", "transformers", "datasets", "pandas", "scipy", "sympy"}
    code = (
        f"import sys; from groupwise.cli.commands import main; rc = main({arguments!r})\n"
        f"sys.exit(rc or ' '.join(sorted({heavy!r} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


PLANNED = ["train", "r.yaml", "--dry-run", "data.limit=20", "data.eval_limit=5"]
UNNEEDED = {
    "a worked step": (["explain"], {"transformers", "torch._dynamo", "torch.distributed.fsdp", "datasets", "pandas"}),
    "a plan": (
        PLANNED,
        {"datasets", "pandas", "tensorboard", "wandb", "peft", "matplotlib", "torch._inductor.compile_fx", "IPython"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "unneeded"), UNNEEDED.values(), ids=UNNEEDED)
def test_a_command_imports_nothing_that_it_does_not_need(arguments: list[str], unneeded: set[str]) -> None:
    code = (
        f"import sys; from groupwise.cli.commands import main; rc = main({arguments!r})\n"
        f"sys.exit(rc or ' '.join(sorted({unneeded!r} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


REFUSED = [["train", "r.yaml", "--lr", "1e-4"], ["explain", "--preset", "gpro"], ["train", "r.yaml", "objective=gpro"], ["trian"],
           ["score", "exat", "rows.jsonl"], ["eval", "nosuch/run"]]  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED[:4], ids=" ".join)
def test_refusals_import_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom groupwise.cli.commands import main\n"
        f"try:\n    rc = main({arguments!r})\nexcept SystemExit as end:\n    rc = end.code\n"
        "sys.exit(rc if 'torch' not in sys.modules else 99)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 2


# ---------------------------------------------------------------- what is passed on


def test_train_passes_everything_on(calls: list) -> None:
    assert commands.main(["train", "r.yaml", "steps=4", "--quiet"]) == 0
    given = {"fresh": False, "accept_changes": False, "quiet": True, "timeout": 1800, "report": train.report}
    assert calls == [("train", ("r.yaml", ["steps=4"]), given)]


def test_a_dry_run_passes_everything_on(calls: list) -> None:
    assert commands.main(["train", "r.yaml", "steps=4", "--dry-run", "--nproc", "2", "--fresh"]) == 0
    assert calls == [("plan", ("r.yaml", ["steps=4"]), {"fresh": True, "world": 2, "model_config": None})]


def test_what_stands_behind_an_override_is_passed_on(calls: list) -> None:
    assert commands.main(["train", "r.yaml", "steps=4", "--fresh"]) == 0
    assert calls[0][2]["fresh"] is True


def test_a_bad_recipe_is_refused_before_anything_is_called(calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["train", "r.yaml", "lr=1"]) == 2
    assert commands.main(["check", "r.yaml", "lr=1"]) == 2
    assert calls == []
    assert capsys.readouterr().err.count("did you mean optimizer.lr?") == 2


def test_several_mistakes_are_one_configuration_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty_rewards.py").write_text("")
    rewards = [f"{tmp_path / 'empty_rewards.py'}:{name}" for name in ("first", "second")]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "objective: grpo\nsteps: 1\nmodel: {scratch: {hidden: 16, context: 96, tokenizer: arithmetic}}\n"
        "data: {task: addition, limit: 8, chat: true}\nrollout: {max_new_tokens: 8}\n"
        "rewards: " + json.dumps([{"function": one} for one in rewards])
    )
    assert commands.main(["train", str(recipe), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert re.match(r"ConfigError: \d problems in ", said)
    assert "'first'" in said and "'second'" in said


def test_check_returns_its_verdict(calls: list) -> None:
    assert commands.main(["check", "sums"]) == 1
    ((name, (recipe, _), _),) = calls
    assert (name, recipe.data.path or recipe.data.task) == ("check", "addition")


def test_eval_passes_everything_on(calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["eval", "runs/x", "--task", "addition", "--task-arg", "digits=2", "--k", "4", "--temperature", "0.7", "--limit", "9"]
    assert commands.main(given) == 0
    assert capsys.readouterr().out == "rendered\n"
    assert commands.main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    _, (checkpoint,), named = calls[0]
    assert checkpoint == "runs/x"
    assert (named["task"], named["task_args"], named["data"]) == ("addition", {"digits": 2}, None)
    assert (named["k"], named["temperature"], named["limit"], named["max_new_tokens"]) == (4, 0.7, 9, None)
    assert (named["chat"], named["rewards"], named["seed"]) == (None, None, None)
    assert commands.main(["eval", "runs/x", "--no-chat", "--reward", "exact", "--reward", "tags"]) == 0
    assert (calls[-1][2]["chat"], calls[-1][2]["rewards"]) == (False, ["exact", "tags"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval"],
        ["eval", "x", "--task", "a", "--k", "0"],
        ["view", "x", "--port", "99999"],
        ["serve", "x", "--port", "99999"],
        ["nosuch"],
        [],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        commands.main(arguments)
    assert end.value.code == 2


def test_wrong_values_of_options(calls: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["eval", "x", "--task", "a", "--data", "b"]) == 2
    assert "--data or --task, not both" in capsys.readouterr().err
    assert commands.main(["eval", "x", "--task", "a", "--temperature", "0"]) == 2
    assert commands.main(["eval", "x", "--task", "a", "--task-arg", "digits"]) == 2
    assert commands.main(["eval", "x", "--task", "a", "--temperature", "nan"]) == 2
    assert commands.main(["score", "accuracy,exact", "f.jsonl", "--arg", "a=1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("ConfigError: --temperature must be greater than 0, got 0")
    assert said[1] == "ConfigError: --task-arg is written KEY=VALUE, got 'digits'"
    assert said[2].startswith("ConfigError: --temperature must be greater than 0, got nan")
    assert calls == []


def test_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "2+2=", "completion": text, "answer": "4"} for text in ("4", "5")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert commands.main(["score", "exact", "rows.jsonl"]) == 0
    assert "mean 0.5" in capsys.readouterr().out
    assert commands.main(["score", "rows.jsonl", "exact"]) == 2
    assert "rows.jsonl is no reward function: groupwise score REWARD rows.jsonl" in capsys.readouterr().err
    assert commands.main(["view", "rows.jsnl", "--export", "page.html"]) == 2
    assert "there is no rows.jsnl (did you mean rows.jsonl?)" in capsys.readouterr().err
    assert commands.main(["score", "exact", "nosuch.jsonl"]) == 2


# ---------------------------------------------------------------- what is printed


def test_get_lists_the_packaged_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["get"]) == 0
    assert "smollm2" in capsys.readouterr().out
    assert commands.main(["get", "smolm2"]) == 2
    assert "did you mean smollm2?" in capsys.readouterr().err


def test_print_config_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["train", "r.yaml", "seed=7", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert dump_stages(parse_stages(text, "again")) == text
    assert parse_stages(text, "again")["grpo"].seed == 7


def test_recipes_list_show_copy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["recipes"]) == 0
    assert capsys.readouterr().out == "sums  Adds numbers: 0.3 -> 0.99 in a minute.\n"
    assert commands.main(["recipes", "sums"]) == 0
    assert capsys.readouterr().out == "Adds numbers: 0.3 -> 0.99 in a minute.\nOne core.\n"
    assert commands.main(["recipes", "sumz"]) == 2
    assert "no such recipe 'sumz'" in capsys.readouterr().err
    assert commands.main(["recipes", "sums", "sums"]) == 2
    assert "copy, show or import-trl" in capsys.readouterr().err
    assert commands.main(["recipes", "show", "sums"]) == 0
    assert capsys.readouterr().out == RECIPE
    assert commands.main(["recipes", "copy", "sums"]) == 0
    assert (folder / "sums.yaml").read_text() == RECIPE
    assert commands.main(["recipes", "copy", "sums"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert commands.main(["recipes", "copy", "sums", "nosuch/sums.yaml"]) == 2
    assert "cannot write nosuch/sums.yaml: No such file or directory" in capsys.readouterr().err
    assert commands.main(["recipes", "copy"]) == 2
    assert commands.main(["recipes", "copy", "sumz"]) == 2
    assert "did you mean sums?" in capsys.readouterr().err


def test_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["config", "num_generations"]) == 0
    assert capsys.readouterr().out.startswith("group.group_size\n")
    assert commands.main(["config", "group.grup_size"]) == 2
    assert capsys.readouterr().err == "ConfigError: there is no setting 'group.grup_size' (did you mean group.group_size?)\n"
    assert commands.main(["config", "clip"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("'clip' is no key. These name it:\n")
    assert re.findall(r"^[a-z_]+\.[a-z_]+", shown, re.MULTILINE) == ["group.surrogate", "optimizer.clip_norm"]
    assert commands.main(["config"]) == 0
    frozen = Path(__file__).parents[1] / "config" / "settings_names.txt"
    assert len(capsys.readouterr().out.splitlines()) == len(frozen.read_text().split())


def test_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from groupwise.records import Step
    from groupwise.runs.run_log import RunLog
    from groupwise.runs.starts import record_end

    assert commands.main(["runs"]) == 2
    recipe = parse_stages(RECIPE, "r")["grpo"]
    for name in "abcd":
        (folder / "runs" / name).mkdir(parents=True)
        with RunLog(folder / "runs" / name, recipe) as log:
            log.write(Step(number=1, metrics={"reward": 0.5}))
            if name == "b":
                log.finish(1)
    record_end(folder / "runs" / "c", "RewardError: judge gave a text")
    (folder / "runs" / "d" / "metrics.jsonl").write_text("[" * 100_000 + "\n")
    capsys.readouterr()
    assert commands.main(["runs"]) == 0
    a, b, c, d = capsys.readouterr().out.splitlines()
    assert a.split() == ["a", "stopped", "step", "1", "reward", "0.500"]
    assert b.split() == ["b", "finished", "step", "1", "reward", "0.500"]
    assert c.split(maxsplit=6) == ["c", "failed", "step", "1", "reward", "0.500", "RewardError: judge gave a text"]
    assert d.split(maxsplit=4)[:4] == ["d", "stopped", "step", "0"]
    assert "metrics.jsonl: its last line is not one of metrics" in d


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize(("raised", "shown"), [("KeyboardInterrupt", False), ("ValueError", True)])
def test_a_further_ctrl_c_at_the_exit_is_no_news(raised: str, shown: bool) -> None:
    code = (
        "import atexit\nfrom groupwise.cli import commands\ncommands.main = lambda: 130\n"
        f"def late():\n    raise {raised}\natexit.register(late)\ncommands.command()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 130 and (raised in done.stderr) == shown == bool(done.stderr)


@pytest.mark.parametrize("error", [Diverged("weights are nan"), EngineError("the engine died")])
def test_errors_are_one_line_and_their_exit_code(
    error: Diverged | EngineError, calls: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(sys.modules["groupwise.api.stages"], "train_recipe", fail)
    assert commands.main(["train", "r.yaml"]) == error.exit_code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"
    with pytest.raises(type(error)):
        commands.main(["train", "r.yaml", "--debug"])


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        (["eval", "m", "--data", "r.jsonl"], "--column answer=YOURS renames one, args: {answer: VALUE} sets it"),
        (["score", "accuracy", "r.jsonl"], "--column answer=YOURS renames one, --arg answer=VALUE sets it"),
        (["check", "r.yaml"], "data.columns: {answer: YOURS} renames one, args: {answer: VALUE} sets it"),
    ],
)
def test_an_error_names_the_option_where_there_is_no_recipe(
    typed: list[str], remedy: str, calls: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise DataError("data.columns: {answer: YOURS} renames one, args: {answer: VALUE} sets it")

    monkeypatch.setattr(importlib.import_module(f"groupwise.cli.{typed[0]}"), "run", fail)
    assert commands.main(typed) == 2
    assert remedy in capsys.readouterr().err


def test_c8_ctrl_c_is_friendly(calls: list, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> int:
        error = KeyboardInterrupt()
        error.add_note("the last checkpoint is x")
        raise error

    def interrupt_plan(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["groupwise.api.stages"], "train_recipe", interrupt)
    monkeypatch.setattr(sys.modules["groupwise.api.planning"], "plan_recipe", interrupt_plan)
    assert commands.main(["train", "r.yaml"]) == 130
    assert capsys.readouterr().err == "\ninterrupted; the last checkpoint is x\n"
    assert commands.main(["train", "r.yaml", "--dry-run"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n", "a plan has no checkpoint"


def test_a_reader_that_goes_away_is_no_error() -> None:
    line = f"{sys.executable} -m groupwise config | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


def test_the_module_is_the_command() -> None:
    done = command("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "groupwise")
    done = command("train", "nosuch.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: no such recipe 'nosuch.yaml'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "typed",
    [
        ["import-trl", "trl.yaml", "--devices", "8", "new.yaml"],
        ["import-trl", "--devices", "8", "trl.yaml", "new.yaml"],
        ["--devices", "8", "import-trl", "trl.yaml", "new.yaml"],
    ],
    ids=" ".join,
)
def test_options_may_stand_between_arguments(typed: list[str]) -> None:
    from groupwise.cli.commands import _parse

    read = _parse(["recipes", *typed])
    assert (read.action, read.name, read.to, read.devices) == ("import-trl", "trl.yaml", "new.yaml", 8)


def test_overrides_may_stand_behind_options() -> None:
    from groupwise.cli.commands import _parse

    given = _parse(["train", "demo", "seed=1", "--dry-run", "steps=3"])
    assert given.dry_run
    assert given.overrides == ["seed=1", "steps=3"]
    with pytest.raises(SystemExit):
        _parse(["train", "demo", "--dryrun", "steps=3"])
    with pytest.raises(SystemExit):
        _parse(["runs", "a", "b"])


# ---------------------------------------------------------------- the nearest right word


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["trian", "x"], "did you mean train?"),
        (["chekc"], "did you mean check?"),
        (["import-trl", "x.py"], "did you mean recipes import-trl?"),
        (["zzzzzz"], "there are train, eval"),
        (["train", "r.yaml", "--lr", "1e-4"], "a key of the recipe is written optimizer.lr=1e-4"),
        (["train", "r.yaml", "--learning-rate=2e-5"], "a key of the recipe is written optimizer.lr=2e-5"),
        (["train", "r.yaml", "--num_generations", "4"], "a key of the recipe is written group.group_size=4"),
        (["train", "r.yaml", "--temprature", "0.7"], "a key of the recipe is written rollout.temperature=0.7"),
        (["train", "r.yaml", "--seed"], "a key of the recipe is written seed=..."),
        (["train", "r.yaml", "--zzzzzz"], "there is no option --zzzzzz; there are --help"),
        (["eval", "x", "--temprature", "1"], "there is no option --temprature; did you mean --temperature?"),
        (["runs", "a", "b"], "nothing that 'b' could mean"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_misspelt_word_gets_the_nearest_right_one(typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        commands.main(typed)
    assert end.value.code == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["train", "r.yaml", "objective=gpro"], "did you mean grpo?"),
        (["train", "r.yaml", "objective=dgpo"], "did you mean dpo?"),
        (["train", "r.yaml", "data.task=additoin"], "did you mean addition?"),
        (["train", "r.yaml", "optimizer.schedule=cosien"], "did you mean cosine?"),
        (["train", "r.yaml", "rewards.0.function=acuracy"], "did you mean accuracy?"),
        (["train", "sumz"], "did you mean sums?"),
        (["explain", "--preset", "gpro"], "did you mean grpo?"),
        (["config", "optimizer.schedul"], "did you mean optimizer.schedule?"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_misspelt_value_gets_the_nearest_right_one(typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(typed) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [["eval"], ["chat"], ["view"], ["check"], ["score"], ["explain"], ["examples"], ["replay", "--step", "1"], ["runs"]],
    ids=" ".join,
)
def test_a_misspelt_run_name_gets_the_nearest_run(typed: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs" / "mine").mkdir(parents=True)
    assert commands.main([typed[0], "runs/mien", *typed[1:]]) == 2
    assert "did you mean runs/mine?" in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["eval", "chat", "view", "score", "explain", "examples"])
def test_a_run_that_is_not_there_is_said_to_be_missing(typed: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not, say, that a reward or data have to be named."""
    (folder / "runs").mkdir()
    assert commands.main([typed, "runs/zzzzzzzz"]) == 2
    assert re.search("no such folder|there is no|is no run", capsys.readouterr().err)


def test_a_misspelt_recipe_name_gets_the_nearest_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["train", "r.yml"]) == 2
    assert "did you mean r.yaml?" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        commands.main([])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert all(re.search(rf"^    {name}\s", said, re.MULTILINE) for name in COMMANDS)


@pytest.mark.parametrize(("command", "needed"), [("train", "RECIPE"), ("eval", "RUN")])
def test_keys_need_not_be_given(command: str, needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main([command])
    assert capsys.readouterr().err.endswith(f"the following arguments are required: {needed}\n")


@pytest.mark.parametrize("command", ["score", "explain"])
def test_what_lies_near_is_found_at_home_too(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my-run").mkdir()
    assert commands.main([command, "~/my-rum"]) == 2
    assert "my-run?)" in capsys.readouterr().err
