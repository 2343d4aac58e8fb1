"""Every address of the application: a name and parameters in, JSON out.  The server asks here, and
so does the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from groupwise.config.schema import normal, settings_table
from groupwise.errors import DataError, RunError
from groupwise.viewer import groups, health, questions, replays
from groupwise.viewer.comparison import differences, letter
from groupwise.viewer.curves import STEP, TIME, TOKENS, Curve, curve_of, places
from groupwise.viewer.figures import CurveFigure, DrawnCurve
from groupwise.viewer.groups import Json
from groupwise.viewer.index import Index
from groupwise.viewer.seeds import RunGroup, setting_labels
from groupwise.viewer.sources import HELD_OUT, TRAINING, CompletionSource

POINTS = 2000
"""Points of a curve; of longer runs each is the mean of its stretch."""

LOOKED_BACK = 20
"""Steps among which the newest one that can be read is looked for."""
LARGEST = float(1 << 53)
"""A number in an address is smaller."""

Parameters = Mapping[str, str]


class Pages:
    """The addresses over some sources."""

    def __init__(self, sources: Sequence[CompletionSource], *, points: int = POINTS) -> None:
        self.sources = list(sources)
        self.indexes = [Index(source) for source in sources]
        self.opened = {0}
        """Runs that somebody has looked at; of the others little is read."""
        self.labels = setting_labels(self.sources)
        """The label of each run's group of seeds; None for a run that is alone."""
        self._started = False
        self.points = points
        known = (
            self.runs,
            self.curves,
            self.bands,
            self.differences,
            self.health,
            self.step,
            self.group,
            self.more,
            self.visits,
            self.search,
            self.lenses,
        )
        self.known: dict[str, Callable[[Parameters], Json]] = {
            page.__name__: page for page in (*known, self.compare, self.config, self.replay)
        }
        self.known["pulse"] = self.runs  # what the application polls while a run is live

    def answer(self, name: str, parameters: Parameters) -> Json:
        """The JSON of an address.  Raises KeyError for one that is not there, DataError for what
        cannot be answered.
        """
        answer = self.known[name]
        for index in self.indexes:
            index.busy += 1
        try:
            return answer(parameters)
        finally:
            for index in self.indexes:
                index.busy -= 1

    def start(self) -> None:
        """Begin to gather what pages about whole runs need, of every run that is looked at."""
        self._started = True
        for i in self.opened:
            self._open(i)

    def _open(self, i: int) -> None:
        self.opened.add(i)
        if self._started:
            self.indexes[i].start()

    def stop(self) -> None:
        """Stop the index."""
        for index in self.indexes:
            index.stop()

    # ------------------------------------------------------------ addresses

    def runs(self, parameters: Parameters) -> Json:
        """What is looked at, and where to begin; all that there is of run `run`, and of those that
        were opened before.
        """
        self._open(self._number(parameters))
        return {"runs": [self._run(i) for i in range(len(self.sources))]}

    def _run(self, i: int) -> Json:
        source, opened = self.sources[i], i in self.opened
        if opened:
            state, names = source.state(), source.metrics().values.keys() - {"wall"}
        else:
            state, names = source.brief()
        steps = source.steps() if opened else []
        return {
            "run": i,
            "name": source.name,
            "label": self.labels[i],
            **state,
            "brief": not opened,
            "recorded": _stretches(steps),
            "newest": steps[-1] if steps else None,
            "evaluations": source.steps(HELD_OUT) if opened else [],
            "metrics": sorted(names),
            "first": health.first(names),
            "read": self.indexes[i].read,
            "replay": replays.offered() if opened and self._replayable(source) else None,
        }

    def curves(self, parameters: Parameters) -> Json:
        """Metrics over steps (`names`, with commas; none: all), and the tokens and seconds that had
        gone by.
        """
        metrics = self._source(parameters).metrics()
        names = sorted(metrics.values.keys() - {"wall"})
        if parameters.get("names"):
            names = parameters["names"].split(",")
        steps = list(metrics.steps)
        cut = max(1, -(-len(steps) // self.points))
        ends = slice(cut - 1, None, cut)
        values = {}
        for name in names:
            if name in metrics.values:
                values[name] = _thinned(metrics.values[name], cut)
        return {
            "steps": steps[ends],
            "tokens": groups.plain(places(metrics, TOKENS)[ends]),
            "seconds": groups.plain(places(metrics, TIME)[ends]),
            "values": values,
        }

    def bands(self, parameters: Parameters) -> Json:
        """Means of metrics over the runs of a group (`runs`, with commas), with their band.

        `names`: with commas; none: all that the first run has.  `x`: step, tokens or time.
        `smooth`: see `curve_of`.
        """
        group, *others = self._groups(parameters, "runs")
        if others:
            raise DataError(f"runs is {parameters['runs']!r}, expected one group")
        names = sorted(group.sources[0].metrics().values.keys() - {"wall"})
        if parameters.get("names"):
            names = parameters["names"].split(",")
        bands = {}
        for name in names:
            curve = self._curve(group, name, parameters).thinned(self.points)
            bands[name] = {
                "steps": curve.step_S.tolist(),
                "xs": None if _across(parameters) == STEP else _short(curve.x_S),
                "mean": _short(curve.value_S),
                "half": _short(curve.half_S),
            }
        return bands

    def differences(self, parameters: Parameters) -> Json:
        """Say how groups of runs differ on held-out prompts, in sentences.

        `series`: the runs of each group with commas, the groups with semicolons.
        """
        sides = self._groups(parameters, "series")
        legend = []
        for number, side in enumerate(sides, 1):
            runs = len(side.sources)
            legend.append({"letter": letter(number), "label": side.label, "runs": runs})
        return {"legend": legend, "sentences": differences(sides)}

    def figure(self, parameters: Parameters, *, smooth: bool) -> CurveFigure:
        """Return a metric of groups of runs (`series`) as a figure.

        `metric`, `x`, `smooth`: as for `bands`.  `seeds`: each run of a group is drawn, too.
        smooth: false for a table, which has the numbers as they were logged.
        """
        metric = parameters.get("metric", "")
        smoothing = _weight(parameters) if smooth else 0.0
        across = _across(parameters)
        curves = []
        listed = parameters.get("series", "0").split(";")
        for runs, group in zip(listed, self._groups(parameters, "series"), strict=True):
            colour = self._colour(runs)
            curve = curve_of(group, metric, across=across, smoothing=smoothing)
            curves.append(DrawnCurve(curve, colour))
            if parameters.get("seeds") and curve.runs > 1:
                for source in group.sources:
                    alone = RunGroup(source.name, (source,))
                    curve = curve_of(alone, metric, across=across, smoothing=smoothing)
                    curves.append(DrawnCurve(curve, colour, seed=True))
        return CurveFigure(metric, curves, across, smoothing)

    def series(self) -> list[str]:
        """List the runs of each group of seeds, and each run that is alone, as addresses do."""
        found: dict[str, list[str]] = {}
        for i, label in enumerate(self.labels):
            found.setdefault(f"run {i}" if label is None else f"group {label}", []).append(str(i))
        return [",".join(runs) for runs in found.values()]

    def _colour(self, runs: str) -> int:
        """Return the number of the colour that the application draws a group in."""
        series = self.series()
        return series.index(runs) if runs in series else 0

    def _curve(self, group: RunGroup, metric: str, parameters: Parameters) -> Curve:
        across = _across(parameters)
        return curve_of(group, metric, across=across, smoothing=_weight(parameters))

    def _groups(self, parameters: Parameters, name: str) -> list[RunGroup]:
        """Return the groups of runs that a parameter lists.  Raises DataError."""
        found = []
        for text in parameters.get(name, "0").split(";"):
            runs = [self._number({"run": run or "none"}) for run in text.split(",")]
            if len(set(runs)) < len(runs):
                raise DataError(f"{name} is {parameters[name]!r}: it names a run twice")
            label = self.labels[runs[0]] if len(runs) > 1 else None
            sources = tuple(self.sources[run] for run in runs)
            found.append(RunGroup(label or sources[0].name, sources))
        return found

    def health(self, parameters: Parameters) -> Json:
        """Flags in plain words, the figures that stand first, where a step's work goes, and the
        metrics by subject.
        """
        source = self._source(parameters)
        metrics = source.metrics()
        names, history = list(metrics.values), metrics.history()
        flags = [*health.unread(source.problems()), *health.flags(history)]
        families = health.families(name for name in names if name != "wall")
        return {
            "flags": flags,
            "figures": health.figures(names),
            "work": health.work(history),
            "families": families,
        }

    def step(self, parameters: Parameters) -> Json:
        """A step's groups, the most informative first; the newest step where none is named."""
        source, kind = self._source(parameters), self._kind(parameters)
        steps, wanted = source.steps(kind), _whole(parameters, "step")
        if not steps:
            return {
                "step": None,
                "kind": kind,
                "groups": [],
                "functions": {},
                "reward": None,
                "completions": 0,
            }
        if wanted is None:
            nearest = _newest(source, kind)
        else:
            nearest = min(steps, key=lambda step: (abs(step - wanted), step))
        return groups.overview(source, nearest, kind)

    def group(self, parameters: Parameters) -> Json:
        """A group with its completions and their tokens."""
        step, place = _needed(parameters, "step"), _needed(parameters, "group")
        return groups.group(self._source(parameters), step, place, self._kind(parameters))

    def more(self, parameters: Parameters) -> Json:
        """A completion from token `begin` on."""
        return groups.more(
            self._source(parameters),
            _needed(parameters, "step"),
            _needed(parameters, "group"),
            _needed(parameters, "index"),
            _needed(parameters, "begin"),
            self._kind(parameters),
        )

    def visits(self, parameters: Parameters) -> Json:
        """A prompt through training: every group it had, as far as the index has read."""
        self._source(parameters)
        index = self.indexes[self._number(parameters)]
        visits = [
            {"step": step, "group": group, "rewards": groups.plain(rewards)}
            for step, group, rewards in index.visits(parameters.get("key", ""))
        ]
        return {"visits": visits, "read": index.read, "total": index.total}

    def search(self, parameters: Parameters) -> Json:
        """Completions that match a query."""
        query = questions.SearchQuery(
            text=parameters.get("text", ""),
            prompt=parameters.get("prompt", ""),
            function=parameters.get("function", ""),
            low=_real(parameters, "low"),
            high=_real(parameters, "high"),
            finish=parameters.get("finish", ""),
            first=_whole(parameters, "first"),
            last=_whole(parameters, "last"),
            kind=self._kind(parameters),
        )
        index = self.indexes[self._number(parameters)]
        return questions.search(
            self._source(parameters), index, query, cursor=_whole(parameters, "cursor")
        )

    def lenses(self, parameters: Parameters) -> Json:
        """Signs of reward hacking in a stretch of steps; the last ten where none is named."""
        source = self._source(parameters)
        steps = source.steps()
        if not steps:
            raise DataError(f"{source.name} holds no completions")
        first, last = _whole(parameters, "first"), _whole(parameters, "last")
        if first is None:
            first = steps[-10:][0]
        if last is None:
            last = steps[-1]
        return questions.lenses(source, first, last)

    def compare(self, parameters: Parameters) -> Json:
        """Compare two steps on the prompts they share, and name the steps that share most with the
        left one.

        Where nobody chose the steps, two runs are compared at the newest step that both evaluated,
        or else at the newest that both recorded; one run is compared with its own beginning, by
        evaluations where no training steps share a prompt."""
        i = self._number(parameters)
        j = self._number({"run": parameters.get("other", str(i))})
        self._open(i)
        self._open(j)
        left, right = _whole(parameters, "step"), _whole(parameters, "with")
        kind = self._kind(parameters)
        free = not parameters.keys() & {"step", "with", "kind"}
        if free and i != j and all(self.sources[run].steps(HELD_OUT) for run in (i, j)):
            kind = HELD_OUT
        steps, others = self.sources[i].steps(kind), self.sources[j].steps(kind)
        if not steps or not others:
            raise DataError("there are no recorded completions to compare")
        if i != j and left is None and right is None:
            left = right = self._both(i, j, kind)
        if right is None:
            right = left if i != j and left in others else _newest(self.sources[j], kind)
        near = questions.shared_steps(self.indexes[j], right) if kind == TRAINING else []
        if left is None and i == j:
            left = near[0][0] if near else steps[0]
        elif left is None:
            left = right if right in steps else _newest(self.sources[i], kind)
        compared = questions.compare((self.sources[i], left), (self.sources[j], right), kind)
        if free and i == j and not compared["pairs"] and len(self.sources[i].steps(HELD_OUT)) > 1:
            return self.compare({**parameters, "kind": HELD_OUT})
        return {**compared, "step": left, "with": right, "near": near, "kind": kind}

    def _both(self, i: int, j: int, kind: str) -> int | None:
        """Return the newest step that two runs recorded completions of; None if there is none."""
        shared = set(self.sources[i].steps(kind)) & set(self.sources[j].steps(kind))
        return max(shared, default=None)

    def config(self, parameters: Parameters) -> Json:
        """The resolved recipe, which of its keys are not at their default, and the environment."""
        source = self._source(parameters)
        config = source.config()
        return {
            "config": config,
            "set": _set_keys(config),
            "environment": source.environment(),
            "path": str(source.path),
        }

    def replay(self, parameters: Parameters) -> Json:
        """Which tokens of a group the update pushed, or would have with `set` changed: see
        `replays`.
        """
        source = self._source(parameters)
        number, place = _needed(parameters, "step"), _needed(parameters, "group")
        changes = replays.checked(parameters.get("set", ""))
        if (key := replays.own_code(source.config())) is not None:
            raise DataError(
                f"{key} names code of the run's own, which the viewer does not run: groupwise"
                f" replay RUN --step {number}"
            )
        if not self._replayable(source) or number not in source.steps():
            raise DataError(
                f"{source.name}: only recorded steps of runs that sample completions can be"
                " replayed"
            )
        return replays.replayed(source.path, number, place, changes)

    @staticmethod
    def _replayable(source: CompletionSource) -> bool:
        config = source.config()
        return config.get("objective") in replays.OBJECTIVES and replays.own_code(config) is None

    # ------------------------------------------------------------ parameters

    def _number(self, parameters: Parameters) -> int:
        i = _whole(parameters, "run") or 0
        if not 0 <= i < len(self.sources):
            raise DataError(f"there is no run {i}")
        return i

    def _source(self, parameters: Parameters) -> CompletionSource:
        i = self._number(parameters)
        self._open(i)
        return self.sources[i]

    @staticmethod
    def _kind(parameters: Parameters) -> str:
        return HELD_OUT if parameters.get("kind") == HELD_OUT else TRAINING


def _set_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of a recipe whose value is not the default."""
    table = settings_table()
    changed = []
    for key, value in config.items():
        setting = table.get(normal(key))
        if setting is None or _plain(setting.default) != _plain(value):
            changed.append(key)
    return changed


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _newest(source: CompletionSource, kind: str) -> int:
    """The newest step that can be read; the newest one if none of the last can."""
    steps = source.steps(kind)
    for step in steps[:-LOOKED_BACK:-1]:
        with suppress(RunError):
            source.table(step, None, kind)
            return step
    return steps[-1]


def _whole(parameters: Parameters, name: str) -> int | None:
    value = _real(parameters, name)
    if value is not None and value != int(value):
        raise DataError(f"{name} is {parameters[name]!r}, expected a whole number")
    return None if value is None else int(value)


def _needed(parameters: Parameters, name: str) -> int:
    value = _whole(parameters, name)
    if value is None:
        raise DataError(f"{name} is missing")
    return value


def _real(parameters: Parameters, name: str) -> float | None:
    """None if it is not there."""
    if not (text := parameters.get(name)):
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not abs(value) < LARGEST:
        raise DataError(f"{name} is {text!r}, expected a number")
    return value


def _across(parameters: Parameters) -> str:
    """Return what curves lie over: steps, unless tokens or time are asked for."""
    across = parameters.get("x", STEP)
    return across if across in (TOKENS, TIME) else STEP


def _weight(parameters: Parameters) -> float:
    """Return the weight of the past in a moving average.  Raises DataError."""
    weight = _real(parameters, "smooth") or 0.0
    if not 0.0 <= weight < 1.0:
        raise DataError(f"smooth is {weight:g}, expected a number from 0 to below 1")
    return weight


def _short(values: np.ndarray) -> list[float | None]:
    """Six significant digits, as JSON has them."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def _stretches(steps: Sequence[int]) -> list[list[int]]:
    """Steps as [first, last, stride]: of 10,000 equally spaced ones three numbers."""
    stretches: list[list[int]] = []
    for step in steps:
        if stretches and stretches[-1][2] in (0, step - stretches[-1][1]):
            stretches[-1][1:] = step, step - stretches[-1][1]
        else:
            stretches.append([step, step, 0])
    return stretches


def _thinned(values: Sequence[float], cut: int) -> list[float | None]:
    """The mean of what is known of each stretch."""
    thinned: list[float | None] = []
    for end in range(cut, len(values) + 1, cut):
        known = [value for value in values[end - cut : end] if math.isfinite(value)]
        thinned.append(float(f"{sum(known) / len(known):.6g}") if known else None)
    return thinned
