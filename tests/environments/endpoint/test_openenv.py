"""OpenEnv's messages, spoken with a WebSocket server of ours: a number to be guessed, one session at a time."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

from groupwise.config.recipes import read_environment
from groupwise.config.settings import Recipe
from groupwise.environments.openenv import OpenEnv
from groupwise.errors import ConfigError, EnvironmentFailure
from groupwise.runs.environments import environment_lines, make_runtime


class Server:
    """Speaks as `openenv`'s server does: errors by code, a capacity, a schema over HTTP."""

    def __init__(self) -> None:
        self.free, self.required, self.heard = threading.Semaphore(1), ["guess"], []
        self.fields = {"guess": {"type": "integer"}}
        self.server = serve(self.session, "127.0.0.1", 0, process_request=self.page)
        self.url = f"ws://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def page(self, connection, request):
        if request.path != "/schema":
            return None
        action = {"required": self.required, "properties": self.fields}
        body = json.dumps({"action": action}).encode()
        return Response(HTTPStatus.OK, "OK", Headers({"Content-Length": str(len(body))}), body)

    def session(self, line):
        if not self.free.acquire(blocking=False):
            line.send(json.dumps({"type": "error", "data": {"message": "all sessions are taken", "code": "CAPACITY_REACHED"}}))
            return
        try:
            self.talk(line)
        finally:
            self.free.release()

    def talk(self, line):
        number, tries = 0, 0
        for text in line:
            told = json.loads(text)
            self.heard.append(told)
            if told["type"] == "close":
                return
            if told["type"] == "reset":
                number, tries = told["data"].get("seed", 3), 0
                answer = {"observation": {"text": "Guess a number."}, "reward": None, "done": False}
            elif not str(told["data"].get("guess", "")).isdigit():
                fault = {"message": "guess must be a number", "code": "VALIDATION_ERROR"}
                line.send(json.dumps({"type": "error", "data": fault}))
                continue
            else:
                guess, tries = int(told["data"]["guess"]), tries + 1
                hint = "right" if guess == number else "higher" if guess < number else "lower"
                answer = {"observation": {"hint": hint, "tries": tries}, "reward": float(guess == number), "done": guess == number}
            line.send(json.dumps({"type": "observation", "data": answer}))


@pytest.fixture
def server():
    made = Server()
    yield made
    made.server.shutdown()


@pytest.mark.parametrize("keys", [{"openenv": "URL"}, {"factory": "openenv", "args": {"url": "URL"}}])
def test_a_recipe_names_it_by_its_key_or_as_a_factory(server, keys):
    settings = read_environment(json.loads(json.dumps(keys | {"runs": "thread", "max_turns": 1}).replace("URL", server.url)))
    recipe = Recipe(objective="grpo", environment=settings)
    runtime = make_runtime(settings)
    (kind,) = runtime.kinds.values()
    runtime.close()
    assert (kind.title, kind.steps, kind.rewarded) == ("OpenEnv", True, True)
    assert "at most 1 turn and 600 s without sampling" in dict(environment_lines(recipe, runtime))["episodes"]


def test_an_episode(server):
    made = OpenEnv(server.url)
    assert made.reset({"seed": 5}) == "Guess a number."
    assert made.step("4") == ('{"hint": "higher", "tries": 1}', 0.0, False)
    assert made.step("no idea") == ("error: guess must be a number", None, False)
    assert made.step('```json\n{"guess": "9"}\n```') == ('{"hint": "lower", "tries": 2}', 0.0, False)
    assert made.step('{"guess": 5}') == ('{"hint": "right", "tries": 3}', 1.0, True)
    made.close()
    assert server.heard[0] == {"type": "reset", "data": {"seed": 5}}
    assert server.heard[1] == {"type": "step", "data": {"guess": 4}}
    for _ in range(200):  # it is heard in a thread of its own
        if len(server.heard) == 6:
            break
        threading.Event().wait(0.05)
    assert server.heard[-1] == {"type": "close"}


@pytest.mark.parametrize(
    ("field", "written", "sent"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "true", "true"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "[1]", "[1]"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "string"}, "NaN", "NaN"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"$ref": "#/$defs/Text"}, "7", "7"),
        ({}, "7", "7"),
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, "4.5", "4.5"),
        ({"type": "array"}, "[1]", [1]),
        ({"type": "boolean"}, "true", True),
    ],
)
@pytest.mark.parametrize("named", [None, "guess"])
def test_a_text_reaches_a_text_field_as_it_was_written(server, field, written, sent, named):
    server.fields = {"guess": field}
    made = OpenEnv(server.url, field=named)
    action = made._action_schema
    made._action_schema = lambda: action() | {"$defs": {"Text": {"type": "string"}}}
    assert made._action(written) == {"guess": sent}


@pytest.mark.slow
def test_a_session_is_waited_for(server):
    first, second = OpenEnv(server.url), OpenEnv(f"{server.url}/ws", seconds=20.0)
    first.reset({"reset": {"seed": 1}})
    found = []
    thread = threading.Thread(target=lambda: found.append(second.reset({})))
    thread.start()
    thread.join(0.5)
    assert found == []
    first.close()
    thread.join(20.0)
    assert found == ["Guess a number."]
    with pytest.raises(EnvironmentFailure, match="all sessions are taken"):
        OpenEnv(server.url, seconds=0.3).reset({})
    second.close()


def test_a_refusal_sent_before_the_first_request_is_read(server):
    first, second = OpenEnv(server.url), OpenEnv(server.url, seconds=0.2)
    first.reset({})
    connect = second._connect

    def slow(*given, **keywords):
        line = connect(*given, **keywords)
        threading.Event().wait(0.5)  # the refusal and the end of the connection have come by now
        return line

    second._connect = slow
    with pytest.raises(EnvironmentFailure, match="all sessions are taken"):
        second.reset({})
    first.close()


def test_unreachable_servers_and_bad_messages_are_errors(server):
    for named in ({"url": "http://127.0.0.1:1"}, {"url": 5}, {}):
        with pytest.raises(ConfigError, match=r"environment.args.url\) is written ws://host:port"):
            OpenEnv(**named)
    with pytest.raises(EnvironmentFailure, match="reset failed"):
        OpenEnv("ws://127.0.0.1:1").reset({})
    with pytest.raises(EnvironmentFailure, match="column reset"):
        OpenEnv(server.url).reset({"reset": 3})
    server.required = ["row", "column"]
    made = OpenEnv(server.url)
    made.reset({})
    with pytest.raises(EnvironmentFailure, match=r"environment\.args\.field"):
        made.step("4")
    assert made.step('{"guess": 3}')[2]
    made.close()
    named = OpenEnv(server.url, field="guess")
    named.reset({})
    assert named.step("3")[2]
    named.close()
