"""Saving a job in checkpoints, and resuming it from the newest one that is whole: bit for bit as if it had not been interrupted.

A policy that each process holds whole is written by the first process, at once; a sharded one by all processes, in the background,
while training continues.  For a sharded policy every process copies its shard of the optimizer state, and its share of the policy's
tensors, to host memory.  A thread then writes both.  When all have done so, the first process seals and renames the checkpoint;
until then the one before is the newest.

`checkpoint.py` says what a checkpoint holds.  `folder.choose_folder` compares the recipe with the run's, and `inputs.check_inputs`
its data, rewards and models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from groupwise.config.settings import Recipe
from groupwise.distributed import comm, sharded_checkpoint
from groupwise.errors import CheckpointError, GroupwiseError, RunError, StorageError
from groupwise.models.policy import Policy
from groupwise.models.saving import save_to_resume
from groupwise.models.sharded import own_parts, write_parts
from groupwise.runs import checkpoint
from groupwise.runs.folder import FINAL
from groupwise.runs.job import Job, make_job
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files, threads

Found = TypeVar("Found")


class Saver:
    """Writes checkpoints of a job; all processes make the same calls."""

    def __init__(self, folder: Path, job: Job, keep: int) -> None:
        """keep: newest checkpoints that stay."""
        self.folder, self.job, self.keep = folder, job, keep
        self._writing: Future[None] | None = None
        self._saved = 0
        """The last step that was saved."""

    def save(self, step: int, state: Mapping[str, Any], *, alone: bool = False) -> None:
        """Save the job as it is now, with `state` beside it, once; returns when what is saved may change again.

        alone: other processes may be lost: nothing is exchanged with them, so a sharded policy cannot be saved.
        Raises StorageError on all processes, if not now then at the next call or in `wait`.
        """
        self.wait()
        if step == self._saved:
            return
        policy, tensors = self.job.policy, self.job.tensors()
        weights = sum(parameter.nbytes for parameter in policy.model.parameters())
        if not policy.sharded:
            write = partial(
                checkpoint.save,
                self.folder,
                step,
                policy_writer=partial(save_to_resume, policy),
                state=state,
                tensors=tensors,
                keep=self.keep,
                policy_bytes=weights,
            )
            if not alone:
                comm.from_first(write)
            elif comm.world().first:
                write()
            set_failure_hint(checkpoint.latest(self.folder) if alone else checkpoint.place(self.folder, step))
            self._saved = step
            return
        needed = weights + sum(tensor.nbytes for tensor in tensors.values())
        temporary = comm.from_first(lambda: checkpoint.begin(self.folder, step, needed))
        if temporary is not None:
            parts = own_parts(policy)
            staged = sharded_checkpoint.Staged(temporary / "trainer" / sharded_checkpoint.SHARDS, tensors)
            group = comm.open_aside()
            work = (temporary, step, dict(state), policy, parts, staged, group)
            self._writing = threads.begin(lambda: self._write(*work), "checkpoint")

    def wait(self) -> None:
        """Return when everything is on the disk.  Raises StorageError or PeerError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self,
        temporary: Path,
        step: int,
        state: Mapping[str, Any],
        policy: Policy,
        parts: Mapping[str, Tensor],
        staged: sharded_checkpoint.Staged,
        group: Any,
    ) -> None:
        here = comm.world()

        def write() -> None:
            staged.write(group)
            write_parts(policy, temporary / "policy", parts)
            if here.first:
                checkpoint.write_state(temporary, state)

        checkpoint.complete(temporary, step, write, keep=self.keep, rank=here.rank, size=here.size, together=_together)
        set_failure_hint(checkpoint.place(self.folder, step))
        self._saved = step


def _together(work: Callable[[], Found]) -> list[Found]:
    """Every process's result; a failure on one is raised on all."""
    found, wrong = [], None
    try:
        found = [work()]
    except Exception as error:  # whatever it is, the others wait to hear of it
        wrong = str(error) if isinstance(error, (GroupwiseError, OSError)) else f"{type(error).__name__}: {error}"
    outcomes = comm.gather([(found, wrong)], aside=True)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise StorageError(f"process {rank} could not write its part of a checkpoint: {failure}")
    return [one for ones, _ in outcomes for one in ones]


def set_failure_hint(newest: Path | None) -> None:
    """Note the newest checkpoint, which the message of a later failure names."""
    saved = f"the last checkpoint is {newest}; the same command continues from there" if newest is not None else None
    comm.set_failure_hint(saved or "nothing was saved yet (save.every): the same command begins anew")


# ---------------------------------------------------------------- resuming


REFERENCE = "reference"
"""Folder of a run: the weights before the first step, where a reference is needed."""


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; None if the run has saved none.  Raises CheckpointError, StorageError.

    An export of the final model that was interrupted is completed or taken back first.
    """
    with files.storing(folder, "the run"):
        for name in (FINAL, REFERENCE):
            files.recover(folder / name)
    return checkpoint.latest(folder)


def check_reference(folder: Path) -> None:
    """Raises CheckpointError if the weights before the first step, or their tokenizer, are not what the run wrote."""
    try:
        RunFiles(folder).verify_folder(REFERENCE)
    except RunError as error:
        raise CheckpointError(f"the KL would be to other weights: {error}, or start anew with --fresh") from error


def resumed_job(recipe: Recipe, folder: Path, newest: Path | None) -> Job:
    """The job of a run at its newest checkpoint, whose bytes have just been verified; a new job if that is None."""
    job = make_job(recipe, resume=None if newest is None else newest / "policy", reference=folder / REFERENCE)
    if newest is None:
        return job
    try:
        job.restore(checkpoint.load(newest, verify=False), reader(newest))
    except BaseException:
        job.close()
        raise
    return job


def reader(path: Path) -> Callable[[Mapping[str, Tensor]], None]:
    """A function that fills tensors by name, sharded or not, from a verified checkpoint, however many processes wrote it."""
    folder = path / "trainer" / sharded_checkpoint.SHARDS
    if folder.is_dir():
        return lambda into: sharded_checkpoint.read(folder, into)
    return lambda into: checkpoint.read_tensors(path, into)
