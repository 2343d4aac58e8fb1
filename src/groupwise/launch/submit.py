"""The programs that take what was written: sbatch, sky, kubectl."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupwise.errors import ConfigError
from groupwise.launch import kubernetes, skypilot, slurm
from groupwise.launch.commands import LaunchJob, demand_no_secret


@dataclass(frozen=True)
class System:
    """What takes a launched recipe.

    write: makes the text of a job.   program: takes it.   options: words of the program for a job.
    from_file: the program reads a file, whose name stands last; others read their input.
    """

    write: Callable[[LaunchJob], str]
    program: str
    options: Callable[[LaunchJob], list[str]]
    from_file: bool = False


SYSTEMS = {
    "slurm": System(slurm.script, "sbatch", lambda _: []),
    "skypilot": System(skypilot.job_group, "sky", skypilot.options, from_file=True),
    "kubernetes": System(kubernetes.manifests, "kubectl", lambda _: ["apply", "--filename=-"]),
}
"""The systems, by the names that `groupwise launch --on` takes."""


def text_of(job: LaunchJob, system: str) -> str:
    """Write what a system takes.

    Raises ConfigError for a job that it cannot take, and for a secret in the text.
    """
    return demand_no_secret(SYSTEMS[system].write(job))


def submit(job: LaunchJob, system: str, text: str) -> int:
    """Hand a text to its system, and return the exit status of the program that took it.  Raises
    ConfigError where the program is not installed.
    """
    taking = SYSTEMS[system]
    words = [taking.program, *taking.options(job)]
    if not taking.from_file:
        return _run(words, text)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        return _run([*words, file.name], "")


def _run(words: Sequence[str], text: str) -> int:
    try:
        return subprocess.run(words, input=text, text=True).returncode
    except FileNotFoundError as error:
        raise ConfigError(
            f"{words[0]} is not installed here: add --dry-run, and take the text to a machine that"
            " has it"
        ) from error
