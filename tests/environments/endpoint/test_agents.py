"""Presets of agents, with a program that talks as they do."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.config.recipes import make_recipe
from groupwise.config.settings import EnvironmentSettings
from groupwise.environments.agent_harness import AgentHarness
from groupwise.environments.agents import PRESETS
from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.harness_episodes import HarnessEnvironment
from groupwise.errors import ConfigError
from groupwise.inspection.agents import try_agent
from groupwise.inspection.check import check_stage
from groupwise.records import Finish, Prompt, Sampling
from groupwise.runs.prepared import plan_of
from groupwise.sandbox import attacks

from .conftest import Played, play

STAND_IN = Path(__file__).with_name("stand_in_agent.py")
TOOLS = {"claude-code": "Bash", "codex": "exec_command", "opencode": "bash", "mini-swe": "bash"}
AGENTS = pytest.mark.parametrize("agent", TOOLS)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def isolation() -> str:
    """The isolation of this machine; without one agents are tried without."""
    try:
        attacks.proved_isolation("bubblewrap", tools=True)
    except ConfigError:
        return "none"
    return "bubblewrap"


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str], str]:
    """`installed(agent)`: the path of a program that talks as this agent does."""

    def install(agent: str) -> str:
        program = tmp_path / PRESETS[agent].program
        program.write_text("#!/usr/bin/env python3\n" + STAND_IN.read_text())
        program.chmod(0o755)
        return str(program)

    return install


@pytest.fixture
def world(chat_tokenizer: Any, end_id: int, installed: Callable[[str], str], isolation: str) -> Any:
    """`world(agent, args, sandbox)`: an environment of a preset; closed with the test."""
    made = []

    def make(agent: str, args: Any = None, sandbox: Any = None, **settings: Any) -> HarnessEnvironment:
        limits = {"isolation": isolation, **(sandbox or {})}
        harness = AgentHarness(agent, {"program": installed(agent), **(args or {})}, limits)
        chosen = EnvironmentSettings(agent=agent, **settings)
        codec = ChatCodec(chat_tokenizer, (end_id,))
        size = {"context": 16384, "vocabulary": len(chat_tokenizer)}
        made.append(HarnessEnvironment(harness, codec, chosen, Sampling(max_new_tokens=8192), **size))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


@pytest.fixture
def episode(chat_tokenizer: Any, end_id: int) -> Callable[..., Played]:
    """`episode(environment, *commands)`: the policy runs these and then says that it is done."""

    def run(environment: HarnessEnvironment, *commands: str, title: str = "", files: Any = None) -> Played:
        harness = environment.harness
        assert isinstance(harness, AgentHarness)
        tool = TOOLS[harness.agent]
        texts = [title] if title else []
        for command in commands:
            call = {"name": tool, "arguments": {"command": command}}
            texts.append(f"I go.\n<tool_call>\n{json.dumps(call)}\n</tool_call>")
        texts.append("It is done.")

        def script(turn: int) -> tuple[list[int], Finish]:
            return [*chat_tokenizer(texts[turn], add_special_tokens=False)["input_ids"], end_id], Finish.EOS

        row = {"prompt": "Repair it.", "files": {"solution.py": "x = 1\n"} if files is None else files}
        prompt = Prompt(id="0/7", tokens=np.array(chat_tokenizer("Q")["input_ids"]), text="Q", row=row)
        return play(environment, prompt, script)

    return run


@AGENTS
def test_a_preset_trains_what_was_sampled_and_hands_its_files_on(world: Any, episode: Any, agent: str) -> None:
    title = "A title." if agent == "opencode" else ""
    played = episode(world(agent), "cat solution.py; echo x = 2 > solution.py", "cat solution.py", title=title)
    turns = played.episode.turns
    assert played.finish is Finish.DONE
    assert [played.tokens[turn.begin : turn.end] for turn in turns] == played.sampled
    for turn, ids in zip(turns, played.sampled, strict=True):
        assert all(played.trained[turn.begin : turn.begin + len(ids)]) is not turn.side
    assert sum(played.trained) == sum(len(ids) for turn, ids in zip(turns, played.sampled, strict=True) if not turn.side)
    assert [turn.side for turn in turns] == ([True] if title else []) + [False] * 3
    results = [call.result for turn in turns for call in turn.calls]
    assert [result.strip() for result in results] == ["x = 1", "x = 2"]
    assert played.episode.state == {"files": {"solution.py": "x = 2\n"}, "output": "It is done.\n"}


@AGENTS
def test_instructions_of_the_recipe_take_the_place_of_the_agents(world: Any, episode: Any, chat_tokenizer: Any, agent: str) -> None:
    played = episode(world(agent, {"system": "Be {{brief}}."}), title="A title." if agent == "opencode" else "")
    shown = chat_tokenizer.decode(played.behind[-1])
    assert "Be {{brief}}." in shown
    assert "I am " not in shown


CONNECT = """python3 -c "
import socket
for port in ({other}, {endpoint}):
    with socket.socket() as one:
        print(one.connect_ex(('127.0.0.1', port)) == 0)
" """


def test_nothing_but_the_endpoint_can_be_reached(world: Any, episode: Any, isolation: str, tmp_path: Path) -> None:
    if isolation == "none":
        pytest.skip("no isolation holds on this machine")
    secret = tmp_path.parent / "secret"
    secret.write_text("a secret")
    environment = world("claude-code")
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"other": other.getsockname()[1], "endpoint": environment.endpoint.port}
        played = episode(environment, CONNECT.format(**ports), f"cat {secret}", "ls -d /proc/[0-9]* | wc -l")
    connected, read, processes = [call.result for turn in played.episode.turns for call in turn.calls]
    assert connected.split() == ["False", "True"]
    assert "a secret" not in read
    assert int(processes) < 10, "processes of this machine are seen"


