"""Samples -> packed batches under a token budget, each prompt once per group.  The only place where
anything shifts by one.

A group becomes a run of segments in the stream: its prompt without the last token, then for each
completion a segment that begins with the prompt's last token and continues with the completion
without its last token.  So every position of such a segment predicts exactly one completion token,
the prompt's last token can predict a different first token in every segment, and the last
completion token (which predicts nothing) is not computed at all.

A position attends to itself, to those before it in its segment, and to the whole segment of its
group's prompt (`Layout.prefix`).  No completion attends to another one, and no group to another
group; `position` counts on from the prompt, so each completion is computed as if it stood alone:

    prompt  a b c      completions  x y z  and  u v

    tokens    a b | c x y | c u        segment of the prompt | first completion | second
    position  0 1 | 2 3 4 | 2 3
    target    - - | x y z | u v

A completion that was drawn behind several contexts (`Sample.branches`) becomes a segment for each,
all in one batch.

P positions of the stream   n completion tokens   m prompt tokens
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.distributed.comm import ALONE, World
from groupwise.ops.onednn_shapes import filled
from groupwise.records import Batch, ImageSpan, Layout, Sample, context_spans


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens of a sample's completion that become one segment: all of them, unless the sample has
    branches.
    """

    owner: int
    """Place of the sample among those that are packed."""
    begin: int
    end: int
    """The tokens are `completion[begin:end]`."""
    prompt: np.ndarray
    """The ids that stand before them and may be shared: the sample's prompt, or a context that does
    not begin with it.
    """
    key: bytes
    """The prompt's bytes: equal prompts have equal ones."""
    between: np.ndarray
    """The ids of the context between the sample's prompt and the tokens."""

    @property
    def size(self) -> int:
        """Positions that it takes beside those of its prompt's tokens before the last one."""
        return self.between.size + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces that are packed next to each other, and the positions they take.  All pieces of a
    sample are in one unit.
    """

    members: tuple[Span, ...]
    positions: int
    shared: bool
    """A prompt stands once for all of them that have it."""


def pack(
    samples: Sequence[Sample],
    max_tokens_per_microbatch: int,
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
    """Pack samples into batches of at most `max_tokens_per_microbatch` positions (a single longer
    sample gets a batch of its own).

    Samples whose weights are all 0 take no position.  `share=False` repeats the prompt before every
    completion; with `alike` only sequences for whose positions it returns the same value share a
    prompt; `whole_groups` never cuts a group; `fill` rounds P up with filler
    (`ops/onednn_shapes.py`).  How samples are packed cannot change an update: weights were fixed
    before.

    world: of several processes, which all pack the same samples, each gets its own part, balanced
        by positions.
    even: every process gets the same number of batches, the last ones a single position of filler
        where there is no more.

    >>> def sample(n, group):
    ...     ones = np.ones(n)
    ...     return Sample(
    ...         group=group, prompt=np.array([7, 8, 9]), completion=np.arange(n), weight=ones,
    ...         advantage=ones, behavior_logp=-ones,
    ...     )
    >>> samples = [sample(3, "a"), sample(4, "b"), sample(2, "a")]
    >>> first, second = pack(samples, max_tokens_per_microbatch=8)
    >>> first.tokens_P.tolist(), first.position_P.tolist(), first.target_P.tolist()
    ([7, 8, 9, 0, 1, 9, 0], [0, 1, 2, 3, 4, 2, 3], [-1, -1, 0, 1, 2, 0, 1])
    >>> first.samples, second.samples
    ((-1, 0, 2), (1,))
    """
    parts = divide(
        samples,
        max_tokens_per_microbatch,
        world.size,
        share=share,
        alike=alike,
        whole_groups=whole_groups,
    )
    bins = _bins(parts[world.rank], max_tokens_per_microbatch)
    if even:
        most = max(len(_bins(part, max_tokens_per_microbatch)) for part in parts)
        bins += [[]] * (most - len(bins))
    return [_batch(samples, bin_, fill, device, dtype) for bin_ in bins]


def divide(
    samples: Sequence[Sample],
    max_tokens_per_microbatch: int,
    parts: int,
    *,
    share: bool = True,
    alike: Callable[[int], Hashable] | None = None,
    whole_groups: bool = False,
) -> list[list[Unit]]:
    """Deal the units of a step out to processes: the longest first, each to the one that has the
    fewest positions.

    A group that is cut repeats its prompt, so groups are cut smaller than the budget only as far as
    that shortens the longest part.

    >>> ones = np.ones(6)
    >>> one = Sample(
    ...     group="a", prompt=np.array([1, 2]), completion=np.arange(6), weight=ones,
    ...     advantage=ones, behavior_logp=-ones,
    ... )
    >>> samples = [one] * 4
    >>> [[unit.positions for unit in part] for part in divide(samples, 100, 2)]
    [[13], [13]]
    """
    whole = _units(samples, max_tokens_per_microbatch, share, alike, whole_groups)
    best = _dealt(whole, parts)
    if parts == 1 or whole_groups:
        return best
    mean = -(-sum(unit.positions for unit in whole) // parts)
    for limit in (mean, mean // 2, mean // 4, mean // 8):
        limit = min(max_tokens_per_microbatch, max(limit, 1))
        finer = _dealt(_units(samples, limit, share, alike, whole_groups), parts)
        best = min(best, finer, key=_longest)
    return best


def _dealt(units: Sequence[Unit], parts: int) -> list[list[Unit]]:
    """Units in parts, the longest first, each to the part with the fewest positions."""
    if parts == 1:
        return [list(units)]
    dealt: list[list[Unit]] = [[] for _ in range(parts)]
    load = [0] * parts
    for unit in sorted(units, key=_shortness):
        place = load.index(min(load))
        dealt[place].append(unit)
        load[place] += unit.positions
    return dealt


def _shortness(unit: Unit) -> int:
    """The order in which the longest unit comes first; ties keep theirs."""
    return -unit.positions


def _longest(parts: Sequence[Sequence[Unit]]) -> int:
    return max(sum(unit.positions for unit in part) for part in parts)


def unpack(
    batch: Batch, values_P: Tensor, samples: Sequence[Sample]
) -> Iterator[tuple[int, np.ndarray]]:
    """For every sample of the batch: its index, and its completion's numbers (n, ...) of a column
    of the stream (P, ...); 0 at tokens that stand in no segment."""
    values = values_P.detach().cpu().numpy()
    columns: dict[int, np.ndarray] = {}
    for s, index in enumerate(batch.samples):
        if index >= 0:
            begin, end = batch.tokens[s]
            stop = batch.layout.start[s] + batch.layout.length[s]
            if index not in columns:
                columns[index] = np.zeros(
                    (samples[index].completion.size, *values.shape[1:]), values.dtype
                )
            columns[index][begin:end] = values[stop - (end - begin) : stop]
    yield from columns.items()


def pieces_of(owner: int, sample: Sample) -> list[Span]:
    """The pieces of a sample with a token whose weight is not 0."""
    pieces = []
    for begin, end, context in context_spans(
        sample.completion.size, sample.prompt, sample.branches
    ):
        if not sample.weight[begin:end].any():
            continue
        size = sample.prompt.size
        if not np.array_equal(context[:size], sample.prompt):
            size = context.size
        prompt = context[:size]
        pieces.append(Span(owner, begin, end, prompt, prompt.tobytes(), context[size:]))
    return pieces


def _units(
    samples: Sequence[Sample],
    max_tokens_per_microbatch: int,
    share: bool,
    alike: Callable[[int], Hashable] | None,
    whole: bool,
) -> list[Unit]:
    """The units of the samples: groups, cut where they are longer than a micro-batch.

    whole: a group is one unit, however long.
    """
    groups: dict[tuple[str, Hashable], list[list[Span]]] = {}
    kinds: dict[tuple[str, Hashable], set[Hashable]] = {}
    for index, sample in enumerate(samples):
        block = pieces_of(index, sample)
        if not block:
            continue
        lengths: set[Hashable] = {None}
        if alike is not None:
            lengths = {alike(piece.prompt.size + piece.size - 1) for piece in block}
        part: Hashable = None
        if not whole:
            part = frozenset(lengths) if share else index
        groups.setdefault((sample.group, part), []).append(block)
        kinds.setdefault((sample.group, part), set()).update(lengths)
    units = []
    for key, blocks in groups.items():
        prompt = samples[blocks[0][0].owner].prompt
        for block in blocks:
            same = np.array_equal(samples[block[0].owner].prompt, prompt)
            assert same, f"group {key[0]}: two prompts"
        shared = share and len(kinds[key]) == 1
        taken: list[Span] = []
        positions = 0
        for block in blocks:
            both = _positions([*taken, *block], shared)
            if taken and both > max_tokens_per_microbatch and not whole:
                units.append(Unit(tuple(taken), positions, shared))
                taken, both = [], _positions(block, shared)
            taken += block
            positions = both
        units.append(Unit(tuple(taken), positions, shared))
    return units


def _positions(pieces: Sequence[Span], shared: bool) -> int:
    """Positions that pieces take, next to each other; each prompt stands once, if it is shared."""
    positions = 0
    standing: set[bytes] = set()
    for piece in pieces:
        positions += piece.size
        if not shared or piece.key not in standing:
            positions += piece.prompt.size - 1
            standing.add(piece.key)
    return positions


def _bins(units: Sequence[Unit], max_tokens_per_microbatch: int) -> list[list[Unit]]:
    """The units in as few bins as first fit finds, filled evenly where that fits: the fullest one
    decides how much memory a step takes.
    """
    first = _first_fit(units, max_tokens_per_microbatch)
    if len(first) < 2:
        return first
    even = _dealt(units, len(first))
    if _longest(even) > max_tokens_per_microbatch:
        return first
    return even


def _first_fit(units: Sequence[Unit], max_tokens_per_microbatch: int) -> list[list[Unit]]:
    """First fit, longest first; ties keep their order."""
    bins: list[list[Unit]] = []
    room: list[int] = []
    for unit in sorted(units, key=_shortness):
        for place, left in enumerate(room):
            if unit.positions <= left:
                bins[place].append(unit)
                room[place] -= unit.positions
                break
        else:
            bins.append([unit])
            room.append(max_tokens_per_microbatch - unit.positions)
    return bins


class _Segment(NamedTuple):
    """Consecutive positions of a batch: a prompt that several pieces continue, or a piece of a
    sample.
    """

    ids: np.ndarray
    position: int
    """Place of its first id in the sequence that it belongs to."""
    parent: int
    """The segment that it continues; -1: none."""
    images: Any
    """The images of its sequence's prompt, or None."""
    owner: int = -1
    """Place of its sample among those that are packed; -1: a prompt."""
    begin: int = 0
    end: int = 0
    """The last positions predict `completion[begin:end]`."""


