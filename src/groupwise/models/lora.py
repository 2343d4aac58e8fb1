"""Low-rank adapters (LoRA, 2106.09685) through peft: small matrices are trained beside weights that
are never touched, or whole modules beside their originals.

The model stays the class it was, with peft's layers in place of its linear ones, so everything that
runs a model runs this one. The reference is the same model with its adapter off: it costs no
memory, and it is what the run started from, also where that was an adapter itself, because adapters
that are given are merged when they are read.

What is exported is an ordinary model with the adapter merged into it (in a copy), and the adapter
in peft's own format beside it."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from groupwise.models.lora_dropout import DroppingLoss, put_dropout
from groupwise.models.moe import BALANCE, router_coefficient
from groupwise.models.policy import Adapter, Policy
from groupwise.models.quantized import (
    QuantizedLinear,
    note_format,
    quantized_layers,
    quantized_name,
)
from groupwise.records import Sample
from groupwise.utils.spelling import nearest
from groupwise.utils.terminal import logger

log = logger(__name__)

ADAPTER, FOLDER, FILE = "default", "adapter", "adapter_model.safetensors"
CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
"""Modules whose weights have three dimensions and are no experts."""
PREFIX = "base_model.model."
"""peft's, before every name in its files."""
ORIGINAL, COPY = ".original_module.", f".modules_to_save.{ADAPTER}."
"""Parts of names of parameters: of a module that was copied, and of the copy that is trained."""
ALL_LINEAR = "all-linear"
LINEAR = (nn.Linear, Conv1D)
"""Layers that an adapter can lie on, and that can be trained whole."""
ADAPTABLE = (*LINEAR, QuantizedLinear)
"""Layers that an adapter can lie on."""
ADAPTER_CONFIG = "adapter_config.json"
"""Marks a folder as a low-rank adapter in peft's format."""
SCORING = "SEQ_CLS"
"""Task in peft's file of an adapter that belongs to a scoring model."""
SCALES = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Keys of peft's file that say what an adapter's product is multiplied by."""


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
    note_format(policy.model, folder)


def restore_adapter(policy: Policy, folder: Path) -> None:
    """Take over an adapter that `keep_adapter` wrote, bit for bit."""
    assert policy.adapter is not None
    saved = load_file(folder / FILE)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if name in policy.adapter.trained:
                parameter.copy_(saved[_file_name(name)])


def adapter_folder(folder: Path) -> Path:
    """Return the folder of the adapter beside a merged model, or the folder itself."""
    beside = folder / FOLDER
    return beside if beside.is_dir() else folder


def take_over_adapter(policy: Policy, folder: Path) -> None:
    """Give a policy's adapter the numbers of one in peft's format.

    Raises ConfigError if there is none, or one of another form or for a base that was quantised
    otherwise.
    """
    assert policy.adapter is not None
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"model.lora.start: there is no {FILE} in {folder}: name an adapter's folder, or a"
            " stage that trains one (model.lora)"
        )
    layers = list(quantized_layers(policy.model).values())
    base = layers[0].format.name if layers else None
    start_base = quantized_name(folder)
    if start_base != base:
        raise ConfigError(
            f"model.lora.start: the base under {folder} was quantised as {start_base}, here it is"
            f" {base}: set model.quantize to {start_base or 'null'}"
        )
    saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    _demand_same_kind(folder, saved.get("task_type") == SCORING, policy)
    start_shapes = {name: tensor.shape for name, tensor in load_file(folder / FILE).items()}
    shapes: dict[str, torch.Size] = {}
    for name, parameter in policy.model.named_parameters():
        if name in policy.adapter.trained:
            shapes[_file_name(name)] = parameter.shape
    config, plain = policy.adapter.config, _peft().LoraConfig()
    differences = []
    for key in SCALES:  # a file of an older peft has fewer keys
        start, here = saved.get(key, getattr(plain, key)), getattr(config, key)
        if start != here:
            differences.append(f"{key} is {start} there and {here} here")
    if start_shapes.keys() != shapes.keys():
        unmatched = sorted(start_shapes.keys() ^ shapes.keys())
        where = "there" if unmatched[0] in start_shapes else "here"
        differences.append(f"{unmatched[0]} is {where} alone")
    elif not differences and start_shapes != shapes:
        name = next(name for name in shapes if start_shapes[name] != shapes[name])
        sides = f"{tuple(start_shapes[name])} there and {tuple(shapes[name])} here"
        differences.append(f"{name} has the sides {sides}")
    if differences:
        raise ConfigError(
            f"model.lora.start: the adapter in {folder} has another form than the one that"
            f" model.lora describes: {'; '.join(differences)}. Give model.lora the settings of that"
            f" adapter ({folder / ADAPTER_CONFIG}), and model.path its base"
        )
    start_path, path = saved.get("base_model_name_or_path"), config.base_model_name_or_path
    if start_path != path:
        log.warning(
            "model.lora.start: the adapter in %s was trained on %s, and goes on here on %s: set"
            " model.path to its base",
            folder,
            start_path,
            path,
        )
    restore_adapter(policy, folder)


def _demand_same_kind(folder: Path, start_scores: bool, policy: Policy) -> None:
    """Raise ConfigError where an adapter of a language model meets a scoring model, or the reverse.

    start_scores: the adapter of the folder is a scoring model's.
    """
    scores = isinstance(getattr(policy.model, "score", None), nn.Module)
    if scores == start_scores:
        return
    if start_scores:
        raise ConfigError(
            f"model.lora.start: the adapter in {folder} belongs to a scoring model (reward, prm),"
            " and this run trains a language model, which cannot go on with it: name the adapter of"
            " a language model, or leave model.lora.start out"
        )
    left_out = "model.lora.start"
    if quantized_layers(policy.model):  # merged weights are not rounded again
        left_out += " and model.quantize"
    raise ConfigError(
        f"model.lora.start: the adapter in {folder} belongs to a language model, and this run"
        " trains a scoring model, whose adapter has a score head too. Begin with the merged model"
        " and a new adapter: set model.path to the folder of the merged model, or to stage:NAME,"
        f" and leave {left_out} out"
    )


def adapt(policy: Policy, lora: LoraSettings, *, base: str, seed: int = 0) -> Policy:
    """Put a new adapter into a policy's model, which is used up by it; at first it changes nothing.

    base: where the weights come from, for the adapter's file.
    seed: of the first of its two factors, and of the masks of dropout; the second factor is 0.
    A score head goes on being trained.
    Raises ConfigError if peft is not there, if the adapter would lie on the embedding, the output
    head or stacked experts, or if dropout could not be exact."""
    model = policy.model
    score = getattr(model, "score", None)
    config = _config(model, lora, base)
    if lora.dropout:
        _check_dropout(policy)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject(model, config)
    _check_patterns(model, lora)
    for name, module in model.named_modules():
        if _is_adapted(module) and type(module.base_layer) not in ADAPTABLE:
            raise ConfigError(
                f"model.lora: an adapter can lie on linear layers, not on {name}"
                f" ({type(module.base_layer).__name__}): name the layers, e.g."
                " model.lora.targets=[q_proj,k_proj,v_proj,o_proj]"
            )
    if (head := model.get_output_embeddings()) is not None and _is_adapted(head):
        raise ConfigError(
            "model.lora: its targets reach the output head, which is read whole: leave it out, or"
            " train all of it with model.lora.modules_to_save"
        )
    if lora.dropout:
        put_dropout(model, lora.dropout, ADAPTER)
    if isinstance(score, nn.Module):
        score.requires_grad_(True)
        # For the file: peft would otherwise wrap it.
        config.modules_to_save = ["score", *(config.modules_to_save or ())]
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    _name_bare_experts(model)
    return replace(policy, adapter=LoraAdapter(config=config, trained=trained, seed=seed))


def _check_dropout(policy: Policy) -> None:
    """Raise ConfigError for a policy whose passes could not draw the masks of separate rows."""
    if policy.attention == "single":
        raise ConfigError(
            "model.lora.dropout draws masks for packed streams, but model.attention is 'single':"
            " set dropout to 0"
        )
    if router_coefficient(policy) > 0.0:
        raise ConfigError(
            "model.lora.dropout: the loss that balances experts counts their tokens in a pass"
            f" without dropout: set dropout to 0, or {BALANCE}"
        )


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
    if config.target_modules == ALL_LINEAR:
        # Of a model that reads images too, those that are trained.
        frozen = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or type(module) is QuantizedLinear:
                continue
            if not module.weight.requires_grad:
                frozen.append(name)
        config.exclude_modules = frozen or None
    elif isinstance(config.target_modules, str):
        _check_pattern(model, config.target_modules)
    else:
        _check_targets(model, sorted(config.target_modules))
    _check_copied(model, config.modules_to_save or ())
    try:
        with warnings.catch_warnings():
            # Of a copy of a matrix that embedding and head share; both are saved.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            _peft().inject_adapter_in_model(config, model, ADAPTER)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.lora: {str(error).splitlines()[0]}") from error
    # Adapters in the type of the weights: shards of one block must not differ in type.
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(next(model.parameters()).dtype)


def linear_layers(model: nn.Module) -> list[str]:
    """The names of a model's linear layers, without the output head."""
    return [
        name
        for name, module in model.named_modules()
        if type(module) in ADAPTABLE and module is not _head_of(model)
    ]


