import json
from collections import Counter
from fractions import Fraction

import pytest

from groupwise.data.tasks.expressions import decimal, evaluate, operator_of, parse
from groupwise.data.tasks.gsm8k import Gsm8kArithmetic, annotations_of, expressions_of
from groupwise.data.tasks.scratchpads import work
from groupwise.data.tokenizers import arithmetic_tokenizer
from groupwise.errors import ConfigError, DataError

TRAIN = [
    "Two boxes: 3*4=<<3*4=12>>12, then 12+9=<<12+9=21.00>>21.\n#### 21",
    "Half of it: <<21/2=10.5>>10.5 and again <<3*4=12>>12\n#### 12",
    *(f"<<{i}+17={i + 17}>>" for i in range(10, 60)),
]
TEST = ["<<3*4=12>>12", "<<100-58=42>>42 and <<(2+3)*4=20>>", "no annotation\n#### 5"]


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, answers in (("train", TRAIN), ("test", TEST)):
        paths[name] = str(tmp_path / f"{name}.jsonl")
        lines = [json.dumps({"question": "?", "answer": answer}) for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return paths


def test_expressions_are_distinct_with_their_own_values_and_operators(files):
    rows = {row["prompt"]: row for row in expressions_of(files["train"], "train")}
    assert len(rows) == 53
    assert rows["3*4"] == {"prompt": "3*4", "answer": "12", "operator": "*"}
    assert rows["12+9"]["answer"] == "21"
    assert rows["21/2"] == {"prompt": "21/2", "answer": "10.5", "operator": "/"}


def test_demonstrated_expressions_prompts_and_held_out_ones_are_apart(files):
    task = Gsm8kArithmetic(**files)
    taught = {row["prompt"] for row in task.demonstrations(300, seed=0)}
    asked = {row["prompt"] for row in task.prompts(300, seed=0)}
    assert taught | asked == {row["prompt"] for row in expressions_of(files["train"], "train")}
    assert not taught & asked
    assert 15 < len(taught) < 40
    held_out = {row["prompt"]: row["seen"] for row in task.held_out(10)}
    assert held_out == {"3*4": "seen", "100-58": "unseen", "(2+3)*4": "unseen"}
    assert {row["prompt"] for row in Gsm8kArithmetic(**files, held_out_rows="unseen").held_out(10)} == {"100-58", "(2+3)*4"}
    assert [row["prompt"] for row in task.held_out(2)] == [row["prompt"] for row in task.held_out(10)][:2]


def test_seeds_and_bad_arguments(files):
    task = Gsm8kArithmetic(**files)
    assert [len(task.demonstrations(n, seed=1)) for n in (1, 40, 300)] == [1, 40, 300]
    assert task.demonstrations(40, seed=1) == Gsm8kArithmetic(**files).demonstrations(40, seed=1)
    assert task.demonstrations(40, seed=1) != task.demonstrations(40, seed=2)
    with pytest.raises(DataError, match="no expression is demonstrated"):
        Gsm8kArithmetic(**files, demonstrated=0.0).demonstrations(1, seed=0)
    with pytest.raises(ConfigError, match="held_out_rows must be all or unseen"):
        Gsm8kArithmetic(**files, held_out_rows="some")
    with pytest.raises(DataError, match="no such file"):
        Gsm8kArithmetic(train="nosuch/train.jsonl", test=files["test"]).prompts(1, seed=0)


def test_a_file_without_solutions_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl line 1: no column 'answer'; there are: question"):
        list(annotations_of(str(tmp_path / "x.jsonl"), "train"))


# whole files


def test_every_annotation_evaluates_to_its_value_by_ours_and_by_pythons_arithmetic(gsm8k):
    found = list(annotations_of(str(gsm8k / "train.jsonl"), "train"))
    assert len(found) == len(set(found)) == 900
    for expression, value in found:
        assert evaluate(parse(expression)) == Fraction(value), expression
        python = eval(expression, {"__builtins__": {}})  # the independent reading; the text is our own
        assert python == pytest.approx(float(Fraction(value)), rel=1e-9, abs=1e-9), expression


@pytest.mark.slow
def test_operators_and_unseen_expressions(gsm8k):
    files = {name: str(gsm8k / f"{name}.jsonl") for name in ("train", "test")}
    operators = Counter(operator_of(expression) for expression, _ in annotations_of(files["train"], "train"))
    assert sum(operators.values()) == 900 and set(operators) == {"+", "-", "*", "/", "mixed"}
    task = Gsm8kArithmetic(**files)
    assert Counter(row["seen"] for row in task.held_out(10_000)) == {"seen": 30, "unseen": 270}
    assert not {row["prompt"] for row in task.prompts(10_000, 0)} & {row["prompt"] for row in task.demonstrations(20_000, 0)}


def test_scratchpads_of_whole_files_are_right_and_short(gsm8k):
    files = {name: str(gsm8k / f"{name}.jsonl") for name in ("train", "test")}
    task, tokenizer = Gsm8kArithmetic(**files), arithmetic_tokenizer()
    rows = expressions_of(files["train"], "train")
    written = 0
    for row in rows:
        done = work(parse(row["prompt"]))
        assert done is not None and decimal(done[1]) == row["answer"], row
        written += len(done[0]) <= task.longest
    assert written / len(rows) > 0.93
    taught = task.demonstrations(3000, seed=0)
    assert max(len(tokenizer(row["completion"])["input_ids"]) for row in taught) <= task.longest + 2 + 2 + 12
    right = sum(row["completion"].endswith(f"\\boxed{{{row['answer']}}}") for row in taught) / len(taught)
    assert 0.5 < right < 0.85


def test_a_hub_name_is_read_by_its_splits(gsm8k, monkeypatch):
    """Without arguments the files are the hub's: `train` and `test` of one data set."""
    import datasets

    asked = []

    def rows_of(path, config, split):
        asked.append((path, config, split))
        lines = (gsm8k / f"{split}.jsonl").read_text().splitlines()
        return datasets.Dataset.from_list([json.loads(line) for line in lines])

    monkeypatch.setattr(datasets, "load_dataset", rows_of)
    assert Counter(row["seen"] for row in Gsm8kArithmetic().held_out(10_000)) == {"seen": 30, "unseen": 270}
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
