"""The built-in reward functions: formulas, edges, and TRL's own functions as the reference where they mean the same."""

from __future__ import annotations

import json
import os
import random

import pytest

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.accuracy import accuracy, check_gold, exact, number
from groupwise.rewards.format import regex, tags, think_format
from groupwise.rewards.length import cosine_length, repetition, soft_overlong
from groupwise.rewards.registry import builtin_function

GSM8K = [
    "Janet sells 16 - 3 - 4 = <<16-3-4=9>>9 duck eggs a day.\nShe makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18",
    "He pays 70,000 in all.\n#### 70,000",
    "She is 3 years younger, so\n#### -3",
    "Half of 5 is 5/2=<<5/2=2.5>>2.5\n#### 2.50",
    "That is $1,080 a year.\n#### $1,080",
]


def test_gsm8k_answers_score_one_against_themselves_and_zero_against_others():
    assert accuracy(GSM8K, GSM8K) == number(GSM8K, GSM8K) == exact(GSM8K, GSM8K) == [1.0] * len(GSM8K)
    others = GSM8K[1:] + GSM8K[:1]
    assert accuracy(GSM8K, others) == number(GSM8K, others) == exact(GSM8K, others) == [0.0] * len(GSM8K)
    assert accuracy([r"\boxed{18}", r"<think>\boxed{7}</think>\boxed{70000}", "The answer is -3.0."], GSM8K[:3]) == [1.0] * 3
    assert check_gold(GSM8K) == [None] * len(GSM8K)


@pytest.mark.parametrize("split", ["train", "test"])
def test_solutions_in_the_form_of_gsm8k(gsm8k, split):
    golds = [json.loads(line)["answer"] for line in (gsm8k / f"{split}.jsonl").read_text().splitlines()]
    assert len(golds) >= 100 and all("<<" in gold and "####" in gold for gold in golds)
    for function in (accuracy, number, exact):
        assert function(golds, golds) == [1.0] * len(golds)
    assert check_gold(golds) == [None] * len(golds)


def test_accuracy_gold_of_other_types():
    assert accuracy(["#### 4", r"\boxed{0.5}", "#### 4"], [4, 0.5, None]) == [1.0, 1.0, None]


def test_exact_and_number():
    assert exact(["Paris", " paris ", "It is\nParis"], ["Paris"] * 3) == [1.0, 0.0, 0.0]
    assert exact([" paris "], ["Paris"], ignore_case=True) == [1.0]
    assert exact(["1.0"], ["1"]) == [0.0]
    assert exact(["x"], [""]) == [None]
    assert exact(["The answer is 5"], ["The answer is 5"]) == [1.0]
    assert number(["it costs $1,234.00 now", "no number", r"\boxed{x = 7} not 8"], ["1234", "1", "7"]) == [1.0, 0.0, 1.0]
    assert number(["5"], ["no number"]) == [None]


def test_p20_a_think_block_opened_by_the_template_counts_as_opened():
    prefilled = "<|user|>2+2?<|assistant|><think>\n"
    assert think_format([prefilled] * 3, ["four</think>4", "<think>four</think>4", "four"]) == [1.0, 0.0, 0.0]
    mentioned = "Reason between <think> and </think>."
    closed = "<|assistant|><think>\n\n</think>\n\n"
    assert think_format([mentioned, closed], ["four</think>4", "four</think>4"]) == [0.0, 0.0]
    assert tags([prefilled], ["a</think><answer>4</answer>"]) == [1.0]


def test_tags():
    texts = ["<a>1</a>", "<a><a>1</a>", "", "</a>"]
    assert tags([""] * 4, texts, tags=["a"]) == [1.0, 0.5, 0.0, 0.5]


@pytest.mark.slow
def test_regex_and_its_guards():
    assert regex(["ab\ncd", "cd"], pattern="^cd$", flags="m") == [1.0, 1.0]
    assert regex(["ab1", "1"], pattern=r"\d", mode="fullmatch") == [0.0, 1.0]
    assert regex([" " * 60_000 + "x"], pattern="x") == [0.0]  # beyond the 50,000 characters that are read
    with pytest.raises(RewardError, match=r"needs more than 1 s for '\(a\|aa\)\+\$' on a completion of 41 characters"):
        regex(["a" * 40 + "b"], pattern="(a|aa)+$")


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("soft_overlong", {"max_tokens": 10, "cache": 0}, "needs 0 < cache <= max_tokens"),
        ("soft_overlong", {"max_tokens": 10, "cache": 11}, "needs 0 < cache <= max_tokens"),
        ("cosine_length", {"max_tokens": 0}, "needs max_tokens > 0"),
        ("cosine_length", {"max_tokens": 9, "right": [1.0, 0.5]}, r"needs right = \[low, high\]"),
        ("repetition", {"n": 0}, "needs n >= 1"),
        ("repetition", {"penalty": 1.0}, "penalty < 0"),
        ("regex", {"pattern": "("}, "cannot compile"),
        ("regex", {"pattern": "a", "mode": "match"}, "'search' or 'fullmatch'"),
        ("tags", {"tags": "think"}, "needs a list"),
    ],
)
def test_bad_arguments_are_refused_without_completions(name, arguments, said):
    function = builtin_function(name)
    empty = {key: [] for key in ("prompts", "completions", "completion_ids", "gold") if key in function.__code__.co_varnames}
    with pytest.raises(ConfigError, match=said):
        function(**empty, **arguments)


