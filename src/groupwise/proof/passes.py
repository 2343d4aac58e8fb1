"""Two ways through a model: its own forward and backward pass, unpadded; and that of a run, packed and fused.

Both give the same of each text: log-probs of the completion's tokens, or a scoring model's score; and the gradients of the weighted
sum of their squares.

n tokens of a completion   V vocabulary   M read positions of a packed batch   P all of them
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from groupwise.data.packing import unpack
from groupwise.distributed import fsdp
from groupwise.models.attention import plain_attention
from groupwise.models.backbone import layers
from groupwise.models.fused import fused_modules
from groupwise.models.passes import forward, packed_for
from groupwise.models.policy import Policy
from groupwise.models.reward_head import head_scores, reads_tokens
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import chosen_logprobs
from groupwise.proof.texts import NEAR, Text

MANY = 30_000_000
"""Parameters of a model of which the gradients of all are compared; of a larger one see `some_gradients`."""


@dataclass(frozen=True, slots=True, eq=False)
class PassResults:
    """What one way gives of texts."""

    values: list[np.ndarray]
    """Of each: log-probs of its completion's tokens (n,), nats; of a scoring model its score (1,)."""
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """By parameter; of a sharded one this process's shard."""
    drawn: list[np.ndarray] = field(default_factory=list)
    """Of each that an engine drew: see `Text.drawn`."""
    first: list[Tensor] = field(default_factory=list)
    """Log-probs of all tokens right behind each prompt (V,)."""


def model_pass(policy: Policy, texts: Sequence[Text], *, gradients: bool) -> PassResults:
    """By the model's own pass: one text at a time, or short ones of one length beside each other."""
    model, scores, device = policy.model.eval(), reads_tokens(policy), policy.device
    values, first, drawn = dict[int, np.ndarray](), dict[int, Tensor](), dict[int, np.ndarray]()
    model.zero_grad(set_to_none=True)
    few = "logits_to_keep" in inspect.signature(model.forward).parameters
    batches: dict[tuple[int, int], list[int]] = {}
    for place, text in enumerate(texts):
        batches.setdefault((text.size, place if scores or text.size > NEAR else -1), []).append(place)
    with plain_attention(model), torch.set_grad_enabled(gradients):
        for places in batches.values():
            samples = [texts[place].sample for place in places]
            ids = torch.from_numpy(np.stack([np.concatenate([one.prompt, one.completion[:-1]]) for one in samples])).to(device)
            options = {"logits_to_keep": max(one.completion.size for one in samples)} if few else {}
            with policy.precision():
                logits = model(input_ids=ids, use_cache=False, **options).logits
            logits, losses = logits.to(torch.promote_types(logits.dtype, torch.float32)), []
            for place, sample, value_N in zip(places, samples, logits, strict=True):
                if not scores:
                    logits_NV = value_N[-sample.completion.size :, : policy.vocabulary]
                    logp_NV = logits_NV.log_softmax(-1)
                    value_N = logp_NV.gather(1, torch.from_numpy(sample.completion).to(device)[:, None])[:, 0]
                    first[place] = logp_NV[0].detach()
                    if texts[place].rollout is not None:
                        drawn[place] = _drawn(texts[place], logits_NV.detach().double())
                losses.append((torch.from_numpy(sample.weight[sample.weight > 0]).to(value_N) * value_N.square()).sum())
                values[place] = value_N.detach().double().cpu().numpy()
            if losses[0].requires_grad:
                torch.stack(losses).sum().backward()
    return PassResults(
        values=[values[place] for place in sorted(values)],
        gradient=take_gradients(policy) if gradients else {},
        drawn=[drawn[place] for place in sorted(drawn)],
        first=[first[place] for place in sorted(first)],
    )


def _drawn(text: Text, logits_NV: Tensor) -> np.ndarray:
    """Log-probs of a rollout's tokens at its temperature, over the support that it was drawn from."""
    rollout, count = text.rollout, logits_NV.shape[0]
    assert rollout is not None
    logits_NV = logits_NV / (rollout.sampling.temperature or 1.0)
    chosen_N = torch.from_numpy(rollout.tokens[:count]).to(logits_NV.device)
    logp_N = logits_NV.gather(1, chosen_N[:, None])[:, 0]
    for n, logits_V in enumerate(logits_NV):
        among = (
            slice(None) if rollout.support is None else torch.from_numpy(rollout.support[n].astype(np.int64)).to(logits_V.device)
        )
        logp_N[n] -= logits_V[among].logsumexp(0)
    return logp_N.cpu().numpy()[rollout.trained[:count]]


def run_pass(policy: Policy, texts: Sequence[Text], *, gradients: bool) -> PassResults:
    """As a run computes it: all in one stream, prompts shared, fused, gradients of head and embedding summed in place."""
    model, scores, samples = policy.model, reads_tokens(policy), [text.sample for text in texts]
    model.zero_grad(set_to_none=True)
    values = [np.zeros(0) for _ in texts]
    with (
        torch.set_grad_enabled(gradients),
        fused_modules(model, keep=not policy.sharded),
        summed_in_place(gradients and not policy.sharded),
    ):
        for batch in packed_for(policy, samples, sum(text.size + 1 for text in texts)):
            rows_M = batch.trained_M
            hidden_MD = forward(policy, batch).hidden_PD[rows_M]
            if scores:
                value_M = head_scores(policy, hidden_MD)
            else:
                with policy.precision():
                    value_M, _ = chosen_logprobs(hidden_MD, policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M])
            if gradients and value_M.requires_grad:
                (batch.weight_P[rows_M].to(value_M) * value_M.square()).sum().backward()
            value_P = value_M.new_zeros(batch.layout.total)
            value_P[rows_M] = value_M.detach()
            for index, column in unpack(batch, value_P, samples):
                values[index] = column[samples[index].weight > 0].astype(np.float64)
    model.eval()
    return PassResults(values, take_gradients(policy) if gradients else {})


def take_gradients(policy: Policy) -> dict[str, Tensor]:
    """The gradients of a model, which are taken away from it."""
    parameters = policy.model.named_parameters()
    gradients = {name: fsdp.own(p.grad).detach().clone() for name, p in parameters if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    return gradients


@contextmanager
def some_gradients(policy: Policy, *, head: bool) -> Iterator[None]:
    """Inside, a model of more than `MANY` parameters takes no gradient of the matrices between its first and its last block.

    What flows through these blocks is seen by the gradients before them, and by those of their norms and biases.
    head: of its embedding and its head, which cost as much as all others.
    """
    model = policy.model
    many = not policy.sharded and sum(p.numel() for p in model.parameters()) > MANY
    between = [p for block in layers(policy)[1:-1] for p in block.parameters() if p.ndim > 1] if many else []
    parts = [] if head else [model.get_input_embeddings(), model.get_output_embeddings()]
    tables = [part.weight for part in parts if part is not None]
    left_out = [p for p in (*between, *tables) if p.requires_grad]
    for parameter in left_out:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in left_out:
            parameter.requires_grad_(True)
