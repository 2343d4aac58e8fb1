import json
import random

import numpy as np
import pytest
from encoders import encode_demonstrations, encode_prompts
from transformers import AutoTokenizer

from groupwise.config.settings import DataSettings
from groupwise.data import templates
from groupwise.data.messages import variables_in
from groupwise.data.sources import BadRow, SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import arithmetic_tokenizer, bpe_tokenizer, byte_tokenizer
from groupwise.data.wording import ReadRow, Wording
from groupwise.errors import ConfigError, DataError

BOS, EOS = 1, 2


def asked(template, row):
    return template.ask([ReadRow({}, "row 1", template.content(row))])[0]


# BOS: never twice, never missing where the tokenizer's own convention has it


def test_bos_written_by_the_chat_template_is_not_added_again(word_tokenizer):
    tokenizer = word_tokenizer(bos_on_strings=True, bos_in_template=True)
    question = asked(Template(tokenizer=tokenizer, chat=True), {"prompt": "two plus two"})
    assert question.tokens.tolist().count(BOS) == 1
    assert question.tokens[0] == BOS
    reference = tokenizer.apply_chat_template([{"role": "user", "content": "two plus two"}], add_generation_prompt=True)
    assert question.tokens.tolist() == reference["input_ids"]


def test_bos_is_added_once_to_plain_strings_if_the_tokenizer_does_so(word_tokenizer):
    template = Template(tokenizer=word_tokenizer(bos_on_strings=True))
    assert asked(template, {"prompt": "two"}).tokens.tolist().count(BOS) == 1
    assert asked(template, {"prompt": "<bos>two"}).tokens.tolist() == asked(template, {"prompt": "two"}).tokens.tolist()


def test_bos_is_not_added_where_the_tokenizer_does_not(word_tokenizer):
    template = Template(tokenizer=word_tokenizer(bos_on_strings=False, bos_in_template=False))
    assert BOS not in asked(template, {"prompt": "two"}).tokens
    assert BOS not in asked(Template(tokenizer=template.tokenizer, chat=True), {"prompt": "two"}).tokens


def test_a_chat_template_without_bos_is_taken_at_its_word(word_tokenizer):
    template = Template(tokenizer=word_tokenizer(bos_on_strings=True, bos_in_template=False), chat=True)
    assert BOS not in asked(template, {"prompt": "two"}).tokens


def test_eos_that_a_tokenizer_puts_behind_strings_does_not_end_the_prompt(word_tokenizer):
    template = Template(tokenizer=word_tokenizer(eos_on_strings=True))
    assert asked(template, {"prompt": "two plus"}).tokens.tolist() == [BOS, 10, 13, 12]


def test_p17_pad_equal_to_eos_changes_no_id(word_tokenizer):
    separate, same = word_tokenizer(), word_tokenizer(pad="<eos>")
    assert same.pad_token_id == same.eos_token_id
    for chat in (False, True):
        rows = [Template(tokenizer=tokenizer, chat=chat) for tokenizer in (separate, same)]
        questions = [asked(template, {"prompt": "two plus two"}) for template in rows]
        assert np.array_equal(questions[0].tokens, questions[1].tokens)
        completions = [t.complete([q], ["three"], (EOS,))[0].tokens.tolist() for t, q in zip(rows, questions, strict=True)]
        assert completions[0] == completions[1]
        assert completions[0].count(EOS) == 1


# text and ids


def test_p21_text_and_ids_agree_and_are_what_the_tokenizer_makes_of_the_messages(tokenizer):
    template = Template(tokenizer=tokenizer, chat=True, system="be brief")
    question = asked(template, {"prompt": "1 + 2"})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 2"}]
    assert question.tokens.tolist() == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(question.tokens) == question.text == "<|system|>be brief<|end|><|user|>1 + 2<|end|><|assistant|>"
    assert asked(template, {"prompt": messages[1:]}).text == question.text


