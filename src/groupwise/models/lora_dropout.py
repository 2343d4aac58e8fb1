"""Dropout on what a low-rank adapter reads, drawn for every sequence by itself.

A mask depends on the seed of the run, the optimizer step, the layer, the sequence and the position
in it.  So it is the same however sequences are packed, in how many micro-batches and on how many
processes, and when a block is computed again.  A resumed run draws the masks that the run would
have drawn.  The completions of a prompt share the masks of its tokens before the last one, whether
these are computed once or for each completion.

Only updates draw: sampling, the reference, scores and evaluations use all that the adapter reads.

T positions of a stream   D width of what a layer reads
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.data.packing import pieces_of
from groupwise.errors import ConfigError
from groupwise.models.passes import BatchPass
from groupwise.records import Batch, Sample


@dataclass(frozen=True, slots=True)
class RandomStream:
    """Consecutive positions of a batch, and the name of the random numbers that they draw."""

    name: str
    """The prompt, or the completion, that the positions belong to."""
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Draws:
    """The random streams of a packed batch."""

    key: str
    """The seed of the run and the optimizer step."""
    streams: Sequence[RandomStream]
    total: int
    """T, filler included."""

    def dropped(self, layer: int, width: int, share: float, device: torch.device) -> Tensor:
        """Return which numbers are dropped before a layer: bool (T, D); none of filler."""
        drawn_TD = torch.ones(self.total, width, device=device)
        generator = torch.Generator(device)
        for stream in self.streams:
            generator.manual_seed(seed_of(f"{self.key}/{layer}/{stream.name}"))
            drawn_TD[stream.start : stream.start + stream.length].uniform_(generator=generator)
        return drawn_TD < share


_draws: ContextVar[Draws | None] = ContextVar("draws", default=None)


class RowDropout(nn.Module):
    """Dropout whose masks belong to sequences; inside of an update alone."""

    def __init__(self, share: float, layer: int) -> None:
        """share: of the numbers that are dropped.   layer: the place of the layer in its model."""
        super().__init__()
        self.share, self.layer = share, layer

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` (1, T, D) with dropped numbers 0 and the rest divided by what is kept."""
        draws = _draws.get()
        if draws is None or not torch.is_grad_enabled():
            return x
        width = x.shape[-1]
        if x.numel() != draws.total * width:
            raise ConfigError(
                "model.lora.dropout: a layer with an adapter reads a part of the positions"
                f" ({x.numel() // width} of {draws.total}), as experts do: set dropout to 0, or"
                " name other layers in model.lora.targets"
            )
        dropped_TD = draws.dropped(self.layer, width, self.share, x.device)
        return x.masked_fill(dropped_TD.view(x.shape), 0.0) / (1.0 - self.share)


@dataclass(frozen=True, slots=True)
class DroppingLoss:
    """A loss whose passes are made with dropout."""

    loss: Callable[[BatchPass], tuple[Tensor, Tensor]]
    samples: Sequence[Sample]
    """The samples that the batches are packed from."""
    key: str
    """See `Draws`."""

    def __call__(self, passed: BatchPass) -> tuple[Tensor, Tensor]:
        """Return what the loss returns."""
        batch = passed.batch
        streams = streams_of(batch, self.samples)
        before = _draws.set(Draws(self.key, streams, batch.layout.total))
        try:
            return self.loss(passed)
        finally:
            _draws.reset(before)


def put_dropout(model: nn.Module, share: float, adapter: str) -> None:
    """Put `RowDropout` into the layers of an adapter that has dropout."""
    layers: list[Any] = [module for module in model.modules() if "lora_dropout" in module._modules]
    for place, layer in enumerate(layers):
        layer.lora_dropout[adapter] = RowDropout(share, place)


def streams_of(batch: Batch, samples: Sequence[Sample]) -> list[RandomStream]:
    """Return what each position of a batch draws from.

    A prompt has a stream for the tokens before its last one, each completion one for the positions
    that predict it.

    samples: those that the batch was packed from.
    """
    layout = batch.layout
    streams: dict[int, RandomStream] = {}
    for segment, index in enumerate(batch.samples):
        if index < 0:
            continue
        sample, (begin, _) = samples[index], batch.tokens[segment]
        (piece,) = [piece for piece in pieces_of(index, sample) if piece.begin == begin]
        prompt = f"{sample.group}/{seed_of(piece.key)}"
        shared, start = layout.prefix[segment], layout.start[segment]
        end = start + layout.length[segment]
        if shared >= 0:
            first = layout.start[shared]
            streams[first] = RandomStream(prompt, first, layout.length[shared])
        elif piece.prompt.size > 1:
            streams[start] = RandomStream(prompt, start, piece.prompt.size - 1)
            start += piece.prompt.size - 1
        streams[start] = RandomStream(f"{index}@{begin}", start, end - start)
    return list(streams.values())


def seed_of(name: str | bytes) -> int:
    """Return a seed of 63 bits by the hash of a name."""
    if isinstance(name, str):
        name = name.encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest()) >> 1
