"""Recipes that cannot be run: everything that is wrong with one stands in one list, before a folder is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupwise.cli.commands import main
from groupwise.config.recipes import load_recipe, parse_stages
from groupwise.config.schema import settings_table
from groupwise.errors import ConfigError
from groupwise.runs.run import Run, train

WRONG = """\
objective: grpo
steps: 4
model: {scratch: {hidden: 32}}
data: {task: addition}
rewards: [{function: accuracy}]
rollout:
  temperature: -1
group:
  group_size: 1
  beta: -0.5
  surrogate:
    name: clipped
    low: -3
    hgih: 0.3
  credit: {name: standardized, eps: -1, beta: 0.1}
optimizer:
  lr: .nan
  betas: [2, 0.9]
"""


@pytest.mark.fault(
    "T35/K4",
    "epsilon -3, temperature -1, group_size 1, lr nan and five more in one recipe",
    "ConfigError: a list of the values that no recipe can have, then of those that do not go together, each by line",
)
def test_k4_everything_wrong_in_two_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(WRONG)
    assert main(["train", "r.yaml"]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert "4 problems in r.yaml" in told
    for line, says in {
        7: "rollout.temperature must be",
        10: "group.beta must be",
        17: "optimizer.lr must be",
        18: "optimizer.betas",
    }.items():
        assert f"r.yaml:{line}: {says}" in told, told
    mended = WRONG.replace("temperature: -1", "temperature: 1").replace("beta: -0.5", "beta: 0.5")
    Path("r.yaml").write_text(mended.replace("lr: .nan", "lr: 1e-3").replace("betas: [2, 0.9]", "betas: [0.8, 0.9]"))
    assert main(["train", "r.yaml"]) == ConfigError.exit_code
    told = capsys.readouterr().err
    assert "5 problems in r.yaml" in told
    for line, says in {
        9: "group.group_size must be at least 2",
        13: "group.surrogate.low: input should be greater than or equal to 0, got -3",
        14: "group.surrogate.hgih: clipped has no such keyword (it takes low, high, delta, dual) (did you mean high?)",
    }.items():
        assert f"r.yaml:{line}: {says}" in told, told
    assert "r.yaml:15: group.credit.eps: input should be greater" in told
    assert "r.yaml:15: group.credit: beta is a setting of its own, group.beta; got 0.1 here" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml"]


ODD = (
    None, -1, 1.5, float("nan"), "", "x" * 1000, "x" * 300 + ".jinja", "x" * 300 + ".py:f", [], {}, [[]], {"a": {}}, 2**70,
    "\x1b[31m", "a:b", "\0", "stage:x", ["a"], {"name": None}, {"name": 1}, {"name": "a:b"}, "live:x", [{"function": None}],
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.fault(
    "K4d", "every setting given 23 values that it was never meant to have", "ConfigError with the key, or it is taken"
)
def test_k4d_no_value_of_a_setting_is_a_traceback() -> None:
    base = {"objective": "grpo", "steps": 1, "model": {"scratch": {}}, "data": {"task": "addition"}}
    base["rewards"] = [{"function": "exact"}]
    parts = {part: yaml.safe_dump({part: below}, sort_keys=False) for part, below in base.items()}
    for key in settings_table():
        first, *inner, last = key.split(".") if "." in key else (key, key)
        for value in ODD:
            tree: dict = {first: copy.deepcopy(base.get(first, {}))}
            if "." not in key:
                tree[key] = value
            else:
                place = tree["rewards"][0] if first == "rewards" else tree[first]
                for part in inner:
                    place = place if part == "N" else place.setdefault(part, {})
                place[last] = value
            text = "".join((parts | {first: yaml.safe_dump(tree, sort_keys=False)}).values())
            try:
                parse_stages(text, "r.yaml")
            except ConfigError as error:
                said = str(error)
                assert "r.yaml:" in said
                assert "\0" not in said
                assert "\x1b" not in said


@pytest.mark.slow
@pytest.mark.fault(
    "K4c", "context, data, a reward's file and a built-in's argument are wrong in one recipe", "ConfigError: one list, by line"
)
def test_k4c_what_data_and_functions_show_stands_in_one_list(
    recipe: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Callable
) -> None:
    (tmp_path / "p.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 8)
    for _ in train(load_recipe(recipe("first", objective="sft", steps=1, batch_size=2, rewards=[]))):
        pass
    path = recipe(
        "r",
        model={"path": "runs/first/final", "scratch": None},
        data={"path": "p.jsonl", "task": None, "limit": None},
        rollout={"max_new_tokens": 4096},
        rewards=[
            {"function": "judges.py:jugde"},
            {"function": "accuracy", "args": {"colunm": "answer"}},
            {"function": "exact", "args": {"column": "gold"}},
            {"function": "judges.py:judge"},
        ],
    )
    code = main(["train", str(path)])
    record_property("exit", code)
    assert code == ConfigError.exit_code
    told, lines = capsys.readouterr().err, path.read_text().splitlines()
    assert f"5 problems in {path}:" in told
    for key, says in {
        "max_new_tokens:": "max_new_tokens is 4096 and the model's context is",
        "path: p.jsonl": "no column 'prompt'",
        "function: judges.py:jugde": "has no function 'jugde'; did you mean 'judge'?",
        "function: accuracy": "has no argument 'colunm'",
        "function: exact": "compares with the column 'gold', which the data do not have",
    }.items():
        number = next(n for n, line in enumerate(lines, 1) if key in line)
        assert any(f"{path}:{number}: " in line and says in line for line in told.splitlines()), (key, told)
    assert not Path("runs/r").exists()


OWN_CODE = """\
import functools
import numpy as np

