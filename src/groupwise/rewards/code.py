"""A program as a reward: the share of its tests that it passes, in a sandbox."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.final_message import final_message
from groupwise.rewards.grading import (
    Grade,
    Grading,
    LocalGrader,
    ProgramGrader,
    RemoteGrader,
    cores,
)
from groupwise.rewards.program_tests import Tests, read_tests
from groupwise.sandbox.attacks import proved_isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.remote import SandboxFusion
from groupwise.utils.built_in import built_in
from groupwise.utils.imports import imported
from groupwise.utils.terminal import escaped

TEST_COLUMNS = ("tests", "test", "test_list", "input_output", "private_test_cases")
"""Columns that hold tests, unless a recipe names another: the first that the data have."""
ENTRY_COLUMNS = ("entry_point", "fn_name", "func_name")
"""Columns that name the function that is tested."""
PYTHON = ("", "python", "py", "python3")
"""What a block of Python may be marked with."""
TRIES = 100
"""Times that a program without a block is cut: each one reads all of it."""
_BLOCK = re.compile(r"```[ \t]*+([\w+#.-]*+)[^\n]*+\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


@built_in("code")
def code(
    columns: Collection[str],
    name: str = "code",
    *,
    tests: str | None = None,
    entry: str | None = None,
    prefix: str | None = None,
    file: str | None = None,
    language: str = "python",
    sandbox: str = "auto",
    credit: Literal["share", "all"] = "share",
    seconds: float = 20.0,
    cpu_seconds: float = 3.0,
    memory_mb: int = 512,
    disk_mb: int = 16,
    output_kb: int = 1024,
    workers: int | None = None,
) -> CodeReward:
    """The share of its tests that the program in a completion passes.

    columns: those of the data.   name: of the reward, which its metrics begin with.
    tests: the column with the tests (`program_tests` lists the forms); default: the first of
        tests, test, test_list, input_output, private_test_cases.
    entry: the column that names the function that is tested; default: entry_point, fn_name or
        func_name, where the data have one.
    prefix: the column with code that goes before the program, such as the imports and the helper
        functions that a prompt of HumanEval begins with.
    file: the program is this file of the episode's folder at its end, not in the completion; for
        rows with `files` and the tools `python` or `shell`.
    language: another one than python needs a sandbox elsewhere.
    sandbox: `auto` takes the first of bubblewrap and sandlock that no attack of ours breaks on this
        machine; or one of them; the address of a SandboxFusion service; or module:function,
        `f(source, language, stdin, limits) -> Ran`.
    credit: `share` of the cases, or 1 where `all` pass, else 0.
    seconds, cpu_seconds, memory_mb, disk_mb, output_kb: limits on a case by the clock, and on a
        program in processor time, memory, files and output.
    workers: programs that run side by side; default: one for each core.

    A completion without a program is worth 0.  None: the sandbox failed, or the tests of the row
    cannot be read.

    Raises ConfigError for data without tests, and where no sandbox holds on this machine.
    """
    settings = {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory_mb": memory_mb}
    settings |= {"disk_mb": disk_mb, "output_kb": output_kb}
    if workers is not None:
        settings["workers"] = workers
    for setting, value in settings.items():
        if not value > 0:
            raise ConfigError(f"the reward 'code' needs {setting} above 0, got {value}")
    if prefix is not None and language != "python":
        raise ConfigError(f"the reward 'code' takes prefix for python alone, not for {language}")
    limits = Limits(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        memory=memory_mb << 20,
        disk=disk_mb << 20,
        output=output_kb << 10,
    )
    test_column = _column("tests", tests, TEST_COLUMNS, columns)
    if test_column is None:
        raise ConfigError(
            f"the reward 'code' needs a column of tests: {', '.join(TEST_COLUMNS)}, or args:"
            f" {{tests: YOURS}}; the data have {', '.join(columns)}"
        )
    make = _graders(sandbox, language, limits)
    return CodeReward(
        Grading([make() for _ in range(workers or cores())], limits),
        tests=test_column,
        entry=_column("entry", entry, ENTRY_COLUMNS, columns),
        prefix=_column("prefix", prefix, (), columns),
        file=file,
        language=language,
        whole=credit == "all",
        name=name,
    )


def _column(
    argument: str, named: str | None, usual: Sequence[str], columns: Collection[str]
) -> str | None:
    """Return the column that an argument names, or the first of the usual ones."""
    if named is not None:
        if named not in columns:
            raise ConfigError(
                f"the reward 'code' has {argument}: {named}, which the data do not have; they have"
                f" {', '.join(columns)}"
            )
        return named
    for column in usual:
        if column in columns:
            return column
    return None


def _graders(sandbox: str, language: str, limits: Limits) -> Callable[[], ProgramGrader]:
    """Return what makes graders.  Raises ConfigError."""
    if sandbox.startswith(("http://", "https://")):
        service = SandboxFusion(sandbox)
        return lambda: RemoteGrader(service, language, limits)
    if ":" in sandbox:
        run = imported("sandbox", sandbox, callable_only=True)
        return lambda: RemoteGrader(run, language, limits)
    if language != "python":
        raise ConfigError(
            f"the reward 'code' runs {language} in a service alone: give sandbox: the address of a"
            " SandboxFusion service"
        )
    isolation = proved_isolation(sandbox)
    return lambda: LocalGrader(isolation, limits)


class CodeReward:
    """Rewards programs, and logs what their tests came to."""

    def __init__(
        self,
        grading: Grading,
        *,
        tests: str,
        entry: str | None,
        prefix: str | None,
        file: str | None,
        language: str,
        whole: bool,
        name: str,
    ) -> None:
        self.grading, self._name = grading, name
        self._tests, self._entry, self._prefix = tests, entry, prefix
        self._language, self._whole, self._file = language, whole, file

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        log_metric: Callable[[str, float], None],
        log_extra: Callable[[str, Sequence[Any]], None],
        environments: Sequence[Any] | None = None,
        **columns: Sequence[Any],
    ) -> list[float | None]:
        """Return the reward of each completion."""
        programs: list[tuple[str, Tests] | None] = []
        unread: dict[int, str] = {}
        cached = self.grading.cached
        folders = list(map(_files_of, environments or [None] * len(completions)))
        if self._file is not None and not any(folder is not None for folder in folders):
            raise RewardError(
                f"the reward 'code' has file: {self._file!r}, and no episode has files: set"
                " environment.tools to python or shell, and give rows a column files"
            )
        for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            folder = folders[place]
            if self._file is not None and folder is None:
                unread[place] = "the episode was broken off"
                programs.append(None)
                continue
            if folder is not None and self._file is not None:
                source = folder.get(self._file)
            elif self._prefix is None:
                source = program_in(completion, prompt, self._language)
            else:
                source = program_behind(str(columns[self._prefix][place]), completion)
            try:
                tests = self._read(columns, place)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                unread[place] = str(error)
                programs.append(None)
                continue
            programs.append(None if source is None else (source, tests))
        if unread and len(unread) == len(programs):
            raise RewardError(
                f"the reward 'code' cannot read the tests in the column {self._tests!r}:"
                f" {unread[0]}"
            )
        grades = self.grading.grade(programs)
        rewards: list[float | None] = []
        notes = []
        for place, grade in enumerate(grades):
            if place in unread:
                rewards.append(None)
                notes.append(f"not judged: {unread[place]}")
            elif isinstance(grade, Grade):
                rewards.append(self._worth(grade))
                notes.append(_note(grade))
            elif grade is None:
                rewards.append(0.0)
                notes.append("no program")
            else:
                rewards.append(None)
                notes.append(f"not judged: {grade}")
        count = max(1, len(grades))
        gameable = sum(isinstance(grade, Grade) and grade.gameable for grade in grades)
        log_metric(f"{self._name}_gameable", gameable / count)
        log_metric(f"{self._name}_not_judged", rewards.count(None) / count)
        log_metric(f"{self._name}_cached", (self.grading.cached - cached) / count)
        log_extra(self._name, notes)
        return rewards

    def close(self) -> None:
        """End the sandboxes."""
        self.grading.close()

    def _read(self, columns: Mapping[str, Sequence[Any]], place: int) -> Tests:
        entry = None if self._entry is None else columns[self._entry][place]
        return read_tests(columns[self._tests][place], entry)

    def _worth(self, grade: Grade) -> float:
        return float(grade.share == 1.0) if self._whole else grade.share


def _files_of(state: Any) -> Mapping[str, str] | None:
    """Return the files of an episode's folder at its end; None where nobody could read them."""
    return getattr(state, "files", None)


