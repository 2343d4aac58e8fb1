"""The mismatch meter names each of four faults that are planted, and none where none of them is.

The faulty log-probs are made here, by transformers' own forward pass, not by what the meter uses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from groupwise.models.policy import Policy
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.training.mismatch import diagnose
from groupwise.training.passes import score
from groupwise.training.samples import sample_of

Logp = list[np.ndarray]


@pytest.fixture(scope="module")
def policy(tiny_policy: Callable[..., Policy]) -> Policy:
    """Sharp enough that a wrong cause changes log-probs by tenths."""
    return tiny_policy("gpt2", scale=4.0)


def drawn(policy: Policy, **sampling: Any) -> list[Rollout]:
    rng = np.random.default_rng(1)
    prompts = [Prompt(id=f"0/{i}", tokens=rng.integers(5, policy.vocabulary, size=4 + i), text="") for i in range(4)]
    how = Sampling(**{"temperature": 0.7, "max_new_tokens": 16} | sampling)
    groups = NativeEngine(policy, max_rows=8).generate(prompts, group_size=2, sampling=how, seed=0)
    return [rollout for group in sorted(groups, key=lambda g: g[0].prompt.id) for rollout in group]


@torch.no_grad()
def logits_of(policy: Policy, rollout: Rollout) -> torch.Tensor:
    ids = torch.tensor([[*rollout.prompt.tokens, *rollout.tokens]])
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    return model(input_ids=ids, use_cache=False).logits[0, rollout.prompt.tokens.size - 1 : -1, : policy.vocabulary].float()


def logp_of(logits: torch.Tensor, rollout: Rollout, temperature: float | None = None, top_k: int = 0) -> np.ndarray:
    z = logits / (temperature or rollout.sampling.temperature)
    if top_k:
        own = z[torch.arange(len(rollout)), torch.from_numpy(rollout.tokens)]
        floor = torch.minimum(z.topk(top_k).values[:, -1], own)  # what was drawn is kept
        z = z.masked_fill(z < floor[:, None], -torch.inf)
    return z.log_softmax(-1)[torch.arange(len(rollout)), torch.from_numpy(rollout.tokens)].numpy()


def told(rollouts: Sequence[Rollout], logp: Sequence[np.ndarray]) -> list[Rollout]:
    return [replace(rollout, behavior_logp=values) for rollout, values in zip(rollouts, logp, strict=True)]


def found(policy: Policy, rollouts: Sequence[Rollout], scored: Logp | None = None, **more: Any) -> Any:
    scored = score(policy, [sample_of(r) for r in rollouts], max_tokens_per_microbatch=500).logp if scored is None else scored
    return diagnose(policy, rollouts, scored, **more)


def named(diagnosis: Any, cause: str, side: str = "sampler") -> None:
    assert diagnosis.cause is not None, str(diagnosis)
    assert (diagnosis.cause.name, diagnosis.side) == (cause, side), str(diagnosis)
    assert diagnosis.cause.explained >= 0.9
    assert diagnosis.gap > 1e-3
    assert cause in str(diagnosis)


@pytest.mark.parametrize(("temperature", "says"), [(1.0, "temperature 1"), (1.4, "fit temperature 1.4, not 0.7")])
def test_temperature(policy: Policy, temperature: float, says: str) -> None:
    rollouts = drawn(policy)
    wrong = [logp_of(logits_of(policy, r), r, temperature=temperature) for r in rollouts]
    diagnosis = found(policy, told(rollouts, wrong))
    named(diagnosis, "temperature")
    assert says in str(diagnosis)


def test_truncated_support_that_nobody_asked_for(policy: Policy) -> None:
    sampled = drawn(policy, top_k=20)
    rollouts = [replace(r, sampling=replace(r.sampling, top_k=0), support=None) for r in sampled]
    diagnosis = found(policy, rollouts)
    named(diagnosis, "truncated support")
    assert "top_k 20" in str(diagnosis)
    assert "top_p" not in str(diagnosis), "only what truncates is named"


def test_truncated_support_that_was_ignored(policy: Policy) -> None:
    rollouts = drawn(policy, top_p=0.7)
    whole = [logp_of(logits_of(policy, r), r) for r in rollouts]
    named(found(policy, told(rollouts, whole)), "truncated support")


def test_dtype(policy: Policy) -> None:
    low = replace(policy, model=copy.deepcopy(policy.model).bfloat16())
    rollouts = drawn(policy)
    wrong = [logp_of(logits_of(low, r), r) for r in rollouts]
    diagnosis = found(policy, told(rollouts, wrong))
    named(diagnosis, "dtype")
    assert "bfloat16" in str(diagnosis)


def test_stale_weights(policy: Policy, tiny_policy: Callable[..., Policy]) -> None:
    old = frozen_copy(policy)
    with torch.no_grad():
        for parameter in old.model.parameters():
            parameter.mul_(0.9)
    older = {"those of the last sync": old, "those of another run": tiny_policy("gpt2", scale=4.0, seed=5)}
    diagnosis = found(policy, drawn(old), older=older)
    named(diagnosis, "stale weights")
    assert "those of the last sync" in str(diagnosis)


def test_an_unexplained_difference_has_no_cause(policy: Policy) -> None:
    rng = np.random.default_rng(0)
    rollouts = drawn(policy)
    diagnosis = found(policy, told(rollouts, [r.behavior_logp + rng.normal(size=len(r)) for r in rollouts]))
    assert diagnosis.cause is None
    assert "none of the usual causes" in str(diagnosis)
    assert {cause.name for cause in diagnosis.tried} == {"temperature", "truncated support", "dtype"}
    assert diagnose(policy, [], []) is None
