"""Finding answers and comparing plain numbers, without sympy."""

from __future__ import annotations

import contextlib
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.rewards.answers import boxes, final_number, find_answer, find_gold, last_number
from groupwise.rewards.equality import Undecided, decide
from groupwise.rewards.restatement import restated


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2}", "1, 2"),
        (r"$\boxed{1}$, $\boxed{2}$", "1, 2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3} \fboxed{3} \boxed {4}", "4"),
        (r"\boxed{unclosed {", "unclosed {"),
        ("work\n#### 1,234\n", "1,234"),
        ("#### 5 dollars\nmore", "5 dollars"),
        (r"\boxed{1} then #### 2", "2"),
        (r"#### 2 then \boxed{1}", "1"),
        ("The answer is 42.", "42"),
        ("Answer: 42", "42"),
        ("The final answer is: $x=3$. \nBye", "$x=3$"),
        ("42", "42"),
        ("<think>\\boxed{1}</think>\n7", "7"),
        ("<think>\\boxed{1}</think>", None),
        ("", None),
        (r"\boxed{}", None),
        ("no answer\nhere", None),
        ("word " * 50, None),
    ],
)
def test_find_answer(text, answer):
    assert find_answer(text) == answer


def test_find_gold_keeps_prose_for_the_parser():
    prose = "First.\nThe result is $\\frac{1}{2}$"
    assert find_gold(prose) == prose
    assert find_gold(" \n") is None


def test_boxes_inside_boxes_are_one_box():
    assert [content for _, _, content, _ in boxes(r"a \boxed{1 + \boxed{2}} \boxed{3}")] == [r"1 + \boxed{2}", "3"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", "1234"), ("-7", "-7"), ("+7", "7"), ("- 7", "-7"), ("007", "7"), ("$18", "18"), ("$5$", "5"),
        (r"\$18.50", "37/2"),
        (r"\( 5 \)", "5"), (".5", "1/2"), ("1{,}000", "1000"), ("3/4", "0.75"), (r"\dfrac{-3}{4}", "-0.75"), ("1e5", "100000"),
        ("٣", "3"), ("−5", "-5"), ("1 234", "1234"), ("½", "0.5"), ("9" * 31, "9" * 31),
    ],
)  # fmt: skip
def test_a_number_is_read_however_it_is_written(text, value):
    assert decide(value, text) == decide(text, value) == 1.0
    assert decide(value, f"{text}7") == 0.0


@pytest.mark.parametrize("text", ["12,34", "1,2", "1/0", "2^3", "", "--5", "1.2.3", "x"])
def test_what_is_no_number_equals_none(text):
    assert decide("5", text) == decide("2", text) == 0.0


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_whole_numbers_are_equal_iff_they_are(a, b):
    assert decide(f"{a:,}", str(b)) == float(a == b)


LONG = [
    " " * 200_000 + "x", "a" + " " * 200_000 + "b.", "\\boxed{" * 30_000, "\\boxed{}" * 30_000, "{" * 200_000,
    "answer" * 30_000, "1" * 200_000, "1,111" * 40_000, "####" * 40_000, "</think>" * 30_000,
    "\\boxed{1}" + " " * 200_000 + "\\boxed{2}", "answer to " * 20_000, "answer: " * 20_000, "answer is " + "\\(" * 90_000,
    "answer is 1" + " " * 90_000, "answer\n" * 9_000, "<answer>" * 20_000, "```\n" * 50_000, "answer: " + "$" * 90_000,
    "answer is " + "1 is " * 40_000, "**" * 90_000, "\r\n" * 90_000,
]  # fmt: skip
PIECES = [
    "(", "{", "\\text{", "\\frac", "\\frac{", "\\sqrt{", "^{", "2^", "1/", "x/", "2!", "1,", "-", " ", "a ", "and ", "\\pm",
    "\\cup", "\\begin{pmatrix}", "\\text{a}", "1 000 ",
    "0.\\overline{3}", "9^9^", "😀", "“", "|", "=", "x^2", "\\quad", "1e9",
]  # fmt: skip


@pytest.mark.parametrize("text", LONG, ids=[repr(text[:12]) for text in LONG])
@pytest.mark.timeout(60)  # a fraction of a second; a search that begins again at every character takes many minutes
def test_long_texts_take_linear_time(text):
    find_answer(text), find_answer(text, cut=True), find_gold(text), final_number(text), last_number(text)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.timeout(60)
def test_answers_made_of_one_piece_are_compared_or_left_in_linear_time(piece):
    answer = (piece * 2_000)[:2_000]
    for gold in ("95", r"\frac{\sqrt3}{2}", "x^2+1", r"\{1,2\}", "(1,2]", "x>5", r"\text{east}", "A", answer):
        with contextlib.suppress(Undecided):
            assert decide(gold, answer if gold != answer else "95") in (0.0, None)
    restated(answer, "95", answer * 50)


def test_last_number():
    assert last_number("1,234 then -5.50") == Decimal("-5.5")
    assert last_number("a 7 b #### 1,000") == 1000
    assert last_number("3 apples, 12.") == 12
    assert last_number("v1.2.3") is not None
    assert last_number("") is None