def test_a_last_assistant_message_is_continued(tokenizer):
    template = Template(tokenizer=tokenizer)
    row = {"prompt": [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "<think>"}]}
    question = asked(template, row)
    assert question.text == "<|user|>1+2<|end|><|assistant|><think>"
    completion = template.complete([question], ["3</think>"], (tokenizer.eos_token_id,))[0]
    assert tokenizer.decode(completion.tokens) == "3</think><|end|>"
    assert completion.stable


def test_templates_of_instruction_rows():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    text = Wording(format="alpaca").content(row)
    assert text.endswith("\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n")
    assert "paired with an input" in text
    without = Wording(format="alpaca").content({"instruction": "Add.", "input": ""})
    ending = "a task. Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n"
    assert without.endswith(ending)
    assert Wording(chat=True).content(row) == [{"role": "user", "content": "Add.\n\n1 and 2"}]
    with pytest.raises(ConfigError, match=r"set data\.template: alpaca, or data\.chat: true"):
        Wording().content(row)


def test_format_strings():
    assert Wording(format="Q: {q} \\boxed{{}}").content({"q": 7}) == "Q: 7 \\boxed{}"
    with pytest.raises(DataError, match=r"f line 3 \(data\.template\): no column 'x'; there are: q"):
        Wording(format="{x}").content({"q": 7}, "f line 3")
    with pytest.raises(ConfigError, match="a literal brace is doubled"):
        Wording(format="\\boxed{").content({"q": 7})
    for template in ("{}", "{.q}", "{0[q]}", "{q:{0}}", "{q[0]x}"):
        with pytest.raises(ConfigError, match="a literal brace is doubled"):
            Wording(format=template).content({"q": "7"})
    with pytest.raises(ConfigError, match=r"data\.system needs chat messages"):
        Wording(system="be brief").content({"prompt": "x"})


ABSENT, NOTHING = "without a part of a column that data.template reads", "with nothing in a column that data.template reads"
MESSAGES, MISFIT = "with messages where data.template reads a text", "with a value that data.template cannot write"
MESSAGE = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("template", "value", "reason", "says"),
    [
        ("{a[3]}", ["x"], ABSENT, r"a lacks what \{a\[3\]\} reads: list index out of range; \{a\[key\]\} reads a key"),
        ("{a[b]}", "x", ABSENT, r"a lacks what \{a\[b\]\} reads: string indices must be integers"),
        ("{a[b]}", {"c": "x"}, ABSENT, r"a lacks what \{a\[b\]\} reads: no key 'b'"),
        ("{a[b][c]}", {"b": {}}, ABSENT, r"a lacks what \{a\[b\]\[c\]\} reads: no key 'c'"),
        ("{a.b}", {"b": "x"}, ABSENT, r"'dict' object has no attribute 'b'; \{a\[key\]\} reads a key"),
        ("{a[1]}", ["x", None], NOTHING, r"a\[1\] is null"),
        ("{a[b]}", {"b": None}, NOTHING, r"a\[b\] is null"),
        ("{a[b]}", None, NOTHING, "a is null"),
        ("{a[0]}", [MESSAGE], MESSAGES, r"a\[0\] holds messages"),
        ("{a[b]}", {"b": [MESSAGE]}, MESSAGES, r"a\[b\] holds messages"),
        ("{a}", MESSAGE, MESSAGES, "a holds messages"),
        ("{a:d}", "x", MISFIT, "Unknown format code 'd'"),
        ("{q:{a}}", None, NOTHING, "a is null"),
    ],
)
def test_a_row_that_a_format_string_cannot_write_is_a_bad_row(template, value, reason, says):
    with pytest.raises(BadRow, match=rf"f line 3: .*{says}") as told:
        Wording(format=template).content({"q": "7", "a": value}, "f line 3")
    assert told.value.reason == reason


def test_a_part_of_a_column_is_written():
    row = {"a": ["x", {"b": 2}], "m": [MESSAGE], "w": 3}
    assert Wording(format="{a[0]:>{w}} {a[1][b]} {m[0][content]}").content(row) == "  x 2 x"


