"""A GGUF file made of a folder holds its numbers, settings and tokens, or is not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import SOURCES, VOCABULARY, byte_vocabulary, source_model, write_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from groupwise.data.tokenizers import arithmetic_tokenizer, bpe_tokenizer, byte_tokenizer
from groupwise.errors import ConfigError
from groupwise.models.gguf import convert
from groupwise.models.gguf_export import TYPES, write_gguf
from groupwise.models.gguf_tokenizer import SPLITS, WHOLE_WORDS
from groupwise.models.gguf_vocabulary import PROBE

SOURCES["mistral"] = {"model_type": "mistral", "sliding_window": None}
FAST = ("llama", "llama, llama3", "qwen3, yarn", "gemma2", "phi3, longrope")


def words() -> PreTrainedTokenizerBase:
    return bpe_tokenizer(["the answer of the sum is right " * 5], 270)


def written(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, kind: str = "f32") -> Path:
    """Save a model as a Hugging Face folder, and write it as a GGUF file."""
    model.config.architectures = [type(model).__name__]
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    file = folder / "gguf" / "tiny.gguf"
    write_gguf(folder / "final", file, kind, "tiny")
    return file


def read_back(file: Path) -> PreTrainedModel:
    convert(file, file.parent / "back")
    return AutoModelForCausalLM.from_pretrained(file.parent / "back", attn_implementation="eager")


def log_probs(model: PreTrainedModel, length: int = 100) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round the matrices of a model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.to(dtype).float())


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [
        pytest.param(name, kind, dtype, marks=() if kind == "f32" and name in FAST else pytest.mark.slow)
        for name in SOURCES
        for kind, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16))
    ],
)
def test_log_probs_are_those_of_the_model_in_the_numbers_of_the_type(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = source_model(name)
    found = log_probs(read_back(written(model, words(), tmp_path, kind)))
    rounded(model, dtype)
    expected = log_probs(model)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


STEPS = {"q8_0": (127, 0.57), "q4_0": (8, 1.01)}
"""Of each type: steps from 0 to the largest number of a block, and the largest error in steps."""


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_weight_is_off_by_no_more_than_the_step_of_its_block(name: str, kind: str, tmp_path: Path) -> None:
    model = source_model(name)
    state = read_back(written(model, words(), tmp_path, kind)).state_dict()
    steps, most = STEPS[kind]
    for key, weight in model.state_dict().items():
        if weight.ndim == 1:
            assert torch.equal(state[key], weight), key
            continue
        blocks = weight.reshape(-1, 32)
        error = (state[key].reshape(-1, 32) - blocks).abs().amax(1) / (blocks.abs().amax(1) / steps)
        assert 0.3 < error.max() <= most, key


@pytest.mark.parametrize(("kind", "most"), [("f16", 0.002), ("bf16", 0.02), ("q8_0", 0.06), ("q4_0", 0.9)])
def test_log_probs_move_by_the_rounding_of_the_type(kind: str, most: float, tmp_path: Path) -> None:
    model = source_model("llama")
    moved = (log_probs(read_back(written(model, words(), tmp_path, kind))) - log_probs(model)).abs().mean()
    assert most / 10 < moved < most


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_model_and_tokens_from_the_file(name: str, kind: str, tmp_path: Path) -> None:
    """Models whose windows, caps and scaled frequencies it leaves out of a file are not compared."""
    tokenizer = words()
    file = written(source_model(name), tokenizer, tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, attn_implementation="eager")
    torch.testing.assert_close(log_probs(model), log_probs(read_back(file)), rtol=0, atol=1e-4)
    if name != "qwen3":
        read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        assert read(PROBE)["input_ids"] == tokenizer(PROBE)["input_ids"]
        assert read.eos_token == tokenizer.eos_token


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama, llama3", "qwen2", "qwen3", "gemma2", "phi3"])
def test_llama_cpp_computes_the_same_log_probs(name: str, tmp_path: Path) -> None:
    """Where the package xllamacpp is installed, which has llama.cpp in it."""
    xllamacpp = pytest.importorskip("xllamacpp")
    model, tokenizer = source_model(name), words()
    settings = xllamacpp.CommonParams()
    settings.model.path = str(written(model, tokenizer, tmp_path))
    settings.n_ctx, settings.n_parallel, settings.warmup = 128, 1, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(settings)
    text = "the answer is 12 <|end|>\nthe sum"
    ids = tokenizer(text)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    letter = [tokenizer.convert_tokens_to_ids("a"), 1000]  # what is drawn must be text; the probabilities are those before
    for prompt, length in ((text, len(ids)), *((ids[:length], length) for length in (1, 2, 5))):
        asked = {"prompt": prompt, "n_predict": 1, "n_probs": 20, "logit_bias": [letter], "cache_prompt": False}
        answer = server.handle_completions(asked)
        assert answer["usage"]["prompt_tokens"] == length
        for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            assert abs(token["logprob"] - float(expected[length - 1, token["id"]])) < 0.02


def of_file(folder: Path, vocabulary: dict) -> PreTrainedTokenizerBase:
    """The tokenizer of a file of llama.cpp's kind."""
    write_model(folder / "source.gguf", source_model("llama"), vocabulary=vocabulary)
    convert(folder / "source.gguf", folder / "source")
    return AutoTokenizer.from_pretrained(folder / "source")


@pytest.mark.parametrize("rule", [name for name in SPLITS if name in ("llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", "smollm")])
def test_a_byte_level_tokenizer_is_found_to_split_by_its_rule(rule: str, tmp_path: Path) -> None:
    tokenizer = of_file(tmp_path, byte_vocabulary(rule))
    file = written(source_model("llama"), tokenizer, tmp_path)
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.pre"].contents() == rule
    assert fields["tokenizer.ggml.add_bos_token"].contents() == (rule in WHOLE_WORDS)
    convert(file, tmp_path / "back")
    read = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert read(PROBE)["input_ids"] == tokenizer(PROBE)["input_ids"]
    assert read.chat_template == tokenizer.chat_template
    assert read.eos_token == tokenizer.eos_token


