"""Every number that TRL 1.16.0's own code produced for small tensors, reproduced through the library's functions.

The folder of the files is $GROUPWISE_ORACLE, else the copy in `tests/fixtures`.  What a file holds is read off its cases, so that
further files of the same form are run too.  Where the library differs on purpose, the adapters below say so with that word.
"""

import json
import math
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise.algorithms import advantages as credit
from groupwise.algorithms import diagnostics, kl_estimators, loss_weights, losses
from groupwise.algorithms.losses import Terms
from groupwise.algorithms.parts import options
from groupwise.algorithms.table import ALGORITHMS

ROOT = Path(__file__).parents[2]


def oracle_folder() -> Path:
    return Path(os.environ.get("GROUPWISE_ORACLE") or ROOT / "tests" / "fixtures" / "oracle")


def kind_of(case: dict) -> str:
    if "outputs" in case:
        return "loss"
    if "per_device" in case:
        return "step"
    return "rloo" if "old_logps" in case else "advantage"


FILES = {path.name: json.loads(path.read_text()) for path in sorted(oracle_folder().glob("*.json"))}
CASES = [
    pytest.param(case, content, id=f"{name}:{number}:{case['name']}")
    for name, content in FILES.items()
    for number, case in enumerate(content["cases"])
]


def cases_of(kind: str) -> list:
    return [param for param in CASES if kind_of(param.values[0]) == kind]


def test_the_oracle_is_there():
    assert {kind_of(param.values[0]) for param in CASES} >= {"loss", "advantage", "rloo", "step"}, oracle_folder()


# ---- losses and their gradients --------------------------------------------------------------------------------------------


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def algorithm_of(config: dict):
    """The row with the case's numbers, found by the names of the surrogate's options, not by the row's name."""
    row = ALGORITHMS[config["loss_type"]]
    high = config["epsilon"] if config["epsilon_high"] is None else config["epsilon_high"]
    known = {
        "low": config["epsilon"],
        "high": high,
        "delta": config["delta"],
        "dual": None,
        "cap": high,
        "tau_pos": config["sapo_temperature_pos"],
        "tau_neg": config["sapo_temperature_neg"],
        "k_pos": config["vespo_k_pos"],
        "k_neg": config["vespo_k_neg"],
        "lam_pos": config["vespo_lambda_pos"],
        "lam_neg": config["vespo_lambda_neg"],
    }
    return replace(
        row,
        surrogate=replace(row.surrogate, **{name: known[name] for name in options(type(row.surrogate))}),
        ratio={"token": losses.TokenRatio(), "sequence": losses.SequenceMeanRatio()}[config["importance_sampling_level"]],
        beta=config["beta"],
        kl=kl_estimators.K3Ratio() if config["use_bias_correction_kl"] else kl_estimators.K3(),
        entropy_bonus=config["entropy_coef"],
        entropy_quantile=1 - config["top_entropy_quantile"],
        off_policy_delta=config["off_policy_mask_threshold"],
    )


def micro_batch_weights(case: dict, algorithm, tokens_B: np.ndarray) -> np.ndarray:
    """The weights of one TRL micro-batch, a part of its step of `ga` micro-batches (evaluation does not accumulate)."""
    config = case["config"]
    copies = case["ga"] if case["train"] else 1
    if config["loss_type"] == "bnpo":
        # Differs on purpose: TRL's token mean is over one micro-batch; the library's bnpo is over the whole minibatch.
        return loss_weights.TokenMean()(tokens_B, np.zeros_like(tokens_B)) / copies
    if algorithm.weights == loss_weights.TokenMean():
        # Differs on purpose: TRL gives each step the generation batch's mean number of tokens, the library its own number.
        rest = case["inputs"]["num_items_in_batch"] - tokens_B.sum()
        share = config["steps_per_generation"] / case["ga"] if case["train"] else 1.0
        generated = np.append(tokens_B, rest)
        return share * loss_weights.TokenMean()(generated, np.zeros_like(generated))[:-1]
    step = np.concatenate([tokens_B] + [np.ones_like(tokens_B)] * (copies - 1))
    if algorithm.weights == loss_weights.Constant():
        return loss_weights.Constant(length=config["max_completion_length"])(step, np.zeros_like(step))[: tokens_B.size]
    return algorithm.weights(step, np.zeros_like(step))[: tokens_B.size]


