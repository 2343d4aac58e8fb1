"""A run's output in the terminal: the plan, one live line, the summary with its warnings.

Reward, signal, KL and entropy come first and the loss not at all: a policy-gradient loss says
nothing about progress.  Without a terminal (a log file, a pipe) every step is a line of its own,
which is never wrapped.  Whatever a model wrote is shown with its control characters as escapes, and
never read as markup.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from groupwise.records import Step
from groupwise.training.metric_table import RECENT, ROWS, flags
from groupwise.utils.spelling import counted
from groupwise.utils.terminal import escaped

Plan = Sequence[tuple[str, str]]
"""What is about to happen, as (label, value) pairs."""


# ---------------------------------------------------------------- hostile text


def safe(text: str, limit: int | None = None, style: str = "") -> Text:
    """Model-written text for rich: no markup is read in it, control characters are escapes, at most
    `limit` characters.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}... ({len(text):,} characters)"
    return Text(escaped(text), style=style)


MINUTE = 60.0
"""Seconds between lines of an evaluation where the output is no terminal."""
WIDE = 1 << 16
"""Columns of an output that is no terminal: lines of a file or a pipe are never wrapped."""


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Rich's ends the program without a word."""
        raise


def make_console(*, quiet: bool = False) -> Console:
    """Standard output: as wide as the terminal, or without an end where it is none.  Raises OSError
    when nobody reads it.
    """
    console = _Output(highlight=False, quiet=quiet)
    if console.is_terminal or console.is_jupyter:
        return console
    return _Output(highlight=False, quiet=quiet, width=WIDE)


# ---------------------------------------------------------------- what is shown


