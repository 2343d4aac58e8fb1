"""Several reward functions as one: user functions, their signatures, their results, their failures."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoders import encode_prompts

from groupwise.algorithms.advantages import BatchCentered, Centered, Decoupled, LeaveOneOut, Maxrl, Standardized, Whitened
from groupwise.config.settings import RewardSettings
from groupwise.data.sources import SourceRows
from groupwise.data.templates import Template
from groupwise.data.tokenizers import arithmetic_tokenizer
from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.compose import LiveReward, Rewards, build_rewards

FILES = itertools.count()
"""Names of modules: each is imported once in this process."""


@pytest.fixture
def functions(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Write the user's functions to a file of its own in the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(code: str) -> Path:
        path = Path(f"mine_{next(FILES)}.py")
        path.write_text(textwrap.dedent(code))
        return path

    return write


@pytest.fixture
def one(functions) -> Callable[..., Rewards]:
    """`one(code, columns, timeout=..., **args)`: the reward function `f` of this code."""

    def build(
        code: str, columns: tuple[str, ...] = (), *, timeout: float | None = None, weight: float = 1.0, **args: Any
    ) -> Rewards:
        spec = f"{functions(code)}:f"
        return build_rewards([RewardSettings(function=spec, args=args, timeout=timeout, weight=weight)], columns=columns)

    return build


def column(rewards: Rewards, *groups: Any) -> list[float]:
    return [value for scored in rewards.score(groups) for value in scored.rewards[:, 0].tolist()]


# ---------------------------------------------------------------------------------------------------- what is passed in


def test_trl_signature_gets_columns_per_completion_in_order(one, group):
    rewards = one(
        "def f(prompts, completions, answer, **kwargs):\n"
        "    assert set(kwargs) == {'completion_ids', 'level'}, kwargs\n"
        "    return [float(c == a) + l for p, c, a, l in zip(prompts, completions, answer, kwargs['level'], strict=True)]",
        ("prompt", "answer", "level"),
    )
    first = group("4", "5", id="0/0", prompt="2+2=", answer="4", level=10)
    second = group("1", "7", "7", id="0/1", text="3+4=", prompt="3+4=", answer="7", level=20)
    assert column(rewards, first, second) == [11.0, 10.0, 20.0, 21.0, 21.0]


def test_p19_ids_and_finish_reasons_for_those_who_ask(one, group):
    rewards = one(
        "def f(completions, completion_ids, prompt_ids, finish_reasons):\n"
        "    assert prompt_ids == [[7, 8]] * 2 and finish_reasons == ['eos', 'eos']\n"
        "    assert [type(i) for ids in completion_ids for i in ids] == [int] * 5\n"
        "    return [len(ids) for ids in completion_ids]"
    )
    assert column(rewards, group("4", "55")) == [2.0, 3.0]


def test_chat_rows_give_messages_to_user_functions_and_text_to_builtins(functions, group):
    path = functions(
        "def f(prompts, completions):\n"
        "    assert prompts[0][0] == {'role': 'user', 'content': '2+2='}\n"
        "    return [float(c[0]['content'] == '4' and c[0]['role'] == 'assistant') for c in completions]"
    )
    settings = [RewardSettings(function=f"{path}:f"), RewardSettings(function="think_format"), RewardSettings(function="exact")]
    rewards = build_rewards(settings, columns=["prompt", "answer"])
    chat = [{"role": "user", "content": "2+2="}]
    (scored,) = rewards.score([group("4", "t</think>4", text="<u>2+2=<a><think>", prompt=chat, answer="4")])
    np.testing.assert_array_equal(scored.rewards, [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert rewards.names == ("f", "think_format", "exact")


USER = {"role": "user", "content": "2+2="}


@pytest.mark.parametrize(
    ("row", "wording", "prompt"),
    [
        ({"prompt": "2+2="}, {}, "2+2="),
        ({"prompt": "2+2="}, {"chat": True, "system": "add"}, "2+2="),
        ({"a": "2", "prompt": "?"}, {"chat": True, "format": "{a}+{a}="}, "2+2="),
        ({"prompt": [USER]}, {}, [USER]),
        ({"prompt": [USER]}, {"system": "add"}, [{"role": "system", "content": "add"}, USER]),
        ({"messages": [USER, {"role": "assistant", "content": "4"}]}, {}, [USER]),
    ],
)
def test_user_functions_get_the_rows_text_or_messages_and_never_the_chat_template(group, row, wording, prompt):
    """A completion has the form of its prompt."""
    seen = []

    def f(prompts, completions):
        seen.extend([prompts[0], completions[0]])
        return [0.0 for _ in prompts]

    template = Template(tokenizer=arithmetic_tokenizer(), **wording)
    (asked,), _ = encode_prompts(SourceRows("rows", [row]), template, max_tokens=60)
    rollouts = [replace(rollout, prompt=asked) for rollout in group("4")]
    build_rewards([LiveReward(function=f, runs="here")], columns=list(row)).score([rollouts])
    assert seen == [prompt, "4" if isinstance(prompt, str) else [{"role": "assistant", "content": "4"}]]


@pytest.mark.parametrize("asked", ["completion", "completions"])
@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize("runs", ["file", "here"])
def test_fixed_arguments_are_copies_in_every_call(functions, group, prefix, asked, runs):
    one = "float(len(seen))" if asked == "completion" else "[float(len(seen))] * len(completions)"
    code = f"{prefix}def f({asked}, seen):\n    seen.append(1)\n    return {one}\n"
    given = {"seen": []}
    if runs == "file":
        settings: Any = RewardSettings(function=f"{functions(code)}:f", args=given)
    else:
        space: dict[str, Any] = {}
        exec(code, space)
        settings = LiveReward(function=space["f"], args=given, runs="here")
    with build_rewards([settings], columns=[]) as rewards:
        assert [column(rewards, group("4", "5", "6")) for _ in range(2)] == [[1.0] * 3] * 2
    assert given == {"seen": []}


@pytest.mark.parametrize("prefix", ["", "async "])
def test_functions_of_one_completion(one, group, prefix):
    rewards = one(
        f"{prefix}def f(completion, answer, prompt, *, bonus=0.0): return float(completion == answer) + bonus",
        ("answer",),
        bonus=0.5,
    )
    assert column(rewards, group("4", "5", answer="4"), group("9", id="0/1", answer="9")) == [1.5, 0.5, 1.5]


def test_callable_objects_partials_and_modules(functions, group):
    path = functions(
        """
        import functools
        class Length:
            def __call__(self, completion_ids, **kwargs): return [float(len(ids)) for ids in completion_ids]
        class Later:
            async def __call__(self, completions): return [2.0 for _ in completions]
        def scaled(completions, factor): return [factor] * len(completions)
        length, later, tripled = Length(), Later(), functools.partial(scaled, factor=3.0)
        """
    )
    settings = [
        RewardSettings(function=f"{spec}:{n}") for spec, n in [(path, "length"), (path.stem, "later"), (path.stem, "tripled")]
    ]
    (scored,) = build_rewards(settings, columns=[]).score([group("ab")])
    assert scored.rewards.tolist() == [[3.0, 2.0, 3.0]]


def test_the_gold_column_of_builtins(group):
    for columns, args in [(("solution",), {}), (("target",), {"column": "target"}), (("answer", "solution"), {})]:
        rewards = build_rewards([RewardSettings(function="accuracy", args=args)], columns=columns)
        row = dict.fromkeys(columns, "other") | {columns[0]: "4"}
        assert column(rewards, group("#### 4", "#### 5", **row)) == [1.0, 0.0]


# ---------------------------------------------------------------------------------------------------------- what is built


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "def f(completions, gold_answer): ...",
            "'f' asks for 'gold_answer', which the data do not have; columns: 'question', 'answer'",
        ),
        ("def f(completion, level, hint): ...", "asks for 'level', 'hint'"),
        ("def f(completions, trainer_stat): ...", "asks for 'trainer_stat'"),
        ("def f(answer): ...", "takes neither completions nor completion_ids"),
        ("def f(completions, /): ...", "positional-only parameter 'completions'"),
        ("g = 3", "has no function 'f'"),
        ("def ff(completions): ...", "did you mean 'ff'"),
    ],
)
def test_r10_a_signature_that_the_data_cannot_serve_is_refused_at_once(one, code, said):
    with pytest.raises(ConfigError, match=said):
        one(code, ("question", "answer"))


@pytest.mark.slow
def test_r10_defaults_and_arguments_stand_in_for_columns(one, group):
    assert column(one("def f(completions, hint=2.0): return [hint] * len(completions)"), group("4")) == [2.0]
    assert column(one("def f(completions, hint): return [hint] * len(completions)", hint=3), group("4")) == [3.0]
    with pytest.raises(ConfigError, match="'f' has no argument 'hnt'; it takes: 'hint'"):
        one("def f(completions, hint=2.0): ...", hnt=3)


def test_r10_builtins(group):
    with pytest.raises(ConfigError, match=r"'accuracy' compares with the column 'answer' or 'solution'.*columns: 'gold'"):
        build_rewards([RewardSettings(function="accuracy")], columns=["prompt", "gold"])
    with pytest.raises(ConfigError, match="compares with the column 'result'"):
        build_rewards([RewardSettings(function="number", args={"column": "result"})], columns=["answer"])
    with pytest.raises(ConfigError, match="no reward function 'acuracy'; did you mean 'accuracy'"):
        build_rewards([RewardSettings(function="acuracy")], columns=["answer"])
    with pytest.raises(ConfigError, match="'soft_overlong' asks for 'max_tokens', 'cache'"):
        build_rewards([RewardSettings(function="soft_overlong")], columns=[])
    with pytest.raises(ConfigError, match="needs 0 < cache"):
        build_rewards([RewardSettings(function="soft_overlong", args={"max_tokens": 5, "cache": 9})], columns=[])
    with pytest.raises(ConfigError, match="'repetition' has no argument 'size'; it takes: 'n', 'penalty'"):
        build_rewards([RewardSettings(function="repetition", args={"size": 5})], columns=[])


def test_r11_names_weights_and_empty_lists():
    twice = [RewardSettings(function="exact"), RewardSettings(function="exact", weight=0.5)]
    with pytest.raises(ConfigError, match="two reward functions have the name 'exact'"):
        build_rewards(twice, columns=["answer"])
    named = build_rewards([twice[0], RewardSettings(function="exact", name="again", weight=0.5)], columns=["answer"])
    assert (named.names, named.weights) == (("exact", "again"), (1.0, 0.5))
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"'exact' has weight {weight}"):
            build_rewards([RewardSettings(function="exact", weight=weight)], columns=["answer"])
    with pytest.raises(ConfigError, match="there is no reward function"):
        build_rewards([], columns=["answer"])


@pytest.mark.slow
def test_x10_code_comes_from_the_working_directory_or_an_installed_module(functions, tmp_path):
    outside = tmp_path.parent / f"outside_{os.getpid()}.py"
    outside.write_text("def f(completions): raise SystemExit('was run')")
    functions("")
    (tmp_path / "link.py").symlink_to(outside)
    for place in (str(outside), f"../{outside.name}", "link.py"):
        with pytest.raises(ConfigError, match="the file must lie in the working directory"):
            build_rewards([RewardSettings(function=f"{place}:f")], columns=[])
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.py"):
        build_rewards([RewardSettings(function="nowhere.py:f")], columns=[])
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        build_rewards([RewardSettings(function="no_such_module:f")], columns=[])


# ------------------------------------------------------------------------------------------------------ what is returned


@pytest.fixture(scope="module")
def returning(tmp_path_factory) -> Iterator[Rewards]:
    """The reward function `f` that returns what the column `result` says, as Python.  One process, for it imports torch."""
    folder = tmp_path_factory.mktemp("returning")
    (folder / "answers.py").write_text(
        "import numpy as np, torch\nasync def later(): return []\ndef f(completions, result): return eval(result[0])"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        rewards = build_rewards([RewardSettings(function="answers.py:f")], columns=["result"])
    with rewards:
        yield rewards


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("[1.0]", "'f' returned 1 reward for 2 completions, expected a list of 2: a number, or None, for each completion"),
        ("[1.0] * 3", "returned 3 rewards for 2 completions"),
        ("1.0", "returned float 1.0, expected a list of 2"),
        ("(1.0 for _ in completions)", "returned generator"),
        ("None", "returned None, expected"),
        ("'ab'", "returned str 'ab'"),
        ("{0: 1.0, 1: 2.0}", "returned dict"),
        ("['1', '0']", "returned str '1' for completion 0 of row 0 .epoch 0., expected a number or None"),
        ("[[1.0], [0.0]]", "returned list for completion 0 of row 0 "),
        ("np.zeros((2, 1))", r"returned an array of shape \(2, 1\)"),
        ("np.zeros(())", r"returned an array of shape \(\)"),
        ("torch.zeros(2, 2)", r"returned an array of shape \(2, 2\)"),
        ("[torch.zeros(3), 1.0]", "returned Tensor for completion 0 of row 0 "),
        ("[1j, 0]", "returned complex for completion"),
        ("later()", "returned coroutine.*declare it with async def"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_r09_bad_results_are_named_by_function_type_and_length(returning, group, result, said):
    with pytest.raises(RewardError, match=said):
        returning.score([group("4", "5", result=result)])


@pytest.mark.parametrize(
    "value", ["float('nan')", "float('inf')", "-float('inf')", "1e39", "np.float32('nan')", "torch.tensor(float('inf'))"]
)
def test_r06_a_reward_that_is_not_finite_is_an_error_and_not_none(returning, group, value):
    with pytest.raises(
        RewardError, match=r"'f' returned (-?inf|nan|1e\+39) for completion 1 of row 0 .epoch 0.: a reward is finite"
    ):
        returning.score([group("4", "5", result=f"[1.0, {value}]")])


@pytest.mark.parametrize(
    "result",
    [
        "[True, False]",
        "(1, 0)",
        "np.array([1.0, 0.0])",
        "np.array([True, False])",
        "np.array([1, 0], dtype=np.int8)",
        "[np.float32(1), np.bool_(False)]",
        "torch.tensor([1.0, 0.0], dtype=torch.bfloat16)",
        "torch.tensor([True, False])",
        "[torch.tensor(1.0, requires_grad=True), torch.tensor(0)]",
        "[np.array(1.0), 0]",
    ],
)
def test_r09_good_kinds_are_taken(returning, group, result):
    (scored,) = returning.score([group("4", "5", result=result)])
    assert scored.rewards.dtype == np.float64
    assert scored.rewards[:, 0].tolist() == [1.0, 0.0]


def test_p23_none_semantics(functions, group):
    path = functions(
        """
        def length(completions): return [None if c == "skip" else float(len(c)) for c in completions]
        def half(completions): return [None if c in ("skip", "part") else 1.0 for c in completions]
        """
    )
    settings = [RewardSettings(function=f"{path}:length", weight=2.0), RewardSettings(function=f"{path}:half", weight=-0.5)]
    (scored,) = build_rewards(settings, columns=[]).score([group("abc", "skip", "part")])
    np.testing.assert_array_equal(scored.rewards, [[3.0, 1.0], [np.nan, np.nan], [4.0, np.nan]])
    np.testing.assert_array_equal(scored.reward, [5.5, np.nan, 8.0])
    assert scored.weights == (2.0, -0.5)


@pytest.mark.parametrize("logged", [1.0, 0.0, -3.0])
@pytest.mark.parametrize("kept", [[1.0, None, 1.0, None], [1.0, 0.0, None, None], [None] * 4])
def test_a_reward_of_weight_0_turns_no_none_into_a_verdict(group, kept, logged):
    """Advantages are those of a run that does not log it, whatever the credit."""

    def judged(completions):
        return kept

    def measured(completions):
        return [logged] * len(completions)

    both = [LiveReward(function=judged, runs="here"), LiveReward(function=measured, weight=0.0, runs="here")]
    (alone,) = build_rewards(both[:1], columns=[]).score([group(*"abcd")])
    (beside,) = build_rewards(both, columns=[]).score([group(*"abcd")])
    np.testing.assert_array_equal(beside.reward, alone.reward)
    np.testing.assert_array_equal(np.isnan(beside.reward), [value is None for value in kept])
    for credit in (Standardized(), Centered(), LeaveOneOut(), Maxrl(), BatchCentered(), Decoupled(), Whitened(baseline=True)):
        for expected, advantages in zip(credit([alone])[0], credit([beside])[0], strict=True):
            np.testing.assert_array_equal(advantages, expected)


def test_rewards_that_are_only_logged_judge_nothing(group):
    def measured(completions):
        return [1.0] * len(completions)

    (scored,) = build_rewards([LiveReward(function=measured, weight=0.0, runs="here")], columns=[]).score([group("a", "b")])
    assert scored.rewards.tolist() == [[1.0], [1.0]]
    assert np.isnan(scored.reward).all()


def test_groups_keep_their_rollouts_and_order(one, group):
    rewards = one("def f(completions): return [float(c) for c in completions]")
    groups = [group("3", "1", id="0/0"), group("2", id="0/1"), group("9", "8", "7", id="0/2")]
    scored = rewards.score(groups)
    assert [s.reward.tolist() for s in scored] == [[3.0, 1.0], [2.0], [9.0, 8.0, 7.0]]
    assert [list(s.rollouts) for s in scored] == groups
    assert rewards.score([]) == []
    assert set(rewards.seconds) == {"f"}


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_r02_an_exception_names_function_completions_and_message(one, group):
    rewards = one("def f(completions): raise KeyError('no such key')")
    groups = [group(*"abcd", id="3/1"), group("e", id="3/2")]
    said = r"'f' raised KeyError: 'no such key' \(.*, line 1: .*\); on completions 0 of row 1 .epoch 3., 1 of .* \(5 in all\)"
    with pytest.raises(RewardError, match=said) as caught:
        rewards.score(groups)
    assert "in f\n" in str(caught.value.__cause__), "the traceback of the worker"


@pytest.mark.parametrize("prefix", ["", "async "])
def test_the_text_that_broke_a_function_of_one_completion_is_shown(one, group, prefix):
    said = r"on completion 1 of row 2 .epoch 0.; the completion: 'six\\x1b', the prompt: '3\+3='"
    rewards = one(f"{prefix}def f(completion): return float(completion)")
    with pytest.raises(RewardError, match=said) as caught:
        rewards.score([group("5", id="0/1", text="2+3="), group("6", "six\x1b", "7", id="0/2", text="3+3=")])
    assert "0 of row 2" not in str(caught.value)


@pytest.mark.parametrize("code", ["return 1 / 0", "for text in completions: pass\n    return 1 / 0"])
def test_a_function_of_many_completions_names_the_batch_and_blames_none(one, group, code):
    rewards = one(f"def f(completions):\n    {code}")
    with pytest.raises(RewardError, match=r"on completions 0 of row 1 .epoch 0., 1 of row 1 .epoch 0.$"):
        rewards.score([group("five", "six", id="0/1")])
    with pytest.raises(RewardError, match=r"on completion 0 of row 1 .epoch 0.; the completion: 'seven', the prompt"):
        rewards.score([group("seven", id="0/1")])


TEXTS = r"; prompts of text give completions of text, prompts of messages give messages"
MESSAGES = r"; prompts of messages give completions of messages: the text is completion\[0\]\[.content.\]"


@pytest.mark.parametrize(
    ("chat", "read", "hint"),
    [
        (False, 'c[0]["content"]', TEXTS), (False, 'c["content"]', TEXTS), (False, 'c[-1].get("content")', TEXTS),
        (True, "c.strip()", MESSAGES), (True, 're.findall("a", c)', MESSAGES),
        (False, 'c + 1', "$"), (True, 'c[0]["text"]', "$"), (False, "c.contents", "$"), (False, "int('x')", "$"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("single", [True, False])
def test_a_completion_taken_for_messages_or_for_text_is_explained(group, chat, read, hint, single):
    space: dict[str, Any] = {}
    many = f"def f(completions): return [len({read}) for c in completions]"
    one = f"def f(completion):\n    c = completion\n    return len({read})"
    exec(f"import re\n{one if single else many}", space)
    row = {"prompt": [USER]} if chat else {}
    rewards = build_rewards([LiveReward(function=space["f"], runs="here")], columns=[])
    said = rf"on completion 0 of row 0 \(epoch 0\)({hint}|; the completion.*)"
    with rewards, pytest.raises(RewardError, match=said) as caught:
        rewards.score([group("4", **row)])
    assert ("prompts of" in str(caught.value)) is (hint != "$")


@pytest.mark.parametrize(("read", "explained"), [('c[0]["content"]', True), ("c[0]", False)])
def test_an_empty_completion_taken_for_messages_is_explained(group, read, explained):
    space: dict[str, Any] = {}
    exec(f"def f(completions): return [len({read}) for c in completions]", space)
    rewards = build_rewards([LiveReward(function=space["f"], runs="here")], columns=[])
    with rewards, pytest.raises(RewardError, match="string index out of range") as caught:
        rewards.score([group("")])
    assert ("prompts of text give" in str(caught.value)) is explained


@pytest.mark.parametrize(
    "raised", ["ValueError('x' * 1_000_000)", "ValueError('\\x1b[2J\\u202e' * 100_000)", "KeyError('x' * 1_000_000)"]
)
def test_the_error_of_a_reward_is_shortened_and_steers_no_terminal(one, group, raised):
    with pytest.raises(RewardError, match="characters left out") as caught:
        one(f"def f(completion): raise {raised}").score([group("\x1b[2J")])
    said = str(caught.value)
    assert len(said) < 100_000 and said.isprintable()


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize("argument", ["completion", "completions"])
def test_r02_a_function_that_exits_does_not_end_the_run_as_if_all_were_well(one, group, prefix, argument):
    rewards = one(f"{prefix}def f({argument}):\n    raise SystemExit(0)\n")
    with pytest.raises(
        RewardError,
        match=r"the reward function 'f' raised .*SystemExit: 0 \(.*, line 2: raise SystemExit.*; on completion 0 of row 0\b",
    ):
        rewards.score([group("a", id="0")])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(:\n", r"SyntaxError: .*line 1"),
        ("import nosuchmodule\n", r"ModuleNotFoundError: No module named 'nosuchmodule' \(line 1\)"),
        ("\nx = 1 / 0\n", r"ZeroDivisionError: division by zero \(line 2\)"),
        ("raise SystemExit(0)\n", r"SystemExit: 0 \(line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_line(functions, code, said):
    path = functions(code)
    places = [path.name] if "ModuleNotFound" in said else [path.name, path.stem]
    for place in places:
        with pytest.raises(ConfigError, match=f"reward function '{place}:f': {place} cannot be imported: {said}"):
            build_rewards([RewardSettings(function=f"{place}:f")], columns=())


def test_a_file_that_takes_its_process_with_it_is_one_mistake(functions):
    path = functions("import os\nos._exit(9)\n")
    with pytest.raises(ConfigError, match=rf"'{path}:f': cannot be imported: worker died \(exit code 9\)$"):
        build_rewards([RewardSettings(function=f"{path}:{name}") for name in "fg"], columns=())


def test_an_async_function_that_ends_its_process_blames_no_single_completion(functions, group):
    path = functions(
        """
        import asyncio, os
        async def f(completion):
            await asyncio.sleep(0.05)
            if completion == "b":
                os._exit(7)
            await asyncio.sleep(3600)
        """
    )
    rewards = build_rewards([RewardSettings(function=f"{path}:f")], columns=())
    with (
        rewards,
        pytest.raises(RewardError, match=r"did not return: worker died \(exit code 7\); on completions 0 of row 0, 1 of row 0$"),
    ):
        rewards.score([group("a", "b", id="0")])


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize("timeout", [None, 60.0])
def test_r02_a_function_of_one_completion_names_the_one(one, group, prefix, timeout):
    rewards = one(f"{prefix}def f(completion): return 1 / (completion != 'c')", timeout=timeout)
    with pytest.raises(
        RewardError,
        match=r"'f' raised ZeroDivisionError.*; on completion 2 of row 1 .epoch 3.; the completion: 'c', the prompt: '2\+2='",
    ):
        rewards.score([group(*"abcd", id="3/1")])


HANGING = [
    "import time\ndef f(completions): time.sleep(3600)",
    "import asyncio\nasync def f(completions): await asyncio.sleep(3600)",
]


@pytest.mark.slow
@pytest.mark.parametrize("code", HANGING)
def test_r03_p63_a_call_out_of_time_says_nothing_and_a_second_one_ends_the_run(one, group, code, caplog):
    with one(code, timeout=0.5) as rewards:
        (scored,) = rewards.score([group("4", "5")])
        assert np.isnan(scored.rewards).all()
        assert "1 of 1 calls of the reward function 'f' had no result within 0.5 s; the last on completions 0 of row" in caplog.text
        with pytest.raises(RewardError, match=r"2 of 2 calls of the reward function 'f' .*; give it more time"):
            rewards.score([group("4", "5")])


LATE = """
import asyncio, time
async def hang():
    for _ in range(100): await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    clock = loop.time
    loop.time = lambda: clock() + 600.0
    await asyncio.sleep(3600)
