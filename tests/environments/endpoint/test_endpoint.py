"""The server itself: who may ask, how much, and what is said to what cannot be read."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from concurrent.futures import Future

import httpx
import pytest

from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.endpoint import LARGEST, Endpoint
from groupwise.environments.requests import SampledTokens, TurnRequest
from groupwise.errors import ConfigError
from groupwise.records import Finish

from .conftest import WAIT

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
TURN = "/episodes/known/v1/chat/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Echo:
    """An episode that answers every request with the same turn."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec

    def render(self, request):
        ids, _ = self.codec.render(request)
        return TurnRequest(ids, request)

    def respond(self, request, thinking, sampled):
        return self.codec.read(sampled, request, thinking, ())

    def draw(self, request):
        done: Future = Future()
        done.set_result(SampledTokens([7, self.codec.eos_ids[0]], [-0.1, -0.2], Finish.EOS, 0))
        return done


@pytest.fixture(scope="module")
def serve(chat_tokenizer, end_id):
    """`serve()`: a server, the same one for all; with options one of its own."""
    made = {}

    def make(**options) -> Endpoint:
        settings = {"name": "m", "context": 512, "vocabulary": len(chat_tokenizer)} | options
        if (name := str(options)) not in made:
            made[name] = Endpoint({"known": Echo(ChatCodec(chat_tokenizer, (end_id,)))}.get, **settings).start()
        return made[name]

    yield make
    for one in made.values():
        one.close()


def ask(endpoint: Endpoint, method="POST", path=TURN, body=CHAT, headers=None) -> httpx.Response:
    url = f"http://127.0.0.1:{endpoint.port}{path}"
    request = {"content": body, "headers": {"Content-Type": "application/json"} | (headers or {})}
    if not isinstance(body, bytes):
        request["content"] = json.dumps(body).encode()
    request = request if method == "POST" else {"headers": headers}
    return httpx.request(method, url, **request, timeout=WAIT, trust_env=False, verify=False)  # certificates take longest to read


def raw(endpoint: Endpoint, text: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT) as line:
        line.sendall(text)
        found = b""
        while data := line.recv(65536):
            found += data
        return found


def test_the_routes_answer_in_their_forms(serve):
    endpoint = serve()
    assert ask(endpoint, "GET", "/health").json() == {}
    assert ask(endpoint, "GET", "/v1/models").json()["data"][0]["max_model_len"] == 512
    assert ask(endpoint).json()["choices"][0]["finish_reason"] == "stop"
    assert ask(endpoint, path="/episodes/known/v1/chat/completions").status_code == 200
    assert ask(endpoint, path="/episodes/known/inference/v1/generate", body={"model": "m", "token_ids": [5]}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "evil.example:80"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_pages_and_foreign_hosts_are_refused(serve, headers, status):
    found = ask(serve(), headers=headers)
    assert found.status_code == status
    assert found.json()["error"]["message"]


def test_an_address_that_others_reach_needs_a_token(serve):
    with pytest.raises(ConfigError, match="token"):
        serve(host="0.0.0.0")


def test_the_token_is_asked_for_everywhere(serve):
    endpoint = serve(host="0.0.0.0", token="sesame")
    for path in ("/v1/chat/completions", "/inference/v1/generate", "/episodes", "/episodes/known/v1/chat/completions"):
        for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic sesame"}):
            found = ask(endpoint, path=path, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
    for path in ("/health", "/v1/models"):
        assert ask(endpoint, "GET", path).status_code == 401
    assert ask(endpoint, headers={"Authorization": "Bearer sesame"}).status_code == 200
    # An episode's id opens its own requests and nothing else; one that there is not opens nothing.
    key = {"Authorization": "Bearer known"}
    assert ask(endpoint, path="/episodes/known/v1/chat/completions", headers=key).status_code == 200
    assert ask(endpoint, path="/episodes/other/v1/chat/completions", headers=key).status_code == 401
    assert ask(endpoint, path="/episodes/none/episodes", headers={"Authorization": "Bearer none"}).status_code == 401


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "object"),
        (b'"x"', "object"),
        (b'{"messages": NaN}', "NaN"),
        (b'{"a": ' * 100_000, "nested"),
        (b'{"messages": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}, "tool_calls[0]"),
        (CHAT | {"temperature": "hot"}, "temperature"),
        (CHAT | {"temperature": -1}, "temperature"),
        (CHAT | {"temperature": True}, "temperature"),
        (CHAT | {"max_tokens": 0}, "max_tokens"),
        (CHAT | {"temperature": 1e300}, "temperature"),
        (CHAT | {"temperature": 1e-300}, "temperature"),
        (CHAT | {"temperature": False}, "temperature"),
        (CHAT | {"top_p": 1e-300}, "top_p"),
        (CHAT | {"top_k": 10**400}, "top_k"),
        (CHAT | {"temperature": 10**400}, "temperature"),
        (CHAT | {"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a character"),
        (CHAT | {"stop": ["\ud83d"]}, "half of a character"),
        (CHAT | {"stop": [""]}, "stop"),
        (CHAT | {"tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT | {"tools": {"a": 1}}, "tools"),
        (CHAT | {"logit_bias": {"5": 100}}, "logit_bias"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT | {"chat_template_kwargs": {"enable_thinking": "false"}}, "enable_thinking is the text 'false'"),
        (CHAT | {"chat_template_kwargs": {"add_generation_prompt": False}}, "sets 'add_generation_prompt'"),
    ],
)
def test_requests_that_cannot_be_parsed_are_refused(serve, body, said):
    found = ask(serve(), body=body)
    assert found.status_code == 400
    assert said in found.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [1 << 40]},
        {"token_ids": [True]},
        {"token_ids": "abc"},
        {"token_ids": [5], "sampling_params": [1]},
        {"token_ids": [5], "sampling_params": {"logprobs": 5}},
        {"token_ids": [5], "sampling_params": {"stop_token_ids": [5]}},
        {"token_ids": [5], "sampling_params": {"stop_token_ids": [[]]}},
        {"token_ids": [5], "sampling_params": {"ignore_eos": True}},
        {"token_ids": [5], "sampling_params": {"min_tokens": 4}},
        {"token_ids": [5], "sampling_params": {"what": 4}},
        {"token_ids": [5], "features": {"a": 1}},
    ],
)
def test_token_requests_that_cannot_be_done_are_refused(serve, body):
    found = ask(serve(), path="/episodes/known/inference/v1/generate", body=body)
    assert found.status_code == 400
    assert found.json()["error"]["message"]


