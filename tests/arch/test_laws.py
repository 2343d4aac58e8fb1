"""The layout's laws, read off the source: who may import whom, what is where, what is documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from groupwise.utils.built_in import built_ins

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "groupwise"
FILES = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in sorted(SOURCE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}

ROOMS = (
    "errors", "records", "protocols", "utils", "sandbox", "ops", "algorithms", "config", "distributed", "data", "models", "rewards",
    "environments", "rollout", "proof", "training", "runs", "tinker", "viewer", "inspection", "api", "launch", "trl",
    "cli", "__init__", "__main__",
)  # fmt: skip
"""The packages from upstream to downstream, with the five files of the root.  A part imports from itself and those before it."""


def part_of(module: str) -> str:
    return module.split(".")[0]


def room_of(module: str) -> int:
    return ROOMS.index(part_of(module))


@cache
def imports(name: str, *, lazy: bool = True, typed: bool = False) -> tuple[str, ...]:
    """Modules that a file imports, with dots; `lazy`: also those inside functions; `typed`: also those for type checkers alone."""
    typing_only = {
        id(child)
        for node in ast.walk(TREES[name])
        if not typed and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    inside = {
        id(child)
        for node in ast.walk(TREES[name])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.walk(node)
    }
    found: list[str] = []
    for node in ast.walk(TREES[name]):
        if id(node) in typing_only or (not lazy and id(node) in inside):
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            if node.module.split(".")[0] == "groupwise":
                found += [f"{node.module}.{alias.name}" for alias in node.names]  # each may be a module
    return tuple(found)


def own_imports(name: str, *, lazy: bool = True, typed: bool = False) -> set[str]:
    """The same, of this library's modules only, by their keys in FILES: a package is its `__init__`."""
    listed = imports(name, lazy=lazy, typed=typed)
    found = (module.removeprefix("groupwise.") for module in listed if module.startswith("groupwise."))
    return {key for module in found for key in (module, f"{module}.__init__") if key in FILES}