# answers


def test_an_answer_ends_with_exactly_one_eos_and_template_newlines_behind_it_are_cut(tokenizer):
    end = tokenizer.eos_token_id
    plain = Template(tokenizer=tokenizer)
    question = asked(plain, {"prompt": "1+2="})
    for answer in ("3", "3<|end|>", "3<|end|>\n "):
        assert tokenizer.decode(plain.complete([question], [answer], (end,))[0].tokens) == "3<|end|>"
    tokenizer.chat_template += "{% if not add_generation_prompt %}{{ '\\n' }}{% endif %}"
    chat = Template(tokenizer=tokenizer, chat=True)
    answered = chat.complete([asked(chat, {"prompt": "1+2"})], ["3"], (end,))[0]
    assert tokenizer.decode(answered.tokens) == "3<|end|>"
    assert answered.stable


def test_an_answer_that_merges_into_the_prompt_is_encoded_apart_and_reported():
    tokenizer = bpe_tokenizer(["abab abab abab abab"] * 9, 267)
    assert len(tokenizer("ab")["input_ids"]) == 1
    template = Template(tokenizer=tokenizer)
    question = asked(template, {"prompt": "xa"})
    completion = template.complete([question], ["b"], (1,))[0]
    assert not completion.stable
    assert tokenizer.decode(np.concatenate([question.tokens, completion.tokens])) == "xab<|end|>"
    assert not template.is_stable({"prompt": "xa"}, "b")
    assert template.is_stable({"prompt": "ab "}, "x")


def test_a_chat_template_that_renders_answered_prompts_differently_is_unstable(tokenizer):
    template = Template(tokenizer=tokenizer, chat=True)
    assert template.is_stable({"prompt": "1+2"}, "3")
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ '<think>' }}{% endif %}"
    assert not template.is_stable({"prompt": "1+2"}, "3")
    question = asked(template, {"prompt": "1+2"})
    completion = template.complete([question], ["3"], (tokenizer.eos_token_id,))[0]
    assert completion.closed and tokenizer.decode(completion.tokens) == "\n</think>\n\n3<|end|>"


# what cannot be done


def test_d13_chat_data_without_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template: set model\.chat_template"):
        asked(Template(tokenizer=tokenizer, chat=True), {"prompt": "1"})


def test_d13_a_template_that_refuses_the_messages_names_the_row(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(DataError, match="row 1: the chat template refuses these messages: no system role"):
        asked(Template(tokenizer=tokenizer, chat=True), {"prompt": "1"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, r"f line 3: prompt is empty \(null\)"),
        ({"prompt": 5}, r"f line 3: prompt is 5 \(int\)"),
        ({"prompt": [{"role": "user"}]}, "f line 3: a message in prompt needs role and content"),
        ({"prompt": ["hello"]}, "f line 3: a message in prompt needs role and content, got 'hello'"),
        (
            {"question": "x", "answer": "y"},
            r"f line 3: no column 'prompt'; there are: answer, question \(data\.columns: \{prompt: YOURS\}",
        ),
        ({"messages": None}, "f line 3: messages is empty"),
    ],
)
def test_d6_rows_that_ask_nothing_readable(row, message):
    with pytest.raises(DataError, match=message):
        Wording(chat=True).content(row, "f line 3")


def test_keys_do_not_depend_on_how_a_prompt_is_wrapped():
    plain, chat, system = Wording(), Wording(chat=True), Wording(chat=True, system="be brief")
    keys = {wording.key(wording.content({"prompt": "1+2"})) for wording in (plain, chat, system)}
    assert keys == {"1+2"}
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert plain.key(plain.content({"prompt": dialogue})) == system.key(system.content({"prompt": dialogue}))
    assert plain.key(dialogue) != plain.key(dialogue[2:])


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_row_with_a_system_message_of_its_own_keeps_it_alone(role):
    own = [{"role": role, "content": "be thorough"}, {"role": "user", "content": "1+2"}]
    wording = Wording(chat=True, system="be brief")
    assert wording.content({"prompt": own}) == own
    assert wording.key(own) == Wording().key(own)
    assert wording.content({"prompt": own[1:]})[0] == {"role": "system", "content": "be brief"}
    assert wording.key(wording.content({"prompt": own[1:]})) == "1+2"
    for nothing in ("", " \n", None, [], [{"type": "text", "text": ""}]):  # what says nothing gives no instruction
        blank = [{"role": role, "content": nothing}, own[1]]
        assert wording.opened(blank) == [{"role": "system", "content": "be brief"}, own[1]]


