"""Proof, before anything is trained, that every path through a model gives what its own forward pass gives.

The reference is transformers' own forward and backward pass, one sequence at a time.  Against it stand the paths that a run takes:
packed log-probs (`scoring`), the fused loss and its gradients (`training`), the same with blocks computed again (`recompute`),
and under an adapter (`adapter`); `rollout/probe.py` adds sampling.
Sequences lie side by side, some share a prompt, and their lengths lie on both sides of every length at which the configuration or
the masks change something.

A small copy of the architecture (`models/small_copy.py`) is compared in values and gradients; the checkpoint itself in the values
of a few short sequences.  What differs is refused.

All of that is in float32, where what is the same differs by rounding only.  Where a run computes in bfloat16 (`model.dtype`), the
model's own forward pass does not give the same twice removed; so the distances of both from it in float32 are compared (`lower`).

n tokens of a completion   V vocabulary
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from groupwise.config.settings import LoraSettings
from groupwise.data.packing import unpack
from groupwise.errors import ConfigError
from groupwise.models import rope
from groupwise.models.attention import plain_attention, use_packed_attention
from groupwise.models.fused import fused_modules
from groupwise.models.logit_scale import has_deep_head, read_form
from groupwise.models.masks import ATTRIBUTE, REMEDY, Reach, note_reach
from groupwise.models.policy import BALANCE, Policy
from groupwise.models.small_copy import language_model, small_model
from groupwise.ops.cpu.library import absence
from groupwise.ops.in_place_gradients import summed_in_place
from groupwise.ops.linear_cross_entropy import chosen_logprobs, head_logits
from groupwise.records import Batch, Sample
from groupwise.utils import files
from groupwise.utils.cache import cache_folder

PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest difference of a logit between packed and ordinary forward, relative to the spread of the logits."""
VALUES, GRADIENTS = 2e-4, 2e-3
"""Largest differences in float32: of a log-prob in nats; of a parameter's gradient, relative to its norm."""
LONGEST, MIDDLE, FAR, FAR_LOWER = 96, 1040, 2100, 773
"""Tokens of the longest sequence whose gradients are compared, of those whose log-probs are, and of that in a lower type: there
positions lose their last bits from 256 on."""
LOWER, LOWER_PART, LOWER_SHORT, LOWER_GRADIENT = 1.3, 1.6, 2.0, 2.5
"""How many times as far from float32 a run may lie as the model's own forward pass in the same type: the median difference of all
log-probs, of those of a part of a text, of those of all short texts, and each parameter's gradient.  Two roundings of the same
products lie equally far."""
ROUNDED, STRETCH, DRAWS = 3e-4, 256, 3
"""Nats that rounding explains anyway; tokens of a text whose median is taken, so that a fault far behind is seen; draws of texts: a
fault shows in every one, a near tie between two experts, which rounding decides otherwise here than there, in one."""
PATHS = ("scoring", "training", "router", "recompute", "adapter")
"""What a model can be asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What was compared, and found to be equal."""

    family: str
    paths: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of the sequences that were compared."""
    switches: tuple[int, ...]
    """Lengths at which the model changes something, which sequences lie on both sides of."""
    difference: float
    """The largest of a log-prob, in nats; of a score."""
    what: str = "log-probs"
    """Or scores."""

    @property
    def written(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Proof:
        """What `written` gave.  Raises ValueError or TypeError."""
        match json.loads(text):
            case {
                "family": str(family),
                "paths": paths,
                "lengths": lengths,
                "switches": switches,
                "difference": float(most),
                "what": str(what),
            }:
                return cls(
                    family=family,
                    paths=tuple(paths),
                    lengths=tuple(lengths),
                    switches=tuple(switches),
                    difference=most,
                    what=what,
                )
        raise ValueError("not a proof")

    @property
    def line(self) -> str:
        """One line for the plan."""
        beyond = f", across {', '.join(map(str, self.switches))}" if self.switches else ""
        equal = "equal" if len(self.paths) > 1 else "equals"
        return (
            f"{self.family}: {', '.join(self.paths)} {equal} its own forward pass at {len(self.lengths)} lengths from "
            f"{self.lengths[0]} to {self.lengths[-1]}{beyond} ({self.what} to {self.difference:.0e})"
        )


M = TypeVar("M")
P = ParamSpec("P")
R = TypeVar("R")


def in_words(prove: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """A model's own code may fail in any way on paths that nobody has tried it on: that is a refusal too."""

    @functools.wraps(prove)
    def proven(model: M, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return prove(model, *args, **kwargs)
        except (ConfigError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as above
            family = type(model.model if isinstance(model, Policy) else model).__name__
            said = str(error).strip().splitlines() or [""]
            raise ConfigError(
                f"{family} cannot be trained like this: it fails ({type(error).__name__}: {said[0][:200]}); {SINGLE}"
            ) from error

    return proven


def prove_policy(policy: Policy, *, recompute: bool = False, lora: LoraSettings | None = None) -> Proof:
    """Prove on a small copy of a policy's architecture what a run will do with it.  Raises ConfigError for what differs.

    Of a scoring model (a backbone with another head) the language model of its configuration is proven; the model itself by
    `reward_head.prove_scorer`.
    """
    paths = ["scoring", "training", "router", *(["recompute"] if recompute else []), *(["adapter"] if lora is not None else [])]
    dtype = dtype_of(policy)
    said = (policy.attention, *paths, str(lora), dtype)

    def run(small: PreTrainedModel) -> Proof:
        try:
            return prove(small, attention=policy.attention, paths=paths, lora=lora, dtype=dtype)
        except ConfigError as error:
            raise advised(error, policy, recompute=recompute, lora=lora) from error.__cause__

    return proven_before(policy.model, said, run)


def advised(error: ConfigError, policy: Policy, *, recompute: bool = False, lora: LoraSettings | None = None) -> ConfigError:
    """A refusal of packed streams that does not advise to `model.attention: single` where that is refused too.

    What is proven is kept, for whoever follows the advice.
    """
    if policy.attention == "single" or REMEDY not in str(error):
        return error
    try:
        prove_policy(replace(policy, attention="single"), recompute=recompute, lora=lora)
    except ConfigError as other:
        if not any(remedy in str(other) for remedy in MENDED):
            return ConfigError(str(error).replace(REMEDY, SINGLE))
    return error


def proven_before(
    model: PreTrainedModel,
    what: tuple[str, ...],
    run: Callable[[PreTrainedModel], Proof],
    kind: type[PreTrainedModel] | None = None,
) -> Proof:
    """What `run` says of a small copy of a model; asked once for the same code, kept in the user's cache beside the kernels.

    what: names `run`.   kind: the copy's class; None: the language model's.
    Classes that do not come with transformers are proven by every process.
    """
    kind = kind or language_model(model)
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    own = getattr(sys.modules.get(kind.__module__), "__file__", None)  # a class that was typed into a notebook has no file
    told = [kind.__qualname__, config, what, FAR, _code(own)]
    key = kind, hashlib.sha256(json.dumps(told, default=str, sort_keys=True).encode()).hexdigest()[:24]
    kept = cache_folder() / "proofs" / f"{key[1]}.json" if _published(kind) else None
    if key not in _PROVEN and kept is not None:
        with suppress(OSError, ValueError, TypeError):
            _PROVEN[key] = Proof.read(kept.read_text(encoding="utf-8"))
    before = key in _PROVEN
    if not before:
        try:
            proof = _PROVEN[key] = run(_copy_of(model, kind))
        except BaseException:  # a copy that was broken off is in no state to be asked again
            _COPIES.pop(model, None)
            raise
        if kept is not None:
            with suppress(OSError):
                kept.parent.mkdir(exist_ok=True)
                files.write(kept, proof.written.encode())
    _SAID.setdefault(model, {}).setdefault(what, ("proven before" if before else "proven", _PROVEN[key].line))
    return _PROVEN[key]


def proofs_of(model: PreTrainedModel) -> list[tuple[str, str]]:
    """What was proven of a model in this process, for the plan: `proven` or `proven before`, and what was compared."""
    return list(_SAID.get(model, {}).values())


_SAID: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, ...], tuple[str, str]]] = WeakKeyDictionary()
_PROVEN: dict[tuple[type, str], Proof] = {}
SMALL = 50_000_000
"""Parameters of a model that may stand for itself."""


