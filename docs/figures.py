"""The pictures of the documentation, but one from runs that were made before: `python docs/figures.py [REAL_RUN [HACKED_RUN]]`.

    groupwise train recipes/smollm2-sums.yaml eval.every=10
    groupwise train recipes/preference-hacking.yaml
    python docs/figures.py runs/smollm2-sums runs/preference-hacking/grpo

Needs playwright and a Chromium (`pip install -e '.[test]'`).
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.runs.metrics_log import read_metrics
from groupwise.viewer.pages import Pages
from groupwise.viewer.server import Viewer
from groupwise.viewer.sources import open_sources

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "real_model.json"
STUDENT = 4.303
"""Quantile of Student's distribution for a 95% interval of three."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 52, 150, 16, 44
BLUE, ORANGE, GREY, INK = "#2557c7", "#b45309", "#9aa5b1", "#1f2933"


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The steps of a run's metrics.jsonl."""
    return read_metrics(run)


def points(lines: Sequence[dict[str, Any]], metric: str) -> list[tuple[float, float, float]]:
    """(step, value, half of its 95% interval or 0) where a metric was written."""
    return [(line["step"], line[metric], line.get(f"{metric}/half_width") or 0.0) for line in lines if metric in line]


class Curve(NamedTuple):
    """A line of a chart."""

    label: str
    colour: str
    points: Sequence[tuple[float, float, float]]
    """(x, y from 0 to 1, half of its 95% interval); without any interval it is a thin line."""


def reward_curve(run: Path) -> str:
    """The training reward of every step, and held-out accuracy with its 95% interval."""
    lines = lines_of(run)
    last = max(line["step"] for line in lines)
    curves = [
        Curve("training reward", GREY, points(lines, "reward")),
        Curve("held out, sampled", BLUE, points(lines, "eval/sampled")),
        Curve("held out, greedy", ORANGE, points(lines, "eval/greedy")),
    ]
    title = "Reward in training and held-out accuracy while SmolLM2 learns sums"
    return chart(title, "GRPO step", curves, range(0, last + 1, 20 if last > 80 else 10))


