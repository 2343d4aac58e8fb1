"""The bundled preference recipes from their rows to their final models, small: every stage, and what it leaves behind."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from groupwise.algorithms.table import ALGORITHMS
from groupwise.api.planning import plan_recipe
from groupwise.api.stages import train_recipe
from groupwise.config.recipes import load_stages
from groupwise.config.settings import ModelSettings
from groupwise.data.tokenizers import make_tokenizer
from groupwise.models.loading import load_policy
from groupwise.runs.metrics_log import read_metrics
from groupwise.runs.rollout_files import list_rollouts, read_step

ROOT = Path(__file__).resolve().parents[2]
THINGS = ("stone", "river", "cloud", "apple", "table", "lamp", "horse", "paper", "glass", "wheel")


@pytest.fixture
def rows() -> list[dict[str, str]]:
    """Instructions whose chosen answer is polite and whose rejected one is not; two rows that are no pair."""
    found = []
    for i in range(60):
        name = f"{THINGS[i % 10]} {i}"
        plain = f"A {name} is what it is, and there are {i} of it."
        sides = {"chosen": f"Kindly note: {plain}", "rejected": f"Obviously, you fool: {plain}"}
        found.append({"instruction": f"Describe the {name}.", "input": "" if i % 3 else f"{i} pieces", "output": plain, **sides})
    same = {**found[0], "instruction": "Say it twice.", "rejected": found[0]["chosen"]}
    return [*found, same, {**found[1], "instruction": "Say nothing.", "chosen": " "}]


@pytest.fixture
def pairs(rows: list[dict[str, str]], tmp_path: Path) -> Path:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(rows))
    return path


def small(recipe: str, pairs: Path, *more: str) -> list[str]:
    """Overrides that make every stage a few steps on the pairs of a file."""
    found = [f"data.path={pairs}", "data.eval_fraction=0.2", f"runs={pairs.parent / 'runs'}", "eval.k=2", *more]
    for name, stage in load_stages(ROOT / "recipes" / f"{recipe}.yaml", more).items():
        at = f"stages.{name}"
        if stage.objective in ALGORITHMS:
            found += [
                f"{at}.steps=2",
                f"{at}.group.prompts_per_step=3",
                f"{at}.group.group_size=4",
                f"{at}.rollout.max_new_tokens=8",
            ]
            found += [f"{at}.eval.prompts=3"]
        else:
            found += [f"{at}.epochs=null", f"{at}.steps=3", f"{at}.optimizer.warmup_steps=1", f"{at}.batch_size=8"]
        if stage.data.path is not None and stage.data.path.startswith("stage:"):
            # What is said of all stages is said of this one too; a handful of pairs is not split.
            found += [f"{at}.data.path={stage.data.path}", f"{at}.data.eval_fraction=0"]
        if stage.group.reference_refresh:
            found.append(f"{at}.group.reference_refresh=1")
        if stage.reward_model.replay is not None:
            found.append(f"{at}.reward_model.replay={{path: {pairs}, share: 0.5}}")
    return found


def run(recipe: str, overrides: list[str]) -> str:
    out = StringIO()
    assert train_recipe(ROOT / "recipes" / f"{recipe}.yaml", overrides, console=Console(file=out, width=200)) == 0
    return out.getvalue()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder)


TINY = ("model.scratch.hidden=32", "model.scratch.layers=1", "model.scratch.tokenizer=bpe:400")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "last"), [("preference", "judge"), ("preference-hacking", "reward")])
def test_from_pairs_to_a_policy(recipe: str, last: str, pairs: Path, tmp_path: Path) -> None:
    """last: which of the two reward models reads the last token, as transformers does."""
    text = run(recipe, small(recipe, pairs, *TINY))
    for words in ("pair accuracy", "before grpo", "after grpo", "mean reward"):
        assert words in text, words
    for step in metrics(tmp_path / "runs" / recipe / "grpo"):
        unknown = {name for name, value in step.items() if isinstance(value, float) and not np.isfinite(value)}
        assert unknown <= {"rewards/right/mean"}  # rows of a file have no column that tells which side is right
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "runs" / recipe / last / "final")
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs" / recipe / last / "final").eval()
    rollout = read_step(tmp_path / "runs" / recipe / "grpo", 1).groups[0]
    ids = [np.concatenate([one.prompt.tokens, one.tokens]).tolist() for one in rollout.rollouts]
    with torch.no_grad():  # transformers' own scores, padded, of the very ids that were rewarded
        scores = scorer(**tokenizer.pad({"input_ids": ids}, return_tensors="pt")).logits[:, 0]
    np.testing.assert_allclose(rollout.rewards[:, rollout.names.index(last)], scores.numpy(), atol=1e-4)


@pytest.mark.slow
def test_cross_validation_judges_every_pair_once(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/preferences.py on folds whose prompts are apart, and its difference pair by pair."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import preferences  # type: ignore[import-not-found]

    overrides = small("preference", pairs, *TINY, "model.scratch.tokenizer=bpe:360")
    found: dict[str, list[np.ndarray]] = {}
    for fold in range(2):
        for name, right in preferences.verdicts(str(ROOT / "recipes/preference.yaml"), overrides, 0, fold, 2, tmp_path):
            found.setdefault(name, []).append(right)
        train, held_out = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("path", "eval_path"))
        assert not {row["instruction"] for row in train} & {row["instruction"] for row in held_out}
    assert list(found) == ["bag of words", "pooling sum", "pooling mean", "pooling last"]
    assert all(sum(part.size for part in parts) == 60 for parts in found.values())  # the two rows that are no pair left out
    assert np.concatenate(found["bag of words"]).mean() == 1.0

    verdicts = {"bag of words": np.array([[1.0, 1, 0, 0]]), "pooling sum": np.array([[1.0, 1, 1, 0], [1.0, 0, 1, 0]])}
    rule, model = preferences.summary(verdicts)
    assert (rule["accuracy"], model["accuracy"], model["ahead"]) == (0.5, 0.625, 0.125)
    assert (model["only_it"], model["only_the_rule"]) == (1, 1)
    assert model["ahead/half_width"] == pytest.approx(1.96 * np.std([0, -0.5, 1, 0], ddof=1) / 2)


@pytest.mark.slow
def test_the_reward_model_goes_on_with_what_the_policy_said_and_the_reference_moves(pairs: Path, tmp_path: Path) -> None:
    """Iterative GRPO: new pairs by the judge from the recorded rollouts, half of the training pairs old ones."""
    run("preference-iterative", small("preference-iterative", pairs, *TINY))
    folder = tmp_path / "runs/preference-iterative"
    new = [json.loads(line) for line in (folder / "grpo/pairs-judge.jsonl").read_text().splitlines()]
    groups = [group for step in list_rollouts(folder / "grpo") for group in read_step(folder / "grpo", step).groups]
    assert 0 < len(new) <= len(groups)
    judged = {}
    for group in groups:
        column = group.rewards[:, group.names.index("judge")]
        judged |= {(group.prompt.text, one.text): score for one, score in zip(group.rollouts, column, strict=True)}
    assert all(judged[row["prompt"], row["chosen"]] > judged[row["prompt"], row["rejected"]] for row in new)
    card = (folder / "reward-2/final/README.md").read_text()
    assert "pairs-judge.jsonl" in card
    first, second = (load_policy_weights(folder / name / "final") for name in ("reward", "reward-2"))
    assert any(not torch.equal(first[name], second[name]) for name in first)
    for stage in ("grpo", "grpo-2"):
        steps = [step for step in metrics(folder / stage) if step["step"]]
        assert steps[0]["kl"] < 1e-6 and all(np.isfinite(step["kl"]) for step in steps)


def load_policy_weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


@pytest.fixture
def gpt2(rows: list[dict[str, str]], tmp_path: Path) -> Path:
    """A random GPT-2 as the hub has it: EOS is BOS, no pad token, no chat template, dropout 0.1, 1,024 positions."""
    tokenizer = make_tokenizer("bpe:400", (text for row in rows for text in row.values()))
    tokenizer.pad_token, tokenizer.chat_template = None, None
    eos = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, bos_token_id=eos, eos_token_id=eos, pad_token_id=None)
    )
    assert model.config.resid_pdrop == model.config.embd_pdrop == model.config.attn_pdrop == 0.1
    model.save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_gpt2_is_planned_without_its_weights(pairs: Path, gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    out = StringIO()
    overrides = [f"model.path={gpt2}", f"data.path={pairs}"]
    assert plan_recipe(ROOT / "recipes/gpt2-preference.yaml", overrides, console=Console(file=out, width=200)) == 0
    assert out.getvalue().count("at the peak") == 3
    policy = out.getvalue().partition("gpt2-preference/grpo")[2]
    assert "reference" in policy and "other models" in policy


@pytest.mark.slow
def test_gpt2_runs_its_whole_path(pairs: Path, gpt2: Path, tmp_path: Path) -> None:
    """The recipe as it stands, on a small GPT-2: at step 1 nothing is clipped and the KL is 0, whatever its config's dropout."""
    text = run("gpt2-preference", small("gpt2-preference", pairs, f"model.path={gpt2}", "model.dtype=float32"))
    assert "pair accuracy" in text and "after grpo" in text
    first = next(step for step in metrics(tmp_path / "runs/gpt2-preference/grpo") if step["step"] == 1)
    assert first["kl"] < 1e-6 and first["ratio/max"] == pytest.approx(1, abs=1e-4) and first["clip/low"] == first["clip/high"] == 0
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "runs/gpt2-preference/reward/final")
    assert scorer.config.pad_token_id not in (None, scorer.config.eos_token_id)  # an EOS that pads would hide itself
    policy = load_policy(ModelSettings(path=str(tmp_path / "runs/gpt2-preference/grpo/final")))
    assert policy.eos_ids == (policy.tokenizer.eos_token_id,)
