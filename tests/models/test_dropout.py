"""Dropout in updates: the model's own training pass with the same masks, whatever way a family spells it, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sample_texts import TOKENIZER, texts
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BioGptConfig,
    BioGptForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.data.packing import pack
from groupwise.distributed.comm import World
from groupwise.errors import ConfigError
from groupwise.models.attention import NAME
from groupwise.models.dropout import Masks, probabilities, stretches_of
from groupwise.models.fused import fused_modules
from groupwise.models.loading import make_policy
from groupwise.models.lora import adapt
from groupwise.models.policy import Policy
from groupwise.models.probe import taken
from groupwise.models.small_copy import randomise
from groupwise.ops.linear_cross_entropy import chosen_logprobs
from groupwise.records import Layout, Sample
from groupwise.training.scoring import score

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(TOKENIZER)}
SHAPE = IDS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
PLAIN = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
FAMILIES: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, IDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, PLAIN | {"hidden_dropout": 0.2, "attention_dropout": 0.1}),
    "opt": (OPTForCausalLM, OPTConfig, PLAIN | {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.2, "attention_dropout": 0.1,
            "layerdrop": 0.3}),
    "biogpt": (BioGptForCausalLM, BioGptConfig, PLAIN | {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1,
               "activation_dropout": 0.1}),
    "phi": (PhiForCausalLM, PhiConfig, SHAPE | {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
    "llama": (LlamaForCausalLM, LlamaConfig, SHAPE | {"attention_dropout": 0.2}),
    "mistral": (MistralForCausalLM, MistralConfig, SHAPE | {"attention_dropout": 0.2, "sliding_window": 8}),
}  # fmt: skip


def built(family: str, **changes: Any) -> PreTrainedModel:
    kind, config, fields = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config(**fields | changes)).eval()
    randomise(model)
    return model


SAMPLES = texts((1, 6), (3, 4), (3, 20), (12, 9), (12, 2), (12, 5), (5, 7))


def gradients(
    policy: Policy,
    samples: Sequence[Sample] = SAMPLES,
    *,
    update: int = 0,
    budget: int = 10_000,
    again: bool = False,
    world: World = World(),  # noqa: B008  (frozen)
) -> dict[str, Tensor]:
    """As an update sums them."""
    policy.model.zero_grad(set_to_none=True)
    with policy.checkpointing(True) if again else nullcontext(), fused_modules(policy.model):
        for batch in pack(samples, budget, share=policy.attention == "shared", world=world):
            if policy.dropout is not None:
                stretches = stretches_of(batch.layout, batch.samples, samples, seed=policy.dropout, update=update)
                batch = replace(batch, stretches=stretches)
            rows = batch.trained_M
            hidden = policy.forward(batch).hidden_PD[rows]
            logp, _ = chosen_logprobs(hidden, policy.head, batch.target_P[rows], batch.temperature_P[rows])
            (batch.weight_P[rows] * logp.square()).sum().backward()
    return taken(policy.model)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to its norm; one that is not there (LayerDrop) is 0."""
    size = max(float(gradient.norm()) for gradient in expected.values())
    none = torch.zeros(())
    return max(float((found.get(name, none) - g).norm()) / (float(g.norm()) + 1e-3 * size) for name, g in expected.items())


class ByTheMasks:
    """`F.dropout` of a model's own forward pass, one sequence at a time: what of each stretch is dropped, number by number."""

    def __init__(self, policy: Policy, sample: Sample, place: int, samples: Sequence[Sample]) -> None:
        length = sample.prompt.size + sample.completion.size - 1
        layout = Layout(start=(0,), length=(length,), prefix=(-1,), total=length)
        assert policy.dropout is not None
        self.stretches = stretches_of(layout, [place], samples, seed=policy.dropout, update=0)
        self.masks = Masks(self.stretches, length, torch.device("cpu"))
        self.length, self.site = length, 0

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        self.site += 1
        factor = torch.ones_like(input)
        for stretch in self.stretches:
            a, b = stretch.start, stretch.start + stretch.length
            if input.shape[-1] == input.shape[-2] == self.length:
                lost = self.masks.dropped((input.shape[1], stretch.length, b), p, self.site, stretch.seed)
                factor[0, :, a:b, :b] = (~lost).float() / (1.0 - p)
            else:
                rows = factor.view(self.length, -1)
                lost = self.masks.dropped((stretch.length, rows.shape[1]), p, self.site, stretch.seed)
                rows[a:b] = (~lost).float() / (1.0 - p)
        return input * factor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("again", [False, True], ids=["", "computed again"])
