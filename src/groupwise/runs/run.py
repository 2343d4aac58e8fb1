"""A run from its recipe to its final model: resume, log, evaluate, save, export.

`train` yields every `Step`; `train_recipe` is what the command does with it: the plan, the progress line, the table at the end.
"""

from __future__ import annotations

import atexit
import errno
import inspect
import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from rich.console import Console
from rich.table import Table

from groupwise.config.live_objects import LIVE
from groupwise.config.recipes import demand_objects, load_stages, run_folder, with_lines
from groupwise.config.settings import Recipe, is_online
from groupwise.config.validation import STAGE
from groupwise.distributed import comm
from groupwise.errors import CheckpointError, ConfigError, Ended, GroupwiseError, PeerError
from groupwise.models.loading import resolve_device
from groupwise.models.policy import Policy
from groupwise.records import Scored, Step
from groupwise.runs import checkpoint
from groupwise.runs.build import Job, Judged
from groupwise.runs.dashboards import base as dashboards
from groupwise.runs.folder import FINAL, Lock, RunLog, anew, choose_folder, finished, record_end, unfinished
from groupwise.runs.inputs import check_inputs, inputs_of, record_inputs
from groupwise.runs.model_card import write_card
from groupwise.runs.plan import Lines
from groupwise.runs.policies import fit_threads
from groupwise.runs.prepare import plan_of
from groupwise.runs.progress import Progress, make_console, safe
from groupwise.runs.recorded_pairs import recorded_pairs
from groupwise.runs.resume import REFERENCE, check_reference, newest_checkpoint, resumed_job
from groupwise.runs.run_files import RunFiles
from groupwise.runs.saving import Saver, set_failure_hint
from groupwise.runs.signals import end_later, endings
from groupwise.runs.trust import seal
from groupwise.training.evaluate import Evaluation
from groupwise.utils import files
from groupwise.utils.secrets import scrubbed
from groupwise.utils.terminal import logger

ACROSS = 5
"""Figures that stand side by side in 80 columns; more of them stand below one another."""

