"""Packed, prompt-shared attention against every family's own forward pass, one sequence at a time (PROBLEMS 6, 7, 33)."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from groupwise.config.settings import ModelSettings
from groupwise.data.packing import pack
from groupwise.errors import ConfigError
from groupwise.models import attention
from groupwise.models.attention import PackedAttention, explicit_attention, last_attention, plain_attention, quick_attention
from groupwise.models.masks import Reach
from groupwise.models.policy import Policy
from groupwise.ops.attention import flex_block_mask
from groupwise.ops.linear_cross_entropy import head_logits, reference_logprobs
from groupwise.proof.prove import prove
from groupwise.records import Layout, Sample

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "gemma2", "mixtral")


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def one_by_one(policy: Policy, samples: list[Sample]) -> tuple[float, dict[str, Tensor]]:
    """The model's own attention and plain log_softmax, a sequence per forward pass: knows nothing of packing."""
    policy.model.zero_grad()
    total = 0.0
    with plain_attention(policy.model) as model:
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion]))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, sample.prompt.size - 1 : -1, : policy.vocabulary]
            logp = (logits / sample.temperature).log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            chosen = logp.gather(1, torch.from_numpy(sample.completion)[:, None])[:, 0]
            loss = (torch.from_numpy(sample.weight).to(logp.dtype) * (chosen.square() + 0.3 * entropy)).sum()
            loss.backward()
            total += loss.item()
    return total, gradients(policy)


def packed(policy: Policy, samples: list[Sample], **options: object) -> tuple[float, dict[str, Tensor]]:
    policy.model.zero_grad()
    total = 0.0
    for batch in pack(samples, dtype=policy.dtype, **options):  # type: ignore[arg-type]
        rows = batch.trained_M
        hidden = policy.forward(batch).hidden_PD[rows]
        logp, entropy = reference_logprobs(hidden, policy.head, batch.target_P[rows], batch.temperature_P[rows])
        loss = (batch.weight_P[rows] * (logp.square() + 0.3 * entropy)).sum()
        loss.backward()
        total += loss.item()
    return total, gradients(policy)


@pytest.mark.parametrize("family", FAMILIES)
def test_p33_packed_and_shared_equal_one_by_one(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(family)
    samples = random_samples()
    expected, expected_gradients = one_by_one(policy, samples)
    for options in ({"budget": 10_000}, {"budget": 25}, {"budget": 10_000, "share": False, "fill": True}):
        found, found_gradients = packed(policy, samples, **options)
        assert found == pytest.approx(expected, rel=1e-5)
        for name, expected_gradient in expected_gradients.items():
            scale = expected_gradient.abs().max()
            assert (found_gradients[name] - expected_gradient).abs().max() <= 2e-5 * scale + 1e-7, (options, name)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_float64_gradients_are_exact(family: str, tiny_policy: Callable, random_samples: Callable) -> None:
    policy = tiny_policy(family, dtype=torch.float64)
    samples = random_samples(groups=4)
    _, expected = one_by_one(policy, samples)
    for options in ({"budget": 10_000}, {"budget": 20}, {"budget": 1}, {"budget": 40, "share": False}):
        _, found = packed(policy, samples, **options)
        assert max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected) < 1e-10


def _random_layout() -> Layout:
    return Layout(start=(0, 5, 9, 10, 17, 20), length=(5, 4, 1, 7, 3, 6), prefix=(-1, 0, 0, -1, -1, 4), total=31)


