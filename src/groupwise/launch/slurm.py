"""A recipe as a batch script of Slurm.

One job holds all machines: the trainers on the first ones, under one `srun torchrun`, the servers
behind them, one task each.  Before the time limit the trainers save, and the job queues again.
"""

from __future__ import annotations

import shlex

from groupwise.launch.commands import (
    FIRST_PORT,
    MEETING_PORT,
    LaunchJob,
    ShellText,
    broken_lines,
    exports,
    shell,
)

INTERRUPT = """\
# USR1 comes {grace} seconds before the time limit.  The trainers save their last whole step and
# end; then the job goes back to the queue, and continues from there.
interrupted=no
interrupt() {{
    interrupted=yes
    kill -USR1 "$trainers"  # srun passes it on to torchrun, torchrun to the trainers
}}
trap interrupt USR1
"""
WAIT = """\
wait "$trainers"
status=$?
while kill -0 "$trainers" 2> /dev/null; do  # the signal has ended the first wait
    wait "$trainers"
    status=$?
done
if [ "$interrupted" = yes ] && [ "$status" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"; then
    sleep 600  # until Slurm ends the script: a job that ended by itself would have failed
fi
exit "$status"
"""


def script(job: LaunchJob) -> str:
    """Write the batch script of a job."""
    parts = [_options(job), INTERRUPT.format(grace=job.cluster.grace)]
    if job.cluster.setup is not None:
        parts.append(f"{job.cluster.setup.rstrip()}\n")
    parts.append(_environment(job))
    if job.model is not None:
        parts.append(_servers(job))
    parts += [_trainers(job), WAIT]
    return "\n".join(parts)


def _options(job: LaunchJob) -> str:
    cluster = job.cluster
    gpus = cluster.trainers.gpus
    if cluster.samplers.nodes:
        gpus = max(gpus, cluster.samplers.gpus)
    options = [
        f"--job-name={job.label}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
    ]
    if gpus:
        options.append(f"--gpus-per-node={_gpus(job, gpus)}")
    if cluster.cpus is None:
        options += ["--exclusive", "--mem=0"]
    else:
        options.append(f"--cpus-per-task={cluster.cpus}")
    for name in ("time", "partition", "account"):
        value = getattr(cluster, name)
        if value is not None:
            options.append(f"--{name}={value}")
    if cluster.folder is not None:
        options.append(f"--chdir={shlex.quote(cluster.folder)}")
    options += [
        "--requeue",
        "--open-mode=append",
        f"--signal=B:USR1@{cluster.grace}",
        *cluster.options,
    ]
    lines = ["#!/bin/bash"]
    for option in options:
        lines.append(f"#SBATCH {option}")
    return "\n".join(lines) + "\n"


def _gpus(job: LaunchJob, count: int) -> str:
    """Return a number of GPUs as Slurm takes it, with their kind if one is named."""
    if job.cluster.accelerator is None:
        return str(count)
    return f"{job.cluster.accelerator}:{count}"


def _environment(job: LaunchJob) -> str:
    """Export what torchrun and torch read."""
    processes = job.cluster.trainers.per_node
    cores = "$SLURM_CPUS_ON_NODE"
    if processes > 1:
        cores = f"$(((SLURM_CPUS_ON_NODE + {processes - 1}) / {processes}))"  # at least one
    lines = [
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{cores}}}",
        exports(job),
    ]
    return "\n".join(lines) + "\n"


def _servers(job: LaunchJob) -> str:
    """Start the servers, and write their addresses into a file."""
    cluster, samplers = job.cluster, job.cluster.samplers
    first = cluster.trainers.nodes
    ports = range(FIRST_PORT, FIRST_PORT + samplers.per_node)
    serve = shell(job.serve(host="0.0.0.0", port="$port"))
    step = [
        "srun",
        f"--relative={first}",
        f"--nodes={samplers.nodes}",
        f"--ntasks={samplers.nodes * samplers.per_node}",
        f"--ntasks-per-node={samplers.per_node}",
    ]
    if samplers.gpus:
        step.append(f"--gpus-per-task={_gpus(job, samplers.tensor_parallel)}")
    step += [
        ShellText("--output=slurm-$SLURM_JOB_ID-server-%t.log"),
        "bash",
        "-c",
        f"port=$(({FIRST_PORT} + SLURM_LOCALID)); exec {serve}",
    ]
    runs = _from_home(job.runs)
    lines = [
        f"mkdir -p {runs}",
        f"runs=$(cd {runs} && pwd)",
        "# The trainers read this file again and again: a server added to it joins the run.",
        f"servers=$runs/{job.label}-servers.txt",
        'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        f'for node in "${{nodes[@]:{first}}}"; do',
        f"    for port in {' '.join(map(str, ports))}; do",
        '        echo "http://$node:$port"',
        "    done",
        'done > "$servers"',
        f"{broken_lines(shell(step))} &",
    ]
    return "\n".join(lines) + "\n"


def _trainers(job: LaunchJob) -> str:
    """Start the trainers behind the script, which waits for them."""
    trainers = job.cluster.trainers
    step = [
        "srun",
        "--relative=0",
        f"--nodes={trainers.nodes}",
        f"--ntasks={trainers.nodes}",
        "--ntasks-per-node=1",
    ]
    if trainers.gpus:
        step.append(f"--gpus-per-node={_gpus(job, trainers.gpus)}")
    lines = []
    if trainers.nodes > 1:
        # The script runs on the first machine.  Jobs that share a machine meet at other ports.
        lines.append("head=$(hostname)")
        lines.append(f"port=$(({MEETING_PORT} + SLURM_JOB_ID % 1000))")
        step.append("--kill-on-bad-exit=0")
    meeting = job.meeting("$head:$port", "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}")
    train = job.train(meeting=meeting, servers="$servers", weights=f"$runs/{job.label}-weights")
    line = shell([*step, *train])
    lines += [f"{broken_lines(line)} &", "trainers=$!"]
    return "\n".join(lines) + "\n"


def _from_home(path: str) -> str:
    """Quote a path for the shell, which replaces no ~ inside of quotes.

    >>> print(_from_home("~/my runs"))
    "$HOME"/'my runs'
    """
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"/{shlex.quote(path[2:])}'
    return shlex.quote(path)
