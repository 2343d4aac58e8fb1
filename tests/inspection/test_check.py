"""The preflight: silent about a healthy recipe, loud about planted faults."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from scripted_vllm import free_port

from groupwise.cli.check import check_recipe
from groupwise.inspection.check import _own_forward
from groupwise.training.passes import score
from groupwise.training.samples import sample_of


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(**changes: object) -> tuple[int, str]:
        tree = {
            "objective": "grpo",
            "runs": str(tmp_path / "runs"),
            "steps": 3,
            "model": {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96}},
            "data": {"task": "addition", "limit": 64, "eval_limit": 8, "chat": True},
            "rewards": [{"function": "accuracy"}],
            "rollout": {"max_new_tokens": 16, "temperature": 0.7},
            "group": {"prompts_per_step": 4},
        }
        for key, value in changes.items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        console = Console(width=500, record=True, quiet=False)
        with console.capture() as captured:
            status = check_recipe(str(path), console=console)
        return status, captured.get()

    return run


@pytest.mark.slow
def test_a_healthy_recipe_passes(check: Callable) -> None:
    status, text = check(name="sums")
    assert status == 0, text
    assert text.startswith("sums (grpo)")
    for name in ("EOS", "PAD", "template", "turns", "gold", "log-probs", "model       proven", "memory"):
        assert name in text
    assert re.search(r"sampler +native is faster on a CPU: native drew [\d,]+ tokens a second here \(measured by this check", text)
    assert "FAIL" not in text
    assert "temperature 0.7" in text


@pytest.mark.slow
def test_a_template_that_rewrites_the_past_is_said(check: Callable) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    _, text = check(model={"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96}, "chat_template": template})
    assert "note  turns       the template writes the past otherwise once a conversation continues" in text
    assert "; user after an answer: rewrites ('" in text and "<|assistant|><think></thi" in text


@pytest.mark.slow
@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_p13_truncated_sampling_is_scored_over_its_support(truncation: dict, check: Callable) -> None:
    status, text = check(rollout={"max_new_tokens": 48} | truncation)
    assert status == 0, text
    assert "over the truncated support" in text


def test_p11_a_scorer_at_another_temperature_is_found(check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    import groupwise.models.passes as scoring

    genuine = scoring.chosen_logprobs
    monkeypatch.setattr(
        scoring,
        "chosen_logprobs",
        lambda h, head, t, temperature, *rest, **kw: genuine(h, head, t, torch.ones_like(temperature), *rest, **kw),
    )
    status, text = check()
    assert status == 1
    assert "FAIL  log-probs" in text
    engine_gap, scorer_gap = (float(gap) for gap in re.findall(r"by up to (\S+?)(?: nats,|$)", text, re.MULTILINE))
    assert engine_gap < 1e-3 < 0.1 < scorer_gap, "it says which of them is wrong"


def test_p07_positions_that_start_anew_are_found(check: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.models import passes

    genuine = passes.hidden
    planted = {"on": False}

    def hidden(policy: object, tokens: torch.Tensor, position: torch.Tensor, *further: object) -> torch.Tensor:
        return genuine(policy, tokens, torch.arange(len(position)) % 90 if planted["on"] else position, *further)

    monkeypatch.setattr(passes, "hidden", hidden)
    import groupwise.inspection.check as module

    make_job = module.make_job

    def after_the_probe(*given: object, **named: object) -> object:
        job = make_job(*given, **named)
        planted["on"] = True
        return job

    monkeypatch.setattr(module, "make_job", after_the_probe)
    status, text = check()
    assert status == 1
    assert "FAIL" in text


def test_a_gold_answer_that_cannot_be_right_is_named(check: Callable, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": ""}\n' * 4)
    status, text = check(data={"task": None, "path": str(rows), "limit": None, "eval_limit": None, "chat": False})
    assert status == 1
    assert "gold answers do not earn accuracy = 1" in text


ROWS: dict = {"task": None, "limit": None, "eval_limit": None, "chat": False}


@pytest.fixture
def check_rows(check: Callable, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Check these rows with these rewards."""

    def run(rows: list[dict], *rewards: dict) -> tuple[int, str]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return check(data=ROWS | {"path": str(path)}, rewards=list(rewards))

    return run


