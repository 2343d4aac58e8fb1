"""Resuming a run from its newest checkpoint that is whole; the resumed run equals an uninterrupted one bit for bit.

`checkpoint.py` says what a checkpoint holds.  `folder.choose_folder` compares the recipe with the run's, and `inputs.check_inputs`
its data, rewards and models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from groupwise.config.settings import Recipe
from groupwise.distributed import sharded_checkpoint
from groupwise.errors import CheckpointError, RunError
from groupwise.runs import checkpoint
from groupwise.runs.folder import FINAL
from groupwise.runs.job import Job, make_job
from groupwise.runs.run_files import RunFiles
from groupwise.utils import files

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