def _segments(samples: Sequence[Sample], units: Sequence[Unit]) -> list[_Segment]:
    """The segments of units: a prompt, once if it is shared, then every piece that has it."""
    segments: list[_Segment] = []
    for unit in units:
        families: dict[bytes, list[Span]] = {}
        for piece in unit.members:
            families.setdefault(piece.key, []).append(piece)
        for members in families.values():
            prompt = head = members[0].prompt
            parent, images = -1, samples[members[0].owner].images
            if unit.shared and len(members) > 1 and prompt.size > 1:
                parent, head = len(segments), prompt[-1:]
                segments.append(_Segment(prompt[:-1], 0, -1, images))
            place = prompt.size - head.size
            for piece in members:
                completion = samples[piece.owner].completion[piece.begin : piece.end]
                ids = np.concatenate([head, piece.between, completion])
                segments.append(
                    _Segment(ids[:-1], place, parent, images, piece.owner, piece.begin, piece.end)
                )
    return segments


class _Stream:
    """The columns of one batch, while they are written."""

    def __init__(
        self,
        samples: Sequence[Sample],
        segments: Sequence[_Segment],
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        fill: bool,
    ) -> None:
        self.segments = segments
        self.device, self.dtype = device, dtype
        self.lengths = [segment.ids.size for segment in segments]
        self.used = sum(self.lengths)
        self.total = max(self.used, 1)
        if fill and self.used:
            self.total = filled(self.used)
        self.starts: list[int] = []
        self.images: list[ImageSpan] = []
        self.pieces: list[tuple[_Segment, int]] = []
        """Each segment with completion tokens, and where it stops."""
        self.owners: list[Sample] = []
        """The sample of each piece."""
        place = 0
        for segment, length in zip(segments, self.lengths, strict=True):
            self.starts.append(place)
            place += length
            if segment.images is not None:
                span = ImageSpan(place - length, place, segment.position, segment.images)
                self.images.append(span)
            if segment.owner >= 0:
                self.pieces.append((segment, place))
                self.owners.append(samples[segment.owner])

    def ids(self, parts: Sequence[np.ndarray], filler: int) -> Tensor:
        """A column of whole numbers, one array for each segment, and `filler` behind them."""
        rest = np.full(self.total - self.used, filler)
        return torch.from_numpy(np.concatenate([*parts, rest])).to(self.device)

    def of_segments(self, numbers: Sequence[int]) -> Tensor:
        """A column with a number for each segment; -1 behind them."""
        lengths = zip(numbers, self.lengths, strict=True)
        return self.ids([np.full(length, number) for number, length in lengths], -1)

    def predicted(
        self, values: Sequence[Any], default: float, kind: type = np.float64
    ) -> np.ndarray:
        """A number per position: those of the samples where their tokens are predicted, `default`
        elsewhere.

        values: of each piece the numbers of its sample's completion, or one number for all.
        """
        column = np.full(self.total, default, kind)
        for (segment, stop), numbers in zip(self.pieces, values, strict=True):
            if isinstance(numbers, np.ndarray):
                numbers = numbers[segment.begin : segment.end]
            column[stop - (segment.end - segment.begin) : stop] = numbers
        return column

    def column(self, name: str) -> Tensor:
        """A column of the samples (`Sample.column`) in the batch's type."""
        return self.of_tokens([sample.column(name) for sample in self.owners], 0.0)

    def of_tokens(self, values: Sequence[Any], default: float) -> Tensor:
        """`predicted` in the batch's type."""
        return torch.from_numpy(self.predicted(values, default)).to(self.device, self.dtype)

    def sequences(self) -> list[int]:
        """The first segment of the sequence that each segment belongs to."""
        first: dict[int, int] = {}
        sequences: list[int] = []
        for place, segment in enumerate(self.segments):
            if segment.owner < 0:
                sequences.append(place)
            else:
                sequences.append(first.setdefault(segment.owner, place))
        return sequences


