"""Small models with random weights, in the shapes of the families that people train: for tasks that
need no pretrained one.

Every model is an ordinary `transformers` model: it is saved, loaded and served like a downloaded
checkpoint.  Dropout is 0 everywhere, so that scoring in training mode and sampling in evaluation
mode agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from groupwise.config.settings import ScratchSettings
from groupwise.errors import ConfigError, MemoryExceeded, out_of_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def scratch_model(
    settings: ScratchSettings,
    *,
    vocabulary: int,
    eos_ids: Sequence[int],
    pad_id: int,
    bos_id: int | None = None,
    seed: int = 0,
    inner: int | None = None,
    kv_heads: int | None = None,
) -> PreTrainedModel:
    """A float32 model on the CPU with random weights drawn from `seed`; torch's global generator is
    left as it was.

    Embeddings are tied: at this size an output matrix of its own would be a large share of the
        parameters.  All `eos_ids` stand in the generation config, which is where engines read them.

    vocabulary: number of token ids, rows of the embedding.   inner: width of a gated MLP, if it is
        to be another than 8/3 of the model's.   kv_heads: heads of keys and values that the
        attention heads share; default: each has its own.
    Raises ConfigError if the widths do not divide, or an id lies outside the vocabulary;
    MemoryExceeded.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    _check(
        settings,
        vocabulary,
        {"bos": bos_id, "pad": pad_id} | {f"eos[{i}]": eos for i, eos in enumerate(eos_ids)},
    )
    ids = {"bos_token_id": bos_id, "eos_token_id": _one_or_list(eos_ids), "pad_token_id": pad_id}
    config = _config(settings, {"vocab_size": vocabulary, "tie_word_embeddings": True, **ids})
    if inner is not None:
        config.intermediate_size = inner
    if kv_heads is not None:
        config.num_key_value_heads = kv_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise MemoryExceeded(
                f"a model of {settings.layers} layers that are {settings.hidden} wide does not fit"
                " into memory: lower model.scratch.hidden or model.scratch.layers"
            ) from error
    model.generation_config = GenerationConfig(
        **ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    return model.eval()


def _config(settings: ScratchSettings, common: dict[str, Any]) -> PretrainedConfig:
    """The family's configuration.  A gated MLP is 8/3 as wide as the model: as many weights as a
    plain one of 4.
    """
    from transformers import AutoConfig

    family, width, last = settings.family, settings.hidden // settings.heads, settings.layers - 1
    if family == "gpt2":
        shape = {
            "n_embd": settings.hidden,
            "n_layer": settings.layers,
            "n_head": settings.heads,
            "n_positions": settings.context,
        }
        return AutoConfig.for_model(
            family, **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common
        )
    fields = {
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "intermediate_size": 32 * -(-settings.hidden * 8 // (3 * 32)),
        "max_position_embeddings": settings.context,
    }
    match family:
        case "qwen3":
            fields |= {"head_dim": width}
        case "qwen3_5":
            kinds = [
                "full_attention" if i % 4 == 3 or i == last else "linear_attention"
                for i in range(settings.layers)
            ]
            fields |= {"head_dim": width, "layer_types": kinds}
            fields |= {f"linear_num_{part}_heads": settings.heads for part in ("key", "value")}
            fields |= {f"linear_{part}_head_dim": width for part in ("key", "value")}
        case "gemma2":
            fields |= {"head_dim": width, "query_pre_attn_scalar": width}
        case "mixtral":
            fields |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return AutoConfig.for_model(
        "qwen3_5_text" if family == "qwen3_5" else family, **fields, **common
    )


def _check(settings: ScratchSettings, vocabulary: int, ids: dict[str, int | None]) -> None:
    if settings.hidden % settings.heads:
        raise ConfigError(
            f"hidden ({settings.hidden}) must be a multiple of heads ({settings.heads})"
        )
    if settings.family != "gpt2" and settings.hidden // settings.heads % 2:
        raise ConfigError(
            f"rotary positions need an even head width, got {settings.hidden} / {settings.heads}:"
            " change heads"
        )
    if "eos[0]" not in ids:
        raise ConfigError(
            "a model needs at least one EOS id: without one a completion can never end"
        )
    for name, token in ids.items():
        if token is not None and not 0 <= token < vocabulary:
            raise ConfigError(
                f"{name} id {token} lies outside the vocabulary of {vocabulary} tokens"
            )


def _one_or_list(ids: Sequence[int]) -> int | list[int]:
    return int(ids[0]) if len(ids) == 1 else [int(token) for token in ids]
