"""What windows, chunks, soft caps and sinks cost: forward and backward of small models with them, beside the same without.

python benchmarks/windows.py [mistral gemma3_text gemma2 phi3 gpt_oss llama4_text]
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from groupwise.config.settings import ModelSettings
from groupwise.data.tokenizers import make_tokenizer
from groupwise.models.loading import make_policy
from groupwise.models.passes import forward, packed_for
from groupwise.ops.operations import operations
from groupwise.records import Sample

SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 704,
         "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": None}  # fmt: skip
WIDE, FEW = {"head_dim": 64}, {"num_local_experts": 4, "num_experts_per_tok": 2}
CAPPED = WIDE | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0}
DENSE = {"moe_layers": [], "intermediate_size_mlp": 704, "head_dim": 64, "attn_temperature_tuning": False}
CASES: dict[str, list[tuple[str, dict]]] = {
    "mistral": [(f"window {n}", {"sliding_window": n}) for n in (None, 215, 64)],
    "gemma3_text": [(f"window {n}", WIDE | {"sliding_window": n}) for n in (4096, 215, 64)],
    "gemma2": [
        ("no cap", CAPPED | {"attn_logit_softcapping": None, "sliding_window": 4096}),
        ("cap", CAPPED | {"sliding_window": 4096}),
        ("cap, window 128", CAPPED | {"sliding_window": 128}),
    ],
    "phi3": [(f"window {n}", {"sliding_window": n}) for n in (None, 215)],
    "llama4_text": [(f"chunks of {n}", DENSE | {"attention_chunk_size": n}) for n in (4096, 128, 64)],
    "gpt_oss": [(f"sinks, window {n}", WIDE | FEW | {"sliding_window": n}) for n in (4096, 64)],
}


def samples(groups: int, size: int, prompt: int, longest: int) -> list[Sample]:
    """Random groups."""
    rng, found = np.random.default_rng(0), []
    for group in range(groups):
        tokens = rng.integers(3, 50, size=prompt)
        for _ in range(size):
            n = int(rng.integers(longest // 2, longest + 1))
            ones = np.ones(n)
            one = {"prompt": tokens, "completion": rng.integers(3, 50, size=n)}
            found.append(Sample(group=str(group), weight=ones / 100, advantage=ones, behavior_logp=0 * ones, **one))
    return found


def main(families: list[str]) -> None:
    """Print the processor seconds of each."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer("arithmetic")
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for family in families or CASES:
        first = None
        for name, more in CASES[family]:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | ids | more)))
            policy = make_policy(model, tokenizer, ModelSettings(device="cpu"))
            batches, seconds = packed_for(policy, samples(4, 8, 120, 103), 4000), []
            for _ in range(5):
                model.zero_grad()
                begun = time.process_time()
                with operations().fused_modules(model):
                    for batch in batches:
                        forward(policy, batch).hidden_PD.square().mean().backward()
                seconds.append(time.process_time() - begun)
            median = sorted(seconds)[2]
            first = first or median
            print(f"{family:12} {name:20} {median:6.3f} s  {median / first:5.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
