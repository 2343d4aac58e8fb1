"""GGUF files: converted once into an ordinary Hugging Face folder, which is what everything else
reads.

transformers reads the families that it knows (Llama, Mistral, Qwen, Gemma, Phi-3, GPT-2 and others)
and dequantises their weights. The folder holds them in float32, so a dequantised weight is not
rounded again, with the file's tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from groupwise.config.packaged_models import is_packaged, not_fetched, packaged_folder
from groupwise.errors import ConfigError
from groupwise.utils.cache import cache_folder
from groupwise.utils.files import expanded, new_folder, place, storing, sync_tree
from groupwise.utils.terminal import logger

log = logger(__name__)

DAMAGED = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    UnicodeDecodeError,
    MemoryError,
)
"""What GGUFReader raises for bytes that are no GGUF file."""
BESIDE = (
    "put the tokenizer.json of the model that it was made from, and the files beside it, into the"
    " same folder"
)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _CASED % ("", "", ""),
    **dict.fromkeys(("gpt-4o", "llama4"), _CASED % (f"{_WORDS}?", f"{_WORDS}?", "{1,3}")),
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact", "command-r"), ""),
}
"""How a byte-level tokenizer splits text before it merges bytes, by the name that llama.cpp gives
the rule: a pattern, or "" for GPT-2's, before which all rules but `gpt-2` itself set digits apart.
A file holds the name alone; a wrong rule gives other ids."""


def checkpoint_folder(path: str) -> str:
    """The Hugging Face folder that a model's path means: of a packaged model, or of a GGUF file;
    any other path as it is.

    A GGUF file is converted the first time (seconds to minutes); the folder lies in the user's
    cache.
    Raises ConfigError for a model that was not fetched, and for a file that cannot be converted.
    """
    if is_packaged(path):
        folder = packaged_folder(path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: {not_fetched(path)}")
        return str(folder)
    file = gguf_file(expanded(path))
    if file is None:
        return path
    content = file.stat()
    state = f"{file.resolve()} {content.st_size} {content.st_mtime_ns}"
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

    Raises ConfigError for a damaged file, a part of a split one, and an architecture that
    transformers' reader does not know."""
    tokens, rule = _check(file)
    try:
        tokenizer = _read_tokenizer(file, tokens, rule)
        model, loading = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            str(file.parent), gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        NotImplementedError,
        ImportError,
    ) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.path: {str(file)!r} cannot be converted: {reason}; take the model's safetensors"
            " checkpoint instead"
        ) from error
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"model.path: {str(file)!r} lacks the weights {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
            + ": take another file of this model, or its safetensors checkpoint"
        )  # fmt: skip
    # The weights are plain numbers now; transformers still calls the model quantised and would not
    # save it.
    del model.config.quantization_config
    model.hf_quantizer = None
    with storing(folder, "the converted model"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = new_folder(folder)
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            sync_tree(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        place(temporary, folder)


def _check(file: Path) -> tuple[int, str | None]:
    """Tokens of the file's tokenizer, and the rule by which a byte-level one splits text; None for
    tokenizers of another kind.

    Raises ConfigError unless the file is one whole GGUF file with a tokenizer.
    """
    from gguf import GGUFReader  # type: ignore[import-not-found]

    advice = "copy or fetch it again"
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError(
                f"model.path: {str(file)!r} is no GGUF file (its first bytes are not GGUF):"
                f" {advice}"
            )
    try:
        fields = GGUFReader(file).fields
        parts = fields["split.count"].contents() if "split.count" in fields else 1
        kind = (
            fields["tokenizer.ggml.model"].contents() if "tokenizer.ggml.model" in fields else None
        )
        rule = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "none"
        tokens = len(fields["tokenizer.ggml.tokens"].data) if kind is not None else 0
    except DAMAGED as error:
        raise ConfigError(
            f"model.path: {str(file)!r} is damaged or cut off ({type(error).__name__}: {error}):"
            f" {advice}"
        ) from error
    if parts > 1:
        raise ConfigError(
            f"model.path: {str(file)!r} is one of {parts} parts: join them with llama.cpp's"
            " gguf-split --merge first"
        )
    if kind is None:
        raise ConfigError(f"model.path: {str(file)!r} holds no tokenizer: {BESIDE}")
    if kind == "gpt2" and rule not in SPLITS and not (file.parent / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path: the tokenizer of {str(file)!r} splits text by the rule {rule!r}, which is"
            f" not known: {BESIDE}"
        )
    return tokens, str(rule) if kind == "gpt2" else None


def _read_tokenizer(file: Path, tokens: int, rule: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of the file, or the one that lies beside it.   tokens, rule: see `_check`."""
    if (file.parent / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(str(file.parent))
    read = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    content = json.loads(read.backend_tokenizer.to_str())
    # transformers' classes add a token of their own family, such as <|endoftext|>, to a vocabulary
    # that lacks it.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < tokens]
    backend = Tokenizer.from_str(json.dumps(content))
    if rule is not None:
        split = SPLITS[rule]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                (
                    pre_tokenizers.Split(Regex(split), "isolated")
                    if split
                    else pre_tokenizers.Digits(individual_digits=True)
                ),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split),
            ][rule == "gpt-2" :]
        )
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {
        name: getattr(read, name)
        for name in names
        if backend.token_to_id(getattr(read, name) or "") is not None
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer
