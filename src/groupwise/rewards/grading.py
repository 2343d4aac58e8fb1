"""Programs are graded by their tests in sandboxes: source and tests in, the share of cases out.

What is expected, and the comparison, are never where the program is.  A program gets arguments or
standard input, one case at a time, and what it gives back is data.  Nothing that it prints or exits
with says that it is right.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from groupwise.rewards.program_tests import Called, Checked, Printed, Tests
from groupwise.sandbox import remote
from groupwise.sandbox.isolation import Isolation
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.runner import Opaque, decode, encode
from groupwise.sandbox.server import LIMITS, ProgramEnded, Sandbox, SandboxFailed

CLOSE = 1e-6
"""Relative and absolute difference of floats that are taken as equal."""
ENDS = 1
"""Cases in which a program may end or run out of time; the cases behind them have failed."""
TOGETHER = 3.0
"""Times the seconds of one case that all cases of a program have together."""
REMEMBERED = 20_000
"""Grades that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """What the tests of a program came to."""

    passed: int
    cases: int
    why: str = ""
    """How the first failed case failed."""
    gameable: bool = False
    """Whether a program could have passed without solving it."""

    @property
    def share(self) -> float:
        """Return the share of the cases that passed."""
        return self.passed / self.cases


class ProgramGrader(Protocol):
    """Grades one program after another, for one thread."""

    def grade(self, source: str, tests: Tests) -> Grade:
        """Return the grade.  Raises SandboxFailed."""
        ...

    def stop(self) -> None:
        """Let `grade` end soon, with SandboxFailed.  Any thread may call it."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class LocalGrader:
    """Grades in two sandboxes of this machine: one for programs, one for the code of tests."""

    def __init__(self, isolation: Isolation, limits: Limits) -> None:
        self._limits = limits
        self._programs = Sandbox(isolation, limits)
        self._tests = Sandbox(isolation, limits)

    def stop(self) -> None:
        """Stop both sandboxes."""
        self._programs.stop()
        self._tests.stop()

    def close(self) -> None:
        """End both sandboxes."""
        self._programs.kill()
        self._tests.kill()

    def grade(self, source: str, tests: Tests) -> Grade:
        """Return the grade of a program."""
        if isinstance(tests, Checked):
            if tests.apart:
                return self._checked_apart(source, tests)
            return self._checked_beside(source, tests)
        counter = _Counter(len(tests), self._limits)
        program = _Program(self._programs, source, self._limits)
        try:
            for case in tests:
                if isinstance(case, Printed):
                    _run_printed(self._programs, source, case, counter)
                else:
                    _run_called(program, case, counter)
        finally:
            program.finish()
        return counter.grade()

    def _checked_apart(self, source: str, tests: Checked) -> Grade:
        """Run the code of the tests in one sandbox, and each call that it makes in the other."""
        program = _Program(self._programs, source, self._limits)
        self._tests.open(
            {
                "do": "judge",
                "source": None,
                "test": tests.test,
                "entry": tests.entry,
                "names": tests.names,
                "check": tests.check,
            }
        )
        try:
            message = self._tests.ask()
            while "name" in message:
                message = self._tests.ask(program.call(message))
        except ProgramEnded as error:
            # the test's own code never ends without an answer, unless its answers make it too long
            return Grade(passed=0, cases=tests.cases, why=f"the test ended: {error}")
        finally:
            program.finish()
            self._tests.finish()
        return _grade_of(message, tests, program.why)

    def _checked_beside(self, source: str, tests: Checked) -> Grade:
        """Run the code of the tests in the program's process."""
        self._programs.open(
            {
                "do": "judge",
                "source": source,
                "test": tests.test,
                "entry": tests.entry,
                "names": (),
                "check": tests.check,
            }
        )
        try:
            message = self._programs.ask()
        except ProgramEnded as error:
            return Grade(passed=0, cases=tests.cases, why=str(error), gameable=True)
        finally:
            self._programs.finish()
        return _grade_of(message, tests, "")


class RemoteGrader:
    """Grades by a service or a function that runs scripts."""

    def __init__(self, run: remote.Run, language: str, limits: Limits) -> None:
        self._run, self._language, self._limits = run, language, limits

    def stop(self) -> None:
        """A program that runs elsewhere is waited for."""

    def close(self) -> None:
        """Nothing was started here."""

    def grade(self, source: str, tests: Tests) -> Grade:
        """Return the grade of a program.  Raises SandboxFailed, also for tests that are code."""
        if isinstance(tests, Checked):
            raise SandboxFailed("tests that are Python code need a sandbox of this machine")
        counter = _Counter(len(tests), self._limits)
        for case in tests:
            if counter.is_over():
                break
            if isinstance(case, Printed):
                ran = self._run(source, self._language, case.text, self._limits)
                counter.count(ran.ended == "0" and same_text(ran.output, case.expected), ran.ended)
                continue
            script = remote.calls_as_script(source, case.name)
            arguments = json.dumps(encode(list(case.args)))
            ran = self._run(script, self._language, arguments, self._limits)
            try:
                value = remote.last_line(ran)
            except (ValueError, RecursionError):
                value = Opaque(ran.ended)
            counter.count(same_value(value, case.expected), ran.ended)
        return counter.grade()


