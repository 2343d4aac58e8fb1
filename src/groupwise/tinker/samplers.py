"""Samplers: each samples from the base model, from a checkpoint, or from the weights that a model
had when it was asked for them.

Requests for completions wait in one list.  Those that agree in how they are drawn are drawn
together.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from groupwise.config.settings import ModelSettings
from groupwise.models.loading import load_policy
from groupwise.models.policy import Policy
from groupwise.tinker.bodies import SampleBody
from groupwise.tinker.places import SCHEME, CheckpointPlace
from groupwise.tinker.promises import Promises, Table, attempt
from groupwise.tinker.sampler import DrawSettings, SampleRequest, WeightsSampler
from groupwise.utils.http import Refused
from groupwise.utils.threads import Thread

SNAPSHOTS = 3
"""Weights beside the base model's that are held at the same time; the least recently used go
first.
"""
Batches = dict[tuple[str, DrawSettings, int], list[SampleRequest]]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsReader:
    """How weights are read, and sampled from."""

    settings: ModelSettings
    """The base model's."""
    rows: int
    """Completions at the same time."""
    positions: int
    """Packed positions scored at a time."""

    def sampler(self, policy: Policy) -> WeightsSampler:
        """Return a sampler of a policy's weights."""
        return WeightsSampler(policy, rows=self.rows, positions=self.positions)

    def read(self, folder: Path) -> WeightsSampler:
        """Return a sampler of a checkpoint's weights."""
        return self.sampler(load_policy(replace(self.settings, path=str(folder))))


class Samplers:
    """The samplers of all clients, by their ids."""

    def __init__(
        self,
        reader: WeightsReader,
        base: Policy,
        root: Path,
        promises: Promises,
        worker: Thread,
    ) -> None:
        """root: folder of checkpoints.   worker: the thread that computes."""
        self._reader, self._base, self._root = reader, reader.sampler(base), root
        self._promises, self._worker = promises, worker
        self._lock = threading.Lock()
        self._keys: Table[str] = Table()
        """What each sampler samples from: a checkpoint's path, its own id for a snapshot, or
        nothing for the base model."""
        self._held: OrderedDict[str, WeightsSampler] = OrderedDict()
        self._promised: Table[str] = Table()
        self._waiting: list[SampleRequest] = []

    def create(self, sampler_id: str, path: str | None) -> None:
        """Name a sampler.   path: of a checkpoint; None: of the base model.   Raises Refused for a
        checkpoint that is not there.
        """
        if path is not None:
            CheckpointPlace.read(path).newest(self._root)
        self._keys.note(sampler_id, path or "")

    def describe(self, sampler_id: str) -> dict[str, Any]:
        """Say what a sampler samples from, as the SDK reads it."""
        key = self._key(sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": str(self._reader.settings.path),
            "model_path": key if key.startswith(SCHEME) else None,
        }

    def hold_snapshot(self, sampler_id: str, policy: Policy) -> None:
        """Hold a copy of a model's weights for one sampler."""
        self._hold(sampler_id, self._reader.sampler(policy))
        self._keys.note(sampler_id, sampler_id)

    def sample(self, body: SampleBody) -> dict[str, Any]:
        """Promise completions of a prompt."""
        body.check()
        self._key(body.sampling_session_id)
        prompt_m = body.prompt.tokens()
        name = f"{body.sampling_session_id}:{body.seq_id}"
        with self._lock:
            request_id = self._promised.get(name)
            if request_id is None:
                promise = self._promises.make()
                request_id = promise.id
                self._promised.note(name, request_id)
                self._waiting.append(SampleRequest(body=body, prompt_m=prompt_m, promise=promise))
                self._worker.begin(self._draw_waiting)
        sequences = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    # ---- in the thread that computes

    def _draw_waiting(self) -> None:
        """Draw for all requests that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for (sampler_id, draws, _), requests in self._batches(waiting).items():
            self._draw(sampler_id, draws, requests)

    def _batches(self, waiting: list[SampleRequest]) -> Batches:
        """Put together the requests that agree in how they are drawn; one that cannot be drawn is
        answered.
        """
        batches: Batches = {}
        seen: Counter[str] = Counter()
        for request in waiting:
            draws = attempt(lambda request=request: self._draws(request))
            if not isinstance(draws, DrawSettings):
                request.promise.settle(draws)
                continue
            # Equal requests have equal random streams, which one call does not draw twice.
            batch = (request.sampler_id, draws, seen[request.name])
            seen[request.name] += 1
            batches.setdefault(batch, []).append(request)
        return batches

    def _draws(self, request: SampleRequest) -> DrawSettings:
        return request.draws(self._find(request.sampler_id).policy)

    def _draw(self, sampler_id: str, draws: DrawSettings, requests: list[SampleRequest]) -> None:
        """Draw for requests that agree, and give each its result."""
        results = attempt(lambda: self._find(sampler_id).draw(requests, draws))
        if isinstance(results, dict):
            results = [results] * len(requests)
        for request, result in zip(requests, results, strict=True):
            request.promise.settle(result)

    def _find(self, sampler_id: str) -> WeightsSampler:
        """Return a sampler, its weights read where they are not held.  Raises Refused for weights
        that were a snapshot, and are gone.
        """
        key = self._key(sampler_id)
        if not key:
            return self._base
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if not key.startswith(SCHEME):
            raise Refused(
                f"the weights of this sampler are gone: {SNAPSHOTS} snapshots are held; save"
                " weights that are to stay under a name (save_weights_for_sampler)"
            )
        folder = CheckpointPlace.read(key).newest(self._root) / "policy"
        self._hold(key, self._reader.read(folder))
        return self._held[key]

    def _hold(self, key: str, sampler: WeightsSampler) -> None:
        """Hold weights; the least recently used ones go."""
        self._held[key] = sampler
        while len(self._held) > SNAPSHOTS:
            self._held.popitem(last=False)

    def _key(self, sampler_id: str) -> str:
        """Return what a sampler samples from.  Raises Refused where there is no such sampler."""
        key = self._keys.get(sampler_id)
        if key is None:
            raise Refused(f"there is no sampler {sampler_id[:80]!r}", HTTPStatus.NOT_FOUND)
        return key
