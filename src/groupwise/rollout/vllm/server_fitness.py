"""Whether a vLLM server, or vLLM in this process, can sample for a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.errors import EngineError
from groupwise.models.lora import is_untied
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape, names_experts
from groupwise.rollout.vllm.client import Client, RefusedRequest
from groupwise.rollout.vllm.plugin.groupwise_versions import FORMAT
from groupwise.rollout.vllm.published import UPDATE_SECONDS

Facts = Mapping[str, Any]
"""What `groupwise_vllm.Extension.groupwise_facts` says of a server."""

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that vLLM's attention knows on a CPU; with another it dies at the first completion.
"""


def meet(client: Client, policy: Policy) -> Facts:
    """Ask a server what it is.  Raises PeerError if it is gone or silent, EngineError if it cannot
    sample for a policy.
    """
    body = {"method": "groupwise_facts"}
    try:
        facts = client.post("/collective_rpc", body, timeout=UPDATE_SECONDS)["results"][0]
    except EngineError as error:
        if isinstance(error, RefusedRequest) and error.passing:
            raise
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
    # Mixtral on vLLM 0.32's CPU build: after an update log-probs were off by a nat.
    if names_experts(config):
        return "on a CPU the new weights of a mixture of experts do not all reach its experts"
    return None