class _Counter:
    """Counts the cases of a program."""

    def __init__(self, cases: int, limits: Limits) -> None:
        self.cases, self.passed, self.ends, self.why = cases, 0, 0, ""
        self._deadline = _deadline(limits)

    def is_over(self) -> bool:
        """Return whether the cases that are left have failed."""
        if time.monotonic() > self._deadline:
            self.why = self.why or LIMITS["seconds"]
            return True
        return self.ends >= ENDS

    def count(self, holds: bool, ended: str) -> None:
        """Count a case.   ended: `0`, or how the program ended."""
        self.passed += holds
        self.ends += ended in (*LIMITS.values(), "killed")
        if not holds and not self.why:
            self.why = "another result" if ended in ("", "0") else ended

    def grade(self) -> Grade:
        """Return what was counted; cases that did not run have failed."""
        return Grade(passed=self.passed, cases=self.cases, why=self.why)


class _Program:
    """A program that answers calls.  It is loaded at the first one, and again after its end."""

    def __init__(self, server: Sandbox, source: str, limits: Limits) -> None:
        self._server, self._source = server, source
        self._deadline = _deadline(limits)
        self._open = False
        self._ends = 0
        self.why = ""
        """How the first call failed that gave no value."""

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call a function: {name, args, kwargs} -> {value, args}, or {error, message}."""
        if time.monotonic() > self._deadline:
            self._failed(ProgramEnded(LIMITS["seconds"]), ends=ENDS)
        if self._ends >= ENDS:
            return {"error": "RuntimeError", "message": self.why}
        try:
            if not self._open:
                self._server.open({"do": "serve", "source": self._source})
                self._open = True
                loaded = self._server.ask()
                if not isinstance(loaded, dict) or "loaded" not in loaded:
                    return self._failed(ProgramEnded(_words(loaded)), ends=ENDS)
            answer = self._server.ask(message)
        except ProgramEnded as error:
            return self._failed(error, ends=1)
        if not isinstance(answer, dict) or not answer.keys() >= {"value", "args"}:
            self.why = self.why or _words(answer)
            return {"error": _kind_of(answer), "message": _words(answer)}
        return answer

    def _failed(self, error: ProgramEnded, ends: int) -> dict[str, Any]:
        self.finish()
        self._ends += ends
        self.why = self.why or str(error)
        return {"error": "RuntimeError", "message": self.why}

    def finish(self) -> None:
        """End the program."""
        if self._open:
            self._server.finish()
            self._open = False


def _deadline(limits: Limits) -> float:
    """Return when a program that begins now has used the time of all its cases."""
    return time.monotonic() + TOGETHER * limits.seconds


def _words(answer: Any) -> str:
    if isinstance(answer, dict) and isinstance(answer.get("message"), str):
        return str(answer["message"])[:300]
    return "an answer of another form"


def _kind_of(answer: Any) -> str:
    kind = answer.get("error") if isinstance(answer, dict) else None
    return kind if isinstance(kind, str) else "RuntimeError"


def _run_printed(server: Sandbox, source: str, case: Printed, counter: _Counter) -> None:
    if counter.is_over():
        return
    ran = server.run(source, case.text)
    counter.count(ran.ended == "0" and same_text(ran.output, case.expected), ran.ended)


def _run_called(program: _Program, case: Called, counter: _Counter) -> None:
    request = {"name": case.name, "args": encode(list(case.args)), "kwargs": encode({})}
    answer = program.call(request)
    if "value" not in answer:
        counter.count(False, _words(answer))
        return
    counter.count(same_value(_decoded(answer["value"]), case.expected), "")


def _decoded(data: Any) -> Any:
    """Return a value that a program sent; what is none equals nothing."""
    try:
        return decode(data)
    except ValueError:
        return Opaque("no value")


def _grade_of(message: Any, tests: Checked, why: str) -> Grade:
    """Return the grade that the code of a test came to."""
    cases = message.get("cases") if isinstance(message, dict) else None
    if not isinstance(cases, list):
        return Grade(passed=0, cases=tests.cases, why=_words(message), gameable=tests.gameable)
    passed = cases.count(True)
    count = max(tests.cases, len(cases))
    ended = message.get("ended")
    if ended is not None:  # the assertions behind it never ran
        count = max(tests.cases, len(cases) + 1)
        why = why or _words(ended)
    if passed < count and not why:
        why = "another result"
    return Grade(passed=passed, cases=count, why=why, gameable=tests.gameable)


def same_text(printed: bytes, expected: str) -> bool:
    """Compare what was printed, word by word in each line; spaces and empty lines at the ends do
    not count, and decimals are compared as numbers.

    >>> same_text(b"1 2\\n0.30000001\\n", "1 2\\n0.3"), same_text(b"1\\n2", "1 2")
    (True, False)
    """
    got = printed.decode(errors="replace").strip().splitlines()
    wanted = expected.strip().splitlines()
    if len(got) != len(wanted):
        return False
    for line, other in zip(got, wanted, strict=True):
        words, others = line.split(), other.split()
        if len(words) != len(others) or not all(map(_same_word, words, others)):
            return False
    return True


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted and "e" not in wanted.lower():
        return False
    try:
        return math.isclose(float(word), float(wanted), rel_tol=CLOSE, abs_tol=CLOSE)
    except ValueError:
        return False


def same_value(value: Any, expected: Any) -> bool:
    """Compare a value with what is expected, which often was JSON: a tuple equals a list, floats
    are close, NaN equals NaN.

    >>> same_value((1, 2.0000000001), [1, 2.0]), same_value(True, "True"), same_value({1}, [1])
    (True, False, False)
    """
    if isinstance(value, Opaque):
        return False
    if isinstance(value, float) or isinstance(expected, float):
        return _same_number(value, expected)
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        if value.keys() == expected.keys():
            return all(same_value(value[key], expected[key]) for key in expected)
        try:
            named = {str(key): item for key, item in value.items()}  # JSON's keys are texts
        except ValueError:  # an integer with more digits than Python writes
            return False
        return named.keys() == expected.keys() and same_value(named, expected)
    return type(value) is type(expected) and bool(value == expected)


def _same_number(value: Any, expected: Any) -> bool:
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        return False
    if value != value or expected != expected:
        return value != value and expected != expected
    try:
        return math.isclose(value, expected, rel_tol=CLOSE, abs_tol=CLOSE)
    except OverflowError:
        return False


class Grading:
    """Grades many programs side by side, and remembers what they came to."""

    def __init__(self, graders: Sequence[ProgramGrader], limits: Limits) -> None:
        """graders: as many as run side by side."""
        self._free: SimpleQueue[ProgramGrader] = SimpleQueue()
        self._graders = graders
        for grader in graders:
            self._free.put(grader)
        self._threads = ThreadPoolExecutor(len(graders), thread_name_prefix="groupwise-programs")
        self._limits = repr(limits)
        self._known: OrderedDict[bytes, Grade] = OrderedDict()
        self.cached = 0
        """Grades that were known."""

    def grade(
        self, programs: Sequence[tuple[str, Tests] | None]
    ) -> list[Grade | SandboxFailed | None]:
        """Return the grades of programs; None where there is no program, the failure where the
        sandbox failed.
        """
        grades: list[Grade | SandboxFailed | None] = []
        begun: dict[bytes, Future[Grade | SandboxFailed]] = {}
        keys = []
        for program in programs:
            key = None if program is None else self._key(*program)
            keys.append(key)
            if program is None or key is None:
                continue
            if key in self._known or key in begun:
                self.cached += 1
            else:
                begun[key] = self._threads.submit(self._grade, *program)
        for key, future in begun.items():
            grade = future.result()
            if isinstance(grade, Grade):
                self._known[key] = grade
        for key in keys:
            if key is None:
                grades.append(None)
            elif key in self._known:
                self._known.move_to_end(key)
                grades.append(self._known[key])
            else:
                grades.append(begun[key].result())
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return grades

    def close(self) -> None:
        """End all sandboxes, also those that a thread waits for."""
        for grader in self._graders:
            grader.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for grader in self._graders:
            grader.close()

    def _key(self, source: str, tests: Tests) -> bytes:
        text = f"{self._limits}\0{tests!r}\0{source}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    def _grade(self, source: str, tests: Tests) -> Grade | SandboxFailed:
        grader = self._free.get()
        try:
            try:
                return grader.grade(source, tests)
            except SandboxFailed:  # once more, in a new one
                return grader.grade(source, tests)
        except SandboxFailed as error:
            return error
        finally:
            self._free.put(grader)


def cores() -> int:
    """Return the number of sandboxes that run side by side."""
    return max(1, len(os.sched_getaffinity(0)))
