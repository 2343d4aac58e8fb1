"""Foreign harnesses trained: what they were told are the ids that were sampled, and those are what is scored and trained."""

from __future__ import annotations

import json
import threading

import numpy as np
import openai
import pytest
import torch
from rule_rewards import RuleRewards

import groupwise as gw
from groupwise.config.settings import EnvironmentSettings, GroupSettings
from groupwise.data.rendering import Chat, render_chats
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.harness import FunctionHarness
from groupwise.environments.harness_episodes import HarnessEnvironment
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.records import Finish, Prompt, Sampling
from groupwise.rollout.native.engine import NativeEngine

from .conftest import ADD, TEMPLATE, WAIT


def loops(row, base_url):
    """Two turns with a tool on offer; any answer is taken, and worth its length."""
    ask = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=WAIT).chat.completions.create
    messages = [{"role": "user", "content": row["question"]}]
    written = 0
    for _ in range(2):
        answer = ask(model="m", messages=messages, tools=[ADD], max_tokens=20)
        message = answer.choices[0].message
        written += answer.usage.completion_tokens
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        messages.append({"role": "user", "content": "again ✓"})
    return float(written % 3)


def tokenizer_with_tools():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prompts(tokenizer, count: int) -> list[Prompt]:
    """As the harness begins, so that nothing is a branch."""
    found = []
    for i in range(count):
        chat = Chat([{"role": "user", "content": f"{i}?"}], tools=[ADD], add_generation_prompt=True)
        (text,) = render_chats(tokenizer, [chat])
        found.append(Prompt(id=f"0/{i}", tokens=np.array(tokenizer(text)["input_ids"]), text=text, row={"question": f"{i}?"}))
    return found


@pytest.fixture
def talking(tiny_policy):
    """`talking(**sampling)`: a policy in float64, and an engine whose completions are the harness's episodes."""
    made = []

    def make(harness=loops, **sampling):
        tokenizer = tokenizer_with_tools()
        policy = tiny_policy("llama", dtype=torch.float64, tokenizer=tokenizer, context=2048, scale=2.0)
        drawn = Sampling(**{"max_new_tokens": 120, "temperature": 0.8} | sampling)
        codec, size = ChatCodec(tokenizer, policy.eos_ids), {"context": policy.context, "vocabulary": policy.vocabulary}
        made.append(HarnessEnvironment(FunctionHarness(harness), codec, EnvironmentSettings(at_once=8), drawn, **size))
        return policy, NativeEngine(policy, max_rows=4, environment=made[-1]), drawn

    yield make
    for environment in made:
        environment.close()


