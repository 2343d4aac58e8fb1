"""What `groupwise train` does: every stage of a recipe, one after the other, with its plan,
progress line and closing table.
"""

from __future__ import annotations

import errno
import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from groupwise.api.progress import Progress, make_console, safe
from groupwise.config.live_objects import LIVE
from groupwise.config.objectives import is_online
from groupwise.config.recipes import load_stages, with_lines
from groupwise.config.settings import Recipe
from groupwise.config.texts import with_texts
from groupwise.distributed import comm, process_group
from groupwise.errors import CheckpointError, GroupwiseError
from groupwise.runs import checkpoint
from groupwise.runs.final_model import unfinished
from groupwise.runs.folder import FINAL, anew, choose_folder, finished, stopped_early
from groupwise.runs.interrupts import end_later
from groupwise.runs.job import Judged
from groupwise.runs.rollout_files import list_rollouts
from groupwise.runs.run import Run, RunResult, join
from groupwise.runs.trust import demand_trust_in_recipe
from groupwise.training.evaluate import Evaluation
from groupwise.utils.spelling import counted

ACROSS = 5
"""Figures that stand side by side in 80 columns; more of them stand below one another."""

WRITERS = ("sft", "dpo")
"""Objectives that learn from data, and whose models write completions."""


def train_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
    timeout: float = process_group.TIMEOUT,
    console: Console | None = None,
    report: Callable[[Path], object] | None = None,
) -> int:
    """What `groupwise train` does: every stage of a recipe, one after the other.  Returns the exit
    status.

    fresh: start anew, under a numbered name.  quiet: print warnings and the closing table only.
    accept_changes: see `train`.
    report: called with the folder of every stage that has finished; if it fails, that is said and
        nothing else.
    """
    demand_trust_in_recipe(path)
    stages = load_stages(path, overrides)
    here = join(next(iter(stages.values())), timeout)
    console = console or make_console(quiet=not here.first)
    if fresh:
        stages = comm.from_first(lambda: anew(stages))
    outcomes: dict[str, RunResult] = {}
    for number, (name, recipe) in enumerate(stages.items(), 1):
        title = f"{recipe.name} ({number} of {len(stages)})" if len(stages) > 1 else recipe.name
        folder, step, more = comm.from_first(lambda recipe=recipe: _standing(recipe))
        if step is not None:
            console.print(
                safe(
                    f"{title}: finished at step"
                    f" {step}{more or f'; its model is in {folder / FINAL}'}"
                ),
                soft_wrap=True,
            )
            if more is None:
                continue
        with with_lines(path, overrides, name):
            run = Run(recipe, folder, accept_changes=accept_changes)
        with run, comm.peers():
            outcomes[name] = train_stage(run, title, console, quiet)
        # The models of a stage are freed before the next one loads its own: their modules name one
        # another.
        del run
        gc.collect()
        if report is not None and here.first:
            try:
                report(folder)
            except GroupwiseError as error:
                console.print(safe(f"no report: {error}", style="yellow"), soft_wrap=True)
    if outcomes:
        closing_table(outcomes, stages, console)
    process_group.leave()
    return 0


def _standing(recipe: Recipe) -> tuple[Path, int | None, str | None]:
    """A recipe's folder, the step after which it finished there, and what is to be done
    nevertheless: its final model is not whole, or more steps are wanted.  Raises CheckpointError if
    that takes a checkpoint, and there is none.
    """
    folder = choose_folder(recipe)
    step = finished(folder)
    if step is None:
        return folder, None, None
    if recipe.steps is not None and recipe.steps > step and not stopped_early(folder):
        more = f"; it continues to step {recipe.steps}"
    else:
        wrong = unfinished(folder)
        if not wrong:
            return folder, step, None
        more = f", but {wrong}: it is made again from the last checkpoint"
    if not checkpoint.exists(folder):
        raise CheckpointError(
            f"{folder} finished at step {step}{more.replace(' it ', ' that ')}, and there is none;"
            " use fresh=True"
        )
    return folder, step, more


