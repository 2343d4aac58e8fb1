"""Episodes with tools and environments, where they run in processes and in threads.  Tests named `trap_N` hold the known traps."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from process_states import running

from groupwise.config.live_objects import Live
from groupwise.environments import runtime, tool_episodes
from groupwise.environments.instance import Instance
from groupwise.environments.runtime import ToolResult
from groupwise.environments.tool_episodes import truncated
from groupwise.errors import ConfigError, DataError, EnvironmentFailure
from groupwise.records import Episode, Finish, Prompt, Rollout, Sampling, Turn
from groupwise.utils.process_main import LINUX
from groupwise.utils.processes import Died

ADD, LATER = "my_tools.py:add", "my_tools.py:later"
BOTH = pytest.mark.parametrize("runs", ["process", "thread"])


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


# ---------------------------------------------------------------- tools


@pytest.mark.slow
@BOTH
def test_trap_12_parallel_results_come_in_the_order_of_the_calls(table: Callable[..., Any], runs: str) -> None:
    """Asynchronous and plain calls mixed, and calls that are none between them."""
    at = table(tools=(ADD, LATER, "my_tools.py:fail"), runs=runs)
    talk, _ = at.begin()
    said = [
        call("later", text="x", seconds=0.2), call("later", text="y", seconds=0.0), call("nothing"), call("add", a=1, b=2),
        call("add", a="1", b=2), call("fail", why="no"), '<tool_call>{"name":</tool_call>', call("later", text="z", seconds=0.0),
    ]  # fmt: skip
    reply = at.say(talk, "\n".join(said))
    at.say(talk, "Done.")
    (turn, last), messages = (episode := talk.close(Finish.EOS)).turns, episode.messages
    assert [one.result if not one.failure else one.failure for one in turn.calls] == [
        "x", "y", "unknown", "3", "arguments", "exception", "unreadable", "z",
    ]  # fmt: skip
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [f"call_{i}" for i in range(8)]
    shown = at.text(reply.tokens)
    places = [shown.index(f"\n{text}\n") for text in ("x", "y", "3", "z")]
    assert places == sorted(places)
    assert turn.finish is Finish.TOOL_CALLS
    assert last.finish is Finish.EOS
    assert json.loads(turn.calls[5].result) == {"error": "no"}
    assert "there are: add, later, fail" in turn.calls[2].result
    assert turn.calls[4].result == json.dumps({"error": 'the argument a is "1", expected integer'})


@pytest.mark.slow
def test_trap_11_a_tool_that_never_returns_lets_the_others_finish(table: Callable[..., Any]) -> None:
    """Its process is ended at the deadline; the call after it and every other episode go on."""
    at = table(tools=(ADD, "my_tools.py:hang", "my_tools.py:die"), tool_timeout=8.0)
    slow, _ = at.begin()
    waiting = at.later(slow, call("hang") + call("add", a=2, b=3))
    for index in range(1, 6):
        quick, _ = at.begin(index)
        assert "\n7\n" in at.text(at.say(quick, call("add", a=3, b=4)).tokens)
        at.say(quick, "7")
        assert quick.close(Finish.EOS).turns[0].calls[0].result == "7"
    assert not waiting.done()
    at.hear(slow, waiting)
    at.say(slow, call("die") + call("add", a=1, b=1))
    hung, died = slow.close(Finish.LENGTH).turns
    assert [(one.failure, one.result) for one in hung.calls] == [
        ("timeout", '{"error": "no result within 8 s: it was stopped"}'), ("", "5"),
    ]  # fmt: skip
    assert [one.failure for one in died.calls] == ["exception", ""]


@pytest.mark.slow
def test_trap_11_in_threads_a_tool_that_never_returns_is_left_behind(table: Callable[..., Any]) -> None:
    at = table(tools=(ADD, "my_tools.py:hang"), tool_timeout=5.0, runs="thread")
    talk, _ = at.begin()
    at.say(talk, call("hang") + call("add", a=2, b=3))
    (turn,) = talk.close(Finish.LENGTH).turns
    assert [one.failure for one in turn.calls] == ["timeout", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "tool"), [("process", "hang"), ("process", "die"), ("thread", "hang")])
def test_trap_11_a_tool_that_is_stopped_in_an_episodes_last_call_costs_no_more(
    table: Callable[..., Any], runs: str, tool: str
) -> None:
    """No process or thread is left to be asked for a reward, and none need be."""
    at = table(tools=(f"my_tools.py:{tool}",), runs=runs, tool_timeout=60.0 if tool == "die" else 0.3)
    talk, _ = at.begin()
    assert at.say(talk, call(tool)).finish is None
    assert at.say(talk, "Done.").finish is Finish.EOS
    called, last = talk.close(Finish.EOS).turns
    assert [one.failure for one in called.calls] == ["exception" if tool == "die" else "timeout"]
    assert last.finish is Finish.EOS


class AtItsEnd:
    """A place that has answered everything, and for which something happens before it is given back."""

    def __init__(self, place: runtime.Worker, happens: Callable[[], None]) -> None:
        self.place, self.happens, self.left = place, happens, False

    def ask(self, *request: Any, **limits: Any) -> Any:
        yield from self.place.ask(*request, **limits)
        self.happens()

    def alive(self) -> bool:
        return self.place.alive()

    def kill(self) -> None:
        self.left = True
        self.place.kill()


@pytest.mark.parametrize("ends", ["conversation", "rooms"])
def test_what_is_ended_between_its_answer_and_its_return_serves_nobody_else(ends: str) -> None:
    """A conversation that is ended just then, by another thread, takes its place with it; so does the end of everything."""

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one
            b: another
        """
        return a + b

    rooms = runtime.ToolRuntime(tools=("live:add",), factories={}, args={}, runs="thread", objects={"live:add": add})
    housed = rooms.make(rooms.kinds[""])
    place = AtItsEnd(rooms.borrow(), housed.kill if ends == "conversation" else rooms.close)
    rooms.give_back(place)
    (result,), finish = housed.call([("add", {"a": 1, "b": 2})], seconds=60.0)
    assert (result.text, finish, place.left) == ("3", None, True)
    if ends == "conversation":
        assert rooms.borrow() is not place
        rooms.close()