WRITERS = ("sft", "dpo")
"""Objectives that learn from data, and whose models write completions."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Outcome:
    """What a run came to."""

    folder: Path
    before: Judged | None
    """None also if the run was resumed after its first step."""
    after: Judged | None
    steps: int
    """Steps taken by this process."""

    def __repr__(self) -> str:
        """A few lines: where the run lies and what it came to."""
        held = [(f"before: {self.before!r}" if self.before else ""), (f"after: {self.after!r}" if self.after else "")]
        return "\n".join([f"Outcome({self.steps} steps, in {self.folder})", *(f"  {line}" for line in held if line)])


def train(recipe: Recipe, *, accept_changes: bool = False) -> Iterator[Step]:
    """Run a recipe and yield its steps; the run folder is written on the way.  Running it again resumes it.

    A step numbered 0 carries the evaluation before training.  Leaving the loop, or the program, between two steps saves the last.
    accept_changes: resume although data, functions or models that the run names have changed since it began.
    Raises ConfigError, DataError, RewardError, EngineError, CheckpointError, StorageError, Diverged.

    >>> from groupwise.config.recipes import load_recipe
    >>> for step in train(load_recipe("recipes/demo.yaml")):  # doctest: +SKIP
    ...     print(step.number, step.metrics["reward"])
    """
    steps = _train(recipe, accept_changes)
    _SUSPENDED.add(steps)
    return steps


def _train(recipe: Recipe, accept_changes: bool) -> Generator[Step]:
    join(recipe)
    folder = comm.from_first(lambda: choose_folder(recipe))
    with Run(recipe, folder, accept_changes=accept_changes) as run, comm.peers():
        for text in run.job.warnings if run.first and run.done < run.job.steps else ():
            logger(__name__).warning("%s", text)
        atexit.unregister(_end_suspended)
        atexit.register(_end_suspended, os.getpid())  # the last to come is the first to go: what the run has begun is closed later
        yield from run.steps()


_SUSPENDED: WeakSet[Generator[Step]] = WeakSet()
"""Runs that somebody iterates over, perhaps with `next`."""


def _end_suspended(process: int) -> None:
    """Save what a program leaves between two steps when it ends, as leaving the loop would have done.

    Not in a fork of it; and not where one of several processes fails, with which the others cannot agree about anything any more.
    """
    failed = getattr(sys, "last_value", None) is not None
    if os.getpid() != process or (failed and comm.world().size > 1):
        return
    for steps in list(_SUSPENDED):
        if inspect.getgeneratorstate(steps) == inspect.GEN_SUSPENDED:
            try:
                steps.close()
            except BaseException as error:  # a second Ctrl-C too: the next run is to be saved all the same
                logger(__name__).error("a run that was left between two steps could not be saved: %r", error)


def join(recipe: Recipe, timeout: float = comm.TIMEOUT) -> comm.World:
    """Meet the other processes of the run, if a launcher started several.  timeout: see `comm.join`."""
    return comm.join(timeout, cuda=resolve_device(recipe.model).type == "cuda")


class Run:
    """A recipe in its folder, locked for this process.

    Use it as a context manager; `steps()` trains, and `before`, `after` and `job` are there to look at.  Of several processes
    only the first writes; all of them must take the same steps.
    """

    def __init__(self, recipe: Recipe, folder: Path, *, accept_changes: bool = False) -> None:
        """accept_changes: see `train`."""
        demand_objects(recipe)
        dashboards.check(recipe.save.report_to)
        self.recipe, self.folder = recipe, folder
        self.before: Judged | None = None
        self.after: Judged | None = None
        self.first = join(recipe).first
        self.lock: Lock | None = None
        self._threads = torch.get_num_threads()
        comm.from_first(self._take_lock)
        try:
            if recipe.threads is not None:
                torch.set_num_threads(recipe.threads)
            newest = comm.from_first(lambda: newest_checkpoint(folder))
            self.done = checkpoint.step_of(newest) if newest is not None else 0
            comm.from_first(lambda: check_reference(folder))
            set_failure_hint(newest)
            meant = resolved(recipe)
            self._inputs = comm.from_first(lambda: inputs_of(meant))
            if newest is not None:
                comm.from_first(lambda: check_inputs(folder, self._inputs, accept=accept_changes))
            self.job: Job = resumed_job(meant, folder, newest)
            fit_threads(self.job.policy, recipe.threads)
            self.saver = Saver(folder, self.job, recipe.save.keep)
            # The last whole step: its number, the optimizer steps taken by then, and where the data stood.
            self._whole = (self.done, self.job.taken, self.job.place())
            self._judging = self._writing = self._begun = False
        except BaseException:
            if "job" in vars(self):
                self.job.close()
            self._release_lock(undo=True)
            torch.set_num_threads(self._threads)
            raise

    def _take_lock(self) -> None:
        self.lock = Lock(self.folder)

    def _release_lock(self, *, undo: bool = False) -> None:
        if self.lock is not None:
            self.lock.release(undo=undo)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        lost = isinstance(error, PeerError) or (error is not None and isinstance(error.__cause__, PeerError))
        try:
            if error is not None and not lost:
                with suppress(GroupwiseError, OSError, RuntimeError):  # the error itself is what matters
                    self.saver.wait()
            self.job.close()
        finally:
            if isinstance(error, Exception) and self._begun and self.first:
                record_end(self.folder, scrubbed(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"))
            self._release_lock()
            torch.set_num_threads(self._threads)
        if isinstance(error, (GroupwiseError, Ended)):
            error.add_note(comm.advice())

    def steps(self) -> Iterator[Step]:
        """Train to the end: evaluate where due, write the log and checkpoints, export the final model."""
        recipe, job = self.recipe, self.job
        # What lies under an adapter is where it came from.
        if self.done == 0 and job.reference is not None and recipe.model.lora is None:
            _export(job.reference, self.folder / REFERENCE, "the reference")
        with self._open_log() as log, endings(self._may_end) as end_if_told:
            log.tokens(job.policy.tokenizer)
            if self.done == 0 and recipe.eval.at_start:
                self.before = job.judge("validation" in recipe.data.parts)  # on what the last evaluation will be on
                if self.before is not None:
                    log.held_out(0, completions(self.before))
                    first = Step(number=0, metrics={}, evaluation=self.before.metrics())
                    comm.from_first(lambda: log.write(first))
                    yield first
            try:
                self._make_up(log)
                for step in job.loop(self.done):
                    told = None
                    if self._due(step.number):
                        step, told = self._judged(step, step.number == job.steps)
                        if step.evaluation is not None and self.after is not None:
                            log.held_out(step.number, completions(self.after))
                    together = told is None or getattr(told, "everywhere", False)
                    with self._undisturbed():
                        self._whole = (step.number, job.taken, job.place())
                        self.done = step.number
                        if together:
                            comm.from_first(lambda step=step: log.write(step))
                        else:  # the others have not been told, or have ended already: this process saves alone, below
                            log.write(step)
                    due = step.number == job.steps or (recipe.save.every and step.number % recipe.save.every == 0)
                    if due and together:
                        log.sync()
                        self._save()
                    if told is not None:
                        raise told
                    yield step
                    end_if_told()
            except (KeyboardInterrupt, Ended):  # the others may have ended already; with sharded weights all end together
                self._save(alone=not job.policy.sharded)
                self.saver.wait()
                raise
            except GeneratorExit:
                self._save()
                self.saver.wait()
                raise
            except Exception as error:
                self._keep(error)
                raise
            self.saver.wait()
            if self.after is None:  # the run was killed behind its last step
                self.after = job.judge(True)
            self._finish(log)

    def _open_log(self) -> RunLog | Unwritten:
        opened: list[RunLog] = []
        self._begun = True

        def begin() -> None:
            opened.append(RunLog(self.folder, self.recipe, done=self.done))
            record_inputs(self.folder, self._inputs, self.done)
            with files.storing(self.folder, "the run"):
                seal(self.folder)

        comm.from_first(begin)
        return opened[0] if self.first else Unwritten()

    def _finish(self, log: RunLog | Unwritten) -> None:
        """Export the final model, and mark the run as finished."""
        final = self.folder / FINAL
        _export(self.job.policy, final, "the final model")
        after = self.after

        def close() -> None:
            with files.storing(final, "the model card"):
                write_card(final, self.recipe, self.job.plan, after)
            log.finish(self.done, {} if after is None else after.metrics())

        comm.from_first(close)

    def _due(self, step: int) -> bool:
        """True if an evaluation belongs behind a step."""
        return step == self.job.steps or bool(self.recipe.eval.every and step % self.recipe.eval.every == 0)

    def _make_up(self, log: RunLog | Unwritten) -> None:
        """Evaluate after the step that the run resumed with, if a signal or an error interrupted that evaluation."""
        if self.done and self._due(self.done) and comm.from_first(lambda: not log.evaluated(self.done)):
            self.after = self.job.judge(self.done == self.job.steps)
            if (found := self.after) is not None:
                comm.from_first(lambda: log.amend(self.done, found.metrics()))
                log.held_out(self.done, completions(found))

    def _keep(self, error: Exception) -> None:
        """Save the last whole step before an error ends the run.

        The first process can do so by itself, unless the weights are sharded: those need all processes, which take part only if the
        error is one that all of them raise.
        """
        everywhere = getattr(error, "everywhere", False)
        if self.job.policy.sharded and not everywhere and comm.world().size > 1:
            return
        try:
            self._save(alone=not everywhere and not self.job.policy.sharded)
            self.saver.wait()
        except (GroupwiseError, OSError, RuntimeError) as failed:
            if str(failed) != str(error):
                error.add_note(f"the last whole step could not be saved: {failed}")

    def _save(self, *, alone: bool = False) -> None:
        """Checkpoint the last whole step; nothing if the step after it has already changed the weights.

        alone: see `Saver.save`.
        """
        number, taken, place = self._whole
        if number and taken == self.job.taken:
            with self._undisturbed():
                self.saver.save(number, self.job.numbers(place), alone=alone)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """While inside, signals wait: something is being written."""
        self._writing = True
        try:
            yield
        finally:
            self._writing = False

    def _judged(self, step: Step, last: bool) -> tuple[Step, BaseException | None]:
        """The step with its evaluation, and None; if the evaluation failed, the step without one (it is saved), and the error."""
        self._judging = True
        try:
            self.after = self.job.judge(last)
        except (KeyboardInterrupt, Ended) as told:
            return step, told
        except (GroupwiseError, OSError) as failed:
            if self.job.policy.sharded and comm.world().size > 1 and not getattr(failed, "everywhere", False):
                raise  # sharded weights could not be saved; whole ones the first process saves by itself
            return step, failed
        finally:
            self._judging = False
        return replace(step, evaluation=self.after.metrics() if self.after is not None else None), None

    def _may_end(self) -> bool:
        """True while the last whole step can be saved from any point of the program, by this process or by the first one."""
        apart = not self.job.policy.sharded or comm.world().size == 1
        unchanged = self._whole[1] == self.job.taken and not self.job.exchanging
        return apart and not self._writing and (self._judging or unchanged)


SHOWN = 32
"""Held-out prompts whose sampled completions are kept at every evaluation."""


def completions(judged: Judged) -> tuple[Scored, ...]:
    """Sampled completions of the first held-out prompts; none where what is held out is not prompts."""
    return judged.groups[:SHOWN] if isinstance(judged, Evaluation) else ()


class Unwritten:
    """The log of a process that writes nothing: the first one does."""

    def __enter__(self) -> Unwritten:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, step: Step) -> None:
        """Nothing."""

    def held_out(self, number: int, groups: Sequence[Scored]) -> None:
        """Nothing."""

    def tokens(self, tokenizer: Any) -> None:
        """Nothing."""

    def evaluated(self, step: int) -> bool:
        """True: nothing is to be made up for."""
        return True

    def amend(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def finish(self, step: int, summary: Mapping[str, float]) -> None:
        """Nothing."""


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with every `stage:NAME` replaced: by the folder of that stage's final model (the model's, the rewards'), or by a
    file of pairs that are made of what the stage sampled (the data's; `stage:NAME:REWARD` by that reward).

    Raises ConfigError if it is not there.
    """
    path, data = recipe.model.path, recipe.data.path
    if path is not None:
        recipe = replace(recipe, model=replace(recipe.model, path=_folder_of(path, recipe, "model.path")))
    if data is not None and data.startswith(STAGE):
        stage, _, judge = data.removeprefix(STAGE).partition(":")
        folder = Path(_folder_of(f"{STAGE}{stage}", recipe, "data.path")).parent
        pairs = comm.from_first(lambda: str(recorded_pairs(folder, judge or None)))
        recipe = replace(recipe, data=replace(recipe.data, path=pairs))
    critic = replace(recipe.critic, path=_folder_of(recipe.critic.path, recipe, "critic.path"))
    rewards = [
        replace(reward, args={key: _folder_of(value, recipe, f"rewards.{place}.args.{key}") for key, value in reward.args.items()})
        for place, reward in enumerate(recipe.rewards)
    ]
    teacher = replace(recipe.teacher, path=_folder_of(recipe.teacher.path, recipe, "teacher.path"))
    return replace(recipe, rewards=tuple(rewards), critic=critic, teacher=teacher)