def _head_of(model: Any) -> nn.Module | None:
    """A language model's output head, or a reward model's score head."""
    score = getattr(model, "score", None)
    return score if isinstance(score, nn.Module) else model.get_output_embeddings()


def _last_parts(names: Sequence[str]) -> list[str]:
    """What modules are called without their place, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _called(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that a name means: by the whole of it, or by its last parts."""
    return [
        module
        for place, module in model.named_modules()
        if place == name or place.endswith(f".{name}")
    ]


def _check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no layer's: peft leaves one out without a word where
    another is there.
    """
    linear = linear_layers(model)
    called = _last_parts(linear)
    for target in targets:
        if not _called(model, target):
            near = nearest(target, linear if "." in target else called)
            meant = "" if near is None else f" (did you mean {near}?)"
            raise ConfigError(
                f"model.lora.targets: no layer of the model is called {target!r}{meant}; its linear"
                f" layers are called {', '.join(called)}"
            )


def _check_pattern(model: nn.Module, pattern: str) -> None:
    """Raises ConfigError for a text that is no regular expression, or the whole name of no linear
    layer.
    """
    linear = linear_layers(model)
    try:
        matches = any(re.fullmatch(pattern, name) for name in linear)
    except re.error as error:
        raise ConfigError(
            f"model.lora.targets: {pattern!r} is no regular expression ({error})"
        ) from error
    if matches:
        return
    remedy = f"its linear layers are called {', '.join(_last_parts(linear))}"
    if _called(model, pattern):
        remedy = f"write [{pattern}] for the layers of that name"
    raise ConfigError(
        f"model.lora.targets: the pattern {pattern!r} is the whole name of no linear layer, such as"
        f" {linear[0]}: {remedy}"
    )


def _check_patterns(model: nn.Module, lora: LoraSettings) -> None:
    """Raises ConfigError for a rank or an alpha of a layer that has no adapter."""
    adapted = [name for name, module in model.named_modules() if _is_adapted(module)]
    for key, patterns in (("rank", lora.rank_pattern), ("alpha", lora.alpha_pattern)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted):
                raise ConfigError(
                    f"model.lora.{key}_pattern: {pattern!r} names no layer with an adapter, such as"
                    f" {adapted[0]}"
                )


def _check_copied(model: nn.Module, names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is no embedding's or linear layer's."""
    for name in names:
        modules = _called(model, name)
        kinds = {type(module) for module in modules}
        if modules and kinds <= {nn.Embedding, *LINEAR}:
            continue
        wrong = "no module of the model has that name"
        if QuantizedLinear in kinds:
            wrong = "model.quantize has frozen it in few bits"
        elif modules:
            wrong = f"a {type(modules[0]).__name__} is no embedding and no linear layer"
        raise ConfigError(
            f"model.lora.modules_to_save: {name!r}: {wrong}; embeddings and linear layers are"
            f" trained whole, e.g. [{', '.join(_ends_of(model))}]"
        )