def rank(groups):
    return [[np.zeros(len(one)) for one in group.rollouts] for group in groups]

def scaled(groups, *, scale: float = 1.0):
    return [[np.full(len(one), scale) for one in group.rollouts] for group in groups]

class Credit:
    def __call__(self, groups, *, scale: float = 1.0):
        return scaled(groups, scale=scale)

INSTANCE, PARTIAL = Credit(), functools.partial(scaled, scale=2.0)

def wordy(group):
    return "yes"

class NoRows:
    def prompts(self, n, seed):
        return [["1+1="]] * n
    def held_out(self, n):
        return []

class Raises:
    def prompts(self, n, seed):
        return 1 // 0

def nothing(*_, **__):
    return None

def breaks(policy, max_rows):
    return {}["weights"]
NUMBER = 3
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": {"task": "mine.py:NUMBER"}}, "data.task: mine.py has no function 'NUMBER'"),
        ({"data": {"task": "mine.py:nothing"}}, "the task 'mine.py:nothing' is an object of NoneType without held_out"),
        ({"data": {"task": "mine.py:NoRows"}}, "the task 'mine.py:NoRows': prompts gave a list: ['1+1=']: a row is a mapping"),
        ({"data": {"task": "mine.py:Raises", "eval_limit": None}}, "'mine.py:Raises' is an object of Raises without held_out"),
        ({"rollout": {"engine": "mine.py:nothing"}}, "rollout.engine mine.py:nothing is an object of NoneType without generate"),
        ({"rollout": {"engine": "mine.py:breaks"}}, "rollout.engine mine.py:breaks raised KeyError: 'weights' ("),
        ({"rollout": {"engine": "mine.py:NUMBER"}}, "rollout.engine: mine.py has no function 'NUMBER'"),
        ({"group": {"ratio": "mine.py:NUMBER"}}, "group.ratio: 'mine.py:NUMBER' is not a function but int"),
    ],
)
@pytest.mark.fault("K4e", "a task, engine or ratio of one's own that is none", "ConfigError: what it is, and what it must be")
def test_code_of_ones_own_that_does_not_fit_is_refused(changes: dict, says: str, recipe: Callable) -> None:
    Path("mine.py").write_text(OWN_CODE)
    with pytest.raises(ConfigError) as caught:
        list(train(load_recipe(recipe("r", **changes))))
    assert says in str(caught.value)