def _folder_of(value: Any, recipe: Recipe, key: str) -> Any:
    """A value of a recipe; the folder of a stage's final model where it is `stage:NAME`."""
    if not isinstance(value, str) or not value.startswith(STAGE):
        return value
    stage = value.removeprefix(STAGE)
    folder = run_folder(recipe).parent / stage / FINAL
    if not (folder / "config.json").exists():
        raise ConfigError(f"{key}: the stage {stage!r} has not finished: there is no model in {folder}")
    return str(folder)


def train_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    dry_run: bool = False,
    fresh: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
    timeout: float = comm.TIMEOUT,
    world: int | None = None,
    model_config: Mapping[str, Any] | None = None,
    console: Console | None = None,
    report: Callable[[Path], object] | None = None,
) -> int:
    """What `groupwise train` does: every stage of a recipe, one after the other.  Returns the exit status.

    dry_run: only the plans.  fresh: start anew, under a numbered name.  quiet: print warnings and the closing table only.
    accept_changes: see `train`.
    world, model_config: of a dry run, so many processes and the configuration of another model (see `plan_of`).
    report: called with the folder of every stage that has finished; if it fails, that is said and nothing else.
    """
    stages = load_stages(path, overrides)
    here = join(next(iter(stages.values())), timeout)
    console = console or make_console(quiet=not here.first)
    if fresh:
        stages = comm.from_first(lambda: anew(stages))
    outcomes: dict[str, Outcome] = {}
    for number, (name, recipe) in enumerate(stages.items(), 1):
        title = f"{recipe.name} ({number} of {len(stages)})" if len(stages) > 1 else recipe.name
        if dry_run:
            with with_lines(path, overrides, name), Progress(recipe.steps or 1, title, console=console) as progress:
                progress.plan(_plan_from_beginning(recipe, stages, world, model_config))
            continue
        folder, step, more = comm.from_first(lambda recipe=recipe: _standing(recipe))
        if step is not None:
            console.print(safe(f"{title}: finished at step {step}{more or f'; its model is in {folder / FINAL}'}"), soft_wrap=True)
            if more is None:
                continue
        with with_lines(path, overrides, name):
            begun = Run(recipe, folder, accept_changes=accept_changes)
        with begun as run, comm.peers():
            outcomes[name] = train_stage(run, title, console, quiet)
        if report is not None and here.first:
            try:
                report(folder)
            except GroupwiseError as error:
                console.print(safe(f"no report: {error}", style="yellow"), soft_wrap=True)
    if outcomes and not dry_run:
        _closing_table(outcomes, stages[list(outcomes)[-1]], console)
    comm.leave()
    return 0


