"""What the terminal shows: the right figures, and nothing that a model wrote as a command to the terminal."""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from groupwise.api.progress import Progress, duration, escaped, make_console, safe
from groupwise.records import Episode, Finish, Prompt, Rollout, RolloutGroup, Sampling, Step, Turn
from groupwise.training.metric_table import FLAGGED, flags

PAYLOADS = [
    "[/oops]",
    "[bold red]x[/]",
    "[link=http://x]y[/link]",
    "\x1b[2J\x1b[31mred",
    "\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\",
    "\x9b31m",
    "\rover",
    "a\x08\x08b",
    "\u202egnp.exe",
    "zero\u200bwidth",
    "line\u2028separator",
    "\x00\x07",
    ":smile: {0} %s",
]


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=200, highlight=False, soft_wrap=True, color_system=None), file


def step(number: int, text: str = "4", **metrics: float) -> Step:
    prompt = Prompt(id="0", tokens=np.array([1]), text=f"prompt {text}")
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            index=i,
            tokens=np.array([5]),
            behavior_logp=np.zeros(1),
            finish=Finish.LENGTH,
            eos_ids=(1,),
            sampling=Sampling(),
            text=f"{text} #{i}",
        )
        for i in range(2)
    )
    group = RolloutGroup(rollouts=rollouts, names=("r",), rewards=np.array([[0.0], [1.0]]), reward=np.array([0.0, 1.0]))
    return Step(number=number, metrics=metrics, groups=(group,))


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize("payload", PAYLOADS)
def test_v5_hostile_text_is_shown_not_obeyed(payload: str) -> None:
    out, file = console(terminal=True)
    progress = Progress(1, title=payload, console=out)
    progress.plan([("task", payload)])
    progress.update(step(1, payload, reward=1.0))
    progress.summary([(payload, payload)])
    shown = file.getvalue()
    assert escaped(payload) in shown
    theirs = shown.replace("\x1b[2K", "").replace("\x1b[?25l", "").replace("\x1b[?25h", "").replace("\x1b[1A", "").replace("\r", "")
    assert not any(char in theirs for char in "\x1b\x9b\x08\x00\x07\u202e\u200b\u2028")


def test_what_is_cut_says_how_long_it_was() -> None:
    assert safe("x" * 2_000_000, limit=10).plain == "xxxxxxxxxx... (2,000,000 characters)"


def test_plain_lines_without_a_terminal() -> None:
    out, file = console()
    clock = Clock()
    with Progress(100, console=out, now=clock) as progress:
        progress.plan([("prompts", "16"), ("completions", "128")])
        for number in range(1, 101):
            clock.time += 1.0
            metrics = {
                "reward": number / 100,
                "groups/dead": 0.25,
                "kl": 0.01,
                "entropy": 1.5,
                "completions/mean_length": 31.6,
            }
            progress.update(step(number, **metrics, **{"tokens/per_second": 12_345.0, "loss": 7.0}))
    lines = [line for line in file.getvalue().splitlines() if line.startswith("step ")]
    assert len(lines) == 100  # one a step
    assert lines[0] == "step 1/100  left 1m39s  reward 0.010  dead 25%  kl 0.010  entropy 1.500  length 32  tok/s 12.3k"
    assert lines[-1].startswith("step 100/100  reward 1.000")
    assert "left" not in lines[-1]
    assert "loss" not in file.getvalue()  # a policy-gradient loss tells nothing


def test_a_step_with_an_evaluation_keeps_its_line() -> None:
    out, file = console(terminal=True)
    with Progress(10, console=out) as progress:
        evaluated = Step(number=3, metrics={"reward": 0.5}, evaluation={"eval/greedy": 0.25, "eval/greedy/half_width": 0.1})
        progress.update(evaluated)
    assert "reward 0.500  eval greedy 0.250" in file.getvalue()
    assert "half_width" not in file.getvalue()


def test_data_set_objectives_show_their_loss() -> None:
    out, file = console()
    with Progress(1, console=out) as progress:
        progress.update(Step(number=1, metrics={"loss": 2.5}))
        progress.summary()
    assert "step 1/1  loss 2.500" in file.getvalue()


