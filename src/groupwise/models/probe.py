"""Proof, before anything is trained, that every path through a model gives what its own forward pass gives.

The reference is transformers' own forward and backward pass, one sequence at a time.  Against it stand the paths that a run takes:
packed log-probs (`scoring`), the fused loss and its gradients (`training`), the same with blocks computed again (`recompute`) and
under an adapter (`adapter`); `rollout/probe.py` adds sampling.  Sequences lie side by side, some share a prompt, and their lengths
lie on both sides of every length at which the configuration or the masks change something.

A small copy of the architecture (`models/small.py`) is compared in values and gradients; the checkpoint itself in the values of a
few short sequences.  What differs is refused.

n tokens of a completion   V vocabulary
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.errors import ConfigError
from groupwise.models import rope
from groupwise.models.attention import plain_attention, use_packed_attention
from groupwise.models.fused import fused_modules
from groupwise.models.masks import ATTRIBUTE, Reach, note_reach
from groupwise.models.policy import Policy
from groupwise.objective.inplace import summed_in_place
from groupwise.objective.logprobs import chosen_logprobs
from groupwise.packing import pack, unpack
from groupwise.records import Sample

VALUES, GRADIENTS = 2e-4, 2e-3
"""Largest differences in float32: of a log-prob in nats; of a parameter's gradient, relative to its norm."""
LONGEST = 96
"""Tokens of the longest sequence that is compared."""
PATHS = ("scoring", "training", "recompute", "adapter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was compared, and found to be equal."""

    family: str
    paths: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of the sequences that were compared."""
    switches: tuple[int, ...]
    """Lengths at which the model changes something, which sequences lie on both sides of."""
    difference: float
    """The largest of a log-prob, in nats."""

    @property
    def line(self) -> str:
        """One line for the log."""
        beyond = f", across {', '.join(map(str, self.switches))}" if self.switches else ""
        return (
            f"{self.family}: {', '.join(self.paths)} equal its own forward pass at {len(self.lengths)} lengths from "
            f"{self.lengths[0]} to {self.lengths[-1]}{beyond} (log-probs to {self.difference:.0e})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """By the model's own forward and backward pass."""

    logp: list[np.ndarray]
    """Per sample (n,), nats."""
    gradient: dict[str, Tensor]


def wrapped(model: PreTrainedModel, attention: str) -> Policy:
    """A policy around a model that no tokenizer belongs to: a tenth of its ids belong to no token."""
    rows = model.get_input_embeddings().weight.shape[0]
    rope.follow_lengths(model)
    if attention == "single":
        with suppress(ConfigError):  # only to know its windows
            note_reach(model)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    else:
        use_packed_attention(model)
    return Policy(
        model=model.eval(),
        tokenizer=None,  # type: ignore[arg-type]
        eos_ids=(),
        pad_id=0,
        vocabulary=int(rows - rows // 10),  # type: ignore[operator]
        context=positions(model),
        attention=attention,
        switches=rope.switches(model),
    )


def positions(model: PreTrainedModel) -> int:
    """Longest sequence that is compared: what fits into learned positions, and no more than is worth it."""
    text: Any = model.config.get_text_config()
    changes = rope.switches(model)
    most = getattr(text, "max_position_embeddings", None) or LONGEST
    return LONGEST if changes else min(int(most), LONGEST)


def switches(model: PreTrainedModel) -> tuple[int, ...]:
    """Lengths above which the model computes otherwise: windows and chunks of its masks, frequencies, steps of a temperature."""
    found = {at for at, _ in rope.switches(model)}
    for module in model.modules():
        reach: Reach = vars(module).get(ATTRIBUTE, Reach())
        found |= {reach.window, reach.chunk}
    text: Any = model.config.get_text_config()
    found |= {getattr(text, key, None) for key in ("floor_scale", "original_max_position_embeddings")}
    return tuple(sorted(size for size in found if size))


def samples_across(switches: Sequence[int], longest: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Groups whose prompts and completions end on both sides of every switch; at most `longest` tokens each."""
    rng = np.random.default_rng(seed)
    ends = {5, 9, 14}
    for at in switches:
        ends |= {at - 1, at, at + 1, at + 2, 2 * at + 3}
    ends = {min(max(end, 4), longest - 1) for end in ends}
    top = max(ends)
    prompts = {2, top // 3, 2 * top // 3 + 1, *(at + 1 for at in switches if at + 3 < top)}
    samples = []
    for group, prompt in enumerate(sorted(prompts)):
        tokens = rng.integers(0, vocabulary, size=max(prompt, 1))
        # Every end once, shared out over the prompts that lie before it; each prompt has at least two completions.
        own = [end for i, end in enumerate(sorted(ends)) if end > prompt and (i % len(prompts) == group or end == top)]
        for end in [*own, prompt + 2]:
            n = end + 1 - tokens.size  # the last token is predicted and not computed
            samples.append(
                Sample(
                    group=str(group),
                    prompt=tokens,
                    completion=rng.integers(0, vocabulary, size=max(n, 1)),
                    weight=rng.random(max(n, 1)) + 0.1,
                    advantage=np.zeros(max(n, 1)),
                    behavior_logp=np.zeros(max(n, 1)),
                )
            )
    return samples


def truth(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> Truth:
    """The model's own forward pass, one sequence at a time, and its gradients of the weighted sum of squared log-probs."""
    model = policy.model.eval()
    model.zero_grad(set_to_none=True)
    found = []
    with plain_attention(model), torch.enable_grad() if gradients else torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]])).to(policy.device)
            with policy.precision():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, sample.prompt.size - 1 :, : policy.vocabulary]
            logp_NV = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            logp_N = logp_NV.gather(1, torch.from_numpy(sample.completion).to(policy.device)[:, None])[:, 0]
            if gradients:
                weight_N = torch.from_numpy(sample.weight).to(logp_N)
                (weight_N * logp_N.square()).sum().backward()
            found.append(logp_N.detach().double().cpu().numpy())
    return Truth(found, taken(model) if gradients else {})


