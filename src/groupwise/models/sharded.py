"""Policies whose weights are sharded over processes, and how they are gathered again to sample and
to be saved.

The sharded model computes packed batches like any other.  To sample through it would gather every
block for every token, so the weights are gathered once per rollout into `Shards.whole`: the same
modules, whose parameters hold numbers only in the meantime. All that reads weights directly (the
engines' fast paths) sees ordinary tensors there.  Loading and saving go tensor by tensor: no
process holds all weights for them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.config.settings import ParallelSettings
from groupwise.distributed import comm, fsdp, layout
from groupwise.distributed.ulysses import ContextGroup
from groupwise.errors import ConfigError
from groupwise.models.attention import NAME, set_attention
from groupwise.models.loading import with_facts
from groupwise.models.lora import keep_adapter
from groupwise.models.output_head import backbone_of
from groupwise.models.policy import METHOD, Policy, Shards, without_adapter
from groupwise.models.reach import copy_reach
from groupwise.models.recurrence import use_packed_recurrence
from groupwise.models.streaming import INDEX, SINGLE, CheckpointReader, check_finite, saved_names
from groupwise.utils.files import write

SINGLE_FILE = 1 << 30
"""Bytes up to which a model is written as one file, by one process."""


def whole_policy(policy: Policy) -> Policy:
    """The policy as one process computes it; of a sharded one, its weights are there only while
    they are `gathered`.
    """
    model = policy.model
    if policy.shards is not None:
        model = policy.shards.whole
    return replace(policy, model=model, shards=None, context_group=None)


@contextmanager
def gathered(policy: Policy) -> Iterator[Policy]:
    """The policy with all of its weights on this process, while inside; itself unless it is
    sharded.
    """
    if policy.shards is None:
        yield policy
        return
    fsdp.reshard(policy.model)
    places = _places(policy.shards.whole)
    try:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                full = nn.Parameter(
                    fsdp.whole(parameter.detach()).to(policy.device), requires_grad=False
                )
                for module, key in places[name]:
                    module._parameters[key] = full
        yield whole_policy(policy)
    finally:
        for modules in places.values():
            empty = _empty(modules[0][0]._parameters[modules[0][1]])
            for module, key in modules:
                module._parameters[key] = empty


def frozen_copy(policy: Policy) -> Policy:
    """A copy of the weights as they are now, which takes no gradients: the reference.  Never loaded
    again by name.

    Under an adapter nothing is copied: those weights are never trained.  Of a sharded policy every
    process copies its shard."""
    if policy.adapter is not None:
        return without_adapter(policy)
    if policy.shards is None:
        model = copy.deepcopy(policy.model).requires_grad_(False)
        for parameter in model.parameters():
            parameter.grad = None
        return replace(policy, model=model.eval())
    fsdp.reshard(policy.model)
    parts = {
        name: fsdp.own(parameter.detach()) for name, parameter in policy.model.named_parameters()
    }

    def part(name: str, _: Tensor) -> Tensor:
        return parts[name]

    plain = replace(policy, model=copy.deepcopy(policy.shards.whole), shards=None)
    copied = shard(plain, policy.shards.parallel, policy.device)
    _fill(copied, part)
    copied.model.requires_grad_(False)
    return copied


@torch.no_grad()
def _fill(policy: Policy, read: Callable[[str, Tensor], Tensor]) -> None:
    """Give a sharded model that was built without weights its part of each.

    read: (name, a parameter or saved buffer) -> what this process holds of it.
    """
    assert policy.shards is not None
    home = torch.device("cpu") if policy.shards.parallel.offload else policy.device
    model, whole = policy.model, policy.shards.whole
    places = _places(model)
    for name, parameter in list(model.named_parameters()):
        part = nn.Parameter(
            torch.empty_like(parameter, device=home), requires_grad=parameter.requires_grad
        )
        own = fsdp.own(part.detach())
        if own.numel():
            own.copy_(read(name, part))
        for module, key in places[name]:
            module._parameters[key] = part
    computed = {name for name, _ in model.named_parameters()}
    for name in saved_names(whole).keys() - computed:
        buffer = model.get_buffer(name)
        buffer.copy_(read(name, buffer))
    for one in (model, whole):
        for module in one.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(policy.device))


@torch.no_grad()
def own_parts(policy: Policy) -> dict[str, Tensor]:
    """This process's share of a sharded model's tensors, each of them whole, in host memory.  All
    processes must call it.

    Every tensor is gathered on every process for a moment; only one keeps it.
    """
    fsdp.reshard(policy.model)
    parameters, files, rank = (
        dict(policy.model.named_parameters()),
        _files(policy),
        comm.world().rank,
    )
    parts = {}
    for name, file in files.items():
        tensor = parameters[name] if name in parameters else policy.model.get_buffer(name)
        full = fsdp.whole(tensor.detach())
        if file == rank:
            parts[name] = full.to("cpu", copy=True).contiguous()
    return parts


def write_parts(policy: Policy, folder: Path, parts: Mapping[str, Tensor]) -> None:
    """This process's files of a Hugging Face folder that exists; together they are what
    `saving.save_to_resume` writes: experts lie one by one, as in the checkpoint they came from.
    """
    assert policy.shards is not None
    files = _files(policy)
    if policy.adapter is not None:
        if comm.world().first:
            keep_adapter(whole_policy(policy), folder, parts)
        return
    count = max(files.values()) + 1
    names = (
        [SINGLE]
        if count == 1
        else [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    )
    model = policy.shards.whole
    if parts:
        stored = {}
        for name, tensor in revert_weight_conversion(model, dict(parts)).items():
            if name not in parts:  # a part of a tensor, beside others of it
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            stored[name] = tensor
        save_file(stored, folder / names[comm.world().rank], metadata={"format": "pt"})
    if not comm.world().first:
        return
    if count > 1:
        tensors = saved_names(model)
        weight_map = {}
        for name, file in files.items():
            empty = {name: torch.empty(tensors[name].shape, device="meta")}
            for stored in revert_weight_conversion(model, empty):
                weight_map[stored] = names[file]
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], policy.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    write_image_files(policy, folder)


def write_image_files(policy: Policy, folder: Path) -> None:
    """Write what says how images are prepared for the model, where it is known."""
    for name, content in policy.image_files.items():
        write(folder / name, content)


def _files(policy: Policy) -> dict[str, int]:
    """For every tensor of a checkpoint the process that writes it: about as many bytes each."""
    assert policy.shards is not None
    if policy.adapter is not None:
        return dict.fromkeys(policy.adapter.trained, 0)
    tensors = saved_names(policy.shards.whole)
    count = (
        comm.world().size if sum(tensor.nbytes for tensor in tensors.values()) > SINGLE_FILE else 1
    )
    load, writer = [0] * count, {}
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        writer[name] = load.index(min(load))
        load[writer[name]] += tensor.nbytes
    used = sorted(set(writer.values()))  # fewer than processes, of a model with fewer tensors
    return {name: used.index(writer[name]) for name in tensors}


def in_context(policy: Policy, parallel: ParallelSettings, device: torch.device) -> Policy:
    """The policy, whose streams are split over processes where `parallel` says so.  Raises
    ConfigError if it has none.

    parallel: decided.   device: what computes.
    """
    if parallel.context == 1:
        return policy
    if policy.attention == "single":
        raise ConfigError(
            f"parallel.context: {type(policy.model).__name__} runs a forward pass per sequence and"
            " packs no streams: leave context out"
        )
    group = layout.mesh_of(parallel, device)["context"].get_group()
    return replace(policy, context_group=ContextGroup(group))


def shard(policy: Policy, parallel: ParallelSettings, device: torch.device) -> Policy:
    """Spread a policy, which is the same on every process and is used up by it.  Raises ConfigError
    if it cannot be.

    parallel: decided.   device: what computes.   A policy without weights is to be filled
        afterwards.
    """
    if policy.attention == "single":
        raise ConfigError(
            "model.attention 'single' runs a forward pass per sequence, so processes would gather"
            " weights at different times; use parallel: ddp"
        )
    model = policy.model
    # Parameters are replaced on the way, everything else (buffers, config) is copied.
    empty = {id(parameter): _empty(parameter) for parameter in model.parameters()}
    whole = copy.deepcopy(model, empty)
    blocks = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    setattr(model, METHOD, lambda **inputs: backbone_of(model)(**inputs))
    layout.use(parallel, device)
    if layout.splits(parallel):
        layout.split(model, parallel, device)
    if parallel.name != "ddp":
        layout.shard(model, blocks, METHOD, parallel, device)
    return replace(policy, shards=Shards(whole=whole, parallel=parallel, device=device))


def shard_from_checkpoint(
    policy: Policy, parallel: ParallelSettings, device: torch.device, reader: CheckpointReader
) -> Policy:
    """Shard a policy that was built without weights; every process reads its part of each tensor,
    and no more.

    Then the model is asked what it computes, by all processes together (`loading.with_facts`).
    Raises Diverged, ConfigError."""
    spread = shard(policy, parallel, device)
    _fill(spread, lambda name, tensor: layout.part_of(partial(reader.rows, name), tensor))
    reader.close()
    check_finite(spread.model)
    spread = with_facts(spread)
    fsdp.reshard(spread.model)
    assert spread.shards is not None
    copy_reach(spread.model, spread.shards.whole)
    set_attention(spread.shards.whole, NAME)
    use_packed_recurrence(spread.shards.whole)
    return spread


def _empty(parameter: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where every parameter hangs, by the name that `named_parameters` gives it; several places if
    it is shared.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key))
    return places