def _standing(recipe: Recipe) -> tuple[Path, int | None, str | None]:
    """A recipe's folder, the step after which it finished there, and what is to be done nevertheless: its final model is not whole,
    or more steps are wanted.  Raises CheckpointError if that takes a checkpoint, and there is none."""
    folder = choose_folder(recipe)
    step = finished(folder)
    if step is None:
        return folder, None, None
    if recipe.steps is not None and recipe.steps > step:
        more = f"; it continues to step {recipe.steps}"
    elif wrong := unfinished(folder):
        more = f", but {wrong}: it is made again from the last checkpoint"
    else:
        return folder, step, None
    if not checkpoint.exists(folder):
        raise CheckpointError(
            f"{folder} finished at step {step}{more.replace(' it ', ' that ')}, and there is none; use fresh=True"
        )
    return folder, step, more


def train_stage(run: Run, title: str, console: Console, quiet: bool) -> Outcome:
    """Train a run to its end and show it: the plan, the progress line, the table at the end."""
    begin = run.done
    with Progress(run.job.steps, title, console=console, quiet=quiet) as progress:
        resumed = [("resumed", f"after step {begin}")] if begin else []
        _show(lambda: progress.plan([*run.job.plan, *resumed]))
        for step in run.steps():
            _show(lambda step=step: progress.update(step))
        progress.stop()
        progress.summary([("model", str(run.folder / FINAL)), ("log", str(run.folder / "metrics.jsonl"))])
    return Outcome(folder=run.folder, before=run.before, after=run.after, steps=run.done - begin)