def test_soft_overlong_is_the_formula():
    lengths = range(130)
    values = soft_overlong([[1] * n for n in lengths], max_tokens=100, cache=25)
    for n, value in zip(lengths, values, strict=True):
        expected = 0.0 if n <= 75 else (75 - n) / 25 if n <= 100 else -1.0
        assert value == pytest.approx(expected, abs=1e-15)


def test_cosine_length_bounds_are_swapped_when_wrong():
    ids = [[], [1] * 50, [1] * 100, [1] * 200]
    assert cosine_length(["4"] * 4, ids, ["4"] * 4, max_tokens=100) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert cosine_length(["5"] * 4, ids, ["4"] * 4, max_tokens=100) == pytest.approx([-1.0, -0.75, -0.5, -0.5])
    assert cosine_length(["5"], [[1]], [""], max_tokens=100) == [None]
    assert cosine_length(["4"] * 2, [[], [1] * 100], ["4"] * 2, max_tokens=100, right=(1.0, 1.0)) == [1.0, 1.0]


# ------------------------------------------------------------------------------------------ against TRL's own functions


def test_trl_think_format():
    trl = pytest.importorskip("trl.rewards")
    rng = random.Random(0)
    parts = ["<think>", "</think>", "a", "\n", " ", "<thin", "4"]
    texts = ["".join(rng.choices(parts, k=rng.randint(0, 7))) for _ in range(3_000)]
    texts += ["<think>" + text for text in texts]
    theirs = trl.think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    assert think_format([""] * len(texts), texts) == theirs
    assert 0 < sum(theirs) < len(theirs)


def test_trl_soft_overlong_repetition_cosine():
    trl = pytest.importorskip("trl.rewards")
    rng = random.Random(0)
    ids = [[rng.randint(0, 3) for _ in range(rng.randint(0, 120))] for _ in range(500)]
    assert soft_overlong(ids, max_tokens=100, cache=30) == trl.get_soft_overlong_punishment(100, 30)(ids)
    for n in (1, 2, 3, 5):
        assert repetition(ids, n=n, penalty=-0.5) == pytest.approx(trl.get_repetition_penalty_reward(n, -0.5)(ids))
    texts = [r"\boxed{4}" if rng.random() < 0.5 else r"\boxed{5}" for _ in ids]
    chat = [[{"role": "assistant", "content": text}] for text in texts]
    theirs = trl.get_cosine_scaled_reward(max_len=100)(chat, ["4"] * len(ids), ids)
    assert cosine_length(texts, ids, ["4"] * len(ids), max_tokens=100) == pytest.approx(theirs)


@pytest.mark.slow
def test_trl_accuracy():
    trl = pytest.importorskip("trl.rewards")
    answers = [
        "4",
        "-4",
        "1,234",
        r"\frac{1}{3}",
        r"\frac{2}{6}",
        "0.333333",
        r"\sqrt{12}",
        r"2\sqrt{3}",
        r"x^2+2x+1",
        r"(x+1)^2",
        r"\{1,2\}",
    ]
    golds = ["4", "1234", r"$\frac{1}{3}$", r"$2\sqrt{3}$", r"$(x+1)^2$", r"\boxed{\{2,1\}}", "", "The value is $4$"]
    pairs = [(f"Therefore the value is $\\boxed{{{answer}}}$.", gold) for answer in answers for gold in golds]
    theirs = trl.accuracy_reward([[{"role": "assistant", "content": text}] for text, _ in pairs], [gold for _, gold in pairs])
    ours = accuracy([text for text, _ in pairs], [gold for _, gold in pairs])
    assert [p for p, a, b in zip(pairs, ours, theirs, strict=True) if a != b] == []
    assert {None, 0.0, 1.0} == set(ours)


def test_importing_the_rewards_does_not_import_torch():
    import subprocess
    import sys

    modules = [
        "accuracy",
        "answers",
        "calls",
        "compose",
        "format",
        "length",
        "math_checker",
        "registry",
        "user_functions",
        "step_rewards",
    ]
    code = "import sys; " + "; ".join(f"import groupwise.rewards.{m}" for m in modules)
    code += "; assert not {'torch', 'transformers', 'sympy', 'math_verify', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
