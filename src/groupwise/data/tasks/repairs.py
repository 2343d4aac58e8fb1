"""Small folders with a failing check: a function that does something else than its check says."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.data.tasks.base import Generated, Row
from groupwise.data.tasks.programs import CASES, KINDS
from groupwise.utils.built_in import built_in

CHECK = """from solution import f

got = f({argument!r})
assert got == {expected!r}, f"f({argument!r}) is {{got!r}}, not {expected!r}"
print("passed")
"""
SOURCE = "def f(x):\n    return {expression}\n"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command by which mini-swe-agent ends."""
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The bash command to execute"}
            },
            "required": ["command"],
        },
    },
}
"""The tool of mini-swe-agent 2.4, as its requests show it."""


@built_in("repairs")
@dataclass(frozen=True, kw_only=True)
class Repairs(Generated):
    """A file with a wrong function, a check that fails, and hidden tests.

    The tools are `shell` or `python`, the reward is `code` with its argument `file`.  With
    probability `slip` a demonstrator writes another wrong function.

    With `agent` demonstrations are turns as the agent asks for them: one that writes the file and
    runs the check, or one that ends.

    >>> (row,) = Repairs().held_out(1)
    >>> sorted(row["files"])
    ['check.py', 'solution.py']
    """

    slip: float = 0.0
    agent: Literal["mini-swe"] | None = None

    def question(self, rng: random.Random) -> Row:
        """Draw a function, a wrong one of its kind, and calls that tell them apart."""
        kind = rng.choice(KINDS)
        right = kind(rng)
        while True:
            wrong = kind(rng)
            arguments = [right.draw(rng) for _ in range(CASES)]
            telling = []
            for argument in arguments:
                if right.reference(argument) != wrong.reference(argument):
                    telling.append(argument)
            if len(telling) > 1:
                break
        tests = []
        for argument in arguments:
            expected = right.reference(argument)
            tests.append({"call": "f", "args": [argument], "expected": expected})
        check = CHECK.format(argument=telling[0], expected=right.reference(telling[0]))
        wrong_source = SOURCE.format(expression=wrong.expression)
        prompt = f"In solution.py, f(x) must return {right.words}. Repair it; check.py fails."
        return {
            "prompt": prompt,
            "answer": SOURCE.format(expression=right.expression),
            "files": {"solution.py": wrong_source, "check.py": check},
            "tests": json.dumps(tests),
        }

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """Return `n` drawn questions with completions; with an agent, of both turns in turn."""
        rows = super().demonstrations(n, seed)
        if self.agent is None:
            return rows
        turns = []
        for place, row in enumerate(rows):
            asked = [{"role": "user", "content": row["prompt"]}]
            turn = row | {"prompt": asked, "tools": [BASH]}
            if place % 2:
                asked += _answered(row["completion"])
                turn["completion"] = _call("bash", SUBMIT)
            turns.append(turn)
        return turns

    def completion(self, row: Row, rng: random.Random) -> str:
        """Return a call that writes the function and runs the check."""
        source = row["answer"]
        if rng.random() < self.slip:
            source = row["files"]["solution.py"]
        if self.agent == "mini-swe":
            line = source.replace("\n   ", "").rstrip()
            return _call("bash", f"echo '{line}' > solution.py; python3 check.py")
        return _call("shell", f"cat > solution.py <<'END'\n{source}END\npython3 check.py")


def _call(tool: str, command: str) -> str:
    call = {"name": tool, "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def _answered(completion: str) -> list[dict[str, Any]]:
    """Return the messages behind a call that passes the check."""
    call = json.loads(completion.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    passed = json.dumps({"returncode": 0, "output": "passed\n"}, indent=2)
    made = {"id": "call_0_0", "type": "function", "function": call}
    return [
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_0_0", "content": passed},
    ]
