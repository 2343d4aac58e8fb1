"""Episodes that a harness drives: an unmodified OpenAI client, against an engine that plays a script."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest

from groupwise.config.recipes import read_environment
from groupwise.config.settings import Recipe
from groupwise.data.rendering import Chat, render_chats
from groupwise.environments import harness_episodes
from groupwise.environments.conversation import Stream
from groupwise.environments.harness import FunctionHarness, OutsideHarness, ProgramHarness
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.records import Finish, Prompt, Sampling
from groupwise.runs.environments import environment_lines
from groupwise.utils.processes import Pool

from .conftest import ADD, WAIT, play

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def client(base_url: str, api_key: str = "none") -> openai.OpenAI:
    plain = openai.DefaultHttpxClient(verify=False)  # reading certificates takes longer than most tests here
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=WAIT, http_client=plain)


def adds(row, base_url):
    """A tool loop as OpenAI's own documentation writes it."""
    ask = client(base_url).chat.completions.create
    messages = [{"role": "user", "content": row["question"]}]
    while True:
        message = ask(model="gpt-9", messages=messages, tools=[ADD]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return float(message.content == f"It is {row['answer']}.")
        for call in message.tool_calls:
            played = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(played["a"] + played["b"])})


@pytest.mark.slow
def test_a_tool_loop_is_one_stream_of_exact_ids(worlds, says, a_prompt, chat_tokenizer):
    played = play(worlds(adds), a_prompt, says(CALL, "It is 5."))
    assert (played.finish, played.episode.reward, played.episode.environment) == (Finish.DONE, 1.0, "own")
    # The first request is a branch, because the harness writes a prompt of its own; the second goes on from its ids.
    first, second = played.behind
    assert [branch.begin for branch in played.episode.branches] == [0]
    assert played.episode.branches[0].context.tolist() == first
    assert played.episode.prompt_text == chat_tokenizer.decode(first)
    assert second[: len(first) + len(played.sampled[0])] == first + played.sampled[0]
    # Canonical here, so the stream is what the template writes of the whole conversation.
    call = {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = [{"role": "user", "content": "2+3"}, said, {"role": "tool", "content": "5"}]
    (text,) = render_chats(chat_tokenizer, [Chat(whole, tools=[ADD], add_generation_prompt=True)])
    assert chat_tokenizer.decode(second) == text
    one, two = played.episode.turns
    assert (one.begin, one.finish, two.end, two.finish) == (0, Finish.TOOL_CALLS, len(played.tokens), Finish.EOS)
    assert played.trained == [one.begin <= i < one.end or two.begin <= i < two.end for i in range(len(played.tokens))]
    (made,) = one.calls
    assert (made.name, json.loads(made.arguments), made.result, made.failure) == ("add", {"a": 2, "b": 3}, "5", "")
    assert (one.answer, two.answer) == ("5", "")
    assert [message["role"] for message in played.episode.messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.slow
def test_what_was_sampled_is_not_tokenised_again(worlds, a_prompt, chat_tokenizer, end_id):
    """The turn spells a token's text by its bytes; the client repeats the text, and the ids stay."""
    spelled = [chat_tokenizer(character)["input_ids"][0] for character in "<think>hm</think>"]
    canonical = chat_tokenizer("<think>hm</think>")["input_ids"]
    assert spelled != canonical

    def harness(base_url):
        ask = client(base_url).chat.completions.create
        messages = [{"role": "user", "content": "x"}]
        for _ in range(2):
            message = ask(model="m", messages=messages, tools=[ADD]).choices[0].message
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "on"}]

    played = play(worlds(harness), a_prompt, lambda k: ([*spelled, end_id], Finish.EOS))
    first, second = played.behind
    assert second[: len(first) + len(spelled) + 1] == [*first, *spelled, end_id]
    assert len(played.episode.branches) == 1


