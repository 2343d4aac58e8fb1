import json

import numpy as np
import pytest

from groupwise.config.live_objects import Live
from groupwise.config.settings import DataSettings
from groupwise.data import sources
from groupwise.data.encoding import DEMONSTRATIONS, PAIRS, columns_of, visit
from groupwise.data.load import load_data, load_records, load_texts
from groupwise.data.sources import SourceRows
from groupwise.data.split import part_of
from groupwise.data.tokenizers import byte_tokenizer, make_tokenizer
from groupwise.errors import ConfigError, DataError

ROWS = [{"prompt": f"{i}+{i}", "completion": str(2 * i), "answer": str(2 * i)} for i in range(200)]
SIZES = {"context": 64, "max_new_tokens": 16, "seed": 0}


def test_the_held_out_share_is_the_same_rows_for_every_objective_seed_and_wrapping(write, tokenizer):
    path = write(ROWS)
    plain = load_data(DataSettings(path=path, eval_fraction=0.2), tokenizer, **SIZES)
    chat = load_data(DataSettings(path=path, eval_fraction=0.2, chat=True), tokenizer, **SIZES | {"seed": 5})
    taught = load_records(DEMONSTRATIONS, DataSettings(path=path, eval_fraction=0.2), tokenizer, context=64, eos_ids=(1,), seed=3)
    expected = [row["answer"] for row in ROWS if part_of(row["prompt"], {"held out": 0.2}) == "held out"]
    assert 20 < len(expected) < 60
    assert [prompt.row["answer"] for prompt in plain.held_out] == expected == [prompt.row["answer"] for prompt in chat.held_out]
    assert [tokenizer.decode(one.prompt) for one in taught.held_out] == [prompt.text for prompt in plain.held_out]
    assert len(plain.train) + len(plain.held_out) == len(taught.train) + len(taught.held_out) == 200
    assert not {prompt.text for prompt in plain.train} & {prompt.text for prompt in plain.held_out}
    assert plain.held_out_report.rows == len(expected)


@pytest.mark.parametrize(("longest", "rows"), [(None, 3), (5, 2), (4, 1), (64, 3)])
def test_rows_to_learn_from_may_be_shorter_than_the_context_and_never_longer(longest, rows, write, tokenizer):
    path = write([{"prompt": prompt, "completion": "7"} for prompt in ("1+1=", "1=", "1+2+3+4=")])
    limit = longest and longest + 1  # a completion is 7 and its end
    settings = DataSettings(path=path, max_tokens=limit)
    data = load_records(DEMONSTRATIONS, settings, tokenizer, context=10, eos_ids=(1,))
    assert len(data.train) == rows
    assert data.report.dropped == ({f"longer than {limit} tokens (data.max_tokens)": 3 - rows} if rows < 3 else {})


@pytest.mark.parametrize("prompt", ["", [{"role": "system", "content": "1"}]])
def test_demonstrations_are_held_out_by_the_prompt_that_is_rendered(prompt, write, tokenizer):
    def row(i):
        said = [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "1"}]
        return {"prompt": prompt, "messages": said}

    settings = DataSettings(path=write([row(i % 100) for i in range(200)]), eval_fraction=0.5)
    data = load_records(DEMONSTRATIONS, settings, tokenizer, context=64, eos_ids=(1,), seed=0)
    train, held_out = ({tokenizer.decode(one.prompt) for one in part} for part in (data.train, data.held_out))
    assert not train & held_out and len(train | held_out) == 100 and 30 < len(held_out) < 70
    texts = "".join(load_texts(settings, 0))
    assert texts.count("1") < 250, "what is held out is not read for a tokenizer"


def test_prompts_that_are_held_out_elsewhere_leave_training_and_are_counted(write, tokenizer):
    train, test = write(ROWS, "train.jsonl"), write([*ROWS[:30], {"prompt": "7+8", "answer": "15"}], "test.jsonl")
    data = load_data(DataSettings(path=train, eval_path=test), tokenizer, **SIZES)
    assert (data.overlap, len(data.train), len(data.held_out)) == (30, 170, 31)
    assert "30 further rows left out of training" in str(data)
    limited = load_data(DataSettings(path=train, eval_path=test, eval_limit=10, limit=50), tokenizer, **SIZES)
    assert (limited.overlap, len(limited.train), len(limited.held_out)) == (10, 40, 10)


