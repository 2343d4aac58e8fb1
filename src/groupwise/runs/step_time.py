"""Seconds of a step before the run: what its models compute, at the speed that was measured on such
a device with a model of about that size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from groupwise.config.settings import Recipe, engine_traits
from groupwise.models.shape import Shape, names_experts
from groupwise.ops.operations import absence
from groupwise.runs.measured_speeds import KINDS, MEASURED, PEAKS, MeasuredSpeed
from groupwise.runs.plan import Load
from groupwise.runs.prepared import Prepared
from groupwise.runs.run_models import shape_of
from groupwise.training.work import forward_flops, sampling_flops

MOST_APART = 4.0
"""A model that is more than so many times larger or smaller was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A range for the seconds of a step, and where it is from."""

    least: float
    most: float
    measured: MeasuredSpeed

    @property
    def source(self) -> str:
        """The device, the speed and the model that were measured, and when."""
        row = self.measured
        peak = PEAKS.get(row.device)
        if peak is None:
            speeds = f"{row.update / 1e9:.0f} and {row.rollout / 1e9:.0f} GFLOP/s"
        else:
            speeds = f"{row.update / peak:.1%} and {row.rollout / peak:.2%} of the peak"
        device = KINDS.get(row.device, row.device)
        return (
            f"updates and sampling at {speeds}, measured on {device} with"
            f" {row.blocks / 1e6:.3g}M parameters in blocks, {row.date}, {row.commit}"
        )


def step_time(prepared: Prepared) -> StepTime | None:
    """Estimate a step of a recipe on this device; None where nothing alike was measured.

    The range is from texts half as long as the longest on all threads, to the longest on one core.
    """
    recipe, load = prepared.recipe, prepared.load
    sampler = engine_traits(recipe.rollout.engine.name)
    if load.completion_tokens and not sampler.prepares:
        return None
    environment = recipe.environment
    if environment.talks or environment.asks or load.adapter or load.rewards:
        return None
    if names_experts(prepared.blueprint.config) or (load.cpu and absence()):
        return None
    shape = shape_of(prepared.blueprint, recipe.model.dtype)
    row = nearest(device_name(load), shape)
    if row is None:
        return None
    threads = 1
    if row.device in KINDS:
        threads = recipe.threads or torch.get_num_threads()
    least = _seconds(recipe, shape, load, row, part=0.5) / threads
    return StepTime(least=least, most=_seconds(recipe, shape, load, row, part=1.0), measured=row)


def nearest(device: str | None, shape: Shape) -> MeasuredSpeed | None:
    """Return the measured speed of a device with a model of about this size."""
    dtype = "float32" if shape.bytes_per_product == 4 else "bfloat16"
    blocks = shape.parameters - shape.outside
    best, least = None, math.log(MOST_APART)
    for row in MEASURED:
        apart = abs(math.log(row.blocks / blocks))
        if (row.device, row.dtype) == (device, dtype) and apart <= least:
            best, least = row, apart
    return best


def device_name(load: Load) -> str | None:
    """What the table of measured speeds may call the device of a step; None for a GPU that is not
    there.
    """
    if load.cpu:
        return processor_kind()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def processor_kind(cpus: Path = Path("/proc/cpuinfo")) -> str | None:
    """The kind of this machine's processor; None where it is not known."""
    if not cpus.exists():
        return None
    fields: dict[str, str] = {}
    for line in cpus.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", "").split()
    family = (fields.get("vendor_id"), fields.get("cpu family"))
    if "avx512f" in flags and family == ("AuthenticAMD", "25"):
        return "zen4"
    for flag, kind in (("amx_bf16", "amx"), ("avx512f", "avx512"), ("avx2", "avx2")):
        if flag in flags:
            return kind
    return None


def _seconds(recipe: Recipe, shape: Shape, load: Load, row: MeasuredSpeed, *, part: float) -> float:
    """Seconds of a step on one core, or a GPU, with texts of a part of the longest."""
    prompt = max(1, round(part * load.prompt_tokens))
    completion = max(1, round(part * load.completion_tokens))
    if not load.completion_tokens:  # rows of a data set: every token but the first is learnt
        prompt, completion = 1, prompt
    rows = [("", prompt, completion, completion)] * load.group
    forward = load.prompts * forward_flops(shape, rows)
    passes = 3 * recipe.group.updates_per_rollout
    if load.recompute:
        passes += recipe.group.updates_per_rollout
    if load.reference:
        passes += 1
    seconds = passes * forward / row.update
    if load.completion_tokens:
        seconds += load.prompts * sampling_flops(shape, rows) / row.rollout
    return seconds
