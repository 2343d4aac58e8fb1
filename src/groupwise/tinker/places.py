"""Where checkpoints lie: `tinker://MODEL/weights/NAME` is the folder `MODEL/weights/NAME` of the
server's folder, in the form of a run's checkpoints (`runs/checkpoint.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from groupwise.runs import checkpoint
from groupwise.utils.http import Refused

WEIGHTS, SAMPLER = "weights", "sampler_weights"
"""Kinds of checkpoints: with the optimizer's state, and the weights alone."""
SCHEME = "tinker://"
PART = r"[A-Za-z0-9_][A-Za-z0-9_.:\-]{0,199}"
"""A name of a model or of a checkpoint: part of a path on the disk."""


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """One checkpoint's name."""

    model_id: str
    kind: str
    name: str

    @classmethod
    def read(cls, path: str) -> CheckpointPlace:
        """Read a `tinker://` path.  Raises Refused."""
        found = re.fullmatch(f"{SCHEME}({PART})/({WEIGHTS}|{SAMPLER})/({PART})", path)
        if found is None:
            raise Refused(
                f"{path[:200]!r} is no path of a checkpoint: tinker://MODEL/{WEIGHTS}/NAME or"
                f" tinker://MODEL/{SAMPLER}/NAME"
            )
        return cls(*found.groups())

    @property
    def path(self) -> str:
        """The path as the SDK has it."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    def folder(self, root: Path) -> Path:
        """The folder on the disk."""
        return root / self.model_id / self.kind / self.name

    def newest(self, root: Path) -> Path:
        """Return the checkpoint itself.  Raises Refused where there is none, CheckpointError for a
        damaged one.
        """
        folder = self.folder(root)
        found = checkpoint.latest(folder) if folder.is_dir() else None
        if found is None:
            raise Refused(f"there is no checkpoint {self.path}")
        return found


def name_of(name: str) -> str:
    """Return the name that a checkpoint is to have.  Raises Refused for one that names no file."""
    if re.fullmatch(PART, name) is None:
        raise Refused(
            f"the checkpoint's name {name[:80]!r} must begin with a letter or digit and hold only"
            " letters, digits and _ . : -"
        )
    return name
