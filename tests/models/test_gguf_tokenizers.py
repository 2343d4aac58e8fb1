"""Tokenizers of GGUF files give the ids that llama.cpp gives, and nothing that lies beside a file is run."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import VOCABULARY, byte_vocabulary, source_model, write_model
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from groupwise.config.settings import ModelSettings
from groupwise.data.tokenizers import byte_tokenizer
from groupwise.errors import ConfigError
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.loading import load_policy, read_blueprint


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _converted(folder: Path, vocabulary: dict[str, Any]) -> PreTrainedTokenizerBase:
    write_model(folder / "tiny.gguf", source_model("llama"), vocabulary=vocabulary)
    return AutoTokenizer.from_pretrained(checkpoint_folder(str(folder / "tiny.gguf")))


LETTERS = "abcd"


def _sentencepiece(**keys: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: bytes, letters, and words of two to four of them with scores of their own."""
    draws = random.Random(0)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256, *[gguf.TokenType.NORMAL] * 5]
    while len(tokens) < VOCABULARY:
        word = "".join(draws.choice("▁" + LETTERS) for _ in range(draws.randint(2, 4)))
        if word not in tokens:
            tokens.append(word)
            types.append(gguf.TokenType.NORMAL)
    scores = [0.0] * 264 + [-float(rank) for rank in draws.sample(range(1, 1000), VOCABULARY - 264)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": [int(one) for one in types],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        **keys,
    }


