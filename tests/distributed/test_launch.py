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
import torch
from torch.distributed.run import get_args_parser

from groupwise.cli import commands
from groupwise.distributed.process_group import own_gpu

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


@pytest.mark.parametrize(("seen", "rank", "own"), [(8, "5", 5), (1, "5", 0), (1, "0", 0)])
def test_a_process_that_sees_one_gpu_takes_it(seen: int, rank: str, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers count processes of a machine, and some of them show each process no GPU but its own."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert own_gpu() == own


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
