"""The documentation is true: its code runs, its numbers are the code's, its links lead somewhere, its made parts are current."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import io
import itertools
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from steps import improve
from trl_objects import config

import groupwise as gw
from groupwise import errors
from groupwise.algorithms.losses import Correction
from groupwise.algorithms.table import ALGORITHMS
from groupwise.api.progress import COLUMNS, LOSS, Progress
from groupwise.cli import commands
from groupwise.config.objectives import is_online
from groupwise.config.recipes import parse_stages
from groupwise.config.resolve import resolve
from groupwise.config.schema import lookup, settings_table
from groupwise.config.settings import (
    GroupSettings,
    OptimizerSettings,
    RewardSettings,
    ScratchSettings,
)
from groupwise.data.curriculum import Curriculum, Visits
from groupwise.data.tokenizers import make_tokenizer
from groupwise.models.loading import make_policy
from groupwise.models.policy import Policy
from groupwise.models.scratch import scratch_model
from groupwise.models.shape import Shape
from groupwise.models.sharded import frozen_copy
from groupwise.records import Prompt, RolloutGroup, Sampling, Step
from groupwise.rewards.compose import build_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.sampling import stream_keys, uniforms
from groupwise.training.groups import SampledRollouts
from groupwise.training.metric_table import METRICS, find
from groupwise.training.metrics import measure
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.recorded_loss import RecordedStep
from groupwise.training.samples import weigh
from groupwise.training.signals import add_signals
from groupwise.training.work import Meter

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("algorithms/*.md"), ROOT / "README.md", ROOT / "SECURITY.md"])
SLOW = {"comparing.md"}
"""Pages whose code takes more than a few seconds."""


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = found  # dataclasses look their module up there
    spec.loader.exec_module(found)
    return found


def pages() -> list:
    return [pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name in SLOW else []) for path in PAGES]


# ---------------------------------------------------------------- code blocks


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it stands for, its text and the line it begins at."""

    language: str
    file: str | None
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```(\w*)(?: file=(\S+))?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        found.append(Block(match[1], match[2], match[3], text[: match.start()].count("\n") + 1))
    assert len(found) * 2 == len(re.findall(r"^```", text, flags=re.MULTILINE)), f"{path.name}: a fence without its other half"
    return found


def as_in_python(block: Block, names: dict[str, Any], path: Path) -> None:
    """Statements are executed, examples with >>> compared with what they show."""
    if ">>> " not in block.text:
        exec(compile("\n" * block.line + block.text, str(path), "exec"), names)
        return
    examples = doctest.DocTestParser().get_doctest(block.text, names, path.name, str(path), block.line)
    examples.globs = names  # a page's blocks build on each other
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=said.append, clear_globs=False)
    assert result.attempted > 0
    assert result.failed == 0, "".join(said)


def as_typed(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    """`$ groupwise ...` and what it prints; `...` stands for anything."""
    for said in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, expected = said.partition("\n")
        name, *arguments = shlex.split(line)
        assert name == "groupwise", f"cannot run {line!r}"
        assert commands.main(arguments) == 0
        found = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS), f"{line} prints\n{found}"


def as_recipe(block: Block) -> None:
    """A whole recipe, or keys that are laid over a small one."""
    if block.text.startswith("cluster:"):
        block_text = BASE + block.text + "stages:\n  page: {seed: 1}\n"  # it is of all stages
    elif not block.text.startswith("stages:") and "\nstages:" not in block.text:
        block_text = BASE + "stages:\n  page:\n" + "".join(f"    {line}\n" for line in block.text.splitlines())
    else:
        block_text = block.text
    for recipe in parse_stages(block_text, "page").values():
        if is_online(recipe.objective):
            resolve(recipe.objective, recipe.group, recipe.rollout.max_new_tokens)


STAND_INS = {
    "prompts.jsonl": '{"prompt": "2+2=", "answer": "4"}\n',
    "train.jsonl": '{"prompt": "2+2=", "answer": "4"}\n',
    "my_rewards.py": "def short(completions, **_):\n    return [-float(len(text)) for text in completions]\n",
}
"""What recipes on the pages call the reader's own files."""
MODEL = "runs/demo/sft/final"
"""A checkpoint that an earlier command of the reader's has made."""
BASE = """\
objective: grpo
steps: 3
model: {scratch: {hidden: 64}}
data: {task: addition}
rewards: [{function: accuracy}]
"""


