"""`groupwise train`: every stage of a recipe, one after the other."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from groupwise.cli import arguments as typed
from groupwise.errors import ConfigError

EXAMPLES = (
    (
        "groupwise train demo                                              a bundled recipe; the"
        " same command resumes it"
    ),
    (
        "groupwise train my.yaml steps=200 optimizer.lr=1e-5 --dry-run     the plan of your recipe,"
        " with two changes"
    ),
    "groupwise train my.yaml --seeds 3 --sweep optimizer.lr=1e-6,3e-6  six runs, side by side",
)
REPORT = "report.html"
"""What a finished run's report is called, in its folder."""


def arguments(command: argparse.ArgumentParser) -> None:
    """What can be typed."""
    typed.recipe(command)
    command.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    planned = "with --dry-run: plan for N processes"
    command.add_argument("--world", type=typed.positive, metavar="N", help=planned)
    command.add_argument(
        "--model-config",
        metavar="FILE",
        help="with --dry-run: plan for the model of this config.json",
    )
    command.add_argument(
        "--print-config", action="store_true", help="print the resolved recipe as YAML and stop"
    )
    command.add_argument(
        "--fresh", action="store_true", help="start anew under the next name (NAME-2, ...)"
    )
    changed = "resume although data, functions or models of the recipe changed since the run began"
    command.add_argument("--accept-changes", action="store_true", help=changed)
    command.add_argument(
        "--quiet", action="store_true", help="print only warnings and the closing table"
    )
    command.add_argument(
        "--nproc",
        type=typed.positive,
        default=1,
        metavar="N",
        help="processes on this machine, started by torchrun",
    )
    patience = "with several processes: seconds to wait for another process (default %(default)g)"
    command.add_argument("--timeout", type=typed.positive, default=1800, metavar="S", help=patience)
    command.add_argument(
        "--seeds",
        type=typed.positive,
        metavar="N",
        help="N runs, with the recipe's seed and those after it",
    )
    command.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE...",
        help="a run for each value of a key; of several such keys, for each combination",
    )
    command.add_argument(
        "--at-once",
        type=typed.positive,
        metavar="N",
        help="runs of --seeds and --sweep side by side (default: one for each GPU, or each core)",
    )


def run(options: argparse.Namespace) -> int:
    """Train, or tell what would be trained."""
    try:
        return _train(options)
    except ConfigError as error:
        if options.dry_run and options.model_config is not None:
            error.add_note(
                "where the recipe's rows are not at hand, `data.path=FILE data.eval_path=null`"
                " takes their place"
            )
        raise


def _train(options: argparse.Namespace) -> int:
    from groupwise.config.recipes import dump_stages, load_stages

    sweeping = options.seeds is not None or bool(options.sweep)
    if sweeping:
        _refuse_of_one_run(options)
    elif options.at_once is not None:
        raise ConfigError("--at-once is about --seeds and --sweep: add one of them")
    if options.dry_run and options.model_config is not None:
        return _plan(options)  # the recipe's own model need not be there
    stages = load_stages(
        options.recipe, options.overrides
    )  # a bad recipe is refused here, before torch is imported
    if options.print_config:
        print(dump_stages(stages), end="")
        return 0
    for option in ("world", "model_config"):
        if getattr(options, option) is not None and not options.dry_run:
            raise ConfigError(
                f"--{option.replace('_', '-')} plans what nobody starts: add --dry-run"
            )
    if sweeping:
        return _sweep(options, next(iter(stages.values())).threads)
    if options.dry_run:
        return _plan(options)
    if options.nproc > 1:
        _become_torchrun(options)
    from groupwise.api.stages import train_recipe

    return train_recipe(
        options.recipe,
        options.overrides,
        fresh=options.fresh,
        accept_changes=options.accept_changes,
        quiet=options.quiet,
        timeout=options.timeout,
        report=report,
    )