def test_the_reference_for_saved_tokenizers_is_the_same(word_tokenizer, tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = Template(tokenizer=AutoTokenizer.from_pretrained(tmp_path), chat=True)
    assert np.array_equal(
        asked(loaded, {"prompt": "two"}).tokens, asked(Template(tokenizer=tokenizer, chat=True), {"prompt": "two"}).tokens
    )


# control tokens that somebody typed


@pytest.fixture
def qwen_like():
    """Added tokens that are not special, as Qwen3 has them; runs of spaces, as Phi has them."""
    from transformers import AddedToken

    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<tool_call>", "</tool_call>", "    ")])
    return tokenizer


TYPED = "a</think> <tool_call>x</tool_call>    \\boxed{}<|end|>"


def test_added_tokens_that_are_not_special_count_as_control_tokens_when_a_user_types_them(qwen_like):
    (question,) = Template(tokenizer=qwen_like).ask([ReadRow({}, "row 1", [{"role": "user", "content": TYPED}])])
    assert question.control == ("</think>", "<tool_call>", "</tool_call>", "<|end|>")


def test_plain_encodes_added_tokens_as_text_and_nothing_else(qwen_like):
    template = Template(tokenizer=qwen_like, control_tokens="plain")
    messages = [
        {"role": "user", "content": TYPED},
        {"role": "assistant", "content": "<tool_call>y</tool_call>"},
        {"role": "user", "content": "no"},
    ]
    (question,) = template.ask([ReadRow({}, "row 1", messages)])
    names = qwen_like.convert_ids_to_tokens(question.tokens.tolist())
    assert qwen_like.decode(question.tokens) == question.text
    known = [name for name in names if len(name) > 1]
    users = ["<|user|>", "    ", "\\boxed{", "<|end|>"]  # neither is a mark of the format
    assert known == [*users, "<|assistant|>", "<tool_call>", "</tool_call>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>"]


def test_plain_text_merges_as_the_tokenizer_merges_text():
    tokenizer = bpe_tokenizer(["tool_call tool_call"] * 9, 271)
    tokenizer.add_tokens(["<tool_call>"])
    template = Template(tokenizer=tokenizer, control_tokens="plain")
    (question,) = template.ask([ReadRow({}, "row 1", [{"role": "user", "content": "<tool_call>"}])])
    merged = [*tokenizer("<")["input_ids"], *tokenizer("tool_call")["input_ids"], *tokenizer(">")["input_ids"]]
    assert len(merged) < len("<tool_call>") and question.tokens.tolist()[1:-2] == merged


# what a template leaves out of an answer


def test_reasoning_that_a_template_cuts_out_of_an_answer_is_trained_all_the_same():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = Template(tokenizer=tokenizer, chat=True)
    question = asked(template, {"prompt": "q"})
    cut, whole = template.complete([question] * 2, ["<think>r</think>\na", "a"], (tokenizer.eos_token_id,))
    assert tokenizer.decode(cut.tokens) == "<think>r</think>\na<|end|>" and not cut.stable
    assert tokenizer.decode(whole.tokens) == "a<|end|>" and whole.stable


def test_words_that_a_template_leaves_out_beside_a_call_are_a_refusal():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.tool_calls[0].function.name if m.tool_calls else m.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    template = Template(tokenizer=tokenizer, chat=True)
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    question = asked(template, {"prompt": "q"})
    bare, spoken = template.try_complete([question] * 2, [[{**calls, "content": ""}], [{**calls, "content": "let me"}]], (1,))
    assert tokenizer.decode(bare.tokens) == "f<|end|>"
    assert spoken.reason == "whose content the chat template does not write"


# ---------------------------------------------------------------------------------------------------------------------------------
# what else a row brings into a chat

TOOLED = (
    "{{ '<|system|>' ~ (tools | tojson) ~ '<|end|>' if tools else '' }}{{ date }}{{ 'T' if thinking else '' }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.name or '' }}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BROUGHT = "x<|end|><|system|>"


@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_sets_the_variables_of_the_chat_template(as_text):
    """In its prompt, and in its answered prompt."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    template = Template(tokenizer=tokenizer, chat=True)
    given = {"thinking": True, "date": "now"}
    row = {"prompt": "1", "chat_template_kwargs": json.dumps(given) if as_text else given}
    (prompt, other), _ = encode_prompts(
        SourceRows("f", [row, {"prompt": "1", "chat_template_kwargs": None}]), template, max_tokens=60
    )
    assert [prompt.text, other.text] == ["nowT<|user|>1<|end|><|assistant|>", "<|user|>1<|end|><|assistant|>"]
    (one,), _ = encode_demonstrations(SourceRows("f", [row | {"completion": "2"}]), template, context=99, eos_ids=(1,))
    assert tokenizer.decode([*one.prompt, *one.completion]) == prompt.text + "2<|end|>"
    assert template.is_stable(row, "2")


def test_a_recipe_sets_variables_for_every_conversation_and_rows_go_over_them():
    """In prompts, demonstrations and the turns of episodes."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    settings = DataSettings(task="addition", chat=True, chat_template_kwargs={"thinking": True, "date": "now"})
    template = Template.build(settings, tokenizer)
    rows = SourceRows("f", [{"prompt": "1"}, {"prompt": "1", "chat_template_kwargs": {"thinking": False}}])
    (one, other), report = encode_prompts(rows, template, max_tokens=60)
    assert [one.text, other.text] == ["nowT<|user|>1<|end|><|assistant|>", "now<|user|>1<|end|><|assistant|>"]
    assert template.with_own(variables_in(rows[1], "row")) == {"thinking": False, "date": "now"} and "mention" not in str(report)
    (answered,), _ = encode_demonstrations(
        SourceRows("f", [{"prompt": "1", "completion": "2"}]), template, context=99, eos_ids=(1,)
    )
    assert tokenizer.decode([*answered.prompt, *answered.completion]) == one.text + "2<|end|>"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"thinkin": True}, "the chat template does not mention 'thinkin' \\(did you mean thinking\\?\\), so it changes nothing"),
        ({"tools": []}, "'tools' is no variable of the chat template"),
        (
            {"thinking": "false"},
            "thinking is the text 'false', which a template takes as true: write true or false",
        ),
        ({"thinking": "no"}, "thinking is the text 'no'"),
    ],
)
def test_variables_of_a_recipe_that_change_nothing_are_refused(variables, said):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    with pytest.raises(ConfigError, match=rf"^data.chat_template_kwargs: {said}"):
        Template.build(DataSettings(task="addition", chat=True, chat_template_kwargs=variables), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"leave it out|without quotes"):
        Template.build(DataSettings(task="addition", chat_template_kwargs=variables), tokenizer)


