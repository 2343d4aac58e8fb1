import numpy as np
import pytest
from encoders import encode_demonstrations, encode_pairs, encode_prompts, encode_solutions

from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.data.wording import UNSAID
from groupwise.errors import ConfigError, DataError


def demonstrations(tokenizer, rows, context=200, chat=False, template=None, system=None, eos_ids=(), **options):
    wording = Template(tokenizer=tokenizer, chat=chat, format=template, system=system)
    return encode_demonstrations(
        SourceRows("f.jsonl", rows), wording, context=context, eos_ids=eos_ids or (tokenizer.eos_token_id,), **options
    )


def texts(tokenizer, demonstration):
    return tokenizer.decode(demonstration.prompt), tokenizer.decode(demonstration.completion)


def test_three_forms_of_rows_give_the_same_demonstration(tokenizer):
    user, assistant = {"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}
    rows = [
        {"prompt": "1+2", "completion": "3"},
        {"prompt": [user], "completion": [assistant]},
        {"prompt": [user], "completion": "3"},
        {"messages": [user, assistant]},
        {"instruction": "1+2", "input": "", "output": "3"},
    ]
    built, report = demonstrations(tokenizer, rows, chat=True)
    assert {texts(tokenizer, one) for one in built} == {("<|user|>1+2<|end|><|assistant|>", "3<|end|>")}
    assert report.kept == 5
    assert max(report.lengths) == 8


def test_the_prompt_of_a_demonstration_has_the_ids_that_generation_starts_from(tokenizer):
    rows = [{"prompt": "1+2", "completion": r"<think>1+2=3</think>\boxed{3}"}]
    (one,), _ = demonstrations(tokenizer, rows, chat=True)
    (prompt,), _ = encode_prompts(SourceRows("f", rows), Template(tokenizer=tokenizer, chat=True), max_tokens=99)
    assert np.array_equal(one.prompt, prompt.tokens)
    assert one.completion.tolist().count(tokenizer.eos_token_id) == 1
    assert one.completion[-1] == tokenizer.eos_token_id


def test_alpaca_rows_through_their_template():
    tokenizer = byte_tokenizer()
    (one,), _ = demonstrations(tokenizer, [{"instruction": "Add.", "input": "1, 2", "output": "3"}], 400, template="alpaca")
    assert tokenizer.decode(one.prompt).endswith("### Input:\n1, 2\n\n### Response:\n")
    assert tokenizer.decode(one.completion) == "3<|end|>"


def test_of_a_text_alone_every_token_but_the_first_is_learnt(tokenizer):
    rows = [{"text": "12+3"}, {"text": "12+3<|end|>"}, {"text": " "}, {"text": "7", "prompt": None, "messages": None}]
    built, report = demonstrations(tokenizer, rows, chat=True)
    assert [texts(tokenizer, one) for one in built] == [("1", "2+3<|end|>"), ("1", "2+3<|end|>"), ("7", "<|end|>")]
    assert report.dropped == {"empty": 1}
    assert report.lengths == [5, 5, 2] and not report.noted
    with pytest.raises(DataError, match="no column 'completion'"):
        demonstrations(tokenizer, [{"prompt": "1", "text": "2"}])
    with pytest.raises(ConfigError, match=r"leave data\.system out"):
        demonstrations(tokenizer, [{"text": "2"}], chat=True, system="1")


def test_a_text_alone_that_ends_with_any_eos_gets_no_second_one(tokenizer):
    other = tokenizer.convert_tokens_to_ids("<|user|>")
    rows = [{"text": f"12{end}"} for end in ("", "<|user|>", "<|end|>", "<|end|>\n")]
    built, _ = demonstrations(tokenizer, rows, eos_ids=(tokenizer.eos_token_id, other))
    assert [texts(tokenizer, one)[1] for one in built] == ["2<|end|>", "2<|user|>", "2<|end|>", "2<|end|>"]


@pytest.mark.parametrize("text", ["<|end|>", "\n<|end|>", "<|end|>\n", "<|end|> <|end|>"])
def test_a_text_alone_that_is_nothing_but_eos_is_empty(tokenizer, text):
    built, report = demonstrations(tokenizer, [{"text": text}, {"text": "7"}])
    assert len(built) == 1 and report.dropped == {"empty": 1}


def test_columns_beside_a_text_are_counted_where_the_text_alone_is_read(tokenizer):
    rows = [{"text": "2", "question": "1+1", "answer": "2"}, {"text": "3"}, {"text": "4", "question": None}]
    _, report = demonstrations(tokenizer, rows)
    assert str(report).endswith("; kept: 1 of which the column text alone is read (first: f.jsonl row 1)")


def test_earlier_assistant_turns_belong_to_the_prompt(tokenizer):
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    (one,), _ = demonstrations(tokenizer, rows)
    prompt = "<|user|>1<|end|><|assistant|>2<|end|><|user|>3<|end|><|assistant|>"
    assert texts(tokenizer, one) == (prompt, "4<|end|>")


def test_what_is_left_out_is_counted(tokenizer):
    rows = [
        {"prompt": "1+2", "completion": "3"},
        {"prompt": "", "completion": "3"},
        {"prompt": "1+3", "completion": " "},
        {"prompt": "1+4", "completion": "É"},
        {"prompt": "1+5", "completion": "6" * 30},
    ]
    built, report = demonstrations(tokenizer, rows, context=20)
    assert [one.id for one in built] == ["0"]
    unknown = "with characters unknown to the tokenizer"
    assert report.dropped == {"empty": 1, "with an empty completion": 1, unknown: 1, "longer than 20 tokens (the test)": 1}


def test_too_long_demonstrations_can_lose_the_head_of_their_prompt(tokenizer):
    rows = [{"prompt": "123456789", "completion": "7"}, {"prompt": "1", "completion": "2"}]
    built, report = demonstrations(tokenizer, rows, context=6, too_long="truncate_left")
    assert texts(tokenizer, built[0]) == ("6789", "7<|end|>")
    assert report.noted == {"cut to 6 tokens (the test)": 1}
    with pytest.raises(DataError, match=r"row 1: prompt and completion have 11 tokens and the limit is 6"):
        demonstrations(tokenizer, rows, context=6, too_long="error")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1"}, r"row 1: no column 'completion'; there are: prompt"),
        ({"prompt": "1", "completion": None}, r"row 1: completion is None \(NoneType\)"),
        ({"prompt": "1", "completion": 5}, r"row 1: completion is 5 \(int\)"),
        ({"messages": [{"role": "user", "content": "1"}]}, "messages must end with a message of the assistant"),
    ],
)
def test_d6_rows_without_an_answer(tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        demonstrations(tokenizer, [row])


# answers that are more than one text


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


PARTS = [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]
CALL = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("1+2"), assistant(PARTS)]},
        {"prompt": [user([{"type": "text", "text": "1+"}, {"type": "text", "text": "2"}])], "completion": [assistant(PARTS)]},
        {"prompt": "1+2", "completion": [assistant([{"type": "text", "text": "34", "image_url": None}])]},
    ],
)
def test_text_parts_of_a_content_are_joined(tokenizer, row):
    (one,), _ = demonstrations(tokenizer, [row], chat=True)
    assert texts(tokenizer, one) == ("<|user|>1+2<|end|><|assistant|>", "34<|end|>")