def test_gradients_are_those_of_the_models_own_training_pass(family: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layerdrop = {"layerdrop": 0.0} if family == "opt" else {}  # drawn by torch's own numbers in the model's own pass
    settings = ModelSettings(dropout=True, gradient_checkpointing=again)
    policy = make_policy(built(family, **layerdrop), TOKENIZER, settings)
    found, model = gradients(policy, again=again), built(family, **layerdrop)
    model.set_attn_implementation("eager")
    model.train()
    sites = set()
    for place, sample in enumerate(SAMPLES):
        by = ByTheMasks(policy, sample, place, SAMPLES)
        monkeypatch.setattr(F, "dropout", by.dropout)
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]]))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, sample.prompt.size - 1 :, : policy.vocabulary]
        logp_N = logits.log_softmax(-1).gather(1, torch.from_numpy(sample.completion)[:, None])[:, 0]
        (torch.from_numpy(sample.weight).to(logp_N) * logp_N.square()).sum().backward()
        sites.add(by.site)
    assert len(sites) == 1 and sites.pop() >= 2
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert apart(found, expected) < 1e-3
    assert apart(gradients(replace(policy, dropout=None)), expected) > 0.05, "the masks are at work"


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_an_update_is_the_same_however_it_is_cut(family: str) -> None:
    policy = make_policy(built(family), TOKENIZER, ModelSettings(dropout=True, gradient_checkpointing=True))
    expected = gradients(policy)
    assert apart(gradients(policy, budget=25), expected) < 1e-4
    assert apart(gradients(policy, budget=1), expected) < 1e-4
    assert apart(gradients(policy, budget=40, again=True), expected) < 1e-4
    assert apart(gradients(replace(policy, attention="packed")), expected) < 1e-4
    parts = [gradients(policy, budget=30, world=World(rank, 2)) for rank in range(2)]
    together = {name: sum(part.get(name, torch.zeros(())) for part in parts) for name in expected}
    assert apart(together, expected) < 1e-4  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(gradients(policy).values(), expected.values(), strict=True))
    assert apart(gradients(policy, update=1), expected) > 0.01
    assert apart(gradients(replace(policy, dropout=1)), expected) > 0.01


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt"])
@pytest.mark.parametrize("again", [False, True], ids=["", "computed again"])
def test_one_by_one_it_is_the_models_own_training_mode_under_a_seed(family: str, again: bool) -> None:
    samples = texts((3, 5), (9, 4))
    settings = ModelSettings(dropout=True, attention="single", gradient_checkpointing=again)
    policy = make_policy(built(family), TOKENIZER, settings)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = gradients(policy, samples, again=again)
    assert torch.equal(torch.get_rng_state(), before), "nobody else's random numbers are moved"
    model = built(family)
    model.set_attn_implementation(policy.model.config._attn_implementation)
    model.train()
    for batch in pack(samples, 10_000, share=False):
        stretches = stretches_of(batch.layout, batch.samples, samples, seed=0, update=0)
        seeds = {stretch.start + stretch.length: stretch.seed for stretch in stretches}
        for start, length, index in zip(batch.layout.start, batch.layout.length, batch.samples, strict=True):
            sample = samples[index]
            torch.manual_seed(seeds[start + length])
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]]))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, sample.prompt.size - 1 :, : policy.vocabulary]
            logp_N = logits.log_softmax(-1).gather(1, torch.from_numpy(sample.completion)[:, None])[:, 0]
            (torch.from_numpy(sample.weight).to(logp_N) * logp_N.square()).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert apart(found, expected) < 1e-3
    assert apart(gradients(replace(policy, dropout=None), samples), expected) > 0.05


def test_probabilities_of_0_are_the_same_as_none() -> None:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    policy = make_policy(built("gpt2", **none), TOKENIZER)
    off, on = gradients(policy), gradients(replace(policy, dropout=0))
    assert all(torch.equal(on[name], off[name]) for name in off)