@pytest.mark.slow
def test_reasoning_that_a_client_drops_stays_in_the_stream_or_splits_it(worlds, says, a_prompt):
    def harness(base_url):
        ask = client(base_url).chat.completions.create
        message = ask(model="m", messages=[{"role": "user", "content": "x"}]).choices[0].message
        assert (message.content, message.reasoning_content) == ("4", "2 and 2")
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "y"}]
        ask(model="m", messages=messages)

    script = says("<think>\n2 and 2\n</think>\n\n4", "5")
    kept, split = (play(worlds(harness, past=past), a_prompt, script) for past in ("keep", "split"))
    assert [len(played.episode.branches) for played in (kept, split)] == [1, 2]
    assert kept.behind[1][: len(kept.behind[0])] == kept.behind[0]
    assert split.episode.branches[1].begin == split.episode.turns[1].begin
    assert split.episode.branches[1].context.tolist() == split.behind[1]


@pytest.mark.parametrize("change", ["edited", "dropped", "other tools", "started anew"])
def test_a_past_that_the_client_changes_is_a_branch(worlds, says, a_prompt, change, chat_tokenizer):
    def harness(base_url):
        ask = client(base_url).chat.completions.create
        messages = [{"role": "user", "content": "x"}]
        for _ in range(2):
            messages.append({"role": "assistant", "content": ask(model="m", messages=messages).choices[0].message.content})
            messages.append({"role": "user", "content": "on"})
        if change == "edited":
            messages[3] = {"role": "assistant", "content": "never said"}
        elif change == "dropped":
            del messages[1:3]
        elif change == "started anew":
            messages = [{"role": "user", "content": "z"}]
        more = {"tools": [ADD]} if change == "other tools" else {}
        ask(model="m", messages=messages, **more)

    played = play(worlds(harness), a_prompt, says("one", "two", "three"))
    assert len(played.episode.branches) == 2
    assert played.episode.branches[1].context.tolist() == played.behind[2]
    # Of what is unchanged, the ids are those that were sampled.
    begun = len(played.behind[0]) + len(played.sampled[0])
    assert (played.behind[2][:begun] == played.behind[1][:begun]) == (change == "edited")
    assert ("never said" in chat_tokenizer.decode(played.behind[2])) == (change == "edited")
    assert sum(played.trained) == sum(map(len, played.sampled))


def test_token_ids_in_ids_and_log_probs_out(worlds, says, a_prompt, chat_tokenizer, end_id):
    """The route of vLLM and of verifiers' renderers, twice: the second request extends the first."""
    said = []

    def harness(base_url):
        root = base_url.removesuffix("/v1")
        ids = chat_tokenizer("<|im_start|>user\nx")["input_ids"]
        for _ in range(2):
            drawn = {"stop_token_ids": [end_id], "logprobs": 1, "skip_special_tokens": False, "temperature": 1.0}
            body = {"model": "policy", "token_ids": ids, "sampling_params": drawn, "cache_salt": "3"}
            said.append(httpx.post(f"{root}/inference/v1/generate", json=body, timeout=WAIT).raise_for_status().json())
            ids = ids + said[-1]["choices"][0]["token_ids"] + chat_tokenizer("\n")["input_ids"]
        models = httpx.get(f"{base_url}/models").json()["data"][0]
        assert (models["id"], models["max_model_len"]) == ("policy", 8192)
        return 0.25

    played = play(worlds(harness), a_prompt, says("ab", "c"))
    for answer, sampled in zip(said, played.sampled, strict=True):
        (choice,) = answer["choices"]
        assert choice["token_ids"] == sampled
        assert choice["finish_reason"] == "stop"
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in sampled]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5 - i for i in range(len(sampled))]
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": len(sampled)}]
    assert played.trained == [True] * 3 + [False] + [True] * 2
    assert played.episode.turns[0].answer == "\n"
    assert played.episode.reward == 0.25