def test_every_visit_of_a_row_has_its_own_id_and_held_out_ids_meet_none_of_them(write, tokenizer):
    data = load_data(DataSettings(path=write(ROWS), eval_fraction=0.2), tokenizer, **SIZES)
    ids = [visit(prompt, epoch).id for epoch in range(3) for prompt in data.train] + [prompt.id for prompt in data.held_out]
    assert len(set(ids)) == len(ids) == 3 * len(data.train) + len(data.held_out)
    assert all(prompt.id.startswith("eval/") for prompt in data.held_out)


def test_what_is_held_out_is_the_same_without_the_training_prompts(write, tokenizer):
    for settings in (
        DataSettings(path=write(ROWS), eval_fraction={"test": 0.2, "validation": 0.2}, chat=True),
        DataSettings(task="addition", eval_limit=20, limit=300),
    ):
        whole, part = (load_data(settings, tokenizer, **SIZES, train=train) for train in (True, False))
        assert len(whole.train) > len(part.train) == 0
        assert [prompt.id for prompt in whole.held_out + whole.validation] == [
            prompt.id for prompt in part.held_out + part.validation
        ]
        for a, b in zip(whole.held_out + whole.validation, part.held_out + part.validation, strict=True):
            assert (a.text, dict(a.row)) == (b.text, dict(b.row))
            assert (a.tokens == b.tokens).all()


def test_columns_are_renamed_in_both_files(write, tokenizer):
    rows = [{"question": "1+1", "gold": "2"}]
    path, held_out = write(rows, "a.jsonl"), write([{"question": "2+2", "gold": "4"}], "b.jsonl")
    settings = DataSettings(path=path, eval_path=held_out, columns={"prompt": "question", "answer": "gold"})
    data = load_data(settings, tokenizer, **SIZES)
    assert data.train[0].row == {"prompt": "1+1", "answer": "2"}
    assert data.held_out[0].row == {"prompt": "2+2", "answer": "4"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of path .* and task"),
        ({"path": "x.jsonl", "task": "addition"}, "exactly one of path"),
        ({"task": "addition", "eval_fraction": 0.1}, "has a held-out set of its own"),
        ({"path": "x", "eval_path": "y", "eval_fraction": 0.1}, r"eval_fraction cannot be used with data\.eval_path"),
        ({"path": "x.jsonl", "task_args": {"digits": 3}}, "task_args are the arguments of a task"),
        ({"task": "adition"}, r"no built-in task 'adition' \(did you mean addition\?\); there are: addition, sums"),
        ({"task": "addition", "task_args": {"digit": 3}}, "has no argument 'digit'; it takes: digits, blurt, slip"),
        ({"task": "addition", "task_args": {"digits": "3"}}, "digits must be an integer from 1 to 12, got '3'"),
        ({"task": "addition", "task_args": {"blurt": 1.5}}, "blurt must be a number from 0 to 1, got 1.5"),
    ],
)
def test_settings_that_contradict_each_other(settings, message, tokenizer):
    with pytest.raises(ConfigError, match=message):
        load_data(DataSettings(**settings), tokenizer, **SIZES)


def test_d3_empty_data_and_a_held_out_share_of_nothing(write, tokenizer):
    with pytest.raises(DataError, match="is empty"):
        load_data(DataSettings(path=write(b"")), tokenizer, **SIZES)
    with pytest.raises(DataError, match="holds out no row of 1"):
        load_data(DataSettings(path=write([{"prompt": "x"}]), eval_fraction=0.01), tokenizer, **SIZES)
    with pytest.raises(DataError, match=r"max_new_tokens is 64 and the model's context is 64"):
        load_data(DataSettings(path=write(ROWS)), tokenizer, context=64, max_new_tokens=64, seed=0)


def test_no_row_left_says_why_and_what_to_do(write, tokenizer):
    path = write([{"prompt": "what is this?"}, {"prompt": "and that?"}])
    with pytest.raises(DataError, match=r"the prompts of all 2 rows of .* are held out by data\.eval_path; .* data\.eval_fraction"):
        load_data(DataSettings(path=path, eval_path=path), tokenizer, **SIZES)
    with pytest.raises(DataError, match=r"2 longer than 3 tokens.*set data\.too_long to truncate_left"):
        load_data(DataSettings(path=path, max_prompt_tokens=3), tokenizer, **SIZES)
    with pytest.raises(
        DataError, match=r"no column 'question'; there are: prompt \(data\.columns: \{prompt: YOURS\} renames one\)"
    ):
        load_data(DataSettings(path=path, columns={"prompt": "question"}), tokenizer, **SIZES)


