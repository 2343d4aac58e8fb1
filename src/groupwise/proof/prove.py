"""The proof: what a run computes with the model that is there equals the model's own forward and
backward pass.

It is made where the policy lies and in its type, on texts of the run's lengths, each by itself
against packed streams. Compared are log-probs of given tokens (`scoring`), gradients of an update
(`training`, `recompute`, `router`), and the log-probs that an engine draws with (`sampling`,
`conversations`).  What differs is refused.

In float32 what is the same differs by rounding only.  So the weights of a lower type are compared
in float32, where memory has room for that, and then in the lower type by a wide measure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.distributed import comm
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.models.backbone import checkpointing, hidden
from groupwise.models.moe import BALANCE, router_coefficient
from groupwise.models.passes import packed_for, reshard
from groupwise.models.policy import Policy
from groupwise.models.reach import REMEDY
from groupwise.models.reward_head import REMEDY as SCORES_REMEDY
from groupwise.models.reward_head import reads_tokens
from groupwise.proof.passes import (
    ComparedAttention,
    PassResults,
    balance_model_pass,
    balance_run_pass,
    model_pass,
    run_pass,
    shortened,
    some_gradients,
)
from groupwise.proof.texts import (
    FULL,
    NEAR,
    SMALL,
    ProvenSampler,
    Size,
    drawn,
    fewer_tokens,
    is_large,
    length_of,
    switches,
    written,
)
from groupwise.records import Sample
from groupwise.utils.spelling import counted

VALUES = 2e-4
"""Largest difference of a log-prob in float32, nats."""
GRADIENTS = (2e-3, 1e-3)
"""Largest difference of a parameter's gradient in float32, relative to its norm and a part of the
largest parameter's.
"""
COARSE_VALUES = 0.1
"""Largest median difference of log-probs in a lower type, relative to their spread."""
COARSE_ATTENTION = 0.05
"""Largest difference of what attention gives a token in a lower type, relative to the root mean
square over tokens.
"""
COARSE_GRADIENTS = (0.35, 0.05)
"""The same as `GRADIENTS`, in a lower type."""
UNSAID = 512
"""Tokens of the longest text where nobody says one."""
SINGLE = "this family is not supported: use another model"
AGAIN = "set model.gradient_checkpointing to false"
FLOAT32 = "set model.dtype to float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProof:
    """What was compared, and where, and is equal."""

    family: str
    paths: tuple[str, ...]
    place: str
    """The device and the types."""
    lengths: tuple[int, ...]
    """Tokens of the texts."""
    switches: tuple[int, ...]
    """Lengths at which the model changes something, which texts lie on both sides of."""
    difference: float
    """The largest of a log-prob, in nats; of a score."""

    @property
    def line(self) -> tuple[str, str]:
        """Label and text for the plan."""
        paths, lengths = self.paths, self.lengths
        verb, across, unit = "equals", "", " nats"
        if len(paths) > 1:
            verb = "equal"
        if self.switches:
            across = f", across {', '.join(map(str, self.switches))}"
        if "scores" in paths:
            unit = ""
        text = (
            f"{self.family}: {', '.join(paths)} {verb} its own pass {self.place}, at"
            f" {counted(len(lengths), 'length')} from {lengths[0]} to {lengths[-1]}{across},"
            f" to {self.difference:.0e}{unit}"
        )
        return "proven", text


def prove(
    policy: Policy,
    *,
    longest: int = UNSAID,
    sampler: ProvenSampler | None = None,
    train: bool = True,
    recompute: bool = False,
) -> ModelProof:
    """Compare what a run does with a policy with the model's own pass.  Raises ConfigError for what
    differs.

    longest: tokens of the run's longest text.   sampler: its engine, if it samples in this process.
    train: the policy is trained, with its blocks computed again if `recompute`.
    All processes call it for a sharded policy.  The model comes back in eval mode, with its weights
    and without gradients."""
    longest = max(min(policy.context, longest), 4)
    size, blocks = FULL, nullcontext()
    if is_large(policy):
        size, blocks = SMALL, shortened(policy)
    case = _Case(policy, size, longest, sampler, train, recompute)
    try:
        with blocks, _filled_adapter(policy), kept_gradients(policy):
            policy.model.eval().zero_grad(set_to_none=True)
            return case.proven()
    finally:
        policy.model.eval().zero_grad(set_to_none=True)
        reshard(policy)


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """What is proven."""

    policy: Policy
    size: Size
    longest: int
    sampler: ProvenSampler | None
    train: bool
    recompute: bool
    coarse: bool = False
    """Products are rounded to a lower type."""

    @property
    def family(self) -> str:
        name = type(self.policy.model).__name__
        return name.removeprefix("FSDP")  # sharding makes a class of its own

    @property
    def path(self) -> str:
        return "scores" if reads_tokens(self.policy) else "scoring"

    @property
    def remedy(self) -> str:
        """What to do if streams differ."""
        if self.coarse:
            return FLOAT32
        if self.policy.attention == "single":
            return SINGLE
        if reads_tokens(self.policy):
            return SCORES_REMEDY
        return REMEDY

    def refusal(self, path: str, difference: str, remedy: str) -> ConfigError:
        what = f"{path} does not equal the model's own forward pass ({difference})"
        return ConfigError(f"{self.family} cannot be trained like this: {what}; {remedy}")

    def proven(self) -> ModelProof:
        """Raises ConfigError for what differs."""
        policy, types = self.policy, list[str]()
        results: list[tuple[list[int], list[str], float]] = []
        lower = policy.autocast or policy.dtype == torch.bfloat16
        if not lower or _has_room(policy):
            with _widened(policy) as exact:
                results.append(replace(self, policy=exact).compared())
                types.append(str(exact.dtype).removeprefix("torch."))
        if lower:
            results.append(replace(self, coarse=True).compared())
            types.append("autocast" if policy.autocast else "bfloat16")
        lengths, paths, difference = results[0]
        device = policy.device.type
        if device == "cuda":
            device = f"cuda ({torch.cuda.get_device_name(policy.device)})"
        return ModelProof(
            family=self.family,
            paths=tuple(paths),
            place=f"on {device} in {' and '.join(types)}",
            lengths=tuple(lengths),
            switches=switches(policy.model, self.longest),
            difference=difference,
        )

    def compared(self) -> tuple[list[int], list[str], float]:
        """The lengths of texts, what is equal, and the largest difference.

        A model's own code may fail in any way on paths that nobody has tried it on: that is a
        refusal too.
        """
        try:
            return self.compare_all()
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as above
            raise ConfigError(
                f"{self.family} cannot be trained like this: it fails ({_words(error)});"
                f" {self.remedy}"
            ) from error

    def compare_all(self) -> tuple[list[int], list[str], float]:
        """Compare as `compared` does.  Gradients are compared of short texts."""
        policy, sampler, paths = self.policy, self.sampler, [self.path]
        texts, failed = self.texts()
        if self.size is SMALL and not self.coarse:  # a median of few would be chance
            texts = fewer_tokens(texts)
        near, far = [], []
        for text in texts:
            if length_of(text) <= NEAR or text.images is not None:
                near.append(text)
            else:
                far.append(text)
        texts = [*near, *far]
        with some_gradients(policy):
            expected = model_pass(policy, near, gradients=self.train)
            beside = model_pass(policy, far, gradients=False)
            values = [*expected.values, *beside.values]
            if not self.coarse:
                self.check_finite(expected)
                self.check_causality(near, expected.values)
            elif policy.device.type != "cpu" and policy.attention == "shared":
                self.check_attention(near)
            trained = self.update(near, self.recompute)
            # Another stream of the same size, so that nothing of the first may serve it.
            again = run_pass(policy, near[::-1], gradients=False).values[::-1]
            together = []
            if far:
                together = run_pass(policy, texts, gradients=False).values
            spread = float(np.concatenate(values).std()) + 1e-3
            try:
                worst = self.compare(
                    self.path, trained.values + again, expected.values * 2, self.remedy, spread
                )
                worst = max(
                    worst,
                    self.compare(self.path, together, values[: len(together)], self.remedy, spread),
                )
            except ConfigError:
                self.check_silence(near[0], values[0])
                raise
            if self.train:
                paths += self.compare_updates(near, trained, expected)
        if failed is not None:
            raise failed
        if sampler is not None:
            paths.append(sampler.path)
            if sampler.conversations:
                paths.append("conversations")
            by_engine = [text.behavior_logp[text.weight > 0] for text in texts]
            difference = self.compare(paths[-1], by_engine, values, sampler.remedy, spread)
            worst = max(worst, difference)
        return sorted({length_of(text) for text in texts}), paths, worst

    def texts(self) -> tuple[list[Sample], ConfigError | None]:
        """What is compared, and why the engine has drawn none of it: that is raised behind what
        else differs.
        """
        if self.sampler is None:
            return written(self.policy, self.size, self.longest), None
        try:
            return drawn(self.policy, self.sampler, self.size, self.longest), None
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as in `compared`
            failed = self.refusal(self.sampler.path, _words(error), self.sampler.remedy)
            return written(self.policy, self.size, self.longest), failed

    def check_finite(self, expected: PassResults) -> None:
        """Raises ConfigError for a model whose own pass gives no numbers."""
        numbers = ""
        for name, gradient in expected.gradient.items():
            if not numbers and not gradient.norm().isfinite():
                numbers = f"a gradient of {name} that is"
        if not np.isfinite(np.concatenate(expected.values)).all():
            numbers = "log-probs that are"
        if numbers:
            raise ConfigError(
                f"{self.family}'s own forward pass gives {numbers} not finite: a number in its"
                " config.json is wrong (compare it with the published one), its weights are"
                " damaged, or the class cannot be trained"
            )

    def check_silence(self, text: Sample, before: np.ndarray) -> None:
        """Raises ConfigError for a model whose own pass gives something else a second time."""
        (again,) = model_pass(self.policy, [text], gradients=False).values
        if not np.abs(again - before).max() <= VALUES:
            what = "scores" if reads_tokens(self.policy) else "log-probs"
            raise ConfigError(
                f"{self.family} gives other {what} each time it is asked: set the dropout in its"
                " config.json to 0"
            )

    def check_causality(self, texts: Sequence[Sample], values: Sequence[np.ndarray]) -> None:
        """Raises ConfigError for a model whose tokens see what comes after them, which texts run
        one by one would not show.
        """
        if self.policy.attention != "single" or reads_tokens(self.policy):
            return
        alike = self.policy.alike or (lambda length: 0)
        text, before = next(
            (text, value)
            for text, value in zip(texts, values, strict=True)
            if alike(length_of(text)) == alike(length_of(text) + 1)
        )
        longer = Sample(
            group="",
            prompt=text.prompt,
            completion=np.append(text.completion, text.prompt[-1]),
            weight=np.append(text.weight, 0.0),
        )
        (behind,) = model_pass(self.policy, [longer], gradients=False).values
        if not np.abs(behind - before).max() <= VALUES:
            self.check_silence(text, before)
            raise ConfigError(
                f"{self.family} lets tokens see what comes after them: it is no causal language"
                " model, and cannot be trained"
            )

    def check_attention(self, texts: Sequence[Sample]) -> None:
        """Raises ConfigError for a GPU whose kernel of the run's type attends to something else
        than that of float32: a median of log-probs would not show it of a few tokens.
        """
        size = sum(text.prompt.size + text.completion.size for text in texts)
        for batch in packed_for(self.policy, texts, size):
            compared = ComparedAttention(batch.layout, batch.prepared)
            with torch.no_grad():
                hidden(self.policy, batch.tokens_P, batch.position_P, compared)
            if not compared.difference <= COARSE_ATTENTION:
                apart = f"a token's output {_apart(compared.difference, ' of their size')}"
                raise self.refusal("attention", apart, self.remedy)

    def update(self, texts: Sequence[Sample], recompute: bool) -> PassResults:
        """Make it as the run does; without gradients where nothing is trained."""
        model = self.policy.model.train(self.train)
        with checkpointing(self.policy, True) if recompute else nullcontext():
            results = run_pass(self.policy, texts, gradients=self.train)
        model.eval()
        return results

    def compare_updates(
        self, texts: Sequence[Sample], trained: PassResults, expected: PassResults
    ) -> list[str]:
        """What is equal.  Raises ConfigError for a gradient that differs."""
        paths = ["training"]
        if self.recompute:
            paths.append("recompute")
        try:
            self.compare_gradients(paths[-1], trained.gradient, expected.gradient, self.remedy)
        except ConfigError:
            if not self.recompute:
                raise
            plain = self.update(texts, False)
            self.compare_gradients("training", plain.gradient, expected.gradient, self.remedy)
            self.compare_gradients("recompute", trained.gradient, expected.gradient, AGAIN)
        if router_coefficient(self.policy) > 0.0 and not self.coarse:
            self.compare_router(texts[-1])
            paths.append("router")
        return paths

    def compare_router(self, text: Sample) -> None:
        """Compute the loss that balances experts, of one text: transformers' own value and its
        gradients.
        """
        ours = balance_run_pass(self.policy, text)
        own = balance_model_pass(self.policy, text)
        self.compare("router", ours.values, own.values, BALANCE)
        self.compare_gradients("router", ours.gradient, own.gradient, BALANCE)

    def compare(
        self,
        path: str,
        ours: Sequence[np.ndarray],
        theirs: Sequence[np.ndarray],
        remedy: str,
        spread: float = 0.0,
    ) -> float:
        """The largest difference of values; in a lower type the median one.  Raises ConfigError if
        it is too large.

        spread: of all values, what the median is judged by.
        """
        sizes = [np.abs(one - other) for one, other in zip(ours, theirs, strict=True)]
        if not sizes:
            return 0.0
        if self.coarse:
            difference, bound = float(np.median(np.concatenate(sizes))), COARSE_VALUES * spread
            what, unit = "in the run's type the median log-prob", ""
        else:
            place = int(np.argmax([size.max(initial=0.0) for size in sizes]))  # of NaN the first
            difference, bound = float(sizes[place].max(initial=0.0)), VALUES
            name, unit = ("score", "") if reads_tokens(self.policy) else ("log-prob", " nats")
            what = f"a {name}"
        if not difference <= bound:
            raise self.refusal(path, f"{what} {_apart(difference, unit)}", remedy)
        return difference

    def compare_gradients(
        self, path: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], remedy: str
    ) -> None:
        """Raises ConfigError for a gradient that differs, is missing, or is none of the model's
        own.
        """
        lost = theirs.keys() - ours.keys()
        if lost:
            raise self.refusal(path, f"{min(lost)} gets no gradient", remedy)
        bound, part = COARSE_GRADIENTS if self.coarse else GRADIENTS
        none, size = torch.zeros((), device=self.policy.device), _norms(theirs, self.policy)
        largest = max(size.values(), default=0.0)
        gaps = {name: gradient - theirs.get(name, none) for name, gradient in ours.items()}
        for name, distance in _norms(gaps, self.policy).items():
            relative = distance / (size.get(name, 0.0) + part * largest)
            if not relative <= bound:
                difference = "is none of the model's own pass"
                if name in theirs:
                    difference = _apart(relative, " of its norm")
                raise self.refusal(path, f"the gradient of {name} {difference}", remedy)


def _norms(tensors: dict[str, Tensor], policy: Policy) -> dict[str, float]:
    """The norm of each; of shards those of the whole tensors."""
    squares = {name: float(tensor.float().norm()) ** 2 for name, tensor in tensors.items()}
    if not policy.sharded:
        return {name: math.sqrt(square) for name, square in squares.items()}
    whole = dict[str, float]()
    for part in comm.gather([squares]):
        for name, square in part.items():
            whole[name] = whole.get(name, 0.0) + square
    return {name: math.sqrt(square) for name, square in whole.items()}


def _words(error: Exception) -> str:
    if isinstance(error, GroupwiseError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _apart(difference: float, unit: str) -> str:
    if not math.isfinite(difference):
        return "is not finite"
    return f"differs by {difference:.2g}{unit}"


@contextmanager
def _widened(policy: Policy) -> Iterator[Policy]:
    """Hold a policy's weights in float32 while inside, its products in the type of the weights."""
    lower = [(p, p.data) for p in policy.model.parameters() if p.dtype == torch.bfloat16]
    try:
        for parameter, data in lower:
            parameter.data = data.float()
        yield replace(policy, autocast=False)
    finally:
        for parameter, data in lower:
            parameter.grad, parameter.data = None, data


