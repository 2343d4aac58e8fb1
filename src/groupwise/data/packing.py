"""Samples -> packed batches under a token budget, each prompt once per group.  The only place where anything shifts by one.

A group becomes one stretch of the stream: its prompt without the last token, then for each completion a segment that begins with
the prompt's last token and continues with the completion without its last token.  So every position of such a segment predicts
exactly one completion token, the prompt's last token can predict a different first token in every segment, and the last
completion token (which predicts nothing) is not computed at all:

    prompt  a b c      completions  x y z  and  u v

    tokens    a b | c x y | c u        segment of the prompt | first completion | second
    position  0 1 | 2 3 4 | 2 3
    target    - - | x y z | u v

A completion that was drawn behind several contexts (`Sample.branches`) becomes a segment for each, all in one batch.

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
from groupwise.records import Batch, Layout, Sample, stretches


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens of a sample's completion that become one segment: all of them, unless the sample has branches."""

    owner: int
    """Place of the sample among those that are packed."""
    begin: int
    end: int
    """The tokens are `completion[begin:end]`."""
    prompt: np.ndarray
    """The ids that stand before them and may be shared: the sample's prompt, or a context that does not begin with it."""
    key: bytes
    """Of the prompt: equal prompts have equal ones."""
    between: np.ndarray
    """The ids of the context between the sample's prompt and the tokens."""

    @property
    def size(self) -> int:
        """Positions that it takes beside those of its prompt's tokens before the last one."""
        return self.between.size + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces that are packed next to each other, and the positions they take.  All pieces of a sample are in one unit."""

    members: tuple[Span, ...]
    positions: int
    shared: bool
    """A prompt stands once for all of them that have it."""


def pack(
    samples: Sequence[Sample],
    budget: int,
    *,
    share: bool = True,
    alike: Callable[[int], Hashable] | None = None,
    whole_groups: bool = False,
    fill: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    world: World = ALONE,
    even: bool = False,
) -> list[Batch]:
    """Pack samples into batches of at most `budget` positions (a single longer sample gets a batch of its own).

    Samples whose weights are all 0 take no position.  `share=False` repeats the prompt before every completion; with `alike` only
    sequences for whose positions it returns the same value share a prompt; `whole_groups` never cuts a group; `fill` rounds P up
    with filler (`ops/onednn_shapes.py`).  How samples are packed cannot change an update: weights were fixed before.

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
    bins = _bins(parts[world.rank], budget)
    if even:
        bins += [[]] * (max(len(_bins(part, budget)) for part in parts) - len(bins))
    return [_batch(samples, bin_, fill, device, dtype) for bin_ in bins]


