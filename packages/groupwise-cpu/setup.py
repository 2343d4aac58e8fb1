"""Compiles the kernels for the processor of this machine, by its own compiler: `pip install` runs this.

CXX names a compiler.  Without it c++, g++ and clang++ are tried, and the first is taken whose library can be loaded.  CXXFLAGS adds
to the flags.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
KERNELS = HERE / "kernels"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=fast"]
INTERFACE = "-DTORCH_TARGET_VERSION=0x020b000000000000"
"""Torch's stable interface as of version 2.11, the oldest that this package takes."""
LOAD = "import sys, torch; torch.ops.load_library(sys.argv[1])"
VECTORS = re.compile("avx|amx|fma|f16c|bmi2")
"""Instruction sets of x86 that a compiler may use and a processor may lack, as Linux calls them."""
processor = runpy.run_path(str(HERE / "src" / "groupwise_cpu" / "processor.py"))


class Build(build_ext):
    """One library, which knows neither this Python nor the compiler's OpenMP.

    Beside it `built.json` holds what it needs of a processor, and digests of the library and of its sources.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """A name without Python's version."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile with the first compiler whose library can be loaded."""
        if find_spec("torch") is None:
            sys.exit("no CPU kernels: torch is not installed here: install Groupwise first")
        made = Path(self.get_ext_fullpath(ext.name)).absolute()
        made.parent.mkdir(parents=True, exist_ok=True)
        flags = [*FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]
        reasons = []
        for compiler in compilers():
            try:
                compiled(compiler, flags, ext.sources, made)
            except subprocess.CalledProcessError as error:
                reasons.append(f"{compiler[0]} could not make them: {first_error(error.stderr)}")
                continue
            loaded = subprocess.run([sys.executable, "-c", LOAD, str(made)], capture_output=True, text=True, errors="replace")
            if not loaded.returncode:
                facts = {
                    "features": needed(compiler, flags),
                    "library": digest([made]),
                    "sources": digest(KERNELS.iterdir()),
                }
                made.with_name("built.json").write_text(json.dumps(facts), encoding="utf-8")
                return
            made.unlink()  # on Linux clang's: its OpenMP is not the one that torch has loaded
            last = (loaded.stderr.strip().splitlines() or [f"exit code {loaded.returncode}"])[-1]
            reasons.append(f"what {compiler[0]} made cannot be loaded ({last}): install g++")
        if named := os.environ.get("CXX"):
            reasons.append(f"CXX names {named!r}, which is no program here: name a compiler, or unset CXX")
        sys.exit("no CPU kernels: " + next(iter(reasons), "no C++ compiler was found: install g++, or name one in CXX"))


def compilers() -> list[list[str]]:
    """The command that CXX holds; without it all that usually are one."""
    commands: dict[str, list[str]] = {}
    named = os.environ.get("CXX", "").split()
    for name, *arguments in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if path := shutil.which(name):
            commands.setdefault(os.path.realpath(path), [path, *arguments])  # often one under several names
    return list(commands.values())


def compiled(compiler: list[str], flags: list[str], sources: list[str], made: Path) -> None:
    """Compile and link."""
    (torch,) = find_spec("torch").submodule_search_locations
    with tempfile.TemporaryDirectory() as work:
        run([*compiler, *flags, INTERFACE, f"-I{torch}/include", "-fopenmp", "-c", *map(os.path.abspath, sources)], work)
        # Not linked to OpenMP: the one that torch has loaded serves both, so that no two pools of threads fight for the cores.
        objects = [f"{Path(source).stem}.o" for source in sources]
        run([*compiler, *flags, "-shared", *objects, f"-L{torch}/lib", "-ltorch_cpu", "-o", str(made)], work)


def needed(compiler: list[str], flags: list[str]) -> list[str]:
    """What the library may use of this processor and another one may lack."""
    features = processor["features"]()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return sorted(features)
    macros = run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    enabled = {name.lower().replace("_", "") for name in re.findall(r"#define __(\w+?)__ 1", macros)}
    return sorted(name for name in features if VECTORS.match(name) and name.replace("_", "") in enabled)


def run(command: list[str], folder: str | None = None) -> str:
    """A command's output."""
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, errors="replace")
    return done.stdout


def digest(paths: Iterable[Path]) -> str:
    """SHA-256 of files, one behind the other by their names."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def first_error(text: str) -> str:
    """A compiler's first line that speaks of an error, or its first."""
    lines = text.strip().splitlines() or ["it says nothing"]
    return next((line for line in lines if "error" in line), lines[0])


setup(
    ext_modules=[Extension("groupwise_cpu.kernels", [os.path.relpath(source, HERE) for source in sorted(KERNELS.glob("*.cpp"))])],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
