"""The table of online algorithms: one row = credit x ratio level x surrogate x weight, and what is
added to them.

Adding a loss is one part (`losses.py`, or your own module), one row, and its entry in
`docs/algorithms/notes.yaml`: the settings of its paper, what other libraries do otherwise, when to
choose it.  A step is given its row, and does not read the table.  Importing this file does not
import torch: configuration, viewer and documentation read it too.
"""

from __future__ import annotations

from types import ModuleType

from groupwise.algorithms import advantages as credits
from groupwise.algorithms import kl_estimators, loss_weights, losses
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import Credit, Divergence, Kl, Part, Ratio, Surrogate, Weights

_ROWS = (
    Algorithm(
        name="grpo",
        summary=(
            "Rewards standardized within the group; PPO's clipped ratio per token; every completion"
            " counts the same."
        ),
        paper="2402.03300",
        equation="-1/R sum_i 1/n_i sum_t min(rho A_i, clip(rho, 1 - e, 1 + e) A_i)",
    ),
    Algorithm(
        name="dr_grpo",
        summary="GRPO without division by the std and without division by the completion's length.",
        paper="2503.20783",
        equation="-1/(R L) sum_i sum_t min(rho A_i, clip(rho) A_i),  A_i = r_i - mean",
        credit=credits.Centered(),
        weights=loss_weights.Constant(),
    ),
    Algorithm(
        name="dapo",
        summary=(
            "Clip higher, mean over tokens, only live groups, truncated completions masked; add the"
            " reward `soft_overlong`."
        ),
        paper="2503.14476",
        equation=(
            "-1/N sum_i sum_t min(rho A_i, clip(rho, 1 - 0.2, 1 + 0.28) A_i),  0 < right"
            " answers < G"
        ),
        surrogate=losses.Clipped(low=0.2, high=0.28),
        weights=loss_weights.TokenMean(),
        dead_groups="refill",
        truncated="mask",
    ),
    Algorithm(
        name="bnpo",
        summary="GRPO with the mean over all tokens of the minibatch.",
        paper="",
        equation="-1/N sum_i sum_t min(rho A_i, clip(rho) A_i)",
        weights=loss_weights.TokenMean(),
    ),
    Algorithm(
        name="gspo",
        summary=(
            "One ratio per completion, the geometric mean of its token ratios, with a much narrower"
            " clip."
        ),
        paper="2507.18071",
        equation=(
            "-1/R sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i),  s_i = exp(mean_t(l -"
            " old))"
        ),
        ratio=losses.SequenceMeanRatio(),
        surrogate=losses.Clipped(low=3e-4, high=4e-4),
    ),
    Algorithm(
        name="luspo",
        summary="GSPO times the completion's length: every token has the same weight.",
        paper="2602.05261",
        equation="-1/R sum_i n_i min(s_i A_i, clip(s_i, 1 - 2e-3, 1 + 2.5e-3) A_i)",
        ratio=losses.SequenceMeanRatio(),
        surrogate=losses.Clipped(low=2e-3, high=2.5e-3),
        weights=loss_weights.SequenceSum(),
    ),
    Algorithm(
        name="cispo",
        summary="REINFORCE with a capped importance weight: clipping removes no token's gradient.",
        paper="2506.13585",
        equation="-1/N sum_i sum_t sg[min(rho, cap)] A_i l",
        surrogate=losses.Cispo(cap=5.0),
        weights=loss_weights.TokenMean(),
    ),
    Algorithm(
        name="sapo",
        summary="A sigmoid gate instead of the hard clip, tighter for negative advantages.",
        paper="2511.20347",
        equation="-1/R sum_i 1/n_i sum_t 4/tau sigmoid(tau (rho - 1)) A_i",
        surrogate=losses.Sapo(),
    ),
    Algorithm(
        name="vespo",
        summary=(
            "REINFORCE with a smooth weight of the completion's ratio: no clipping, off-policy"
            " completions get less weight."
        ),
        paper="2602.10693",
        equation=(
            "-1/N sum_i sum_t sg[exp(lam + k s_i - lam exp(s_i))] A_i l,  s_i = sum_t(l - old)"
        ),
        ratio=losses.SequenceSumRatio(),
        surrogate=losses.Vespo(),
        weights=loss_weights.TokenMean(),
    ),
    Algorithm(
        name="gmpo",
        summary="The geometric mean of the clipped token ratios: robust to single outliers.",
        paper="2507.20673",
        equation="-1/R sum_i A_i exp(mean_t clip(l - old, -0.4, 0.4 on the side of A_i))",
        surrogate=losses.Geometric(),
    ),
    Algorithm(
        name="rloo",
        summary=(
            "The baseline is the mean reward of the other completions; one ratio per completion;"
            " the KL is part of the reward."
        ),
        paper="2402.14740",
        equation=(
            "-1/R sum_i min(rho_i A_i, clip(rho_i) A_i),  A_i = r_i - mean of the others,  rho_i ="
            " exp(sum_t(l - old))"
        ),
        credit=credits.LeaveOneOut(),
        ratio=losses.SequenceSumRatio(),
        kl_place="reward",
    ),
    Algorithm(
        name="reinforce_pp",
        summary=(
            "Rewards minus the KL of the remaining tokens, whitened over the batch; one completion"
            " per prompt is enough."
        ),
        paper="2501.03262",
        equation=(
            "-1/N sum_i sum_t min(rho A_it, clip(rho) A_it),  A_it = whitened(r_i - beta sum_{s >="
            " t}(old - ref)_s)"
        ),
        credit=credits.Whitened(),
        weights=loss_weights.TokenMean(),
        kl_place="reward",
    ),
    Algorithm(
        name="reinforce",
        summary=(
            "The plain policy gradient: no ratio, no group; the baseline is the batch's mean"
            " reward."
        ),
        paper="",
        equation="-1/R sum_i sum_t (r_i - mean of the batch) l",
        credit=credits.BatchCentered(),
        surrogate=losses.Reinforce(),
        weights=loss_weights.SequenceSum(),
    ),
    Algorithm(
        name="reinforce_pp_baseline",
        summary=(
            "REINFORCE++ with the group's mean as baseline: rewards minus their group's mean,"
            " whitened over the batch; KL (k2) in the loss."
        ),
        paper="2501.03262",
        equation="-1/N sum_i sum_t min(rho A_i, clip(rho) A_i),  A_i = whitened(r_i - mean)",
        credit=credits.Whitened(baseline=True),
        weights=loss_weights.TokenMean(),
        kl=kl_estimators.K2(),
    ),
    Algorithm(
        name="maxrl",
        summary=(
            "Maximises the log of the pass rate: rarely solved prompts count as much as others."
        ),
        paper="2602.02710",
        equation="-1/R sum_i sum_t min(rho A_i, clip(rho) A_i),  A_i = (r_i - mean) / mean",
        credit=credits.Maxrl(),
        weights=loss_weights.SequenceSum(),
    ),
    Algorithm(
        name="gspo_token",
        summary=(
            "GSPO with a gradient per token, so that advantages may differ within a completion."
        ),
        paper="2507.18071",
        equation=(
            "-1/R sum_i 1/n_i sum_t min(s_it A_it, clip(s_it, 1 - 3e-4, 1 + 4e-4) A_it),  s_it ="
            " sg[s_i] exp(l - sg[l])"
        ),
        ratio=losses.SequenceTokenRatio(),
        surrogate=losses.Clipped(low=3e-4, high=4e-4),
    ),
    Algorithm(
        name="gdpo",
        summary=(
            "Each reward is standardized separately within the group, then their weighted sum over"
            " the batch."
        ),
        paper="2601.05242",
        equation=(
            "GRPO's,  A_i = standardized over the batch(sum_k w_k standardized in the group(r_ik))"
        ),
        credit=credits.Decoupled(),
    ),
    Algorithm(
        name="ppo",
        summary=(
            "A critic predicts a value per token; advantages by GAE, whitened; reward and KL per"
            " token."
        ),
        paper="1707.06347",
        equation=(
            "-1/N sum_i sum_t min(rho A_it, clip(rho) A_it),  A_it = whitened(sum_k (gamma lam)^k"
            " delta_{t+k}); critic: c/N sum_i sum_t 1/2 max((V - R)^2, (clip(V, V_old -+ 0.2) -"
            " R)^2)"
        ),
        credit=credits.Gae(),
        weights=loss_weights.TokenMean(),
        kl_place="reward",
        extra=(losses.ValueLoss(),),
    ),
    Algorithm(
        name="distill",
        summary=(
            "On-policy distillation: the divergence from a teacher over the whole vocabulary at"
            " every sampled token."
        ),
        paper="2306.13649",
        equation=(
            "1/N sum_i sum_t beta KL(p || m) + (1 - beta) KL(q || m),  m = (1 - beta) q + beta p;"
            " beta 0: KL(p || q), 1: KL(q || p)"
        ),
        credit=credits.Nothing(),
        surrogate=losses.Silent(),
        weights=loss_weights.TokenMean(),
        extra=(losses.TeacherDivergence(),),
    ),
    Algorithm(
        name="distill_sampled",
        summary=(
            "On-policy distillation by sampled tokens: a token's advantage is the teacher's"
            " log-prob minus the policy's."
        ),
        paper="",
        equation="-1/N sum_i sum_t [q - q_old >= -0.2] rho (log p - log q_old)",
        credit=credits.ReverseKl(gamma=0.0),
        surrogate=losses.Importance(),
        weights=loss_weights.TokenMean(),
    ),
    Algorithm(
        name="minillm",
        summary=(
            "Reverse KL to a teacher: exact for the current token, policy gradient for the"
            " following tokens."
        ),
        paper="2306.08543",
        equation=(
            "1/N sum_i sum_t sg[w] KL(q || p) - min(w A_it, clip(w) A_it),  w = q / q_old,"
            "  A_it = mean_{s > t} log(p / q_old)_s"
        ),
        credit=credits.ReverseKl(own=False, normalize=True),
        weights=loss_weights.TokenMean(),
        extra=(losses.TeacherDivergence(importance=True),),
    ),
)

ALGORITHMS: dict[str, Algorithm] = {row.name: row for row in _ROWS}
"""The online algorithms by name."""


def _by_name(kind: type[Part], module: ModuleType) -> dict[str, type[Part]]:
    """Return the parts of a kind that a module defines, in its order."""
    parts: dict[str, type[Part]] = {}
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, kind) and one is not kind:
            parts[one.name] = one
    return parts


PARTS: dict[str, dict[str, type[Part]]] = {
    "credit": _by_name(Credit, credits),
    "ratio": _by_name(Ratio, losses),
    "surrogate": _by_name(Surrogate, losses),
    "weights": _by_name(Weights, loss_weights),
    "divergence": _by_name(Divergence, losses),
    "kl": _by_name(Kl, kl_estimators),
}
"""What the parts of a recipe's `group` may name: those that the modules define."""
