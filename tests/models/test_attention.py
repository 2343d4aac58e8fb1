"""Packed, prompt-shared attention against every family's own forward pass, one sequence at a time (PROBLEMS 6, 7, 33)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from own_pass import apart, own, packed

from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models.attention import plain_attention
from groupwise.models.passes import forward
from groupwise.proof.prove import prove


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_p33_packed_and_shared_equal_one_by_one(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(family, dtype=torch.float64)
    samples = random_samples(groups=4)
    expected = own(policy, samples)
    for options in (
        {"max_tokens_per_microbatch": 10_000},
        {"max_tokens_per_microbatch": 20},
        {"max_tokens_per_microbatch": 1},
        {"max_tokens_per_microbatch": 40, "share": False},
    ):
        assert max(apart(packed(policy, samples, **options), expected)) < 1e-10


def test_scores_do_not_depend_on_the_neighbours(tiny_policy: Callable, random_samples: Callable) -> None:
    policy, samples = tiny_policy("qwen2"), random_samples()
    (whole,) = pack(samples, 10_000)
    (alone,) = pack(samples[-1:], 10_000)
    with torch.no_grad():
        together = forward(policy, whole).hidden_PD
        single = forward(policy, alone).hidden_PD
        n = samples[-1].completion.size
        end = whole.layout.start[whole.samples.index(len(samples) - 1)] + n
        torch.testing.assert_close(together[end - n : end], single[-n:], rtol=1e-4, atol=1e-5)


def test_an_ordinary_call_on_a_packed_model_is_refused(tiny_policy: Callable) -> None:
    policy = tiny_policy("llama")
    with pytest.raises(ConfigError, match="plain_attention"):
        policy.model(input_ids=torch.tensor([[5, 6]]))
    with plain_attention(policy.model) as model:
        assert model(input_ids=torch.tensor([[5, 6]])).logits.shape[1] == 2


def test_a_model_that_ignores_the_layout_is_refused(tiny_policy: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("llama")
    monkeypatch.setattr(
        "groupwise.models.attention.PackedAttention.__call__",
        lambda self, query: torch.nn.functional.scaled_dot_product_attention(*query.heads, is_causal=True, enable_gqa=True)[
            0
        ].transpose(0, 1),
    )
    with pytest.raises(ConfigError, match=r"scoring does not equal.*single"):
        prove(policy, longest=32)