@pytest.mark.parametrize("task", ["addition", "sums", "arithmetic"])
def test_built_in_tasks_give_prompts_held_out_prompts_and_demonstrations(task, tokenizer):
    settings = DataSettings(task=task, chat=True, limit=50, eval_limit=20)
    data = load_data(settings, tokenizer, context=128, max_new_tokens=64, seed=0)
    assert (len(data.train), len(data.held_out)) == (50, 20)
    assert all("answer" in prompt.row for prompt in data.train + data.held_out)
    taught = load_records(DEMONSTRATIONS, settings, tokenizer, context=128, eos_ids=(tokenizer.eos_token_id,), seed=0)
    assert (len(taught.train), taught.held_out) == (50, ())
    assert tokenizer.decode(taught.train[0].completion).endswith("}<|end|>")
    held_out = {prompt.text for prompt in data.held_out}
    assert not held_out & {tokenizer.decode(one.prompt) for one in taught.train}
    with pytest.raises(ConfigError, match="has no preference pairs"):
        load_records(PAIRS, settings, tokenizer, context=128, eos_ids=(1,), seed=0)


def test_texts_for_a_tokenizer_are_the_training_rows_of_any_form(write):
    rows = [
        {"prompt": [{"role": "user", "content": "what"}], "chosen": "good", "rejected": "bad", "n": 3},
        {"prompt": "why", "chosen": [{"role": "assistant", "content": "so"}], "rejected": None},
    ]
    assert list(load_texts(DataSettings(path=write(rows)), seed=0)) == ["what", "good", "bad", "why", "so"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "what"}]}]
    assert list(load_texts(DataSettings(path=write([{"prompt": parts}])), seed=0)) == ["what"]
    taught = {text for text in load_texts(DataSettings(path=write(ROWS), eval_fraction=0.2), seed=0) if "+" in text}
    assert taught == {row["prompt"] for row in ROWS if part_of(row["prompt"], {"held out": 0.2}) == "train"}
    assert len(make_tokenizer("bpe:300", load_texts(DataSettings(task="addition", limit=200), seed=0))) == 300


def alpaca(count):
    """Rows of an instruction file, with chosen and rejected answers; every fifth has an input."""
    rows = []
    for i in range(count):
        given = f"{i} kilometers" if i % 5 == 0 else ""
        output = f"{i} kilometers is {1000 * i} meters."
        sides = {"output": output, "chosen": output, "rejected": f"Obviously {output}"}
        rows.append({"instruction": f"Convert {i} to meters.", "input": given, **sides})
    return rows


def test_a_file_of_preferences(write):
    rows = alpaca(200)
    for row in rows[::40]:
        row["rejected"] = row["chosen"]
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    settings = DataSettings(path=write(rows, "pairs.json"), template="alpaca", eval_fraction=0.2)
    data = load_records(PAIRS, settings, tokenizer, context=1024, eos_ids=(end,), seed=0)
    reports = (data.report, data.held_out_report)
    assert sum(report.rows for report in reports) == 200
    assert sum(report.dropped.get("with chosen = rejected", 0) for report in reports) == 5
    assert sum(report.kept for report in reports) == 195 == len(data.train) + len(data.held_out)
    assert all(pair.chosen[-1] == end == pair.rejected[-1] for pair in data.train)
    assert all(np.count_nonzero(pair.chosen == end) == 1 for pair in data.train)


def test_a_file_of_instructions(write):
    path = write(alpaca(150), "instructions.json")
    tokenizer = byte_tokenizer()
    settings = DataSettings(path=path, template="alpaca", limit=100)
    data = load_records(DEMONSTRATIONS, settings, tokenizer, context=1024, eos_ids=(tokenizer.eos_token_id,), seed=0)
    assert data.report.kept == 100
    assert tokenizer.decode(data.train[45].completion) == "45 kilometers is 45000 meters.<|end|>"
    assert "### Input:" in tokenizer.decode(data.train[45].prompt) and "### Input:" not in tokenizer.decode(data.train[46].prompt)
    with pytest.raises(ConfigError, match=r"set data\.template: alpaca"):
        load_records(DEMONSTRATIONS, DataSettings(path=path), tokenizer, context=1024, eos_ids=(1,), seed=0)


