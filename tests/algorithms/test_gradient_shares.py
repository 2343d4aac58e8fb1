"""Where a gradient comes from: parts that add up."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from groupwise.algorithms.gradient_shares import account


def test_every_cut_adds_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    sizes = [[3, 0, 17], [1, 64, 2], [0]]
    gradient = [[rng.normal(size=n) * (rng.random(n) > 0.3) for n in group] for group in sizes]
    ratio = [[rng.uniform(0.5, 1.5, size=n) for n in group] for group in sizes]
    found = account(gradient, ratio=ratio, clip_range=(0.8, 1.2))
    whole = np.concatenate([column for group in gradient for column in group])
    assert found.total == pytest.approx(np.abs(whole).sum(), rel=1e-12)
    for cut in (found.groups, found.completions, found.lengths, found.sides):
        assert sum(part.gradient for part in cut) == pytest.approx(found.total, rel=1e-12)
        assert sum(part.share for part in cut) == pytest.approx(1.0, rel=1e-12)
        assert sum(part.tokens for part in cut) == whole.size
        assert sum(part.silent for part in cut) == np.count_nonzero(whole == 0)
    assert [part.name for part in found.lengths] == ["1", "2-3", "16-31", "64-127"]
    assert [part.name for part in found.completions] == ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2", "2/0"]
    below = np.concatenate([column for group in ratio for column in group]) < 0.8
    assert found.sides[0].gradient == pytest.approx(np.abs(whole[below]).sum(), rel=1e-12)
    assert found.raised == pytest.approx(-whole[whole < 0].sum() / found.total, rel=1e-12)


def test_no_gradient_and_no_clip_range() -> None:
    found = account([[np.zeros(3)], []], ratio=[[np.ones(3)], []])
    assert (found.total, found.raised, found.sides) == (0.0, 0.0, ())
    assert [part.share for part in found.groups] == [0.0, 0.0]
    assert account([]).groups == ()


def test_gradient_shares_import_no_torch() -> None:
    code = "import sys, groupwise.algorithms.gradient_shares; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