def _heads(kv: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    made = torch.randn(1, 4, 31, 8, dtype=torch.float64), *(torch.randn(1, kv, 31, 8, dtype=torch.float64) for _ in range(2))
    return tuple(x.requires_grad_() for x in made)  # type: ignore[return-value]


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_flash_by_stretches_equals_the_definition(kv: int) -> None:
    layout = _random_layout()
    weights = torch.randn(1, 31, 4, 8, dtype=torch.float64)
    weights[:, 26:] = 0  # filler is read by nobody
    results = []
    for attend in (lambda q, k, v: PackedAttention(layout)(0, q, k, v, 0.3, None, None),
                   lambda q, k, v: explicit_attention(layout, q, k, v, 0.3, None, None)):  # fmt: skip
        query, key, value = _heads(kv)
        out = attend(query, key, value)
        (out * weights).sum().backward()
        results.append((out.detach()[:, :26], query.grad, key.grad, value.grad))
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_flex_mask_says_the_same() -> None:
    """The CUDA path's block mask, evaluated on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    layout = _random_layout()
    query, key, value = (x.detach().float() for x in _heads(4))
    with torch.no_grad():
        mask = flex_block_mask(layout, torch.device("cpu"))
        found = flex_attention(query, key, value, block_mask=mask, scale=0.3).transpose(1, 2)
        expected = explicit_attention(layout, query, key, value, 0.3, None, None)
    torch.testing.assert_close(found[:, :26], expected[:, :26], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_flex_blocks_are_those_of_the_mask_of_all_pairs() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    rng = random.Random(0)
    for longest in (3, 40, 128, 300, 700) * 6:
        length, prefix = [], []
        for _ in range(rng.randint(1, 5)):
            members = rng.randint(0, 4)
            prefix += [-1, *[len(prefix)] * members]
            length += [rng.randint(1, longest) for _ in range(1 + members)]
        start = [sum(length[:s]) for s in range(len(length))]
        filler = rng.choice([0, 0, 1, 130, 300])
        layout = Layout(start=tuple(start), length=tuple(length), prefix=tuple(prefix), total=sum(length) + filler)
        found = flex_block_mask(layout, torch.device("cpu"))
        expected = create_block_mask(found.mask_mod, None, None, layout.total, layout.total, device="cpu")
        assert (found.seq_lengths, found.BLOCK_SIZE) == (expected.seq_lengths, expected.BLOCK_SIZE)
        for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
            for kind in (name, f"full_{name}"):
                assert torch.equal(getattr(found, kind), getattr(expected, kind)), (layout, kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_on_a_gpu_equals_the_definition() -> None:
    layout = _random_layout()
    query, key, value = (x.detach().float().cuda().requires_grad_() for x in _heads(2))
    found = PackedAttention(layout)(0, query, key, value, 0.3, None, None)
    expected = explicit_attention(layout, query, key, value, 0.3, None, None)
    torch.testing.assert_close(found[:, :26], expected[:, :26], rtol=1e-3, atol=1e-3)


def test_window_shorter_than_the_sequence_is_respected() -> None:
    layout = Layout(start=(0, 4), length=(4, 5), prefix=(-1, 0), total=9)
    query, key, value = (x[:, :, :9].detach() for x in _heads(4))
    found = PackedAttention(layout)(0, query, key, value, 0.3, None, 3)
    scores = query[0] @ key[0].transpose(1, 2) * 0.3
    distance = torch.arange(9)[:, None] - torch.arange(9)[None]
    expected = scores.masked_fill((distance < 0) | (distance >= 3), -torch.inf).softmax(-1) @ value[0]
    torch.testing.assert_close(found[0], expected.transpose(0, 1))


@pytest.mark.parametrize("form", [last_attention, quick_attention])
@pytest.mark.parametrize("reach", [Reach(), Reach(window=1), Reach(window=5), Reach(window=40), Reach(chunk=6)])
@pytest.mark.parametrize(("queries", "softcap", "sinks"), [(23, None, False), (9, 2.0, False), (23, 2.0, True), (1, None, True)])
def test_long_texts_are_computed_in_blocks_to_the_same(
    form: Callable[..., Tensor], reach: Reach, queries: int, softcap: float | None, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, against one softmax over all pairs."""
    monkeypatch.setattr(attention, "ROWS", 4)
    torch.manual_seed(0)
    sizes = (2, queries, 8), (2, 23, 8), (2, 23, 6)
    inputs = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]
    sink_H = torch.randn(2, dtype=torch.float64, requires_grad=True) if sinks else None
    weight = torch.randn(2, queries, 6, dtype=torch.float64)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(1, 2) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        at, of = torch.arange(23 - queries, 23)[:, None], torch.arange(23)[None]
        begin = at - reach.window + 1 if reach.window else at // reach.chunk * reach.chunk if reach.chunk else 0 * at
        scores = scores.masked_fill((of > at) | (of < begin), -torch.inf)
        every = scores if sink_H is None else torch.cat([scores, sink_H[:, None, None].expand(2, queries, 1)], -1)
        return every.softmax(-1)[..., :23] @ value

    results = []
    for compute in (plain, lambda *heads: form(*heads, 0.3, softcap, reach, sink_H)):
        out = compute(*inputs)
        wanted = [*inputs, *([] if sink_H is None else [sink_H])]
        results.append([out.detach(), *torch.autograd.grad((out * weight).sum(), wanted)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_scores_within_a_window_are_not_rounded_to_bfloat16() -> None:
    """As torch's own attention, which the model alone would use; an error of scores grows with them."""
    torch.manual_seed(0)
    layout = Layout(start=(0,), length=(64,), prefix=(-1,), total=64)
    query, key, value = (torch.randn(1, 2, 64, 32) * size for size in (4.0, 4.0, 1.0))
    query, key, value = (x.bfloat16() for x in (query, key, value))
    exact = PackedAttention(layout)(0, query.double(), key.double(), value.double(), 0.3, None, 16)

    def distance(found: Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    ours = distance(PackedAttention(layout)(0, query, key, value, 0.3, None, 16))
    rounded = distance(explicit_attention(layout, query, key, value, 0.3, None, 16))
    assert ours < 0.5 * rounded and ours < 4e-3


def test_scores_do_not_depend_on_the_neighbours(tiny_policy: Callable, random_samples: Callable) -> None:
    policy, samples = tiny_policy("qwen2"), random_samples()
    (whole,) = pack(samples, 10_000)
    (alone,) = pack(samples[-1:], 10_000)
    with torch.no_grad():
        together = policy.forward(whole).hidden_PD
        single = policy.forward(alone).hidden_PD
        n = samples[-1].completion.size
        end = whole.layout.start[whole.samples.index(len(samples) - 1)] + n
        torch.testing.assert_close(together[end - n : end], single[-n:], rtol=1e-4, atol=1e-5)


def test_an_ordinary_call_on_a_packed_model_is_refused(tiny_policy: Callable) -> None:
    policy = tiny_policy("llama")
    with pytest.raises(ConfigError, match="plain_attention"):
        policy.model(input_ids=torch.tensor([[5, 6]]))
    with plain_attention(policy.model) as model:
        assert model(input_ids=torch.tensor([[5, 6]])).logits.shape[1] == 2


def test_single_attention_gives_the_same(tiny_policy: Callable, random_samples: Callable) -> None:
    shared, samples = tiny_policy("llama"), random_samples()
    single = tiny_policy("llama", settings=ModelSettings(attention="single"))
    expected, _ = packed(shared, samples, budget=10_000)
    found, _ = packed(single, samples, budget=10_000, share=False)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_model_that_ignores_the_layout_is_refused(tiny_policy: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy("llama")
    monkeypatch.setattr(
        "groupwise.models.attention.PackedAttention.__call__",
        lambda self, layer, q, k, v, scale, softcap, window, *_: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ).transpose(1, 2),
    )
    with pytest.raises(ConfigError, match=r"scoring does not equal.*single"):
        prove(policy, longest=32)


def test_gradient_checkpointing_gives_the_same_gradients_and_keeps_dropout_off(
    tiny_policy: Callable, random_samples: Callable
) -> None:
    policy, samples = tiny_policy("gpt2"), random_samples()
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    _, expected = packed(policy, samples, budget=10_000)
    with policy.checkpointing(True):
        _, found = packed(policy, samples, budget=10_000)
    assert not any(module.training for module in policy.model.modules())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_the_head_is_the_models_own(tiny_policy: Callable) -> None:
    for family in FAMILIES:
        policy = tiny_policy(family)
        with plain_attention(policy.model) as model, torch.no_grad():
            logits = model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits[0, :, : policy.vocabulary]
            hidden = model.base_model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(head_logits(hidden, policy.head), logits)
