"""A loss, credit, reward, engine, task, environment and command of one's own, from a package that lies outside of the tree.
Built-in ones in a copy of the tree, each by one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import groupwise
from groupwise.config.recipes import make_recipe
from groupwise.errors import ConfigError
from groupwise.records import Finish
from groupwise.runs.run import train

pytestmark = pytest.mark.slow

PACKAGE = '''
from groupwise.algorithms.advantages import Centered
from groupwise.rollout.engine import InProcess
from groupwise.rollout.native.engine import NativeEngine

calls = []


def loss(terms, *, width: float = 1.0):
    calls.append(("loss", width))
    return -terms.advantage_M * terms.logp_M * width


def credit(groups):
    calls.append(("credit", len(groups)))
    return Centered()(groups)


class Engine(InProcess):
    """Draws by the native engine, and counts."""

    def __init__(self, policy, *, max_rows, environment=None):
        calls.append(("engine", max_rows, environment is not None))
        self.inner = NativeEngine(policy, max_rows=max_rows, environment=environment)

    def generate(self, prompts, *, group_size, sampling, seed):
        self.inner.send_weights(self.version)
        calls.append(("generate", len(prompts), group_size))
        return self.inner.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
'''


ALONE = '''
from dataclasses import dataclass
import json


def reward(prompts, completions, *, bonus=0.0, **columns):
    return [bonus + sum(map(ord, text)) % 3 for text in completions]


@dataclass(frozen=True)
class Doubling:
    """Twice a number."""

    most: int = 9

    def rows(self, n):
        return [{"prompt": f"{i}+{i}", "answer": str(2 * i), "hard": i > 5} for i in range(1, min(n, self.most) + 1)]

    def prompts(self, n, seed):
        return self.rows(n)

    def held_out(self, n):
        return self.rows(min(n, 2))

    def demonstrations(self, n, seed):
        return [row | {"completion": row["answer"]} for row in self.rows(n)]


class Count:
    """Counts the turns up to a number, which it says; each is worth the row's answer."""

    def __init__(self, last=9):
        self.last = last

    def reset(self, **row):
        self.turns, self.answer = 0, float(row["answer"])

    def step(self, text):
        self.turns += 1
        return str(self.turns), self.answer, self.turns == self.last


def command(arguments):
    print(json.dumps(arguments))
    return 7
'''
"""What runs in a process of its own too, which need not load what an engine does."""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module outside of the tree, which no test had before, as an installed package has it; `_alone` is beside it."""
    place = tmp_path / "site"
    name = f"outside_{abs(hash(str(tmp_path))):x}"
    place.mkdir()
    (place / f"{name}.py").write_text(PACKAGE)
    (place / f"{name}_alone.py").write_text(ALONE)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.chdir(tmp_path)
    yield name
    for module in (name, f"{name}_alone"):
        sys.modules.pop(module, None)


def keys(name: str) -> dict[str, object]:
    """A small run in which all of it is used."""
    return {
        "objective": "grpo",
        "steps": 1,
        "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 512}},
        "data": {"task": f"{name}_alone:Doubling", "task_args": {"most": 6}},
        "rewards": [{"function": f"{name}_alone:reward", "args": {"bonus": 0.5}}],
        "rollout": {"engine": f"{name}:Engine", "max_new_tokens": 4, "max_rows": 5},
        "group": {
            "prompts_per_step": 3,
            "group_size": 2,
            "credit": f"{name}:credit",
            "surrogate": {"name": f"{name}:loss", "width": 0.5},
        },
        "eval": {"at_start": False, "k": 1},
        "save": {"every": 0},
    }


def test_each_of_them_is_used_by_a_run(outside: str) -> None:
    (step,) = (step for step in train(make_recipe(keys(outside))) if step.number == 1)
    said = sys.modules[outside].calls
    assert ("engine", 5, False) in said
    assert ("generate", 3, 2) in said
    assert ("credit", 3) in said
    assert ("loss", 0.5) in said
    # Reward functions run in a process of their own: what they were given is seen by what they gave.
    assert {reward for group in step.groups for reward in group.reward.tolist()} <= {0.5, 1.5, 2.5}
    assert {group.rollouts[0].prompt.row["answer"] for group in step.groups} <= {str(2 * i) for i in range(1, 7)}
    assert "correction" in str(step.metrics) or "mismatch/mean" in step.metrics, "an engine of one's own is corrected"


def test_an_environment_answers_what_an_engine_samples(outside: str) -> None:
    """In a worker process of its own, with the engine from the same package; its reward is the run's."""
    chosen = keys(outside)
    del chosen["rewards"]
    chosen |= {
        "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 128, "tokenizer": "arithmetic"}},
        "data": {"task": f"{outside}_alone:Doubling", "chat": True},
        "environment": {"factory": f"{outside}_alone:Count", "args": {"last": 2}, "runs": "process"},
        "rollout": {"engine": f"{outside}:Engine", "max_new_tokens": 64, "max_rows": 5},
    }
    (step,) = (step for step in train(make_recipe(chosen)) if step.number == 1)
    assert ("engine", 5, True) in sys.modules[outside].calls
    assert {group.names for group in step.groups} == {("environment",)}
    for group in step.groups:
        for rollout, reward in zip(group.rollouts, group.reward.tolist(), strict=True):
            assert rollout.episode is not None
            answered = len(rollout.episode.turns) if rollout.finish is Finish.DONE else len(rollout.episode.turns) - 1
            assert reward == answered * float(rollout.prompt.row["answer"])
            assert rollout.finish is not Finish.DONE or answered == 2
            assert not rollout.trained.all() or answered == 0, "what it said is in the completion, and is not trained"
    assert any(rollout.finish is Finish.DONE for group in step.groups for rollout in group.rollouts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rollout": {"engine": "{}:Nothing"}}, r"rollout.engine: .* has no function 'Nothing'"),
        ({"rollout": {"engine": "{}_alone:Count"}}, r"rollout.engine: .* cannot be called with .*max_rows"),
        ({"data": {"task": "{}:Nothing"}}, r"data.task: .* has no function 'Nothing'"),
        (
            {"data": {"task": "{}_alone:Doubling", "task_args": {"least": 1}}},
            r"has no argument 'least'; it takes: most",
        ),
    ],
)
def test_an_extension_that_does_not_fit_is_refused_with_its_key(change: dict, said: str, outside: str) -> None:
    named = json.loads(json.dumps(change).replace("{}", outside))
    recipe = make_recipe(keys(outside) | named)
    with pytest.raises(ConfigError, match=said):
        list(train(recipe))


ONE_FILE_EACH = {
    "rewards/brevity.py": '''
