"""Makes a tokenizer of transformers from the metadata of a GGUF file, by llama.cpp's rules.

The rules, where a file leaves something out, are those of src/llama-vocab.cpp: which vocabularies
begin a text with BOS, which take a whole word that is a token without merging it, and which tokens
end an answer.  A file holds the name of the rule that splits text before it is merged (`SPLITS`),
not the rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from groupwise.errors import ConfigError
from groupwise.models.gguf_header import Header

BESIDE = (
    "put the tokenizer.json of the model that it was made from, and the files beside it, into the"
    " same folder"
)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}"
_LLAMA3_RULES = ("llama-bpe", "llama3", "llama-v3", "falcon3")
QWEN2_RULES = ("qwen2", "deepseek-r1-qwen")
SPLITS = {
    **dict.fromkeys((*_LLAMA3_RULES, "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(QWEN2_RULES, _QWEN2),
    "tekken": _CASED % ("", "", ""),
    **dict.fromkeys(("gpt-4o", "llama4"), _CASED % (f"{_WORDS}?", f"{_WORDS}?", "{1,3}")),
    **dict.fromkeys(("gpt-2", "smollm", "starcoder", "refact", "command-r"), ""),
}
"""How a byte-level tokenizer splits text before it merges bytes, by the name that llama.cpp gives
the rule: a pattern, or "" for GPT-2's, before which all rules but `gpt-2` itself set digits apart.
A file holds the name alone; a wrong rule gives other ids."""
WHOLE_WORDS = (*_LLAMA3_RULES, "tekken")
"""Rules under which a word that is a token is that token, whatever the merges; and under which a
text begins with BOS unless the file says otherwise."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""Names that transformers has for special tokens, and the keys that hold their ids."""
END_IDS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
"""Keys of tokens that end an answer: text, turn, message."""
END_TOKENS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
)
"""Tokens that end an answer wherever they are control tokens."""
READ = (
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    *IDS.values(),
    *END_IDS[1:],
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.chat_template",
)
"""Keys that a tokenizer is made from."""
NOTES = (
    "tokenizer.ggml.token_type_count",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.mask_token_id",
    "tokenizer.ggml.cls_token_id",
    "tokenizer.ggml.fim_",
    "tokenizer.ggml.prefix_token_id",
    "tokenizer.ggml.suffix_token_id",
    "tokenizer.ggml.middle_token_id",
    "tokenizer.huggingface.json",
    "tokenizer.chat_templates",
    "tokenizer.chat_template.",
)
"""Beginnings of keys that no encoded text depends on."""
NEUTRAL = {
    "tokenizer.ggml.add_sep_token": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
}
"""Keys that are accepted with the value under which they change nothing."""


PRINTABLE = [chr(code) for code in range(0x21, 0x7F)]
"""The characters of ASCII that a byte-level vocabulary writes as they are."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer, and every id that ends an answer."""

    tokenizer: PreTrainedTokenizerFast
    end_ids: tuple[int, ...]


def read_tokenizer(header: Header, rows: int) -> GgufTokenizer:
    """Make the tokenizer of a GGUF file.   rows: of the model's embedding.

    Raises ConfigError for a kind, a rule or a key that is not known, and for numbers and merges
    that do not fit the vocabulary.
    """
    return _Maker(header, rows).make()


def splitter(rule: str) -> pre_tokenizers.PreTokenizer:
    """Make what splits text before bytes are merged, by a rule of `SPLITS`."""
    pattern = SPLITS[rule]
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, as_bytes])
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return pre_tokenizers.Sequence([as_bytes])
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_bytes])


