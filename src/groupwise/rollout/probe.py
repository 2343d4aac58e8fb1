"""Proof that what an engine samples is what the model's own forward pass gives: prefill, decoding, truncated sampling.

Prompts lie on both sides of every length at which the model changes something, and completions grow across them, beside others of
other lengths.  The log-prob that a token was drawn with has to be the one that the model's own forward pass over the text gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from groupwise.errors import ConfigError, EngineError
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.models.probe import (
    LONGEST,
    PATHS,
    VALUES,
    Proof,
    compare_lower,
    dtype_of,
    in_words,
    lowered,
    proven_before,
    refusal,
    round_weights,
    switches,
    wrapped,
)
from groupwise.models.probe import prove as prove_training
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.engine import Engine
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine

PATH = "sampling"
REMEDY = "set rollout.engine to 'transformers'"
OTHERS = "sample it with rollout.engine 'vllm', or train it on data (sft, dpo)"
GROUP, ROWS, BEYOND = 2, 3, 6
"""Completions of a prompt; rows that are decoded at a time, so that some wait; tokens that completions grow beyond a switch."""


def prove(model: PreTrainedModel, *, attention: str = "shared", paths: Sequence[str] = (*PATHS, PATH), seed: int = 0) -> Proof:
    """`models.probe.prove`, and the engine that belongs to this attention: the native one, or transformers' with `single`."""
    proof = prove_training(model, attention=attention, paths=[path for path in paths if path != PATH], seed=seed)
    if PATH not in paths:
        return proof
    engine: Any = TransformersEngine if attention == "single" else NativeEngine
    remedy = OTHERS if engine is TransformersEngine else REMEDY
    lengths, worst = sampled(wrapped(model, attention), lambda policy: engine(policy, max_rows=ROWS), remedy=remedy, seed=seed)
    return replace(
        proof,
        paths=(*proof.paths, PATH),
        lengths=tuple(sorted({*proof.lengths, *lengths})),
        difference=max(proof.difference, worst),
    )


def prove_engine(policy: Policy, make: Callable[..., Engine]) -> Proof:
    """Prove that an engine of ours samples from policies of this kind, on a small copy; see `models.probe.prove_policy`.

    make: the engine's class.   Raises ConfigError.
    """

    remedy, dtype = OTHERS if make is TransformersEngine else REMEDY, dtype_of(policy)

    def run(small: PreTrainedModel) -> Proof:
        if dtype == "bfloat16":
            round_weights(small)
        ours = wrapped(small, policy.attention)
        lengths, worst = sampled(ours, lambda policy: make(policy, max_rows=ROWS), remedy=remedy, dtype=dtype)
        return Proof(family=type(small).__name__, paths=(PATH,), lengths=lengths, switches=switches(small), difference=worst)

    return proven_before(policy.model, (PATH, make.__name__, policy.attention, dtype), run)


@in_words
def sampled(
    policy: Policy, make: Callable[[Policy], Engine], *, remedy: str = REMEDY, dtype: str = "float32", seed: int = 0
) -> tuple[tuple[int, ...], float]:
    """Sample, and compare with the model's own forward pass: lengths that were sampled, and the largest difference in nats.

    dtype: where it is not float32, what is sampled in that type may lie as far from float32 as `models.probe.compare_lower` allows.
    Raises ConfigError if it is too large, or if the engine refuses the model.
    """
    family, changes = type(policy.model).__name__, switches(policy.model)
    policy = replace(policy, tokenizer=_NoText())
    longest = min(policy.context, LONGEST, max(changes, default=10) + BEYOND)
    rng = np.random.default_rng(seed)
    sizes = {1, 4, 9, *(at + step for at in changes for step in (-2, 1))}
    prompts = [
        Prompt(id=str(size), tokens=rng.integers(0, policy.vocabulary, size=size), text="", row={})
        for size in sorted(size for size in sizes if 0 < size < longest)
    ]
    whole = Sampling(temperature=1.0, max_new_tokens=longest)
    worst, lengths = 0.0, set()
    for asked, sampling in ((prompts, whole), (prompts[-2:], replace(whole, top_k=5, max_new_tokens=4))):
        try:
            rollouts = [
                rollout
                for group in make(policy).generate(asked, group_size=GROUP, sampling=sampling, seed=seed)
                for rollout in group
            ]
        except EngineError as error:
            raise ConfigError(refusal(family, PATH, str(error), remedy)) from error
        for rollout in rollouts:
            difference = float(np.abs(rollout.behavior_logp - _truth(policy, rollout)).max())
            if not difference <= VALUES:
                said = f"a completion of {len(rollout)} tokens behind {rollout.prompt.tokens.size} differs by {difference:.2g} nats"
                raise ConfigError(refusal(family, PATH, said, remedy))
            worst = max(worst, difference)
            lengths.add(rollout.prompt.tokens.size + len(rollout))
    if dtype != "float32":
        lower = lowered(policy, dtype)
        groups = make(lower).generate(prompts, group_size=GROUP, sampling=whole, seed=seed)
        rollouts = [rollout for group in groups for rollout in group]
        exact, own = (np.concatenate([_truth(by, rollout) for rollout in rollouts]) for by in (policy, lower))
        ours = np.concatenate([rollout.behavior_logp for rollout in rollouts])
        compare_lower(family, PATH, f"in {dtype} log-probs lie", ours - exact, own - exact, remedy)
    return tuple(sorted(lengths)), worst


@torch.no_grad()
def _truth(policy: Policy, rollout: Rollout) -> np.ndarray:
    """Log-probs of a rollout's tokens by the model's own forward pass over its text, over the support it was drawn from.

    With frequencies that depend on the length: over the text as it is without the token that was only drawn.
    """
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens[:-1]]))
    with plain_attention(policy.model) as model, policy.precision():
        logits_NV = model(input_ids=ids[None], use_cache=False).logits[0, rollout.prompt.tokens.size - 1 :, : policy.vocabulary]
    logits_NV = logits_NV.double() / (rollout.sampling.temperature or 1.0)
    found = []
    for row, (token, logits_V) in enumerate(zip(rollout.tokens, logits_NV, strict=True)):
        among = logits_V if rollout.support is None else logits_V[torch.from_numpy(rollout.support[row].astype(np.int64))]
        found.append(float(logits_V[int(token)] - among.logsumexp(0)))
    return np.array(found)


class _NoText:
    """In place of a tokenizer: tokens without a text."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """Nothing."""
        return ""
