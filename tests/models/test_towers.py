"""Checkpoints that read images too: the text part is trained and sampled, what reads images is saved as it was."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sample_texts import TOKENIZER
from transformers import AutoModelForImageTextToText, Gemma4VisionConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from groupwise.config.settings import LoraSettings, ModelSettings
from groupwise.data.packing import pack
from groupwise.models.loading import load_policy, read_blueprint
from groupwise.models.lora import adapt, adapter_size
from groupwise.models.passes import forward
from groupwise.models.saving import save
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE
from groupwise.records import Sample
from groupwise.runs.run_models import weightless

TEXT = ("language_model.", "lm_head.")
"""In the names of the parameters that are trained."""
FAST, OTHERS = ("qwen3_5",), ("qwen3_5_moe", "gemma3", "gemma4", "mistral3", "llama4")
MODELS = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def families() -> ModuleType:
    """tests/models/families.py, which knows how to make a configuration small."""
    if "families" not in sys.modules:
        spec = importlib.util.spec_from_file_location("families", Path(__file__).with_name("families.py"))
        assert spec is not None and spec.loader is not None
        sys.modules["families"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["families"])
    return sys.modules["families"]


def published(name: str, folder: Path) -> PreTrainedModel:
    """A small random checkpoint, as the real ones are published: of the whole model."""
    size = len(TOKENIZER), TOKENIZER.eos_token_id
    tower = {}
    if name == "gemma4":  # by default it has none
        tower = {"vision_config": families().shrunken(Gemma4VisionConfig(), *size) | {"model_type": "gemma4_vision"}}
    config = families().config_of(name, *size, **tower)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = TOKENIZER.eos_token_id
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_text_part_is_trained_and_what_reads_images_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    model = published(name, tmp_path / "before")
    policy = load_policy(ModelSettings(path=str(tmp_path / "before"), device="cpu"))
    assert type(policy.model).__name__ == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]
    assert {"scoring", "training", "sampling"} <= set(prove(policy, longest=24, sampler=NATIVE).paths)
    numbers = torch.ones(3, dtype=torch.float64).numpy()
    sample = Sample(
        group="a",
        prompt=torch.arange(5, 9).numpy(),
        completion=torch.arange(9, 12).numpy(),
        weight=numbers,
        advantage=numbers,
        behavior_logp=numbers,
    )
    (batch,) = pack([sample], 100, dtype=policy.dtype)
    forward(policy, batch).hidden_PD.square().sum().backward()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                assert parameter.requires_grad
                parameter -= 0.1 * parameter.grad + 0.01
    save(policy, tmp_path / "after")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "after")
    assert type(again) is type(model)
    before, after = dict(model.named_parameters()), dict(again.named_parameters())
    assert before.keys() == after.keys()
    others = [name for name in before if not any(part in name for part in TEXT)]
    assert others and all(torch.equal(before[name], after[name]) for name in others)
    assert any(not torch.equal(before[name], after[name]) for name in before if name not in others)
    configs = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("before", "after"))
    assert len({config["architectures"][0] for config in configs}) == 1


def test_an_adapter_of_all_layers_lies_on_the_text_part_alone(tmp_path: Path) -> None:
    published("qwen3_5", tmp_path)
    settings = ModelSettings(path=str(tmp_path), device="cpu")
    lora = LoraSettings(targets="all-linear")
    adapted = adapt(load_policy(settings), lora, base="x")
    assert adapted.adapter.trained and all("language_model." in name for name in adapted.adapter.trained)
    sizes = {name: parameter.numel() for name, parameter in adapted.model.named_parameters()}
    planned = adapter_size(weightless(read_blueprint(settings)), lora).parameters
    assert planned == sum(sizes[name] for name in adapted.adapter.trained)
