"""A checkpoint read piece by piece, into a model that is built without weights: no process ever
holds all of it.

`empty_model` builds what `from_pretrained` would, its parameters on the meta device and its buffers
computed.  `CheckpointReader` reads rows of single tensors from the checkpoint's safetensors files,
so a process can take its part of each and nothing else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from groupwise.distributed import comm, fsdp
from groupwise.errors import Diverged

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointReader:
    """The tensors of a Hugging Face folder, by name."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """files: where each tensor lies."""
        self.files = dict(files)
        self._open = contextlib.ExitStack()
        self._handles: dict[Path, safe_open] = {}

    @classmethod
    def of(cls, folder: Path) -> CheckpointReader | None:
        """Open a folder's tensors; None if its weights are not in safetensors files."""
        if (folder / INDEX).is_file():
            where = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return cls({name: folder / file for name, file in where.items()})
        if (folder / SINGLE).is_file():
            with safe_open(folder / SINGLE, framework="pt") as file:
                return cls(dict.fromkeys(file.keys(), folder / SINGLE))
        return None

    def fit(self, model: PreTrainedModel) -> bool:
        """True if every parameter and saved buffer of a model is here under its own name.

        Not so where transformers fuses or renames tensors while it loads them (mixtures of
        experts).
        """
        return set(saved_names(model)) <= self.files.keys()

    def rows(self, name: str, part: slice) -> Tensor:
        """Rows of a tensor, read from the file; of one without dimensions all there is."""
        file = self.files[name]
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(file, framework="pt"))
        stored = self._handles[file].get_slice(name)
        return stored[part] if stored.get_shape() else self._handles[file].get_tensor(name)

    def close(self) -> None:
        """Let go of the files."""
        self._handles.clear()
        self._open.close()


def saved_names(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of a model holds, by name: parameters and saved buffers, one name for those
    that are shared.
    """
    names: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), (name, tensor))
    return dict(names.values())


def modules_of(
    kind: Any, config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model's modules on the meta device, buffers too.

    kind: one of transformers' Auto classes, or the model's own.
    """
    with torch.device("meta"):
        if issubclass(kind, PreTrainedModel):
            return kind(config).to(dtype)  # type: ignore[arg-type]
        return kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def empty_model(
    kind: Any, config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build a model whose parameters have shapes and no numbers.

    kind: one of transformers' Auto classes, or the model's own.
    """
    model: Any = modules_of(kind, config, dtype, trust_remote_code=trust_remote_code)
    # The way `from_pretrained` gets its buffers: placeholders, which the model's own initialisation
    # then computes.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.initialize_weights()
    return model


def check_finite(model: PreTrainedModel) -> None:
    """Raises Diverged if a parameter is not finite; of a sharded model on all processes, which must
    all call it.
    """
    parameters = dict(model.named_parameters())
    names = [
        name
        for name, parameter in parameters.items()
        if not _is_finite(fsdp.own(parameter).detach())
    ][:1]
    if any(fsdp.own(parameter) is not parameter for parameter in parameters.values()):
        names = comm.gather(names)
    if names:
        raise Diverged(
            f"the checkpoint's parameter {names[0]} holds numbers that are not finite: load another"
            " checkpoint"
        )


def _is_finite(x: Tensor) -> bool:
    """A sum reads the numbers once; one of finite numbers may overflow."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())