def _ends_of(model: Any) -> list[str]:
    """The names of a model's embedding and output head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if module in ends]


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """What an adapter adds to a model."""

    parameters: int
    """Numbers that are trained, copies of whole modules included."""
    inputs: int
    """Numbers that all of its layers read of a position."""
    ranks: int = 0
    """Numbers between its two factors of a position, over all layers."""
    factors: tuple[int, ...] = ()
    """Numbers of each trained parameter."""


def adapter_size(model: PreTrainedModel, lora: LoraSettings) -> AdapterSize:
    """What an adapter would add to a model, which may be on the meta device and is used up by it.

    Raises ConfigError.
    """
    inject(model, _config(model, lora, ""))
    inputs, ranks, factors = 0, 0, list[int]()
    for name, parameter in model.named_parameters():
        if ".lora_" in name or COPY in name:
            factors.append(parameter.numel())
    for module in model.modules():
        if _is_adapted(module):
            layer: Any = module
            inputs += layer.in_features
            ranks += layer.r[ADAPTER]
    return AdapterSize(sum(factors), inputs, ranks, tuple(factors))


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """A base model with the adapter of a folder (peft's format) merged into its weights.  Raises
    ConfigError.
    """
    peft = _peft()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(Model|Input and output embeddings) .*tie")
            merged = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the adapter {folder!r} does not fit its base: {str(error).splitlines()[0]}"
        ) from error
    if is_untied(merged):
        untie(merged.config)
    return merged.requires_grad_(True)


def is_untied(model: PreTrainedModel) -> bool:
    """True if the config ties embedding and head, and a copy of one of them is trained."""
    config: Any = model.config
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    # The config of a text part need not say it, as Qwen3-VL's.
    inner = getattr(config.get_text_config(), "tie_word_embeddings", False)
    tied = config.tie_word_embeddings or inner
    return bool(tied) and head is not None and head.weight is not embedding.weight


def untie(config: Any) -> None:
    """Note in a config that embedding and head are two matrices."""
    config.tie_word_embeddings = False
    config.get_text_config().tie_word_embeddings = False


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


def _config(model: PreTrainedModel, lora: LoraSettings, base: str) -> Any:
    """The settings as peft's configuration.  Raises ConfigError."""
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    if lora.layers:
        blocks = model.config.get_text_config().num_hidden_layers
        if max(lora.layers) >= blocks:
            raise ConfigError(
                f"model.lora.layers: the model has {blocks} blocks, the last is {blocks - 1}; got"
                f" {max(lora.layers)}"
            )
        if targets == ALL_LINEAR:  # peft takes numbers of blocks with names alone
            targets = _last_parts(linear_layers(model))
    scores = isinstance(getattr(model, "score", None), nn.Module)
    copied = [name for name in lora.modules_to_save if not (scores and name == "score")]
    return _peft().LoraConfig(
        r=lora.rank,
        lora_alpha=_whole(lora.alpha),
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        target_modules=targets,
        layers_to_transform=list(lora.layers) or None,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern={name: _whole(alpha) for name, alpha in lora.alpha_pattern.items()},
        modules_to_save=copied or None,
        task_type=SCORING if scores else "CAUSAL_LM",
        base_model_name_or_path=base,
    )


def _whole(alpha: float) -> float:
    """An alpha as peft's files have it."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapters need peft, which is not installed: pip install peft") from error
    return peft


def _is_adapted(module: nn.Module) -> bool:
    return "lora_A" in module._modules


def _is_copied(module: nn.Module) -> bool:
    """True for peft's pair of an original module and its trained copy."""
    return "original_module" in module._modules


def _file_name(name: str) -> str:
    return PREFIX + name.replace(COPY, ".").replace(f".{ADAPTER}.", ".")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraAdapter(Adapter):
    """A low-rank adapter by peft's layers."""

    seed: int
    """The seed of dropout's masks."""

    @contextmanager
    def off(self, model: PreTrainedModel) -> Iterator[None]:
        """See `Adapter.off`."""
        layers: list[Any] = [x for x in model.modules() if _is_adapted(x) or _is_copied(x)]
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def module_in_use(self, module: Any, *, on: bool) -> Any:
        """See `Adapter.module_in_use`."""
        if not _is_copied(module):
            return module
        return module.modules_to_save[ADAPTER] if on else module.original_module

    def with_dropout(self, loss: Callable[..., Any], samples: Sequence[Sample], step: int) -> Any:
        """See `Adapter.with_dropout`."""
        if not self.config.lora_dropout:
            return loss
        return DroppingLoss(loss, samples, f"{self.seed}/{step}")

    def plain_model(self, model: PreTrainedModel, *, on: bool) -> PreTrainedModel:
        """See `Adapter.plain_model`."""
        return model_without_layers(model, on=on, merge=False, bare=on)

    def added_weights(self, model: PreTrainedModel) -> dict[str, Callable[[], Tensor]]:
        """See `Adapter.added_weights`."""
        functions: dict[str, Callable[[], Tensor]] = {}
        for name, quantized in quantized_layers(model).items():
            functions[name] = partial(quantized.dequantized, dtype_of(model))
        for name, module in model.named_modules():
            layer: Any = module
            if _is_adapted(layer):
                functions[name] = partial(_merged_weight, layer, functions.get(name))
        return functions


def _merged_weight(layer: Any, base: Callable[[], Tensor] | None) -> Tensor:
    """What a layer's adapter adds, and the weight under it where that is quantised."""
    delta: Tensor = layer.get_delta_weight(ADAPTER)
    return delta if base is None else base() + delta


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """The type of a model's weights, of which those that are quantised have none."""
    return next(model.parameters()).dtype


def model_without_layers(
    model: PreTrainedModel, *, on: bool, merge: bool, bare: bool = False
) -> PreTrainedModel:
    """A model of the same class without the adapter's layers, and without quantised ones.

    on: modules that are trained whole are as they are now, else as they were.
    merge: with the adapter in its weights, which alone are copied.
    bare: quantised weights are zeros that take no memory, for whoever adds `added_weights`.
    """
    adapted = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    unused = ORIGINAL if on else COPY
    weights: dict[str, Tensor] = {}
    for name, tensor in _plain_weights(model, bare=bare).items():
        if ".lora_" in name or unused in name:
            continue
        layer = name.rpartition(".base_layer.")[0]
        if merge and layer in adapted and name.endswith(".base_layer.weight"):
            delta: Any = adapted[layer].get_delta_weight(ADAPTER)  # type: ignore[operator]
            tensor = (tensor + delta).to(tensor.dtype)
        for part in (".base_layer.", ORIGINAL, COPY):
            name = name.replace(part, ".")
        weights[name] = tensor
    config = copy.deepcopy(model.config)
    if on and is_untied(model):
        untie(config)
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(weights, strict=True, assign=True)
    for name, buffer in model.named_buffers():
        if name not in weights:  # no file holds it, as tables of rotary embeddings
            place, _, last = name.rpartition(".")
            plain.get_submodule(place)._buffers[last] = buffer
    plain.tie_weights()
    if model.can_generate():
        plain.generation_config = model.generation_config
    return plain


def _plain_weights(model: PreTrainedModel, *, bare: bool) -> dict[str, Tensor]:
    """A model's tensors by name, with a weight where a quantised layer has codes and scales.

    bare: see `model_without_layers`.
    """
    weights = model.state_dict()
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedLinear):
            continue
        del weights[f"{name}.codes"], weights[f"{name}.scale"]
        if bare:
            none = torch.zeros((), dtype=dtype_of(model), device=module.codes.device)
            weight = none.expand(module.out_features, module.in_features)
        else:
            weight = module.dequantized(dtype_of(model))
        weights[f"{name}.weight"] = weight
    return weights
