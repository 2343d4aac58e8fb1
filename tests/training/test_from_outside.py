"""Algorithms from one file of a user's: a part of each kind, a term with a teacher, one with a value; and parts in the table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import options
from groupwise.algorithms.table import ALGORITHMS
from groupwise.config.recipes import load_recipe
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, OptimizerSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.passes import BatchPass
from groupwise.runs.run import train
from groupwise.training.loss import Loss
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.recorded_rollouts import RecordedRollouts
from groupwise.training.samples import weigh

OUTSIDE = '''
from dataclasses import dataclass, replace

import numpy as np

from groupwise.algorithms.table import ALGORITHMS


@dataclass(frozen=True)
class Signed:
    """The sign of a reward's distance from its group's mean."""

    scale: float = 1.0
    compares_siblings = True

    def __call__(self, groups):
        return [self.scale * np.sign(group.reward - group.reward.mean()) for group in groups]


@dataclass(frozen=True)
class Banded:
    """The policy gradient, of tokens whose ratio has not left a band."""

    band: float = 1e-4
    per_token = True

    def __call__(self, terms):
        return -terms.advantage_M * terms.logp_M * (terms.log_ratio_M.detach().abs() <= self.band)


def halved(logp_M, old_logp_M, segment_M, segments):
    return 0.5 * (logp_M - old_logp_M)


halved.per_token = True


def per_prompt(tokens_R, prompt_R):
    return np.where(np.asarray(tokens_R) > 0, 0.01, 0.0)


def unsure(terms):
    return -terms.advantage_M * terms.logp_M * terms.entropy_M.detach()


def near_teacher(terms):
    return 0.5 * (terms.logp_M - terms.signals["teacher_logp"]).square()


near_teacher.reads, near_teacher.per_token = ("teacher_logp",), True


def absolute(terms):
    gap_M = (terms.value_M - terms.signals["return"]).abs()
    return gap_M.nan_to_num(nan=0.0)


absolute.reads = ("value",)


def without_rows(log_q_CV, log_p_CV):
    return (log_q_CV - log_p_CV).abs().mean()


MINE = replace(ALGORITHMS["grpo"], name="mine", credit=Signed(), surrogate=Banded(), ratio=halved, weights=per_prompt)
def calm(terms):
    return -0.01 * terms.entropy_M


CALM = replace(ALGORITHMS["grpo"], name="calm", extra=(calm,))
TAUGHT = replace(ALGORITHMS["grpo"], name="taught", extra=(near_teacher,))
VALUED = replace(ALGORITHMS["ppo"], name="valued", extra=(absolute,))
DISTILLED = replace(ALGORITHMS["distill"], name="distilled")
'''
JUDGE = "def judge(completions, **_):\n    return [float(len(text) % 3) for text in completions]\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with parts in the working directory, by a name that no test had before."""
    monkeypatch.chdir(tmp_path)
    name = f"outside_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(OUTSIDE)
    (tmp_path / "judges.py").write_text(JUDGE)
    return name


@pytest.fixture
def steps(tmp_path: Path, module: str, write_recipe: Callable) -> Callable[..., list]:
    """`steps(objective, **changes)` -> the steps of a run."""

    def run(row: str, **changes: object) -> list:
        path = write_recipe(tmp_path, row.lower(), steps=2, objective=f"{module}.py:{row}", **changes)
        return list(train(load_recipe(path)))

    return run


def test_facts_of_a_dataclass_of_ones_own_are_known(module: str) -> None:
    row = resolve(f"{module}:MINE", GroupSettings(), 8)
    assert row.token_level
    assert not row.needs.teacher
    assert resolve(f"{module}:TAUGHT", GroupSettings(), 8).needs.teacher
    assert resolve(f"{module}:VALUED", GroupSettings(), 8).needs.critic
    with pytest.raises(ConfigError, match="group_size must be at least 2 for 'mine'"):
        resolve(f"{module}:MINE", GroupSettings(group_size=1), 8)


def test_a_recipe_names_a_class_and_sets_its_fields(module: str) -> None:
    row = resolve("grpo", GroupSettings(credit={"name": f"{module}.py:Signed", "scale": 2}, surrogate=f"{module}:Banded"), 8)
    assert (options(row.credit)["scale"], options(row.surrogate)["band"], row.token_level) == (2.0, 1e-4, True)
    with pytest.raises(ConfigError, match=r"group.credit.scael: .*no such keyword \(it takes scale\) \(did you mean scale\?\)"):
        resolve("grpo", GroupSettings(credit={"name": f"{module}:Signed", "scael": 2}), 8)


def test_credit_ratio_surrogate_and_weights_of_ones_own_are_trained_and_recorded(steps: Callable) -> None:
    trained = steps("MINE", group={"updates_per_rollout": 2})
    first = trained[0]
    assert {float(a) for group in first.advantages for column in group for a in column} <= {-1.0, 0.0, 1.0}
    assert {w for group in first.columns["weight"] for column in group for w in column} == {0.01}
    clipped = np.concatenate([column for group in first.columns["clipped"] for column in group])
    assert set(clipped.tolist()) <= {0.0, 0.5}, "in the first pass every ratio is 1, in the second some have left the band"
    assert first.metrics["clip/low"] + first.metrics["clip/high"] == pytest.approx(float(clipped.mean()), abs=1e-6)