def taken(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a model, which are taken away from it."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def by_policy(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> Truth:
    """The same as a run computes it: packed, fused, gradients summed in place."""
    policy.model.zero_grad(set_to_none=True)
    budget = sum(sample.prompt.size + sample.completion.size for sample in samples)
    found = [np.zeros(sample.completion.size) for sample in samples]
    with (
        torch.enable_grad() if gradients else torch.no_grad(),
        fused_modules(policy.model, keep=not policy.sharded),
        summed_in_place(gradients and not policy.sharded),
    ):
        how = {"share": policy.attention == "shared", "alike": policy.alike, "fill": policy.tiled}
        for batch in pack(samples, budget, device=policy.device, dtype=torch.promote_types(policy.dtype, torch.float32), **how):
            rows_M = batch.trained_M
            hidden_MD = policy.forward(batch).hidden_PD[rows_M]
            with policy.precision():
                logp_M, _ = chosen_logprobs(hidden_MD, policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M])
            if gradients:
                (batch.weight_P[rows_M].to(logp_M) * logp_M.square()).sum().backward()
            logp_P = logp_M.new_zeros(batch.layout.total)
            logp_P[rows_M] = logp_M.detach()
            for index, values in unpack(batch, logp_P, samples):
                found[index] = values.astype(np.float64)
    return Truth(found, taken(policy.model) if gradients else {})


REMEDIES = {
    "scoring": "set model.attention to 'single' and rollout.engine to 'transformers'",
    "training": "set model.attention to 'single' and rollout.engine to 'transformers'",
    "recompute": "set model.gradient_checkpointing to false",
    "adapter": "leave model.lora out",
}


def compare(family: str, path: str, found: Truth, expected: Truth, remedy: str, slack: float = 1.0) -> float:
    """The largest difference of a log-prob.  Raises ConfigError if it, or a gradient's, is too large; `slack` times what is."""
    worst, said = 0.0, ""
    for ours, theirs in zip(found.logp, expected.logp, strict=True):
        difference = float(np.abs(ours - theirs).max())
        if not difference <= worst:
            worst, said = difference, f"a log-prob of a completion of {len(ours)} tokens differs by {difference:.2g} nats"
    if not worst <= VALUES * slack:
        raise ConfigError(refusal(family, path, said, remedy))
    if lost := expected.gradient.keys() - found.gradient.keys():
        raise ConfigError(refusal(family, path, f"{min(lost)} gets no gradient", remedy))
    size = max((float(gradient.norm()) for gradient in expected.gradient.values()), default=0.0)
    for name, theirs in expected.gradient.items():
        difference = float((found.gradient[name] - theirs).norm()) / (float(theirs.norm()) + 1e-3 * size)
        if not difference <= GRADIENTS * slack:
            raise ConfigError(refusal(family, path, f"the gradient of {name} differs by {difference:.2g} of its norm", remedy))
    return worst


