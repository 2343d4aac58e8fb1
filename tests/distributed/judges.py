"""A reward function for the runs of these tests, which misbehaves when it is asked to."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def judge(completions: list[str], **_: Any) -> list[float]:
    """Something that differs between completions.

    With MISCHIEF=what:rank:file in the environment, once the file has two lines, that rank's function raises, or the rank
    is killed or stopped.
    """
    if os.environ.get("MISCHIEF"):
        what, rank, file = os.environ["MISCHIEF"].split(":", 2)
        if os.environ.get("RANK") == rank and Path(file).exists() and len(Path(file).read_text(encoding="utf-8").splitlines()) >= 2:
            if what == "raise":
                raise RuntimeError("the judge is tired")
            os.kill(rank_process(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
            time.sleep(0.1)
    return [(sum(map(ord, text)) % 7) / 6 for text in completions]


def rank_process() -> int:
    """The rank that this function's worker belongs to: above the worker is its supervisor, and above that the rank."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def brief(completion: str) -> float:
    return -float(len(completion))


def lengthy(completion: str) -> float:
    return float(len(completion))
