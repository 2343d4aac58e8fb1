"""Parts of one's own: what they declare is known everywhere, and what they give is checked with a message that names them."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.algorithms import advantages, losses
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import describe, options
from groupwise.algorithms.table import ALGORITHMS
from groupwise.algorithms.user_parts import UserPart
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings
from groupwise.errors import ConfigError


def with_parts(**parts: Callable) -> Algorithm:
    return replace(resolve("grpo", GroupSettings(group_size=2), 8), **parts)


def wrapped(groups):
    return advantages.ReverseKl()(groups)


wrapped.reads = ("teacher_logp",)
wrapped.needs_reward = False


class WrappedGae(advantages.Gae):
    """A credit of ours, changed; its facts and options are inherited."""

    def __call__(self, groups):
        return [[2.0 * advantage_n for advantage_n in row] for row in super().__call__(groups)]


def without_whitening(groups):
    return [[-value_n for value_n in group.signals["value"]] for group in groups]


without_whitening.reads = ("value",)
without_whitening.compares_siblings = True


class Credit:
    """A credit that is an object."""

    reads = ("process",)
    compares_siblings = True

    def __call__(self, groups, *, power: float = 1.0):
        return [[r**power for r in group.reward] for group in groups]


def test_a_credit_of_ones_own_declares_what_it_needs() -> None:
    assert (with_parts(credit=wrapped).needs.teacher, with_parts(credit=wrapped).needs.reward) == (True, False)
    assert with_parts(credit=WrappedGae()).needs.critic
    assert with_parts(credit=without_whitening).needs.critic
    assert with_parts(credit=functools.partial(Credit(), power=2.0)).needs.steps
    plain = with_parts(credit=lambda groups: [])
    needs = plain.needs
    assert (needs.reference, needs.critic, needs.teacher, needs.steps) == (False, False, False, False)
    assert needs.reward


def test_a_part_that_reads_one_signal_may_name_it_without_a_tuple() -> None:
    def term(terms: losses.Terms) -> torch.Tensor:
        return terms.logp_M - terms.signals["teacher_logp"]

    term.reads = "teacher_logp"
    assert with_parts(extra=(term,)).needs.teacher_logp


def test_a_credit_that_does_not_whiten_needs_no_such_option(scored) -> None:
    group = scored([1.0, 0.0])
    group.signals["value"] = tuple(np.full(2, 0.25) for _ in range(2))
    (targets,) = with_parts(credit=without_whitening).returns([group])
    assert [target.tolist() for target in targets] == [[0.0, 0.0], [0.0, 0.0]]


def test_a_surrogate_of_ones_own_declares_that_it_is_token_by_token(random_terms) -> None:
    def mine(terms):
        return -terms.advantage_M * terms.logp_M

    assert not with_parts(surrogate=mine).token_level
    mine.per_token = True
    assert with_parts(surrogate=mine).token_level
    mine.folds_mismatch = True
    terms = random_terms((2, 2))
    terms = replace(terms, mismatch=losses.token_mismatch(torch.full((4,), 0.5), terms.segment_M, 2))
    torch.testing.assert_close(with_parts(surrogate=mine).loss(terms), mine(terms))


@pytest.fixture
def resolved(tmp_path, monkeypatch) -> Callable[..., Algorithm]:
    """`resolved(text, **group)`: a recipe's algorithm beside a file `my_parts.py` with this text."""

    def make(text: str, **group: object) -> Algorithm:
        (tmp_path / "my_parts.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        return resolve("grpo", GroupSettings(group_size=2, **group), 8)  # type: ignore[arg-type]

    return make


GIVES = [
    ("[g.reward - g.reward.mean() for g in groups]", None),
    ("[[torch.ones(len(r)) for r in g.rollouts] for g in groups]", None),
    ("None", "the credit 'f' (my_parts.py:2) gave None, expected, for each group, .* is there a return?"),
    ("np.zeros(7)", "the credit 'f' (my_parts.py:2) gave 7 values for 1 group,"),
    ("3.0", "the credit 'f' (my_parts.py:2) gave float 3.0, expected"),
    ("[[1.0]]", "the credit 'f' (my_parts.py:2) gave 1 value for 2 completions of prompt p"),
    ("[[np.zeros(5), 1.0]]", r"the credit 'f' (my_parts.py:2) gave an array of shape (5,) for completion 0 of prompt p (2 tokens)"),
    ("[['much', 1.0]]", "the credit 'f' (my_parts.py:2) gave str much for completion 0 of prompt p (2 tokens)"),
    ("[[1.0, float('nan')]]", "the credit 'f' (my_parts.py:2) gave nan for completion 1 of prompt p (2 tokens), whose reward is 0"),
    ("[[1.0, float('inf')]]", "the credit 'f' (my_parts.py:2) gave inf for completion 1 of prompt p"),
    ("1 / 0", "the credit 'f' (my_parts.py:2) raised ZeroDivisionError: division by zero (my_parts.py:3: return 1 / 0)"),
]


@pytest.mark.parametrize(("gives", "message"), GIVES)
def test_what_a_credit_of_ones_own_gives_is_checked(gives: str, message: str | None, resolved: Callable, scored) -> None:
    algorithm = resolved(f"import numpy as np, torch\ndef f(groups):\n    return {gives}\n", credit="my_parts.py:f")
    group = scored([1.0, 0.0])
    if message is None:
        (found,) = algorithm.advantages([group])
        assert all(isinstance(one, np.ndarray) and one.shape == (2,) and one.dtype == np.float64 for one in found)
        return
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")) as refused:
        algorithm.advantages([group])
    assert refused.value.key == "group.credit"


def test_a_group_of_a_run_is_named_by_its_row(resolved: Callable, scored) -> None:
    algorithm = resolved("def f(groups):\n    return [[1.0] for g in groups]\n", credit="my_parts.py:f")
    group = scored([1.0, 0.0])
    rollouts = tuple(replace(one, prompt=replace(one.prompt, id="0/72")) for one in group.rollouts)
    with pytest.raises(ConfigError, match=r"gave 1 value for 2 completions of row 72 \(epoch 0\), expected"):
        algorithm.advantages([replace(group, rollouts=rollouts)])


def test_a_completion_without_a_reward_may_have_no_advantage(resolved: Callable, scored) -> None:
    algorithm = resolved("def f(groups):\n    return [g.reward - 0.5 for g in groups]\n", credit="my_parts.py:f")
    assert [one.tolist() for one in algorithm.advantages([scored([1.0, None])])[0]] == [[0.5, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("ratio", "def f(logp, behavior, segment, segments):\n    pass", r"gave None, expected a tensor of shape \(4,\)"),
        ("ratio", "def f(logp, behavior, segment, segments):\n    return 1.0", "gave float 1.0, expected a tensor"),
        ("surrogate", "def f(terms):\n    return terms.logp_M.sum()", r"gave a tensor of shape \(\), expected a tensor of shape"),
        ("surrogate", "def f(terms):\n    return terms.logp_M.detach()", "gave numbers without a gradient"),
        ("surrogate", "def f(terms):\n    return terms.logp_M * float('nan')", "gave nan for a token whose log-prob is"),
        (
            "kl",
            "def f(logp, reference, log_ratio):\n    pass",
            r"gave None, expected a tensor of shape \(4,\), .* is there a return",
        ),
        (
            "kl",
            "def f(logp, reference, log_ratio):\n    return (logp - reference).mean()",
            r"gave a tensor of shape \(\), expected",
        ),
        (
            "surrogate",
            "def f(terms):\n    return terms.nothing",
            r"raised AttributeError: .* \(my_parts.py:2: return",
        ),
        (
            "surrogate",
            "def f(terms):\n    return terms.logp_M - terms.sampler_logp_M",
            r"raised AttributeError: .* \(my_parts.py:2: .*\): the log-probs of the sampler are called behavior_logp_M",
        ),
    ],
)
def test_what_a_ratio_a_surrogate_or_a_kl_of_ones_own_gives_is_checked(
    kind: str, text: str, message: str, resolved: Callable, random_terms
) -> None:
    algorithm = resolved(text, **{kind: "my_parts.py:f"}, **({"beta": 0.1} if kind == "kl" else {}))
    terms = random_terms((2, 2))
    with pytest.raises(ConfigError, match=rf"the {kind} 'f' \(my_parts.py:1\) {message}") as refused:
        algorithm.loss(replace(terms, reference_logp_M=terms.old_logp_M))
    assert refused.value.key == f"group.{kind}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(tokens, prompts):\n    pass", "gave None, expected a number for each of the 3 completions"),
        ("def f(tokens, prompts):\n    return [1.0]", "gave a list of 1, expected a number for each"),
        ("def f(tokens, prompts):\n    return 1 / tokens", "gave inf for completion 2"),
        ("def f(tokens, prompts):\n    return -tokens", "gave -1 for completion 0: give finite numbers, 0 or more"),
    ],
)
def test_what_weights_of_ones_own_give_is_checked(text: str, message: str, resolved: Callable) -> None:
    algorithm = resolved(text, weights="my_parts.py:f")
    with pytest.raises(ConfigError, match=rf"the weights 'f' \(my_parts.py:1\) {message}"), np.errstate(divide="ignore"):
        algorithm.token_weights(np.array([1, 2, 0]), np.array([0, 0, 1]))