def functions(name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method with its dotted name; not those inside functions."""

    def walk(prefix: str, body: list[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                yield f"{prefix}{node.name}", node
            elif isinstance(node, ast.ClassDef):
                yield from walk(f"{prefix}{node.name}.", node.body)

    yield from walk(f"{name}.", TREES[name].body)


def test_the_root_holds_five_files_and_the_packages() -> None:
    flat = {name for name in FILES if "." not in name}
    assert flat == {"__init__", "__main__", "errors", "records", "protocols"}
    assert {part_of(name) for name in FILES} <= set(ROOMS), "a package without a place in the order"


def test_imports_point_upstream() -> None:
    """Also those for type checkers alone: a type is read where it is made."""
    wrong = [(name, module) for name in FILES for module in own_imports(name, typed=True) if room_of(module) > room_of(name)]
    assert not wrong


def test_only_the_model_reward_imports_models_and_only_when_it_runs() -> None:
    for name in FILES:
        if part_of(name) == "rewards":
            assert not {m for m in own_imports(name, lazy=False) if part_of(m) in ("models", "data")}, name
            if name != "rewards.model":
                assert not {m for m in own_imports(name) if part_of(m) == "models"}, name


def test_no_circle_of_imports() -> None:
    """Also of imports inside functions, and of those for type checkers alone."""
    graph = {name: own_imports(name, typed=True) for name in FILES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for module in graph.get(name, set()):
                visit(module, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


STEP = ("training.online", "rollout.native.engine")
"""Where a step begins: the loop, and the engine that samples for it."""
MODULES_OF_A_STEP = 62
LINES_OF_A_STEP = 9_000
NOT_OF_A_STEP = (
    "algorithms.table", "api", "cli", "config.recipes", "config.schema", "config.strict_yaml", "config.validation", "data.encoding",
    "data.preference_formats", "models.gguf", "models.loading", "rewards.compose", "rollout.vllm", "runs", "trl", "viewer",
)  # fmt: skip
"""What a reader of a step need not read, because nothing that a step runs imports it."""


ON_A_GPU = ("ops.cuda.", "rollout.native.cuda.")
"""What only a GPU runs: a step on a CPU imports none of it."""


def reached(*starts: str) -> dict[str, str]:
    """The modules that imports lead to, nested ones too, and for each the one that imports it."""
    by = dict.fromkeys(starts, "")
    waiting = list(starts)
    while waiting:
        name = waiting.pop(0)
        for module in sorted(own_imports(name) - set(by)):
            by[module] = name
            waiting.append(module)
    return by


def docstrings(name: str) -> Iterator[ast.Expr]:
    """Texts that stand alone as a statement: of modules, classes, functions and attributes."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node


def lines_of_code(name: str) -> int:
    """Lines that hold a token of code: no docstring, comment or blank."""
    documented: set[int] = set()
    for text in docstrings(name):
        documented |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines: set[int] = set()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with FILES[name].open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in layout and token.start[0] not in documented:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_the_path_of_a_step_is_short() -> None:
    """Who wants to know what a step computes reads no more than this: the packages' `__init__` are maps, and hold no code."""
    path = reached(*STEP)
    modules = [name for name in path if not name.endswith("__init__") and not name.startswith(ON_A_GPU)]
    sizes = {name: lines_of_code(name) for name in modules}
    assert len(modules) <= MODULES_OF_A_STEP, sorted(modules)
    assert sum(sizes.values()) <= LINES_OF_A_STEP, sorted(sizes.items(), key=lambda item: -item[1])


def test_what_only_a_gpu_runs_is_imported_where_tensors_lie_on_one() -> None:
    for name in FILES:
        if not name.startswith(ON_A_GPU):
            wrong = {module for module in own_imports(name, lazy=False, typed=True) if module.startswith(ON_A_GPU)}
            assert not wrong, f"{name} imports {wrong} at its head"


def test_a_step_does_not_enter_rooms_that_it_does_not_need() -> None:
    path = reached(*STEP)
    wrong = [
        f"{path[name]} -> {name}" for name in path if any(name == room or name.startswith(f"{room}.") for room in NOT_OF_A_STEP)
    ]
    assert not wrong, wrong


def test_only_the_commands_enter_the_room_of_inspection() -> None:
    """What explains, checks and replays a run is no part of what a run does: it can change without a training changing."""
    wrong = [
        f"{name} -> {module}"
        for name in FILES
        for module in own_imports(name)
        if part_of(module) == "inspection" and part_of(name) not in ("inspection", "api", "cli", "__init__")
    ]
    assert not wrong, wrong


CLEVER = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.NamedExpr, ast.Lambda)
"""Expressions that hide a step of a computation inside of a statement."""


def nesting(node: ast.AST) -> int:
    """How many clever expressions stand inside one another in a statement."""
    inner = [nesting(child) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]
    return max(inner, default=0) + isinstance(node, CLEVER)


def knots(name: str) -> Iterator[int]:
    """Lines of statements with five clever expressions, or with three inside one another."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            count = sum(isinstance(inner, CLEVER) for inner in ast.walk(node))
            if count >= 5 or nesting(node) >= 3:
                yield node.lineno


FRAGMENTS = ("Of", "Its", "As", "In", "Those", "By", "Their")
"""First words of docstrings that are half of a sentence: alone, in an editor's tooltip, they say nothing."""


def long_lines(name: str) -> Iterator[int]:
    """Lines of more than 100 characters."""
    for number, line in enumerate(FILES[name].read_text(encoding="utf-8").splitlines(), 1):
        if len(line) > 100:
            yield number


def fragments(name: str) -> Iterator[int]:
    """Lines of docstrings that begin with half of a sentence."""
    for node in docstrings(name):
        assert isinstance(node.value, ast.Constant)
        words = str(node.value.value).split()
        if words and words[0] in FRAGMENTS:
            yield node.lineno


@pytest.mark.parametrize("places", [knots, long_lines, fragments], ids=["knots", "long lines", "docstrings that are fragments"])
def test_code_is_straight(places: Callable[[str], Iterator[int]]) -> None:
    """A debugger can stop at each step, two files fit side by side, and a docstring stands alone in a tooltip."""
    wrong = [f"{name}:{line}" for name in FILES for line in places(name)]
    assert not wrong, wrong


