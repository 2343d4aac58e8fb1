"""Curves as a figure for a paper (SVG) and as a table (CSV).

Labels come from run folders and logs: they are escaped, and neither file can run anything.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from groupwise.utils.spelling import counted
from groupwise.utils.terminal import escaped
from groupwise.viewer.curves import STEP, TIME, TOKENS, Curve, is_smoothed

AXES = {STEP: "step", TOKENS: "tokens sampled", TIME: "seconds"}
COLOURS = (
    "#2563eb", "#ea580c", "#0d9488", "#a21caf", "#ca8a04", "#dc2626", "#4d7c0f", "#64748b",
)  # fmt: skip
WIDTH, PLOT_HEIGHT = 640, 300
"""Pixels of the figure, and of the height between its axes."""
LEFT, RIGHT, TOP, BOTTOM, LEGEND_LINE = 72, 18, 40, 64, 20
"""Pixels around the axes, and of a line of the legend."""
POINTS = 1000
"""Points of a drawn curve; the table has all of them."""
FEW = 40
"""A curve of so many points has its points marked."""
LONGEST_LABEL = 80
"""Characters of a label in the figure."""
FORMULA = ("=", "+", "-", "@")
"""A spreadsheet computes a cell that begins so."""


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in a figure.

    colour: its number among COLOURS.  seed: it is one run of a group that is drawn too.
    """

    curve: Curve
    colour: int
    seed: bool = False


