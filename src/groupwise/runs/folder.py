"""The run folder: everything about a run that is kept, in files that others can read while it
trains (by `run_files`).

    config.yaml               resolved recipe, secrets redacted
    environment.json          one entry per start: versions, command, hardware, why it ended
    metrics.jsonl             one line a step
    rollouts/000012.parquet   one row per completion of that step
    evaluations/              the same of the held-out prompts, where there were evaluations
    tokens.parquet            the text of every token id
    tensorboard/ wandb/       the same metrics for dashboards (`save.report_to`)
    dashboards.json           what those call the run
    inputs.json               data and reward files: what they held when the run began
    done.json                 written when the last step is taken: the files of the final model
    checksums.txt             of all of these, but for the dashboards'
    .lock                     held by the process that writes here

Importing this file does not import torch: `groupwise runs` and `groupwise score` read run folders
through it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from groupwise.config.recipes import changes, parse_recorded, run_folder
from groupwise.config.settings import Recipe
from groupwise.config.strict_yaml import parse
from groupwise.data.rendering import CLOCK
from groupwise.errors import CheckpointError, ConfigError, RunError, StorageError
from groupwise.runs.metrics_log import METRICS, read_metrics
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.utils import files
from groupwise.utils.files import expanded
from groupwise.utils.secrets import redacted_command
from groupwise.utils.spelling import near_path
from groupwise.utils.terminal import logger

log = logger("groupwise")

CONFIG, DONE, LOCK = "config.yaml", "done.json", ".lock"
LARGEST_CONFIG = 1 << 17
"""Bytes of `config.yaml`: YAML is slow to read."""
FINAL = "final"
"""Folder of the trained model."""
REFERENCE = "reference"
"""Folder with the weights before the first step, where a reference is needed."""


# ---------------------------------------------------------------- choosing and locking a folder


def anew(stages: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The same stages under the first name of NAME, NAME-2, NAME-3 ... under which none of them has
    run.

    They move together, so that a later one still builds on the earlier ones' models.
    """
    number, renamed = 1, dict(stages)
    while any((run_folder(recipe) / CONFIG).exists() for recipe in renamed.values()):
        number += 1
        for stage, recipe in stages.items():
            root = recipe.name.removesuffix(f"/{stage}")
            renamed[stage] = replace(recipe, name=f"{root}-{number}{recipe.name[len(root) :]}")
    return renamed


def choose_folder(recipe: Recipe) -> Path:
    """The folder in which a recipe runs; `Lock` makes it.

    Running the same recipe again resumes it.  Raises ConfigError with the differences if the folder
    holds a run of another recipe."""
    folder = run_folder(recipe)
    run = RunFiles(folder)
    if run.has(CONFIG):
        try:
            different = changes(run.text(CONFIG, LARGEST_CONFIG), recipe)
        except (RunError, ConfigError) as error:
            raise ConfigError(
                f"{folder / CONFIG} is damaged, so that nobody knows whether it is the same run"
                f" ({error}): restore it, delete it to continue with the recipe as it is now, or"
                " start anew with fresh=True"
            ) from error
        if different:
            lines = "\n".join(f"  {line}" for line in different)
            if (
                all(line.startswith(("steps:", "epochs:")) for line in different)
                and recipe.optimizer.schedule != "constant"
            ):
                lines += (
                    f"\n  (with optimizer.schedule: {recipe.optimizer.schedule} every step's"
                    " learning rate depends on the last one, so that a longer run is another run;"
                    f" to train its model further: model.path={folder / FINAL} name=...)"
                )
            remedy = "undo the change, choose another name=..., or start anew with fresh=True"
            raise ConfigError(f"{folder} holds a run of another configuration; {remedy}:\n{lines}")
    return folder


