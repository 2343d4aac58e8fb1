"""The package `groupwise-cpu`: how it is compiled, what of it is not loaded, and what Groupwise says then."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kernel_build import PACKAGE, build

from groupwise.ops import operations as ops
from groupwise.ops.operations import absence

needs_kernels = pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")


def installed() -> Path:
    """The folder of the package that is installed here."""
    spec = find_spec("groupwise_cpu")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def compiler(path: Path, *, compiles: str = "exit 0", links: str | None = None) -> Path:
    """A program that stands for a compiler: it says that it uses AVX2, and links what is installed."""
    links = links or f"cp '{installed() / 'kernels.so'}' \"$2\""
    script = [
        *("#!/bin/sh", 'case " $* " in', "*' -dM '*) printf '#define __%s__ 1\\n' AVX2 AVX1024 PKU ;;"),
        *("*' -shared '*)", 'while [ "$1" != -o ]; do shift; done', f"{links} ;;", f"*) {compiles} ;;", "esac"),
    ]
    path.write_text("\n".join(script))
    path.chmod(0o755)
    return path


def refusal(folder: Path, **environment: str) -> str:
    """The last line of a build that fails."""
    done = build(folder, **environment)
    assert done.returncode == 1 and not list(folder.glob("lib/**/*.so")), done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


# ---------------------------------------------------------------- compiling


@pytest.mark.slow
def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    expected = "no CPU kernels: no C++ compiler was found: install g++, or name one in CXX"
    assert refusal(tmp_path, PATH=str(tmp_path), CXX="") == expected


@pytest.mark.slow
def test_a_name_in_cxx_that_is_no_program_is_named(tmp_path: Path) -> None:
    """Another compiler is not taken for it."""
    expected = "no CPU kernels: CXX names 'g++-that-is-not', which is no program here: name a compiler, or unset CXX"
    assert refusal(tmp_path, CXX="g++-that-is-not") == expected


@needs_kernels
@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    broken = compiler(tmp_path / "c++", compiles="{ echo warming up >&2; echo fatal error: no such luck >&2; exit 1; }")
    assert refusal(tmp_path, CXX=str(broken)) == f"no CPU kernels: {broken} could not make them: fatal error: no such luck"


@needs_kernels
@pytest.mark.slow
def test_the_next_compiler_is_taken_where_one_makes_what_cannot_be_loaded(tmp_path: Path) -> None:
    """As clang on Linux: it needs another OpenMP than the one that is there."""
    compiler(tmp_path / "c++", links='echo not a library > "$2"')
    compiler(tmp_path / "g++")
    path = f"{tmp_path}{os.pathsep}/bin"
    assert build(tmp_path, PATH=path, CXX="").returncode == 0
    shutil.rmtree(tmp_path / "lib")
    words = refusal(tmp_path, PATH=path, CXX="env -u NOTHING c++")  # arguments behind the name are the compiler's
    assert words.startswith("no CPU kernels: what ") and "made cannot be loaded" in words and words.endswith(": install g++")


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.slow
def test_a_build_knows_which_vectors_it_uses_of_this_processor(tmp_path: Path) -> None:
    assert build(tmp_path, CXX=str(compiler(tmp_path / "c++"))).returncode == 0
    facts = json.loads((tmp_path / "lib" / "groupwise_cpu" / "built.json").read_text())
    assert facts["features"] == (["avx2"] if _has("avx2") else [])


def _has(feature: str) -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.is_file() and feature in cpus.read_text().split()


# ---------------------------------------------------------------- what is installed


def test_this_machine_has_the_kernels_of_these_sources() -> None:
    """A mistake must not pass as a machine without a compiler, nor as the kernels of yesterday."""
    if (reason := absence()) is not None:
        assert "is not installed" in reason or reason == "GROUPWISE_KERNELS=off"
        pytest.skip(reason)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((PACKAGE / "kernels").iterdir()))).hexdigest()
    assert json.loads((installed() / "built.json").read_text())["sources"] == digest, "the C++ has changed: run `make kernels`"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what is installed."""
    return shutil.copytree(installed(), tmp_path / "site" / "groupwise_cpu")


OTHER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from groupwise.ops.operations import absence, operations
print(absence())
print(operations().product(torch.ones(3, 64), torch.eye(64)).sum().item())
"""


def _words(copy: Path, forked: Any) -> str:
    """What is said of a package that is not loaded; torch's operations compute."""
    ran = forked.run(str(copy.parent), code=OTHER, GROUPWISE_KERNELS="on")
    assert ran.returncode == 0, ran.said
    words, total = ran.said.splitlines()
    assert total == "192.0" and "install it again on this machine: pip install" in words
    return words


@needs_kernels
def test_a_processor_that_lacks_something_goes_on_without(copy: Path, forked: Any) -> None:
    """A wheel that was moved: an instruction that a processor does not know would end the process."""
    facts = json.loads((copy / "built.json").read_text())
    (copy / "built.json").write_text(json.dumps(facts | {"features": [*facts["features"], "avx1024"]}))
    assert "compiled for a processor with avx1024, which this one lacks" in _words(copy, forked)


