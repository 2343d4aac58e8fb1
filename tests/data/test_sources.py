import os
import time
from decimal import Decimal

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from groupwise.config.settings import DATA_SUFFIXES, DataSettings
from groupwise.data import sources
from groupwise.data.load import load_data
from groupwise.data.sources import live_rows, read_rows
from groupwise.errors import DataError
from groupwise.utils.built_in import find_built_in

ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "2+2", "answer": "4"}, {"prompt": "3+3", "answer": "6"}]


def test_jsonl_json_and_parquet_hold_the_same_rows(write, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for path in (write(ROWS), write(ROWS, "rows.json"), str(tmp_path / "rows.parquet")):
        assert list(read_rows(path)) == ROWS, path


def test_every_ending_that_recipes_may_name_has_a_reader():
    assert DATA_SUFFIXES == (".jsonl", ".ndjson", ".json", ".parquet")
    assert all(callable(find_built_in("data.sources", suffix)) for suffix in DATA_SUFFIXES)


def test_jsonl_lines_are_counted_as_an_editor_counts_them(write):
    path = write('{"a": 1}\n\n   \n{"a": 2}\n')
    rows = read_rows(path)
    assert list(rows) == [{"a": 1}, {"a": 2}]
    assert rows.where(1) == f"{path} line 4"
    assert rows.subset([1]).where(0) == f"{path} line 4"
    assert rows.first(1).where(0) == f"{path} line 1"


def test_a_byte_order_mark_and_windows_line_ends_are_fine(write):
    assert list(read_rows(write(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n{"a": "b"}\r\n'))) == [{"a": "é"}, {"a": "b"}]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ('{"a": 1}\n{"a": "cut', "x.jsonl", r"x\.jsonl line 2: not JSON: the line is cut off"),
        ('{"a": 1}\n{"a": \n{"a": 2}', "x.jsonl", r"x\.jsonl line 2: not JSON: the line is cut off at column 6: '\{\"a\":'"),
        ('{"a": 1}\n{"a": 2, "b"', "x.jsonl", r"x\.jsonl line 2: not JSON: the line is cut off"),
        ('{"a": 1}\n{a: 2}\n', "x.jsonl", r"x\.jsonl line 2: not JSON: Expecting property name.* at column 2"),
        (b'{"a": 1}\n{"a": "\xff\xfe"}\n', "x.jsonl", r"x\.jsonl line 2: not UTF-8: byte 0xff at offset 7"),
        ('{"a": 1}\n[1, 2]\n', "x.jsonl", r"x\.jsonl line 2: a row is a JSON object, this is a list"),
        (b"", "x.jsonl", r"x\.jsonl is empty \(0 bytes\)"),
        ("\n\n", "x.jsonl", r"x\.jsonl holds no rows"),
        ("[]", "x.json", r"x\.json holds no rows"),
        ('{"a": 1}', "x.json", r"x\.json: expected a list of objects, found an object"),
        ('[{"a": 1}, 5]', "x.json", r"x\.json row 2: a row is a JSON object, this is a number"),
        ('{"a": 1}\n{"a": 2}\n', "x.json", r"line 2: not JSON: Extra data.*name it \.jsonl"),
        (
            '{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d!"}\n',
            "x.jsonl",
            r"x\.jsonl line 2: half of a character, '\\ud83d', stands alone",
        ),
        ('[{"a": 1}, {"a": "\\ud83d"}]', "x.json", r"x\.json row 2: half of a character"),
        (
            "a,b\n1,2\n",
            "x.csv",
            r"x\.csv' is none of \.jsonl, .*make one of it, datasets\.Dataset\.from_csv\('.*x\.csv'\)\.to_json\('x\.jsonl'\)",
        ),
    ],
)
def test_d7_a_broken_file_names_itself_the_line_and_what_was_found(write, content, name, message):
    with pytest.raises(DataError, match=message):
        read_rows(write(content, name))


def test_what_datasets_has_saved_says_how_it_becomes_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = datasets.Dataset.from_list([{"prompt": "one and one", "answer": "two"}])
    rows.save_to_disk("one")
    datasets.DatasetDict({"train": rows}).save_to_disk("several")
    rows.to_csv("table.csv")
    for path, remedy, made in (
        ("one", "datasets.load_from_disk('one').to_json('one.jsonl')", lambda: datasets.load_from_disk("one")),
        ("several", "datasets.load_from_disk('several')['train'].to_json(", lambda: datasets.load_from_disk("several")["train"]),
        (
            "table.csv",
            "datasets.Dataset.from_csv('table.csv').to_json('table.jsonl')",
            lambda: datasets.Dataset.from_csv("table.csv"),
        ),
    ):
        with pytest.raises(DataError) as caught:
            read_rows(path)
        assert remedy in str(caught.value)
        made().to_json("rows.jsonl")
        assert list(read_rows("rows.jsonl")) == list(rows)


def test_d7_random_bytes_are_no_parquet_file(write):
    with pytest.raises(DataError, match=r"x\.parquet: not a readable Parquet file \(begins with b'\\x93"):
        read_rows(write(b"\x93\x01" + bytes(range(255, 0, -1)), "x.parquet"))
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_rows(write(b"PAR1" + bytes(100) + b"PAR1", "y.parquet"))


@pytest.mark.parametrize("name", ["data/nosuch.jsonl", "./nosuch", "/nosuch/file", "nosuch.parquet", "a/b/c", "~/nosuch", "x.csv"])
def test_k8_a_path_is_never_looked_up_on_the_hub(name, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(DataError, match="no such file"):
        read_rows(name)


def test_a_missing_file_beside_others_names_them(write):
    path = write(ROWS, "train.jsonl")
    with pytest.raises(DataError, match=r"no such file '.*trian\.jsonl' \(did you mean .*train\.jsonl\?\)"):
        read_rows(path.replace("train", "trian"))
    with pytest.raises(DataError, match="is a folder"):
        read_rows(os.path.dirname(path))


def test_hub_names_go_to_datasets_with_config_and_split(monkeypatch):
    import datasets

    asked = []

    def load(path, config, split):
        asked.append((path, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read_rows("openai/gsm8k:main", "test")) == ROWS
    read_rows("squad")
    assert asked == [("openai/gsm8k", "main", "test"), ("squad", None, "train")]
    assert read_rows("squad").where(0) == "squad row 1"


def test_an_unreachable_hub_is_one_clear_message(monkeypatch):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"cannot load 'a/b' \(split 'train'\) from the hub, and no such file is here: .* Hub$"):
        read_rows("a/b")


def test_renaming_is_simultaneous_and_names_missing_columns(write):
    rows = read_rows(write([{"question": "q", "answer": "a", "extra": 1}]))
    assert list(rows.renamed({"prompt": "question"})) == [{"prompt": "q", "answer": "a", "extra": 1}]
    assert list(rows.renamed({"answer": "question", "question": "answer"})) == [{"answer": "q", "question": "a", "extra": 1}]
    with pytest.raises(DataError, match=r"rows\.jsonl line 1: no column 'quesiton'; there are: answer, extra, question"):
        rows.renamed({"prompt": "quesiton"})


@pytest.mark.parametrize("value", [np.int64, Decimal, lambda n: np.array([n, 1]), lambda n: torch.tensor([n])])
def test_rows_in_memory_with_other_values_have_another_name(value):
    names = [live_rows([{"prompt": "1", "answer": value(n)}], "data") for n in (3, 3, 4)]
    assert names[0] == names[1] != names[2]


def test_rows_in_memory_are_copied():
    shared = [1, 2]
    given = [{"prompt": "1", "shared": shared}, {"prompt": "2", "shared": shared}]
    rows = live_rows(given, "data").value
    given[0]["prompt"] = "3"
    shared.append(3)
    del given[1]
    assert list(rows) == [{"prompt": "1", "shared": [1, 2]}, {"prompt": "2", "shared": [1, 2]}]
    assert rows[0]["shared"] is rows[1]["shared"], "what rows share is held once"
    assert rows.where(1) == "data row 2"


def test_a_row_in_memory_that_cannot_be_copied_is_named():
    with pytest.raises(DataError, match=r"data row 2 holds a value that cannot be copied \(.*generator.*\): give plain values"):
        live_rows([{"prompt": "1"}, {"prompt": "2", "answers": (char for char in "12")}], "data")


def test_values_of_a_parquet_file_that_python_cannot_hold_are_told(tmp_path):
    days = pyarrow.array([10**9], pyarrow.int32()).cast(pyarrow.date32())
    text = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe"))
    for name, values in (("days", days), ("text", text)):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": values}), path)
        with pytest.raises(DataError, match=rf"{name}.parquet: a value of the Parquet file cannot be read"):
            read_rows(str(path))


def test_a_folder_of_nobody_is_a_path_that_is_not_there():
    with pytest.raises(DataError, match=r"~nobody/x\.jsonl"):
        read_rows("~nobody/x.jsonl")


def test_a_row_of_a_json_file_costs_no_look_through_the_whole_file(write):
    path = write([{"prompt": "x" * 40, "answer": str(i)} for i in range(40_000)], "rows.json")
    began = time.process_time()
    assert len(read_rows(path)) == 40_000
    assert time.process_time() - began < 8.0  # 0.2 where it is looked through once, a minute where every row does it


def test_of_a_large_parquet_file_no_more_than_the_limit_is_read(tmp_path, tokenizer):
    """A later part of the file is damaged: who reads it fails."""
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": [f"{n}+{n}" for n in range(4000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, compression="none", use_dictionary=False)
    data, text = bytearray(path.read_bytes()), b"3500+3500"
    place = data.index(text)
    data[place - 4 : place + 400] = bytes(b"\xff" * 404)
    path.write_bytes(data)
    with pytest.raises(DataError):
        read_rows(str(path))
    settings = DataSettings(path=str(path), limit=16)
    loaded = load_data(settings, tokenizer, context=64, max_new_tokens=8, seed=0)
    assert [prompt.text for prompt in loaded.train] == [f"{n}+{n}" for n in range(16)]
    held_out = DataSettings(task="addition", eval_path=str(path), eval_limit=16, limit=4)
    judged = load_data(held_out, tokenizer, context=64, max_new_tokens=8, seed=0).held_out
    assert [prompt.text for prompt in judged] == [f"{n}+{n}" for n in range(16)]


def test_of_a_data_set_of_the_hub_no_more_than_the_limit_is_read(monkeypatch):
    made = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(sources, "_load_hub", lambda name, split: made)
    monkeypatch.setattr(made, "to_list", lambda: pytest.fail("all rows were read"))
    assert list(read_rows("owner/rows", limit=2)) == ROWS[:2]


@pytest.mark.parametrize("limit", [1, 2, 3, 9, None])
def test_a_limit_gives_the_first_rows_of_every_kind_of_source(write, tmp_path, limit):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    for path in (write(ROWS), write(ROWS, "rows.json"), str(tmp_path / "rows.parquet")):
        assert list(read_rows(path, limit=limit)) == ROWS[:limit], path
