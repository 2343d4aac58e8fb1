"""What runs on the machines of a cluster, whoever starts it: torchrun with `groupwise train`, and
`groupwise serve`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.config.cluster import ClusterSettings
from groupwise.config.objectives import is_online
from groupwise.config.recipes import load_cluster, load_stages
from groupwise.config.settings import Recipe
from groupwise.config.validation import STAGE
from groupwise.errors import ConfigError
from groupwise.rollout.vllm.server import LORA_RANKS, demand_servable, takes_adapters
from groupwise.utils.redaction import redacted_command
from groupwise.utils.secrets import scrubbed

FIRST_PORT = 8000
"""Port of a machine's first server; the others follow."""
MEETING_PORT = 29500
"""Port at which the trainers of several machines meet."""
SHARED = "/runs"
"""Where machines without a shared file system mount `cluster.storage`."""
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun passes on to the trainers."""
SERVED = ("rollout.engine.name=vllm", "rollout.engine.servers=[http://server:8000]")
"""Overrides like those that trainers with servers get."""
SPARE_SECONDS = 15
"""Seconds of `cluster.grace` for what is around the trainers: srun, torchrun, the shell."""


@dataclass(frozen=True)
class LaunchJob:
    """A recipe and the machines that it runs on.

    name: of the run.   path, overrides: as `groupwise train` takes them.
    model, dtype: what servers serve; None where the trainers sample.
    lora_rank: of adapters that servers take alone; 0: they take whole weights.
    """

    name: str
    path: str
    overrides: tuple[str, ...]
    cluster: ClusterSettings
    runs: str
    model: str | None
    dtype: str | None
    lora_rank: int = 0

    @property
    def label(self) -> str:
        """The name as every system takes it: small letters, digits and hyphens, a letter first.

        >>> LaunchJob("My_run/2", "my.yaml", (), ClusterSettings(), "runs", None, None).label
        'my-run-2'
        """
        letters = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        if letters[:1].isdigit():  # Kubernetes would refuse a Service of that name
            letters = f"run-{letters}"
        return letters[:40].strip("-") or "run"

    @property
    def shared_weights(self) -> str:
        """The folder of new weights on the storage that all machines mount."""
        return f"{SHARED}/{self.label}-weights"

    @property
    def save_seconds(self) -> int:
        """How long trainers that were told to end may take to save."""
        return self.cluster.grace - SPARE_SECONDS

    def train(
        self,
        *,
        meeting: Sequence[str],
        servers: str = "",
        runs: str | None = None,
        weights: str | None = None,
    ) -> list[str]:
        """Return the words of torchrun on one machine.

        meeting: torchrun's options about where the machines meet.   servers: their addresses, or a
            file of them, as the recipe's key takes it.
        runs: the folder of run folders, where it is not the recipe's.
        weights: the folder that trainers and servers share.
        """
        words = [
            "torchrun",
            *meeting,
            f"--nproc-per-node={self.cluster.trainers.per_node}",
            f"--signals-to-handle={SIGNALS}",
            "-m",
            "groupwise",
            "train",
            self.path,
            *self.overrides,
        ]
        if runs is not None:
            words.append(f"runs={runs}")
        if self.model is not None:
            words += ["rollout.engine.name=vllm", ShellText(f"rollout.engine.servers={servers}")]
            if weights is not None:
                words.append(ShellText(f"rollout.engine.weights_folder={weights}"))
        return words

    def meeting(self, endpoint: str, identity: str) -> list[str]:
        """Return torchrun's options for trainers on one machine, or on several.

        endpoint: host and port of the first machine.   identity: the same on all machines.
        """
        nodes = self.cluster.trainers.nodes
        if nodes == 1:
            return ["--standalone"]
        return [
            f"--nnodes={nodes}",
            "--rdzv-backend=c10d",
            ShellText(f"--rdzv-endpoint={endpoint}"),
            ShellText(f"--rdzv-id={identity}"),
        ]

    def devices(self, number: int) -> str:
        """Return what stands before the command of a machine's server: its GPUs.

        number: of the server on its machine.
        """
        samplers = self.cluster.samplers
        if not samplers.gpus or samplers.per_node == 1:
            return ""
        begin = number * samplers.tensor_parallel
        own = range(begin, begin + samplers.tensor_parallel)
        return f"CUDA_VISIBLE_DEVICES={','.join(map(str, own))} "

    def serve(self, *, host: str, port: str) -> list[str]:
        """Return the words of a server's command.   host: the address that it listens on."""
        assert self.model is not None
        place = [ShellText(f"--host={host}"), ShellText(f"--port={port}")]
        words = ["groupwise", "serve", self.model, *place]
        if self.dtype is not None:
            words.append(f"--dtype={self.dtype}")
        if self.lora_rank:
            words.append(f"--lora-rank={self.lora_rank}")
        samplers = self.cluster.samplers
        arguments = list(samplers.arguments)
        if samplers.tensor_parallel > 1:
            arguments = ["--tensor-parallel-size", str(samplers.tensor_parallel), *arguments]
        if arguments:
            words += ["--", *arguments]
        return words