class Lock:
    """Keeps a second process out of a run folder, which it makes if need be, while this one writes
    there.

    Held through the operating system, so it ends with the process however that dies; the file says
    who holds it.  Where the file system cannot lock, the process id and host in the file decide.

    Raises ConfigError if a live process holds it, StorageError if nothing can be written there.
    """

    _held: set[str] = set()  # POSIX locks do not keep a process out of its own files

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder).resolve() / LOCK
        if str(self.path) in self._held:
            raise ConfigError(f"{folder} is in use by this process already")
        self._made = [
            path for path in (self.path.parent, *self.path.parent.parents) if not path.exists()
        ]
        with files.storing(Path(folder), "the run"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # held until `release`
            self._file: IO[str] = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115
        self._file.seek(0)
        holder = _holder(self._file.read())
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            cannot_lock = error.errno not in (errno.EACCES, errno.EAGAIN)
            if not cannot_lock or _alive(holder):
                self._file.close()
                who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
                raise ConfigError(
                    f"{folder} is in use by {who}; wait for it, end it, or choose another name=..."
                ) from error
        self._held.add(str(self.path))
        try:
            with files.storing(Path(folder), "the run"):
                self._file.seek(0)
                self._file.truncate()
                self._file.write(
                    json.dumps(
                        {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
                    )
                )
                self._file.flush()
        except StorageError:
            self.release()
            raise

    def release(self, *, undo: bool = False) -> None:
        """Let others in.  Safe to call twice.   undo: also delete the folders that it made, where
        nothing was written into them.
        """
        if self._file.closed:
            return
        with suppress(OSError):  # a full disk, which may have been the reason
            self._file.seek(0)
            self._file.truncate()
        if undo and self._made and os.listdir(self.path.parent) == [LOCK]:
            with suppress(OSError):  # another process's file: the folder is in use after all
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()
        with suppress(OSError):
            self._file.close()
        self._held.discard(str(self.path))

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _holder(text: str) -> dict[str, Any]:
    try:
        holder = bounded_json(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _alive(holder: Mapping[str, Any]) -> bool:
    """True unless the holder is known to be gone; a process of another host counts as alive."""
    if not isinstance(pid := holder.get("pid"), int):
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def in_use(folder: Path) -> bool:
    """True if a live process of this host writes there; for display only."""
    try:
        return _alive(_holder(RunFiles(folder).text(LOCK)))
    except RunError:
        return False


# ---------------------------------------------------------------- how a run stands


def finished(folder: Path) -> int | None:
    """The step after which a run finished, or None."""
    step = _ended(folder).get("step")
    return step if isinstance(step, int) else None


def _ended(folder: Path) -> Mapping[str, Any]:
    """What `RunLog.finish` wrote; empty if it did not, or if that is damaged."""
    try:
        ended = RunFiles(folder).json(DONE)
    except RunError:
        return {}
    return ended if isinstance(ended, dict) else {}


EDITED = (".json", ".md", ".jinja")
"""Files of a model that people edit."""


def unfinished(folder: Path) -> str | None:
    """What is wrong with the final model of a finished run, the file named; None if it can be used.

    Files are compared by their checksums, but for those that people edit: a card and a template
    need only be there, JSON must be JSON.
    """
    run = RunFiles(folder)
    if not (names := run.known(f"{FINAL}/")):
        place = run.folder / FINAL  # written before there were checksums
        whole = (place / "config.json").is_file() and any(
            file.stat().st_size for file in place.glob("*.safetensors")
        )
        return None if whole else f"{FINAL}/ is not there, or not whole"
    for name in names:
        file = run.folder / name
        if not file.is_file() or not file.stat().st_size:
            return f"{name} is missing or empty"
        if name.endswith(".json") and not _is_json(file):
            return f"{name} is no JSON any more"
        if not name.endswith(EDITED) and _altered(run, name):
            return f"{name} is not what the run wrote"
    return None


def check_final(model: Path) -> None:
    """Compare a finished run's model with what the run wrote, before it is used.  A warning names a
    file that people edit.

    Raises RunError for any other.
    """
    run = RunFiles(model.parent)
    for name in run.known(f"{model.name}/"):
        if (wrong := _altered(run, name)) is None:
            continue
        if not name.endswith(EDITED):
            raise RunError(f"{wrong}; the training command makes it again from the last checkpoint")
        log.warning("%s; it is used as it is", wrong)


def check_reference(folder: Path) -> None:
    """Raises CheckpointError if the weights before the first step, or their tokenizer, are not what
    the run wrote.
    """
    try:
        RunFiles(folder).verify_folder(REFERENCE)
    except RunError as error:
        raise CheckpointError(
            f"the KL would be to other weights: {error}, or start anew with --fresh"
        ) from error


def _altered(run: RunFiles, name: str) -> str | None:
    """Why a file is not what the run wrote."""
    try:
        run.verify(name)
    except RunError as error:
        return str(error)
    return None


def _is_json(file: Path) -> bool:
    try:
        bounded_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def model_digest(folder: Path) -> str | None:
    """One text that stands for the weights of a finished run's model; None if the run has not
    finished.
    """
    run = RunFiles(folder)
    weights = [name for name in run.known(f"{FINAL}/") if name.endswith(".safetensors")]
    if not weights or finished(folder) is None:
        return None
    return " ".join(list(run.digests(name))[-1] for name in weights)


def standing(run: RunFiles) -> tuple[str, str]:
    """`finished`, `live`, `failed` or `stopped`; and why it failed, else nothing."""
    if finished(run.folder) is not None:
        return "finished", ""
    if in_use(run.folder):
        return "live", ""
    with suppress(RunError):
        if (attempts := attempts_of(run)) and isinstance(why := attempts[-1].get("ended"), str):
            return "failed", why
    return "stopped", ""


def list_runs(root: Path) -> list[Path]:
    """The run folders under `root` (runs, and the stages of runs), sorted by name."""
    return sorted(
        path.parent for path in {*Path(root).glob(f"*/{CONFIG}"), *Path(root).glob(f"*/*/{CONFIG}")}
    )


# ---------------------------------------------------------------- the starts of a run


ENVIRONMENT = "environment.json"
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
    if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
        raise RunError(f"{run.folder / ENVIRONMENT} holds no attempts")
    return attempts


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
    facts: dict[str, Any] = {
        "time": time.time(),
        "command": redacted_command(sys.argv),
        "versions": versions,
        "git": _commit(Path(__file__).parent),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if (
        torch := sys.modules.get("torch")
    ) is not None:  # only if the run uses it: importing it here would cost seconds
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
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


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
        return git("rev-parse", "HEAD").strip() + (
            "+" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
        )
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


# ---------------------------------------------------------------- the run that a path belongs to


HEIGHT = 3
"""From runs/x/checkpoints/000100/policy up to runs/x."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A run, known by its folder."""

    folder: Path
    recipe: Recipe
    config: str
    """The text that the recipe was read from: the run's `config.yaml`."""

    @property
    def step(self) -> int:
        """The last step in its log; 0 if there is none."""
        return max((line["step"] for line in read_metrics(self.folder)), default=0)

    @property
    def dated(self) -> Recipe:
        """The recipe whose chat templates write the date of the run's first start."""
        return at_moment(self.recipe, moment_of(self.folder, time.time()))


def overridden(origin: Origin, overrides: Sequence[str]) -> Origin:
    """The run with overrides of its recipe.  Raises ConfigError, RunError."""
    if not overrides:
        return origin
    place = str(origin.folder / CONFIG)
    return replace(origin, recipe=parse_recorded(origin.config, place, overrides))


def origin_of(path: str | Path) -> Origin | None:
    """The run of a run folder, or of a model, checkpoint, rollouts or file inside of one; None if
    no run made it.

    Of a run of several stages the stage that was written last is meant.  Data, models and reward
    functions that the recipe names need not be there any more.  Raises RunError or ConfigError if
    the run's `config.yaml` cannot be read.
    """
    place = expanded(path)
    if not place.exists():
        return None
    place = place.resolve()
    for folder in (place, *list(place.parents)[:HEIGHT]):
        if _is_run(folder):
            shown = expanded(path) if folder == place else folder
            return _read(shown)
    stages = (
        sorted(place.glob(f"*/{METRICS}"), key=lambda log: log.stat().st_mtime)
        if place.is_dir()
        else []
    )
    return (
        _read(expanded(path) / stages[-1].parent.name)
        if stages and _is_run(stages[-1].parent)
        else None
    )


def is_config_of(path: str | Path, origin: Origin) -> bool:
    """Return whether a path is the `config.yaml` of a run, and not a recipe that has this name."""
    begun = RunFiles(origin.folder).has(METRICS) or RunFiles(origin.folder).has(ENVIRONMENT)
    return begun and expanded(path).resolve() == (origin.folder / CONFIG).resolve()


def run_of(path: str | Path, otherwise: str = "") -> Origin:
    """`origin_of` what must be a run's.   otherwise: the end of the message where it is none.
    Raises ConfigError, RunError.
    """
    if (origin := origin_of(path)) is None:
        if not os.path.exists(expanded(path)):
            raise ConfigError(f"no such folder {str(path)!r}{near_path(expanded(path))}{otherwise}")
        raise ConfigError(f"{path} is no run folder: it has no {CONFIG}{otherwise}")
    return origin


def _is_run(folder: Path) -> bool:
    """True for a folder with a recipe in it."""
    run = RunFiles(folder)
    if not run.has(CONFIG):
        return False
    try:
        document, problems = parse(run.text(CONFIG, LARGEST_CONFIG), CONFIG)
    except RunError:
        return True  # whoever reads it says what is wrong
    return bool(problems) or (isinstance(document.values, dict) and "objective" in document.values)


def _read(folder: Path) -> Origin:
    text = RunFiles(folder).text(CONFIG, LARGEST_CONFIG)
    return Origin(folder=folder, recipe=parse_recorded(text, str(folder / CONFIG)), config=text)
