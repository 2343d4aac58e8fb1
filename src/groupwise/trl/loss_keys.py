"""Keys for what is learnt: the objective, and the parts of it that TRL sets one by one."""

from __future__ import annotations

from groupwise.trl.configuration import Configuration, Fate
from groupwise.trl.values import short
from groupwise.utils.spelling import closest

PRESETS = ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
"""Losses of TRL's that are presets of the same name here; its `dapo` is bnpo."""
BOUNDS = ("epsilon", "epsilon_high", "delta")
"""Arguments of the clipped surrogate."""
SURROGATES = {
    "sapo": {"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"},
    "vespo": {
        "vespo_k_pos": "k_pos",
        "vespo_lambda_pos": "lam_pos",
        "vespo_k_neg": "k_neg",
        "vespo_lambda_neg": "lam_neg",
    },
}
"""Surrogates with keywords of their own: TRL's argument -> ours."""


def preset_of(trl: Configuration) -> str:
    """The objective that TRL's loss is."""
    if trl.kind != "GRPOConfig":
        return trl.objective
    loss = str(trl.get("loss_type"))
    return loss if loss in PRESETS else "bnpo"


def write_objective(trl: Configuration) -> None:
    """Write `objective`, and for pairs `pairs.loss`."""
    loss = trl.get("loss_type")
    trl.write("objective", preset_of(trl))
    if trl.kind == "GRPOConfig":
        write_group_objective(trl, str(loss))
    elif trl.kind == "DPOConfig":
        if isinstance(loss, list) and len(loss) == 1:
            loss = loss[0]
        if loss in ("sigmoid", "ipo"):
            trl.write("pairs.loss", loss, "loss_type", fate="same")
        else:
            detail = f"{short(loss)} is not there"
            trl.write("pairs.loss", "sigmoid", "loss_type", detail=detail, fate="missing")
    elif trl.kind == "SFTConfig":
        only = "the loss of sft is the mean over tokens of -log p"
        if loss in ("nll", "chunked_nll"):
            trl.note("loss_type", "unneeded", only)
        else:
            trl.note("loss_type", "missing", f"{only}; {short(loss)} is not there")


def write_group_objective(trl: Configuration, loss: str) -> None:
    """Write the objective of GRPOConfig, with what differs from TRL's loss of that name."""
    preset, known = preset_of(trl), ("dapo", *PRESETS)
    if loss not in known:
        detail = f"TRL 1.16 knows {', '.join(known)}{closest(loss, PRESETS)}"
        trl.write("objective", preset, "loss_type", detail=detail, fate="missing")
        return
    details = []
    if loss == "dapo":
        details.append("TRL's dapo is a mean over tokens")
    if loss == "bnpo" and trl.microbatches > 1:
        details.append("the mean over the step's tokens; TRL takes one in each micro-batch")
    if loss in ("dapo", "cispo", "vespo") and trl.batch.minibatches > 1:
        details.append("the mean over the minibatch's tokens; TRL divides by the rollout's mean")
    if loss == "cispo" and trl.get("epsilon_high") is None:
        cap = trl.number("epsilon")
        details.append(f"ratios are capped at 5; TRL's cap is epsilon, {cap:g} for every token")
    trl.write("objective", preset, "loss_type", detail="; ".join(details))


def write_credit(trl: Configuration) -> None:
    """Write how rewards become advantages, where the preset's way is another."""
    if trl.kind == "RLOOConfig":
        if trl.get("normalize_advantages"):
            leave_one_out = {"name": "leave_one_out", "scale": "batch"}
            trl.write("group.credit", leave_one_out, "normalize_advantages")
        return
    if trl.kind != "GRPOConfig":
        return
    name = "scale_rewards"
    if trl.get("multi_objective_aggregation") == "normalize_then_sum":
        trl.write("group.credit", "decoupled", "multi_objective_aggregation")
        trl.unused("normalize_then_sum scales by itself", name)
        return
    scale = str(trl.get(name))
    scale = {"True": "group", "False": "none"}.get(scale, scale)
    plain = preset_of(trl) == "dr_grpo"
    if scale == ("none" if plain else "group"):
        trl.note(name, "same", "group.credit: the objective's")
        return
    detail = "TRL's loss_type dr_grpo leaves it to scale_rewards" if plain else ""
    trl.write("group.credit", {"name": "standardized", "scale": scale}, name, detail=detail)


def write_ratio(trl: Configuration) -> None:
    """Write the level of the importance ratio, where it is not the preset's."""
    name, preset = "importance_sampling_level", preset_of(trl)
    if trl.kind != "GRPOConfig":
        return
    sequence = trl.get(name) == "sequence"
    if preset == "vespo":
        trl.unused("the weight of vespo is the completion's at both levels", name)
    elif sequence == (preset == "luspo"):
        trl.note(name, "same", "group.ratio: the objective's")
    elif preset == "luspo":
        trl.write("group.ratio", "token", name)
    else:
        detail = ""
        if trl.get("beta") and trl.get("use_bias_correction_kl"):
            detail = "the KL is weighed by the token's ratio, TRL's by the completion's"
        trl.write("group.ratio", "sequence_mean", name, detail=detail)


