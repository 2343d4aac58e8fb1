"""A recipe as a JobGroup of SkyPilot: a job with the trainers, and one for each machine of servers.

The group ends with its trainers.  A machine that is lost is replaced by SkyPilot, and the run
continues from its folder on the storage that all machines mount.
"""

from __future__ import annotations

from typing import Any

from groupwise.config.strict_yaml import dump
from groupwise.errors import ConfigError
from groupwise.launch.commands import (
    FIRST_PORT,
    MEETING_PORT,
    SHARED,
    LaunchJob,
    broken_lines,
    exports,
    listed,
    shell,
)

TRAINERS = "trainers"
"""Name of the job with the trainers; a job of servers is `samplers-NUMBER`."""


def job_group(job: LaunchJob) -> str:
    """Write a JobGroup, or a plain task where the trainers sample.  Raises ConfigError for a job
    without storage, and for GPUs of an unknown kind.
    """
    _check(job)
    samplers = job.cluster.samplers
    tasks = [_trainers(job)]
    for number in range(samplers.nodes):
        tasks.append(_samplers(job, number))
    if len(tasks) == 1:
        return dump(tasks[0])
    header = {
        "name": job.label,
        "execution": "parallel",
        "primary_tasks": [TRAINERS],
        "termination_delay": "30s",
    }
    return "---\n".join(dump(document) for document in (header, *tasks))


def options(job: LaunchJob) -> list[str]:
    """Return the words behind `sky` that launch a file."""
    words = ["jobs", "launch", "--yes", "--detach-run"]
    for name in job.cluster.variables:
        words += ["--secret", name]
    return words


def _check(job: LaunchJob) -> None:
    cluster = job.cluster
    gpus = cluster.trainers.gpus + cluster.samplers.nodes * cluster.samplers.gpus
    if gpus and cluster.accelerator is None:
        raise ConfigError(
            "cluster.accelerator is missing: SkyPilot looks for GPUs of a kind, accelerator: H100"
        )
    if cluster.storage is None:
        raise ConfigError(
            "cluster.storage is missing: name the volume or the bucket that holds the run folder"
            " when a machine is replaced"
        )
    if "://" in cluster.storage and cluster.nodes > 1:
        raise ConfigError(
            f"cluster.storage: {cluster.storage} is a bucket, and {cluster.nodes} machines write"
            " into one folder: name a volume (`sky volumes apply`)"
        )


def _task(job: LaunchJob, name: str, nodes: int, gpus: int, run: str) -> dict[str, Any]:
    """Make a task of SkyPilot.   gpus: of each node.   run: shell lines."""
    cluster = job.cluster
    resources: dict[str, Any] = {}
    if cluster.infra is not None:
        resources["infra"] = cluster.infra
    if gpus:
        resources["accelerators"] = f"{cluster.accelerator}:{gpus}"
    if cluster.cpus is not None:
        resources["cpus"] = f"{cluster.cpus}+"
    if cluster.image is not None:
        resources["image_id"] = f"docker:{cluster.image}"
    task: dict[str, Any] = {"name": name, "num_nodes": nodes, "resources": resources}
    if cluster.folder is None:
        task["workdir"] = "."
    if cluster.variables:
        task["secrets"] = dict.fromkeys(cluster.variables)
    storage = str(cluster.storage)
    if "://" in storage:
        task["file_mounts"] = {SHARED: {"source": storage, "mode": "MOUNT_CACHED"}}
    else:
        task["volumes"] = {SHARED: storage}
    lines = [exports(job)]
    if cluster.folder is not None:
        lines.append(shell(["cd", cluster.folder]))
    if cluster.setup is not None:
        lines.append(cluster.setup.rstrip())
    task["run"] = "\n".join([*lines, run]) + "\n"
    return task


def _trainers(job: LaunchJob) -> dict[str, Any]:
    trainers, samplers = job.cluster.trainers, job.cluster.samplers
    addresses = []
    for machine in range(samplers.nodes):
        # What SkyPilot calls the first machine of a job, for the other jobs of its group.
        host = f"{_sampler(machine)}-0.{job.label}"
        for number in range(samplers.per_node):
            addresses.append(f"http://{host}:{FIRST_PORT + number}")
    lines = []
    if trainers.nodes > 1:
        lines.append('head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)')
    meeting = job.meeting(f"$head:{MEETING_PORT}", "$SKYPILOT_TASK_ID")
    words = job.train(
        meeting=meeting, servers=listed(addresses), runs=SHARED, weights=job.shared_weights
    )
    lines.append(broken_lines(f"exec {shell(words)}"))
    name = TRAINERS if samplers.nodes else job.label
    return _task(job, name, trainers.nodes, trainers.gpus, "\n".join(lines))


def _sampler(machine: int) -> str:
    return f"samplers-{machine}"


def _samplers(job: LaunchJob, machine: int) -> dict[str, Any]:
    samplers = job.cluster.samplers
    lines = []
    for number in range(samplers.per_node):
        serve = shell(job.serve(host="0.0.0.0", port=str(FIRST_PORT + number)))
        lines.append(broken_lines(f"{job.devices(number)}{serve}") + " &")
    lines.append("wait")
    return _task(job, _sampler(machine), 1, samplers.gpus, "\n".join(lines))
