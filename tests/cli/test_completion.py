"""Completion in a real shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from groupwise.cli.commands import COMMANDS, main
from groupwise.cli.completion import SHELLS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "expected", "absent"),
    [
        (["groupwise", "tr"], {"train", "trust"}, "eval"),
        (["groupwise", "train", "--se"], {"--seeds"}, "--sweep"),
        (["groupwise", "train", "dem"], {"demo"}, "arithmetic"),
        (["groupwise", "train", "demo", "optimizer.l"], {"optimizer.lr="}, "optimizer.eps="),
        (["groupwise", "config", "optimizer.l"], {"optimizer.lr"}, "optimizer.lr="),
        (["groupwise", "eval", "my-r"], {"my-run"}, "demo"),
        (["groupwise", "completion", "z"], {"zsh"}, "bash"),
        (["groupwise", "train", "demo", "model.path", "="], {"my-run"}, "demo"),
        (["groupwise", "train", "demo", "model.path", "=", "my-"], {"my-run"}, "demo"),
        (["groupwise", "train", "demo", "model.path", "=", "de"], set(), "demo"),
        (["groupwise", "train", "demo", "model.path=my-"], {"model.path=my-run"}, "demo"),
    ],
)
def test_bash_completes(typed: list[str], expected: set[str], absent: str, capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    (tmp_path / "my-run").mkdir()
    words = " ".join(f"'{word}'" for word in typed)
    asked = f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _groupwise; printf "%s\\n" "${{COMPREPLY[@]}}"'
    bash = ["bash", "--norc", "-c", script("bash", capsys) + asked]
    done = subprocess.run(bash, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    found = set(done.stdout.split())
    assert expected <= found and absent not in found, (done.stdout, done.stderr)


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for name in COMMANDS:
        assert f" {name}" in text
    if shutil.which(shell):
        read = subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, timeout=60)
        assert read.returncode == 0, read.stderr
