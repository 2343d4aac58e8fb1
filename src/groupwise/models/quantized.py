"""Frozen bases in 4 or 8 bits a number, under an adapter that is trained (QLoRA, 2305.14314).

The linear layers of the language model are quantised, but for its head.  Embeddings, norms, biases
and the parts of a model that are not trained stay as they are.  A layer holds codes and scales, and
makes its weight anew for every product, forward and backward: sampling, scores, updates and the
reference read the same numbers.

O, I sides of a matrix
"""

from __future__ import annotations

import ctypes
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from groupwise.errors import ConfigError
from groupwise.models.streaming import CheckpointReader, saved_names
from groupwise.utils import files

# It warns, whoever imports it, of kernels for products that are not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

BLOCK = 64
"""Numbers of a row that share a scale in NF4, as in the paper and in bitsandbytes."""
LARGEST_INT8 = 127
SCALE_BYTES = 4
MMAP_THRESHOLD, PAGED = -3, 1 << 19
"""glibc's `M_MMAP_THRESHOLD`, and the bytes from which a block of memory has pages of its own.

Below, blocks lie in the heap, where a forward pass leaves holes between what it keeps: glibc 2.36
puts an aligned block, as torch asks for, into no hole of its own size.  With 1 MiB those of a GRPO
step of SmolLM2-135M with short texts held 0.33 to 0.39 GB that nothing used."""


