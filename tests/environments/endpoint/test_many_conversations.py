"""Many conversations: random ones in three forms, and many at once with clients that misbehave."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import pytest

from groupwise.records import Finish, Prompt

from .conftest import ADD, WAIT, play
from .test_message_apis import ANTHROPIC_ADD, RESPONSES_ADD

WORDS = ("two", " and ", "three\n", "größer 🙂", "", "<|im_end|>", "{}", "</think>", "  x  ")


@dataclass(frozen=True)
class Script:
    """A conversation: what the policy writes, and what its client says to it."""

    system: str
    tools: bool
    turns: list[str]
    says: list[str]
    """The first message, and what follows each turn; empty where only tools answer."""

    @classmethod
    def random(cls, seed: int) -> Script:
        """Draw a conversation of one to four turns."""
        draw = random.Random(seed)
        tools, turns, says = draw.random() < 0.7, [], ["begin" + draw.choice(WORDS)]
        for _ in range(draw.randint(1, 4)):
            text = "".join(draw.choices(("I", *WORDS[:4], *WORDS[6:]), k=draw.randint(1, 3)))
            if draw.random() < 0.4:
                text = f"<think>\n{draw.choice(WORDS[:4])}\n</think>\n\n{text}"
            calls = draw.randint(0, 2) if tools else 0
            for _ in range(calls):
                arguments = json.dumps({"a": draw.randint(0, 9), "b": draw.randint(0, 9)})
                text += f'\n<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
            turns.append(text)
            silent = calls and draw.random() < 0.6
            says.append("" if silent else "go " + draw.choice(WORDS))
        return cls(draw.choice(("", "Be brief.")), tools, turns, says)


class ChatClient:
    """A client of chat completions."""

    path = "/chat/completions"

    def __init__(self, script: Script, draw: random.Random) -> None:
        self.script, self.draw = script, draw
        self.messages = []
        if script.system:
            self.messages.append({"role": "system", "content": script.system})

    def body(self):
        return {"messages": self.messages} | ({"tools": [ADD]} if self.script.tools else {})

    def take(self, answer) -> list[str]:
        """Note an answer, and return the ids of its calls."""
        message = dict(answer["choices"][0]["message"])
        if self.draw.random() < 0.5:
            message.pop("reasoning_content", None)
        self.messages.append(message)
        return [call["id"] for call in message.get("tool_calls") or ()]

    def say(self, results: dict[str, str], text: str) -> None:
        for call, result in results.items():
            self.messages.append({"role": "tool", "tool_call_id": call, "content": result})
        if text:
            self.messages.append({"role": "user", "content": text})


class MessagesClient(ChatClient):
    """A client of Messages, whose blocks and cache marks change from request to request."""

    path = "/messages"

    def __init__(self, script: Script, draw: random.Random) -> None:
        super().__init__(script, draw)
        self.messages = []

    def body(self):
        body = {"max_tokens": 32_000, "messages": [self.changed(one) for one in self.messages]}
        if self.script.system:
            body["system"] = self.in_blocks(self.script.system)
        if self.script.tools:
            body["tools"] = [ANTHROPIC_ADD]
        return body

    def in_blocks(self, text: str):
        if self.draw.random() < 0.5:
            return text
        cut = self.draw.randint(0, len(text))
        blocks = [{"type": "text", "text": part} for part in (text[:cut], text[cut:])]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        return blocks

    def changed(self, message):
        if isinstance(message["content"], str):
            return {**message, "content": self.in_blocks(message["content"])}
        blocks = [dict(block) for block in message["content"]]
        blocks[-1]["cache_control"] = {"type": "ephemeral"}
        return {**message, "content": blocks}

    def take(self, answer) -> list[str]:
        thinking = self.draw.random() < 0.5
        blocks = [one for one in answer["content"] if thinking or one["type"] != "thinking"]
        if blocks:
            self.messages.append({"role": "assistant", "content": blocks})
        else:
            self.messages.append({"role": "assistant", "content": ""})
        return [block["id"] for block in blocks if block["type"] == "tool_use"]

    def say(self, results: dict[str, str], text: str) -> None:
        blocks = []
        for call, result in results.items():
            block = {"type": "tool_result", "tool_use_id": call}
            blocks.append({**block, "content": self.in_blocks(result)})
        if text:
            blocks.append({"type": "text", "text": text})
        self.messages.append({"role": "user", "content": blocks})


class ResponsesClient(ChatClient):
    """A client of Responses, which repeats the items that it was given."""

    path = "/responses"

    def __init__(self, script: Script, draw: random.Random) -> None:
        super().__init__(script, draw)
        self.messages = []

    def body(self):
        body = {"input": self.messages, "store": False}
        if self.script.system:
            body["instructions"] = self.script.system
        if self.script.tools:
            body["tools"] = [RESPONSES_ADD]
        return body

    def take(self, answer) -> list[str]:
        reasoning = self.draw.random() < 0.5
        items = [one for one in answer["output"] if reasoning or one["type"] != "reasoning"]
        self.messages += items
        return [item["call_id"] for item in items if item["type"] == "function_call"]

    def say(self, results: dict[str, str], text: str) -> None:
        for call, result in results.items():
            item = {"type": "function_call_output", "call_id": call, "output": result}
            self.messages.append(item)
        if text:
            part = {"type": "input_text", "text": text}
            self.messages.append({"type": "message", "role": "user", "content": [part]})


def ask(line: http.client.HTTPConnection, path: str, body, key: str = "none"):
    """The status and the JSON of an answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    line.request("POST", path, json.dumps({"model": "m", **body}), headers)
    answer = line.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hundred", range(10))
