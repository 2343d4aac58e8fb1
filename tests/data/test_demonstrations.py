import numpy as np
import pytest

from groupwise.data.demonstrations import encode_demonstrations
from groupwise.data.prompts import encode_prompts
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.errors import DataError


def demonstrations(tokenizer, rows, context=200, chat=False, template=None, **options):
    wording = Template(tokenizer=tokenizer, chat=chat, format=template)
    return encode_demonstrations(
        SourceRows("f.jsonl", rows), wording, context=context, eos_ids=(tokenizer.eos_token_id,), **options
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
    assert report.max_tokens == 8


def test_the_prompt_of_a_demonstration_has_the_ids_that_generation_starts_from(tokenizer):
    rows = [{"prompt": "1+2", "completion": r"<think>1+2=3</think>\boxed{3}"}]
    (one,), _ = demonstrations(tokenizer, rows, chat=True)
    (prompt,), _ = encode_prompts(SourceRows("f", rows), Template(tokenizer=tokenizer, chat=True), max_tokens=99)
    assert np.array_equal(one.prompt, prompt.tokens)
    assert one.completion.tolist().count(tokenizer.eos_token_id) == 1
    assert one.completion[-1] == tokenizer.eos_token_id


def test_alpaca_rows_through_their_template():
    from groupwise.data.tokenizers import byte_tokenizer

    tokenizer = byte_tokenizer()
    (one,), _ = demonstrations(tokenizer, [{"instruction": "Add.", "input": "1, 2", "output": "3"}], 400, template="alpaca")
    assert tokenizer.decode(one.prompt).endswith("### Input:\n1, 2\n\n### Response:\n")
    assert tokenizer.decode(one.completion) == "3<|end|>"


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
    assert report.dropped == {"empty": 1, "with an empty completion": 1, unknown: 1, "longer than the context of 20 tokens": 1}


def test_too_long_demonstrations_can_lose_the_head_of_their_prompt(tokenizer):
    rows = [{"prompt": "123456789", "completion": "7"}, {"prompt": "1", "completion": "2"}]
    built, report = demonstrations(tokenizer, rows, context=6, too_long="truncate_left")
    assert texts(tokenizer, built[0]) == ("6789", "7<|end|>")
    assert report.noted == {"truncated to the context of 6 tokens": 1}
    with pytest.raises(DataError, match=r"row 1: prompt and completion have 11 tokens and the model's context is 6"):
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