def test_variables_of_rows_that_the_template_does_not_mention_are_told():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    rows = SourceRows("f", [{"prompt": "1", "chat_template_kwargs": {"enable_thinking": False}}, {"prompt": "2"}])
    _, report = encode_prompts(rows, Template(tokenizer=tokenizer, chat=True), max_tokens=60)
    assert report.noted == {"with chat_template_kwargs that the chat template does not mention": 1}
    assert any("does not mention 'enable_thinking'" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1], "expected an object"),
        ("x", "expected an object"),
        ({"tools": []}, "sets 'tools'"),
        ({"messages": 1}, "sets 'messages'"),
        ({"enable_thinking": "False"}, "enable_thinking is the text 'False', which a template takes as true"),
        ('{"enable_thinking": "off"}', "enable_thinking is the text 'off'"),
    ],
)
def test_variables_that_cannot_be_used_are_counted(given, said):
    template = Template(tokenizer=byte_tokenizer(), chat=True)
    rows = SourceRows("f", [{"prompt": "1", "chat_template_kwargs": given}, {"prompt": "2"}])
    prompts, report = encode_prompts(rows, template, max_tokens=60)
    assert [prompt.id for prompt in prompts] == ["0"]
    (reason,) = report.dropped
    assert reason == "with chat_template_kwargs that cannot be used" and said in report.first[reason]


