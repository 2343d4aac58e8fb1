"""Preference data in exactly the forms in which they are published: columns, types and turns as there."""

import pytest
from encoders import encode_pairs

from groupwise.config.settings import DataSettings
from groupwise.data.encoding import PAIRS
from groupwise.data.load import load_records, load_texts
from groupwise.data.preference_formats import as_pairs
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.data.wording import Wording
from groupwise.errors import ConfigError, DataError

TOKENIZER = byte_tokenizer()
ASKED = [{"role": "user", "content": "1+2"}]
CHAT = "<|user|>1+2<|end|><|assistant|>"


def told(rows, *, chat=True, format=None, context=2000):
    """(prompt, chosen, rejected) of each pair as text, and the report."""
    template = Template(tokenizer=TOKENIZER, chat=chat, format=format)
    pairs, report = encode_pairs(SourceRows("f.jsonl", rows), template, context=context, eos_ids=(TOKENIZER.eos_token_id,))
    return [tuple(TOKENIZER.decode(side) for side in (pair.prompt, pair.chosen, pair.rejected)) for pair in pairs], report


def spoken(text):
    return [*ASKED, {"role": "assistant", "content": text}]


HH = {
    "chosen": "\n\nHuman: 1+1\n\nAssistant: 2\n\nHuman: 1+2\n\nAssistant: 3",
    "rejected": "\n\nHuman: 1+1\n\nAssistant: 2\n\nHuman: 1+2\n\nAssistant: No.",
}


def test_hh_rlhf_with_chat_becomes_turns():
    ((prompt, chosen, rejected),), _ = told([HH])
    assert prompt == "<|user|>1+1<|end|><|assistant|>2<|end|><|user|>1+2<|end|><|assistant|>"
    assert (chosen, rejected) == ("3<|end|>", "No.<|end|>")


def test_hh_rlhf_without_chat_keeps_its_own_text():
    ((prompt, chosen, rejected),), _ = told([HH], chat=False)
    assert prompt == "\n\nHuman: 1+1\n\nAssistant: 2\n\nHuman: 1+2\n\nAssistant:"
    assert prompt + chosen == HH["chosen"] + "<|end|>" and prompt + rejected == HH["rejected"] + "<|end|>"


@pytest.mark.parametrize("chat", [True, False])
def test_hh_rlhf_as_it_is_with_its_odd_rows(chat):
    rows = [
        HH,
        {"chosen": HH["chosen"], "rejected": HH["chosen"]},
        {"chosen": HH["chosen"], "rejected": "\n\nHuman: 1+2\n\nAssistant: 3"},
        {"chosen": HH["chosen"] + "\n\nHuman: thanks", "rejected": HH["rejected"]},
        {"chosen": HH["chosen"], "rejected": HH["rejected"].replace("No.", "")},
        {"chosen": None, "rejected": HH["rejected"]},
        {"chosen": HH["chosen"], "rejected": "no conversation"},
        {"chosen": HH["chosen"]},
    ]
    pairs, report = told(rows, chat=chat)
    assert (len(pairs), report.rows, report.kept) == (1, 8, 1)
    assert report.dropped == {
        "with chosen = rejected": 1,
        "whose conversations differ before the last turn": 1,
        "that do not end with a turn of the assistant": 1,
        "with an empty completion": 1,
        "that cannot be read": 1,
        "in which one side is no conversation": 1,
        "without rejected": 1,
    }
    assert "1 that cannot be read (first: f.jsonl row 6: no column 'prompt'" in str(report)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            {"prompt": "1+2", "prompt_id": "a1", "chosen": spoken("3"), "rejected": spoken("No."), "messages": spoken("3")}
            | {"score_chosen": 8.5, "score_rejected": 3.0},
            id="ultrafeedback_binarized",
        ),
        pytest.param(
            {"chosen": spoken("3"), "rejected": spoken("No."), "score_chosen": 8.5, "score_rejected": 3.0}, id="without a prompt"
        ),
        pytest.param({"prompt": ASKED, "chosen": spoken("3")[1:], "rejected": spoken("No.")[1:]}, id="TRL, conversational"),
        pytest.param({"prompt": "1+2", "chosen": "3", "rejected": "No."}, id="TRL, standard"),
    ],
)
def test_one_row_holds_the_pair(row):
    assert told([row])[0] == [(CHAT, "3<|end|>", "No.<|end|>")]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": "1", "chosen": "a"}, "rejected"),
        ({"chosen": "a", "rejected": "b"}, "prompt"),
        ({"prompt": "1", "completion": "a", "label": True}, "chosen"),
        ({"prompt": "1", "response_1": "a", "response_2": "b", "preference_strength": 1}, "chosen"),
        ({"context": ASKED, "response1": "a", "response2": "b", "overall_preference": 1}, "chosen"),
        ({"prompt": "1", "response": "a", "helpfulness": 4}, "chosen"),
        ({"instruction": "1", "completions": [{"response": "a", "overall_score": 9}]}, "chosen"),
        ({"question": "1", "text": "a"}, "chosen"),
    ],
)
def test_a_source_in_no_form_names_the_column_that_is_missing(row, column):
    with pytest.raises(DataError, match=rf"f\.jsonl row 1: no column '{column}'; there are: ") as error:
        told([row])
    assert ("docs/preferences.md makes pairs of scores" in str(error.value)) == (column != "prompt")