@pytest.mark.slow
def test_large_bodies_are_not_read(serve):
    endpoint = serve()
    head = (
        b"POST /episodes/known/v1/chat/completions HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
        % endpoint.port
    )
    assert b" 413 " in raw(endpoint, head + b"Content-Length: %d\r\n\r\n" % (LARGEST + 1)).split(b"\r\n")[0]
    assert b" 413 " in raw(endpoint, head + b"Content-Length: 99999999999999999999\r\n\r\n").split(b"\r\n")[0]
    for length in (b"-1", b"+5", b"5x", b"\xb2"):
        assert b" 411 " in raw(endpoint, head + b"Content-Length: " + length + b"\r\n\r\n").split(b"\r\n")[0]
    chunked = raw(endpoint, head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
    assert b" 411 " in chunked.split(b"\r\n")[0]
    assert chunked.count(b"HTTP/1.1") == 1  # what was not read is not taken for a request
    assert b" 411 " in raw(endpoint, head + b"\r\n").split(b"\r\n")[0]
    # One that is larger than allowed and sent nevertheless hears why.
    assert ask(endpoint, body=b"x" * (LARGEST + 1)).status_code == 413
    assert ask(endpoint, "GET", "/health").status_code == 200


@pytest.mark.parametrize("announced", [b"Content-Length: %d", b"Transfer-Encoding: chunked\r\nX: %d", b"Content-Length: 0%d"])
def test_the_body_of_a_request_is_no_second_request(serve, announced):
    endpoint = serve()
    second = b"GET /v1/models HTTP/1.1\r\nHost: localhost:%d\r\n\r\n" % endpoint.port
    for method in (b"GET /health", b"GET /nothing", b"PUT /health", b"OPTIONS /health"):
        head = b"%s HTTP/1.1\r\nHost: localhost:%d\r\n" % (method, endpoint.port)
        found = raw(endpoint, head + announced % len(second) + b"\r\n\r\n" + second)
        assert found.count(b"HTTP/1.1 ") == 1, found
        assert b"Connection: close" in found


def test_two_lengths_of_a_body_are_refused(serve):
    endpoint, body = serve(), json.dumps(CHAT).encode()
    head = (
        b"POST /episodes/known/v1/chat/completions HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
        % endpoint.port
    )
    lengths = b"Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (len(body), len(body) + 9)
    assert b" 411 " in raw(endpoint, head + lengths + body).split(b"\r\n")[0]


def test_any_model_may_be_named_and_an_episode_is_found_by_it(serve):
    assert ask(serve(), body=CHAT | {"model": "gpt-4o"}).status_code == 200
    assert ask(serve(), path="/v1/chat/completions", body=CHAT | {"model": "known"}).status_code == 200
    for model in ("gpt-4o", None):
        found = ask(serve(), path="/v1/chat/completions", body=CHAT | {"model": model})
        assert (found.status_code, found.json()["error"]["code"]) == (404, "episode_over")


def test_an_answer_says_when_it_was_made(serve):
    begun = ask(serve(), "GET", "/v1/models").json()["data"][0]["created"]
    chunk = json.loads(ask(serve(), body=CHAT | {"stream": True}).text.split("\n")[0].removeprefix("data: "))
    for found in (ask(serve()).json(), chunk):
        assert found["created"] >= begun > 1_700_000_000


def test_unknown_addresses_and_methods_are_refused(serve):
    endpoint = serve()
    for path in ("/", "/v1", "/v1/completions", "/episodes/known", "/episodes/known/v2", "/../etc/passwd", "/health/"):
        assert ask(endpoint, path=path).status_code == 404, path
    assert ask(endpoint, "GET", "/v1/chat/completions").status_code == 404
    assert ask(endpoint, path="/episodes/other/v1/chat/completions").json()["error"]["code"] == "episode_over"
    assert ask(endpoint, "GET", "/episodes/other/v1/models").status_code == 404
    assert ask(endpoint, "GET", "/" + "x" * 3000).status_code == 414
    assert ask(endpoint, "PUT", "/health").status_code == 501
    assert b"Bad request syntax" in raw(endpoint, b"nonsense\r\n\r\n")


def test_a_connection_is_used_again(serve):
    line = http.client.HTTPConnection("127.0.0.1", serve().port, timeout=WAIT)
    for _ in range(3):
        line.request("POST", TURN, json.dumps(CHAT), {"Content-Type": "application/json"})
        answer = line.getresponse()
        assert answer.status == 200
        answer.read()
        assert answer.getheader("Connection") is None
    line.close()


@pytest.mark.slow
def test_a_request_whose_client_has_gone_is_not_begun(serve, chat_tokenizer, end_id):
    asked, waiting = threading.Event(), Future()

    class Slow(Echo):
        def draw(self, request):
            asked.set()
            return waiting

    slow = Slow(ChatCodec(chat_tokenizer, (end_id,)))
    endpoint = Endpoint({"known": slow}.get, name="m", context=9, vocabulary=9).start()
    body = json.dumps(CHAT).encode()
    head = (
        b"POST /episodes/known/v1/chat/completions HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
        % endpoint.port
    )
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT) as line:
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert asked.wait(WAIT)
    for _ in range(100):
        if waiting.cancelled():
            break
        threading.Event().wait(0.1)
    endpoint.close()
    assert waiting.cancelled()


