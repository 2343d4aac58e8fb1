"""Small folders with a failing check: a function that does something else than its check says."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from groupwise.data.tasks.base import Generated, Row
from groupwise.data.tasks.programs import CASES, KINDS
from groupwise.utils.built_in import built_in

CHECK = """from solution import f

got = f({argument!r})
assert got == {expected!r}, f"f({argument!r}) is {{got!r}}, not {expected!r}"
print("passed")
"""
SOURCE = "def f(x):\n    return {expression}\n"


@built_in("repairs")
@dataclass(frozen=True, kw_only=True)
class Repairs(Generated):
    """A file with a wrong function, a check that fails, and hidden tests.

    The tools are `shell` or `python`, the reward is `code` with its argument `file`.  With
    probability `slip` a demonstrator writes another wrong function.

    >>> (row,) = Repairs().held_out(1)
    >>> sorted(row["files"])
    ['check.py', 'solution.py']
    """

    slip: float = 0.0

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

    def completion(self, row: Row, rng: random.Random) -> str:
        """Return a call that writes the function and runs the check."""
        source = row["answer"]
        if rng.random() < self.slip:
            source = row["files"]["solution.py"]
        command = f"cat > solution.py <<'END'\n{source}END\npython3 check.py"
        call: dict[str, Any] = {"name": "shell", "arguments": {"command": command}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"