def test_summary_compares_the_start_with_the_end() -> None:
    out, file = console()
    progress = Progress(40, console=out)
    for number in range(1, 41):
        progress.update(step(number, reward=0.1 if number <= 20 else 0.9, **{"groups/dead": 0.0}, entropy=0.5))
    progress.summary([("held-out accuracy", "0.33 -> 0.99")])
    text = file.getvalue().split("steps 1-10", 1)[1]
    assert "steps 31-40" in text
    assert any(line.split() == ["reward", "0.100", "0.900"] for line in text.splitlines())
    assert "0.33 -> 0.99" in text
    assert "!" not in text
    assert "best of step 40: reward 1, 1 token, length" in text
    assert "worst of step 40: reward 0" in text


def test_the_best_completion_stands_behind_the_prompt_that_the_policy_saw() -> None:
    out, file = console()
    progress = Progress(1, console=out)
    taken = step(1, reward=1.0)
    turn = Turn(begin=0, end=1, finish=Finish.LENGTH)
    episode = Episode(turns=(turn,), opening=" 1 to 8.", prompt_text="Guess. 1 to 8.")
    groups = [replace(group, rollouts=tuple(replace(one, episode=episode) for one in group.rollouts)) for group in taken.groups]
    progress.update(replace(taken, groups=groups))
    progress.summary()
    assert "Guess. 1 to 8." in file.getvalue()


def test_health_flags() -> None:
    bad = {
        "groups/dead": 0.9,
        "completions/clipped_ratio": 0.85,
        "entropy": 0.005,
        "mismatch/max": 0.2,
        "completions/duplicates": 0.95,
        "skipped_updates": 1.0,
        "kl/guarded": 2.0,
        "reward": math.nan,
    }
    good = dict.fromkeys(bad, 0.0) | {"entropy": 1.0}
    assert set(bad) | {"groups/solved", "groups/failed", "tokens/trained", "value/explained"} == {
        metric.name for metric, _ in FLAGGED
    }
    assert flags([good] * 20) == []
    assert flags([]) == []
    assert flags([good] * 20 + [bad] * 10) == flags([bad])
    raised = [metric.name for metric, _ in FLAGGED if metric.name in bad]
    assert [line.split()[0] for line in flags([bad])] == [name for name in raised if name != "groups/dead"], "reward is NaN"
    assert [line.split()[0] for line in flags([bad | {"reward": 0.5}])] == [name for name in raised if name != "reward"]
    assert flags([bad] * 20 + [good] * 10) == []  # what is over is over


COLLAPSED = {"groups/dead": 1.0, "entropy": 0.001, "completions/duplicates": 1.0, "completions/clipped_ratio": 0.0}


def test_solved_groups_raise_no_collapse_warning() -> None:
    solved = flags([COLLAPSED | {"groups/solved": 0.87, "groups/failed": 0.0}])
    assert solved == ["groups/solved 87%: most groups are solved. Stop here, or go on with harder prompts."]
    assert not flags([COLLAPSED | {"groups/solved": 0.7, "groups/failed": 0.0}])
    lost = flags([COLLAPSED | {"groups/solved": 0.0, "groups/failed": 1.0}])
    assert lost[0].startswith("groups/failed 100%: most groups hold no right completion. Easier prompts, a better start (SFT)")
    assert [line.split()[0] for line in lost[1:]] == ["completions/duplicates", "entropy"]
    mixed = flags([COLLAPSED | {"groups/solved": 0.5, "groups/failed": 0.5}])
    assert [line.split()[0] for line in mixed] == ["groups/dead", "completions/duplicates", "entropy"]


def test_a_run_that_trains_nothing_is_flagged_once() -> None:
    nothing = {"groups/dead": 1.0, "tokens/trained": 0.0, "completions/clipped_ratio": 1.0}
    assert [line.split()[0] for line in flags([nothing])] == ["tokens/trained", "completions/clipped_ratio"]
    assert "group.truncated: keep" in flags([nothing])[0]
    assert flags([nothing | {"tokens/trained": 7.0, "completions/clipped_ratio": 0.0}]) != []


def test_a_critic_that_explains_nothing_is_flagged_once_it_had_time_to_learn() -> None:
    steps = [{"value/explained": 0.005}] * 20
    assert flags(steps[:19]) == []
    assert [line.split(".")[0] for line in flags(steps)] == ["value/explained 0%: the critic explains nothing"]
    assert flags([{"value/explained": 0.2}] * 20) == []