from groupwise.utils.built_in import built_in


@built_in("brevity")
def brevity(completions, *, most: int = 9):
    """Shorter is better."""
    return [-len(text) / most for text in completions]
''',
    "data/tasks/echo.py": '''
from dataclasses import dataclass

from groupwise.utils.built_in import built_in


@built_in("echo")
@dataclass(frozen=True)
class Echo:
    """Digits that are to be said again."""

    def prompts(self, n, seed):
        return [{"prompt": f"{i}=", "answer": str(i)} for i in range(min(n, 9))]

    def held_out(self, n):
        return self.prompts(2, 0)

    def demonstrations(self, n, seed):
        return [row | {"completion": row["answer"]} for row in self.prompts(n, seed)]
''',
    "environments/mirror.py": '''
from groupwise.utils.built_in import built_in


@built_in("mirror", "looking_glass")
class Mirror:
    """Says what it was told."""

    def reset(self, **row):
        return None

    def step(self, text):
        return text, 1.0, True
''',
    "data/sources.py": """

@built_in(".lines")
def _read_lines(file: Path, name: str, limit: int | None) -> SourceRows:
    return SourceRows(name, [{"prompt": line} for line in file.read_text().splitlines()[:limit]])
""",
}
USED = """
import sys
from groupwise.config.recipes import make_recipe
from groupwise.errors import ConfigError

keys = {
    "objective": "grpo", "steps": 1, "model": {"scratch": {"hidden": 32, "layers": 1, "heads": 2, "context": 128}},
    "data": {"task": "echo", "chat": True}, "rewards": [{"function": "brevity", "args": {"most": 5}}, "environment"],
    "environment": {"factory": "looking_glass", "runs": "thread"}, "group": {"prompts_per_step": 2, "group_size": 2},
    "rollout": {"max_new_tokens": 16}, "eval": {"at_start": False}, "save": {"every": 0},
}
recipe = make_recipe(keys)
for wrong in ({"data": {"task": "ehco"}}, {"rewards": ["brevty"]}, {"environment": {"factory": "miror"}}):
    try:
        make_recipe(keys | wrong)
    except ConfigError as error:
        print(str(error).partition("did you mean ")[2].split("?")[0])
assert not {"torch", "groupwise.rewards.brevity", "groupwise.data.tasks", "groupwise.environments"} & set(sys.modules)
from groupwise.data.sources import read_rows
print(len(read_rows("rows.lines")))
from groupwise.runs.environments import make_runtime
from groupwise.runs.run import train
(group, *_) = [step for step in train(recipe) if step.number == 1][0].groups
print(*group.names, *[kind.title for kind in make_runtime(recipe.environment).kinds.values()])
"""


def test_a_built_in_is_one_file(tmp_path: Path) -> None:
    """A reward, a task, an environment and a file of rows: each is added to one file, and a recipe takes its name."""
    tree = tmp_path / "tree" / "groupwise"
    shutil.copytree(Path(groupwise.__file__).parent, tree)
    for name, text in ONE_FILE_EACH.items():
        with (tree / name).open("a") as file:
            file.write(text)
    (tmp_path / "rows.lines").write_text("1+1\n2+2\n")
    environment = os.environ | {"PYTHONPATH": str(tree.parent)}
    run = subprocess.run([sys.executable, "-c", USED], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["echo", "brevity", "mirror", "2", "brevity environment Mirror"], run.stdout + run.stderr
