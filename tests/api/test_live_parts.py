"""Parts of a loss that are given as objects: the same run as by name, and its source in the run folder."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finished import untimed_metrics
from rich.console import Console

import groupwise as gw
from groupwise.cli.commands import main
from groupwise.config.live_objects import live_part, source_of
from groupwise.errors import ConfigError

SOURCE = """import numpy as np


def centred(groups):
    return [group.reward - np.mean(group.reward) for group in groups]
"""
RECIPE: dict[str, Any] = {
    "objective": "grpo", "seed": 3, "data": {"task": "addition", "limit": 64, "eval_limit": 4},
    "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96, "tokenizer": "arithmetic"}},
    "rewards": {"function": lambda completion: float(len(completion)), "name": "length"}, "rollout": {"max_new_tokens": 6},
    "optimizer": {"lr": 1e-3}, "eval": {"at_start": False, "k": 1}, "save": {"every": 1},
}  # fmt: skip


def centred(groups):
    return [group.reward - np.mean(group.reward) for group in groups]


@dataclass(frozen=True)
class Scaled:
    """Centred rewards times a number."""

    scale: float = 1.0

    def __call__(self, groups):
        return [self.scale * one for one in centred(groups)]


def curve(name: str, credit: object, steps: int = 2, stop: int | None = None) -> list[dict[str, Any]]:
    group = {"prompts_per_step": 3, "group_size": 3, "credit": credit}
    for step in gw.train(**RECIPE, group=group, steps=steps, name=name):
        if step.number == stop:
            break
    return untimed_metrics(Path("runs") / name)


@pytest.mark.slow
def test_an_object_is_the_function_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts_of_mine.py").write_text(SOURCE)
    named = curve("named", "parts_of_mine.py:centred")
    ways: dict[str, Callable] = {"function": centred, "lambda": lambda groups: centred(groups), "object": Scaled()}
    for name, credit in ways.items():
        assert curve(name, credit) == named, name
        (source,) = (Path("runs") / name / "parts").glob("*.py")
        assert source.stem in (Path("runs") / name / "config.yaml").read_text()
    assert "def centred(groups)" in next(Path("runs/function/parts").glob("centred-*.py")).read_text()
    assert curve("twice", Scaled(2.0)) != named


@pytest.mark.slow
def test_a_resume_asks_for_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = curve("whole", Scaled(0.5))
    curve("broken", Scaled(0.5), stop=1)
    with pytest.raises(ConfigError, match=r"group\.credit"):
        curve("broken", Scaled(0.25))
    with pytest.raises(ConfigError, match=r"call gw\.train with the same object"):
        list(gw.train("runs/broken/config.yaml"))
    assert curve("broken", Scaled(0.5)) == whole


class Scales:
    """A credit that is a method of an object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def centred(self, groups: Any) -> list[Any]:
        return [self.scale * one for one in centred(groups)]


def with_default(scale: float) -> Callable[..., Any]:
    def credit(groups, scale=scale):
        return [scale * one for one in centred(groups)]

    return credit


def with_keyword(scale: float) -> Callable[..., Any]:
    def credit(groups, *, scale=scale):
        return [scale * one for one in centred(groups)]

    return credit


def typed_in(scale: float) -> Callable[..., Any]:
    made: dict[str, Any] = {"centred": centred}
    exec(f"def credit(groups):\n    return [(lambda x: {scale} * x)(one) for one in centred(groups)]", made)
    return made["credit"]


def beside_functions(scale: float) -> Callable[..., Any]:
    parts = (scale, lambda x: x)
    return lambda groups: [parts[0] * parts[1](one) for one in centred(groups)]


WAYS: list[Callable[[float], Callable[..., Any]]] = [
    with_default,
    with_keyword,
    typed_in,
    beside_functions,
    lambda scale: Scales(scale).centred,
    lambda scale: functools.cache(with_default(scale)),
]


@pytest.mark.parametrize("made", WAYS)
def test_a_part_of_another_number_has_another_name(made: Callable[[float], Callable[..., Any]]) -> None:
    assert live_part("credit", made(0.5)) == live_part("credit", made(0.5))
    assert live_part("credit", made(0.5)) != live_part("credit", made(0.25))


def test_a_part_written_in_c_has_a_name() -> None:
    names = {live_part("credit", part) for part in (len, sum, np.add)}
    assert len(names) == 3


def test_the_source_of_a_method_is_that_of_its_class() -> None:
    source = source_of(Scales(0.5).centred)
    assert source is not None and source.startswith("class Scales")


def brief(completion: str) -> float:
    return -float(len(completion))


def double(number: int) -> int:
    """Double a number.

    Args:
        number: what is doubled
    """
    return 2 * number


ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(24)]
HELD_OUT = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(8)]
CHATS = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(24)]
OFFERED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "names": ({"rewards": "repetition"}, {"view", "chat", "eval", "score"}),
    "reward": ({"rewards": brief}, {"view", "chat"}),
    "one of two rewards": ({"rewards": ["repetition", brief]}, {"view", "chat"}),
    "rows": ({"rewards": "repetition", "data": {"path": ROWS, "eval_fraction": 0.5}}, {"view", "chat", "score"}),
    "held-out rows": ({"rewards": "repetition", "data": {"path": "rows.jsonl", "eval_path": HELD_OUT}}, {"view", "chat", "score"}),
    "credit": ({"rewards": "repetition", "group": {"credit": centred}}, {"view", "chat", "eval", "score"}),
    "tool": (
        {"rewards": "repetition", "data": {"path": "chats.jsonl", "chat": True, "eval_fraction": 0.5}, "tools": [double]},
        {"view", "chat", "score"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "offered"), OFFERED.values(), ids=OFFERED)
def test_only_commands_that_work_are_offered(
    changes: dict[str, Any], offered: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that find what they need in the run folder; each of them is run, as far as it ends by itself."""
    monkeypatch.chdir(tmp_path)
    for name, rows in (("rows", ROWS), ("chats", CHATS)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    group = {"prompts_per_step": 2, "group_size": 3} | changes.get("group", {})
    output = io.StringIO()
    gw.train(**(RECIPE | changes | {"group": group}), steps=1, name="run").run(console=Console(file=output, width=200))
    _, _, after = output.getvalue().partition("Next:")
    commands = [line.split()[1:] for line in after.splitlines() if line.strip()]
    assert {command[0] for command in commands} == offered
    for command in commands:
        if command[0] in ("eval", "score"):
            assert main(command) == 0, command
