"""Several runs of one recipe: other seeds, other values of its keys.

    groupwise train my.yaml --seeds 3 --sweep optimizer.lr=1e-6,3e-6

starts six runs, each a `groupwise train` of its own in a folder whose name holds its setting:
runs/mine-lr=1e-6-seed=0 and so on.  The same command resumes what is left of them.

Importing this file does not import torch.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from groupwise.config.recipes import load_stages
from groupwise.config.settings import Recipe
from groupwise.errors import ConfigError, GroupwiseError, RunError
from groupwise.runs.metrics_log import last_metrics
from groupwise.runs.run_files import RunFiles
from groupwise.utils.files import storing
from groupwise.utils.process_main import end_with_parent

POLL, REPORT = 0.2, 60.0
"""Seconds between two looks at the processes, and between two lines about runs that go on."""
LONGEST_NAME = 200
"""Characters of a run's name: a file name has at most 255 bytes."""
LAST_WORDS = 12
"""Lines of a failed run's log that are shown."""
LONGEST_TAG = 64
"""Characters of a tag that W&B takes."""


@dataclass(frozen=True)
class SweepSetting:
    """One run of a sweep: what differs from the recipe.

    name: its run folder below `runs`.  group: the name without the seed, which dashboards group by.
    overrides: `KEY=VALUE` of the swept keys and the seed.
    """

    name: str
    group: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class SweepRun:
    """A run that is checked and can start.

    folders: the run folders of its stages, in order.  log: the file of its output.
    """

    setting: SweepSetting
    folders: tuple[Path, ...]
    log: Path