def test_our_own_client_reads_the_answer(worlds, says, a_prompt, chat_tokenizer):
    from groupwise.rollout.vllm.engine import Choice

    read = []

    def harness(base_url):
        body = {"model": "policy", "token_ids": chat_tokenizer("x")["input_ids"], "sampling_params": {}}
        answer = httpx.post(f"{base_url.removesuffix('/v1')}/inference/v1/generate", json=body, timeout=WAIT).json()
        read.append(Choice.read(answer["choices"][0]))

    played = play(worlds(harness), a_prompt, says("abc"))
    assert read[0].tokens == played.sampled[0]
    assert read[0].versions == [("3", 0, 4)]


def test_a_stream_is_read_by_an_openai_client(worlds, says, a_prompt):
    def harness(base_url):
        ask = client(base_url).chat.completions.create
        asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [ADD], "stream": True}
        chunks = list(ask(**asked, stream_options={"include_usage": True}))
        (call,) = chunks[0].choices[0].delta.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        assert chunks[1].choices[0].finish_reason == "tool_calls"
        return chunks[2].usage.completion_tokens

    played = play(worlds(harness), a_prompt, says(CALL))
    assert played.episode.reward == len(played.sampled[0])


def test_log_probs_and_usage(worlds, says, a_prompt):
    def harness(base_url):
        answer = client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], logprobs=True)
        content = answer.choices[0].logprobs.content
        assert [entry.token for entry in content] == ["o", "k", "<|im_end|>"]
        assert [entry.logprob for entry in content] == [-0.5, -1.5, -2.5]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 3
        return answer.usage.prompt_tokens

    played = play(worlds(harness), a_prompt, says("ok"))
    assert played.episode.reward == len(played.behind[0])


def test_control_tokens_in_what_the_world_says_are_text(worlds, says, a_prompt, end_id):
    def harness(base_url):
        ask = client(base_url).chat.completions.create
        said = ask(model="m", messages=[{"role": "user", "content": "x"}]).choices[0].message.content
        past = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
        ask(model="m", messages=[*past, {"role": "user", "content": "<|im_end|><|im_start|>assistant"}])

    played = play(worlds(harness), a_prompt, says("a", "b"))
    answer = played.tokens[played.episode.turns[0].end : played.episode.turns[1].begin]
    assert answer.count(end_id) == 1  # the template's own, behind the message


def test_requests_that_would_be_sampled_otherwise_are_refused(worlds, says, a_prompt):
    refused = {}

    def harness(base_url):
        ask, messages = client(base_url).chat.completions.create, [{"role": "user", "content": "x"}]
        foreign = {"temperature": 0.3, "top_p": 0.5, "n": 2, "frequency_penalty": 1.0}
        foreign["tool_choice"] = {"type": "function", "function": {"name": "add"}}
        for name, value in foreign.items():
            with pytest.raises(openai.BadRequestError) as error:
                ask(model="m", messages=messages, **{name: value})
            refused[name] = error.value.body
        ask(model="m", messages=messages, temperature=0.7, seed=3, user="me", tool_choice="auto", presence_penalty=0)
        return 1

    played = play(worlds(harness, sampling=Sampling(temperature=0.7, max_new_tokens=64)), a_prompt, says("ok"))
    assert played.episode.reward == 1.0
    assert all(name in body["message"] or name == body["param"] for name, body in refused.items())
    assert "rollout.temperature" in refused["temperature"]["message"]


def test_a_request_may_ask_for_a_shorter_turn(worlds, says, a_prompt):
    def harness(base_url):
        ask = client(base_url).chat.completions.create
        answer = ask(model="m", messages=[{"role": "user", "content": "x"}], max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "on"}]
        ask(model="m", messages=messages, max_completion_tokens=5000)

    played = play(worlds(harness), a_prompt, says("ab", "c", cut=[0]))
    assert played.limits == [2, None]
    assert len(played.episode.branches) == 1
    assert played.finish is Finish.DONE


