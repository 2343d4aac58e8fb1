"""Memory, compute and traffic of each of many processes: the plan of a run without starting it.

Memory and traffic follow from shapes; seconds also from a `Device` and from how much of its limits is reached, which is assumed.
Lengths are the longest that a recipe allows, so tokens and seconds are upper bounds.

numbers: of whatever width; Φ parameters; n processes, s of which share a copy of the weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from groupwise.models.shape import Shape
from groupwise.runs.plan import Lines, Memory, memory, memory_lines, size


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Peak speeds of one process's device, and the share of them that is assumed to be reached."""

    name: str
    flops: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second from its memory."""
    inside: float
    """Bytes a second to the other processes of its node."""
    between: float
    """Bytes a second to those of other nodes."""
    node: int = 8
    """Processes of a node."""
    reached: float = 0.4
    """Part of `flops` in a forward or backward pass."""
    streamed: float = 0.6
    """Part of the bandwidths."""


H100 = Device(
    name="H100 (989 TFLOP/s, 3.35 TB/s; 450 GB/s inside a node of 8, 50 GB/s between)",
    flops=989e12,
    bandwidth=3.35e12,
    inside=450e9,
    between=50e9,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The work of one step over all processes."""

    prompts: int
    """Of a data-set objective: rows."""
    group: int
    prompt_tokens: int
    completion_tokens: int
    """The longest; of a data-set objective all is prompt, and this is 0."""
    budget: int
    """Positions of a micro-batch."""
    rows: int = 0
    """Completions that a process decodes at a time."""
    passes: int = 1
    minibatches: int = 1
    reference: bool = False
    recompute: bool = False
    rewards: int = 0
    """Bytes of reward models on each process."""
    adapter: int = 0
    """Parameters of a low-rank adapter, which then are all that is trained."""

    def positions(self, prompts: int) -> int:
        """Packed positions of so many prompts and their completions; a prompt counts once."""
        return prompts * (self.prompt_tokens + self.group * self.completion_tokens)

    def fullest(self, prompts: int) -> int:
        """Positions of the largest micro-batch for so many prompts: whole groups, evenly dealt out, where a group fits."""
        group, every = self.positions(1), self.positions(prompts)
        if group > self.budget or every <= self.budget:
            return min(self.budget, every)
        batches = -(-prompts // (self.budget // group))
        return -(-prompts // batches) * group


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Bytes that a process sends, as a ring moves them."""

    copy: float = 0.0
    """To those that share a copy of the weights with it."""
    others: float = 0.0
    """To those that hold the same part of other copies."""

    def times(self, count: float) -> Sent:
        """The bytes of `count` such exchanges."""
        return Sent(copy=self.copy * count, others=self.others * count)

    @property
    def all(self) -> float:
        """All bytes, of both kinds."""
        return self.copy + self.others


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of a step on one process."""

    flops: float
    """Operations of the products."""
    read: float
    """Bytes that must come from the device's memory."""
    sent: Sent

    def seconds(self, device: Device, shards: int, world: int) -> float:
        """Seconds of the phase; only computing and reading are assumed to overlap."""
        work = max(self.flops / (device.flops * device.reached), self.read / (device.bandwidth * device.streamed))
        copy = device.inside if shards <= device.node else device.between
        others = device.inside if world <= device.node else device.between
        return work + (self.sent.copy / copy + self.sent.others / others) / device.streamed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process's part of a step."""

    prompts: int
    memory: Memory
    positions: int
    micro_batches: int
    phases: Mapping[str, Phase]


def rank(shape: Shape, load: Load, *, world: int, sharded: str, shards: int, offload: bool = False, prompts: int) -> Rank:
    """What a process does that samples for `prompts` of a step's prompts.  The update is dealt out evenly, by positions.

    sharded: `ddp`, `zero2` or `zero3`.   shards: processes that share a copy.
    """
    positions = -(-load.positions(load.prompts) // world)
    micro = -(-positions // load.budget)
    found = memory(
        shape,
        microbatch=load.fullest(-(-load.prompts // world)),
        rows=min(load.rows, prompts * load.group),
        prompts=prompts if load.completion_tokens else 0,
        prompt_tokens=load.prompt_tokens,
        completion_tokens=load.completion_tokens,
        reference=load.reference,
        recompute=load.recompute,
        rewards=load.rewards,
        adapter=load.adapter,
    )
    found = spread_memory(found, shape, sharded=sharded, shards=shards, offload=offload) if world > 1 else found
    sent = traffic(shape, sharded=sharded, world=world, shards=shards, trained=load.adapter)
    phases = _phases(shape, load, prompts, positions, micro, sent)
    return Rank(prompts=prompts, memory=found, positions=positions, micro_batches=micro, phases=phases)


def spread_memory(found: Memory, shape: Shape, *, sharded: str, shards: int, offload: bool = False) -> Memory:
    """Memory of a process that holds a part of weights, gradients and optimizer state."""
    if sharded == "ddp":
        return found
    width = shape.bytes_per_weight
    # While it trains: embedding, last norm and head, and the blocks that are gathered (the one at work and the next).
    block = (shape.parameters - shape.outside) // shape.layers
    kept = shape.outside + (2 * block if sharded == "zero3" else shape.parameters - shape.outside)
    parts = {name: -(-getattr(found, name) // shards) for name in ("weights", "gradients", "optimizer", "reference")}
    host = sum(parts.values()) if offload else 0
    if offload:
        parts = dict.fromkeys(parts, 0)
    return replace(
        found,
        **parts,
        # A block's (or the root's) gradient is whole before it is summed.
        gathered=kept * width + max(block, shape.outside) * 4,
        whole=shape.parameters * width,
        host=host,
    )


def traffic(shape: Shape, *, sharded: str, world: int, shards: int, trained: int = 0) -> dict[str, Sent]:
    """What a process sends for a micro-batch forward and backward, for one forward, for an update, and for whole weights.

    trained: parameters that have gradients; 0: all.
    """
    width, gradients, nothing = shape.bytes_per_weight, 4 * (trained or shape.parameters), Sent()
    if world == 1:
        return dict.fromkeys(("micro-batch", "forward", "update", "whole weights"), nothing)
    if sharded == "ddp":
        sums = Sent(others=2 * (world - 1) / world * gradients)
        return {"micro-batch": nothing, "forward": nothing, "update": sums, "whole weights": nothing}
    inside, copies = (shards - 1) / shards, world // shards
    gathered = shape.parameters * width * inside
    again = (shape.parameters - shape.outside) * width * inside if sharded == "zero3" else 0.0
    between = 2 * (copies - 1) / copies * gradients / shards
    micro = Sent(copy=gathered + again + gradients * inside, others=between)
    whole = Sent(copy=gathered)
    return {"micro-batch": micro, "forward": whole, "update": nothing, "whole weights": whole}


def _phases(shape: Shape, load: Load, prompts: int, positions: int, micro: int, sent: Mapping[str, Sent]) -> dict[str, Phase]:
    """A process samples for its prompts and trains its positions; all its completions are as long as they may be."""
    longest = load.prompt_tokens + load.completion_tokens
    weights = shape.parameters * shape.bytes_per_product
    kv = 2 * shape.layers * shape.kv_heads * shape.head_width * shape.bytes_per_product
    share = load.group * load.completion_tokens / max(load.positions(1), 1) if load.completion_tokens else 1.0
    forward = forward_flops(shape, positions, longest / 2, round(positions * share))
    phases = {}
    if load.completion_tokens:
        completions, rows = prompts * load.group, min(load.rows, prompts * load.group)
        steps = -(-completions // max(rows, 1)) * load.completion_tokens
        phases["rollout"] = Phase(
            flops=forward_flops(shape, load.positions(prompts), longest / 2, completions * load.completion_tokens),
            # A decoding step reads all weights, and the keys and values of what is decoded: half of the longest on average.
            read=steps * (weights + rows * longest / 2 * kv),
            sent=sent["whole weights"],
        )
    if load.reference:
        phases["reference"] = Phase(flops=forward, read=micro * weights, sent=sent["forward"].times(micro))
    times = load.passes * (4 if load.recompute else 3)
    updates = load.passes * load.minibatches
    moved = sent["micro-batch"].times(load.passes * max(micro, load.minibatches)), sent["update"].times(updates)
    sums = Sent(copy=moved[0].copy + moved[1].copy, others=moved[0].others + moved[1].others)
    again = recomputed_flops(shape, positions, longest / 2) if load.recompute else 0.0
    phases["update"] = Phase(flops=load.passes * (3 * forward + again), read=times * micro * weights, sent=sums)
    return phases


def forward_flops(shape: Shape, positions: int, context: float, logits: int) -> float:
    """Operations of a forward pass: products with the weights, attention at a mean context, logits where they are asked for."""
    body = shape.parameters - shape.outside
    attention = 4 * shape.layers * shape.heads * shape.head_width * context
    return positions * (2 * body + attention) + 2 * logits * shape.vocabulary * shape.hidden


def recomputed_flops(shape: Shape, positions: int, context: float) -> float:
    """Operations of computing blocks again: all but the last, without their fused MLPs' last products, which nobody reads."""
    every = forward_flops(shape, positions, context, 0) - 2 * positions * shape.layers * shape.hidden * shape.intermediate
    return every * (shape.layers - 1) / shape.layers


def prompts_of(load: Load, world: int) -> list[tuple[str, int]]:
    """Ranks that get the same number of prompts, as text, and that number."""
    less, more = divmod(load.prompts, world)
    groups = [group for group in ((0, more, less + 1), (more, world, less)) if group[1] > group[0]]
    return [(f"rank {begin}" if end - begin == 1 else f"ranks {begin}-{end - 1}", count) for begin, end, count in groups]


def rank_lines(shape: Shape, load: Load, *, world: int, sharded: str, shards: int, offload: bool, device: Device | None) -> Lines:
    """What every process holds and does, as it is printed; how long that takes on a `device`."""
    copies = world // shards
    parts = f"weights, gradients and optimizer state sharded over {shards} ({sharded})"
    held = "all weights on each" if sharded == "ddp" else parts
    held += f", {copies} copies" if sharded != "ddp" and copies > 1 else ""
    held += ", in host memory" if offload else ""
    lines = [("processes", f"{world}, {held}; gradients are summed")]
    for name, prompts in prompts_of(load, world):
        one = rank(shape, load, world=world, sharded=sharded, shards=shards, offload=offload, prompts=prompts)
        sampled = prompts * load.group * load.completion_tokens
        what = f"{prompts} x {load.group} completions, at most {sampled:,} tokens; " if load.completion_tokens else ""
        lines.append((name, f"{what}{one.positions:,} positions to train in {one.micro_batches} micro-batches"))
        lines += memory_lines(one.memory)
        lines += phase_lines(one, device, shards, world) if device is not None else []
    if device is not None:
        assumed = f"{device.reached:.0%} of its operations and {device.streamed:.0%} of its bandwidths reached"
        lines.append(("assumed", f"{device.name}, {assumed}, the longest completions; by formula, not measured"))
    return lines


def phase_lines(one: Rank, device: Device, shards: int, world: int) -> Lines:
    """How long the phases of a step take a process, and why."""
    seconds = {phase: work.seconds(device, shards, world) for phase, work in one.phases.items()}
    parts = [
        f"{phase} {seconds[phase]:.2g} s ({work.flops / 1e12:,.3g} TFLOP, sends {size(work.sent.all)})"
        for phase, work in one.phases.items()
    ]
    return [("phases", f"about {sum(seconds.values()):.2g} s a step: {', '.join(parts)}")]
