"""The proof: what a run computes with the model that is there equals the model's own forward and backward pass.

It is made where the policy lies and in its type, on texts of the run's lengths, one sequence at a time against packed streams.
Compared are log-probs of given tokens (`scoring`), gradients of an update (`training`, `recompute`, `router`), and the log-probs
that an engine draws with (`sampling`, `conversations`).  What differs is refused.

In float32 what is the same differs by rounding only.  So the weights of a lower type are compared in float32, where memory has room
for that, and then in the lower type by a wide measure.
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
from groupwise.models.attention import plain_attention
from groupwise.models.backbone import checkpointing
from groupwise.models.masks import REMEDY
from groupwise.models.moe import BALANCE, router_coefficient
from groupwise.models.passes import forward, packed_for, reshard
from groupwise.models.policy import Policy
from groupwise.models.reward_head import REMEDY as SCORES_REMEDY
from groupwise.models.reward_head import reads_tokens
from groupwise.proof import cache
from groupwise.proof.passes import PassResults, Text, model_pass, run_pass, some_gradients, take_gradients
from groupwise.proof.texts import FULL, NEAR, Sampler, drawn, size_of, switches, written

VALUES, GRADIENTS = 2e-4, (2e-3, 1e-3)
"""Largest differences in float32: of a log-prob in nats; of a parameter's gradient, relative to its norm and a part of the largest
parameter's."""
COARSE, COARSE_GRADIENTS = 0.1, (0.35, 0.05)
"""The same in a lower type: of the median log-prob, relative to the spread of all; of a gradient as above."""
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
    before: bool = False
    """It was made by an earlier load of the same."""

    @property
    def line(self) -> tuple[str, str]:
        """Label and text for the plan."""
        beyond = f", across {', '.join(map(str, self.switches))}" if self.switches else ""
        return (
            "proven before" if self.before else "proven",
            f"{self.family}: {', '.join(self.paths)} {'equal' if len(self.paths) > 1 else 'equals'} its own pass {self.place}, at "
            f"{len(self.lengths)} lengths from {self.lengths[0]} to {self.lengths[-1]}{beyond} (to {self.difference:.0e})",
        )