def train_stage(run: Run, title: str, console: Console, quiet: bool) -> RunResult:
    """Train a run to its end and show it: the plan, the progress line, the table at the end."""
    begin = run.done
    with Progress(run.job.steps, title, console=console, quiet=quiet) as progress:
        resumed = [("resumed", f"after step {begin}")] if begin else []
        _show(lambda: progress.plan([*run.job.plan, *resumed]))
        run.job.watch = lambda done, count: _show(lambda: progress.evaluating(done, count))
        for step in run.steps():
            _show(lambda step=step: progress.update(step))
        progress.stop()
        progress.summary(
            [("model", str(run.folder / FINAL)), ("log", str(run.folder / "metrics.jsonl"))]
        )
    return RunResult(
        folder=run.folder,
        before=run.before,
        after=run.after,
        steps=run.done - begin,
        exported=run.exported,
    )


def _show(work: Callable[[], None]) -> None:
    """Print; where nobody reads the output any more (`| head`, a terminal that was closed), end the
    run after its step.
    """
    try:
        work()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        with suppress(OSError, ValueError):  # what follows goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end_later(signal.SIGPIPE)


def closing_table(
    outcomes: Mapping[str, RunResult], stages: Mapping[str, Recipe], console: Console
) -> None:
    """Held-out figures before, between and after, and what to type next.

    Stages have one table whose completions the same reward functions judge, or which are of one
    objective and judged by its loss."""
    tables: dict[tuple[object, ...], list[tuple[str, dict[str, str]]]] = {}
    notes: list[str] = []
    for stage, outcome in outcomes.items():
        for label, judged in (
            (f"before {stage}", outcome.before),
            (f"after {stage}", outcome.after),
        ):
            if judged is not None:
                figures = judged.summary()
                same: tuple[object, ...] = (stages[stage].objective,)
                if isinstance(judged, Evaluation):
                    same = (judged.verdict, judged.k, *judged.by_function)
                rows = tables.setdefault(same, [])
                if judged is outcome.after or not rows:
                    rows.append((label, figures))
                    notes += _part(label, judged, outcome.after)
    last = list(outcomes)[-1]
    for rows in tables.values():
        columns = dict.fromkeys(column for _, figures in rows for column in figures)
        if len(columns) <= ACROSS:
            table = Table("held out", *columns, box=None, pad_edge=False)
            for label, figures in rows:
                table.add_row(label, *(figures.get(column, "") for column in columns))
        else:
            table = Table("held out", *(label for label, _ in rows), box=None, pad_edge=False)
            for column in columns:
                table.add_row(column, *(figures.get(column, "") for _, figures in rows))
        console.print()
        console.print(table)
    if tables:
        about = "; ".join(["on what training never saw", *notes, "± is half of a 95% interval"])
        console.print(f"({about})", style="dim", highlight=False)
    for stage, outcome in outcomes.items():
        if outcome.exported is not None:
            line = f"{stage}: exported is {outcome.exported}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("\nNext:", highlight=False)
    for line in _next_commands(stages[last], outcomes[last].folder):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _part(label: str, judged: Judged, last: Judged | None) -> list[str]:
    """Which of the held-out prompts a row is about, where `eval.prompts` makes them fewer than
    those of the last row.
    """
    if (
        isinstance(judged, Evaluation)
        and isinstance(last, Evaluation)
        and judged.prompts < last.prompts
    ):
        return [f"{label}: the first {judged.prompts:,} of {counted(last.prompts, 'prompt')}"]
    return []


def _next_commands(recipe: Recipe, folder: Path) -> list[str]:
    """Commands to go on with: look at the run, talk to the model, evaluate it again, score the
    recorded completions again.

    Those that need an object of the program that trains are left out: no file holds it.
    """
    data, run = recipe.data, str(folder)
    writes = is_online(recipe.objective) or recipe.objective in WRITERS
    held_out = data.task is not None or data.eval_path is not None or bool(data.parts)
    recorded = is_online(recipe.objective) and bool(list_rollouts(folder))
    judged = bool(recipe.rewards) and not _is_live(recipe.rewards)
    commands = [["groupwise", "view", run]]
    if writes:
        commands.append(["groupwise", "chat", run])
    if writes and held_out and judged and not _is_live((data, recipe.environment)):
        commands.append(["groupwise", "eval", run])
    if recorded and judged:
        commands.append(["groupwise", "score", run])
    return [shlex.join(command) for command in commands]


def _is_live(settings: Any) -> bool:
    """True if these settings name an object of the running program."""
    named: list[str] = []

    def note(_: str, text: str) -> str:
        if text.startswith(LIVE):
            named.append(text)
        return text

    with_texts(settings, note)
    return bool(named)
