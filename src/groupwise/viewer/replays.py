"""A step replayed for the viewer: which tokens its update pushed, and which ones another algorithm
would have pushed.

The closed form needs torch, which the viewer does not load: `groupwise replay RUN --step N
--no-model --json --tokens` is started in a process of its own, when it is asked for, one at a time,
and the last answers are kept.

A link may ask for a replay, so all that it can change are the objective and the keys under `group`,
to numbers and single words. Somebody's own code (`module:function`) is refused, also where the
run's recipe names it: looking at a folder must not run what lies in it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
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
CHANGE = re.compile(
    r"(objective|group\.[a-z_]+(\.[a-z_]+)?)=(-?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[a-z][a-z0-9_]*)"
)
"""A change: of the objective or of a key under `group`, to a number or a single word, which names
what Groupwise has.
"""
OBJECTIVES = tuple(
    name for name, row in ALGORITHMS.items() if not (row.needs.critic or row.needs.teacher)
)
"""Objectives that can be replayed without a model: those with a critic or a teacher are not among
them.
"""


Json = dict[str, Any]


def _replayable(part: type[Part]) -> bool:
    """True if a part learns from rewards by log-probs that were recorded, and reads no critic and
    no teacher.
    """
    return part.needs_reward and part.reads_logp and not {"value", "teacher_logp"} & set(part.reads)


def offered() -> Json:
    """What the application offers to change: objectives, parts by kind, and the options of each
    part.
    """
    parts: dict[str, list[str]] = {}
    numbers: dict[str, list[str]] = {}
    for kind in ("credit", "ratio", "surrogate", "weights"):
        parts[kind] = []
        for name, part in PARTS[kind].items():
            if _replayable(part):
                parts[kind].append(name)
                numbers[name] = sorted(parameters(part).keys() - {"beta"})
    return {"objectives": list(OBJECTIVES), "parts": parts, "options": numbers}


def own_code(config: Mapping[str, Any]) -> str | None:
    """The key under which a recipe names code of its own that a replay would import."""
    for key, value in config.items():
        code = isinstance(value, str) and ":" in value
        if code and (key == "objective" or key.startswith("group.")):
            return key
    return None


def checked(text: str) -> list[str]:
    """The changes of `KEY=VALUE;KEY=VALUE`.  Raises DataError for what a link must not change.

    >>> checked("objective=dr_grpo; group.surrogate.high=0.28")
    ['objective=dr_grpo', 'group.surrogate.high=0.28']
    """
    changes = []
    for part in text.split(";"):
        if not part.strip():
            continue
        change = re.sub(r"\s*=\s*", "=", part.strip(), count=1)
        if CHANGE.fullmatch(change) is None:
            raise DataError(
                f"{change}: a replay in the viewer changes objectives and parts that Groupwise has,"
                " and their numbers"
            )
        changes.append(change)
    return changes


def replayed(folder: Path, number: int, place: int, changes: Sequence[str]) -> Json:
    """One group of a replayed step, each token's push in a pass of the step as a share of the
    group's sum of |gradient|.

    `recorded` by the run's own configuration; `replay` by the changed one (by the recorded one
    where nothing was changed); `change` is the second less the first.  Positive: made likelier.
    None where there is no closed form.

    Raises DataError for a step that cannot be replayed, and a group that is not there.
    """
    if not _one.acquire(timeout=LONGEST):
        raise DataError("another replay is still being computed")
    try:
        step = computed(folder, number, tuple(changes))
    finally:
        _one.release()
    if not 0 <= place < len(step["tokens"]):
        raise DataError(f"step {number} has no group {place}")
    rows, outcome = step["tokens"][place], step["changed"] or step["recorded"]
    recorded = _shares([row["recorded"] for row in rows])
    replay = recorded
    change: Columns = [None] * len(rows)
    if changes:
        replay = _shares([row["changed"] for row in rows])
        change = list(map(_difference, recorded, replay))
    columns = {"recorded": recorded, "replay": replay, "change": change}
    scales = {name: _scale(values) for name, values in columns.items()}
    if scales["change"] and scales["replay"]:  # no trifle looks large
        bound = max(scales["change"][1], LEAST * scales["replay"][1])
        scales["change"] = [-bound, bound]
    completions = []
    for i, row in enumerate(rows):
        shown = {name: _plain(values[i]) for name, values in columns.items()}
        completions.append({"index": row["index"], **shown})
    return {
        "algorithm": outcome["algorithm"],
        "without": outcome["without"],
        "loss": [step["recorded"]["loss"], outcome["loss"]],
        "pushes": step.get("pushes"),
        "pass": step["pass"],
        "completions": completions,
        "scales": scales,
    }


_one = threading.Lock()


@lru_cache(KEPT)
def computed(folder: Path, number: int, changes: tuple[str, ...]) -> Json:
    """What `groupwise replay --json --tokens` says of a step.  Raises DataError with what it says
    if it cannot.
    """
    options: list[str] = []
    for change in changes:
        options += ["--set", change]
    command = [
        *COMMAND,
        "replay",
        str(folder.resolve()),
        "--step",
        str(number),
        "--no-model",
        "--json",
        "--tokens",
        *options,
    ]
    outside = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=outside,
            stdin=subprocess.DEVNULL,
            timeout=LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"the replay of step {number} took more than {LONGEST:.0f} s: see groupwise replay"
        ) from error
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        words = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise DataError(words.partition(": ")[2] or words) from error


Columns = list[np.ndarray | None]
"""A number for each token of a completion, of each completion."""


def _shares(gradients: Sequence[Sequence[float] | None]) -> Columns:
    """- dLoss/dlog-prob over the sum of its sizes."""
    columns: Columns = []
    total = 0.0
    for column in gradients:
        pushes = None if column is None else -np.asarray(column, np.float64)
        columns.append(pushes)
        if pushes is not None:
            total += float(np.abs(pushes).sum())
    if not total:
        return columns
    return [None if column is None else column / total for column in columns]


def _difference(one: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """The second less the first; 0 where they differ by no more than the digits that were sent."""
    if one is None or other is None:
        return None
    return np.where(
        np.isclose(one, other, rtol=DIGITS, atol=DIGITS * float(np.abs(one).max(initial=0.0))),
        0.0,
        other - one,
    )


def _plain(column: np.ndarray | None) -> list[float] | None:
    if column is None:
        return None
    return [float(f"{value:.4g}") + 0.0 for value in column.tolist()]


def _scale(columns: Columns) -> list[float] | None:
    """Symmetric around 0; a single outlier must not turn everything else pale."""
    sizes = [np.abs(column) for column in columns if column is not None]
    flat = np.concatenate([np.zeros(0), *sizes])
    if not flat.size:
        return None
    bound = max(float(np.quantile(flat, 0.98)) or float(flat.max()), 1e-9)
    return [-bound, bound]
