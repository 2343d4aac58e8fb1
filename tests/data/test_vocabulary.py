"""The text of token ids without a tokenizer equals what the tokenizer says, for every kind of vocabulary."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupwise.data import vocabulary
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import DataError

TEXTS = ["12+30=42 <think>so</think>\\boxed{42}", "héllo wörld 🎉 日本語\n\ttabs", "a  b"]


def said(known: vocabulary.Vocabulary, ids: list[int]) -> str:
    return "".join(text for text, token in zip(known.texts(ids), ids, strict=True) if token not in known.special)


@pytest.mark.parametrize("name", ["arithmetic", "bytes", "bpe:300"])
def test_our_tokenizers(name: str) -> None:
    tokenizer = make_tokenizer(name, TEXTS * 50)
    known = vocabulary.of(tokenizer)
    for text in TEXTS[:1] if name == "arithmetic" else TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert said(known, ids) == text
    end = tokenizer.eos_token_id
    assert end in known.special
    assert known.texts([end]) == [tokenizer.eos_token]


def test_pieces_of_a_sentence_with_bytes_for_what_it_does_not_know() -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁so", "▁it", "▁is", "s", "o"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    known = vocabulary.of(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))
    ids = [pieces.index(piece) for piece in ("▁so", "▁it", "▁is", "<0xC3>", "<0xA9>", "▁", "s")]
    assert known.texts(ids) == [" so", " it", " is", "", "é", " ", "s"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    known = vocabulary.Vocabulary([b"a", "é".encode()[:1]], frozenset())
    assert known.texts([0, 1]) == ["a", "\ufffd"]
    assert known.texts([1, 0]) == ["", "\ufffda"]


def test_what_is_written_is_read_back() -> None:
    known = vocabulary.Vocabulary([b"a", None, b"\xff", b""], frozenset({3}))
    found = vocabulary.from_table(pq.read_table(pa.BufferReader(vocabulary.to_bytes(known))))
    assert (list(found.pieces), found.special) == (list(known.pieces), known.special)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {},
        {"model": {"vocab": {"a": 10**12}}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]},
        {"model": {"vocab": [3]}},
        {"model": {"vocab": {"a": 1e999}}},
    ],
)
def test_what_is_no_vocabulary_is_refused(tokenizer: dict) -> None:
    with pytest.raises(DataError, match="without a vocabulary"):
        vocabulary.from_json(tokenizer)
    with pytest.raises(DataError, match="no vocabulary"):
        vocabulary.from_table(pa.table({"piece": ["a"]}))