def split_values(text: str) -> list[str]:
    """Split at the commas that stand outside of brackets and quotes.

    >>> split_values("1e-6,3e-6"), split_values("[0.9, 0.95],[0.9, 0.99]")
    (['1e-6', '3e-6'], ['[0.9, 0.95]', '[0.9, 0.99]'])
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not values[-1].strip("[{ "):  # it begins a value
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def settings(
    name: str, first_seed: int, seeds: int | None, sweeps: Sequence[str]
) -> list[SweepSetting]:
    """List every combination of the swept values and the seeds.

    name: of the recipe.  first_seed: the recipe's; `seeds` count up from it.
    sweeps: `KEY=VALUE,VALUE...` each.   Raises ConfigError.

    >>> for one in settings("mine", 0, 2, ["optimizer.lr=1e-6,3e-6"]):
    ...     print(one.name, one.overrides)
    mine-lr=1e-6-seed=0 ('optimizer.lr=1e-6', 'seed=0')
    mine-lr=1e-6-seed=1 ('optimizer.lr=1e-6', 'seed=1')
    mine-lr=3e-6-seed=0 ('optimizer.lr=3e-6', 'seed=0')
    mine-lr=3e-6-seed=1 ('optimizer.lr=3e-6', 'seed=1')
    """
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        values = split_values(text)
        if not equals or not key or "" in values:
            raise ConfigError(f"--sweep is written KEY=VALUE,VALUE..., got {sweep!r}")
        if key in axes:
            raise ConfigError(f"--sweep names {key} twice: give its values once, with commas")
        axes[key] = values
    if seeds is not None:
        if "seed" in axes:
            raise ConfigError("--seeds and --sweep seed=... say the same thing: give one of them")
        axes["seed"] = [str(first_seed + number) for number in range(seeds)]
    if "name" in axes:
        raise ConfigError(
            "--sweep name=...: the names of a sweep's runs follow from their settings"
        )
    short = [key.rpartition(".")[2] for key in axes]
    found = []
    for values in itertools.product(*axes.values()):
        parts = [name]
        for key, last, value in zip(axes, short, values, strict=True):
            label = last if short.count(last) == 1 else key
            parts.append(f"{label}={re.sub(r'[^A-Za-z0-9.+_-]+', '_', value)}")
        overrides = tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        same = [part for part in parts if not part.startswith("seed=")]
        found.append(SweepSetting("-".join(parts), "-".join(same), overrides))
    for one in found:
        if len(one.name) > LONGEST_NAME:
            raise ConfigError(
                f"the values of --sweep make a folder name of {len(one.name)} characters"
                f" ({one.name[:40]}...), and {LONGEST_NAME} are possible: give a file of rows, a"
                " template or a recipe for each instead"
            )
    names = [one.name for one in found]
    for one in found:
        if names.count(one.name) > 1:
            raise ConfigError(
                f"two runs of the sweep would have the folder {one.name}: give values that"
                " differ in letters, digits or . + -"
            )
    return found


def plan_sweep(
    recipe: str | Path, overrides: Sequence[str], *, seeds: int | None, sweeps: Sequence[str]
) -> list[SweepRun]:
    """Check the recipe of every run of a sweep before the first one starts.  Raises ConfigError."""
    name, first = _named(load_stages(recipe, overrides))
    runs = []
    for setting in settings(name, first.seed, seeds, sweeps):
        stages = load_stages(recipe, [*overrides, *setting.overrides, f"name={setting.name}"])
        folders = tuple(Path(stage.runs) / stage.name for stage in stages.values())
        log = Path(next(iter(stages.values())).runs) / f"{setting.name}.log"
        runs.append(SweepRun(setting, folders, log))
    return runs


def check_inputs(
    recipe: str | Path,
    overrides: Sequence[str],
    runs: Sequence[SweepRun],
    *,
    world: int | None = None,
) -> None:
    """Read the data and make the functions of each setting, as `--dry-run` does of one run.

    The seeds of a setting read the same data: the first one stands for all.  world: processes of
    each run.   Raises ConfigError, DataError.
    """
    from groupwise.api.planning import plan_recipe

    checked = set()
    for run in runs:
        if run.setting.group in checked:
            continue
        checked.add(run.setting.group)
        try:
            plan_recipe(
                recipe,
                [*overrides, *run.setting.overrides, f"name={run.setting.name}"],
                world=world,
                console=Console(quiet=True),
            )
        except GroupwiseError as error:
            error.add_note(f"found before any run of the sweep started, in {run.setting.name}")
            raise


def tags_of(setting: SweepSetting) -> str:
    """Write the setting as W&B's list of tags, which commas separate.

    >>> tags_of(SweepSetting("a", "a", ("optimizer.betas=[0.9, 0.95]", "seed=0")))
    'optimizer.betas=[0.9; 0.95],seed=0'
    """
    tags = [override.replace(",", ";")[:LONGEST_TAG] for override in setting.overrides]
    return ",".join(tags)


def _named(stages: Mapping[str, Recipe]) -> tuple[str, Recipe]:
    """Return the name of a recipe, without that of a stage, and its first stage."""
    stage, first = next(iter(stages.items()))
    return first.name.removesuffix(f"/{stage}"), first


def run_sweep(
    recipe: str | Path,
    overrides: Sequence[str],
    runs: Sequence[SweepRun],
    *,
    flags: Sequence[str] = (),
    at_once: int | None = None,
    threads: int | None = None,
    tell: Callable[[str], None] = print,
) -> int:
    """Run what is left of a sweep; returns 0, or 1 if a run failed.

    flags: options of `groupwise train` for each.  at_once: runs side by side; by default one for
        each GPU, or for each core where there is no GPU.  threads: the recipe's; by default the
        cores are shared out.   tell: prints a line.

    A run that fails does not end the others.  Ctrl-C ends all after their current steps, and so
    does a disk on which no run can begin (StorageError).
    """
    devices = _devices()
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if at_once is None:
        at_once = len(devices) or cores
    at_once = min(at_once, len(runs))
    environment = dict(os.environ)
    if threads is None:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // at_once)))
    sweep = _Sweep(recipe, overrides, flags, environment, tell)
    waiting = list(runs)
    free = [devices[place % len(devices)] if devices else None for place in range(at_once)]
    reported = time.monotonic()
    try:
        while waiting or sweep.running:
            while waiting and free:
                sweep.start(waiting.pop(0), free.pop())
            time.sleep(POLL)
            free += sweep.ended()
            if time.monotonic() - reported > REPORT:
                reported = time.monotonic()
                sweep.report()
    except (KeyboardInterrupt, GroupwiseError) as error:
        sweep.interrupt()
        error.add_note("the same command resumes what is left of the sweep")
        raise
    for failed in sweep.failed:
        tell(f"failed: {failed.setting.name}; its output is in {failed.log}")
    return 1 if sweep.failed else 0


def _devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name for name in listed.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


class _Sweep:
    """The processes of a sweep."""

    def __init__(
        self,
        recipe: str | Path,
        overrides: Sequence[str],
        flags: Sequence[str],
        environment: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> None:
        self.command = [sys.executable, "-P", "-u", "-m", "groupwise", "train", str(recipe)]
        self.overrides, self.flags = list(overrides), list(flags)
        self.environment, self.tell = environment, tell
        self.running: dict[subprocess.Popen[bytes], tuple[SweepRun, str | None]] = {}
        self.begins: dict[subprocess.Popen[bytes], int] = {}
        self.failed: list[SweepRun] = []

    def start(self, run: SweepRun, device: str | None) -> None:
        """Start the process of a run, on one device."""
        environment = dict(self.environment)
        environment.setdefault("WANDB_RUN_GROUP", run.setting.group)
        environment.setdefault("WANDB_TAGS", tags_of(run.setting))
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        named = [*self.overrides, *run.setting.overrides, f"name={run.setting.name}"]
        parent = os.getpid()
        with storing(run.log, "the output of a run"):
            run.log.parent.mkdir(parents=True, exist_ok=True)
            output = run.log.open("ab")
        with output as log:
            begins = log.tell()
            process = subprocess.Popen(
                [*self.command, *named, *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches it once, from here
                preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
            )
        self.running[process] = run, device
        self.begins[process] = begins
        self.tell(f"begun: {run.setting.name}")

    def ended(self) -> list[str | None]:
        """Tell of the runs that have ended; returns their devices."""
        devices = []
        for process, (run, device) in list(self.running.items()):
            status = process.poll()
            if status is None:
                continue
            del self.running[process]
            devices.append(device)
            if status == 0:
                self.tell(f"finished: {run.setting.name}: {_standing(run)}")
                continue
            self.failed.append(run)
            said = run.log.read_bytes()[self.begins[process] :]
            lines = said.decode("utf-8", "replace").splitlines()
            shown = "\n".join(f"  {line}" for line in lines[-LAST_WORDS:])
            self.tell(f"failed with status {status}: {run.setting.name}\n{shown}")
        return devices

    def report(self) -> None:
        """Tell how far the runs are."""
        for run, _ in self.running.values():
            self.tell(f"running: {run.setting.name}: {_standing(run)}")

    def interrupt(self) -> None:
        """End all runs after their steps; at a second Ctrl-C at once."""
        for process in self.running:
            process.send_signal(signal.SIGINT)
        try:
            for process in self.running:
                process.wait()
        except KeyboardInterrupt:
            for process in self.running:
                process.kill()
                process.wait()


def _standing(run: SweepRun) -> str:
    """Return the step and the figures that a run's newest stage has reached."""
    for folder in reversed(run.folders):
        try:
            last = last_metrics(RunFiles(folder))
        except RunError as error:
            return str(error)
        if last:
            parts = [f"step {last['step']}"]
            for name in ("reward", "loss", "eval/greedy", "eval/reward", "eval/loss"):
                if isinstance(last.get(name), float):
                    parts.append(f"{name} {last[name]:.4g}")
            return ", ".join(parts)
    return "no step yet"
