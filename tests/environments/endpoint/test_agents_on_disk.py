"""Runs in which agents drive the episodes, read from disk: what is trained is what was sampled.

The agents are stand-ins, or the real ones where the variable names folders with their programs:
GROUPWISE_AGENTS=node_modules/.bin:venv/bin.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import groupwise as gw
from groupwise.environments.agents import PRESETS
from groupwise.errors import ConfigError
from groupwise.runs.rollout_files import read_step
from groupwise.sandbox import attacks

from . import scripted_engine
from .test_agents import STAND_IN, TOOLS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VARIABLE = "GROUPWISE_AGENTS"
COMMAND = {"codex": "cmd"}
"""The name of the command in a call of the real agent's shell, where it is another."""
SYSTEM = "You work in a shell."


@pytest.fixture(params=["stand-in", "real"])
def installed(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """`installed(agent)`: the path of its program, and whether it is the real one."""

    def find(agent: str) -> tuple[str, bool]:
        name = PRESETS[agent].program
        if request.param == "stand-in":
            program = tmp_path / name
            program.write_text("#!/usr/bin/env python3\n" + STAND_IN.read_text())
            program.chmod(0o755)
            return str(program), False
        folders = os.environ.get(VARIABLE)
        if folders is None:
            pytest.skip(f"set {VARIABLE} to the folders that hold {name}, separated by {os.pathsep}")
        path = shutil.which(name, path=folders)
        if path is None:
            pytest.skip(f"{name} is not in {folders}: {PRESETS[agent].install}")
        return path, True

    return find


def turns_of(agent: str, real: bool) -> list[str]:
    """What the policy writes: it looks, writes the file, and ends as the agent wants it."""
    commands = ["cat solution.py", "echo x = 2 > solution.py; cat solution.py"]
    texts = ["A title."] if agent == "opencode" else []
    more = {"description": "Works."} if real and agent in ("claude-code", "opencode") else {}
    if real and agent == "mini-swe":
        commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    for command in commands:
        call = {"name": TOOLS[agent], "arguments": {COMMAND.get(agent, "command") if real else "command": command, **more}}
        texts.append(f"I go.\n<tool_call>\n{json.dumps(call)}\n</tool_call>")
    return [*texts, "It is done."]


@pytest.mark.parametrize("agent", TOOLS)
def test_every_id_on_disk_was_sampled_and_is_trained_or_a_side_calls(
    installed: Any, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, real = installed(agent)
    try:
        attacks.proved_isolation("bubblewrap", tools=True)
        isolation = "bubblewrap"
    except ConfigError:
        isolation = "none"
    monkeypatch.chdir(tmp_path)
    shutil.copy(scripted_engine.__file__, tmp_path / "my_engine.py")
    monkeypatch.setenv(scripted_engine.VARIABLE, json.dumps(turns_of(agent, real)))
    rows = [{"prompt": f"Repair it, {name}.", "files": {"solution.py": f"x = {name}\n"}} for name in ("one", "two")]
    gw.train(
        objective="grpo",
        steps=1,
        model={"scratch": {"hidden": 32, "layers": 2, "context": 16384, "tokenizer": "bytes"}},
        data={"path": rows, "chat": True},
        environment={
            "agent": agent,
            "args": {"program": program, "system": SYSTEM},
            "sandbox": {"isolation": isolation},
            "at_once": 2,
        },
        rewards=[written],
        rollout={"engine": {"name": "my_engine.py:make"}, "max_new_tokens": 8192},
        group={"prompts_per_step": 2, "group_size": 2},
        runs=tmp_path,
        name="run",
    ).run(quiet=True)
    drawn: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in (tmp_path / scripted_engine.DRAWN).read_text().splitlines():
        turn = json.loads(line)
        drawn.setdefault((turn["prompt"], turn["index"]), []).append(turn)
    step = read_step(tmp_path / "run", 1)
    rollouts = [rollout for group in step.groups for rollout in group.rollouts]
    assert len(rollouts) == len(drawn) == 4
    side_calls = 0
    for rollout in rollouts:
        assert rollout.episode is not None
        turns, sampled = rollout.episode.turns, drawn[rollout.prompt.id, rollout.index]
        assert len(turns) == len(sampled) >= 3
        trained = np.zeros(len(rollout), dtype=bool)
        for turn, was in zip(turns, sampled, strict=True):
            assert (turn.begin, turn.end) == (was["begin"], was["begin"] + len(was["ids"]))
            assert rollout.tokens[turn.begin : turn.end].tolist() == was["ids"]
            assert np.allclose(rollout.behavior_logp[turn.begin : turn.end], was["logp"], atol=1e-6)
            assert context_of(rollout, turn).tolist() == was["behind"]
            trained[turn.begin : turn.end] = not turn.side
            side_calls += turn.side
        assert rollout.trained.tolist() == trained.tolist()
        results = [call.result for turn in turns for call in turn.calls]
        assert any(rollout.prompt.row["files"]["solution.py"].strip() in result for result in results)
        assert any("x = 2" in result for result in results)
    assert step.metrics["episodes/side_calls"] * len(rollouts) == side_calls
    assert side_calls == (4 if agent == "opencode" else 0)
    assert step.metrics["reward"] == 1.0
    for text in gw.read_rollouts(tmp_path / "run")["episode"]:
        assert json.loads(text)["left"]["files"] == {"solution.py": "x = 2\n"}


def context_of(rollout: Any, turn: Any) -> np.ndarray:
    """What a turn was drawn behind, of the record alone."""
    behind, begin = rollout.prompt.tokens, 0
    for branch in rollout.episode.branches:
        if branch.begin <= turn.begin:
            behind, begin = branch.context, branch.begin
    return np.concatenate([behind, rollout.tokens[begin : turn.begin]])


def written(completions: list[Any], environments: list[Any]) -> list[float]:
    return [float(environment.files == {"solution.py": "x = 2\n"}) for environment in environments]