def test_a_term_with_a_teacher_is_added_to_the_loss(steps: Callable) -> None:
    """The surrogate's part is about 0, so the loss is the term's."""
    for step in steps("TAUGHT", teacher={"hint": "{answer} "}):
        assert "teacher/kl" in step.metrics
        assert step.metrics["loss/near_teacher"] == pytest.approx(step.metrics["loss"], abs=1e-6)
        assert abs(step.metrics["loss"]) > 1e-5


def test_a_term_of_entropies_alone_is_trained_and_measured(steps: Callable) -> None:
    (first, _) = steps("CALM")
    assert first.metrics["loss/calm"] < 0


def test_a_surrogate_may_read_entropies_without_a_bonus(steps: Callable, module: str) -> None:
    (first, _) = steps("MINE", group={"surrogate": f"{module}.py:unsure"})
    assert first.metrics["grad_norm"] > 0
    assert {"clipped", "gradient"} <= first.columns.keys()


def test_a_row_with_a_teacher_s_term_needs_one(steps: Callable) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.path is missing: the policy would learn from itself"):
        steps("TAUGHT")


def test_a_divergence_that_gives_one_number_for_all_tokens_is_refused(steps: Callable, module: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the divergence 'without_rows' \(outside_.*\.py:\d+\) gave a tensor of shape \(\), expected"
    ):
        steps("DISTILLED", teacher={"hint": "{answer} "}, group={"divergence": f"{module}.py:without_rows"})


def test_a_row_s_terms_are_fed_whatever_the_credit(steps: Callable) -> None:
    taught, valued = (
        steps("TAUGHT", teacher={"hint": "{answer} "}, group={"credit": "centered"}),
        steps("VALUED", critic={"lr": 0.1}, group={"credit": "centered"}),
    )
    assert "teacher/kl" in taught[0].metrics
    assert "value/mean" in valued[0].metrics


def test_a_row_that_reads_whole_distributions_is_refused_where_servers_teach(steps: Callable) -> None:
    """They would be the policy's own, from which nothing is learnt."""
    with pytest.raises(
        ConfigError, match=r"teacher\.servers tell the log-probs of tokens that were drawn, not whole distributions"
    ):
        steps("DISTILLED", teacher={"servers": ["http://127.0.0.1:1"]})


def test_a_term_reads_the_rewards_of_steps(tiny_policy: Callable, scored_group: Callable) -> None:
    def of_steps(terms: Terms) -> torch.Tensor:
        return terms.signals["process"].nan_to_num() * terms.logp_M

    of_steps.reads = ("process",)
    algorithm = replace(ALGORITHMS["grpo"], extra=(of_steps,))
    assert algorithm.needs.steps
    group = scored_group([1.0, 1.0], [3, 2])
    process = (np.array([np.nan, 1.0, 2.0]), np.array([0.5, np.nan]))
    nothing = [[np.zeros(3), np.zeros(2)]]
    samples = weigh([replace(group, signals={"process": process})], nothing, algorithm)
    (batch,) = pack(samples, 100)
    value, seen_M2 = Loss(algorithm=algorithm)(BatchPass(tiny_policy(), batch))
    rows_M = batch.trained_M
    expected = batch.weight_P[rows_M] * torch.tensor([0.0, 1.0, 2.0, 0.5, 0.0]) * seen_M2[:, 0]
    torch.testing.assert_close(value, expected.sum())


def test_the_loop_reaches_a_surrogate_in_five_calls(tiny_policy: Callable, scored_group: Callable) -> None:
    calls: list[str] = []

    def looking(terms: Terms) -> torch.Tensor:
        frame = sys._getframe(1)
        while not calls or calls[-1] != "train_online":
            calls.append(frame.f_code.co_qualname)
            frame = frame.f_back  # type: ignore[assignment]
        return -terms.advantage_M * terms.logp_M

    looking.per_token = True
    policy, group = tiny_policy(), GroupSettings(group_size=2)
    algorithm = replace(ALGORITHMS["grpo"], surrogate=looking)
    recorded = RecordedRollouts(lambda number: ([scored_group([1.0, 0.0], [3, 2])], 1), range(1, 2))
    optimizer = Optimizer(policy.model, OptimizerSettings(lr=1e-3), 1)
    next(train_online(policy, algorithm, recorded, optimizer, group=group, max_tokens_per_microbatch=100))
    assert calls == ["Algorithm.loss", "Loss.__call__", "packed_pass", "update", "train_online"]


def test_a_term_with_a_value_trains_the_critic(steps: Callable) -> None:
    first, second = steps("VALUED", critic={"lr": 0.1})
    assert first.metrics["value/mean"] == 0.0
    assert second.metrics["value/mean"] != 0.0


