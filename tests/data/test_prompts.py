import numpy as np
import pytest
from encoders import encode_prompts

from groupwise.data.encoding import prompt_limit, visit
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.errors import DataError


def rows_of(*prompts):
    return SourceRows("f.jsonl", [{"prompt": prompt, "answer": "7"} for prompt in prompts])


def test_prompts_carry_their_row_text_and_ids(tokenizer):
    prompts, report = encode_prompts(rows_of("1+6", "2+5"), Template(tokenizer=tokenizer, chat=True), max_tokens=20)
    assert [prompt.id for prompt in prompts] == ["0", "1"]
    assert prompts[1].text == "<|user|>2+5<|end|><|assistant|>"
    assert tokenizer.decode(prompts[1].tokens) == prompts[1].text
    assert prompts[1].row == {"prompt": "2+5", "answer": "7"}
    assert (report.rows, report.kept, report.lengths) == (2, 2, [6, 6])
    assert not report.dropped


def test_d1_one_empty_prompt_is_dropped_and_counted(tokenizer):
    for empty in ("", "  \n", [], [{"role": "user", "content": ""}]):
        prompts, report = encode_prompts(rows_of("1", empty, "2"), Template(tokenizer=tokenizer, chat=True), max_tokens=20)
        assert [prompt.id for prompt in prompts] == ["0", "2"], empty
        assert report.dropped == {"empty": 1}


def test_d2_all_empty_is_an_error(tokenizer):
    with pytest.raises(DataError, match=r"no prompt is left: f\.jsonl: 0 of 2 rows.*dropped: 2 empty"):
        encode_prompts(rows_of("", " "), Template(tokenizer=tokenizer), max_tokens=20)


def test_d4_too_long_prompts_are_dropped_truncated_or_an_error(tokenizer):
    template, rows = Template(tokenizer=tokenizer), rows_of("1+2", "123456", "3")
    prompts, report = encode_prompts(rows, template, max_tokens=4, too_long="drop")
    assert [prompt.text for prompt in prompts] == ["1+2", "3"]
    assert report.dropped == {"longer than 4 tokens (the test)": 1}
    prompts, report = encode_prompts(rows, template, max_tokens=4, too_long="truncate_left")
    assert [prompt.text for prompt in prompts] == ["1+2", "3456", "3"]
    assert tokenizer.decode(prompts[1].tokens) == "3456"
    assert report.noted == {"cut to 4 tokens (the test)": 1}
    with pytest.raises(DataError, match=r"f\.jsonl row 2: the prompt has 6 tokens and the limit is 4"):
        encode_prompts(rows, template, max_tokens=4, too_long="error")


def test_truncation_keeps_a_leading_bos(word_tokenizer):
    template = Template(tokenizer=word_tokenizer())
    prompts, _ = encode_prompts(rows_of("what is two plus three"), template, max_tokens=4, too_long="truncate_left")
    assert template.tokenizer.convert_ids_to_tokens(prompts[0].tokens) == ["<bos>", "plus", " ", "three"]


def test_d5_prompt_and_completion_must_fit_into_the_context():
    assert prompt_limit(128, 28, None) == 100
    assert prompt_limit(128, 28, 60) == 60
    with pytest.raises(DataError, match=r"is 128 and the model's context is 128 tokens.*lower it below 128 .*--max-new-tokens"):
        prompt_limit(128, 128, None)
    with pytest.raises(DataError, match=r"max_prompt_tokens \(101\) \+ max_new_tokens \(28\) exceed the model's context of 128"):
        prompt_limit(128, 28, 101)


def test_d6_a_prompt_that_is_no_text_is_counted_with_its_row(tokenizer):
    prompts, report = encode_prompts(rows_of("1", 5), Template(tokenizer=tokenizer), max_tokens=20)
    assert len(prompts) == 1 and report.dropped == {"that cannot be read": 1}
    assert report.first["that cannot be read"].startswith("f.jsonl row 2: prompt is 5 (int)")
    with pytest.raises(DataError, match=r"f\.jsonl row 1: prompt is 5 \(int\)"):
        encode_prompts(rows_of(5), Template(tokenizer=tokenizer), max_tokens=20)


