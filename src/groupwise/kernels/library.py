"""The C++ files of this folder as a shared library: compiled once for a machine by its own compiler, kept in the user's cache.

A second's work for the first process that needs it.  Where there is no compiler, or `GROUPWISE_KERNELS=off` is set, there is no
library, and whoever asks takes torch's operations instead: the same results to rounding, more slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
SWITCH = "GROUPWISE_KERNELS"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=fast")
SECONDS = 120
"""A compiler that takes longer hangs."""


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none; `absence` tells why."""
    return None if absence() else ctypes.CDLL(str(_compiled()))


@cache
def absence() -> str | None:
    """Why there is no library, in words and with the remedy; None if there is one."""
    if os.environ.get(SWITCH, "on") == "off":
        return f"{SWITCH}=off"
    if sys.byteorder != "little":
        return "this processor's numbers begin with their largest byte"
    if _compiler() is None:
        return "no C++ compiler was found: install g++ or clang++, or name one in CXX"
    try:
        ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        told = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"{_compiler()} could not make them: {next((line for line in told if 'error' in line), told[0])}"
    return None


def _compiler() -> str | None:
    names = (os.environ.get("CXX") or "c++", "c++", "g++", "clang++")
    return next((found for name in names if (found := shutil.which(name))), None)


@cache
def _compiled() -> Path:
    """The shared library of these sources, this compiler and this processor."""
    sources = sorted(SOURCES.glob("*.cpp"))
    seen = hashlib.sha256()
    for part in (*(path.read_bytes() for path in (*sources, *SOURCES.glob("*.h"))), _machine().encode(), " ".join(FLAGS).encode()):
        seen.update(part)
    folder = _cache()
    made = folder / f"kernels-{seen.hexdigest()[:16]}.so"
    if made.is_file():
        return made
    with tempfile.TemporaryDirectory(dir=folder) as work:
        compile_all = [str(_compiler()), *FLAGS, "-fopenmp", "-c", *map(str, sources)]
        subprocess.run(compile_all, cwd=work, check=True, capture_output=True, text=True, timeout=SECONDS)
        # Not linked to OpenMP: the one that torch has loaded serves both, so that no two pools of threads fight for the cores.
        link = [str(_compiler()), "-shared", *(f"{path.stem}.o" for path in sources), "-o", "made.so"]
        subprocess.run(link, cwd=work, check=True, capture_output=True, text=True, timeout=SECONDS)
        os.replace(Path(work) / "made.so", made)
    return made


def _machine() -> str:
    """What `-march=native` follows from, and the compiler."""
    asked = subprocess.run([str(_compiler()), "--version"], capture_output=True, text=True, timeout=SECONDS)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines() if cpus.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return "\n".join((platform.machine(), platform.processor(), features, asked.stdout, torch.__version__))


def _cache() -> Path:
    """A folder of the user's own: what lies there is loaded as code."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupwise"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(home, os.W_OK) and home.stat().st_uid == os.getuid():
            return home
    except OSError:
        pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    """Where the cache cannot be written: a folder for this process."""
    folder = tempfile.mkdtemp(prefix="groupwise-kernels-")
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