@pytest.mark.parametrize("content", [None, "so: ", ""])
def test_calls_are_part_of_the_answer_as_the_template_writes_them(content):
    tokenizer = byte_tokenizer()
    (one,), report = demonstrations(tokenizer, [{"messages": [user("q"), assistant(content, **CALL)]}])
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|end|>'
    assert texts(tokenizer, one) == ("<|user|>q<|end|><|assistant|>", (content or "") + call) and not report.noted


@pytest.mark.slow
def test_reasoning_is_part_of_the_answer_where_the_template_writes_it():
    tokenizer = byte_tokenizer()
    row = {"prompt": [user("q")], "completion": [assistant("a", reasoning_content="r")]}
    tokenizer.chat_template = THINKING
    (one,), _ = demonstrations(tokenizer, [row])
    assert texts(tokenizer, one) == ("<|user|>q<|end|>\n<|assistant|>", "<think>r</think>a<|end|>")
    tokenizer.chat_template = THINKING + "{% if add_generation_prompt %}<think>no</think>{% endif %}"
    good = {"prompt": [user("q")], "completion": "a"}
    _, report = demonstrations(tokenizer, [row, good])
    assert report.dropped == {"whose prompt the chat template writes otherwise once it is answered": 1}
    tokenizer.chat_template = THINKING.replace("m.reasoning_content", "m.thoughts")
    _, report = demonstrations(tokenizer, [row, {"messages": [user("q"), assistant("a", **CALL)]}, good])
    assert report.dropped == {
        "whose reasoning_content the chat template does not write": 1,
        "whose tool_calls the chat template does not write": 1,
    }


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [user("1"), assistant([{"type": "image", "image": "x"}])]}, "with content that is no text"),
        ({"messages": [user([{"type": "image_url"}]), assistant("2")]}, "with content that is no text"),
        ({"prompt": "1", "completion": [assistant([{"type": "tool_use", "name": "f"}])]}, "with content that is no text"),
        ({"prompt": "1", "completion": [assistant(5)]}, "that cannot be read"),
        ({"prompt": [user(None)], "completion": "2"}, "that cannot be read"),
        ({"messages": [user("1"), assistant("2"), assistant("3")]}, "with two turns of the assistant in sequence"),
        ({"prompt": "9", "messages": [user("1"), assistant("2")]}, "whose prompt is another than that of its conversation"),
        ({"prompt": "1"}, "that cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_counted_by_reason(tokenizer, row, reason):
    built, report = demonstrations(tokenizer, [{"prompt": "1", "completion": "2"}, row], chat=True)
    assert len(built) == 1 and report.dropped == {reason: 1}
    assert "row 2: " in report.first[reason]
    with pytest.raises(DataError, match=f"1 {reason}"):
        demonstrations(tokenizer, [row], chat=True)


def test_more_than_text_behind_a_plain_string_is_counted(tokenizer):
    rows = [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": [assistant("3", **CALL)]}]
    _, report = demonstrations(tokenizer, rows)
    assert report.dropped == {"whose answer is more than text, behind a prompt that is a string": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("1")], "completion": [assistant("2"), user("3"), assistant("4")]},
        {"prompt": "1", "completion": [assistant("2"), user("3"), assistant("4")]},
        {"prompt": "1", "completion": [user("1"), assistant("2"), user("3"), assistant("4")]},
        {"prompt": "1", "prompt_id": "x", "messages": [user("1"), assistant("2"), user("3"), assistant("4")]},  # ultrachat_200k
        {"prompt": [user("1"), assistant("")], "completion": [assistant("2"), user("3"), assistant("4")]},
    ],
)
def test_no_turn_between_the_prompt_and_the_last_answer_is_lost(tokenizer, row):
    (one,), _ = demonstrations(tokenizer, [row], chat=True)
    prompt = "<|user|>1<|end|><|assistant|>2<|end|><|user|>3<|end|><|assistant|>"
    assert texts(tokenizer, one) == (prompt, "4<|end|>")


