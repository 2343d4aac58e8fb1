"""Training with tools and environments: sampled is scored, what rewards see, and a run that is killed and resumed."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import groupwise as gw
from groupwise.api.tool_chat import Answered
from groupwise.cli.chat import chat
from groupwise.config.recipes import make_recipe
from groupwise.config.settings import EnvironmentSettings, RewardSettings
from groupwise.environments.procedural import answer_in
from groupwise.errors import ConfigError, RewardError
from groupwise.inspection.check import check_stage
from groupwise.ops.operations import absence
from groupwise.records import Episode, Finish, Prompt, Rollout, Sampling, Turn
from groupwise.rewards.compose import build_rewards

GAME = {
    "objective": "grpo",
    "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 128, "tokenizer": "arithmetic"}},
    "data": {"task": "guessing", "task_args": {"highest": 14}, "chat": True},
    "environment": {"factory": "groupwise.environments.playground:Guess", "max_turns": 4, "runs": "thread"},
    "rollout": {"max_new_tokens": 48},
    "group": {"prompts_per_step": 4, "group_size": 4},
    "optimizer": {"lr": 1e-3},
    "eval": {"at_start": False, "k": 2},
    "steps": 3,
}
FEW: dict[str, Any] = GAME["data"] | {"eval_limit": 2}  # type: ignore[operator]
"""For runs that are not about their evaluation."""


class Talkative:
    """Answers everything, and counts."""

    def reset(self, **row: Any) -> str:
        self.heard = 0
        return f" {row['start']}"

    def step(self, text: str) -> tuple[str, float, bool]:
        self.heard += 1
        return "more", 0.25 * len(text), self.heard == 3


def test_an_environment_given_as_an_object_trains(tmp_path: Path) -> None:
    """Its reward is the run's where no other is named; turns, answers and rewards are recorded; sampled = scored."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "start": str(i)} for i in range(8)]
    game = {key: value for key, value in GAME.items() if key not in ("data", "environment")}
    training = gw.train(**game, data=rows, environment=Talkative, runs=str(tmp_path), name="talk")  # type: ignore[arg-type]
    assert training.recipe.environment.factory == "live:Talkative"
    steps = list(training)
    assert [step.number for step in steps if step.number] == [1, 2, 3]
    rollouts = [rollout for group in steps[-1].groups for rollout in group.rollouts]
    assert steps[-1].groups[0].names == ("environment",)
    for rollout in rollouts:
        episode = rollout.episode
        assert episode is not None
        assert not rollout.trained[: episode.turns[0].begin].any()
        assert int(rollout.trained.sum()) == sum(turn.end - turn.begin for turn in episode.turns)
        assert rollout.finish in (Finish.DONE, Finish.LENGTH)
    rewards = np.concatenate([group.reward for group in steps[-1].groups])
    expected = [sum(turn.reward or 0.0 for turn in rollout.episode.turns) for rollout in rollouts if rollout.episode]
    np.testing.assert_allclose(rewards, expected)


class Spoken:
    """A tool that is an object."""

    def __call__(self) -> str:
        """Say so."""
        return "so"


def test_objects_and_partials_that_are_tools_are_named(tmp_path: Path) -> None:
    """After the class, and after the function."""
    game = {key: value for key, value in GAME.items() if key != "environment"}
    environment = {"tools": [Spoken(), partial(answer_in, "x")]}
    training = gw.train(**game, environment=environment, rewards="exact", runs=str(tmp_path), name="named")  # type: ignore[arg-type]
    assert training.recipe.environment.tools == ("live:Spoken", "live:answer_in")


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["process", "thread"])
def test_tools_given_by_name_train(tmp_path: Path, runs: str) -> None:
    """A scratch model that calls nothing: its prompts show the tool, and its completions are conversations."""
    keys = GAME | {
        "data": {"task": "calculator", "chat": True, "limit": 32, "eval_limit": 4},
        "model": {"scratch": GAME["model"]["scratch"] | {"tokenizer": "bpe:300", "context": 192}},  # type: ignore[index]
        "environment": {"tools": ["groupwise.environments.playground:calculate"], "runs": runs},
        "rewards": [{"function": "accuracy"}],
        "runs": str(tmp_path),
        "steps": 1,
    }
    training = gw.train(make_recipe(keys))
    (step,) = [step for step in training if step.number]
    rollout = step.groups[0].rollouts[0]
    assert "calculate(expression)" in rollout.prompt.text
    assert rollout.episode is not None
    assert [message["role"] for message in rollout.episode.messages] == ["assistant"]


