"""One self-contained page: the application with a run's most telling parts inside, to be mailed and
kept.

It is the same application over answers that were asked beforehand: curves, the first and the last
step, the two around the largest move of the reward, of each the most informative groups with their
tokens, signs of reward hacking, configuration and environment. It needs no server and no network,
and its policy allows neither.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.errors import DataError
from groupwise.utils import files
from groupwise.viewer import health
from groupwise.viewer.pages import Pages
from groupwise.viewer.server import SCRIPTS, STYLES, asset
from groupwise.viewer.sources import HELD_OUT, TRAINING, CompletionSource, open_sources

LARGEST = 5_000_000
"""Bytes of a report."""
GROUPS = (6, 3, 2, 1)
"""Groups of each step, fewer where they would not fit."""
POINTS = 400
"""Points of a curve."""


def export(paths: Sequence[str | Path], file: str | Path) -> Path:
    """Write a report of runs or files of completions, whole or not at all; its path.  Raises
    DataError.
    """
    text, file = report(open_sources(paths)), Path(file)
    try:
        files.write(file, text.encode())
    except OSError as error:
        raise DataError(
            f"cannot write the report {file}: {error.strerror}; name another file"
        ) from error
    return file


def report(sources: Sequence[CompletionSource]) -> str:
    """The page, smaller than LARGEST."""
    pages = Pages(sources, points=POINTS)
    pages.opened = set(range(len(sources)))
    for index in pages.indexes:
        index.total = len(index.source.steps())
    for count in GROUPS:
        text = _page(pages, _answers(pages, count))
        if len(text.encode()) < LARGEST:
            return text
    raise DataError(f"even one group a step makes a report of more than {LARGEST:,} bytes")


def address(name: str, parameters: dict[str, Any]) -> str:
    """The key of an answer, as the application asks for it: its name, its parameters in order."""
    given = [f"{key}={parameters[key]}" for key in sorted(parameters) if parameters[key] != ""]
    return f"{name}?{'&'.join(given)}"


class _Answers:
    """The answers that a report holds, by their addresses."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.by_address: dict[str, Any] = {}

    def ask(self, name: str, **parameters: str | int) -> Any:
        """Answer an address, and keep what it says; of one that cannot be answered the reason."""
        texts = {key: str(value) for key, value in parameters.items()}
        try:
            answer = self.pages.answer(name, texts)
        except DataError as error:
            answer = {"error": str(error)}
        self.by_address[address(name, parameters)] = answer
        return answer

    def ask_run(self, run: dict[str, Any], count: int) -> None:
        """Ask for all that is shown of a run, and for `count` groups of each step."""
        i = run["run"]
        self.ask("curves", run=i)
        self.ask("config", run=i)
        if run["newest"] is not None:
            self.ask("lenses", run=i)
            run["kept"] = {
                TRAINING: self.ask_steps(i, TRAINING, _telling(self.pages.sources[i]), count),
                HELD_OUT: self.ask_steps(i, HELD_OUT, run["evaluations"][-1:], count),
            }
        self.ask("health", run=i)  # the last: it names the files that could not be read

    def ask_steps(self, i: int, kind: str, steps: list[int], count: int) -> list[int]:
        """Ask for steps with their first groups, and return those that can be read."""
        read = []
        for step in steps:
            answer = self.ask("step", run=i, kind=kind, step=step)
            if "error" in answer:
                continue
            read.append(step)
            answer["all"] = len(answer["groups"])
            answer["groups"] = answer["groups"][:count]
            for group in answer["groups"]:
                shown = self.ask("group", run=i, kind=kind, step=step, group=group["group"])
                for completion in shown.get("completions", ()):
                    _shorten(completion)
                visits = address("visits", {"run": i, "key": group["key"]})
                self.by_address[visits] = {"visits": [], "read": 0, "total": 0}
        return read