def _copy_of(model: PreTrainedModel, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """`stand_in`; of a class that comes with transformers the same for all proofs of a model, as a run has one model too."""
    if not _published(kind):
        return stand_in(model, kind)
    copies = _COPIES.setdefault(model, {})
    if kind not in copies:
        copies[kind] = stand_in(model, kind)
    return copies[kind]


_COPIES: WeakKeyDictionary[PreTrainedModel, dict[type, PreTrainedModel]] = WeakKeyDictionary()


def stand_in(model: PreTrainedModel, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """A small copy; a model that is small itself, and of which none can be made, stands for itself.  Raises ConfigError.

    kind: its class; None: the language model's.
    """
    kind = kind or language_model(model)
    try:
        return small_model(kind, model.config, shallow=_published(kind))
    except ConfigError:
        if type(model) is not kind or model.device.type == "meta" or sum(p.numel() for p in model.parameters()) > SMALL:
            raise
    return copy.deepcopy(model).to("cpu", torch.float32)  # type: ignore[arg-type]


def _published(kind: type) -> bool:
    """True of a class that comes with transformers; any other may do in its last layer what it does in no other."""
    return kind.__module__.startswith("transformers.")


@functools.cache
def _code(modeling: str | None) -> list[Any]:
    """What a proof depends on besides the configuration: this library, those it computes with, the model's own file."""
    own = Path(modeling).read_bytes() if modeling else b""
    processor = platform.processor(), torch.backends.cpu.get_cpu_capability()
    versions = [transformers.__version__, torch.__version__, _version("peft"), absence(), *processor]
    return [_library(), hashlib.sha256(own).hexdigest(), *versions]


def _version(package: str) -> str | None:
    """Of a package that may not be installed."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


@functools.cache
def _library() -> str:
    """A digest of this library's code; of its contents, for installers may give all files one time."""
    seen = hashlib.sha256()
    for folder, folders, names in os.walk(Path(__file__).parents[1]):
        folders.sort()
        for name in sorted(name for name in names if name.endswith((".py", ".cpp", ".h"))):
            seen.update(Path(folder, name).read_bytes())
    return seen.hexdigest()


@in_words
@torch.no_grad()
def probe_checkpoint(policy: Policy) -> None:
    """Two short sequences with one prompt through the weights themselves, against the model's own forward pass.

    Raises ConfigError.
    """
    model = policy.model
    rng, longest = np.random.default_rng(0), min(9, policy.context)
    prompt = rng.integers(0, policy.vocabulary, size=max(1, longest // 3))
    samples = [_sample(rng, prompt, n, policy.vocabulary) for n in (longest - prompt.size, 2)]
    expected = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]])).to(policy.device)
        with plain_attention(model), policy.precision():
            out = model(input_ids=ids[None], use_cache=False).logits[0, sample.prompt.size - 1 :, : policy.vocabulary]
        expected.append(out.float())
    differences = []
    with fused_modules(model, keep=not policy.sharded):
        for batch in _packed(policy, samples):
            hidden_PD = policy.forward(batch).hidden_PD
            for s, index in enumerate(batch.samples):
                if index >= 0:
                    end, count = batch.layout.start[s] + batch.layout.length[s], samples[index].completion.size
                    with policy.precision():
                        logits = head_logits(hidden_PD[end - count : end], policy.head).float()
                    differences.append((logits - expected[index]).abs().max())
    worst, spread = float(torch.stack(differences).max()), float(torch.cat(expected).std()) + 1e-6
    if not math.isfinite(spread):
        raise ConfigError(
            f"{type(model).__name__}'s own forward pass gives logits that are not finite: a number in its config.json is wrong, "
            "or its weights are damaged; fetch them again"
        )
    compute = torch.bfloat16 if policy.autocast else policy.dtype
    if not worst / spread <= PROBE_TOLERANCE.get(compute, 0.15):
        remedy = REMEDIES["scoring"] if policy.attention != "single" else SINGLE
        said = f"logits differ by {worst / spread:.2g} of their spread" if math.isfinite(worst) else "logits are not finite"
        raise ConfigError(refusal(type(model).__name__, "scoring", said, remedy))


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """By the model's own forward and backward pass."""

    logp: list[np.ndarray]
    """Per sample (n,), nats."""
    gradient: dict[str, Tensor]