def test_an_object_that_is_false_is_a_tool_too() -> None:
    class Empty:
        """A tool that holds nothing."""

        def __len__(self) -> int:
            return 0

        def __call__(self, word: str) -> str:
            """Look a word up.

            Args:
                word: which
            """
            return f"no {word}"

    rooms = runtime.ToolRuntime(tools=("live:look",), factories={}, args={}, runs="thread", objects={"live:look": Empty()})
    (result,), _ = rooms.make(rooms.kinds[""]).call([("look", {"word": "x"})], seconds=60.0)
    assert result.text == "no x"
    rooms.close()


@pytest.mark.slow
@BOTH
def test_an_environment_that_hangs_ends_its_episode_only(table: Callable[..., Any], runs: str) -> None:
    at = table(factory="my_tools.py:Counter", runs=runs)
    talk, _ = at.begin(start=1)
    other, _ = at.begin(1, start=1)
    patient = at.environment.settings
    at.environment.settings = replace(patient, tool_timeout=0.3)  # while one call is asked for, which would hang for ever
    reply = at.say(talk, call("wait_forever") + call("increment", step=1))
    at.environment.settings = patient
    assert reply.finish is Finish.DEADLINE
    episode = talk.close(reply.finish)
    assert [one.failure for one in episode.turns[0].calls] == ["timeout", "exception"]
    assert episode.reward is None
    at.say(other, call("increment", step=4))
    at.say(other, "5")
    assert other.close(Finish.EOS).reward == 5.0