def _note(grade: Grade) -> str:
    note = f"{grade.passed} of {grade.cases}"
    if grade.why:  # words of the program
        note = f"{note}: {escaped(grade.why)}"
    return note


def program_in(completion: str, prompt: str = "", language: str = "python") -> str | None:
    """Return the program that a completion gives; None if it gives none.

    It is the last block of code in the final message.  Without a block it is the whole message, or
    the prompt and what continues it, where that is Python.

    >>> program_in("First:\\n```python\\nx = 1\\n```\\nBetter:\\n```\\nx = 2\\n```")
    'x = 2'
    >>> program_in("    return n + n", "def double(n):\\n")
    'def double(n):\\n    return n + n'
    """
    message = final_message(completion)
    marks = PYTHON if language == "python" else ("", language)
    blocks = [text for mark, text in _BLOCK.findall(message) if mark.lower() in marks]
    if blocks:
        return str(blocks[-1])
    if language != "python":
        return message if message.strip() else None
    if message.strip() and _wrong_line(message) == 0:
        return message
    lines = message.splitlines()
    above = prompt.count("\n")
    for _ in range(TRIES):  # what a model writes behind its function need not be Python
        if not lines:
            return None
        source = prompt + "\n".join(lines)
        wrong = _wrong_line(source)
        if wrong == 0:
            return source
        first = min(wrong - above, len(lines)) - 1
        del lines[max(0, first) :]
    return None


def program_behind(prefix: str, completion: str) -> str | None:
    """Return the program that a completion gives, behind the code that its prompt begins with.

    The completion writes the function anew, or continues it.

    >>> program_behind("import math\\ndef f(x):\\n    'Half.'\\n", "    return x / 2\\nDone!")
    "import math\\ndef f(x):\\n    'Half.'\\n    return x / 2"
    """
    source = program_in(completion, prefix)
    if source is None or source.startswith(prefix) or "from __future__ import" in source:
        return source
    return f"{prefix.rstrip()}\n{source}"


def _wrong_line(source: str) -> int:
    """Return the number of the first line that is no Python; 0 where there is none."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        return error.lineno or 1
    except (ValueError, RecursionError, MemoryError):
        return 1
    return 0
