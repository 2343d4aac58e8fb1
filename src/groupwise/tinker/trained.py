"""A model in training: requests add to its gradient, and a step of the optimizer uses it up.

The pass and the optimizer are the trainer's (`training/passes.py`, `training/optimizer.py`); what
differs is that the gradient of several requests is summed before a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.config.settings import (
    LoraSettings,
    ModelSettings,
    OptimizerSettings,
    Recipe,
    positions_of,
)
from groupwise.errors import MemoryExceeded, out_of_memory
from groupwise.models.loading import make_policy
from groupwise.models.lora import model_without_layers
from groupwise.models.moe import balanced
from groupwise.models.passes import packed_pass
from groupwise.models.policy import Policy
from groupwise.models.saving import merged, save_to_resume
from groupwise.runs import checkpoint
from groupwise.runs.prepared import modelled
from groupwise.runs.run_models import fit_threads, hold
from groupwise.tinker.batches import algorithm_of, packed_data
from groupwise.tinker.bodies import AdamBody
from groupwise.tinker.wire import BatchRequest, batch_output
from groupwise.training.loss import Loss
from groupwise.training.objectives import language_model
from groupwise.training.optimizer import Optimizer
from groupwise.training.passes import assess, batches_of, score
from groupwise.utils import files
from groupwise.utils.http import Refused

ALPHA = 32.0
"""The alpha of every adapter: the SDK cannot name one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOrigin:
    """What a model is made of: it is written into its checkpoints, and made anew from them."""

    settings: ModelSettings
    """The base model, with the adapter that is trained; without one all weights are."""
    seed: int
    """Seed of a new adapter."""

    @property
    def rank(self) -> int | None:
        """The adapter's rank; None where all weights are trained."""
        return None if self.settings.lora is None else self.settings.lora.rank

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint says of it."""
        lora = self.settings.lora
        state = {"base": self.settings.path, "rank": self.rank, "seed": self.seed}
        if lora is not None:
            state["targets"] = lora.targets
        return state

    @classmethod
    def read(cls, state: Mapping[str, Any], base: ModelSettings) -> ModelOrigin:
        """Read what a checkpoint says.   base: the model that the server was started with.

        Raises Refused for a checkpoint of another model.
        """
        if state["base"] != base.path:
            raise Refused(f"the checkpoint is of {state['base']}, and this server has {base.path}")
        if state["rank"] is None:
            return cls(settings=replace(base, lora=None), seed=state["seed"])
        targets = state["targets"]
        if not isinstance(targets, str):
            targets = tuple(targets)
        lora = LoraSettings(rank=state["rank"], alpha=ALPHA, targets=targets)
        return cls(settings=replace(base, lora=lora), seed=state["seed"])


class TrainedModel:
    """A policy with its optimizer, and the gradient of the requests since the last step."""

    def __init__(self, origin: ModelOrigin, resume: Path | None = None) -> None:
        """resume: a checkpoint whose weights are taken instead of the base's."""
        recipe = Recipe(objective="sft", seed=origin.seed, model=origin.settings)
        folder = None if resume is None else resume / "policy"
        recipe, blueprint = modelled(recipe, folder)
        self.origin = origin
        self.policy: Policy = hold(recipe, blueprint, language_model, folder)
        fit_threads(self.policy, None)
        self.positions = positions_of(recipe)
        self.optimizer = Optimizer(self.policy.model, OptimizerSettings(), total_steps=1)
        self.requests = 0
        """Requests whose gradient is summed."""
        self.spoilt = ""
        """Why the gradient is not whole; empty: it is."""

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.optimizer.taken

    def run_batch(self, request: BatchRequest) -> bytes:
        """Compute a batch, and unless it is `forward_only` add its gradient to what is there.

        A batch that fails leaves no part of a gradient: the next step is refused.
        """
        try:
            return self._run_batch(request)
        except BaseException as error:
            if not request.forward_only:
                self.spoil(f"forward_backward (request {request.number}) failed: {error}")
            raise

    def _run_batch(self, request: BatchRequest) -> bytes:
        algorithm = algorithm_of(request.loss, request.config)
        data = packed_data(request.data(), request.loss, self.policy)
        loss = Loss(algorithm=algorithm, samples=data.samples)
        prompts = score(self.policy, data.prompts, max_tokens_per_microbatch=self.positions)
        if request.forward_only:
            assessed = assess(
                self.policy, loss, data.samples, max_tokens_per_microbatch=self.positions
            )
            value, logp = assessed.loss, assessed.seen
        else:
            value, logp = self._add_gradient(loss)
        return batch_output(data.logp(logp, prompts.logp), {"loss:sum": value})

    def _add_gradient(self, loss: Loss) -> tuple[float, list[np.ndarray]]:
        """Make a pass forward and backward; return the loss and the log-probs of the samples."""
        samples = loss.samples
        batches = balanced(self.policy, batches_of(self.policy, samples, self.positions))
        try:
            value, seen = packed_pass(self.policy, loss, batches, learn=True).read(samples)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise MemoryExceeded(
                f"{self.positions} packed positions at a time do not fit into memory; send shorter"
                " data"
            ) from error
        self.requests += 1
        logp: list[np.ndarray] = [np.empty(0)] * len(samples)
        for place, columns in seen:
            logp[place] = columns[:, 0]
        return value, logp

    def spoil(self, reason: str) -> None:
        """Drop the gradient: a part of it is missing, so no step is taken on it."""
        self.optimizer.clear()
        self.requests, self.spoilt = 0, reason

    def step(self, adam: AdamBody) -> dict[str, Any]:
        """Take one optimizer step on the gradient that is there."""
        requests, spoilt = self.requests, self.spoilt
        self.requests, self.spoilt = 0, ""
        if spoilt:
            self.optimizer.clear()
            raise Refused(f"no step is taken: {spoilt}")
        if not requests:
            raise Refused("no step is taken: there was no forward_backward since the last one")
        self._set(adam)
        stats = self.optimizer.step()
        if stats.skipped:
            raise Refused("no step is taken: the gradient is not finite")
        metrics = {"grad_norm": stats.grad_norm, "learning_rate": stats.lr}
        return {"type": "optim_step", "metrics": metrics}

    def _set(self, adam: AdamBody) -> None:
        """Give the optimizer the settings of one step."""
        self.optimizer.settings = OptimizerSettings(
            lr=adam.learning_rate, clip_norm=adam.grad_clip_norm or None
        )
        for group in self.optimizer.adamw.param_groups:
            group["betas"], group["eps"] = (adam.beta1, adam.beta2), adam.eps
            # Of matrices only, as the optimizer was made.
            matrices = any(parameter.ndim >= 2 for parameter in group["params"])
            group["weight_decay"] = adam.weight_decay if matrices else 0.0

    # ---- checkpoints

    def save(self, folder: Path, metadata: Mapping[str, str], *, optimizer: bool) -> None:
        """Write a checkpoint.   optimizer: with its state, which a run needs to go on to the bit.
        The gradient of a step that was not taken is no part of it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        same_step = checkpoint.path_of(folder, self.steps)
        if same_step.exists():
            files.remove(same_step)
        state = {"model": self.origin.state(), "metadata": dict(metadata), "optimizer": None}
        tensors = {}
        if optimizer:
            state["optimizer"] = self.optimizer.numbers()
            tensors = self.optimizer.tensors()
        checkpoint.save(
            folder,
            self.steps,
            policy_writer=partial(save_to_resume, self.policy),
            state=state,
            tensors=tensors,
            keep=1,
        )

    @classmethod
    def load(cls, path: Path, base: ModelSettings, *, optimizer: bool) -> TrainedModel:
        """Read a checkpoint.   optimizer: with the state of the optimizer.

        Raises Refused where that was asked for and is not there.
        """
        state = checkpoint.load(path, verify=False)
        model = cls(ModelOrigin.read(state["model"], base), path)
        if optimizer:
            if state["optimizer"] is None:
                raise Refused(
                    "the checkpoint holds weights alone (it was saved for a sampler): load it"
                    " without the optimizer"
                )
            model.optimizer.restore(state["optimizer"], partial(checkpoint.read_tensors, path))
        return model

    def snapshot(self) -> Policy:
        """Return the weights as they are now, as a policy of its own that no step changes."""
        if self.policy.adapter is not None:
            # The weights under an adapter are never changed; those with it are copies.
            model = merged(self.policy)
        else:
            model = model_without_layers(self.policy.model, on=True, merge=False)
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        model.requires_grad_(False)
        return make_policy(model, self.policy.tokenizer, self.origin.settings)
