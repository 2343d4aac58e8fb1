"""Instruction tuning: the loss of the completion, EOS included, or of every token, against one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from groupwise import train
from groupwise.config.recipes import parse_stages
from groupwise.data.encoding import Demonstration
from groupwise.models.attention import plain_attention
from groupwise.models.policy import Policy
from groupwise.training.offline import SFT, validate

ROWS = [
    Demonstration(id=str(i), prompt=np.array(prompt), completion=np.array(completion))
    for i, (prompt, completion) in enumerate([([7, 8, 9], [10, 11, 1]), ([7], [1]), ([5, 6], [12, 13, 14, 15, 1])])
]


@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 1000])
@pytest.mark.parametrize("train_on", ["completion", "all"])
def test_the_loss_is_the_mean_over_the_tokens_that_are_trained(
    tiny_policy: Callable[..., Policy], train_on: str, max_tokens_per_microbatch: int
) -> None:
    policy = tiny_policy(dtype=torch.float64)
    rows = ROWS if train_on == "completion" else [row.whole for row in ROWS]
    logps = []
    with plain_attention(policy.model), torch.no_grad():
        for row in ROWS:
            ids = torch.from_numpy(np.concatenate([row.prompt, row.completion]))
            logp = torch.log_softmax(policy.model(input_ids=ids[None]).logits[0, :-1, : policy.vocabulary], -1)
            first = row.prompt.size - 1 if train_on == "completion" else 0  # what a token is predicted from stands before it
            logps.append(logp.gather(1, ids[1:, None])[first:, 0])
    expected = -torch.cat(logps).mean().item()
    assert validate(policy, SFT, rows, max_tokens_per_microbatch=max_tokens_per_microbatch).figures["nll"] == pytest.approx(
        expected, rel=1e-9
    )


def test_a_recipe_says_which_tokens_are_trained(tmp_path: Path) -> None:
    """Prompts of 4 tokens (the first cannot be predicted), completions of 2 with EOS."""
    rows = [{"prompt": f"{i}+{i}=", "completion": str(i)} for i in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    recipe = f"""
    objective: sft
    name: tokens
    model: {{scratch: {{hidden: 32, layers: 1, heads: 2, context: 32}}}}
    data: {{path: {tmp_path / "rows.json"}}}
    runs: {tmp_path / "runs"}
    steps: 1
    batch_size: 8
    """
    counts = {}
    for which in ("completion", "all"):
        (stage,) = parse_stages(recipe, "recipe", [f"data.train_on={which}", f"name={which}"]).values()
        (step,) = train(stage)
        counts[which] = step.metrics["tokens/trained"]
    assert counts == {"completion": 8 * 2, "all": 8 * (3 + 2)}
