"""The table of algorithms: what each row is, how a recipe changes it, and how the parts of a loss are put together."""

import math
import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch

from groupwise.algorithms import advantages, kl_estimators, loss_weights, losses
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import describe, fact, options
from groupwise.algorithms.table import ALGORITHMS, PARTS
from groupwise.algorithms.user_parts import UserPart
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings
from groupwise.errors import ConfigError


def terms_of(lengths=(3, 1, 4), *, seed=0, spread=0.4, requires_grad=True, **columns) -> Terms:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    total, segments = sum(lengths), len(lengths)
    segment_M = torch.repeat_interleave(torch.arange(segments), torch.tensor(lengths))
    old_M = -draw(total).abs()
    return Terms(
        logp_M=(old_M + spread * draw(total)).requires_grad_(requires_grad),
        old_logp_M=old_M,
        advantage_M=draw(segments)[segment_M],
        segment_M=segment_M,
        segments=segments,
        reference_logp_M=-draw(total).abs(),
        entropy_M=draw(total).abs().requires_grad_(requires_grad),
        **columns,
    )


PAPER = {
    "grpo": ("standardized", "token", "clipped(low=0.2, high=0.2)", "sequence_mean"),
    "dr_grpo": ("centered", "token", "clipped(low=0.2, high=0.2)", "constant"),
    "dapo": ("standardized", "token", "clipped(low=0.2, high=0.28)", "token_mean"),
    "bnpo": ("standardized", "token", "clipped(low=0.2, high=0.2)", "token_mean"),
    "gspo": ("standardized", "sequence_mean", "clipped(low=0.0003, high=0.0004)", "sequence_mean"),
    "luspo": ("standardized", "sequence_mean", "clipped(low=0.002, high=0.0025)", "sequence_sum"),
    "cispo": ("standardized", "token", "cispo(cap=5.0)", "token_mean"),
    "sapo": ("standardized", "token", "sapo(tau_pos=1.0, tau_neg=1.05)", "sequence_mean"),
    "vespo": ("standardized", "sequence_sum", "vespo(k_pos=2.0, lam_pos=3.0, k_neg=3.0, lam_neg=2.0)", "token_mean"),
    "gmpo": ("standardized", "token", "geometric(clip=0.4)", "sequence_mean"),
    "rloo": ("leave_one_out", "sequence_sum", "clipped(low=0.2, high=0.2)", "sequence_mean"),
    "reinforce_pp": ("whitened", "token", "clipped(low=0.2, high=0.2)", "token_mean"),
    "gdpo": ("decoupled", "token", "clipped(low=0.2, high=0.2)", "sequence_mean"),
    "reinforce": ("batch_centered", "token", "reinforce", "sequence_sum"),
    "reinforce_pp_baseline": ("whitened", "token", "clipped(low=0.2, high=0.2)", "token_mean"),
    "maxrl": ("maxrl", "token", "clipped(low=0.2, high=0.2)", "sequence_sum"),
    "gspo_token": ("standardized", "sequence_token", "clipped(low=0.0003, high=0.0004)", "sequence_mean"),
    "distill": ("nothing", "token", "silent", "token_mean"),
    "distill_sampled": ("reverse_kl", "token", "importance(drop=0.2)", "token_mean"),
    "minillm": ("reverse_kl", "token", "clipped(low=0.2, high=0.2)", "token_mean"),
    "ppo": ("gae", "token", "clipped(low=0.2, high=0.2)", "token_mean"),
}


@pytest.mark.parametrize("name", PAPER)
def test_each_preset_has_the_parts_its_paper_names(name):
    row = ALGORITHMS[name]
    assert (describe(row.credit).split("(")[0], describe(row.ratio), describe(row.surrogate), describe(row.weights)) == PAPER[name]
    assert row.name == name
    assert row.summary.endswith(".")
    assert row.equation


def test_every_row_has_its_case():
    assert set(PAPER) == set(ALGORITHMS)


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_ours_is_a_frozen_dataclass_by_its_name(kind):
    for name, part in PARTS[kind].items():
        assert (name, hash(part()) == hash(part()), part() == part()) == (part.name, True, True)
        assert (part.__doc__ or "").strip()