def test_nothing_is_wrapped_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with (tmp_path / "log").open("w") as file, contextlib.redirect_stdout(file):
        progress = Progress(2, "a title", console=make_console())
        progress.plan([("memory", "about " + "many words " * 40), ("data", "x" * 300)])
        for number in (1, 2):
            progress.update(
                step(number, reward=1.0, entropy=0.5, kl=0.1, **{"tokens/per_second": 1e4, "completions/duplicates": 1.0})
            )
        progress.summary([("model", "y" * 200)])
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if line.startswith(("memory", "data"))] == [
        "memory  about " + "many words " * 39 + "many words ", "data    " + "x" * 300,
    ]  # fmt: skip
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/2", "2/2"]
    assert sum(line.startswith("! ") for line in lines) == 1
    assert "y" * 200 in next(line for line in lines if line.startswith("model"))


def test_more_than_half_of_the_completions_cut_off_is_said() -> None:
    """A policy that half of the time is not allowed to end learns to be short, or nothing."""
    assert [line.split()[0] for line in flags([{"completions/clipped_ratio": 0.55}])] == ["completions/clipped_ratio"]
    assert flags([{"completions/clipped_ratio": 0.45}]) == []


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 59.6, 3599, 3600, 90_061)] == [
        "0s",
        "59s",
        "1m00s",
        "59m59s",
        "1h00m",
        "25h01m",
    ]


def test_a_short_run_compares_different_steps() -> None:
    """Six steps: the first three beside the last three; a single step stands alone."""
    for count, columns in ((6, ("steps 1-3", "steps 4-6")), (2, ("step 1", "step 2")), (1, ("step 1",))):
        shown, text = console()
        progress = Progress(count, console=shown)
        for number in range(1, count + 1):
            progress.update(step(number, reward=0.5))
        progress.summary()
        assert re.findall(r"steps? \d+(?:-\d+)?(?![\d/])", text.getvalue().split("\nreward ")[0]) == list(columns)


def test_the_evaluation_before_step_1_is_no_step_of_the_table() -> None:
    shown, text = console()
    progress = Progress(4, console=shown)
    for number in range(5):
        progress.update(
            step(number, reward=float(number)) if number else Step(number=0, metrics={}, evaluation={"eval/greedy": 0.5})
        )
    progress.summary()
    assert all(column in text.getvalue() for column in ("steps 1-2", "steps 3-4"))


def test_the_live_line_stays_one_line() -> None:
    shown, _ = console(terminal=True)
    progress = Progress(9, console=shown)
    with progress:
        progress.update(step(1, reward=0.5))
        assert progress._live is not None
        line = progress._live.renderable
        assert len(shown.render_lines(line, shown.options.update(width=20))) == 1


def test_an_evaluation_without_a_terminal_has_a_line_a_minute() -> None:
    out, file = console()
    clock = Clock()
    with Progress(100, console=out, now=clock) as progress:
        progress.plan([("prompts", "64")])
        for _ in ("greedy", "sampled"):
            for done in range(1, 65):
                clock.time += 2.0
                progress.evaluating(done, 64)
        progress.update(step(0))
        clock.time += 59.0
        progress.evaluating(1, 64)
    lines = [line for line in file.getvalue().splitlines() if line.startswith("evaluating")]
    assert lines == [
        "evaluating, greedy: 30 of 64 prompts", "evaluating, greedy: 60 of 64 prompts",
        "evaluating, sampled: 26 of 64 prompts", "evaluating, sampled: 56 of 64 prompts",
    ]  # fmt: skip
    out, file = console(terminal=True)
    with Progress(100, console=out, now=clock) as progress:
        progress.evaluating(1, 64)
        progress.evaluating(2, 64)
    assert "evaluating, greedy: 2 of 64 prompts" in file.getvalue()


def test_a_notebook_has_one_output_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[list[str]] = []

    class Handle:
        def __init__(self, content: dict[str, str]) -> None:
            self.texts = [content["text/plain"]]
            outputs.append(self.texts)

        def update(self, content: dict[str, str], raw: bool) -> None:
            self.texts.append(content["text/plain"])

    stand_in = types.ModuleType("IPython.display")
    stand_in.display = lambda content, raw, display_id: Handle(content)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    progress = Progress(3, console=Console(file=io.StringIO(), force_jupyter=True))
    progress.evaluating(1, 64)
    progress.update(replace(step(0), evaluation={"eval/greedy": 0.25}))
    for number in (1, 2, 3):
        progress.update(step(number, reward=0.5))
    (shown,) = outputs
    assert shown[0] == "evaluating, greedy: 1 of 64 prompts"
    lines = shown[-1].splitlines()
    assert "eval greedy 0.250" in lines[0]
    assert [line.split("  ")[0] for line in lines] == ["step 0/3", "step 3/3"]