def terms_of(case: dict, logp_BT: torch.Tensor, entropy_BT: torch.Tensor) -> tuple[Terms, tuple[torch.Tensor, torch.Tensor]]:
    """The trained tokens of a padded case as flat columns, and their places in it."""
    inputs = case["inputs"]
    place = torch.nonzero(torch.tensor(inputs["mask"]) > 0, as_tuple=True)
    rows, segments = place[0], logp_BT.shape[0]
    advantage = tensor(inputs["advantages"])
    flat = {
        name: tensor(inputs[key])[place] if inputs.get(key) is not None else None
        for name, key in {"behavior": "old_logps", "reference": "ref_logps", "sampler": "sampling_logps"}.items()
    }
    mismatch = None
    if inputs["importance_sampling_ratio"] is not None:
        ratio = tensor(inputs["importance_sampling_ratio"])
        # Padding counts in TRL's product over a row; its trainer puts 1 there, these cases put other numbers.
        grid = torch.arange(segments).repeat_interleave(ratio.shape[1])
        whole = losses.token_mismatch(ratio.flatten(), grid, segments)
        mismatch = losses.Mismatch(ratio.expand(logp_BT.shape)[place], whole.log_weight_S)
    return (
        Terms(
            logp_M=logp_BT[place],
            old_logp_M=logp_BT.detach()[place] if flat["behavior"] is None else flat["behavior"],
            advantage_M=advantage[rows] if advantage.dim() == 1 else advantage[place],
            segment_M=rows,
            segments=segments,
            reference_logp_M=flat["reference"],
            entropy_M=entropy_BT[place],
            behavior_logp_M=flat["sampler"],
            mismatch=mismatch,
        ),
        place,
    )


def with_trl_kl(case: dict, algorithm, terms: Terms):
    """Differs on purpose (P29): TRL multiplies the token KL by the ratio of the policy's level, the library by the token's own.

    Where the levels differ, TRL's product is put in the place of `k3_ratio`, which shows that this is the only difference.
    """
    if case["config"]["importance_sampling_level"] == "token" or algorithm.kl == kl_estimators.K3():
        return algorithm
    level_M = algorithm.ratio(terms.logp_M, terms.old_logp_M, terms.segment_M, terms.segments)
    return replace(algorithm, kl=lambda *arguments: level_M.exp() * kl_estimators.K3()(*arguments))


@pytest.mark.parametrize(("case", "content"), cases_of("loss"))
def test_loss_case(case, content):
    config, expected = case["config"], case["outputs"]
    assert not config["use_adaptive_entropy"], "TRL's controller has a state that a case does not hold"
    logp_BT = tensor(case["inputs"]["logps"]).requires_grad_()
    entropy_BT = tensor(case["inputs"]["entropies"]).requires_grad_()
    terms, (rows, _) = terms_of(case, logp_BT, entropy_BT)
    algorithm = algorithm_of(config)
    if algorithm.needs.forking:
        terms = replace(terms, forking_M=losses.forking(terms.entropy_M, algorithm.entropy_quantile))
        kept = int(terms.forking_M.sum())
    else:
        kept = rows.numel()
    tokens_B = np.bincount(rows.numpy(), minlength=terms.segments)
    weight_M = tensor(micro_batch_weights(case, algorithm, tokens_B))[rows]
    accumulated = case["ga"] if case["train"] else 1
    algorithm = with_trl_kl(case, algorithm, terms)
    loss = (weight_M * algorithm.loss(terms)).sum()
    if algorithm.entropy_bonus:
        loss = loss - algorithm.bonus(terms, max(kept, 1) * accumulated)
    loss.backward()

    single = config["loss_type"] == "sapo" or algorithm.needs.forking  # TRL computes these parts in float32
    tolerance = {"rtol": 0, "atol": 1e-7 if single else 1e-12}
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **tolerance)
    torch.testing.assert_close(logp_BT.grad, tensor(expected["grad_logps"]), **tolerance)
    entropy_grad = torch.zeros_like(entropy_BT) if entropy_BT.grad is None else entropy_BT.grad
    torch.testing.assert_close(entropy_grad, tensor(expected["grad_entropies"]), **tolerance)


