"""Reads the weights of a GGUF file under transformers' names, dequantised to float32.

llama.cpp's converter (convert_hf_to_gguf.py) changes two things, which are undone here: it orders
the rows of Llama's queries and keys by pairs of a rotation, and it adds 1 to the weights of Gemma's
norms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize  # type: ignore[import-not-found]
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from groupwise.errors import ConfigError
from groupwise.models.gguf_config import GEMMAS
from groupwise.models.gguf_header import Header, TensorInfo

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
"""GGUF's names of the tensors outside of the blocks, and transformers'."""
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names of the modules of a block, and transformers'."""
OTHER_NAMES = {
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
OTHER_NAMES["gemma3"] = OTHER_NAMES["gemma2"]
"""Modules that an architecture names in its own way."""
UNBUILDABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    StrictDataclassError,
)
"""What transformers raises for numbers that it cannot make a model of."""
ROPE_TENSORS = {
    "llama": ("rope_freqs.weight",),
    "phi3": ("rope_factors_long.weight", "rope_factors_short.weight"),
}
"""Tensors that are settings of the rotary frequencies, which the config has taken over."""


def read_weights(header: Header, config: dict[str, Any]) -> dict[str, Tensor]:
    """Read all weights in float32, by transformers' names.   config: see `gguf_config.read_config`.

    Raises ConfigError before any of them is read if a weight of the model is missing, has another
    shape, or if the file holds a tensor that nothing uses.
    """
    names = _names(header)
    shapes = _shapes(header, config)
    for name, tensor in names.items():
        if tensor not in shapes:
            raise _unfit(header, f"nothing uses its tensor {name}")
        info = header.tensors[name]
        if info.shape != shapes[tensor]:
            raise _unfit(
                header,
                f"its tensor {name} has the shape {info.shape} where its metadata describes"
                f" {shapes[tensor]}",
            )
    missing = sorted(shapes.keys() - set(names.values()))
    if missing:
        more = ""
        if len(missing) > 1:
            more = f" and {len(missing) - 1} more"
        raise _unfit(header, f"it lacks the weights {missing[0]}{more}")
    architecture = header.metadata["general.architecture"]
    weights = {}
    for name, tensor in names.items():
        numbers = _dequantised(header, header.tensors[name])
        if architecture == "llama" and ".attn_q." in name:
            numbers = _halves(numbers, config["num_attention_heads"])
        if architecture == "llama" and ".attn_k." in name:
            numbers = _halves(numbers, config["num_key_value_heads"])
        if architecture in GEMMAS and name.endswith("norm.weight"):
            numbers = numbers - np.float32(1.0)
        weights[tensor] = torch.from_numpy(np.array(numbers, np.float32))
    return weights


def _unfit(header: Header, reason: str) -> ConfigError:
    """Make the error for weights that are not those of the metadata's model."""
    return ConfigError(
        f"model.path: {str(header.file)!r} cannot be converted: {reason:.300}: take another file of"
        " this model, or its safetensors checkpoint"
    )


def _names(header: Header) -> dict[str, str]:
    """Transformers' names of the file's tensors, by GGUF's; settings of frequencies left out."""
    architecture = header.metadata["general.architecture"]
    modules = BLOCK | OTHER_NAMES.get(architecture, {})
    names: dict[str, str] = {}
    for name in header.tensors:
        if name in ROPE_TENSORS.get(architecture, ()):
            continue
        if name in OUTSIDE:
            names[name] = OUTSIDE[name]
            continue
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in modules:
            raise _unfit(header, f"nothing uses its tensor {name}")
        names[name] = f"model.layers.{parts[1]}.{modules[parts[2]]}.{parts[3]}"
    return names


def _shapes(header: Header, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that a model of this config saves."""
    settings = dict(config)
    try:
        made = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
    except UNBUILDABLE as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _unfit(
            header, f"no model can be made of its metadata ({lines[-1].strip()})"
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    return shapes


def _dequantised(header: Header, info: TensorInfo) -> np.ndarray:
    """Numbers of a tensor in float32."""
    block, block_bytes = GGML_QUANT_SIZES[info.kind]
    row_bytes = info.shape[-1] // block * block_bytes
    rows = header.read_bytes(info.name).reshape(*info.shape[:-1], row_bytes)
    try:
        return dequantize(rows, info.kind).reshape(info.shape)
    except NotImplementedError as error:
        raise _unfit(header, f"the package gguf reads no tensors of {info.kind.name}") from error


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head as transformers rotates them: first halves of pairs, then the
    second.
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
