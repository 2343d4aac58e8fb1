"""The built-in tools `python` and `shell` in episodes: a folder for each, and what becomes of a sandbox that fails."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from groupwise.config.recipes import make_recipe
from groupwise.config.settings import EnvironmentSettings
from groupwise.data.tasks import make_task
from groupwise.errors import ConfigError, EnvironmentFailure, RewardError
from groupwise.records import Finish
from groupwise.rewards.code import code
from groupwise.rewards.environment import EnvironmentState
from groupwise.runs.environments import make_runtime
from groupwise.sandbox import attacks, server
from groupwise.sandbox.isolation import ISOLATIONS
from groupwise.sandbox.workspace import EpisodeSandbox

TOOLS = ("python", "shell")


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


BOTH = pytest.mark.parametrize("runs", ["process", "thread"])


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> None:
    try:
        attacks.proved_isolation(tools=True, asks="environment.sandbox")
    except ConfigError as error:
        pytest.skip(str(error))


def results(talk: Any) -> list[str]:
    return [one.result for one in talk.close(Finish.EOS).turns[0].calls]


@pytest.mark.slow
@BOTH
def test_calls_of_an_episode_share_a_folder_and_no_other_episode_does(table: Callable[..., Any], runs: str) -> None:
    at = table(tools=TOOLS, runs=runs)
    (one, _), (other, _) = at.begin(0), at.begin(1)
    at.say(one, call("python", code="open('note', 'w').write('mine')") + call("shell", command="cat note; ls"))
    at.say(other, call("shell", command="ls; echo done") + call("python", code="6 * 7"))
    assert results(one) == ["4", "minenote"]
    assert results(other) == ["done", "42"]


@pytest.mark.slow
@BOTH
def test_a_call_out_of_time_is_a_text_and_the_episode_goes_on(table: Callable[..., Any], runs: str) -> None:
    at = table(tools=TOOLS, runs=runs, sandbox={"seconds": 1.0})
    talk, _ = at.begin()
    reply = at.say(talk, call("shell", command="echo begun; sleep 1000"))
    assert reply.finish is None
    reply = at.say(talk, call("shell", command="echo still"))
    assert reply.finish is None
    turns = talk.close(Finish.EOS).turns
    assert [turn.calls[0].result for turn in turns] == ["begun\n[stopped after 1 seconds]", "still"]
    assert not any(turn.calls[0].failure for turn in turns)


@pytest.mark.slow
@BOTH
def test_an_episode_that_is_broken_off_leaves_nothing(table: Callable[..., Any], runs: str) -> None:
    """The call is under way when sampling is broken off."""
    at = table(tools=TOOLS, runs=runs, sandbox={"seconds": 3.0})
    talk, _ = at.begin()
    at.later(talk, call("shell", command="sleep 4321.25"))
    deadline = time.monotonic() + 60.0

    def runs_still() -> bool:
        return b"4321.25" in subprocess.run(["ps", "-eo", "args"], capture_output=True).stdout

    while not runs_still() and time.monotonic() < deadline:
        time.sleep(0.01)
    talk.close(Finish.ERROR)
    while runs_still():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_tools_of_the_user_stand_beside_them_in_the_order_of_the_recipe(table: Callable[..., Any]) -> None:
    at = table(tools=("shell", "my_tools.py:add", "python"), runs="process")
    (kind,) = at.environment.runtime.kinds.values()
    assert [schema["function"]["name"] for schema in kind.schemas] == ["shell", "add", "python"]
    talk, _ = at.begin()
    at.say(talk, call("add", a=1, b=2) + call("python", code="3"))
    assert results(talk) == ["3", "3"]


@pytest.mark.slow
def test_a_sandbox_that_fails_ends_the_episode_and_is_no_result(table: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model must not be paid, or punished, for a machine without memory."""

    def fails(self: EpisodeSandbox, tool: str, source: str) -> None:
        raise server.SandboxFailed("no memory")

    at = table(tools=TOOLS, runs="thread")
    monkeypatch.setattr(EpisodeSandbox, "call", fails)
    talk, _ = at.begin()
    reply = at.say(talk, call("shell", command="ls"))
    assert reply.finish is Finish.ERROR
    other, _ = at.begin(1)
    with pytest.raises(EnvironmentFailure, match="2 of 2 episodes were broken off"):
        at.say(other, call("shell", command="ls"))


