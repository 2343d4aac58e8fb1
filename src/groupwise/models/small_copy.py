"""A small copy of an architecture: the same code with the same switches, narrow and shallow, with random weights.

What a model computes differently in packed streams is a matter of its code and its configuration, not of its weights or its width.
So the copy has a layer or two of every type, few heads of the same width, few experts, and everything that depends on a length
scaled down: beyond windows, chunks and `original_max_position_embeddings` come then a few dozen tokens instead of thousands.

Which types there are is not read from the configuration, whose families spell it in many ways (lists, periods, offsets, numbers of
the first or of the last layers): the whole model is built without weights, and its layers are compared (`structure_of`).
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from groupwise.errors import ConfigError

WINDOW, CHUNK, LENGTH, SCALE, CAP = 12, 12, 20, 8, 2.0
"""What windows, chunks, lengths that frequencies depend on, steps of a temperature and soft caps become."""
VOCABULARY, POSITIONS, HIDDEN, INNER, RANK = 160, 2304, 128, 96, 32
REFERENCE = 40
"""MiniCPM's width of reference; the quotient of a width and it is no factor that a configuration would hold."""
FEW, CHEAP = 2, 6
"""Layers of a small copy whose layers are all alike, one more where some are not, so that a type occurs twice; as many as are taken
without a search for fewer."""
NOTED = ("architectures", "transformers_version")
"""What a model notes in its configuration, which makes it no other."""
HEAD, WIDTHS = 16, ("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
"""Widest head of a narrow copy, and the keys that say how wide heads are."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
WINDOWS = ("sliding_window", "window_size", "attention_window", "attention_window_size", "sliding_window_size", "local_attention")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping", "logits_soft_cap")
SCALED = ("llama3", "yarn")
"""Frequencies that are the same at every length."""
STATES = ("no_rope_layers",)
"""A number for each layer, not the numbers of layers."""
HEADS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
TAILS = ("num_kv_shared_layers",)
"""How many of the first, and of the last layers are of another type."""
PERIOD, BEGIN = re.compile(r"(period|interval|_step|freq|frequency|every_n_layers)$"), re.compile(r"(offset|start_index)$")
"""Keys of numbers by which types of layers recur."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")


def small_copy(
    config: PretrainedConfig, kind: type[PreTrainedModel] | None = None, *, shallow: bool = True, narrow: bool = False
) -> PretrainedConfig:
    """The configuration of a small copy.

    kind: the model's class; None: the language model of the configuration.
    shallow: the first layer of each type, and `FEW` at least; else as many as there are.
    narrow: of a configuration that is small, for long texts, whose cost heads and layers multiply: heads of `HEAD` numbers, one
        layer of each type.
    """
    kind = kind or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # type: ignore[assignment]
    key = kind, shallow, narrow, POSITIONS, _written(config)
    if key not in _MADE:
        _MADE[key] = _small_copy(config, kind, shallow, narrow)
    return copy.deepcopy(_MADE[key])


_MADE: dict[tuple[Any, ...], PretrainedConfig] = {}
"""Of this process: a load asks several times."""


def _written(config: PretrainedConfig) -> tuple[type, str]:
    """What tells a configuration from others."""
    said = {name: value for name, value in config.to_dict().items() if name not in NOTED}
    return type(config), json.dumps(said, default=str, sort_keys=True)


def _small_copy(config: PretrainedConfig, kind: Any, shallow: bool, narrow: bool) -> PretrainedConfig:
    found = copy.deepcopy(config)
    text: Any = found.get_text_config()
    fields = {key: value for key, value in vars(text).items() if not key.startswith("_")}
    if not narrow:
        _lengths(text, fields)
    _widths(text, fields, HEAD if narrow else None)
    if isinstance(getattr(text, "dim_model_base", None), int):
        text.dim_model_base = REFERENCE
    _vocabulary(found)
    _vocabulary(text)
    for key, part in vars(found).items():
        if isinstance(part, PretrainedConfig) and part is not text and "vision" in key + part.model_type:
            name = next((name for name in LAYERS if isinstance(getattr(part, name, None), int)), None)
            if name is not None and shallow:
                _keep(part, name, range(min(getattr(part, name), FEW)))
    return _shallow(found, config, kind, 1 if narrow else FEW) if shallow else found