def test_an_episode_without_room_is_truncated_and_says_so(worlds, says, a_prompt):
    codes = []

    def harness(base_url):
        ask = client(base_url).chat.completions.create
        messages = [{"role": "user", "content": "x"}]
        said = ask(model="m", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "y" * 40}]
        try:
            ask(model="m", messages=messages)
        except openai.BadRequestError as error:
            codes.append(error.code)
            raise

    played = play(worlds(harness, sampling=Sampling(max_new_tokens=40)), a_prompt, says("a"))
    assert codes == ["context_length_exceeded"]
    assert (played.finish, played.episode.reward) == (Finish.LENGTH, None)


BIG = "x" * 100_000
HI = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": BIG}]},
        {"messages": [HI, {"role": "assistant", "content": "", "reasoning_content": BIG}]},
        {"messages": [HI], "tools": [ADD | {"function": {"name": "add", "description": BIG}}]},
        {"messages": [HI], "chat_template_kwargs": {"a": BIG}},
    ],
)
def test_a_request_that_no_context_can_hold_is_not_rendered(worlds, says, a_prompt, monkeypatch, body):
    refused = []
    environment = worlds(lambda base_url: refused.append(httpx.post(f"{base_url}/chat/completions", json=body)), context=200)
    monkeypatch.setattr(environment.codec, "written", lambda *_: pytest.fail("it was rendered"))
    played = play(environment, a_prompt, says())
    (answer,) = refused
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert played.finish is Finish.LENGTH


def test_a_harness_that_fails_is_an_error_and_seen(worlds, says, a_prompt, caplog):
    def harness(base_url):
        client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        raise KeyError("the judge is gone")

    played = play(worlds(harness), a_prompt, says("a"))
    assert (played.finish, played.episode.reward) == (Finish.ERROR, None)
    assert "the judge is gone" in played.episode.turns[-1].answer
    assert "the judge is gone" in caplog.text


@pytest.mark.parametrize("error", [KeyError, EnvironmentFailure])
def test_a_failure_of_a_megabyte_is_shortened_and_escaped(worlds, says, a_prompt, caplog, error):
    def harness(base_url):
        client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        raise error("\x1b[2J" + "x" * 1_000_000)

    played = play(worlds(harness), a_prompt, says("a"))
    assert len(played.episode.turns[-1].answer) < 2100
    assert len(caplog.text) < 4000 and "\x1b" not in caplog.text


def test_a_harness_that_only_fails_ends_the_run(worlds, says, a_prompt):
    def harness(base_url):
        raise OSError("no such tool")

    environment = worlds(harness)

    def run():
        for _ in range(64):
            play(environment, a_prompt, says("a"))

    with pytest.raises(EnvironmentFailure, match="no such tool"):
        run()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400, "1", {"reward": 1}])
def test_a_reward_that_is_no_number_is_an_error(worlds, says, a_prompt, reward):
    assert play(worlds(lambda base_url: reward), a_prompt, says()).finish is Finish.ERROR


def test_a_harness_without_requests_is_over_at_once(worlds, says, a_prompt):
    played = play(worlds(lambda base_url: 1), a_prompt, says())
    assert (played.finish, played.tokens, played.episode.turns) == (Finish.DONE, [], ())


@pytest.mark.slow
def test_a_harness_that_never_returns_meets_its_deadline_and_others_finish(worlds, says, a_prompt):
    held = threading.Event()

    def harness(base_url, index):
        client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        if index == 0:
            held.wait()
        return 1

    environment, played = worlds(harness, episode_timeout=8.0), {}
    players = [
        threading.Thread(target=lambda i=i: played.update({i: play(environment, a_prompt, says("a"), index=i)})) for i in range(4)
    ]
    for thread in players:
        thread.start()
    for thread in players:
        thread.join(WAIT)
    held.set()
    assert [played[i].finish for i in range(4)] == [Finish.DEADLINE] + [Finish.DONE] * 3
    assert [played[i].episode.reward for i in range(4)] == [None, 1.0, 1.0, 1.0]


