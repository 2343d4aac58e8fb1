"""Low-rank adapters (LoRA, 2106.09685) through peft: small matrices are trained beside weights that
are never touched.

The model stays the class it was, with peft's layers in place of its linear ones, so everything that
runs a model runs this one. The reference is the same model with its adapter off: it costs no
memory, and it is what the run started from, also where that was an adapter itself, because adapters
that are given are merged when they are read.

What is exported is an ordinary model with the adapter merged into it (in a copy), and the adapter
in peft's own format beside it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.config.settings import LoraSettings
from groupwise.errors import ConfigError
from groupwise.models.policy import Adapter, Policy
from groupwise.utils.spelling import nearest
from groupwise.utils.terminal import logger

log = logger(__name__)

ADAPTER, FOLDER, FILE = "default", "adapter", "adapter_model.safetensors"
CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
"""Modules whose weights have three dimensions and are no experts."""
PREFIX = "base_model.model."
"""peft's, before every name in its files."""
ADAPTER_CONFIG = "adapter_config.json"
"""Marks a folder as a low-rank adapter in peft's format."""


def keep_adapter(policy: Policy, folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write the adapter alone: its base is where it was.

    parameters: at least the trained ones.
    """
    write_adapter(policy, folder, parameters)
    policy.model.config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def write_adapter(policy: Policy, folder: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write the adapter in peft's format.   parameters: at least the trained ones."""
    assert policy.adapter is not None
    folder.mkdir(exist_ok=True)
    policy.adapter.config.save_pretrained(str(folder))
    trained = {
        _file_name(name): parameters[name].detach().cpu().contiguous()
        for name in policy.adapter.trained
    }
    save_file(trained, folder / FILE)


def restore_adapter(policy: Policy, folder: Path) -> None:
    """Take over an adapter that `keep_adapter` wrote, bit for bit."""
    assert policy.adapter is not None
    saved = load_file(folder / FILE)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:
                parameter.copy_(saved[_file_name(name)])


def adapt(policy: Policy, lora: LoraSettings, *, base: str, seed: int = 0) -> Policy:
    """Put a new adapter into a policy's model, which is used up by it; at first it changes nothing.

    base: where the weights come from, for the adapter's file.
    seed: of the first of its two factors; the second is 0.   A score head goes on being trained.
    Raises ConfigError if peft is not there, or if the adapter would lie on the embedding, the
    output head or stacked experts."""
    model = policy.model
    config = _config(lora, base, scores=isinstance(getattr(model, "score", None), nn.Module))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject(model, config)
    for name, module in model.named_modules():
        if _is_adapted(module) and type(module.base_layer) not in (nn.Linear, Conv1D):
            raise ConfigError(
                f"model.lora: an adapter can lie on linear layers, not on {name}"
                f" ({type(module.base_layer).__name__}): name the layers, e.g."
                " model.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
            )
    if (head := model.get_output_embeddings()) is not None and _is_adapted(head):
        raise ConfigError(
            "model.lora: its targets reach the output head, which is read whole: leave it out"
        )
    if isinstance(score := getattr(model, "score", None), nn.Module):
        score.requires_grad_(True)
        config.modules_to_save = ["score"]  # for the file: peft would otherwise wrap it
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    _name_bare_experts(model)
    return replace(policy, adapter=LoraAdapter(config=config, trained=trained))


def _name_bare_experts(model: nn.Module) -> None:
    """Warn of experts that lie stacked in one parameter: peft adapts layers, so they stay."""
    bare = []
    for module_name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                bare.append((f"{module_name}.{name}", parameter.numel()))
    if not bare:
        return
    share = sum(numel for _, numel in bare) / sum(x.numel() for x in model.parameters())
    log.warning(
        "model.lora: the experts get no adapter and stay as they are (%s and %d more, %.0f%% of the"
        " model's parameters): train without model.lora to train them too",
        bare[0][0],
        len(bare) - 1,
        100.0 * share,
    )


def inject(model: nn.Module, config: Any) -> None:
    """Replace the linear layers that a peft configuration names, and freeze all other weights.
    Raises ConfigError.
    """
    config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in model.modules())
    if (
        config.target_modules == "all-linear"
    ):  # of a model that reads images too, those that are trained
        frozen = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not module.weight.requires_grad
        ]
        config.exclude_modules = frozen or None
    _check_targets(model, config.target_modules)
    try:
        _peft().inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(f"model.lora: {str(error).splitlines()[0]}") from error
    # Adapters in the type of the weights: shards of one block must not differ in type.
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(next(model.parameters()).dtype)


