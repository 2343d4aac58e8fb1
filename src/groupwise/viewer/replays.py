"""A step replayed for the viewer: which tokens its update pushed, and which ones another algorithm would have pushed.

The closed form needs torch, which the viewer does not load: `groupwise replay RUN --step N --no-model --json --tokens` is started
in a process of its own, when it is asked for, one at a time, and the last answers are kept.

A link may ask for a replay, so what it can change is a fixed list: objectives and parts by the names that Groupwise has, and their
numbers.  Names of somebody's own code (`module:function`) are refused, also where the run's recipe holds them: looking at a folder
must not run what lies in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.algorithms.parts import Part, parameters
from groupwise.algorithms.table import ALGORITHMS, PARTS
from groupwise.errors import DataError

KEPT = 4
"""Replays that are kept, each with all tokens of a step."""
LEAST = 0.1
"""Least scale of a change, as a share of the scale of the pushes."""
LONGEST = 180.0
"""Seconds that a replay may take."""
DIGITS = 2e-5
"""Relative difference that rounding explains."""
COMMAND = (sys.executable, "-P", "-m", "groupwise")
"""What starts Groupwise.  -P: nothing is imported from the working directory."""
NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
SINGLE = {
    "group.beta": (),
    "group.kl": ("k1", "k2", "k3", "k3_ratio"),
    "group.off_policy_delta": (),
    "group.dead_groups": ("exact", "drop"),
    "group.truncated": ("keep", "mask"),
}
"""Keys with one value, and the words that it may be; all of them may be a number."""
OBJECTIVES = tuple(name for name, row in ALGORITHMS.items() if not (row.needs_value or row.needs_teacher))
"""Objectives that can be replayed without a model: those with a critic or a teacher are not among them."""


def _replayable(part: type[Part]) -> bool:
    """True if a part learns from rewards by log-probs that were recorded, and reads no critic and no teacher."""
    return part.needs_reward and part.reads_logp and not {"value", "teacher_logp"} & set(part.reads)


CHANGED = {
    kind: {name: sorted(parameters(part).keys() - {"beta"}) for name, part in PARTS[kind].items() if _replayable(part)}
    for kind in ("credit", "ratio", "surrogate", "weights")
}
"""By kind and name of a part: its options."""

Json = dict[str, Any]


def offered() -> Json:
    """What the application offers to change."""
    options = {name: own for parts in CHANGED.values() for name, own in parts.items()}
    return {"objectives": list(OBJECTIVES), "parts": {kind: list(parts) for kind, parts in CHANGED.items()}, "options": options}


def own_code(config: Mapping[str, Any]) -> str | None:
    """The key under which a recipe names code of its own that a replay would import."""
    said = (key for key, value in config.items() if isinstance(value, str) and ":" in value)
    return next((key for key in said if key == "objective" or key.startswith("group.")), None)


def checked(text: str) -> list[str]:
    """The changes of `KEY=VALUE;KEY=VALUE`.  Raises DataError for what is not in the fixed list.

    >>> checked("objective=dr_grpo; group.surrogate.high=0.28")
    ['objective=dr_grpo', 'group.surrogate.high=0.28']
    """
    found = []
    for change in filter(None, (part.strip() for part in text.split(";"))):
        key, _, value = (part.strip() for part in change.partition("="))
        if not _allowed(key, value):
            raise DataError(
                f"{key}={value}: a replay in the viewer changes objectives and parts that Groupwise has, and their numbers"
            )
        found.append(f"{key}={value}")
    return found


def _allowed(key: str, value: str) -> bool:
    if key == "objective":
        return value in OBJECTIVES
    if key in SINGLE:
        return value in SINGLE[key] or NUMBER.fullmatch(value) is not None
    part = key.removeprefix("group.").partition(".")
    if not key.startswith("group.") or part[0] not in CHANGED:
        return False
    if part[2] in ("", "name"):
        return value in CHANGED[part[0]]
    known = {option for options in CHANGED[part[0]].values() for option in options}
    return part[2] in known and (NUMBER.fullmatch(value) is not None or value in ("true", "false", "group", "batch", "none"))


class Replays:
    """Replays of steps, computed one at a time."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int, tuple[str, ...]], Json] = OrderedDict()
        self._lock = threading.Lock()

    def step(self, folder: Path, number: int, changes: Sequence[str]) -> Json:
        """What `groupwise replay --json --tokens` says.  Raises DataError with what it says if it cannot."""
        key = (str(folder), number, tuple(changes))
        if not self._lock.acquire(timeout=LONGEST):
            raise DataError("another replay is still being computed")
        try:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            self._kept[key] = found = _computed(folder, number, changes)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found
        finally:
            self._lock.release()

    def group(self, folder: Path, number: int, place: int, changes: Sequence[str]) -> Json:
        """One group of it, each token's push in the step's last pass as a share of the group's sum of |gradient|.

        `recorded` by the run's own configuration; `replay` by the changed one (by the recorded one where nothing was changed);
        `change` is the second less the first.  Positive: made likelier.   None where there is no closed form.
        """
        found = self.step(folder, number, changes)
        if not 0 <= place < len(found["tokens"]):
            raise DataError(f"step {number} has no group {place}")
        rows = found["tokens"][place]
        recorded = _shares([row["recorded"] for row in rows])
        changed = _shares([row["changed"] for row in rows]) if changes else recorded
        columns = []
        for one, other in zip(recorded, changed, strict=True):
            difference = _difference(one, other)
            columns.append({"recorded": _plain(one), "replay": _plain(other), "change": _plain(difference) if changes else None})
        said = found["changed"] or found["recorded"]
        return {
            "algorithm": said["algorithm"],
            "without": said["without"],
            "loss": [found["recorded"]["loss"], said["loss"]],
            "pushes": found.get("pushes"),
            "completions": [{"index": row["index"], **own} for row, own in zip(rows, columns, strict=True)],
            "scales": {
                "recorded": _scale([own["recorded"] for own in columns]),
                "replay": (whole := _scale([own["replay"] for own in columns])),
                "change": _scale([own["change"] for own in columns], least=LEAST * whole[1] if whole else 0.0),
            },
        }


