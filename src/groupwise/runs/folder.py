"""The run folder: everything about a run that is kept, in files that others can read while it trains (by `run_files`).

    config.yaml               resolved recipe, secrets redacted
    environment.json          one entry per start: versions, git commit, hardware
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

Importing this file does not import torch: `groupwise runs` and `groupwise score` read run folders through it.
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
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from groupwise.config.recipes import changes, dump, run_folder
from groupwise.config.settings import Recipe
from groupwise.data import vocabulary
from groupwise.data.rollout_table import columns_of, groups_of, jsonable
from groupwise.errors import ConfigError, RunError, StorageError
from groupwise.records import Scored, Step
from groupwise.runs import recorded
from groupwise.runs.dashboards.base import Dashboards
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.utils import files
from groupwise.utils.secrets import redacted_command
from groupwise.utils.terminal import json_line, logger

log = logger("groupwise")

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
METRICS, ROLLOUTS, TOKENS, CONFIG, ENVIRONMENT, DONE, LOCK = (
    "metrics.jsonl",
    recorded.ROLLOUTS,
    "tokens.parquet",
    "config.yaml",
    "environment.json",
    "done.json",
    ".lock",
)
LARGEST_CONFIG = 1 << 17
"""Bytes of `config.yaml`: YAML is slow to read."""
FINAL = "final"
"""Folder of the trained model."""
EVALUATED = "eval/"
"""Prefix of an evaluation's figures in the log."""


# ---------------------------------------------------------------- choosing and locking a folder