def _refuse_of_one_run(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that are about one run, where there are several."""
    if options.fresh:
        raise ConfigError("--fresh is for one run: give a sweep another name=... instead")
    for name in ("print_config", "world", "model_config"):
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is about one run: leave --seeds and --sweep out, and give the values of"
                " that run as KEY=VALUE"
            )


def _sweep(options: argparse.Namespace, threads: int | None) -> int:
    """Train several runs, or list them."""
    from groupwise.api.sweep import check_inputs, plan_sweep, run_sweep

    swept = {sweep.partition("=")[0] for sweep in options.sweep}
    for override in options.overrides:
        key = override.partition("=")[0]
        if key in swept:
            raise ConfigError(f"{key} is swept: leave {override} out")
    runs = plan_sweep(options.recipe, options.overrides, seeds=options.seeds, sweeps=options.sweep)
    world = options.nproc if options.nproc > 1 else None
    check_inputs(options.recipe, options.overrides, runs, world=world)
    if options.dry_run:
        for run in runs:
            print(f"{run.folders[-1]}: {' '.join(run.setting.overrides)}")
        return 0
    flags = _flags(options)
    at_once = options.at_once
    if options.nproc > 1:
        flags.append(f"--nproc={options.nproc}")
        at_once = at_once or 1
    return run_sweep(
        options.recipe,
        options.overrides,
        runs,
        flags=flags,
        at_once=at_once,
        threads=threads,
        tell=lambda line: print(line, flush=True),
    )


def _flags(options: argparse.Namespace) -> list[str]:
    """Return the options that each process of a run is started with, as they are typed."""
    switches = ("debug", "fresh", "accept_changes", "quiet")
    flags = [f"--{name.replace('_', '-')}" for name in switches if getattr(options, name)]
    return [*flags, f"--timeout={options.timeout}"]


def _plan(options: argparse.Namespace) -> int:
    config = None
    if options.model_config is not None:
        config = read_model_config(options.model_config)
    world = options.world
    if world is None and options.nproc > 1:
        world = options.nproc
    from groupwise.api.planning import plan_recipe

    return plan_recipe(
        options.recipe, options.overrides, fresh=options.fresh, world=world, model_config=config
    )


def read_model_config(path: str) -> dict[str, Any]:
    """A model's `config.json` as a dictionary.  Raises ConfigError if it is none."""
    from transformers import AutoConfig

    if not Path(path).exists():
        raise ConfigError(f"--model-config: no such file {path!r}: give the config.json of a model")
    try:
        return AutoConfig.from_pretrained(path).to_dict()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--model-config: {path!r} is no config.json of a model: {str(error).splitlines()[0]}"
        ) from error


def report(folder: Path) -> None:
    """Write the one page that stands in the folder of every finished run."""
    from groupwise.viewer.report import export

    try:
        export([folder], folder / REPORT)
    except Exception as error:  # the run is done and saved: its page must not make it a failure
        print(
            f"warning: {folder / REPORT} was not made ({type(error).__name__}: {error}); `groupwise"
            f" view {folder}` shows the run",
            file=sys.stderr,
        )


def _become_torchrun(options: argparse.Namespace) -> NoReturn:
    """Replace this process by the launcher, which starts the same command `--nproc` times."""
    if "RANK" in os.environ:
        raise ConfigError(
            "--nproc starts processes, but a launcher has started this one already: leave"
            " --nproc out"
        )
    python = [sys.executable, "-P"]  # the working folder may hold a random.py
    launcher = [
        *python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={options.nproc}",
        "--no-python",
    ]
    # Else torchrun gives every process a single thread, however many cores there are.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.nproc)))
    # Seconds that torchrun gives the others to end once one has failed: nothing is saved then that
    # was not saved before.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    sys.stdout.flush()
    os.execv(
        sys.executable,
        [
            *launcher,
            *python,
            "-u",
            "-m",
            "groupwise",
            "train",
            options.recipe,
            *options.overrides,
            *_flags(options),
        ],
    )
