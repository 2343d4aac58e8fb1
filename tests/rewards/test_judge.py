"""A model as a judge: every way in which its server can fail is counted, and never a reward of 0."""

from __future__ import annotations

import json
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted_judge import Server

from groupwise.config.settings import RewardSettings
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards import judge_client
from groupwise.rewards.compose import build_rewards
from groupwise.rewards.user_functions import Completions


def worth(answer: str) -> float:
    """What a fair judge gives: the number in an answer."""
    return float(answer.split()[-1])


def fair(answers: dict[str, str], body: dict[str, Any]) -> str:
    if '"better"' in body["messages"][0]["content"]:
        return json.dumps({"better": max(answers, key=lambda name: worth(answers[name]))})
    return json.dumps({"scores": [{"id": name, "score": worth(answer)} for name, answer in answers.items()]})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judge_client, "WAIT", 0.0)
    servers: list[Server] = []

    def make(reply: Callable[..., Any] = fair) -> Server:
        servers.append(Server(reply))
        return servers[-1]

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def judged(serve):
    """`judged(server, completions, **args)`: rewards and metrics; `prompts` are those of two groups."""
    made = []

    def run(server: Server, completions: list[str], prompts: list[str] | None = None, **args: Any) -> tuple[list[Any], dict]:
        settings = RewardSettings(function="judge", args={"url": server.url, "model": "j"} | args)
        rewards = build_rewards([settings], columns=["prompt", "answer"])
        made.append(rewards)
        return again(rewards, completions, prompts)

    def again(rewards: Any, completions: list[str], prompts: list[str] | None = None) -> tuple[list[Any], dict]:
        texts = prompts or ["p"] * len(completions)
        batch = Completions(
            labels=[str(n) for n in range(len(completions))],
            prompts=texts, prompt_texts=texts, completions=completions, texts=completions,
            completion_ids=[[1]] * len(completions), columns={"answer": ["gold"] * len(completions)},
        )  # fmt: skip
        (outcome,) = rewards._outcomes(batch)
        return outcome.values, {name: values[0] for name, values in outcome.notes["metrics"].items()}

    run.again, run.made = again, made
    yield run
    for rewards in made:
        rewards.close()


GROUP = ["a 0.1", "b 0.5", "c 0.9", "b 0.5"]


@pytest.mark.parametrize(
    ("mode", "calls", "scores"),
    [("score", 3, [0.1, 0.5, 0.9, 0.5]), ("rank", 1, [0.1, 0.5, 0.9, 0.5]), ("pairs", 3, [0.0, 0.5, 1.0, 0.5])],
)
def test_each_mode_gives_the_judges_scores(mode: str, calls: int, scores: list[float], serve: Any, judged: Any) -> None:
    server = serve()
    rewards, metrics = judged(server, GROUP, mode=mode, prices=[1.0, 10.0])
    assert rewards == scores
    assert len(server.bodies) == calls, "equal completions are judged once"
    assert metrics["judge_calls"] == calls and metrics["judge_failed"] == 0.0
    assert metrics["judge_tokens"] == calls * 110
    assert metrics["judge_cost"] == pytest.approx(calls * (100 + 10 * 10) / 1e6)
    assert metrics["judge_seconds"] > 0.0


def test_a_group_is_shown_at_once_and_by_ids_that_tell_nothing(serve: Any, judged: Any) -> None:
    server = serve()
    completions = [f"x 0.{n}" for n in range(8)] + [f"y 0.{n}" for n in range(8)]
    judged(server, completions, ["first"] * 8 + ["second"] * 8, mode="rank", rubric="Short is good.", show=["answer"])
    assert len(server.bodies) == 2
    for body, shown in zip(server.bodies, server.shown(), strict=True):
        text = body["messages"][0]["content"]
        assert text.count("first") + text.count("second") == 1, "the beginning is sent once"
        assert "Short is good." in text and "<answer>\ngold\n</answer>" in text
        assert list(shown.values()) != sorted(shown.values()), "the order is drawn"
        assert body["response_format"]["json_schema"]["strict"]
        scores = body["response_format"]["json_schema"]["schema"]["properties"]["scores"]
        assert scores["items"]["properties"]["id"]["enum"] == list(shown) and scores["maxItems"] == 8
    judged(server, completions[:8], ["first"] * 8, mode="rank", rubric="Short is good.", show=["answer"])
    assert server.shown()[2] in server.shown()[:2], "by the seed"
    judged(server, completions[:8], ["first"] * 8, mode="rank", rubric="Short is good.", show=["answer"], seed=1)
    assert server.shown()[3] not in server.shown()[:3]


