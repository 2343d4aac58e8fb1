"""Code that a run folder from elsewhere names: nothing of it runs until its user has trusted it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import groupwise as gw
from groupwise.algorithms.table import PARTS
from groupwise.cli.commands import main
from groupwise.config.recipes import load_recipe, parse_recorded
from groupwise.errors import ConfigError
from groupwise.runs.origin import run_of
from groupwise.runs.run_files import RunFiles
from groupwise.runs.run_log import RunLog
from groupwise.runs.trust import demand_trust, named_code, seal, sealed

HERE = Path(__file__).parent


def config_of(folder: Path) -> str:
    return (folder / "config.yaml").read_text()


@pytest.fixture
def theirs(write_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`theirs(**changes)`: the folder of a run that another user made; its recipe names `evil.py`, which leaves a mark."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\ndef f(**_): ...\n")
    monkeypatch.chdir(tmp_path)

    def make(**changes: Any) -> Path:
        changes = {"rewards": [{"function": "accuracy"}]} | changes
        folder = tmp_path / "runs" / "theirs"
        recipe = load_recipe(write_recipe(tmp_path, "theirs", **{name: changes[name] for name in changes if name != "late"}))
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user"))
            folder.mkdir(parents=True, exist_ok=True)
            with RunLog(folder, recipe) as log:
                log.finish(0)
            config = yaml.safe_load((folder / "config.yaml").read_text())
            (folder / "config.yaml").write_text(yaml.safe_dump(config | changes.get("late", {})))
            (folder / "checksums.txt").unlink()
            seal(folder, config_of(folder))
            assert sealed(RunFiles(folder), config_of(folder))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "this user"))
        assert not sealed(RunFiles(folder), config_of(folder))
        return folder

    return make


OWN = {"rewards": [{"function": "evil.py:f"}]}
TOOLS = {"environment": {"tools": ["evil.py:f"]}}
KINDS = [kind for kind in PARTS if kind != "kl"]
"""Parts of an algorithm that may be code; estimators of the KL have names alone."""
PARTS_OF = {"group": {"credit": "evil:f"}}
REMOTE = {"model": {"path": "x", "trust_remote_code": True}}


@pytest.mark.parametrize(
    ("late", "command", "key"),
    [
        (OWN, ["eval"], "rewards.0.function: evil.py:f"),
        (OWN, ["score"], "rewards.0.function: evil.py:f"),
        (OWN, ["check"], "rewards.0.function: evil.py:f"),
        (OWN, ["check config.yaml"], "rewards.0.function: evil.py:f"),
        (OWN, ["train config.yaml"], "rewards.0.function: evil.py:f"),
        (OWN, ["train config.yaml", "--dry-run"], "rewards.0.function: evil.py:f"),
        (TOOLS, ["eval"], "environment.tools.0: evil.py:f"),
        (TOOLS, ["chat"], "environment.tools.0: evil.py:f"),
        (PARTS_OF, ["replay", "--step", "1"], "group.credit: evil:f"),
        (PARTS_OF, ["explain"], "group.credit: evil:f"),
        ({"data": {"task": "evil:f"}}, ["eval"], "data.task: evil:f"),
        (REMOTE, ["replay", "--step", "1"], "model.trust_remote_code"),
        ({"environment": {"harness": ["sh", "-c", "touch mark"]}}, ["eval"], "environment.harness: sh -c touch mark"),
        ({"environment": {"agent": "codex", "args": {"program": "./mark"}}}, ["eval"], "environment.agent: ./mark"),
    ],
)
def test_code_of_a_run_from_elsewhere_is_refused_until_it_is_trusted(
    late: dict, command: list[str], key: str, theirs: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = theirs(late=late)
    name, _, file = command[0].partition(" ")
    arguments = [name, str(folder / file), *command[1:]]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "was not made by you on this machine" in said
    assert f"groupwise trust {folder}" in said and key in said
    assert not (tmp_path / "mark").exists()
    assert main(["trust", str(folder), "--show"]) == 0
    assert key in capsys.readouterr().out
    assert not sealed(RunFiles(folder), config_of(folder))
    assert main(["trust", str(folder)]) == 0
    assert sealed(RunFiles(folder), config_of(folder))
    main(arguments)
    assert "was not made by you" not in capsys.readouterr().err


def test_a_model_with_code_of_its_own_is_not_loaded(theirs: Callable) -> None:
    folder = theirs(late=REMOTE)
    (folder / "final").mkdir()
    (folder / "final" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"was not made by you on this machine(.|\n)*model.trust_remote_code"):
        gw.load_policy(folder)


def test_a_recipe_that_was_changed_after_the_run_is_not_trusted(theirs: Callable) -> None:
    folder = theirs()
    seal(folder, config_of(folder))
    assert sealed(RunFiles(folder), config_of(folder))
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config + "\n")
    assert not sealed(RunFiles(folder), config_of(folder))
    (folder / "config.yaml").write_text(config)
    assert sealed(RunFiles(folder), config_of(folder))
    (folder / ".seal").write_text("")
    assert not sealed(RunFiles(folder), config_of(folder))


def test_a_recipe_exchanged_after_it_was_read_is_not_the_one_that_is_trusted(theirs: Callable) -> None:
    """The text that was parsed is the text that is sealed, and the text whose seal is asked for."""
    folder = theirs()
    origin = run_of(folder)
    (folder / "config.yaml").write_text(config_of(theirs(late=OWN)))
    seal(folder, origin.config)
    assert not sealed(RunFiles(folder), config_of(folder))
    with pytest.raises(ConfigError, match="was not made by you"):
        demand_trust(run_of(folder), ["rewards"])
    exchanged = run_of(folder)
    (folder / "config.yaml").write_text(origin.config)
    with pytest.raises(ConfigError, match="was not made by you"):
        demand_trust(exchanged, ["rewards"])


@pytest.mark.parametrize("name", ["rewards.py", "final/modeling_own.py"])
def test_a_run_given_back_with_other_code_in_its_folder_is_not_trusted(name: str, theirs: Callable) -> None:
    folder = theirs()
    (folder / "final").mkdir()
    for code in ("A = 1\n", "A = 2\n"):
        (folder / name).write_text(code)
        assert not sealed(RunFiles(folder), config_of(folder))
        seal(folder, config_of(folder))
        assert sealed(RunFiles(folder), config_of(folder))


def test_a_recipe_that_is_called_config_yaml_is_no_run(
    write_recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, "mine", rewards=[{"function": "nowhere.py:f"}]).rename(tmp_path / "config.yaml")
    main(["check", str(path)])
    assert "was not made by you" not in capsys.readouterr().err


def test_what_another_user_judged_by_built_ins_needs_no_trust(theirs: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    folder = theirs()
    for arguments in (["eval", str(folder)], ["replay", str(folder), "--step", "1"], ["check", str(folder)]):
        main(arguments)
        assert "was not made by you" not in capsys.readouterr().err
    assert main(["trust", str(folder), "--show"]) == 0
    assert capsys.readouterr().out == ""


def test_what_the_user_names_takes_the_place_of_the_runs_code(theirs: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    folder = theirs(late=OWN)
    for own in (["--reward", "accuracy"], ["rewards.0.function=accuracy"]):
        main(["eval", str(folder), *own])
        assert "was not made by you" not in capsys.readouterr().err


def test_every_place_of_a_recipe_that_takes_code_is_known(write_recipe: Callable[..., Path], tmp_path: Path) -> None:
    """What stands in `settings.py` as `module:function` is looked at."""
    code = "evil:f"
    changes: dict[str, Any] = {
        "objective": code,
        "group": {**dict.fromkeys(KINDS, code)},
        "rewards": [{"function": code}],
        "data": {"task": code},
        "rollout": {"engine": {"name": code}},
        "environment": {"tools": [code], "factory": {"a": code}, "harness": code},
        "model": {"path": "x", "trust_remote_code": True},
    }
    tree = yaml.safe_load(write_recipe(tmp_path, "run").read_text())
    tree = {key: changes.get(key, value) for key, value in (tree | changes).items()}
    found = dict(named_code(parse_recorded(yaml.safe_dump(tree), "config.yaml")))
    assert set(found) == {
        "objective", "data.task", "rollout.engine.name", "rewards.0.function", "model.trust_remote_code", "environment.tools.0",
        "environment.factory.a", "environment.harness", *(f"group.{part}" for part in KINDS),
    }  # fmt: skip
