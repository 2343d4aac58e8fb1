"""Dropout in updates: the probabilities are the checkpoint's, the masks belong to the tokens and not to where they are computed.

Masks come from generators that are seeded anew for every stretch of a sequence and every place in the model where units are
dropped.  A stretch is a prompt, but for its last token, or what follows it; its seed is made of the run's seed, of how many
updates were made before, and of the group or the sample.  So an update is the same however its samples are packed, cut into
micro-batches or spread over processes, whether blocks are computed again or not, and after a resume.  Completions of a group share
their prompt, and its masks; what follows the prompt has its own.

Whatever way a family spells it, dropout ends in `torch.nn.functional.dropout`, which `Masks` answers while a forward pass runs
inside; of attention that is replaced it is `models/attention` that asks.  LayerDrop is one number for each layer and update.  Any
other random number (noise on a router's scores, say) is refused: it would be another one in every packing.

T positions of a stream   H heads   Q queries   K keys
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from groupwise.errors import ConfigError
from groupwise.records import Layout, Sample, Stretch

REMEDY = "set model.dropout to false"
RANDOM = frozenset(
    [
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like),
        *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, torch.dropout_, torch.native_dropout),
        *(torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, F.alpha_dropout, F.feature_alpha_dropout),
        *(F.dropout1d, F.dropout2d, F.dropout3d, F.gumbel_softmax, F.rrelu),
        *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_),
        *(Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, Tensor.multinomial),
    ]
)
"""Functions that draw random numbers."""

_active: ContextVar[Masks | OwnTraining | None] = ContextVar("dropout", default=None)


def active() -> Masks | OwnTraining | None:
    """What units are dropped by, in the forward pass that is running; None if nothing is."""
    return _active.get()


class Masks(TorchFunctionMode):
    """What is dropped in one forward pass that runs inside, and again where its blocks are computed again."""

    def __init__(self, stretches: Sequence[Stretch], total: int, device: torch.device) -> None:
        """total: T.   stretches: of the T positions; the others (filler) lose nothing."""
        super().__init__()
        self.stretches, self.total, self.device = stretches, total, device
        self.generator = torch.Generator(device)
        self.site = 0
        """Places where something was dropped in this pass so far."""
        self._before: list[Token[Masks | OwnTraining | None]] = []

    def __enter__(self) -> Masks:
        self._before.append(_active.set(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._before.pop())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is torch.dropout:
            return self._dropout(*args, **{"training" if name == "train" else name: value for name, value in kwargs.items()})
        if _drops_inside(func, args, kwargs):
            raise ConfigError(f"model.dropout: attention drops inside of one operation, whose masks nobody else can draw; {REMEDY}")
        if func in RANDOM and kwargs.get("generator") is not self.generator:
            if _is_layer_drop(func, args):
                return self._number(*args)
            name = getattr(func, "__name__", str(func))
            raise ConfigError(f"model.dropout: the model draws other random numbers than those of dropout ({name}); {REMEDY}")
        return func(*args, **kwargs)

    def next_site(self) -> int:
        """The number of the place in the model where units are about to be dropped."""
        self.site += 1
        return self.site

    def dropped(self, shape: Iterable[int], probability: float, site: int, seed: int) -> Tensor:
        """bool of `shape`: what one stretch loses at a place."""
        self.generator.manual_seed(_mixed(seed, site))
        return torch.empty(tuple(shape), dtype=torch.bool, device=self.device).bernoulli_(probability, generator=self.generator)

    def attention(self, weight_HQK: Tensor, probability: float, site: int, queries: range) -> Tensor:
        """Attention weights of some positions of the stream, whole stretches, to the first K of their sequence."""
        lost_HQK = torch.zeros(weight_HQK.shape, dtype=torch.bool, device=self.device)
        for stretch in self.stretches:
            a, b = stretch.start - queries.start, stretch.start + stretch.length - queries.start
            if a >= 0 and b <= len(queries):
                shape = (weight_HQK.shape[0], stretch.length, stretch.position + stretch.length)
                lost_HQK[:, a:b, : shape[2]] = self.dropped(shape, probability, site, stretch.seed)
        return _without(weight_HQK, lost_HQK, probability)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # torch's own names
        if not training or p == 0.0:
            return input
        kept = self._kept(input, p)
        return input.copy_(kept) if inplace else kept

    def _kept(self, input: Tensor, p: float) -> Tensor:
        site, shape, total = self.next_site(), tuple(input.shape), self.total
        if len(shape) == 4 and shape[0] == 1 and shape[2:] == (total, total):  # a model's own attention, of one sequence
            return self.attention(input[0], p, site, range(total))[None]
        rows = shape[0] == total
        if not rows and shape[:2] != (1, total):
            said = f"what is dropped has the shape {shape}, which is no row for each of {total} tokens"
            raise ConfigError(f"model.dropout: {said}; {REMEDY}")
        columns = shape[1:] if rows else shape[2:]
        lost = torch.zeros((total, *columns), dtype=torch.bool, device=self.device)
        for stretch in self.stretches:
            own = slice(stretch.start, stretch.start + stretch.length)
            lost[own] = self.dropped((stretch.length, *columns), p, site, stretch.seed)
        return _without(input, lost.view(shape), p)

    def _number(self, *shape: Any) -> Tensor:
        """Between 0 and 1, the same for all tokens of an update."""
        self.generator.manual_seed(_mixed(self.stretches[0].update if self.stretches else 0, self.next_site()))
        return torch.rand(*shape, generator=self.generator, device=self.device).cpu()


def _is_layer_drop(func: Any, args: Any) -> bool:
    """True of the one random number that a layer is left out by."""
    return func is torch.rand and args in ((), (1,), ([],), ([1],), ((),), ((1,),))


def _drops_inside(func: Any, args: Any, kwargs: Any) -> bool:
    """True of an operation that computes attention as a whole and drops weights on its way."""
    if func is F.scaled_dot_product_attention:
        return (args[4] if len(args) > 4 else kwargs.get("dropout_p") or 0.0) > 0.0
    if func is F.multi_head_attention_forward:
        probability = args[10] if len(args) > 10 else kwargs["dropout_p"]
        return probability > 0.0 and (args[13] if len(args) > 13 else kwargs.get("training", True))
    return False


def _without(input: Tensor, lost: Tensor, probability: float) -> Tensor:
    """What is kept, scaled so that its mean stays."""
    return input.masked_fill(lost, 0.0) * (0.0 if probability >= 1.0 else 1.0 / (1.0 - probability))


class Nothing(TorchFunctionMode):
    """A forward pass inside drops nothing, in whatever mode it runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.dropout, torch.dropout):
            return args[0] if args else (kwargs or {})["input"]
        found = func(*args, **(kwargs or {}))
        return torch.ones_like(found) if _is_layer_drop(func, args) else found


