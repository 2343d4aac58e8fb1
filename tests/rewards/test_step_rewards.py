"""Step rewards and step segmentation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.settings import RewardSettings
from groupwise.data.vocabulary import Vocabulary
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.compose import build_rewards
from groupwise.rewards.step_rewards import checked_steps, segment_steps

BYTES = Vocabulary([bytes([i]) for i in range(256)], frozenset())


@pytest.mark.parametrize(
    ("text", "ends"),
    [("", []), ("a", [0]), ("a\nb", [1, 2]), ("a\n\nb\n", [1, 4]), ("\n\na", [2]), ("\n", [0]), ("a\n \nb", [1, 4])],
)
def test_steps_by_newline(text, ends):
    assert segment_steps(list(text.encode()), BYTES.texts) == ends


def test_steps_end_at_the_token_that_completes_the_match():
    vocabulary = {1: "Step", 2: " one.\n", 3: "Step two.\nStep", 4: " three", 5: ""}
    decode = lambda ids: [vocabulary[i] for i in ids]  # noqa: E731
    assert segment_steps([1, 2, 3, 4, 5], decode) == [1, 2, 4]
    assert segment_steps([1, 2, 3, 4], decode, by="regex", pattern=r"two") == [2, 3]
    assert segment_steps([1, 2, 2], decode, by="tokens", ends=[2]) == [1, 2]


def test_long_completions_are_cut_in_one_pass():
    """Texts are asked for once, whatever the length: nothing is decoded prefix by prefix."""
    asked = []

    def texts(ids):
        asked.append(len(ids))
        return BYTES.texts(ids)

    ids = [65, 10] * 4000
    assert segment_steps(ids, texts) == list(range(1, 8000, 2))
    assert asked == [8000]


def test_characters_of_several_tokens():
    text = "é\nü"
    assert segment_steps(list(text.encode()), BYTES.texts) == [2, 4]


@given(st.lists(st.sampled_from([10, 32, 65, 66]), max_size=30), st.sampled_from(["newline", "regex", "tokens"]))
def test_every_token_belongs_to_one_step(ids, by):
    ends = segment_steps(ids, BYTES.texts, by=by, pattern="A" if by == "regex" else None, ends=[65])
    assert ends == sorted(set(ends))
    assert (ends[-1] == len(ids) - 1) if ids else ends == []


def test_bad_segmentations():
    with pytest.raises(ConfigError, match="'newline', 'regex' or 'tokens', got 'words'"):
        segment_steps([1], BYTES.texts, by="words")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot compile"):
        segment_steps([1], BYTES.texts, by="regex", pattern="(")
    with pytest.raises(ConfigError, match="need the ids"):
        segment_steps([1], BYTES.texts, by="tokens")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[(0, 1.0)]], "returned 1 lists, expected 2 lists"),
        ([1.0, 2.0], "returned list of float"),
        (None, "returned NoneType"),
        ([[(0, 1.0)], [3.0]], r"returned the step 3.0 for completion 0#1"),
        ([[(0, 1.0)], [(0, None)]], r"returned the step \(0, None\)"),
        ([[(0, float("nan"))], []], "returned the reward nan for a step of completion 0#0"),
        ([[(1, 1.0), (1, 1.0)], []], r"end tokens \[1, 1\] for completion 0#0: they rise from 0"),
        ([[(-1, 1.0)], []], r"end tokens \[-1\]"),
    ],
)
def test_bad_step_rewards(values, said):
    with pytest.raises(RewardError, match=said):
        checked_steps("f", values, ["0#0", "0#1"])


STEPS = """
from groupwise.rewards.step_rewards import process_reward
@process_reward
def steps(completions, completion_ids, scale=1.0):
    return [[(i, scale * i) for i in range(0, len(text), 2)] for text in completions]
@process_reward
def outside(completion_ids):
    return [[(len(ids), 1.0)] for ids in completion_ids]
def outcome(completions): return [1.0] * len(completions)
"""


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_process_rewards_become_a_signal_and_a_column(group, tmp_path, monkeypatch, timeout):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text(STEPS)
    settings = [
        RewardSettings(function="steps.py:steps", weight=2.0, args={"scale": 0.5}, timeout=timeout),
        RewardSettings(function="steps.py:outcome"),
    ]
    with build_rewards(settings, columns=[]) as rewards:
        (scored,) = rewards.score([group("abc", "", "d")])
    nan = np.nan
    expected = [[0.0, nan, 2.0, nan], [nan], [0.0, nan]]  # weight x reward at the ends, a last token for EOS
    for signal, column in zip(scored.signals["process"], expected, strict=True):
        np.testing.assert_array_equal(signal, column)
    np.testing.assert_array_equal(scored.rewards, [[1.0, 1.0], [nan, 1.0], [0.0, 1.0]])
    np.testing.assert_array_equal(scored.reward, [3.0, 1.0, 1.0])


def test_a_step_that_ends_outside_its_completion(group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps_outside.py").write_text(STEPS)
    rewards = build_rewards([RewardSettings(function="steps_outside.py:outside")], columns=[])
    with pytest.raises(RewardError, match=r"'outside' ends a step of completion 0 of row 0 .epoch 0. at token 3; it has 3 tokens"):
        rewards.score([group("ab")])
