"""Messages in three forms: OpenAI's chat completions and Responses, and Anthropic's Messages."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import httpx
import openai
import pytest

from groupwise.environments.chat_codec import ChatCodec
from groupwise.environments.harness_episodes import no_side
from groupwise.environments.messages_api import read_messages_request
from groupwise.environments.requests import read_chat_request
from groupwise.environments.responses_api import read_responses_request
from groupwise.records import Finish, Sampling

from .conftest import ADD, WAIT, play

WIRE = Path(__file__).parent / "wire"
ARGUMENTS = {"a": 2, "b": 3}
CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
SCHEMA = ADD["function"]["parameters"]
ANTHROPIC_ADD = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
RESPONSES_ADD = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": SCHEMA,
    "strict": False,
}
HI = {"role": "user", "content": "x"}
PATHS = ("/chat/completions", "/messages", "/responses")

CHAT = {
    "model": "m",
    "tools": [ADD],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "user", "content": "Go on."},
    ],
}
MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "tools": [{**ANTHROPIC_ADD, "cache_control": {"type": "ephemeral"}}],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=4711;"},
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ],
    "messages": [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "any"},
                {"type": "redacted_thinking", "data": "any"},
                {"type": "text", "text": "I "},
                {"type": "text", "text": "add."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "5"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ],
}
RESPONSES = {
    "model": "m",
    "max_output_tokens": 9,
    "tools": [RESPONSES_ADD],
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2+3?"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {
            "type": "function_call",
            "id": "fc",
            "call_id": "c1",
            "name": "add",
            "arguments": json.dumps(ARGUMENTS),
        },
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "message", "role": "user", "content": "Go on."},
    ],
}
READERS = {
    "chat": read_chat_request,
    "messages": read_messages_request,
    "responses": read_responses_request,
}


def post(base_url: str, path: str, body, headers=None) -> httpx.Response:
    return httpx.post(
        f"{base_url}{path}",
        json=body,
        headers=headers,
        timeout=WAIT,
        trust_env=False,
        verify=False,
    )


def opening(path: str, text: str = "x", **more):
    """The body of a first request, in the form of a path."""
    key = "input" if path == "/responses" else "messages"
    return {"model": "m", "max_tokens": 4, key: [{"role": "user", "content": text}], **more}


def test_a_conversation_is_the_same_request_in_three_forms():
    chat, messages, responses = (read(body) for read, body in zip(READERS.values(), (CHAT, MESSAGES, RESPONSES), strict=True))
    assert chat.messages == messages.messages == responses.messages
    assert chat.tools == messages.tools == responses.tools == [ADD]
    assert chat.keys == messages.keys == responses.keys
    assert chat.setting == messages.setting == responses.setting
    assert (messages.max_tokens, responses.max_tokens) == (9, 9)


def test_reasoning_is_read_under_both_of_its_names():
    """DeepSeek's, which chat templates read, and that of vLLM."""
    changed = copy.deepcopy(CHAT)
    changed["messages"][2]["reasoning"] = changed["messages"][2].pop("reasoning_content")
    assert read_chat_request(changed).messages == read_chat_request(CHAT).messages