def anew(stages: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The same stages under the first name of NAME, NAME-2, NAME-3 ... under which none of them has run.

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

    Running the same recipe again resumes it.  Raises ConfigError with the differences if the folder holds a run of another recipe.
    """
    folder = run_folder(recipe)
    run = RunFiles(folder)
    if run.has(CONFIG):
        try:
            different = changes(run.text(CONFIG, LARGEST_CONFIG), recipe)
        except (RunError, ConfigError) as error:
            raise ConfigError(
                f"{folder / CONFIG} is damaged, so that nobody knows whether it is the same run ({error}): restore it, delete it "
                "to continue with the recipe as it is now, or start anew with fresh=True"
            ) from error
        if different:
            lines = "\n".join(f"  {line}" for line in different)
            if all(line.startswith(("steps:", "epochs:")) for line in different) and recipe.optimizer.schedule != "constant":
                lines += (
                    f"\n  (with optimizer.schedule: {recipe.optimizer.schedule} every step's learning rate depends on the last "
                    f"one, so that a longer run is another run; to train its model further: model.path={folder / FINAL} name=...)"
                )
            remedy = "undo the change, choose another name=..., or start anew with fresh=True"
            raise ConfigError(f"{folder} holds a run of another configuration; {remedy}:\n{lines}")
    return folder


class Lock:
    """Keeps a second process out of a run folder, which it makes if need be, while this one writes there.

    Held through the operating system, so it ends with the process however that dies; the file says who holds it.  Where the file
    system cannot lock, the process id and host in the file decide.

    Raises ConfigError if a live process holds it, StorageError if nothing can be written there.
    """

    _held: set[str] = set()  # POSIX locks do not keep a process out of its own files

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder).resolve() / LOCK
        if str(self.path) in self._held:
            raise ConfigError(f"{folder} is in use by this process already")
        self._made = [path for path in (self.path.parent, *self.path.parent.parents) if not path.exists()]
        with files.storing(Path(folder), "the run"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - held until `release`
        self._file.seek(0)
        holder = _holder(self._file.read())
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            cannot_lock = error.errno not in (errno.EACCES, errno.EAGAIN)
            if not cannot_lock or _alive(holder):
                self._file.close()
                who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
                raise ConfigError(f"{folder} is in use by {who}; wait for it, end it, or choose another name=...") from error
        self._held.add(str(self.path))
        try:
            with files.storing(Path(folder), "the run"):
                self._file.seek(0)
                self._file.truncate()
                self._file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
                self._file.flush()
        except StorageError:
            self.release()
            raise

    def release(self, *, undo: bool = False) -> None:
        """Let others in.  Safe to call twice.   undo: also delete the folders that it made, where nothing was written into them."""
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


# ---------------------------------------------------------------- writing


class RunLog:
    """Writes the run folder, step by step.

    done: steps that the run resumed with; what was written of later ones is taken away, because they are taken again, and so is the
    evaluation before the first step if there is none.   Every method raises StorageError if the disk fails.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, done: int = 0) -> None:
        self.folder = Path(folder)
        self.files = RunFiles(self.folder)
        self._every = recipe.save.rollouts_every
        with files.storing(self.folder, "the run"):
            (self.folder / ROLLOUTS).mkdir(exist_ok=True)
            for kind in (recorded.ROLLOUTS, recorded.EVALUATIONS):
                recorded.cut(self.files, kind, done)
            (self.folder / DONE).unlink(missing_ok=True)
            before = self._lines_before() if done else []
            self.files.begin(without=(METRICS,))
            self.files.write(CONFIG, dump(recipe).encode())
            _add_environment(self.files, done)
            self.lines = {line["step"]: line for line in before if line["step"] <= done}
            """What stands in the log, by step."""
            self.files.note_lines(METRICS, (_line(line).encode() for line in self.lines.values()))
            self._write_lines()
            self._run = recipe.name
            sent = max((line["step"] for line in before), default=-1)
            self._dashboards = Dashboards(self.folder, recipe, list(self.lines.values()), sent)
            self._finished = False

    def _lines_before(self) -> list[dict[str, Any]]:
        """What stood in the log; a damaged one is put aside, and goes on without its bad lines."""
        found = LogReader(self.files)
        lines = found.read()
        if found.problems:
            aside = self.folder / "metrics.damaged.jsonl"
            os.replace(self.folder / METRICS, aside)
            log.warning("%s; the log goes on without (as it was: %s)", "; ".join(found.problems), aside.name)
        return lines

    def _write_lines(self) -> None:
        files.write(self.folder / METRICS, b"".join(_line(line).encode() for line in self.lines.values()))
        self._file = open(self.folder / METRICS, "ab")  # noqa: SIM115 - held until `close`

    def write(self, step: Step) -> None:
        """Record a step: its line at once, and its completions where they are due."""
        line: dict[str, Any] = {"step": step.number, **step.metrics}
        line |= {f"time/{phase}": seconds for phase, seconds in step.timings.items()}
        line |= _evaluated(step.evaluation or {})
        line["wall"] = time.time()
        self._check_place()
        try:
            if self._every and step.groups and step.number % self._every == 0:
                with files.storing(self.folder / ROLLOUTS / f"{step.number:06d}.parquet", "the completions of a step"):
                    recorded.write(self.files, ROLLOUTS, step, self._run)
                self._dashboards.table(step)
        finally:  # the step was taken, whatever becomes of its completions
            self._write_line(line)

    def _check_place(self) -> None:
        """Raises StorageError if the folder is not the one that the run began in: half of the run would stand in another."""
        with files.storing(self.folder / METRICS, "the log"):
            if not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.folder / METRICS)):
                raise FileNotFoundError(errno.ENOENT, "it was moved or replaced while the run went on; move it back")

    def _write_line(self, line: dict[str, Any]) -> None:
        with files.storing(self.folder / METRICS, "the log"):
            written = _line(line).encode()
            self.files.note_lines(METRICS, [written])
            self._file.write(written)
            self._file.flush()
        self._dashboards.write(line)
        self.lines[line["step"]] = line

    def evaluated(self, step: int) -> bool:
        """True if the log holds an evaluation after `step` steps."""
        return any(name.startswith(EVALUATED) for name in self.lines.get(step, ()))

    def amend(self, step: int, evaluation: Mapping[str, float]) -> None:
        """Add the evaluation after a step whose line stands there already."""
        before = self.lines.get(step)
        self.lines[step] = (before or {"step": step}) | _evaluated(evaluation)
        with files.storing(self.folder / METRICS, "the log"):
            self.files.note_lines(METRICS, [_line(self.lines[step]).encode()])
            self.files.sync()  # the log is on the disk when it is replaced, and must not be there before its digest
            self._file.close()
            self._write_lines()
            if before is not None:
                self.files.note_replaced(METRICS, _line(before).encode())
        self._dashboards.write({"step": step, "wall": time.time()} | _evaluated(evaluation), again=True)

    def held_out(self, number: int, groups: Sequence[Scored]) -> None:
        """Record completions of held-out prompts after step `number`."""
        if self._every and groups:
            with files.storing(self.folder / recorded.EVALUATIONS, "held-out completions"):
                recorded.write(self.files, recorded.EVALUATIONS, Step(number=number, metrics={}, groups=groups), self._run)

    def tokens(self, tokenizer: Any) -> None:
        """Record the text of every token id once, so that readers of the run need no tokenizer."""
        if not (self.folder / TOKENS).exists():
            with files.storing(self.folder / TOKENS, "the vocabulary"):
                self.files.write(TOKENS, vocabulary.to_bytes(vocabulary.of(tokenizer)))

    def sync(self) -> None:
        """Make what was written survive a power cut; call it before a checkpoint."""
        with files.storing(self.folder / METRICS, "the log"):
            self._file.flush()
            os.fsync(self._file.fileno())
            self.files.sync()

    def finish(self, step: int, summary: Mapping[str, Any] | None = None) -> None:
        """Mark the run as finished after `step` steps."""
        ended: dict[str, Any] = {"step": step, "time": time.time(), **(summary or {})}
        with files.storing(self.folder / DONE, "the end of the run"):
            self.files.write(DONE, json.dumps(jsonable(ended), indent=1).encode())
        self._finished = True

    def close(self) -> None:
        """Close the files.  Safe to call twice."""
        with suppress(OSError):  # a full disk has been told of when the line was written
            self._file.close()
        self._dashboards.close(self._finished)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """What is wrong with the final model of a finished run, the file named; None if every file is there as it was written.

    Files are compared by their checksums, but for those that people edit: a card and a template need only be there, JSON must be
    JSON.
    """
    run = RunFiles(folder)
    if not (names := run.known(f"{FINAL}/")):
        place = run.folder / FINAL  # written before there were checksums
        whole = (place / "config.json").is_file() and any(file.stat().st_size for file in place.glob("*.safetensors"))
        return None if whole else f"{FINAL}/ is not there, or not whole"
    for name in names:
        file, wrong = run.folder / name, None
        if not name.endswith(EDITED):
            try:
                run.verify(name)
            except RunError:  # its remedies are not for a file that is made again
                wrong = "is not what the run wrote" if file.exists() else "is missing"
        elif not file.is_file() or not file.stat().st_size:
            wrong = "is missing or empty"
        elif name.endswith(".json") and not _is_json(file):
            wrong = "is no JSON any more"
        if wrong:
            return f"{name} {wrong}"
    return None