def test_questions_in_the_form_of_gsm8k(gsm8k):
    settings = DataSettings(path=str(gsm8k / "test.jsonl"), columns={"prompt": "question"}, chat=True)
    data = load_data(settings, byte_tokenizer(), context=2048, max_new_tokens=256, seed=0)
    assert data.report.kept == 100
    assert all("####" in prompt.row["answer"] for prompt in data.train)


def test_the_preferences_task_gives_pairs_demonstrations_and_prompts_that_share_no_held_out_prompt():
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    settings = DataSettings(task="preferences", template="{instruction}\n{input}\n", limit=300, eval_limit=40)
    pairs = load_records(PAIRS, settings, tokenizer, context=512, eos_ids=(end,), seed=0)
    assert (len(pairs.train), len(pairs.held_out)) == (300, 40)
    prompts = load_data(settings, tokenizer, context=512, max_new_tokens=64, seed=0)
    taught = load_records(DEMONSTRATIONS, settings, tokenizer, context=512, eos_ids=(end,), seed=0)
    held_out = {tokenizer.decode(pair.prompt) for pair in pairs.held_out}
    assert held_out == {prompt.text for prompt in prompts.held_out}
    for part in (pairs.train, taught.train, prompts.train):
        assert not held_out & {tokenizer.decode(getattr(one, "prompt", getattr(one, "tokens", None))) for one in part}
    again, other = (load_records(PAIRS, settings, tokenizer, context=512, eos_ids=(end,), seed=seed) for seed in (0, 1))
    same = [[pair.chosen.tolist() for pair in data.train] for data in (pairs, again, other)]
    assert same[0] == same[1] != same[2]
    assert [pair.chosen.tolist() for pair in other.held_out] == [pair.chosen.tolist() for pair in pairs.held_out]


def test_two_held_out_parts_share_nothing_and_the_test_part_is_the_same_with_and_without_the_other(write, tokenizer):
    path = write(ROWS)
    one = load_data(DataSettings(path=path, eval_fraction=0.2), tokenizer, **SIZES)
    for shares in ({"test": 0.2, "validation": 0.1}, {"validation": 0.1, "test": 0.2}):
        both = load_data(DataSettings(path=path, eval_fraction=shares), tokenizer, **SIZES)
        assert [prompt.text for prompt in both.held_out] == [prompt.text for prompt in one.held_out]
        parts = [{prompt.text for prompt in part} for part in (both.train, both.validation, both.held_out)]
        assert all(parts) and sum(map(len, parts)) == len(set.union(*parts)) == 200
        assert both.watched == both.validation and one.watched == one.held_out
        assert all(prompt.id.startswith("eval/") for prompt in both.validation)
    texts = set(load_texts(DataSettings(path=path, eval_fraction={"test": 0.2, "validation": 0.1}), seed=0))
    assert not texts & (parts[1] | parts[2])
    with pytest.raises(DataError, match=r"eval_fraction 0\.001 holds out no row of 200"):
        load_data(DataSettings(path=path, eval_fraction={"test": 0.2, "validation": 0.001}), tokenizer, **SIZES)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_damaged_and_unreadable_rows_are_counted_and_the_others_used(write, tokenizer, name):
    good, half, bad = '{"prompt": "1+1", "completion": "2"}', '{"prompt": "\\ud83d", "completion": "2"}', '{"prompt": 5}'
    lines = [good, half, bad, good.replace("1+1", "3+3")]
    path = write("\n".join(lines) if name == "x.jsonl" else f"[{','.join(lines)}]", name)
    data = load_data(DataSettings(path=path), tokenizer, **SIZES)
    taught = load_records(DEMONSTRATIONS, DataSettings(path=path), tokenizer, context=64, eos_ids=(1,), seed=0)
    for found in (data, taught):
        assert (found.report.rows, found.report.kept) == (4, 2)
        assert found.report.dropped == {"that are damaged": 1, "that cannot be read": 1}
        assert " 2: half of a character" in found.report.first["that are damaged"]
    assert [prompt.id for prompt in data.train] == ["0", "1"]
    with pytest.raises(DataError, match=r"0 of 2 rows can be used: 2 that are damaged \(first: .* 1: half of a character"):
        load_data(DataSettings(path=write(f"{half}\n{half}\n", "y.jsonl")), tokenizer, **SIZES)


