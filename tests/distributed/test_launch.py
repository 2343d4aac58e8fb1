"""The torchrun lines of docs/scaling.md, and `--nproc`: the arguments are those that torchrun and the command take."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from groupwise.cli import commands

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
BLOCKS = [text for language, text in FENCED if not language]


def launched() -> Iterator[list[str]]:
    """Arguments of every torchrun on the page."""
    for block in BLOCKS:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "torchrun" in words:
                yield words[words.index("torchrun") + 1 :]


@pytest.mark.parametrize("words", launched(), ids=" ".join)
def test_torchrun_and_the_command_take_these_arguments(words: list[str]) -> None:
    given: Any = get_args_parser().parse_args(words)
    assert given.module
    assert given.training_script == "groupwise"
    assert given.standalone or given.rdzv_backend == "c10d"
    assert commands._parse(given.training_script_args).command == "train"


class Replaced(Exception):
    """Raised in the place of `os.execv`."""


@pytest.mark.parametrize("command", [["train", "demo", "--nproc", "2"], ["train", "demo", "seed=1", "--fresh", "--nproc", "3"]])
def test_launcher_and_processes_import_nothing_of_the_working_folder(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A `random.py` that lies there is the user's."""
    words = list[str]()

    def replaced(program: str, arguments: list[str]) -> None:
        words[:] = arguments
        raise Replaced

    monkeypatch.setattr(os, "execv", replaced)
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(Replaced):
        commands.main(command)
    pythons = [place for place, word in enumerate(words) if word == sys.executable]
    assert [words[place + 1] for place in pythons] == ["-P", "-P"]
    assert f"--nproc-per-node={command[-1]}" in words


def test_the_launch_commands_of_the_page_are_all_found() -> None:
    assert len(list(launched())) == 3