def small_model(
    kind: type[PreTrainedModel], config: PretrainedConfig, *, shallow: bool = True, narrow: bool = False, seed: int = 0
) -> PreTrainedModel:
    """A small copy of a model on the CPU, float32, in eval mode.   shallow, narrow: as of `small_copy`.

    Raises ConfigError if its configuration makes none, or none that has every class of module that the model has.
    """
    try:
        small = small_copy(config, kind, shallow=shallow, narrow=narrow)
        small._attn_implementation = "eager"
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(seed)
            made = kind(small).float().eval()
            randomise(made)
    except Exception as error:  # whatever a model's own code says of sizes that it was not made for
        raise ConfigError(
            f"no small copy of {kind.__name__} can be made to prove it on: {type(error).__name__}: {str(error).strip()[:200]}"
        ) from error
    whole = _whole(kind, config, small) if shallow else None
    if whole is not None and (lost := whole.classes - classes_of(made)):
        raise ConfigError(
            f"no small copy of {kind.__name__} can be made to prove it on: it would be without {', '.join(sorted(lost))}"
        )
    return made


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """The model without its head.

    It is `base_model`, but for a few families whose `base_model_prefix` names no attribute: there it is the part that holds the
    embedding.
    """
    found = model.base_model
    if found is not model or model.get_output_embeddings() is None:
        return found
    embedding = model.get_input_embeddings()
    for part in model.children():
        if isinstance(part, PreTrainedModel) and part.get_input_embeddings() is embedding:
            return part
    return found


def language_model(model: PreTrainedModel) -> type[PreTrainedModel]:
    """A model's class; of a scoring model that of the language model with the same configuration."""
    if model.can_generate():
        return type(model)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    return type(model) if found is None or isinstance(found, tuple) else found


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights with which every part of a model has a say: freshly initialised ones make all tokens nearly equal."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        if id(parameter) in tables:
            parameter.normal_(0.0, 2.0 / math.sqrt(parameter.shape[-1]))
        elif parameter.ndim >= 2:
            parameter.normal_(0.0, 1.0 / math.sqrt(min(parameter.shape[-2:])))
        else:
            parameter.add_(torch.randn_like(parameter) * 0.2)


