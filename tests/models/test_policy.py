"""Checkpoints in: what is wrong with one is said in a sentence, and never filled with random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging as its

from groupwise.config.settings import ModelSettings
from groupwise.errors import ConfigError, Diverged
from groupwise.models.loading import load_policy, read_blueprint
from groupwise.models.saving import save
from groupwise.models.shape import Shape
from groupwise.models.streaming import check_finite
from groupwise.runs.run_models import weightless


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def without_a_weight(file: Path) -> None:
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}, file, {"format": "pt"})


def of_another_shape(file: Path) -> None:
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1.mlp.up_proj" in name)
    save_file(tensors | {name: torch.zeros(3, 3)}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "cannot be read: .*incomplete"),
        (Path.unlink, "cannot be read: .*no file named model.safetensors"),
        (without_a_weight, r"lack model\.layers\.1\.mlp\.up_proj\.weight: fetch or copy them again"),
        (of_another_shape, "cannot be read: .*fetch or copy them again"),
    ],
)
def test_damaged_weights_are_refused(damage: Callable[[Path], None], said: str, tiny_policy: Callable, tmp_path: Path) -> None:
    save(tiny_policy(), tmp_path)
    load_policy(ModelSettings(path=str(tmp_path)))
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        load_policy(ModelSettings(path=str(tmp_path)))


def test_a_number_that_is_none_is_found_and_sums_may_overflow(tiny_policy: Callable) -> None:
    model = tiny_policy().model
    weight = model.lm_head.weight.data
    weight[:2, :2] = 3e38
    check_finite(model)
    for number in (float("nan"), float("inf"), -float("inf")):
        weight[1, 1] = number
        with pytest.raises(Diverged, match=r"parameter .* holds numbers that are not finite"):
            check_finite(model)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "KeyError: 'spiral'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "KeyError: .*'factor'"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, "hidden size .* is not a multiple"),
        ("llama", {"hidden_size": "32"}, "'hidden_size' expected int"),
        ("llama", {"hidden_act": "glu9"}, "KeyError: 'glu9'"),
        ("llama", {"model_type": "phi3"}, "must be one of \\['longrope'\\]"),
    ],
)
def test_configurations_that_describe_no_model_are_refused_in_words(
    family: str, changes: dict[str, Any], said: str, tiny_policy: Callable, tmp_path: Path
) -> None:
    save(tiny_policy(family), tmp_path)
    file = tmp_path / "config.json"
    if "model_type" in changes:  # a rope that the other family does not know
        changes = changes | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=rf"config.json of .* describes no model that can be built .*{said}"):
        load_policy(ModelSettings(path=str(tmp_path)))


def test_the_plan_of_a_configuration_that_describes_no_model_is_refused_in_words(tiny_policy: Callable, tmp_path: Path) -> None:
    save(tiny_policy(), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "glu9"}))
    with pytest.raises(ConfigError, match=r"describes no model that can be built .KeyError: 'glu9'.: correct it"):
        weightless(read_blueprint(ModelSettings(path=str(tmp_path))))


def test_weights_that_nothing_uses_are_named(tiny_policy: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tiny_policy(), tmp_path)
    load_policy(ModelSettings(path=str(tmp_path)))
    assert "nothing uses" not in caplog.text
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    load_policy(ModelSettings(path=str(tmp_path)))
    assert "nothing uses model.layers.1.input_layernorm.weight and 8 more of the weights" in caplog.text


def test_loaded_weights_lie_as_others_do(tiny_policy: Callable, tmp_path: Path) -> None:
    """In a file they begin anywhere, and torch's products round by where numbers begin: a resumed run would compute otherwise."""
    save(tiny_policy(), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for more in range(0, 64, 8):
        save_file(tensors, file, {"format": "pt", "more": "x" * more})
        loaded = load_policy(ModelSettings(path=str(tmp_path))).model
        assert {parameter.data_ptr() % 64 for parameter in loaded.parameters()} == {0}


def test_a_folder_without_a_tokenizer_says_so(tiny_policy: Callable, tmp_path: Path) -> None:
    save(tiny_policy(), tmp_path)
    for file in (*tmp_path.glob("tokenizer*"), *tmp_path.glob("chat_template*")):
        file.unlink()
    with pytest.raises(ConfigError, match=r"holds no tokenizer .* copy the tokenizer files of the model that it was made from"):
        load_policy(ModelSettings(path=str(tmp_path)))


def test_a_shape_is_read_off_every_form_of_a_config() -> None:
    mamba = {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
    assert Shape.of(mamba, 100, dtype="float32").heads == 0
    bart = {
        "model_type": "bart",
        "d_model": 8,
        "decoder_layers": 3,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "vocab_size": 9,
    }
    shape = Shape.of(bart | {"decoder_ffn_dim": 24}, 100, dtype="float32")
    assert (shape.hidden, shape.layers, shape.heads, shape.head_width, shape.intermediate) == (8, 3, 2, 4, 24)
    unheard = {"model_type": "unheard", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 9}
    assert Shape.of(unheard, 100, dtype="float32").head_width == 4
    with pytest.raises(ConfigError, match="names no hidden_size or num_hidden_layers"):
        Shape.of({"model_type": "unheard", "vocab_size": 9}, 100, dtype="float32")


def test_loading_leaves_transformers_as_it_was(tiny_policy: Callable, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever uses the library has settings of his own; its bars are shown by no load or save of ours."""
    save(tiny_policy(), tmp_path / "model")
    bars, filters = its.is_progress_bar_enabled(), [list(handler.filters) for handler in its.get_logger("transformers").handlers]
    its.enable_progress_bar()
    try:
        save(load_policy(ModelSettings(path=str(tmp_path / "model"))), tmp_path / "again")
        assert its.is_progress_bar_enabled()
        assert [list(handler.filters) for handler in its.get_logger("transformers").handlers] == filters == [[]] * len(filters)
        assert "%|" not in capfd.readouterr().err
    finally:
        if not bars:
            its.disable_progress_bar()