@pytest.mark.slow
def test_the_clock_stands_still_while_the_policy_writes(worlds, a_prompt, end_id, monkeypatch):
    ahead = 0.0
    monkeypatch.setattr(harness_episodes, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))

    def harness(base_url):
        client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        return 1

    def slow(k):
        nonlocal ahead
        ahead += 3600.0
        threading.Event().wait(1.0)  # longer than it takes to look at the clock
        return [end_id], Finish.EOS

    assert play(worlds(harness, episode_timeout=60.0), a_prompt, slow).finish is Finish.DONE


def test_async_harnesses_and_parallel_requests_of_one_episode(worlds, says, a_prompt):
    async def harness(base_url, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=WAIT) as ask:
            agents = [
                ask.chat.completions.create(model="m", messages=[{"role": "user", "content": f"agent {i}"}]) for i in range(3)
            ]
            return sorted(answer.choices[0].message.content for answer in await asyncio.gather(*agents)) == ["a", "b", "c"]

    played = play(worlds(harness), a_prompt, says("a", "b", "c"))
    assert (played.episode.reward, len(played.episode.branches)) == (1.0, 3)
    assert sum(played.trained) == len(played.tokens) == 6


def test_an_async_harness_that_exits_ends_its_episode_alone(worlds, says, a_prompt, caplog):
    async def harness(base_url, index):
        if index == 0:
            raise SystemExit("no licence")
        return 1

    environment = worlds(harness)
    assert [play(environment, a_prompt, says(), index=i).finish for i in (0, 1)] == [Finish.ERROR, Finish.DONE]
    assert "SystemExit: no licence" in caplog.text


def test_at_most_so_many_harnesses_run(worlds, says, a_prompt):
    lock, now, most = threading.Lock(), [0], [0]

    def harness(base_url):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        with lock:
            now[0] -= 1
        return 1

    environment = worlds(harness, at_once=2)
    players = [threading.Thread(target=lambda i=i: play(environment, a_prompt, says("a"), index=i)) for i in range(6)]
    for thread in players:
        thread.start()
    for thread in players:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert most[0] <= 2


def test_an_engine_that_breaks_off_frees_the_client(worlds, a_prompt):
    heard = []

    def harness(base_url):
        try:
            client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        except openai.APIStatusError as error:
            heard.append(error.status_code)

    environment = worlds(harness)
    conversation = environment.begin(Stream(a_prompt, 0, 100), seed=0)
    conversation.open().result(WAIT)
    assert conversation.close(Finish.ERROR).turns == ()
    for _ in range(100):
        if heard:
            break
        threading.Event().wait(0.1)
    assert heard == [410]


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": row["question"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
answer = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
print("a log line")
print(float(answer["choices"][0]["message"]["content"] == str(row["answer"])))
"""


@pytest.mark.slow
def test_a_program_is_a_harness(worlds, says, a_prompt, tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    assert play(worlds(ProgramHarness([sys.executable, str(file)])), a_prompt, says("5")).episode.reward == 1.0
    file.write_text("import sys; sys.exit('no model')")
    played = play(worlds(ProgramHarness([sys.executable, str(file)])), a_prompt, says("5"))
    assert (played.finish, played.episode.reward) == (Finish.ERROR, None)
    file.write_text("import time; time.sleep(600)")
    assert (
        play(worlds(ProgramHarness([sys.executable, str(file)]), episode_timeout=1.0), a_prompt, says()).finish is Finish.DEADLINE
    )
    file.write_text("print('no reward')")
    assert play(worlds(ProgramHarness([sys.executable, str(file)])), a_prompt, says()).finish is Finish.ERROR


STARTS = """
import os, subprocess, sys, time
for session in (False, True):
    child = subprocess.Popen(["sleep", "3600"], start_new_session=session)
    print(child.pid, file=open(sys.argv[1], "a"))
