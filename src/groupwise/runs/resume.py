"""Resuming a run: it goes on from its newest checkpoint that is whole, to the bit.

What a checkpoint holds is `checkpoint.py`'s.  That the recipe is still the run's is asked where its folder is chosen
(`folder.choose_folder`), that its data, rewards and models are, by `inputs.check_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from groupwise.config.settings import Recipe
from groupwise.distributed import sharded_checkpoint
from groupwise.runs import checkpoint
from groupwise.runs.build import Job, make_job
from groupwise.runs.folder import FINAL
from groupwise.utils import files

REFERENCE = "reference"
"""Folder of a run: the weights before the first step, where a reference is needed."""


def newest_checkpoint(folder: Path) -> Path | None:
    """Where a run goes on: its newest checkpoint that is whole; None if it has saved none.  Raises CheckpointError, StorageError.

    A model whose export was interrupted is put in order first.
    """
    with files.storing(folder, "the run"):
        for name in (FINAL, REFERENCE):
            files.recover(folder / name)
    return checkpoint.latest(folder)


def resumed_job(recipe: Recipe, folder: Path, newest: Path | None) -> Job:
    """The job of a run as its newest checkpoint left it, whose bytes have just been verified; a new one if that is None."""
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
    """Fills tensors, whole or spread, by name, from a checkpoint that was found to be whole, whoever wrote it."""
    folder = path / "trainer" / sharded_checkpoint.SHARDS
    if folder.is_dir():
        return lambda into: sharded_checkpoint.read(folder, into)
    return lambda into: checkpoint.read_tensors(path, into)