def sentencepiece(space: str) -> PreTrainedTokenizerBase:
    """A tokenizer as transformers has those of Llama 2 (`first`) and Gemma (`never`)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thea"]
    tokens += ["th", "▁th", "the", "▁the", "ea", "he"]
    merges = [("t", "h"), ("h", "e"), ("▁", "th"), ("th", "e"), ("▁th", "e"), ("▁", "the"), ("e", "a")]
    core = Tokenizer(
        models.BPE({token: id for id, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=space, split=False)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("space", ["first", "never"])
def test_a_sentencepiece_tokenizer_keeps_its_ids(space: str, tmp_path: Path) -> None:
    tokenizer = sentencepiece(space)
    file = written(source_model("llama"), tokenizer, tmp_path)
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() == (space == "first")
    convert(file, tmp_path / "back")
    read = AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in ("the heath", "a  tea", "x\nthe", "üthe", PROBE):
        assert read(text)["input_ids"] == tokenizer(text)["input_ids"], text


def test_every_token_that_ends_a_completion_is_in_the_file(tmp_path: Path) -> None:
    model, tokenizer = source_model("llama"), words()
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>"), tokenizer.pad_token_id]
    file = written(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "final/generation_config.json").read_text())
    (tmp_path / "final/generation_config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    write_gguf(tmp_path / "final", file, "f32", "tiny")
    assert set(ends) <= set(read_back(file).generation_config.eos_token_id)
    (tmp_path / "final/generation_config.json").write_text(json.dumps(config | {"eos_token_id": [*ends, 9]}))
    with pytest.raises(ConfigError, match="end at 4 tokens, and a file names 3"):
        write_gguf(tmp_path / "final", file, "f32", "tiny")


def split_by_dashes() -> PreTrainedTokenizerBase:
    tokenizer = words()
    pattern = pre_tokenizers.Split(Regex("-"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pattern, as_bytes])
    return tokenizer


def in_lower_case() -> PreTrainedTokenizerBase:
    tokenizer = words()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (arithmetic_tokenizer, "it is a WordLevel"),
        (byte_tokenizer, "it merges nothing"),
        (split_by_dashes, "splits text by none of the rules llama-bpe, "),
        (in_lower_case, r"normalises text \(Lowercase\)"),
        (
            lambda: bpe_tokenizer(["the answer of the sum is right and the number is wrong or even left behind " * 9], 305),
            "embedding 300 rows",
        ),
    ],
)
def test_a_tokenizer_that_the_format_cannot_hold_is_refused(
    make: Callable[[], PreTrainedTokenizerBase], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        written(source_model("llama"), make(), tmp_path)
    assert not (tmp_path / "gguf/tiny.gguf").exists()


def gpt2() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY))


def with_score() -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_config(source_model("llama").config)


def of_large_numbers() -> PreTrainedModel:
    model: Any = source_model("llama")
    model.model.layers[0].mlp.down_proj.weight.data[1, 2] = -7e4
    return model


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
NTK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
WAVES = {**SOURCES["llama, llama3"]["rope_parameters"], "high_freq_factor": 8.0}


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (gpt2, "f32", r"GPT2LMHeadModel \(gpt2\) cannot be written as GGUF: causal models of llama, "),
        (with_score, "f32", r"LlamaForSequenceClassification \(llama\) cannot be written"),
        (lambda: source_model("mistral", sliding_window=64), "f32", "the model's sliding_window is 64"),
        (lambda: source_model("llama", hidden_act="gelu"), "f32", "the model's hidden_act is 'gelu'"),
        (lambda: source_model("gemma2", query_pre_attn_scalar=16), "f32", "the model's query_pre_attn_scalar is 16"),
        (lambda: source_model("gemma2", tie_word_embeddings=False), "f32", "gemma2 has no name for it"),
        (lambda: source_model("llama", rope_parameters=DYNAMIC), "f32", "of the kind 'dynamic' cannot be written"),
        (lambda: source_model("llama", rope_parameters=NTK), "f32", "rope_parameters.truncate is False"),
        (lambda: source_model("llama", rope_parameters=WAVES), "f32", r"the factors \(1.0, 8.0\)"),
        (lambda: source_model("llama", hidden_size=48), "q8_0", "blocks of 32 numbers, and rows of .* have 48: take f16"),
        (of_large_numbers, "f16", r"down_proj.weight has numbers up to 70000, and f16 holds none beyond 65504: take bf16"),
    ],
)
def test_a_model_that_the_format_cannot_hold_is_refused(
    make: Callable[[], PreTrainedModel], kind: str, words: str, tmp_path: Path
) -> None:
    tokenizer = bpe_tokenizer(["the answer of the sum is right " * 5], 270)
    with pytest.raises(ConfigError, match=words):
        written(make(), tokenizer, tmp_path, kind)
    assert not (tmp_path / "gguf/tiny.gguf").exists()


def test_a_file_names_its_type_and_holds_vectors_in_full(tmp_path: Path) -> None:
    for kind, type_ in TYPES.items():
        file = written(source_model("llama"), words(), tmp_path, kind)
        reader = gguf.GGUFReader(file)
        assert reader.fields["general.file_type"].contents() == int(type_.file)
        for tensor in reader.tensors:
            expected = type_.tensor if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
            assert tensor.tensor_type == expected
            assert np.all(tensor.shape > 0)