@dataclass(frozen=True)
class CurveFigure:
    """A metric of several runs or groups of runs.

    across: `step`, `tokens` or `time`.  smoothing: the weight of the past in the moving average
        that the curves are.
    """

    metric: str
    curves: Sequence[DrawnCurve]
    across: str = STEP
    smoothing: float = 0.0

    @property
    def name(self) -> str:
        """The metric as a file name, without a suffix."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.metric).strip("-.")[:80] or "curve"

    def csv(self) -> str:
        """Write a row for each point of each curve.

        The value of a group is its mean over `runs` runs; low and high are the ends of its 95 %
        interval.
        """
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        place = [] if self.across == STEP else [AXES[self.across]]
        table.writerow(["series", "runs", "step", *place, "value", "low", "high"])
        for drawn in self.curves:
            for row in self._rows(drawn.curve):
                table.writerow(row)
        return text.getvalue()

    def _rows(self, curve: Curve) -> list[list[str]]:
        series = escaped(curve.label, keep="")
        if series.startswith(FORMULA):
            series = f"'{series}"
        rows = []
        points = zip(curve.step_S, curve.x_S, curve.value_S, curve.half_S, strict=True)
        for step, x, value, half in points:
            row = [series, str(curve.runs), str(step)]
            if self.across != STEP:
                row.append(_written(x))
            row += [_written(value), _written(value - half), _written(value + half)]
            rows.append(row)
        return rows

    def svg(self) -> str:
        """Draw the curves with their bands, a title, labelled axes and a legend."""
        thinned = []
        for drawn in self.curves:
            if len(drawn.curve.step_S):
                curve = drawn.curve.thinned(POINTS)
                thinned.append(DrawnCurve(curve, drawn.colour, drawn.seed))
        named = [drawn for drawn in thinned if not drawn.seed]
        height = TOP + PLOT_HEIGHT + BOTTOM + LEGEND_LINE * len(named)
        size = {"width": str(WIDTH), "height": str(height), "viewBox": f"0 0 {WIDTH} {height}"}
        font = {"font-family": "system-ui, sans-serif", "font-size": "13", "fill": "#1f2937"}
        root = Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img", **size, **font}
        )
        SubElement(root, "title").text = _label(self.metric)
        SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
        axes = _Axes.around([drawn.curve for drawn in thinned], whole=self.across != TIME)
        axes.draw(root, _label(self.metric), AXES[self.across])
        longest = max((len(drawn.curve.step_S) for drawn in self.curves), default=0)
        if is_smoothed(self.metric, longest, self.smoothing):
            note = f"moving average, weight {self.smoothing:g}"
            _draw_text(root, note, WIDTH - RIGHT, 22, {"text-anchor": "end", "font-size": "11"})
        for drawn in thinned:
            _draw_band(root, axes, drawn)
        for drawn in thinned:
            _draw_line(root, axes, drawn)
        for place, drawn in enumerate(named):
            _draw_legend(root, TOP + PLOT_HEIGHT + BOTTOM + LEGEND_LINE * place, drawn)
        return ElementTree.tostring(root, encoding="unicode") + "\n"


def _written(value: float) -> str:
    """Write a number of the table; nothing where it is not known."""
    return "" if math.isnan(value) else f"{value:.10g}"


def _label(text: str) -> str:
    """Return a label without characters that XML forbids, or that turn the direction of writing."""
    shown = re.sub("[\ufffe\uffff]", "\ufffd", escaped(text, keep=""))
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "\u2026"


@dataclass(frozen=True)
class _Axes:
    """The ranges of a figure.   x_ticks, y_ticks: round numbers in them."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]

    @classmethod
    def around(cls, curves: Sequence[Curve], *, whole: bool) -> _Axes:
        """Find the ranges that hold the curves with their bands.   whole: steps have no halves."""
        xs, ys = [np.zeros(0)], [np.zeros(0)]
        for curve in curves:
            half_S = np.nan_to_num(curve.half_S)
            xs.append(curve.x_S)
            ys += [curve.value_S - half_S, curve.value_S + half_S]
        x_low, x_high = _range(np.concatenate(xs))
        y_low, y_high = _range(np.concatenate(ys))
        room = 0.05 * (y_high - y_low)
        y_low, y_high = y_low - room, y_high + room
        x_ticks = ticks(x_low, x_high, least=1.0 if whole else 0.0)
        return cls(x_low, x_high, y_low, y_high, x_ticks, ticks(y_low, y_high))

    def x(self, value: float) -> float:
        """Return the pixel of a step, of tokens or seconds."""
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the pixel of a value."""
        return TOP + (self.y_high - value) / (self.y_high - self.y_low) * PLOT_HEIGHT

    def points(self, x_S: np.ndarray, y_S: np.ndarray) -> str:
        """Write points as SVG does."""
        pairs = zip(x_S.tolist(), y_S.tolist(), strict=True)
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in pairs)

    def draw(self, root: Element, title: str, x_label: str) -> None:
        """Draw grid, numbers, title and the labels of the axes."""
        right, bottom = WIDTH - RIGHT, TOP + PLOT_HEIGHT
        middle = (LEFT + right) / 2
        _draw_text(root, title, middle, 22, {"text-anchor": "middle", "font-weight": "600"})
        for value in self.y_ticks:
            y = f"{self.y(value):.1f}"
            line = {"x1": str(LEFT), "x2": str(right), "y1": y, "y2": y, "stroke": "#e5e7eb"}
            SubElement(root, "line", line)
            _draw_text(root, _tick(value), LEFT - 8, self.y(value) + 4, {"text-anchor": "end"})
        for value in self.x_ticks:
            _draw_text(root, _tick(value), self.x(value), bottom + 18, {"text-anchor": "middle"})
        axis = {"x1": str(LEFT), "x2": str(right), "y1": str(bottom), "y2": str(bottom)}
        SubElement(root, "line", {**axis, "stroke": "#9ca3af"})
        _draw_text(root, x_label, middle, bottom + 40, {"text-anchor": "middle"})
        height = TOP + PLOT_HEIGHT / 2
        upright = {"text-anchor": "middle", "transform": f"rotate(-90 16 {height:g})"}
        _draw_text(root, title, 16, height, upright)


def _range(values: np.ndarray) -> tuple[float, float]:
    """Return the lowest and the highest value, apart from one another."""
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low - 0.5, high + 0.5
    return low, high


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """List up to seven round numbers in a range.   least: the smallest distance between two.

    >>> ticks(0.0, 60.0), ticks(0.0, 3.0, least=1.0)
    ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [0.0, 1.0, 2.0, 3.0])
    """
    distance = max((high - low) / 6.0, least)
    power = 10.0 ** math.floor(math.log10(distance))
    size = 10.0 * power
    for times in (1.0, 2.0, 5.0):
        if times * power >= distance:
            size = times * power
            break
    first, last = math.ceil(low / size), math.floor(high / size)
    return [float(f"{number * size:.6g}") for number in range(first, last + 1)]


def _tick(value: float) -> str:
    return f"{value:,.6g}" if abs(value) >= 1e-4 or value == 0.0 else f"{value:.3g}"


def _colour(drawn: DrawnCurve) -> str:
    return COLOURS[drawn.colour % len(COLOURS)]


def _draw_text(root: Element, text: str, x: float, y: float, attributes: dict[str, str]) -> None:
    SubElement(root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", **attributes}).text = text


def _draw_band(root: Element, axes: _Axes, drawn: DrawnCurve) -> None:
    """Draw the 95 % interval of a group of runs."""
    curve = drawn.curve
    if curve.runs < 2:
        return
    upper = axes.points(curve.x_S, curve.value_S + curve.half_S)
    lower = axes.points(curve.x_S[::-1], (curve.value_S - curve.half_S)[::-1])
    fill = {"fill": _colour(drawn), "fill-opacity": "0.18"}
    SubElement(root, "polygon", {"points": f"{upper} {lower}", **fill})


def _draw_line(root: Element, axes: _Axes, drawn: DrawnCurve) -> None:
    """Draw the values, and a mark at each of them where they are few."""
    curve, colour = drawn.curve, _colour(drawn)
    look = {"fill": "none", "stroke": colour, "stroke-width": "2", "stroke-linejoin": "round"}
    if drawn.seed:
        look.update({"stroke-width": "1", "stroke-opacity": "0.5"})
    SubElement(root, "polyline", {"points": axes.points(curve.x_S, curve.value_S), **look})
    if drawn.seed or len(curve.x_S) >= FEW:
        return
    for x, value in zip(curve.x_S.tolist(), curve.value_S.tolist(), strict=True):
        place = {"cx": f"{axes.x(x):.1f}", "cy": f"{axes.y(value):.1f}"}
        SubElement(root, "circle", {**place, "r": "2.5", "fill": colour})


def _draw_legend(root: Element, y: float, drawn: DrawnCurve) -> None:
    """Draw the colour and the name of a curve."""
    curve = drawn.curve
    place = {"x1": str(LEFT), "x2": str(LEFT + 22), "y1": f"{y - 4:.1f}", "y2": f"{y - 4:.1f}"}
    SubElement(root, "line", {**place, "stroke": _colour(drawn), "stroke-width": "2"})
    text = _label(curve.label)
    if curve.runs > 1:
        text += f": mean of {counted(curve.runs, 'run')}, 95 % interval"
    _draw_text(root, text, LEFT + 30, y, {})
