"""The C++ files of this folder as a shared library: compiled once for a machine by its own compiler, kept in the user's cache.

About twelve seconds of one core for the first process that needs it.  A library that is loaded registers its kernels with torch
(`bindings.cpp`).  Where there is no compiler, or `GROUPWISE_KERNELS=off` is set, there is no library, and whoever needs a kernel
takes torch's operations instead: the same results to rounding, more slowly.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from groupwise.utils import files
from groupwise.utils.cache import cache_folder

SOURCES = Path(__file__).parent
SWITCH = "GROUPWISE_KERNELS"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=fast")
TORCH = Path(torch.__file__).parent
INTERFACE = ("-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{TORCH / 'include'}")
"""Torch's stable interface as of version 2.11, the oldest that this library takes."""
SEAL = ".xxh3"
"""Suffix of the file beside a compiled library that holds its digest."""
SECONDS = 300
"""A compiler that takes longer hangs."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none; `absence` tells why."""
    return _loaded()[0]


def absence() -> str | None:
    """Why there is no library, in words and with the remedy; None if there is one."""
    return _loaded()[1]


def has_tiles() -> bool:
    """True if there are kernels for matrix tiles (AMX), which this processor has and this process may use."""
    found = library()
    return found is not None and bool(found.has_tiles())


def has_gemm() -> bool:
    """True if there are products of matrices worth it on this processor: it has matrix tiles, or AVX-512 and is not Intel's."""
    found = library()
    return found is not None and bool(found.has_gemm())


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    """The library that the first compiler makes whose work can be loaded; or what came of the one that is asked first."""
    if os.environ.get(SWITCH, "on") == "off":
        return None, f"{SWITCH}=off"
    if sys.byteorder != "little":
        return None, "this processor's numbers begin with their largest byte"
    reasons = []
    for compiler in _compilers():
        try:
            made = _compiled(compiler)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{compiler[0]} could not make them: {_told(error)}")
            continue
        try:
            return ctypes.CDLL(str(made)), None
        except OSError as error:  # on Linux clang's: its OpenMP is not the one that torch has loaded
            reasons.append(f"what {compiler[0]} made cannot be loaded ({error}): install g++, or delete that file if it is broken")
    if named := os.environ.get("CXX"):
        reasons.append(f"CXX names {named!r}, which is no program here: name a compiler, or unset CXX")
    return None, next(iter(reasons), "no C++ compiler was found: install g++, or name one in CXX")


def _compilers() -> list[list[str]]:
    """The command that CXX holds; without it all that usually are one."""
    found: dict[str, list[str]] = {}
    named = os.environ.get("CXX", "").split()
    for name, *arguments in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if path := shutil.which(name):
            found.setdefault(os.path.realpath(path), [path, *arguments])  # often one under several names
    return list(found.values())


def _told(error: OSError | subprocess.SubprocessError) -> str:
    """A compiler's first line that speaks of an error, or its first."""
    said = getattr(error, "stderr", None) or ""
    # Of a compiler that took too long these are bytes, whatever was asked for.
    text = said.decode(errors="replace") if isinstance(said, bytes) else said
    lines = text.strip().splitlines() or [str(error)]
    return next((line for line in lines if "error" in line), lines[0])


def _compiled(compiler: list[str]) -> Path:
    """The shared library of these sources, this compiler and this processor."""
    sources = sorted(SOURCES.glob("*.cpp"))
    seen = hashlib.sha256()
    machine = _machine(compiler)
    for part in (*(path.read_bytes() for path in (*sources, *SOURCES.glob("*.h"))), machine.encode(), " ".join(FLAGS).encode()):
        seen.update(part)
    folder = cache_folder()
    made = folder / f"kernels-{seen.hexdigest()[:16]}.so"
    if _whole(made):
        return made
    with _alone(folder), tempfile.TemporaryDirectory(dir=folder) as work:
        if not _whole(made):
            _run([*compiler, *FLAGS, *INTERFACE, "-fopenmp", "-c", *map(str, sources)], work)
            # Not linked to OpenMP: the one that torch has loaded serves both, so that no two pools of threads fight for the cores.
            objects = [f"{path.stem}.o" for path in sources]
            _run([*compiler, "-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", "made.so"], work)
            files.sync(Path(work) / "made.so")
            os.replace(Path(work) / "made.so", made)
            files.write(made.with_suffix(SEAL), files.digest(made).encode())
    return made


def _whole(made: Path) -> bool:
    """True if a library is what was compiled: to load one that is cut off, or damaged, ends the process (SIGBUS)."""
    seal = made.with_suffix(SEAL)
    return made.is_file() and seal.is_file() and seal.read_bytes() == files.digest(made).encode()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time compiles and the others wait for what it makes; where folders cannot be locked, each compiles."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _run(command: list[str], folder: str | None = None) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    return done.stdout


def _machine(compiler: list[str]) -> str:
    """What `-march=native` follows from, and the compiler."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines() if cpus.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return "\n".join((platform.machine(), platform.processor(), features, _run([*compiler, "--version"]), torch.__version__))
