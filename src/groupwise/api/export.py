"""Write the final model of a run as a GGUF file, for llama.cpp, Ollama and LM Studio."""

from __future__ import annotations

from pathlib import Path

from groupwise.api.ollama import HEAD, modelfile
from groupwise.data.tokenizers import load_tokenizer
from groupwise.errors import ConfigError
from groupwise.models.gguf_export import TYPES, write_gguf
from groupwise.runs.final_model import whole_final
from groupwise.runs.origin import run_of
from groupwise.utils import files
from groupwise.utils.spelling import nearest

MODELFILE = "Modelfile"


def export_gguf(run: str | Path, kind: str = "q8_0", out: str | Path | None = None) -> Path:
    """Write the final model of a finished run as a GGUF file, and Ollama's Modelfile beside it.

    The tokenizer, the chat template and the tokens that end a completion are in the file.  An
    adapter is merged.  The file is read back before it gets its name: settings and tokens that it
    would change are refused.
    kind: type of the matrices: `f32`, `f16`, `bf16`, `q8_0` or `q4_0`.
    out: the file; default: RUN/gguf-KIND/NAME.gguf.  A file of that name is replaced.
    Returns the path of the file.  Raises CheckpointError if the run has no whole final model,
    ConfigError for a model or a tokenizer that a GGUF file cannot hold, StorageError if the file
    cannot be written.
    """
    if kind not in TYPES:
        near = nearest(kind, TYPES)
        hint = f"did you mean {near}?" if near is not None else f"there are {', '.join(TYPES)}"
        raise ConfigError(f"there is no type {kind!r} to write a GGUF file in; {hint}")
    model = whole_final(run)
    folder = model.parent
    file = folder / f"gguf-{kind}" / f"{folder.name}.gguf"
    if out is not None:
        file = files.expanded(out)
    if file.suffix != ".gguf":
        raise ConfigError(f"the name of a GGUF file ends in .gguf, {file.name!r} does not")
    beside = file.with_name(MODELFILE)
    if beside.exists() and not beside.read_text(encoding="utf-8").startswith(HEAD):
        raise ConfigError(
            f"{beside} is there, and not made by this command: move it away, or name another folder"
        )
    text = modelfile(run_of(run).recipe, load_tokenizer(str(model)), file.name)
    write_gguf(model, file, kind, folder.name)
    with files.storing(beside, "the Modelfile"):
        files.write(beside, text.encode())
    return file
