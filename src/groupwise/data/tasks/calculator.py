"""Products that are too long to be done in the head, and a calculator, which demonstrators use
carelessly.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from groupwise.data.tasks.base import Generated, Row
from groupwise.data.tasks.expressions import decimal, evaluate, parse
from groupwise.utils.built_in import built_in

ARGUMENTS = {"calculate": "expression", "python": "code"}
"""Tools that a demonstrator may call, each with the argument that holds what is worked out."""


@built_in("calculator")
@dataclass(frozen=True, kw_only=True)
class Calculator(Generated):
    r"""`a*b` with numbers of `digits` digits, perhaps with a third number added.

    With probability `blurt` a demonstrator writes an answer at once, which is right but cannot be
    learnt; otherwise he calls `tool`, but types one digit wrong with probability `slip`; then
    he reads off what it says.  A call and the reading are two demonstrations.

    >>> Calculator(blurt=0.0, slip=0.0).demonstrations(1, seed=0)[0]["completion"]
    '<tool_call>{"name": "calculate", "arguments": {"expression": "381*263"}}</tool_call>'
    """

    ranges: ClassVar = {"digits": (1, 12)}
    choices: ClassVar = {"tool": tuple(ARGUMENTS)}

    digits: int = 3
    blurt: float = 0.4
    slip: float = 0.5
    tool: str = "calculate"

    def question(self, rng: random.Random) -> Row:
        """Numbers without leading zeros."""
        a, b, c = (rng.randint(10 ** (self.digits - 1), 10**self.digits - 1) for _ in range(3))
        prompt = f"{a}*{b}" + (f"+{c}" if rng.random() < 0.5 else "")
        return {"prompt": prompt, "answer": decimal(evaluate(parse(prompt)))}

    def completion(self, row: Row, rng: random.Random) -> str:
        """What a careless demonstrator writes first."""
        if rng.random() < self.blurt:
            return f"\\boxed{{{row['answer']}}}"
        typed = str(row["prompt"])
        if rng.random() < self.slip:
            place = rng.choice([i for i, character in enumerate(typed) if character.isdigit()])
            typed = typed[:place] + str(rng.randrange(1, 10)) + typed[place + 1 :]
        call = {"name": self.tool, "arguments": {ARGUMENTS[self.tool]: typed}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """`n` rows: direct answers, calls, and answers read off the result of a call."""
        rng, rows = random.Random(f"demonstrations/{seed}"), []
        for row in self._questions(rng, held_out=False):
            question = {"role": "user", "content": row["prompt"]}
            written = self.completion(row, rng)
            rows.append({**row, "prompt": [question], "completion": written})
            if written.startswith("<tool_call>"):
                call = json.loads(written.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                result = decimal(evaluate(parse(call["arguments"][ARGUMENTS[self.tool]])))
                conversation = [
                    question,
                    {"role": "assistant", "content": written},
                    {"role": "tool", "name": self.tool, "content": result},
                ]
                rows.append({**row, "prompt": conversation, "completion": f"\\boxed{{{result}}}"})
            if len(rows) >= n:
                break
        return list(islice(rows, n))