def wrapped(model: PreTrainedModel, attention: str) -> Policy:
    """A policy around a model that no tokenizer belongs to: a tenth of its ids belong to no token."""
    rows = model.get_input_embeddings().get_parameter("weight").shape[0]
    rope.follow_lengths(model)
    if attention == "single":
        with suppress(ConfigError):  # only to know its windows
            note_reach(model)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    else:
        use_packed_attention(model)
    return Policy(
        model=model.eval(),
        tokenizer=None,  # type: ignore[arg-type]
        eos_ids=(),
        pad_id=0,
        vocabulary=int(rows - rows // 10),  # type: ignore[operator]
        context=positions(model),
        attention=attention,
        form=read_form(model, language_model(model)),
        switches=rope.switches(model),
        deep_head=attention == "single" and has_deep_head(model, language_model(model)),
    )


def positions(model: PreTrainedModel, most: int = LONGEST) -> int:
    """Longest sequence that is compared: what fits into learned positions, and no more than is worth it."""
    text: Any = model.config.get_text_config()
    reach = getattr(text, "max_position_embeddings", None)
    return most if rope.switches(model) or not reach else min(int(reach), most)


def switches(model: PreTrainedModel) -> tuple[int, ...]:
    """Lengths above which the model computes otherwise: windows and chunks of its masks, frequencies, steps of a temperature."""
    sizes = {at for at, _ in rope.switches(model)}
    for module in model.modules():
        reach: Reach = vars(module).get(ATTRIBUTE, Reach())
        sizes |= {reach.window, reach.chunk}
    text: Any = model.config.get_text_config()
    sizes |= {getattr(text, key, None) for key in ("floor_scale", "original_max_position_embeddings")}
    return tuple(sorted(size for size in sizes if size))


def samples_across(switches: Sequence[int], longest: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Groups whose prompts and completions end on both sides of every switch; at most `longest` tokens each."""
    rng = np.random.default_rng(seed)
    ends = {5, 9, 14}
    for at in switches:
        ends |= {at - 1, at, at + 1, at + 2, 2 * at + 3}
    ends = {min(max(end, 4), longest - 1) for end in ends}
    top = max(ends)
    thirds = (2, 2 * top // 3 + 1) if not switches else (2, top // 3, 2 * top // 3 + 1)
    prompts = sorted({min(prompt, top - 1) for prompt in (*thirds, *(at + 1 for at in switches))} - {0})
    # Every prompt has at least two completions; every end is that of one prompt before it.
    chosen = {prompt: [top, prompt + 2] for prompt in prompts}
    for i, end in enumerate(sorted(ends - {top})):
        before = [prompt for prompt in prompts if prompt <= end] or prompts[:1]
        chosen[before[i % len(before)]].append(end)
    samples = []
    for prompt, own in chosen.items():
        tokens = rng.integers(0, vocabulary, size=prompt)
        # The last token of a text is predicted and not computed.
        samples += [_sample(rng, tokens, max(end + 1 - prompt, 1), vocabulary) for end in own]
    return samples


def far_samples(policy: Policy, longest: int, seed: int = 0) -> list[Sample]:
    """A text that is far longer than any other and holds every id, beside short ones: whatever length a family's code changes
    something at, that no configuration names, lies between them."""
    rng, ids = np.random.default_rng(seed), np.arange(policy.vocabulary)
    prompt = rng.integers(0, policy.vocabulary, size=5)
    long = _sample(rng, prompt, max(positions(policy.model, longest) - prompt.size, 1), policy.vocabulary)
    long.completion[: ids.size] = rng.permutation(ids)[: long.completion.size]
    return [_sample(rng, prompt, 7, policy.vocabulary), long, _sample(rng, rng.permutation(ids)[:11], 9, policy.vocabulary)]


def _sample(rng: np.random.Generator, prompt: np.ndarray, n: int, vocabulary: int) -> Sample:
    """A random completion of n tokens; prompts of one length are one prompt."""
    nothing = np.zeros(n)
    return Sample(
        group=str(prompt.size),
        prompt=prompt,
        completion=rng.integers(0, vocabulary, size=n),
        weight=rng.random(n) + 0.1,
        advantage=nothing,
        behavior_logp=nothing,
    )


def truth(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> Truth:
    """The model's own forward pass, one sequence at a time, and its gradients of the weighted sum of squared log-probs."""
    model = policy.model.eval()
    model.zero_grad(set_to_none=True)
    logps = []
    with plain_attention(model), torch.enable_grad() if gradients else torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.completion[:-1]])).to(policy.device)
            with policy.precision():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, sample.prompt.size - 1 :, : policy.vocabulary]
            logp_NV = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            logp_N = logp_NV.gather(1, torch.from_numpy(sample.completion).to(policy.device)[:, None])[:, 0]
            if gradients:
                weight_N = torch.from_numpy(sample.weight).to(logp_N)
                (weight_N * logp_N.square()).sum().backward()
            logps.append(logp_N.detach().double().cpu().numpy())
    return Truth(logps, taken(model) if gradients else {})