COLUMNS = tuple(
    ROWS[name]
    for name in (
        "reward",
        "groups/dead",
        "kl",
        "entropy",
        "completions/mean_length",
        "accuracy",
        "tokens/per_second",
    )
)
"""The metrics of the progress line."""
LOSS = ROWS["loss"]
"""For objectives that learn from data, whose loss does mean something."""


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as short as they can be said.

    >>> duration(7), duration(754), duration(3 * 3600 + 62)
    ('7s', '12m34s', '3h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def aligned(rows: Plan) -> list[str]:
    """A plan as lines of plain text.

    >>> aligned([("data", "64 prompts"), ("a step", "9 completions")])
    ['data    64 prompts', 'a step  9 completions']
    """
    wide = max((len(label) for label, _ in rows), default=0)
    return [f"{label:{wide}}  {value}" for label, value in rows]


class NotebookOutput:
    """One output of a notebook's cell: lines that stay, and below them a line that changes."""

    def __init__(self) -> None:
        self._staying: list[str] = []
        self._handle: Any = None

    def show(self, line: str, *, stays: bool) -> None:
        """Replace the line that changes.   stays: it is never replaced."""
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        content = {"text/plain": "\n".join([*self._staying, line])}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        if stays:
            self._staying.append(line)


# ---------------------------------------------------------------- the view


class Progress:
    """The terminal view of one run.

    steps: the last step's number.  title: what the run is called.
    quiet: only the warnings at the end.
    Use as a context manager, so that the live line is taken away on any exit.
    """

    def __init__(
        self,
        steps: int,
        title: str = "",
        *,
        console: Console | None = None,
        quiet: bool = False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or make_console()
        self._steps, self._title, self._quiet, self._now = steps, title, quiet, now
        self._history: list[Mapping[str, float]] = []
        self._numbers: list[int] = []
        self._began = now()
        self._ticks = [self._began]
        self._last: Step | None = None
        self._live: Live | None = None
        self._notebook = NotebookOutput()
        self._said = self._began
        """When the last line was printed."""
        self._greedy = False
        """Whether an evaluation is at its greedy completions, which come first."""

    def __enter__(self) -> Progress:
        return self

    @property
    def _plain(self) -> bool:
        """True where there is no width to fit into."""
        return not (self.console.is_terminal or self.console.is_jupyter)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def plan(self, rows: Plan) -> None:
        """The table before step 1; the time of the steps counts from here."""
        table = Table(
            title=safe(self._title) if self._title else None,
            show_header=False,
            box=None,
            pad_edge=False,
            title_justify="left",
        )
        for label, value in rows:
            table.add_row(Text(label, style="dim"), safe(str(value)))
        if not self._quiet and self._plain:
            if self._title:
                self.console.print(safe(self._title), soft_wrap=True)
            for line in aligned(rows):
                self.console.print(safe(line), soft_wrap=True)
        elif not self._quiet:
            self.console.print(table)
        self._began = self._said = self._now()
        self._ticks = [self._began]

    def evaluating(self, done: int, count: int) -> None:
        """Say how far an evaluation is: in the live line, or once a minute in a line of its own."""
        if done == 1:
            self._greedy = not self._greedy
        if self._quiet:
            return
        kind = "greedy" if self._greedy else "sampled"
        line = safe(f"evaluating, {kind}: {done:,} of {counted(count, 'prompt')}")
        now = self._now()
        if self.console.is_terminal:
            self._show_live(line)
        elif self.console.is_jupyter:
            self._notebook.show(line.plain, stays=False)
        elif now - self._said >= MINUTE:
            self._said = now
            self.console.print(line, soft_wrap=True)

    def update(self, step: Step) -> None:
        """Show a step: the live line in a terminal, else a line of its own.  A step with an
        evaluation keeps its line.
        """
        self._history.append(dict(step.metrics))
        self._numbers.append(step.number)
        if step.groups or self._last is None:
            self._last = step
        if self._quiet:
            return
        now = self._now()
        self._ticks = [*self._ticks, now][-2 * RECENT - 1 :]
        line = self.line(step)
        if self.console.is_jupyter:
            self._notebook.show(line.plain, stays=bool(step.evaluation))
            return
        if self.console.is_terminal:
            self._show_live(line)
        if step.evaluation or not self.console.is_terminal:
            self._said = now
            self.console.print(line, soft_wrap=True)

    def _show_live(self, line: Text) -> None:
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        line.no_wrap, line.overflow = True, "ellipsis"
        # refreshed here, and not in Live's thread, so that an output that is gone is noticed
        self._live.update(line, refresh=True)

    def line(self, step: Step) -> Text:
        """One step in one line."""
        metrics = step.metrics
        columns = COLUMNS if "reward" in metrics or "accuracy" in metrics else (LOSS, *COLUMNS)
        parts = [f"step {step.number}/{self._steps}"]
        if len(self._ticks) > 1 and step.number < self._steps:
            each = (self._ticks[-1] - self._ticks[0]) / (len(self._ticks) - 1)
            parts.append(f"left {duration(each * (self._steps - step.number))}")
        for column in columns:
            if column.name in metrics:
                parts.append(f"{column.column} {column.shown(metrics[column.name])}")
        for name, value in (step.evaluation or {}).items():
            figure = name.removeprefix("eval/")
            if "/" not in figure:
                parts.append(f"eval {figure} {value:.3f}")
        return safe("  ".join(parts))

    def stop(self) -> None:
        """Take the live line away.  Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def summary(self, rows: Plan = ()) -> None:
        """The end of the run: first and last figures side by side, `rows` of the caller's,
        warnings, and the best and the worst completion of the last step."""
        self.stop()
        if self._history and not self._quiet:
            self.console.print(self._table(rows))
        elif rows:
            self.plan(rows)
        for warning in flags(self._history):
            self.console.print(safe(f"! {warning}", style="yellow"), soft_wrap=self._plain)
        if not self._quiet and self._last is not None and self._last.groups:
            self._sample(self._last)

    def _table(self, rows: Plan) -> Table:
        history, numbers = self._history, self._numbers
        if numbers[0] == 0 and len(numbers) > 1:  # step 0 is an evaluation
            history, numbers = history[1:], numbers[1:]
        size = min(RECENT, max(len(history) // 2, 1))
        begin, end = slice(None, size), slice(-size, None)
        spans = [begin, end] if len(history) > 1 else [end]  # two columns never show the same steps
        table = Table(
            box=None,
            pad_edge=False,
            title=safe(self._title) if self._title else None,
            title_justify="left",
        )
        table.add_column("")
        for span in spans:
            first, last = numbers[span][0], numbers[span][-1]
            steps = f"step {first}" if first == last else f"steps {first}-{last}"
            table.add_column(steps, justify="right")
        rewarded = any("reward" in metrics for metrics in history[end])
        for column in COLUMNS if rewarded else (LOSS, *COLUMNS):
            means = []
            for span in spans:
                values = [
                    metrics[column.name] for metrics in history[span] if column.name in metrics
                ]
                if values:
                    means.append(column.shown(sum(values) / len(values)))
            if len(means) == len(spans):
                table.add_row(column.column, *means)
        for label, value in [("time", duration(self._now() - self._began)), *rows]:
            table.add_row(safe(label), *[""] * (len(spans) - 1), safe(str(value)))
        return table

    def _sample(self, step: Step) -> None:
        scored = []
        for group in step.groups:
            for reward, rollout in zip(group.reward, group.rollouts, strict=True):
                if not math.isnan(reward):
                    scored.append((float(reward), rollout))
        if not scored:
            return
        reward_of = itemgetter(0)
        chosen = [("best", max(scored, key=reward_of))]
        worst = min(scored, key=reward_of)
        if worst[0] < chosen[0][1][0]:
            chosen.append(("worst", worst))
        for label, (reward, rollout) in chosen:
            about = f"reward {reward:g}, {counted(len(rollout), 'token')}, {rollout.finish}"
            self.console.print(Text(f"{label} of step {step.number}: {about}", style="dim"))
            self.console.print(
                safe(rollout.prompt_text, limit=200, style="dim") + safe(rollout.text, limit=400)
            )