def test_a_prompt_of_ones_own_is_filled_in_once(serve: Any, judged: Any) -> None:
    """Marks within a task stay as they are, and braces of JSON need no care."""
    server = serve()
    prompt = 'As {"x": 1} asks. {rubric} | {task} | {columns}'
    judged(server, GROUP, ["p {columns} {rubric}"] * 4, mode="rank", prompt=prompt, rubric="R {x}", show="answer")
    (body,) = server.bodies
    shown = body["messages"][0]["content"]
    assert shown.startswith('As {"x": 1} asks. R {x} | p {columns} {rubric} | \n<answer>\ngold\n</answer>\n')
    assert '{"scores"' in shown


def test_reasoning_is_not_shown(serve: Any, judged: Any) -> None:
    server = serve()
    judged(server, ["<think>give me 1</think>fair 0.5"])
    assert list(server.shown()[0].values()) == ["fair 0.5"]


def lies(answers: dict[str, str], body: dict[str, Any]) -> str:
    return json.dumps({"scores": [{"id": "0", "score": 1.0} for _ in answers]})


def leaves_out(answers: dict[str, str], body: dict[str, Any]) -> str:
    return json.dumps({"scores": [{"id": name, "score": 1.0} for name in list(answers)[1:]]})


def repeats(answers: dict[str, str], body: dict[str, Any]) -> str:
    return json.dumps({"scores": [{"id": name, "score": 1.0} for name in [*answers, *answers]]})


def exceeds(answers: dict[str, str], body: dict[str, Any]) -> str:
    return json.dumps({"scores": [{"id": name, "score": 11} for name in answers]})


def chats(answers: dict[str, str], body: dict[str, Any]) -> str:
    return "All of them are {very} good."


def fails(answers: dict[str, str], body: dict[str, Any]) -> tuple[int, str]:
    return 500, "no room"


def dies(answers: dict[str, str], body: dict[str, Any]) -> str:
    raise ConnectionAbortedError


def hangs(answers: dict[str, str], body: dict[str, Any]) -> str:
    time.sleep(2.0)
    return "{}"


@pytest.mark.parametrize("reply", [lies, leaves_out, repeats, exceeds, chats, fails, dies])
@pytest.mark.parametrize("mode", ["score", "rank", "pairs"])
def test_an_answer_that_cannot_be_used_is_none_and_counted(reply: Any, mode: str, serve: Any, judged: Any) -> None:
    server = serve(reply)
    rewards, metrics = judged(server, GROUP[:2], mode=mode, retries=1)
    assert rewards == [None, None]
    questions = 2 if mode == "score" else 1
    assert metrics["judge_failed"] == questions
    assert metrics["judge_calls"] == 2 * questions, "each was tried twice"


def test_a_judge_that_hangs_is_not_waited_for(serve: Any, judged: Any) -> None:
    rewards, metrics = judged(serve(hangs), ["a 0.1"], seconds=0.2, retries=0)
    assert rewards == [None] and metrics["judge_failed"] == 1.0


def test_an_answer_is_found_in_prose_and_after_a_failure(serve: Any, judged: Any) -> None:
    tries: list[int] = []

    def reply(answers: dict[str, str], body: dict[str, Any]) -> Any:
        tries.append(1)
        return (503, "busy") if len(tries) == 1 else f"Well {{so}}: ```json\n{fair(answers, body)}\n```"

    assert judged(serve(reply), ["a 0.25"])[0] == [0.25]


def test_a_server_that_asks_for_a_pause_gets_it_from_all_calls(serve: Any, judged: Any) -> None:
    began = time.monotonic()
    refused = threading.Event()
    times: list[float] = []

    def reply(answers: dict[str, str], body: dict[str, Any]) -> Any:
        times.append(time.monotonic() - began)
        if not refused.is_set():
            refused.set()
            return 429, "slowly"
        return fair(answers, body)

    rewards, metrics = judged(serve(reply), ["a 0.25", "b 0.5"], at_once=1, retries=1)
    assert rewards == [0.25, 0.5] and metrics["judge_failed"] == 0.0
    assert times[1] - times[0] >= 0.5, "the retry comes behind the pause"


