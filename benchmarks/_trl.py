"""TRL's side of `vs_trl.py`: its own trainers, unchanged but for a schedule that ends completions, and clocks around its phases.

The trainer runs its ordinary loop; a callback holds it before every step until the parent asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import Meter, Peak
from _pictures import Counted, embeddings, load_processor, rows_for_trl
from _workload import Workload, model_folder, reward, teacher_of
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList, Trainer, TrainerCallback
from trl import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from groupwise.data.tokenizers import load_tokenizer

STEPS = 10**6
CERTAIN = 1e30
"""A logit beside which no other token has any probability."""


class Schedule(LogitsProcessor):
    """EOS is drawn exactly at each row's scheduled last token: a step writes one column."""

    def __init__(self, length_R: np.ndarray, prompt: int, eos: int) -> None:
        self.length_R, self.prompt, self.eos = torch.from_numpy(length_R.reshape(-1)), prompt, eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits (R, V) of the next token -> the same with EOS hidden, or forced."""
        self.length_R = self.length_R.to(scores.device)
        scores[:, self.eos] = torch.where(self.length_R == input_ids.shape[1] - self.prompt + 1, CERTAIN, -torch.inf)
        return scores


class Conductor(TrainerCallback):
    """Stands between the parent's commands and the trainer's steps."""

    def __init__(self, connection: Connection, folder: Path, work: Workload) -> None:
        self.connection, self.folder, self.work = connection, folder, work
        self.meter = Meter(work.device)
        self.peak: Peak | None = None
        self.checking = False
        self.seen: dict[str, Any] = {}
        self.trainer: Trainer | None = None
        self.tower: Counted | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Wait for a command."""
        if self.peak is None:
            self.peak = Peak(self.work.device)
            self.connection.send("ready")
        command = self.connection.recv()
        if command == "end":
            raise SystemExit(0)
        self.checking, self.seen = command == "check", {}
        self.phase = self.meter.phase("step")
        self.phase.__enter__()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Keep the gradients of the step that is compared."""
        if self.checking:
            assert self.trainer is not None
            path = self.folder / "trl_gradients.npz"
            gradients = {name: p.grad.cpu().numpy() for name, p in self.trainer.model.named_parameters() if p.grad is not None}
            np.savez(path, **gradients)
            self.seen["gradients"] = str(path)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report."""
        self.phase.__exit__(None, None, None)
        seconds = self.meter.read()
        for table in seconds.values():
            table["rollout"] = table.get("rollout", 0.0) - table.get("reference", 0.0)
            table["update"] = table["step"] - table["rollout"] - table.get("reference", 0.0)
        assert self.peak is not None
        if self.tower is not None:
            self.seen["tower"] = self.tower.read()
        self.connection.send(seconds | {"peak": self.peak.above()} | self.seen)


def serve(connection: Connection, work: Workload, folder: Path, scratch: Path) -> None:
    """Train until told to end; runs in a process of its own."""
    torch.set_num_threads(work.threads)
    conductor = Conductor(connection, scratch, work)
    make = {"grpo": _grpo, "distill": _distill, "sft": _sft, "reward": _reward}[work.objective]
    trainer = make(work, folder, scratch, conductor)
    conductor.trainer = trainer
    trainer.train()


def _settings(work: Workload, scratch: Path) -> dict[str, Any]:
    """Same rate, optimizer and clipping as on our side; nothing saved, nothing reported."""
    rows = work.prompts * (work.group if work.online else 1)
    settings: dict[str, Any] = {
        "output_dir": str(scratch / "trl"),
        "per_device_train_batch_size": rows // work.trl_microbatches,
        "gradient_accumulation_steps": work.trl_microbatches,
        "learning_rate": 1e-7,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": STEPS,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": work.device == "cpu",
        "dataloader_pin_memory": False,
        "seed": work.seed,
    }
    if not work.trl_defaults:
        settings |= {"bf16": work.dtype == "bfloat16", "gradient_checkpointing": work.checkpointing}
    return settings