@pytest.mark.slow
def test_trap_10_limits_end_an_episode_and_say_so(table: Callable[..., Any]) -> None:
    at = table(tools=(ADD, "my_tools.py:long"), max_turns=3, max_observation_tokens=60, max_observation_bytes=50)
    talk, _ = at.begin()
    reply = at.say(talk, call("long", size=1000))
    at.say(talk, call("add", a=1, b=1))
    assert at.say(talk, call("add", a=1, b=1)).finish is Finish.TURNS
    first, second, third = talk.close(Finish.TURNS).turns
    assert first.truncated
    assert not second.truncated
    assert first.answer.endswith("characters left out]")
    assert len(first.answer.encode()) <= 50
    assert len(at.ids(first.answer)) <= 60
    assert first.answer in at.text(reply.tokens)
    assert third.calls[0].result == "2"
    assert third.answer == ""


@pytest.mark.slow
def test_an_observation_shares_its_budget_between_parallel_results(table: Callable[..., Any]) -> None:
    at = table(tools=("my_tools.py:long",), max_observation_bytes=200)
    talk, _ = at.begin()
    at.say(talk, call("long", size=400) * 4)
    (turn,) = talk.close(Finish.LENGTH).turns
    assert [len(one.result.encode()) <= 50 for one in turn.calls] == [True] * 4


@pytest.mark.parametrize("size", [0, 1, 5, 60, 61, 500])
def test_what_is_cut_fits_and_says_how_much_is_missing(size: int) -> None:
    text = "".join(random.Random(size).choices("aé漢😀", k=size))
    cut = truncated(text, 60, 50, len)
    assert len(cut.encode()) <= 60 and len(cut) <= 50
    if cut != text:
        kept, _, mark = cut.rpartition("\n[")
        assert text.startswith(kept)
        assert int(mark.split()[0].replace(",", "")) == size - len(kept)


def test_an_episode_that_takes_too_long_ends(table: Callable[..., Any]) -> None:
    at = table(tools=(LATER,), episode_timeout=5.0, runs="thread")
    talk, _ = at.begin()
    reply = at.say(talk, call("later", text="x", seconds=600.0))
    assert reply.finish is Finish.DEADLINE
    assert talk.close(reply.finish).turns[0].calls[0].failure == "timeout"