@pytest.mark.slow
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_closes_its_half_is_answered(serve, chat_tokenizer, end_id, version):
    asked, waiting = threading.Event(), Future()

    class Slow(Echo):
        def draw(self, request):
            asked.set()
            return waiting

    endpoint = Endpoint({"known": Slow(ChatCodec(chat_tokenizer, (end_id,)))}.get, name="m", context=9, vocabulary=9).start()
    body = json.dumps(CHAT).encode()
    head = (HEAD % (TURN.encode(), endpoint.port)).replace(b"HTTP/1.1", b"HTTP/" + version)
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT) as line:
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        line.shutdown(socket.SHUT_WR)
        assert asked.wait(WAIT)
        threading.Event().wait(1.5)  # longer than two looks at whether the client is there
        waiting.set_result(SampledTokens([7, end_id], [-0.1, -0.2], Finish.EOS, 0))
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["object"]) == (200, "chat.completion")
    endpoint.close()


@pytest.mark.slow
def test_many_wait_at_once(serve, chat_tokenizer, end_id):
    """Descriptors above 1023 too: each connection has two here."""
    gate: list[Future] = []
    lock = threading.Lock()

    class Gate(Echo):
        def draw(self, request):
            with lock:
                gate.append(Future())
                return gate[-1]

    endpoint = Endpoint({"known": Gate(ChatCodec(chat_tokenizer, (end_id,)))}.get, name="m", context=9, vocabulary=9).start()
    body = json.dumps({"token_ids": [1]}).encode()
    head = (
        b"POST /episodes/known/inference/v1/generate HTTP/1.1\r\nHost: localhost:%d\r\nContent-Type: application/json\r\n"
        % endpoint.port
    )
    connections = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=WAIT) for _ in range(600)]
    for line in connections:
        line.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    for _ in range(600):
        if len(gate) == len(connections):
            break
        threading.Event().wait(0.1)
    threading.Event().wait(1.0)  # longer than a look at whether the clients are there
    for one in gate:
        assert not one.cancelled()
        one.set_result(SampledTokens([1], [-0.5], Finish.LENGTH, 0))
    for line in connections:
        assert line.recv(4096).startswith(b"HTTP/1.1 200")
        line.close()
    endpoint.close()


def test_a_taken_port_is_told(serve):
    with pytest.raises(ConfigError, match="another port"):
        serve(port=serve().port)
