"""480 random conversations: whatever a template does to the past, what is trained keeps the ids that were sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from encoders import encode_prompts

from groupwise.data.rendering import Chat, render_chats
from groupwise.data.sources import SourceRows
from groupwise.data.templates import unmarked
from groupwise.data.tokenizers import bpe_tokenizer
from groupwise.records import Finish

TEXTS = (
    "Ja.",
    "",
    "x = 1\n\n",
    " 漢字 é",
    "😀",
    "a  b",
    "<|im_end|>",
    "</tool_call>",
    "<think>",
    '{"a": [1, null]}',
    "zq7mark",
    "4",
)
VALUES: tuple[Any, ...] = ("x", "é漢", False, True, None, 1e5, 0, -1.5, [1, "a"], {"b": 1, "a": None}, "<|call|>", 'quo"te\n')
ENDS = {"keeps": "<|im_end|>", "forgets": "<|im_end|>", "bare": "<|eot_id|>", "channels": "<|call|>"}


def ragged(rng: random.Random, ids: list[int], tokenizer: Any) -> list[int]:
    """Other ids for the same text: tokens cut into their bytes here and there, as a policy may sample them."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    found: list[int] = []
    for one in ids:
        letters = tokenizer.convert_ids_to_tokens(one)
        if one in special or len(letters) == 1 or rng.random() < 0.5:
            found.append(one)
        else:
            found += [vocabulary[letter] for letter in letters]
    return found


def merging() -> Any:
    """A byte-pair tokenizer whose tokens are parts of words: one text has many ways to be written."""
    texts = ['<tool_call>\n{"name": "echo", "arguments": {"value": "x"}}\n</tool_call> commentary final analysis é漢 abc 1234'] * 4
    return bpe_tokenizer(texts, 320)


def turn(rng: random.Random, name: str, calls: bool) -> str:
    """What a policy of the family writes: reasoning, text, calls."""
    arguments = {key: rng.choice(VALUES) for key in rng.sample(("value", "flag", "number"), rng.randint(0, 3))}
    written = json.dumps(arguments, ensure_ascii=False, separators=rng.choice([(", ", ": "), (",", ":")]))
    text, thought = rng.choice(("Ja.", " 漢字 é", "a  b", "😀", "4")), rng.choice(("so", "because é\n", "4"))
    if name == "channels":
        reasoning = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if rng.random() < 0.5 else ""
        if calls:
            return f"{reasoning}<|channel|>commentary to=functions.echo <|constrain|>json<|message|>{written}"
        return f"{reasoning}<|channel|>final<|message|>{text}"
    if name == "bare":
        return '{"name": "echo", "parameters": ' + written + "}" if calls else text
    reasoning = f"<think>\n{thought}\n</think>\n\n" if rng.random() < 0.5 else ""
    one = '<tool_call>\n{"name": "echo", "arguments": ' + written + "}\n</tool_call>"
    return reasoning + ("\n".join([one] * rng.randint(1, 2)) if calls else text)


@pytest.mark.slow
@pytest.mark.parametrize("past", ["keep", "split"])
@pytest.mark.parametrize("name", list(ENDS))
def test_trap_1_scored_ids_are_sampled_ids(table: Callable[..., Any], name: str, past: str) -> None:
    """60 conversations of each template and way: up to four turns with tools, in tokens that no tokenizer would choose.

    The engine's stream is built from the replies; in it every turn stands as it was sampled.  With `split` a context is, as text,
    what the template writes of the whole conversation.
    """
    at = table(template=name, tools=("my_tools.py:echo",), past=past, runs="thread", max_turns=9, tokenizer=merging())
    tokenizer, splits = at.tokenizer, 0
    for number in range(60):
        rng = random.Random(f"{name}/{number}")
        prompt = at.prompt(rng.choice(TEXTS) or "?")
        talk, reply = at.open(prompt)
        assert reply.context is None
        stream: list[int] = prompt.tokens.tolist()
        completion: list[int] = []
        written: list[Any] = []
        for _ in range(rng.randint(1, 4)):
            text = turn(rng, name, calls=rng.random() < 0.8)
            ids = ragged(rng, tokenizer(text + ENDS[name], add_special_tokens=False)["input_ids"], tokenizer)
            begin = len(completion)
            completion += ids
            stream += ids
            reply = at.hear(talk, at.draw(talk, ids))
            written.append((begin, ids))
            if reply.finish is not None:
                break
            completion += reply.tokens.tolist()
            stream += reply.tokens.tolist()
            if reply.context is not None:
                assert past == "split"
                assert reply.tokens.size == 0
                splits += 1
                stream = reply.context.tolist()
                _is_the_templates(stream, talk, tokenizer)
            assert at.streams[talk].ids().tolist() == stream
        episode = talk.close(Finish.EOS)
        assert [(one.begin, completion[one.begin : one.end]) for one in episode.turns] == written
        assert all(stretch.begin >= previous.end for previous, stretch in zip(episode.turns, episode.turns[1:], strict=False))
    assert splits == 0 if past == "keep" else splits > 10


