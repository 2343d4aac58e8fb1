"""Describes a tokenizer of transformers as the metadata of a GGUF file: the way back of
`gguf_tokenizer`.

A file names the rule that splits text, it does not hold it: the rule is found by what it does to
`PROBE`.  `check_same` makes the tokenizer of the written file and compares its ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from groupwise.errors import ConfigError
from groupwise.models.gguf_header import Header
from groupwise.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    END_IDS,
    END_TOKENS,
    IDS,
    NORMAL,
    QWEN2_RULES,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE_WORDS,
    read_tokenizer,
    splitter,
)

PROBE = (
    "Hello, world! It's 2024: 1 22 333 4444 55555 dollars, I'LL pay ($3.50).\n\n"
    "  two  spaces\ttab \r\n\r\n trailing   \nCamelCase PayMe HTTPServer snake_case\n"
    "https://a.b/c/d?e=f//g\n"
    "/* x += y; */ <div>|</div> \\boxed{-7} don't DON'T we've\n"
    "Ünïcödé e\u0301 日本語 한국어 Привет עברית ½ ² ① 😀👍🏽 …—“”\u00a0\u3000x"
)
"""Text on which the rules of `SPLITS` differ: cases, digits, spaces, ends of lines, scripts."""
BYTES = re.compile(r"<0x[0-9A-F]{2}>")
"""A token of SentencePiece that stands for a byte."""
NEVER = -1e6
"""Score of a token that no merge makes."""


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, rows: int, ends: Sequence[int]
) -> dict[str, Any]:
    """Describe a tokenizer by the keys of a GGUF file.

    rows: of the model's embedding; rows without a token get one that is unused.
    ends: ids that end a completion.
    Raises ConfigError for a kind of tokenizer that the format does not know.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _unknown(f"{type(tokenizer).__name__} has no tokenizer.json")
    backend = tokenizer.backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    tokens = _tokens(tokenizer, rows)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    merges = [tuple(merge) for merge in model.get("merges", [])]
    if model["type"] != "BPE":
        raise _unknown(f"it is a {model['type']}")
    if not merges:
        raise _unknown("it merges nothing")
    if model["byte_fallback"]:
        keys["tokenizer.ggml.model"] = "llama"
        keys["tokenizer.ggml.pre"] = "default"
        keys["tokenizer.ggml.scores"] = _scores(tokens, merges)
        keys["tokenizer.ggml.add_space_prefix"] = _adds_space(tokenizer)
    else:
        keys["tokenizer.ggml.model"] = "gpt2"
        keys["tokenizer.ggml.pre"] = _rule(backend, model["ignore_merges"])
        keys["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    keys["tokenizer.ggml.token_type"] = _types(tokenizer, tokens, model)
    for name, key in IDS.items():
        id = getattr(tokenizer, f"{name}_id")
        if id is not None:
            keys[key] = id
    keys |= _ends_of_text(tokenizer)
    keys |= _end_ids(tokenizer, tokens, ends)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        keys["tokenizer.chat_template"] = template
    return keys


def _unknown(reason: str) -> ConfigError:
    """Make the error for a tokenizer that cannot be written."""
    return ConfigError(
        f"the tokenizer cannot be written as GGUF: {reason}; byte-level BPE and SentencePiece's"
        " BPE with bytes can"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """List the tokens by id, one for each row of the embedding."""
    tokens = [f"[PAD{id}]" for id in range(rows)]
    for token, id in tokenizer.get_vocab().items():
        if id >= rows:
            raise ConfigError(
                f"the token {token!r} has the id {id}, and the model's embedding {rows} rows"
            )
        tokens[id] = token
    return tokens


def _types(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], model: dict[str, Any]
) -> list[int]:
    """List what kind of token each is: ordinary, special, added by a user, a byte, or none."""
    known = set(tokenizer.get_vocab().values())
    added = tokenizer.added_tokens_decoder
    types = []
    for id, token in enumerate(tokens):
        if id not in known:
            types.append(UNUSED)
        elif model["byte_fallback"] and token == model["unk_token"]:
            types.append(UNKNOWN)
        elif id in added and added[id].special:
            types.append(CONTROL)
        elif id in added:
            types.append(USER_DEFINED)
        elif model["byte_fallback"] and BYTES.fullmatch(token):
            types.append(BYTE)
        else:
            types.append(NORMAL)
    return types


def _scores(tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> list[float]:
    """Score each token by the place of the first merge that makes it: the best is merged first."""
    scores = dict.fromkeys(tokens, NEVER)
    for place, (left, right) in enumerate(merges):
        if scores.get(left + right) == NEVER:
            scores[left + right] = -float(place)
    return [scores[token] for token in tokens]


def _adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text is encoded as if a space stood before it."""
    first, *_ = tokenizer.tokenize("a", add_special_tokens=False)
    return first.startswith("▁")


def _rule(backend: Tokenizer, whole_words: bool) -> str:
    """Name the rule by which a byte-level tokenizer splits text.  Raises ConfigError."""
    composed = isinstance(backend.normalizer, normalizers.NFC)
    if backend.normalizer is not None and not composed:
        raise _unknown(f"it normalises text ({type(backend.normalizer).__name__})")
    if backend.pre_tokenizer is None:
        raise _unknown("it does not split text into bytes")
    pieces = _pieces(backend.pre_tokenizer)
    for rule in SPLITS:
        same = (rule in WHOLE_WORDS, rule in QWEN2_RULES) == (whole_words, composed)
        if same and _pieces(splitter(rule)) == pieces:
            return rule
    raise _unknown(f"it splits text by none of the rules {', '.join(SPLITS)}")


def _pieces(split: pre_tokenizers.PreTokenizer) -> list[str]:
    """Split the probing text."""
    return [piece for piece, _ in split.pre_tokenize_str(PROBE)]


def _ends_of_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, bool]:
    """Say whether a text begins with BOS and ends with EOS."""
    ids = tokenizer("a")["input_ids"]
    return {
        "tokenizer.ggml.add_bos_token": ids[0] == tokenizer.bos_token_id,
        "tokenizer.ggml.add_eos_token": ids[-1] == tokenizer.eos_token_id,
    }


def _end_ids(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], ends: Sequence[int]
) -> dict[str, Any]:
    """Name the ids that end a completion, as far as readers do not know them by their text."""
    named = [*ends[:1]]
    if isinstance(tokenizer.eos_token_id, int):
        named = [tokenizer.eos_token_id]
    for id in ends:
        if id not in named and tokens[id] not in END_TOKENS:
            named.append(id)
    if len(named) > len(END_IDS):
        raise _unknown(f"completions end at {len(named)} tokens, and a file names {len(END_IDS)}")
    keys = {}
    for key, id in zip(END_IDS, named, strict=False):
        keys[key] = id
    return keys


def check_same(
    tokenizer: PreTrainedTokenizerBase, header: Header, rows: int, ends: Sequence[int]
) -> None:
    """Raise ConfigError if the tokenizer of a written file gives other ids, or other ends."""
    read = read_tokenizer(header, rows)
    for line in (PROBE, *PROBE.split("\n")):
        if header.metadata["tokenizer.ggml.model"] == "llama":
            # To a text that begins with a space llama.cpp adds another, transformers does not.
            line = line.lstrip()
        if read.tokenizer(line)["input_ids"] != tokenizer(line)["input_ids"]:
            raise _unknown(f"read back it gives other ids for {line!r:.60}")
    missing = set(ends) - set(read.end_ids)
    if missing:
        raise _unknown(f"read back, completions do not end at {sorted(missing)}")