def prove(
    policy: Policy, *, longest: int = UNSAID, sampler: Sampler | None = None, train: bool = True, recompute: bool = False
) -> ModelProof:
    """Compare what a run does with a policy with the model's own pass.  Raises ConfigError for what differs.

    longest: tokens of the run's longest text.   sampler: its engine, if it samples in this process.
    train: the policy is trained, with its blocks computed again if `recompute`.
    All processes call it for a sharded policy.  The model comes back in eval mode, with its weights and without gradients.
    """
    longest = max(min(policy.context, longest), 4)
    engine = None if sampler is None else (sampler.name, sampler.path, sampler.sampling, sampler.conversations)
    key = cache.key(policy, repr((longest, train, recompute, engine)))
    fields = cache.read(key)
    hits = comm.gather([fields is not None]) if policy.sharded else [fields is not None]
    if fields is not None and all(hits):
        return replace(ModelProof(**fields), before=True)
    case = _Case(policy, longest, sampler, train, recompute)
    try:
        with filled_adapter(policy):
            proof = case.proven()
    finally:
        policy.model.eval().zero_grad(set_to_none=True)
        reshard(policy)
    cache.write(key, proof)
    return proof


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """What is proven."""

    policy: Policy
    longest: int
    sampler: Sampler | None
    train: bool
    recompute: bool

    @property
    def family(self) -> str:
        return type(self.policy.model).__name__

    @property
    def path(self) -> str:
        return "scores" if reads_tokens(self.policy) else "scoring"

    @property
    def remedy(self) -> str:
        """What to do if streams differ."""
        return SINGLE if self.policy.attention == "single" else SCORES_REMEDY if reads_tokens(self.policy) else REMEDY

    def refusal(self, path: str, said: str, remedy: str) -> ConfigError:
        return ConfigError(
            f"{self.family} cannot be trained like this: {path} does not equal the model's own forward pass ({said}); {remedy}"
        )

    def proven(self) -> ModelProof:
        """Raises ConfigError for what differs."""
        policy, paths = self.policy, list[str]()
        lower, types = policy.autocast or policy.dtype == torch.bfloat16, list[str]()
        if not lower or has_room(policy):
            with widened(policy) as exact, self.in_words(self.remedy):
                texts, paths, worst = replace(self, policy=exact).in_float32()
                types.append(str(exact.dtype).removeprefix("torch."))
        if lower:
            with self.in_words(FLOAT32):
                coarse = self.coarsely()
            texts, paths, worst = (texts, paths, worst) if types else coarse
            types.append("autocast" if policy.autocast else "bfloat16")
        name = f" ({torch.cuda.get_device_name(policy.device)})" if policy.device.type == "cuda" else ""
        return ModelProof(
            family=self.family,
            paths=tuple(paths),
            place=f"on {policy.device.type}{name} in {' and '.join(types)}",
            lengths=tuple(sorted({text.size for text in texts})),
            switches=switches(policy.model, self.longest),
            difference=worst,
        )

    @contextmanager
    def in_words(self, remedy: str) -> Iterator[None]:
        """A model's own code may fail in any way on paths that nobody has tried it on: that is a refusal too."""
        try:
            yield
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as above
            raise ConfigError(f"{self.family} cannot be trained like this: it fails ({_words(error)}); {remedy}") from error

    def texts(self) -> tuple[list[Text], list[Text], ConfigError | None]:
        """Those whose gradients are compared, and the others; what the engine draws, or why it draws nothing.

        Gradients are compared of short texts; of a large model on a CPU of one group alone.
        """
        policy, size, failed = self.policy, size_of(self.policy), None
        if self.sampler is None:
            found = written(policy, size, self.longest)
        else:
            try:
                found = drawn(policy, self.sampler, size, self.longest)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # as of `in_words`; what else differs is said first
                found = written(policy, size, self.longest)
                failed = self.refusal(self.sampler.path, _words(error), self.sampler.remedy)
        groups = [text.sample.group for text in found]
        learn = [text for text in found if text.size <= NEAR and (size is FULL or groups.count(text.sample.group) > 1)]
        return learn, [text for text in found if text not in learn], failed

    def in_float32(self) -> tuple[list[Text], list[str], float]:
        """The texts, what is equal, and the largest difference."""
        policy, path = self.policy, self.path
        learn, others, failed = self.texts()
        texts, paths = [*learn, *others], [path]
        with some_gradients(policy, head=size_of(policy) is FULL):
            expected, beside = model_pass(policy, learn, gradients=self.train), model_pass(policy, others, gradients=False)
            values, by_engine = [*expected.values, *beside.values], [*expected.drawn, *beside.drawn]
            self.check_own(learn, expected)
            trained = self.update(learn, self.recompute)
            worst = self.compare(path, trained.values, expected.values)
            # Another stream of the same size, so that nothing of the first may serve it.
            self.compare(path, run_pass(policy, learn[::-1], gradients=False).values[::-1], expected.values)
            if others:
                worst = max(worst, self.compare(path, run_pass(policy, texts, gradients=False).values, values))
            if self.train:
                paths += self.compare_updates(learn, trained, expected)
        if failed is not None:
            raise failed
        if self.sampler is not None:
            worst = max(worst, self.compare_drawn(self.sampler.path, texts, by_engine))
            paths.append(self.sampler.path)
            if self.sampler.conversations:
                talk = drawn(policy, self.sampler, size_of(policy), self.longest, talks=True)
                worst = max(worst, self.compare_drawn("conversations", talk, model_pass(policy, talk, gradients=False).drawn))
                paths.append("conversations")
        return texts, paths, worst

    def check_own(self, texts: Sequence[Text], expected: PassResults) -> None:
        """Raises ConfigError for a model whose own pass gives no numbers, is noisy, or lets tokens see what comes after them."""
        finite = all(np.isfinite(values).all() for values in expected.values)
        wrong = [name for name, gradient in expected.gradient.items() if not gradient.isfinite().all()]
        if wrong or not finite:
            what = f"a gradient of {wrong[0]}" if finite else "log-probs"
            raise ConfigError(
                f"{self.family}'s own forward pass gives {what} that {'is' if finite else 'are'} not finite: a number in its "
                "config.json is wrong (compare it with the published one), its weights are damaged, or the class cannot be trained"
            )
        alike, pairs = self.policy.alike, list(zip(texts, texts[1:], expected.first, expected.first[1:], strict=False))
        apart = [
            float((before - behind).abs().max())
            for one, other, before, behind in pairs
            if one.sample.group == other.sample.group and (alike is None or alike(one.size) == alike(other.size))
        ]
        if expected.first and max(apart, default=0.0) <= VALUES:
            return
        again = model_pass(self.policy, texts[:1], gradients=False).values[0]
        if not np.abs(again - expected.values[0]).max() <= VALUES:
            what = "scores" if reads_tokens(self.policy) else "log-probs"
            raise ConfigError(f"{self.family} gives other {what} each time it is asked: set the dropout in its config.json to 0")
        if expected.first:
            raise ConfigError(
                f"{self.family} lets tokens see what comes after them: it is no causal language model, and cannot be trained"
            )

    def update(self, texts: Sequence[Text], recompute: bool) -> PassResults:
        """As the run makes it; without gradients where nothing is trained."""
        self.policy.model.train(self.train)  # whatever mode somebody has left it in, nothing is dropped
        with checkpointing(self.policy, True) if recompute else nullcontext():
            return run_pass(self.policy, texts, gradients=self.train)

    def compare_updates(self, texts: Sequence[Text], trained: PassResults, expected: PassResults) -> list[str]:
        """What is equal.  Raises ConfigError for a gradient that differs."""
        try:
            self.compare_gradients("recompute" if self.recompute else "training", trained.gradient, expected.gradient, self.remedy)
        except ConfigError:
            if not self.recompute:
                raise
            self.compare_gradients("training", self.update(texts, False).gradient, expected.gradient, self.remedy)
            self.compare_gradients("recompute", trained.gradient, expected.gradient, AGAIN)
        paths = ["training", *(["recompute"] if self.recompute else [])]
        if router_coefficient(self.policy) > 0.0:
            self.compare_router(texts[-1])
            paths.append("router")
        return paths

    def compare_router(self, text: Text) -> None:
        """The loss that balances experts, of one text: transformers' own value and its gradients."""
        policy, model = self.policy, self.policy.model
        (batch,) = packed_for(policy, [text.sample], text.size + 1)
        ours: Any = forward(policy, batch).router_loss
        ours.backward()
        gradient = take_gradients(policy)
        with plain_attention(model):
            loss = getattr(model(input_ids=batch.tokens_P[None], use_cache=False, output_router_logits=True), "aux_loss", None)
        if loss is None:
            raise ConfigError(f"{self.family} has no loss that balances experts; {BALANCE}")
        theirs = router_coefficient(policy) * loss
        theirs.backward()
        self.compare("router", *([loss.detach().cpu().numpy()[None]] for loss in (ours, theirs)), remedy=BALANCE)
        self.compare_gradients("router", gradient, take_gradients(policy), BALANCE)

    def compare_drawn(self, path: str, texts: Sequence[Text], expected: Sequence[np.ndarray]) -> float:
        """The largest difference of a log-prob that the engine drew a token with."""
        assert self.sampler is not None
        return self.compare(path, *_written(texts, expected), remedy=self.sampler.remedy)

    def compare(self, path: str, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], *, remedy: str | None = None) -> float:
        """The largest difference of values.  Raises ConfigError if it is too large."""
        sizes = [float(np.abs(one - other).max(initial=0.0)) for one, other in zip(ours, theirs, strict=True)]
        place = int(np.argmax(sizes))  # of NaN the first
        if not sizes[place] <= VALUES:
            what, unit = ("score", "") if reads_tokens(self.policy) else ("log-prob", " nats")
            said = f"a {what} of a completion of {ours[place].size} tokens {_apart(sizes[place], unit)}"
            raise self.refusal(path, said, remedy or self.remedy)
        return sizes[place]

    def compare_gradients(
        self,
        path: str,
        ours: dict[str, Tensor],
        theirs: dict[str, Tensor],
        remedy: str,
        bounds: tuple[float, float] = GRADIENTS,
    ) -> None:
        """Raises ConfigError for a gradient that differs, is missing, or is none of the model's own."""
        if lost := theirs.keys() - ours.keys():
            raise self.refusal(path, f"{min(lost)} gets no gradient", remedy)
        none, size = torch.zeros((), device=self.policy.device), norms(theirs, self.policy)
        largest = max(size.values(), default=0.0)
        for name, distance in norms({name: g - theirs.get(name, none) for name, g in ours.items()}, self.policy).items():
            relative = distance / (size.get(name, 0.0) + bounds[1] * largest)
            if not relative <= bounds[0]:
                said = _apart(relative, " of its norm") if name in theirs else "is none of the model's own pass"
                raise self.refusal(path, f"the gradient of {name} {said}", remedy)

    def coarsely(self) -> tuple[list[Text], list[str], float]:
        """In the run's type: the texts, what is equal, and the largest median difference."""
        learn, others, failed = self.texts()
        texts, paths, worst = [*learn, *others], [self.path], 0.0
        theirs, ours = model_pass(self.policy, texts, gradients=False), run_pass(self.policy, texts, gradients=False)
        if failed is not None:
            raise failed
        spread, sides = float(np.concatenate(theirs.values).std()) + 1e-3, [(self.path, ours.values, theirs.values, FLOAT32)]
        if self.sampler is not None:
            sides.append((self.sampler.path, *_written(texts, theirs.drawn), self.sampler.remedy))
            paths.append(self.sampler.path)
        for path, one, other, remedy in sides:
            distance = float(np.median(np.abs(np.concatenate(one) - np.concatenate(other))))
            if not distance <= COARSE * spread:
                raise self.refusal(path, f"in the run's type the median log-prob {_apart(distance, '')}", remedy)
            worst = max(worst, distance)
        if self.train:
            with some_gradients(self.policy, head=size_of(self.policy) is FULL):
                expected = model_pass(self.policy, learn, gradients=True).gradient
                self.compare_gradients("training", self.update(learn, self.recompute).gradient, expected, FLOAT32, COARSE_GRADIENTS)
            paths.append("training")
        return texts, paths, worst


