"""Pictures of coloured shapes, and questions about them: how many, which, more or fewer."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from groupwise.data.images import pillow
from groupwise.data.tasks.base import Generated, Row
from groupwise.utils.built_in import built_in

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (235, 205, 40),
}
"""Colours of shapes, in RGB."""
FORMS = ("circle", "square", "triangle")
BACKGROUND = (255, 255, 255)
SHARE_EMPTY = 0.25
"""Share of the cells of a mixed scene in which nothing stands."""
MOST_ALIKE = 4
"""Shapes of a scene of equal ones."""


class ColouredShape(NamedTuple):
    """A shape of a picture."""

    colour: str
    form: str

    def __str__(self) -> str:
        return f"{self.colour} {self.form}"


Scene = Sequence[ColouredShape | None]
"""What stands in the cells of a picture, row by row."""


@built_in("shapes")
@dataclass(frozen=True, kw_only=True)
class Shapes(Generated):
    """Questions about a picture of `side` x `side` cells, each empty or with a coloured shape.

    scenes: `alike`, in which up to four shapes have one colour and one form, or `mixed`.
    `count`: `how many?`; in mixed scenes `how many red?`, `how many circles?`.
    `name`: `which colour?`, `which shape?`; in mixed scenes `which colour is the circle?`, `which
        shape is red?`.
    `compare`: `more than two?`; in mixed scenes `more red than blue?`.

    Rows carry the picture (PNG) in `images`, what it shows in `scene`, and which of the three is
    asked in `kind`.  The reward is `exact`.  Rows are asked as chat messages (`data.chat: true`).

    All questions about a picture are on one side of the split: no picture of a held-out row is
    trained on.
    demonstrators: `blind` ones do not see the picture: their rows have none, and any answer to the
        question.  What they show is how answers look.  Rows of `seeing` ones have the picture, and
        the right answer.

    >>> (row,) = Shapes(side=2).held_out(1)
    >>> row["prompt"], row["answer"], row["scene"]
    ('which shape is yellow?', 'circle', '-, yellow circle, blue circle, -')
    """

    breakdown: ClassVar = ("kind",)
    ranges: ClassVar = {"side": (2, 8), "cell": (8, 128)}
    choices: ClassVar = {"scenes": ("mixed", "alike"), "demonstrators": ("blind", "seeing")}

    scenes: str = "mixed"
    demonstrators: str = "blind"
    side: int = 3
    """Cells in a row of the picture, and rows."""
    cell: int = 8
    """Pixels of a cell's side."""

    def question(self, rng: random.Random) -> Row:
        """Draw a picture, and a question about it."""
        while True:
            if self.scenes == "alike":
                scene = _alike(self.side**2, rng)
                asked = _asked_of_alike(scene, rng)
            else:
                scene = [_cell(rng) for _ in range(self.side**2)]
                asked = rng.choice((_count, _name, _compare))(scene, rng)
            if asked is not None:
                break
        return asked | {
            "images": [picture_of(scene, side=self.side, cell=self.cell)],
            "scene": ", ".join(str(shape or "-") for shape in scene),
        }

    def subject(self, row: Row) -> str:
        """See `Generated.subject`: what the picture shows."""
        return row["scene"]

    def demonstrations(self, n: int, seed: int) -> list[Row]:
        """Draw `n` questions, answered as `demonstrators` says."""
        rows = super().demonstrations(n, seed)
        if self.demonstrators == "blind":
            for row in rows:
                del row["images"]
        return rows

    def completion(self, row: Row, rng: random.Random) -> str:
        """Return the answer, or for blind demonstrators any that the question may have."""
        if self.demonstrators == "seeing":
            return row["answer"]
        match row["prompt"].split():
            case ["how", "many?"]:
                return str(rng.randint(1, MOST_ALIKE))
            case ["how", *_]:
                return str(rng.randint(0, self.side**2))
            case ["which", "colour" | "colour?", *_]:
                return rng.choice(tuple(COLOURS))
            case ["which", *_]:
                return rng.choice(FORMS)
        return rng.choice(("yes", "no"))


