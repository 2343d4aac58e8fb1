"""The models of a run: how each is loaded, and how each process holds it, whole or as a shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from groupwise.config.settings import ModelSettings, ParallelSettings, Recipe
from groupwise.config.validation import STAGE
from groupwise.data.images import ImageEncoder, NoImages
from groupwise.data.load import load_texts
from groupwise.data.tokenizers import (
    check_same_tokens,
    make_tokenizer,
    with_chat_template,
    with_image_marks,
)
from groupwise.data.wording import formatted
from groupwise.distributed import comm, layout
from groupwise.errors import ConfigError, DataError
from groupwise.models.fp8_blocks import in_fp8
from groupwise.models.loading import (
    UNBUILDABLE,
    Blueprint,
    LoadedModel,
    freeze_towers,
    is_scorer,
    language_class,
    make_policy,
    read_blueprint,
    resolve_device,
    unbuildable,
)
from groupwise.models.lora import restore_adapter
from groupwise.models.policy import Policy
from groupwise.models.quantized import QuantizedSize, quantized_size
from groupwise.models.reward_head import make_scorer
from groupwise.models.scratch import image_encoder, image_ids_of, scratch_model
from groupwise.models.shape import Shape
from groupwise.models.sharded import frozen_copy, in_context, shard, shard_from_checkpoint
from groupwise.models.splitting import demand_followed, demand_split
from groupwise.models.streaming import modules_of
from groupwise.models.vision import seeing
from groupwise.records import Prompt
from groupwise.rollout.vllm.scoring import ScoringServers
from groupwise.training.critics import Critic
from groupwise.training.objectives import language_model
from groupwise.training.stored_state import STATES
from groupwise.training.teachers import Teacher

SMALL = 1_000_000
"""Parameters of a model that gains nothing from a second thread (with three million a step is 1.3
times as fast with two).
"""


def fit_threads(policy: Policy, threads: int | None) -> None:
    """Set torch's threads for work with this policy: as many as a recipe names, else one for a
    small model on a CPU.

    OMP_NUM_THREADS decides where it is set and the recipe names none.
    """
    if threads is not None:
        torch.set_num_threads(threads)
        return
    small = (
        policy.device.type == "cpu"
        and sum(parameter.numel() for parameter in policy.model.parameters()) < SMALL
    )
    if small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def blueprint_of(recipe: Recipe, resume: Path | None) -> Blueprint:
    """Tokenizer, configuration and a way to load the weights, of a checkpoint or of a model from
    scratch.
    """
    if resume is not None:
        return read_blueprint(replace(recipe.model, path=str(resume), scratch=None))
    if recipe.model.path is not None:
        return read_blueprint(recipe.model)
    scratch = recipe.model.scratch
    assert scratch is not None
    tokenizer = make_tokenizer(
        scratch.tokenizer,
        load_texts(recipe.data, recipe.seed) if scratch.tokenizer.startswith("bpe") else (),
    )
    images: ImageEncoder | NoImages = NoImages(f"a model of the family {scratch.family} reads none")
    image_ids = None
    if scratch.family == "qwen3_vl":
        tokenizer = with_image_marks(tokenizer)
        images, image_ids = image_encoder(), image_ids_of(tokenizer)
    tokenizer = with_chat_template(tokenizer, recipe.model.chat_template)
    model = scratch_model(
        scratch,
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),  # type: ignore[arg-type]
        pad_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
        bos_id=tokenizer.bos_token_id,  # type: ignore[arg-type]
        seed=recipe.seed,
        image_ids=image_ids,
    )
    if recipe.model.dtype == "bfloat16":
        # Parameters only, as from_pretrained does: `model.to` would round the rotary frequencies
        # too.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    eos = (int(tokenizer.eos_token_id),)  # type: ignore[arg-type]
    return Blueprint(
        tokenizer=tokenizer,
        config=model.config.to_dict(),
        eos_ids=eos,
        context=scratch.context,
        source=LoadedModel(model),
        images=images,
    )


def shared_out(recipe: Recipe, blueprint: Blueprint) -> Recipe:
    """The recipe with `parallel: auto` decided for all models of the run together, by the largest.

    Processes must make the same passes through each: a sharded teacher makes as many as the policy
    has micro-batches."""
    if comm.world().size == 1:
        return recipe
    return replace(
        recipe,
        parallel=layout.decided(
            recipe.parallel, largest_model(recipe, blueprint), comm.world().size
        ),
    )


def largest_model(recipe: Recipe, blueprint: Blueprint) -> int:
    """Parameters of the largest model that a run trains or learns from; models of stages that are
    still to come are left out.
    """
    others = [
        path
        for path in (recipe.critic.path, recipe.teacher.path)
        if path is not None and not path.startswith(STAGE)
    ]
    return max(
        parameter_count(one)
        for one in (blueprint, *(read_blueprint(ModelSettings(path=path)) for path in others))
    )


def hold(
    recipe: Recipe,
    blueprint: Blueprint,
    make: Callable[[Recipe, Blueprint], Policy] = language_model,
    resume: Path | None = None,
) -> Policy:
    """The policy that `make` makes, as the processes of this run hold it, by `Recipe.parallel`.

    A sharded one is read piece by piece where its checkpoint allows it; else every process reads
    all and keeps its part.
    resume: where an adapter continues from; other policies come from there by their blueprint.
    """
    parallel = layout.decided(recipe.parallel, parameter_count(blueprint), comm.world().size)
    device = resolve_device(recipe.model)
    demand_parts(blueprint, parallel)
    layout.use(parallel, device)
    policy = _held(recipe, blueprint, make, resume, parallel)
    policy = replace(policy, image_files=blueprint.images.files)
    return in_fp8(in_context(policy, parallel, device), recipe.model.fp8)


def demand_parts(blueprint: Blueprint, parallel: ParallelSettings) -> None:
    """Refuse a model that cannot be split as `parallel` says, before weights are read.  Raises
    ConfigError.
    """
    demand_split(blueprint.config, parallel)
    if parallel.context > 1:
        demand_followed(weightless(blueprint))


def _held(
    recipe: Recipe,
    blueprint: Blueprint,
    make: Callable[[Recipe, Blueprint], Policy],
    resume: Path | None,
    parallel: ParallelSettings,
) -> Policy:
    """The policy with the weights that this process holds.   parallel: decided."""
    if comm.world().size == 1 or not layout.spreads(parallel):
        return seeing(_resumed(make(recipe, blueprint), resume), blueprint.images)
    device, reader = resolve_device(recipe.model), blueprint.reader()
    if reader is not None and recipe.model.lora is None:
        policy = make(recipe, blueprint.without_weights())
        if reader.fit(policy.model):
            return shard_from_checkpoint(policy, parallel, device, reader)
    return shard(_resumed(make(recipe, blueprint), resume), parallel, device)


def _resumed(policy: Policy, folder: Path | None) -> Policy:
    """The policy, whose adapter, where it has one, continues from a checkpoint's; other policies
    are read from there.
    """
    if folder is not None and policy.adapter is not None:
        restore_adapter(policy, folder)
    return policy


def reference_of(recipe: Recipe, policy: Policy, folder: Path | None) -> Policy:
    """The weights before the first step: a copy of the policy, or on resume what was saved then.
    Never loaded by name.
    """
    if folder is None or not folder.exists():
        return frozen_copy(policy)
    settings = replace(recipe.model, path=str(folder), scratch=None)
    frozen = hold(
        recipe,
        read_blueprint(settings),
        lambda _, blueprint: make_policy(blueprint.load(), blueprint.tokenizer, settings),
    )
    frozen.model.requires_grad_(False)
    return frozen


def critic_of(recipe: Recipe, policy: Policy, updates: int) -> Critic:
    """The critic that `Recipe.critic` describes, new or from its checkpoint.   updates: optimizer
    steps of the run.

    Raises ConfigError if its model has other tokens than the policy, or if its head would stand on
    a sharded backbone."""
    settings = recipe.critic
    if settings.path is None:
        if policy.sharded:
            raise ConfigError(
                "critic.path: the weights are sharded, and a head on the policy's backbone is not:"
                " give the critic a backbone of its own (critic.path), or set parallel: ddp"
            )
        return Critic.on(policy, settings, recipe.optimizer, updates)
    model = replace(
        recipe.model, path=settings.path, scratch=None, lora=None, quantize=None, fp8=None
    )
    blueprint = read_blueprint(model)
    check_same_tokens(
        policy.tokenizer, blueprint.tokenizer, f"critic.path: {settings.path}", further=True
    )
    pooling = blueprint.config.get("pooling", "last") if is_scorer(blueprint.config) else "last"
    scorer = hold(
        replace(recipe, model=model),
        blueprint,
        lambda recipe, blueprint: make_scorer(
            blueprint, recipe.model, pooling=pooling, seed=recipe.seed
        ),
    )
    adamw = STATES[recipe.optimizer.state]
    return Critic.of(scorer, settings, recipe.optimizer, updates, adamw)


def teacher_of(recipe: Recipe, policy: Policy) -> Teacher:
    """The teacher that `Recipe.teacher` describes: a checkpoint, servers, or the policy, as it is
    now or as it will be.

    Raises ConfigError or DataError, for a model with other tokens than the policy too.
    """
    settings, servers = recipe.teacher, None
    model = replace(
        recipe.model, path=settings.path, scratch=None, lora=None, quantize=None, fp8=None
    )
    if settings.path is not None:
        blueprint = read_blueprint(model)
        check_same_tokens(policy.tokenizer, blueprint.tokenizer, f"teacher.path: {settings.path}")
        teacher = hold(replace(recipe, model=model), blueprint)
        teacher.model.requires_grad_(False)
    elif settings.servers:
        teacher, servers = policy, ScoringServers(settings.servers)
        servers.connect(policy.tokenizer)
    else:
        teacher = frozen_copy(policy)
    return Teacher(
        policy=teacher,
        servers=servers,
        hint=_hint(settings.hint, policy),
    )


def _hint(text: str | None, policy: Policy) -> Callable[[Prompt], np.ndarray] | None:
    """The ids of a hint, by the prompt's row."""
    if text is None:
        return None

    def ids(prompt: Prompt) -> np.ndarray:
        return np.asarray(
            policy.tokenizer(hint_of(text, prompt.row), add_special_tokens=False)["input_ids"],
            dtype=np.int64,
        )

    return ids