def test_the_mathematics_is_pure() -> None:
    """Functions of tensors: torch, numpy, kernels, operations and records."""
    allowed = {"torch", "numpy", "fla", "groupwise_cpu", "annotated_types", "groupwise"}
    kernels = {"triton"}
    standard = set(sys.stdlib_module_names)
    for name in FILES:
        if part_of(name) in ("algorithms", "ops"):
            foreign = {module.split(".")[0] for module in imports(name)} - allowed - standard
            if name.startswith("ops.triton."):
                foreign -= kernels
            assert not foreign, f"{name} imports {foreign}"
            assert {part_of(module) for module in own_imports(name)} <= {"algorithms", "ops", "records", "errors", "utils"}, name


def test_one_place_asks_for_the_package_of_kernels() -> None:
    """Everything else calls `operations()`, whose answer computes on any device."""
    for name in FILES:
        named = any("groupwise_cpu" in module for module in imports(name))
        assert not named or name == "ops.operations", f"{name} imports groupwise_cpu: call `ops.operations.operations()`"


def test_nothing_imports_the_kernels_for_gpus() -> None:
    """They need Triton: `ops.operations` loads them by name, where a device and Triton are there."""
    inside = ("ops.triton.", "ops.triton")
    for name in FILES:
        entered = [module for module in own_imports(name) if module.startswith(inside)]
        assert name.startswith(inside) or not entered, f"{name} imports {entered}"


PLUGIN = (
    "rollout.vllm.plugin.groupwise_lease", "rollout.vllm.plugin.groupwise_versions", "rollout.vllm.plugin.groupwise_vllm",
)  # fmt: skip
"""Run inside vLLM's processes, where Groupwise is not installed: they can import no part of it."""
DISTRIBUTED = (
    "distributed.comm", "distributed.fsdp", "distributed.layout", "distributed.process_group", "distributed.sharded_checkpoint",
    "distributed.ulysses",
)  # fmt: skip
"""What imports torch.distributed."""


def test_only_distributed_knows_of_other_processes() -> None:
    for name in FILES:
        reached = any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" for node in ast.walk(TREES[name])
        )
        uses = reached or any(module.startswith("torch.distributed") for module in imports(name))
        assert not uses or name in DISTRIBUTED, f"{name} uses torch.distributed"


PROGRAMS = {
    "api.sweep": "the runs of a sweep, as the command trains them",
    "environments.programs": "a harness that is a program",
    "launch.local": "torchrun and servers, on this machine",
    "launch.submit": "sbatch, sky and kubectl",
    "models.model_download": "pip",
    "rollout.vllm.server": "vLLM's server",
    "runs.starts": "git",
    "sandbox.server": "a sandbox, for programs of a model",
    "viewer.replays": "a replay, as the command does it",
}
"""Modules that start programs which are not this library's workers, and what they start."""
INSIDE_VLLM = "rollout.vllm.plugin.groupwise_vllm"
INSIDE_SANDBOX = ("sandbox.agent_runner", "sandbox.runner", "sandbox.workspace_runner", "sandbox.attacks")
"""What runs in a sandbox, and the programs that try to break out."""


def test_one_system_of_processes_and_threads() -> None:
    """Threads, forks and worker processes are those of `utils`; programs are started where `PROGRAMS` says."""
    started = re.compile(r"\bos\.fork\(|\bmultiprocessing\.|\bthreading\.Thread\(|\bsubprocess\.(run|Popen|call|check_\w+)\(")
    places = {(name, found[0]) for name, path in FILES.items() for found in started.finditer(path.read_text(encoding="utf-8"))}
    others = sorted(
        (name, what) for name, what in places if part_of(name) != "utils" and name not in (INSIDE_VLLM, *INSIDE_SANDBOX)
    )
    assert [one for one in others if not (one[0] in PROGRAMS and one[1].startswith("subprocess."))] == []
    assert {name for name, _ in others} == set(PROGRAMS)


