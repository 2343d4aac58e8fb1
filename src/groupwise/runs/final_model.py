"""The final model and the reference of a run, compared with what the run wrote."""

from __future__ import annotations

from pathlib import Path

from groupwise.errors import CheckpointError, ConfigError, RunError
from groupwise.runs.folder import FINAL, REFERENCE, finished
from groupwise.runs.origin import run_of
from groupwise.runs.run_files import RunFiles, bounded_json
from groupwise.utils.terminal import logger

log = logger("groupwise")


EDITED = (".json", ".md", ".jinja")
"""Files of a model that people edit."""


def unfinished(folder: Path) -> str | None:
    """What is wrong with the final model of a finished run, the file named; None if it can be used.

    Files are compared by their checksums, but for those that people edit: a card and a template
    need only be there, JSON must be JSON.
    """
    run = RunFiles(folder)
    names = run.known(f"{FINAL}/")
    if not names:
        place = run.folder / FINAL  # written before there were checksums
        whole = (place / "config.json").is_file() and any(
            file.stat().st_size for file in place.glob("*.safetensors")
        )
        return None if whole else f"{FINAL}/ is not there, or not whole"
    for name in names:
        file = run.folder / name
        if not file.is_file() or not file.stat().st_size:
            return f"{name} is missing or empty"
        if name.endswith(".json") and not _is_json(file):
            return f"{name} is no JSON any more"
        if not name.endswith(EDITED) and _altered(run, name):
            return f"{name} is not what the run wrote"
    return None


def whole_final(run: str | Path) -> Path:
    """Return the folder of a finished run's final model, compared with what the run wrote.

    Raises ConfigError for what is no run folder, CheckpointError for a run that has not finished
    or whose final model is not whole, RunError for weights that are not the run's.
    """
    folder = run_of(run).folder
    if Path(run).resolve() != folder.resolve():
        raise ConfigError(f"{run} is no run folder: name the run that is meant, such as {folder}")
    if finished(folder) is None:
        raise CheckpointError(
            f"{folder} has not finished, so that it has no final model: run its training command to"
            " the end"
        )
    if wrong := unfinished(folder):
        raise CheckpointError(f"{folder}: {wrong}; its training command makes it again")
    check_final(folder / FINAL)
    return folder / FINAL


def check_final(model: Path) -> None:
    """Compare a finished run's model with what the run wrote, before it is used.  A warning names a
    file that people edit.

    Raises RunError for any other.
    """
    run = RunFiles(model.parent)
    for name in run.known(f"{model.name}/"):
        wrong = _altered(run, name)
        if wrong is None:
            continue
        if not name.endswith(EDITED):
            raise RunError(f"{wrong}; the training command makes it again from the last checkpoint")
        log.warning("%s; it is used as it is", wrong)


def check_reference(folder: Path) -> None:
    """Raises CheckpointError if the weights before the first step, or their tokenizer, are not what
    the run wrote.
    """
    try:
        RunFiles(folder).verify_folder(REFERENCE)
    except RunError as error:
        raise CheckpointError(
            f"the KL would be to other weights: {error}, or start anew with --fresh"
        ) from error


def _altered(run: RunFiles, name: str) -> str | None:
    """Why a file is not what the run wrote."""
    try:
        run.verify(name)
    except RunError as error:
        return str(error)
    return None


def _is_json(file: Path) -> bool:
    try:
        bounded_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def model_digest(folder: Path) -> str | None:
    """One text that stands for the weights of a finished run's model; None if the run has not
    finished.
    """
    run = RunFiles(folder)
    weights = [name for name in run.known(f"{FINAL}/") if name.endswith(".safetensors")]
    if not weights or finished(folder) is None:
        return None
    return " ".join(list(run.digests(name))[-1] for name in weights)