def hint_of(text: str, row: Mapping[str, Any]) -> str:
    """`teacher.hint` filled in with a row; empty for a row that lacks what it reads, or has nothing
    there.
    """
    try:
        return formatted(text, row, "row")
    except DataError:
        return ""


def parameter_count(blueprint: Blueprint) -> int:
    """Parameters of a model, counted without its weights."""
    return sum(parameter.numel() for parameter in weightless(blueprint).parameters())


def shape_of(blueprint: Blueprint, dtype: str = "float32") -> Shape:
    """The sizes of a model."""
    parameters = experts = 0
    for name, parameter in weightless(blueprint).named_parameters():
        parameters += parameter.numel()
        if ".experts." in name:
            experts += parameter.numel()
    return replace(Shape.of(blueprint.config, parameters, dtype=dtype), experts=experts)


def planned_quantization(recipe: Recipe, blueprint: Blueprint) -> QuantizedSize:
    """What the quantised base of a recipe takes; zeros if it is not quantised."""
    name = recipe.model.quantize
    return QuantizedSize() if name is None else quantized_size(weightless(blueprint), name)


def weightless(blueprint: Blueprint) -> PreTrainedModel:
    """A language model's modules on the meta device, by its configuration alone.  Raises
    ConfigError if it describes none.
    """
    keys = {key: value for key, value in blueprint.config.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(blueprint.config["model_type"], **keys)
        model = modules_of(language_class(config), config, torch.float32)
        freeze_towers(model)
        return model
    except (ValueError, *UNBUILDABLE) as error:
        raise unbuildable(blueprint.config.get("_name_or_path", ""), error) from error