def test_what_runs_inside_vllm_imports_nothing_of_ours() -> None:
    assert not {module for name in PLUGIN for module in own_imports(name)}


@pytest.mark.parametrize(
    "module", ["peft", "tensorboard", "vllm", "wandb", "mlflow", "trackio", "math_verify", "datasets", "pyarrow", "xxhash"]
)
def test_optional_and_heavy_dependencies_have_one_home(module: str) -> None:
    homes = {name for name in FILES if any(found.split(".")[0] == module for found in imports(name))}
    limit = {"pyarrow": 7, "datasets": 1, "vllm": 2}.get(module, 1)
    assert len(homes) <= limit, homes


TOOLS = ("test", "dev", "docs", "bench")
"""Extras of who works on the library; it imports nothing that they alone install."""
PACKAGES = {"yaml": "pyyaml", "PIL": "pillow", "google": "protobuf"}
"""Names of packages that differ from the names of their modules."""
APART = {"vllm", "groupwise_lease", "groupwise_versions", "groupwise_vllm", "groupwise_cpu", "fla", "IPython"}
"""Modules that no extra of ours installs: vLLM and our plug-in to it have an environment of their own, the kernels are another
package, flash-linear-attention is used where a user has it, and IPython is where a notebook is."""


def test_what_is_imported_is_declared() -> None:
    """A package that another one happens to bring may go with that package's next version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {name for extra, names in project["optional-dependencies"].items() if extra not in TOOLS for name in names}
    packages = {canonicalize_name(Requirement(line).name) for line in needed.union(project["dependencies"])}
    modules = {module.split(".")[0] for name in FILES for module in imports(name, typed=True)}
    foreign = modules - set(sys.stdlib_module_names) - APART - {"groupwise"}
    assert {module for module in foreign if canonicalize_name(PACKAGES.get(module, module)) not in packages} == set()


def test_the_command_and_the_configuration_need_no_torch() -> None:
    modules = ("cli", "config.recipes", "records", "config.settings", "data", "rewards")
    code = "import sys, groupwise, " + ", ".join(f"groupwise.{module}" for module in modules)
    ask = "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", f"{code}; {ask}"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_built_in_has_its_name_alone() -> None:
    """And the mark reads it: of two with a name one would never be called, and one without a readable mark is unknown."""
    for place in ("rewards", "data.tasks", "data.sources", "environments"):
        marked = [
            (argument.value, f"groupwise.{name}:{node.name}")
            for name in FILES
            if name == place or name.rpartition(".")[0] == place
            for node in TREES[name].body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            for mark in node.decorator_list
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "built_in"
            for argument in mark.args
            if isinstance(argument, ast.Constant)
        ]
        assert marked == list(built_ins(place).items()), place


def test_broad_excepts_say_why() -> None:
    """`except Exception` needs its reason on the line or inside; one that only cleans up and raises again needs none."""
    wrong = []
    for name, path in FILES.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in (node for node in ast.walk(TREES[name]) if isinstance(node, ast.ExceptHandler)):
            if node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"):
                raises = any(isinstance(child, ast.Raise) for statement in node.body for child in ast.walk(statement))
                body = lines[node.lineno - 2 : node.body[-1].end_lineno]
                if not raises and not any("#" in line for line in body):
                    wrong.append(f"{name}:{node.lineno}")
    assert not wrong


def test_the_library_prints_nothing() -> None:
    calls = [
        f"{name}:{node.lineno}"
        for name in FILES
        if part_of(name) not in ("cli", "__main__")
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
    ]
    assert not calls


def test_docstrings_name_what_there_is() -> None:
    """`folder/file.py`, `package/file` and `module.NAME` in backticks: a name that has moved would send a reader nowhere."""
    modules = {full.removesuffix(".__init__").rpartition(".")[2] for full in FILES}
    homes: dict[str, set[str]] = {}
    for full, tree in TREES.items():
        for node in tree.body:
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            names += [target.id for target in targets if isinstance(target, ast.Name)]
            for name in names:
                homes.setdefault(name, set()).add(full.removesuffix(".__init__").rpartition(".")[2])
    # What is not ours, and attributes and keys of the name.
    others = ("torch.", "gw.", "groupwise.", "algorithm.importance", "reward_model.replay", "wording.chat", "ops.attention")
    wrong = []
    for full, path in FILES.items():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            files = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", line)
            files += [f"{file}.py" for file in re.findall(rf"`((?:{'|'.join({*ROOMS} - {'runs'})})/[a-z_/]+)`", line)]
            for file in files:
                places = (SOURCE / file, path.parent / file, ROOT / file, ROOT / "src" / file)
                known = any(place.is_file() or place.with_suffix("").is_dir() for place in places) or (
                    "/" not in file and file.removesuffix(".py") in modules
                )
                if not known and file not in EXAMPLES:
                    wrong.append(f"{full}:{number}: {file}")
            for dotted in re.findall(r"`([a-z_.]+\.[A-Za-z_]+)`", line):
                module, name = dotted.split(".")[-2:]
                if name in homes and module not in homes[name] and not dotted.startswith(others):
                    wrong.append(f"{full}:{number}: {dotted}, which is in {', '.join(sorted(homes[name]))}")
    assert not wrong, wrong


def test_no_class_has_the_name_of_another() -> None:
    homes: dict[str, list[str]] = {}
    for name in FILES:
        for node in TREES[name].body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    wrong = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert not wrong, wrong


EXAMPLES = {"path/to/file.py", "my_rewards.py", "my_env.py", "file.py"}
"""Files of a user's, in docstrings."""