ACCURACY, THINKS_FIRST = {"function": "accuracy"}, {"function": "think_format"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "rewards"),
    [
        ([{"prompt": "1+1=", "answer": "2"}] * 7 + [{"prompt": "1+2="}], [ACCURACY]),
        ([{"prompt": "1+2="}] + [{"prompt": "1+1=", "answer": "2"}] * 7, [ACCURACY]),
        ([{"prompt": "1+1=", "answer": "2"}] * 7 + [{"prompt": "1+2=", "answer": None}], [ACCURACY]),
        ([{"prompt": "1+1=", "answer": 2.0}] * 7 + [{"prompt": "1+2=", "answer": float("nan")}], [ACCURACY]),
        ([{"prompt": "1+1=", "answer": "2"}] * 8, [THINKS_FIRST, ACCURACY]),
        ([{"prompt": "1+1=", "answer": "x", "final": "2"}] * 8, [ACCURACY | {"args": {"column": "final"}}]),
        ([{"prompt": "1+1=", "solution": "Paris"}] * 8, [{"function": "exact"}]),
    ],
    ids=["without the column", "the first without the column", "null", "NaN", "format first", "a named column", "words for exact"],
)
def test_golds_are_held_against_the_functions_and_columns_that_training_takes(
    rows: list[dict], rewards: list[dict], check_rows: Callable
) -> None:
    status, text = check_rows(rows, *rewards)
    assert status == 0 and "ok    gold" in text, text
    lacking = len({json.dumps(row) for row in rows}) - 1
    assert (f"{lacking} of 8 rows have none" in text) == bool(lacking)


@pytest.mark.slow
def test_golds_in_words_are_named_for_accuracy(check_rows: Callable) -> None:
    status, text = check_rows([{"prompt": "1+1=", "answer": "two of them"}] * 8, ACCURACY)
    assert status == 1
    assert "8 of 8 gold answers do not earn accuracy = 1" in text and "(is words, not mathematics: `exact` compares words)" in text


@pytest.mark.slow
def test_what_the_prompt_itself_and_each_half_of_the_derivation_would_earn_is_shown(check_rows: Callable) -> None:
    rows = [{"prompt": f"{n} + 14 =", "answer": f"{n} + 14 = {n + 14}\n#### {n + 14}"} for n in range(8)]
    _, text = check_rows(rows, ACCURACY)
    shown = "the prompt itself earns accuracy 0; of the gold's derivation the left half earns accuracy 0, the right half earns"
    assert f"ok    restated    as a completion {shown} accuracy 1" in text
    _, text = check_rows([{"prompt": f"0+{n}", "answer": str(n)} for n in range(8)], {"function": "number"})
    assert "note  restated    as a completion the prompt itself earns number 1" in text


@pytest.mark.slow
def test_every_form_of_gold_is_taken_or_named(check_rows: Callable) -> None:
    lines = (Path(__file__).parents[1] / "rewards/answer_forms.tsv").read_text(encoding="utf-8").splitlines()
    found = {cells[3]: cells[0] for line in lines if len(cells := line.split("\t")) > 4 and cells[3].strip()}
    golds = [gold for gold, verdict in found.items() if verdict != "-"]
    for some in (golds[first : first + 64] for first in range(0, len(golds), 64)):
        status, text = check_rows([{"prompt": "1+1=", "answer": gold} for gold in some], ACCURACY)
        assert status == 0 and f"the gold answers of the first {len(some)} prompts earn accuracy = 1" in text, text
    words = [gold for gold, verdict in found.items() if verdict == "-"]
    status, text = check_rows([{"prompt": "1+1=", "answer": gold} for gold in words], ACCURACY)
    assert status == 1 and f"{len(words)} of {len(words)} gold answers do not earn accuracy = 1" in text


def test_an_unusable_recipe_says_why_in_its_last_line(check: Callable) -> None:
    status, text = check(group={"prompts_per_step": 100})
    assert status == 1
    assert "prompts_per_step is 100, but the data has only" in text


