"""Work is dealt out by packed positions."""

from __future__ import annotations

import numpy as np
import pytest

from groupwise.data.packing import divide, pack
from groupwise.distributed import comm
from groupwise.distributed.comm import World
from groupwise.records import Sample


def lognormal(groups: int, size: int, seed: int) -> list[Sample]:
    """Completions whose lengths are log-normal (median 200 tokens, deviation 0.8), prompts of 30 to 90 tokens."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(0, 60, size=int(rng.integers(30, 90)))
        for _ in range(size):
            n = int(np.clip(rng.lognormal(np.log(200), 0.8), 1, 4000))
            ones = np.ones(n)
            samples.append(
                Sample(
                    group=str(group),
                    prompt=prompt,
                    completion=np.zeros(n, np.int64),
                    weight=ones,
                    advantage=ones,
                    behavior_logp=ones,
                )
            )
    return samples


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_p34_the_fullest_rank_works_at_most_a_tenth_more_than_the_mean(parts: int) -> None:
    """By rows (each rank the same number of prompts) is shown beside it (`-s`), and is worse."""
    found = np.array([balanced_and_by_rows(parts, seed) for seed in range(8)])
    by_tokens, by_rows, more = found.T
    print(f"{parts} ranks: fullest / mean {by_tokens.max():.3f}, by rows {by_rows.mean():.3f} (mean), {by_rows.max():.3f} (worst)")
    assert by_tokens.max() <= 1.1
    assert by_tokens.mean() < by_rows.mean()
    # Cutting groups for balance repeats prompts: that must cost little.
    assert more.max() <= 1.1


def balanced_and_by_rows(parts: int, seed: int) -> tuple[float, float, float]:
    samples = lognormal(groups=4 * parts, size=8, seed=seed)
    load = np.array([sum(unit.positions for unit in part) for part in divide(samples, 16384, parts)])
    by_rows = [divide([s for s in samples if int(s.group) % parts == r], 16384, 1)[0] for r in range(parts)]
    rows = np.array([sum(unit.positions for unit in part) for part in by_rows])
    return load.max() / load.mean(), rows.max() / rows.mean(), load.sum() / rows.sum()


@pytest.mark.parametrize("whole_groups", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_sample_is_packed_once_and_filler_is_marked(ranks: int, even: bool, whole_groups: bool) -> None:
    samples = lognormal(groups=2, size=5, seed=1)
    batches = [pack(samples, 2000, world=World(rank, ranks), even=even, whole_groups=whole_groups) for rank in range(ranks)]
    found = sorted(index for own in batches for batch in own for index in batch.samples if index >= 0)
    assert found == list(range(len(samples)))
    if even:
        assert len({len(own) for own in batches}) == 1
    for own in batches:
        for batch in own:
            if not batch.layout.segments:
                assert even
                assert batch.segment_P.tolist() == [-1]
                assert batch.weight_P.tolist() == [0.0]
                assert batch.trained_M.numel() == 0
    if whole_groups:
        homes = {samples[i].group: rank for rank, own in enumerate(batches) for b in own for i in b.samples if i >= 0}
        assert all(homes[samples[i].group] == rank for rank, own in enumerate(batches) for b in own for i in b.samples if i >= 0)


def test_nothing_to_train_gives_no_batches_on_any_rank() -> None:
    assert [pack([], 100, world=World(rank, 2), even=True) for rank in range(2)] == [[], []]


def test_a_process_alone_waits_for_nobody() -> None:
    assert comm.waiting() == {}
