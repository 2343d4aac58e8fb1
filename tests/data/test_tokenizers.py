import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from groupwise.data.tokenizers import (
    CHARACTERS,
    MARKS,
    arithmetic_tokenizer,
    bpe_tokenizer,
    byte_tokenizer,
    load_tokenizer,
    make_tokenizer,
)
from groupwise.errors import ConfigError, DataError

TEXTS = ["the cat sat on the mat", "hello there, world", "two plus three is five"] * 3
ARITHMETIC, BYTES, BPE = arithmetic_tokenizer(), byte_tokenizer(), bpe_tokenizer(TEXTS, 275)
known_text = st.lists(st.sampled_from([*CHARACTERS, *MARKS])).map("".join)


def roundtrip(tokenizer, text):
    return tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])


@given(known_text)
def test_arithmetic_is_an_exact_roundtrip_of_every_text_it_covers(text):
    assert roundtrip(ARITHMETIC, text) == text
    assert len(ARITHMETIC(text)["input_ids"]) <= len(text)


@given(st.text())
def test_bytes_and_bpe_are_exact_roundtrips_of_every_text(text):
    assert roundtrip(BYTES, text) == text
    assert roundtrip(BPE, text) == text


@pytest.mark.parametrize("tokenizer", [ARITHMETIC, BYTES, BPE], ids=["arithmetic", "bytes", "bpe"])
def test_a_saved_folder_is_the_same_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "  two  plus <think>3 + 4\n</think>\\boxed{7}<|end|> "
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.pad_token, loaded.eos_token, len(loaded)) == ("<pad>", "<|end|>", len(tokenizer))
    chat = [{"role": "user", "content": "two"}]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    assert make_tokenizer(str(tmp_path))(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("tokenizer", [ARITHMETIC, BYTES, BPE], ids=["arithmetic", "bytes", "bpe"])
def test_marks_are_single_visible_tokens_and_pad_is_not_eos(tokenizer):
    for mark in MARKS:
        ids = tokenizer(mark)["input_ids"]
        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == mark
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("7<|end|>")["input_ids"], skip_special_tokens=True) == "7"


def test_arithmetic_has_sixty_odd_tokens_and_the_chat_form_of_the_recipes():
    assert len(ARITHMETIC) == 64
    chat = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]
    assert ARITHMETIC.apply_chat_template(chat, tokenize=False) == "<|user|>1+2<|end|><|assistant|>3<|end|>"
    prompt = ARITHMETIC.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert ARITHMETIC.convert_ids_to_tokens(prompt) == ["<|user|>", "1", "+", "2", "<|end|>", "<|assistant|>"]


def test_bpe_is_deterministic_has_the_size_asked_for_and_merges():
    again = bpe_tokenizer(TEXTS, 275)
    assert again.get_vocab() == BPE.get_vocab()
    assert len(BPE) == 275
    assert len(BPE("the cat")["input_ids"]) < len(BYTES("the cat")["input_ids"])


def test_names_that_make_no_tokenizer():
    with pytest.raises(ConfigError, match="no tokenizer 'arithmatic': choose arithmetic"):
        make_tokenizer("arithmatic")
    with pytest.raises(ConfigError, match="as a number"):
        make_tokenizer("bpe:many")
    with pytest.raises(ConfigError, match="bpe:264 or more"):
        make_tokenizer("bpe:100", TEXTS)
    with pytest.raises(DataError, match="lower bpe:5000"):
        make_tokenizer("bpe:5000", TEXTS)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("name", ["arithmetic", "bytes", "bpe:290"])
def test_a_saved_tokenizer_is_loaded_as_it_was_whatever_the_models_family(tmp_path, name, family):
    tokenizer = make_tokenizer(name, ["the cat sat on the mat, was it?", "abc def ghi jkl mno pqr stu vwx yz 0123 456 789"] * 9)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    loaded = load_tokenizer(str(tmp_path))
    text = "<|user|>12+3<|end|><|assistant|><think>1  ab\u00e9 x"
    assert loaded(text).input_ids == tokenizer(text).input_ids
    assert len(loaded) == len(tokenizer)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def _damaged(change: str, content: str) -> str:
    """A tokenizer.json with one fault."""
    tree = json.loads(content)
    if change == "a wrong letter":
        return content.replace('"BPE"', '"BPF"')
    if change == "a wrong letter in a class":
        return content.replace('"ByteLevel"', '"ByteLevl"')
    if change == "cut":
        return content[:-20]
    if change == "no object":
        return "[]"
    if change == "nested":
        return "[" * 100_000
    if change == "an unknown merge":
        tree["model"]["merges"] = [["qq", "zz"]]
    if change.startswith("vocabulary"):
        tree["model"]["vocab"]["a"] = int(change.split()[1])
    if change.startswith("added"):
        tree["added_tokens"][0]["id"] = int(change.split()[1])
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a wrong letter", "did not match any variant"),
        ("a wrong letter in a class", "did not match any variant"),
        ("cut", "Expecting"),
        ("no object", "it holds no JSON object"),
        ("nested", "(recursion|Stack overflow)"),
        ("an unknown merge", "`qq` out of vocabulary"),
        ("vocabulary -1", "the token 'a' has the id -1"),
        ("vocabulary 2147483648", "the token 'a' has the id 2147483648"),
        ("added -1", "the token '<pad>' has the id -1"),
        ("added 2147483648", "the token '<pad>' has the id 2147483648"),
    ],
)
def test_a_damaged_tokenizer_file_is_named(change: str, message: str, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(_damaged(change, file.read_text()))
    with pytest.raises(ConfigError, match=rf"tokenizer.json' cannot be read: .*{message}.*copy or fetch it again"):
        load_tokenizer(str(tmp_path))
