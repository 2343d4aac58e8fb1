import json

import pytest

from groupwise.data.tokenizers import CHAT_TEMPLATE, arithmetic_tokenizer


@pytest.fixture
def tokenizer():
    return arithmetic_tokenizer()


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSONL, or raw bytes or text, and returns the path."""

    def write(content, name="rows.jsonl") -> str:
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
        elif name.endswith(".json"):
            path.write_text(json.dumps(content))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(path)

    return write


@pytest.fixture
def word_tokenizer():
    """Builds a word-level tokenizer as checkpoints have them: with or without BOS, EOS behind strings, a chat template with BOS."""

    def build(*, bos_on_strings=True, eos_on_strings=False, bos_in_template=True, pad="<pad>"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        special = ["<pad>", "<bos>", "<eos>", "<unk>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>"]
        words = ["what", "is", "two", "three", "plus", " "]
        core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(special + words)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
        core.decoder = decoders.Fuse()
        core.add_special_tokens(special)
        before, behind = "<bos> " * bos_on_strings, " <eos>" * eos_on_strings
        core.post_processor = processors.TemplateProcessing(
            single=f"{before}$A{behind}", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
        built = PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token=pad, unk_token="<unk>"
        )
        built.chat_template = "{{ bos_token }}" * bos_in_template + CHAT_TEMPLATE
        return built

    return build
