"""A policy whose weights are sharded over processes, and how they are gathered again to sample and to be saved.

The sharded model computes packed batches like any other.  To sample through it would gather every block for every token, so the
weights are gathered once per rollout into `plain`: the same modules, whose parameters hold numbers only in the meantime.  All that
reads weights directly (the engines' fast paths) sees ordinary tensors there.  Loading and saving go tensor by tensor: no process
holds all weights for them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.distributed import comm, fsdp
from groupwise.errors import ConfigError
from groupwise.models.attention import NAME
from groupwise.models.loading import with_facts
from groupwise.models.logit_scale import backbone_of
from groupwise.models.lora import AdaptedPolicy, bare
from groupwise.models.masks import copy_reach
from groupwise.models.policy import Policy
from groupwise.models.recurrence import use_packed_recurrence
from groupwise.models.streaming import INDEX, SINGLE, CheckpointReader, check_finite, saved_names

METHOD = "run_backbone"
"""Attribute of a sharded model that runs its backbone with weights gathered."""
SINGLE_FILE = 1 << 30
"""Bytes up to which a model is written as one file, by one process."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardedPolicy(Policy):
    """A policy sharded over all processes; every process must call `gathered` and make the same passes over batches."""

    plain: Policy
    """The same modules; their parameters have no numbers outside of `gathered`."""
    sharding: fsdp.ShardingConfig
    computes_on: torch.device

    @property
    def device(self) -> torch.device:
        """Where products are computed and batches lie; shards may lie in host memory."""
        return self.computes_on

    @property
    def sharded(self) -> bool:
        """True."""
        return True

    @property
    def backbone(self) -> Callable[..., Any]:
        """The backbone as FSDP wraps it."""
        return getattr(self.model, METHOD)

    @contextmanager
    def gathered(self) -> Iterator[Policy]:
        """Every process holds all weights while inside."""
        fsdp.reshard(self.model)
        places = _places(self.plain.model)
        try:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    full = nn.Parameter(fsdp.whole(parameter.detach()).to(self.device), requires_grad=False)
                    for module, key in places[name]:
                        module._parameters[key] = full
            yield self.plain
        finally:
            for found in places.values():
                empty = _empty(found[0][0]._parameters[found[0][1]])
                for module, key in found:
                    module._parameters[key] = empty

    def reshard(self) -> None:
        """Free the weights that FSDP has gathered."""
        fsdp.reshard(self.model)

    def frozen_copy(self) -> Policy:
        """Every process copies its shard."""
        if isinstance(self.plain, AdaptedPolicy):
            return bare(self)
        fsdp.reshard(self.model)
        parts = {name: fsdp.own(parameter.detach()) for name, parameter in self.model.named_parameters()}
        plain = replace(self.plain, model=copy.deepcopy(self.plain.model))
        found = shard(plain, self.sharding, self.device)
        found.fill(lambda name, _: parts[name])
        found.model.requires_grad_(False)
        return found

    @torch.no_grad()
    def fill(self, rows: Callable[[str, slice], Tensor]) -> None:
        """Give a model that was built without weights its part of each.

        rows: (name of a parameter or saved buffer, rows of the whole) -> these rows.
        """
        home = torch.device("cpu") if self.sharding.offload else self.device
        places = _places(self.model)
        for name, parameter in list(self.model.named_parameters()):
            part = nn.Parameter(torch.empty_like(parameter, device=home), requires_grad=parameter.requires_grad)
            own, which = fsdp.own(part.detach()), fsdp.own_rows(part)
            if own.numel():
                own.copy_(rows(name, which))
            for module, key in places[name]:
                module._parameters[key] = part
        computed = {name for name, _ in self.model.named_parameters()}
        for name in saved_names(self.plain.model).keys() - computed:
            buffer = self.model.get_buffer(name)
            buffer.copy_(rows(name, slice(0, buffer.shape[0]) if buffer.ndim else slice(0, 1)))
        for model in (self.model, self.plain.model):
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(self.device))

    def export(self, folder: Path) -> None:
        """Write whole tensors; every process writes its share of them."""
        if isinstance(self.plain, AdaptedPolicy):
            with self.gathered() as plain:  # its adapter is merged into weights that are whole
                plain.export(folder)
        else:
            self.write(folder, self.parts())
        comm.wait()

    @torch.no_grad()
    def parts(self) -> dict[str, Tensor]:
        """This process's share of the model's tensors, each of them whole, in host memory.  All processes must call it.

        Every tensor is gathered on every process for a moment; only one keeps it.
        """
        fsdp.reshard(self.model)
        parameters, files, rank = dict(self.model.named_parameters()), self._files(), comm.world().rank
        found = {}
        for name, file in files.items():
            tensor = parameters[name] if name in parameters else self.model.get_buffer(name)
            full = fsdp.whole(tensor.detach())
            if file == rank:
                found[name] = full.to("cpu", copy=True).contiguous()
        return found

    def write(self, folder: Path, parts: Mapping[str, Tensor]) -> None:
        """This process's files of a Hugging Face folder that exists; together they are what `Policy.keep` writes."""
        files = self._files()
        if isinstance(self.plain, AdaptedPolicy):
            if comm.world().first:
                self.plain.keep_parts(folder, parts)
            return
        count = max(files.values()) + 1
        names = [SINGLE] if count == 1 else [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
        if parts:
            save_file(dict(parts), folder / names[comm.world().rank], metadata={"format": "pt"})
        if not comm.world().first:
            return
        model = self.plain.model
        if count > 1:
            total = sum(tensor.nbytes for tensor in saved_names(model).values())
            index = {"metadata": {"total_size": total}, "weight_map": {name: names[file] for name, file in files.items()}}
            (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        config = copy.deepcopy(model.config)
        config.architectures, config.dtype = [type(model).__name__], self.dtype
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _files(self) -> dict[str, int]:
        """For every tensor of a checkpoint the process that writes it: about as many bytes each."""
        tensors = saved_names(self.plain.model)
        if isinstance(self.plain, AdaptedPolicy):
            return dict.fromkeys(self.plain.trained, 0)
        count = comm.world().size if sum(tensor.nbytes for tensor in tensors.values()) > SINGLE_FILE else 1
        load, found = [0] * count, {}
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
            found[name] = load.index(min(load))
            load[found[name]] += tensor.nbytes
        used = sorted(set(found.values()))  # fewer than processes, of a model with fewer tensors
        return {name: used.index(found[name]) for name in tensors}


def shard(policy: Policy, sharding: fsdp.ShardingConfig, device: torch.device) -> ShardedPolicy:
    """Spread a policy, which is the same on every process and is used up by it.  Raises ConfigError if it cannot be.

    sharding: decided.   device: what computes.   A policy without weights is to be filled afterwards.
    """
    if policy.attention == "single":
        raise ConfigError(
            "model.attention 'single' runs a forward pass per sequence, so processes would gather weights at different times; "
            "use parallel: ddp"
        )
    model = policy.model
    # Parameters are replaced on the way, everything else (buffers, config) is copied.
    empty = {id(parameter): _empty(parameter) for parameter in model.parameters()}
    plain = replace(policy, model=copy.deepcopy(model, empty))
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    setattr(model, METHOD, lambda **inputs: backbone_of(model)(**inputs))
    fsdp.shard(model, blocks, METHOD, sharding, device)
    return ShardedPolicy(**policy.as_fields(), plain=plain, sharding=sharding, computes_on=device)


def shard_from_checkpoint(
    policy: Policy, sharding: fsdp.ShardingConfig, device: torch.device, reader: CheckpointReader
) -> ShardedPolicy:
    """Shard a policy that was built without weights; every process reads its part of each tensor, and no more.

    Then the model is asked what it computes, by all processes together (`loading.with_facts`).  Raises Diverged, ConfigError.
    """
    found = shard(policy, sharding, device)
    found.fill(reader.rows)
    reader.close()
    check_finite(found.model)
    found = with_facts(found)
    found.reshard()
    copy_reach(found.model, found.plain.model)
    found.plain.model.set_attn_implementation(NAME)
    use_packed_recurrence(found.plain.model)
    return replace(found, plain=replace(found.plain, form=found.form))


def _empty(parameter: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _places(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where every parameter hangs, by the name that `named_parameters` gives it; several places if it is shared."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[names[id(parameter)]].append((module, key))
    return places