def _show(work: Callable[[], None]) -> None:
    """Print; where nobody reads the output any more (`| head`, a terminal that was closed), end the run after its step."""
    try:
        work()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        with suppress(OSError, ValueError):  # what follows goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        end_later(signal.SIGPIPE)


def _plan_from_beginning(
    recipe: Recipe, stages: Mapping[str, Recipe], world: int | None, config: Mapping[str, Any] | None
) -> Lines:
    """The plan of a stage before the stages it builds on exist: their models have the shape of what those start from."""
    if (recipe.data.path or "").startswith(STAGE):
        return [("objective", recipe.objective), ("data", f"pairs of what {recipe.data.path} will have sampled; not there yet")]
    awaited = [reward for reward in recipe.rewards if str(reward.args.get("path")).startswith(STAGE)]
    scorers = [_from_beginning(stages[str(reward.args["path"]).removeprefix(STAGE)], stages) for reward in awaited]
    known = tuple(reward for reward in recipe.rewards if reward not in awaited)
    return plan_of(_from_beginning(replace(recipe, rewards=known), stages), scorers, world=world, config=config)


def _from_beginning(recipe: Recipe, stages: Mapping[str, Recipe]) -> Recipe:
    """The recipe with the model that its first stage starts from: the same shape, and it exists before anything was trained.

    Data that are sampled on the way are replaced by those of the stage before.
    """
    while recipe.model.path is not None and recipe.model.path.startswith(STAGE):
        earlier = stages[recipe.model.path.removeprefix(STAGE)]
        recipe = replace(recipe, model=replace(recipe.model, path=earlier.model.path, scratch=earlier.model.scratch))
        if (recipe.data.path or "").startswith(STAGE):
            recipe = replace(recipe, data=earlier.data)
    return recipe