def forward(policy, behind: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of tokens behind others, by transformers' own forward pass over both."""
    ids = torch.from_numpy(np.concatenate([behind, tokens]))
    with plain_attention(policy.model), torch.no_grad():
        z = policy.model(input_ids=ids[None], use_cache=False).logits[0, behind.size - 1 : -1, : policy.vocabulary]
    return (z / temperature).log_softmax(-1).gather(1, ids[behind.size :, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_log_probs_of_an_episode_are_those_of_a_forward_pass(talking, own):
    """own: the prompt is another than the harness's first request, which is then a branch."""
    policy, engine, sampling = talking()
    asked = prompts(policy.tokenizer, 3)
    if own:
        asked = [Prompt(id=one.id, tokens=one.tokens[:5], text="", row=one.row) for one in asked]
    groups = list(engine.generate(asked, group_size=3, sampling=sampling, seed=5))
    turns = 0
    for rollout in (rollout for group in groups for rollout in group):
        episode = rollout.episode
        assert rollout.finish in (Finish.DONE, Finish.LENGTH)
        assert len(episode.branches) == own
        behind = episode.branches[0].context if own else rollout.prompt.tokens
        logp = forward(policy, behind, rollout.tokens, sampling.temperature)
        assert np.abs(logp - rollout.behavior_logp)[rollout.trained].max() < 1e-10
        assert rollout.trained.sum() == sum(turn.end - turn.begin for turn in episode.turns)
        turns += len(episode.turns)
    assert turns > 12


@pytest.mark.slow
def test_an_openai_client_is_trained(talking):
    from groupwise.config.resolve import resolve
    from groupwise.config.settings import OptimizerSettings
    from groupwise.training.groups import SampledRollouts
    from groupwise.training.online import train_online
    from groupwise.training.optimizer import Optimizer

    policy, engine, sampling = talking()
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    group, asked = GroupSettings(prompts_per_step=2, group_size=4), iter(prompts(policy.tokenizer, 8))
    steps = list(
        train_online(
            policy,
            resolve("grpo", group, sampling.max_new_tokens),
            SampledRollouts(
                algorithm=resolve("grpo", group, sampling.max_new_tokens),
                engine=engine,
                rewards=RuleRewards(lambda rollout: rollout.episode.reward),
                draw=lambda k: [next(asked) for _ in range(k)],
                sampling=sampling,
                steps=4,
                group=group,
            ),
            Optimizer(policy.model, OptimizerSettings(lr=1e-3), 4),
            group=group,
            max_tokens_per_microbatch=4096,
        )
    )
    assert len(steps) == 4
    for step in steps:
        for scored, current in zip(step.groups, step.current_logp, strict=True):
            for rollout, logp in zip(scored.rollouts, current, strict=True):
                if logp.size:  # of groups that teach nothing none is computed
                    assert np.abs(logp - rollout.behavior_logp)[rollout.trained].max() < 1e-10
    assert any(not scored.equal_rewards for step in steps for scored in step.groups)
    assert any(not torch.equal(before[name], parameter) for name, parameter in policy.model.named_parameters())


@pytest.mark.slow
def test_a_recipe_with_a_harness(tmp_path, monkeypatch):
    """From the keys of a recipe: the reward is the harness's, and what it did is recorded."""
    monkeypatch.chdir(tmp_path)
    seen = set()

    def harness(row, base_url, model):
        ask = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=WAIT).chat.completions.create
        seen.add(threading.get_ident())
        text = ask(model=model, messages=[{"role": "user", "content": row["prompt"]}]).choices[0].message.content
        return len(text) % 2

    training = gw.train(
        name="harness",
        objective="grpo",
        model={"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 512, "tokenizer": "bytes"}},
        data={"path": [{"prompt": f"{i}+1"} for i in range(8)], "chat": True},
        environment={"harness": harness, "episode_timeout": 60.0},
        rollout={"max_new_tokens": 12},
        group={"prompts_per_step": 2, "group_size": 3},
        steps=2,
        runs=str(tmp_path / "runs"),
    )
    steps = list(training)
    assert len(steps) == 2
    for step in steps:
        for scored in step.groups:
            assert scored.names == ("environment",)
            assert all(one.episode is not None and one.episode.branches == () for one in scored.rollouts)
            expected = [len(one.episode.messages[-1]["content"] or "") % 2 for one in scored.rollouts]
            assert scored.reward.tolist() == expected
    assert seen


def asks_for_a_title(row, base_url, model):
    """An agent with a tool that asks for a title beside its work."""
    ask = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=WAIT).chat.completions.create
    for text, tools in (("title", {}), (row["prompt"], {"tools": [ADD]})):
        ask(model=model, messages=[{"role": "user", "content": text}], max_tokens=5, **tools)
    return 1.0


def works(messages, tools):
    return messages[0]["content"] != "title"


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "side"), [("without_tools", [True, False]), ("none", [False] * 2), (works, [False, True])])
def test_side_calls_of_a_recipe_are_recorded_and_not_trained(tmp_path, monkeypatch, rule, side):
    monkeypatch.chdir(tmp_path)
    training = gw.train(
        name="side",
        objective="grpo",
        model={"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 1024, "tokenizer": "bytes"}},
        data={"path": [{"prompt": f"{i}+1"} for i in range(8)], "chat": True},
        environment={"harness": asks_for_a_title, "episode_timeout": 60.0, "side_calls": rule},
        rollout={"max_new_tokens": 20},
        group={"prompts_per_step": 2, "group_size": 2},
        steps=1,
        runs=str(tmp_path / "runs"),
    )
    (step,) = list(training)
    assert step.metrics["episodes/side_calls"] == sum(side)
    table = gw.read_rollouts(tmp_path / "runs" / "side")
    assert len(table) == 4
    for episode, trained in zip(table["episode"], table["trained"], strict=True):
        turns = json.loads(episode)["turns"]
        assert [turn["side"] for turn in turns] == side
        for turn in turns:
            assert set(trained[turn["begin"] : turn["end"]]) == {not turn["side"]}


@pytest.mark.slow
def test_a_harness_that_does_not_take_the_recipes_arguments_is_refused_with_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"environment.args: the harness .*loops.* cannot be called with colour"):
        gw.train(
            objective="grpo",
            model={"scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 512, "tokenizer": "bytes"}},
            data={"path": [{"prompt": "1+1"}], "chat": True},
            environment={"harness": loops, "args": {"colour": 1}},
            rollout={"max_new_tokens": 4},
            group={"prompts_per_step": 1, "group_size": 2},
            steps=1,
        ).run()


def test_harnesses_that_fail_are_counted(talking):
    from groupwise.records import RolloutGroup
    from groupwise.training.metrics import episode_metrics

    def harness(row, base_url, index):
        if index == 0:
            raise OSError("no such tool")
        return loops(row, base_url)

    policy, engine, sampling = talking(harness)
    (group,) = engine.generate(prompts(policy.tokenizer, 1), group_size=4, sampling=sampling, seed=1)
    reward = np.array([np.nan if one.episode.reward is None else one.episode.reward for one in group])
    assert [one.finish is Finish.ERROR for one in group] == [True, False, False, False]
    assert np.isnan(reward).tolist() == [True, False, False, False]
    scored = RolloutGroup(rollouts=group, names=("own",), rewards=reward[:, None], reward=reward)
    assert episode_metrics([scored])["episodes/errors"] == 0.25
