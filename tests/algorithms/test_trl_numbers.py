"""PPO and MiniLLM against the numbers of the last TRL that had them, on the same random inputs, in value and gradient.

Where TRL does something else, what it does is computed here from our numbers and compared with TRL's: so every deviation that
docs/algorithms lists is shown to be there, and to be all there is.  `tests/fixtures/record_trl.py` made the files.

R completions   T longest   V vocabulary
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.algorithms import advantages as credit
from groupwise.algorithms import losses
from groupwise.algorithms.algorithm import Algorithm
from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings
from groupwise.inspection.closed_form import closed_form
from groupwise.ops.distillation import jsd
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sampling
from groupwise.training.online import weigh

HERE = Path(__file__).parents[1] / "fixtures"
LONGEST = 5
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}


def cases(name: str) -> list[dict[str, Any]]:
    """The recorded cases."""
    return json.loads((HERE / f"trl_{name}.json").read_text())["cases"]


def name_of(case: dict[str, Any]) -> str:
    """Its settings."""
    return "-".join(map(str, case["settings"].values()))


def arrays(numbers: dict[str, Any]) -> dict[str, np.ndarray]:
    """Lists as arrays."""
    return {name: np.array(values) for name, values in numbers.items()}


def cut(values_RT: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Padded rows -> each completion's own numbers."""
    return [row[:n].copy() for row, n in zip(values_RT, lengths, strict=True)]


def group_of(logp: Sequence[np.ndarray], reward: Sequence[float], **signals: Sequence[np.ndarray]) -> RolloutGroup:
    """Completions of one prompt with these log-probs, rewards and signals."""
    prompt = Prompt(id="0/0", tokens=np.array([1]), text="")
    rollouts = tuple(
        Rollout(
            prompt=prompt, index=i, tokens=np.full(one.size, 2), behavior_logp=one, finish=Finish.LENGTH, eos_ids=(0,),
            sampling=Sampling(), text="",
        )
        for i, one in enumerate(logp)
    )  # fmt: skip
    reward_R = np.array(reward, dtype=np.float64)
    columns = {name: tuple(column) for name, column in signals.items()}
    return RolloutGroup(rollouts=rollouts, names=("reward",), rewards=reward_R[:, None], reward=reward_R, signals=columns)


# ---- PPO: TRL 1.12.0 ---------------------------------------------------------------------------------------------------------


def ppo_of(settings: dict[str, Any]) -> Algorithm:
    """Our row with TRL's settings."""
    part = {"gamma": settings["gamma"], "lam": settings["lam"]}
    return resolve("ppo", GroupSettings(group_size=1, beta=settings["kl_coef"], kl=settings["kl_estimator"], credit=part), 8)


def ppo_case(case: dict[str, Any], *, reward: np.ndarray | None = None) -> tuple[dict, list[int], Algorithm, RolloutGroup]:
    given, lengths, algorithm = arrays(case["given"]), case["lengths"], ppo_of(case["settings"])
    signals = {"value": cut(given["values"], lengths), "reference_logp": cut(given["ref_logprobs"], lengths)}
    group = group_of(cut(given["logprobs"], lengths), given["scores"] if reward is None else reward, **signals)
    return given, lengths, algorithm, group