@pytest.mark.parametrize("kind", ["credit", "ratio", "surrogate", "weights"])
def test_a_part_with_other_arguments_is_refused_before_the_first_step(kind: str, resolved: Callable) -> None:
    text = "def f(one, two, three):\n    return one\n"
    with pytest.raises(ConfigError, match=rf"group.{kind}: the {kind} 'f' \(my_parts.py:1\) is called with .* and nothing else: "):
        resolved(text, **{kind: "my_parts.py:f"})


def test_a_part_may_be_a_partial_or_an_object(resolved: Callable, scored) -> None:
    text = """
import functools

class Credit:
    reads = ("process",)
    def __call__(self, groups, *, power: float = 1.0):
        return [[r ** power for r in group.reward] for group in groups]

def f(groups, *, shift: float, scale: float = 1.0):
    return [group.reward * scale + shift for group in groups]

CREDIT, PART = Credit(), functools.partial(f, shift=0.5)
"""
    made = resolved(text, credit={"name": "my_parts.py:CREDIT", "power": "2"})
    assert (describe(made.credit), made.needs.steps) == ("Credit(power=2.0)", True)
    assert [one.tolist() for one in made.advantages([scored([3.0, 1.0])])[0]] == [[9.0, 9.0], [1.0, 1.0]]
    made = resolved(text, credit={"name": "my_parts:PART", "scale": 2})
    assert describe(made.credit) == "f(shift=0.5, scale=2.0)"
    with pytest.raises(ConfigError, match="input should be a valid number"):
        resolved(text, credit={"name": "my_parts:PART", "scale": "much"})


