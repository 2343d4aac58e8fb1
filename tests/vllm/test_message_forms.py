"""What `message_forms.json` holds is what vLLM answers; the fast tests hold the endpoint's answers against it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import message_forms as forms
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .conftest import start_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PARSERS = (
    "--",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "qwen3",
    "--api-key",
    forms.SECRET,
)


def save_scripted_model(folder: Path) -> None:
    """A Llama without attention or MLP: its head reads the last token alone."""
    tokenizer = forms.scripted_tokenizer()
    following = forms.successors(tokenizer)
    width = 64
    assert len(following) <= width
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=forms.CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("embed_tokens.weight", "lm_head.weight", "o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        for place, (id, next_id) in enumerate(following.items()):
            model.get_input_embeddings().weight[id, place] = 1.0
            model.get_output_embeddings().weight[next_id, place] = 10.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where vLLM serves the scripted model."""
    folder = tmp_path_factory.mktemp("scripted")
    save_scripted_model(folder / "model")
    with start_server(folder / "model", folder / "log", *PARSERS) as (url, _):
        yield url


def test_vllm_answers_as_it_was_recorded(address: str, tmp_path: Path) -> None:
    """If it does not any more: read the new answers, and put the file in the old one's place."""
    model = forms.model_of(address)
    answers = {name: case.asked(address, model) for name, case in forms.cases().items()}
    text = json.dumps(answers, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    (tmp_path / forms.RECORDED.name).write_text(text, encoding="utf-8")
    recorded = json.loads(forms.RECORDED.read_text(encoding="utf-8"))
    changed = [name for name in {**answers, **recorded} if answers.get(name) != recorded.get(name)]
    assert not changed, f"{changed}: see {tmp_path / forms.RECORDED.name}"