def _computed(folder: Path, number: int, changes: Sequence[str]) -> Json:
    options = [text for change in changes for text in ("--set", change)]
    command = [*COMMAND, "replay", str(folder.resolve()), "--step", str(number), "--no-model"]
    outside = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [*command, "--json", "--tokens", *options],
            capture_output=True,
            text=True,
            env=outside,
            stdin=subprocess.DEVNULL,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"the replay of step {number} took more than {LONGEST:.0f} s: see groupwise replay") from error
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        said = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise DataError(said.partition(": ")[2] or said) from error


def _shares(gradients: Sequence[Sequence[float] | None]) -> list[np.ndarray | None]:
    """- dLoss/dlog-prob over the sum of its sizes."""
    columns = [None if column is None else -np.asarray(column, np.float64) for column in gradients]
    total = sum(float(np.abs(column).sum()) for column in columns if column is not None)
    return [column if column is None or not total else column / total for column in columns]


def _difference(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """The second less the first; 0 where they differ by no more than the digits that were sent."""
    if one is None or other is None:
        return None
    return np.where(np.isclose(one, other, rtol=DIGITS, atol=DIGITS * float(np.abs(one).max(initial=0.0))), 0.0, other - one)


def _plain(column: np.ndarray | None) -> list[float] | None:
    return None if column is None else [float(f"{value:.4g}") + 0.0 for value in column.tolist()]


def _scale(columns: Sequence[Sequence[float] | None], least: float = 0.0) -> list[float] | None:
    """Symmetric around 0; a single outlier must not turn everything else pale, and no trifle looks large."""
    flat = np.abs(np.array([value for column in columns if column is not None for value in column]))
    if not flat.size:
        return None
    bound = max(float(np.quantile(flat, 0.98)) or float(flat.max()), least, 1e-9)
    return [-bound, bound]
