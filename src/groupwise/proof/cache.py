"""Proofs that an earlier load has made, in the user's cache: for the same code, weights, device, type and texts."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
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

KNOWN = ("torch", "transformers", "peft", "groupwise")
"""Packages whose code has a version, or is read."""


def key(policy: Policy, asked: str) -> str | None:
    """A name for a proof; None for a model that holds code of anybody else, which is proven by every process.

    asked: what else the proof depends on.
    """
    model, device = policy.model, policy.device
    if not all(_known(module) for module in model.modules()):
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    facts = [asked, device.type, name, policy.dtype, policy.autocast, policy.attention, policy.vocabulary, policy.context, trained]
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    written = json.dumps([type(model).__qualname__, config, facts, _code()], default=str, sort_keys=True)
    digest = hashlib.sha256(written.encode())
    for part in sampled_weights(model):
        digest.update(part)
    return digest.hexdigest()[:32]


def read(key: str | None) -> dict[str, Any] | None:
    """The fields of a proof; None if there is none, or none that can be read."""
    if key is None:
        return None
    with suppress(OSError, ValueError):
        fields = json.loads(_file(key).read_text(encoding="utf-8"))
        if isinstance(fields, dict) and {"family", "paths", "place", "lengths", "switches", "difference"} <= fields.keys():
            return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return None


def write(key: str | None, proof: Any) -> None:
    """Remember a proof; a cache that cannot be written costs the next load its time."""
    if key is not None:
        with suppress(OSError):
            _file(key).parent.mkdir(exist_ok=True)
            files.write(_file(key), json.dumps(asdict(proof)).encode())


def _file(key: str) -> Path:
    return cache_folder() / "proofs" / f"{key}.json"


def _known(module: nn.Module) -> bool:
    """True if nobody else's code runs in a module's forward pass."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    codes = type(module).__module__, getattr(module.forward, "__module__", None) or ""
    return not hooks and all(code.partition(".")[0] in KNOWN for code in codes)


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, kernels: {absence()}"


@functools.cache
def _code() -> list[str | None]:
    """This library and its kernels, by their contents, for installers may give all files one time; and those it computes with."""
    seen = hashlib.sha256()
    for file in _files():
        seen.update(file.read_bytes())
    return [seen.hexdigest(), *map(_version, ("torch", "transformers", "peft"))]


def _files() -> Iterator[Path]:
    for package in ("groupwise", "groupwise_cpu"):
        spec = find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for folder, folders, names in os.walk(place):
                folders.sort()
                yield from (Path(folder, name) for name in sorted(names) if name.endswith((".py", ".so")))


def _version(package: str) -> str | None:
    """Of a package that may not be installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None
