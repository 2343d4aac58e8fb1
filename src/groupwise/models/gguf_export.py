"""Writes a Hugging Face folder as a GGUF file, with its tokenizer and chat template.

The numbers are turned as llama.cpp's converter (convert_hf_to_gguf.py) turns them; `gguf_weights`
has the way back.  Matrices are written in the type that is asked for, vectors in float32, as
llama.cpp has them.  One tensor at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from groupwise.data.tokenizers import load_tokenizer
from groupwise.errors import ConfigError
from groupwise.models import gguf_metadata, gguf_vocabulary
from groupwise.models.gguf_config import GEMMAS
from groupwise.models.gguf_header import read_header
from groupwise.utils.files import replacing, storing


@dataclass(frozen=True, slots=True)
class Type:
    """A type of numbers, and the number by which a file names it."""

    tensor: gguf.GGMLQuantizationType
    file: gguf.LlamaFileType


TYPES = {
    "f32": Type(gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": Type(gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": Type(gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": Type(gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": Type(gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
"""Types that matrices can be written in."""
MOST_IN_F16 = float(np.finfo(np.float16).max)


def write_gguf(folder: Path, file: Path, kind: str, name: str) -> None:
    """Write the model of a Hugging Face folder as a GGUF file.

    kind: one of `TYPES`.   name: what the file calls the model.
    Raises ConfigError, and leaves no file, for a model or a tokenizer that the format cannot hold;
    StorageError if the file cannot be written.
    """
    config = AutoConfig.from_pretrained(folder)
    metadata = gguf_metadata.metadata_of(config)
    tokenizer = load_tokenizer(str(folder))
    ends = _end_ids(folder)
    vocabulary = gguf_vocabulary.vocabulary_of(tokenizer, config.vocab_size, ends)
    weights = FolderWeights(folder, config, kind)
    with storing(file, "the GGUF file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            writer = gguf.GGUFWriter(temporary, gguf_metadata.architecture_of(config))
            writer.add_name(name)
            writer.add_file_type(TYPES[kind].file)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in (metadata | vocabulary).items():
                _add(writer, key, value)
            weights.write(writer)
            header = read_header(temporary)
            gguf_metadata.check_same(config, header)
            gguf_vocabulary.check_same(tokenizer, header, config.vocab_size, ends)


def _end_ids(folder: Path) -> Sequence[int]:
    """Read the ids that end a completion."""
    ids = GenerationConfig.from_pretrained(folder).eos_token_id
    if isinstance(ids, int):
        return [ids]
    return ids or []


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a metadata entry by its type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


class FolderWeights:
    """The weights of a folder, as a GGUF file has them."""

    def __init__(self, folder: Path, config: PreTrainedConfig, kind: str) -> None:
        """Look up the GGUF name of each weight.  Raises ConfigError for one that has none."""
        self.config = config
        self.architecture = gguf_metadata.architecture_of(config)
        self.type = TYPES[kind].tensor
        self.files = sorted(folder.glob("*.safetensors"))
        architectures = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self.names = gguf.get_tensor_name_map(
            architectures[self.architecture], config.num_hidden_layers
        )

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Write the whole file: its header, then one tensor after the other."""
        factors = gguf_metadata.rope_tensors(self.config)
        for name, numbers in factors.items():
            writer.add_tensor_info(name, numbers.shape, numbers.dtype, numbers.nbytes)
        for name, shape in self.shapes():
            kind = self.type_of(shape)
            size = np.prod(self.bytes_shape(name, shape, kind), dtype=int)
            writer.add_tensor_info(
                self.written(name), shape, np.dtype(np.float32), size, raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for numbers in factors.values():
            writer.write_tensor_data(numbers)
        for name, numbers in self.numbers():
            kind = self.type_of(numbers.shape)
            if kind is gguf.GGMLQuantizationType.F16:
                check_range(name, numbers)
            writer.write_tensor_data(gguf.quantize(self.turned(name, numbers), kind))
        writer.close()

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and shape of each weight, in the order in which `numbers` has them."""
        for file in self.files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if not self.is_repeated(name):
                        yield name, tuple(tensors.get_slice(name).get_shape())

    def numbers(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and the numbers of each weight, in float32."""
        for file in self.files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    if not self.is_repeated(name):
                        yield name, tensors.get_tensor(name).float().numpy()

    def is_repeated(self, name: str) -> bool:
        """Return whether a weight is the embedding once more."""
        return name == "lm_head.weight" and self.config.tie_word_embeddings

    def written(self, name: str) -> str:
        """Return the GGUF name of a weight.  Raises ConfigError if the architecture has none."""
        written = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if written is None:
            raise ConfigError(
                f"the weight {name} cannot be written as GGUF: {self.architecture} has no name"
                " for it"
            )
        return written

    def type_of(self, shape: Sequence[int]) -> gguf.GGMLQuantizationType:
        """Return the type in which a weight of this shape is written."""
        if len(shape) == 1:
            return gguf.GGMLQuantizationType.F32
        return self.type

    def bytes_shape(
        self, name: str, shape: Sequence[int], kind: gguf.GGMLQuantizationType
    ) -> Sequence[int]:
        """Return the shape of a weight in bytes.  Raises ConfigError for rows that do not fit."""
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ConfigError(
                f"{kind.name.lower()} holds blocks of {block} numbers, and rows of {name} have"
                f" {shape[-1]}: take f16, bf16 or f32"
            )
        return [*shape[:-1], shape[-1] // block * size]

    def turned(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Return a weight's numbers as llama.cpp computes with them."""
        if self.architecture == "llama" and ".q_proj." in name:
            return as_pairs(numbers, self.config.num_attention_heads)
        if self.architecture == "llama" and ".k_proj." in name:
            return as_pairs(numbers, self.config.num_key_value_heads)
        if self.architecture in GEMMAS and name.endswith("norm.weight"):
            return numbers + np.float32(1.0)
        return numbers


def check_range(name: str, numbers: np.ndarray) -> None:
    """Raise ConfigError for numbers that would be infinite in f16."""
    largest = np.abs(numbers).max()
    if largest > MOST_IN_F16:
        raise ConfigError(
            f"the weight {name} has numbers up to {largest:g}, and f16 holds none beyond"
            f" {MOST_IN_F16:g}: take bf16 or f32"
        )


def as_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows of each head by pairs of a rotation: i and i + half become neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
