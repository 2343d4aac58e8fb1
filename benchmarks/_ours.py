"""Our side of `vs_trl.py`: the library's own loops, with the lengths of completions fixed by a schedule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import Meter, Peak
from _pictures import pictures
from _workload import Workload, model_folder, teacher_of

from groupwise.config.resolve import resolve
from groupwise.config.settings import GroupSettings, ModelSettings, OptimizerSettings, RewardModelSettings, RewardSettings
from groupwise.data.encoding import Demonstration, Pair
from groupwise.data.images import PromptImages
from groupwise.data.packing import pack, unpack
from groupwise.data.tokenizers import load_tokenizer
from groupwise.models.backbone import checkpointing
from groupwise.models.loading import make_policy, read_blueprint
from groupwise.models.passes import BatchPass
from groupwise.models.policy import Policy
from groupwise.models.reward_head import load_scorer
from groupwise.models.shape import Shape
from groupwise.models.sharded import frozen_copy
from groupwise.models.vision import seeing
from groupwise.ops.operations import operations
from groupwise.records import Finish, Prompt, Rollout, RolloutGroup, Sample, Sampling, Step
from groupwise.rewards.compose import build_rewards, no_rewards
from groupwise.rollout.native.engine import NativeEngine
from groupwise.runs.plan import Load, gpu_microbatch, microbatch, prepared_weights, process_memory
from groupwise.training import online
from groupwise.training.groups import SampledRollouts
from groupwise.training.loss import Loss
from groupwise.training.offline import SFT, Objective, train_offline
from groupwise.training.online import train_online
from groupwise.training.optimizer import Optimizer
from groupwise.training.preferences import reward_objective
from groupwise.training.samples import weigh
from groupwise.training.signals import add_signals
from groupwise.training.teachers import Teacher
from groupwise.utils.clock import Clock

# Large pages, as the command does; TRL's steps take as long with them, and half as much memory more.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
STEPS = 10**6


class Scheduled(NativeEngine):
    """Ends completion `index` of prompt `visit/p` after `lengths[p, index]` tokens."""

    lengths: np.ndarray

    def limit(self, prompt: Prompt, index: int, sampling: Sampling) -> int:
        """See `NativeEngine`."""
        return int(self.lengths[int(prompt.id.split("/")[1]), index])


def load(work: Workload, folder: Path) -> Policy:
    """The policy, with an EOS that cannot be drawn: the schedule alone ends completions."""
    dtype = "autocast" if work.dtype == "bfloat16" else "float32"
    settings = ModelSettings(path=str(folder), dtype=dtype, device=work.device)  # type: ignore[arg-type]
    blueprint = read_blueprint(settings, load_tokenizer(str(folder)))
    if work.objective == "reward":
        return load_scorer(settings, blueprint)
    policy = make_policy(blueprint.load(), blueprint.tokenizer, settings)
    if work.image:
        policy = seeing(policy, blueprint.images)
    return replace(policy, eos_ids=(work.vocab,)) if work.online else policy


def prompts_of(work: Workload, visit: int = 0) -> list[Prompt]:
    """The prompts of one step."""
    prompts = [
        Prompt(id=f"{visit}/{p}", tokens=ids, text=work.text_of(ids), row={"dead": bool(dead)})
        for p, (ids, dead) in enumerate(zip(work.prompt_ids(), work.dead_prompts(), strict=True))
    ]
    if work.image == 0:
        return prompts
    shown = zip(prompts, pictures(work, visit), strict=True)
    return [replace(prompt, images=PromptImages((picture,), prompt.tokens)) for prompt, picture in shown]


def optimizer_settings(work: Workload) -> OptimizerSettings:
    """A rate so small that every step sees the same policy; everything else as in TRL's defaults."""
    return OptimizerSettings(lr=1e-7, betas=(0.9, 0.999), weight_decay=0.0)


def positions(work: Workload, policy: Policy) -> int:
    """Packed positions of a micro-batch: the workload's, or the library's own choice for the model."""
    if work.microbatch:
        return work.microbatch
    shape = Shape.of_policy(policy)
    if policy.device.type != "cuda":
        return microbatch(shape)
    free = torch.cuda.mem_get_info()[0] + shape.parameters * shape.bytes_per_weight  # its weights are loaded already
    return gpu_microbatch(shape, free, recompute=work.checkpointing)