def test_an_episode_ends_in_time_whatever_a_turn_calls(table: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them may be in time.  The clock stands still, but for that of the thread that waits for the end."""
    monkeypatch.setattr(tool_episodes, "time", SimpleNamespace(monotonic=lambda: 0.0))
    killed = threading.Event()

    def until_killed(calls: Any, *, seconds: float) -> tuple[list[ToolResult], None]:
        killed.wait(60.0)
        return [ToolResult(text="3") for _ in calls], None

    at = table(tools=(ADD,), runs="thread", episode_timeout=0.1)
    talk, _ = at.begin()
    monkeypatch.setattr(talk, "_instance", SimpleNamespace(call=until_killed, kill=killed.set))
    assert at.say(talk, call("add", a=1, b=2) * 2).finish is Finish.DEADLINE
    assert killed.is_set()


def test_sampling_takes_no_time_of_an_episode(table: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what an episode earns depends on how fast the machine samples, and on how many episodes it samples at once."""
    now = [0.0]
    monkeypatch.setattr(tool_episodes, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(calls: Any, *, seconds: float) -> tuple[list[ToolResult], None]:
        now[0] += 6.0
        return [ToolResult(text="3") for _ in calls], None

    at = table(tools=(ADD,), runs="thread", episode_timeout=10.0)
    for turns, end in ((0, Finish.EOS), (1, Finish.EOS), (2, Finish.DEADLINE)):
        talk, _ = at.begin()
        monkeypatch.setattr(talk._instance, "call", slow)
        for turn in range(turns):
            now[0] += 1e6
            reply = at.say(talk, call("add", a=1, b=2))
            assert reply.finish is (Finish.DEADLINE if turn == 1 else None)
        if end is Finish.EOS:
            now[0] += 1e6
            reply = at.say(talk, "It is 3.")
        assert reply.finish is end


def test_asynchronous_calls_are_answered_as_soon_as_those_before_them() -> None:
    """Also beside one that takes no notice of its deadline: what is before it keeps its result."""
    gate = asyncio.Event()

    async def answered() -> str:
        return "1"

    async def waits() -> str:
        await gate.wait()
        return "2"

    instance = Instance({"answered": answered, "waits": waits}, None, {})
    answers = iter(instance.call([("answered", {}), ("waits", {})], 60.0))
    assert next(answers) == {"result": "1"}
    gate.set()
    assert list(answers) == [{"result": "2"}]


@BOTH
def test_an_episode_whose_time_is_over_before_it_begins_ends(table: Callable[..., Any], runs: str) -> None:
    at = table(factory="my_tools.py:Guess", runs=runs, episode_timeout=1e-9)
    talk, reply = at.begin(secret=1)
    assert reply.finish is Finish.DEADLINE
    assert talk.close(reply.finish).reward is None


@pytest.mark.parametrize(("seconds", "error"), [(-1.0, TimeoutError), (1e300, OverflowError)])
def test_a_thread_whose_answer_nobody_took_is_asked_nothing_more(seconds: float, error: type[Exception]) -> None:
    """The answer would be taken for that to the next request."""
    asked = threading.Event()
    place = runtime.WorkerThread(Instance({"wait": asked.wait}, None, {}))
    with pytest.raises(error):
        next(place.ask("call", [("wait", {})], 1.0, seconds=seconds))
    asked.set()
    with pytest.raises(Died, match="it has been ended"):
        next(place.ask("end", False, seconds=60.0))


def test_trap_9_a_turn_that_was_cut_is_not_carried_out(table: Callable[..., Any]) -> None:
    """Cut at every token position: the call is carried out only if all of it is there, and never where there is no room."""
    at = table(factory="my_tools.py:Counter", runs="thread")
    whole = at.ids(call("increment", step=3) + "<|im_end|>")
    for cut in range(1, len(whole) + 1):
        for finish in {Finish.LENGTH, Finish.EOS if cut == len(whole) else Finish.STOP}:
            talk, _ = at.begin()
            reply = at.hear(talk, at.draw(talk, whole[:cut], finish))
            if finish is Finish.LENGTH:
                assert reply.finish is Finish.LENGTH
            elif reply.finish is None:  # it was taken for a call, and answered behind the end of the turn
                assert at.text(reply.tokens).startswith("<|im_end|>" if cut < len(whole) else "\n")
            episode = talk.close(reply.finish or Finish.LENGTH)
            complete = cut >= len(whole) - 1
            assert episode.reward == (3.0 if complete and finish is not Finish.LENGTH else 0.0), (cut, finish)
            assert (episode.turns[0].begin, episode.turns[0].end) == (0, cut)


def test_trap_5_arguments_reach_the_tool_as_they_were_written(table: Callable[..., Any]) -> None:
    """Booleans, null, 1e5, letters of every kind and the order of keys; the turn's ids are not looked at again."""
    at = table(tools=("my_tools.py:echo",), runs="thread")
    arguments = '{"number": 1e5, "value": "é漢\\n\\u00e9", "nothing": null, "flag": false}'
    written = f'<tool_call>{{"arguments": {arguments}, "name":"echo"}}</tool_call>'
    talk, _ = at.begin()
    at.say(talk, written)
    (turn,) = talk.close(Finish.LENGTH).turns
    assert turn.calls[0].result == "'é漢\\né' False 100000.0 None"
    assert turn.end == len(at.ids(written + "<|im_end|>"))


# ---------------------------------------------------------------- environments


@pytest.mark.slow
@BOTH
def test_a_trl_environment_runs_unchanged(
    table: Callable[..., Any], runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    monkeypatch.setenv("CLOSED", str(closed))
    at = table(factory="my_tools.py:Counter", runs=runs)
    before = len(closed.read_text()) if closed.exists() else 0
    assert [schema["function"]["name"] for schema in at.environment.runtime.kinds[""].schemas] == ["increment", "wait_forever"]
    talk, reply = at.begin(start=5)
    assert "Do it. Start at 5.<|im_end|>" in at.text(reply.context)
    answer = at.say(talk, "So." + call("increment", step=2))
    assert "\n7\n" in at.text(answer.tokens)
    at.say(talk, "It is 7.")
    episode = talk.close(Finish.EOS)
    assert episode.reward == 7.0
    assert episode.environment == "Counter"
    assert episode.state is not None and episode.state["count"] == 7 and "secret" not in episode.state
    assert [message["role"] for message in episode.messages] == ["assistant", "tool", "assistant"]
    assert episode.messages[1] == {"role": "tool", "name": "increment", "tool_call_id": "call_0", "content": "7"}
    assert len(closed.read_text()) == before + 1
    plain, reply = at.begin()
    assert reply.context is None, "reset() said nothing: the prompt is drawn behind as it is"
    plain.close(Finish.ERROR)
    assert len(closed.read_text()) == before + 2, "closed also where sampling is broken off"


def test_what_reset_adds_to_the_prompt_is_in_the_record(table: Callable[..., Any]) -> None:
    at = table(factory="my_tools.py:Counter", runs="thread")
    talk, reply = at.begin(start=5)
    episode = talk.close(Finish.ERROR)
    assert episode.opening.strip() == "Start at 5."
    assert episode.prompt_text == at.text(reply.context)
    assert f"Do it.{episode.opening}<|im_end|>" in episode.prompt_text
    talk, _ = at.begin()
    silent = talk.close(Finish.ERROR)
    assert (silent.opening, silent.prompt_text) == ("", "")


def test_trl_writes_the_same_messages(table: Callable[..., Any]) -> None:
    """What TRL's loop appends for the same calls: `str` of the result under the tool's name, in a message of its own."""
    at = table(factory="my_tools.py:Counter", runs="thread")
    talk, _ = at.begin()
    for step in (2, 3):
        at.say(talk, call("increment", step=step))
    at.say(talk, "5")
    ours = [{key: message[key] for key in ("role", "content")} for message in talk.close(Finish.EOS).messages]
    theirs = []  # grpo_trainer.py, _tool_call_loop: content = result if isinstance(result, list) else str(result)
    count = 0
    for step in (2, 3):
        count += step
        theirs += [{"role": "assistant", "content": ""}, {"role": "tool", "content": str(count)}]
    assert ours == [*theirs, {"role": "assistant", "content": "5"}]


@BOTH
def test_an_environment_with_step(table: Callable[..., Any], runs: str) -> None:
    at = table(factory="my_tools.py:Guess", runs=runs, max_turns=4)
    talk, reply = at.begin(secret=7)
    assert "Do it. Guess.<|im_end|>" in at.text(reply.context)
    replies = [at.say(talk, text) for text in ("3", "9", "7")]
    assert [at.text(reply.tokens).split("\n")[-3:-2] for reply in replies[:2]] == [["higher<|im_end|>"], ["lower<|im_end|>"]]
    assert replies[2].finish is Finish.DONE
    episode = talk.close(Finish.DONE)
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
    assert [turn.answer for turn in episode.turns] == ["higher", "lower", ""]
    assert episode.reward == 1.0


@pytest.mark.slow
@BOTH
def test_trap_15_no_episode_sees_anothers_state(table: Callable[..., Any], runs: str) -> None:
    """Whatever the interleaving, the transcripts are the same: 24 episodes one by one, and all at once in random order."""
    at = table(factory="my_tools.py:Gym", runs=runs)

    def transcripts(order: list[int] | None) -> list[Any]:
        talks = [at.begin(index % 4, seed=3, name=f"0/{index // 4}") for index in range(24)]
        said = []
        for turn in range(3):
            places = list(range(24)) if order is None else random.Random(turn).sample(range(24), 24)
            futures = {place: at.later(talks[place][0], str(turn)) for place in places}
            replies = {place: at.hear(talks[place][0], futures[place]) for place in (places if order is None else reversed(places))}
            said.append([replies[place].tokens.tolist() for place in range(24)])
        opened = [reply.context.tolist() for _, reply in talks]
        return [opened, said, [talk.close(Finish.LENGTH).messages for talk, _ in talks]]

    alone, together = transcripts(None), transcripts([1])
    assert alone == together
    opened = alone[0]
    assert all(opened[4 * group] == opened[4 * group + place] for group in range(6) for place in range(4)), "siblings share luck"
    assert len({tuple(ids) for ids in opened}) == 6, "groups do not"


def test_the_environments_worker_imports_numpy_and_asyncio_only_when_it_serves():
    code = "import sys, groupwise.environments.instance; print([m for m in ('numpy', 'asyncio') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_trap_15_processes_share_no_module_state(table: Callable[..., Any]) -> None:
    """The generators of a process are the episode's own: its draws depend on the prompt, not on who drew before."""
    at = table(factory="my_tools.py:Counter", runs="process")

    def drawn(index: int, name: str) -> tuple[float, float]:
        talk, _ = at.begin(index, name=name)
        at.say(talk, "x")
        state = talk.close(Finish.EOS).state
        assert state is not None
        return state["drawn"], state["drawn_late"]

    first = [drawn(0, "0/1"), drawn(1, "0/1"), drawn(0, "0/2")]
    assert first[0] == first[1] != first[2]
    assert first[0][1] != first[2][1]
    assert drawn(0, "0/2") == first[2]


def test_gymnasiums_five_values(table: Callable[..., Any]) -> None:
    at = table(factory="my_tools.py:Gym", runs="thread")
    talk, _ = at.begin()
    assert at.say(talk, "go").finish is None
    assert at.say(talk, "stop").finish is Finish.DONE, "truncated ends it too"
    assert talk.close(Finish.DONE).reward == 1.0


def test_environments_are_selected_by_their_column(table: Callable[..., Any]) -> None:
    at = table(factory={"count": "my_tools.py:Counter", "guess": "my_tools.py:Guess"}, runs="thread")
    counted, guessed = at.prompt(environment="count"), at.prompt(environment="guess")
    assert "increment" in counted.text
    assert "increment" not in guessed.text
    talk, _ = at.begin(environment="guess", secret=1)
    assert at.say(talk, "1").finish is Finish.DONE
    assert talk.close(Finish.DONE).environment == "guess"
    with pytest.raises(DataError, match=r"no column 'environment'; environment\.factory has: count, guess"):
        at.begin()


# ---------------------------------------------------------------- what fails


def test_a_few_broken_environments_cost_their_episodes_many_the_run(table: Callable[..., Any]) -> None:
    at = table(factory="my_tools.py:Fragile", runs="thread")
    for index in range(19):
        talk, reply = at.begin(index)
        assert reply.finish is None
        talk.close(Finish.ERROR)
    talk, reply = at.begin(broken=True)
    assert reply.finish is Finish.ERROR
    assert talk.close(Finish.ERROR).reward is None
    at.begin(broken=True)
    with pytest.raises(EnvironmentFailure, match=r"3 of 22 .* reset\(\) of Fragile raised RuntimeError: no table"):
        at.begin(broken=True)


def test_a_step_that_returns_nonsense_is_a_failure(table: Callable[..., Any]) -> None:
    """It is told what was returned; the line of ours that found it helps nobody."""
    at = table(factory="my_tools.py:Fragile", runs="thread")
    talk, _ = at.begin()
    assert at.say(talk, "x").finish is Finish.ERROR
    other, _ = at.begin(1)
    returned = r"step\(\) of Fragile: it returned str, expected \(observation, .* truncated, info\)$"
    with pytest.raises(EnvironmentFailure, match=returned):
        at.say(other, "x")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": ("my_tools.py:undocumented",)}, "the tool 'undocumented' has no docstring"),
        ({"tools": ("my_tools.py:unhinted",)}, "the tool 'unhinted'.*type hint"),
        ({"tools": ("my_tools.py:ad",)}, "did you mean 'add'"),
        ({"tools": ("missing.py:add",)}, "there is no file missing.py"),
        ({"factory": "my_tools.py:add"}, "cannot be made: TypeError"),
        ({"factory": "my_tools.py:Idle"}, r"\(Idle\) has nothing that the policy can do: give it step"),
        ({"tools": (ADD,), "template": "headers"}, "no form that is known"),
    ],
)
@BOTH
def test_what_cannot_be_used_is_refused_in_words(table: Callable[..., Any], runs: str, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table(runs=runs, **settings)


def test_special_tokens_in_an_observation_are_text(table: Callable[..., Any]) -> None:
    at = table(tools=("my_tools.py:echo",), runs="thread")
    talk, _ = at.begin()
    reply = at.say(talk, call("echo", value="<|im_end|><|im_start|>system"))
    start = at.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert (np.asarray(reply.tokens) == start).sum() == 2, "those of the template alone"


def test_trap_7_a_mask_that_does_not_fit_is_refused_at_birth() -> None:
    """More or fewer flags than ids, trained tokens outside of the turns, turns behind the end."""
    prompt = Prompt(id="0/0", tokens=np.array([1]), text="?")
    given: dict[str, Any] = {
        "prompt": prompt, "index": 0, "tokens": np.arange(4), "behavior_logp": np.zeros(4), "finish": Finish.DONE, "eos_ids": (),
        "sampling": Sampling(), "text": "",
    }  # fmt: skip
    Rollout(
        **given, trained=np.array([True, True, False, False]), episode=Episode(turns=(Turn(begin=0, end=2, finish=Finish.EOS),))
    )
    for trained, end in (([True] * 5, 4), ([True] * 3, 3), ([True, True, True, False], 2), ([True] * 4, 5)):
        with pytest.raises(AssertionError):
            Rollout(**given, trained=np.array(trained), episode=Episode(turns=(Turn(begin=0, end=end, finish=Finish.EOS),)))


@pytest.mark.slow
def test_sampling_that_is_broken_off_leaves_nothing_running(table: Callable[..., Any]) -> None:
    """Closed while a call hangs: its process is ended, and the environment can be closed at once."""
    at = table(factory="my_tools.py:Counter", tool_timeout=600.0)
    talk, _ = at.begin(start=1)
    waiting = at.later(talk, call("wait_forever"))
    episode = talk.close(Finish.ERROR)
    assert waiting.result(timeout=60).finish is Finish.ERROR
    assert episode.reward is None
    assert at.environment._broken == 0, "it did not fail"
    other, _ = at.begin(1, start=1)
    at.say(other, "done")
    assert other.close(Finish.EOS).reward == 1.0


def test_a_tool_that_forks_and_hangs_leaves_nothing(table: Callable[..., Any], tmp_path: Path, monkeypatch: Any) -> None:
    """No process, also of a session of its own, and no file among the temporary ones."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    at = table(tools=("odd_tools.py:fork_and_hang",), tool_timeout=1.0)
    talk, _ = at.begin()
    at.say(talk, call("fork_and_hang", path=str(tmp_path / "pid")))
    (one,) = talk.close(Finish.LENGTH).turns[0].calls
    assert one.failure == "timeout"
    started = [int(line) for line in (tmp_path / "pid").read_text().split()]
    give_up = time.monotonic() + 60
    while any(map(running, started)) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert len(started) == 2 and not any(map(running, started))
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.skipif(not LINUX, reason="open files are counted in /proc")
def test_environments_beyond_the_limit_of_open_files_are_a_clear_error(table: Callable[..., Any]) -> None:
    at = table(factory="my_tools.py:Counter")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if not os.path.exists(f"/proc/self/fd/{number}")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[8], limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"Too many open files.*ulimit -n"):
            deque(map(at.begin, range(32)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_objects_can_be_run_in_processes_too(table: Callable[..., Any]) -> None:
    """A closure has no name: the worker is a fork of this process, and what it changes stays there."""
    heard: list[str] = []

    def remember(text: str) -> str:
        """Remember it.

        Args:
            text: What.
        """
        heard.append(text)
        return " ".join(heard)

    at = table(tools=(Live("remember", remember),), runs="process")
    talk, _ = at.begin()
    at.say(talk, call("remember", text="one") + call("remember", text="two"))
    assert [one.result for one in talk.close(Finish.LENGTH).turns[0].calls] == ["one", "one two"]
    assert heard == []
