"""The files around the code: what they promise to a fresh clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from groupwise.config.bundled import bundled_recipes, header
from groupwise.config.recipes import load_stages
from groupwise.errors import ConfigError

ROOT = Path(__file__).parents[1]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_cpu_build_of_torch_pulls_in_no_cuda_package() -> None:
    torch = metadata.version("torch")
    if not torch.endswith("+cpu"):
        pytest.skip(f"torch {torch} is not the CPU build")
    assert [name for found in metadata.distributions() if (name := found.metadata["Name"]).startswith("nvidia-")] == []


def test_constraints_pin_exactly_what_is_needed() -> None:
    found = pins()
    assert found["torch"] == "2.13.0"
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in found.values())
    assert all(name == canonicalize_name(name) for name in found)
    extras = project()["optional-dependencies"]
    wanted = project()["dependencies"] + extras["test"] + extras["dev"] + extras["tensorboard"] + extras["peft"]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


def test_messages_install_the_packages_of_the_extras_and_nothing_by_our_name() -> None:
    """`pip install groupwise[...]` would ask an index, where a package of this name is a stranger's."""
    files = [path for folder, ending in (("src", "py"), ("docs", "md")) for path in (ROOT / folder).rglob(f"*.{ending}")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    asked = re.compile(r"pip install (?!--no-index)[^\n`]*(?<![\w/-])groupwise(?![\w/-])")
    assert not [name for name, text in texts.items() if asked.search(text)]
    lines = [*project()["dependencies"], *(line for extra in project()["optional-dependencies"].values() for line in extra)]
    needed = {wanted.name: wanted for wanted in map(Requirement, lines)}
    pinned = {pair for text in texts.values() for pair in re.findall(r"pip install ([\w-]+)==([\d.]+)", text)}
    assert {name for name, _ in pinned} == {"math-verify", "reasoning-gym", "sandlock", "verifiers"}
    assert all(str(needed[name].specifier) == f"=={version}" for name, version in pinned)


def test_what_is_installed_here_is_what_is_pinned() -> None:
    found = pins()
    core = [canonicalize_name(Requirement(line).name) for line in project()["dependencies"]]
    different = {name: metadata.version(name) for name in core if metadata.version(name).split("+")[0] != found[name]}
    if not any(Path(sys.prefix, stamp).exists() for stamp in (".core", ".test", ".dev")):
        pytest.skip("this environment was not made by the Makefile")
    assert not different, "the Makefile installs what constraints.txt pins"


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "test-vllm", "kernels", "lint", "docs", "bench"])
def test_make_targets_set_up_what_they_need(target: str) -> None:
    """What `make` would do, in a clone without a virtual environment."""
    command = ["make", "--dry-run", "--always-make", "VENV=/nowhere", target]
    # The suite itself runs under `make test`: what that make tells its children is not for this one.
    outside = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    dry = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True).stdout
    commands = [line for line in dry.splitlines() if not line.startswith("echo ")]
    assert commands[0].endswith("-m venv /nowhere")
    assert "pip install" in commands[1]
    assert "-c constraints.txt" in commands[1]
    assert len(commands) > 3


@pytest.mark.xdist_group("a group")
def test_tests_of_a_group_meet_on_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist sends them there by what it appends to their names."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("only under pytest-xdist")
    assert request.node.nodeid.endswith("@a group")


def test_continuous_integration_runs_everything() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "exec make lint test test-slow"


def test_the_changelog_names_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {project()['version']}" in text


def test_the_kernels_have_the_version_of_what_calls_them() -> None:
    kernels = tomllib.loads((ROOT / "packages" / "groupwise-cpu" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kernels["version"] == project()["version"]


def test_pre_commit_hooks_are_local() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"repo: (\S+)", text) == ["local"]


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_say_what_to_expect_and_name_no_unknown_key(name: str) -> None:
    assert header(name)
    wrong: list[str] = []
    try:
        load_stages(name)
    except ConfigError as error:  # a model may have to be fetched first; a path would have to be beside the clone
        fetched = ("as a hub name it is", "fetch it by `groupwise get", "run `groupwise get", "problems in")
        wrong = [line for line in str(error).splitlines() if not any(text in line for text in fetched)]
    assert not wrong


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_users_script_type_checks(check_types: Callable[..., None], tmp_path: Path) -> None:
    """Pyright passes it, more strictly than `make lint` passes the library, and finds its mistakes."""
    pytest.importorskip("pyright")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]
    source = str(ROOT / "src")
    assert settings.pop("include") == ["src"]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings | {"extraPaths": [source], "stubPath": str(ROOT / "typings")}))
    command = ["pyright", "--project", str(tmp_path / "pyrightconfig.json"), "--pythonpath", sys.executable]
    check_types(command, tmp_path, dict(os.environ), behind="\n# pyright: standard\n")


@pytest.mark.parametrize("how", [{"PYTHONOPTIMIZE": "1"}, {"PYTHONOPTIMIZE": "2"}])
def test_python_that_leaves_checks_out_is_refused(how: dict[str, str]) -> None:
    found = subprocess.run([sys.executable, "-c", "import groupwise"], env=os.environ | how, capture_output=True, text=True)
    assert found.returncode == 1
    assert "which `python -O` and PYTHONOPTIMIZE leave out: start Python without them" in found.stderr


def test_the_system_that_is_needed_is_said() -> None:
    """Locks, limits and sockets are POSIX's."""
    assert "Operating System :: POSIX" in project()["classifiers"]
    assert "on Windows: WSL" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def test_the_former_name_of_a_rollout_group_warns() -> None:
    import groupwise as gw

    with pytest.warns(DeprecationWarning, match="RolloutGroup"):
        assert gw.Scored is gw.RolloutGroup


def test_the_container_copies_what_is_there_and_needs_nothing_else() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("COPY")]
    assert lines
    for line in lines:
        for name in line.split()[1:-1]:
            assert (ROOT / name).exists(), name
    version = re.search(r"^ARG PYTHON=(.*)$", text, flags=re.MULTILINE)
    assert version is not None and version[1] in ("3.11", "3.12", "3.13", "3.14")
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.slow
def test_the_container_is_built_and_trains(tmp_path: Path) -> None:
    builder = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if builder is None or subprocess.run([builder, "info"], capture_output=True).returncode:
        pytest.skip("no builder of containers works on this machine")
    subprocess.run([builder, "build", "-q", "-t", "groupwise-test", str(ROOT)], check=True, timeout=1800)
    command = [builder, "run", "--rm", "groupwise-test", "train", "demo", "--dry-run"]
    subprocess.run(command, check=True, timeout=600)


def test_the_workflow_runs_what_continuous_integration_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    assert job["steps"][-1] == {"run": ".ci/run"} and (ROOT / ".ci/run").exists()
    for version in job["strategy"]["matrix"]["python"]:
        assert SpecifierSet(project()["requires-python"]).contains(f"{version}.0")


def test_pages_and_pip_name_the_same_pythons() -> None:
    asked = SpecifierSet(project()["requires-python"])
    assert asked.contains("3.11.0") and asked.contains("3.14.9") and not asked.contains("3.15.0")
    for page in ("docs/install.md", "docs/first-hour.md"):
        assert "Python 3.11 to 3.14" in (ROOT / page).read_text(encoding="utf-8")