@pytest.mark.parametrize(("case", "content"), cases_of("loss"))
def test_loss_case_metrics(case, content):
    """Means only: TRL's minima and maxima are of rows, the library's of tokens (on purpose)."""
    config, expected = case["config"], case["outputs"]["metrics"]
    logp_BT, entropy_BT = tensor(case["inputs"]["logps"]), tensor(case["inputs"]["entropies"])
    terms, (rows, _) = terms_of(case, logp_BT, entropy_BT)
    algorithm = algorithm_of(config)
    log_ratio_M, cut_M, advantage_M = algorithm.log_ratio(terms), algorithm.cut(terms), terms.advantage_M
    if config["importance_sampling_level"] == "sequence" and not isinstance(case["inputs"]["advantages"][0], list):
        # TRL counts completions at this level, empty ones included; the library counts tokens.
        first = [int(torch.nonzero(rows == s)[0]) if (rows == s).any() else None for s in range(terms.segments)]
        log_ratio_M = torch.stack([tensor(0.0) if i is None else log_ratio_M[i] for i in first])
        cut_M = torch.stack([torch.tensor(False) if i is None else cut_M[i] for i in first])
        advantage_M = tensor(case["inputs"]["advantages"])
    if config["delta"] is not None:  # TRL counts neither what lies beyond it nor that what it caps has no gradient
        above_M = log_ratio_M > math.log(config["delta"])
        assert (cut_M | ~above_M | (advantage_M == 0)).all()
        cut_M = cut_M & ~(above_M & ((advantage_M < 0) | (config["delta"] < 1 + options(algorithm.surrogate)["high"])))
    found = diagnostics.ratio(log_ratio_M, cut_M)
    if rows.numel() == 0:
        return
    close = partial(pytest.approx, abs=1e-6)
    if "clip_ratio/low_mean" in expected:
        assert found["clip/low"] == close(expected["clip_ratio/low_mean"])
        assert found["clip/high"] == close(expected["clip_ratio/high_mean"])
        assert found["clip/low"] + found["clip/high"] == close(expected["clip_ratio/region_mean"])
    if "cispo_clip_ratio" in expected:
        # TRL counts the tokens whose weight is capped; no gradient is cut, so here they are none.
        capped_M = (log_ratio_M > math.log(options(algorithm.surrogate)["cap"])) & (advantage_M > 0)
        assert float(capped_M.double().mean()) == close(expected["cispo_clip_ratio"])
        assert found["clip/low"] == found["clip/high"] == 0.0
    assert float(terms.entropy_M.mean()) == close(expected["entropy"])
    if "kl" in expected:
        kl_M = with_trl_kl(case, algorithm, terms).kl(terms.logp_M, terms.reference_logp_M, terms.logp_M - terms.old_logp_M)
        assert diagnostics.reference_kl(kl_M, terms.logp_M, terms.reference_logp_M)["kl"] == close(expected["kl"])
    if "vespo/phi_seq_mean" in expected and not isinstance(case["inputs"]["advantages"][0], list):
        log_ratio_S = losses.segment_sum(terms.logp_M - terms.old_logp_M, rows, terms.segments)
        whole = Terms(
            logp_M=log_ratio_S,
            old_logp_M=torch.zeros_like(log_ratio_S),
            advantage_M=tensor(case["inputs"]["advantages"]),
            segment_M=torch.arange(terms.segments),
            segments=terms.segments,
            mismatch=terms.mismatch,
        )
        gain = whole.advantage_M >= 0
        k = torch.where(gain, config["vespo_k_pos"], config["vespo_k_neg"])
        lam = torch.where(gain, config["vespo_lambda_pos"], config["vespo_lambda_neg"])
        assert float(losses.vespo_weight(whole, k, lam).mean()) == close(expected["vespo/phi_seq_mean"])


# ---- advantages --------------------------------------------------------------------------------------------------------------


def grouped(scored, case: dict, rewards_RK: np.ndarray, factors=None, **columns):
    """The case's completions as groups of G; `factors` weigh the reward functions."""
    parts = [slice(start, start + case["G"]) for start in range(0, len(rewards_RK), case["G"])]
    return [
        scored(rewards_RK[part], name=str(part.start), weights=factors, **{key: column[part] for key, column in columns.items()})
        for part in parts
    ]


@pytest.mark.parametrize(("case", "content"), cases_of("advantage"))
def test_advantage_case(case, content, scored):
    config = case["config"]
    rewards_RK = np.array(case["rewards"], dtype=np.float64).T
    groups = grouped(scored, case, rewards_RK, config["reward_weights"])
    if config["multi_objective_aggregation"] == "normalize_then_sum":
        found = credit.Decoupled()(groups)
    else:
        found = credit.Standardized(scale=config["scale_rewards"])(groups)
    expected = np.array(case["advantages"]).reshape(len(groups), case["G"])
    for group, advantages, expected_G in zip(groups, found, expected, strict=True):
        if group.equal_rewards and config["multi_objective_aggregation"] == "sum_then_normalize":
            # Differs on purpose: exactly 0, where TRL's float32 mean leaves -7e-5.
            assert all(advantage == 0.0 for completion in advantages for advantage in completion)
            assert np.abs(expected_G).max() < 1e-3
            continue
        assert all((completion == completion[0]).all() for completion in advantages)
        np.testing.assert_allclose([completion[0] for completion in advantages], expected_G, rtol=0, atol=rounding(group, config))