def rollout_of(messages: list[dict[str, Any]], **episode: Any) -> Rollout:
    prompt = Prompt(id="0/0", tokens=np.array([1]), text="?", row={"prompt": [{"role": "user", "content": "?"}], "answer": "4"})
    turns = (Turn(begin=0, end=2, finish=Finish.TOOL_CALLS), Turn(begin=5, end=6, finish=Finish.EOS))
    return Rollout(
        prompt=prompt, index=0, tokens=np.arange(6), behavior_logp=np.zeros(6), finish=Finish.STOP, eos_ids=(),
        sampling=Sampling(), text="everything", trained=np.array([True, True, False, False, False, True]),
        episode=Episode(turns=turns, messages=tuple(messages), **episode),
    )  # fmt: skip


SAID = [
    {"role": "assistant", "content": "Let me see.", "tool_calls": []},
    {"role": "tool", "name": "f", "content": "\\boxed{4}"},
    {"role": "assistant", "content": "\\boxed{5}"},
]


def test_trap_6_an_answer_that_a_tool_gave_is_not_the_policys() -> None:
    """Built-in rewards read the policy's last turn; what they count are the tokens that it wrote."""
    asked = [RewardSettings(function="accuracy"), RewardSettings(function="soft_overlong", args={"max_tokens": 4, "cache": 1})]
    with build_rewards(asked, columns=["prompt", "answer"]) as rewards:
        (found,) = rewards.score([[rollout_of(SAID)]])
    assert found.rewards.tolist() == [[0.0, 0.0]], "wrong, and three tokens of four"


def test_rewards_get_messages_states_and_the_environments_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(
        "def roles(completions, **kwargs):\n"
        "    return [float([m['role'] for m in c] == ['assistant', 'tool', 'assistant']) for c in completions]\n"
        "def count(completions, environments, **kwargs): return [float(e.count + e.get_reward()) for e in environments]\n"
        "def gone(completions, environments): return [e.increment(1) for e in environments]\n"
    )
    settings = [RewardSettings(function=f"judge.py:{name}") for name in ("roles", "count")]
    rollout = rollout_of(SAID, state={"count": 3}, reward=0.5, environment="Counter")
    with build_rewards([*settings, RewardSettings(function="environment")], columns=["prompt", "answer"]) as rewards:
        (found,) = rewards.score([[rollout]])
    assert found.rewards.tolist() == [[1.0, 3.5, 0.5]]
    with (
        build_rewards([RewardSettings(function="judge.py:gone")], columns=["prompt"]) as rewards,
        pytest.raises(RewardError, match="keep what rewards need in one of them"),
    ):
        rewards.score([[rollout]])


@pytest.mark.slow
def test_check_shows_tools_and_plays_an_episode(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in check_stage(make_recipe(GAME | {"runs": str(tmp_path)}))}
    assert found["environment"].good
    assert "Guess: reset() says nothing; to an empty turn it answers ''" in found["environment"].text
    assert found["turns"].good is not False
    assert found["log-probs"].good, found["log-probs"].text
    assert all(finding.good is not False for name, finding in found.items() if name != "endings"), found


@pytest.mark.slow
def test_sampled_is_scored_behind_answers(tmp_path: Path) -> None:
    """Log-probs of the packed stream are those that the engine sampled with, in every turn."""
    training = gw.train(make_recipe(GAME | {"data": FEW, "runs": str(tmp_path), "steps": 1}))
    (step,) = [step for step in training if step.number]
    for group, columns in zip(step.groups, step.current_logp, strict=True):
        for rollout, logp in zip(group.rollouts, columns, strict=True):
            if logp.size:
                np.testing.assert_allclose(logp[rollout.trained], rollout.behavior_logp[rollout.trained], atol=1e-4)


@pytest.mark.slow
def test_a_finished_run_is_evaluated_and_talked_to_with_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    list(gw.train(make_recipe(GAME | {"runs": str(tmp_path), "steps": 1, "name": "game"})))
    gw.load_policy(tmp_path / "game").generate("1", max_new_tokens=2)
    assert "trained in conversations: `generate` asks for one turn" in caplog.text
    report = gw.evaluate(tmp_path / "game", k=2)  # everything else the run says itself
    assert report.evaluation.prompts == 15, "the numbers from 0 to 14"
    assert all(one.rollouts[0].episode is not None for one in report.evaluation.answers)
    said = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    tool = {"tools": ["groupwise.environments.playground:calculate"], "runs": "thread"}
    assert chat(str(tmp_path / "game"), max_new_tokens=8, environment=tool) == 0
    assert "a conversation; at most 8 tokens; an empty line ends it" in " ".join(capsys.readouterr().out.split())
    with ExitStack() as ends:
        policy = gw.load_policy(tmp_path / "game")
        policy = replace(policy, data=replace(policy.data, system="1+2"))
        answered = Answered.of(policy, None, tool, 8, ends)
        assert answered is not None
        rollout = answered.turn([{"role": "user", "content": "3"}], 1.0, 0)
    assert rollout.prompt.text.index("1+2") < rollout.prompt.text.index("3<")


