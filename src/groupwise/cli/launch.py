"""`groupwise launch`: a recipe on the machines of its section `cluster`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from groupwise.cli import arguments as typed

if TYPE_CHECKING:
    from groupwise.launch.commands import LaunchJob

EXAMPLES = (
    "groupwise launch my.yaml --on slurm --dry-run > job.sh   the batch script, to read or to keep",
    "groupwise launch my.yaml --on kubernetes steps=200       submits, with a changed key",
    (
        "groupwise launch my.yaml --on local cluster.trainers.gpus=4"
        " cluster.samplers='{nodes: 1, gpus: 4}'"
    ),
)
PLACES = ("local", "slurm", "skypilot", "kubernetes")


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    typed.recipe(command)
    command.add_argument(
        "--on",
        required=True,
        choices=PLACES,
        help="local: trainers and servers on this machine; else what takes the job",
    )
    command.add_argument("--dry-run", action="store_true", help="print the text and stop")


def run(options: argparse.Namespace) -> int:
    """Print what runs, then run or submit it."""
    from groupwise.launch.commands import launch_job

    job = launch_job(options.recipe, options.overrides)
    if options.on == "local":
        return _run_here(job, dry=options.dry_run)
    from groupwise.launch.submit import submit, text_of

    text = text_of(job, options.on)
    print(text, end="", flush=True)
    if options.dry_run:
        return 0
    return submit(job, options.on, text)


def _run_here(job: LaunchJob, *, dry: bool) -> int:
    from groupwise.launch.local import commands_of, demand_gpus, free_ports, run_local

    if dry:
        print(commands_of(job).text(), end="")
        return 0
    demand_gpus(job)
    samplers = job.cluster.samplers
    commands = commands_of(job, ports=free_ports(samplers.nodes * samplers.per_node))
    print(commands.text(), end="", flush=True)
    return run_local(job, commands, tell=lambda line: print(line, file=sys.stderr, flush=True))