def _check_targets(model: nn.Module, targets: str | Iterable[str]) -> None:
    """Raises ConfigError for a name that is no layer's: peft leaves one out without a word where
    another is there.
    """
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        raise ConfigError(
            f"model.lora.targets must be all-linear or a list of names, got the text {targets!r}:"
            f" write [{targets}]"
        )
    linear = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    called = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    for target in sorted(targets):
        if not any(
            name == target or name.endswith(f".{target}") for name, _ in model.named_modules()
        ):
            near = nearest(target, linear if "." in target else called)
            meant = "" if near is None else f" (did you mean {near}?)"
            raise ConfigError(
                f"model.lora.targets: no layer of the model is called {target!r}{meant}; its linear"
                f" layers are called {', '.join(called)}"
            )


def adapter_size(model: PreTrainedModel, lora: LoraSettings) -> int:
    """Parameters that an adapter would add to a model, which may be on the meta device and is used
    up by it.
    """
    inject(model, _config(lora, "", scores=False))
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A base model with the adapter of a folder (peft's format) merged into its weights.  Raises
    ConfigError.
    """
    peft = _peft()
    try:
        return peft.PeftModel.from_pretrained(model, folder).merge_and_unload().requires_grad_(True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the adapter {folder!r} does not fit its base: {str(error).splitlines()[0]}"
        ) from error


def read_adapter(folder: Path) -> str:
    """The base model of an adapter's folder.  Raises ConfigError if its file does not name one, or
    if it is no language model's.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base, task = config.get("base_model_name_or_path"), config.get("task_type")
    if not base:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} names no base_model_name_or_path: write the base model's"
            " folder there"
        )
    if task not in (None, "CAUSAL_LM"):
        raise ConfigError(
            f"{folder} is an adapter for {task}, not for a language model: give the merged model's"
            " folder"
        )
    return str(base)


def _config(lora: LoraSettings, base: str, *, scores: bool) -> Any:
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapters need peft, which is not installed: pip install peft") from error
    return peft


def _is_adapted(module: nn.Module) -> bool:
    return "lora_A" in module._modules


def _file_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.", ".")


class LoraAdapter(Adapter):
    """A low-rank adapter by peft's layers."""

    __slots__ = ()

    @contextmanager
    def off(self, model: PreTrainedModel) -> Iterator[None]:
        """See `Adapter.off`."""
        layers: list[Any] = [module for module in model.modules() if _is_adapted(module)]
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def plain_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """See `Adapter.plain_model`."""
        return model_without_layers(model, merge=False)

    def added_weights(self, model: PreTrainedModel) -> dict[str, Callable[[], Tensor]]:
        """See `Adapter.added_weights`."""
        functions: dict[str, Callable[[], Tensor]] = {}
        for name, module in model.named_modules():
            layer: Any = module
            if _is_adapted(layer):
                functions[name] = partial(layer.get_delta_weight, ADAPTER)
        return functions


def model_without_layers(model: PreTrainedModel, *, merge: bool) -> PreTrainedModel:
    """A model of the same class without the adapter's layers.   merge: with the adapter in its
    weights, which alone are copied.
    """
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        layer = name.rpartition(".base_layer.")[0]
        if layer in adapted and name.endswith(".base_layer.weight"):
            if merge:
                delta: Any = adapted[layer].get_delta_weight(ADAPTER)  # type: ignore[operator]
                tensor = (tensor + delta).to(tensor.dtype)
            weights[f"{layer}.weight"] = tensor
        elif ".lora_" not in name:
            weights[name.replace(".base_layer.", ".")] = tensor
    with torch.device("meta"):
        plain = type(model)(copy.deepcopy(model.config))
    plain.load_state_dict(weights, strict=True, assign=True)
    for (
        name,
        buffer,
    ) in model.named_buffers():  # those that no file holds, as tables of rotary embeddings
        if name not in weights:
            place, _, last = name.rpartition(".")
            plain.get_submodule(place)._buffers[last] = buffer
    plain.tie_weights()
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain
