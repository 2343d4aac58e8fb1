"""Groups of seeds: who belongs together, their mean and band, and the figures that are saved."""

from __future__ import annotations

import csv
import http.client
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from groupwise.errors import ConfigError, DataError
from groupwise.records import Step
from groupwise.runs import rollout_files
from groupwise.runs.run_files import RunFiles
from groupwise.viewer.curves import curve_of
from groupwise.viewer.figures import COLOURS, CurveFigure, DrawnCurve
from groupwise.viewer.pages import Pages
from groupwise.viewer.seeds import RunGroup, read_group, setting_labels
from groupwise.viewer.sources import open_sources

SVG = "{http://www.w3.org/2000/svg}"


def logged(folder: Path, columns: Mapping[str, Sequence[float | None]], first: int = 1) -> Path:
    """A run that is nothing but a recipe and a log."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("objective: grpo\n", encoding="utf-8")
    lines = []
    for i in range(len(next(iter(columns.values())))):
        known = {name: values[i] for name, values in columns.items() if values[i] is not None}
        lines.append(json.dumps({"step": first + i, "wall": 100.0 + 2 * i, **known}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def evaluated(folder: Path, made: Any, reward: float) -> Path:
    """A run that evaluated 3 prompts at step 4, and earned one reward for all of them."""
    logged(folder, {"reward": [reward] * 4, "eval/reward": [None, None, None, reward]})
    groups = [replace(group, reward=np.full(4, reward)) for group in made.make_step(4, groups=3).groups]
    step = Step(number=4, metrics={}, groups=groups)
    rollout_files.write(RunFiles(folder), rollout_files.EVALUATIONS, step, folder.name)
    return folder


@pytest.fixture
def six(tmp_path: Path, made: Any) -> Path:
    """Two settings with three seeds each."""
    for lr, base in (("1e-5", 0.1), ("1e-2", 0.6)):
        for seed in range(3):
            evaluated(tmp_path / f"mine-lr={lr}-seed={seed}", made, base + 0.01 * seed)
    return tmp_path


# ---------------------------------------------------------------- who belongs together


def test_seeds_of_a_sweep_are_a_group(six: Path) -> None:
    alone = logged(six / "other-seed=0", {"reward": [0.5]})
    sources = open_sources([*sorted(six.glob("mine-*")), alone])
    assert setting_labels(sources) == ["mine-lr=1e-2"] * 3 + ["mine-lr=1e-5"] * 3 + [None]


def test_runs_of_a_pattern_are_a_group_whatever_their_names(tmp_path: Path) -> None:
    for name in ("one", "other", "single-x"):
        logged(tmp_path / "runs" / name, {"reward": [0.5]})
    (tmp_path / "runs" / "one.log").write_text("what it printed")
    pattern = str(tmp_path / "runs" / "o*")
    sources = open_sources([pattern, str(tmp_path / "runs" / "single-*")])
    assert [source.name for source in sources] == ["one", "other", "single-x"]
    assert setting_labels(sources) == [pattern, pattern, None]
    with pytest.raises(ConfigError, match="a pattern with \\* stands in quotes"):
        open_sources([str(tmp_path / "runs" / "none-*")])


def test_stages_of_seeds_are_grouped_by_stage(tmp_path: Path) -> None:
    for seed in range(2):
        for stage in ("sft", "grpo"):
            logged(tmp_path / f"mine-seed={seed}" / stage, {"reward": [0.5]})
    sources = open_sources([tmp_path / "mine-seed=0", tmp_path / "mine-seed=1"])
    assert setting_labels(sources) == ["mine/grpo", "mine/sft"] * 2
    pattern = str(tmp_path / "mine-*")
    assert setting_labels(open_sources([pattern])) == [f"{pattern}/grpo", f"{pattern}/sft"] * 2


# ---------------------------------------------------------------- mean and band


def test_the_band_is_students_interval_at_the_steps_that_every_run_has(tmp_path: Path) -> None:
    runs = [[0.1, 0.2, None, 0.4], [0.3, 0.1, 0.2, 0.6], [0.2, 0.9, 0.2, 0.8, 1.0]]
    for seed, values in enumerate(runs):
        logged(tmp_path / f"a-seed={seed}", {"reward": values, "tokens/sampled": [10.0 + seed] * len(values)})
    group = read_group(str(tmp_path / "a-*"))
    curve = curve_of(group, "reward", across="tokens")
    values = np.array([[0.1, 0.2, 0.4], [0.3, 0.1, 0.6], [0.2, 0.9, 0.8]])
    assert curve.step_S.tolist() == [1, 2, 4]
    assert curve.x_S == pytest.approx([11.0, 22.0, 44.0])
    assert curve.value_S == pytest.approx(values.mean(axis=0))
    assert curve.half_S == pytest.approx(stats.t.ppf(0.975, 2) * stats.sem(values, axis=0), rel=1e-3)


def test_runs_are_smoothed_before_their_mean(tmp_path: Path) -> None:
    """The band of smooth curves is narrower than a smooth band: noise within a run is no difference between seeds."""
    chance = np.random.default_rng(0)
    for seed in range(3):
        logged(
            tmp_path / f"a-seed={seed}", {"reward": chance.normal(size=40).tolist(), "eval/reward": chance.normal(size=40).tolist()}
        )
    group = read_group(str(tmp_path / "a-*"))
    plain, smooth = (curve_of(group, "reward", smoothing=weight) for weight in (0.0, 0.9))
    first = sum(0.9 ** (2 - i) * plain.value_RS[:, i] for i in range(3)) / sum(0.9**i for i in range(3))
    assert smooth.value_RS[:, 2] == pytest.approx(first)
    assert smooth.half_S[20:].mean() < plain.half_S[20:].mean() / 2
    held_out = curve_of(group, "eval/reward", smoothing=0.9)
    assert held_out.value_S == pytest.approx(curve_of(group, "eval/reward").value_S), "drawn as they are"


def test_long_curves_are_thinned_to_means_of_stretches(tmp_path: Path) -> None:
    values = np.arange(103.0)
    logged(tmp_path / "a", {"reward": values.tolist()})
    curve = curve_of(RunGroup("a", tuple(open_sources([tmp_path / "a"]))), "reward")
    thin = curve.thinned(10)
    assert len(thin.step_S) == 10 and thin.step_S[-1] == 103
    assert thin.value_S[0] == pytest.approx(values[:11].mean()) and thin.value_S[-1] == pytest.approx(values[99:].mean())
    assert curve.thinned(103) is curve


def test_pages_answer_what_compare_computes(six: Path) -> None:
    pages = Pages(open_sources([six / f"mine-lr={lr}-seed={seed}" for lr in ("1e-5", "1e-2") for seed in range(3)]))
    band = pages.answer("bands", {"runs": "3,4,5", "names": "eval/reward"})["eval/reward"]
    values = [0.60, 0.61, 0.62]
    assert (band["steps"], band["xs"]) == ([4], None)
    assert band["mean"] == pytest.approx([0.61]) and band["half"] == pytest.approx([4.303 * stats.sem(values)], rel=1e-3)
    said = pages.answer("differences", {"series": "0,1,2;3,4,5"})
    assert [one["label"] for one in said["legend"]] == ["mine-lr=1e-5", "mine-lr=1e-2"]
    assert "B - A, over seeds: +0.500" in said["sentences"][2]
    for wrong in ("0,9", "x", "0,", "0;1", "0,0"):
        with pytest.raises(DataError):
            pages.answer("bands", {"runs": wrong})


# ---------------------------------------------------------------- figures


@pytest.fixture
def figure(made: Any, tmp_path: Path) -> CurveFigure:
    """Curves whose labels, and whose metric, try to be more than text."""
    curves = []
    for place, text in enumerate(made.HOSTILE):
        folder = logged(tmp_path / f"r{place}", {"reward": [0.1, 0.2]})
        group = RunGroup(text, tuple(open_sources([folder])))
        curves.append(DrawnCurve(curve_of(group, "reward"), place))
    return CurveFigure("".join(made.HOSTILE[:14]), curves)


def test_labels_of_a_figure_are_text(figure: CurveFigure) -> None:
    text = figure.svg()
    root = ElementTree.fromstring(text)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags == {"svg", "title", "rect", "line", "text", "polyline", "circle"}
    names = {name for element in root.iter() for name in element.attrib}
    assert not [name for name in names if name.startswith("on") or "href" in name]
    assert "<script>window.pwned = 1</script>" in [element.text for element in root.iter(f"{SVG}text")]
    assert not [character for character in text if not character.isprintable() and character != "\n"]


def test_a_file_name_of_a_figure_is_harmless(figure: CurveFigure) -> None:
    assert set(figure.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert CurveFigure("../../..", []).name == "curve"
    assert CurveFigure("eval/reward", []).name == "eval-reward"


def test_a_table_is_read_back_and_computes_nothing(tmp_path: Path) -> None:
    curves = []
    for place, label in enumerate(('=HYPERLINK("http://evil.example")', 'a,"b"\nc', "@x")):
        folder = logged(tmp_path / f"r{place}", {"reward": [0.1, -0.2]})
        curves.append(DrawnCurve(curve_of(RunGroup(label, tuple(open_sources([folder]))), "reward", across="time"), place))
    rows = list(csv.reader(io.StringIO(CurveFigure("reward", curves, "time").csv())))
    assert rows[0] == ["series", "runs", "step", "seconds", "value", "low", "high"]
    assert [row[0] for row in rows[1::2]] == ['\'=HYPERLINK("http://evil.example")', 'a,"b"\\x0ac', "'@x"]
    assert rows[2][1:] == ["1", "2", "2", "-0.2", "", ""]


def test_an_axis_holds_its_curves_and_has_round_numbers(six: Path) -> None:
    groups = [read_group(str(six / f"mine-lr={lr}-*")) for lr in ("1e-5", "1e-2")]
    curves = [DrawnCurve(curve_of(group, "reward"), place) for place, group in enumerate(groups)]
    root = ElementTree.fromstring(CurveFigure("reward", curves).svg())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"reward", "step", "1", "2", "3", "4"} <= set(texts)
    assert any("mean of 3 runs, 95 % interval" in text for text in texts if text)
    for band in root.iter(f"{SVG}polygon"):
        places = [float(pair.split(",")[1]) for pair in band.attrib["points"].split()]
        assert min(places) >= 40 and max(places) <= 340
    empty = CurveFigure("reward", [DrawnCurve(curve_of(groups[0], "no such metric"), 0)])
    assert len(list(ElementTree.fromstring(empty.svg()).iter(f"{SVG}polyline"))) == 0


def get(port: int, path: str) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def test_a_curve_is_saved_as_a_file_that_runs_nothing(viewer: Callable, six: Path) -> None:
    folders = [six / f"mine-lr=1e-2-seed={seed}" for seed in range(3)]
    port = viewer(*folders).port
    for kind, of in (("svg", "image/svg+xml"), ("csv", "text/csv")):
        status, headers, text = get(port, f"/figure.{kind}?metric=eval/reward&series=0,1,2&seeds=1&smooth=0.6")
        assert (status, headers["Content-Type"]) == (200, f"{of}; charset=utf-8")
        assert headers["Content-Disposition"] == f'attachment; filename="eval-reward.{kind}"'
        assert "script-src 'self'" in headers["Content-Security-Policy"]
        assert text.count("mine-lr=1e-2") == (1 if kind == "svg" else 4), "seeds are rows, and thin lines without a name"
    for wrong in ("series=7", "series=0&smooth=2", "series=0&smooth=x"):
        status, _, text = get(port, f"/figure.svg?metric=reward&{wrong}")
        assert status == 422 and "\n" in text


def test_a_saved_figure_has_the_colours_of_the_screen(six: Path) -> None:
    pages = Pages(open_sources([six / f"mine-lr={lr}-seed={seed}" for lr in ("1e-5", "1e-2") for seed in range(3)]))
    figure = pages.figure({"metric": "reward", "series": "3,4,5"}, smooth=True)
    assert COLOURS[1] in figure.svg() and COLOURS[0] not in figure.svg()
