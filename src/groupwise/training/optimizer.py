"""AdamW with its schedule, gradient clipping, and the rule that a step which is not finite is never
taken.

For bfloat16 weights the optimizer keeps float32 masters and sums the gradients of all micro-batches
in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.settings import OptimizerSettings
from groupwise.distributed import comm, fsdp
from groupwise.errors import ConfigError, Diverged

MAX_NONFINITE_STEPS = 5
"""Skipped steps in a row, whose gradients are not finite, after which a run ends."""


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`: linear warm-up, then constant,
    linear or cosine.  A warm-up that is longer than `total` is cut to it.

    >>> s = OptimizerSettings(lr=0.1, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    >>> [round(learning_rate(s, k, 6), 4) for k in range(6)]
    [0.05, 0.1, 0.1, 0.0868, 0.055, 0.0232]
    """
    warmup = min(settings.warmup_steps, total)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    low = settings.min_lr_ratio
    share = {
        "constant": 1.0,
        "linear": low + (1 - low) * (1 - progress),
        "cosine": low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)),
    }[settings.schedule]
    return settings.lr * share


@dataclass(frozen=True, slots=True)
class StepStats:
    """What happened at one optimizer step."""

    grad_norm: float
    """Euclidean norm of the whole gradient before clipping."""
    lr: float
    skipped: bool
    """True if the gradient was not finite: weights and optimizer state are as before."""
    entropy_bonus: float = 0.0
    """`Optimizer.entropy_bonus` of the step."""


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which says what moments a parameter begins with."""

    def zeros(self, master: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter before its first step."""
        return {moment: torch.zeros_like(master.detach()) for moment in ("exp_avg", "exp_avg_sq")}


