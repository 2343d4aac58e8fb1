"""Proofs that an earlier load has made, in the user's cache: for the same code, weights, device, type and texts."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from groupwise.models.loading import sampled_weights
from groupwise.models.policy import Policy
from groupwise.ops.kernels import absence
from groupwise.utils import files
from groupwise.utils.cache import cache_folder

VERSIONED = ("torch", "transformers", "peft")
"""Packages whose version says which code they hold."""


def file_of(policy: Policy, facts: Sequence[Any]) -> Path | None:
    """Where the proof of a policy lies; None for a model that holds code of anybody else, which every process proves.

    facts: what else the proof depends on.
    """
    model, device = policy.model, policy.device
    if not all(map(_is_known, model.modules())):
        return None
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, kernels: {absence()}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    facts = [*facts, where, policy.dtype, policy.autocast, policy.attention, policy.vocabulary, policy.context, trained]
    facts += [getattr(sys.modules.get(package), "__version__", None) for package in VERSIONED]
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    text = json.dumps([type(model).__qualname__, config, facts, library_digest()], default=str, sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for part in sampled_weights(model):
        digest.update(part)
    return cache_folder() / "proofs" / f"{digest.hexdigest()[:32]}.json"


def read(file: Path | None) -> dict[str, Any]:
    """The fields of a proof; none if there is none, or none that can be read."""
    with suppress(OSError, ValueError):
        fields = json.loads(file.read_bytes()) if file is not None else None
        if (
            isinstance(fields, dict)
            and {"family", "paths", "place", "lengths", "switches", "difference", "before"} == fields.keys()
        ):
            return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return {}


def write(file: Path | None, fields: dict[str, Any]) -> None:
    """Remember a proof; a cache that cannot be written costs the next load its time."""
    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            files.write(file, json.dumps(fields).encode())


def _is_known(module: nn.Module) -> bool:
    """True if nobody else's code runs in a module's forward pass."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    codes = type(module).__module__, getattr(module.forward, "__module__", None) or ""
    return not hooks and all(code.partition(".")[0] in (*VERSIONED, "groupwise") for code in codes)


@functools.cache
def library_digest() -> str:
    """This library and its kernels, by their contents: installers may give all files one time."""
    digest = hashlib.sha256()
    for package in ("groupwise", "groupwise_cpu"):
        spec = find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(place).rglob("*.*")):
                if file.suffix in (".py", ".so"):
                    digest.update(file.read_bytes())
    return digest.hexdigest()