def test_a_row_without_a_renamed_column_is_counted(write, tokenizer):
    path = write([{"question": "1+1"}, {"other": "x"}])
    data = load_data(DataSettings(path=path, columns={"prompt": "question"}), tokenizer, **SIZES)
    assert data.report.dropped == {"without question": 1}
    held = load_data(
        DataSettings(path=path, columns={"prompt": "question"}, eval_path=write([{"question": "2+2"}], "e.jsonl")),
        tokenizer,
        **SIZES,
    )
    assert (held.report.rows, len(held.train), len(held.held_out)) == (2, 1, 1)


def test_a_row_of_another_task_may_lack_a_renamed_column(write, tokenizer):
    """Unless prompts are read from it; a column that no row has is named."""
    rows = [{"q": "1+1", "gold": "2"}, {"q": "2+2", "checks": "4"}, {"gold": "5"}]
    columns = {"prompt": "q", "answer": "gold", "tests": "checks"}
    data = load_data(DataSettings(path=write(rows), columns=columns), tokenizer, **SIZES)
    assert [dict(prompt.row) for prompt in data.train] == [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "tests": "4"}]
    assert columns_of(data.train) == ["prompt", "answer", "tests"]
    assert data.report.dropped == {"without q": 1}
    with pytest.raises(DataError, match=r"no column 'golds'.*data\.columns: \{answer: YOURS\} renames one"):
        load_data(DataSettings(path=write(rows), columns={"answer": "golds"}), tokenizer, **SIZES)


