"""A small copy of an architecture: the same code with the same switches, narrow and shallow, with random weights.

What a model computes differently in packed streams is a matter of its code and its configuration, not of its weights or its width.
So the copy has a layer or two of every type, few heads of the same width, few experts, and everything that depends on a length
scaled down: beyond windows, chunks and `original_max_position_embeddings` come then a few dozen tokens instead of thousands.
"""

from __future__ import annotations

import copy
import math
import re
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from groupwise.errors import ConfigError

WINDOW, CHUNK, LENGTH, SCALE, CAP = 12, 12, 20, 8, 2.0
"""What windows, chunks, lengths that frequencies depend on, steps of a temperature and soft caps become."""
VOCABULARY, POSITIONS, HIDDEN, INNER, RANK = 160, 2304, 128, 96, 32
FEW = 3
"""Layers of a small copy, if its configuration tells no types apart."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_window_size", "sliding_window_size", "local_attention")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "logits_soft_cap")
STATES = ("no_rope_layers",)
"""A number for each layer, not the numbers of layers."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")


def small_copy(config: PretrainedConfig, *, shallow: bool = True) -> PretrainedConfig:
    """The configuration of a small copy.   shallow: few layers of each type; else as many as there are."""
    found = copy.deepcopy(config)
    text: Any = found.get_text_config()
    fields = {key: value for key, value in vars(text).items() if not key.startswith("_")}
    _lengths(text, fields)
    _widths(text, fields)
    _vocabulary(found)
    _vocabulary(text)
    if shallow:
        _layers(text, fields)
    for key, part in vars(found).items():
        if isinstance(part, PretrainedConfig) and part is not text and "vision" in key + part.model_type:
            _layers(part, vars(part))
    return found


def small_model(kind: type[PreTrainedModel], config: PretrainedConfig, *, shallow: bool = True, seed: int = 0) -> PreTrainedModel:
    """A small copy of a model on the CPU, float32, in eval mode.  Raises ConfigError if its configuration makes none."""
    try:
        config = small_copy(config, shallow=shallow)
        config._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            made = kind(config).float().eval()
            randomise(made)
    except Exception as error:  # whatever a model's own code says of sizes that it was not made for
        raise ConfigError(
            f"no small copy of {kind.__name__} can be made to prove it on: {type(error).__name__}: {str(error).strip()[:200]}"
        ) from error
    return made


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head.

    It is `base_model`, but for a few families whose `base_model_prefix` names no attribute: there it is the part that holds the
    embedding.
    """
    found = model.base_model
    if found is not model or model.get_output_embeddings() is None:
        return found
    embedding = model.get_input_embeddings()
    for part in model.children():
        if isinstance(part, PreTrainedModel) and part.get_input_embeddings() is embedding:
            return part
    return found


def language_model(model: PreTrainedModel) -> type[PreTrainedModel]:
    """A model's class; of a scoring model that of the language model with the same configuration."""
    if model.can_generate():
        return type(model)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    return type(model) if found is None or isinstance(found, tuple) else found


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights with which every part of a model has a say: freshly initialised ones make all tokens nearly equal."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if id(parameter) in tables:
            parameter.normal_(0.0, 2.0 / math.sqrt(parameter.shape[-1]))
        elif parameter.ndim >= 2:
            parameter.normal_(0.0, 1.0 / math.sqrt(min(parameter.shape[-2:])))
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)


