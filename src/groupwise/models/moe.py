"""The loss that balances the experts of a mixture, over the whole of an optimizer step.

The load-balancing loss is a product of two means over tokens.  Of the one no gradient is taken: it
is counted in a pass before, over all batches and processes; the other is then a sum over tokens
like every loss.

P positions   E experts   K experts of a token   L layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.attention import PackedAttention
from groupwise.models.backbone import run_backbone
from groupwise.models.policy import Policy
from groupwise.records import Batch, Routing

BALANCE = (
    "set output_router_logits to false in its config.json: its experts are then trained without a"
    " loss that balances them"
)


def router_coefficient(policy: Policy) -> float:
    """Weight of a mixture of experts' load-balancing loss; 0 unless its config asks for
    `output_router_logits`.
    """
    config: Any = policy.model.config.get_text_config()
    wanted = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if wanted else 0.0


@torch.no_grad()
def balanced(policy: Policy, batches: list[Batch]) -> list[Batch]:
    """Batches of this process that know where the tokens of the whole step are sent, if the loss
    balances them.
    """
    if router_coefficient(policy) == 0.0 or policy.attention == "single":
        return batches
    routing = _routing(
        policy, batches, (_routed(policy, batch)[1] for batch in batches), comm.gather_work
    )
    return [replace(batch, routing=routing) for batch in batches]


def balance_pass(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states (P, D) of a packed batch, and its part of the step's load-balancing loss, times
    its coefficient.

    A batch that knows nothing of a step (`balanced`) is one.
    """
    hidden_PD, logits = _routed(policy, batch)
    routing = batch.routing or _routing(policy, [batch], [logits], lambda parts: parts)
    uses_P = torch.tensor(batch.layout.uses, dtype=torch.float32, device=policy.device)
    mass_LE = torch.stack(
        [uses_P @ layer_PE.softmax(-1, dtype=torch.float32) for layer_PE in logits]
    )
    balance = (routing.part_KE * (mass_LE.sum(0) / routing.tokens)).sum() * routing.part_KE.shape[1]
    return hidden_PD, router_coefficient(policy) * balance


def _routed(policy: Policy, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Hidden states (P, D), and what each layer's router says of its experts (P, E)."""
    attend = PackedAttention(batch.layout, batch.prepared)
    columns = (batch.tokens_P, batch.position_P, attend, batch.images)
    outputs = run_backbone(policy, *columns, output_router_logits=True)
    logits = [
        layer.view(batch.layout.total, -1)
        for layer in outputs.router_logits or ()
        if layer is not None
    ]
    if not logits:
        raise ConfigError(f"{type(policy.model).__name__} shows no router logits; {BALANCE}")
    return outputs.last_hidden_state[0], logits


def _routing(
    policy: Policy,
    batches: Sequence[Batch],
    logits: Iterable[list[Tensor]],
    gather: Callable[[list[Any]], list[Any]],
) -> Routing:
    """Count as `load_balancing_loss_func` of transformers, each sequence for itself.   gather: the
    counts of all processes.
    """
    chosen = policy.model.config.get_text_config().num_experts_per_tok
    parts = []
    for batch, layers in zip(batches, logits, strict=True):
        uses_P = torch.tensor(batch.layout.uses, dtype=torch.float32, device=policy.device)
        count_KE = torch.zeros(chosen, layers[0].shape[1], device=policy.device)
        for layer_PE in layers:
            best_PK = layer_PE.detach().softmax(-1, dtype=torch.float32).topk(chosen, -1).indices
            for k in range(chosen):
                count_KE[k].index_add_(0, best_PK[:, k], uses_P)
        parts.append((count_KE.tolist(), float(uses_P.sum()) * len(layers)))
    parts = gather(parts)
    tokens = max(sum(tokens for _, tokens in parts), 1.0)
    return Routing(
        torch.tensor([part for part, _ in parts], device=policy.device).sum(0) / tokens, tokens
    )