class Optimizer:
    """AdamW over a model's trainable parameters.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = Optimizer(model, OptimizerSettings(lr=1e-2), total_steps=10)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step().skipped
    False
    """

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        total_steps: int,
        adamw: type[AdamW] = AdamW,
    ) -> None:
        """total_steps: of the schedule.   adamw: keeps the moments."""
        self.settings, self.total = settings, total_steps
        named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        self.parameters = [parameter for _, parameter in named]
        self.names = [name for name, _ in named]
        if not self.parameters:
            raise ConfigError("the model has no trainable parameter")
        self.lower = self.parameters[0].dtype in (torch.bfloat16, torch.float16)
        self.masters = [p.detach().float().clone() if self.lower else p for p in self.parameters]
        if self.lower:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.register_post_accumulate_grad_hook(_into(master))
        groups = []
        for alike in fsdp.by_kind(self.masters):
            decayed = [m for m in alike if m.ndim >= 2]
            plain = [m for m in alike if m.ndim < 2]
            groups.append({"params": decayed, "weight_decay": settings.weight_decay})
            groups.append({"params": plain, "weight_decay": 0.0})
        self.adamw = adamw(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
        )
        self.taken = 0
        """Optimizer steps taken or skipped."""
        self.exchanging = False
        """True while gradients are summed over the processes: another one may have them already and
        take the step, and would not get to its end without this process."""
        self.nonfinite = 0
        """Steps in a row that were skipped."""
        self.entropy_bonus = 0.0
        """Coefficient of an adaptive entropy bonus (`Algorithm.with_bonus`), which moves with every
        step.
        """

    def step(self) -> StepStats:
        """Sum the gradients of all processes, clip, update the weights, clear the gradients.

        A parameter without a gradient had a gradient of 0 (all of the step was skipped; an expert
        that no token was routed to): it moves by its moments, as it would if what was skipped had
        been computed.

        Skips an update whose gradient is not finite.  Raises Diverged after `MAX_NONFINITE_STEPS`
        of them in a row."""
        lr = learning_rate(self.settings, self.taken, self.total)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        limit = math.inf if self.settings.clip_norm is None else self.settings.clip_norm
        self.exchanging = True
        try:
            comm.sum_gradients(self.masters)
            norm_before = self._clip(limit)
            self.taken += 1
        finally:
            self.exchanging = False
        if self._decides_on_device or math.isfinite(float(norm_before)):
            self.adamw.step()
            self._write_weights()
        norm = float(norm_before)
        finite = math.isfinite(norm)
        if finite:
            self.nonfinite = 0
        else:
            self.nonfinite += 1
        broken = [] if finite else self._broken()
        self.clear()
        if self.nonfinite >= MAX_NONFINITE_STEPS:
            first = ", ".join(broken) or "overflow of the norm"
            raise Diverged(
                f"the gradient was not finite {self.nonfinite} steps in a row (first of"
                f" them: {first}); lower optimizer.lr, or look at the last rollouts"
            )
        return StepStats(norm, lr, not finite, self.entropy_bonus)

    @property
    def _decides_on_device(self) -> bool:
        """True where the step itself clips, and leaves out a gradient that is not finite."""
        master = self.masters[0]
        return master.is_cuda and fsdp.own(master) is master

    def _clip(self, limit: float) -> Tensor:
        """Clip the gradients, and return their norm before.

        On a GPU the step divides by a scale as it reads them: no pass is made over the gradients,
        and the host does not wait for the norm before the step.
        """
        if not self._decides_on_device:
            return fsdp.clip(self.masters, limit)
        gradients = [master.grad for master in self.masters if master.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        # `clip_grad_norm_` multiplies by min(limit / (norm + 1e-6), 1).
        self.adamw.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)  # type: ignore[attr-defined]
        self.adamw.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        return norm

    def clear(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.masters, *self.parameters):
            tensor.grad = None

    def _write_weights(self) -> None:
        if self.lower:
            with torch.no_grad():
                own, masters = map(fsdp.own, self.parameters), map(fsdp.own, self.masters)
                torch._foreach_copy_(list(own), list(masters))  # type: ignore[attr-defined]

    def _broken(self) -> list[str]:
        graded = ((name, master.grad) for name, master in self._named() if master.grad is not None)
        broken = (
            name for name, gradient in graded if not torch.isfinite(fsdp.whole(gradient)).all()
        )
        return [name for name, _ in zip(broken, range(5), strict=False)]

    def numbers(self) -> dict[str, Any]:
        """The scalar part of the state dict: all of the state that is not in `tensors`."""
        steps = next(iter(self.adamw.state.values()))["step"] if self.adamw.state else 0
        numbers = {"taken": self.taken, "nonfinite": self.nonfinite, "adam_steps": int(steps)}
        return numbers | ({"entropy_bonus": self.entropy_bonus} if self.entropy_bonus else {})

    def tensors(self) -> dict[str, Tensor]:
        """Moments and float32 masters by name (no copies), sharded as their parameters are; no
        moments before the first step.
        """
        tensors = {
            f"master.{name}": master.detach() for name, master in self._named() if self.lower
        }
        if not self.adamw.state:
            return tensors
        for name, master in self._named():
            for kind, tensor in self.adamw.state[master].items():
                if kind != "step":
                    tensors[f"{kind}.{name}"] = tensor
        return tensors

    def restore(
        self, numbers: Mapping[str, Any], read: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        """Continue from `numbers()` and `tensors()`; the weights themselves are the policy's.

        read: fills the tensors that it is given, by name.
        """
        self.taken, self.nonfinite = int(numbers["taken"]), int(numbers["nonfinite"])
        self.entropy_bonus = float(numbers.get("entropy_bonus", 0.0))
        if numbers["adam_steps"]:
            for master in self.masters:
                step = torch.tensor(float(numbers["adam_steps"]), device=master.device)
                self.adamw.state[master] = {"step": step, **self.adamw.zeros(master)}
        with torch.no_grad():
            read(self.tensors())

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, self.masters, strict=True)


def _into(master: Tensor) -> Any:
    """A hook that moves a finished gradient into the float32 sum of its master."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    return hook