def _batch(
    samples: Sequence[Sample],
    units: Sequence[Unit],
    fill: bool,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Batch:
    """Write the batch of some units; without units it is one position of filler."""
    segments = _segments(samples, units)
    stream = _Stream(samples, segments, device, dtype, fill=fill)
    owners = stream.owners
    members = owners or samples[:1]
    weight = stream.predicted([one.weight for one in owners], 0.0)
    target = stream.predicted([one.completion for one in owners], -1, np.int64)
    positions = []
    for segment in segments:
        positions.append(np.arange(segment.position, segment.position + segment.ids.size))
    reference = None
    if all(one.reference_logp is not None for one in members):
        reference = stream.column("reference_logp")
    support = None
    if any(one.support is not None for one in owners):
        support = _support(stream, weight)
    numbers = list(range(len(segments)))
    tokens_P = stream.ids([segment.ids for segment in segments], 0)
    temperature_P = stream.of_tokens([one.temperature for one in owners], 1.0)
    sequences, sequence_P = stream.sequences(), None
    if sequences != numbers:
        sequence_P = stream.of_segments(sequences)
    layout = Layout(
        start=tuple(stream.starts),
        length=tuple(stream.lengths),
        prefix=tuple(segment.parent for segment in segments),
        total=stream.total,
    )
    prepared = None
    if torch.device(device).type != "cpu":
        from groupwise.ops.cuda.stream_attention import prepare_stream

        prepared = prepare_stream(layout, device)
    return Batch(
        layout=layout,
        tokens_P=tokens_P,
        position_P=stream.ids(positions, 0),
        segment_P=stream.of_segments(numbers),
        target_P=torch.from_numpy(target).to(device),
        weight_P=torch.from_numpy(weight).to(device, dtype),
        advantage_P=stream.column("advantage"),
        behavior_logp_P=stream.column("behavior_logp"),
        reference_logp_P=reference,
        temperature_P=temperature_P,
        trained_M=torch.from_numpy(np.flatnonzero(weight)).to(device),
        support=support,
        extra_P={name: stream.column(name) for name in members[0].extra},
        sequence_P=sequence_P,  # type: ignore[arg-type]
        samples=tuple(segment.owner for segment in segments),
        tokens=tuple((segment.begin, segment.end) for segment in segments),
        prepared=prepared,
        images=tuple(stream.images),
    )


def _support(stream: _Stream, weight: np.ndarray) -> tuple[Tensor, Tensor] | None:
    """Flat ids and, for every trained position (M + 1), where its stretch begins; the offsets stay
    on the host.
    """
    per_position: dict[int, np.ndarray] = {}
    for (segment, stop), sample in zip(stream.pieces, stream.owners, strict=True):
        support = sample.support or ()
        start = stop - (segment.end - segment.begin)
        for t, ids in enumerate(support[segment.begin : segment.end]):
            per_position[start + t] = ids
    if not per_position:
        return None
    nothing = np.empty(0, np.int64)
    chosen = [per_position.get(int(p), nothing) for p in np.flatnonzero(weight)]
    begin = np.cumsum([0, *map(len, chosen)]).astype(np.int64)
    flat = np.concatenate([nothing, *chosen])
    return torch.from_numpy(flat).to(stream.device), torch.from_numpy(begin)
