"""`groupwise export`: a GGUF file that is read back, and what Ollama is told."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import groupwise as gw
from groupwise.api.ollama import modelfile
from groupwise.cli.commands import main
from groupwise.config.settings import DataSettings, Recipe, RolloutSettings
from groupwise.data.tokenizers import bpe_tokenizer
from groupwise.errors import CheckpointError, ConfigError

RECIPE = """\
objective: grpo
name: sums
steps: 2
threads: 1
model: {scratch: {hidden: 32, context: 128, tokenizer: "bpe:266"}}
data: {path: rows.jsonl, eval_fraction: 0.3, template: "Q: {prompt} A:"}
rewards: [{function: "my_rewards.py:digits"}]
group: {prompts_per_step: 3, group_size: 4}
rollout: {max_new_tokens: 5, temperature: 0.8, stop: ["\\n", 'say "no"']}
eval: {k: 2}
"""
ADAPTED = """\
objective: grpo
name: adapted
steps: 2
threads: 1
model: {path: runs/sums/final, lora: {rank: 4}}
data: {path: rows.jsonl, eval_fraction: 0.3, chat: true, system: Be brief.}
rewards: [{function: "my_rewards.py:digits"}]
group: {prompts_per_step: 3, group_size: 4}
rollout: {max_new_tokens: 5}
optimizer: {lr: 0.1}
eval: {k: 2}
"""
REWARDS = "def digits(completions, **_):\n    return [float(any(c.isdigit() for c in text)) for text in completions]\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: of all weights, and of an adapter over their result."""
    folder = tmp_path_factory.mktemp("exported")
    rows = [{"prompt": f"What is the sum of {a} and {b}?", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text(REWARDS)
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name, recipe in (("sums", RECIPE), ("adapted", ADAPTED)):
            Path(f"{name}.yaml").write_text(recipe)
            assert main(["train", f"{name}.yaml", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def there(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("f32", 1e-5), ("f16", 1e-3), ("bf16", 5e-3), ("q8_0", 2e-2), ("q4_0", 2e-1)])
@pytest.mark.parametrize("name", ["sums", "adapted"])
def test_an_exported_model_is_read_back_with_log_probs_within_its_rounding(
    there: Path, name: str, kind: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", f"runs/{name}", "--gguf", kind]) == 0
    file = Path(f"runs/{name}/gguf-{kind}/{name}.gguf")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{file} (") and said[1] == f"ollama create {name} -f {file.with_name('Modelfile')}"
    prompt, completion = "What is the sum of 3 and 4?", "the sum is 7 <|end|>"
    trained, read = gw.load_policy(f"runs/{name}/final"), gw.load_policy(str(file))
    message = [{"role": "user", "content": prompt}]
    for policy_prompt in (prompt, message):
        expected, found = (policy.score(policy_prompt, completion, end=True) for policy in (trained, read))
        np.testing.assert_allclose(found, expected, rtol=0, atol=most)
    if kind == "q4_0":
        assert not np.allclose(found, expected, rtol=0, atol=1e-4), "the type rounds nothing"


@pytest.mark.slow
def test_an_adapter_is_in_the_file(there: Path) -> None:
    base, adapted = (gw.export_gguf(f"runs/{name}", "f32", f"{name}.gguf") for name in ("sums", "adapted"))
    scores = [gw.load_policy(str(file)).score("What", "the sum") for file in (base, adapted)]
    assert not np.allclose(*scores, atol=1e-3)


@pytest.mark.slow
def test_ollama_asks_as_the_run_asked(there: Path) -> None:
    gw.export_gguf("runs/sums", "q8_0")
    assert Path("runs/sums/gguf-q8_0/Modelfile").read_text().splitlines() == [
        "# Made by groupwise export.",
        "FROM ./sums.gguf",
        'TEMPLATE """Q: {{ .Prompt }} A:"""',
        "PARAMETER temperature 0.8",
        "PARAMETER top_k 0",
        "PARAMETER top_p 1",
        "PARAMETER min_p 0",
        "PARAMETER repeat_penalty 1",
        "PARAMETER num_predict 5",
        'PARAMETER stop "\\n"',
        'PARAMETER stop "say \\"no\\""',
    ]
    gw.export_gguf("runs/adapted", "q8_0")
    lines = Path("runs/adapted/gguf-q8_0/Modelfile").read_text().splitlines()
    assert lines[2:4] == [
        'TEMPLATE """{{ if .System }}<|system|>{{ .System }}<|end|>{{ else }}{{ end }}{{ range .Messages }}'
        '{{ if eq .Role "user" }}<|user|>{{ .Content }}<|end|>{{ else if eq .Role "assistant" }}<|assistant|>{{ .Content }}<|end|>'
        '{{ end }}{{ end }}<|assistant|>"""',
        'SYSTEM """Be brief."""',
    ]


CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
COUNTING = "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}"


def with_template(template: str) -> str:
    tokenizer = bpe_tokenizer(["the sum of the sum is the sum"], 265)
    tokenizer.chat_template = template
    data = DataSettings(chat=True, template="{prompt} Think.")
    recipe = Recipe(objective="grpo", data=data, rollout=RolloutSettings(max_new_tokens=9))
    return modelfile(recipe, tokenizer, "x.gguf")


def test_a_chat_template_is_taken_apart_into_turns() -> None:
    text = with_template(CHATML)
    system = (
        "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ else }}<|im_start|>system\nBe kind.<|im_end|>\n{{ end }}"
    )
    user = "<|im_start|>user\n{{ .Content }} Think.<|im_end|>\n"
    assistant = "<|im_start|>assistant\n{{ .Content }}<|im_end|>\n"
    turns = f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{user}{{{{ else if eq .Role "assistant" }}}}{assistant}'
    assert f'TEMPLATE """{system}{turns}{{{{ end }}}}{{{{ end }}}}<|im_start|>assistant\n"""\n' in text


def test_a_chat_template_that_is_no_sum_of_turns_is_left_to_ollama(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        assert "TEMPLATE" not in with_template(COUNTING)
    assert "the Modelfile has no TEMPLATE" in caplog.text


@pytest.mark.slow
def test_what_cannot_be_exported_is_said(there: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="there is no type 'q8' to write a GGUF file in; did you mean q8_0"):
        gw.export_gguf("runs/sums", "q8")
    with pytest.raises(ConfigError, match=r"ends in \.gguf, 'x\.bin' does not"):
        gw.export_gguf("runs/sums", "q8_0", tmp_path / "x.bin")
    with pytest.raises(ConfigError, match="runs holds runs and is none itself"):
        gw.export_gguf("runs", "q8_0")
    (tmp_path / "Modelfile").write_text("FROM ./mine.gguf\n")
    with pytest.raises(ConfigError, match="is there, and not made by this command"):
        gw.export_gguf("runs/sums", "q8_0", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
    begun = tmp_path / "runs/begun"
    shutil.copytree("runs/sums", begun)
    (begun / "done.json").unlink()
    with pytest.raises(CheckpointError, match="has not finished"):
        gw.export_gguf(begun, "q8_0")
    assert main(["export", str(finished / "runs/demo/grpo"), "--gguf", "f16"]) == ConfigError.exit_code
    assert "it merges nothing" in capsys.readouterr().err
