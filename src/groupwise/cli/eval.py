"""`groupwise eval`: a trained model on held-out prompts."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TextIO

from groupwise.cli import arguments as typed
from groupwise.data.benchmarks import BENCHMARKS
from groupwise.errors import ConfigError
from groupwise.utils.spelling import counted

EXAMPLES = (
    (
        "groupwise eval runs/demo/grpo                                   with the evaluation"
        " settings of the run"
    ),
    (
        "groupwise eval runs/demo/grpo --data test.jsonl --k 4 --json    on other rows, with the"
        " same settings"
    ),
)


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    command.add_argument(
        "checkpoint", metavar="RUN", help="a run, a checkpoint, a model folder or a hub name"
    )
    what = "override a key of the run's recipe, e.g. rewards.0.args.api_key=..."
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=what)
    command.add_argument(
        "--data", metavar="PATH", help="a .jsonl, .json or .parquet file, or a hub name"
    )
    command.add_argument(
        "--benchmark",
        metavar="NAME",
        help=f"a standard evaluation, as the field asks and samples it: {', '.join(BENCHMARKS)};"
        " --data names a copy of its rows",
    )
    command.add_argument("--task", metavar="NAME", help="held-out prompts of a built-in task")
    command.add_argument(
        "--task-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="keyword argument of the task",
    )
    command.add_argument("--split", metavar="NAME", help="split of a hub data set (default test)")
    command.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="OURS=THEIRS",
        help="rename a column, e.g. prompt=question",
    )
    command.add_argument(
        "--template",
        metavar="TEXT",
        help="format string that builds the prompt from the row's columns",
    )
    chat = "apply the chat template to string prompts"
    command.add_argument("--chat", action=argparse.BooleanOptionalAction, help=chat)
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument(
        "--reward",
        action="append",
        metavar="NAME",
        help="a reward function, by name; may be repeated",
    )
    command.add_argument(
        "--verdict", metavar="NAME", help="the reward that is 1 for right completions"
    )
    typed.environment(command)
    command.add_argument(
        "--k", type=typed.positive, metavar="N", help="sampled completions per prompt"
    )
    command.add_argument(
        "--temperature", type=float, metavar="T", help="temperature of the samples"
    )
    command.add_argument(
        "--top-p", type=typed.share, metavar="P", help="keep the likeliest tokens of this share"
    )
    command.add_argument(
        "--max-new-tokens", type=typed.positive, metavar="N", help="longest completion"
    )
    command.add_argument("--limit", type=typed.positive, metavar="N", help="first prompts only")
    command.add_argument("--seed", type=typed.seed, metavar="N", help="seed of the samples")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.epilog = (
        "Other settings are those of the run.  For a model without a run: accuracy, 8 samples of at"
        " most 256 tokens."
    )


class Counter:
    """One line of a terminal that says how far an evaluation is; nothing where the output is no
    terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.greedy = stream, False

    def show(self, done: int, count: int) -> None:
        """`done` of `count` prompts are sampled; the first pass is greedy."""
        if done == 1:
            self.greedy = not self.greedy
        if self.stream.isatty():
            kind = "greedy" if self.greedy else "sampled"
            end = "\r\033[K" if done == count and not self.greedy else ""
            print(
                f"\r\033[Kevaluating, {kind}: {done:,} of {counted(count, 'prompt')}{end}",
                end="",
                file=self.stream,
                flush=True,
            )


def run(options: argparse.Namespace) -> int:
    """Evaluate and print."""
    if options.data is not None and options.task is not None:
        raise ConfigError("say what to evaluate on: --data or --task, not both")
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        raise ConfigError(
            f"--temperature must be greater than 0, got {options.temperature:g} (greedy is always"
            " reported too)"
        )
    columns = typed.texts(options.column, "--column")
    # What a benchmark takes too; None where nothing was typed.
    shared = {
        "data": options.data,
        "split": options.split,
        "columns": columns or None,
        "template": options.template,
        "chat": options.chat,
        "system": options.system,
        "k": options.k,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_new_tokens": options.max_new_tokens,
        "limit": options.limit,
        "seed": options.seed,
        "overrides": options.overrides,
        "progress": None if options.json else Counter(sys.stderr).show,
    }
    if options.benchmark is not None:
        from groupwise.api.benchmark import evaluate_benchmark

        for name in ("task", "task_arg", "reward", "verdict", "environment"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is not for --benchmark, which has its own rows and"
                    " its own reward"
                )
        report = evaluate_benchmark(options.checkpoint, options.benchmark, **shared)
    else:
        from groupwise.api.evaluate import evaluate

        report = evaluate(
            options.checkpoint,
            task=options.task,
            task_args=typed.pairs(options.task_arg, "--task-arg") or None,
            rewards=options.reward,
            verdict=options.verdict,
            environment=typed.pairs(options.environment, "--environment") or None,
            **shared,
        )
    print(report.to_json() if options.json else report.render())
    return 0
