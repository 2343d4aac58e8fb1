"""The kernels' interface: what `kernels.h` says is what Python passes, and nothing else goes through."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from groupwise.ops.cpu import interface, library
from groupwise.ops.cpu.library import call

needs_kernels = pytest.mark.skipif(library.library() is None, reason=f"no kernels: {library.absence()}")
FOLDER = Path(library.__file__).parent


def test_every_structure_has_the_compilers_size_and_offsets(tmp_path: Path) -> None:
    """The same header, asked through a compiler."""
    compiler = next(iter(library._compilers()), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    lines = []
    for name, fields in interface.declarations(interface.HEADER.read_text())[0].items():
        lines.append(f'std::printf("{name} %zu", sizeof({name}));')
        lines += [f'std::printf(" %zu", offsetof({name}, {field}));' for _, field in fields]
        lines.append('std::printf("\\n");')
    source = tmp_path / "sizes.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include \"kernels.h\"\nint main() {\n" + "\n".join(lines) + "\n}\n"
    )  # fmt: skip
    subprocess.run([*compiler, f"-I{FOLDER}", str(source), "-o", str(tmp_path / "sizes")], check=True, timeout=120)
    told = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True, timeout=60).stdout
    for line in told.splitlines():
        name, *numbers = line.split()
        made = interface._MADE[name]
        offsets = [getattr(made, field).offset for field, _ in made._fields_]
        assert [ctypes.sizeof(made), *offsets] == [int(number) for number in numbers], name


def test_every_function_of_the_files_is_in_the_header() -> None:
    declared = set(interface.declarations(interface.HEADER.read_text())[1])
    defined = {
        name
        for path in FOLDER.glob("*.cpp")
        for name in re.findall(r'extern "C" \w+ (\w+)\(', path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert defined == declared


def test_every_call_of_python_names_a_function_of_the_header() -> None:
    declared = set(interface.declarations(interface.HEADER.read_text())[1])
    called = {
        name
        for path in (FOLDER / "kernels.py", FOLDER / "decoding.py")
        for name in re.findall(r'call\(\s*\*?\(?\s*"(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert called
    assert called | {"has_tiles", "has_gemm"} == declared


@needs_kernels
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, torch.zeros(16, dtype=torch.float64), torch.zeros(16), 16, 1), "argument x.*float64"),
        ((0, torch.zeros(16), [0.0], 16, 1), "argument out.*list"),
        ((0, torch.zeros(16), torch.zeros(16), 16.0, 1), "argument numbers"),
        ((0, torch.zeros(16), torch.zeros(16), 16), r"takes 5 arguments \(half, x, out, numbers, threads\), got 4"),
        ((0, torch.zeros(16, device="meta"), torch.zeros(16), 16, 1), "argument x.*meta"),
        ((0, interface.array(interface.Part, [(0, 0, 1)]), torch.zeros(16), 16, 1), "argument x.*Part_Array"),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call("gelu", *arguments)


@needs_kernels
def test_a_wrong_structure_is_refused() -> None:
    x = torch.zeros(1, 1, 16)
    strides = interface.array(interface.Stretch, [(0, 1, 0, 0)])
    with pytest.raises(TypeError, match=r"argument strides: .*Strides"):
        call("attention_forward", 0, x, x, x, x, x, strides, 1, 1, 1, 16, 1.0, None, None, 0, 1)


def test_a_library_that_lacks_a_function_is_not_taken(tmp_path: Path) -> None:
    compiler = next(iter(library._compilers()), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "a.cpp").write_text('extern "C" int has_tiles() { return 0; }')
    subprocess.run([*compiler, "-shared", "-fPIC", str(tmp_path / "a.cpp"), "-o", str(tmp_path / "a.so")], check=True, timeout=120)
    with pytest.raises(AttributeError):
        interface.declare(ctypes.CDLL(str(tmp_path / "a.so")))


@pytest.mark.slow
def test_the_header_is_read_without_a_compiler() -> None:
    code = "from groupwise.ops.cpu import interface; print(interface.Weight._fields_[2][0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""}, timeout=120)
    assert done.stdout.strip() == "outputs"