def test_earlier_turns_of_a_completion_are_noted(tokenizer):
    _, report = demonstrations(tokenizer, [{"prompt": "1", "completion": [assistant("2"), user("3"), assistant("4")]}], chat=True)
    assert report.noted == {"with earlier turns of the completion in the prompt": 1}


def test_the_system_message_of_the_settings_stands_before_a_joined_conversation(tokenizer):
    wording = Template(tokenizer=tokenizer, chat=True, system="s")
    rows = SourceRows("f", [{"prompt": "1", "messages": [user("1"), assistant("2"), user("3"), assistant("4")]}])
    (one,), _ = encode_demonstrations(rows, wording, context=200, eos_ids=(tokenizer.eos_token_id,))
    assert tokenizer.decode(one.prompt).startswith("<|system|>s<|end|><|user|>1<|end|><|assistant|>2<|end|>")


# a system message beside data.template


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("answer", ["messages", "completion"])
def test_a_system_message_stands_before_what_a_format_string_writes(role, answer):
    tokenizer = byte_tokenizer()
    asked = [user("q")] if answer == "messages" else []
    row = {"q": "1", answer: [{"role": role, "content": "own"}, *asked, assistant("2")]}
    wording = Template(tokenizer=tokenizer, chat=True, format="Q: {q}", system="recipe")
    (one,), report = encode_demonstrations(SourceRows("f", [row]), wording, context=200, eos_ids=(tokenizer.eos_token_id,))
    assert texts(tokenizer, one) == (f"<|{role}|>own<|end|><|user|>Q: 1<|end|><|assistant|>", "2<|end|>")
    assert UNSAID not in report.noted


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("answer", ["messages", "completion"])
def test_a_system_message_that_a_string_does_not_hold_is_counted(role, answer):
    tokenizer = byte_tokenizer()
    asked = [user("q")] if answer == "messages" else []
    rows = [{"q": "0", "completion": "1"}, {"q": "1", answer: [{"role": role, "content": "own"}, *asked, assistant("2")]}]
    built, report = demonstrations(tokenizer, rows, template="Q: {q}")
    assert [texts(tokenizer, one) for one in built] == [("Q: 0", "1<|end|>"), ("Q: 1", "2<|end|>")]
    assert "kept: 1 whose system message data.template does not write (first: f.jsonl row 2)" in str(report)