def learning_curve() -> str:
    """Held-out accuracy by processor minutes, TRL beside Groupwise (`benchmarks/learning.py`): means over seeds, 95% intervals."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    curves = []
    for side, label, colour in (("groupwise", "Groupwise", BLUE), ("trl", "TRL 1.16", ORANGE)):
        seeds = [result["curve"] for name, result in results.items() if name.startswith(f"learning/{side}/")]
        row = []
        for point in zip(*seeds, strict=True):
            accuracy = [seed["sampled"] for seed in point]
            half = STUDENT * statistics.stdev(accuracy) / math.sqrt(len(accuracy))
            row.append((statistics.mean(seed["seconds"] for seed in point) / 60, statistics.mean(accuracy), half))
        curves.append(Curve(label, colour, row))
    title = "Held-out accuracy of SmolLM2 on sums by processor time, TRL and Groupwise"
    return chart(title, "processor minutes in 30 steps of training", curves, range(0, 36, 5))


def chart(title: str, along: str, curves: Sequence[Curve], ticks: range) -> str:
    """An SVG of curves between 0 and 1.   along: what the x axis counts."""
    last = max(a for curve in curves for a, _, _ in curve.points)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / last

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - value)

    def path(row: Sequence[tuple[float, float]]) -> str:
        return "M" + " L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in row)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="system-ui, sans-serif"'
        f' font-size="13" fill="{INK}">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<path d="M{LEFT} {y(value):.1f} H{WIDTH - RIGHT}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for at in (tick for tick in ticks if tick <= last):
        parts.append(f'<text x="{x(at):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{at}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{along}</text>')
    for _, colour, row in curves:
        line = path([(a, b) for a, b, _ in row])
        if not any(half for _, _, half in row):
            parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1"/>')
            continue
        band = [(a, min(b + half, 1.0)) for a, b, half in row] + [(a, max(b - half, 0.0)) for a, b, half in reversed(row)]
        parts.append(f'<path d="{path(band)} Z" fill="{colour}" fill-opacity="0.15"/>')
        parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b, _ in row]
    for place, curve in enumerate(sorted(curves, key=lambda curve: -curve.points[-1][1])):
        colour = "#616e7c" if curve.colour == GREY else curve.colour
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 12 + 20 * place}" fill="{colour}">{curve.label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


ANSWERS = (
    ("25 + 17 = 42", 1.0),
    ("5 + 7 = 12, so 32", 0.0),
    ("42", 1.0),
    ("It is 43", 0.0),
    ("25 17", 0.0),
    ("20 + 10 + 12 = 42", 1.0),
    ("41", 0.0),
    ("I add 25 and 17", 0.0),
)
"""Eight answers to one prompt, and their rewards."""


def group_drawing() -> str:
    """One group of GRPO: a prompt, eight answers, their rewards, the mean, and an arrow for each advantage."""
    rewards = [reward for _, reward in ANSWERS]
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    wide, top, row, zero, one = 760, 84, 30, 330, 560

    def x(reward: float) -> float:
        return zero + (one - zero) * reward

    bottom = top + row * len(ANSWERS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {bottom + 62}" role="img" font-family="system-ui, sans-serif"'
        f' font-size="14" fill="{INK}">',
        "<title>A prompt, eight answers with rewards 0 and 1, their mean, and an arrow from the mean to each reward</title>",
        "<defs>",
    ]
    for name, colour in (("up", BLUE), ("down", ORANGE)):
        parts.append(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 Z" fill="{colour}"/></marker>'
        )
    parts += [
        "</defs>",
        f'<rect width="{wide}" height="{bottom + 62}" fill="#ffffff"/>',
        '<rect x="20" y="16" width="270" height="32" rx="6" fill="#e6edfb"/>',
        '<text x="34" y="37">prompt: What is 25 + 17?</text>',
        f'<text x="20" y="{top - 14}" fill="#616e7c">eight sampled answers</text>',
        f'<text x="{x(0)}" y="{top - 14}" text-anchor="middle" fill="#616e7c">reward 0</text>',
        f'<text x="{x(1)}" y="{top - 14}" text-anchor="middle" fill="#616e7c">reward 1</text>',
        f'<text x="{wide - 20}" y="{top - 14}" text-anchor="end" fill="#616e7c">advantage</text>',
        f'<path d="M{x(mean):.1f} {top - 6} V{bottom + 8}" stroke="{INK}" stroke-dasharray="4 4"/>',
        f'<text x="{x(mean):.1f}" y="{bottom + 24}" text-anchor="middle">mean {mean:g}</text>',
    ]
    for place, (answer, reward) in enumerate(ANSWERS):
        middle = top + row * place + row / 2
        advantage = f"{(reward - mean) / std:+.2f}".replace("-", "−")
        name, colour = ("up", BLUE) if reward > mean else ("down", ORANGE)
        parts += [
            f'<text x="34" y="{middle + 5}" font-family="ui-monospace, monospace">{answer}</text>',
            f'<path d="M{x(mean):.1f} {middle} H{x(reward):.1f}" stroke="{colour}" stroke-width="2.5" marker-end="url(#{name})"/>',
            f'<text x="{wide - 20}" y="{middle + 5}" text-anchor="end" fill="{colour}">{advantage}</text>',
        ]
    below = bottom + 48
    parts += [
        f'<text x="{x(mean) + 14:.1f}" y="{below}" fill="{BLUE}">→ every token becomes more likely</text>',
        f'<text x="{x(mean) - 14:.1f}" y="{below}" text-anchor="end" fill="{ORANGE}">every token becomes less likely ←</text>',
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def photographs(shots: Sequence[tuple[str, Path, str, int]]) -> None:
    """PNGs of the viewer: (file, run, the address from `#` on, height)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, run, address, height in shots:
            viewer = Viewer(Pages(open_sources([run]))).start()
            page = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme="light")
            page.goto(viewer.address + address)
            page.wait_for_selector("main[data-ready]")
            page.wait_for_timeout(10_000)  # the rest of the run is read in the background
            page.reload()
            page.wait_for_selector("main[data-ready]")
            page.wait_for_timeout(2_000)
            page.screenshot(path=IMAGES / name)
            page.close()
            viewer.close()
        browser.close()


def main(real: Path | None, hacked: Path | None) -> None:
    """Write the pictures: the drawing of a group, and those of the runs that are there."""
    (IMAGES / "group.svg").write_text(group_drawing(), encoding="utf-8")
    if real is None:
        return
    (IMAGES / "reward-curve.svg").write_text(reward_curve(real), encoding="utf-8")
    (IMAGES / "learning.svg").write_text(learning_curve(), encoding="utf-8")
    photographs([("viewer.png", real, "#step=12&by=push", 860), ("viewer-curves.png", real, "#view=curves", 860)])
    if hacked is not None:
        photographs(
            [
                ("hacked.png", hacked, "#step=60&by=push", 860),
                ("hacked-lenses.png", hacked, "#view=lenses", 1100),
            ]
        )


if __name__ == "__main__":
    runs = [Path(argument) for argument in sys.argv[1:3]]
    main(*runs, *[None] * (2 - len(runs)))