def check_final(model: Path) -> None:
    """Compare a finished run's model with what the run wrote, before it is used.  A warning names a file that people edit.

    Raises RunError for any other.
    """
    run = RunFiles(model.parent)
    for name in run.known(f"{model.name}/"):
        try:
            run.verify(name)
        except RunError as error:
            if not name.endswith(EDITED):
                raise RunError(f"{error}; the training command makes it again from the last checkpoint") from error
            log.warning("%s; it is used as it is", error)


def _is_json(file: Path) -> bool:
    try:
        bounded_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def model_digest(folder: Path) -> str | None:
    """One text that stands for the weights of a finished run's model; None if the run has not finished."""
    run = RunFiles(folder)
    weights = [name for name in run.known(f"{FINAL}/") if name.endswith(".safetensors")]
    if not weights or finished(folder) is None:
        return None
    return " ".join(list(run.digests(name))[-1] for name in weights)


def record_end(folder: Path, why: str) -> None:
    """Note beside a run's last start why it ended.  A disk that does not take it is no matter: the run has ended."""
    run = RunFiles(folder)
    with suppress(RunError, OSError):
        if attempts := attempts_of(run):
            _write_attempts(run, [*attempts[:-1], {**attempts[-1], "ended": why}])


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


def _evaluated(evaluation: Mapping[str, float]) -> dict[str, float]:
    return {EVALUATED + name.removeprefix(EVALUATED): value for name, value in evaluation.items()}


def _line(values: Mapping[str, Any]) -> str:
    return json_line(jsonable(values))


def attempts_of(run: RunFiles) -> list[dict[str, Any]]:
    """The starts of a run, by `environment.json`; none if there is no such file.  Raises RunError."""
    if not run.has(ENVIRONMENT):
        return []
    found = run.json(ENVIRONMENT)
    attempts = found.get("attempts") if isinstance(found, dict) else None
    if not isinstance(attempts, list) or not all(isinstance(attempt, dict) for attempt in attempts):
        raise RunError(f"{run.folder / ENVIRONMENT} holds no attempts")
    return attempts


def _add_environment(run: RunFiles, done: int) -> None:
    """Add this start to those that are there; a file that cannot be read is put aside."""
    try:
        attempts = attempts_of(run)
    except RunError as error:
        attempts, aside = [], run.folder / "environment.damaged.json"
        os.replace(run.folder / ENVIRONMENT, aside)
        log.warning("%s: it is %s now, and begun anew", error, aside.name)
    _write_attempts(run, [*attempts, {"after_step": done, **environment()}])


def _write_attempts(run: RunFiles, attempts: Sequence[Mapping[str, Any]]) -> None:
    run.write(ENVIRONMENT, json.dumps({"attempts": attempts}, indent=1).encode())