@pytest.mark.parametrize("case", [c for c in cases("ppo") if min(c["lengths"]) == LONGEST], ids=name_of)
def test_ppo_is_trl_s_where_the_length_limit_ends_completions(case: dict[str, Any]) -> None:
    """TRL 1.12.0: KL in the reward, GAE, returns, whitening, both losses and the gradients of their sum."""
    given, lengths, algorithm, group = ppo_case(case)
    found = arrays(case["found"])
    (raw,) = replace(algorithm.credit, whiten=False)([group])
    (white,) = algorithm.credit([group])
    (targets,) = credit.returns([group], algorithm.credit)
    np.testing.assert_allclose(raw, found["unwhitened"], **EXACT)
    np.testing.assert_allclose(targets, found["returns"], **EXACT)
    # TRL puts its 1e-8 under the root, we beside it, and it takes n / (n - 1) in float32: that is all that differs.
    np.testing.assert_allclose(white, found["advantages"], rtol=1e-7, atol=1e-7)
    pool = np.concatenate(raw)
    variance = pool.var() * float(np.float32(pool.size) / np.float32(pool.size - 1))
    np.testing.assert_allclose((pool - pool.mean()) / np.sqrt(variance + 1e-8), found["advantages"].ravel(), **EXACT)

    samples = weigh([group], [list(found["advantages"])], algorithm)
    step = closed_form(algorithm, samples, {("0/0", i): one for i, one in enumerate(given["new_logprobs"])})
    assert step.loss == pytest.approx(float(found["pg_loss"]), rel=1e-11)
    ours = np.array([step.gradient["0/0", i] for i in range(len(lengths))])
    np.testing.assert_allclose(ours, found["loss_by_new_logprobs"], **EXACT)
    value, gradient = value_loss(given, targets, case["settings"]["vf_coef"])
    assert value == pytest.approx(case["settings"]["vf_coef"] * float(found["vf_loss"]), rel=1e-11)
    np.testing.assert_allclose(gradient, found["loss_by_vpred"], **EXACT)


def value_loss(given: dict[str, np.ndarray], targets: Sequence[np.ndarray], coefficient: float) -> tuple[float, np.ndarray]:
    """`coefficient x mean clipped value loss` over the targets' tokens, and its gradient (R, T) by the values."""
    lengths = [len(target) for target in targets]
    new = [torch.tensor(one, requires_grad=True) for one in cut(given["vpred"], lengths)]
    before = [torch.tensor(one) for one in cut(given["values"], lengths)]
    parts = [losses.clipped_value(v, b, torch.tensor(t), clip=0.2) for v, b, t in zip(new, before, targets, strict=True)]
    loss = coefficient * torch.cat(parts).mean()
    loss.backward()
    gradient = np.zeros_like(given["vpred"])
    for row, one in zip(gradient, new, strict=True):
        assert one.grad is not None
        row[: one.numel()] = one.grad.numpy()
    return float(loss.detach()), gradient


@pytest.mark.parametrize("case", [c for c in cases("ppo") if min(c["lengths"]) < LONGEST], ids=name_of)
def test_ppo_differs_from_trl_s_by_the_state_behind_an_eos(case: dict[str, Any]) -> None:
    """TRL puts the reward one place behind EOS, on a state with a value of its own, which is bootstrapped from and learnt.

    Ours has no such state.  Told that its value is the reward, ours is TRL's at every token, with `gamma lam` times what is left.
    """
    settings, found = case["settings"], arrays(case["found"])
    given, lengths, algorithm, group = ppo_case(case)
    discount = settings["gamma"] * settings["lam"]
    behind = given["values"][np.arange(len(lengths)), lengths]
    # The advantage of the state behind is r - V; the last token's delta has gamma V in the place of our r.
    stand_in = settings["gamma"] * behind + discount * (given["scores"] - behind)
    _, _, _, moved = ppo_case(case, reward=stand_in)
    (raw,), (targets,) = replace(algorithm.credit, whiten=False)([moved]), credit.returns([moved], algorithm.credit)
    for ours, theirs in ((raw, found["unwhitened"]), (targets, found["returns"])):
        for one, other, n in zip(ours, theirs, lengths, strict=True):
            np.testing.assert_allclose(one, other[:n], **EXACT)
    for row, n, score in zip(found["returns"], lengths, given["scores"], strict=True):
        assert row[n] == pytest.approx(score, rel=1e-11), "the state behind EOS is taught the reward"

    (plain,) = replace(algorithm.credit, whiten=False)([group])
    apart = max(float(np.abs(one - other[:n]).max()) for one, other, n in zip(plain, found["unwhitened"], lengths, strict=True))
    assert (apart < 1e-12) == (discount == 1.0), "with gamma = lam = 1 the value behind cancels"

    # Its value loss is a mean over one more token for each completion.
    taught = [np.append(target, score) for target, score in zip(targets, given["scores"], strict=True)]
    value, gradient = value_loss(given, taught, settings["vf_coef"])
    assert value == pytest.approx(settings["vf_coef"] * float(found["vf_loss"]), rel=1e-11)
    np.testing.assert_allclose(gradient, found["loss_by_vpred"], **EXACT)

    # The policy's loss and gradient are the same again, for the same advantages.
    samples = weigh([group], [cut(found["advantages"], lengths)], algorithm)
    step = closed_form(algorithm, samples, {("0/0", i): one for i, one in enumerate(cut(given["new_logprobs"], lengths))})
    assert step.loss == pytest.approx(float(found["pg_loss"]), rel=1e-11)
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(step.gradient["0/0", i], found["loss_by_new_logprobs"][i, :n], **EXACT)
        assert not found["loss_by_new_logprobs"][i, n:].any()