def _has_room(policy: Policy) -> bool:
    """True if the weights of a policy, and some gradients, fit into free memory in float32; of a
    sharded one they are not tried.
    """
    if policy.sharded or policy.autocast:
        return not policy.sharded
    needed = 6 * sum(parameter.numel() for parameter in policy.model.parameters())
    if policy.device.type == "cuda":
        return needed <= torch.cuda.mem_get_info(policy.device)[0]
    return needed <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def kept_gradients(policy: Policy) -> Iterator[None]:
    """Inside, gradients stay with their parameters: an optimizer of a lower type would take them
    away to its masters, and nothing would be left to compare.
    """
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for parameter in policy.model.parameters():
        hooks: Any = parameter._post_accumulate_grad_hooks
        if hooks:
            taken.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)


@contextmanager
def _filled_adapter(policy: Policy) -> Iterator[None]:
    """Inside, a new adapter changes something: its second factors, which are 0, hold random
    numbers.
    """
    factors = [
        p
        for name, p in policy.model.named_parameters()
        if "lora_B" in name and not policy.sharded and not p.any()
    ]
    drawn = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for factor in factors:
                factor.copy_(0.05 * torch.randn(factor.shape, generator=drawn))
        yield
    finally:
        with torch.no_grad():
            for factor in factors:
                factor.zero_()