def test_dapo_resamples_dead_groups_and_masks_truncated_completions():
    assert [name for name, row in ALGORITHMS.items() if row.dead_groups == "refill"] == ["dapo"]
    assert [name for name, row in ALGORITHMS.items() if row.truncated == "mask"] == ["dapo"]
    assert {name for name, row in ALGORITHMS.items() if row.kl_place == "reward"} == {"rloo", "reinforce_pp", "ppo"}
    taught = {"distill", "distill_sampled", "minillm"}
    assert {name for name, row in ALGORITHMS.items() if row.needs.critic} == {"ppo"}
    assert {name for name, row in ALGORITHMS.items() if row.needs.teacher} == taught
    assert {name for name, row in ALGORITHMS.items() if not row.needs.reward} == taught
    assert {name for name, row in ALGORITHMS.items() if row.divergence is not None} == {"distill", "minillm"}
    credits = PARTS["credit"].items()
    assert {name for name, part in credits if not part.needs_reward} == {"reverse_kl", "nothing"}
    compares = {name for name, part in credits if fact(part(), "compares_siblings")}
    assert compares == {"standardized", "centered", "leave_one_out", "decoupled", "maxrl"}
    assert fact(advantages.Whitened(baseline=True), "compares_siblings")


def test_token_level_is_what_a_fused_head_may_use():
    assert {name for name, row in ALGORITHMS.items() if not row.token_level} == {
        "gspo",
        "gspo_token",
        "luspo",
        "vespo",
        "gmpo",
        "rloo",
    }
    assert not replace(ALGORITHMS["grpo"], off_policy_delta=0.1).token_level
    assert not replace(ALGORITHMS["grpo"], surrogate=lambda terms: terms.logp_M).token_level  # unknown functions: the safe answer


@pytest.mark.parametrize("name", ALGORITHMS)
def test_token_level_losses_add_up_over_chunks(name):
    """Loss and gradient of the whole micro-batch against chunks of 3 tokens that cut through completions."""
    row = replace(ALGORITHMS[name], beta=0.1, kl_place="loss", entropy_bonus=0.01, entropy_quantile=0.3)
    whole = terms_of()
    whole = replace(whole, forking_M=whole.entropy_M.detach() >= 0.4)
    weight_M = torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = (weight_M * row.loss(whole)).sum() - row.bonus(whole, 5)
    expected = torch.autograd.grad(total, (whole.logp_M, whole.entropy_M))

    def part(rows):
        columns = ("old_logp_M", "advantage_M", "segment_M", "reference_logp_M", "entropy_M", "forking_M")
        cut = {n: getattr(whole, n)[rows] for n in columns}
        terms = Terms(logp_M=whole.logp_M[rows], segments=3, **cut)
        return (weight_M[rows] * row.loss(terms)).sum() - row.bonus(terms, 5)

    found = sum(part(slice(start, start + 3)) for start in (0, 3, 6))
    gradients = torch.autograd.grad(found, (whole.logp_M, whole.entropy_M))
    same = all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(gradients, expected, strict=True))
    assert same == row.token_level
    if row.token_level:
        torch.testing.assert_close(found, total)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_permuting_tokens_and_completions_permutes_the_losses(name):
    row, terms = replace(ALGORITHMS[name], off_policy_delta=0.05), terms_of(requires_grad=False)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    relabel = torch.tensor([2, 0, 1])
    columns = {n: getattr(terms, n)[order] for n in ("logp_M", "old_logp_M", "advantage_M")}
    shuffled = Terms(segment_M=relabel[terms.segment_M][order], segments=3, **columns)
    torch.testing.assert_close(row.loss(shuffled), row.loss(terms)[order])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_completion_does_not_see_the_others(name):
    """Loss of a micro-batch of three completions == of each alone: any packing gives the same update."""
    row, terms = replace(ALGORITHMS[name], off_policy_delta=0.05, beta=0.1), terms_of(requires_grad=False)
    together = row.loss(terms)
    for s in range(3):
        rows = terms.segment_M == s
        columns = {n: getattr(terms, n)[rows] for n in ("logp_M", "old_logp_M", "advantage_M", "reference_logp_M")}
        alone = Terms(segment_M=torch.zeros(int(rows.sum()), dtype=torch.long), segments=1, **columns)
        torch.testing.assert_close(row.loss(alone), together[rows])