def divide(
    samples: Sequence[Sample],
    budget: int,
    parts: int,
    *,
    share: bool = True,
    alike: Callable[[int], Hashable] | None = None,
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
    """For every sample of the batch: its index, and its completion's numbers (n, ...) of a column of the stream (P, ...); 0 at
    tokens that stand in no segment."""
    values = values_P.detach().cpu().numpy()
    columns: dict[int, np.ndarray] = {}
    for s, index in enumerate(batch.samples):
        if index >= 0:
            begin, end = batch.tokens[s]
            stop = batch.layout.start[s] + batch.layout.length[s]
            if index not in columns:
                columns[index] = np.zeros((samples[index].completion.size, *values.shape[1:]), values.dtype)
            columns[index][begin:end] = values[stop - (end - begin) : stop]
    yield from columns.items()


def _pieces(owner: int, sample: Sample) -> list[Span]:
    """The pieces of a sample with a token whose weight is not 0."""
    pieces = []
    for begin, end, context in stretches(sample.completion.size, sample.prompt, sample.branches):
        if sample.weight[begin:end].any():
            size = sample.prompt.size if np.array_equal(context[: sample.prompt.size], sample.prompt) else context.size
            pieces.append(Span(owner, begin, end, context[:size], context[:size].tobytes(), context[size:]))
    return pieces


def _units(samples: Sequence[Sample], budget: int, share: bool, alike: Callable[[int], Hashable] | None, whole: bool) -> list[Unit]:
    groups: dict[tuple[str, Hashable], list[list[Span]]] = {}
    kinds: dict[tuple[str, Hashable], set[Hashable]] = {}
    for index, sample in enumerate(samples):
        if block := _pieces(index, sample):
            lengths = frozenset(alike(piece.prompt.size + piece.size - 1) if alike else None for piece in block)
            key = sample.group, None if whole else lengths if share else index
            groups.setdefault(key, []).append(block)
            kinds.setdefault(key, set()).update(lengths)
    units = []
    for key, blocks in groups.items():
        first = samples[blocks[0][0].owner]
        assert all(np.array_equal(samples[block[0].owner].prompt, first.prompt) for block in blocks), f"group {key[0]}: two prompts"
        shared = share and len(kinds[key]) == 1
        taken: list[Span] = []
        positions = 0
        for block in blocks:
            both = _positions([*taken, *block], shared)
            if taken and both > budget and not whole:
                units.append(Unit(tuple(taken), positions, shared))
                taken, both = [], _positions(block, shared)
            taken += block
            positions = both
        units.append(Unit(tuple(taken), positions, shared))
    return units


def _positions(pieces: Sequence[Span], shared: bool) -> int:
    """Positions that pieces take, next to each other; each prompt stands once, if it is shared."""
    first = {piece.key: piece for piece in pieces}.values() if shared else pieces
    return sum(piece.size for piece in pieces) + sum(piece.prompt.size - 1 for piece in first)


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
        self.tokens: list[tuple[int, int]] = []
        self.end = 0

    def add(self, samples: Sequence[Sample], unit: Unit) -> None:
        """Append a unit: a prompt once if it is shared, then every piece that has it."""
        families: dict[bytes, list[Span]] = {}
        for piece in unit.members:
            families.setdefault(piece.key, []).append(piece)
        for members in families.values():
            prompt = members[0].prompt
            shared = unit.shared and len(members) > 1 and prompt.size > 1
            parent = len(self.start) if shared else -1
            if shared:
                self._place(prompt[:-1], 0, -1, -1, (0, 0))
            head = prompt[-1:] if shared else prompt
            for piece in members:
                sample, tokens = samples[piece.owner], (piece.begin, piece.end)
                ids = np.concatenate([head, piece.between, sample.completion[piece.begin : piece.end]])
                self._place(ids[:-1], prompt.size - head.size, parent, piece.owner, tokens)
                self._annotate(sample, *tokens)

    def sequences(self) -> np.ndarray | None:
        """`Batch.sequence_P` (P,): positions of one sample have the same number; None if each has but one segment."""
        first: dict[int, int] = {}
        places = [first.setdefault(owner, s) if owner >= 0 else s for s, owner in enumerate(self.owner)]
        return None if places == list(range(len(places))) else np.array([*places, -1])[self.ids["segment"]]

    def _place(self, ids: np.ndarray, position: int, parent: int, owner: int, tokens: tuple[int, int]) -> None:
        stretch = slice(self.end, self.end + ids.size)
        self.ids["tokens"][stretch] = ids
        self.ids["position"][stretch] = np.arange(position, position + ids.size)
        self.ids["segment"][stretch] = len(self.start)
        self.start.append(self.end)
        self.length.append(ids.size)
        self.prefix.append(parent)
        self.owner.append(owner)
        self.tokens.append(tokens)
        self.end = stretch.stop

    def _annotate(self, sample: Sample, begin: int, end: int) -> None:
        """The last positions predict the tokens of the piece that was just placed."""
        stretch, tokens = slice(self.end - (end - begin), self.end), slice(begin, end)
        self.ids["target"][stretch] = sample.completion[tokens]
        for name in ("weight", "advantage", "behavior_logp"):
            self.columns[name][stretch] = getattr(sample, name)[tokens]
        self.columns["temperature"][stretch] = sample.temperature
        if sample.reference_logp is not None:
            self.columns["reference_logp"][stretch] = sample.reference_logp[tokens]
        for name, column in sample.extra.items():
            self.extra[name][stretch] = column[tokens]
        if sample.support is not None:
            self.supports.append((stretch.start, sample.support[tokens]))


def _batch(
    samples: Sequence[Sample],
    units: Sequence[Unit],
    fill: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Batch:
    used = sum(unit.positions for unit in units)
    members = [samples[piece.owner] for unit in units for piece in unit.members] or samples[:1]
    stream = _Stream(filled(used) if fill and used else max(used, 1), members[0].extra)
    for unit in units:
        stream.add(samples, unit)

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, dtype)

    def ids(name: str) -> Tensor:
        return torch.from_numpy(stream.ids[name]).to(device)

    referred = all(sample.reference_logp is not None for sample in members)
    weight, sequence = stream.columns["weight"], stream.sequences()
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
        tokens=tuple(stream.tokens),
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