def _lengths(text: Any, fields: dict[str, Any]) -> None:
    for key in WINDOWS:
        if isinstance(fields.get(key), int):
            setattr(text, key, min(fields[key], WINDOW))
    if isinstance(fields.get("attention_chunk_size"), int):
        text.attention_chunk_size = min(fields["attention_chunk_size"], CHUNK)
    if isinstance(fields.get("floor_scale"), int):
        text.floor_scale = min(fields["floor_scale"], SCALE)
    for key in CAPS:
        if fields.get(key):
            setattr(text, key, CAP)
    reach = POSITIONS  # also of a model that has fewer: what is proven are its operations
    rope = copy.deepcopy(fields.get("rope_parameters"))
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if not isinstance(part, dict):
            continue
        original = part.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
        if original and original > LENGTH:
            part["original_max_position_embeddings"] = LENGTH
            reach = max(LENGTH + 1, LENGTH * _context(text) // original)
        if "dynamic" in str(part.get("rope_type")):
            reach = min(reach, LENGTH)
    if rope:
        text.rope_parameters = rope
    if (fields.get("original_max_position_embeddings") or 0) > LENGTH:
        text.original_max_position_embeddings = LENGTH
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"):
        if isinstance(fields.get(key), int):
            setattr(text, key, reach)


def _context(text: Any) -> int:
    return int(getattr(text, "max_position_embeddings", None) or POSITIONS)


def _widths(text: Any, fields: dict[str, Any]) -> None:
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if isinstance(heads, int) and isinstance(hidden, int):
        width = hidden // heads
        own = fields.get("head_dim") or width
        # A model whose heads together are not as wide as it is lets it be of any width.
        free = own != width
        shared = next((name for name in ("num_key_value_heads", "num_kv_heads") if isinstance(fields.get(name), int)), None)
        groups = heads // fields[shared] if shared else 1
        few = 2 if own >= 64 else 4
        few = min(heads, few if groups == 1 or few % 2 == 0 else groups)
        text.num_attention_heads = few
        if shared:
            setattr(text, shared, few if groups == 1 else max(1, few // 2))
        text.hidden_size = min(hidden, HIDDEN) if free else few * max(width, 1)
    for key, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if re.search(r"intermediate_size|^n_inner$|ffn_dim|ffn_hidden_size|mlp_hidden_size", key):
            setattr(text, key, min(value, INNER))
        elif key.endswith("lora_rank"):
            setattr(text, key, min(value, RANK))
        elif key in EXPERTS:
            setattr(text, key, min(value, 4 * max(1, min(fields.get("n_group") or 1, 2))))
        elif key in CHOSEN:
            setattr(text, key, min(value, 2))
    if (fields.get("n_group") or 1) > 1:
        text.n_group, text.topk_group = 2, 1
    if (fields.get("n_shared_experts") or 0) > 1:
        text.n_shared_experts = 1


def _vocabulary(config: Any) -> None:
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(vars(config).get(key), int):
            setattr(config, key, min(vars(config)[key], VOCABULARY))
    for key, value in list(vars(config).items()):
        if re.fullmatch(r"(pad|bos|eos|sep|decoder_start)_token_id", key) and value is not None:
            setattr(config, key, {"pad": 0, "bos": 1}.get(key[:3], 2))


def _layers(text: Any, fields: dict[str, Any]) -> None:
    """Keep the first layer of every type, and `FEW` at least."""
    name = next((name for name in LAYERS if isinstance(fields.get(name), int)), None)
    if name is None:
        return
    count = fields[name]
    for key in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "num_kv_shared_layers"):
        if isinstance(fields.get(key), int):
            setattr(text, key, min(fields[key], 1))
    lists = {key: value for key, value in fields.items() if isinstance(value, (list, tuple))}
    indices = {key for key, value in lists.items() if key.endswith("layers") and key not in STATES and _ascending(value)}
    columns = {key: value for key, value in lists.items() if len(value) == count and key not in indices}
    columns |= {key: [i in lists[key] for i in range(count)] for key in indices}
    types = list(zip(*(map(str, column) for column in columns.values()), strict=True)) or [()] * count
    dense = int(bool(fields.get("first_k_dense_replace")))
    kept = sorted({types.index(kind) for kind in types} | set(range(min(count, FEW + dense))))
    setattr(text, name, len(kept))
    for key, column in columns.items():
        setattr(text, key, [kept.index(i) for i in kept if column[i]] if key in indices else type(column)(column[i] for i in kept))


def _ascending(values: Any) -> bool:
    """True of a list of layers by number."""
    return all(type(value) is int for value in values) and all(a < b for a, b in pairwise(values))