# ---- the order of the extras ---------------------------------------------------------------------------------------------------


def test_extras_multiply_the_surrogate_and_never_the_kl():
    terms = terms_of(seed=4, spread=1.0)
    terms = replace(terms, forking_M=terms.entropy_M.detach() >= 0.5)
    mismatch = losses.token_mismatch(torch.linspace(0.0, 2.0, 8, dtype=torch.float64), terms.segment_M, 3)
    terms = replace(terms, mismatch=mismatch)
    row = replace(ALGORITHMS["grpo"], beta=0.1, off_policy_delta=0.1, entropy_quantile=0.5)
    policy_M, kl_M = losses.Clipped()(terms), kl_estimators.K3()(terms.logp_M, terms.reference_logp_M, terms.log_ratio_M)
    keep_M, high_M = losses.off_policy_keep(terms, delta=0.1), terms.entropy_M >= 0.5
    assert keep_M.any()
    assert not keep_M.all()
    assert high_M.any()
    assert not high_M.all()
    torch.testing.assert_close(row.loss(terms), policy_M * keep_M * high_M * mismatch.weight_M + 0.1 * kl_M)


def test_vespo_takes_the_mismatch_into_its_own_weight():
    terms = terms_of()
    mismatch = losses.token_mismatch(torch.linspace(0.5, 2.0, 8, dtype=torch.float64), terms.segment_M, 3)
    folded = ALGORITHMS["vespo"].loss(replace(terms, mismatch=mismatch))
    # The same ratio, had the sampler's log-probs been the behaviour's: w = exp(l - b) exp(b - sampler).
    direct = ALGORITHMS["vespo"].loss(replace(terms, old_logp_M=terms.old_logp_M - mismatch.weight_M.log()))
    torch.testing.assert_close(folded, direct)


@pytest.mark.parametrize("ratio", [part() for part in PARTS["ratio"].values()])
def test_p29_the_kl_is_weighted_by_the_tokens_ratio_at_every_level(ratio):
    terms = terms_of()
    row = replace(ALGORITHMS["gspo"], ratio=ratio, kl=kl_estimators.K3Ratio())
    kl_M = replace(row, beta=0.3).loss(terms) - row.loss(terms)
    gap_M = terms.reference_logp_M - terms.logp_M
    token_ratio_M = (terms.logp_M - terms.old_logp_M).exp()
    torch.testing.assert_close(kl_M, 0.3 * token_ratio_M * (gap_M.exp() - gap_M - 1))


def test_the_entropy_bonus_is_the_mean_over_tokens_for_every_preset():
    for row in ALGORITHMS.values():
        terms = terms_of()
        (gradient,) = torch.autograd.grad(replace(row, entropy_bonus=0.01).bonus(terms, 8), terms.entropy_M)
        torch.testing.assert_close(gradient, torch.full((8,), 0.01 / 8, dtype=torch.float64))


def test_p26_every_preset_stays_finite_with_a_gap_of_100_nats():
    for row in ALGORITHMS.values():
        for dtype in (torch.float32, torch.float64):
            logp_M = torch.tensor([-150.0, -0.1, -100.1, -1.0], dtype=dtype, requires_grad=True)
            terms = Terms(
                logp_M=logp_M,
                old_logp_M=torch.tensor([-1.0, -150.0, -0.1, -1.0], dtype=dtype),
                advantage_M=torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=dtype),
                segment_M=torch.tensor([0, 0, 1, 2]),
                segments=3,
                reference_logp_M=torch.tensor([-50.0, -100.1, -0.1, -1.0], dtype=dtype),
            )
            for kl in (part() for part in PARTS["kl"].values()):
                loss = replace(row, beta=0.04, kl=kl, kl_place="loss").loss(terms).sum()
                (gradient,) = torch.autograd.grad(loss, logp_M)
                assert torch.isfinite(loss), (row.name, kl)
                assert torch.isfinite(gradient).all(), (row.name, kl)