def _is_the_templates(stream: list[int], talk: Any, tokenizer: Any) -> None:
    """The text of a context is the template's own of the whole conversation."""
    (whole,) = render_chats(tokenizer, [Chat(talk._written, tools=talk._tools, add_generation_prompt=True)])
    assert tokenizer.decode(stream) == unmarked(str(whole))


def test_trap_3_the_past_is_kept_or_split(table: Callable[..., Any]) -> None:
    """Of a template that drops old reasoning: `keep` goes on behind what was sampled, `split` behind what it writes."""
    for past in ("keep", "split"):
        at = table(template="forgets", factory="my_tools.py:Guess", past=past, runs="thread")
        talk, reply = at.begin(secret=7)
        before = at.tokenizer.decode(reply.context)
        said = "<think>\nseven is lucky\n</think>\n\n3"
        reply = at.say(talk, said)
        episode = talk.close(Finish.LENGTH)
        if past == "keep":
            assert reply.context is None
            assert at.text(reply.tokens) == "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
        else:
            assert at.text(reply.context) == before + "3<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"
        assert episode.turns[0].answer == "higher"


@pytest.mark.parametrize("control", ["warn", "plain"])
@pytest.mark.parametrize("greets", [False, True])
def test_the_prompt_is_encoded_in_later_turns_as_in_the_first(table: Callable[..., Any], control: str, greets: bool) -> None:
    """With `split` too: control tokens in a row's own messages are what `data.control_tokens` says, an observation's are text."""
    typed = "be <|im_end|> brief"
    row = [{"role": "system", "content": typed}, {"role": "user", "content": f"guess {typed}"}]
    at = table(template="forgets", factory="my_tools.py:Greeter", past="split", runs="thread", control_tokens=control)
    (end,) = at.ids("<|im_end|>")
    talk, reply = at.begin(prompt=row, secret=7, greeting=typed if greets else "")
    first = at.prompt(prompt=row).tokens if reply.context is None else reply.context
    later = at.say(talk, "<think>\nlucky\n</think>\n\n3")
    talk.close(Finish.LENGTH)
    closed = 2  # by the template: the two messages of the prompt
    assert np.count_nonzero(first == end) == closed + (2 if control == "warn" else 0)
    head = first[: -len(at.ids("<|im_start|>assistant\n"))]
    assert at.text(head).count(typed) == 2 + greets
    assert later.context[: head.size].tolist() == head.tolist()


def test_tools_of_a_row_are_not_shown_where_nobody_answers_their_calls(table: Callable[..., Any]) -> None:
    """An environment without tools, and a data set with a column of tools: no turn shows what cannot be called."""
    at = table(template="forgets", factory="my_tools.py:Greeter", past="split", runs="thread")
    schema = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    talk, _ = at.begin(secret=7, greeting="", tools=[schema])
    first = at.prompt(tools=[schema]).tokens
    later = at.say(talk, "<think>\nlucky\n</think>\n\n3")
    talk.close(Finish.LENGTH)
    head = first[: -len(at.ids("<|im_start|>assistant\n"))]
    assert "now" not in at.text(first)
    assert later.context[: head.size].tolist() == head.tolist()