def taken(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a model, which are taken away from it."""
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def by_policy(policy: Policy, samples: Sequence[Sample], *, gradients: bool) -> Truth:
    """The same as a run computes it: packed, fused, gradients summed in place."""
    policy.model.zero_grad(set_to_none=True)
    logps = [np.zeros(sample.completion.size) for sample in samples]
    with (
        torch.enable_grad() if gradients else torch.no_grad(),
        fused_modules(policy.model, keep=not policy.sharded),
        summed_in_place(gradients and not policy.sharded),
    ):
        for batch in _packed(policy, samples):
            rows_M = batch.trained_M
            hidden_MD = policy.forward(batch).hidden_PD[rows_M]
            with policy.precision():
                logp_M, _ = chosen_logprobs(hidden_MD, policy.head, batch.target_P[rows_M], batch.temperature_P[rows_M])
            if gradients:
                (batch.weight_P[rows_M].to(logp_M) * logp_M.square()).sum().backward()
            logp_P = logp_M.new_zeros(batch.layout.total)
            logp_P[rows_M] = logp_M.detach()
            for index, values in unpack(batch, logp_P, samples):
                logps[index] = values.astype(np.float64)
    return Truth(logps, taken(policy.model) if gradients else {})


def _packed(policy: Policy, samples: Sequence[Sample]) -> list[Batch]:
    """All in one batch."""
    return policy.packed(samples, sum(sample.prompt.size + sample.completion.size for sample in samples))


REMEDIES = {
    "scoring": REMEDY,
    "training": REMEDY,
    "router": BALANCE,
    "recompute": "set model.gradient_checkpointing to false",
    "adapter": "leave model.lora out",
}
SINGLE = "this family is not supported: use another model"
LOWER_REMEDY = "set model.dtype to float32"
MENDED = (LOWER_REMEDY, BALANCE, REMEDIES["recompute"], REMEDIES["adapter"])
"""Remedies of what a run may do without."""


def compare(
    family: str, path: str, measured: Truth, expected: Truth, remedy: str, *, what: str = "log-prob", unit: str = "nats"
) -> float:
    """The largest difference of a log-prob.  Raises ConfigError if it, or a gradient's, is too large, or not finite.

    what, unit: where other numbers than log-probs are compared.
    """
    check_finite_truth(family, expected)
    sizes = [float(np.abs(ours - theirs).max()) for ours, theirs in zip(measured.logp, expected.logp, strict=True)]
    place = int(np.argmax(sizes))  # of NaN the first
    if not sizes[place] <= VALUES:
        said = f"a {what} of a completion of {measured.logp[place].size} tokens {apart(sizes[place], unit)}"
        raise ConfigError(refusal(family, path, said, remedy))
    if lost := expected.gradient.keys() - measured.gradient.keys():
        raise ConfigError(refusal(family, path, f"{min(lost)} gets no gradient", remedy))
    size, none = max((float(gradient.norm()) for gradient in expected.gradient.values()), default=0.0), torch.zeros(())
    for name, ours in measured.gradient.items():
        theirs = expected.gradient.get(name, none)
        difference = float((ours - theirs).norm()) / (float(theirs.norm()) + 1e-3 * size)
        if not difference <= GRADIENTS:
            said = apart(difference, "of its norm") if name in expected.gradient else "is none of the model's own pass"
            raise ConfigError(refusal(family, path, f"the gradient of {name} {said}", remedy))
    return sizes[place]


def check_finite_truth(family: str, truth: Truth) -> None:
    """Raises ConfigError for a model whose own passes give infinities or NaN: there is nothing to hold a run against."""
    wrong = next((name for name, gradient in truth.gradient.items() if not gradient.isfinite().all()), None)
    if wrong is None and all(np.isfinite(logp).all() for logp in truth.logp):
        return
    what = "log-probs" if wrong is None else f"the gradient of {wrong}"
    raise ConfigError(
        f"{family}'s own forward pass with random weights gives {what} that are not finite: a number in its config.json is wrong "
        "(compare it with the one that the checkpoint was published with), or the class cannot be trained"
    )


def apart(difference: float, unit: str) -> str:
    """In words."""
    return f"differs by {difference:.2g} {unit}" if math.isfinite(difference) else "is not finite"


def refusal(family: str, path: str, said: str, remedy: str) -> str:
    """What a user is told of a path that differs."""
    return f"{family} cannot be trained like this: {path} does not equal the model's own forward pass ({said}); {remedy}"


@in_words
def prove(
    model: PreTrainedModel,
    *,
    attention: str = "shared",
    paths: Sequence[str] = PATHS,
    lora: LoraSettings | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Proof:
    """Compare paths through a model with its own forward and backward pass.  Raises ConfigError for what differs.

    The model is small, in float32, on the CPU, and comes back in eval mode with its weights as they were, or rounded to `dtype`.
    paths: of `PATHS`; those that a model has not (it has no layers that can recompute) are left out.
    lora: a run's adapter; without it one on all linear layers.
    dtype: a run's, as `settings.ModelSettings.dtype`; what it scores and trains is compared in that type too.
    """
    family = type(model).__name__
    remedies = REMEDIES if attention != "single" else REMEDIES | dict.fromkeys(("scoring", "training"), SINGLE)
    if dtype == "bfloat16":
        round_weights(model)
    policy = wrapped(model, attention)
    samples = samples_across(switches(model), policy.context, policy.vocabulary, seed)
    if attention == "single":  # nothing lies beside anything else: one text of each length
        samples = list({_size(sample): sample for sample in samples}.values())
    expected = truth(policy, samples, gradients=True)
    check_finite_truth(family, expected)
    _check_truth(policy, samples, expected)
    case = Case(policy, samples, expected, lora)
    proven, worst = [], 0.0
    if paths:
        far, worst = _prove_far(policy, remedies["scoring"])
        if dtype != "float32":
            prove_lower(policy, dtype, case)
            proven.append(dtype)
        samples = [*samples, *far]
    for path in paths:
        computed = _PATHS[path](case)
        if computed is not None:
            worst = max(worst, compare(family, path, *computed, remedies[path]))
            proven.append(path)
    model.eval()
    return Proof(
        family=family,
        paths=tuple(proven),
        lengths=tuple(sorted({sample.prompt.size + sample.completion.size - 1 for sample in samples})),
        switches=switches(model),
        difference=worst,
    )


def _prove_far(policy: Policy, remedy: str) -> tuple[list[Sample], float]:
    """Compare log-probs of long texts: what was compared, and the largest difference.  Raises ConfigError.

    What changes with the length alone is a matter of the code of a layer: of classes that come with transformers a copy that is
    narrower still is asked `FAR` tokens, and the model itself `MIDDLE`; or the model itself all of them, where there is no such
    copy, or where it differs.
    """

    def asked(policy: Policy, far: list[Sample]) -> tuple[list[Sample], float]:
        computed, expected = (ask(policy, far, gradients=False) for ask in (by_policy, truth))
        return far, compare(type(policy.model).__name__, "scoring", computed, expected, remedy)

    kind = type(policy.model)
    if _published(kind):
        with suppress(Exception):  # a model's own code, of sizes that it was not made for; the model itself is asked then
            narrow = wrapped(small_model(kind, policy.model.config, narrow=True), policy.attention)
            far, worst = asked(narrow, far_samples(narrow, FAR)[1:2])
            middle, other = asked(policy, far_samples(policy, MIDDLE)[1:])
            return [*middle, *far], max(worst, other)
    return asked(policy, far_samples(policy, FAR))


def dtype_of(policy: Policy) -> str:
    """What `settings.ModelSettings.dtype` made of a policy."""
    return "autocast" if policy.autocast else "bfloat16" if policy.dtype == torch.bfloat16 else "float32"


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Weights that bfloat16 holds: what is then computed in float32 is the truth of both types."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def lowered(policy: Policy, dtype: str) -> Policy:
    """A float32 policy as one whose products run in bfloat16.   dtype: `autocast` or `bfloat16`."""
    if dtype == "autocast":
        return replace(policy, autocast=True)
    model = copy.deepcopy(policy.model)
    for parameter in model.parameters():  # not the buffers, as transformers reads a checkpoint
        parameter.data = parameter.data.to(torch.bfloat16)
    return replace(policy, model=model)


def prove_lower(policy: Policy, dtype: str, case: Case) -> None:
    """Compare how far a run and the model's own forward pass, both in a lower type, lie from that in float32.

    case: what is asked, with the answers in float32.   Of a text of `FAR_LOWER` tokens the values alone are compared.
    Raises ConfigError if the run's distance is more than `LOWER` times the own one, a gradient's more than `LOWER_GRADIENT` times,
    in every one of `DRAWS` draws of texts.
    """
    lower, family, refused = lowered(policy, dtype), type(policy.model).__name__, list[ConfigError]()
    for seed in range(DRAWS):
        if seed:
            samples = samples_across(switches(policy.model), policy.context, policy.vocabulary, seed)
            case = replace(case, samples=samples, expected=truth(policy, samples, gradients=True))
        try:
            return _prove_lower(policy, lower, dtype, case, seed)
        except ConfigError as error:
            refused.append(error)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # as `in_words`
            said = f"it fails in {dtype} ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]})"
            raise ConfigError(f"{family} cannot be trained like this: {said}; {LOWER_REMEDY}") from error
    raise refused[0]


def _prove_lower(policy: Policy, lower: Policy, dtype: str, near: Case, seed: int) -> None:
    family, errors = type(policy.model).__name__, list[tuple[np.ndarray, np.ndarray]]()
    samples = far_samples(policy, FAR_LOWER, seed)
    far = Case(policy, samples, truth(policy, samples, gradients=False), None)
    for case, gradients in ((near, True), (far, False)):
        own, ours = (ask(lower, case.samples, gradients=gradients) for ask in (truth, by_policy))
        if gradients:
            _compare_lower_gradients(family, dtype, ours.gradient, own.gradient, case.expected.gradient)
        for exact, theirs, lowered in zip(case.expected.logp, own.logp, ours.logp, strict=True):
            errors.append((lowered - exact, theirs - exact))
            for at in range(0, exact.size - STRETCH + 1, STRETCH):
                what = f"in {dtype} log-probs of tokens {at} to {at + STRETCH} lie"
                part = slice(at, at + STRETCH)
                compare_lower(family, "scoring", what, (lowered - exact)[part], (theirs - exact)[part], LOWER_REMEDY)
        if gradients:  # all short texts together: among the many tokens of the long one they would not be seen
            ours_N, own_N = (np.concatenate(each) for each in zip(*errors, strict=True))
            compare_lower(family, "scoring", f"in {dtype} log-probs of short texts lie", ours_N, own_N, LOWER_REMEDY, LOWER_SHORT)
    ours_N, own_N = (np.concatenate(each) for each in zip(*errors, strict=True))
    compare_lower(family, "scoring", f"in {dtype} log-probs lie", ours_N, own_N, LOWER_REMEDY, LOWER)


def compare_lower(
    family: str, path: str, what: str, ours: np.ndarray, own: np.ndarray, remedy: str, bound: float = LOWER_PART
) -> None:
    """Hold differences from float32 against those of the model's own pass, in nats.  Raises ConfigError if ours are larger than
    `bound` times these."""
    error, theirs = (float(np.median(np.abs(errors))) for errors in (ours, own))
    if not error <= bound * theirs + ROUNDED:
        raise ConfigError(refusal(family, path, f"{what} {error:.2g} nats from float32, its own {theirs:.2g}", remedy))


def _compare_lower_gradients(
    family: str, dtype: str, ours: dict[str, Tensor], own: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    size, none = max(float(gradient.norm()) for gradient in exact.values()), torch.zeros(())
    truths = {name: exact.get(name, none) for name in exact | ours}

    def distances(found: dict[str, Tensor]) -> dict[str, float]:
        return {
            name: float((found.get(name, none).float() - g).norm()) / (float(g.norm()) + 1e-3 * size) for name, g in truths.items()
        }

    theirs, found = distances(own), distances(ours)
    usual = float(np.median(list(theirs.values())))
    for name, distance in found.items():
        if not distance <= LOWER_GRADIENT * max(theirs[name], usual) + ROUNDED:
            said = f"in {dtype} the gradient of {name} lies {distance:.2g} of its norm from float32, its own {theirs[name]:.2g}"
            raise ConfigError(refusal(family, "training", said, LOWER_REMEDY))


def _check_truth(policy: Policy, samples: Sequence[Sample], expected: Truth) -> None:
    """Raises ConfigError for a model whose own forward pass is noisy, or lets tokens see what comes after them."""
    family = type(policy.model).__name__
    places = sorted(range(len(samples)), key=lambda i: (samples[i].completion.size < 3, _size(samples[i])))
    for place in places[:3]:  # short ones: further on, frequencies may depend on the length; several: one may hold a padding id
        sample, n, whole = samples[place], samples[place].completion.size, expected.logp[place]
        shorter = {key: getattr(sample, key)[: max(n - 1, 1)] for key in ("completion", "weight", "advantage", "behavior_logp")}
        (before,) = truth(policy, [replace(sample, **shorter)], gradients=False).logp
        if np.abs(before - whole[: before.size]).max() <= VALUES / 10:
            continue
        (again,) = truth(policy, [sample], gradients=False).logp
        if not np.abs(again - whole).max() <= VALUES / 10:
            raise ConfigError(f"{family} gives other log-probs each time it is asked: set the dropout in its config.json to 0")
        if not np.abs(before - again[: before.size]).max() <= VALUES:
            raise ConfigError(
                f"{family} lets tokens see what comes after them: it is no causal language model, and cannot be trained"
            )


def _size(sample: Sample) -> int:
    return sample.prompt.size + sample.completion.size


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A policy, what it is asked, and the true answers."""

    policy: Policy
    samples: Sequence[Sample]
    expected: Truth
    lora: LoraSettings | None


def _scoring(case: Case) -> tuple[Truth, Truth]:
    """In two streams of one size, so that nothing of the first may serve the second."""
    first = by_policy(case.policy, case.samples, gradients=False).logp
    if case.policy.attention == "single":
        return Truth(first, {}), Truth(case.expected.logp, {})
    second = by_policy(case.policy, case.samples[::-1], gradients=False).logp
    return Truth([*first, *second[::-1]], {}), Truth([*case.expected.logp, *case.expected.logp], {})


def _training(case: Case) -> tuple[Truth, Truth]:
    case.policy.model.train()  # whatever mode somebody has left it in, nothing is dropped
    return by_policy(case.policy, case.samples, gradients=True), case.expected


def _router(case: Case) -> tuple[Truth, Truth] | None:
    """The loss that balances experts, of one sequence: transformers' own value and its gradients."""
    if case.policy.router_coefficient == 0.0:
        return None
    model, sample = case.policy.model, case.samples[0]
    (batch,) = _packed(case.policy, [sample])
    own = case.policy.forward(batch).router_loss
    assert isinstance(own, Tensor)
    own.backward()
    computed = Truth([own.detach().numpy()[None]], taken(model))
    with plain_attention(model):
        loss = getattr(model(input_ids=batch.tokens_P[None], use_cache=False, output_router_logits=True), "aux_loss", None)
    if loss is None:
        raise ConfigError(f"{type(model).__name__} has no loss that balances experts; {BALANCE}")
    (case.policy.router_coefficient * loss).backward()
    return computed, Truth([(case.policy.router_coefficient * loss).detach().numpy()[None]], taken(model))


def _recompute(case: Case) -> tuple[Truth, Truth] | None:
    if not case.policy.recomputes:
        return None
    case.policy.model.train()
    with case.policy.checkpointing(True):
        return by_policy(case.policy, case.samples, gradients=True), case.expected


def _adapter(case: Case) -> tuple[Truth, Truth] | None:
    from groupwise.models.lora import adapt  # peft is optional

    def adapted_to(lora: LoraSettings) -> Policy:
        return adapt(replace(case.policy, model=copy.deepcopy(case.policy.model)), lora, base="")

    samples = case.samples[:4]
    if case.lora is not None:
        adapted = adapted_to(case.lora)
    else:
        small, model = LoraSettings(rank=4, alpha=8.0), case.policy.model
        try:
            adapted = adapted_to(replace(small, targets=_linear_names(model, inside=True, outside=True)))
        except ConfigError:  # stacked experts that peft takes for linear layers
            adapted = adapted_to(replace(small, targets=_linear_names(model, inside=True, outside=False)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.3)
    off = by_policy(adapted.frozen_copy(), samples, gradients=False)
    expected = truth(adapted, samples, gradients=True)
    computed = by_policy(adapted, samples, gradients=True)
    base = Truth(case.expected.logp[: len(samples)], {})
    return Truth([*computed.logp, *off.logp], computed.gradient), Truth([*expected.logp, *base.logp], expected.gradient)


def _linear_names(model: PreTrainedModel, *, inside: bool, outside: bool) -> tuple[str, ...]:
    """Names that linear layers have inside and outside of attention and not elsewhere; the output head is none of them."""
    output, names = model.get_output_embeddings(), {True: set[str](), False: set[str]()}
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) and module is not output:
            names["att" in name].add(name.rpartition(".")[2])
    chosen = (names[True] if inside else set()) | (names[False] if outside else set())
    return tuple(sorted(chosen - (set() if inside and outside else names[not inside])))


_PATHS: dict[str, Callable[[Case], tuple[Truth, Truth] | None]] = {
    "scoring": _scoring,
    "training": _training,
    "router": _router,
    "recompute": _recompute,
    "adapter": _adapter,
}