def test_passes_without_gradients_drop_nothing() -> None:
    policy = make_policy(built("gpt2"), TOKENIZER, ModelSettings(dropout=True))
    plain = make_policy(built("gpt2"), TOKENIZER)
    (batch,) = pack(SAMPLES, 10_000)
    batch = replace(batch, stretches=stretches_of(batch.layout, batch.samples, SAMPLES, seed=0, update=0))
    dropped = policy.forward(batch).hidden_PD.detach()
    with torch.no_grad():
        expected = plain.forward(batch).hidden_PD
        assert torch.equal(policy.forward(batch).hidden_PD, expected)
    assert not torch.allclose(dropped, expected, atol=0.1)
    for other in (policy.frozen_copy(), replace(policy, dropout=None)):
        assert torch.equal(other.forward(batch).hidden_PD.detach(), expected)
    for one, other in zip(score(policy, SAMPLES, budget=99).logp, score(plain, SAMPLES, budget=99).logp, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not any(module.training for module in policy.model.modules())


def test_under_an_adapter_the_base_drops_and_the_reference_does_not() -> None:
    policy = adapt(make_policy(built("gpt2"), TOKENIZER, ModelSettings(dropout=True)), LoraSettings(rank=4), base="")
    (batch,) = pack(SAMPLES, 10_000)
    batch = replace(batch, stretches=stretches_of(batch.layout, batch.samples, SAMPLES, seed=0, update=0))
    dropped = make_policy(built("gpt2"), TOKENIZER, ModelSettings(dropout=True)).forward(batch).hidden_PD
    torch.testing.assert_close(policy.forward(batch).hidden_PD, dropped)  # a new adapter changes nothing
    plain = make_policy(built("gpt2"), TOKENIZER).forward(batch).hidden_PD
    torch.testing.assert_close(policy.frozen_copy().forward(batch).hidden_PD, plain)


def test_what_is_dropped_is_random_and_keeps_its_mean() -> None:
    """Shares and correlations within 5 standard errors; seeds are fixed, so this cannot fail now and then."""
    samples, p, width = texts((3, 400), (3, 400)), 0.2, 64
    (batch,) = pack(samples, 10_000)

    def kept(update: int, site: int, seed: int = 0) -> Tensor:
        masks = Masks(
            stretches_of(batch.layout, batch.samples, samples, seed=seed, update=update), batch.layout.total, torch.device("cpu")
        )
        masks.site = site
        with masks:
            return F.dropout(torch.ones(1, batch.layout.total, width), p)[0]

    one = kept(0, 0)
    n = one.numel()
    assert set(one.unique().tolist()) == {0.0, 1.0 / (1.0 - p)}
    assert abs(float((one == 0).float().mean()) - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert abs(float(one.mean()) - 1.0) < 5 * math.sqrt(p / (1 - p) / n)
    first, second = ((one[batch.segment_P == s]) for s in range(1, 3))
    shifted = {"tokens": (one[1:], one[:-1]), "units": (one[:, 1:], one[:, :-1]), "completions of a group": (first, second)}
    others = {"updates": kept(1, 0), "places": kept(0, 1), "seeds": kept(0, 0, seed=1)}
    for told, (a, b) in {**shifted, **{name: (one, other) for name, other in others.items()}}.items():
        found = float(((a - 1) * (b - 1)).mean()) * (1 - p) / p
        assert abs(found) < 5 / math.sqrt(a.numel()), told
    mean = torch.stack([kept(update, 0) for update in range(200)]).mean(0)
    assert float((mean - 1).abs().max()) < 6 * math.sqrt(p / (1 - p) / 200)


@pytest.mark.slow
def test_the_mean_of_many_masked_passes_is_the_pass_without() -> None:
    """Where what follows is linear: from the last block's residual dropout to the hidden states before the last norm."""
    policy = make_policy(built("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, n_layer=1), TOKENIZER, ModelSettings(dropout=True))
    (batch,) = pack(SAMPLES, 10_000)
    seen: list[Tensor] = []
    policy.model.transformer.h[0].attn.register_forward_hook(lambda module, args, out: seen.append(out[0].detach()[0]))
    with torch.no_grad():
        policy.forward(batch)
    for update in range(400):
        policy.forward(replace(batch, stretches=stretches_of(batch.layout, batch.samples, SAMPLES, seed=0, update=update)))
    plain, passes = seen[0], torch.stack(seen[1:])
    z = (passes.mean(0) - plain) / (passes.std(0) / math.sqrt(400) + 1e-9)
    assert 0.9 < float(z.square().mean()) < 1.1 and float(z.abs().max()) < 6


def test_what_cannot_be_drawn_token_by_token_is_refused_in_words() -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4, attention_dropout=0.1, router_jitter_noise=0.1)
    model = MixtralForCausalLM(config)
    randomise(model)
    with pytest.raises(ConfigError, match=r"model.dropout: the model draws other random numbers .*set model.dropout to false"):
        make_policy(model, TOKENIZER, ModelSettings(dropout=True))


class DropsInPlace(GPT2LMHeadModel):
    """By torch's own function, and in place: what it returns is left alone."""

    drop: Any = staticmethod(lambda out, p: F.dropout(out, p, True, True))

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp.dropout.p = 0.0
            block.mlp.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        if module.training:
            out = out.clone()
            self.drop(out, 0.2)
        return out


class DropsByAnotherName(DropsInPlace):
    def _hook(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return torch.dropout(out, p=0.2, train=module.training)


@pytest.mark.parametrize("kind", [DropsInPlace, DropsByAnotherName])
def test_every_spelling_of_dropout_drops_the_same_units(kind: type[PreTrainedModel]) -> None:
    def gradient(kind: type[PreTrainedModel], **fields: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = kind(GPT2Config(**FAMILIES["gpt2"][2] | {"attn_pdrop": 0.0, "embd_pdrop": 0.0} | fields)).eval()
        randomise(model)
        return gradients(make_policy(model, TOKENIZER, ModelSettings(dropout=True)))

    class AsGpt2Does(GPT2LMHeadModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in self.transformer.h:
                block.mlp.dropout.p = 0.2

    assert apart(gradient(kind, resid_pdrop=0.1), gradient(AsGpt2Does, resid_pdrop=0.1)) < 1e-6


class DropsInsideOfAttention(GPT2LMHeadModel):
    """Somewhere in its MLP another attention, all in one operation, which takes the probability by place."""

    inside: Any = staticmethod(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], None, 0.1)[:, 0])

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.h[0].mlp.register_forward_hook(
            lambda module, args, out: out + 0.1 * self.inside(out) if module.training else out
        )


class DropsInsideOfTorchsAttention(DropsInsideOfAttention):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        attention = self.transformer.attention = nn.MultiheadAttention(config.n_embd, 2, dropout=0.1, batch_first=True)
        self.inside = lambda x: attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("kind", [DropsInsideOfAttention, DropsInsideOfTorchsAttention])
def test_dropout_inside_of_one_operation_is_refused_in_words(kind: type[PreTrainedModel]) -> None:
    model = kind(GPT2Config(**FAMILIES["gpt2"][2])).eval()
    randomise(model)
    with pytest.raises(ConfigError, match=r"attention drops inside of one operation.*set model.dropout to false"):
        make_policy(model, TOKENIZER, ModelSettings(dropout=True))


def test_a_model_that_drops_nothing_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"drops nothing with this configuration.*config.json"):
        make_policy(built("llama", attention_dropout=0.0), TOKENIZER, ModelSettings(dropout=True))


def packed(module: Any) -> bool:
    return module.config._attn_implementation == NAME


class DropsAnotherShare(GPT2LMHeadModel):
    """In a packed stream it drops more."""

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn_implementation(*args, **kwargs)
        self.transformer.drop.p = 0.3 if packed(self) else 0.1


class ForgetsToDrop(GPT2LMHeadModel):
    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn_implementation(*args, **kwargs)
        self.transformer.h[1].mlp.dropout.p = 0.0 if packed(self) else 0.1


class ForgetsAttention(GPT2LMHeadModel):
    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn_implementation(*args, **kwargs)
        for block in self.transformer.h:
            block.attn.attn_dropout.p = 0.0 if packed(self) else 0.1


class DropsOnceMore(GPT2LMHeadModel):
    """In the pass whose gradient is taken."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer.ln_f.register_forward_hook(lambda module, args, out: F.dropout(out, 0.1, module.training and packed(self)))


@pytest.mark.parametrize("kind", [DropsAnotherShare, ForgetsToDrop, ForgetsAttention, DropsOnceMore])
def test_planted_faults_are_found_at_load(kind: type[PreTrainedModel]) -> None:
    _, config, fields = FAMILIES["gpt2"]

    def made() -> PreTrainedModel:
        model = kind(config(**fields))
        randomise(model)
        return model.eval()

    make_policy(made(), TOKENIZER)  # nobody sees it as long as nothing is dropped
    with pytest.raises(ConfigError, match=rf"{kind.__name__} cannot be trained like this: dropout .*; set model.dropout to false"):
        make_policy(made(), TOKENIZER, ModelSettings(dropout=True))


def test_stretches_are_named_by_what_they_are_and_not_by_where_they_lie() -> None:
    seeds: dict[tuple[int, int, int], set[int]] = {}
    for budget, share in ((10_000, True), (10_000, False), (20, True)):
        for batch in pack(SAMPLES, budget, share=share):
            found = stretches_of(batch.layout, batch.samples, SAMPLES, seed=0, update=0)
            assert sum(stretch.length for stretch in found) == sum(batch.layout.length)
            for stretch in found:
                tokens = batch.tokens_P[stretch.start : stretch.start + stretch.length].tolist()
                seeds.setdefault((stretch.position, stretch.length, hash(tuple(tokens))), set()).add(stretch.seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len(set().union(*seeds.values())) == len(seeds) == len(SAMPLES) + 3


def test_probabilities_are_those_of_the_decoder() -> None:
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.1, attn_pdrop=0.2, summary_first_dropout=0.5, classifier_dropout=0.5)
    assert probabilities(config.to_dict()) == {"embd_pdrop": 0.1, "attn_pdrop": 0.2}
    assert probabilities({"text_config": {"attention_dropout": 0.1}, "vision_config": {"dropout": 0.5}}) == {
        "attention_dropout": 0.1
    }
