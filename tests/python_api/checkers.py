"""What type checkers say of a user's script: nothing of one that is right, and every mistake of one that is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("user_script.py")
WRONG = """
import groupwise as gw
gw.train(objective="grpo", lr=1e-4)
gw.train(objective="grpo", steps="3")
gw.train(objective="grpo", optimizer=gw.settings.OptimizerSettings(learning_rate=1e-4))
gw.train(objective="grpo", rewards=3)
gw.load_policy("x").generate(3)
"""


def check_types(command: list[str], folder: Path, environment: dict[str, str], behind: str = "") -> None:
    """A type checker has nothing to say of the user's script, nor of what else it is given, and finds what is wrong in `WRONG`.

    behind: stands at the end of both files.
    """
    right, wrong = folder / "right.py", folder / "wrong.py"
    right.write_text(SCRIPT.read_text(encoding="utf-8") + behind, encoding="utf-8")
    wrong.write_text(WRONG + behind, encoding="utf-8")
    line = [sys.executable, "-m", *command, str(right), str(wrong)]
    found = subprocess.run(line, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    errors = [line for line in found.stdout.splitlines() if re.search(r":\d+(:\d+)?\s*(-\s*)?:?\s*error", line)]
    assert not [line for line in errors if "wrong.py" not in line], found.stdout + found.stderr
    lines = {int(told[1]) for line in errors if (told := re.search(r"wrong\.py:(\d+)", line))}
    assert lines == {3, 4, 5, 6, 7}, found.stdout + found.stderr