def _answers(pages: Pages, count: int) -> dict[str, Any]:
    answers = _Answers(pages)
    runs = answers.ask("runs")["runs"]
    for run in runs:
        answers.ask_run(run, count)
    series = pages.series()
    for together in series:
        if "," in together:
            answers.ask("bands", runs=together)
    if len(series) > 1 and all("reward" in run["metrics"] for run in runs):
        answers.ask("differences", series=";".join(series))
    return answers.by_address


def _shorten(completion: dict[str, Any]) -> None:
    """Write a column of equal numbers as one; the application writes it out again."""
    columns = completion.get("columns", {})
    columns.pop("behavior", None)
    for name, values in columns.items():
        if len(values) > 1 and len(set(values)) == 1:
            columns[name] = values[:1]


def _telling(source: CompletionSource) -> list[int]:
    """The first and the last step, and those around the largest move of the reward."""
    steps, metrics = source.steps(), source.metrics()
    wanted = [steps[0], steps[-1]]
    if "reward" in metrics.values:
        wanted += _largest_move(metrics.steps, metrics.values["reward"])
    return sorted({min(steps, key=lambda step: abs(step - near)) for near in wanted})


def _largest_move(steps: Sequence[int], rewards: Sequence[float]) -> tuple[int, ...]:
    """The last and the first step of the two neighbouring stretches between which the mean reward
    differs most.

    >>> _largest_move(range(1, 9), [0, 0, 0, 0, 1, 1, 1, 1])
    (4, 5)
    """
    known = []
    for step, reward in zip(steps, rewards, strict=True):
        if step > 0 and np.isfinite(reward):
            known.append((step, reward))
    width = max(3, len(known) // 20)
    if len(known) < 2 * width:
        width = len(known) // 2
    if not width:
        return ()
    values = np.array([reward for _, reward in known])
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[width:] - sums[:-width]) / width
    place = int(np.argmax(np.abs(means[width:] - means[:-width])))
    number = [step for step, _ in known]
    return number[place + width - 1], number[place + width]


def _page(pages: Pages, answers: dict[str, Any]) -> str:
    # `</script>` and `<!--` would end the element that holds the data.
    data = json.dumps(answers, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [asset(name).decode() for name in SCRIPTS]
    styles = [asset(name).decode() for name in STYLES]
    assert not any("</script" in text for text in scripts) and not any(
        "</style" in text for text in styles
    )
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src"
        f" {' '.join(map(_hash, styles))}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = ", ".join(source.name for source in pages.sources)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        + "".join(f"<style>{text}</style>\n" for text in styles)
    )  # fmt: skip
    body = f'<script type="application/json" id="answers">{data}</script>\n' + "".join(
        f"<script>{text}</script>\n" for text in scripts
    )
    text = asset("index.html").decode().replace('<link rel="icon" href="/static/icon.svg">\n', "")
    text = text.replace("<!--summary-->", _summary(pages))
    text = text.replace(
        "<title>groupwise</title>", f"<title>{html.escape(title)} · groupwise</title>"
    )
    before, _, after = text.replace("<!--styles-->", head).partition("<!--scripts-->")
    # The scripts stand behind the page, since inline ones cannot wait for it.
    return before + after.replace("</body>", body + "</body>")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _summary(pages: Pages) -> str:
    """The figures as plain HTML, for readers that run no scripts (mail)."""
    parts = []
    for i, source in enumerate(pages.sources):
        metrics = source.metrics()
        rows = []
        for figure in health.figures(list(metrics.values)):
            known = [value for value in metrics.values[figure["metric"]] if value == value]
            if known:
                rows.append(
                    f"<tr><th>{html.escape(figure['label'])}<td>{known[0]:.4g}<td>{known[-1]:.4g}"
                )
        warned = "".join(
            f"<li><b>{html.escape(flag['title'])}.</b> {html.escape(flag['meaning'])}"
            f" {html.escape(flag['remedy'])}"
            for flag in pages.health({"run": str(i)})["flags"]
        )
        parts.append(
            f"<h1>{html.escape(source.name)}</h1><ul>{warned}</ul><table><tr><th><td>first"
            f" step<td>last step{''.join(rows)}</table>"
        )
    return "<noscript>" + "".join(parts) + "</noscript>"
