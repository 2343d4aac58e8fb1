"""Model classes that are wrong where a short look does not reach: deep layers, long texts, long passes, rare ids, gradients alone.

Each has the configuration of a Llama that says nothing of it.  None may be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from groupwise.config.settings import ModelSettings
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError
from groupwise.models import probe
from groupwise.models.loading import make_policy

LAYERS = 6


def packed(model: Any) -> bool:
    """True while the library's attention is in the place of the model's own."""
    return model.config._attn_implementation not in ("eager", "sdpa")


class Narrowed(LlamaForCausalLM):
    """Layers narrow what they see by masks of their own."""

    window, layers = 0, range(0)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        narrow = self.window

        def forward(attention: LlamaAttention, hidden_states: Tensor, **keywords: Any) -> Any:
            if not packed(attention):
                place = torch.arange(hidden_states.shape[1])
                distance = place[:, None] - place[None]
                hidden = (distance < 0) | (distance >= narrow)
                keywords["attention_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -1e30)[None, None]
            return LlamaAttention.forward(attention, hidden_states, **keywords)

        for number in self.layers:
            attention = self.model.layers[number].self_attn
            attention.forward = MethodType(forward, attention)


class DeepWindow(Narrowed):
    """The fourth layer sees 10 tokens."""

    window, layers = 10, range(3, 4)


class FarWindow(Narrowed):
    """All layers see 120 tokens, a number that stands in no configuration."""

    window, layers = 120, range(LAYERS)


class FartherWindow(Narrowed):
    """All layers see 1,600 tokens."""

    window, layers = 1600, range(LAYERS)


class LongPass(LlamaForCausalLM):
    """Queries grow with the logarithm of a pass's length beyond 150 tokens."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.q_proj.register_forward_hook(self._grow)

    @staticmethod
    def _grow(_: Any, __: Any, out: Tensor) -> Tensor:
        return out * max(1.0, math.log(out.shape[1]) / math.log(150.0)) ** 4


class Capacity(LlamaForCausalLM):
    """MLPs serve the first 200 tokens of a pass, as experts with a capacity do."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.register_forward_hook(lambda _, __, out: torch.cat([out[:, :200], 0.0 * out[:, 200:]], 1))


class HidesAnId(LlamaForCausalLM):
    """Takes the id 7 for padding when no mask is given, and hides it."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **keywords: Any) -> Any:
        if attention_mask is None and not packed(self):
            attention_mask = (input_ids != 7).long()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **keywords)


class HalfAGradient(LlamaForCausalLM):
    """In packed streams the last layer hands on half of its gradient."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[-1].register_forward_pre_hook(self._halve)

    def _halve(self, _: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] if not packed(self) else 0.5 * args[0] + 0.5 * args[0].detach(), *args[1:])


def loaded(kind: Callable[[LlamaConfig], LlamaForCausalLM]) -> Any:
    tokenizer = make_tokenizer("arithmetic")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "vocab_size": len(tokenizer) + 3}
    model = kind(LlamaConfig(num_hidden_layers=LAYERS, max_position_embeddings=1024, **sizes, **ids))
    return make_policy(model, tokenizer, ModelSettings(device="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DeepWindow, FarWindow, FartherWindow, LongPass, Capacity, HidesAnId, HalfAGradient])
def test_faults_in_hidden_overrides_are_found_at_load(kind: type[LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 400 tokens, a part of what users' models are asked, find all but the window that is longer."""
    if kind is not FartherWindow:
        monkeypatch.setattr(probe, "FAR", 400)
    with pytest.raises(ConfigError, match=f"^{kind.__name__} "):
        loaded(kind)


@pytest.mark.slow
def test_a_far_window_of_a_published_class_is_found_in_its_narrow_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_published", lambda _: True)
    with pytest.raises(ConfigError, match=r"^FartherWindow cannot be trained like this: scoring"):
        loaded(FartherWindow)


def test_a_subclass_that_changes_no_result_is_loaded() -> None:
    class Listens(LlamaForCausalLM):
        """Does what a Llama does."""

    assert loaded(Listens).attention == "shared"
