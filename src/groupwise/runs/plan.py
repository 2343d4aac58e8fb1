"""The plan of a run in numbers, before it starts: prompts, completions, updates, epochs, memory.

What a recipe does not set is derived here and shown; a recipe that would train nothing is refused
here, before step 1."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.parts import describe, is_built_in
from groupwise.config.settings import (
    ModelSettings,
    ParallelSettings,
    Recipe,
    engine_traits,
    positions_of,
)
from groupwise.config.validation import STAGE, policy_updates
from groupwise.data.load import Data
from groupwise.distributed import comm, layout
from groupwise.errors import ConfigError
from groupwise.models.loading import Blueprint, read_blueprint, resolve_device
from groupwise.models.lora import AdapterSize, adapter_size
from groupwise.models.quantized import QuantizedSize
from groupwise.models.shape import Shape
from groupwise.ops.linear_cross_entropy import chunk_rows
from groupwise.ops.operations import absence
from groupwise.rewards.model import POSITIONS
from groupwise.rewards.registry import MODEL
from groupwise.rollout.vllm.server import cache_bytes
from groupwise.runs.run_models import (
    largest_model,
    parameter_count,
    planned_quantization,
    shape_of,
    weightless,
)
from groupwise.training.stored_state import PIECE, moment_bytes
from groupwise.utils.spelling import counted

Lines = list[tuple[str, str]]
"""Label and text, as printed."""

LEAST_ACTIVATIONS, ACTIVATIONS_PER_PARAMETER, MOST_POSITIONS = 64 << 20, 12, 16384
"""What a micro-batch may keep for its backward pass, in bytes a parameter of the blocks: less than
AdamW's training state (16), and enough positions for products that run at full speed.  The
vocabulary's matrices do not count: more ids keep no more activations."""
LEAST_ON_GPU, SHARE_ON_GPU = 1024, 0.6
"""Fewest positions of a micro-batch on a GPU, and the part of its free memory that a step may take:
the rest is for other models, pieces and what sampling holds."""
HEAD_ROWS_ON_GPU = 2048
"""Fewest rows of the head whose logits exist at a time on a GPU (`ops.triton.head.ROWS`)."""
STAYS_ON_GPU = 8
"""What the native engine keeps on a GPU during an update is at most this part of the card
(`rollout.native.cuda.workspace.SHARE`).
"""
PIECES, PIECES_OF_BLOCKS = 50 << 20, 96 << 20
"""Fragmentation of the heap of a CPU, with the machine code of the products: a constant, and what a
model adds at most.  Measured (`benchmarks/memory.py`).  Nothing was measured on GPUs, so plans for
them leave it out."""
PIECES_UNDER_ADAPTER = 0.5
"""What an update of an adapter adds to it on a CPU, as a part of the activations: small tensors
between large ones leave holes that fit none.  Measured: 0 to 0.6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes by part."""

    weights: int
    """Weights in the policy's type."""
    gradients: int
    optimizer: int
    reference: int
    activations: int
    cache: int
    """Keys and values while sampling; never at the same time as activations."""
    quantized: int = 0
    """Codes and scales of a quantised base."""
    piece: int = 0
    """Moments that a step makes in float32, of a piece of the weights at a time."""
    rewards: int = 0
    """Weights of reward models, and their activations while they score."""
    gathered: int = 0
    """Sharded weights: the blocks that are gathered in training, and a gradient before it is
    reduced.
    """
    whole: int = 0
    """Sharded weights: all of them, gathered to sample with them in the process."""
    published: int = 0
    """On a CPU: the copy of the weights that were published last for servers."""
    host: int = 0
    """Bytes in the memory of the host instead."""
    prepared: int = 0
    """The native engine's copy of weights in the layout that decoding reads, while completions are
    sampled.
    """
    kept: int = 0
    """On a GPU: the prepared weights, keys and values that the native engine keeps while it
    trains.
    """
    vllm: int = 0
    """Weights, keys and values of a colocated vLLM."""
    vllm_awake: int = 0
    """The part of `vllm` that stays while it trains: on a CPU it cannot sleep."""
    fragmentation: int = 0
    """On a CPU: freed memory that nothing fits into (of it what sampling has left behind), and the
    products' machine code.
    """

    @property
    def held(self) -> int:
        """Bytes that are held all the time."""
        models = self.weights + self.quantized + self.reference + self.rewards
        return models + self.optimizer + self.published

    @property
    def training(self) -> int:
        """Bytes in a backward pass."""
        beside = self.gathered + self.kept + self.vllm_awake
        return self.held + self.gradients + self.activations + beside

    @property
    def stepping(self) -> int:
        """Bytes in a step of the optimizer."""
        return self.held + self.gradients + self.piece + self.kept + self.vllm_awake

    @property
    def sampling(self) -> int:
        """Bytes while completions are decoded in this process."""
        return self.held + self.whole + self.prepared + self.cache + self.vllm

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment of a step."""
        updating = max(self.training, self.stepping)
        return max(updating + self.fragmentation, self.sampling)

    @property
    def above(self) -> int:
        """Bytes at the fullest moment above what is there once all weights are loaded."""
        return self.peak - self.weights - self.quantized - self.reference - self.rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The work of one step over all processes."""

    prompts: int
    """Prompts of a step; rows of a data-set objective."""
    group: int
    prompt_tokens: int
    completion_tokens: int
    """The longest; of a data-set objective all is prompt, and this is 0."""
    max_tokens_per_microbatch: int
    """Positions of a micro-batch."""
    rows: int = 0
    """Completions that this program decodes at a time; 0 where servers sample."""
    prepared: int = 0
    """See `prepared_weights`."""
    stays: float = math.inf
    """Most bytes that the native engine keeps on a GPU while it trains; unknown where there is
    none.
    """
    vllm: int = 0
    """Bytes of a colocated vLLM."""
    published: int = 0
    """Bytes of the weights that are published for servers, on all processes together."""
    cpu: bool = True
    reference: bool = False
    recompute: bool = False
    rewards: int = 0
    """Bytes of reward models on each process."""
    adapter: int = 0
    """Parameters of a low-rank adapter, which then are all that is trained."""
    dropped: int = 0
    """Numbers of a position that an adapter reads through dropout, over all layers."""
    ranks: int = 0
    """Numbers between its two factors of a position, over all layers."""
    quantized: QuantizedSize = field(default_factory=QuantizedSize)
    """Layers of the base in few bits."""
    moments: int | None = None
    """Bytes of AdamW's moments; None: 8 of each number that is trained."""
    moments_on_host: bool = False

    def positions(self, prompts: int) -> int:
        """Packed positions of so many prompts and their completions; a prompt counts once."""
        return prompts * (self.prompt_tokens + self.group * self.completion_tokens)

    def fullest(self, prompts: int) -> int:
        """Positions of the largest micro-batch for so many prompts: whole groups, evenly dealt out,
        where a group fits.
        """
        group, every = self.positions(1), self.positions(prompts)
        if group > self.max_tokens_per_microbatch or every <= self.max_tokens_per_microbatch:
            return min(self.max_tokens_per_microbatch, every)
        batches = -(-prompts // (self.max_tokens_per_microbatch // group))
        return -(-prompts // batches) * group


ALONE = ParallelSettings(name="ddp")
WIDTHS = {"float32": 4, "bfloat16": 2, None: None}
"""Bytes of a number by `rollout.engine.dtype`; None: those of the policy's products."""


def process_memory(
    shape: Shape, load: Load, parallel: ParallelSettings = ALONE, *, prompts: int, world: int = 1
) -> MemoryPlan:
    """Bytes of one of `world` processes that samples for `prompts` of a step's prompts.

    The update is dealt out evenly, by positions.   parallel: decided.
    """
    samples = load.rows > 0
    workers = world // (parallel.tensor * parallel.context)
    measured = partial(
        memory,
        load=load,
        microbatch=load.fullest(-(-load.prompts // workers)),
        rows=min(load.rows, prompts * load.group),
        prompts=prompts if samples else 0,
        parts=parallel.context,
    )
    need, width = measured(shape), shape.bytes_per_weight
    if layout.splits(parallel):
        need = _split(need, measured, shape, parallel)
    published = -(-load.published // world)
    host = 0
    if load.cpu:
        need = replace(need, published=published)
    else:
        host = published
        if load.moments_on_host:
            host += load.moments or 0
        need = replace(need, host=host)
    if parallel.name == "ddp":
        return need
    # While it trains: embedding, last norm and head, and the blocks that are gathered (the one at
    # work and the next).
    block = (shape.parameters - shape.outside) // shape.layers
    resident = shape.parameters
    if parallel.name == "zero3":
        resident = shape.outside + 2 * block
    resident, block = resident // parallel.tensor, block // parallel.tensor
    base = (shape.parameters - load.quantized.numbers) * width + load.quantized.bytes
    shards, parts = parallel.shards or world // parallel.tensor, {}
    for name in ("weights", "quantized", "gradients", "optimizer", "reference"):
        parts[name] = -(-getattr(need, name) // shards)
    if parallel.offload:
        host += sum(parts.values())
        parts = dict.fromkeys(parts, 0)
    # Servers take shards as they are; an adapter is merged into whole weights for them, and parts
    # of matrices are joined.
    by_shards = load.published > 0 and not load.adapter and not layout.splits(parallel)
    return replace(
        need,
        **parts,
        # A block's (or the root's) gradient is whole before it is summed.
        gathered=need.gathered
        + resident * base // shape.parameters
        + max(block, shape.outside // parallel.tensor) * 4,
        whole=0 if by_shards else base,
        host=host,
    )


def _split(
    need: MemoryPlan,
    measured: Callable[[Shape], MemoryPlan],
    shape: Shape,
    parallel: ParallelSettings,
) -> MemoryPlan:
    """Return the memory of one of the processes that split a model between them, before FSDP2
    shards its part.

    measured: the memory of one that has a model of a shape for itself.   parallel: decided.
    """
    count, of_experts = parallel.tensor, parallel.expert
    if parallel.name != "ddp":
        of_experts = count  # FSDP2 shards them over copies alone: over all processes in the end

    def part(size: int) -> int:
        experts = size * shape.experts // shape.parameters
        return (size - experts) // count + experts // of_experts

    own = replace(
        shape,
        heads=shape.heads // count,
        kv_heads=shape.kv_heads // count,
        intermediate=shape.intermediate // count,
    )
    width, gathered = shape.bytes_per_weight, 0
    if count > 1:  # the head's weight, and its gradient, are whole while it computes
        gathered = shape.vocabulary * shape.hidden * (width + 4)
    return replace(
        need,
        weights=part(need.weights),
        gradients=part(need.gradients),
        optimizer=part(need.optimizer),
        reference=part(need.reference),
        activations=measured(own).activations,
        gathered=gathered,
        whole=shape.parameters * width,
    )


def prepared_weights(shape: Shape, *, cpu: bool) -> int:
    """Bytes of the weights that the native engine lays out anew for decoding
    (`ops.decoding.DecodeOperations`).

    On a CPU all of them.  On a GPU queries, keys and values lie side by side, and gate and up;
    other weights are read where they are, unless products run in another type.  GPT-2's matrices
    lie transposed, and all of its blocks are copied.
    """
    if cpu or shape.bytes_per_weight != shape.bytes_per_product:
        return shape.parameters * shape.bytes_per_product
    if not shape.gated:
        return (shape.parameters - shape.outside) * shape.bytes_per_product
    joined = (shape.heads + 2 * shape.kv_heads) * shape.head_width + 2 * shape.intermediate
    return shape.layers * shape.hidden * joined * shape.bytes_per_product


def memory(
    shape: Shape,
    load: Load,
    *,
    microbatch: int,
    rows: int = 0,
    prompts: int = 0,
    parts: int = 1,
) -> MemoryPlan:
    """Bytes of a step of one process.

    microbatch: positions of the largest forward and backward.   rows: completions decoded at the
        same time.
    prompts: of a rollout; the prompt's keys and values exist once per prompt.
    parts: processes that split a micro-batch's positions; the head is computed of all of them.
    """
    adapter = load.adapter
    trained = adapter or shape.parameters
    lower = shape.bytes_per_weight == 2
    kv = shape.kv_heads * shape.head_width
    stream = 4 if shape.bytes_per_weight == 4 else 2
    # Of a block that is computed again its inputs; the last is kept, and leaves its room to the
    # others one by one.
    recomputed = shape.layers - 1 if load.recompute else 0
    per_position = recomputed * shape.hidden * stream + (
        shape.layers - recomputed
    ) * kept_per_block(shape)
    # Behind dropout an adapter keeps its input once more, and a mask of a byte a number.  What is
    # between its factors is made again where a CPU computes it without dropout (`ops.adapted`).
    of_adapter = load.dropped * (shape.bytes_per_product + 1)
    if load.dropped or not load.cpu:
        of_adapter += load.ranks * shape.bytes_per_product
    per_position += of_adapter * (shape.layers - recomputed) // shape.layers
    own = -(-microbatch // parts)
    # While a block goes backward: its MLP's activations and the gradients of its two inner
    # products.
    working = 3 * shape.intermediate * shape.bytes_per_product + 2 * shape.hidden * stream
    quantized = load.quantized
    made = quantized.widest * shape.bytes_per_product
    # The head holds one chunk of logits, and the trained rows once more with their gradient.
    chunk_of_head = chunk_rows(shape.vocabulary, shape.bytes_per_product, shape.hidden)
    if not load.cpu:
        chunk_of_head = max(chunk_of_head, HEAD_ROWS_ON_GPU)
    chunk = min(microbatch, chunk_of_head) * shape.vocabulary
    head = (chunk + 2 * microbatch * shape.hidden) * shape.bytes_per_product
    # Gradients that are summed in another type are made first; weights in the products' type, for
    # the step.
    again = cast = reference = 0
    if lower and trained > shape.vocabulary * shape.hidden:  # the head is trained too
        again = 4 * shape.vocabulary * shape.hidden
    if shape.bytes_per_product != shape.bytes_per_weight:
        cast = (shape.parameters - quantized.numbers) * shape.bytes_per_product
    if load.reference and not adapter:
        reference = shape.parameters * shape.bytes_per_weight
    drawn = min(rows, chunk_rows(shape.vocabulary, 4))
    keys = (
        2
        * shape.layers
        * kv
        * (prompts * load.prompt_tokens + rows * load.completion_tokens)
        * shape.bytes_per_product
    )
    prepared = load.prepared if load.rows else 0
    blocks = (shape.parameters - shape.outside) * shape.bytes_per_product if prepared else 0
    kept = 0
    if prepared and not load.cpu and prepared + keys <= load.stays:
        kept = prepared + keys
    activations = own * per_position + max(own * working + made, head) + again + cast
    # Sampling leaves the pages of its keys, values and blocks in pieces; larger tensors have had
    # pages of their own.
    fragmentation = 0
    if load.cpu:
        fragmentation = PIECES + keys + min(blocks, PIECES_OF_BLOCKS)
        if quantized.numbers:  # its memory is given back (`models.quantized.give_memory_back`)
            fragmentation = PIECES
        elif adapter:
            fragmentation += int(PIECES_UNDER_ADAPTER * activations)
    moments, piece = 8 * trained, 0
    if load.moments is not None:
        moments, piece = load.moments, 8 * min(PIECE, trained)
    if load.moments_on_host:
        moments = 0
    return MemoryPlan(
        weights=(shape.parameters - quantized.numbers + adapter) * shape.bytes_per_weight,
        quantized=quantized.bytes,
        gradients=trained * 4,
        optimizer=moments + (4 * trained if lower else 0),
        piece=piece,
        reference=reference,
        activations=activations,
        cache=keys + drawn * shape.vocabulary * 4 * 3,
        rewards=load.rewards,
        prepared=prepared,
        kept=kept,
        vllm=load.vllm,
        vllm_awake=load.vllm if load.cpu else 0,
        fragmentation=fragmentation,
    )


def kept_per_block(shape: Shape) -> int:
    """Bytes that a position leaves in one block for the backward pass.

    The residual stream before each of the two norms, in its own type; in that of the products the
    norms' outputs, queries, keys, values, the attention's output, and the first products of the
    MLP.
    """
    kv, stream = shape.kv_heads * shape.head_width, 4 if shape.bytes_per_weight == 4 else 2
    inner = (
        2 * shape.hidden
        + 2 * shape.heads * shape.head_width
        + 2 * kv
        + (2 if shape.gated else 1) * shape.intermediate
    )
    return 2 * shape.hidden * stream + inner * shape.bytes_per_product


def microbatch(shape: Shape) -> int:
    """Positions per forward and backward where the recipe names none: what they keep is bounded by
    the model's own size.
    """
    room = max(LEAST_ACTIVATIONS, ACTIVATIONS_PER_PARAMETER * (shape.parameters - shape.outside))
    return max(1, min(MOST_POSITIONS, room // (shape.layers * kept_per_block(shape))))


def gpu_microbatch(
    shape: Shape,
    free: int,
    *,
    parallel: ParallelSettings = ALONE,
    world: int = 1,
    recompute: bool = False,
    adapter: bool = False,
    quantized: QuantizedSize | None = None,
) -> int:
    """Positions per forward and backward on a GPU of so many free bytes: `MOST_POSITIONS`, halved
    until a step fits.  Fewer launch the same kernels for less work.

    parallel: decided.   adapter: nothing but an adapter is trained.   quantized: its base.
    """
    positions = MOST_POSITIONS
    while positions > LEAST_ON_GPU:
        load = Load(
            prompts=world,
            group=1,
            prompt_tokens=positions,
            completion_tokens=0,
            max_tokens_per_microbatch=positions,
            cpu=False,
            recompute=recompute,
            adapter=int(adapter),
            quantized=quantized or QuantizedSize(),
        )
        need = process_memory(shape, load, parallel, prompts=1, world=world)
        if need.training <= SHARE_ON_GPU * free:
            break
        positions //= 2
    return positions


def free_memory(world: int) -> int:
    """Bytes that this process can take of its GPU; of several processes the smallest GPU's whole
    memory, so that all choose alike.
    """
    if world == 1:
        return torch.cuda.mem_get_info()[0]
    cards = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(card).total_memory for card in cards)


def fitted(recipe: Recipe, shape: Shape, quantized: QuantizedSize | None = None) -> Recipe:
    """The recipe with a size of its micro-batches.   quantized: layers of its base."""
    if recipe.optimizer.tokens_per_microbatch is not None:
        return recipe
    positions = microbatch(shape)
    if recipe.model.device != "cpu" and torch.cuda.is_available():
        world = comm.world().size
        positions = gpu_microbatch(
            shape,
            free_memory(world),
            parallel=ALONE if world == 1 else recipe.parallel,  # which is decided among several
            world=world,
            recompute=recipe.model.gradient_checkpointing,
            adapter=recipe.model.lora is not None,
            quantized=quantized,
        )
    optimizer = replace(recipe.optimizer, tokens_per_microbatch=positions)
    return replace(recipe, optimizer=optimizer)


def scoring_memory(shape: Shape, microbatch: int) -> int:
    """Bytes of a reward model and of its widest moment while it scores `microbatch` positions
    without a gradient.
    """
    kv = shape.kv_heads * shape.head_width
    attention = 2 * shape.hidden + 2 * shape.heads * shape.head_width + 2 * kv
    gated = 2 * shape.hidden + 3 * shape.intermediate
    return (
        shape.parameters * shape.bytes_per_weight
        + microbatch * max(attention, gated) * shape.bytes_per_product
    )


def memory_lines(need: MemoryPlan) -> Lines:
    """The memory plan as it is printed."""
    parts = {
        "weights": need.weights,
        "quantized base": need.quantized,
        "gradients": need.gradients,
        "optimizer": need.optimizer,
        "moments of a piece in a step": need.piece,
        "reference": need.reference,
        "other models": need.rewards,
        "gathered while training": need.gathered,
        "activations": need.activations,
        "whole weights while sampling": need.whole,
        "published weights": need.published,
        "prepared weights while sampling": need.prepared,
        "keys and values": need.cache,
        "kept of these while training": need.kept,
        "vLLM": need.vllm,
        "allocator fragmentation": need.fragmentation,
        "in host memory": need.host,
    }
    shown = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    return [("memory", f"about {size(need.peak)} at the peak ({shown})")]


def process_lines(shape: Shape, load: Load, parallel: ParallelSettings, world: int) -> Lines:
    """What each of `world` processes holds and does, as it is printed."""
    workers = world // (parallel.tensor * parallel.context)
    shards = parallel.shards or world // parallel.tensor
    copies = world // parallel.tensor // shards
    if parallel.name == "ddp":
        held = "all weights on each"
    else:
        held = f"weights, gradients and optimizer state sharded over {shards} ({parallel.name})"
        if copies > 1:
            held += f", {copies} copies"
        if parallel.offload:
            held += ", in host memory"
    if parallel.tensor > 1:
        held += f", each matrix of them split over {parallel.tensor} (tensor)"
    if parallel.expert > 1:
        held += f", experts divided over {parallel.expert} (expert)"
    if parallel.context > 1:
        held += f"; {parallel.context} split the positions of a micro-batch (context)"
    lines = [("processes", f"{world}, {held}; gradients are summed")]
    positions = -(-load.positions(load.prompts) // workers)
    training = (
        f"{positions:,} positions to train in"
        f" {counted(-(-positions // load.max_tokens_per_microbatch), 'micro-batch')}"
    )
    for name, prompts in prompts_of(load, world):
        work = training
        if load.completion_tokens:
            sampled = prompts * load.group * load.completion_tokens
            completions = f"{prompts} x {counted(load.group, 'completion')}"
            work = f"{completions}, at most {sampled:,} tokens; {training}"
        lines.append((name, work))
        lines += memory_lines(process_memory(shape, load, parallel, prompts=prompts, world=world))
    return lines


def prompts_of(load: Load, world: int) -> list[tuple[str, int]]:
    """Ranks that get the same number of prompts, as text, and that number."""
    least, remainder = divmod(load.prompts, world)
    lines = []
    for begin, end, count in ((0, remainder, least + 1), (remainder, world, least)):
        if end - begin == 1:
            lines.append((f"rank {begin}", count))
        elif end > begin:
            lines.append((f"ranks {begin}-{end - 1}", count))
    return lines


def online_plan(
    recipe: Recipe, rows: int, held_out: int, validation: int = 0, left_out: str = ""
) -> Lines:
    """Prompts, completions, updates and epochs of an online run.  Raises ConfigError if nothing
    would be trained.

    left_out: what was dropped of the data (`Report.left_out`), for messages.
    """
    group, steps = recipe.group, recipe.steps
    assert steps is not None
    if rows < 1:
        raise ConfigError(f"no prompt is left to train on{_because(left_out)}")
    if group.prompts_per_step > rows:
        raise ConfigError(
            f"group.prompts_per_step is {group.prompts_per_step}, but the data has only"
            f" {counted(rows, 'prompt')}: use group.prompts_per_step={rows} or less, or add"
            f" data{_because(left_out)}"
        )
    completions = group.prompts_per_step * group.group_size
    updates = group.updates_per_rollout * group.minibatches
    drawn, alone = steps * group.prompts_per_step, recipe.critic.pretrain
    of_policy = ""
    if alone:
        of_policy = f" of the policy, after {counted(alone, 'step')} of the critic alone"
    passes = f"passes {group.updates_per_rollout} x minibatches {group.minibatches}"
    longest = counted(recipe.rollout.max_new_tokens, "token")
    drawn_prompts = counted(group.prompts_per_step, "prompt")
    siblings = f"{drawn_prompts} x {counted(group.group_size, 'completion')}"
    in_all = f"{counted(steps, 'step')}, {counted(steps * completions, 'completion')}"
    return [
        ("data", f"{counted(rows, 'prompt')} to train on, {_held_out(held_out, validation)}"),
        ("a step", f"{siblings} = {counted(completions, 'completion')} of at most {longest}"),
        (
            "updates",
            f"{updates} per rollout ({passes}), {policy_updates(recipe):,} in all{of_policy}",
        ),
        ("in all", f"{in_all}, {drawn / rows:.2f} epochs"),
        *warmup_lines(recipe, policy_updates(recipe)),
    ]


def offline_plan(
    recipe: Recipe, rows: int, held_out: int, tokens: float, validation: int = 0, left_out: str = ""
) -> tuple[Lines, int]:
    """Rows, steps and epochs of a data-set run, and its number of steps.  `tokens`: mean per row.
    left_out: see `online_plan`.

    Raises ConfigError if nothing would be trained.
    """
    if rows < 1:
        raise ConfigError(f"no row is left to train on{_because(left_out)}")
    size = min(recipe.batch_size, rows)
    steps = recipe.steps or math.ceil((recipe.epochs or 0.0) * rows / size)
    if steps < 1:
        raise ConfigError(
            f"epochs {recipe.epochs:g} of {counted(rows, 'row')} make no step of {size}: raise"
            " epochs, or say steps"
        )
    lines = [
        (
            "data",
            (
                f"{counted(rows, 'row')} to train on ({tokens:.0f} tokens on average),"
                f" {_held_out(held_out, validation)}"
            ),
        ),
        ("a step", f"{counted(size, 'row')}, about {size * tokens:,.0f} tokens"),
        (
            "in all",
            (
                f"{counted(steps, 'step')}, {counted(steps * size, 'row')},"
                f" {steps * size / rows:.2f} epochs"
            ),
        ),
        *warmup_lines(recipe, steps),
    ]
    return lines, steps


def warmup_lines(recipe: Recipe, updates: int) -> Lines:
    """Say that a warm-up which is longer than the run is cut to it."""
    warmup = recipe.optimizer.warmup_steps
    if warmup <= updates:
        return []
    text = f"optimizer.warmup_steps ({warmup}) is cut to all {counted(updates, 'optimizer step')}"
    return [("warning", text)]


def _because(left_out: str) -> str:
    return f" ({left_out})" if left_out else ""


def _held_out(test: int, validation: int) -> str:
    text = f"{test:,} held out"
    return f"{validation:,} for validation, {text}" if validation else text


def size(count: float) -> str:
    """Bytes for people.

    >>> size(3_500_000_000), size(12_000)
    ('3.3 GiB', '11.7 KiB')
    """
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count:.0f} B"


# ---------------------------------------------------------------- of a recipe


def algorithm_line(algorithm: Algorithm) -> str:
    """An algorithm as its four parts, and what is added to them."""
    parts = (algorithm.credit, algorithm.ratio, algorithm.surrogate, algorithm.weights)
    text = f"{algorithm.name}: {' x '.join(map(describe, parts))}"
    if algorithm.needs.reference:
        text += f", KL {describe(algorithm.kl)} x {algorithm.beta} in the {algorithm.kl_place}"
    else:
        text += ", no KL"
    terms = [describe(term) for term in algorithm.extra if not is_built_in(term)]
    if terms:
        text += f"; plus {', '.join(terms)}"
    if algorithm.needs.critic:
        text += "; a critic"
    if algorithm.divergence is not None:
        text += f"; {describe(algorithm.divergence)} from a teacher"
    return f"{text}; dead groups {algorithm.dead_groups}, truncated {algorithm.truncated}"


def load_of(
    recipe: Recipe,
    blueprint: Blueprint,
    algorithm: Algorithm | None,
    rows: Data[Any],
    scorers: Sequence[Blueprint],
) -> Load:
    """The work of one step, for the memory plan.   scorers: reward models that do not exist yet."""
    group, device = recipe.group, recipe.model.device
    # A plan for GPUs needs none.
    cpu = device != "cuda" and resolve_device(recipe.model).type == "cpu"
    adapter = planned_adapter(recipe, blueprint)
    quantized = planned_quantization(recipe, blueprint)
    load = Load(
        prompts=recipe.batch_size,
        group=1,
        prompt_tokens=0,
        completion_tokens=0,
        max_tokens_per_microbatch=positions_of(recipe),
        cpu=cpu,
        recompute=recipe.model.gradient_checkpointing,
        adapter=adapter.parameters,
        dropped=adapter.inputs if recipe.model.lora and recipe.model.lora.dropout else 0,
        ranks=adapter.ranks,
        quantized=quantized,
    )
    if recipe.optimizer.state is not None:
        sizes = adapter.factors
        if recipe.model.lora is None:
            whole = weightless(blueprint).parameters()
            sizes = tuple(one.numel() for one in whole if one.requires_grad)
        load = replace(
            load,
            moments=moment_bytes(recipe.optimizer.state, sizes),
            moments_on_host=recipe.optimizer.state == "host",
        )
    if algorithm is None:
        longer_than_mean = math.ceil(mean_length(rows) * 1.2)
        return replace(load, prompt_tokens=longer_than_mean)
    shape = shape_of(blueprint, recipe.model.dtype)
    engine = engine_traits(recipe.rollout.engine.name)
    prepared = 0
    if engine.prepares:  # of a quantised base all matrices are made, as on a CPU
        prepared = prepared_weights(shape, cpu=cpu or recipe.model.quantize is not None)
    return replace(
        load,
        prompts=group.prompts_per_step,
        group=group.group_size,
        prompt_tokens=max(prompt.tokens.size for prompt in rows.train),
        completion_tokens=recipe.rollout.max_new_tokens,
        rows=recipe.rollout.max_rows if engine.own_weights else 0,
        prepared=prepared,
        stays=_stays(),
        vllm=_colocated(recipe, blueprint, shape),
        published=_published(recipe, shape),
        reference=algorithm.needs.reference,
        rewards=_other_models(recipe, algorithm, shape, scorers),
    )


def _stays() -> float:
    """Return most bytes that the native engine keeps on this machine's GPU while it trains."""
    if not torch.cuda.is_available():
        return math.inf
    return torch.cuda.get_device_properties(0).total_memory // STAYS_ON_GPU


def _colocated(recipe: Recipe, blueprint: Blueprint, shape: Shape) -> int:
    """Return the bytes of one process's part of a colocated vLLM; 0 without one."""
    engine = recipe.rollout.engine
    if not engine.colocated:
        return 0
    width = WIDTHS[engine.dtype] or shape.bytes_per_product
    cache = cache_bytes(shape, blueprint.context, recipe.rollout.max_rows, width)
    return (shape.parameters * width + cache) // engine.tensor_parallel


def _published(recipe: Recipe, shape: Shape) -> int:
    """Return the bytes of the weights that are published for servers; 0 without servers."""
    engine = recipe.rollout.engine
    if engine.colocated or not engine_traits(engine.name).beside:
        return 0
    return shape.parameters * (WIDTHS[engine.dtype] or shape.bytes_per_product)


def _other_models(
    recipe: Recipe, algorithm: Algorithm, shape: Shape, scorers: Sequence[Blueprint]
) -> int:
    """Bytes of reward models, of a critic and of a teacher; those that an earlier stage makes are
    left out.

    shape: of the policy.
    """
    total = sum(scoring_memory(shape_of(one), POSITIONS) for one in scorers)
    for reward in recipe.rewards:
        if reward.function == MODEL:
            other = shape_of(
                _blueprint_at(str(reward.args.get("path"))),
                str(reward.args.get("dtype", "float32")),
            )
            total += scoring_memory(other, int(reward.args.get("tokens_per_microbatch", POSITIONS)))
    critic, teacher = recipe.critic.path, recipe.teacher
    if algorithm.needs.critic and critic is not None and not critic.startswith(STAGE):
        total += 16 * parameter_count(
            _blueprint_at(critic)
        )  # weights, gradients and moments in float32
    if algorithm.needs.teacher and teacher.path is None and recipe.model.lora is None:
        total += shape.parameters * shape.bytes_per_weight  # a former self of the policy
    elif (
        algorithm.needs.teacher and teacher.path is not None and not teacher.path.startswith(STAGE)
    ):
        other = shape_of(_blueprint_at(teacher.path), recipe.model.dtype)
        total += other.parameters * other.bytes_per_weight
    return total


def _blueprint_at(path: str) -> Blueprint:
    return read_blueprint(ModelSettings(path=path))


def planned_adapter(recipe: Recipe, blueprint: Blueprint) -> AdapterSize:
    """What the adapter that a recipe trains adds; zeros if it trains none."""
    lora = recipe.model.lora
    return AdapterSize(0, 0) if lora is None else adapter_size(weightless(blueprint), lora)


ADAPTER_LR = 1e-5
"""Learning rate below which an adapter hardly moves: ten times as much is usual, where full
training takes 1e-6.
"""


def model_lines(recipe: Recipe, blueprint: Blueprint, load: Load, world: int | None) -> Lines:
    """What is trained, and what the process, or each of several, holds and does in a step."""
    shape = shape_of(blueprint, recipe.model.dtype)
    count = comm.world().size if world is None else world
    lines, lr = Lines(), recipe.optimizer.lr
    if load.adapter:
        beside = f"{shape.parameters:,} that stay as they are"
        share = f"{load.adapter / shape.parameters:.2%}"
        lines.append(("adapter", f"{load.adapter:,} parameters beside {beside} ({share})"))
        if lr < ADAPTER_LR:
            usual = "is one for training all weights; an adapter learns with about 1e-4"
            lines.append(("warning", f"optimizer.lr {lr:g} {usual}"))
    if load.quantized.numbers:
        few = load.quantized
        bits = 8 * few.bytes / few.numbers
        stays = f"{shape.parameters - few.numbers:,} stay in the policy's type"
        text = f"{few.numbers:,} parameters of the base in {bits:.2g} bits, {stays}"
        lines.append(("quantized", f"{recipe.model.quantize}: {text}"))
    capability = torch.backends.cpu.get_cpu_capability()
    old = platform.machine() in ("x86_64", "AMD64") and capability in ("DEFAULT", "AVX2")
    if recipe.model.dtype != "float32" and old and load.cpu:
        cost = "an update takes many times as long as in float32"
        remedy = f"this processor has no AVX-512, and {cost}: set model.dtype=float32"
        lines.append(("warning", f"model.dtype {recipe.model.dtype}: {remedy}"))
    parallel = layout.decided(recipe.parallel, largest_model(recipe, blueprint), count)
    if count == 1:
        positions = f"at most {load.max_tokens_per_microbatch:,} packed positions"
        lines.append(("micro-batches", positions))
        lines += memory_lines(process_memory(shape, load, prompts=load.prompts))
        if load.cpu and absence():
            lines.append(("kernels", f"torch's own, more slowly: {absence()}"))
    else:
        lines += process_lines(shape, load, parallel, count)
    if load.completion_tokens and not load.rows and not load.vllm:
        engine = recipe.rollout.engine.name
        lines.append(("not counted", f"what {engine} takes to sample, on this device or another"))
    return lines


def mean_length(rows: Data[Any]) -> float:
    """Tokens of a row that is trained on."""
    return sum(len(row) for row in rows.train) / max(len(rows.train), 1)