def test_several_problems_are_told_with_their_lines(check: Callable) -> None:
    status, text = check(rewards=[{"function": "tags", "args": {"nonsense": 1}}, {"function": "accuracy", "args": {"nonsense": 1}}])
    assert status == 1
    assert "Problems" not in text
    assert "2 problems in " in text
    assert text.count("has no argument 'nonsense'") == 2 and "recipe.yaml:16: " in text and "recipe.yaml:19: " in text


def test_rows_that_are_left_out_are_told_and_secrets_are_not(
    check: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "VALUE-of-the-environment-1")
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8 + '{"answer": "2"}\n')
    (tmp_path / "judge.py").write_text(
        "import os\ndef judge(completions, **_):\n    raise ValueError('401 for ' + os.environ['HF_TOKEN'])\n"
    )
    data = {"task": None, "path": str(rows), "limit": None, "eval_limit": None, "chat": False}
    status, text = check(data=data, rewards=[{"function": "judge.py:judge"}])
    assert status == 1 and "401 for [redacted]" in text and "VALUE" not in text
    assert "8 of 9 rows" in text and "dropped: 1 that cannot be read" in text


NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('needs a system message') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ONE_TURN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('one turn only') }}{% endif %}"
    "<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
SAID = [{"role": "system", "content": "1"}, {"role": "user", "content": "1+1="}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "prompt", "says"),
    [
        (NEEDS_SYSTEM, "1+1=", None),
        (ONE_TURN, "1+1=", None),
        (THINKS, "1+1=", None),
        (NEEDS_SYSTEM, SAID, "ok    template"),
        (ONE_TURN, SAID, "the chat template refuses these messages: one turn only; no difference here: the policy has one turn"),
        (THINKS, SAID, "note  template    the chat template writes a prompt otherwise once it is answered; no difference here"),
    ],
)
def test_a_template_is_judged_by_the_prompts_and_not_by_a_conversation_that_nobody_asked_for(
    template: str, prompt: object, says: str | None, check: Callable, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": prompt, "answer": "2"}) + "\n") * 8)
    model = {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96}, "chat_template": template}
    status, text = check(model=model, data={"task": None, "path": str(rows), "limit": None, "eval_limit": None, "chat": False})
    assert status == 0 and "FAIL" not in text and "log-probs" in text, text
    assert says in text if says else "  template  " not in text and "  turns  " not in text


@pytest.mark.slow
def test_a_template_that_writes_prompts_otherwise_fails_where_conversations_have_several_turns(
    check: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, **row):\n        pass\n\n    def step(self, text):\n        return '1', 0.0, True\n"
    )
    model = {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96}, "chat_template": THINKS}
    _, text = check(model=model, environment={"factory": "game.py:Game"})
    assert "FAIL  template    the chat template writes a prompt otherwise once it is answered: several turns" in text


@pytest.mark.slow
def test_what_the_template_makes_of_a_recipes_variables_is_shown(check: Callable) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ '0' if enable_thinking is false else '' }}{% endif %}"
    )
    model = {"scratch": {"hidden": 32, "layers": 2, "heads": 4, "context": 96}, "chat_template": template}
    _, text = check(model=model, data={"chat": True, "chat_template_kwargs": {"enable_thinking": False}})
    assert "ok    variables   {enable_thinking: False}: the prompt ends in" in text
    assert "<|assistant|>0', without in" in text


def test_an_episode_that_failed_before_its_first_turn_has_no_log_probs(tiny_policy: Callable, scored_group: Callable) -> None:
    policy = tiny_policy()
    rollouts = scored_group([0.0, 1.0], [0, 3]).rollouts
    scored = score(policy, [sample_of(one) for one in rollouts], max_tokens_per_microbatch=100).logp
    for rollout, logp in zip(rollouts, scored, strict=True):
        np.testing.assert_allclose(_own_forward(policy, rollout), logp, atol=1e-4)


@pytest.mark.slow
def test_servers_that_are_not_there_are_found_and_not_sampled_with(check: Callable) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    status, text = check(rollout={"engine": {"name": "vllm", "servers": [url]}})
    assert status == 1
    assert re.search(r"ok +servers +1 named", text)
    assert re.search(rf"FAIL +servers +the vLLM server at {url} does not exist", text)
    assert "log-probs" not in text