class Ours:
    """Answers the commands of `vs_trl.py`."""

    def __init__(self, work: Workload, folder: Path) -> None:
        self.work = work
        self.policy = load(work, folder)
        self.reference: Policy | None = None
        if work.online:
            self.group = GroupSettings(group_size=work.group, prompts_per_step=work.prompts, beta=work.beta, dead_groups="exact")
            self.algorithm = resolve(work.objective, self.group, work.completion)
            self.teacher = None
            if work.objective == "distill":
                self.teacher = Teacher(policy=frozen_copy(load(work, model_folder(teacher_of(work), folder.parent))))
            self.reference = frozen_copy(self.policy) if self.algorithm.needs.reference else None
        self.meter = Meter(work.device)
        self.loop = self._online() if work.online else self._offline()
        self.peak = Peak(work.device)

    def check(self, found: dict[str, Any]) -> dict[str, float]:
        """Log-probs and gradients of TRL's own completions, compared with TRL's (float32: to rounding)."""
        if self.work.online:
            samples = self._samples(found)
            told = {"teacher": self.teacher, "samples": samples}
            value, seen = self._gradients(samples, Loss(algorithm=self.algorithm, entropy_tokens=1.0, **told))
        else:
            objective, rows = self._rows()
            value, seen = self._gradients(objective.samples(rows), objective.loss, whole_groups=objective.whole_groups)
        torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), 1.0)
        difference = total = 0.0
        with np.load(found["gradients"]) as theirs:
            for name, parameter in self.policy.model.named_parameters():
                if not parameter.requires_grad:
                    continue
                assert parameter.grad is not None
                other = torch.from_numpy(theirs[name]).to(parameter.device)
                difference += float((parameter.grad - other).double().square().sum())
                total += float(other.double().square().sum())
        self.policy.model.zero_grad(set_to_none=True)
        result = {"gradient_relative": (difference / max(total, 1e-300)) ** 0.5, "gradient_norm": total**0.5}
        if "logp" in found:
            pairs = [np.abs(ours - np.array(logp)).max() for ours, logp in zip(seen, found["logp"], strict=True)]
            result["logp_largest"] = float(max(pairs))
        else:
            result["loss_difference"] = abs(value - found["loss"])
        return result

    def step(self) -> dict[str, Any]:
        """One step; seconds by phase."""
        passes = 0 if self.policy.vision is None else self.policy.vision.passes
        with self.meter.phase("step"):
            step = next(self.loop)
        seconds = self.meter.read()
        wall, cpu = seconds["wall"], seconds["cpu"]
        if self.work.online:
            lengths = [[len(rollout) for rollout in group.rollouts] for group in step.groups]
            assert lengths == self.work.schedule().tolist(), "completions do not follow the schedule"
        for table in (wall, cpu):
            table["update"] = table["step"] - table.get("rollout", 0.0) - table.get("reference", 0.0)
        if self.policy.vision is not None:
            seconds["tower"] = self.policy.vision.passes - passes
        return seconds | {"peak": self.peak.above()}

    def planned(self) -> int:
        """Bytes that `--dry-run` predicts for the fullest moment of a step, above what is loaded; lengths are the longest."""
        work, shape = self.work, Shape.of_policy(self.policy)
        load = Load(
            prompts=work.prompts,
            group=work.group,
            prompt_tokens=work.prompt,
            completion_tokens=work.completion,
            max_tokens_per_microbatch=positions(work, self.policy),
            rows=work.prompts * work.group,
            prepared=prepared_weights(shape, cpu=True),
            reference=self.reference is not None,
            recompute=work.checkpointing,
        )
        return process_memory(shape, load, prompts=work.prompts).above

    def _online(self) -> Iterator[Step]:
        work = self.work
        engine = Scheduled(self.policy, max_rows=work.prompts * work.group)
        engine.lengths = work.schedule()
        engine.send_weights(0)
        judged = self.teacher is None
        rewards = build_rewards([RewardSettings(function="_workload:reward")], columns=["dead"]) if judged else no_rewards()
        settings = optimizer_settings(work)
        visits = iter(range(STEPS))
        steps = train_online(
            self.policy,
            self.algorithm,
            SampledRollouts(
                algorithm=self.algorithm,
                engine=engine,
                rewards=rewards,
                draw=lambda count: prompts_of(work, next(visits))[:count],
                sampling=Sampling(max_new_tokens=work.completion),
                steps=STEPS,
                group=self.group,
            ),
            Optimizer(self.policy.model, settings, STEPS),
            group=self.group,
            max_tokens_per_microbatch=positions(work, self.policy),
            reference=self.reference,
            teacher=self.teacher,
            checkpointing=work.checkpointing,
        )
        return _metered(steps, self.meter)

    def _offline(self) -> Iterator[Step]:
        settings = optimizer_settings(self.work)
        objective, rows = self._rows()
        return train_offline(
            self.policy,
            objective,
            draw=lambda count: rows,
            optimizer=Optimizer(self.policy.model, settings, STEPS),
            max_tokens_per_microbatch=positions(self.work, self.policy),
            batch_size=len(rows),
            steps=STEPS,
            checkpointing=self.work.checkpointing,
        )

    def _rows(self) -> tuple[Objective[Any], list[Any]]:
        """The data-set objective and the rows of every step."""
        work = self.work
        prompts, completions = work.prompt_ids(), work.completion_ids()
        if work.objective == "reward":
            pairs = zip(prompts, completions[::2], completions[1::2], strict=True)
            rows: list[Any] = [Pair(id=str(i), prompt=p, chosen=c, rejected=r) for i, (p, c, r) in enumerate(pairs)]
            return reward_objective(RewardModelSettings()), rows
        demonstrations = zip(prompts, completions, strict=True)
        return SFT, [Demonstration(id=str(i), prompt=p, completion=c) for i, (p, c) in enumerate(demonstrations)]

    def _samples(self, found: dict[str, Any]) -> list[Sample]:
        """TRL's completions as weighted samples; its log-probs stand for the sampler's, as in its own loss."""
        groups = []
        size = self.work.group
        behavior = found.get("logp", [[0.0] * len(ids) for ids in found["completions"]])  # distillation reads none
        rewards = found.get("rewards", [0.0] * len(behavior))
        for p, prompt in enumerate(prompts_of(self.work)):
            rollouts = [
                Rollout(
                    prompt=prompt,
                    index=i,
                    tokens=np.array(ids, dtype=np.int64),
                    behavior_logp=np.array(logp, dtype=np.float32),
                    finish=Finish.LENGTH,
                    eos_ids=self.policy.eos_ids,
                    sampling=Sampling(),
                    text="",
                )
                for i, (ids, logp) in enumerate(zip(found["completions"], behavior, strict=True))
                if i // size == p
            ]
            reward = np.array(rewards[p * size : (p + 1) * size])
            groups.append(RolloutGroup(rollouts=tuple(rollouts), names=("reward",), rewards=reward[:, None], reward=reward))
        groups = add_signals(groups, self.algorithm, reference=self.reference, max_tokens_per_microbatch=1 << 20)
        return weigh(groups, self.algorithm.advantages(groups), self.algorithm)

    def _gradients(self, samples: list[Sample], loss: Any, **options: Any) -> tuple[float, list[np.ndarray]]:
        seen = [np.zeros(sample.completion.size) for sample in samples]
        total = 0.0
        options |= {"fill": self.policy.tiled, "device": self.policy.device}
        for batch in pack(samples, positions(self.work, self.policy), **options):
            with checkpointing(self.policy, self.work.checkpointing), operations().fused_modules(self.policy.model):
                value, seen_M = loss(BatchPass(self.policy, batch))
                value.backward()
            total += float(value.detach())
            logp_M = seen_M.detach() if seen_M.ndim == 1 else seen_M.detach()[:, 0]
            logp_P = logp_M.new_zeros(batch.layout.total)
            logp_P[batch.trained_M] = logp_M
            for index, values in unpack(batch, logp_P, samples):
                seen[index] = values
        return total, seen


def _metered(steps: Iterator[Step], meter: Meter) -> Iterator[Step]:
    """Count the loop's own phases with the benchmark's meter too, which knows processor seconds.  Here only a reference gives
    signals."""

    class Metered(Clock):
        @contextmanager
        def phase(self, name: str) -> Iterator[None]:
            with meter.phase("reference" if name == "signals" else name), super().phase(name):
                yield

    online.Clock = Metered  # type: ignore[misc]
    return steps


def serve(connection: Connection, work: Workload, folder: Path, scratch: Path) -> None:
    """Answer commands until told to end; runs in a process of its own."""
    torch.set_num_threads(work.threads)
    side = Ours(work, folder)
    connection.send("ready")
    while (command := connection.recv()) != "end":
        answers = {"step": side.step, "planned": side.planned}
        connection.send(answers[command]() if isinstance(command, str) else side.check(command))