def test_rows_that_hold_no_pair_are_counted_never_the_end():
    pair = {"prompt": "1+2", "chosen": "3", "rejected": "No."}
    rows = [
        {"prompt": None, "chosen": "3", "rejected": "No."},
        {"prompt": "1+2", "chosen": 5, "rejected": "No."},
        {"prompt": "1+2", "chosen": [{"role": "user", "content": "x"}], "rejected": "No."},
        {"prompt": [{"role": "user"}], "chosen": "3", "rejected": "No."},
        pair | {"margin": "large"},
        pair | {"margin": 10**400},
        pair | {"margin": 10**20},
    ]
    pairs, report = told(rows)
    assert len(pairs) == 1 and report.dropped == {"that cannot be read": 6}


@pytest.mark.slow
def test_messages_that_the_chat_template_refuses_are_counted():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    twice = [*ASKED, *ASKED]
    rows = [{"prompt": ASKED, "chosen": "3", "rejected": "4"}, {"prompt": twice, "chosen": "3", "rejected": "4"}]
    template = Template(tokenizer=tokenizer, chat=True)
    pairs, report = encode_pairs(SourceRows("f.jsonl", rows), template, context=99, eos_ids=(tokenizer.eos_token_id,))
    assert len(pairs) == 1 and report.dropped == {"refused by the chat template": 1}
    assert "f.jsonl row 2: the chat template refuses these messages: roles must alternate" in str(report)


def test_a_format_makes_the_prompt_from_other_columns():
    rows = [{"question": "1+2", "chosen": "3", "rejected": "No."}]
    assert told(rows, chat=False, format="Q: {question} A:")[0] == [("Q: 1+2 A:", "3<|end|>", "No.<|end|>")]
    with pytest.raises(ConfigError, match=r"set data\.template: alpaca"):
        told([{"instruction": "1", "chosen": "2", "rejected": "3"}], chat=False)


def test_reading_twice_changes_nothing():
    once = as_pairs(SourceRows("f", [HH]), Wording(chat=True))
    assert list(once) == list(as_pairs(once, Wording(chat=True)))