@pytest.mark.parametrize(
    ("form", "change"),
    [
        ("messages", {"system": "Be brief."}),
        ("messages", {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"}}),
        ("messages", {"context_management": {"edits": []}, "output_config": {"effort": "high"}}),
        ("responses", {"reasoning": {"summary": "auto"}, "include": ["x"], "store": False}),
        ("responses", {"prompt_cache_key": "k", "client_metadata": {"a": "b"}}),
        ("chat", {"user": "me", "seed": 3}),
    ],
)
def test_what_changes_nothing_leaves_the_keys_as_they_are(form, change):
    body = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}[form]
    plain, changed = READERS[form](body), READERS[form](body | change)
    assert plain.keys == changed.keys
    assert (changed.wishes, changed.unknown) == ((), ())


@pytest.mark.parametrize(
    ("form", "change", "wishes"),
    [
        ("chat", {"tool_choice": "required"}, ["tool_choice"]),
        ("chat", {"parallel_tool_calls": False}, ["parallel_tool_calls"]),
        ("messages", {"tool_choice": {"type": "any"}}, ["tool_choice"]),
        (
            "messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ["parallel_tool_calls"],
        ),
        (
            "messages",
            {"tools": [ANTHROPIC_ADD, {"type": "web_search_20250305", "name": "web_search"}]},
            ["web_search_20250305"],
        ),
        ("responses", {"tool_choice": "required"}, ["tool_choice"]),
        (
            "responses",
            {"tools": [RESPONSES_ADD, {"type": "namespace", "name": "n"}, {"type": "web_search"}]},
            ["namespace", "web_search"],
        ),
    ],
)
def test_wishes_are_noted_and_change_nothing(form, change, wishes):
    body = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}[form]
    plain, changed = READERS[form](body), READERS[form](body | change)
    assert list(changed.wishes) == wishes
    assert (changed.keys, changed.setting) == (plain.keys, plain.setting)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/messages", {"messages": []}, "messages must hold"),
        ("/messages", {"messages": "x"}, "messages must be a list"),
        ("/messages", {"messages": [3]}, "messages[0] must be an object"),
        ("/messages", {"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        (
            "/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "'image': only text",
        ),
        (
            "/messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "tool_use_id must be a string",
        ),
        ("/messages", {"messages": [HI], "stop_sequences": [3]}, "stop_sequences"),
        ("/messages", {"messages": [HI], "temperature": 0.3}, "temperature is 0.3"),
        ("/messages", {"messages": [HI], "top_k": 5}, "top_k is 5"),
        ("/messages", {"messages": [HI], "max_tokens": 0}, "max_tokens"),
        ("/messages", {"messages": [HI], "tools": [{}]}, "tools[0].name"),
        (
            "/messages",
            {"messages": [HI], "tool_choice": {"type": "tool", "name": "add"}},
            "tool_choice",
        ),
        (
            "/messages",
            {"messages": [HI], "output_config": {"format": {"type": "json_schema"}}},
            "output_config.format",
        ),
        ("/messages/count_tokens", {"messages": [{"role": "user"}], "tools": 3}, "tools must be"),
        ("/responses", {"input": []}, "input must hold"),
        ("/responses", {"input": 3}, "input must be a list"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (
            "/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input_image': only text",
        ),
        ("/responses", {"input": [{"type": "function_call", "name": "add"}]}, "arguments"),
        ("/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
        ("/responses", {"input": "x", "tools": [{"name": "add"}]}, "tools[0].type must be a string"),
        ("/responses", {"input": "x", "background": True}, "background"),
        ("/responses", {"input": "x", "temperature": 0.3}, "temperature is 0.3"),
        ("/responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (
            "/responses",
            {"input": "x", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
        ("/chat/completions", {"messages": [HI], "guided_json": {}}, "guided_json"),
        ("/chat/completions", {"messages": [HI], "min_tokens": 5}, "min_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_in_the_apis_own_form(worlds, a_prompt, path, body, words):
    refused = []
    play(
        worlds(lambda base_url: refused.append(post(base_url, path, {"model": "m", **body}))),
        a_prompt,
        lambda _: pytest.fail("a turn was drawn"),
    )
    (answer,) = refused
    assert answer.status_code == 400
    error = answer.json()
    assert words in error["error"]["message"]
    assert error["error"]["type"] == "invalid_request_error"
    assert (error.get("type") == "error") == path.startswith("/messages")


def test_errors_of_messages_have_anthropics_names(worlds, says, a_prompt):
    answers = {}

    def harness(base_url):
        root, _, rest = base_url.partition("/episodes/")
        body = opening("/messages")
        answers["nowhere"] = post(f"{root}/episodes/{rest[:4]}/v1", "/messages", body)
        answers["stranger"] = post(f"{root}/v1", "/messages", body, {"x-api-key": "guess"})
        answers["with key"] = post(f"{root}/v1", "/messages", body, {"x-api-key": rest[:-3]})

    play(worlds(harness, token="sesame"), a_prompt, says("ok"))
    for name in ("nowhere", "stranger"):
        assert answers[name].status_code == 401
        assert answers[name].json()["error"]["type"] == "authentication_error"
    assert answers["with key"].json()["content"] == [{"type": "text", "text": "ok"}]


def test_unknown_parameters_are_told_once(worlds, says, a_prompt, caplog):
    def harness(base_url):
        for path in (*PATHS, *PATHS):
            post(base_url, path, opening(path, novelty=1)).raise_for_status()
        return 1

    with caplog.at_level(logging.WARNING):
        played = play(worlds(harness), a_prompt, says(*"abcdef"))
    assert played.episode.reward == 1.0
    told = [record.getMessage() for record in caplog.records if "novelty" in record.getMessage()]
    assert told == ["chat/completions: the unknown parameter 'novelty' is ignored"]


def sse(response: httpx.Response) -> list[dict]:
    """The events of a stream; each must have its name in a line of its own."""
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


MESSAGE_STREAM = """message_start
content_block_start content_block_delta content_block_delta content_block_stop
content_block_start content_block_delta content_block_stop
content_block_start content_block_delta content_block_stop
message_delta message_stop"""
RESPONSE_STREAM = """created in_progress
output_item.added content_part.added reasoning_text.delta reasoning_text.done content_part.done
output_item.done
output_item.added content_part.added output_text.delta output_text.done content_part.done
output_item.done
output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
completed"""


def test_events_come_in_the_order_of_the_apis(worlds, says, a_prompt, chat_tokenizer):
    streams = {}

    def harness(base_url):
        for path, tool in (("/messages", ANTHROPIC_ADD), ("/responses", RESPONSES_ADD)):
            streams[path] = sse(post(base_url, path, opening(path, tools=[tool], stream=True)))

    text = f"<think>\nhm\n</think>\n\nI add.\n{CALL}"
    played = play(worlds(harness), a_prompt, says(text, text))
    messages, responses = streams.values()
    assert [event["type"] for event in messages] == MESSAGE_STREAM.split()
    assert [event["type"] for event in responses] == [f"response.{name}" for name in RESPONSE_STREAM.split()]
    assert [event["sequence_number"] for event in responses] == list(range(len(responses)))
    begun = [event["content_block"] for event in messages if "content_block" in event]
    assert begun == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_0_0", "name": "add", "input": {}},
    ]
    assert messages[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert messages[0]["message"]["usage"]["input_tokens"] > 0
    assert messages[-2]["usage"]["output_tokens"] == len(played.sampled[0])
    assert messages[-2]["usage"]["input_tokens"] == messages[0]["message"]["usage"]["input_tokens"]
    last = responses[-1]["response"]
    thought = chat_tokenizer("<think>\nhm\n</think>", add_special_tokens=False)["input_ids"]
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": len(thought)}
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    done = [event["item"] for event in responses if event["type"].endswith("item.done")]
    assert done == last["output"]
    assert (last["status"], last["output"][2]["call_id"]) == ("completed", "call_1_0")


def test_a_turn_that_is_cut_off_says_so(worlds, says, a_prompt):
    answers = []

    def harness(base_url):
        for path in ("/messages", "/responses"):
            answers.append(post(base_url, path, opening(path)).json())

    play(worlds(harness), a_prompt, says("ab", "cd", cut=[0, 1]))
    messages, responses = answers
    assert (messages["stop_reason"], messages["usage"]["output_tokens"]) == ("max_tokens", 2)
    assert responses["status"] == "incomplete"
    assert responses["incomplete_details"] == {"reason": "max_output_tokens"}


def test_tokens_are_counted_without_a_turn(worlds, says, a_prompt):
    counts = []

    def harness(base_url):
        body = opening("/messages", tools=[ANTHROPIC_ADD])
        counts.append(post(base_url, "/messages/count_tokens", body).json())
        counts.append(post(base_url, "/messages", body).json()["usage"]["input_tokens"])

    played = play(worlds(harness), a_prompt, says("ok"))
    assert counts == [{"input_tokens": len(played.behind[0])}, len(played.behind[0])]
    assert len(played.sampled) == 1


@pytest.mark.parametrize(
    ("agent", "tool"),
    [("claude_code", {"Bash": "command"}), ("codex", {"exec_command": "cmd"})],
)
def test_what_agents_sent_is_one_stream_of_exact_ids(worlds, says, a_prompt, agent, tool):
    """Requests as an agent sent them, with other words: two turns with a tool, then the last."""
    requests = json.loads((WIRE / f"{agent}.json").read_text())

    def harness(base_url):
        for request in requests:
            path = request["path"].removeprefix("/v1")
            answer = post(base_url, path, request["body"], request["headers"])
            assert answer.status_code == 200, answer.text
        return 1

    ((name, key),) = tool.items()
    turns = []
    for command in ("echo hi > made.txt", "cat made.txt"):
        arguments = {key: command}
        if agent == "claude_code":
            arguments["description"] = "make" if "echo" in command else "look"
        call = json.dumps({"name": name, "arguments": arguments})
        turns.append(f"I go.\n<tool_call>\n{call}\n</tool_call>")
    script = says(f"<think>\nhm\n</think>\n\n{turns[0]}", turns[1], "It is done.")
    played = play(worlds(harness, context=60_000), a_prompt, script)
    assert played.episode.reward == 1.0
    assert [branch.begin for branch in played.episode.branches] == [0]
    turns = played.episode.turns
    assert [played.tokens[turn.begin : turn.end] for turn in turns] == played.sampled
    assert sum(played.trained) == sum(map(len, played.sampled))
    wishes = ("namespace", "web_search") if agent == "codex" else ()
    assert [turn.wishes for turn in turns] == [wishes] * 3


# ---- stop strings of a request


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_a_turn_ends_at_the_stop_string_of_its_request(worlds, says, a_prompt, path, chat_tokenizer):
    """What was drawn behind it is neither trained nor seen by the next turn."""
    answers = []

    def harness(base_url):
        key = "stop" if path == "/chat/completions" else "stop_sequences"
        body = opening(path, **{key: ["Observation:", "never"]})
        answers.append(post(base_url, path, body).json())
        spoken = {"role": "assistant", "content": "Act: look"}  # without the line's end
        body["messages"] += [spoken, {"role": "user", "content": "nothing"}]
        answers.append(post(base_url, path, body).json())

    played = play(worlds(harness), a_prompt, says("Act: look\nObservation: gold", "I see."))
    kept = chat_tokenizer("Act: look\nObservation:")["input_ids"]
    first = played.episode.turns[0]
    assert played.tokens[first.begin : first.end] == kept
    assert first.finish is Finish.STOP
    tail = slice(first.end, len(played.sampled[0]))
    assert not any(played.trained[tail])
    assert sum(played.trained) == len(kept) + len(played.sampled[1])
    assert played.behind[1][: len(played.behind[0]) + len(kept)] == [*played.behind[0], *kept]
    assert "gold" not in chat_tokenizer.decode(played.behind[1])
    if path == "/messages":
        ending = [answers[0][key] for key in ("stop_reason", "stop_sequence")]
        assert ending == ["stop_sequence", "Observation:"]
        assert answers[0]["content"] == [{"type": "text", "text": "Act: look\n"}]
        assert answers[1]["stop_reason"] == "end_turn"
    else:
        choice = answers[0]["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "Act: look\n")


def test_a_request_cannot_undo_the_stop_strings_of_the_run(worlds, a_prompt):
    refused = []

    def harness(base_url):
        body = opening("/messages", stop_sequences=["other"])
        refused.append(post(base_url, "/messages", body).json()["error"]["message"])

    sampling = Sampling(max_new_tokens=64, stop=("Observation:",))
    play(worlds(harness, sampling=sampling), a_prompt, lambda _: pytest.fail("drawn"))
    assert "this run stops at ['Observation:'] as well" in refused[0]


# ---- side conversations, and several agents


def title_and_work(base_url, order):
    """An agent with a tool that asks for a title in a conversation of its own."""
    for text in order:
        tools = {} if text == "title" else {"tools": [ADD]}
        post(base_url, "/chat/completions", opening("/chat/completions", text, **tools))


@pytest.mark.parametrize("order", [["title", "work"], ["work", "title"], ["title", "work", "work"]])
def test_a_side_conversation_is_served_and_not_trained(worlds, says, a_prompt, order):
    played = play(worlds(lambda base_url: title_and_work(base_url, order)), a_prompt, says(*order))
    turns = played.episode.turns
    assert [turn.side for turn in turns] == [text == "title" for text in order]
    for turn in turns:
        assert played.trained[turn.begin : turn.end] == [not turn.side] * (turn.end - turn.begin)
    assert [played.tokens[turn.begin : turn.end] for turn in turns] == played.sampled
    # The record is that of the work, whichever was asked for first or last.
    assert [message["content"] for message in played.episode.messages] == ["work", "work"]
    assert "work" in played.episode.prompt_text and "title" not in played.episode.prompt_text


def by_words(messages, tools):
    return messages[0]["content"] == "work"


@pytest.mark.parametrize(("rule", "side"), [(None, [True, False]), ("none", [False] * 2), (by_words, [False, True])])
def test_the_rule_says_what_is_beside(worlds, says, a_prompt, rule, side):
    environment = worlds(lambda base_url: title_and_work(base_url, ["title", "work"]))
    environment.is_side = no_side if rule == "none" else rule
    played = play(environment, a_prompt, says("title", "work"))
    assert [turn.side for turn in played.episode.turns] == side


@pytest.mark.parametrize("with_tools", [[False, False], [False, True]])
def test_a_conversation_that_goes_on_is_none_beside(worlds, says, a_prompt, with_tools):
    """Neither where no conversation has tools, nor where it goes on with tools."""

    def harness(base_url):
        messages = [HI]
        for tools in with_tools:
            body = {"model": "m", "messages": messages} | ({"tools": [ADD]} if tools else {})
            answer = post(base_url, "/chat/completions", body).json()
            messages = [*messages, answer["choices"][0]["message"], HI]

    played = play(worlds(harness), a_prompt, says("a", "b"))
    assert [turn.side for turn in played.episode.turns] == [False, False]
    assert sum(played.trained) == sum(map(len, played.sampled))


@pytest.mark.parametrize("header", ["x-claude-code-session-id", "session-id", "x-session-id"])
def test_agents_with_the_same_words_are_told_apart_by_their_sessions(worlds, says, a_prompt, header):
    """Both were told the same and said the same by other ids; each goes on behind its own."""

    def harness(base_url):
        answers = []
        for session in ("one", "two"):
            answer = post(base_url, "/chat/completions", opening(""), {header: session})
            answers.append(answer.json()["choices"][0]["message"])
        for session, message in zip(("one", "two"), answers, strict=True):
            body = opening("")
            body["messages"] += [message, HI]
            post(base_url, "/chat/completions", body, {header: session})

    script = says("ab", "<think>\nhm\n</think>\n\nab", "y", "z")
    turns = [script(k)[0] for k in range(4)]
    played = play(worlds(harness), a_prompt, lambda k: (turns[k], Finish.EOS))
    assert [turn.agent for turn in played.episode.turns] == [0, 1, 0, 1]
    for first, then in ((0, 2), (1, 3)):
        begun = [*played.behind[first], *turns[first]]
        assert played.behind[then][: len(begun)] == begun


# ---- system messages behind the first


def codec_of(tokenizer, end_id, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return ChatCodec(other, (end_id,))


REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('first') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') or loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHOWS = REFUSES.replace("and not loop.first", "and false")


@pytest.mark.parametrize(("template", "role"), [(SHOWS, "system"), (REFUSES, "user"), (DROPS, "user")])
@pytest.mark.parametrize("name", ["system", "developer"])
def test_a_later_system_message_is_shown(chat_tokenizer, end_id, template, role, name):
    codec = codec_of(chat_tokenizer, end_id, template)
    spoken = {"role": "assistant", "content": "b"}
    messages = [{"role": name, "content": "first"}, HI, spoken, {"role": name, "content": "later"}]
    _, text = codec.render(read_chat_request({"messages": messages}))
    assert "<|im_start|>system\nfirst" in text
    assert f"<|im_start|>{role}\nlater" in text
    _, suffix = codec.follow(read_chat_request({"messages": messages}), end_id, messages[3:])
    assert f"<|im_start|>{role}\nlater" in suffix


# ---- official clients


def plain_openai(base_url: str) -> openai.OpenAI:
    client = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=WAIT, http_client=client)


def without_ids(output):
    items = []
    for item in output:
        fields = item.model_dump(exclude_none=True)
        for key in ("id", "parsed_arguments"):
            fields.pop(key, None)
        items.append(fields)
    return items


TEXTS = {
    "text": "It is 5.",
    "call": CALL,
    "both": f"I add.\n{CALL}",
    "calls": f"{CALL}\n{CALL}",
    "thought": f"<think>\nhm\n</think>\n\nI add.\n{CALL}",
    "umlauts": "Größe: 5 µm 🙂",
    "empty": "",
}
CONTENT = {
    "text": "It is 5.",
    "call": "",
    "both": "I add.",
    "calls": "",
    "thought": "I add.",
    "umlauts": "Größe: 5 µm 🙂",
    "empty": "",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_openais_client_reads_the_same_streamed_and_not(worlds, says, a_prompt, kind):
    read = []

    def harness(base_url):
        ask = plain_openai(base_url).responses
        body = {"model": "m", "input": "2+3?", "tools": [RESPONSES_ADD]}
        read.append(ask.create(**body))
        with ask.stream(**body) as stream:
            for _ in stream:
                pass
            read.append(stream.get_final_response())
        return 1

    played = play(worlds(harness), a_prompt, says(TEXTS[kind], TEXTS[kind]))
    assert played.episode.reward == 1.0
    whole, streamed = (without_ids(one.output) for one in read)
    for items in (whole, streamed):
        for item in items:
            item.pop("call_id", None)  # ids differ between turns
            for part in item.get("content", ()):
                part.pop("parsed", None)
    assert whole == streamed
    assert read[0].usage == read[1].usage
    assert read[0].output_text == CONTENT[kind]


@pytest.mark.parametrize("kind", TEXTS)
def test_openais_client_reads_chat_completions_the_same_streamed_and_not(worlds, says, a_prompt, kind):
    read, seen = [], []

    def harness(base_url):
        ask = plain_openai(base_url).chat.completions
        body = {"model": "m", "messages": [HI], "tools": [ADD]}
        read.append(ask.create(**body))
        with ask.stream(**body, stream_options={"include_usage": True}) as stream:
            seen.extend(event.type for event in stream)
            read.append(stream.get_final_completion())
        return 1

    played = play(worlds(harness), a_prompt, says(TEXTS[kind], TEXTS[kind]))
    assert played.episode.reward == 1.0
    messages = []
    for one in read:
        (choice,) = one.choices
        message = choice.message.model_dump(exclude_none=True)
        message.pop("parsed", None)
        for call in message.get("tool_calls", ()):
            call.pop("id")  # ids differ between turns
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        messages.append((message, choice.finish_reason, one.usage))
    assert messages[0] == messages[1]
    assert (messages[0][0].get("content") or "") == CONTENT[kind]
    calls = [json.loads(call["function"]["arguments"]) for call in messages[0][0].get("tool_calls", ())]
    assert calls == [ARGUMENTS] * TEXTS[kind].count("<tool_call>")
    assert seen.count("tool_calls.function.arguments.done") == len(calls)


@pytest.mark.parametrize("kind", TEXTS)
def test_anthropics_client_reads_the_same_streamed_and_not(worlds, says, a_prompt, kind):
    anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed (pip install anthropic)")
    read = []

    def harness(base_url):
        root = base_url.removesuffix("/v1")
        ask = anthropic.Anthropic(base_url=root, api_key="none", max_retries=0, timeout=WAIT).messages
        body = {"model": "m", "max_tokens": 64, "messages": [HI], "tools": [ANTHROPIC_ADD]}
        read.append(ask.create(**body))
        with ask.stream(**body) as stream:
            read.append(stream.get_final_message())
        return 1

    played = play(worlds(harness), a_prompt, says(TEXTS[kind], TEXTS[kind]))
    assert played.episode.reward == 1.0
    whole, streamed = (without_ids(one.content) for one in read)
    assert whole == streamed
    assert read[0].stop_reason == read[1].stop_reason
    assert read[0].usage.output_tokens == read[1].usage.output_tokens == len(played.sampled[0])


def deep(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


UNREADABLE = {
    "a number above all": (b"1e400", "1e400 is no number that can be read"),
    "the same in a list": (b"[1, -1e999]", "-1e999 is no number"),
    "half of a character": (b'"\xed\xa0\x80"', "the body is not JSON"),
    "bytes that are no text": (b'"\xff"', "the body is not JSON"),
    "nested deeper than answers can be": (deep(400), "nested too deeply"),
    "nested deeper than it can be read": (deep(100_000), "nested too deeply"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_body_that_no_answer_could_repeat_is_refused(worlds, a_prompt, case):
    """The answer of Responses repeats `metadata`: a turn must not be drawn for an answer that cannot be written."""
    value, words = UNREADABLE[case]
    refused = {}

    def harness(base_url):
        for path in (*PATHS, "/messages/count_tokens"):
            data = json.dumps(opening(path, metadata="VALUE")).encode().replace(b'"VALUE"', value)
            kind = {"Content-Type": "application/json"}
            refused[path] = httpx.post(f"{base_url}{path}", content=data, headers=kind, timeout=WAIT, trust_env=False)

    play(worlds(harness), a_prompt, lambda _: pytest.fail("a turn was drawn"))
    assert len(refused) == 4
    for path, answer in refused.items():
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert (answer.json().get("type") == "error") == path.startswith("/messages")


@pytest.mark.parametrize("number", ["1e400", "NaN", "-Infinity", "[1e999]", "[" * 300 + "]" * 300])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_with_a_number_that_json_lacks_reaches_the_client(worlds, says, a_prompt, path, number, stream):
    """The policy writes what it likes; the turn is answered in JSON."""
    answers = []
    tools = {"/chat/completions": ADD, "/messages": ANTHROPIC_ADD, "/responses": RESPONSES_ADD}

    def harness(base_url):
        answers.append(post(base_url, path, opening(path, tools=[tools[path]], stream=stream)))

    text = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    play(worlds(harness), a_prompt, says(text))
    (answer,) = answers
    assert answer.status_code == 200
    assert number in answer.text and "tool_use" not in answer.text  # a call that cannot be read stays text
