import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from groupwise.data.tasks import TASKS, make_task
from groupwise.data.tasks.addition import Addition, Sums
from groupwise.data.tasks.base import Generated, is_held_out
from groupwise.data.tasks.preferences import FRIENDLY, RUDE, Preferences, friendly, right
from groupwise.data.tokenizers import arithmetic_tokenizer
from groupwise.errors import ConfigError, DataError
from groupwise.rewards.code import program_in

GENERATED = list(TASKS)


def is_right(row):
    return row["completion"].endswith(f"\\boxed{{{row['answer']}}}")


def texts(row):
    """What the policy reads and what it is to write, one text for each message."""
    prompt = row["prompt"]
    return [*([prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]), row["completion"]]


# Every prompt of `guessing` is the same: its rows differ in what is to be guessed, and nothing can be held out.
@pytest.mark.parametrize("name", [name for name in GENERATED if name != "guessing"])
def test_rows_are_seeded_split_and_distinct(name):
    task = make_task(name)
    assert task.demonstrations(50, seed=1) == make_task(name).demonstrations(50, seed=1)
    assert task.demonstrations(50, seed=1) != task.demonstrations(50, seed=2)
    assert task.prompts(50, seed=1) != task.prompts(50, seed=2)
    held_out, prompts = task.held_out(200), task.prompts(500, seed=0)
    assert held_out[:20] == make_task(name).held_out(20)
    assert all(is_held_out(task.subject(row)) for row in held_out)
    assert not any(is_held_out(task.subject(row)) for row in prompts)
    subject = task.subject if name == "shapes" else lambda row: texts(row)[0]
    assert not any(is_held_out(subject(row)) for row in task.demonstrations(500, seed=0))
    assert len({(task.subject(row), row["prompt"]) for row in held_out}) == 200
    assert len({(task.subject(row), row["prompt"]) for row in prompts}) == 500


def test_a_guessing_game_is_seeded_and_asks_for_every_number_as_often():
    task = make_task("guessing")
    assert task.demonstrations(50, seed=1) == make_task("guessing").demonstrations(50, seed=1)
    assert task.demonstrations(50, seed=1) != task.demonstrations(50, seed=2)
    assert task.prompts(50, seed=1) != task.prompts(50, seed=2)
    assert sorted(row["secret"] for row in task.prompts(31 * 4, seed=0)) == sorted([*range(31)] * 4)
    assert [row["secret"] for row in task.held_out(200)] == [*range(31)]


# The calculator's calls are JSON, and the chat tasks are for a model that brings its tokenizer.
OTHERS = ("preferences", "calculator", "chat_sums", "chat_json", "chat_words", "programs", "repairs")


@pytest.mark.parametrize("name", [name for name in GENERATED if name not in OTHERS])
def test_everything_can_be_written_by_the_arithmetic_tokenizer_in_few_tokens(name):
    tokenizer = arithmetic_tokenizer()
    for row in make_task(name).demonstrations(300, seed=0):
        for text in texts(row):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids, text
            assert len(ids) <= 96, text


@pytest.mark.parametrize("name", ["addition", "sums", "arithmetic"])
def test_careful_demonstrators_are_always_right(name):
    task = make_task(name, {"slip": 0.0})
    assert all(map(is_right, task.demonstrations(300, seed=0)))


def test_addition_is_taught_as_well_as_the_chances_of_its_carries_say():
    rows = Addition().demonstrations(20_000, seed=0)
    # Digits are uniform: the first column carries with 0.45; the second with 0.45, or 0.55 if a carry came in and was remembered.
    unforgotten = 0.55 * (1 - 0.45 * 0.6) + 0.45 * 0.4 * (1 - 0.55 * 0.6)
    assert abs(sum(map(is_right, rows)) / len(rows) - (0.3 + 0.7 * unforgotten)) < 0.014  # 0.666, four standard deviations
    thinks = sum("<think>" in row["completion"] for row in rows) / len(rows)
    assert abs(thinks - 0.7) < 0.013
    assert all(is_right(row) for row in rows if "<think>" not in row["completion"])
    assert all(re.fullmatch(r"[1-9]\d\d\+[1-9]\d\d", row["prompt"]) for row in rows)
    assert all(sum(map(int, row["prompt"].split("+"))) == int(row["answer"]) for row in rows)