class OwnTraining:
    """In the place of masks: a model's own training mode, whatever it draws."""

    site = 0


@contextmanager
def as_before(masks: Masks | OwnTraining | None, site: int) -> Iterator[None]:
    """Compute a part of a forward pass, now or again: it drops what it did when `site` places lay before it."""
    if not isinstance(masks, Masks) or active() is masks:
        yield
        return
    masks.site = site
    with masks:
        yield


@contextmanager
def own_training(seed: int, device: torch.device) -> Iterator[None]:
    """A forward pass inside is one of the model's own training mode, with random numbers of torch that begin with `seed`; those
    outside go on as if there had been none."""
    before = _active.set(OwnTraining())
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield
    finally:
        _active.reset(before)


def stretches_of(
    layout: Layout, owners: Sequence[int], samples: Sequence[Sample], *, seed: int, update: int
) -> tuple[Stretch, ...]:
    """The stretches of a batch that was packed from `samples`; `owners` is its `samples`.

    seed: the run's.   update: updates made before.
    """
    begun, found = _seed(seed, update), []
    children = {prefix: owners[s] for s, prefix in enumerate(layout.prefix) if prefix >= 0}
    for s, (start, length, prefix) in enumerate(zip(layout.start, layout.length, layout.prefix, strict=True)):
        place = owners[s] if owners[s] >= 0 else children[s]
        sample = samples[place]
        shared = _seed(begun, sample.group, sample.prompt[:-1].tobytes())
        before = sample.prompt.size - 1 if prefix < 0 else 0
        if before:
            found.append(Stretch(start, before, 0, shared, begun))
        if owners[s] >= 0:
            found.append(Stretch(start + before, length - before, sample.prompt.size - 1, _seed(begun, place), begun))
    return tuple(found)


def _seed(*parts: int | str | bytes) -> int:
    told = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = part if isinstance(part, bytes) else str(part).encode()
        told.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(told.digest(), "little") >> 1


def _mixed(seed: int, site: int) -> int:
    """Another seed for every place (splitmix64): torch's generator of the CPU reads its lower 32 bits."""
    z = (seed + site * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def probabilities(config: dict[str, Any]) -> dict[str, float]:
    """What a configuration (transformers', as a dictionary) drops in its decoder, by its own names."""
    text = config.get("text_config")
    fields = text if isinstance(text, dict) else config
    return {
        name: float(value)
        for name, value in fields.items()
        if "drop" in name
        and not name.startswith(("classifier", "summary"))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0.0 < value <= 1.0
    }