@pytest.mark.parametrize("game", [{"factory": "openenv", "args": {"url": "ws://127.0.0.1:1"}}, {"openenv": "ws://127.0.0.1:1"}])
def test_a_run_that_played_is_talked_to_without_its_game(game: dict[str, Any]) -> None:
    origin: Any = SimpleNamespace(recipe=make_recipe(GAME | {"environment": game}))
    policy: Any = None
    with ExitStack() as ends:
        assert Answered.of(policy, origin, None, 8, ends) is None


@pytest.mark.slow
def test_a_run_that_is_killed_in_the_middle_of_episodes_ends_with_the_same_weights(tmp_path: Path, forked: Any) -> None:
    """Killed while the environment thinks; resumed, it ends with the weights of a run that nobody disturbed.

    To the bit where the compiled kernels decode.  Torch's products round by how many rows are decoded together, and when an
    environment answers decides which those are.
    """
    (tmp_path / "slow.py").write_text(
        "import random, time\nfrom groupwise.environments.playground import Guess\n"
        "class Slow(Guess):\n"
        "    def step(self, text):\n"
        "        open('steps', 'a').write('x')\n        time.sleep(0.002)\n"
        "        observation, reward, done = super().step(text)\n"
        "        return observation, reward + random.random() / 100, done\n"
    )
    keys = GAME | {"environment": {"factory": "slow.py:Slow", "max_turns": 4}, "save": {"every": 1}}
    keys |= {"data": FEW, "rollout": {"max_new_tokens": 16}}
    (tmp_path / "game.yaml").write_text(json.dumps(keys))
    command = ("train", "game.yaml")
    whole = forked.run(*command, "name=whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.said
    (tmp_path / "steps").unlink()
    killed = forked.start(*command, "name=killed", cwd=tmp_path)
    metrics = tmp_path / "runs" / "killed" / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().splitlines()) and time.monotonic() < end and killed.poll() is None:
        time.sleep(0.01)
    before = (tmp_path / "steps").stat().st_size
    while (tmp_path / "steps").stat().st_size <= before and killed.poll() is None:
        time.sleep(0.001)  # until an episode of the next step is under way
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it was over before it could be killed"
    resumed = forked.run(*command, "name=killed", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.said
    first, second = (load_file(tmp_path / "runs" / name / "final" / "model.safetensors") for name in ("whole", "killed"))
    exact = absence() is None
    torch.testing.assert_close(first, second, rtol=0.0 if exact else 1e-4, atol=0.0 if exact else 1e-5)


def test_the_answer_of_a_completion() -> None:
    assert answer_in(r"\boxed{1} <answer>2</answer>") == "2"
    assert answer_in(r"<think>\boxed{1}</think> \boxed{3}.") == "3"
    assert answer_in("<think>1</think>\n4 ") == "4"


def test_reasoning_gym_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    recipe = make_recipe(
        {key: value for key, value in GAME.items() if key != "data"} | {"environment": {"reasoning_gym": "chain_sum"}}
    )
    from groupwise.runs.environments import with_environment_data

    with pytest.raises(ConfigError, match="pip install reasoning-gym=="):
        with_environment_data(recipe)


def test_a_reasoning_gym_data_set_trains_and_its_scorer_is_looked_at(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    keys = {key: value for key, value in GAME.items() if key != "data"}
    scratch = GAME["model"]["scratch"] | {"tokenizer": "bytes", "context": 256}  # type: ignore[index]
    keys |= {"environment": {"reasoning_gym": "chain_sum"}, "model": {"scratch": scratch}, "runs": str(tmp_path)}
    keys |= {"data": {"chat": True, "limit": 16, "eval_limit": 4}, "steps": 2}
    recipe = make_recipe(keys)
    steps = [step for step in gw.train(recipe) if step.number]
    assert steps[-1].groups[0].names == ("reasoning_gym",)
    found = {finding.name: finding for finding in check_stage(recipe)}
    assert found["scorer"].good, found["scorer"].text


def test_settings_know_whether_an_environment_answers() -> None:
    assert not EnvironmentSettings(reasoning_gym="chain_sum").talks
    assert EnvironmentSettings(tools=("a:f",)).talks
