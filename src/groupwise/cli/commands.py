"""The command `groupwise`.

Everything heavy is imported by the command that needs it: `--help`, `config`, `recipes`, `runs` and the refusal of a bad recipe
take a fraction of a second, because none of them imports torch.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import math
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from groupwise.errors import ConfigError, Ended, GroupwiseError, StorageError
from groupwise.utils.allocator import prefer_large_pages
from groupwise.utils.secrets import scrubbed
from groupwise.utils.terminal import HARMLESS, escaped

REPORT = "report.html"
"""What a finished run's report is called, in its folder."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

EXAMPLES = """\
examples:
  groupwise train demo                          a bundled recipe; the same again resumes it
  groupwise train my.yaml steps=200 group.beta=0.01    your own, two keys changed
  groupwise train my.yaml --dry-run             the plan and nothing else
  groupwise eval runs/demo/grpo --task addition --k 8
  groupwise config group.group_size             what a key means
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, the `exit_code` of the error class, 130 after Ctrl-C or 143 after SIGTERM.

    Errors of Groupwise print one short message to stderr; `--debug` adds the traceback.
    """
    given = _parse(arguments)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    prefer_large_pages()
    logging.getLogger("groupwise").addFilter(HARMLESS)
    try:
        return given.run(given)
    except GroupwiseError as error:
        if given.debug:
            raise
        _tell("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
        return error.exit_code
    except KeyboardInterrupt:
        if given.debug:
            raise
        again = "; the same command continues from the last checkpoint" if given.command == "train" else ""
        _tell(f"interrupted{again}", before="\n")
        return INTERRUPTED
    except Ended as told:
        meanwhile = [f"meanwhile {type(told.__cause__).__name__}: {told.__cause__}"] if told.__cause__ is not None else []
        _tell("; ".join(["ended by SIGTERM", *getattr(told, "__notes__", ()), *meanwhile]))
        return told.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`groupwise config | head`); Python would complain once more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        from groupwise.utils.files import disk_failed

        if given.debug or not disk_failed(error):
            raise
        place = error.filename or "the working directory, or where the output goes"
        _tell("\n".join([f"StorageError: {error.strerror}: {place}", *getattr(error, "__notes__", ())]))
        return StorageError.exit_code


def command() -> NoReturn:
    """The command as a process: `main`, and the end of the process at once, without taking Python down first.

    While it is taken down, a library's thread that asks for the interpreter aborts the process ("terminate called without an active
    exception"): gloo's, as it lets go of what the last exchange sent, did so in one of thirty runs on a busy machine, after all
    work was done.  What is due at an exit is done as ever: threads that are no daemons are waited for, `atexit` is heard, output is
    flushed.
    """
    status: Any = 1
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            _tell(status)
            status = 1
    except BaseException:  # `main` has told of what is expected; the rest is shown as Python would, but harmless
        _tell("".join(traceback.format_exception(*sys.exc_info())).rstrip())
    # As `Py_FinalizeEx` begins; there is no public name for either.
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(Exception):  # said to stderr by itself
            finish()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a reader that went away; closed by somebody
            stream.flush()
    os._exit(int(status or 0))