@pytest.mark.parametrize("credit", ["mine.py:rank", "mine.py:INSTANCE", "mine.py:PARTIAL", "{name: mine.py:INSTANCE, scale: 2}"])
def test_a_part_is_a_function_of_a_file_an_instance_or_a_partial(credit: str, recipe: Callable) -> None:
    Path("mine.py").write_text(OWN_CODE)
    path = recipe("r", steps=1, group={"credit": yaml.safe_load(credit)})
    (step,) = train(load_recipe(path))
    assert step.number == 1
    assert main(["train", str(path), "--dry-run"]) == 0


@pytest.mark.slow
def test_a_file_of_ones_own_imports_its_neighbours(recipe: Callable, forked: Any) -> None:
    """In the command too, whose path does not begin with the working folder."""
    folder = Path("parts_of_mine")
    folder.mkdir()
    (folder / "beside_it.py").write_text("import in_the_working_folder\nfrom math import tau\n")
    Path("in_the_working_folder.py").touch()
    (folder / "mine.py").write_text(f"import beside_it\n{OWN_CODE}\ndef judge(completion):\n    return beside_it.tau\n")
    path = recipe("r", steps=1, group={"credit": "parts_of_mine/mine.py:rank"}, rewards=["parts_of_mine/mine.py:judge"])
    process = forked.start("train", path, "--quiet")
    assert process.wait() == 0, process.said


def test_a_mistake_in_a_part_stands_where_the_part_stands(recipe: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text(OWN_CODE)
    path = recipe("r", group={"credit": {"name": "mine.py:scaled", "scael": 2}})
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "scael" in text)
    name, value = "group.credit=mine.py:rnak", "group.credit={name: mine.py:scaled, scale: x}"
    for arguments, where in [
        ([], f"{path}:{line}: group.credit.scael: "),
        ([name], f"override {name}: group.credit: mine.py has no 'rnak'; did you mean 'rank'?"),
        ([value], f"override {value}: group.credit.scale: "),
    ]:
        assert main(["train", str(path), *arguments, "--dry-run"]) == 2
        assert where in capsys.readouterr().err


def test_what_a_part_of_ones_own_reads_decides_about_critic_and_teacher(recipe: Callable) -> None:
    Path("mine.py").write_text(
        f"{OWN_CODE}\nfrom groupwise.algorithms.advantages import ReverseKl\ndef taught(groups):\n    return ReverseKl()(groups)\n"
        "taught.reads = ('teacher_logp',)\n"
    )
    unread = {"teacher": {"hint": "x"}, "critic": {"lr": 1e-3}}
    assert main(["train", str(recipe("taught", group={"credit": "mine.py:taught"}, teacher={"hint": "x"})), "--dry-run"]) == 0
    with pytest.raises(ConfigError, match=r"(?s)critic: nothing that is learnt from.*teacher: nothing that is learnt from"):
        next(iter(train(load_recipe(recipe("rank", group={"credit": "mine.py:rank"}, **unread)))))


def test_one_mistake_in_data_has_its_line(recipe: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    Path("none.jsonl").touch()
    path = recipe("r", data={"path": "none.jsonl", "task": None}, rewards=[{"function": "exact"}])
    assert main(["train", str(path)]) == 2
    number = next(n for n, line in enumerate(path.read_text().splitlines(), 1) if "none" in line)
    assert f"DataError: {path}:{number}: none.jsonl is empty" in capsys.readouterr().err


def test_a_folder_that_was_there_stays(recipe: Callable) -> None:
    path = recipe("refused", data={"limit": 2})
    kept = Path("runs/refused")
    kept.mkdir(parents=True)
    with pytest.raises(ConfigError):
        Run(load_recipe(path), kept)
    assert kept.is_dir()
    (kept / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError):
        Run(load_recipe(path), kept)
    assert (kept / "notes.txt").read_text() == "mine"