def test_an_agent_beyond_a_limit_is_ended_and_its_files_are_judged(world: Any, episode: Any) -> None:
    spend = "echo x = 3 > solution.py; python3 -c \"import time; text = 'a' * (300 << 20); time.sleep(60)\""
    played = episode(world("claude-code", sandbox={"memory_mb": 200}), spend)
    assert played.finish is Finish.DONE
    assert played.episode.state["files"] == {"solution.py": "x = 3\n"}
    assert played.episode.state["output"].endswith("[stopped: out of memory]")
    bomb = "for i in $(seq 50); do sleep 60 & done; wait"
    played = episode(world("claude-code", sandbox={"processes": 20}), bomb)
    assert played.episode.state["output"].endswith("[stopped: too many processes]")


def test_an_agent_out_of_time_is_ended_with_all_that_it_started(world: Any, episode: Any) -> None:
    played = episode(world("claude-code", episode_timeout=2.0), "sleep 3600 & sleep 3600")
    assert played.finish is Finish.DEADLINE
    assert played.episode.state is None


def test_an_episode_out_of_turns_is_judged_by_its_files(world: Any, episode: Any) -> None:
    played = episode(world("mini-swe", max_turns=1), "echo x = 4 > solution.py", "echo never")
    assert played.finish is Finish.TURNS
    assert played.episode.state["files"] == {"solution.py": "x = 4\n"}


def test_an_agent_that_fails_is_a_failure_with_its_words(world: Any, episode: Any) -> None:
    played = episode(world("codex"), "rm -r $HOME; kill -9 $PPID")
    assert played.finish is Finish.ERROR
    assert "codex ended with status" in played.episode.turns[-1].answer


def test_what_is_no_file_in_the_folder_is_not_read(world: Any, episode: Any, tmp_path: Path) -> None:
    files = {"a/link": "x", "pipe": "x", "gone": "x", "plain": "x", "b/inner": "x"}
    swap = f"rm a/link pipe gone; ln -s /etc/passwd a/link; mkfifo pipe; rm -r b; ln -s {tmp_path} b"
    (tmp_path / "inner").write_text("outside")
    played = episode(world("mini-swe"), swap, files=files)
    assert played.episode.state["files"] == {"plain": "x"}


def test_folders_of_episodes_are_removed(world: Any, episode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    episode(world("mini-swe"), "echo x > more")
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in before} <= {"mini"}


@AGENTS
def test_a_preset_says_its_version_and_takes_a_turn(world: Any, chat_tokenizer: Any, end_id: int, agent: str) -> None:
    prompt = Prompt(id="0/7", tokens=np.array([1]), text="Q", row={"prompt": "Repair it."})
    found = try_agent(world(agent), prompt, chat_tokenizer, end_id)
    assert found.startswith(f"{agent} 1.2.3: ")
    assert "asked for a turn" in found


def test_a_preset_that_takes_no_turn_is_reported(world: Any, chat_tokenizer: Any, end_id: int) -> None:
    environment = world("claude-code")
    Path(environment.harness.program).write_text("#!/bin/sh\necho 1.0; exit 3\n")
    prompt = Prompt(id="0/7", tokens=np.array([1]), text="Q", row={"prompt": "Repair it."})
    with pytest.raises(ConfigError, match="claude-code ended with status 3"):
        try_agent(environment, prompt, chat_tokenizer, end_id)


RECIPE: dict[str, Any] = {
    "objective": "grpo",
    "steps": 1,
    "model": {"scratch": {"hidden": 32, "layers": 2, "context": 512, "tokenizer": "bytes"}},
    "data": {"task": "repairs", "chat": True},
    "rewards": [{"function": "code", "args": {"file": "solution.py"}}],
}


def recipe(**environment: Any) -> Any:
    return make_recipe({**RECIPE, "environment": {"agent": "codex", **environment}})


@AGENTS
def test_an_agent_that_is_not_installed_is_refused_before_anything_is_loaded(agent: str) -> None:
    wanted = recipe(agent=agent, args={"program": "/nowhere/agent"})
    with pytest.raises(ConfigError, match=PRESETS[agent].install):
        plan_of(wanted)


def test_check_says_which_agent_was_found(installed: Callable[[str], str], isolation: str) -> None:
    environment = {"agent": "codex", "args": {"program": installed("codex")}, "sandbox": {"isolation": isolation}}
    small = {"rollout": {"max_new_tokens": 8}, "group": {"prompts_per_step": 2, "group_size": 2}}
    small["data"] = {**RECIPE["data"], "limit": 2}
    wanted = make_recipe({**RECIPE, **small, "environment": environment})
    found = {finding.name: finding for finding in check_stage(wanted)}
    assert found["agent"].good
    assert found["agent"].text.startswith("codex 1.2.3: it asked for a turn behind ")
    assert found["agent"].text.endswith("; it does not get namespace")


WRONG = {
    "an unknown argument": ({"args": {"sytem": "x"}}, "did you mean system"),
    "an argument of another agent": ({"args": {"tools": ["bash"]}}, "codex has no 'tools'"),
    "flags that are no list": ({"args": {"flags": "-v"}}, "must be a list of words"),
    "variables that are no mapping": ({"args": {"variables": ["x"]}}, "must be names with values"),
    "a program that is no text": ({"args": {"program": 3}}, "must be a text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_refused(case: str) -> None:
    environment, words = WRONG[case]
    with pytest.raises(ConfigError, match=words):
        plan_of(recipe(**environment))