def _grpo(work: Workload, folder: Path, scratch: Path, conductor: Conductor) -> Trainer:
    config = GRPOConfig(
        **_settings(work, scratch),
        num_generations=work.group,
        max_completion_length=work.completion,
        loss_type="grpo",
        beta=work.beta,
        temperature=1.0,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
    )
    dead = [bool(d) for d in work.dead_prompts()]
    processor = load_tokenizer(str(folder))
    if work.image:
        words = [work.text_of(ids[embeddings(work) + 2 :]) for ids in work.prompt_ids()]
        data = Dataset.from_list(rows_for_trl(work, words, dead))
        processor = load_processor(folder, processor)
    else:
        data = Dataset.from_dict({"prompt": [work.text_of(ids) for ids in work.prompt_ids()], "dead": dead})
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=processor,
        callbacks=[conductor],
    )
    if work.image:
        # Ours trains no encoder either.
        trainer.model.model.visual.requires_grad_(False)
        conductor.tower = Counted(trainer.model.model.visual)
    _scheduled(trainer, work)
    meter = conductor.meter
    roll, score = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies
    inside = False
    seen_logp: dict[tuple[int, ...], list[float]] = {}

    def timed_rollout(inputs: Any) -> Any:
        nonlocal inside
        inside = True
        with meter.phase("rollout"):
            outputs = roll(inputs)
        inside = False
        lengths = outputs["completion_mask"].sum(1)
        assert lengths.tolist() == work.schedule().reshape(-1).tolist(), "completions do not follow the schedule"
        if conductor.checking:
            ids = [c[:n].tolist() for c, n in zip(outputs["completion_ids"], lengths, strict=True)]
            prompts = [p[m.bool()].tolist() for p, m in zip(outputs["prompt_ids"], outputs["prompt_mask"], strict=True)]
            assert prompts == work.prompt_ids().repeat(work.group, 0).tolist(), "prompts are not the same on both sides"
            out = [bool(d) for d in work.dead_prompts().repeat(work.group)]
            conductor.seen |= {"completions": ids, "rewards": reward([], [], ids, out)}
        return outputs

    def timed_score(*inputs: Any, **keywords: Any) -> Any:
        if inside:
            with meter.phase("reference"):
                return score(*inputs, **keywords)
        outputs = score(*inputs, **keywords)
        if conductor.checking:
            # The trainer has shuffled its rows since they were drawn.
            _, tokens, mask, _ = inputs[:4]
            for ids, real, logp in zip(tokens, mask.bool(), outputs[0].detach().float(), strict=True):
                whole = tuple(ids[real].tolist())
                seen_logp[whole] = logp[: len(whole) - work.prompt].tolist()
            prompts = work.prompt_ids().repeat(work.group, 0).tolist()
            wholes = [tuple(p + c) for p, c in zip(prompts, conductor.seen["completions"], strict=True)]
            conductor.seen["logp"] = [seen_logp.get(whole) for whole in wholes]
        return outputs

    trainer._generate_and_score_completions = timed_rollout
    trainer._get_per_token_logps_and_entropies = timed_score
    return trainer


def _scheduled(trainer: Trainer, work: Workload) -> None:
    """Completions end where the schedule says."""
    schedule = LogitsProcessorList([Schedule(work.schedule(), work.prompt, work.eos)])
    generate = trainer.model.generate
    trainer.model.generate = lambda **inputs: generate(**inputs, logits_processor=schedule)


def _distill(work: Workload, folder: Path, scratch: Path, conductor: Conductor) -> Trainer:
    """It knows no groups: every completion is a row of its own, in which its prompt stands again."""
    config = DistillationConfig(
        **_settings(work, scratch),
        max_completion_length=work.completion,
        beta=1.0,
        temperature=1.0,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
    )
    rows = [work.text_of(ids) for ids in work.prompt_ids().repeat(work.group, 0)]
    trainer = DistillationTrainer(
        model=str(folder),
        teacher_model=str(model_folder(teacher_of(work), folder.parent)),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        processing_class=load_tokenizer(str(folder)),
        callbacks=[conductor],
    )
    _scheduled(trainer, work)
    roll = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        with conductor.meter.phase("rollout"):
            outputs = roll(inputs)
        lengths = outputs["completion_mask"].sum(1)
        assert lengths.tolist() == work.schedule().reshape(-1).tolist(), "completions do not follow the schedule"
        if conductor.checking:
            ids = [c[:n].tolist() for c, n in zip(outputs["completion_ids"], lengths, strict=True)]
            prompts = [p[m.bool()].tolist() for p, m in zip(outputs["prompt_ids"], outputs["prompt_mask"], strict=True)]
            assert prompts == work.prompt_ids().repeat(work.group, 0).tolist(), "prompts are not the same on both sides"
            conductor.seen["completions"] = ids
        return outputs

    trainer._generate_and_score_completions = timed
    return _keep_loss(trainer, conductor)


def _keep_loss(trainer: Trainer, conductor: Conductor) -> Trainer:
    training_step: Callable[..., torch.Tensor] = trainer.training_step

    def kept(*inputs: Any, **keywords: Any) -> torch.Tensor:
        loss = training_step(*inputs, **keywords)
        conductor.seen["loss"] = float(loss)
        return loss

    trainer.training_step = kept  # type: ignore[method-assign]
    return trainer


def _sft(work: Workload, folder: Path, scratch: Path, conductor: Conductor) -> Trainer:
    rows = zip(work.prompt_ids(), work.completion_ids(), strict=True)
    data = [
        {"input_ids": [*map(int, prompt), *map(int, completion)], "completion_mask": [0] * len(prompt) + [1] * len(completion)}
        for prompt, completion in rows
    ]
    trainer = SFTTrainer(
        model=str(folder),
        args=SFTConfig(**_settings(work, scratch), model_init_kwargs={"dtype": "float32"}, completion_only_loss=True),
        train_dataset=Dataset.from_list(data),
        processing_class=load_tokenizer(str(folder)),
        callbacks=[conductor],
    )
    return _keep_loss(trainer, conductor)


def _reward(work: Workload, folder: Path, scratch: Path, conductor: Conductor) -> Trainer:
    sides = work.completion_ids()
    data = [
        {name: [*map(int, prompt), *map(int, side)] for name, side in (("chosen_ids", chosen), ("rejected_ids", rejected))}
        for prompt, chosen, rejected in zip(work.prompt_ids(), sides[::2], sides[1::2], strict=True)
    ]
    config = RewardConfig(**_settings(work, scratch), model_init_kwargs={"dtype": "float32"})
    trainer = RewardTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=load_tokenizer(str(folder)),
        callbacks=[conductor],
    )
    return _keep_loss(trainer, conductor)
