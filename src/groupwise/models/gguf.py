"""GGUF files: converted once into an ordinary Hugging Face folder, which is what everything else
reads.

The folder holds the weights in float32, so a dequantised weight is not rounded again, with the
file's tokenizer and chat template.  Nothing that lies beside the file is run: a tokenizer.json is
read, a tokenizer that needs code of its own is refused.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from groupwise.config.packaged_models import (
    is_fetched,
    is_packaged,
    not_fetched,
    packaged_folder,
)
from groupwise.data.tokenizers import load_tokenizer
from groupwise.errors import ConfigError
from groupwise.models.gguf_config import read_config
from groupwise.models.gguf_header import read_header
from groupwise.models.gguf_tokenizer import BESIDE, read_tokenizer
from groupwise.models.gguf_weights import read_weights
from groupwise.utils.cache import cache_folder
from groupwise.utils.files import expanded, new_folder, rename_into, storing, sync_tree
from groupwise.utils.terminal import logger

log = logger(__name__)

CONVERSION = 2
"""Changes when the same file is converted into something else: older folders are then not used."""


def checkpoint_folder(path: str) -> str:
    """The Hugging Face folder that a model's path means: of a packaged model, or of a GGUF file;
    any other path as it is.

    A GGUF file is converted the first time (seconds to minutes); the folder lies in the user's
    cache.
    Raises ConfigError for a model that was not fetched, and for a file that cannot be converted.
    """
    if is_packaged(path):
        if not is_fetched(path):
            raise ConfigError(f"model.path: {not_fetched(path)}")
        return str(packaged_folder(path))
    file = gguf_file(expanded(path))
    if file is None:
        return path
    content = file.stat()
    state = f"{CONVERSION} {file.resolve()} {content.st_size} {content.st_mtime_ns}"
    folder = (
        cache_folder() / "models" / f"{file.stem}-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    )
    with storing(folder, "the converted model"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):  # of several processes one converts
            if not (folder / "config.json").is_file():
                log.info("converting %s into %s, once", file, folder)
                convert(file, folder)
    return str(folder)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names or, as a folder without a config.json, holds; None if there
    is none.

    Raises ConfigError for a folder that holds several.
    """
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ConfigError(
            f"model.path: {str(path)!r} holds {len(files)} GGUF files ({names}): name one of them"
        )
    return files[0] if files else None


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder of that name, whole or not at all.

    Raises ConfigError for a damaged file, a part of a split one, and a model that is not known.
    """
    header = read_header(file)
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConfigError(
            f"model.path: {str(file)!r} is one of {parts} parts: join them with llama.cpp's"
            " gguf-split --merge first"
        )
    settings = read_config(header)
    if (file.parent / "tokenizer.json").is_file():
        tokenizer, end_ids = _tokenizer_beside(file), []
    else:
        made = read_tokenizer(header, settings["vocab_size"])
        tokenizer, end_ids = made.tokenizer, list(made.end_ids)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end_ids or tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    weights = read_weights(header, settings)
    with storing(folder, "the converted model"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = new_folder(folder)
        try:
            _model_config(settings | ids).save_pretrained(temporary)
            GenerationConfig(**ids).save_pretrained(temporary)
            save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
            tokenizer.save_pretrained(temporary)
            sync_tree(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        rename_into(temporary, folder)


def _model_config(settings: dict[str, Any]) -> PreTrainedConfig:
    """Make transformers' config, which names its class."""
    settings = dict(settings)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = torch.float32
    return config


def _tokenizer_beside(file: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a GGUF file; code that it asks for is never run.

    Raises ConfigError for one that cannot be read, or not without code of its own.
    """
    try:
        return load_tokenizer(str(file.parent))
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model.path: the tokenizer beside {str(file)!r} cannot be read: {lines[0]}; {BESIDE}"
        ) from error
