"""What loading the rows of a file costs, from the file to token ids: prompts, demonstrations and pairs.

    python benchmarks/rows.py GSM8K.jsonl [--rows 100000] [--formats "pairs,demonstrations"]

The file has rows with `question` and `answer`.  They are repeated with changed numbers until there are as many as are wanted, and
written in each format.  They are encoded by the tokenizer of SmolLM2, and by one with 4,096 byte pairs that the answers are made
of.  Processor seconds are of this process with all its threads, and of the process in which chat templates run (Linux).  That one
has started before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _machine import save, significant

from groupwise.config.settings import DataSettings, ModelSettings
from groupwise.data.encoding import DEMONSTRATIONS, PAIRS
from groupwise.data.load import load_data, load_records
from groupwise.data.tokenizers import bpe_tokenizer
from groupwise.models.loading import read_blueprint

Row = dict[str, Any]
CHAT = {"chat": True, "columns": {"prompt": "question"}}
FORMATS: dict[str, tuple[str, dict[str, Any], Callable[[str, str, str], Row]]] = {
    "prompts": ("prompt", {}, lambda question, answer, _: {"prompt": question, "answer": answer}),
    "data.chat": ("prompt", CHAT, lambda question, answer, _: {"question": question, "answer": answer}),
    "demonstrations": ("demonstration", {}, lambda question, answer, _: {"messages": spoken(question, answer)}),
    "pairs": ("pair", {}, lambda question, answer, other: {"prompt": question, "chosen": answer, "rejected": other}),
    "pairs of messages": (
        "pair",
        {},
        lambda question, answer, other: {"chosen": spoken(question, answer), "rejected": spoken(question, other)},
    ),
}
"""Kind of record, settings, and the row of a question, its answer and another row's answer."""


def spoken(question: str, answer: str) -> list[Row]:
    """A conversation."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def rows_of(source: Path, count: int) -> Iterator[tuple[str, str, str]]:
    """Question, answer and another row's answer."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]

    def changed(text: str, by: int) -> str:
        return re.sub(r"\d+", lambda number: str(int(number[0]) + by), text)

    for i in range(count):
        row, other, by = rows[i % len(rows)], rows[(i + 1) % len(rows)], i // len(rows)
        yield changed(row["question"], by), changed(row["answer"], by), changed(other["answer"], by)


def load(kind: str, settings: DataSettings, tokenizer: Any) -> Any:
    """As a run loads."""
    if kind == "prompt":
        return load_data(settings, tokenizer, context=2048, max_new_tokens=256, seed=0)
    records: Any = DEMONSTRATIONS if kind == "demonstration" else PAIRS
    return load_records(records, settings, tokenizer, context=2048, eos_ids=[tokenizer.eos_token_id])


def processor_seconds() -> float:
    """Of this process and all its descendants."""
    spent: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        spent[int(path.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total = time.process_time()
    for process, (parent, seconds) in spent.items():
        while parent in spent and parent != os.getpid():
            parent = spent[parent][0]
        total += seconds if parent == os.getpid() and process != parent else 0.0
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--formats", default=",".join(FORMATS), help="default: %(default)s")
    options = parser.parse_args()
    rows = list(rows_of(options.source, options.rows))
    small = bpe_tokenizer((answer for _, answer, _ in rows[:5_000]), 4_096)
    tokenizers = {"smollm2": read_blueprint(ModelSettings(path="smollm2")).tokenizer, "bpe:4096": small}
    result: dict[str, Any] = {"rows": len(rows)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for name in options.formats.split(","):
            kind, settings, written = FORMATS[name]
            path.write_text("".join(json.dumps(written(*row)) + "\n" for row in rows), encoding="utf-8")
            for title, tokenizer in tokenizers.items():
                load(kind, DataSettings(path=str(path), limit=100, **settings), tokenizer)
                gc.collect()
                processor, clock = processor_seconds(), time.perf_counter()
                data = load(kind, DataSettings(path=str(path), **settings), tokenizer)
                taken = {"processor": processor_seconds() - processor, "clock": time.perf_counter() - clock}
                result[f"{name}, {title}"] = {unit: significant(seconds) for unit, seconds in taken.items()}
                print(f"{name}, {title}: {taken['processor']:.1f} s of the processor, {taken['clock']:.1f} s on the clock for "
                      f"{len(data.train):,} rows")  # fmt: skip
                del data
    save("rows", result)


if __name__ == "__main__":
    main()
