"""The starts of a run, in `environment.json`: versions, command, hardware, and why each ended."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from groupwise.config.settings import Recipe
from groupwise.data.rendering import CLOCK
from groupwise.errors import RunError
from groupwise.runs.run_files import RunFiles
from groupwise.utils.redaction import redacted_command
from groupwise.utils.terminal import logger

log = logger("groupwise")


ENVIRONMENT = "environment.json"


LATEST = 1 << 37
"""Unix time of the year 6325: calendars end at 9999."""
PACKAGES = (
    "groupwise",
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "datasets",
    "numpy",
    "pyarrow",
    "math-verify",
    "peft",
)


def attempts_of(run: RunFiles) -> list[dict[str, Any]]:
    """Return the starts of a run by `environment.json`, none without it.  Raises RunError."""
    if not run.has(ENVIRONMENT):
        return []
    record = run.json(ENVIRONMENT)
    attempts = record.get("attempts") if isinstance(record, dict) else None
    if not isinstance(attempts, list) or not all(map(_is_attempt, attempts)):
        raise RunError(f"{run.folder / ENVIRONMENT} holds no attempts")
    return attempts


def _is_attempt(attempt: Any) -> bool:
    """True for a mapping with the time at which a run was started."""
    moment = attempt.get("time") if isinstance(attempt, dict) else None
    return isinstance(moment, int | float) and 0 <= moment < LATEST


def moment_of(folder: Path, now: float) -> float:
    """The time at which a run was first started; `now` of a run that has not been.

    All of its chat templates write this date, on every day on which the run is resumed.
    """
    try:
        attempts = attempts_of(RunFiles(folder))
    except RunError:
        return now  # `add_start` puts the file aside and warns
    return float(attempts[0]["time"]) if attempts else now


def at_moment(recipe: Recipe, moment: float) -> Recipe:
    """The recipe whose chat templates write the date of a moment, a Unix time."""
    variables = {CLOCK: moment, **recipe.data.chat_template_kwargs}
    return replace(recipe, data=replace(recipe.data, chat_template_kwargs=variables))


def add_start(run: RunFiles, done: int, started: float | None = None) -> None:
    """Add this start to those that are there; a file that cannot be read is put aside.

    started: the time of the start; None: now.
    """
    try:
        attempts = attempts_of(run)
    except RunError as error:
        attempts, aside = [], run.folder / "environment.damaged.json"
        os.replace(run.folder / ENVIRONMENT, aside)
        log.warning("%s: it is %s now, and begun anew", error, aside.name)
    start = {"after_step": done, **environment()}
    if started is not None:
        start["time"] = started
    _write_attempts(run, [*attempts, start])


def _write_attempts(run: RunFiles, attempts: Sequence[Mapping[str, Any]]) -> None:
    run.write(ENVIRONMENT, json.dumps({"attempts": attempts}, indent=1).encode())


def environment() -> dict[str, Any]:
    """Versions, command, commit and hardware of this process.  No environment variable is ever
    recorded.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    facts: dict[str, Any] = {
        "time": time.time(),
        "command": redacted_command(sys.argv),
        "versions": versions,
        "git": _commit(Path(__file__).parent),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    # Only if the run uses it: importing it here would cost seconds.
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch_threads"] = torch.get_num_threads()
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if not facts["gpus"]:
            from groupwise.ops.operations import absence

            facts["kernels"] = absence() or "compiled"
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit(folder: Path) -> str | None:
    """The git commit of a checkout, with `+` behind it if files differ; None outside of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout

    try:
        commit = git("rev-parse", "HEAD").strip()
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return f"{commit}+" if changed else commit
    except (OSError, subprocess.SubprocessError):
        return None


def record_end(folder: Path, why: str) -> None:
    """Note beside a run's last start why it ended.  A disk that does not take it is no matter: the
    run has ended.
    """
    run = RunFiles(folder)
    with suppress(RunError, OSError):
        if attempts := attempts_of(run):
            _write_attempts(run, [*attempts[:-1], {**attempts[-1], "ended": why}])
