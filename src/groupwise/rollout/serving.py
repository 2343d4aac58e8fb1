"""A checkpoint behind the endpoint: requests of any client are decoded by the native engine, those that wait together in one batch.

A batch is what waits when the last one is done: requests that ask for the same distribution.  Their limits may differ, and each is
answered when it has ended; who comes meanwhile waits for the batch.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import numpy as np

from groupwise.environments.chat_tokens import Asking, Memory, Speech, Told
from groupwise.environments.endpoint import Endpoint
from groupwise.environments.requests import Asked, ChatRequest, Refused, SampledTokens
from groupwise.errors import EngineError
from groupwise.models.policy import Policy
from groupwise.records import Prompt, Rollout, Sampling
from groupwise.rollout.native.engine import NativeEngine
from groupwise.utils import threads

LIMIT = "limit"
"""Column of a prompt's row: the most tokens of its completions."""


class _Engine(NativeEngine):
    """The native engine with a limit for each prompt."""

    def limit(self, prompt: Prompt, index: int, sampling: Sampling) -> int:
        """Most tokens of a completion: the request's own limit, where it is lower."""
        return min(super().limit(prompt, index, sampling), int(prompt.row[LIMIT]))


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request on its way."""

    prompt: Prompt
    sampling: Sampling
    count: int
    seed: int
    drawn: Future[Sequence[SampledTokens]] = field(default_factory=Future)

    @property
    def kind(self) -> tuple[Sampling, int, int]:
        """Requests of one kind are decoded together."""
        return replace(self.sampling, max_new_tokens=1), self.count, self.seed


class Serving:
    """Implements `endpoint.Line` for requests of no episode: each is answered from what it says alone."""

    def __init__(self, policy: Policy, *, rows: int = 256, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
        """rows: completions decoded at the same time.   variables: of the chat template, where a request sets none."""
        self.policy, self.engine = policy, _Engine(policy, max_rows=rows)
        self.speech = Speech(policy.tokenizer, policy.eos_ids, variables)
        self._seed, self._number, self._lock = secrets.randbits(48), 0, threading.Lock()
        self._closed = False
        self._arriving: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._served = threads.begin(self._run, "serving")

    def ask(self, request: ChatRequest) -> Asking:
        """What the next turn is drawn behind, from the messages alone: nothing is kept between requests."""
        return Memory(self.speech).ask(request)

    def tell(self, request: ChatRequest, asking: Asking, drawn: SampledTokens) -> Told:
        """The turn as a message; it is not kept."""
        # The ids of its calls differ from those of earlier turns.
        return self.speech.read(replace(drawn, turn=len(request.messages)), request, asking.thinking, request.asked.stop)

    def draw(self, context: np.ndarray, asked: Asked, asking: Asking | None = None) -> Future[Sequence[SampledTokens]]:
        """Queue a request; those with the same sampling are decoded together."""
        room = self.policy.context - context.size
        if room < 1:
            raise Refused(
                f"the context has {context.size} tokens, and the model's is {self.policy.context}: no room for a completion",
                code="context_length_exceeded",
            )
        sampling = asked.sampling(room)
        if asked.seed is None:
            with self._lock:
                self._number += 1
            name, seed = f"request/{self._number}", self._seed
        else:  # the same request with the same seed gives the same completions
            name, seed = f"seeded/{blake2b(context.tobytes(), digest_size=12).hexdigest()}", asked.seed
        row = {LIMIT: sampling.max_new_tokens}
        waiting = _Waiting(Prompt(id=name, tokens=context, text="", row=row), sampling, asked.count, seed)
        with self._lock:
            if self._closed:
                waiting.drawn.cancel()
            else:
                self._arriving.put(waiting)
        return waiting.drawn

    def close(self) -> None:
        """End the thread that decodes, after the batch that it is at; requests that still wait are cancelled."""
        with self._lock:
            self._closed = True
            self._arriving.put(None)
        self._served.exception()

    def _run(self) -> None:
        held: list[_Waiting] = []
        while True:
            arrived = [self._arriving.get()] if not held else []
            while not self._arriving.empty():
                arrived.append(self._arriving.get())
            held += [one for one in arrived if one is not None]
            if None in arrived:
                break
            batch: dict[str, _Waiting] = {}
            for one in held:
                if one.kind == held[0].kind:
                    batch.setdefault(one.prompt.id, one)
            chosen = set(map(id, batch.values()))
            held = [one for one in held if id(one) not in chosen]
            self._decode({name: one for name, one in batch.items() if one.drawn.set_running_or_notify_cancel()})
        for one in held:
            one.drawn.cancel()

    def _decode(self, batch: dict[str, _Waiting]) -> None:
        """Answer requests of one kind."""
        if not batch:
            return
        some = next(iter(batch.values()))
        sampling = replace(some.sampling, max_new_tokens=max(one.sampling.max_new_tokens for one in batch.values()))
        prompts = [one.prompt for one in batch.values()]
        try:
            for rollouts in self.engine.generate(prompts, group_size=some.count, sampling=sampling, seed=some.seed):
                batch.pop(rollouts[0].prompt.id).drawn.set_result([_drawn(rollout) for rollout in rollouts])
        except Exception as error:  # it belongs to those who wait
            refused = Refused(str(error)) if isinstance(error, EngineError) else error
            for one in batch.values():
                one.drawn.set_exception(refused)


def _drawn(rollout: Rollout) -> SampledTokens:
    version = int(rollout.version[-1]) if len(rollout) else 0
    return SampledTokens(rollout.tokens.tolist(), rollout.behavior_logp.tolist(), rollout.finish, version)


class Served:
    """A policy that is served; use it as a context manager."""

    def __init__(
        self,
        policy: Policy,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        rows: int = 256,
        token: str | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """name: of the model, for clients.   host, port, token: see `Endpoint`.   rows, variables: see `Serving`."""
        found: dict[str | None, Serving] = {}
        self.endpoint = Endpoint(
            found.get, name=name, context=policy.context, vocabulary=policy.vocabulary, host=host, port=port, token=token
        )
        self.serving = found[None] = Serving(policy, rows=rows, variables=variables)
        self.endpoint.start()

    @property
    def base_url(self) -> str:
        """For OpenAI clients."""
        return f"{self.endpoint.url}/v1"

    def close(self) -> None:
        """Stop serving."""
        self.endpoint.close()
        self.serving.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