@needs_kernels
def test_a_library_that_cannot_be_loaded_is_named(copy: Path, forked: Any) -> None:
    """As on a machine of another kind."""
    facts = json.loads((copy / "built.json").read_text())
    (copy / "kernels.so").write_bytes(b"\x7fELF" + bytes(1000))
    facts["library"] = hashlib.sha256((copy / "kernels.so").read_bytes()).hexdigest()
    (copy / "built.json").write_text(json.dumps(facts))
    assert "groupwise-cpu cannot be loaded" in _words(copy, forked)


@needs_kernels
@pytest.mark.parametrize("damage", ["built.json is gone", "built.json is empty", "kernels.so is gone", "kernels.so is cut off"])
def test_a_package_of_which_a_part_is_missing_is_named(damage: str, copy: Path, forked: Any) -> None:
    """As an installation that was interrupted, or a full disk, leaves it."""
    (copy / "__init__.py").unlink()
    shutil.copy(PACKAGE / "src" / "groupwise_cpu" / "__init__.py", copy)
    file = copy / damage.split()[0]
    content = file.read_bytes()
    file.unlink()
    if "gone" not in damage:
        file.write_bytes(content[: 0 if "empty" in damage else 1000])
    assert "groupwise-cpu is damaged" in _words(copy, forked)


def test_a_folder_that_is_left_of_the_package_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setenv("GROUPWISE_KERNELS", "on")
    monkeypatch.setitem(sys.modules, "groupwise_cpu", ModuleType("groupwise_cpu"))
    monkeypatch.setattr(ops, "version", version)
    words = ops._choose()[1]
    assert words is not None and words.startswith("the package groupwise-cpu is not installed")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPWISE_KERNELS", "on")
    monkeypatch.setitem(sys.modules, "groupwise_cpu", None)
    words = ops._choose()[1]
    assert words is not None and words.startswith("the package groupwise-cpu is not installed") and "pip install" in words


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPWISE_KERNELS", "off")
    assert ops._choose()[1] == "GROUPWISE_KERNELS=off"


@needs_kernels
def test_a_package_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "version", {"groupwise": "0.3.0", "groupwise-cpu": "0.2.9"}.__getitem__)
    words = ops._choose()[1]
    assert words is not None and words.startswith("groupwise-cpu is 0.2.9, and groupwise 0.3.0: run `pip install")


# ---------------------------------------------------------------- other processors

ELSEWHERE = """
import sys, pytest
sys.path.insert(0, sys.argv[1])
from groupwise.ops.operations import absence
from groupwise_cpu.compiled import operations
assert absence() is None, absence()
assert operations.has_tiles() == (sys.argv[2] == "tiles")
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=few", *sys.argv[3:]]))
"""
FILES = [str(Path(__file__).parent / name) for name in ("test_kernels.py", "test_matrices.py")]
FLAGS = {  # most machines have AVX2: theirs are the kernels that users have, the others need not be quick
    "SSE2": "-O1 -march=x86-64",
    "AVX2": "-mno-avx512f",
    "AVX-512 alone": "-O1 -mno-avx512bf16 -mno-amx-tile",
    "no tiles": "-O1 -mno-amx-tile",
    "tiles": f"-O1 -include {Path(__file__).parent / 'software_tiles.h'}",
}
WITHOUT = {"AVX2": "avx512f", "AVX-512 alone": "avx512_bf16", "no tiles": "amx_tile"}
"""What a kind leaves out, as Linux calls it."""


@pytest.fixture
def kept(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder that outlives the tests, for the newest build of a kind: only what has changed is compiled again."""
    cache = getattr(request.config, "cache", None)  # pytest's own; `-p no:cacheprovider` leaves it out
    folder = Path(tmp_path if cache is None else cache.mkdir("kernels"))
    sources = [*sorted((PACKAGE / "kernels").iterdir()), PACKAGE / "setup.py", Path(__file__).parent / "software_tiles.h"]
    name = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:8]
    yield folder / f"{kind} {name}"
    for old in folder.glob(f"{kind} *"):
        if old.name != f"{kind} {name}":
            shutil.rmtree(old)


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("kind", FLAGS)
def test_other_processors_get_the_same(kind: str, kept: Path, forked: Any) -> None:
    """All that is said of the kernels beside this file, of those for other processors: older ones, and some with matrix tiles."""
    if kind == "tiles" and not _has("avx512_bf16"):
        pytest.skip("matrix tiles in software need AVX-512 for all else")
    if kind in WITHOUT and not _has(WITHOUT[kind]):
        pytest.skip("what is left out this processor does not have: these are the kernels of every other test")
    if not (kept / "lib" / "groupwise_cpu" / "built.json").exists():
        done = build(kept, CXXFLAGS=FLAGS[kind])
        assert done.returncode == 0, done.stderr
    process = forked.start(str(kept / "lib"), kind, *FILES, code=ELSEWHERE)
    assert process.wait(590) == 0, process.said
