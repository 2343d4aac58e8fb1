"""Answers as models write them: one file of forms, read by every reward that compares with a gold answer."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.tasks.chat import same_number
from groupwise.rewards.accuracy import accuracy, as_text, check_gold, exact, number
from groupwise.rewards.answers import find_answer, find_gold
from groupwise.rewards.equality import Undecided, decide

HERE = Path(__file__).parent
VERDICTS = {"1": 1.0, "0": 0.0, "-": None}
ASKED = {"roots, powers, constants", "expressions", "equations", "inequalities and intervals", "sets and lists", "words of LaTeX"}
"""Kinds with forms that math-verify is asked about."""


class Form(NamedTuple):
    kind: str
    accuracy: float | None
    exact: float | None
    number: float | None
    gold: str
    text: str
    why: str
    how: str


def forms() -> list[Form]:
    found, kind = [], ""
    for line in (HERE / "answer_forms.tsv").read_text(encoding="utf-8").split("\n"):
        if line.startswith("#") and "\t" not in line:
            kind = line[2:]
        elif line:
            first, second, third, gold, text, why, *how = line.split("\t")
            gold, text = gold.replace("⏎", "\n"), text.replace("⏎", "\n")
            found.append(Form(kind, VERDICTS[first], VERDICTS[second], VERDICTS[third], gold, text, why, "".join(how)))
    return found


FORMS = forms()


def scored(function, forms: list[Form], **more) -> list[float | None]:
    reasons = ["length" if form.how == "cut" else "eos" for form in forms]
    return function([form.text for form in forms], [form.gold for form in forms], finish_reasons=reasons, **more)


def test_the_file_holds_right_and_wrong_forms_of_every_kind():
    assert len({(form.gold, form.text, form.how) for form in FORMS}) == len(FORMS) >= 400
    counts = Counter((form.kind, form.accuracy) for form in FORMS)
    kinds = {form.kind for form in FORMS} - {"words"}
    assert len(kinds) >= 15 and min(counts[kind, verdict] for kind in kinds for verdict in (0.0, 1.0)) >= 5
    assert counts["words", None] >= 15 and all(form.why for form in FORMS)


@pytest.mark.slow
def test_accuracy_gives_every_form_its_verdict():
    prompts = [form.how.removeprefix("prompt: ") if form.how.startswith("prompt: ") else "" for form in FORMS]
    verdicts = scored(accuracy, FORMS, prompts=prompts)
    assert [(form, verdict) for form, verdict in zip(FORMS, verdicts, strict=True) if verdict != form.accuracy] == []


@pytest.mark.parametrize("kind", sorted({form.kind for form in FORMS} - ASKED))
def test_numbers_words_options_and_dates_need_no_process(kind):
    for form in FORMS:
        if form.kind == kind and not form.how and not any(sign in form.gold + form.text for sign in ("sqrt", "pi", "x", "√")):
            try:
                decide(find_gold(form.gold) or "", form.text)
            except Undecided:
                pytest.fail(f"{form.gold!r} and {form.text!r} are left to math-verify")


def test_exact_gives_every_form_its_verdict():
    verdicts = scored(exact, FORMS)
    assert [(form, verdict) for form, verdict in zip(FORMS, verdicts, strict=True) if verdict != form.exact] == []


def test_number_gives_every_form_its_verdict():
    verdicts = scored(number, FORMS)
    assert [(form, verdict) for form, verdict in zip(FORMS, verdicts, strict=True) if verdict != form.number] == []


@pytest.mark.slow
def test_a_gold_of_the_file_passes_the_check_of_golds_unless_it_is_words():
    readable = {form.gold: form.accuracy is not None for form in FORMS}
    problems = check_gold(list(readable))
    assert [
        (gold, problem) for gold, problem in zip(readable, problems, strict=True) if (problem is None) is not readable[gold]
    ] == []
    assert {problem for problem in problems if problem} == {
        "holds no answer",
        "is words, not mathematics: `exact` compares words",
    }


WAYS = (
    r"\boxed{%s}", "The answer is $%s$.", "so\n#### %s", "Thus\n$$\\boxed{ %s }.$$ Done.", "The final answer is: \\[ %s \\]",
    "**Answer:** $%s$", "<think>hm</think>\n<answer>%s</answer>", "So $x$ is\n\n$\\boxed{%s}$.",
)  # fmt: skip


@pytest.mark.slow
def test_answers_in_the_forms_of_math_are_right_in_all_ways_to_mark_them_and_no_other_is():
    golds = (HERE / "math_answers.txt").read_text(encoding="utf-8").splitlines()[1:]
    pairs = [(gold, way % gold) for gold in golds for way in WAYS]
    assert len(pairs) >= 1_000
    verdicts = accuracy([text for _, text in pairs], [gold for gold, _ in pairs])
    assert [pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict != 1.0] == []
    others = [(gold, rf"\boxed{{{golds[(n * 7 + 3) % len(golds)]}}}") for n, gold in enumerate(golds)]
    right = accuracy([text for _, text in others], [gold for gold, _ in others])
    assert [pair for pair, verdict in zip(others, right, strict=True) if verdict != 0.0] == []


# ---------------------------------------------------------------------------------- prose: letters, accents, quotes, line ends

SYLLABLES = st.sampled_from(["ba", "ko", "té", "mü", "ла", "ni"])
WORDS = st.lists(SYLLABLES, min_size=2, max_size=4).map("".join)
QUOTE = st.sampled_from(["", '"', "'", "“", "’", "«"])
LINE_END = st.sampled_from(["\n", "\r\n", "\r", "\u2028"])


@given(st.lists(WORDS, min_size=4, max_size=9), st.integers(0, 9), QUOTE, st.integers(0, 999))
def test_prose_has_no_answer_whatever_its_letters_accents_and_quotes(words, place, quote, gold):
    words.insert(place, str(gold))
    text = f"{quote}{' '.join(words)}"
    assert accuracy([text], [gold]) == [0.0]
    assert number([text], [gold]) == [1.0]


@given(st.lists(WORDS, min_size=1, max_size=9), LINE_END, QUOTE, st.integers(-999, 999))
def test_a_marked_answer_stands_whatever_the_letters_and_line_ends_around_it(words, end, quote, gold):
    closing = {"“": "”", "«": "»", "’": "’"}.get(quote, quote)
    prose = " ".join(words)
    marked = [f"{end}#### {gold}{end}", f".{end}Answer: {quote}{gold}{closing}{end}", rf"\boxed{{{gold}}}{end}{prose}"]
    texts = [prose + answer for answer in marked]
    for function in (accuracy, exact, number):
        assert function(texts, [gold] * 3) == [1.0] * 3
        assert function(texts, [gold + 1] * 3) == [0.0] * 3


@pytest.mark.parametrize(
    ("gold", "text"),
    [("café", "cafe\u0301"), ("a\nb", "a\r\nb"), ("it's", "it’s"), ('"a"', "“a”"), ("-5 a", "−5 a"), ("a\nb", "a\u2028b")],
)
def test_exact_reads_accents_line_ends_quotes_and_minus_signs_however_they_are_encoded(gold, text):
    assert exact([text], [gold]) == exact([gold], [text]) == [1.0]
    assert exact(["cafe"], ["café"]) == [0.0]


# ---------------------------------------------------------------------------------- cells of tables


@pytest.mark.parametrize(
    ("cell", "text", "verdict"),
    [
        (1e-05, "0.00001", 1.0), (1e-05, "-5", 0.0), (2.5e17, "250000000000000000", 1.0), (1e20, "100000000000000000000", 1.0),
        (4.0, "4", 1.0), (4.0, "4.0", 1.0), (0.1 + 0.2, "0.3", 1.0), (1 / 3, "0.333333333333333", 1.0), (7, "7", 1.0),
        (7, "8", 0.0),        (float("nan"), "5", None), (None, "5", None),
    ],
)  # fmt: skip
def test_a_number_of_a_table_is_the_number_and_nan_is_none(cell, text, verdict):
    assert accuracy([text], [cell]) == exact([text], [cell]) == number([text], [cell]) == [verdict]


def test_every_float_is_written_out_and_read_back():
    for value in (1e-300, -1e-7, 0.1, 123456.789, 1e15, 1.5e300, -0.0):
        text = as_text(value)
        assert "e" not in text and math.isclose(float(text), value, rel_tol=1e-14)
        assert accuracy([rf"\boxed{{{text}}}"], [value]) == [1.0]


# ---------------------------------------------------------------------------------- None


def test_a_gold_in_words_gives_none_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        verdicts = accuracy([r"\boxed{silent}", "42", r"\boxed{4}"], ["the word listen", "forty-two of them", "4"])
    assert verdicts == [None, None, 1.0]
    assert "the gold answer 'forty-two of them' is words, not mathematics: `exact` compares words, like 1 more" in caplog.text
    caplog.clear()
    accuracy([r"\boxed{silent}"], ["the word listen"])
    assert caplog.text == ""


def short_answers() -> list[list[str]]:
    lines = (HERE / "short_answers.tsv").read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def test_letters_factorials_powers_and_roots_are_neither_multiplied_nor_rounded():
    rows = short_answers()
    assert len({(gold, answer) for _, gold, answer, _ in rows}) == len(rows) >= 300
    verdicts = accuracy([rf"\boxed{{{answer}}}" for _, _, answer, _ in rows], [gold for _, gold, _, _ in rows])
    assert [row for row, verdict in zip(rows, verdicts, strict=True) if verdict != VERDICTS[row[0]]] == []


HARMONY = "<|channel|>analysis<|message|>{0}<|end|><|start|>assistant<|channel|>final<|message|>{1}<|return|>"
REASONING = {
    "most families": "<think>{0}</think>{1}", "opened by the prompt": "{0}</think>{1}", "EXAONE": "<thought>{0}</thought>{1}",
    "Mistral": "[THINK]{0}[/THINK]{1}", "Seed-OSS": "<seed:think>{0}</seed:think>{1}", "Kimi": "◁think▷{0}◁/think▷{1}",
    "Gemma 4": "<|channel>thought\n{0}<channel|>{1}", "Apertus": "<|inner_prefix|>{0}<|inner_suffix|>{1}",
    "Command": "<|START_THINKING|>{0}<|END_THINKING|><|START_RESPONSE|>{1}<|END_RESPONSE|>",
    "LongCat": "<longcat_think>{0}</longcat_think>{1}",
    "OpenThinker": "<|begin_of_thought|>{0}<|end_of_thought|>\n\n<|begin_of_solution|>{1}<|end_of_solution|>",
    "Granite": "Here is my thought process: {0} Here is my response: {1}", "Apriel": "{0}\n[BEGIN FINAL RESPONSE]\n{1}",
    "gpt-oss": HARMONY, "gpt-oss, a format": HARMONY.replace("final<|message|>", "final <|constrain|>json<|message|>"),
    "gpt-oss, a tool": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{}}<|call|>" + HARMONY,
    "gpt-oss, no special tokens": "analysis{0}assistantfinal{1}",
}  # fmt: skip
"""How families part reasoning from the final message."""
GUESS, RIGHT = r"Maybe \boxed{5}. The answer is 5.", r"It is \boxed{7}."


@pytest.mark.parametrize("function", [accuracy, exact, number])
@pytest.mark.parametrize("family", REASONING)
def test_the_final_message_is_judged_whatever_marks_part_it_from_reasoning(function, family):
    marks = REASONING[family]
    both, only_thought, plain = marks.format(GUESS, RIGHT), marks.format(GUESS, ""), marks.format(GUESS, "7")
    assert function([both, both, plain, plain, only_thought], ["7", "5", "7", "5", "5"]) == [1.0, 0.0, 1.0, 0.0, 0.0]


UNFINISHED = (
    "<think>{0}", "[THINK]{0}", "<seed:think>{0}", "◁think▷{0}", "<|channel>thought\n{0}", "<|inner_prefix|>{0}",
    "<|begin_of_thought|>{0}",
    "<|channel|>analysis<|message|>{0}", "analysis{0}",
    "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>commentary<|message|>{0}",
)  # fmt: skip


@pytest.mark.parametrize("function", [accuracy, exact, number])
@pytest.mark.parametrize("marks", UNFINISHED)
def test_a_guess_in_reasoning_that_does_not_end_is_no_answer(function, marks):
    text = marks.format(GUESS)
    assert function([text, text], ["5", "5"], finish_reasons=["eos", "length"]) == [0.0, 0.0]


@pytest.mark.parametrize(
    "text", ["analysis of the data: 7", "finally 7", "Here is my thought process: 3 + 4. The answer is 7", "final answer: 7"]
)
def test_words_that_only_resemble_marks_of_reasoning_are_read(text):
    assert number([text], ["7"]) == [1.0]


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"\boxed{\text{5 apples}}", "5"), (r"\boxed{\mathrm{5\ apples}}", "5"), (r"\boxed{\text{x = 5}}", "5"),
        (r"$\boxed 5$", "5"),
        (r"\boxed 5.", "5"), (r"so \boxed \frac{1}{2}.", "0.5"), (r"\(\boxed 5\)", "5"), (r"\boxed5", "5"), (r"\boxed -5", "-5"),
        (r"\boxed{\varnothing}", r"\emptyset"), (r"\boxed{\{\}}", r"\emptyset"), ("\\boxed{\u2205}", r"\varnothing"),
        (r"\boxed{\textbf{\$5}}", "5"), (r"\boxed{5}", r"\text{5 apples}"), (r"\boxed{\text{5 and 6}}", "5, 6"),
        (r"\boxed{\frac{1}{2^{10}}}", r"\frac{1}{1024}"),
    ],
)  # fmt: skip
def test_a_box_is_read_in_the_forms_that_TeX_has_for_it(text, gold):
    assert accuracy([text], [gold]) == [1.0]
    assert accuracy([text.replace("5", "4").replace("2", "3").replace("arnothing", "arphi")], ["7"]) == [0.0]


def test_a_box_without_braces_that_the_limit_cut_may_have_gone_on():
    assert accuracy([r"\boxed 4", r"\boxed 4 apples"], ["4", "4"], finish_reasons=["length"] * 2) == [0.0, 1.0]
    assert find_answer(r"use the \boxed command") == r"use the \boxed command"


# ---------------------------------------------------------------------------------- the reward that newcomers copy


def taught_rewards() -> dict[str, Callable[..., list[float]]]:
    """The recipe's, and those that the page on rewards and the notebook show."""
    page = (HERE.parents[1] / "docs/rewards.md").read_text(encoding="utf-8")
    block = page.split("```python file=my_rewards.py\n")[1].split("```")[0]
    cells = json.loads((HERE.parents[1] / "docs/notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    (cell,) = [source for one in cells if "def right(" in (source := "".join(one["source"]))]
    space: dict[str, Any] = {"re": re}
    exec(block + cell, space)
    notebook = partial(space["right"], log_metric=lambda name, value: None)
    return {"recipe": same_number, "page": space["last_number"], "notebook": notebook}


@pytest.mark.parametrize("where", ["recipe", "page", "notebook"])
def test_the_reward_that_teaches_a_real_model_compares_numbers_and_pays_no_truncated_completion(where):
    function = taught_rewards()[where]
    right = ["95", "95.0", "81 + 14 = 95.", "It is **95**, thanks", "1. 95"]
    wrong = ["3.95", "0.95", "-95", "= -95", "950", "195", "95.5", "none", "", "81 + 14 =", "95, or 96"]
    texts = [*right, *wrong]
    assert function(texts, ["95"] * len(texts), finish_reasons=["eos"] * len(texts)) == [1.0] * len(right) + [0.0] * len(wrong)
    assert function(texts, ["95"] * len(texts), finish_reasons=["length"] * len(texts)) == [0.0] * len(texts)
    assert function(["It is -5", "5"], ["-5"] * 2, finish_reasons=["eos"] * 2) == [1.0, 0.0]
