"""Solutions with labelled steps: where their steps end, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
from encoders import encode_solutions

from groupwise.data import vocabulary
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import arithmetic_tokenizer
from groupwise.errors import DataError
from groupwise.rewards.step_rewards import segment_steps

TOKENIZER = arithmetic_tokenizer()
EOS = int(TOKENIZER.eos_token_id)


def encode(*rows: dict[str, Any], context: int = 64) -> Any:
    return encode_solutions(SourceRows("rows", list(rows)), Template(tokenizer=TOKENIZER), context=context, eos_ids=(EOS,))


def test_steps_end_where_the_policy_would_end_them() -> None:
    row = {"prompt": "1+2+3=", "completions": ["1+2=3", "3+3=6", "6"], "labels": [True, False, 0.25]}
    (solution,), report = encode(row)
    text = TOKENIZER.decode(solution.completion.tolist(), skip_special_tokens=True)
    assert text == "1+2=3\n3+3=6\n6" and solution.completion[-1] == EOS
    assert solution.ends.tolist() == [5, 11, 13] and solution.labels.tolist() == [1.0, 0.0, 0.25]
    found = segment_steps(solution.completion.tolist(), vocabulary.of(TOKENIZER).texts)
    assert found == solution.ends.tolist()
    assert report.kept == 1


def test_rows_that_cannot_be_used_are_counted() -> None:
    good = {"prompt": "1+2=", "completions": ["3"], "labels": [True]}
    bad = [
        {**good, "completions": [], "labels": []},
        {**good, "completions": ["3", " "], "labels": [True, True]},
        {**good, "prompt": ""},
        {**good, "completions": ["3" * 80]},
        {**good, "completions": ["\u4e09"]},
    ]
    solutions, report = encode(good, *bad)
    assert len(solutions) == 1
    assert sum(report.dropped.values()) == 5 and len(report.dropped) == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "labels": [True]}, "completions"),
        ({"prompt": "1", "completions": ["1"]}, "labels"),
        ({"prompt": "1", "completions": ["1", "2"], "labels": [True]}, "2 completions and 1 label;"),
        ({"prompt": "1", "completions": ["1"], "labels": ["yes"]}, "probabilities"),
        ({"prompt": "1", "completions": "1", "labels": [True]}, "list of strings"),
    ],
)
def test_malformed_rows_are_refused_with_their_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encode(row)