WRITES = {
    ("api.sweep", "open"): "the log of another process, as it writes",
    ("launch.local", "open"): "the same",
    ("rollout.vllm.server", "open"): "the log of another process, as it writes",
    ("rollout.vllm.server", "shutil.copyfile"): "the same, kept for a person to read",
    ("rollout.vllm.plugin.groupwise_versions", "open"): "a lock, and the mirror in shared memory",
    ("rollout.vllm.plugin.groupwise_versions", "rename"): "the same",
    ("rollout.vllm.plugin.groupwise_versions", "write_bytes"): "the same",
    ("rollout.vllm.plugin.groupwise_vllm", "rename"): "the mirror's folder",
    ("rollout.vllm.publisher", "open"): "blocks that are appended; the manifest that counts them comes last",
    ("runs.lock", "open"): "a lock",
    ("sandbox.agent_runner", "open"): "files of an episode, inside its sandbox",
    ("runs.metrics_log", "open"): "lines that are appended",
    ("runs.starts", "os.replace"): "a damaged file, out of the way",
    ("runs.run_files", "open"): "lines that are appended",
    ("runs.checkpoint", "write_text"): "inside of a folder from `files.new_folder`, which is synced as a whole",
    ("models.sharded", "write_text"): "the same",
    ("sandbox.attacks", "write_text"): "a secret that attacks look for",
    ("sandbox.runner", "open"): "the input of a program, in its sandbox",
    ("sandbox.runner", "os.rename"): "folders of a program, on the way to their end",
}
"""Who changes files by other means than `utils/files.py`, and what they are."""


MOVES = ("os.replace", "os.rename", "os.renames", "shutil.move", "shutil.copy", "shutil.copy2", "shutil.copyfile")