def exports(job: LaunchJob) -> str:
    """Write the shell line that exports what Python and torch read on every machine."""
    variables = {
        "PYTHONSAFEPATH": "1",  # the working folder may hold a random.py
        "PYTHONUNBUFFERED": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.save_seconds),
    }
    return "export " + " ".join(f"{name}={value}" for name, value in variables.items())


def launch_job(path: str | Path, overrides: Sequence[str]) -> LaunchJob:
    """Read a recipe and its section `cluster`.  Raises ConfigError for a recipe that `groupwise
    train` would refuse, for servers that nothing would ask, and for a secret among the overrides.
    """
    passed_on = [word for word in overrides if not word.startswith(("cluster.", "cluster="))]
    for word, shown in zip(passed_on, redacted_command(passed_on), strict=True):
        if word != shown:
            raise ConfigError(
                f"{shown} holds a secret, and what is launched is written down: give the secret in"
                " an environment variable, and name the variable in cluster.variables"
            )
    cluster = load_cluster(path, overrides)
    read = list(overrides)
    if cluster.samplers.nodes:
        read += SERVED  # what the trainers will read: keys of engines with servers are not refused
    stages = load_stages(path, read)
    stage, first = next(iter(stages.items()))
    model = dtype = None
    lora_rank = 0
    if cluster.samplers.nodes:
        model, dtype = _served(stages), _served_dtype(first)
        if takes_adapters(model):
            lora_rank = _served_rank(stages)
    return LaunchJob(
        name=first.name.removesuffix(f"/{stage}"),
        path=str(path),
        overrides=tuple(passed_on),
        cluster=cluster,
        runs=first.runs,
        model=model,
        dtype=dtype,
        lora_rank=lora_rank,
    )


def _served(stages: Mapping[str, Recipe]) -> str:
    """Return the checkpoint that servers start with: new weights come from the trainers."""
    if not any(is_online(recipe.objective) for recipe in stages.values()):
        raise ConfigError(
            "cluster.samplers: this recipe samples nothing, it learns from a data set: set"
            " cluster.samplers.nodes=0"
        )
    for recipe in stages.values():
        if recipe.model.path is not None and not recipe.model.path.startswith(STAGE):
            demand_servable(recipe.model.path)
            return recipe.model.path
    raise ConfigError(
        "cluster.samplers: servers load a checkpoint, and model.scratch is none: set"
        " cluster.samplers.nodes=0, so that the trainers sample"
    )


def _served_rank(stages: Mapping[str, Recipe]) -> int:
    """Return the highest rank of adapters that servers can take alone, of all stages that sample;
    0: there are none, and servers get merged weights.
    """
    highest = 0
    for recipe in stages.values():
        lora = recipe.model.lora
        if lora is None or lora.modules_to_save or not is_online(recipe.objective):
            continue
        rank = max([lora.rank, *lora.rank_pattern.values()])
        if rank <= LORA_RANKS[-1]:
            highest = max(highest, rank)
    return highest


def _served_dtype(recipe: Recipe) -> str:
    """Return the type of the policy's products, which a server's log-probs are compared with."""
    if recipe.model.dtype == "float32":
        return "float32"
    return "bfloat16"


def listed(addresses: Sequence[str]) -> str:
    """Write addresses as a list of a recipe."""
    return f"[{','.join(addresses)}]"


class ShellText(str):
    """A word with variables that the shell is to read, such as `http://$HOSTNAME`."""


def shell(words: Sequence[str]) -> str:
    """Join words to a line of a shell script, each quoted unless it is `ShellText`.

    >>> print(shell(["echo", "a b", ShellText("$port"), "$port"]))
    echo 'a b' "$port" '$port'
    """
    quoted = []
    for word in words:
        if isinstance(word, ShellText) and "$" in word:
            quoted.append(f'"{word}"')
        else:
            quoted.append(shlex.quote(word))
    return " ".join(quoted)


def broken_lines(line: str, width: int = 100) -> str:
    """Break a long command at its words, with a backslash at the end of each line.

    >>> print(broken_lines("torchrun --standalone -m groupwise train my.yaml", 30))
    torchrun --standalone -m \\
        groupwise train my.yaml
    """
    lines = [""]
    for word in _shell_words(line):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _shell_words(line: str) -> list[str]:
    """Split a line at spaces that stand outside of quotes; quotes stay."""
    return re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", line)


def demand_no_secret(text: str) -> str:
    """Return a text that is about to be printed and handed on.  Raises ConfigError if a value of a
    secret environment variable stands in it, or a password in an address.
    """
    clean = scrubbed(text)
    if clean == text:
        return text
    for line, shown in zip(text.splitlines(), clean.splitlines(), strict=True):
        if line != shown:
            raise ConfigError(
                f"what would be launched holds a secret: {shown.strip()}: name its environment"
                " variable in cluster.variables instead"
            )
    raise AssertionError(clean)