def test_duplicates_are_kept_and_counted_and_unknown_characters_dropped(tokenizer):
    rows = rows_of("1+2", "1+2", [{"role": "user", "content": "1+2"}], "É", "3")
    prompts, report = encode_prompts(rows, Template(tokenizer=tokenizer, chat=True), max_tokens=20)
    assert len(prompts) == 4
    assert report.noted == {"duplicate": 2}
    assert report.dropped == {"with characters unknown to the tokenizer": 1}


def test_a_dropped_row_is_counted_once_even_if_its_prompt_stood_before(tokenizer):
    prompts, report = encode_prompts(rows_of("1+2+3", "1+2+3", "3", "3"), Template(tokenizer=tokenizer), max_tokens=4)
    assert [prompt.row["prompt"] for prompt in prompts] == ["3", "3"]
    assert (report.dropped, report.noted) == ({"longer than 4 tokens (the test)": 2}, {"duplicate": 1})


def test_a_visit_names_its_epoch(tokenizer):
    (prompt,), _ = encode_prompts(rows_of("1"), Template(tokenizer=tokenizer), max_tokens=20)
    again = visit(prompt, 3)
    assert again.id == "3/0"
    assert again.tokens is prompt.tokens
    assert again.tokens.dtype == np.int64


def test_a_column_that_a_format_string_cannot_write_as_text_is_counted(tokenizer):
    rows = SourceRows("f.jsonl", [{"q": "1+1"}, {"q": None}, {"q": [{"role": "user", "content": "1"}]}, {"q": 3}])
    prompts, report = encode_prompts(rows, Template(tokenizer=tokenizer, format="{q}="), max_tokens=20)
    assert [prompt.text for prompt in prompts] == ["1+1=", "3="]
    assert report.dropped == {
        "with nothing in a column that data.template reads": 1,
        "with messages where data.template reads a text": 1,
    }
    prompts, report = encode_prompts(
        SourceRows("f.jsonl", [{"q": {"a": "1"}}, {"q": None}]), Template(tokenizer=tokenizer, format="{q[a]}="), max_tokens=20
    )
    assert [prompt.text for prompt in prompts] == ["1="] and sum(report.dropped.values()) == 1


def test_a_row_without_a_part_that_a_format_string_reads_does_not_stop_the_others(tokenizer):
    rows = [{"q": ["1", "2"]}, {"q": ["1"]}, {"q": ["1", None]}, {"q": 3}]
    template = Template(tokenizer=tokenizer, format="{q[1]}=")
    prompts, report = encode_prompts(SourceRows("f.jsonl", rows), template, max_tokens=20)
    assert [prompt.text for prompt in prompts] == ["2="]
    assert report.dropped == {
        "without a part of a column that data.template reads": 2,
        "with nothing in a column that data.template reads": 1,
    }
    with pytest.raises(DataError, match=r"0 of 1 row can be used: 1 without a part of .*row 1: q lacks what \{q\[1\]\} reads"):
        encode_prompts(SourceRows("f.jsonl", rows[1:2]), template, max_tokens=20)


def test_missing_columns_are_told_in_one_line_of_a_readable_length(tokenizer):
    for row in ({f"c{i}": 1 for i in range(20_000)}, {"a\nERROR all good\r": 1}, {1: "a"}):
        with pytest.raises(DataError) as told:
            encode_prompts(SourceRows("f.jsonl", [row]), Template(tokenizer=tokenizer), max_tokens=20)
        assert "no column 'prompt'" in str(told.value)
        assert len(str(told.value)) < 2000 and not any(line.startswith("ERROR") for line in str(told.value).splitlines())