def _writes(call: ast.Call) -> bool:
    """True if a call of `open` has a mode to write, append or create."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    texts = [node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return any(re.fullmatch("[rbt+]*[wax+][rbt+]*", text) for text in texts)


def test_one_module_writes_files() -> None:
    """Whole or not at all, and on the disk: who writes, renames or copies a file does it by `utils/files.py`."""
    found = set()
    for name in set(FILES) - {"utils.files"}:
        for call in (node for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)):
            callee = ast.unparse(call.func)
            method = callee.rpartition(".")[2]
            if callee in MOVES:
                found.add((name, callee))
            elif method in ("write_text", "write_bytes", "rename") or (method == "open" and callee != "os.open" and _writes(call)):
                found.add((name, method))
    assert found == set(WRITES)


def test_no_code_compares_an_algorithms_name() -> None:
    from groupwise.algorithms.table import ALGORITHMS

    for name in set(FILES) - {"trl.loss_keys"}:  # which compares names of TRL's losses, some of which are also ours
        for node in ast.walk(TREES[name]):
            if isinstance(node, (ast.Compare, ast.match_case)):
                names = {child.value for child in ast.walk(node if isinstance(node, ast.Compare) else node.pattern)
                         if isinstance(child, ast.Constant)}  # fmt: skip
                assert not names & set(ALGORITHMS), f"{name}:{getattr(node, 'lineno', node)} compares {names & set(ALGORITHMS)}"


def test_no_code_compares_an_engines_name() -> None:
    """Engines say what they can do: `settings.EngineTraits` before they are made, `rollout.engine.Engine` after."""
    from groupwise.config.settings import ENGINE_TRAITS

    for name in FILES:
        for node in ast.walk(TREES[name]):
            if isinstance(node, (ast.Compare, ast.match_case)):
                names = {child.value for child in ast.walk(node if isinstance(node, ast.Compare) else node.pattern)
                         if isinstance(child, ast.Constant)}  # fmt: skip
                assert not names & set(ENGINE_TRAITS), (
                    f"{name}:{getattr(node, 'lineno', node)} compares {names & set(ENGINE_TRAITS)}"
                )


def test_public_names_are_documented() -> None:
    wrong = [name for name in FILES if not ast.get_docstring(TREES[name]) and not name.endswith("__init__")]
    for name in FILES:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                wrong.append(f"{name}.{node.name}")
        for full, node in functions(name):
            parts = full.removeprefix(f"{name}.").split(".")
            # An overload's implementation speaks for it; `forward` and `backward` are described by their class.
            overload = any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list)
            public = not any(part.startswith("_") for part in parts) and parts[-1] not in ("forward", "backward")
            if public and not overload and not ast.get_docstring(node):
                wrong.append(full)
    assert not wrong


NO_MAP = {
    "cli.__init__": "each module is the subcommand of its name",
    "data.tasks.__init__": "each module is the task of its name",
    "rollout.vllm.plugin.__init__": "what vLLM loads",
}
"""Packages whose page does not list their modules, and why."""


def test_the_page_of_a_package_lists_its_modules() -> None:
    """A reader finds the module there, and no name of one that has moved."""
    wrong = []
    for name in FILES:
        package, _, leaf = name.rpartition(".")
        if leaf != "__init__" or not package or name in NO_MAP:
            continue
        inside = {other.removeprefix(f"{package}.").partition(".")[0] for other in FILES if other.startswith(f"{package}.")}
        page = ast.get_docstring(TREES[name]) or ""
        listed = set()
        for entry in re.findall(r"^- (`\w+`(?:, `\w+`)*):|^\| (`\w+`(?:, `\w+`)*) \|", page, re.MULTILINE):
            listed |= set(re.findall(r"\w+", "".join(entry)))
        mentioned = set(re.findall(r"`(\w+)`", page))
        wrong += [f"{package} does not name {module}" for module in sorted(inside - {"__init__"} - mentioned)]
        wrong += [f"{package} lists {module}, which is not there" for module in sorted(listed - inside)]
    assert not wrong, wrong


def test_pages_are_written_in_lines() -> None:
    """Scripts and style sheets that are ours are read by people too."""
    folders = (SOURCE / "viewer" / "static", ROOT / "docs" / "site")
    pages = [path for folder in folders for path in folder.glob("*") if path.suffix in (".js", ".css", ".html")]
    lines = [(path.name, i, text) for path in pages for i, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
    assert not [f"{name}:{i}" for name, i, text in lines if len(text) > 140]


def test_nothing_names_a_machine() -> None:
    """No file of the repository knows where it was written."""
    mark = re.compile(r"/(home|work|Users)/\w+")
    for folder in ("src", "tests", "docs", "recipes", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".md", ".yaml", ".txt") and path != Path(__file__):
                found = mark.search(path.read_text(encoding="utf-8"))
                assert found is None, f"{path.relative_to(ROOT)}: {found.group()}"
