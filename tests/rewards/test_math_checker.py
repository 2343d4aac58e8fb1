"""Mathematical equality: the same verdicts as math-verify, and none of its hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import resource
import threading
from collections.abc import Iterator

import pytest

from groupwise.rewards.math_checker import Checker
from groupwise.utils.processes import Died

HOSTILE = [
    "9^{9^{9^{9}}}", "10^{10^{10}}", "99999999!", "(9999999!)!", r"\binom{10^8}{5*10^7}",
    "+".join(["x"] * 500) + "^{99999}",
    r"\{" + ",".join(map(str, range(700))) + r"\}", r"\sum_{k=1}^{10^9} \frac{1}{k^2}", r"\prod_{k=1}^{10^7} (k^2+1)",
    r"\int_0^{\infty} \frac{\sin(x^x)}{x^{x^x}} dx", "{" * 900 + "1" + "}" * 900, "{" * 3000 + "1" + "}" * 3000,
    "(" * 900 + "1" + ")" * 900, r"\sqrt{" * 300 + "2" + "}" * 300, r"\frac{1}{" * 250 + "2" + "}" * 250, "2^{2^{2^{2^{2^{2}}}}}",
    "(x+1)^{100000}", "(x+y+z+w)^{300}", r"\lim_{x \to 0} \frac{x^{x^{x^x}}}{\sin x}", "1" * 1900,
    "0." + "3" * 1900, "1/" * 600 + "1",
    "x_" * 500, r"\left(" * 400, "\x00" * 100, "\ud800\udfff", "\u202e1234\u202c", "[" * 1000, r"\begin{pmatrix}" * 100, "%" * 1500,
    "+".join(f"x^{{{n}}}" for n in range(250)),
]  # fmt: skip


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    checker = Checker(workers=2)
    yield checker
    checker.pool.close()


def reference(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    try:
        gold_parsed, answer_parsed = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer))
        return bool(answer_parsed) and verify(gold_parsed, answer_parsed, timeout_seconds=None)
    finally:
        logging.disable(logging.NOTSET)


def written(value: int, rng: random.Random) -> str:
    digits = rng.choice([str(value), f"{value:,}", f"{value}.0", f"{value}.00", f"\\${value:,}" if value > 0 else str(value)])
    return rng.choice([digits, f"${digits}$" if "$" not in digits else digits, digits])


def generated_pairs(count: int) -> list[tuple[str, str]]:
    rng, pairs = random.Random(0), []
    while len(pairs) < count:
        kind = rng.randrange(4)
        a = rng.choice([rng.randint(-20, 20), rng.randint(-(10**6), 10**6)])
        b = a if rng.random() < 0.5 else a + rng.choice([-1, 1, 10])
        below = rng.choice([2, 3, 4, 5, 7, 8, 12])
        decimals = rng.randint(1, 5)
        fraction = rng.choice([f"{a}/{below}", f"\\frac{{{a}}}{{{below}}}", f"\\dfrac{{{a}}}{{{below}}}"])
        if kind == 0:
            pairs.append((written(a, rng), written(b, rng)))
        elif kind == 1:
            pairs.append((f"{a / 10**decimals:.{decimals}f}", f"{b / 10**decimals:.{rng.randint(decimals, 6)}f}"))
        elif kind == 2:
            pairs.append((fraction, rng.choice([f"{b * 2}/{below * 2}", f"\\frac{{{b}}}{{{below}}}", f"{b}/{below}"])))
        else:
            pairs.append((fraction, rng.choice([f"{b / below:.6f}", f"{b / below:.2f}", f"{a / below:.4f}"])))
    return pairs


@pytest.mark.slow
def test_m03_the_fast_path_agrees_with_math_verify_on_generated_pairs(checker):
    pairs = generated_pairs(1_500)
    decided, equal, wrong = 0, 0, []
    for gold, answer in pairs:
        ours = checker._at_once(gold, answer)
        if ours in (0.0, 1.0):
            decided += 1
            equal += ours == 1.0
            if bool(ours) is not reference(gold, answer):
                wrong.append((gold, answer, ours))
    assert wrong == []
    assert decided >= 1_300
    assert 400 < equal < decided - 400


def test_m03_plain_numbers_start_no_process():
    checker = Checker(workers=1)
    pairs = [(str(n), f"{n:,}") for n in range(5_000)]
    assert checker.compare(pairs) == [1.0] * 5_000
    assert checker.pool._idle == []


@pytest.mark.slow
def test_m03_the_second_time_is_from_the_cache(checker, monkeypatch):
    pair = (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}")
    assert checker.compare([pair]) == [1.0]
    asked = []
    ask = checker.pool.map
    monkeypatch.setattr(checker.pool, "map", lambda calls: asked.extend(calls) or ask(calls))
    assert checker.compare([pair] * 200) == [1.0] * 200 and asked == []
    assert checker.compare([(pair[0], r"\sqrt{3}"), pair]) == [0.0, 1.0] and len(asked) == 1


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\{1, 2, 3\}", r"\{3, 2, 1\}", 1.0),
        ("1, 2", "2, 1", 1.0),
        (r"[0, 1)", r"\left[0, 1\right)", 1.0),
        (r"[0, 1)", r"[0, 1]", 0.0),
        (r"x^2 + 2x + 1", r"(x+1)^2", 1.0),
        ("x = 5", "5", 1.0),
        (r"18 \text{ meters}", "18", 1.0),
        (r"50\%", r"50", 1.0),
        (r"\pi", "3.14", 0.0),
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
        ("The result is $\\frac{3}{4}$ of\nall", "0.75", 1.0),
        ("7", None, 0.0),
        (r"\sqrt{2}", None, 0.0),
        ("", "7", None),
        ("   ", None, None),
        ("prose of two lines about nothing,\nwith never a number or a sign to be found in it anywhere", "7", None),
    ],
)  # fmt: skip
def test_verdicts(checker, gold, answer, verdict):
    assert checker.compare([(gold, answer)]) == [verdict]


@pytest.mark.slow
def test_order_and_repeats_are_preserved(checker):
    pairs = [("1", "1"), (r"\sqrt{4}", "2"), ("2", "3"), (r"\sqrt{4}", "2"), (r"\sqrt{4}", "3"), ("", "1")]
    assert checker.compare(pairs) == [1.0, 1.0, 0.0, 1.0, 0.0, None]


@pytest.mark.slow
def test_a_hostile_gold_is_none_and_a_hostile_answer_is_wrong(monkeypatch):
    monkeypatch.setattr("groupwise.rewards.math_checker.CPU_SECONDS", 0.25)
    checker = Checker(workers=2)
    with checker.pool:
        assert checker.compare([("9^{9^{9^{9}}}", "5"), ("5", "9^{9^{9^{9}}}")]) == [None, 0.0]
        assert checker.recompute(["99999999!", r"\sqrt{2}", "1,234"]) == [None, 1.0, 1.0]  # M2


@pytest.mark.parametrize(("below", "ended"), [(2, Died("no memory")), (3, TimeoutError())])
def test_a_comparison_that_something_else_has_ended_is_made_again(checker, monkeypatch, below, ended):
    """The machine stood still, or its memory went to somebody else: the right answer stays right, now and from the cache."""
    real, asked = checker.pool.map, list[int]()

    def first_ends(calls):
        asked.append(len(calls))
        return [ended for _ in calls] if len(asked) == 1 else real(calls)

    monkeypatch.setattr(checker.pool, "map", first_ends)
    pair = (rf"\frac{{(x+1)^2}}{{{below}}}", rf"\frac{{x^2+2x+1}}{{{below}}}")
    assert [checker.compare([pair]) for _ in range(2)] == [[1.0]] * 2
    assert asked[:2] == [1, 1]


def test_m04_strange_text_scores_zero(checker):
    strange = ["x" * 60_000, "\x00", "\ud800", "\u202e7\u202c", "1" * 60_000, "\\" * 100, "$" * 51, ""]
    assert checker.compare([(r"\sqrt{7}", text) for text in strange]) == [0.0] * len(strange)
    assert checker.compare([("7", text) for text in strange]) == [
        0.0,
        0.0,
        0.0,
        checker.compare([("7", strange[3])])[0],
        *[0.0] * 4,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["main", "thread", "asyncio"])
def test_m01_hostile_answers_end_on_time_from_everywhere(where, monkeypatch):
    """All texts at a short deadline; one from everywhere else, once at the deadline that users have."""
    if where != "thread":
        monkeypatch.setattr("groupwise.rewards.math_checker.CPU_SECONDS", 0.25)
    checker = Checker(workers=2)
    texts = HOSTILE if where == "main" else HOSTILE[:1]  # which text it is makes no difference to who waits for it
    pairs = [(r"\frac{\sqrt{3}}{7}", text) for text in texts for _ in range(3 if where == "main" else 8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: list[list[float | None]] = []
    if where == "main":
        found.append(checker.compare(pairs))
    elif where == "thread":
        thread = threading.Thread(target=lambda: found.append(checker.compare(pairs)))
        thread.start()
        thread.join(timeout=280)
        assert not thread.is_alive()
    else:

        async def inside() -> None:
            found.append(checker.compare(pairs))

        asyncio.run(inside())
    assert found == [[0.0] * len(pairs)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
    pids = [process._connection.child.pid for process, _ in checker.pool._idle]
    checker.pool.close()
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
