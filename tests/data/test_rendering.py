"""What the guarded renderer writes is what transformers writes."""

import threading

import pytest
from encoders import encode_prompts

from groupwise.data import rendering
from groupwise.data.rendering import Chat, Refusal, render_chats
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.errors import DataError

TEMPLATES = {
    "roles": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ thinking | default('off') }}",
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": False, "é": None}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}}
CHATS = [
    Chat([{"role": "user", "content": " hi \u2028 é "}], add_generation_prompt=True),
    Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
    Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}], continue_final_message=True),
    Chat([{"role": "user", "content": "a"}], variables={"thinking": "on"}),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_apply_chat_template(name):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    found = render_chats(tokenizer, CHATS)
    expected = [tokenizer.apply_chat_template(list(chat.messages), tokenize=False, **chat.options) for chat in CHATS]
    assert found == expected


def test_tools_and_calls_reach_the_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["tools"]
    messages = [{"role": "assistant", "content": "see", "tool_calls": [CALL]}]
    (found,) = render_chats(tokenizer, [Chat(messages, tools=[TOOL])])
    assert found == tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert '"é": null' in found


def test_conversations_with_tools_and_without_have_templates_of_their_own():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ messages[0].content }}"}
    chats = [Chat([{"role": "user", "content": str(i)}], tools=[TOOL] if i % 2 else None) for i in range(5)]
    assert render_chats(tokenizer, chats) == ["plain 0", "tools 1", "plain 2", "tools 3", "plain 4"]


def test_many_conversations_keep_their_order_and_their_refusals():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages[0].content == '77' %}{{ 1/0 }}{% endif %}{{ messages[0].content }}"
    found = render_chats(tokenizer, [Chat([{"role": "user", "content": str(i)}], f"row {i}") for i in range(150)])
    assert [text for text in found if isinstance(text, str)] == [str(i) for i in range(150) if i != 77]
    assert found[77] == Refusal("row 77", "ZeroDivisionError: division by zero")


def test_threads_do_not_get_each_others_answers():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES["roles"]
    found = {}

    def render(name):
        found[name] = [render_chats(tokenizer, [Chat([{"role": "user", "content": f"{name}{i}"}])])[0] for i in range(50)]

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [f"[user]{name}{i}<|end|>\n" for i in range(50)] for name in "abcd"}


def test_no_template_and_no_default_among_several():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template: set model\.chat_template"):
        render_chats(tokenizer, CHATS)
    tokenizer.chat_template = {"rag": "x", "search": "y"}
    with pytest.raises(DataError, match="'rag', 'search'"):
        render_chats(tokenizer, CHATS)


@pytest.mark.parametrize(
    "template",
    [
        "{% break %}x",
        "{% if true %}{% continue %}{% endif %}x",
        "{% for m in messages %}{{ m.content }}",
        "{{ x | nothing }}",
        "{% x %}",
    ],
)
def test_what_is_no_template_is_said_with_the_remedy(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"(?s)row 1: .*is no Jinja template that can be run: .+; set model\.chat_template to one"):
        render_chats(tokenizer, [Chat([{"role": "user", "content": "a"}], "row 1")])


def test_behind_a_template_that_cannot_be_used_another_one_is_answered(monkeypatch):
    monkeypatch.setattr(rendering, "_RENDERER", rendering._Renderer())
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% macro f() %}{{ f() }}{% endmacro %}{% if messages[0].content == '1' %}{{ f() }}{% endif %}old {{ messages[0].content }}"
    )
    chats = [Chat([{"role": "user", "content": str(i)}], f"row {i}") for i in range(4)]
    with pytest.raises(DataError, match=r"row 1: .* it calls itself without end"):
        render_chats(tokenizer, chats)
    tokenizer.chat_template = "new {{ messages[0].content }}"
    assert render_chats(tokenizer, chats) == [f"new {i}" for i in range(4)]


def test_a_template_that_writes_nothing_and_one_that_refuses_are_told_with_the_remedy():
    tokenizer = byte_tokenizer()
    rows = SourceRows("rows", [{"prompt": "a"}, {"prompt": "b"}])
    tokenizer.chat_template = "{% for m in messages %}{% continue %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        DataError, match=r"2 of which the chat template writes nothing \(first: rows row 1; set model\.chat_template\)"
    ):
        encode_prompts(rows, Template(tokenizer=tokenizer, chat=True), max_tokens=9)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match=r"refuses these messages: no; change the messages, or set model\.chat_template"):
        encode_prompts(rows, Template(tokenizer=tokenizer, chat=True), max_tokens=9)


@pytest.mark.slow
def test_a_template_that_nothing_but_the_kernel_stops_has_its_time_once(monkeypatch):
    """It is not begun again to learn at which conversation it was."""
    monkeypatch.setattr(rendering, "SECONDS", 0.5)
    monkeypatch.setattr(rendering, "_RENDERER", rendering._Renderer())
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (  # lists are compared without looking for signals
        "{{ messages[0].content }}{% set n = messages | length * 1000000 %}{% set x, y = [1.5] * n, [1.5] * n %}"
        "{% if messages[0].content == '2' %}{{ [x] * 100000 == [y] * 100000 }}{% endif %}"
    )
    chats = [Chat([{"role": "user", "content": str(i)}], f"row {i}") for i in range(4)]
    assert render_chats(tokenizer, chats[:2]) == ["0", "1"]
    process = rendering._RENDERER._process
    with pytest.raises(
        DataError, match=r"row 2: .* it ran for 0\.5 seconds on one conversation and was stopped; set model\.chat_template"
    ):
        render_chats(tokenizer, chats)
    assert rendering._RENDERER._process is process and not process.alive(), "it was not started again"