def test_random_conversations_are_the_same_tokens_in_three_forms(worlds, chat_tokenizer, end_id, a_prompt, hundred):
    """A thousand conversations, each in three forms: ids, what is trained, and branches."""
    running: dict[str, object] = {}

    def harness(base_url):
        script, client = running["script"], running["client"]
        where = urlsplit(base_url)
        line = http.client.HTTPConnection(where.netloc, timeout=WAIT)
        results = {}
        for text in script.says[: len(script.turns)]:
            client.say(results, text)
            status, answer = ask(line, where.path + client.path, client.body())
            assert status == 200, answer
            results = {call: f"result {place}" for place, call in enumerate(client.take(answer))}
        line.close()
        return 1.0

    environment = worlds(harness)
    for seed in range(hundred * 100, hundred * 100 + 100):
        script = Script.random(seed)
        turns = [chat_tokenizer(text, add_special_tokens=False)["input_ids"] for text in script.turns]
        streams = []
        for kind in (ChatClient, MessagesClient, ResponsesClient):
            running |= {"script": script, "client": kind(script, random.Random(seed))}
            played = play(environment, a_prompt, lambda k, t=turns: ([*t[k], end_id], Finish.EOS))
            assert played.episode.reward == 1.0, (seed, kind, played.episode)
            branches = [(branch.begin, branch.context.tolist()) for branch in played.episode.branches]
            streams.append((played.tokens, played.trained, branches))
        assert streams[0] == streams[1] == streams[2], seed
        assert len(streams[0][2]) == 1, seed
        assert sum(streams[0][1]) == sum(map(len, turns)) + len(turns)


# ---- many at once

EPISODES = 200
TURNS = 3
KINDS = ("plain", "slow", "vanishing", "lying", "failing")
CLIENTS = (ChatClient, MessagesClient, ResponsesClient)
NOBODY = Script("", False, [], [])
ASKED_FOR = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/inference/v1/generate", "/end")


