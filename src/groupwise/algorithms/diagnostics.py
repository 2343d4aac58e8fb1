"""What is only looked at: numbers about a whole minibatch, read from the same vectors as the loss
but never part of it.

Every function returns flat metrics by name and waits for the device once.  A quantity that was not
computed has no key, and empty vectors give no keys at all.  Minima and maxima are true ones, over
tokens.

N trained tokens of a minibatch   l, old, ref log-probs of policy, old policy, reference, nats
b those of the sampler
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.algorithms.losses import LIMIT, guarded_exp


def ratio(log_ratio_N: Tensor, cut_N: Tensor | None = None) -> dict[str, float]:
    """The importance ratio at the algorithm's level: its range, its effective sample size, and how
    much of it is clipped.

    `ratio/kl` estimates KL(old || policy) as mean(rho - 1 - log rho).  `ratio/ess` is (sum rho)^2 /
    (N sum rho^2), 1 when on-policy.  cut_N: bool, the tokens whose gradient the surrogate cut
    (`Algorithm.cut`); `clip/low` counts those with a ratio below 1, `clip/high` the others, both as
    shares of all N.
    """
    if log_ratio_N.numel() == 0:
        return {}
    log_ratio_N = log_ratio_N.detach().double()
    ratio_N = guarded_exp(log_ratio_N)
    values = {
        "ratio/mean": ratio_N.mean(),
        "ratio/min": ratio_N.min(),
        "ratio/max": ratio_N.max(),
        "ratio/kl": (ratio_N - 1 - log_ratio_N).mean(),
        "ratio/ess": ratio_N.sum().square() / (ratio_N.square().sum() * ratio_N.numel()),
    }
    if cut_N is not None:
        values["clip/low"] = (cut_N & (log_ratio_N < 0)).double().mean()
        values["clip/high"] = (cut_N & (log_ratio_N >= 0)).double().mean()
    return _floats(values)


def progress(logp_N: Tensor, advantage_N: Tensor) -> dict[str, float]:
    """`progress` = mean(A l): what the policy gradient raises.

    The loss itself says nothing: on-policy its value is -mean(A), which is 0 for centred
    advantages, while its gradient is not."""
    if logp_N.numel() == 0:
        return {}
    return _floats({"progress": (advantage_N.double() * logp_N.detach().double()).mean()})


def reference_kl(kl_N: Tensor, logp_N: Tensor, reference_logp_N: Tensor) -> dict[str, float]:
    """`kl` and `kl/max`, by the estimator that made `kl_N`; `kl/guarded` counts the tokens whose
    gap is too wide for exp.
    """
    if kl_N.numel() == 0:
        return {}
    kl_N = kl_N.detach().double()
    guarded = ((reference_logp_N - logp_N.detach()).abs() > LIMIT).sum()
    return _floats({"kl": kl_N.mean(), "kl/max": kl_N.max(), "kl/guarded": guarded})


def mismatch(logp_N: Tensor, sampler_logp_N: Tensor) -> dict[str, float]:
    """Is what was sampled what is scored?  At the first update after a rollout these are rounding
    errors, else something is wrong.

    `mismatch/mean` and `mismatch/max` of |l - b|; `mismatch/kl` estimates KL(sampler || trainer).
    """
    if logp_N.numel() == 0:
        return {}
    gap_N = logp_N.detach().double() - sampler_logp_N.double()
    kl = (guarded_exp(gap_N) - 1 - gap_N).mean()
    return _floats(
        {"mismatch/mean": gap_N.abs().mean(), "mismatch/max": gap_N.abs().max(), "mismatch/kl": kl}
    )


def dropped(factor_N: Tensor) -> float:
    """Share of tokens that a mask or a correction (bool or number) takes out of the loss; NaN if
    there are none.
    """
    return float((factor_N == 0).double().mean())


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    return dict(
        zip(
            values, torch.stack([value.double() for value in values.values()]).tolist(), strict=True
        )
    )