def _lengths(text: Any, fields: dict[str, Any]) -> None:
    for key in WINDOWS:
        if isinstance(fields.get(key), int):
            setattr(text, key, min(fields[key], WINDOW))
    if isinstance(fields.get("attention_chunk_size"), int):
        text.attention_chunk_size = min(fields["attention_chunk_size"], CHUNK)
    if isinstance(fields.get("floor_scale"), int):
        text.floor_scale = min(fields["floor_scale"], SCALE)
    for key in CAPS:
        if fields.get(key):
            setattr(text, key, CAP)
    reach = POSITIONS  # also of a model that has fewer: what is proven are its operations
    rope = copy.deepcopy(fields.get("rope_parameters"))
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if not isinstance(part, dict):
            continue
        told = part.get("rope_type") in SCALED and part.get("factor")  # else it is the quotient of two lengths
        original = part.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
        if original and original > LENGTH:
            part["original_max_position_embeddings"] = LENGTH
            reach = reach if told else max(LENGTH + 1, LENGTH * _context(text) // original)
        if "dynamic" in str(part.get("rope_type")):
            reach = min(reach, LENGTH)
    if rope:
        text.rope_parameters = rope
    if (fields.get("original_max_position_embeddings") or 0) > LENGTH:
        text.original_max_position_embeddings = LENGTH
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"):
        if isinstance(fields.get(key), int):
            setattr(text, key, reach)


def _context(text: Any) -> int:
    return int(getattr(text, "max_position_embeddings", None) or POSITIONS)


def _widths(text: Any, fields: dict[str, Any], widest: int | None = None) -> None:
    """widest: of a head; None: as wide as the model's."""
    heads = getattr(text, "num_attention_heads", None)
    hidden = getattr(text, "hidden_size", None)
    if isinstance(heads, int) and isinstance(hidden, int):
        width = hidden // heads
        own = fields.get("head_dim") or width
        # A model whose heads together are not as wide as it is lets it be of any width.
        free = own != width
        shared = next((name for name in ("num_key_value_heads", "num_kv_heads") if isinstance(fields.get(name), int)), None)
        groups = heads // fields[shared] if shared else 1
        few = 2 if own >= 64 else 4
        few = min(heads, few if groups == 1 or few % 2 == 0 else groups)
        text.num_attention_heads = few
        if shared:
            setattr(text, shared, few if groups == 1 else max(1, few // 2))
        text.hidden_size = min(hidden, HIDDEN) if free else few * max(min(width, widest or width), 1)
    for key in WIDTHS if widest else ():
        if isinstance(fields.get(key), int):
            setattr(text, key, min(fields[key], widest))
    if widest and isinstance(fields.get("qk_head_dim"), int):
        text.qk_head_dim = text.qk_nope_head_dim + text.qk_rope_head_dim
    for key, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if re.search(r"intermediate_size|^n_inner$|ffn_dim|ffn_hidden_size|mlp_hidden_size", key):
            setattr(text, key, min(value, INNER))
        elif key.endswith("lora_rank"):
            setattr(text, key, min(value, RANK))
        elif key in EXPERTS:
            setattr(text, key, min(value, 4 * max(1, min(fields.get("n_group") or 1, 2))))
        elif key in CHOSEN:
            setattr(text, key, min(value, 2))
    if (fields.get("n_group") or 1) > 1:
        text.n_group, text.topk_group = 2, 1
    if (fields.get("n_shared_experts") or 0) > 1:
        text.n_shared_experts = 1


def _vocabulary(config: Any) -> None:
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(vars(config).get(key), int):
            setattr(config, key, min(vars(config)[key], VOCABULARY))
    for key, value in list(vars(config).items()):
        if re.fullmatch(r"(pad|bos|eos|sep|decoder_start)_token_id", key) and value is not None:
            setattr(config, key, {"pad": 0, "bos": 1}.get(key[:3], 2))


# ---------------------------------------------------------------- which layers there are


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """What a model's layers are made of."""

    classes: frozenset[str]
    """Of all modules, the layers' and others."""
    lists: dict[str, list[Layer]]
    """Its lists of layers by name; none that lies in a layer."""

    def types(self, varying: frozenset[Any] = frozenset()) -> frozenset[Any]:
        """The distinct layers.   varying: settings of modules that count too, see `varying`."""
        return frozenset((name, layer.type(varying)) for name, layers in self.lists.items() for layer in layers)

    def varying(self) -> frozenset[Any]:
        """Settings in which layers differ, by module and name; not those that are different in every layer, as its number is."""
        found = set()
        for layers in self.lists.values():
            for key in {key for layer in layers for key in layer.settings}:
                values = [repr(layer.settings[key]) for layer in layers if key in layer.settings]
                if 1 < len(set(values)) < len(values):
                    found.add(key)
        return frozenset(found)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A member of a list of layers."""

    parts: frozenset[Any]
    """Classes of modules and names of parameters; members of lists below have one name."""
    settings: dict[Any, Any]
    """Numbers, flags and words that its modules hold, by module and name."""

    def type(self, varying: frozenset[Any]) -> Any:
        """What makes it a layer like others: of numbers only whether they are 0, for they are other ones in a small copy."""
        told = frozenset((key, _flag(value)) for key, value in self.settings.items() if key in varying)
        return self.parts, told


def _flag(value: Any) -> Any:
    return value if isinstance(value, (bool, str)) or value is None else ("number", bool(value))


def structure_of(model: nn.Module) -> Structure:
    """Compare a model's layers, as its modules are and what they hold."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    outer = {name: module for name, module in lists.items() if not any(name.startswith(f"{other}.") for other in lists)}
    return Structure(classes_of(model), {name: [_layer(member) for member in module] for name, module in outer.items()})


def classes_of(model: nn.Module) -> frozenset[str]:
    """Names of the classes of all modules."""
    return frozenset(type(module).__name__ for module in model.modules())


def _layer(member: nn.Module) -> Layer:
    parts, settings = set(), {}
    for name, module in member.named_modules():
        where = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        parts.add((where, type(module).__name__))
        parts |= {(where, own) for own, parameter in module._parameters.items() if parameter is not None}
        for own, value in vars(module).items():
            if not own.startswith("_") and own != "training" and (value is None or isinstance(value, (bool, int, float, str))):
                settings[where, own] = value
    return Layer(frozenset(parts), settings)


def _whole(kind: Any, config: PretrainedConfig, deep: PretrainedConfig) -> Structure | None:
    """Of the model itself, without weights; of a class that cannot be built so, of a copy that is as deep and narrow.

    None if it cannot be built at all.
    """
    return _structure(kind, config) or _structure(kind, deep, "cpu")


class Unfilled(TorchFunctionMode):
    """Leaves tensors as they were made, in this thread: without weights, initialising them takes half of the time for nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What would fill a tensor gives it back; `nn.init` hands it on by its name."""
        kwargs = kwargs or {}
        return (args[0] if args else kwargs["tensor"]) if func in FILL else func(*args, **kwargs)


FILL = frozenset(
    [getattr(of, name) for of in (torch.Tensor, nn.init) for name in ("uniform_", "normal_")]
    + [torch.Tensor.fill_, torch.Tensor.zero_, nn.init.kaiming_uniform_, nn.init.trunc_normal_]
)


def _structure(kind: Any, config: PretrainedConfig, device: str = "meta") -> Structure | None:
    """None if it cannot be built."""
    key = kind, device, _written(config)
    if key not in _STRUCTURES:
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device), Unfilled() if device == "meta" else nullcontext():
                found = structure_of(kind(copy.deepcopy(config)))
        except MemoryError:
            raise
        except Exception:  # a model's own code
            found = None
        _STRUCTURES[key] = found
    return _STRUCTURES[key]


_STRUCTURES: dict[tuple[Any, ...], Structure | None] = {}


def _shallow(found: PretrainedConfig, config: PretrainedConfig, kind: Any, few: int) -> PretrainedConfig:
    """A copy with few layers, which has all types that the model has and no others; as deep as the model where none is shorter.

    If no choice of layers has all of their settings too, one that has all of their parts.
    """
    text: Any = found.get_text_config()
    name = next((name for name in LAYERS if isinstance(vars(text).get(name), int)), None)
    whole = None if name is None or kind is None else _whole(kind, config, found)
    if name is None:
        return found
    if whole is None:
        return _with(found, lambda text: _keep(text, name, _firsts(_columns(text, vars(text)[name]), few)))
    varying, best = whole.varying(), dict[bool, PretrainedConfig]()
    for tried in _candidates(found, name, whole, varying, kind, few):
        depth, made = _depth(tried, name), _structure(kind, tried)
        if made is None or made.types() != whole.types() or whole.classes - made.classes:
            continue
        exact = made.types(varying) == whole.types(varying)
        if exact not in best or depth < _depth(best[exact], name):
            best[exact] = tried
        if exact and depth <= CHEAP:
            break
    return best.get(True) or best.get(False) or found


def _depth(config: PretrainedConfig, name: str) -> int:
    return int(getattr(config.get_text_config(), name))


def _candidates(
    found: PretrainedConfig, name: str, whole: Structure, varying: frozenset[Any], kind: Any, few: int
) -> Iterator[PretrainedConfig]:
    """Some layers by number, where lists say what each is; the first ones, where periods do; those of shorter periods."""
    count = _depth(found, name)
    types = _types(whole, varying, count)
    columns = _columns(found.get_text_config(), count)
    kept = _firsts([*zip(columns, types, strict=True)], few)
    yield _with(found, lambda text: _keep(text, name, kept))
    bare = _firsts([*zip(columns, _types(whole, frozenset(), count), strict=True)], few)
    yield _with(found, lambda text: _keep(text, name, bare))
    yield _with(found, lambda text: _keep(text, name, range(max(kept) + 1), first=True))
    twice = sorted(
        {i for i in range(count) if types[:i].count(types[i]) < 2}
    )  # some share the weights of the second with the first
    yield _with(found, lambda text: _keep(text, name, twice))
    shorter = _with(found, _shorten)
    if (made := _structure(kind, shorter)) is not None:
        last = max(_firsts(_types(made, varying, count), few))
        yield _with(shorter, lambda text: _keep(text, name, range(last + 1), first=True))


def _types(structure: Structure, varying: frozenset[Any], count: int) -> list[Any]:
    """Of each layer, in all lists that have so many."""
    lists = [layers for layers in structure.lists.values() if len(layers) == count]
    return [tuple(layers[i].type(varying) for layers in lists) for i in range(count)]


def _with(config: PretrainedConfig, change: Callable[[Any], None]) -> PretrainedConfig:
    changed = copy.deepcopy(config)
    change(changed.get_text_config())
    return changed


def _firsts(types: Sequence[Any], few: int) -> list[int]:
    """The first layer of each type, and others of the most frequent one: `few` layers where all are alike, else one more."""
    kept = {types.index(kind) for kind in types}
    common = Counter(types).most_common(1)[0][0]
    others = [i for i, kind in enumerate(types) if kind == common and i not in kept]
    return sorted(kept | set(others[: max(few + (len(kept) > 1) - len(kept), 0)]))


def _columns(text: Any, count: int) -> list[Any]:
    """What the lists of a configuration say of each layer."""
    columns, indices = _lists(text, count)
    stated = [*columns.values(), *([i in values for i in range(count)] for values in indices.values())]
    return list(zip(*(map(str, column) for column in stated), strict=True)) or [()] * count


def _lists(text: Any, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Lists with something for each layer; lists of layers by number."""
    lists = {key: value for key, value in vars(text).items() if isinstance(value, (list, tuple))}
    named = re.compile(r"(layers|layer_indices|layer_ids|layer_idx)$")
    indices = {key: value for key, value in lists.items() if named.search(key) and key not in STATES and _ascending(value)}
    return {key: value for key, value in lists.items() if len(value) == count and key not in indices}, indices


def _keep(text: Any, name: str, kept: Sequence[int], *, first: bool = False) -> None:
    """Keep these layers, in whatever a configuration says of layers.   first: they are the first ones, which stay as they are."""
    count = getattr(text, name)
    columns, indices = _lists(text, count)
    for key in () if first else (*HEADS, *TAILS):
        value = vars(text).get(key)
        if isinstance(value, int):
            setattr(text, key, sum(i < value if key in HEADS else i >= count - value for i in kept))
    setattr(text, name, len(kept))
    for key, column in columns.items():
        setattr(text, key, type(column)(column[i] for i in kept))
    for key, numbers in indices.items():
        setattr(text, key, [place for place, i in enumerate(kept) if i in numbers])


def _shorten(text: Any) -> None:
    """Let types recur with every second layer."""
    for key, value in list(vars(text).items()):
        if type(value) is int and value > 1 and (PERIOD.search(key) or BEGIN.search(key)):
            setattr(text, key, 2 if PERIOD.search(key) else 1)


def _ascending(values: Any) -> bool:
    """True of a list of layers by number."""
    return all(type(value) is int for value in values) and all(a < b for a, b in pairwise(values))