def test_a_part_may_be_any_class(resolved: Callable, scored) -> None:
    text = """
class Power:
    def __init__(self, power):
        self.power = power
    def __call__(self, groups):
        return [[r ** self.power for r in group.reward] for group in groups]
"""
    made = resolved(text, credit={"name": "my_parts.py:Power", "power": 2})
    assert [one.tolist() for one in made.advantages([scored([3.0, 1.0])])[0]] == [[9.0, 9.0], [1.0, 1.0]]
    with pytest.raises(ConfigError, match=r"group\.credit: Power needs a value for power"):
        resolved(text, credit="my_parts.py:Power")


def test_options_that_a_class_inherits_are_checked(resolved: Callable) -> None:
    text = """
from __future__ import annotations
from dataclasses import dataclass
from groupwise.algorithms.losses import Clipped

@dataclass(frozen=True)
class Mine(Clipped):
    share: float = 0.5
"""
    made = resolved(text, surrogate={"name": "my_parts.py:Mine", "low": "0.1", "share": 1})
    chosen = options(made.surrogate)
    assert (chosen["low"], chosen["share"]) == (0.1, 1.0)
    for wrong in ({"low": -3}, {"share": "much"}):
        with pytest.raises(ConfigError, match=rf"group\.surrogate\.{next(iter(wrong))}: input should be"):
            resolved(text, surrogate={"name": "my_parts.py:Mine", **wrong})


