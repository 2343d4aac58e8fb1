"""Samples -> packed batches under a token budget, each prompt once per group.  The only place where anything shifts by one.

A group becomes one stretch of the stream: its prompt without the last token, then for each completion a segment that begins with
the prompt's last token and continues with the completion without its last token.  So every position of such a segment predicts
exactly one completion token, the prompt's last token can predict a different first token in every segment, and the last
completion token (which predicts nothing) is not computed at all:

    prompt  a b c      completions  x y z  and  u v

    tokens    a b | c x y | c u        segment of the prompt | first completion | second
    position  0 1 | 2 3 4 | 2 3
    target    - - | x y z | u v

P positions of the stream   n completion tokens   m prompt tokens
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from groupwise.distributed.comm import ALONE, World
from groupwise.ops.onednn_shapes import filled
from groupwise.records import Batch, Layout, Sample


@dataclass(frozen=True, slots=True)
class Unit:
    """Samples that are packed next to each other and share one prompt, and the positions they take.

    A unit holds all parts of an episode; parts behind a branch bring prompts of their own."""

    members: tuple[int, ...]
    positions: int
    shared: bool
    """A prompt stands once for all of them that have it."""


def pack(
    samples: Sequence[Sample],
    budget: int,
    *,
    share: bool = True,
    alike: Callable[[Sample], Hashable] | None = None,
    whole_groups: bool = False,
    fill: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    world: World = ALONE,
    even: bool = False,
) -> list[Batch]:
    """Pack samples into batches of at most `budget` positions (a single longer sample gets a batch of its own).

    Samples whose weights are all 0 take no position.  `share=False` repeats the prompt before every completion; with `alike` only
    samples for which it returns the same value share a prompt; `whole_groups` never cuts a group; `fill` rounds P up with filler
    (`ops/onednn_shapes.py`).  How samples are packed cannot change an update: weights were fixed before.

    world: of several processes, which all pack the same samples, each gets its own part, balanced by positions.
    even: every process gets the same number of batches, the last ones a single position of filler where there is no more.

    >>> def sample(n, group):
    ...     ones = np.ones(n)
    ...     return Sample(group=group, prompt=np.array([7, 8, 9]), completion=np.arange(n), weight=ones, advantage=ones,
    ...                   behavior_logp=-ones)
    >>> first, second = pack([sample(3, "a"), sample(4, "b"), sample(2, "a")], budget=8)
    >>> first.tokens_P.tolist(), first.position_P.tolist(), first.target_P.tolist()
    ([7, 8, 9, 0, 1, 9, 0], [0, 1, 2, 3, 4, 2, 3], [-1, -1, 0, 1, 2, 0, 1])
    >>> first.samples, second.samples
    ((-1, 0, 2), (1,))
    """
    parts = divide(samples, budget, world.size, share=share, alike=alike, whole_groups=whole_groups)
    own = _bins(parts[world.rank], budget)
    if even:
        own += [[]] * (max(len(_bins(part, budget)) for part in parts) - len(own))
    return [_batch(samples, bin_, fill, device, dtype) for bin_ in own]


def divide(
    samples: Sequence[Sample],
    budget: int,
    parts: int,
    *,
    share: bool = True,
    alike: Callable[[Sample], Hashable] | None = None,
    whole_groups: bool = False,
) -> list[list[Unit]]:
    """Deal the units of a step out to processes: the longest first, each to the one that has the fewest positions.

    A group that is cut repeats its prompt, so groups are cut smaller than the budget only as far as that shortens the longest part.

    >>> ones = np.ones(6)
    >>> samples = [Sample(group="a", prompt=np.array([1, 2]), completion=np.arange(6), weight=ones, advantage=ones,
    ...                   behavior_logp=-ones) for _ in range(4)]
    >>> [[unit.positions for unit in part] for part in divide(samples, 100, 2)]
    [[13], [13]]
    """
    whole = _units(samples, budget, share, alike, whole_groups)
    best = _dealt(whole, parts)
    mean = -(-sum(unit.positions for unit in whole) // parts)
    for limit in (mean, mean // 2, mean // 4, mean // 8) if parts > 1 and not whole_groups else ():
        finer = _dealt(_units(samples, min(budget, max(limit, 1)), share, alike, whole_groups), parts)
        best = min(best, finer, key=_longest)
    return best


def _dealt(units: Sequence[Unit], parts: int) -> list[list[Unit]]:
    dealt: list[list[Unit]] = [[] for _ in range(parts)]
    load = [0] * parts
    for unit in sorted(units, key=lambda unit: -unit.positions) if parts > 1 else units:
        place = load.index(min(load))
        dealt[place].append(unit)
        load[place] += unit.positions
    return dealt


def _longest(parts: Sequence[Sequence[Unit]]) -> int:
    return max(sum(unit.positions for unit in part) for part in parts)


def unpack(batch: Batch, values_P: Tensor, samples: Sequence[Sample]) -> Iterator[tuple[int, np.ndarray]]:
    """For every sample of the batch: its index, and its completion's part (n,) of a column of the stream."""
    values = values_P.detach().cpu().numpy()
    layout = batch.layout
    for s, index in enumerate(batch.samples):
        if index >= 0:
            end = layout.start[s] + layout.length[s]
            yield index, values[end - samples[index].completion.size : end]


