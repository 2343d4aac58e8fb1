"""The vLLM servers that sample for a policy: whether they can, and how they come to its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from groupwise.errors import EngineError
from groupwise.models.lora import is_untied
from groupwise.models.policy import Policy
from groupwise.models.saving import merged
from groupwise.models.shape import Shape
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.plugin.groupwise_versions import FORMAT
from groupwise.rollout.vllm.published import (
    UPDATE_SECONDS,
)
from groupwise.utils.batching import batch_by_size

Facts = Mapping[str, Any]
"""What `groupwise_vllm.Extension.groupwise_facts` says of a server."""

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that vLLM's attention knows on a CPU; with another it dies at the first completion.
"""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call the number of experts.  Mixtral on vLLM 0.32's CPU build: after an update
log-probs were off by a nat.
"""
BUCKET_BYTES = 1 << 28
"""Weights that travel together."""


def meet(client: Client, policy: Policy) -> Facts:
    """Ask a server what it is.  Raises PeerError if it is gone or silent, EngineError if it cannot
    sample for a policy.
    """
    body = {"method": "groupwise_facts"}
    try:
        facts = client.post("/collective_rpc", body, timeout=UPDATE_SECONDS)["results"][0]
    except EngineError as error:
        raise EngineError(
            f"the server at {client.url} runs without Groupwise's plug-in for vLLM: start it"
            " with `groupwise serve MODEL`"
        ) from error
    if facts.get("format") != FORMAT:
        raise EngineError(
            f"{client.name} was started by another version of Groupwise: start it anew with"
            " `groupwise serve MODEL`"
        )
    if wrong := unfit(facts, policy):
        raise EngineError(f"{client.name} cannot sample for this policy: {wrong}")
    return facts


def unfit(facts: Facts, policy: Policy) -> str | None:
    """Why a server cannot sample for a policy, or None."""
    rows = policy.model.config.get_text_config().vocab_size
    if facts["device"] == "cpu" and (wrong := unfit_on_cpu(policy.model.config.to_dict())):
        return wrong
    if facts["logprobs"] != "processed_logprobs":
        return (
            f"it reports {facts['logprobs']}, which know no temperature; start it with"
            " --logprobs-mode processed_logprobs"
        )
    if facts["vocabulary"] != rows:
        return (
            f"its model has a vocabulary of {facts['vocabulary']}, the policy one of {rows}; start"
            " it with the policy's model"
        )
    if policy.adapter is not None and is_untied(policy.model):
        return (
            "its model has one matrix for embedding and head, of which"
            " model.lora.modules_to_save trains a copy; leave it out, or set rollout.engine to"
            " native"
        )
    return None


def unfit_on_cpu(config: dict[str, Any]) -> str | None:
    """Why vLLM cannot sample for a model on a CPU, or None.   config: transformers'."""
    width = Shape.of(config, 0, dtype="float32").head_width
    if width not in CPU_HEADS:
        return (
            f"its attention on a CPU knows heads of {', '.join(map(str, CPU_HEADS))} numbers, the"
            f" policy's have {width}"
        )
    if any(config.get(name) for name in EXPERTS):
        return "on a CPU the new weights of a mixture of experts do not all reach its experts"
    return None


def buckets(
    policy: Policy, dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[tuple[list[str], list[list[int]], Tensor]]:
    """A policy's weights by their checkpoint's names, in runs of up to `limit` bytes: (names,
    shapes, all of them as uint8).

    Adapters are merged into them; a tied head is sent as the embedding that it is.
    """
    model = merged(policy)
    weights = revert_weight_conversion(
        model, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    for bucket in batch_by_size(
        weights.items(), lambda named: named[1].numel() * dtype.itemsize, limit
    ):
        names, parts = zip(*bucket, strict=True)
        flat = torch.cat([part.to(dtype).reshape(-1) for part in parts])
        yield list(names), [list(part.shape) for part in parts], flat.view(torch.uint8)