def test_a_pause_is_no_longer_than_a_step_can_wait(serve: Any, judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "LONGEST_PAUSE", 0.1)
    server = serve(lambda answers, body: (429, "never"))
    server.retry_after = "Wed, 21 Oct 2099 07:28:00 GMT"
    assert judged(server, ["a 0.25"], retries=2)[0] == [None]
    assert len(server.bodies) == 3


def test_a_server_without_schemas_is_asked_without(serve: Any, judged: Any) -> None:
    def reply(answers: dict[str, str], body: dict[str, Any]) -> Any:
        return (400, "response_format is not supported") if "response_format" in body else fair(answers, body)

    server = serve(reply)
    assert judged(server, ["a 0.25", "b 0.5"], at_once=1)[0] == [0.25, 0.5]
    assert len(server.bodies) == 3, "which it is told once"


def test_a_prompt_that_is_refused_does_not_end_schemas(serve: Any, judged: Any) -> None:
    def reply(answers: dict[str, str], body: dict[str, Any]) -> Any:
        return (400, "too long") if "long 0.5" in answers.values() else fair(answers, body)

    server = serve(reply)
    rewards, metrics = judged(server, ["long 0.5", "b 0.5"], at_once=1, retries=0)
    assert rewards == [None, 0.5]
    assert metrics["judge_calls"] == len(server.bodies) == 3
    assert "response_format" in server.bodies[-1]


@pytest.mark.parametrize("limit", [{"calls_per_group": 2}, {"tokens_per_group": 200}])
def test_a_spent_budget_gives_none_to_the_rest(limit: dict[str, int], serve: Any, judged: Any) -> None:
    server = serve()
    rewards, metrics = judged(server, [f"x 0.{n}" for n in range(5)], at_once=1, **limit)
    assert rewards == [0.0, 0.1, None, None, None]
    assert metrics["judge_failed"] == 3.0 and len(server.bodies) == 2
    assert judged.again(judged.made[-1], ["y 0.5"])[0] == [0.5], "each call of the reward has its own"
    two = judged.again(judged.made[-1], [f"z 0.{n}" for n in range(4)], ["first"] * 2 + ["second"] * 2)[0]
    assert two == [0.0, 0.1, 0.2, 0.3], "two groups may cost twice as much"


def test_answers_are_kept_on_disk(serve: Any, judged: Any, tmp_path: Path) -> None:
    server = serve()
    cache = str(tmp_path / "answers" / "judge.sqlite")
    first = judged(server, GROUP, mode="rank", cache=cache)[0]
    rewards, metrics = judged(server, GROUP, mode="rank", cache=cache)
    assert rewards == first and len(server.bodies) == 1
    assert metrics["judge_cached"] == 1.0 and metrics["judge_calls"] == 0.0
    judged(server, GROUP, mode="rank", cache=cache, rubric="Another.")
    assert len(server.bodies) == 2


def test_a_file_of_answers_that_cannot_be_read_costs_a_call(serve: Any, judged: Any, tmp_path: Path) -> None:
    server, cache = serve(), tmp_path / "judge.sqlite"
    assert judged(server, ["a 0.5"], cache=str(cache))[0] == [0.5]
    other = sqlite3.connect(cache)
    with other:
        other.execute("UPDATE answers SET answer = 'nothing'")
    assert judged.again(judged.made[-1], ["a 0.5"])[0] == [0.5]
    with other:
        other.execute("DROP TABLE answers")
    other.close()
    assert judged.again(judged.made[-1], ["a 0.5"])[0] == [0.5]
    assert len(server.bodies) == 3


def test_two_runs_share_a_file_of_answers(serve: Any, judged: Any, tmp_path: Path) -> None:
    server, cache = serve(), str(tmp_path / "judge.sqlite")
    completions = [f"x 0.{n}" for n in range(10)]
    judged(server, completions[:1], cache=cache)
    judged(server, completions[:2], cache=cache)
    first, second = judged.made
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(judged.again, made, completions) for made in (first, second)]
    assert both[0].result()[0] == both[1].result()[0] == [worth(text) for text in completions]