def write_surrogate(trl: Configuration) -> None:
    """Write the bounds of the surrogate, where they are not the preset's."""
    preset = preset_of(trl)
    if not trl.online:
        return
    for loss, keywords in SURROGATES.items():
        if loss != preset:
            trl.unused(f"loss_type is not {loss}", *keywords)
    if preset in SURROGATES:
        trl.unused(f"{preset} does not clip", *BOUNDS)
        keywords = SURROGATES[preset]
        value = {keywords[name]: trl.number(name) for name in keywords if name in trl.arguments}
        if value:
            trl.write("group.surrogate", {"name": preset, **value}, *keywords)
    elif preset == "cispo":
        trl.unused("cispo has a cap, epsilon_high", "epsilon", "delta")
        write_capped(trl)
    else:
        low = trl.number("epsilon")
        clipped = {"name": "clipped", "low": low, "high": trl.number("epsilon_high", null=low)}
        if trl.get("delta") is not None:
            clipped["delta"] = trl.number("delta")
        if preset == "luspo" or clipped != {"name": "clipped", "low": 0.2, "high": 0.2}:
            trl.write("group.surrogate", clipped, *BOUNDS)
        else:
            for name in BOUNDS:
                trl.note(name, "same", "group.surrogate: its default")


def write_capped(trl: Configuration) -> None:
    """Write the cap of cispo."""
    name = "epsilon_high"
    if trl.get(name) is None:
        return
    cap = trl.number(name)
    if cap > 1.0:
        trl.write("group.surrogate", {"name": "cispo", "cap": cap}, name)
    else:
        lost = f"a cap is above 1 and stays at 5; TRL's {cap:g} weighs every token with it"
        trl.note(name, "missing", lost)


def write_kl(trl: Configuration) -> None:
    """Write the weight of the KL, and its estimator."""
    name = "use_bias_correction_kl"
    if trl.kind not in ("DPOConfig", "RLOOConfig", "GRPOConfig"):
        return
    beta = trl.number("beta", null=0.0)
    if trl.kind == "DPOConfig":
        trl.write("pairs.beta", beta, "beta")
    elif trl.kind == "RLOOConfig":
        trl.write("group.beta", beta, "beta", detail="for the KL in the reward")
    elif beta:
        trl.write("group.beta", beta, "beta")
        trl.write("group.kl", "k3_ratio" if trl.get(name) else "k3", name)
    else:
        trl.unused("beta is 0", name)


def write_moving_reference(trl: Configuration) -> None:
    """Write how the reference follows the policy."""
    steps, mix = "ref_model_sync_steps", "ref_model_mixup_alpha"
    if not trl.arguments.get("sync_ref_model"):
        trl.unused("sync_ref_model is off", steps, mix)
    elif trl.kind == "DPOConfig":
        trl.note("sync_ref_model", "missing", "the reference of pairs does not move")
    elif trl.online:
        count = trl.our_steps(steps, None) or 1
        trl.write("group.reference_refresh", count, steps, "sync_ref_model")
        trl.write("group.reference_mix", trl.number(mix), mix)


def write_entropy(trl: Configuration) -> None:
    """Write the entropy bonus, constant or adaptive, and the mask of high entropies."""
    adaptive = {
        "entropy_target": "entropy_target",
        "entropy_coef_max": "entropy_bonus",
        "entropy_coef_delta": "entropy_step",
    }
    if trl.kind != "GRPOConfig":
        return
    if trl.arguments.get("use_adaptive_entropy"):
        for name, key in adaptive.items():
            trl.write(f"group.{key}", trl.number(name), name)
        moves = "the coefficient moves before a step, by the entropy of its completions; TRL's"
        moves += " moves behind it, and its first step has none"
        trl.note("use_adaptive_entropy", "changed", moves)
        trl.note("entropy_coef", "changed", "an adaptive coefficient begins at 0")
    else:
        trl.unused("use_adaptive_entropy is off", *adaptive, "entropy_coef_min")
        if trl.arguments.get("entropy_coef"):
            write_constant_bonus(trl)
    upper = trl.made("top_entropy_quantile", float, trl.get("top_entropy_quantile"))
    if upper < 1.0:
        name, detail = "top_entropy_quantile", ""
        if trl.microbatches > 1:
            detail = "a quantile of the step's tokens; TRL's of each micro-batch's"
        trl.write("group.entropy_quantile", round(1.0 - upper, 12), name, detail=detail)


def write_constant_bonus(trl: Configuration) -> None:
    """Write the coefficient of a constant entropy bonus."""
    name, detail, fate = "entropy_coef", "", None
    if trl.microbatches > 1:
        detail = "for the mean over the step's tokens; TRL takes one in each micro-batch"
        fate: Fate | None = "changed"
    trl.write("group.entropy_bonus", trl.number(name), name, detail=detail, fate=fate)


def write_masks(trl: Configuration) -> None:
    """Write which tokens are left out, and the centering of a reward model."""
    if trl.arguments.get("mask_truncated_completions"):
        trl.write("group.truncated", "mask", "mask_truncated_completions")
    numbers = {
        "off_policy_mask_threshold": "group.off_policy_delta",
        "center_rewards_coefficient": "reward_model.centering",
    }
    for name, key in numbers.items():
        if trl.arguments.get(name):
            trl.write(key, trl.number(name), name)


CONVERTERS = (
    write_objective,
    write_credit,
    write_ratio,
    write_surrogate,
    write_kl,
    write_moving_reference,
    write_entropy,
    write_masks,
)