USER, ASSISTANT = {"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}


@pytest.mark.parametrize("indent", [None, 1])
def test_conversations_that_are_stored_as_json_text_are_conversations(write, tokenizer, indent):
    """As CSV, SQL and some Parquet files hold them, in every column that messages are read from, renamed or not."""

    def text(*messages):
        return json.dumps(messages, indent=indent)

    asked = "<|user|>1+2<|end|><|assistant|>"
    for row, columns in (
        ({"messages": text(USER, ASSISTANT)}, {}),
        ({"prompt": text(USER)}, {}),
        ({"conversation": text(USER)}, {"prompt": "conversation"}),
    ):
        (prompt,) = load_data(DataSettings(path=write([row]), columns=columns), tokenizer, **SIZES).train
        assert (prompt.text, prompt.messages) == (asked, (USER,))
    context = {"context": 64, "eos_ids": (1,), "seed": 0}
    for row in ({"messages": text(USER, ASSISTANT)}, {"prompt": text(USER), "completion": text(ASSISTANT)}):
        (one,) = load_records(DEMONSTRATIONS, DataSettings(path=write([row])), tokenizer, **context).train
        assert tokenizer.decode([*one.prompt, *one.completion]) == asked + "3<|end|>"
    worse = {"role": "assistant", "content": "4"}
    row = {"chosen": text(USER, ASSISTANT), "rejected": text(USER, worse)}
    (pair,) = load_records(PAIRS, DataSettings(path=write([row])), tokenizer, **context).train
    assert [tokenizer.decode(ids) for ids in (pair.prompt, pair.chosen, pair.rejected)] == [asked, "3<|end|>", "4<|end|>"]


@pytest.mark.parametrize(
    "text",
    [str([USER, ASSISTANT]), json.dumps([USER, ASSISTANT])[:-5], '[{"content": "1+2", "role": user}]'],
    ids=["repr", "cut", "loose"],
)
def test_messages_as_text_that_is_no_json_are_counted_and_never_trained_as_text(write, tokenizer, text):
    path = write([{"messages": text}, {"messages": [USER]}])
    data = load_data(DataSettings(path=path), tokenizer, **SIZES)
    assert data.report.dropped == {"with messages as text that is no JSON": 1}
    assert "line 1: messages holds messages as text" in data.report.first["with messages as text that is no JSON"]
    assert [prompt.messages for prompt in data.train] == [(USER,)]


@pytest.mark.parametrize("text", ['[{"a": 1}]', "[{1+2}]", '[{"role": "user", "content": "1+2"}] (1)', "[]", '[{"role": 1}, 2]'])
def test_other_text_stays_text(write, tokenizer, text):
    (prompt,) = load_data(DataSettings(path=write([{"prompt": text}])), byte_tokenizer(), **SIZES).train
    assert (prompt.text, prompt.messages) == (text, None)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_limit_counts_what_is_left_out_before_its_last_row(write, tokenizer, name):
    good, half = '{"prompt": "1+1"}', '{"prompt": "\\ud83d"}'
    lines = [good, half, good, half, half]
    path = write("\n".join(lines) if name == "x.jsonl" else f"[{','.join(lines)}]", name)
    data = load_data(DataSettings(path=path, limit=2), tokenizer, **SIZES)
    assert (data.report.rows, data.report.kept, data.report.dropped) == (3, 2, {"that are damaged": 1})
    whole = load_data(DataSettings(path=path), tokenizer, **SIZES)
    assert (whole.report.rows, whole.report.dropped) == (5, {"that are damaged": 3})


def shared(*turns):
    return {"conversations": [{"from": who, "value": what} for who, what in turns]}


def test_conversations_of_sharegpt_are_messages(write, tokenizer):
    asked = [("system", "add"), ("human", "1+2")]
    path = write([shared(*asked, ("gpt", "3")), shared(("human", "2+2"), ("gpt", "4")), shared(("human", "2"), ("bing", "3"))])
    data = load_data(DataSettings(path=path), tokenizer, **SIZES)
    assert [prompt.text for prompt in data.train] == [
        "<|system|>add<|end|><|user|>1+2<|end|><|assistant|>",
        "<|user|>2+2<|end|><|assistant|>",
    ]
    assert data.report.dropped == {"with a speaker that is not known": 1}
    assert "line 3" in str(data.report)
    taught = load_records(DEMONSTRATIONS, DataSettings(path=path), tokenizer, context=64, eos_ids=(tokenizer.eos_token_id,), seed=0)
    assert [tokenizer.decode(one.completion) for one in taught.train] == ["3<|end|>", "4<|end|>"]


def test_a_form_of_rows_is_one_function(write, tokenizer, monkeypatch):
    def asked_and_answered(row, where):
        """{"q": ..., "a": ...} in our columns."""
        return {"prompt": row["q"], "completion": row["a"]} if row.keys() >= {"q", "a"} else row

    monkeypatch.setattr(sources, "FORMS", (*sources.FORMS, asked_and_answered))
    settings = DataSettings(path=write([{"q": "1+2", "a": "3"}, {"prompt": "2+2", "completion": "4"}]))
    assert [prompt.text for prompt in load_data(settings, tokenizer, **SIZES).train] == ["1+2", "2+2"]
    taught = load_records(DEMONSTRATIONS, settings, tokenizer, context=64, eos_ids=(tokenizer.eos_token_id,), seed=0)
    assert [tokenizer.decode(one.completion) for one in taught.train] == ["3<|end|>", "4<|end|>"]


class Counted(dict):
    """A row that counts how often its prompt is read."""

    reads = 0

    def __getitem__(self, key):
        self.reads += key == "prompt"
        return super().__getitem__(key)


def test_a_prompt_is_read_once_for_splitting_encoding_and_its_record(tokenizer):
    rows = [Counted(prompt=f"{i}+1", completion=str(i + 1)) for i in range(40)]
    settings = DataSettings(path=Live("rows", SourceRows("rows", rows)), eval_fraction=0.2, chat=True)
    data = load_data(settings, tokenizer, **SIZES)
    assert len(data.train) + len(data.held_out) == 40 and data.held_out
    assert {row.reads for row in rows} == {1}
    load_records(DEMONSTRATIONS, settings, tokenizer, context=64, eos_ids=(tokenizer.eos_token_id,), seed=0)
    assert {row.reads for row in rows} == {2}


def test_a_tokenizer_whose_file_cuts_and_pads_leaves_prompts_as_they_are(write):
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=32)
    data = load_data(DataSettings(path=write([{"prompt": "x" * 20}, {"prompt": "y"}])), tokenizer, **SIZES)
    assert sorted(len(prompt.tokens) for prompt in data.train) == [1, 20]