def _alike(cells: int, rng: random.Random) -> list[ColouredShape | None]:
    """A scene of one to four shapes of one colour and one form."""
    shape = ColouredShape(rng.choice(tuple(COLOURS)), rng.choice(FORMS))
    scene: list[ColouredShape | None] = [None] * cells
    for place in rng.sample(range(cells), rng.randint(1, MOST_ALIKE)):
        scene[place] = shape
    return scene


def _asked_of_alike(scene: Scene, rng: random.Random) -> Row:
    """A question about a scene of equal shapes."""
    shapes = [shape for shape in scene if shape is not None]
    rows = [
        {"prompt": "how many?", "answer": str(len(shapes)), "kind": "count"},
        {"prompt": "which colour?", "answer": shapes[0].colour, "kind": "name"},
        {"prompt": "which shape?", "answer": shapes[0].form, "kind": "name"},
        {"prompt": "more than two?", "answer": "yes" if len(shapes) > 2 else "no"},
    ]
    return {"kind": "compare"} | rng.choice(rows)


def _cell(rng: random.Random) -> ColouredShape | None:
    """What stands in a cell."""
    if rng.random() < SHARE_EMPTY:
        return None
    return ColouredShape(rng.choice(tuple(COLOURS)), rng.choice(FORMS))


def _count(scene: Scene, rng: random.Random) -> Row | None:
    """Ask how many shapes have a colour or a form; what is there is asked for more often."""
    words = [*COLOURS, *FORMS]
    for shape in scene:
        words += shape or ()
    word = rng.choice(words)
    plural = f"{word}s" if word in FORMS else word
    answer = sum(word in (shape or ()) for shape in scene)
    return {"prompt": f"how many {plural}?", "answer": str(answer), "kind": "count"}


def _name(scene: Scene, rng: random.Random) -> Row | None:
    """Ask for the colour of the only shape of its form, or the other way; None if all repeat."""
    shapes = [shape for shape in scene if shape is not None]
    colours = [shape.colour for shape in shapes]
    forms = [shape.form for shape in shapes]
    rows = []
    for colour, form in shapes:
        if forms.count(form) == 1:
            rows.append({"prompt": f"which colour is the {form}?", "answer": colour})
        if colours.count(colour) == 1:
            rows.append({"prompt": f"which shape is {colour}?", "answer": form})
    if not rows:
        return None
    return rng.choice(rows) | {"kind": "name"}


def _compare(scene: Scene, rng: random.Random) -> Row | None:
    """Ask whether one colour is there more often than another; None if they are as many."""
    first, second = rng.sample(tuple(COLOURS), 2)
    colours = [shape.colour for shape in scene if shape is not None]
    difference = colours.count(first) - colours.count(second)
    if difference == 0:
        return None
    answer = "yes" if difference > 0 else "no"
    return {"prompt": f"more {first} than {second}?", "answer": answer, "kind": "compare"}


def picture_of(scene: Scene, *, side: int, cell: int) -> bytes:
    """Draw a scene: the bytes of a PNG of `side * cell` pixels in both directions."""
    pixels = np.full((side * cell, side * cell, 3), BACKGROUND, np.uint8)
    for place, shape in enumerate(scene):
        if shape is not None:
            row, column = divmod(place, side)
            square = pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
            square[_mask(shape.form, cell)] = COLOURS[shape.colour]
    file = io.BytesIO()
    image: Any = pillow().Image.fromarray(pixels)
    image.save(file, "PNG")
    return file.getvalue()


@cache
def _mask(form: str, cell: int) -> np.ndarray:
    """Return which pixels (cell, cell) of a cell its shape covers; a margin stays free."""
    centre = (cell - 1) / 2
    down, right = np.mgrid[:cell, :cell] - centre
    half = 0.375 * cell
    inside = (np.abs(down) <= half) & (np.abs(right) <= half)
    if form == "circle":
        return down**2 + right**2 <= half**2
    if form == "triangle":
        return inside & (2 * np.abs(right) <= down + half + 1)
    return inside