COMMANDS = yaml.safe_load((DOCS / "commands.yaml").read_text(encoding="utf-8"))
"""Which test runs the commands of the pages, and why none does."""


def as_command(block: Block) -> None:
    """A command that is too long to be run here exists, and docs/commands.yaml says who runs it or why nobody does."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        said = " ".join(line.partition(" #")[0].split())
        if said and not said.startswith("#"):
            assert any(re.fullmatch(row["match"], said) for row in COMMANDS), f"docs/commands.yaml says nothing of {said!r}"
        if words[:1] == ["make"]:
            assert all(f"\n{target}:" in makefile for target in words[1:] if "=" not in target), line
        elif words[:1] == ["groupwise"]:
            commands._parse(words[1:])


def a_small_model(folder: Path) -> None:
    """A checkpoint with a tokenizer in the place of the reader's own."""
    tokenizer = make_tokenizer("bytes")
    settings = ScratchSettings(hidden=32, layers=1, heads=2, context=64)
    ids = {"eos_ids": (tokenizer.eos_token_id,), "pad_id": tokenizer.pad_token_id, "bos_id": tokenizer.bos_token_id}
    model = scratch_model(settings, vocabulary=len(tokenizer), **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("path", pages())
def test_every_code_block_of_a_page_is_true(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # A page may name a checkpoint of the hub; it is only looked at here, never fetched.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / MODEL).mkdir(parents=True)
    (tmp_path / MODEL / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    if path.name == "from-trl.md":
        a_small_model(tmp_path / "my-model")
        monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=partial(config, "GRPOConfig")))  # type: ignore[arg-type]
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(path):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        match block.language:
            case "python":
                as_in_python(block, names, path)
            case "console":
                as_typed(block, capsys)
            case "yaml":
                as_recipe(block)
            case "bash" | "":
                as_command(block)
            case "json":
                assert all(json.loads(line) for line in block.text.splitlines())
            case language:
                assert language == "text", f"{path.name}:{block.line}: nothing can check a block of {language!r}"


def test_what_commands_are_run_by_is_there() -> None:
    for row in COMMANDS:
        assert ("run" in row) != ("not_run" in row), row
        for path in re.findall(r"tests/[\w/.]+", row.get("run", "")):
            assert (ROOT / path).exists(), path


def test_pages_have_code_to_check() -> None:
    """The test above would pass on pages whose blocks it does not see."""
    assert {path.name for path in PAGES if any(block.language == "python" for block in blocks(path))} >= {
        "batches.md", "data.md", "environments.md", "first-hour.md", "from-trl.md", "grpo.md", "kl.md", "monitoring.md",
        "formats.md", "own-loop.md", "own-parts.md", "python.md", "rewards.md",
    }  # fmt: skip


# ---------------------------------------------------------------- links and made parts


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{path.name} links to {target}"


@pytest.mark.slow
def test_made_parts_are_current() -> None:
    for path, text in module(DOCS / "generate.py").pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not current: make docs"


def test_pages_name_settings_that_exist() -> None:
    """Whatever looks like a key of a recipe (`group.beta`) is one."""
    sections = {key for key, setting in settings_table().items() if setting.section}
    for path in PAGES:
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", path.read_text(encoding="utf-8")):
            if key.partition(".")[0] in sections and not key.endswith((".md", ".py", ".json")):
                assert lookup(key) is not None, f"{path.name}: {key}"


def test_pages_are_about_the_project_alone() -> None:
    """No machine's paths; completions are no responses (docs/words.md lists such words in brackets), but Responses is an API."""
    for path in [*PAGES, *DOCS.glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(work|home|root|tmp|usr|mnt)/", text), path.name
        prose = re.sub(r"^```json.*?^```$|\[[^\]\n]*\] \||`[^`\n]*`|\"\w+\"", "", text, flags=re.MULTILINE | re.DOTALL)
        wrong = re.findall(r"\b(?:[Rr]esponse|responses|[Bb]ehaviour)\b", prose)
        assert not wrong, f"{path.name}: {wrong}"


# ---------------------------------------------------------------- tables that are written by hand


def cells(page: str, columns: int) -> list[list[str]]:
    rows = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        found = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(found) == columns and not set(line) <= set("|-"):
            rows.append(found)
    return rows


def test_the_page_explains_every_metric_of_a_step(
    scored_group: Callable[..., RolloutGroup], tiny_policy: Callable[..., Policy]
) -> None:
    groups = [scored_group([1.0, 0.0, None], [2, 3, 4], id="0/0", truncated=(1,)), scored_group([1.0, 1.0], [2, 2], id="0/1")]
    policy, settings = (
        tiny_policy(),
        GroupSettings(group_size=2, beta=0.1, off_policy_delta=0.5, entropy_target=9.0, entropy_bonus=0.01),
    )
    algorithm = replace(resolve("grpo", settings, 8), correction=Correction())
    groups = add_signals(groups, algorithm, reference=frozen_copy(policy), max_tokens_per_microbatch=1000)
    names = ("value", "old_value", "return", "teacher_logp")
    made_up = {name: lambda r, i=i: np.arange(len(r)) * 0.1 + i for i, name in enumerate(names)}
    groups = [
        replace(
            group,
            logged={"noted": 1.0},
            verdict="r",
            signals={**group.signals, **{name: tuple(map(column, group.rollouts)) for name, column in made_up.items()}},
        )
        for group in groups
    ]
    samples = weigh(groups, algorithm.credit(groups), algorithm)
    taken = improve(policy, algorithm, samples, Optimizer(policy.model, OptimizerSettings(), 1), max_tokens_per_microbatch=1000)
    for rollout in groups[0].rollouts:  # the other group was drawn by older weights
        rollout.version[:] = 1
    found = measure(groups, RecordedStep(algorithm, [taken], minibatches=1), drawn=2, seconds={"rollout": 1.0}, version=1)
    shape = Shape.of_policy(policy)
    metered = Meter(policy=shape).read(Step(number=1, metrics=found, groups=groups, timings={"rollout": 1.0}))
    found = {**metered.metrics, **{f"time/{name}": seconds for name, seconds in metered.timings.items()}}
    rows = [replace(group.prompt, id=group.prompt.id.partition("/")[2]) for group in groups]
    visits = Visits(rows, Curriculum(len(rows), seed=0, retire=1))
    visits.seen(groups)
    found |= visits.account(groups[:1])
    missing = [name for name in found if find(name) is None]
    assert not missing, f"training/metric_table.py has no row for {missing}"
    rewritten = {section.title: section for section in METRICS}
    online = (
        "Rewards",
        "Completions",
        "The policy and how far an update moved it",
        "Critic and teacher",
        "Sampler against trainer",
    )
    stale = [
        row.name for title in online for row in rewritten[title].metrics
        if row.name != "mismatch/bounded" and not any(row.matches(name) for name in found)
    ]  # fmt: skip
    assert not stale, f"nobody writes {stale}"


TINY = """\
seed: 1
runs: runs
model: {scratch: {hidden: 16, heads: 2, layers: 1, context: 200, tokenizer: "bpe:300"}}
data: {task: preferences, limit: 60, eval_limit: 4, template: "{instruction} {input}"}
eval: {every: 1, k: 2, batches: 2}
stages:
  sft: {objective: sft, steps: 1, batch_size: 4}
  reward: {objective: reward, steps: 1, batch_size: 4, model: {path: "stage:sft", scratch: null}}
  dpo: {objective: dpo, steps: 1, batch_size: 4, model: {path: "stage:sft", scratch: null}}
  grpo:
    objective: grpo
    steps: 2
    model: {path: "stage:sft", scratch: null}
    rewards: [{function: repetition, weight: -1.0}]
    rollout: {max_new_tokens: 8}
    group: {prompts_per_step: 2, group_size: 3, beta: 0.01, updates_per_rollout: 2}
"""


@pytest.mark.slow
def test_every_key_of_a_real_runs_log_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY, encoding="utf-8")
    assert commands.main(["train", "tiny.yaml"]) == 0
    logs = sorted(tmp_path.glob("runs/**/metrics.jsonl"))
    assert len(logs) == 4
    keys = {key for log in logs for line in log.read_text(encoding="utf-8").splitlines() for key in json.loads(line)}
    assert {"eval/greedy_reward", "kl", "accuracy", "nll", "time/rollout"} <= keys
    missing = sorted(key for key in keys if find(key) is None)
    assert not missing, f"training/metric_table.py has no row for {missing}"


def test_every_algorithm_says_when_to_choose_it() -> None:
    notes = yaml.safe_load((DOCS / "algorithms" / "notes.yaml").read_text(encoding="utf-8"))
    assert list(notes) == list(ALGORITHMS)
    assert all(set(row) - {"measured"} == {"paper", "peers", "choose"} and all(row.values()) for row in notes.values())
    chosen = (DOCS / "choosing.md").read_text(encoding="utf-8")
    for name in ("grpo", "dapo", "gspo", "rloo", "ppo", "distill"):
        assert f"algorithms/{name}.md" in chosen


def test_the_page_has_a_row_for_every_figure_of_the_terminal() -> None:
    rows = {row[0]: row[1] for row in cells("monitoring.md", 2) if row[0]}
    for column in (LOSS, *COLUMNS):
        assert f"`{column.name}`" in rows[column.column], column.name
    step = Step(
        number=1,
        metrics={"reward": 1.0},
        evaluation={"eval/greedy": 1.0, "eval/pass@8": 1.0, "eval/sampled": 1.0, "eval/reward": 1.0},
    )
    ticks = itertools.count()
    progress = Progress(3, now=lambda: float(next(ticks)), console=Console(file=io.StringIO()))
    progress.update(step)
    labels = [part.rpartition(" ")[0] for part in progress.line(step).plain.split("  ")[1:]]
    listed = {label.strip() for row in rows for label in row.split(",")}
    assert {label.replace("pass@8", "pass@K") for label in labels} <= listed, labels
    assert "left" in labels


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")]
    measured = [one for result in results for name, one in result.items() if re.fullmatch(r"vs_trl_[SML]_float32_threads_1", name)]
    for group, key, what in (("cpu_ratios", "step", "less processor time"), ("ratios", "memory", "less memory")):
        ratios = [one[group][key] for one in measured]
        assert f"{min(ratios):.1f} to {max(ratios):.1f} times {what}" in said
    learnt = json.loads((ROOT / "benchmarks/real_model.json").read_text())
    seconds = {
        side: statistics.mean(one["curve"][-1]["seconds"] for name, one in learnt.items() if name.startswith(f"learning/{side}/"))
        for side in ("trl", "groupwise")
    }
    assert f"to the same accuracy in {seconds['trl'] / seconds['groupwise']:.1f} times less processor time" in said


def test_the_ratios_of_smollm2_are_those_of_the_results() -> None:
    said = " ".join((DOCS / "performance.md").read_text(encoding="utf-8").split())
    results = json.loads((ROOT / "benchmarks/results/zen4.json").read_text())
    single, half = results["vs_trl_model-smollm2_threads_1"], results["vs_trl_model-smollm2_dtype-bfloat16_threads_1"]
    time, memory = single["cpu_ratios"]["step"], single["ratios"]["memory"]
    assert f"takes {time:.1f} times less processor time and {memory:.1f} times less memory in float32" in said
    assert f"in float32, and {half['cpu_ratios']['step']:.1f} and {half['ratios']['memory']:.1f} times less in bfloat16" in said


@pytest.mark.parametrize(
    ("shape", "result"),
    [
        ("3M parameters, 8 prompts", "S_float32"),
        ("25M", "M_float32"),
        ("GPT-2", "L_float32"),
        ("3M parameters, a", "S_float32_vocabulary_131072"),
    ],
)
def test_the_ratios_of_the_page_are_those_of_the_results(shape: str, result: str) -> None:
    results = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")]
    measured = [one[f"vs_trl_{result}_threads_1"] for one in results if f"vs_trl_{result}_threads_1" in one]
    row = next(row for row in cells("performance.md", 3) if row[0].startswith(shape))
    for cell, group, key in ((row[1], "cpu_ratios", "step"), (row[2], "ratios", "memory")):
        ratios = [one[group][key] for one in measured]
        assert cell == f"{min(ratios):.1f} to {max(ratios):.1f}"


def test_the_glossary_has_every_word_that_names_are_made_of() -> None:
    words = {row[0] for row in cells("words.md", 2)}
    needed = {"prompt", "completion", "rollout", "group", "reward", "credit", "advantage", "policy", "behavior", "reference"}
    assert needed | {"teacher", "segment", "weight"} <= words
    assert sorted(words - {"word"}, key=str.casefold) == [row[0] for row in cells("words.md", 2)][1:]


# ---------------------------------------------------------------- formats of data


GALLERY = DOCS / "formats.md"


def gallery() -> list[str]:
    return [block.file for block in blocks(GALLERY) if block.language == "yaml" and block.file is not None]


@pytest.mark.parametrize("name", gallery())
def test_every_row_of_the_gallery_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four rows each, read by `groupwise train --dry-run` with a model from scratch."""
    monkeypatch.chdir(tmp_path)
    for block in blocks(GALLERY):
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    rows = (tmp_path / name).with_suffix(".jsonl").read_text(encoding="utf-8")
    assert rows.count("\n") == 4
    small = "{hidden: 32, layers: 1, heads: 2, context: 2000, tokenizer: bytes}"
    overrides = [f"model.scratch={small}", "steps=1", "group.prompts_per_step=1", "rollout.max_new_tokens=8"]
    if "objective: grpo" not in (tmp_path / name).read_text(encoding="utf-8"):
        overrides = overrides[:2]
    assert commands.main(["train", name, "--dry-run", *overrides]) == 0
    plan = capsys.readouterr().out
    assert re.search(r"\b4 (prompts|rows) to train on", plan), plan
    assert "dropped" not in plan


# ---------------------------------------------------------------- Python reference


def test_the_reference_has_every_name_that_the_package_offers() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: groupwise\.(\w+)$", page, flags=re.MULTILINE)) | set(re.findall(r"`gw\.(\w+)`", page))
    assert listed == set(gw.__all__)


# ---------------------------------------------------------------- errors


def texts_of_the_source() -> list[str]:
    """Every string of the library; what an f-string fills in is a gap."""
    found = []
    for path in (ROOT / "src" / "groupwise").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_the_messages_of_the_page_are_those_of_the_source() -> None:
    texts = texts_of_the_source()
    stale = []
    for rows in yaml.safe_load((DOCS / "errors.yaml").read_text(encoding="utf-8")).values():
        for row in rows:
            assert set(row) == {"message", "cause", "cure"}
            pattern = re.compile(".*".join(re.escape(part) for part in row["message"].split("...")), re.DOTALL)
            if not any(pattern.search(text) for text in texts):
                stale.append(row["message"])
    assert not stale, f"no message of the library says: {stale}"


def test_the_page_has_every_exit_code() -> None:
    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GroupwiseError)}
    assert codes <= {int(row[0]) for row in cells("errors.md", 3) if row[0].isdigit()}


# ---------------------------------------------------------------- GRPO in one file


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    return module(DOCS / "grpo_in_one_file.py")


def same_weights(small: torch.nn.Module, gpt2: torch.nn.Module) -> None:
    """Copy the one file's transformer into transformers' GPT-2, whose matrices are stored transposed."""
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    theirs = dict(gpt2.named_parameters())
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            top, *rest = name.split(".")
            if top == "blocks":
                number, part, kind = rest
                value = parameter.T if kind == "weight" and "norm" not in part else parameter
                theirs.pop(f"transformer.h.{number}.{names[part]}.{kind}").copy_(value)
            else:
                theirs.pop(f"transformer.{ {'tokens': 'wte', 'positions': 'wpe', 'norm': 'ln_f'}[top] }.{rest[0]}").copy_(parameter)
    assert not theirs


def library_policy(small: torch.nn.Module) -> Policy:
    tokenizer = make_tokenizer("arithmetic")
    gpt2 = scratch_model(
        ScratchSettings(family="gpt2", hidden=32, layers=2, heads=4, context=16),
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),  # type: ignore[arg-type]
        pad_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
    ).to(torch.float64)
    same_weights(small, gpt2)
    return make_policy(gpt2, tokenizer)


STEPS = 10


def drawn(step: int) -> list[list[int]]:
    """Three ragged prompts a step."""
    rng = np.random.default_rng(step)
    return [rng.integers(5, 30, size=n).tolist() for n in (1, 4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("mu", "beta", "temperature"), [(1, 0.0, 1.0), (2, 0.0, 0.7), (3, 0.05, 1.2)])
def test_ten_steps_of_the_one_file_are_the_librarys(
    one_file: ModuleType, mu: int, beta: float, temperature: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    longest, group_size, seed = 5, 6, 3
    torch.manual_seed(0)
    small = one_file.GPT(len(make_tokenizer("arithmetic"))).double()
    with torch.no_grad():
        small.tokens.weight.mul_(2)  # sharper than an almost uniform start: clipping then has something to do
    policy = library_policy(small)
    (eos,) = policy.eos_ids
    (tmp_path / "thirds.py").write_text(
        "def reward(prompt_ids, completion_ids):\n"
        "    return [sum((7 * id + place) % 3 == 0 for place, id in enumerate(ids)) / 5 for ids in completion_ids]\n"
    )
    monkeypatch.chdir(tmp_path)

    def stream(group: str, index: int, token: int) -> float:
        return float(uniforms(stream_keys(seed, group, [index]), token + 1)[0, token])

    ours = list(
        one_file.train(
            small, drawn, module(tmp_path / "thirds.py").reward,
            eos=eos, steps=STEPS, group_size=group_size, longest=longest, lr=2e-3, mu=mu, beta=beta, temperature=temperature,
            draw=stream,
        )
    )  # fmt: skip
    step = iter(range(STEPS))

    def draw(count: int) -> list[Prompt]:
        number = next(step)
        rows = drawn(number)
        assert len(rows) == count
        return [Prompt(id=f"{number}/{i}", tokens=np.array(row), text="") for i, row in enumerate(rows)]

    settings = GroupSettings(prompts_per_step=3, group_size=group_size, updates_per_rollout=mu, beta=beta)
    with build_rewards([RewardSettings(function="thirds.py:reward")], columns=[]) as rewards:
        theirs = list(
            train_online(
                policy,
                resolve("grpo", settings, longest),
                SampledRollouts(
                    algorithm=resolve("grpo", settings, longest),
                    engine=NativeEngine(policy, max_rows=7),
                    rewards=rewards,
                    draw=draw,
                    sampling=Sampling(temperature=temperature, max_new_tokens=longest),
                    steps=STEPS,
                    seed=seed,
                    group=settings,
                ),
                Optimizer(policy.model, OptimizerSettings(lr=2e-3), STEPS * mu),
                group=settings,
                max_tokens_per_microbatch=40,
                reference=frozen_copy(policy) if beta else None,
            )
        )
    for name in ("reward", "loss", "grad_norm", "progress"):
        expected = [found.metrics[name] for found in theirs]
        np.testing.assert_allclose([found[name] for found in ours], expected, rtol=1e-6, atol=1e-9, err_msg=name)
    assert len({round(found["reward"], 6) for found in ours}) > 5, "a curve that does not move compares nothing"
    assert mu == 1 or any(found.metrics["clip/high"] > 0 for found in theirs), "nothing was clipped"


@pytest.mark.slow
def test_the_toy_of_the_one_file_is_learnt(one_file: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert one_file.main() >= 0.95
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step  1  reward +0.0")
    assert len((DOCS / "grpo_in_one_file.py").read_text(encoding="utf-8").splitlines()) <= 215