@pytest.mark.slow
@BOTH
def test_files_of_a_row_are_repaired_and_graded(table: Callable[..., Any], runs: str) -> None:
    """The program is the file, whatever the completion says; a file that forges a verdict earns nothing."""
    row = make_task("repairs").prompts(1, seed=0)[0]
    forged = "import os, sys\nprint('passed')\nsys.stdout.flush()\nos._exit(0)\n"
    states = []
    at = table(tools=TOOLS, runs=runs)
    for index, source in enumerate((row["answer"], forged, None)):
        talk, _ = at.begin(index, files=row["files"])
        if source is not None:
            command = f"cat > solution.py <<'END'\n{source}END\npython3 check.py"
            at.say(talk, call("shell", command=command))
        at.say(talk, f"```python\n{row['answer']}```")
        episode = talk.close(Finish.EOS)
        if source is not None:
            assert episode.turns[0].calls[0].result == "passed"
        states.append(EnvironmentState("tools", episode.state or {}, None))
    reward = code(["tests"], file="solution.py")
    try:
        states.append(EnvironmentState("tools", {}, None))  # of an episode that was broken off
        said = [row["answer"]] * 4
        got = reward([""] * 4, said, lambda *_: None, lambda *_: None, tests=[row["tests"]] * 4, environments=states)
    finally:
        reward.close()
    assert got[0] == 1.0 and got[1] == 0.0 and got[2] < 1.0 and got[3] is None


def test_a_file_is_asked_of_episodes_alone() -> None:
    reward = code(["tests"], file="solution.py")
    with pytest.raises(RewardError, match="no episode has files"):
        reward([""], ["x"], lambda *_: None, lambda *_: None, tests=["[]"])
    reward.close()


def test_tools_are_refused_where_no_sandbox_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    for isolation in ISOLATIONS:
        monkeypatch.setattr(type(isolation), "installed", lambda self: False)
    attacks.proved_isolation.cache_clear()
    with pytest.raises(ConfigError, match=r"no sandbox holds on this machine.*bubblewrap: not here.*sandlock: not here"):
        make_runtime(EnvironmentSettings(tools=TOOLS, runs="thread"))
    attacks.proved_isolation.cache_clear()


WRONG = {
    "a misspelt tool": ({"tools": ["pyton"]}, "python"),
    "the same tool twice": ({"tools": ["python", "python"]}, "two tools are called 'python'"),
    "a tool of the same name": ({"tools": ["python", "my_tools.py:python"]}, "two tools are called 'python'"),
    "a limit that another one hides": ({"tools": ["python"], "tool_timeout": 5}, "environment.sandbox.seconds is 10, and"),
    "an isolation that is none": ({"tools": ["python"], "sandbox": {"isolation": "docker"}}, "bubblewrap"),
    "a misspelt limit": ({"tools": ["python"], "sandbox": {"second": 1}}, "did you mean seconds"),
    "a limit without tools": ({"tools": ["my_tools.py:add"], "sandbox": {"seconds": 1}}, "and none is set"),
    "a truth value": ({"tools": ["python"], "sandbox": {"seconds": True}}, "must be a number above 0"),
    "half a process": ({"tools": ["python"], "sandbox": {"processes": 0.5}}, "must be a whole number above 0"),
    "a limit of nothing": ({"tools": ["python"], "sandbox": {"memory_mb": 0}}, "memory_mb"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_are_refused(case: str) -> None:
    environment, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        make_recipe({"objective": "grpo", "data": {"task": "calculator", "chat": True}, "environment": environment, "steps": 1})


def test_a_row_of_the_calculator_may_call_python() -> None:
    rows = make_task("calculator", {"blurt": 0.0, "slip": 0.0, "tool": "python"}).demonstrations(2, seed=0)
    called = json.loads(rows[0]["completion"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert called["name"] == "python" and set(called["arguments"]) == {"code"}
    read = rows[1]["prompt"][-1]
    assert read["name"] == "python" and read["content"] == rows[0]["answer"]
    assert str(eval(called["arguments"]["code"])) == rows[0]["answer"]