class Format(ABC):
    """How a matrix lies in few bits."""

    name: str
    """The name in a recipe."""

    @abstractmethod
    def bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix's codes and scales."""

    @abstractmethod
    def quantize(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales, whose rows are those of the matrix."""

    @abstractmethod
    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the matrix (O, I) that codes and scales stand for."""

    @abstractmethod
    def check(self, name: str, layer: nn.Linear) -> None:
        """Raise ConfigError for a layer that it cannot hold."""


class Nf4(Format):
    """NF4: 16 quantiles of a normal distribution, scaled by the largest of 64 numbers of a row.

    Codes and numbers are those of bitsandbytes' `Linear4bit` without double quantisation.
    """

    name = "nf4"

    def bytes(self, rows: int, columns: int) -> int:
        """See `Format`."""
        return rows * (columns // 2 + columns // BLOCK * SCALE_BYTES)

    def quantize(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """See `Format`.  Two codes lie in a byte."""
        codes, state = bitsandbytes().quantize_4bit(
            weight_OI.contiguous(), blocksize=BLOCK, quant_type=self.name
        )
        rows = weight_OI.shape[0]
        return codes.view(rows, -1), state.absmax.view(rows, -1)

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Format`."""
        kernel = bitsandbytes()
        shape = (codes.shape[0], 2 * codes.shape[1])
        state = kernel.QuantState(
            absmax=scale.flatten(),
            shape=torch.Size(shape),
            dtype=dtype,
            blocksize=BLOCK,
            quant_type=self.name,
            code=None,
        )
        return kernel.dequantize_4bit(codes, state).view(shape)

    def check(self, name: str, layer: nn.Linear) -> None:
        """See `Format`."""
        if layer.in_features % BLOCK:
            raise ConfigError(
                f"model.quantize: nf4 scales blocks of {BLOCK} numbers of a row, and the rows of"
                f" {name} have {layer.in_features}: set model.quantize to int8"
            )


class Int8(Format):
    """Whole numbers from -127 to 127, scaled by the largest number of a row."""

    name = "int8"

    def bytes(self, rows: int, columns: int) -> int:
        """See `Format`."""
        return rows * (columns + SCALE_BYTES)

    def quantize(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """See `Format`."""
        weight_OI = weight_OI.float()
        scale_O1 = weight_OI.abs().amax(1, keepdim=True) / LARGEST_INT8
        scale_O1.clamp_(min=torch.finfo(torch.float32).tiny)  # of a row of zeros
        return (weight_OI / scale_O1).round().to(torch.int8), scale_O1

    def dequantize(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Format`."""
        return (codes * scale).to(dtype)

    def check(self, name: str, layer: nn.Linear) -> None:
        """See `Format`.  It holds any."""


NOTE = "quantized.json"
"""A file in an adapter's folder that says how the base under it was quantised."""
FORMATS: Mapping[str, Format] = {"nf4": Nf4(), "int8": Int8()}
"""The formats by their names in a recipe."""


@cache
def bitsandbytes() -> Any:
    """Import `bitsandbytes.functional`.  Raises ConfigError where it is not installed."""
    try:
        import bitsandbytes.functional  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            f"what is quantised is computed by bitsandbytes, which cannot be imported ({error}):"
            " pip install bitsandbytes"
        ) from error
    return bitsandbytes.functional


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that holds codes and scales instead of its weight."""

    def __init__(self, layer: nn.Linear, weight_OI: Tensor, format: Format) -> None:
        """layer: the one that it replaces; its bias is taken over.   weight_OI: its numbers."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.format = format
        self.dtype = weight_OI.dtype
        codes, scale = format.quantize(weight_OI)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The matrix (O, I), made anew at every call, in the type of the model."""
        return self.dequantized(self.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix (O, I) in a type."""
        return self.format.dequantize(self.codes, self.scale, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply in the type of the input, or in that of autocast."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        return _Product.apply(input, self)  # type: ignore[return-value]


class _Product(torch.autograd.Function):
    """A product with a quantised matrix; the backward pass makes the matrix again, so that nothing
    of its size is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        bias_O = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.dequantized(x.dtype), bias_O)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient @ ctx.layer.dequantized(gradient.dtype), None


@torch.no_grad()
def quantize(model: PreTrainedModel, format: Format, device: torch.device) -> PreTrainedModel:
    """Quantise a model that is loaded, matrix by matrix; it is used up by it.

    device: where it is quantised, and the matrices stay.
    """
    give_memory_back(device)
    for name, layer in quantizable(model, format).items():
        put(model, name, QuantizedLinear(layer, layer.weight.to(device), format))
    return model


@torch.no_grad()
def read_quantized(
    model: PreTrainedModel, reader: CheckpointReader, format: Format, device: torch.device
) -> PreTrainedModel:
    """Fill a model that was built without weights from a checkpoint that fits it, on a device.

    A matrix is quantised before the next one is read: the whole weights are never in memory.
    """
    give_memory_back(device)
    names = {id(tensor): name for name, tensor in saved_names(model).items()}
    layers = quantizable(model, format)
    filled: dict[int, nn.Parameter] = {}

    def read(tensor: Tensor) -> Tensor:
        stored = reader.rows(names[id(tensor)], slice(None))
        # In memory of its own: products round by where numbers begin.
        return stored.to(device, tensor.dtype, copy=True)

    replaced = set(layers.values())
    for module in list(model.modules()):
        for key, parameter in list(module._parameters.items()):
            if parameter is None or (module in replaced and key == "weight"):
                continue
            if id(parameter) not in filled:
                filled[id(parameter)] = nn.Parameter(read(parameter), parameter.requires_grad)
            module._parameters[key] = filled[id(parameter)]
    for name, buffer in list(model.named_buffers()):
        place, _, key = name.rpartition(".")
        value = read(buffer) if id(buffer) in names else buffer.to(device)
        model.get_submodule(place)._buffers[key] = value
    for name, layer in layers.items():
        put(model, name, QuantizedLinear(layer, read(layer.weight), format))
    reader.close()
    return model


def give_memory_back(device: torch.device) -> None:
    """Have glibc give freed memory back at once, in blocks of `PAGED` bytes and more.

    Otherwise matrices that are made for one product leave holes which later ones do not fit, and a
    process keeps twice what it holds.  It costs an update a tenth to a fifth of its time.
    """
    libc = ctypes.CDLL(None)
    if device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(MMAP_THRESHOLD, PAGED)


def quantizable(model: PreTrainedModel, format: Format) -> dict[str, nn.Linear]:
    """Return the linear layers that are quantised, by name: those that are trained (not those that
    read images, `freeze_towers`), but for the head.

    Raises ConfigError if there are none, or if one does not fit the format.
    """
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    layers: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module not in heads and module.weight.requires_grad:
            format.check(name, module)
            layers[name] = module
    if not layers:
        raise ConfigError(
            f"model.quantize: {type(model).__name__} has no linear layers to quantise (GPT-2's are"
            " others): leave model.quantize out"
        )
    return layers


@dataclass(frozen=True, slots=True)
class QuantizedSize:
    """What the quantised layers of a model take."""

    numbers: int = 0
    """Numbers of their matrices."""
    bytes: int = 0
    """Bytes of their codes and scales."""
    widest: int = 0
    """Numbers of the largest matrix, which is made anew for a product."""


def quantized_size(model: PreTrainedModel, name: str) -> QuantizedSize:
    """What the layers of a model take in a format; the model may be on the meta device."""
    format, numbers, total, widest = FORMATS[name], 0, 0, 0
    for layer in quantizable(model, format).values():
        size = layer.out_features * layer.in_features
        numbers += size
        widest = max(widest, size)
        total += format.bytes(layer.out_features, layer.in_features)
    return QuantizedSize(numbers, total, widest)


def count_numbers(model: nn.Module) -> int:
    """Count the numbers of a model's parameters; of quantised layers those of their matrices."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    for layer in quantized_layers(model).values():
        numbers += layer.in_features * layer.out_features
        numbers -= layer.codes.numel() + layer.scale.numel()
    return numbers


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in the place of the one of this name."""
    place, _, last = name.rpartition(".")
    setattr(model.get_submodule(place), last, layer)


def rounded(model: PreTrainedModel, format: Format) -> PreTrainedModel:
    """A model whose matrices are rounded to what the format holds of them; it is changed."""
    with torch.no_grad():
        for layer in quantizable(model, format).values():
            codes, scale = format.quantize(layer.weight)
            layer.weight.copy_(format.dequantize(codes, scale, layer.weight.dtype))
    return model


def note_format(model: nn.Module, folder: Path) -> None:
    """Note in an adapter's folder how the base under it is quantised, if it is."""
    for layer in quantized_layers(model).values():
        files.write(folder / NOTE, json.dumps({"base": layer.format.name}).encode())
        return


def quantized_name(folder: Path) -> str | None:
    """How the base under the adapter of a folder was quantised; None if it was not."""
    if not (folder / NOTE).is_file():
        return None
    return json.loads((folder / NOTE).read_text(encoding="utf-8"))["base"]


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantised layers of a model, by the names that they have without an adapter."""
    layers: dict[str, QuantizedLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            layers[name.removesuffix(".base_layer")] = module
    return layers