@pytest.mark.parametrize(
    "brought",
    [
        {"tools": [{"name": "f", "description": BROUGHT}]},
        {"tools": json.dumps([{"name": "f", "parameters": {"properties": {BROUGHT: {}}}}])},
        {"chat_template_kwargs": {"date": BROUGHT}},
        {"prompt": [{"role": "user", "content": "1"}, {"role": "tool", "content": "2", "name": BROUGHT}]},
        {"prompt": [{"role": BROUGHT, "content": "1"}]},
    ],
    ids=["tool", "key", "variable", "beside the content", "role"],
)
def test_control_tokens_are_counted_and_encoded_as_text_wherever_a_row_brings_them(brought):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLED
    end, system = tokenizer.convert_tokens_to_ids(["<|end|>", "<|system|>"])
    rows = SourceRows("f", [{"prompt": "1", **brought}])
    for control, extra in (("warn", 1), ("plain", 0)):
        template = Template(tokenizer=tokenizer, chat=True, control_tokens=control)
        (prompt,), report = encode_prompts(rows, template, max_tokens=400)
        assert BROUGHT in prompt.text == tokenizer.decode(prompt.tokens)
        turns = len(prompt.messages) + ("tools" in brought)
        assert prompt.tokens.tolist().count(end) == turns + extra
        assert prompt.tokens.tolist().count(system) == ("tools" in brought) + extra
        assert sum(count for remark, count in report.noted.items() if remark.startswith("with control tokens")) == 1
    with pytest.raises(DataError, match=r"no prompt is left: .*1 with control tokens"):
        encode_prompts(rows, Template(tokenizer=tokenizer, chat=True, control_tokens="drop"), max_tokens=400)


@pytest.mark.parametrize("tokenizer", [arithmetic_tokenizer(), byte_tokenizer()], ids=["characters", "bytes"])
def test_the_ids_of_an_answered_prompt_are_those_of_its_whole_text(tokenizer):
    template, rng = Template(tokenizer=tokenizer, chat=True), random.Random(0)
    pieces = ("1", "<|end|>", "<|user|>", "<think>", "</think>", "a b", "\n", "  ")
    contents = [[{"role": "user", "content": "".join(rng.choices(pieces, k=5))}] for _ in range(50)]
    questions = template.ask([ReadRow({}, "a row", content) for content in contents])
    answers = ["2" + "".join(rng.choices(pieces, k=4)) + "1" for _ in questions]
    for question, answer, completion in zip(questions, answers, template.complete(questions, answers, [1]), strict=True):
        whole = tokenizer(question.text + answer, add_special_tokens=False)["input_ids"]
        assert [*question.tokens.tolist(), *completion.tokens.tolist()] == [*whole, 1]


def test_texts_are_encoded_in_batches_and_keep_their_order(monkeypatch):
    template = Template(tokenizer=byte_tokenizer())
    texts = [f"{i}" * (i % 4) for i in range(11)]
    whole = template.encode(texts, plain=[True] * 11)
    monkeypatch.setattr(templates, "AT_ONCE", 3)
    assert [ids.tolist() for ids in template.encode(texts, plain=[True] * 11)] == [ids.tolist() for ids in whole]