def test_calls_in_a_prompt_are_written_in_later_turns_as_in_the_first(table: Callable[..., Any]) -> None:
    """Rows of OpenAI's form hold arguments as JSON text; the template wants what it stands for."""
    at = table(template="forgets", tools=("my_tools.py:echo",), past="split", runs="thread")
    arguments = '{"value": "y"}'
    asked = {"id": "c", "type": "function", "function": {"name": "echo", "arguments": arguments}}
    row = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "name": "echo", "tool_call_id": "c", "content": "y"},
        {"role": "user", "content": "r"},
    ]
    talk, _ = at.begin(prompt=row)
    called = '<tool_call>\n{"name": "echo", "arguments": {"value": "x"}}\n</tool_call>'
    later = at.say(talk, f"<think>\nhm\n</think>\n\n{called}")
    talk.close(Finish.LENGTH)
    assert arguments in at.text(at.prompt(prompt=row).tokens)
    assert later.context is None, "the template writes what was drawn, and no other form of the prompt"


def test_trap_4_an_empty_think_block_appears(table: Callable[..., Any]) -> None:
    """Qwen 3 writes one into a turn that is the last, and none once a result follows."""
    at = table(template="forgets", tools=("my_tools.py:echo",), past="split", runs="thread", tokenizer=merging())
    talk, _ = at.begin()
    ids = ragged(
        random.Random(0), at.ids('<tool_call>\n{"name": "echo", "arguments": {"value": "x"}}\n</tool_call><|im_end|>'), at.tokenizer
    )
    reply = at.hear(talk, at.draw(talk, ids))
    prompt = at.prompt().tokens.tolist()
    stream = reply.context.tolist() if reply.context is not None else [*prompt, *ids, *reply.tokens.tolist()]
    _is_the_templates(stream, talk, at.tokenizer)
    talk.close(Finish.LENGTH)


def test_trap_2_the_separator_behind_the_end_is_there(table: Callable[..., Any], templates: ModuleType) -> None:
    """Of canonical text the stream is what the template writes of the whole conversation, every template that appends."""
    for name in ("keeps", "bare"):
        at = table(template=name, tools=("my_tools.py:echo",), runs="thread")
        prompt = at.prompt()
        talk, _ = at.open(prompt)
        text = {"keeps": '<tool_call>\n{"name": "echo", "arguments": {"value": "x"}}\n</tool_call>',
                "bare": '{"name": "echo", "parameters": {"value": "x"}}'}[name]  # fmt: skip
        ids = at.ids(text + ENDS[name])
        reply = at.hear(talk, at.draw(talk, ids))
        stream = [*prompt.tokens.tolist(), *ids, *reply.tokens.tolist()]
        messages = [*prompt.row["prompt"], *talk.close(Finish.LENGTH).messages]
        (whole,) = render_chats(at.tokenizer, [Chat(messages, tools=talk._tools, add_generation_prompt=True)])
        assert at.text(stream) == whole


@pytest.mark.parametrize("past", ["keep", "split"])
def test_a_prompt_that_was_cut_stays_cut_whatever_the_environment_says(table: Callable[..., Any], past: str) -> None:
    """`too_long: truncate_left` holds for the observation of `reset`, and with `split` for every later turn."""
    at = table(template="forgets", factory="my_tools.py:Greeter", past=past, runs="thread")
    row = {"prompt": [{"role": "user", "content": "x" * 300}], "secret": 7, "greeting": " Guess!"}
    (prompt,), _ = encode_prompts(SourceRows("rows", [row]), at.template, max_tokens=40, too_long="truncate_left")
    talk, reply = at.open(prompt)
    context = reply.context
    assert prompt.tokens.size == context.size == 40
    assert at.text(context).endswith("x Guess!<|im_end|>\n<|im_start|>assistant\n")
    reply = at.say(talk, "<think>\nlucky\n</think>\n\n3")
    talk.close(Finish.LENGTH)
    if past == "keep":
        assert reply.context is None
    else:
        assert at.text(reply.context).count("x") < 40
        assert at.text(reply.context).endswith("3<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n")
