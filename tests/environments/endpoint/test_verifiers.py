"""verifiers 0.4.0 itself: a taskset by name, trained for 20 steps, and its renderers on the token-level route."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest

import groupwise as gw
from groupwise.environments.verifiers import VerifiersHarness
from groupwise.errors import ConfigError
from groupwise.records import Finish

from .conftest import WAIT, play

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed: pip install -e '.[verifiers]'"
)


SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def even(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") % 2 == 0)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for i in range(12):
            yield SumTask(SumData(prompt=f"{i}+{i}", system_prompt="Add.", answer=2 * i), self.config.task)


__all__ = ["SumTaskset"]
"""
"""A taskset as verifiers' own documentation has them."""


@pytest.fixture
def sums(monkeypatch, tmp_path):
    (tmp_path / "own_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own-sums"
    sys.modules.pop("own_sums", None)


def test_an_episode_is_verifiers_and_its_turn_is_ours(worlds, says, sums, a_prompt):
    harness = VerifiersHarness(sums)
    rows = harness.rows()
    assert rows[3] == {"prompt": "3+3", "task": 3}
    environment = worlds(harness)
    for text, reward in (("4", 0.0), ("42", 2.0)):
        found = play(environment, replace(a_prompt, row=rows[3]), says(text))
        assert (found.finish, found.episode.reward) == (Finish.DONE, reward)
        assert [message["role"] for message in found.episode.messages] == ["system", "user", "assistant"]
    assert play(environment, replace(a_prompt, row={"task": 99}), says("4")).finish is Finish.ERROR


POKER = """
import verifiers.v1 as vf


class HandData(vf.TaskData):
    pass


class HandTask(vf.Task[HandData]):
    pass


class HandTaskset(vf.Taskset[HandTask]):
    def load(self):
        for i in range(4):
            yield HandTask(HandData(prompt=f"hand {i}"), self.config.task)


class HandEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class HandEnv(vf.Env[HandEnvConfig]):
    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)

    async def finalize(self, task, episode):
        lengths = [len(trace.last_reply or "") for trace in episode.traces]
        for place, trace in enumerate(episode.traces):
            trace.record_reward("won", 1.0 if lengths[place] > lengths[1 - place] else -1.0)


__all__ = ["HandTaskset", "HandEnv"]
"""
"""Two agents, and a game of sum zero: whoever writes more wins."""


@pytest.fixture
def poker(monkeypatch, tmp_path):
    (tmp_path / "own_poker.py").write_text(POKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own-poker"
    sys.modules.pop("own_poker", None)


def test_several_agents_of_an_episode_are_refused(poker):
    with pytest.raises(ConfigError, match=r"several agents \(first, second\)"):
        VerifiersHarness(poker, {"id": poker})


def test_the_reward_of_several_attempts_is_their_mean(worlds, says, sums, a_prompt):
    harness = VerifiersHarness(sums, {"id": "best-of-n", "n": 3})
    row = harness.rows()[0]
    found = play(worlds(harness), replace(a_prompt, row=row), says("a", "ab", "abc"))
    assert (len(found.episode.turns), found.episode.reward) == (3, pytest.approx(2 / 3))


def test_names_and_arguments_are_checked(sums):
    with pytest.raises(ConfigError, match="nothing-of-this-name"):
        VerifiersHarness("nothing-of-this-name")
    with pytest.raises(ConfigError, match="colour"):
        VerifiersHarness(sums, {"colour": "red"})


def test_a_taskset_trains_by_name(sums, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    training = gw.train(
        name="verifiers",
        objective="grpo",
        model={"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 512, "tokenizer": "bytes"}},
        environment={"verifiers": sums},
        rollout={"max_new_tokens": 8},
        group={"prompts_per_step": 2, "group_size": 4},
        optimizer={"lr": 1e-3},
        steps=20,
        runs=str(tmp_path / "runs"),
    )
    steps = list(training)
    assert len(steps) == 20
    rewards = [reward for step in steps for scored in step.groups for reward in scored.reward]
    assert not np.isnan(rewards).any()
    assert set(rewards) == {0.0, 2.0}
    assert all(one.finish in (Finish.DONE, Finish.LENGTH) for step in steps for scored in step.groups for one in scored.rollouts)


def test_renderers_read_the_token_level_route(worlds, says, a_prompt, chat_tokenizer):
    """What verifiers' client for training does with a turn: ids, one log-prob each, and its own checks of both."""
    import openai
    from renderers import create_renderer
    from renderers.client import generate

    read = []

    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.eos_token = "<|im_end|>"  # renderers asks to stop there

    async def harness(base_url, model):
        renderer = create_renderer(tokenizer)
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=WAIT) as client:
            messages = [{"role": "user", "content": "x"}]
            read.append(await asyncio.wait_for(generate(client=client, renderer=renderer, messages=messages, model=model), WAIT))
        return 1

    found = play(worlds(harness), a_prompt, says("ab"))
    assert found.episode.reward == 1.0, found.episode.turns
    assert read[0]["completion_ids"] == found.sampled[0]
    assert read[0]["completion_logprobs"] == [-0.5, -1.5, -2.5]
    assert read[0]["prompt_ids"] == found.behind[0]
