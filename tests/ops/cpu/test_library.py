"""Compiling on the user's machine: what happens without a compiler, with a broken one, and in many processes at once."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.ops.cpu.library import absence, library
from groupwise.utils.cache import cache_folder

ASK = "from groupwise.ops.cpu.library import absence, library; print(absence()); print(library() is None)"
Ask = Callable[..., list[str]]


@pytest.fixture
def ask(forked: Any, tmp_path: Path) -> Ask:
    """`absence` and whether there is no library, in a process with a cache of its own that does something first."""

    def asked(first: str = "", **environment: str) -> list[str]:
        found = forked.run(code=first + ASK, **{"XDG_CACHE_HOME": str(tmp_path), "GROUPWISE_KERNELS": "on"} | environment)
        assert found.returncode == 0, found.said
        return found.said.splitlines()

    return asked


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """One that takes a second to make what was compiled already, and writes down whenever it did."""
    good = library()
    assert good is not None
    script = [
        "#!/bin/sh",
        '[ "$1" = --version ] && echo quick && exit 0',
        f"[ \"$1\" = -shared ] && echo linked >> '{tmp_path / 'calls'}' && sleep 1 && cp '{good._name}' made.so",
        "exit 0",
    ]
    (tmp_path / "c++").write_text("\n".join(script))
    (tmp_path / "c++").chmod(0o755)
    return tmp_path / "c++"


@pytest.mark.slow
def test_without_a_compiler_it_says_what_to_install(ask: Ask, tmp_path: Path) -> None:
    told, none = ask(PATH=str(tmp_path), CXX="")
    assert "install g++" in told and none == "True"


@pytest.mark.slow
def test_a_name_in_cxx_that_is_no_program_is_said(ask: Ask) -> None:
    """Another compiler is not taken for it; arguments behind the name are its own."""
    told, none = ask(CXX="g++-that-is-not")
    assert told == "CXX names 'g++-that-is-not', which is no program here: name a compiler, or unset CXX" and none == "True"
    assert ask(CXX="env -u NOTHING g++") == ask(CXX="g++")


@pytest.mark.slow
def test_switched_off(ask: Ask) -> None:
    assert ask(GROUPWISE_KERNELS="off") == ["GROUPWISE_KERNELS=off", "True"]


@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(ask: Ask, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    script = ["#!/bin/sh", '[ "$1" = --version ] && exit 0', "echo warming up >&2", "echo fatal error: no such luck >&2", "exit 1"]
    broken.write_text("\n".join(script))
    broken.chmod(0o755)
    told, none = ask(CXX=str(broken))
    assert told == f"{broken} could not make them: fatal error: no such luck" and none == "True"
    assert not list((tmp_path / "groupwise").iterdir())


@pytest.mark.slow
def test_a_compiler_that_hangs_is_left_alone(ask: Ask, tmp_path: Path) -> None:
    """What it had said until then is bytes."""
    slow = tmp_path / "c++"
    slow.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho thinking >&2\nexec sleep 60\n')
    slow.chmod(0o755)
    told, none = ask("from groupwise.ops.cpu import library as l; l.SECONDS = 1; ", CXX=str(slow))
    assert told == f"{slow} could not make them: thinking" and none == "True"


@pytest.mark.slow
@pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")
def test_the_next_compiler_is_asked_where_one_makes_what_cannot_be_loaded(ask: Ask, tmp_path: Path) -> None:
    """As clang on Linux: it needs another OpenMP than the one that is there."""
    good = library()
    assert good is not None
    for name, makes in (("c++", "echo not a library > made.so"), ("g++", f"cp '{good._name}' made.so")):
        (tmp_path / name).write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {name} && exit 0\n{makes}\n')
        (tmp_path / name).chmod(0o755)
    only = {"PATH": f"{tmp_path}{os.pathsep}/bin", "CXX": ""}
    assert ask(**only) == ["None", "False"]
    told, none = ask(**only | {"CXX": "c++"})
    assert told.startswith(f"what {tmp_path / 'c++'} made cannot be loaded") and "install g++" in told and none == "True"


def test_code_is_loaded_from_no_folder_that_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "groupwise" and (tmp_path / "groupwise").stat().st_mode & 0o777 == 0o700
    (tmp_path / "groupwise").chmod(0o777)
    assert cache_folder().parent != tmp_path


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under a number that no list of users knows."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache_folder().is_dir()


@pytest.mark.slow
@pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")
def test_compiled_once_and_kept(ask: Ask, compiler: Path, forked: Any, tmp_path: Path) -> None:
    """Of two processes at the same time one compiles and the other waits; the next one only loads the library."""
    given = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler), "GROUPWISE_KERNELS": "on"}
    both = [forked.start(code=ASK, **given) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [process.said.splitlines() for process in both] == [["None", "False"]] * 2
    assert (tmp_path / "calls").read_text() == "linked\n"
    (made,) = (tmp_path / "groupwise").glob("*.so")
    before = made.stat().st_mtime_ns
    assert ask(CXX=str(compiler)) == ["None", "False"] and made.stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")
def test_a_cache_that_cannot_be_written(ask: Ask, compiler: Path, tmp_path: Path) -> None:
    """A file where the folder should be: the library is made for this process alone."""
    (tmp_path / "groupwise").write_text("")
    for count in (1, 2):
        assert ask(CXX=str(compiler)) == ["None", "False"]
        assert (tmp_path / "calls").read_text() == "linked\n" * count


OTHER = """
import sys, pytest
from groupwise.ops.cpu import library
library.FLAGS += tuple(sys.argv[2:])
assert library.absence() is None, library.absence()
assert library.has_tiles() == ("-include" in sys.argv)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=few", *sys.argv[1].split(",")]))
"""
FILES = ",".join(str(Path(__file__).parent / name) for name in ("test_kernels.py", "test_matrices.py"))
FLAGS = {  # most machines have AVX2: theirs are the kernels that users have, the others need not be quick
    "SSE2": ["-O1", "-march=x86-64"],
    "AVX2": ["-mno-avx512f"],
    "AVX-512 alone": ["-O1", "-mno-avx512bf16", "-mno-amx-tile"],
    "no tiles": ["-O1", "-mno-amx-tile"],
    "tiles": ["-O1", "-include", str(Path(__file__).parent / "software_tiles.h")],
}

WITHOUT = {"AVX2": "avx512f", "AVX-512 alone": "avx512_bf16", "no tiles": "amx_tile"}
"""What a kind leaves out, as Linux calls it."""


@pytest.fixture
def kept(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A cache that outlives the tests, for the newest library of a kind: only what has changed is compiled again.

    A library's name tells its sources and flags, but not what a flag includes.
    """
    cache = getattr(request.config, "cache", None)  # pytest's own; `-p no:cacheprovider` leaves it out
    seen = hashlib.sha256((Path(__file__).parent / "software_tiles.h").read_bytes()).hexdigest()
    folder = Path(tmp_path if cache is None else cache.mkdir("kernels")) / f"{kind} {seen[:8]}"
    yield folder
    made = sorted(folder.glob("groupwise/*.so"), key=lambda path: path.stat().st_mtime)
    for path in made[:-1]:
        path.unlink()


def _has(feature: str) -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.is_file() and feature in cpus.read_text().split()


@pytest.mark.skipif(absence() is not None, reason=f"no compiled kernels: {absence()}")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.slow
@pytest.mark.parametrize("kind", FLAGS)
def test_other_processors_get_the_same(kind: str, kept: Path, forked: Any) -> None:
    """All that is said of the kernels beside this file, of those for other processors: older ones, and some with matrix tiles."""
    if kind == "tiles" and not _has("avx512_bf16"):
        pytest.skip("matrix tiles in software need AVX-512 for all else")
    if kind in WITHOUT and not _has(WITHOUT[kind]):
        pytest.skip("what is left out this processor does not have: these are the kernels of every other test")
    process = forked.start(FILES, *FLAGS[kind], code=OTHER, XDG_CACHE_HOME=str(kept))
    assert process.wait(590) == 0, process.said


def test_this_machine_has_them_if_it_has_a_compiler() -> None:
    """A mistake in the sources must not pass as a machine without a compiler."""
    if os.environ.get("GROUPWISE_KERNELS") != "off":
        assert absence() is None or "no C++ compiler" in str(absence())