def rounding(group, config: dict) -> float:
    """1e-6, or what TRL's float32 mean can be wrong by (one unit in the last place of a reward), divided by the group's std.

    Differs on purpose: statistics are float64 here.  Rewards that differ by 1e-6 have a float32 std of eight digits less.
    """
    known = group.reward[~np.isnan(group.reward)]
    if config["scale_rewards"] != "group" or known.size < 2:
        return 1e-6
    return max(1e-6, float(np.finfo(np.float32).eps * np.abs(known).max() / (known.std(ddof=1) + 1e-4)))


# ---- RLOO ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "content"), cases_of("rloo"))
def test_rloo_case(case, content, scored):
    """These cases are float32: 1e-6."""
    config = case["config"]
    mask_BT = np.array(case["mask"], dtype=bool)
    low, high = config.get("reward_clip_range") or (-np.inf, np.inf)  # a reward's own range is the reward function's business here
    rewards_R = np.clip(np.array(case["rewards"], dtype=np.float64), low, high)
    flat = lambda key: [np.array(row)[keep] for row, keep in zip(case[key], mask_BT, strict=True)]  # noqa: E731
    groups = grouped(scored, case, rewards_R, behavior=flat("old_logps"), reference=flat("ref_logps"))
    scale = "batch" if config.get("normalize_advantages") else "none"
    advantages = [a for group in credit.LeaveOneOut(beta=case["beta"], scale=scale)(groups) for a in group]
    np.testing.assert_allclose([completion[0] for completion in advantages], case["advantages"], rtol=0, atol=1e-6)

    logp_BT = tensor(case["logps"]).requires_grad_()
    place = torch.nonzero(torch.tensor(mask_BT), as_tuple=True)
    terms = Terms(
        logp_M=logp_BT[place],
        old_logp_M=tensor(case["old_logps"])[place],
        advantage_M=torch.from_numpy(np.concatenate(advantages)),
        segment_M=place[0],
        segments=len(mask_BT),
    )
    algorithm = replace(ALGORITHMS["rloo"], beta=case["beta"])
    weight_M = tensor(algorithm.weights(mask_BT.sum(1), np.arange(len(mask_BT)) // case["G"]))[place[0]]
    loss = (weight_M * algorithm.loss(terms)).sum()
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(logp_BT.grad, tensor(case["grad_logps"]), rtol=0, atol=1e-6)
    if "kl" in case["metrics"]:
        kl_M = kl_estimators.K1()(terms.old_logp_M, tensor(case["ref_logps"])[place], None)
        assert float(kl_M.mean()) == pytest.approx(case["metrics"]["kl"], abs=1e-6)


# ---- the step does not depend on how it is cut -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "content"), cases_of("step"))
def test_step_case(case, content):
    """TRL's step gradient in 6 cuts of the same 8 completions, against the weights of the same cuts.

    A per-token gradient of our own stands for the model's (the cases hold TRL's norms of it only).  `spg > ga` means several
    optimizer steps per rollout: minibatches, which are cut first and weighted second.
    """
    tokens_R = np.array([len(ids) for ids in content["completion_ids"]])
    row = ALGORITHMS[case["loss_type"]]
    weigh = loss_weights.Constant(length=6) if row.weights == loss_weights.Constant() else row.weights
    rng = np.random.default_rng(0)
    gradient_RD = np.stack([rng.normal(size=(n, 5)).sum(0) for n in tokens_R])  # sum over tokens: the weight is one per completion

    def step_gradient(rows: np.ndarray) -> np.ndarray:
        weight_R = weigh(tokens_R[rows], np.zeros_like(rows))
        parts = np.split(np.arange(len(rows)), range(case["per_device"], len(rows), case["per_device"]))
        return sum(weight_R[part] @ gradient_RD[rows[part]] for part in parts)  # micro-batches, accumulated

    everything = np.arange(len(tokens_R))
    whole = weigh(tokens_R, np.zeros_like(everything)) @ gradient_RD
    minibatches = np.split(everything, range(case["per_device"] * case["ga"], len(everything), case["per_device"] * case["ga"]))
    assert len(minibatches) == len(case["logged_loss"]) == case["spg"] // case["ga"]
    theirs = case["rel_diff_of_mean_step_gradient_to_pd8_ga1"]
    if case["loss_type"] == "bnpo":
        # Differs on purpose: the cut changes TRL's step by up to 44 %, and nothing here.
        assert theirs > 0.05 or case["per_device"] == len(everything)
    else:
        assert theirs < 1e-6
    if row.weights == loss_weights.TokenMean():
        # Differs on purpose: N is the step's own; TRL gives every step the mean of the steps, so that only their mean is right.
        share = [tokens_R[rows].sum() / tokens_R.sum() for rows in minibatches]
    else:
        share = [1 / len(minibatches)] * len(minibatches)
    ours = sum(part * step_gradient(rows) for part, rows in zip(share, minibatches, strict=True))
    np.testing.assert_allclose(ours, whole, rtol=1e-12, atol=1e-15)
