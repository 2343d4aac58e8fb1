"""A reward function for the runs of these tests, which misbehaves when it is asked to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def judge(completions: list[str], **_: Any) -> list[float]:
    """Something that differs between completions.

    With MISCHIEF=what:rank:file in the environment that rank raises, is killed or stops once the file has two lines.
    """
    if os.environ.get("MISCHIEF"):
        what, rank, file = os.environ["MISCHIEF"].split(":", 2)
        if os.environ.get("RANK") == rank and Path(file).exists() and len(Path(file).read_text(encoding="utf-8").splitlines()) >= 2:
            if what == "raise":
                raise RuntimeError("the judge is tired")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
            time.sleep(0.1)
    return [(sum(map(ord, text)) % 7) / 6 for text in completions]