def request_of(where, path: str, body, key: str) -> bytes:
    data = json.dumps({"model": "m", **body}).encode()
    head = (
        f"POST {where.path}{path} HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def trickle(where, request: bytes, steps: int = 5):
    """Send a request in pieces, and read its answer in pieces; the answer."""
    with socket.create_connection((where.hostname, where.port), timeout=WAIT) as line:
        for place in range(0, len(request), len(request) // steps + 1):
            line.sendall(request[place : place + len(request) // steps + 1])
            threading.Event().wait(0.01)
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert answer.status == 200
        data = b""
        while piece := answer.read(100):
            data += piece
            threading.Event().wait(0.001)
        return json.loads(data)


def vanish(where, request: bytes) -> None:
    """Send a part of a request, then a whole one, and wait for neither answer."""
    for sent in (request[: len(request) // 2], request):
        with socket.create_connection((where.hostname, where.port), timeout=WAIT) as line:
            line.sendall(sent)


def lie(where, others: list[str], path: str, body) -> set[int]:
    """Ask as somebody else, and for somebody else; the statuses of the answers."""
    line, statuses = http.client.HTTPConnection(where.netloc, timeout=WAIT), set()
    own = where.path.split("/")[2]
    for other in others:
        for wanted in ASKED_FOR:
            statuses.add(ask(line, f"/episodes/{other}{wanted}", body, own)[0])
    for key in ("", "none", own[:-1], "Sesame"):
        statuses.add(ask(line, where.path + path, body, key)[0])
        statuses.add(ask(line, f"/v1{path}", {**body, "model": others[0]}, key)[0])
        statuses.add(ask(line, "/episodes", {}, key)[0])
    line.close()
    return statuses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_episodes_with_clients_that_misbehave_do_not_mix(worlds, chat_tokenizer, end_id):
    """Each of 200 episodes at once hears its own turns alone, each once, behind exactly what it has heard before; every
    id that was sampled is in its stream, and trained; nobody gets in without a token.
    """
    together, addresses = threading.Barrier(EPISODES), [""] * EPISODES
    heard: list[list[str]] = [[] for _ in range(EPISODES)]
    statuses: set[int] = set()

    def harness(row, base_url, api_key):
        number, where = row["number"], urlsplit(base_url)
        kind, client = KINDS[number % len(KINDS)], CLIENTS[number % len(CLIENTS)](NOBODY, random.Random(number))
        addresses[number] = where.path
        together.wait(WAIT)
        line = http.client.HTTPConnection(where.netloc, timeout=WAIT)
        others = [addresses[(number + step) % EPISODES].split("/")[2] for step in (1, 2)]
        for place in range(TURNS):
            client.say({}, f"question {place} of {number}.")
            body = {**client.body(), "max_tokens": 99}
            if kind == "lying":
                statuses.update(lie(where, others, client.path, body))
                body["model"] = others[0]
            if kind == "vanishing":
                vanish(where, request_of(where, client.path, body, api_key))
            if kind == "slow":
                answer = trickle(where, request_of(where, client.path, body, api_key))
            else:
                status, answer = ask(line, where.path + client.path, body, api_key)
                assert status == 200, answer
            client.take(answer)
            heard[number] += re.findall(r"answer \d+ of \d+\.", json.dumps(answer))
            assert kind != "failing" or place == 0, "this client fails"
        line.close()
        return float(number)

    environment = worlds(harness, token="sesame", at_once=EPISODES, max_turns=99)

    def one(number: int):
        def turn(place: int):
            text = f"answer {place} of {number}."
            return [*chat_tokenizer(text, add_special_tokens=False)["input_ids"], end_id], Finish.EOS

        prompt = Prompt(id=f"0/{number}", tokens=np.array([5]), text="Q", row={"number": number})
        return play(environment, prompt, turn)

    with ThreadPoolExecutor(EPISODES) as pool:
        episodes = list(pool.map(one, range(EPISODES)))
    assert statuses == {401}
    for number, played in enumerate(episodes):
        kind, turns = KINDS[number % len(KINDS)], played.episode.turns
        if kind == "failing":
            assert (played.finish, played.episode.reward) == (Finish.ERROR, None)
        else:
            assert played.episode.reward == float(number), played.episode
        # Nothing is lost: every sampled id is in the stream, and trained.
        assert [played.tokens[turn.begin : turn.end] for turn in turns] == played.sampled
        assert sum(played.trained) == sum(map(len, played.sampled))
        drawn = [f"answer {place} of {number}." for place in range(len(turns))]
        if kind == "vanishing":
            assert len(heard[number]) == TURNS
            assert heard[number] == [text for text in drawn if text in heard[number]]
        else:
            assert heard[number] == drawn
            assert len(drawn) == (2 if kind == "failing" else TURNS)
            for place in range(1, len(turns)):
                before = [*played.behind[place - 1], *played.sampled[place - 1]]
                assert played.behind[place][: len(before)] == before
        # Nothing of another episode is in it.
        for ids in (*played.behind, played.tokens):
            assert set(re.findall(r" of (\d+)\.", chat_tokenizer.decode(ids))) == {str(number)}
    # The key of an episode that is over opens nothing.
    where = urlsplit(environment.endpoint.url)
    line = http.client.HTTPConnection(where.netloc, timeout=WAIT)
    for address in addresses[:20]:
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert ask(line, f"{address}/chat/completions", body, address.split("/")[2])[0] == 401
    line.close()
