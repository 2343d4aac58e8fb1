"""GGUF files that say something which is not computed here, or nothing that can be true, end in one clear error."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import VOCABULARY, byte_vocabulary, source_model, write_gguf, write_model

from groupwise.errors import ConfigError
from groupwise.models.gguf import convert
from groupwise.models.gguf_header import read_header

HEAD_WIDTHS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
CHANGED: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("llama", {"rope.scaling.type": "longrope"}, (), "rope.scaling.type is 'longrope'"),
    ("llama", {"rope.scaling.alpha": 8.0}, (), r"rope.scaling.alpha to 8.0 \(rotary frequencies are scaled by alpha\)"),
    ("llama", {"rope.scaling.attn_factor": 2.0}, (), "attn_factor is 2.0 without YaRN"),
    ("llama, llama3", {"rope.scaling.factor": 2.0}, (), "both by rope_freqs.weight and a factor"),
    ("llama", {"rope.scaling.yarn_ext_factor": 0.5}, (), "yarn_ext_factor to 0.5"),
    ("llama", {"rope.dimension_count": 32}, (), "rotates 32 of the 64 numbers"),
    ("llama", {"rope.freq_base": float("inf")}, (), "rope.freq_base is inf"),
    ("qwen2", {"rope.freq_base": float("nan")}, (), "rope.freq_base is nan"),
    ("llama", {"attention.scale": 0.5}, (), "attention.scale to 0.5"),
    ("llama", {"attention.sliding_window": 16}, (), "computed without a window"),
    ("llama", {"attention.causal": False}, (), "attention.causal to False"),
    ("llama", {"logit_scale": 0.5}, (), "logits are scaled"),
    ("llama", {"residual_scale": 0.5}, (), "residuals are scaled"),
    ("llama", {"embedding_scale": 12.0}, (), "embeddings are scaled"),
    ("llama", {"expert_count": 4}, (), "mixture of experts"),
    ("llama", {"unheard": 1}, (), r"llama.unheard to 1 \(what it means is not known here\)"),
    ("llama", {"attention.value_length": 32}, (), "keys have the length 64 and its values 32"),
    ("llama", {"attention.head_count": 0}, (), "head_count is 0, not a whole number"),
    ("llama", {"attention.head_count_kv": 3}, (), "4 attention heads cannot share 3"),
    (
        "llama",
        {"attention.head_count": 3, "attention.head_count_kv": 1},
        HEAD_WIDTHS,
        "ValueError: The hidden size",
    ),
    ("llama", {"attention.head_count": 8}, HEAD_WIDTHS, r"attn_k.weight has the shape \(128, 256\) where .* \(64, 256\)"),
    ("llama", {"attention.head_count_kv": [2, 1]}, (), r"head_count_kv is \[2, 1\], not a whole number"),
    ("llama", {"block_count": 1}, (), "block_count is 1 and it holds the tensors of 2 blocks"),
    ("llama", {"block_count": 100_000}, (), "block_count is 100,000 and it holds the tensors of 2 blocks"),
    ("llama", {"vocab_size": 301}, (), "vocab_size is 301 and its embedding has 300 rows"),
    ("llama", {"attention.layer_norm_rms_epsilon": -1.0}, (), "epsilon is -1.0, not a number above 0"),
    ("llama", {}, ("context_length",), "holds no llama.context_length"),
    ("qwen2", {"attention.head_count": 4.0}, (), "head_count is 4.0, not a whole number"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, (), "attn_logit_softcapping is 0.0"),
    ("gemma2", {"rope.scaling.factor": 2.0}, (), "rope.scaling.factor to 2.0"),
    ("phi3", {"rope.scaling.factor": 2.0}, (), "computes no linear frequencies in a phi3"),
]


@pytest.mark.parametrize(("name", "metadata", "without", "message"), CHANGED)
def test_a_key_that_changes_the_model_is_refused_by_name(
    name: str, metadata: dict[str, Any], without: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "tiny.gguf", source_model(name), metadata=metadata, without=without)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


TOKENIZERS: list[tuple[dict[str, Any], str]] = [
    ({"ggml.model": "t5"}, "is of the kind 't5'"),
    ({"ggml.pre": "unheard"}, "by the rule 'unheard', which is not known: put the tokenizer.json"),
    ({"ggml.unheard": True}, "tokenizer.ggml.unheard, which is not known"),
    ({"ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces, which is not known"),
    ({"ggml.eos_token_id": VOCABULARY}, "has 300 tokens, and its tokenizer.ggml.eos_token_id is 300"),
    ({"ggml.eot_token_id": 1 << 31}, "has 300 tokens, and its tokenizer.ggml.eot_token_id is 2147483648"),
    ({"ggml.merges": ["t h", "t q"]}, "has the merge 't q', whose parts are no tokens"),
    ({"ggml.merges": ["th"]}, "has the merge 'th', whose parts are no tokens"),
    ({"ggml.tokens": ["a"] * VOCABULARY}, "has the token 'a' twice"),
    ({"ggml.tokens": [str(place) for place in range(VOCABULARY)]}, "has no token for the character"),
    ({"ggml.tokens": [str(place) for place in range(VOCABULARY + 1)]}, "has 301 tokens and the model's embedding 300 rows"),
    ({"ggml.token_type": [1]}, "token_type of 300 numbers"),
    ({"ggml.token_type": [9] * VOCABULARY}, "a token of the type 9"),
    ({"ggml.add_bos_token": 1}, "add_bos_token that is neither true nor false"),
    ({"chat_template": 1}, "chat_template that is no text"),
]


@pytest.mark.parametrize(("keys", "message"), TOKENIZERS)
def test_a_tokenizer_that_cannot_be_made_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", source_model("llama"), vocabulary=byte_vocabulary() | keys)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "tiny.gguf", tmp_path / "made")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "unheard")
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"architecture is 'unheard'; files of llama, .* are read.*safetensors"):
        convert(tmp_path / "tiny.gguf", tmp_path / "made")


@pytest.mark.parametrize("name", ["blk.0.attn_q.scale", "blk.0.unheard.weight", "rope_freqs.weight", "blk.x.attn_q.weight"])
def test_a_tensor_that_nothing_uses_is_named(name: str, tmp_path: Path) -> None:
    model = source_model("qwen2")
    plain = gguf.GGUFWriter.write_header_to_file

    def with_tensor(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, np.ones(32, np.float32))
        plain(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_tensor)
        write_model(tmp_path / "tiny.gguf", model)
    with pytest.raises(ConfigError, match=f"nothing uses its tensor {name}"):
        convert(tmp_path / "tiny.gguf", tmp_path / "made")


def _head(*entries: bytes, tensors: int = 0, count: int | None = None) -> bytes:
    number = len(entries) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, number) + b"".join(entries)


def _entry(key: str, kind: int, content: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + content


HEADS = [
    (b"GGUF", "a number has 4 bytes where 0 are left"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "its version is 50331648"),
    (_head(count=1 << 60), "states 1,152,921,504,606,846,976 metadata entries where 0 bytes are left"),
    (_head(tensors=1 << 60), "states 1,152,921,504,606,846,976 tensors"),
    (_head(_entry("a", 8, struct.pack("<Q", 1 << 50))), "a string of 1,125,899,906,842,624 bytes"),
    (_head(_entry("a", 8, struct.pack("<Q", 40))), "a has 40 bytes where 0 are left"),
    (_head(_entry("a", 8, struct.pack("<Q", 1) + b"\xff")), "a is no UTF-8"),
    (_head(_entry("a", 9, struct.pack("<IQ", 4, 1 << 60))), "elements of 'a' where 0 bytes are left"),
    (_head(_entry("a", 9, struct.pack("<IQ", 9, 1))), "'a' is an array of arrays"),
    (_head(_entry("a", 9, struct.pack("<IQ", 99, 0))), "'a' has the type 99"),
    (_head(_entry("a", 99, b"")), "'a' has the type 99"),
    (_head(_entry("a", 7, b"\x02")), "'a' is neither true nor false"),
    (_head(*[_entry("a", 7, b"\x01")] * 2), "it holds 'a' twice"),
    (_head(_entry("general.alignment", 4, struct.pack("<I", 33))), "general.alignment is 33"),
]


@pytest.mark.parametrize(("content", "message"), HEADS)
def test_a_length_that_the_file_does_not_have_is_refused_before_it_is_read(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_header(tmp_path / "tiny.gguf")


def test_a_header_is_what_the_package_gguf_reads(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "gemma3", "Q4_K")
    header, reader = read_header(tmp_path / "tiny.gguf"), gguf.GGUFReader(tmp_path / "tiny.gguf")
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    assert [(info.name, info.kind, info.start, info.size) for info in header.tensors.values()] == [
        (tensor.name, tensor.tensor_type, tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors
    ]


def test_a_message_does_not_hold_all_that_a_file_says(tmp_path: Path) -> None:
    key = "a" * 100_000
    (tmp_path / "tiny.gguf").write_bytes(_head(*[_entry(key, 7, b"\x01")] * 2))
    with pytest.raises(ConfigError) as refused:
        read_header(tmp_path / "tiny.gguf")
    assert len(str(refused.value)) < 1000