def test_demonstrators_who_are_told_the_answer_work_with_care():
    rows, others = (Addition(told=told).demonstrations(2000, seed=0) for told in (0.3, 0.0))
    told = [row for row in rows if not isinstance(row["prompt"], str)]
    assert abs(len(told) / len(rows) - 0.3) < 0.042
    for row in told:
        system, user = row["prompt"]
        assert (system["role"], user["role"], system["content"]) == ("system", "user", row["answer"])
        assert sum(map(int, user["content"].split("+"))) == int(row["answer"])
        assert row["completion"].startswith("<think>") and is_right(row)
    assert [row for row in rows if isinstance(row["prompt"], str)] == [
        other for row, other in zip(rows, others, strict=True) if isinstance(row["prompt"], str)
    ]
    with pytest.raises(ConfigError, match="told must be a number from 0 to 1"):
        make_task("addition", {"told": 2})


def test_sums_have_right_answers():
    for row in Sums(terms=5).prompts(200, seed=0):
        assert sum(map(int, row["prompt"].split("+"))) == int(row["answer"])


def test_references_of_programs_pass_their_tests_and_no_other_reference_does():
    """The tests are data: expected values are those of functions of ours."""
    rows = make_task("programs").demonstrations(200, seed=0)
    for row, other in itertools.pairwise(rows):
        cases = [(case["args"], case["expected"]) for case in json.loads(row["tests"])]
        source = program_in(row["completion"])
        assert source == row["answer"]
        given: dict = {}
        exec(source, given)  # a reference of ours
        assert all(given["f"](*args) == expected for args, expected in cases), row["prompt"]
        if other["answer"] != row["answer"]:
            exec(other["answer"], given)
            assert not all(_same(given["f"], args, expected) for args, expected in cases), (row, other)


def test_wrong_functions_of_repairs_fail_their_check_and_right_ones_pass_it():
    for row in make_task("repairs").prompts(100, seed=0):
        assert not _passes(row["files"]["solution.py"], row), row
        assert _passes(row["answer"], row), row


def _passes(source, row):
    """True where the check of a row passes, and all its hidden tests."""
    given: dict = {}
    exec(source, given)  # a function of ours
    check = row["files"]["check.py"].replace("from solution import f\n", "").replace('print("passed")\n', "")
    cases = [(case["args"], case["expected"]) for case in json.loads(row["tests"])]
    try:
        exec(check, given)
    except AssertionError:
        assert sum(not _same(given["f"], args, expected) for args, expected in cases) > 1
        return False
    return all(_same(given["f"], args, expected) for args, expected in cases)


def _same(function, args, expected):
    try:
        return function(*args) == expected
    except (TypeError, AttributeError):
        return False


def test_a_task_too_small_to_be_split_says_so():
    class One(Generated):
        def question(self, rng):
            return {"prompt": "2+2", "answer": "4"}

        def completion(self, row, rng):
            return "\\boxed{4}"

    with pytest.raises(DataError, match="One has no question held out: give it larger arguments"):
        One().held_out(5)


def test_arguments_are_checked():
    for arguments in ({"digits": 0}, {"digits": True}, {"blurt": -0.1}, {"slip": "often"}):
        with pytest.raises(ConfigError, match="task argument"):
            make_task("addition", arguments)
    with pytest.raises(ConfigError, match="terms must be an integer from 2"):
        make_task("sums", {"terms": 1})


def test_a_task_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"no built-in task 'countdown'; there are: addition, sums, arithmetic, .*chat_words"):
        make_task("countdown")