def test_dead_completions_have_no_gradient_exactly_when_they_are_skipped():
    for row in ALGORITHMS.values():
        assert row.skips_dead == (not row.needs.critic and row.divergence is None)  # these learn from all of them
        terms = replace(terms_of(), advantage_M=torch.zeros(8, dtype=torch.float64))
        (gradient,) = torch.autograd.grad(row.loss(terms).sum(), terms.logp_M)
        assert not gradient.any()
    assert not replace(ALGORITHMS["grpo"], beta=0.04).skips_dead
    assert not replace(ALGORITHMS["grpo"], entropy_bonus=0.01).skips_dead
    assert replace(ALGORITHMS["rloo"], beta=0.04).skips_dead  # its KL is already in the advantages


# ---- a new surrogate takes one function and one row -----------------------------------------------------------------------------


def squared_trust(terms: Terms, *, width: float = 0.5) -> torch.Tensor:
    """The policy gradient with a quadratic price for leaving the sampler."""
    return -terms.advantage_M * terms.logp_M + terms.log_ratio_M.square() / width


def test_a_new_surrogate_is_one_function_and_one_row():
    row = Algorithm(name="mine", summary="Mine.", paper="", equation="-A l + r^2 / w", surrogate=partial(squared_trust, width=2.0))
    terms = terms_of()
    expected = -terms.advantage_M * terms.logp_M + (terms.logp_M - terms.old_logp_M).square() / 2
    torch.testing.assert_close(row.loss(terms), expected)
    assert describe(row.surrogate) == "squared_trust(width=2.0)"


