"""Standard evaluations by name: GSM8K, MATH-500, AIME, IFEval and HumanEval.

gw.evaluate_benchmark("runs/mine", "math500")
gw.evaluate_benchmark("runs/mine", "gsm8k", data="gsm8k/test.jsonl")   # a copy of the rows
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupwise.api.evaluate import EvalReport, evaluate
from groupwise.data.benchmarks import find_benchmark, packaged_rows
from groupwise.errors import DataError
from groupwise.runs.origin import origin_of


def evaluate_benchmark(
    path: str | os.PathLike[str],
    name: str,
    *,
    data: str | os.PathLike[str] | None = None,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    template: str | None = None,
    chat: bool | None = None,
    system: str | None = None,
    k: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Evaluate a run, a checkpoint, a model folder or a hub name on a standard evaluation.

    The row of `groupwise.data.benchmarks.BENCHMARKS` says how problems are asked, what is right,
    and how completions are sampled; arguments replace its settings.  The chat template and the
    system message are the run's; any other model is asked with its chat template.  No tools are
    offered.  Every problem is used: one that does not fit the context is an error,
    unless `overrides` set a run's `data.too_long`.
    data: a copy of the rows, with the same columns; default: the hub, or the package that brings
        them.
    columns: `{ours: theirs}`, for a copy that names its columns in another way.
    template, chat, system, k, temperature, top_p, max_new_tokens, limit, seed, overrides,
        progress: see `evaluate`.
    Raises ConfigError, DataError, RewardError, CheckpointError.
    """
    benchmark = find_benchmark(name)
    path = os.fspath(path)
    too_long = "error"
    if origin_of(path) is not None:
        overrides = ["data.max_prompt_tokens=null", f"data.too_long={too_long}", *overrides]
        too_long = None
    elif chat is None:
        chat = True
    rows: Any = data
    if data is None and benchmark.package is not None:
        rows = packaged_rows(name)
    reward = {"function": benchmark.reward, "args": dict(benchmark.arguments)}
    try:
        report = evaluate(
            path,
            data=rows or benchmark.path,
            split=split or benchmark.split,
            columns={**benchmark.columns, **(columns or {})},
            template=template or benchmark.template,
            chat=chat,
            system=system,
            rewards=reward,
            verdict=benchmark.reward,
            environment={},
            k=k or benchmark.k,
            temperature=temperature or benchmark.temperature,
            top_p=top_p or benchmark.top_p,
            max_new_tokens=max_new_tokens or benchmark.max_new_tokens,
            too_long=too_long,
            limit=limit,
            seed=seed,
            overrides=overrides,
            progress=progress,
        )
    except DataError as error:
        if rows is None:
            error.add_note(f"a copy of {benchmark.path} can be read in its place: data=FILE")
        raise
    return replace(report, about=f"benchmark {name}; {report.about}")