"""
"""`hang`: lets all others go first, then puts the loop's clock ten minutes on, and goes on hanging.  Nobody waits, and no call that
needs a moment is late because the machine is busy."""


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "async "])
def test_r03_p63_one_slow_completion_costs_no_other(one, group, prefix):
    wait = "await hang()" if prefix else "time.sleep(3600)"
    code = f"{LATE}\n{prefix}def f(completion):\n    if completion == 'x': {wait}\n    return float(completion)"
    with one(code, timeout=60.0 if prefix else 5.0) as rewards:
        (scored,) = rewards.score([group("1", "x", "3")])
        assert scored.reward[[0, 2]].tolist() == [1.0, 3.0]
        assert np.isnan(scored.reward[1])
        rewards.score([group(*"1234567")])
        with pytest.raises(RewardError, match=r"2 of 13 calls .* the last on completion 0 of row 0 .epoch 0.;"):
            rewards.score([group("x", "1", "2")])


@pytest.mark.slow
def test_r03_timeouts_that_are_few_never_end_the_run(one, group):
    code = f"{LATE}\nasync def f(completion):\n    if completion == 'x': await hang()\n    return 1.0"
    with one(code, timeout=60.0) as rewards:
        for _ in range(3):
            (scored,) = rewards.score([group(*"123456789x")])
            assert np.isnan(scored.reward).tolist() == [False] * 9 + [True]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os\ndef f(completions): os._exit(7)", r"'f' did not return: worker died \(exit code 7\)"),
        ("def f(completions): raise ValueError('x')", r"'f' raised ValueError: x \(.*mine_.*line 1"),
        ("def f(completions): return 'x'", "'f' returned str 'x'"),
    ],
)
def test_r04_a_failure_in_a_worker_ends_the_run(one, group, code, said):
    with one(code, timeout=5.0) as rewards, pytest.raises(RewardError, match=said):
        rewards.score([group("4")])


def test_functions_with_a_timeout_keep_their_state_and_arguments(one, group):
    code = "calls = []\ndef f(completions, answer, start=0): calls.append(1); return [start + len(calls) + len(a) for a in answer]"
    with one(code, ("answer",), timeout=60.0, start=100) as rewards:
        assert column(rewards, group("4", answer="44")) == [103.0]
        assert column(rewards, group("4", answer="44")) == [104.0]


def test_builtins_with_a_timeout(group):
    with build_rewards([RewardSettings(function="exact", timeout=60.0)], columns=["answer"]) as rewards:
        assert column(rewards, group("4", "5", answer="4")) == [1.0, 0.0]


# ------------------------------------------------------------------------------------------------------- at the same time


@pytest.mark.slow
def test_r12_async_functions_run_side_by_side_and_in_order(functions, group):
    """Every call waits until all others have begun: one after the other they would wait for ever."""
    path = functions(
        """
        import asyncio, pathlib
        here = pathlib.Path(__file__).resolve().parent  # each function may be in a process of its own
        def begin(me):
            (here / f"{me}.begun").touch()
        async def others():
            while len(list(here.glob("*.begun"))) < 64 + 1 + 1:
                await asyncio.sleep(0.02)
        async def single(completion):
            begin(completion)
            await others()
            await asyncio.sleep(0.1 if completion == "7" else 0.0)
            return float(completion)
        async def batch(completions):
            begin("batch")
            await others()
            return [2 * float(c) for c in completions]
        def plain(completions):
            begin("plain")
            return [3 * float(c) for c in completions]
        """
    )
    rewards = build_rewards([RewardSettings(function=f"{path}:{name}") for name in ("single", "batch", "plain")], columns=[])
    groups = [group(*(str(8 * g + n) for n in range(8)), id=f"0/{g}") for g in range(8)]
    scored = rewards.score(groups)
    np.testing.assert_array_equal(np.concatenate([s.rewards for s in scored]), np.arange(64)[:, None] * [1.0, 2.0, 3.0])


def test_async_functions_keep_one_loop_and_work_inside_another(one, group):
    import asyncio

    rewards = one(
        "import asyncio\nseen = set()\n"
        "async def f(completions): seen.add(asyncio.get_running_loop()); return [len(seen)] * len(completions)"
    )

    async def inside() -> list[float]:
        return column(rewards, group("4"))

    assert [column(rewards, group("4")), asyncio.run(inside()), column(rewards, group("4"))] == [[1.0]] * 3


def test_an_async_call_beside_one_that_failed_has_ended_when_the_failure_is_told(group):
    import asyncio

    told = []

    async def f(completion: str) -> float:
        if completion == "bad":
            raise ValueError("no")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            told.append(completion)
        return 0.0

    rewards = build_rewards([LiveReward(function=f, runs="here")], columns=[])
    with pytest.raises(RewardError, match="'f' raised ValueError: no"):
        rewards.score([group("waits", "bad")])
    assert told == ["waits"]


@pytest.mark.parametrize("asked", ["completion", "completions"])
def test_an_async_function_that_is_cancelled_by_itself_is_the_one_that_failed(functions, group, asked):
    """And no other function of its process; the program that waits for it is not cancelled."""
    path = functions(f"import asyncio\nasync def fine(completion): return 1.0\nasync def f({asked}): raise asyncio.CancelledError")
    rewards = build_rewards([RewardSettings(function=f"{path}:{name}") for name in ("fine", "f")], columns=[])
    with pytest.raises(RewardError, match="'f' raised CancelledError"):
        rewards.score([group("4")])


def test_plain_and_async_functions_of_a_file_share_its_variables(functions, group):
    path = functions(
        """
        import os
        seen = []
        def plain(completions): seen.append(os.getpid()); return [float(len(seen))] * len(completions)
        async def later(completions): seen.append(os.getpid()); return [float(len(seen))] * len(completions)
        async def bounded(completions): return [float(len(set(seen)))] * len(completions)
        """
    )
    settings = [RewardSettings(function=f"{path}:{name}") for name in ("later", "plain")]
    with build_rewards([*settings, RewardSettings(function=f"{path}:bounded", timeout=60.0)], columns=[]) as rewards:
        assert [rewards.score([group("4")])[0].rewards.tolist() for _ in range(2)] == [[[2.0, 1.0, 1.0]], [[4.0, 3.0, 1.0]]]


@pytest.mark.slow
def test_an_async_function_that_holds_the_loop_is_late_alone(functions, group, monkeypatch):
    """Its deadline is its own timeout, whatever others of its process may take; these are called again."""
    monkeypatch.setattr("groupwise.rewards.calls.GRACE", 0.5)
    path = functions(
        """
        import pathlib, time
        async def patient(completions): return [1.0] * len(completions)
        async def holds(completions):
            pathlib.Path("held").touch()
            time.sleep(3600)
        """
    )
    settings = [RewardSettings(function=f"{path}:patient"), RewardSettings(function=f"{path}:holds", timeout=0.5)]
    with build_rewards(settings, columns=[]) as rewards:
        (scored,) = rewards.score([group("4")])
    np.testing.assert_array_equal(scored.rewards, [[1.0, np.nan]])


@pytest.mark.slow
def test_rewards_with_a_timeout_run_side_by_side(functions, group):
    """Each waits until all three have begun: one after the other the first would come to its timeout."""
    path = functions(
        """
        import os, pathlib, time
        here = pathlib.Path(__file__).parent
        def a(completions):
            (here / f"{os.getpid()}.begun").touch()
            while len(list(here.glob("*.begun"))) < 3:
                time.sleep(0.01)
            return [1.0] * len(completions)
        b = c = a
        """
    )
    settings = [RewardSettings(function=f"{path}:{name}", timeout=120.0) for name in "abc"]
    with build_rewards(settings, columns=[]) as rewards:
        (scored,) = rewards.score([group("4")])
    np.testing.assert_array_equal(scored.rewards, [[1.0, 1.0, 1.0]])
