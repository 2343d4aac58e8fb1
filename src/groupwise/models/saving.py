"""Policies to folders: what a run needs to go on, and what others read."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from groupwise.distributed import comm
from groupwise.models.lora import FOLDER, keep_adapter, model_without_layers, write_adapter
from groupwise.models.policy import Policy
from groupwise.models.quiet import quiet_transformers
from groupwise.models.sharded import gathered, own_parts, write_image_files, write_parts


def merged(policy: Policy) -> PreTrainedModel:
    """The plain model: an adapter that is on is merged into a copy of its weights; of one that is
    off the weights are shared.
    """
    if policy.adapter is None:
        return policy.model
    return model_without_layers(policy.model, on=policy.adapter_on, merge=policy.adapter_on)


def save(policy: Policy, folder: Path) -> None:
    """Write a plain Hugging Face folder: safetensors, config, generation config, tokenizer, chat
    template.

    An adapter is merged, and lies beside the model in `adapter/`.
    """
    with quiet_transformers():
        merged(policy).save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    write_image_files(policy, folder)
    if policy.adapter is not None and policy.adapter_on:
        write_adapter(policy, folder / FOLDER, dict(policy.model.named_parameters()))
        policy.tokenizer.save_pretrained(
            folder / FOLDER
        )  # so that the adapter's folder alone is enough for peft


def save_to_resume(policy: Policy, folder: Path) -> None:
    """Write what a run needs to go on from here: of an adapter less than `save` writes."""
    if policy.adapter is None or not policy.adapter_on:
        save(policy, folder)
    else:
        keep_adapter(policy, folder, dict(policy.model.named_parameters()))


def export(policy: Policy, folder: Path) -> None:
    """`save` by whoever has the weights: all processes call it, for a folder that they all see."""
    if policy.shards is None:
        if comm.world().first:
            save(policy, folder)
        return
    if policy.adapter is None:
        write_parts(policy, folder, own_parts(policy))
    else:
        with gathered(policy) as whole:  # its adapter is merged into weights that are whole
            export(whole, folder)
    comm.wait()
