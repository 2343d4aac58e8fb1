"""Pictures of shapes: what is asked is true of what is drawn, and no picture is on both sides of the split."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from PIL import Image

from groupwise.data.tasks import make_task
from groupwise.data.tasks.shapes import COLOURS, FORMS, ColouredShape, picture_of
from groupwise.rewards.accuracy import exact

TASKS = {"mixed": make_task("shapes"), "alike": make_task("shapes", {"scenes": "alike"})}


@pytest.fixture(scope="module", params=TASKS)
def scenes(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(scenes: str) -> list[dict[str, Any]]:
    return TASKS[scenes].prompts(1500, seed=0)


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def cells(png: bytes, cell: int = 8) -> list[tuple[str, int] | None]:
    """Colour and covered pixels of each cell, from the picture alone."""
    seen: list[tuple[str, int] | None] = []
    image = pixels(png)
    for row in range(0, image.shape[0], cell):
        for column in range(0, image.shape[1], cell):
            part = image[row : row + cell, column : column + cell].reshape(-1, 3)
            counts = {name: int((part == colour).all(1).sum()) for name, colour in COLOURS.items()}
            name = max(counts, key=counts.__getitem__)
            seen.append((name, counts[name]) if counts[name] else None)
    return seen


PLAIN = {form: pixels(picture_of([ColouredShape("red", form)], side=1, cell=8)) for form in FORMS}
AREAS = {form: int((picture[..., 2] == 40).sum()) for form, picture in PLAIN.items()}


def test_forms_differ_by_more_than_a_pixel() -> None:
    areas = sorted(AREAS.values())
    assert min(np.diff(areas)) >= 4


def test_answers_are_true_of_what_is_drawn(rows: list[dict[str, Any]]) -> None:
    """Answers are worked out once more, from the pixels."""
    form_of = {area: form for form, area in AREAS.items()}
    for row in rows:
        shapes = [(one[0], form_of[one[1]]) for one in cells(row["images"][0]) if one is not None]
        colours, forms = zip(*shapes, strict=True) if shapes else ((), ())
        match row["prompt"].rstrip("?").split():
            case ["how", "many"]:
                answer = str(len(shapes))
            case ["which", "colour"]:
                (answer,) = set(colours)
            case ["which", "shape"]:
                (answer,) = set(forms)
            case ["more", "than", "two"]:
                answer = "yes" if len(shapes) > 2 else "no"
            case ["how", "many", word]:
                answer = str(colours.count(word) + forms.count(word.removesuffix("s")))
            case ["which", "colour", "is", "the", form]:
                assert forms.count(form) == 1
                answer = colours[forms.index(form)]
            case ["which", "shape", "is", colour]:
                assert colours.count(colour) == 1
                answer = forms[colours.index(colour)]
            case ["more", first, "than", second]:
                answer = "yes" if colours.count(first) > colours.count(second) else "no"
        assert row["answer"] == answer, row


def test_no_picture_is_on_both_sides(rows: list[dict[str, Any]], scenes: str) -> None:
    """A split by question and picture, or by the question, fails here."""
    trained = {row["images"][0] for row in rows}
    held_out = {row["images"][0] for row in TASKS[scenes].held_out(500)}
    assert len(trained) > 800
    assert not trained & held_out


def test_the_question_alone_does_not_give_the_answer(rows: list[dict[str, Any]], scenes: str) -> None:
    """The best guess for each question is right about some rows, of each kind."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        answers[row["prompt"]][row["answer"]] += 1
    judged: dict[str, list[bool]] = defaultdict(list)
    for row in TASKS[scenes].held_out(600):
        judged[row["kind"]].append(answers[row["prompt"]].most_common(1)[0][0] == row["answer"])
    assert set(judged) == {"count", "name", "compare"}
    assert all(np.mean(right) < 0.75 for right in judged.values())


def test_demonstrators_see_nothing_and_answer_in_form(scenes: str) -> None:
    shown = TASKS[scenes].demonstrations(600, seed=0)
    assert not any("images" in row for row in shown)
    rights = exact([row["completion"] for row in shown], [row["answer"] for row in shown])
    assert 0.15 < np.mean(np.array(rights, float)) < 0.5
    assert {row["completion"] for row in shown} >= {"red", "circle", "yes", "2"}


def test_demonstrators_that_see_show_the_picture_and_its_answer(scenes: str) -> None:
    task = make_task("shapes", {"scenes": scenes, "demonstrators": "seeing"})
    shown = task.demonstrations(200, seed=0)
    assert all(row["completion"] == row["answer"] and row["images"] for row in shown)
    held_out = {row["scene"] for row in task.held_out(600)}
    assert not held_out & {row["scene"] for row in shown}


def test_larger_pictures_have_more_and_larger_cells() -> None:
    (row,) = make_task("shapes", {"side": 4, "cell": 28}).held_out(1)
    assert pixels(row["images"][0]).shape == (112, 112, 3)
    assert len(row["scene"].split(", ")) == 16