def _units(
    samples: Sequence[Sample], budget: int, share: bool, alike: Callable[[Sample], Hashable] | None, whole: bool
) -> list[Unit]:
    kinds = [alike(sample) if alike else None for sample in samples]
    episodes: dict[tuple[str, int], list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.part is not None and sample.weight.any():
            episodes.setdefault((sample.group, sample.index), []).append(index)
    groups: dict[tuple[str, Hashable], list[list[int]]] = {}
    for index, sample in enumerate(samples):
        if not sample.weight.any():
            continue
        block = [index] if sample.part is None else episodes[sample.group, sample.index]
        if block[0] == index:
            alike_ones = {kinds[i] for i in block}
            kind = kinds[index] if len(alike_ones) == 1 else frozenset(alike_ones)
            part = None if whole else kind if share else index
            groups.setdefault((sample.group, part), []).append(block)
    units = []
    for blocks in groups.values():
        members = [index for block in blocks for index in block]
        plain = [samples[i] for i in members if samples[i].part is None]
        assert all(np.array_equal(one.prompt, plain[0].prompt) for one in plain), f"group {plain[0].group}: two prompts"
        shared = share and len({kinds[i] for i in members}) == 1
        several = len(plain) < len(members)
        taken: list[int] = []
        positions, prompts = 0, set[bytes]()

        def added(block: list[int], prompts: set[bytes], *, shared: bool = shared, several: bool = several) -> int:
            """Positions that a block takes behind others, whose prompts stand already; its own are noted."""
            size = 0
            for sample in (samples[i] for i in block):
                prompt = sample.prompt.tobytes() if several else b""
                size += sample.completion.size + (0 if shared and prompt in prompts else sample.prompt.size - 1)
                prompts.add(prompt)
            return size

        for block in blocks:
            size = added(block, prompts)
            if taken and positions + size > budget and not whole:
                units.append(Unit(tuple(taken), positions, shared))
                taken, positions, prompts = [], 0, set()
                size = added(block, prompts)
            taken += block
            positions += size
        units.append(Unit(tuple(taken), positions, shared))
    return units


def _bins(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """As few bins as first fit finds, filled evenly where that fits: the fullest one decides how much memory a step takes."""
    first = _first_fit(units, budget)
    even = _dealt(units, len(first))
    return even if len(first) > 1 and _longest(even) <= budget else first


def _first_fit(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """First fit, longest first; ties keep their order."""
    bins: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.positions):
        place = next((i for i, left in enumerate(room) if unit.positions <= left), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(unit)
        room[place] -= unit.positions
    return bins


class _Stream:
    """The columns of one batch while they are filled, segment by segment; host arrays of P positions."""

    def __init__(self, total: int, extra: Iterable[str]) -> None:
        self.ids = {"tokens": np.zeros(total, np.int64), "position": np.zeros(total, np.int64)}
        self.ids |= {"segment": np.full(total, -1, np.int64), "target": np.full(total, -1, np.int64)}
        self.columns = {name: np.zeros(total) for name in ("weight", "advantage", "behavior_logp", "reference_logp")}
        self.columns["temperature"] = np.ones(total)
        self.extra = {name: np.zeros(total) for name in extra}
        self.supports: list[tuple[int, tuple[np.ndarray, ...]]] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.prefix: list[int] = []
        self.owner: list[int] = []
        self.end = 0

    def add(self, samples: Sequence[Sample], unit: Unit) -> None:
        """Append a unit: a prompt once if it is shared, then every member that has it."""
        families: dict[bytes, list[int]] = {}
        several = any(samples[index].part is not None for index in unit.members)
        for index in unit.members:
            families.setdefault(samples[index].prompt.tobytes() if several else b"", []).append(index)
        for members in families.values():
            prompt = samples[members[0]].prompt
            shared = unit.shared and len(members) > 1 and prompt.size > 1
            parent = len(self.start) if shared else -1
            if shared:
                self._place(prompt[:-1], 0, -1, -1)
            head = prompt[-1:] if shared else prompt
            for index in members:
                sample = samples[index]
                self._place(np.concatenate([head, sample.completion[:-1]]), prompt.size - head.size, parent, index)
                self._annotate(sample)

    def sequences(self, samples: Sequence[Sample]) -> np.ndarray | None:
        """`Batch.sequence_P` (P,): positions of one episode have the same number; None if no sample is a part of an episode."""
        first: dict[tuple[str, int], int] = {}
        places = list(range(len(self.start)))
        for s, owner in enumerate(self.owner):
            if owner >= 0 and samples[owner].part is not None:
                places[s] = first.setdefault((samples[owner].group, samples[owner].index), s)
        return np.array([*places, -1])[self.ids["segment"]] if first else None

    def _place(self, ids: np.ndarray, position: int, parent: int, owner: int) -> None:
        own = slice(self.end, self.end + ids.size)
        self.ids["tokens"][own] = ids
        self.ids["position"][own] = np.arange(position, position + ids.size)
        self.ids["segment"][own] = len(self.start)
        self.start.append(self.end)
        self.length.append(ids.size)
        self.prefix.append(parent)
        self.owner.append(owner)
        self.end = own.stop

    def _annotate(self, sample: Sample) -> None:
        """The last n positions predict the completion of the sample that was just placed."""
        own = slice(self.end - sample.completion.size, self.end)
        self.ids["target"][own] = sample.completion
        for name in ("weight", "advantage", "behavior_logp", "temperature"):
            self.columns[name][own] = getattr(sample, name)
        if sample.reference_logp is not None:
            self.columns["reference_logp"][own] = sample.reference_logp
        for name, column in sample.extra.items():
            self.extra[name][own] = column
        if sample.support is not None:
            self.supports.append((own.start, sample.support))


def _batch(
    samples: Sequence[Sample],
    units: Sequence[Unit],
    fill: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Batch:
    used = sum(unit.positions for unit in units)
    members = [samples[i] for unit in units for i in unit.members] or samples[:1]
    stream = _Stream(filled(used) if fill and used else max(used, 1), members[0].extra)
    for unit in units:
        stream.add(samples, unit)

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, dtype)

    def ids(name: str) -> Tensor:
        return torch.from_numpy(stream.ids[name]).to(device)

    referred = all(sample.reference_logp is not None for sample in members)
    weight, sequence = stream.columns["weight"], stream.sequences(samples)
    return Batch(
        layout=Layout(start=tuple(stream.start), length=tuple(stream.length), prefix=tuple(stream.prefix), total=weight.size),
        tokens_P=ids("tokens"),
        position_P=ids("position"),
        segment_P=ids("segment"),
        target_P=ids("target"),
        weight_P=column(weight),
        advantage_P=column(stream.columns["advantage"]),
        behavior_logp_P=column(stream.columns["behavior_logp"]),
        reference_logp_P=column(stream.columns["reference_logp"]) if referred else None,
        temperature_P=column(stream.columns["temperature"]),
        trained_M=torch.from_numpy(np.flatnonzero(weight)).to(device),
        support=_support(stream.supports, weight, device) if stream.supports else None,
        extra_P={name: column(values) for name, values in stream.extra.items()},
        sequence_P=None if sequence is None else torch.from_numpy(sequence).to(device),  # type: ignore[arg-type]
        samples=tuple(stream.owner),
    )


def _support(
    supports: list[tuple[int, tuple[np.ndarray, ...]]], weight: np.ndarray, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Flat ids and, for every trained position (M + 1), where its stretch begins; the offsets stay on the host."""
    per_position: dict[int, np.ndarray] = {start + t: ids for start, support in supports for t, ids in enumerate(support)}
    chosen = [per_position.get(int(p), np.empty(0, np.int64)) for p in np.flatnonzero(weight)]
    begin = np.concatenate([[0], np.cumsum([ids.size for ids in chosen])]).astype(np.int64)
    flat = np.concatenate(chosen) if chosen else np.empty(0, np.int64)
    return torch.from_numpy(flat).to(device), torch.from_numpy(begin)