def _tell(text: str, before: str = "") -> None:
    """The last words, to stderr: without secrets, and with nothing in them that steers a terminal."""
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    with suppress(OSError, ValueError):  # a full disk, or somebody closed it
        print(before + escaped(scrubbed(f"{who}{text}")), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what can be typed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; overrides may stand behind options too, and those of `serve` behind --, where argparse would not find them."""
    parser = _parser()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    behind = typed.index("--") if typed[:1] == ["serve"] and "--" in typed else len(typed)
    given, rest = parser.parse_known_args(typed[:behind])
    unknown = [text for text in rest if text.startswith("-") or "overrides" not in vars(given)]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        given.overrides = [*given.overrides, *rest]
    if "more" in vars(given):
        given.more = typed[behind + 1 :]
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise",
        description="Post-train language models with GRPO and its family.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[common])
        command.set_defaults(run=run)
        return command

    _add_train(add("train", _train, "run a recipe, or resume it where it stopped"))
    _add_eval(add("eval", _eval, "greedy accuracy, sampled accuracy and pass@k of a checkpoint"))
    check = add("check", _check, "preflight: is what we sample what we score? EOS, packing, memory ...")
    _add_recipe(check)

    score = add("score", _score, "run reward functions over completions that exist already")
    score.add_argument("reward", metavar="REWARD", help="built-in name, module:function or file.py:function; several with commas")
    score.add_argument("file", metavar="FILE", help="rows with prompt, completion and the columns that the functions ask for")
    score.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of the function")
    score.add_argument("--column", action="append", default=[], metavar="OURS=THEIRS", help="rename a column")
    score.add_argument("--limit", type=_positive, metavar="N", help="first rows only")
    score.add_argument("--rows", type=int, default=10, metavar="N", help="rows to print (default %(default)s)")

    chat = add("chat", _chat, "talk to a checkpoint")
    chat.add_argument("checkpoint", metavar="CHECKPOINT", help="a run, a checkpoint or a model folder")
    _add_environment(chat)

    recipes = add("recipes", _recipes, "list the bundled recipes, tell about one, or copy it to edit it")
    recipes.add_argument("action", nargs="?", default="list", metavar="NAME | copy | show", help="a bundled recipe, to read of it")
    recipes.add_argument("name", nargs="?", metavar="NAME", help="with copy or show: a bundled recipe")
    recipes.add_argument("to", nargs="?", metavar="TO", help="with copy: where to (default: NAME.yaml)")

    config = add("config", _config, "what a key of a recipe means: type, range, default, TRL's name")
    config.add_argument("key", nargs="?", metavar="KEY", help="a key, a section or a TRL argument; without it all keys")
    config.add_argument("--markdown", action="store_true", help="all keys as a Markdown page")

    _add_view(add("view", _view, "look at runs in the browser, token by token, also while they train"))

    _add_serve(add("serve", _serve, "serve a model: by vLLM, for training to sample from, or with --native by our own engine"))
    _add_install(add("install-vllm", _install_vllm, "install vLLM into an environment of its own"))

    _add_replay(add("replay", _replay, "compute a recorded step again, as it was or with something changed"))

    _add_explain(add("explain", _explain, "one step of an algorithm worked through in numbers"))

    runs = add("runs", _runs, "list the run folders and how they stand")
    runs.add_argument("folder", nargs="?", default="runs", metavar="FOLDER", help="default: %(default)s")
    return parser


def _add_train(command: argparse.ArgumentParser) -> None:
    _add_recipe(command)
    command.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    planned = "with --dry-run: plan for so many processes, what each holds, computes and sends"
    command.add_argument("--world", type=_positive, metavar="N", help=planned)
    command.add_argument("--model-config", metavar="FILE", help="with --dry-run: plan for the model of this config.json instead")
    command.add_argument("--print-config", action="store_true", help="print the resolved recipe as YAML and stop")
    command.add_argument(
        "--fresh", action="store_true", help="start anew under a name of its own (NAME-2, ...) instead of resuming"
    )
    changed = "resume although data or reward files have changed since the run began"
    command.add_argument("--accept-changes", action="store_true", help=changed)
    command.add_argument("--quiet", action="store_true", help="print warnings and the closing table only")
    command.add_argument("--nproc", type=_positive, default=1, metavar="N", help="processes on this machine, started by torchrun")
    patience = "with several processes: seconds that one waits for another (default %(default)g)"
    command.add_argument("--timeout", type=_positive, default=1800, metavar="S", help=patience)


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file or the name of a bundled recipe")
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="e.g. optimizer.lr=1e-6, stages.sft.steps=100")


def _add_eval(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a run, a checkpoint, a model folder or a hub name")
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="PATH", help="a .jsonl, .json or .parquet file, or a hub name")
    source.add_argument("--task", metavar="NAME", help="a built-in task; its held-out prompts are used")
    command.add_argument("--task-arg", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of the task")
    command.add_argument("--split", default="test", metavar="NAME", help="split of a hub data set (default %(default)s)")
    command.add_argument("--column", action="append", default=[], metavar="OURS=THEIRS", help="rename one, e.g. prompt=question")
    command.add_argument("--template", metavar="TEXT", help="format string that makes the prompt from the row's columns")
    command.add_argument("--chat", action="store_true", help="apply the chat template to string prompts")
    command.add_argument("--system", metavar="TEXT", help="system message")
    command.add_argument("--reward", default="accuracy", metavar="NAME", help="what counts as right (default %(default)s)")
    _add_environment(command)
    command.add_argument("--k", type=_positive, default=8, metavar="N", help="sampled completions per prompt (default %(default)s)")
    command.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of those samples (default %(default)s)")
    command.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N", help="default %(default)s")
    command.add_argument("--limit", type=_positive, metavar="N", help="first prompts only")
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the samples (default %(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_environment(command: argparse.ArgumentParser) -> None:
    what = "a key of environment, as in a recipe: tools=[my_tools.py:search]"
    command.add_argument("--environment", action="append", default=[], metavar="KEY=VALUE", help=what)


def _add_view(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", nargs="+", metavar="RUN", help="run folders, or Parquet or JSONL files of completions")
    command.add_argument("--export", metavar="FILE", help="write one self-contained page, for example report.html, and stop")
    port = "default: 8765, or any that is free"
    command.add_argument("--port", type=int, metavar="N", help=port)
    command.add_argument("--open", action="store_true", help="open it in the browser of this machine")
    command.epilog = "From another machine: ssh -L 8765:127.0.0.1:8765 HOST, and open the address there."


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="a model folder or a hub name: the model that will be trained")
    host = "whoever reaches it can replace its weights (default %(default)s)"
    native = "without vLLM: OpenAI's chat and vLLM's token ids, for agents and evaluations; other hosts need GROUPWISE_TOKEN"
    command.add_argument("--native", action="store_true", help=native)
    command.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    command.add_argument("--port", type=_positive, default=8000, metavar="N", help="default %(default)s")
    command.add_argument("--rows", type=_positive, default=256, metavar="N", help="completions at a time (default %(default)s)")
    command.add_argument("--dtype", metavar="TYPE", help="float32 or bfloat16 (default: the checkpoint's)")
    command.add_argument("--cache", metavar="SIZE", help="keys and values, e.g. 4G (default: 512M on a CPU, vLLM's own on a GPU)")
    command.epilog = "Arguments behind -- go to vLLM as they are: groupwise serve MODEL -- --tensor-parallel-size 2"
    command.set_defaults(more=[])


def _add_install(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", nargs="?", default=".venv-vllm", metavar="FOLDER", help="default: %(default)s")
    command.add_argument("--gpu", action="store_true", help="vLLM's CUDA build instead of its CPU build")


def _add_replay(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="RUN", help="a run folder")
    command.add_argument("--step", type=_positive, required=True, metavar="N", help="a recorded step")
    changed = "print beside it what this would have done: objective=dr_grpo, group.surrogate.high=0.28, optimizer.lr=1e-5 ..."
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes", help=changed)
    command.add_argument("--no-model", action="store_true", help="leave out what needs the weights before the step")
    reach = "recorded steps to train again, at most, from the nearest checkpoint on (default 20)"
    command.add_argument("--reach", type=_count, metavar="N", help=reach)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--tokens", action="store_true", help="with --json: the gradient with respect to every log-prob too")
    command.epilog = "The exit status is 0 exactly if the numbers are the recorded ones."


def _add_explain(command: argparse.ArgumentParser) -> None:
    rewards = "one per completion; none: unscorable (default %(default)s)"
    command.add_argument("--rewards", type=_rewards, default="1,0,0.5", metavar="R,R,...", help=rewards)
    command.add_argument("--lengths", type=_lengths, metavar="N,N,...", help="tokens of each completion")
    command.add_argument("--preset", default="grpo", metavar="NAME", help="an online algorithm (default %(default)s)")
    command.add_argument("--mu", type=_positive, default=2, metavar="N", help="passes over the rollout (default %(default)s)")
    command.add_argument("--beta", type=float, metavar="B", help="weight of the KL to the reference (default: the preset's)")
    command.add_argument("--lr", type=float, default=5.0, metavar="LR", help="step on the toy policy (default %(default)s)")


def _rewards(text: str) -> list[float | None]:
    try:
        return [None if part.strip().lower() == "none" else float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers or none with commas between them, got {text!r}") from error


def _lengths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than {1 << 63}, got {number}")
    return number


def _version() -> str:
    from importlib.metadata import version

    return version("groupwise")


def _pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """`KEY=VALUE` options, each value read as YAML."""
    from groupwise.config.strict_yaml import parse_value

    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        node, problems = parse_value(value, f"{option} {text}")
        if not equals or problems:
            raise ConfigError(str(problems[0]) if problems else f"{option} is written KEY=VALUE, got {text!r}")
        found[key] = node.plain()
    return found


def _texts(texts: Sequence[str], option: str) -> dict[str, str]:
    return {key: str(value) for key, value in _pairs(texts, option).items()}


# ---------------------------------------------------------------- what it does


def _train(given: argparse.Namespace) -> int:
    from groupwise.config.recipes import dump_stages, load_stages

    stages = load_stages(given.recipe, given.overrides)  # a bad recipe is refused here, before torch is imported
    if given.print_config:
        print(dump_stages(stages), end="")
        return 0
    for option in ("world", "model_config"):
        if getattr(given, option) is not None and not given.dry_run:
            raise ConfigError(f"--{option.replace('_', '-')} plans what nobody starts: add --dry-run")
    if given.nproc > 1 and not given.dry_run:
        _become_torchrun(given)
    from groupwise.runs.run import train_recipe

    return train_recipe(
        given.recipe,
        given.overrides,
        dry_run=given.dry_run,
        fresh=given.fresh,
        accept_changes=given.accept_changes,
        quiet=given.quiet,
        timeout=given.timeout,
        world=given.world or (given.nproc if given.nproc > 1 else None),
        model_config=given.model_config,
        report=_report,
    )


def _report(folder: Path) -> None:
    """The one page that stands in the folder of every finished run."""
    from groupwise.viewer import export

    export([folder], folder / REPORT)


def _become_torchrun(given: argparse.Namespace) -> NoReturn:
    """Replace this process by the launcher, which starts the same command `--nproc` times."""
    if "RANK" in os.environ:
        raise ConfigError("--nproc starts processes, but a launcher has started this one already: leave --nproc out")
    switches = ("debug", "fresh", "accept_changes", "quiet")
    flags = [f"--{name.replace('_', '-')}" for name in switches if getattr(given, name)] + [f"--timeout={given.timeout}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.nproc}"]
    # Else torchrun gives every process a single thread, however many cores there are.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // given.nproc)))
    # Seconds that torchrun gives the others to end once one has failed: nothing is saved then that was not saved before.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", "groupwise", "train", given.recipe, *given.overrides, *flags])


def _eval(given: argparse.Namespace) -> int:
    task_args, columns = _pairs(given.task_arg, "--task-arg"), _texts(given.column, "--column")
    if not 0 < given.temperature < math.inf:
        raise ConfigError(f"--temperature must be greater than 0, got {given.temperature:g} (greedy is always reported too)")
    from groupwise.cli.use import evaluate_checkpoint

    report = evaluate_checkpoint(
        given.checkpoint,
        data=given.data,
        split=given.split,
        task=given.task,
        task_args=task_args,
        columns=columns,
        template=given.template,
        chat=given.chat,
        system=given.system,
        reward=given.reward,
        environment=_pairs(given.environment, "--environment"),
        k=given.k,
        temperature=given.temperature,
        max_new_tokens=given.max_new_tokens,
        limit=given.limit,
        seed=given.seed,
    )
    print(report.to_json() if given.json else report.render())
    return 0


def _check(given: argparse.Namespace) -> int:
    from groupwise.config.recipes import load_stages

    load_stages(given.recipe, given.overrides)
    from groupwise.cli.check import check_recipe

    return check_recipe(given.recipe, given.overrides)


def _score(given: argparse.Namespace) -> int:
    from groupwise.config.settings import RewardSettings

    arguments = _pairs(given.arg, "--arg")
    functions = [RewardSettings(function=name.strip(), args=arguments) for name in given.reward.split(",")]
    if arguments and len(functions) > 1:
        raise ConfigError(f"--arg belongs to one function, but {len(functions)} are named; score them one by one")
    from groupwise.cli.score import score_file

    report = score_file(functions, given.file, columns=_texts(given.column, "--column"), limit=given.limit)
    print(report.render(rows=given.rows))
    return 0


def _chat(given: argparse.Namespace) -> int:
    from groupwise.cli.use import chat

    return chat(given.checkpoint, environment=_pairs(given.environment, "--environment")) or 0


def _recipes(given: argparse.Namespace) -> int:
    from groupwise.config.recipes import bundled_recipes, find_recipe, header

    bundled = bundled_recipes()
    if given.action == "list":
        wide = max(map(len, bundled), default=0)
        for name, path in bundled.items():
            print(f"{name:{wide}}  {header(path).partition(chr(10))[0]}")
        return 0
    if given.action not in ("copy", "show"):
        if given.name is not None:
            raise ConfigError(f"groupwise recipes takes the name of one recipe, or copy or show and a name; got {given.action!r}")
        print(header(given.action))
        return 0
    if given.name is None:
        raise ConfigError(f"groupwise recipes {given.action} needs a NAME: one of {', '.join(bundled)}")
    source = find_recipe(given.name)
    if given.action == "show":
        print(source.read_text(encoding="utf-8"), end="")
        return 0
    target = Path(given.to or source.name)
    if target.is_dir():
        target /= source.name
    if target.exists():
        raise ConfigError(f"{target} exists already; name another file: groupwise recipes copy {given.name} OTHER.yaml")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; name another file") from error
    print(f"{target}: edit it, then run `groupwise train {target}`")
    return 0


def _config(given: argparse.Namespace) -> int:
    from groupwise.config.schema import describe, first_sentence, knobs, reference, settings_table

    if given.markdown:
        print(reference(), end="")
    elif given.key is not None:
        print(describe(given.key))
    else:
        width = max(map(len, knobs()))
        for key in knobs():
            print(f"{key:{width}}  {first_sentence(settings_table()[key].meaning)}")
    return 0


def _serve(given: argparse.Namespace) -> int:
    if not given.native:
        from groupwise.rollout.vllm.server import serve

        how = {name: getattr(given, name) for name in ("host", "port", "rows", "dtype", "cache", "more")}
        serve(given.model, **how)
    return _serve_native(given)


def _serve_native(given: argparse.Namespace) -> int:
    if given.cache is not None or given.more:
        raise ConfigError("--cache and arguments behind -- are vLLM's: leave them out with --native")
    from groupwise.rollout.serving import serve_checkpoint

    token = os.environ.get("GROUPWISE_TOKEN") or None
    how = {name: getattr(given, name) for name in ("host", "port", "rows", "dtype")}
    with serve_checkpoint(given.model, **how, token=token) as served:
        print(f"{served.base_url}  (Ctrl-C ends it)", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0


def _install_vllm(given: argparse.Namespace) -> int:
    from groupwise.rollout.vllm.server import ENVIRONMENT, FOLDER, install

    folder = Path(given.folder).expanduser()
    print(f"installing vLLM into {folder}: 2.5 GB, a few minutes", flush=True)
    install(folder, gpu=given.gpu)
    found = "it is found there" if given.folder == FOLDER else f"say where it is: export {ENVIRONMENT}={folder.absolute()}"
    print(f"done; {found}.  Next: groupwise train RECIPE rollout.engine=vllm")
    return 0


def _explain(given: argparse.Namespace) -> int:
    from groupwise.cli.explain import render, work

    print(render(work(given.rewards, given.lengths, preset=given.preset, mu=given.mu, beta=given.beta, lr=given.lr)))
    return 0


def _replay(given: argparse.Namespace) -> int:
    from groupwise.cli.replay import replay_step

    reach = {} if given.reach is None else {"reach": given.reach}
    if given.tokens and not given.json:
        raise ConfigError("--tokens is a part of the JSON: say --json too")
    how = {"model": not given.no_model, "as_json": given.json, "tokens": given.tokens, **reach}
    return replay_step(given.folder, given.step, given.changes, **how)


def _view(given: argparse.Namespace) -> int:
    from groupwise.viewer import export, serve

    if given.export is not None:
        print(export(given.paths, given.export))
        return 0
    try:
        viewer = serve(given.paths, 8765 if given.port is None else given.port)
    except ConfigError:
        if given.port is not None:
            raise
        viewer = serve(given.paths, 0)
    print(f"{viewer.address}  (Ctrl-C ends it)", flush=True)
    if given.open:
        import webbrowser

        webbrowser.open(viewer.address)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return 0
    finally:
        viewer.close()


def _runs(given: argparse.Namespace) -> int:
    from groupwise.runs.folder import finished, in_use, list_runs, read_metrics

    root = Path(given.folder)
    if not root.is_dir():
        raise ConfigError(f"no such folder: {root}")
    rows = []
    for folder in list_runs(root):
        lines = read_metrics(folder)
        last = lines[-1] if lines else {}
        done = finished(folder)
        state = "finished" if done is not None else "running" if in_use(folder) else "stopped"
        reward = f"reward {last['reward']:.3f}" if isinstance(last.get("reward"), float) else ""
        rows.append((str(folder.relative_to(root)), state, f"step {last.get('step', 0)}", reward))
    widths = [max((len(row[place]) for row in rows), default=0) for place in range(4)]
    for row in rows:
        print(escaped("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()))
    if not rows:
        print(f"{root} holds no runs")
    return 0
