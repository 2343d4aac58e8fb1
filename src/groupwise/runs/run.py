"""A run from its recipe to its final model: resume, log, save, evaluate, export.

`train` yields every `Step`.  What the command does with it, for every stage of a recipe:
`api/stages.py`.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from groupwise.config.live_objects import LIVE, Live, source_of
from groupwise.config.recipes import demand_objects, dump
from groupwise.config.settings import Recipe
from groupwise.config.texts import with_texts
from groupwise.distributed import comm, process_group
from groupwise.errors import Ended, GroupwiseError, PeerError, RewardError
from groupwise.models.loading import resolve_device
from groupwise.models.policy import Policy
from groupwise.models.saving import export
from groupwise.records import RolloutGroup, Step
from groupwise.runs import checkpoint, dashboards
from groupwise.runs.best import BestEvaluation
from groupwise.runs.checkpoint import Saver, reader, set_failure_hint
from groupwise.runs.final_model import check_reference
from groupwise.runs.folder import FINAL, PARTS, REFERENCE, choose_folder
from groupwise.runs.inputs import check_inputs, inputs_of, record_inputs, resolved
from groupwise.runs.interrupts import endings
from groupwise.runs.job import Job, Judged, make_job
from groupwise.runs.lock import Lock
from groupwise.runs.model_card import write_card
from groupwise.runs.run_files import RunFiles
from groupwise.runs.run_log import EVALUATED, RunLog
from groupwise.runs.run_models import fit_threads
from groupwise.runs.starts import at_moment, moment_of, record_end
from groupwise.runs.trust import seal
from groupwise.training.evaluate import Evaluation
from groupwise.training.objectives import OBJECTIVES
from groupwise.utils import files
from groupwise.utils.secrets import scrubbed
from groupwise.utils.spelling import counted
from groupwise.utils.statistics import Estimate
from groupwise.utils.terminal import logger


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class RunResult:
    """What a run came to."""

    folder: Path
    before: Judged | None
    """The first evaluation; of a resumed run what its log holds, figures without completions."""
    after: Judged | None
    steps: int
    """Steps taken by this process."""
    exported: str | None = None
    """Which model was exported, where the recipe has `eval.best`."""

    def __repr__(self) -> str:
        """A few lines: where the run lies and what it came to."""
        held = [
            (f"before: {self.before!r}" if self.before else ""),
            (f"after: {self.after!r}" if self.after else ""),
        ]
        return "\n".join(
            [
                f"RunResult({counted(self.steps, 'step')}, in {self.folder})",
                *(f"  {line}" for line in held if line),
            ]
        )


def train(recipe: Recipe, *, accept_changes: bool = False) -> Iterator[Step]:
    """Run a recipe and yield its steps; the run folder is written on the way.  Running it again
    resumes it.

    A step numbered 0 carries the evaluation before training.  Leaving the loop, or the program,
    between two steps saves the last.
    accept_changes: resume although data, functions or models that the run names have changed since
        it began.
    Raises ConfigError, DataError, RewardError, EngineError, CheckpointError, StorageError,
    Diverged.

    >>> from groupwise.config.recipes import load_recipe
    >>> for step in train(load_recipe("recipes/demo.yaml")):  # doctest: +SKIP
    ...     print(step.number, step.metrics["reward"])
    """
    steps = _train(recipe, accept_changes)
    _loops.add(steps)
    return steps


_loops: WeakSet[Generator[Step]] = WeakSet()
"""Loops that `train` returned and nobody has left."""


def _leave(process: int) -> None:
    """When a program ends between two steps, leave its loops; a fork of it leaves none."""
    if os.getpid() != process:
        return
    with ExitStack() as leaving:  # all are left, also where one raises
        for steps in list(_loops):
            leaving.callback(_leave_one, steps)


def _leave_one(steps: Generator[Step]) -> None:
    if comm.world().size == 1:
        steps.close()
    else:
        with suppress(_ProgramEnds):
            steps.throw(_ProgramEnds())


class _ProgramEnds(Ended):
    """The program of several processes ends, and some of them may have failed: nothing is exchanged
    any more.
    """


def _train(recipe: Recipe, accept_changes: bool) -> Generator[Step]:
    join(recipe)
    folder = comm.from_first(lambda: choose_folder(recipe))
    with Run(recipe, folder, accept_changes=accept_changes) as run, comm.peers():
        if run.first and run.done < run.job.steps:
            for text in run.job.prepared.warnings:
                logger(__name__).warning("%s", text)
        yield from run.steps()


def join(recipe: Recipe, timeout: float = process_group.TIMEOUT) -> comm.World:
    """Meet the other processes of the run, if a launcher started several.  timeout: see
    `process_group.join`.
    """
    return process_group.join(timeout, cuda=resolve_device(recipe.model).type == "cuda")


class Run:
    """A recipe in its folder, locked for this process.

    Use it as a context manager; `steps()` trains, and `before`, `after` and `job` are there to look
    at.  Of several processes only the first writes; all of them must take the same steps.
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
            self._started = comm.from_first(time.time)
            moment = comm.from_first(lambda: moment_of(folder, self._started))
            self.job: Job = resumed_job(at_moment(meant, moment), folder, newest)
            fit_threads(self.job.policy, recipe.threads)
            rewards = self.job.prepared.rewards
            if rewards is not None and self.done < self.job.steps:
                comm.from_first(rewards.reach_servers)
            self.saver = Saver(folder, self.job, recipe.save.keep)
            self.best = BestEvaluation.of(recipe.eval)
            # The last whole step: its number, the optimizer steps taken by then, and where the data
            # stood.
            self._whole = (self.done, self.job.taken, self.job.data_state())
            self._writing = self._begun = False
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
        lost = error is not None and isinstance(error.__cause__, PeerError)
        try:
            if error is not None and not lost and not isinstance(error, PeerError):
                # The error itself is what matters.
                with suppress(GroupwiseError, OSError, RuntimeError):
                    self.saver.wait()
            self.job.close()
        finally:
            if isinstance(error, Exception) and self._begun and self.first:
                first_line = str(error).partition("\n")[0]
                record_end(self.folder, scrubbed(f"{type(error).__name__}: {first_line}"))
            self._release_lock()
            torch.set_num_threads(self._threads)
        if isinstance(error, (GroupwiseError, Ended, KeyboardInterrupt)):
            error.add_note(process_group.failure_hint())
        if isinstance(error, RewardError) and error.of_file and checkpoint.exists(self.folder):
            error.add_note(
                "with a repaired file of reward functions it continues by accept_changes=True"
            )

    def steps(self) -> Iterator[Step]:
        """Train to the end: log and save each step, evaluate where due, export the final model."""
        recipe, job = self.recipe, self.job
        # What lies under an adapter is where it came from.
        if self.done == 0 and job.reference is not None and recipe.model.lora is None:
            _export(job.reference, self.folder / REFERENCE, "the reference")
        with self._open_log() as log, endings(self._may_end) as end_if_told:
            comm.from_first(lambda: log.tokens(job.policy.tokenizer))
            logged = comm.from_first(lambda: log.lines.get(0)) if self.done else None
            if self.best is not None:
                self.best = comm.from_first(lambda: self._best_of(log))
                self.saver.pinned = self.best.step
            if self.done == 0 and recipe.eval.at_start:
                # On what the last evaluation will be on.
                self.before = job.judge("validation" in recipe.data.parts)
                if self.before is not None:
                    first = Step(number=0, metrics={}, evaluation=self.before.metrics())
                    comm.from_first(lambda: log.write(first))
                    comm.from_first(lambda: log.held_out(0, completions(self.before)))
                    yield first
            try:
                if self.done and self._due():
                    evaluated = comm.from_first(lambda: log.evaluated(self.done))
                    if not evaluated:  # a signal or an error interrupted that evaluation
                        self._evaluate(log)
                for step in iter(()) if self._stops else job.loop(self.done):
                    with self._undisturbed():
                        self._whole = (step.number, job.taken, job.data_state())
                        self.done = step.number
                        comm.from_first(lambda step=step: log.write(step))
                    if self._falls_on(recipe.save.every):
                        comm.from_first(lambda: log.sync())
                        self._save()
                    if self._due():
                        step = replace(step, evaluation=self._evaluate(log))
                    if self._stops:
                        comm.from_first(lambda: log.sync())
                        self._save()
                    yield step
                    end_if_told()
                    if self._stops:
                        break
            except (KeyboardInterrupt, Ended) as end:
                # The others may have ended already; with sharded weights all end together.
                if not (job.policy.sharded and isinstance(end, _ProgramEnds)):
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
            if self.best is not None:
                self._go_back()
            # None: the run was killed behind its last step.
            if self.after is None or self.best is not None:
                self.after = job.judge(True)
            if logged is not None and self.after is not None:
                self.before = judged_before(logged, recipe, self.after)
            self._finish(log)

    @contextmanager
    def _open_log(self) -> Iterator[RunLog]:
        """The log.  Of several processes only the first opens it, and only the first may call it
        (`comm.from_first`).
        """
        self._begun = True
        opened: list[RunLog] = []

        def begin() -> None:
            opened.append(RunLog(self.folder, self.recipe, done=self.done, started=self._started))
            record_inputs(self.folder, self._inputs, self.done)
            self._keep_parts()
            with files.storing(self.folder, "the run"):
                seal(self.folder, dump(self.recipe))

        try:
            comm.from_first(begin)
            # It runs before what a dashboard's library has registered: the last is called first.
            atexit.unregister(_leave)
            atexit.register(_leave, os.getpid())
            yield opened[0] if opened else None  # type: ignore[misc]
        finally:
            for log in opened:
                log.close()
                with suppress(OSError):  # a full disk has been told of; the last seal stays
                    seal(self.folder, dump(self.recipe))  # models with code of their own were saved

    def _keep_parts(self) -> None:
        """Write the source of each part of the loss that the program gave as an object."""

        def keep(key: str, text: str) -> str:
            if key.startswith("group.") and isinstance(text, Live):
                source = source_of(text.value)
                if source is not None:
                    (self.folder / PARTS).mkdir(exist_ok=True)
                    name = text.removeprefix(LIVE)
                    RunFiles(self.folder).write(f"{PARTS}/{name}.py", source.encode())
            return text

        with files.storing(self.folder / PARTS, "the source of a part"):
            with_texts(self.recipe, keep)

    def _evaluate(self, log: RunLog) -> dict[str, float] | None:
        """Evaluate after the last step, whose line stands in the log already, and add the figures
        to it.
        """
        number = self.done
        # Evaluations that are compared with each other are on the same rows.
        whole = number == self.job.steps and self.best is None
        self.after = judged = self.job.judge(whole)
        if judged is None:
            return None
        figures = judged.metrics()
        with self._undisturbed():
            comm.from_first(lambda: log.amend(number, figures))
            comm.from_first(lambda: log.held_out(number, completions(judged)))
        if self.best is not None:
            name = self.best.figure
            value = comm.from_first(lambda: figures.get(name))
            if self.best.add(number, value):
                self.saver.pinned = number
                comm.from_first(lambda: log.sync())
                self._save()
        return figures

    @property
    def _stops(self) -> bool:
        """True if `eval.stop_after` ends the run here."""
        return self.best is not None and self.best.stops

    def _best_of(self, log: RunLog) -> BestEvaluation:
        """The best evaluation by the log, of a run that may have been resumed."""
        new = BestEvaluation.of(self.recipe.eval)
        assert new is not None
        best = replace(new).read(log.lines)
        if best.step is None or checkpoint.path_of(self.folder, best.step).is_dir():
            return best
        logger(__name__).warning(
            "the checkpoint of step %d, the best by %s, is not there any more: evaluations are"
            " compared from step %d on",
            best.step,
            best.figure,
            self.done,
        )
        return new

    def _go_back(self) -> None:
        """Go back to the weights of the best evaluation, which are exported."""
        assert self.best is not None
        if self.best.step is None or self.best.step == self.done:
            return
        place = checkpoint.path_of(self.folder, self.best.step)
        numbers = comm.from_first(lambda: checkpoint.load(place))
        self.job.go_back(place / "policy", numbers, reader(place))
        self._whole = (self.best.step, self.job.taken, self.job.data_state())

    def _finish(self, log: RunLog) -> None:
        """Export the final model, and mark the run as finished."""
        final = self.folder / FINAL
        _export(self.job.policy, final, "the final model")
        after = self.after
        ended: dict[str, Any] = {} if after is None else after.metrics()
        plan = self.job.plan
        if self.best is not None:
            ended["exported"] = self.exported
            plan.append(("exported", self.best.describe()))
        if self.best is not None and self.best.stops:
            ended["stopped"] = self.best.why()

        def close() -> None:
            with files.storing(final, "the model card"):
                write_card(final, self.recipe, plan, after)
            log.finish(self.done, ended)

        comm.from_first(close)

    @property
    def exported(self) -> str | None:
        """Which model is exported, and why the run ended early; None without `eval.best`."""
        if self.best is None:
            return None
        text = self.best.describe()
        if self.best.stops:
            text += f"; the run ended at step {self.done}: {self.best.why()}"
        return text

    def _due(self) -> bool:
        """True if an evaluation belongs behind the step that has just been taken."""
        return self._falls_on(self.recipe.eval.every)

    def _falls_on(self, every: int | None) -> bool:
        """True if the step that has just been taken is the last one, or one of every so many."""
        return self.done == self.job.steps or bool(every and self.done % every == 0)

    def _keep(self, error: Exception) -> None:
        """Save the last whole step before an error ends the run.

        The first process can do so by itself, unless the weights are sharded: those need all
        processes, which take part only if the error is one that all of them raise.
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
        """Checkpoint the last whole step; nothing if the step after it has already changed the
        weights.

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

    def _may_end(self) -> bool:
        """True while the last whole step can be saved from any point of the program, by this
        process or by the first one.
        """
        apart = not self.job.policy.sharded or comm.world().size == 1
        unchanged = self._whole[1] == self.job.taken and not self.job.exchanging
        return apart and not self._writing and unchanged


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; None if the run has saved none.  Raises CheckpointError,
    StorageError.

    An export of the final model that was interrupted is completed or taken back first.
    """
    with files.storing(folder, "the run"):
        for name in (FINAL, REFERENCE):
            files.recover(folder / name)
    return checkpoint.latest(folder)


def resumed_job(recipe: Recipe, folder: Path, newest: Path | None) -> Job:
    """The job of a run at its newest checkpoint, whose bytes have just been verified; a new job if
    that is None.
    """
    if newest is None:
        return make_job(recipe, reference=folder / REFERENCE)
    job = make_job(recipe, resume=newest / "policy", reference=folder / REFERENCE)
    try:
        job.restore(checkpoint.load(newest, verify=False), reader(newest))
    except BaseException:
        job.close()
        raise
    return job


def judged_before(line: Mapping[str, Any], recipe: Recipe, after: Judged) -> Judged | None:
    """The evaluation before the first step, by the figures of its line of the log, in the form of
    the last one; None if the line holds none."""
    figures = {}
    for name, value in line.items():
        if name.startswith(EVALUATED):
            figures[name.removeprefix(EVALUATED)] = float(value)
    if not figures:
        return None

    def figure(name: str) -> Estimate:
        return Estimate(figures.get(name, math.nan), figures.get(f"{name}/half_width", math.nan))

    if not isinstance(after, Evaluation):
        shown = {}
        for label, name in OBJECTIVES[recipe.objective].objective(recipe).headlines.items():
            estimate = figure(name)
            shown[label] = str(estimate)
            if math.isnan(estimate.half):
                shown[label] = f"{estimate.mean:.4g}"
        if "validation" in recipe.data.parts:  # the rules judged the same rows
            for label, text in after.summary().items():
                shown.setdefault(label, text)
        return replace(after, figures=figures, shown=shown)
    prompts, part = after.prompts, recipe.eval.prompts
    if part is not None and "validation" not in recipe.data.parts:
        prompts = min(part, prompts)
    unjudged = {}
    for name in after.by_function:
        key = f"rewards/{name}/none"
        if key in figures:
            unjudged[name] = figures[key]
    return replace(
        after,
        prompts=prompts,
        greedy=figure("greedy"),
        sampled=figure("sampled"),
        pass_at_k=figure(f"pass@{after.k}"),
        greedy_reward=figure("greedy_reward"),
        reward=figure("reward"),
        length=figure("completions/mean_length").mean,
        truncated=figure("completions/clipped_ratio").mean,
        by_function={name: figure(f"rewards/{name}") for name in after.by_function},
        none=unjudged,
        by_column={},
        groups=(),
        answers=(),
    )


SHOWN = 32
"""Held-out prompts whose sampled completions are kept at every evaluation."""


def completions(judged: Judged | None) -> tuple[RolloutGroup, ...]:
    """Sampled completions of the first held-out prompts; none where what is held out is not
    prompts.
    """
    return judged.groups[:SHOWN] if isinstance(judged, Evaluation) else ()


def _export(policy: Policy, folder: Path, what: str) -> None:
    """Write a policy as a plain Hugging Face folder, all or nothing; when this returns, every
    process can read it.
    """

    def prepare() -> Path:
        with files.storing(folder, what):
            return files.new_folder(folder)

    def name() -> None:
        with files.storing(folder, what):
            files.sync_tree(temporary)
            digests = []
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    place = f"{folder.name}/{path.relative_to(temporary)}"
                    digests.append((place, files.digest(path)))
            RunFiles(folder.parent).note(digests)
            files.rename_into(temporary, folder)

    temporary = comm.from_first(prepare)
    with files.storing(folder, what):
        export(policy, temporary)
    comm.from_first(name)
