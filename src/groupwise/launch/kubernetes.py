"""A recipe as objects of Kubernetes: an indexed Job with a headless Service, or with servers a
JobSet (jobset.sigs.k8s.io), which ends the servers when the trainers are done.

A pod that is evicted saves and is replaced.  A pod that fails ends the others by their heartbeat;
all begin again from the last checkpoint.
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

TRAINERS, SAMPLERS = "trainers", "samplers"
RESTARTS = 10
"""Failures after which the job is given up."""
SECRET = "groupwise"
"""Name of the Secret that holds `cluster.variables`."""


def manifests(job: LaunchJob) -> str:
    """Write the objects of a job, one YAML document each.  Raises ConfigError without image or
    storage.
    """
    for name, purpose in (
        ("image", "the container image with Groupwise in it"),
        ("storage", "the PersistentVolumeClaim that holds the run folder, ReadWriteMany"),
    ):
        if getattr(job.cluster, name) is None:
            raise ConfigError(f"cluster.{name} is missing: name {purpose}")
    if job.model is not None:
        return dump(_job_set(job))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.label},
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": job.label},
            "publishNotReadyAddresses": True,  # the trainers meet before they are ready
        },
    }
    alone = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.label},
        "spec": _trainers(job, f"{job.label}-0.{job.label}", []),
    }
    alone["spec"]["template"]["spec"]["subdomain"] = job.label
    return "---\n".join(dump(document) for document in (service, alone))


def _job_set(job: LaunchJob) -> dict[str, Any]:
    """Make a JobSet: it restarts as a whole, and is done when its trainers are."""
    samplers = job.cluster.samplers
    servers = samplers.nodes * samplers.per_node
    addresses = []
    for number in range(servers):
        addresses.append(f"http://{job.label}-{SAMPLERS}-0-{number}.{job.label}:{FIRST_PORT}")
    trainers = _trainers(job, f"{job.label}-{TRAINERS}-0-0.{job.label}", addresses)
    serve = shell(job.serve(host="0.0.0.0", port=str(FIRST_PORT)))
    gpus = samplers.tensor_parallel if samplers.gpus else 0
    jobs = []
    trainers["backoffLimit"] = 0  # the set counts their failures, and restarts all of them
    for name, spec in (
        (TRAINERS, trainers),
        (SAMPLERS, _indexed(job, servers, gpus, f"exec {serve}")),
    ):
        jobs.append({"name": name, "replicas": 1, "template": {"spec": spec}})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.label},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.label},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [TRAINERS]},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": jobs,
        },
    }


def _trainers(job: LaunchJob, first: str, servers: list[str]) -> dict[str, Any]:
    """Make the Job of the trainers.   first: name of the pod where they meet."""
    trainers = job.cluster.trainers
    meeting = job.meeting(f"{first}:{MEETING_PORT}", job.label)
    words = job.train(
        meeting=meeting, servers=listed(servers), runs=SHARED, weights=job.shared_weights
    )
    return _indexed(job, trainers.nodes, trainers.gpus, f"exec {shell(words)}")


def _indexed(job: LaunchJob, pods: int, gpus: int, command: str) -> dict[str, Any]:
    """Make the specification of an indexed Job, whose pods have names."""
    lines = [exports(job)]
    if job.cluster.setup is not None:
        lines.append(job.cluster.setup.rstrip())
    lines.append(broken_lines(command))
    # Kubernetes puts variables of its own in the place of $(NAME), unless the $ is doubled.
    script = "\n".join(lines).replace("$(", "$$(") + "\n"
    container: dict[str, Any] = {
        "name": "main",
        "image": job.cluster.image,
        "command": ["bash", "-c", script],
        "volumeMounts": [
            {"name": "runs", "mountPath": SHARED},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if job.cluster.folder is not None:
        container["workingDir"] = job.cluster.folder
    resources: dict[str, Any] = {}
    if gpus:
        resources["limits"] = {"nvidia.com/gpu": gpus}
    if job.cluster.cpus is not None:
        resources["requests"] = {"cpu": job.cluster.cpus}
    if resources:
        container["resources"] = resources
    variables = []
    for name in job.cluster.variables:
        reference = {"secretKeyRef": {"name": SECRET, "key": name}}
        variables.append({"name": name, "valueFrom": reference})
    if variables:
        container["env"] = variables
    claim = {"claimName": job.cluster.storage}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    return {
        "completions": pods,
        "parallelism": pods,
        "completionMode": "Indexed",
        "backoffLimit": RESTARTS * pods,
        "podFailurePolicy": {"rules": [evicted]},
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": job.cluster.grace,
                "containers": [container],
                "volumes": [
                    {"name": "runs", "persistentVolumeClaim": claim},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}},
                ],
            }
        },
    }