print(os.getpid(), file=open(sys.argv[1], "a"), flush=True)
"""


def all_ended(path, count: int) -> bool:
    """Whether processes whose numbers stand in a file end."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        pids = path.read_text().split() if path.exists() else []
        if len(pids) == count and not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "hangs"])
def test_what_a_program_has_started_ends_with_it(worlds, says, a_prompt, tmp_path, how):
    """Also in a session of its own."""
    file = tmp_path / "agent.py"
    file.write_text(STARTS + ("print(1)" if how == "ends" else "time.sleep(3600)"))
    found = play(worlds(ProgramHarness([sys.executable, str(file), str(tmp_path / "pids")]), episode_timeout=5.0), a_prompt, says())
    assert (found.finish, found.episode.reward) == ((Finish.DONE, 1.0) if how == "ends" else (Finish.DEADLINE, None))
    assert all_ended(tmp_path / "pids", 3)


@pytest.mark.slow
def test_programs_end_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "agent.py").write_text(STARTS + "time.sleep(3600)")
    code = """
import sys, time
from groupwise.environments.conversation import Stream
from groupwise.environments.harness import EpisodeRequest, ProgramHarness
harness = ProgramHarness([sys.executable, *sys.argv[1:]])
request = EpisodeRequest(id="1", row={}, base_url="", api_key="", model="", index=0, seed=0)
harness.start(request)
time.sleep(3600)
"""
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "agent.py"), str(tmp_path / "pids")])
    end = time.monotonic() + WAIT
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 3:
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert all_ended(tmp_path / "pids", 3)


def test_a_program_that_prints_without_end_fills_no_disk_and_no_memory(worlds, says, a_prompt, tmp_path):
    file = tmp_path / "agent.py"
    file.write_text("import sys\nfor _ in range(200): print('x' * 99_999); sys.stderr.write('y' * 100_000)\nprint(0.5)")
    assert play(worlds(ProgramHarness([sys.executable, str(file)])), a_prompt, says()).episode.reward == 0.5
    missing = play(worlds(ProgramHarness(["no-such-program"])), a_prompt, says())
    assert missing.finish is Finish.ERROR


def test_the_token_of_the_endpoint_is_not_for_code_of_others(worlds, says, a_prompt, tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_TOKEN", "sesame-1234")
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM.replace('print("a log line")', 'assert "GROUPWISE_TOKEN" not in os.environ'))
    assert play(worlds(ProgramHarness([sys.executable, str(file)]), token="sesame-1234"), a_prompt, says("5")).episode.reward == 1.0
    with Pool("functools:partial", os.getenv, "GROUPWISE_TOKEN", size=1, seconds=WAIT) as pool:
        assert pool.call("none") == "none"


def lines_of(harness):
    """The lines of the plan about an environment with this harness."""
    return str(environment_lines(Recipe(objective="grpo", environment=read_environment({"harness": harness})), None))


def test_a_secret_of_a_harness_is_in_no_plan_and_no_record(worlds, says, a_prompt, tmp_path, monkeypatch):
    monkeypatch.delenv("GROUPWISE_TOKEN", raising=False)
    key = "sk-abcdefghijkl1mnop"
    monkeypatch.setenv("JUDGE_API_KEY", key)
    command = [sys.executable, "agent.py", key]
    shown = lines_of(command)
    assert "agent.py [redacted]" in shown and key not in shown
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM + "import sys; sys.exit(f'{sys.argv[1]} is refused')")
    played = play(worlds(ProgramHarness([sys.executable, str(file), key])), a_prompt, says("5"))
    assert "[redacted] is refused" in played.episode.turns[-1].answer
    assert "GROUPWISE_TOKEN" in lines_of("outside")
    monkeypatch.setenv("GROUPWISE_TOKEN", "sesame-1234")
    assert "GROUPWISE_TOKEN" not in lines_of("outside")