@pytest.mark.parametrize("annotation", ["np.NoSuch", "NoSuch", "int[float]", "an array"])
def test_an_annotation_that_means_nothing_at_run_time_checks_nothing(annotation: str, resolved: Callable, scored: Callable) -> None:
    text = f"""
import numpy as np
def credit(groups: {annotation!r}, *, factor=1.0):
    return [[factor * r for r in group.reward] for group in groups]
"""
    made = resolved(text, credit={"name": "my_parts.py:credit", "factor": 2.0})
    assert made.advantages([scored([3.0, 1.0])])[0][0].tolist() == [6.0, 6.0]


def test_an_option_that_follows_from_a_setting_may_be_null() -> None:
    settings = GroupSettings(group_size=2, weights={"name": "constant", "length": None})
    assert describe(resolve("grpo", settings, 8).weights) == "constant(length=8)"


def test_every_part_of_the_table_can_be_called_as_its_kind_is() -> None:
    for name in ALGORITHMS:
        resolve(name, GroupSettings(), 8)
    assert math.isfinite(len(ALGORITHMS))


ROWS = """
from dataclasses import replace
from groupwise.algorithms.table import ALGORITHMS
row = replace(ALGORITHMS["grpo"], name="row", {change})
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("surrogate='clipped'", "objective: surrogate of 'my_rows.py:row' is 'clipped': give the function or object itself"),
        ("extra=len", "objective: extra of 'my_rows.py:row' is <built-in function len>: give a tuple"),
        ("extra=('len',)", "give a tuple, extra=(my_term,)"),
    ],
)
def test_a_row_with_what_cannot_be_called_is_refused(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rows.py").write_text(ROWS.format(change=change))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve("my_rows.py:row", GroupSettings(), 8)


@pytest.mark.parametrize("part", ["f = lambda groups: []", "class F:\n    def __call__(self, groups): return []\nf = F()"])
def test_a_signal_that_does_not_exist_is_no_fact(part: str, resolved: Callable) -> None:
    with pytest.raises(ConfigError, match=r"reads 'values', which is no signal \(did you mean value\?\)"):
        resolved(f"{part}\nf.reads = ('values',)\n", credit="my_parts.py:f")


def test_log_probs_that_every_part_gets_need_no_declaration(resolved: Callable) -> None:
    with pytest.raises(ConfigError, match="reads 'reference_logp', which needs no declaration: leave it out"):
        resolved("def f(groups): return []\nf.reads = ('reference_logp',)\n", credit="my_parts.py:f")


def test_an_object_that_cannot_be_called_is_no_part(resolved: Callable) -> None:
    with pytest.raises(ConfigError, match="the surrogate is an object of F, which has no method __call__"):
        resolved("class F:\n    pass\n", surrogate="my_parts.py:F")


def test_who_reads_a_signal_without_declaring_it_hears_how_to(resolved: Callable, scored) -> None:
    credit = resolved("def f(groups):\n    return [g.signals['value'] for g in groups]\n", credit="my_parts.py:f")
    with pytest.raises(ConfigError, match=r"KeyError: 'value' .*: declare that it reads it: f.reads = \('value',\)"):
        credit.advantages([scored([1.0, 0.0])])


def test_who_reads_a_field_that_nothing_fills_hears_what_fills_it(resolved: Callable, random_terms) -> None:
    text = "def f(terms):\n    return terms.logp_M - terms.reference_logp_M\n"
    surrogate = resolved(text, surrogate="my_parts.py:f")
    with pytest.raises(ConfigError, match=r"'NoneType'.*reference_logp_M without a KL in the loss \(group.beta\)"):
        surrogate.loss(replace(random_terms((2, 2)), reference_logp_M=None))


def test_a_term_that_reads_values_must_depend_on_them(random_terms) -> None:
    def constant(terms: losses.Terms) -> torch.Tensor:
        return terms.advantage_M

    constant.reads = ("value",)
    terms = random_terms((2, 2))
    terms = replace(terms, logp_M=terms.logp_M.detach(), value_M=torch.zeros(4, requires_grad=True))
    with pytest.raises(ConfigError, match=r"the extra term 'constant' .* compute them from terms\.value_M") as refused:
        UserPart("extra", constant)(terms)
    assert refused.value.key == "objective"