# ---- MiniLLM: TRL 1.14.2 -----------------------------------------------------------------------------------------------------


def minillm_ours(case: dict[str, Any], own: bool = True) -> tuple[list[np.ndarray], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Our advantages on TRL's tables, log-probs of the drawn tokens (R, T), the exact single step (R, T), student's logits."""
    given, lengths = case["given"], case["lengths"]
    student = torch.tensor(given["student"], dtype=torch.float64, requires_grad=True)
    log_q, log_p = student.log_softmax(-1), torch.tensor(given["teacher"], dtype=torch.float64).log_softmax(-1)
    ids = torch.tensor(given["ids"])[:, :, None]
    q_RT, p_RT = (log.gather(-1, ids)[:, :, 0] for log in (log_q, log_p))
    group = group_of(cut(q_RT.detach().numpy(), lengths), [0.0] * len(lengths), teacher_logp=cut(p_RT.numpy(), lengths))
    chosen = case["settings"]
    options: dict[str, Any] = {"gamma": chosen["gamma"], "normalize": chosen["length_normalization"], "own": own}
    (advantage,) = credit.ReverseKl(**options)([group])
    rows = log_q.shape[0]
    single = jsd(log_q.flatten(0, 1), log_p.flatten(0, 1), beta=1.0).view(rows, -1)
    return advantage, q_RT, single, student


def discounted(reward_RT: torch.Tensor, gamma: float, *, normalize: bool, powers: bool) -> torch.Tensor:
    """`sum_{s >= t} gamma^(s - t) R_s`, differentiable; with `powers` gamma^s stands for gamma^(s - t)."""
    if gamma == 0.0:
        return reward_RT
    longest = reward_RT.shape[1]
    weight = torch.zeros(longest, longest, dtype=torch.float64)
    for t in range(longest):
        for s in range(t, longest):
            weight[t, s] = gamma ** (s if powers and not normalize else s - t)
    if normalize:
        weight = weight / weight.sum(1, keepdim=True)
    return reward_RT @ weight.T


@pytest.mark.parametrize("case", [c for c in cases("minillm") if min(c["lengths"]) == LONGEST], ids=name_of)
def test_minillm_is_trl_s_but_for_its_powers_and_its_leak(case: dict[str, Any]) -> None:
    """Without padding: TRL 1.14.2's loss is ours with each token's own reward in its advantage, where gamma is 0 or 1 or lengths
    normalise.  Elsewhere it leaves out gamma^-t.  Its gradient has what leaks through the rewards beside ours."""
    gamma, normalize = case["settings"]["gamma"], case["settings"]["length_normalization"]
    advantage, q_RT, single_RT, student = minillm_ours(case)
    ours_RT = torch.tensor(np.array(advantage))
    same = normalize or gamma in (0.0, 1.0)
    theirs_RT = ours_RT if same else ours_RT * gamma ** torch.arange(LONGEST, dtype=torch.float64)
    terms = losses.Terms(
        logp_M=q_RT.flatten(), old_logp_M=q_RT.detach().flatten(), advantage_M=theirs_RT.flatten(),
        segment_M=torch.zeros(q_RT.numel(), dtype=torch.int64), segments=1,
    )  # fmt: skip
    value = losses.Clipped()(terms).mean() + single_RT.mean()
    assert float(value.detach()) == pytest.approx(case["found"]["loss"], rel=1e-11)
    assert same or abs(float((theirs_RT - ours_RT).mean())) > 1e-3, "the missing powers change the loss"

    p_RT = torch.tensor(case["given"]["teacher"], dtype=torch.float64).log_softmax(-1)
    reward_RT = p_RT.gather(-1, torch.tensor(case["given"]["ids"])[:, :, None])[:, :, 0] - q_RT
    leak = -discounted(reward_RT, gamma, normalize=normalize, powers=True).mean()
    (mine,) = torch.autograd.grad(value, student, retain_graph=True)
    (leaked,) = torch.autograd.grad(leak, student)
    np.testing.assert_allclose(mine + leaked, case["found"]["loss_by_student"], **EXACT)
    assert float(leaked.norm() / mine.norm()) > 0.05, "what leaks is not small"


@pytest.mark.parametrize("case", [c for c in cases("minillm") if min(c["lengths"]) < LONGEST], ids=name_of)
def test_minillm_of_trl_learns_from_padding(case: dict[str, Any]) -> None:
    """TRL's mask is always true: PAD has rewards, and single steps that are trained and counted.  Ours has no PAD."""
    gamma, normalize, lengths = case["settings"]["gamma"], case["settings"]["length_normalization"], case["lengths"]
    advantage, q_RT, single_RT, student = minillm_ours(case)
    p_RT = torch.tensor(case["given"]["teacher"], dtype=torch.float64).log_softmax(-1)
    reward_RT = p_RT.gather(-1, torch.tensor(case["given"]["ids"])[:, :, None])[:, :, 0] - q_RT
    theirs_RT = discounted(reward_RT, gamma, normalize=normalize, powers=True)
    real_RT = torch.arange(LONGEST) < torch.tensor(lengths)[:, None]
    loss = (-((q_RT - q_RT.detach()).exp() * theirs_RT))[real_RT].mean() + single_RT.mean()  # the second over PAD too
    assert float(loss.detach()) == pytest.approx(case["found"]["loss"], rel=1e-11)
    np.testing.assert_allclose(torch.autograd.grad(loss, student, retain_graph=True)[0], case["found"]["loss_by_student"], **EXACT)
    at_padding = np.array(case["found"]["loss_by_student"])[~real_RT.numpy()]
    assert np.abs(at_padding).max() > 1e-3, "TRL has a gradient at PAD"
    if gamma > 0.0:
        gaps = [np.abs(a - b[:n].detach().numpy()).max() for a, b, n in zip(advantage, theirs_RT, lengths, strict=True)]
        assert max(gaps) > 1e-2, "what PAD earned reaches real tokens"
    ours = single_RT[real_RT].mean()
    assert not torch.autograd.grad(ours, student)[0][~real_RT].any()


@pytest.mark.parametrize("case", [c for c in cases("minillm") if c["settings"]["gamma"] == 1.0], ids=name_of)
def test_minillm_of_trl_counts_the_single_step_twice(case: dict[str, Any]) -> None:
    """Equation 6 takes the token's own reward out of the long part, because the exact single step stands for it; TRL does not.

    Our row does (`own=False`): a last token has no long part.
    """
    with_own, *_ = minillm_ours(case)
    long_part, q_RT, *_ = minillm_ours(case, own=False)
    p = torch.tensor(case["given"]["teacher"], dtype=torch.float64).log_softmax(-1)
    p_RT = p.gather(-1, torch.tensor(case["given"]["ids"])[:, :, None])[:, :, 0]
    for whole, part, own, n in zip(with_own, long_part, (p_RT - q_RT).detach().numpy(), case["lengths"], strict=True):
        assert part[-1] == 0.0
        assert whole[n - 1] == pytest.approx(own[n - 1])
        later = np.arange(n - 1, -1, -1) if case["settings"]["length_normalization"] else np.ones(n)
        kept = part * later + own[:n]
        np.testing.assert_allclose(whole, kept / (later + 1) if case["settings"]["length_normalization"] else kept, **EXACT)