def test_a_process_of_somebody_else_fetches_episodes(worlds, says, a_prompt):
    environment = worlds(OutsideHarness())
    root, done = environment.endpoint.url, {}
    thread = threading.Thread(target=lambda: done.update(found=play(environment, a_prompt, says("5"))))
    thread.start()
    request = httpx.post(f"{root}/episodes", json={}, timeout=WAIT).json()
    assert request["row"] == {"question": "2+3", "answer": 5}
    answer = client(request["base_url"]).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    end = f"{root}/episodes/{request['id']}/end"
    for reward in (True, 10**400, -(10**400), "1", [1], {"reward": 1}):
        assert httpx.post(end, json={"reward": reward}).status_code == 400
    assert httpx.post(end, json={"failure": 1}).status_code == 400
    assert httpx.post(end, json={"reward": float(answer.choices[0].message.content)}).status_code == 200
    thread.join(WAIT)
    assert (done["found"].finish, done["found"].episode.reward) == (Finish.DONE, 5.0)
    assert httpx.post(end, json={"reward": 9.0}).status_code == 404


def test_a_process_that_has_hung_up_is_given_no_episode(worlds, a_prompt):
    """It was killed while it waited for one: the episode would have nobody until its deadline."""
    asked = threading.Event()

    class Outside(OutsideHarness):
        def claim(self, seconds, there):
            asked.set()
            return super().claim(seconds, there)

    environment = worlds(Outside())
    with socket.create_connection(("127.0.0.1", environment.endpoint.port)) as gone:
        head = f"POST /episodes HTTP/1.1\r\nHost: 127.0.0.1:{environment.endpoint.port}\r\nContent-Type: application/json\r\n"
        gone.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
        assert asked.wait(WAIT)
    conversation = environment.begin(Stream(a_prompt, 0, 100), seed=7)
    conversation.open()
    assert httpx.post(f"{environment.endpoint.url}/episodes", json={}, timeout=WAIT).json()["id"] == conversation.id


def test_async_harnesses_clean_up_when_everything_is_closed(worlds, a_prompt):
    began, ended = threading.Event(), []

    async def harness(base_url):
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(base_url)

    environment = worlds(harness)
    environment.begin(Stream(a_prompt, 0, 100), seed=7).open()
    assert began.wait(WAIT)
    environment.close()
    assert len(ended) == 1


def test_an_episode_is_found_by_its_key_alone(worlds, says, a_prompt):
    def harness(base_url, api_key):
        root = base_url[: base_url.index("/episodes")]
        client(f"{root}/v1", api_key).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        return 1

    assert play(worlds(harness), a_prompt, says("a")).episode.reward == 1.0


def test_a_prompt_that_the_harness_sends_as_it_is_needs_no_branch(worlds, says, chat_tokenizer):
    (text,) = render_chats(chat_tokenizer, [Chat([{"role": "user", "content": "x"}], add_generation_prompt=True)])
    prompt = Prompt(id="0/1", tokens=np.array(chat_tokenizer(text)["input_ids"]), text=text)

    def harness(base_url):
        client(base_url).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    played = play(worlds(harness), prompt, says("a"))
    assert (played.episode.branches, played.episode.prompt_text) == ((), "")
    assert played.behind[0] == prompt.tokens.tolist()


@pytest.mark.parametrize("wrong", [lambda row: 1, lambda base_url, colour: 1])
def test_functions_that_cannot_be_called_are_refused(wrong):
    with pytest.raises(ConfigError, match="harness"):
        FunctionHarness(wrong)


def test_an_episode_has_so_many_turns(worlds, says, a_prompt):
    def harness(base_url):
        ask = client(base_url).chat.completions.create
        for done in (0, 1):
            ask(model="m", messages=[{"role": "user", "content": str(done)}])
        with pytest.raises(openai.BadRequestError, match="too_many_turns"):
            ask(model="m", messages=[{"role": "user", "content": "2"}])
        return 2

    played = play(worlds(harness, max_turns=2), a_prompt, says("a", "b", "c"))
    assert (played.finish, played.episode.reward, len(played.episode.turns)) == (Finish.TURNS, 2.0, 2)