class _Maker:
    """Makes one tokenizer; holds what several steps need."""

    def __init__(self, header: Header, rows: int) -> None:
        self.header = header
        self.kind = header.metadata.get("tokenizer.ggml.model")
        if self.kind is None:
            raise ConfigError(f"model.path: {str(header.file)!r} holds no tokenizer: {BESIDE}")
        if self.kind not in ("gpt2", "llama"):
            self.refuse(f"is of the kind {self.kind!r}, which is not known")
        self.check_keys()
        self.rule = self.text("tokenizer.ggml.pre", "none")
        if self.kind == "gpt2" and self.rule not in SPLITS:
            self.refuse(f"splits text by the rule {self.rule!r}, which is not known")
        self.tokens = self.read_tokens(rows)
        self.id_of = {token: id for id, token in enumerate(self.tokens)}
        if len(self.id_of) < len(self.tokens):
            twice = next(token for id, token in enumerate(self.tokens) if self.id_of[token] != id)
            self.refuse(f"has the token {twice!r} twice")
        self.types = self.read_types()

    def refuse(self, reason: str) -> NoReturn:
        """Raise ConfigError for a tokenizer that cannot be made."""
        raise ConfigError(
            f"model.path: the tokenizer of {str(self.header.file)!r} {reason:.300}: {BESIDE}"
        )

    def check_keys(self) -> None:
        """Refuse keys of a tokenizer that are not known: they could change every text."""
        for key, value in self.header.metadata.items():
            prefix, _, name = key.partition(".")
            if prefix != "tokenizer":
                if f"tokenizer.{name}" in READ:
                    self.refuse(f"has a misspelt key, {key!r}")
                continue
            if key in READ or key.startswith(NOTES):
                continue
            if key in NEUTRAL and value == NEUTRAL[key]:
                continue
            self.refuse(f"has the key {key}, which is not known here")

    def text(self, key: str, default: str) -> str:
        """Look up a string."""
        value = self.header.metadata.get(key, default)
        if not isinstance(value, str):
            self.refuse(f"has a {key} that is no text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Look up a truth value."""
        value = self.header.metadata.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"has a {key} that is neither true nor false")
        return value

    def id(self, key: str) -> int | None:
        """Look up the id of a token; None if the file does not name it."""
        value = self.header.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            self.refuse(f"has {len(self.tokens):,} tokens, and its {key} is {value!r}")
        return value

    def strings(self, key: str) -> list[str]:
        """Look up a list of strings, which must be there."""
        values = self.header.metadata.get(key)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self.refuse(f"has no list of texts {key}")
        return values

    def numbers(self, key: str) -> list[Any]:
        """Look up a list of one number for each token, which must be there."""
        values = self.header.metadata.get(key)
        if not isinstance(values, list) or len(values) != len(self.tokens):
            self.refuse(f"has no list {key} of {len(self.tokens):,} numbers, one for each token")
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            self.refuse(f"has a list {key} that does not hold numbers alone")
        return values

    def read_tokens(self, rows: int) -> list[str]:
        """Texts of all tokens, by id; empty ones get a name, as llama.cpp does it."""
        tokens = []
        for id, token in enumerate(self.strings("tokenizer.ggml.tokens")):
            tokens.append(token or f"[EMPTY_{id}]")
        if not 0 < len(tokens) <= rows:
            self.refuse(f"has {len(tokens):,} tokens and the model's embedding {rows:,} rows")
        return tokens

    def read_types(self) -> list[int]:
        """Types of all tokens, by id."""
        if "tokenizer.ggml.token_type" not in self.header.metadata:
            return [NORMAL] * len(self.tokens)
        types = self.numbers("tokenizer.ggml.token_type")
        unknown = set(types) - set(range(NORMAL, BYTE + 1))
        if unknown:
            self.refuse(f"has a token of the type {unknown.pop()}, which is none of the format's")
        return types

    def make(self) -> GgufTokenizer:
        """Make the tokenizer."""
        if self.kind == "gpt2":
            backend = self.make_byte_level()
        else:
            backend = self.make_sentencepiece()
        special = self.special_tokens()
        for id, kind in enumerate(self.types):
            token = self.tokens[id]
            if kind in (UNKNOWN, CONTROL) or token in special.values():
                backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind == USER_DEFINED:
                backend.add_tokens([AddedToken(token, special=False, normalized=False)])
        self.add_ends_of_text(backend, special)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
        )
        template = self.text("tokenizer.chat_template", "")
        if template:
            tokenizer.chat_template = template
        return GgufTokenizer(tokenizer, self.end_ids())

    def make_byte_level(self) -> Tokenizer:
        """Make the core of a tokenizer that merges bytes."""
        # Published vocabularies lack control characters and bytes that UTF-8 rarely or never has
        # (SmolLM2: 21 of 256): such a byte gives no token.  One without a letter is no byte level.
        for character in PRINTABLE:
            if character not in self.id_of:
                self.refuse(f"has no token for the character {character!r}")
        merges = []
        for merge in self.strings("tokenizer.ggml.merges"):
            at = merge.find(" ", 1)
            left, right = merge[:at], merge[at + 1 :]
            if at < 0 or any(part not in self.id_of for part in (left, right, left + right)):
                self.refuse(f"has the merge {merge!r}, whose parts are no tokens")
            merges.append((left, right))
        whole = self.rule in WHOLE_WORDS
        backend = Tokenizer(models.BPE(self.id_of, merges, ignore_merges=whole))
        if self.rule in QWEN2_RULES:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = splitter(self.rule)
        backend.decoder = decoders.ByteLevel()
        return backend

    def make_sentencepiece(self) -> Tokenizer:
        """Make the core of a SentencePiece vocabulary, whose scores say what is merged first."""
        scores = self.numbers("tokenizer.ggml.scores")
        unknown = self.id(IDS["unk_token"])
        if unknown is None:
            unknown = 0  # llama.cpp's
        bpe = models.BPE(
            self.id_of,
            self.score_merges(scores),
            unk_token=self.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(bpe)
        spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
        back: list[decoders.Decoder] = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
        if self.flag("tokenizer.ggml.add_space_prefix", True):
            spaces.insert(0, normalizers.Prepend("▁"))
            back.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(spaces)
        backend.decoder = decoders.Sequence(back)
        return backend

    def score_merges(self, scores: list[float]) -> list[tuple[str, str]]:
        """Every pair of tokens that gives a token, the ones with the best score first."""
        merges = []
        for id, token in enumerate(self.tokens):
            if self.types[id] not in (NORMAL, USER_DEFINED, UNUSED):
                continue
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in self.id_of and right in self.id_of:
                    merges.append((-scores[id], self.id_of[left], self.id_of[right]))
        merges.sort()
        return [(self.tokens[left], self.tokens[right]) for _, left, right in merges]

    def special_tokens(self) -> dict[str, str]:
        """Tokens that the file names, by transformers' names."""
        special = {}
        for name, key in IDS.items():
            id = self.id(key)
            if id is not None:
                special[name] = self.tokens[id]
        return special

    def add_ends_of_text(self, backend: Tokenizer, special: dict[str, str]) -> None:
        """Put BOS before every text and EOS behind it, where the file or llama.cpp says so."""
        begins = self.kind == "llama" or self.rule in WHOLE_WORDS
        begins = self.flag("tokenizer.ggml.add_bos_token", begins)
        ends = self.flag("tokenizer.ggml.add_eos_token", False)
        parts, ids = ["$A"], []
        if begins and "bos_token" in special:
            parts.insert(0, special["bos_token"])
        if ends and "eos_token" in special:
            parts.append(special["eos_token"])
        for part in dict.fromkeys(parts):
            if part != "$A":
                ids.append((part, self.id_of[part]))
        if ids:
            backend.post_processor = processors.TemplateProcessing(
                single=parts,
                pair=[*parts, *(part.replace("$A", "$B") for part in parts)],
                special_tokens=ids,
            )

    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: those that the file names, and control tokens by name."""
        ids = set()
        for key in END_IDS:
            id = self.id(key)
            if id is not None:
                ids.add(id)
        for token in END_TOKENS:
            id = self.id_of.get(token)
            if id is not None and self.types[id] == CONTROL:
                ids.add(id)
        return tuple(sorted(ids))