PLANTED = """
import json, sys
from dataclasses import dataclass, replace

import numpy as np

from groupwise.algorithms.parts import Credit, Ratio, Surrogate, Term, Weights
from groupwise.algorithms.table import ALGORITHMS, PARTS


@dataclass(frozen=True)
class Planted(Surrogate):
    '''A planted surrogate.'''

    width: float = 0.5
    per_token = True

    def __call__(self, terms):
        return -terms.advantage_M * terms.logp_M


@dataclass(frozen=True)
class Rooted(Credit):
    '''A planted credit, which asks a critic.'''

    reads = ("value",)

    def __call__(self, groups):
        return [group.reward for group in groups]


@dataclass(frozen=True)
class HalvedRatio(Ratio):
    '''A planted ratio.'''

    per_token = True

    def __call__(self, logp_M, old_logp_M, segment_M, segments):
        return 0.5 * (logp_M - old_logp_M)


@dataclass(frozen=True)
class Flat(Weights):
    '''Planted weights.'''

    def __call__(self, tokens_R, prompt_R):
        return np.where(np.asarray(tokens_R) > 0, 0.01, 0.0)


@dataclass(frozen=True)
class NearTeacher(Term):
    '''A planted term with a teacher.'''

    pull: float = 0.5
    reads = ("teacher_logp",)

    def __call__(self, terms):
        return self.pull * (terms.logp_M - terms.signals["teacher_logp"]).square()


@dataclass(frozen=True)
class Absolute(Term):
    '''A planted term with a value.'''

    reads = ("value",)

    def __call__(self, terms):
        return (terms.value_M - terms.signals["return"]).abs().nan_to_num(nan=0.0)


for kind, part in (("surrogate", Planted), ("credit", Rooted), ("ratio", HalvedRatio), ("weights", Flat)):
    PARTS[kind][part.name] = part
ALGORITHMS["planted"] = replace(ALGORITHMS["grpo"], name="planted", surrogate=Planted(), ratio=HalvedRatio(), weights=Flat())
ALGORITHMS["taught"] = replace(ALGORITHMS["grpo"], name="taught", extra=(NearTeacher(),))
ALGORITHMS["valued"] = replace(ALGORITHMS["grpo"], name="valued", extra=(Absolute(),))

from groupwise.config.recipes import make_recipe
from groupwise.config.schema import describe
from groupwise.errors import ConfigError
from groupwise.viewer.replays import checked, offered

base = {"model": {"scratch": {}}, "data": {"task": "sums"}, "rewards": [{"function": "accuracy"}], "steps": 1}


def refused(**changes):
    try:
        make_recipe(base | changes)
    except ConfigError as error:
        return str(error)
    return ""


def page():
    sys.path.insert(0, "DOCS")
    import generate

    return generate.algorithms_page()


print(json.dumps({
    "torch": "torch" in sys.modules,
    "accepted": refused(objective="planted", group={"surrogate": {"width": 2}}),
    "width": refused(objective="planted", group={"surrogate": {"widht": 2}}),
    "critic": refused(objective="grpo", group={"credit": "rooted", "group_size": 1}, critic={"lr": 0.1}),
    "without": refused(objective="grpo", group={"surrogate": "planted"}, critic={"lr": 0.1}),
    "teacher": refused(objective="taught", teacher={"hint": "{answer} "}),
    "untaught": refused(objective="planted", teacher={"hint": "{answer} "}),
    "valued": refused(objective="valued", critic={"lr": 0.1}),
    "config": [describe(key) for key in ("objective", "group.credit", "group.ratio", "group.surrogate", "group.weights")],
    "offered": offered(),
    "change": checked("objective=planted; group.surrogate.width=1"),
    "page": page(),
}))
"""


@pytest.mark.slow
def test_what_is_planted_in_the_table_is_known_everywhere(tmp_path: Path) -> None:
    """One row and two parts, said once: configuration, viewer and documentation know them and their facts."""
    docs = Path(__file__).parents[2] / "docs"
    done = subprocess.run(
        [sys.executable, "-c", PLANTED.replace("DOCS", str(docs))], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    told = json.loads(done.stdout)
    assert not told["torch"]
    assert told["accepted"] == told["critic"] == told["teacher"] == told["valued"] == ""
    assert "teacher is for those that learn from one" in told["untaught"]
    planted = ("planted, taught, valued.", "rooted.", "halved.", "planted.", "flat.")
    assert [name for name, text in zip(planted, told["config"], strict=True) if name not in text] == []
    assert "planted has no such keyword (it takes width) (did you mean width?)" in told["width"]
    assert "critic is for credits that ask one" in told["without"]
    assert "planted" in told["offered"]["objectives"]
    assert told["offered"]["options"]["planted"] == ["width"]
    assert "rooted" not in told["offered"]["parts"]["credit"], "it asks a critic, which a replay has not"
    assert told["change"] == ["objective=planted", "group.surrogate.width=1"]
    assert "| `planted(width=0.5)` | A planted surrogate. |" in told["page"]
    assert "| `halved` | A planted ratio. |" in told["page"]
    assert "| `flat` | Planted weights. |" in told["page"]
    assert "[`planted`](algorithms/planted.md)" in told["page"]
    assert "`near_teacher(pull=0.5)`" in told["page"], "an extra term stands in its row"
    assert "`absolute`" in told["page"]