def _merged_by_score(text: str, vocabulary: dict[str, Any]) -> list[str]:
    """Pieces as llama.cpp merges them: of all neighbours that make a token the best first, of equals the leftmost."""
    scores = dict(zip(vocabulary["ggml.tokens"], vocabulary["ggml.scores"], strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -place) for place, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found = []
    for piece in pieces:
        found += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return found


@pytest.mark.parametrize(
    ("keys", "before"),
    [
        ({}, ["<s>", "▁"]),
        ({"ggml.add_space_prefix": True}, ["<s>", "▁"]),
        ({"ggml.add_space_prefix": False}, ["<s>"]),
        ({"ggml.add_space_prefix": False, "ggml.add_bos_token": False}, []),
        ({"ggml.add_bos_token": False}, ["▁"]),
    ],
)
def test_a_sentencepiece_vocabulary_gives_the_tokens_of_its_scores(keys: dict[str, Any], before: list[str], tmp_path: Path) -> None:
    vocabulary = _sentencepiece(**keys)
    tokenizer = _converted(tmp_path, vocabulary)
    draws = random.Random(1)
    texts = ["a", " a", "a  b", "ü", "\n", *("".join(draws.choice(LETTERS + " x") for _ in range(20)) for _ in range(300))]
    for text in texts:
        beginning = [token for token in before if token != "▁"]
        space = "".join(token for token in before if token == "▁")
        expected = beginning + _merged_by_score(space + text, vocabulary)
        assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == expected
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_a_text_ends_with_eos_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = _converted(tmp_path, _sentencepiece(**{"ggml.add_eos_token": True}))
    assert tokenizer.convert_ids_to_tokens(tokenizer("x")["input_ids"]) == ["<s>", "▁", "<0x78>", "</s>"]


def _with_word(rule: str, **keys: Any) -> dict[str, Any]:
    """A byte-level vocabulary with the word `hello`, which no merges make."""
    vocabulary = byte_vocabulary(rule)
    vocabulary["ggml.tokens"][-1] = "hello"
    vocabulary["ggml.token_type"][-1] = int(gguf.TokenType.NORMAL)
    return vocabulary | keys


@pytest.mark.parametrize(
    ("rule", "keys", "tokens"),
    [
        ("llama-bpe", {}, ["<|user|>", "hello"]),
        ("llama-bpe", {"ggml.add_bos_token": False}, ["hello"]),
        ("tekken", {}, ["<|user|>", "hello"]),
        ("qwen2", {}, [*"hello"]),
        ("qwen2", {"ggml.add_bos_token": True}, ["<|user|>", *"hello"]),
        ("gpt-2", {}, [*"hello"]),
        ("smollm", {}, [*"hello"]),
        ("gpt-4o", {}, [*"hello"]),
        ("smaug-bpe", {}, [*"hello"]),
    ],
)
def test_bos_and_whole_words_are_as_the_rule_has_them(rule: str, keys: dict[str, Any], tokens: list[str], tmp_path: Path) -> None:
    tokenizer = _converted(tmp_path, _with_word(rule, **keys))
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello")["input_ids"]) == tokens


def _named(vocabulary: dict[str, Any], id: int, token: str) -> dict[str, Any]:
    vocabulary["ggml.tokens"][id] = token
    return vocabulary


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({}, ["<|end|>"]),
        ({"ggml.eot_token_id": 270}, ["<|end|>", "<unused9>"]),
        ({"ggml.eot_token_id": 270, "ggml.eom_token_id": 271}, ["<|end|>", "<unused9>", "<unused10>"]),
        ({"ggml.eos_token_id": 280}, ["<|end|>", "<unused19>"]),
    ],
)
def test_every_token_that_ends_an_answer_is_known(keys: dict[str, Any], ends: list[str], tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", source_model("llama"), vocabulary=byte_vocabulary() | keys)
    policy = load_policy(ModelSettings(path=str(tmp_path / "tiny.gguf")))
    assert sorted(policy.tokenizer.convert_ids_to_tokens(policy.eos_ids)) == sorted(ends)


def test_control_tokens_are_one_token_in_a_text_and_normal_ones_are_not(tmp_path: Path) -> None:
    vocabulary = _named(byte_vocabulary("qwen2"), VOCABULARY - 1, "<normal>")
    vocabulary["ggml.token_type"][-1] = int(gguf.TokenType.NORMAL)
    vocabulary["ggml.token_type"][-2] = int(gguf.TokenType.USER_DEFINED)
    tokenizer = _converted(tmp_path, vocabulary)
    last = vocabulary["ggml.tokens"][-2]
    assert tokenizer.convert_ids_to_tokens(tokenizer(f"<|end|>{last}<normal>")["input_ids"]) == ["<|end|>", last, *"<normal>"]
    assert tokenizer.decode(tokenizer(f"<|end|>{last}")["input_ids"], skip_special_tokens=True) == last


STRANGER = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Strange:\n    pass\n"


@pytest.mark.parametrize("files", [[], ["tokenizer.json"], ["config.json"], ["tokenizer.json", "config.json"]])
def test_code_beside_a_file_is_not_asked_about_and_not_run(files: list[str], tmp_path: Path, monkeypatch) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("a question was asked")

    monkeypatch.setattr("builtins.input", ask)
    write_model(tmp_path / "tiny.gguf", source_model("llama"))
    (tmp_path / "strange.py").write_text(STRANGER)
    code = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", "strange.Strange"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    if "tokenizer.json" in files:
        byte_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    if "config.json" in files:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "strange", "auto_map": {"AutoConfig": "strange.Strange", "AutoTokenizer": "strange.Strange"}})
        )
    path = ModelSettings(path=str(tmp_path / "tiny.gguf"))
    if "tokenizer.json" in files:
        with pytest.raises(ConfigError, match=r"the tokenizer beside .* cannot be read"):
            read_blueprint(path)
    else:
        assert read_blueprint(path).tokenizer.eos_token == "<|end|>"
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / "cache").rglob("strange*"))


def test_bytes_are_all_there(tmp_path: Path) -> None:
    tokenizer = _converted(tmp_path, byte_vocabulary("qwen2"))
    text = "ä日本 \n\tz"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256


def test_bytes_that_a_vocabulary_does_not_have_give_no_token(tmp_path: Path) -> None:
    """SmolLM2's vocabulary has no token for 21 bytes: control characters, and bytes that UTF-8 rarely or never has."""
    vocabulary = byte_vocabulary("qwen2")
    absent = {"ĝ", "ė", "ñ", "ÿ"}  # 0x1d, 0x17, 0xf1, 0xff, as a byte level writes them
    vocabulary["ggml.tokens"] = [f"<gone{n}>" if token in absent else token for n, token in enumerate(vocabulary["ggml.tokens"])]
    tokenizer = _converted(tmp_path, vocabulary)
    assert tokenizer.decode(tokenizer("a\x1db ä")["input_ids"]) == "ab ä"