def test_held_out_parts_of_published_data_count_every_row_once(write):
    rows = [{side: text.replace("1+2", f"1+{i}") for side, text in HH.items()} for i in range(100)]
    rows += [{"chosen": HH["chosen"], "rejected": "\n\nHuman: ?\n\nAssistant: 3"}] * 3
    path = write(rows)
    data = load_records(
        PAIRS, DataSettings(path=path, eval_fraction=0.3), TOKENIZER, context=999, eos_ids=(TOKENIZER.eos_token_id,), seed=0
    )
    assert data.report.rows + data.held_out_report.rows == 103 and data.held_out_report.kept == len(data.held_out) > 10
    assert data.report.dropped == {"whose conversations differ before the last turn": 3} and not data.held_out_report.dropped
    texts = list(load_texts(DataSettings(path=path, eval_fraction=0.3), seed=0))
    assert sum("Human" in text for text in texts) == len(data.train)
    other = load_records(
        PAIRS, DataSettings(path=path, eval_path=write(rows[:50], "e.jsonl")), TOKENIZER, context=999, eos_ids=(1,), seed=0
    )
    assert (other.overlap, other.report.rows) == (50, 53)


# the prompt and what the sides hold of it


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "s"}
GO_ON = [assistant("a"), user("r")]
LONG = "<|user|>q<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>"


def sides(*before):
    return {"chosen": [*before, assistant("x")], "rejected": [*before, assistant("y")]}


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": [SYSTEM, user("q")], **sides(*GO_ON)}, "<|system|>s<|end|>" + LONG),
        ({"prompt": "q", **sides(*GO_ON)}, LONG),
        ({"prompt": "q", **sides(user("q"), *GO_ON)}, LONG),
        ({"prompt": [SYSTEM, user("q")], **sides(user("q"), *GO_ON)}, "<|system|>s<|end|>" + LONG),
        ({"prompt": [user("q")], **sides(SYSTEM, user("q"), *GO_ON)}, "<|system|>s<|end|>" + LONG),
        ({"prompt": [user("q"), assistant("a")], **sides(user("r"))}, LONG),
        ({"prompt": [user("q"), *GO_ON], **sides(user("r"))}, LONG),
        ({"messages": [user("q"), *GO_ON, assistant("x")], **sides(user("q"), *GO_ON)}, LONG),
        ({"prompt": None, **sides(user("q"), *GO_ON)}, LONG),
        ({"instruction": "q", **sides(*GO_ON)}, LONG),
    ],
)
def test_a_prompt_and_what_its_sides_begin_with_are_one_conversation(row, prompt, chat):
    assert told([row], chat=chat)[0] == [(prompt, "x<|end|>", "y<|end|>")]
    once = as_pairs(SourceRows("f", [row]), Wording(chat=chat))
    assert list(once) == list(as_pairs(once, Wording(chat=chat)))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "other", **sides(user("q"))}, "whose prompt is another than that of its conversation"),
        ({"prompt": [SYSTEM, user("q")], **sides({"role": "system", "content": "t"}, user("q"))}, "whose prompt is another"),
        ({"prompt": "q", "chosen": [*GO_ON, assistant("x")], "rejected": "y"}, "whose conversations differ before the last turn"),
        ({"prompt": "q", **sides(user("q"), assistant("a"))}, "with two turns of the assistant in sequence"),
        ({"prompt": "q", "chosen": [assistant([{"type": "image"}])], "rejected": "y"}, "with content that is no text"),
    ],
)
def test_what_is_no_pair_of_one_prompt_is_counted_by_reason(row, reason):
    _, report = told([{"prompt": "1", "chosen": "2", "rejected": "3"}, row])
    ((found, count),) = report.dropped.items()
    assert found.startswith(reason) and count == 1 and "f.jsonl row 2" in report.first[found]
    with pytest.raises(DataError, match=f"(no pair is left|0 of 1 row can be used): .*1 {reason}"):
        told([row])


def test_sides_of_different_length_that_hold_the_same_prompt_are_a_pair():
    row = {"prompt": [user("q")], "chosen": [assistant("x")], "rejected": [user("q"), assistant("y")]}
    assert told([row])[0] == [("<|user|>q<|end|><|assistant|>", "x<|end|>", "y<|end|>")]


def test_a_call_and_text_parts_are_read_on_both_sides():
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = {"prompt": "q", "chosen": [assistant("x", **call)], "rejected": [assistant([{"type": "text", "text": "x"}])]}
    ((_, chosen, rejected),), _ = told([row])
    assert chosen == 'x<tool_call>{"name": "f", "arguments": {}}</tool_call><|end|>' and rejected == "x<|end|>"