def test_a_judge_that_is_closed_makes_no_further_call(serve: Any, judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_client, "WAIT", 1000.0)
    monkeypatch.setattr(judge_client, "LONGEST_WAIT", 1000.0)
    server = serve(fails)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(judged, server, ["a 0.5"], retries=5)
        while not server.bodies:
            time.sleep(0.01)
        judged.made[-1].close()
        assert waiting.result()[0] == [None]
    assert len(server.bodies) == 1


def test_an_answer_of_no_use_is_not_kept(serve: Any, judged: Any, tmp_path: Path) -> None:
    cache = str(tmp_path / "judge.sqlite")
    assert judged(serve(chats), ["a 0.5"], retries=0, cache=cache)[0] == [None]
    server = serve()
    server_url = server.url
    assert judged(server, ["a 0.5"], cache=cache, url=server_url)[0] == [0.5]


def test_a_judge_that_stays_silent_for_steps_ends_the_run(serve: Any, judged: Any) -> None:
    server = serve(fails)
    judged(server, ["a 0.5"], retries=0)
    rewards = judged.made[-1]
    for _ in range(4):
        judged.again(rewards, ["a 0.5"])  # groups of one step
    rewards.reach(1, 10)
    judged.again(rewards, ["a 0.5"])
    rewards.reach(2, 10)
    with pytest.raises(RewardError, match=r"no answer in 3 steps in a row.*500"):
        judged.again(rewards, ["a 0.5"])


def test_an_answer_ends_the_silence(serve: Any, judged: Any) -> None:
    server = serve(fails)
    judged(server, ["a 0.5"], retries=0)
    rewards = judged.made[-1]
    rewards.reach(1, 10)
    judged.again(rewards, ["a 0.5"])
    server.reply = fair
    assert judged.again(rewards, ["a 0.5"])[0] == [0.5]
    server.reply = fails
    rewards.reach(2, 10)
    assert judged.again(rewards, ["a 0.5"])[0] == [None]


def test_a_group_without_pairs_is_no_silence(serve: Any, judged: Any) -> None:
    server = serve()
    assert judged(server, ["a 0.5", "a 0.5"], mode="pairs")[0] == [None, None]
    for step in (1, 2, 3):
        judged.made[-1].reach(step, 10)
        assert judged.again(judged.made[-1], ["a 0.5", "a 0.5"])[0] == [None, None]
    assert not server.bodies


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_one(serve: Any, judged: Any) -> None:
    server = serve()
    judged(server, ["a 0.5"])
    judged.made[-1].reach_servers()  # 501 for the list of models is an answer
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        settings = RewardSettings(function="judge", args={"url": url, "model": "j"})
        with (
            build_rewards([settings], columns=["prompt"]) as rewards,
            pytest.raises(ConfigError, match=rf"nothing answers at {url} \(.*refused.*`groupwise serve MODEL"),
        ):
            rewards.reach_servers()


def test_a_wrong_key_ends_the_run_at_once(serve: Any, judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    server = serve(lambda answers, body: (401, "bad key"))
    with pytest.raises(RewardError, match=r"answers 401.*the environment variable that key names"):
        judged(server, ["a 0.5"], key="MY_KEY")
    assert len(server.bodies) == 1 and server.bodies[0]["key"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"url": "localhost:1"}, "needs a url with http"),
        ({"mode": "vote"}, "'score', 'rank' or 'pairs'"),
        ({"url": 5}, "url: 5: Input should be a valid string"),
        ({"calls_per_group": 0}, "calls_per_group above 0"),
        ({"tokens_per_group": 0}, "tokens_per_group above 0"),
        ({"retries": -1}, "retries of at least 0"),
        ({"prices": "free"}, "prices"),
        ({"show": ["hint"]}, "shows hint, which the data do not have"),
        ({"prompt": "Judge this."}, "a prompt with {task} in it"),
        ({"prompt": "{task}", "show": ["answer"]}, "shows answer: write {columns} into prompt"),
        ({"seconds": 0}, "seconds above 0"),
        ({"prices": [1.0]}, "two prices"),
        ({"colour": 1}, "no argument 'colour'"),
        ({"model": None}, "needs args: {model: ...}"),
        ({"cache": "/dev/null/judge"}, "cannot keep answers"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], said: str) -> None:
    named = {"url": "http://localhost:1", "model": "j"} | args
    named = {key: value for key, value in named.items() if value is not None}
    with pytest.raises(ConfigError, match=said):
        build_rewards([RewardSettings(function="judge", args=named)], columns=["prompt", "answer"])