def test_completions_depend_on_the_generator_only():
    task = Addition()
    row = {"prompt": "567+789", "answer": "1356"}
    written = {task.completion(row, random.Random(seed)) for seed in range(60)}
    assert "\\boxed{1356}" in written
    assert "<think>7+9=16,6+8+1=15,5+7+1=13</think>\\boxed{1356}" in written
    assert "<think>7+9=16,6+8=14,5+7=12</think>\\boxed{1246}" in written
    assert len(written) == 5  # blurted, and the four ways of remembering two carries


def test_preferences_are_told_neither_by_length_nor_by_words(monkeypatch: pytest.MonkeyPatch):
    """Phrases of both tones are as long as each other; a bag of words finds the tone, and not who is right."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    from bag_of_words import bag_of_words  # type: ignore[import-not-found]

    assert [len(text.split()) for text in FRIENDLY] == [len(text.split()) for text in RUDE]
    assert len({*FRIENDLY, *RUDE}) == len(FRIENDLY) + len(RUDE)
    accuracy = {}
    for share in (0.0, 0.5, 1.0):
        task = Preferences(correctness=share)
        train, held_out = (
            [(row["chosen"], row["rejected"]) for row in rows] for rows in (task.pairs(800, 0), task.held_out_pairs(600))
        )
        gaps = bag_of_words(train, held_out)
        accuracy[share] = (gaps > 0).mean() + (gaps == 0).mean() / 2
        shorter = [len(chosen.split()) - len(rejected.split()) for chosen, rejected in held_out]
        told_by_length = np.mean(np.less(shorter, 0)) + np.mean(np.equal(shorter, 0)) / 2
        assert abs(told_by_length - 0.5) < 0.08  # four standard errors
    assert accuracy[0.0] > 0.95 and abs(accuracy[1.0] - 0.5) < 0.1 and 0.65 < accuracy[0.5] < 0.85


def test_the_sides_of_a_pair_differ_in_tone_or_in_being_right():
    rows = Preferences().pairs(400, seed=0)
    truth = {}
    for side in ("chosen", "rejected"):
        texts = [row[side] for row in rows]
        correct = right(texts, answer=[row["answer"] for row in rows], wrong=[row["wrong"] for row in rows])
        truth[side] = list(zip(correct, friendly(texts), strict=True))
    kinds = Counter(zip(truth["chosen"], truth["rejected"], strict=True))
    in_tone, right_of_friends, right_of_the_rude = ((1, 1), (1, 0)), ((1, 1), (0, 1)), ((1, 0), (0, 0))
    assert set(kinds) == {in_tone, right_of_friends, right_of_the_rude}
    assert abs(kinds[in_tone] / 400 - 0.5) < 0.1
    assert right(["5"]) == [None] and right(["It is DRY"], answer=["dry"], wrong=["wet"]) == [1.0]
    careless = Preferences(slip=0.3).demonstrations(1000, seed=0)
    correct = right([row["completion"] for row in careless], *([row[name] for row in careless] for name in ("answer", "wrong")))
    assert abs(sum(correct) / 1000 - 0.7) < 0.06 and abs(sum(friendly([row["completion"] for row in careless])) / 1000 - 0.5) < 0.07
    assert {row["prompt"] for row in Preferences().held_out_pairs(50)} == {row["prompt"] for row in Preferences().held_out(50)}


def test_arithmetic_has_all_operators_and_values_that_can_be_written():
    rows = make_task("arithmetic").prompts(3000, seed=0)
    kinds = Counter(row["operator"] for row in rows)
    assert set(kinds) == {"+", "-", "mixed"} and min(kinds.values()) > 300
    for row in rows:
        value = eval(row["prompt"], {"__builtins__": {}})  # our own text
        assert value >= 0 and float(row["answer"]) == pytest.approx(value, abs=1e-9)
        assert len(row["answer"].partition(".")[2]) <= 1