def test_a_recipe_names_a_function_of_ones_own(monkeypatch):
    module = types.ModuleType("my_losses")
    module.squared_trust = squared_trust
    monkeypatch.setitem(sys.modules, "my_losses", module)
    chosen = resolve("grpo", GroupSettings(surrogate={"name": "my_losses:squared_trust", "width": "0.25"}), 64)
    assert options(chosen.surrogate) == {"width": 0.25}
    assert resolve("grpo", GroupSettings(surrogate="my_losses:squared_trust"), 64).surrogate == UserPart("surrogate", squared_trust)
    for wrong, message in (
        ("my_losses:square", "my_losses has no 'square'"),
        ("no_such_module:f", "cannot import"),
        ({"name": "my_losses:squared_trust", "widht": 1}, "did you mean width"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve("grpo", GroupSettings(surrogate=wrong), 64)


def test_a_function_of_the_working_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "credit_of_mine.py").write_text(
        "def half(groups):\n    return [[0.5 + 0 * o.tokens for o in g.rollouts] for g in groups]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "credit_of_mine", raising=False)
    assert resolve("grpo", GroupSettings(credit="credit_of_mine:half", group_size=1), 64).credit([]) == []


# ---- resolve ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_resolves_to_its_row(name):
    chosen = resolve(name, GroupSettings(), 256)
    row = ALGORITHMS[name]
    assert describe(chosen.surrogate) == describe(row.surrogate)
    assert (chosen.ratio, chosen.dead_groups, chosen.truncated, chosen.beta) == (row.ratio, row.dead_groups, row.truncated, 0.0)
    if isinstance(row.weights, loss_weights.Constant):
        assert options(chosen.weights) == {"length": 256}
    assert not chosen.needs.reference
    assert not chosen.needs.entropy


def test_a_credit_that_asks_a_critic_brings_the_value_loss_of_ppo():
    assert resolve("grpo", GroupSettings(credit="gae"), 8).extra == ALGORITHMS["ppo"].extra == (losses.ValueLoss(0.2, 0.1),)


def test_what_learns_from_no_advantages_drops_no_group_for_having_none():
    with pytest.raises(ConfigError, match="'distill' learns from no advantages, so drop would leave out every group"):
        resolve("distill", GroupSettings(dead_groups="drop"), 8)
    assert resolve("minillm", GroupSettings(dead_groups="drop"), 8).dead_groups == "drop"


def test_a_recipe_replaces_single_parts():
    group = GroupSettings(
        beta=0.04,
        kl="k2",
        credit={"name": "standardized", "ddof": 0, "eps": 0},
        ratio="sequence_token",
        surrogate={"name": "clipped", "low": 0.1, "delta": 2},
        weights="prompt_mean",
        dead_groups="drop",
        truncated="mask",
        entropy_bonus=0.001,
        entropy_quantile=0.8,
        off_policy_delta=0.5,
    )
    chosen = resolve("dapo", group, 64)
    assert describe(chosen.credit) == "standardized(ddof=0, eps=0.0, scale=group)"
    assert describe(chosen.surrogate) == "clipped(low=0.1, high=0.2, delta=2.0)"
    assert (chosen.ratio, chosen.weights, chosen.kl) == (losses.SequenceTokenRatio(), loss_weights.PromptMean(), kl_estimators.K2())
    assert (chosen.dead_groups, chosen.truncated, chosen.beta) == ("drop", "mask", 0.04)
    assert chosen.needs.reference
    assert chosen.needs.entropy
    assert chosen.needs.forking


def test_keywords_alone_change_the_presets_own_function():
    assert describe(resolve("dapo", GroupSettings(surrogate={"low": 0.1}), 64).surrogate) == "clipped(low=0.1, high=0.28)"
    assert describe(resolve("cispo", GroupSettings(surrogate={"cap": 3}), 64).surrogate) == "cispo(cap=3.0)"
    assert options(resolve("dr_grpo", GroupSettings(weights={"length": 100}), 64).weights) == {"length": 100}


def test_the_kl_of_rloo_goes_into_its_credit():
    chosen = resolve("rloo", GroupSettings(beta=0.05), 64)
    assert options(chosen.credit)["beta"] == 0.05
    assert (chosen.needs.reference, chosen.loss_beta, chosen.skips_dead) == (True, 0.0, True)
    plain = resolve("grpo", GroupSettings(beta=0.05, credit="leave_one_out"), 64)
    assert (options(plain.credit)["beta"], plain.loss_beta) == (0.0, 0.05)


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "cut"),
    [
        ("clipped", 1.5, 1.0, True),
        ("clipped", 1.5, -1.0, False),
        ("clipped", 0.5, -1.0, True),
        ("clipped", 0.5, 1.0, False),
        ({"name": "clipped", "delta": 2.0}, 3.0, -1.0, True),
        ({"name": "clipped", "delta": 2.0}, 1.5, -1.0, False),
        ({"name": "clipped", "dual": 3.0}, 4.0, -1.0, True),
        ({"name": "cispo", "cap": 2.0}, 4.0, 1.0, False),
        ({"name": "geometric", "clip": 0.1}, 1.5, 1.0, True),
        ({"name": "importance", "drop": 0.1}, 0.5, 1.0, True),
        ("sapo", 3.0, 1.0, False),
        ("reinforce", 3.0, 1.0, False),
    ],
)
def test_a_surrogate_says_itself_which_gradients_it_cuts(surrogate, ratio, advantage, cut):
    """CISPO caps a weight and cuts no gradient; two-sided and dual clipping cut gradients beyond a bound of their own."""
    algorithm = resolve("grpo", GroupSettings(surrogate=surrogate), 8)
    old_M = torch.tensor([0.25], dtype=torch.float64).log()
    terms = Terms(
        logp_M=old_M + math.log(ratio),
        old_logp_M=old_M,
        advantage_M=torch.tensor([advantage], dtype=torch.float64),
        segment_M=torch.zeros(1, dtype=torch.int64),
        segments=1,
    )
    assert algorithm.cut(terms).tolist() == [cut]


def test_an_option_of_ones_own_that_is_called_clip_makes_no_clip_range():
    def mine(terms, *, clip=0.5):
        return -terms.advantage_M * terms.logp_M

    row = replace(ALGORITHMS["grpo"], surrogate=mine)
    assert not row.cut(terms_of()).any()


def test_reinforce_pp_works_with_single_completions():
    assert resolve("reinforce_pp", GroupSettings(group_size=1), 64).credit == advantages.Whitened()