def _closing_table(outcomes: Mapping[str, Outcome], recipe: Recipe, console: Console) -> None:
    """Held-out figures before, between and after, stages that measure the same in one table, and what to type
    next.  recipe: of the last stage."""
    tables: dict[tuple[str, ...], list[tuple[str, dict[str, str]]]] = {}
    notes: list[str] = []
    for stage, outcome in outcomes.items():
        for label, found in ((f"before {stage}", outcome.before), (f"after {stage}", outcome.after)):
            if found is not None:
                notes += _part(label, found, outcome.after)
                figures = found.summary()
                rows = tables.setdefault(tuple(figures), [])
                if found is outcome.after or not rows:
                    rows.append((label, figures))
    last = list(outcomes.values())[-1].folder
    for columns, rows in tables.items():
        if len(columns) <= ACROSS:
            table = Table("held out", *columns, box=None, pad_edge=False)
            for label, figures in rows:
                table.add_row(label, *figures.values())
        else:
            table = Table("held out", *(label for label, _ in rows), box=None, pad_edge=False)
            for column in columns:
                table.add_row(column, *(figures[column] for _, figures in rows))
        console.print()
        console.print(table)
    if tables:
        said = "; ".join(["on what training never saw", *notes, "± is half of a 95 % interval"])
        console.print(f"({said})", style="dim", highlight=False)
    console.print("\nNext:", highlight=False)
    for line in _next_commands(recipe, last):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _part(label: str, judged: Judged, last: Judged | None) -> list[str]:
    """Which of the held-out prompts a row is about, where `eval.prompts` makes them fewer than those of the last row."""
    if isinstance(judged, Evaluation) and isinstance(last, Evaluation) and judged.prompts < last.prompts:
        return [f"{label}: the first {judged.prompts:,} of {last.prompts:,} prompts"]
    return []


def _next_commands(recipe: Recipe, folder: Path) -> list[str]:
    """Commands to go on with: look at the run, talk to the model, evaluate it again, look at what the rewards said."""
    data, run = recipe.data, str(folder)
    writes = is_online(recipe.objective) or recipe.objective in WRITERS
    held_out = data.task is not None or data.eval_path is not None or bool(data.parts)
    live = any(reward.function.startswith(LIVE) for reward in recipe.rewards) or str(data.path).startswith(LIVE)
    commands = [["groupwise", "view", run]]
    commands += [["groupwise", "chat", run]] if writes else []
    commands += [["groupwise", "eval", run]] if writes and recipe.rewards and held_out and not live else []
    commands += [["groupwise", "score", run]] if recipe.rewards and is_online(recipe.objective) and not live else []
    return [shlex.join(command) for command in commands]


def _export(policy: Policy, folder: Path, what: str) -> None:
    """Write a policy as a plain Hugging Face folder, all or nothing; when this returns, every process can read it."""

    def prepare() -> Path:
        with files.storing(folder, what):
            return files.new_folder(folder)

    def name() -> None:
        with files.storing(folder, what):
            files.sync_tree(temporary)
            written = sorted(path for path in temporary.rglob("*") if path.is_file())
            RunFiles(folder.parent).note((f"{folder.name}/{path.relative_to(temporary)}", files.digest(path)) for path in written)
            files.place(temporary, folder)

    temporary = comm.from_first(prepare)
    with files.storing(folder, what):
        policy.export(temporary)
    comm.from_first(name)