def test_hh_strings_beside_a_prompt_are_not_trained_as_one_completion():
    rows = [{**HH, "prompt": "1+1"}, {**HH, "prompt": HH["chosen"][: HH["chosen"].rindex("Assistant:") + 10]}]
    for chat in (True, False):
        assert told(rows, chat=chat)[0] == told([HH, HH], chat=chat)[0]
        assert told([HH, {**HH, "prompt": "another"}], chat=chat)[1].dropped == {
            "whose prompt is another than that of its conversation": 1
        }
    before = {"prompt": "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant:", "chosen": " x", "rejected": " y"}
    assert told([before])[0] == [(LONG, " x<|end|>", " y<|end|>")]


def test_conversations_beside_a_format_are_read_or_counted():
    rows = [{"prompt": "q", **sides(user("q"))}, {"prompt": "q", **sides(user("q"), *GO_ON)}]
    pairs, report = told(rows, chat=False, format="Q: {prompt} A:")
    assert pairs == [("Q: q A:", "x<|end|>", "y<|end|>")]
    assert report.dropped == {"with several turns beside data.template": 1}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_of_the_sides_beside_a_format_is_kept_or_counted(role, write):
    own = {"role": role, "content": "own"}
    row = {"prompt": "q", **sides(own, user("q"))}
    template = Template(tokenizer=TOKENIZER, chat=True, format="Q: {prompt}", system="recipe")
    (pair,), report = encode_pairs(SourceRows("f.jsonl", [row]), template, context=200, eos_ids=(TOKENIZER.eos_token_id,))
    prompt = f"<|{role}|>own<|end|><|user|>Q: q<|end|><|assistant|>"
    assert TOKENIZER.decode(pair.prompt) == prompt and TOKENIZER.decode(pair.chosen) == "x<|end|>" and not report.noted
    once = as_pairs(SourceRows("f", [row]), template)
    assert list(once) == list(as_pairs(once, template))
    settings = DataSettings(path=write([row]), chat=True, template="Q: {prompt}", system="recipe")
    (loaded,) = load_records(PAIRS, settings, TOKENIZER, context=200, eos_ids=(TOKENIZER.eos_token_id,), seed=0).train
    assert TOKENIZER.decode(loaded.prompt) == prompt
    pairs, report = told([{"prompt": "r", "chosen": "3", "rejected": "4"}, row], chat=False, format="Q: {prompt}")
    assert pairs[1] == ("Q: q", "x<|end|>", "y<|end|>")
    assert "kept: 1 whose system message data.template does not write (first: f.jsonl row 2)" in str(report)


# rows that are damaged


@pytest.mark.parametrize("parts", [None, 0.5])
def test_a_file_whose_rows_are_all_left_out_says_why_with_counts(write, parts):
    path = write([{"prompt": "q", **sides(user("other"))}] * 2 + [{"chosen": "x"}])
    settings = DataSettings(path=path, chat=True, **({} if parts is None else {"eval_fraction": parts}))
    with pytest.raises(DataError, match=r"0 of 3 rows can be used: 2 whose prompt is another .*line 1.*, 1 without rejected"):
        load_records(PAIRS, settings, TOKENIZER, context=999, eos_ids=(1,), seed=0)


def test_damaged_lines_are_counted_with_the_first_of_them(write):
    good = '{"prompt": "q", "chosen": "x", "rejected": "y"}\n'
    path = write(good + '{"prompt": "q", "cho\n' + good + '{"prompt": "\\ud83d", "chosen": "x", "rejected": "y"}\n')
    data = load_records(PAIRS, DataSettings(path=path), TOKENIZER, context=999, eos_ids=(1,), seed=0)
    assert (data.report.rows, data.report.kept, data.report.dropped) == (4, 2, {"that are damaged": 2})
    assert "line 2: not JSON: the line is cut off" in data.report.first["that are damaged"]