def environment() -> dict[str, Any]:
    """Versions, command, commit and hardware of this process.  No environment variable is ever recorded."""
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
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if (torch := sys.modules.get("torch")) is not None:  # only if the run uses it: importing it here would cost seconds
        facts["torch_threads"] = torch.get_num_threads()
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if not facts["gpus"]:
            from groupwise.ops.kernels import absence

            facts["kernels"] = absence() or "compiled"
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit(folder: Path) -> str | None:
    """The git commit of a checkout, with `+` behind it if files differ; None outside of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+" if git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None


# ---------------------------------------------------------------- reading


LARGEST_LOG, MOST_PROBLEMS = 1 << 30, 20
"""Bytes of metrics.jsonl; bad lines of it that are named."""


class LogReader:
    """Reads metrics.jsonl, and on as it grows.

    A line that a run did not write is left out, and named in `problems`.  So is a whole line that is none; a last one that is not
    whole (the run is writing it, or died there) is left for later.
    """

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._clear()

    def _clear(self) -> None:
        self._file: tuple[int, int] | None = None
        self._offset = self._number = 0
        self._matched: set[str] = set()
        self.problems: list[str] = []
        self.restarted = True
        """True if the last `read` began at the first line: what was read before holds no more."""

    def read(self) -> list[dict[str, Any]]:
        """The lines that came since the last call; all of them where the file was replaced (a resumed run).  Raises RunError."""
        self.restarted = False
        if not self._run.has(METRICS):
            return []
        with self._run.open(METRICS) as file:
            status = os.fstat(file.fileno())
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                self._clear()
                self._file = status.st_dev, status.st_ino
            if status.st_size > LARGEST_LOG:
                raise RunError(f"{self._run.folder / METRICS} has more than {LARGEST_LOG:,} bytes")
            file.seek(self._offset)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = whole.split(b"\n")[:-1]
        known = self._run.digests(METRICS).keys()
        digests = [files.digest_of(line) for line in lines] if known else []
        self._matched.update(known & set(digests))
        # A digest that no line has is that of a line which was written otherwise.  Without one, the power went before the digests
        # of the last lines were on the disk.
        altered = bool(known - self._matched)
        entries = []
        for place, line in enumerate(lines):
            self._number += 1
            try:
                if altered and digests[place] not in known:
                    raise ValueError("it is not what the run wrote, its checksum differs")
                entries.append(_entry(line))
            except ValueError as error:
                if len(self.problems) < MOST_PROBLEMS:
                    self.problems.append(f"{self._run.folder / METRICS}:{self._number}: not a line of metrics ({error})")
        return entries


def _entry(line: bytes) -> dict[str, Any]:
    """A line of metrics.jsonl.  Raises ValueError."""
    values = bounded_json(line.decode("utf-8"))
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError("no step in it")
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity") else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts, in order; empty if there is none yet.  A warning names lines that are left out."""
    found = LogReader(RunFiles(folder))
    lines = found.read()
    for problem in found.problems:
        log.warning("%s: it is left out", problem)
    return lines


TAIL = 1 << 16
"""Bytes at the end of the log in which its last line is looked for."""


def last_metrics(run: RunFiles) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty if there is none.  Raises RunError if it is no line of metrics."""
    if not run.has(METRICS):
        return {}
    with run.open(METRICS) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        whole, end, _ = file.read(TAIL).rpartition(b"\n")
    if not end:
        return {}
    try:
        return _entry(whole.rpartition(b"\n")[2])
    except ValueError as error:
        raise RunError(f"{run.folder / METRICS}: its last line is not one of metrics ({error})") from error


def list_rollouts(folder: Path) -> list[int]:
    """The steps whose completions were written, in order."""
    return list(recorded.steps(RunFiles(folder))[0])


def read_step(folder: Path, step: int) -> Step:
    """A recorded step as the record it was: the same ids, log-probs, rewards, advantages, metrics.

    Raises DataError if it is not there, RunError if its file is not what the run wrote.
    """
    run = RunFiles(folder)
    table = recorded.table(run, step)
    try:
        groups, advantages, current = groups_of(table)
        columns = columns_of(table)
    except KeyError as error:
        raise RunError(f"step {step} of {folder}: the recorded completions have no column {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        raise RunError(f"step {step} of {folder}: the recorded completions are damaged: {error}") from error
    lines = {line["step"]: line for line in read_metrics(folder)}
    flat = {name: value for name, value in lines.get(step, {}).items() if name not in ("step", "wall")}
    timings = {name.removeprefix("time/"): flat.pop(name) for name in list(flat) if name.startswith("time/")}
    evaluation = {name: flat.pop(name) for name in list(flat) if name.startswith("eval/")}
    return Step(
        number=step,
        metrics=flat,
        timings=timings,
        groups=tuple(groups),
        advantages=tuple(advantages) if any(advantages) else (),
        current_logp=tuple(current) if any(current) else (),
        columns=columns,
        evaluation=evaluation or None,
    )


def list_runs(root: Path) -> list[Path]:
    """The run folders under `root` (runs, and the stages of runs), sorted by name."""
    return sorted(path.parent for path in {*Path(root).glob(f"*/{CONFIG}"), *Path(root).glob(f"*/*/{CONFIG}")})
