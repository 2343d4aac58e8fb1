"""The section `cluster` of a recipe file: the machines that `groupwise launch` asks for.

It is no part of a `Recipe`: what a run computes does not depend on it, and nothing of a step reads
it.  Importing this file imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, MinLen

from groupwise.config.settings import Count, Name, Positive

TIME = r"(\d+-)?\d+(:\d\d){0,2}"
"""A duration as Slurm writes it: minutes, minutes:seconds, hours:minutes:seconds, or days before
them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerNodes:
    """The machines that train."""

    nodes: Positive = 1
    """Number of machines."""
    gpus: Count = 8
    """GPUs of a machine that train; 0: processor cores."""
    processes: Positive | None = None
    """Trainer processes of a machine.  Default: one for each GPU, and one without GPUs."""

    @property
    def per_node(self) -> int:
        """Trainer processes of a machine.

        >>> TrainerNodes().per_node, TrainerNodes(gpus=0).per_node
        (8, 1)
        """
        return self.processes or max(self.gpus, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerNodes:
    """The machines that sample, with vLLM servers."""

    nodes: Count = 0
    """Number of machines; 0: the trainers sample, by `rollout.engine`."""
    gpus: Count = 8
    """GPUs of a machine that sample; 0: one server on processor cores."""
    tensor_parallel: Positive = 1
    """GPUs that hold one server together; a machine has gpus / tensor_parallel servers."""
    arguments: tuple[Name, ...] = ()
    """Further arguments of `vllm serve`, e.g. `[--max-model-len, "8192"]`."""

    @property
    def per_node(self) -> int:
        """Servers of a machine.

        >>> SamplerNodes(tensor_parallel=2).per_node, SamplerNodes(gpus=0).per_node
        (4, 1)
        """
        return max(self.gpus // self.tensor_parallel, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """The machines that `groupwise launch` asks for, and how commands run on them.  `groupwise
    train` does not read it.
    """

    trainers: TrainerNodes = field(default_factory=TrainerNodes)
    samplers: SamplerNodes = field(default_factory=SamplerNodes)
    setup: str | None = None
    """Shell lines before each command, e.g. `source venv/bin/activate`."""
    folder: str | None = None
    """Working folder on each machine, where the recipe and the files that it names are.  Default:
    the current one (Slurm), the copy of the current one (SkyPilot), the image's (Kubernetes).
    """
    image: str | None = None
    """Container image (Kubernetes, SkyPilot)."""
    storage: str | None = None
    """What all machines mount at `/runs`, for the run folder: a PersistentVolumeClaim (Kubernetes),
    a volume, or for one machine a bucket such as `s3://my-runs` (SkyPilot).  Slurm has a shared
    file system.
    """
    variables: tuple[Name, ...] = ()
    """Names of environment variables that hold secrets, e.g. `[HF_TOKEN]`.  Kubernetes reads them
    from the Secret `groupwise`, SkyPilot from the environment of `groupwise launch`; Slurm hands
    the whole environment on.
    """
    accelerator: str | None = None
    """Kind of GPU, e.g. `H100`: SkyPilot needs it, Slurm and Kubernetes can do without."""
    cpus: Positive | None = None
    """Processor cores of a machine.  Default: whole machines (Slurm), what comes with the GPUs
    (others).
    """
    time: str | None = None
    """Slurm: time limit, `24:00:00`.  The run saves before it, and the job queues again."""
    grace: Annotated[int, Ge(30)] = 120
    """Seconds between the signal to save and the end of a machine's time.  Sharded weights need
    more than a step.
    """
    partition: str | None = None
    """Slurm: partition."""
    account: str | None = None
    """Slurm: account."""
    options: tuple[Annotated[str, MinLen(3)], ...] = ()
    """Slurm: further options of sbatch, e.g. `[--qos=high]`."""
    infra: str | None = None
    """SkyPilot: where to look for machines, `kubernetes`, `aws/us-east-1`.  Default: anywhere."""

    @property
    def nodes(self) -> int:
        """All machines."""
        return self.trainers.nodes + self.samplers.nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """The part of a recipe file that is read by `groupwise launch` alone."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)


def cluster_findings(cluster: ClusterSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what does not go together in a section `cluster`: the keys, and a message."""
    samplers = cluster.samplers
    together = samplers.tensor_parallel
    if samplers.nodes and (samplers.gpus or 1) % together:
        message = (
            f"cluster.samplers.tensor_parallel ({together}) must divide cluster.samplers.gpus"
            f" ({samplers.gpus})"
        )
        yield ("cluster.samplers.tensor_parallel", "cluster.samplers.gpus"), message
    if cluster.time is not None and not re.fullmatch(TIME, cluster.time):
        message = f"cluster.time is written hours:minutes:seconds, 24:00:00; got {cluster.time!r}"
        yield ("cluster.time",), message
    elif cluster.time is not None and 0 < _seconds(cluster.time) <= cluster.grace:
        message = (
            f"cluster.time ({cluster.time}) must be longer than cluster.grace ({cluster.grace}"
            " seconds): the job would be told to save before it has begun, and queue again for ever"
        )
        yield ("cluster.time", "cluster.grace"), message
    if cluster.folder is not None and cluster.folder.startswith("~"):
        message = (
            f"cluster.folder: nothing replaces ~ on other machines: write {cluster.folder!r} whole"
        )
        yield ("cluster.folder",), message
    for name in ("partition", "account", "accelerator", "storage", "image", "infra"):
        value = getattr(cluster, name)
        if value is not None and not re.fullmatch(r"[\w.,:/@+-]+", value):
            yield (f"cluster.{name}",), f"cluster.{name} must be one word, got {value!r}"
    for place, option in enumerate(cluster.options):
        if not re.fullmatch(r"--[a-z][a-z-]*(=[^\s#]+)?", option):
            message = f"cluster.options: an option of sbatch is written --qos=high, got {option!r}"
            yield (f"cluster.options.{place}",), message
    for place, name in enumerate(cluster.variables):
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            message = (
                "cluster.variables are names of environment variables, not their values: entry"
                f" {place} is none"
            )
            yield (f"cluster.variables.{place}",), message


def _seconds(time: str) -> int:
    """Return the seconds of a duration as Slurm writes it.

    >>> _seconds("90"), _seconds("90:00"), _seconds("1:30:00"), _seconds("1-2"), _seconds("1-2:30")
    (5400, 5400, 5400, 93600, 95400)
    """
    days, dash, clock = time.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if not dash and len(numbers) < 3:
        numbers.insert(0, 0)  # without days and hours the first number says minutes
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
