"""A checkpoint put to use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.cli.chat import chat
from groupwise.models.saving import save


def test_a_conversation_answers_and_ends_its_line_at_the_end_of_input(
    tiny_policy: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tiny_policy(), tmp_path)
    said = iter(["1+1", "2+2"])

    def ask(text: str) -> str:
        print(text, end="")
        for line in said:
            print(line)  # as a terminal shows it
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    assert chat(str(tmp_path), max_new_tokens=4) == 0
    out = capsys.readouterr().out
    assert out.count("> ") >= 3
    assert out.endswith("> \n")