def test_turns_before_a_completion_are_not_written_by_a_format_string():
    rows = [{"q": "1", "completion": "2"}, {"q": "1", "completion": [user("3"), assistant("4")]}]
    _, report = demonstrations(byte_tokenizer(), rows, template="Q: {q}")
    assert report.dropped == {"with several turns beside data.template": 1}


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\n' if thinks }}{% endif %}"
)


def marked(eos="<|im_end|>", thinks=False):
    """A tokenizer with marks as Qwen's; `eos` ends a completion."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = QWEN.replace("if thinks", f"if {str(thinks).lower()}")
    return tokenizer


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|im_end|><|im_end|>", "<|im_end|>\n<|im_end|>\n"])
@pytest.mark.parametrize("form", ["text", "messages", "steps", "pair"])
def test_an_answer_that_brings_its_templates_end_mark_has_one(eos, end, form):
    tokenizer = marked(eos)
    (mark,) = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    user, said = {"role": "user", "content": "1+2"}, f"3{end}"
    template, last = Template(tokenizer=tokenizer, chat=True), (tokenizer.eos_token_id,)
    options = {"context": 200, "eos_ids": last}
    if form == "steps":
        row = {"prompt": "1+2", "completions": ["1", said], "labels": [True, True]}
        (solution,), _ = encode_solutions(SourceRows("f", [row]), template, **options)
        completions, expected = [solution.completion], "1\n3<|im_end|>" + ("\n<|endoftext|>" if eos == "<|endoftext|>" else "")
    elif form == "pair":
        row = {"prompt": "1+2", "chosen": said, "rejected": [{"role": "assistant", "content": f"4{end}"}]}
        (pair,), _ = encode_pairs(SourceRows("f", [row]), template, **options)
        assert pair.rejected.tolist().count(mark) == 1
        completions, expected = [pair.chosen], None
    else:
        answer = said if form == "text" else [{"role": "assistant", "content": said}]
        row = {"prompt": [user], "completion": answer}
        (one,), _ = encode_demonstrations(SourceRows("f", [row]), template, **options)
        completions, expected = [one.completion], None
    clean = {"prompt": [user], "completion": "3"}
    (bare,), _ = encode_demonstrations(SourceRows("f", [clean]), template, **options)
    assert tokenizer.decode(completions[0]) == (expected or tokenizer.decode(bare.completion))


@pytest.mark.parametrize("answer", ["<think>\nso\n</think>\n3", "<think>so</think>3", "\n<think>\nso\n</think>\n3"])
def test_an_answer_that_begins_with_the_think_mark_that_its_template_opens_has_one(answer):
    tokenizer = marked(thinks=True)
    row = {"prompt": "1+2", "completion": answer}
    built, _ = demonstrations(tokenizer, [row, {**row, "completion": "so</think>3"}], chat=True)
    whole = [tokenizer.decode([*one.prompt, *one.completion]) for one in built]
    assert [text.count("<think>") for text in whole] == [1, 1]
    assert "so" in whole[0] and whole[0].endswith("3<|im_end|>")
    options = {"context": 200, "eos_ids": (tokenizer.eos_token_id,)}
    pair = {"prompt": "1+2", "chosen": answer, "rejected": "so</think>4"}
    (one,), _ = encode_pairs(SourceRows("f", [pair]), Template(tokenizer=tokenizer, chat=True), **options)
    assert tokenizer.decode([*one.prompt, *one.chosen]) == whole[0]


def test_the_weight_of_a_message_is_obeyed_or_said(tokenizer):
    def turns(*weights):
        roles = ("user", "assistant", "user", "assistant")
        return {
            "messages": [
                {"role": role, "content": str(i)} | ({} if weights[i] is None else {"weight": weights[i]})
                for i, role in enumerate(roles)
            ]
        }

    rows = [turns(None, 0, None, 1), turns(None, 0, None, None), turns(None, 1, None, 1), turns(None, None, None, 0)]
    built, report = demonstrations(tokenizer, rows)
    assert len(built) == 3
    assert report.dropped == {"whose answer has another weight than 1": 1}
    assert "has weight 0: the last turn is what is trained" in report.first["whose answer has another weight than 1"]
    assert report.noted["with an earlier turn that is to be trained, which is not"] == 1
    with pytest.raises(DataError, match="weight 0: the last turn is what is trained"):
        demonstrations(tokenizer, [{"prompt": "1", "completion": [{"role": "assistant", "content": "2", "weight": 0}]}])


OFF, WEIGHT, UNCLEAR = (
    "whose answer is switched off",
    "whose answer has another weight than 1",
    "with a mask that may mean trained or left out",
)
SWITCHES = [
    ("train", False, OFF),
    ("training", "false", OFF),
    ("trainable", False, OFF),
    ("train_on", False, OFF),
    ("loss", False, OFF),
    ("loss_mask", 0, OFF),
    ("masked", True, OFF),
    ("is_masked", 1, OFF),
    ("loss_scale", 0.0, WEIGHT),
    ("loss_weight", 0.5, WEIGHT),
    ("mask", True, UNCLEAR),
    ("mask", 0, UNCLEAR),
]


@pytest.mark.parametrize(("key", "off", "reason"), SWITCHES)
@pytest.mark.parametrize("form", ["messages", "completion", "conversations"])
def test_an_answer_that_other_libraries_switch_off_is_not_trained(key, off, reason, form):
    turns = [user("1"), assistant("2", **{key: off})]
    if form == "conversations":
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[turn.pop("role")], "value": turn.pop("content"), **turn} for turn in turns]
    row = {"prompt": "1", "completion": turns[1:]} if form == "completion" else {form: turns}
    on = {} if key == "mask" else {key: int(key not in ("masked", "is_masked"))}
    kept = {"prompt": "1", "completion": [assistant("3", **on)]}
    write = SourceRows("f", [row, kept]).renamed({})
    built, report = encode_demonstrations(write, Template(tokenizer=byte_tokenizer(), chat=True), context=200, eos_ids=(1,))
    assert len(built) == 1 and report.dropped == {reason: 1}
    assert f"has {key} {off!r}" in report.first[reason]


def test_a_mask_of_an_earlier_answer_is_refused_and_one_of_a_question_is_not(tokenizer):
    rows = [
        {"messages": [user("1"), assistant("2", mask=1), user("3"), assistant("4")]},
        {"messages": [user("1", mask=1), assistant("2")]},
    ]
    built, report = demonstrations(tokenizer, rows)
    assert len(built) == 1 and report.dropped == {UNCLEAR: 1}
    assert "has mask 1, which may mean trained or left out: write train, true or false" in report.first[UNCLEAR]


@pytest.mark.parametrize(
    ("key", "on"), [("train", True), ("loss_mask", 1), ("masked", False), ("is_masked", 0), ("loss_scale", 1.0)]
)
def test_an_earlier_turn_that_other_libraries_train_is_noted(tokenizer, key, on):
    row = {"messages": [user("1"), assistant("2", **{key: on}), user("3"), assistant("4")]}
    _, report = demonstrations(tokenizer, [row])
    assert report.noted["with an earlier turn that is to be trained, which is not"] == 1