def test_an_episode_is_found_by_its_models_name(worlds, says, a_prompt):
    def harness(base_url, api_key):
        root = base_url[: base_url.index("/episodes")]
        client(f"{root}/v1").chat.completions.create(model=api_key, messages=[{"role": "user", "content": "x"}])
        return 1

    assert play(worlds(harness), a_prompt, says("a")).episode.reward == 1.0


def test_a_text_ends_before_the_stop_string_and_the_ids_keep_it(worlds, a_prompt, chat_tokenizer):
    ids = chat_tokenizer("Act: look\nObservation:", add_special_tokens=False)["input_ids"]

    def harness(base_url):
        ask = client(base_url).chat.completions.create
        messages = [{"role": "user", "content": "x"}]
        (choice,) = ask(model="m", messages=messages, stop=["Observation:"]).choices
        assert (choice.message.content, choice.finish_reason) == ("Act: look\n", "stop")
        ask(model="m", messages=[*messages, choice.message, {"role": "user", "content": "a door"}])
        return 1

    played = play(
        worlds(harness, sampling=Sampling(max_new_tokens=200, stop=("Observation:",))), a_prompt, lambda k: (ids, Finish.STOP)
    )
    assert played.episode.reward == 1.0
    assert played.sampled == [ids, ids] and len(played.episode.branches) == 1
    assert played.behind[1][: len(played.behind[0]) + len(ids)] == played.behind[0] + ids


@pytest.mark.slow
def test_whatever_harnesses_and_engines_do_every_episode_ends_and_none_is_left(worlds, a_prompt, chat_tokenizer, end_id):
    """Harnesses that end at once, fail, hang, request in parallel, or leave a request behind; engines that break off."""
    turn, held = [*chat_tokenizer("hi", add_special_tokens=False)["input_ids"], end_id], threading.Event()
    kinds, found = ("none", "fails", "one", "parallel", "hangs", "leaves"), {}

    def request(base_url: str) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        httpx.post(f"{base_url}/chat/completions", json=body, timeout=WAIT, trust_env=False, verify=False)

    def harness(base_url, index):
        kind = kinds[index % len(kinds)]
        if kind == "fails":
            raise OSError("no such tool")
        requests = [threading.Thread(target=request, args=(base_url,), daemon=True) for _ in range(3 if kind == "parallel" else 1)]
        for one in requests if kind != "none" else ():
            one.start()
            if kind != "leaves":
                one.join()
        if kind == "hangs":
            held.wait(WAIT)
        return 1

    environment = worlds(harness, at_once=3, episode_timeout=1.0)

    def engine(first: int) -> None:
        for index in range(first, 48, 6):
            stream = Stream(a_prompt, index, 1 << 30)
            episode = environment.begin(stream, seed=0)
            reply, finish = episode.open(), None
            while finish is None and (finish := reply.result(WAIT).finish) is None:
                stream.take(reply.result(), 0, limit=1 << 30)
                stream.add(turn, [0.0] * len(turn), 0)
                stream.end_turn(Finish.EOS)
                if index % 7 == 3:
                    finish = Finish.ERROR
                reply = episode.answer() if finish is None else reply
            found[index] = (finish, episode.close(finish).reward)

    engines = [threading.Thread(target=engine, args=(first,)) for first in range(6)]
    for one in engines:
        one.start()
    for one in engines:
        one.join(WAIT)
    held.set()
    assert len(found) == 48
    for index, (finish, reward) in found.items():
        assert (reward == 1.0) == (finish is Finish.DONE), (index, finish)
        assert finish is not Finish.DONE or kinds[index % len(kinds)] not in ("fails", "hangs"), index
    assert any(finish is Finish.DONE for finish, _ in found.values())
    assert not environment._live and not environment._queue and not environment._running