def refusal(family: str, path: str, said: str, remedy: str) -> str:
    """What a user is told of a path that differs."""
    return f"{family} cannot be trained like this: {path} does not equal the model's own forward pass ({said}); {remedy}"


def prove(model: PreTrainedModel, *, attention: str = "shared", paths: Sequence[str] = PATHS, seed: int = 0) -> Proof:
    """Compare paths through a model with its own forward and backward pass.  Raises ConfigError for what differs.

    The model is small, in float32, on the CPU, and comes back in eval mode with its weights as they were.
    paths: of `PATHS`; those that a model has not (it has no layers that can recompute) are left out.
    """
    family = type(model).__name__
    remedy = REMEDIES if attention != "single" else REMEDIES | dict.fromkeys(("scoring", "training"), "use another model")
    policy = wrapped(model, attention)
    samples = samples_across(switches(model), policy.context, policy.vocabulary, seed)
    expected = truth(policy, samples, gradients=True)
    _check_truth(policy, samples, expected)
    case = Case(policy, samples, expected)
    proven, worst = [], 0.0
    for path in paths:
        found = _PATHS[path](case)
        if found is not None:
            worst = max(worst, compare(family, path, *found, remedy[path]))
            proven.append(path)
    model.eval()
    return Proof(
        family=family,
        paths=tuple(proven),
        lengths=tuple(sorted({sample.prompt.size + sample.completion.size - 1 for sample in samples})),
        switches=switches(model),
        difference=worst,
    )


def _check_truth(policy: Policy, samples: Sequence[Sample], expected: Truth) -> None:
    """Raises ConfigError for a model whose own forward pass is noisy, or lets tokens see what comes after them."""
    family = type(policy.model).__name__
    place = min(range(len(samples)), key=lambda i: (samples[i].completion.size < 3, samples[i].prompt.size))
    sample, n = samples[place], samples[place].completion.size
    (again,) = truth(policy, [sample], gradients=False).logp
    if not np.abs(again - expected.logp[place]).max() <= VALUES / 10:
        raise ConfigError(f"{family} gives other log-probs each time it is asked: set the dropout in its config.json to 0")
    shorter = {key: getattr(sample, key)[: n - 1] for key in ("completion", "weight", "advantage", "behavior_logp")}
    (before,) = truth(policy, [replace(sample, **shorter)], gradients=False).logp
    if not np.abs(before - again[: n - 1]).max() <= VALUES:
        raise ConfigError(f"{family} lets tokens see what comes after them: it is no causal language model, and cannot be trained")


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A policy, what it is asked, and the true answers."""

    policy: Policy
    samples: Sequence[Sample]
    expected: Truth


def _scoring(case: Case) -> tuple[Truth, Truth]:
    return by_policy(case.policy, case.samples, gradients=False), replace(case.expected, gradient={})


def _training(case: Case) -> tuple[Truth, Truth]:
    case.policy.model.train()  # whatever mode somebody has left it in, nothing is dropped
    return by_policy(case.policy, case.samples, gradients=True), case.expected


def _recompute(case: Case) -> tuple[Truth, Truth] | None:
    if not case.policy.recomputes:
        return None
    case.policy.model.train()
    with case.policy.checkpointing(True):
        return by_policy(case.policy, case.samples, gradients=True), case.expected


def _adapter(case: Case) -> tuple[Truth, Truth] | None:
    from groupwise.models.lora import adapt  # peft is optional

    policy, samples = replace(case.policy, model=copy.deepcopy(case.policy.model)), case.samples[:4]
    adapted = adapt(policy, {"rank": 4, "alpha": 8, "targets": sorted(_linear_names(policy.model))}, base="")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    off = by_policy(adapted.frozen_copy(), samples, gradients=False)
    expected = truth(adapted, samples, gradients=True)
    found = by_policy(adapted, samples, gradients=True)
    base = Truth(case.expected.logp[: len(samples)], {})
    return Truth([*found.logp, *off.logp], found.gradient), Truth([*expected.logp, *base.logp], expected.gradient)


def _linear_names(model: PreTrainedModel) -> set[str]:
    """What an adapter can lie on: linear layers but the output head, whose names are no stacked experts' too."""
    stacked = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    linear = {name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)}
    output = model.get_output_embeddings()
    return {name.rpartition(".")[2] for name in linear if model.get_submodule(name) is not output} - stacked


_PATHS: dict[str, Callable[[Case], tuple[Truth, Truth] | None]] = {
    "scoring": _scoring,
    "training": _training,
    "recompute": _recompute,
    "adapter": _adapter,
}
