"""Tiny random policies of every family, prompts of given lengths, and an independent scorer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from groupwise.config.settings import ModelSettings
from groupwise.models.attention import plain_attention
from groupwise.models.loading import make_policy
from groupwise.records import Prompt

CHARACTERS = "0123456789+-*/=()ABCDEFGHIJKLMNOPQRSTUVWXYZ.#"


def tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Ids: 0 <pad>, 1 <eos>, then characters."""
    words = ["<pad>", "<eos>", *CHARACTERS][:size]
    words += [f"w{i}" for i in range(len(words), size)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def tiny_model(family: str, *, rows: int, context: int, sharpness: float, **options):
    common = {"vocab_size": rows, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    if family == "gpt2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": context}
        shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.pop("dropout", 0.0))
    else:
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= {"intermediate_size": 48, "max_position_embeddings": context}
        if family == "qwen3_5_text":
            wide = {"head_dim": 64, "partial_rotary_factor": 0.5, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
            shape |= wide | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            shape["layer_types"] = ["linear_attention", "full_attention"]
        if family in ("qwen3", "gemma2"):
            shape["head_dim"] = 16
        if family == "gemma2":
            shape |= {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
        if family == "mixtral":
            shape |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(shape | common | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpness)  # random weights alone give nearly uniform distributions
            elif family == "qwen2":
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def policy_of():
    """policy_of(family, dtype=..., vocabulary=40, rows=None, context=64, eos_ids=(1,), sharpness=4, **config options)."""

    def build(
        family="llama",
        *,
        dtype=torch.float64,
        vocabulary=40,
        rows=None,
        context=64,
        eos_ids=(1,),
        sharpness=4.0,
        setting=None,
        **options,
    ):
        model = tiny_model(family, rows=rows or vocabulary, context=context, sharpness=sharpness, **options).to(dtype)
        model.generation_config.eos_token_id = list(eos_ids)
        return make_policy(model, tokenizer(vocabulary), setting or ModelSettings(device="cpu"))

    return build


@pytest.fixture
def prompts_of():
    """Prompts of these lengths over ids 3 .. `vocabulary` - 1."""

    def build(*lengths: int, vocabulary: int = 40):
        rng = np.random.default_rng(11)
        return [Prompt(id=f"p{i}", tokens=rng.integers(3, vocabulary, size=n), text="") for i, n in enumerate(lengths)]

    return build


@pytest.fixture
def scored():
    """Log-probs of a rollout's tokens by the model's own forward pass over the whole sequence, one at a time."""

    def score(policy, rollout):
        sequence = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]))
        with plain_attention(policy.model), torch.no_grad():
            z = policy.model(input_ids=sequence[None], use_cache=False).logits[0, rollout.prompt.tokens.size - 1 : -1]
        z = z[:, : policy.vocabulary].to(torch.promote_types(z.dtype, torch.float32))
        if not rollout.sampling.greedy:
            z = z / rollout.sampling.temperature
        if rollout.support is not None:
            hidden = torch.ones_like(z, dtype=torch.bool)
            for row, ids in zip(hidden, rollout.support, strict=True):
                row[torch.from_numpy(ids)] = False
            z = z.masked_fill(hidden, -torch.inf)
        return z.log_softmax(-1).gather(1, torch.from_numpy(rollout.tokens)[:, None])[:, 0].numpy()

    return score