def norms(tensors: dict[str, Tensor], policy: Policy) -> dict[str, float]:
    """The norm of each; of shards those of the whole tensors."""
    squares = {name: float(tensor.float().norm()) ** 2 for name, tensor in tensors.items()}
    parts = comm.gather([squares]) if policy.sharded else [squares]
    return {name: math.sqrt(sum(part.get(name, 0.0) for part in parts)) for name in {name for part in parts for name in part}}


def _written(texts: Sequence[Text], expected: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of the tokens that the policy wrote itself: the log-probs that they were drawn with, and those that are expected."""
    ours, theirs = [], []
    for text, logp_N in zip(texts, expected, strict=True):
        assert text.rollout is not None
        chosen_N = np.flatnonzero(text.rollout.trained[: logp_N.size])
        ours.append(text.rollout.behavior_logp[chosen_N])
        theirs.append(logp_N[chosen_N])
    return ours, theirs


def _words(error: Exception) -> str:
    if isinstance(error, GroupwiseError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _apart(difference: float, unit: str) -> str:
    return f"differs by {difference:.2g}{unit}" if math.isfinite(difference) else "is not finite"


@contextmanager
def widened(policy: Policy) -> Iterator[Policy]:
    """The policy with its weights in float32 while inside, and products in the type of the weights."""
    lower = [(p, p.data) for p in policy.model.parameters() if p.dtype == torch.bfloat16]
    try:
        for parameter, data in lower:
            parameter.data = data.float()
        yield replace(policy, autocast=False)
    finally:
        for parameter, data in lower:
            parameter.grad, parameter.data = None, data


def has_room(policy: Policy) -> bool:
    """True if the weights of a policy, and some gradients, fit into free memory in float32; of a sharded one they are not tried."""
    if policy.sharded or policy.autocast:
        return not policy.sharded
    needed = 6 * sum(parameter.numel() for parameter in policy.model.parameters())
    if policy.device.type == "cuda":
        return needed <= torch.cuda.mem_get_info(policy.device)[0]
    return needed <= os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def filled_adapter(policy: Policy) -> Iterator[None]:
    """Inside, a new adapter changes something: its second factors, which are 0, hold random numbers."""
    factors = [p for name, p in policy.model.named_parameters() if "lora_B" in name and not policy.sharded and not p.any()]
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
