"""The vLLM engine: completions come from vLLM servers, which get the policy's weights after every
update.

Token ids go out; token ids, their log-probs and the version of the weights that drew them come
back.  A prompt is one request for its whole group, so that vLLM computes it once; several requests
are in flight, to several servers if there are, and a group is handed on as soon as it is complete,
while others are still being sampled.  No answer is taken on trust: versions, log-probs, lengths and
endings are checked here, and the trainer compares the log-probs with its own (`mismatch`).

With an environment each turn is a request of its own, with all ids so far: the server's prefix
cache knows what stands before it, and other turns are on their way meanwhile.

A completion's random numbers are seeded by (seed, prompt, index).  What else is in a server's batch
can still change the last bits of a log-prob, and so once in a while a token.
"""

from __future__ import annotations

import copy
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.distributed import comm
from groupwise.environments.conversation import Environment, Stream
from groupwise.errors import ConfigError, EngineError
from groupwise.models.policy import Policy
from groupwise.models.shape import Shape
from groupwise.models.sharded import gathered
from groupwise.records import Finish, Prompt, Rollout, Sampling
from groupwise.rollout.engine import check_request, completion_limit, make_rollout
from groupwise.rollout.episodes import Conversations, Groups
from groupwise.rollout.sampling import stream_keys
from groupwise.rollout.vllm.addresses import Servers, addresses_of
from groupwise.rollout.vllm.client import Client
from groupwise.rollout.vllm.colocated import MEDIA, Colocated, LocalRequests
from groupwise.rollout.vllm.delivery import Transport, WeightDelivery
from groupwise.rollout.vllm.images import check_tokens, image_request
from groupwise.rollout.vllm.pool import ServerPool
from groupwise.rollout.vllm.published import Published, VersionedServer
from groupwise.rollout.vllm.publisher import FULL_EVERY
from groupwise.rollout.vllm.request_pool import RequestPool
from groupwise.rollout.vllm.server import MODEL, START_SECONDS, OwnServer, cache_bytes
from groupwise.rollout.vllm.server_fitness import meet
from groupwise.utils.files import write
from groupwise.utils.spelling import counted

EXACT, ROUNDED = 0.01, 0.1
"""Mean difference of sampled and scored log-probs that rounding can explain: in float32, and where
a side rounds to bfloat16, or a server to fewer bits.
"""
PATIENCE = 300.0
"""Seconds without any running server after which sampling fails."""
NEVER = -9000.0
"""vLLM writes the log-prob of what could not be drawn as -9999."""
NO_TOKEN = -1e9
"""Added to the logit of an id that is no token."""


class StaleAnswer(EngineError):
    """An answer that other weights have drawn than those that were asked for, or none of them."""


class VllmEngine:
    """Implements `engine.Engine`.  Of several processes each asks for its share of the completions.

    Servers get their weights from the first process; a colocated vLLM gets them from its own.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        servers: Servers = (),
        patience: float = PATIENCE,
        max_rows: int = 256,
        dtype: str | None = None,
        in_flight: bool = False,
        colocated: bool = False,
        tensor_parallel: int = 1,
        environment: Environment | None = None,
        weights_folder: str | None = None,
        full_every: int = FULL_EVERY,
    ) -> None:
        """servers: `http://host:port` of running ones (`groupwise serve`), a file with one address
        a line, or `{"router": URL}` of a running vllm-router.  None: one of its own starts, and
        ends with `close`.

        patience: seconds without any running server after which sampling fails.
        max_rows, dtype: of its own server: completions decoded at the same time; `float32` or
            `bfloat16` (default: the policy's products').
        in_flight: `generate` may run in other threads while `send_weights` sends weights;
            completions go on with the new ones, and each token carries the version that drew it.
        colocated: no servers, but vLLM in this process.
        tensor_parallel: processes that hold one colocated vLLM together.
        environment: that answers the turns of completions; the caller closes it.
        weights_folder: that this run and the servers share, for new weights; default: servers
            fetch them from this process.
        full_every: versions of the weights from one that is written whole to the next.
        Raises ConfigError if no server can be started.  A server is waited for at the first
        `send_weights` or `generate`.
        """
        self.environment = environment
        self.policy, self.version = policy, 0
        self._own: OwnServer | None = None
        self._in_flight, self._requested = in_flight, set[RequestPool | LocalRequests]()
        self._last_sent: int | None = None
        """The last version that was sent."""
        self._delivery: WeightDelivery | None = None
        dtype = dtype or _dtype(policy)
        if colocated:
            self._run, self._alive = secrets.token_hex(4), None
            self.servers: ServerPool | Colocated = Colocated(
                self._describe,
                policy,
                max_rows,
                dtype,
                self._cache(max_rows, dtype),
                tensor_parallel,
            )
            return
        # The name is of this run alone: weights that another run has sent to the same servers are
        # not taken for ours.
        self._run, named = comm.from_first(
            lambda: (secrets.token_hex(4), servers or [self._start(max_rows, dtype)]),
        )
        self._alive = None if self._own is None else self._own.check
        self._transport = Transport(weights_folder, addressed=bool(servers), full_every=full_every)
        self._delivery = WeightDelivery(self._run, self._transport)
        self.servers = ServerPool(
            addresses_of(named),
            self._run,
            serve=VersionedServer,
            meet=partial(meet, policy=policy),
            locate=self._locate,
            leads=comm.world().first,
            keep=in_flight,
            patience=patience if servers else START_SECONDS,
            alive=self._alive,
        )

    def _start(self, rows: int, dtype: str) -> str:
        if self.policy.device.type != "cpu":
            raise ConfigError(
                "a vLLM server of its own is started beside a policy on the CPU only: start one on"
                " other GPUs, `CUDA_VISIBLE_DEVICES=1 groupwise serve MODEL`, and name it:"
                " rollout.engine: {name: vllm, servers: [http://...]}"
            )
        # The weights are sent anyway, so it begins with any.
        more = ["--load-format", "dummy", "--max-model-len", str(self.policy.context)]
        if self.policy.vision is not None:
            more += ["--limit-mm-per-prompt", json.dumps(MEDIA)]
        cache = f"{self._cache(rows, dtype) >> 20}M"
        self._own = OwnServer(self._describe, rows=rows, dtype=dtype, cache=cache, more=more)
        return self._own.url

    def _describe(self, folder: Path) -> None:
        """Put the policy's configuration and tokenizer into a folder."""
        config = copy.deepcopy(self.policy.model.config)
        # FSDP2 puts a class of its own before the model's.
        named = (
            kind
            for kind in type(self.policy.model).__mro__
            if kind.__module__.startswith("transformers.models.")
        )
        config.architectures = [next(named).__name__]
        config.save_pretrained(folder)
        self.policy.tokenizer.save_pretrained(folder)
        if self.policy.vision is not None:
            for name, content in self.policy.image_files.items():
                write(folder / name, content)

    def _cache(self, rows: int, dtype: str) -> int:
        """Bytes of keys and values that so many rows need on average, and one of the longest at
        least.
        """
        shape = Shape.of(self.policy.model.config.to_dict(), 0, dtype=dtype)
        return cache_bytes(shape, self.policy.context, rows, shape.bytes_per_product)

    @property
    def where(self) -> str:
        """Where completions come from, in words."""
        if self._own is not None:
            return f"vLLM, a server of this run (log: {self._own.log})"
        return " and ".join(self.servers.names)

    @property
    def tolerance(self) -> float:
        """Mean difference of sampled and scored log-probs, nats, that rounding can explain;
        infinite until a server is known.
        """
        types = {_dtype(self.policy)}
        for facts in self.servers.known.values():
            types.add(str(facts.get("quantization") or facts["dtype"]))
        if not self.servers.known:
            return math.inf
        return EXACT if types == {"float32"} else ROUNDED

    def metrics(self) -> dict[str, float]:
        """Return what servers did since the last call, by the names of the metric table."""
        return {} if isinstance(self.servers, Colocated) else self.servers.metrics()

    def close(self) -> None:
        """Hang up, break off what other threads still sample, and end the server of its own."""
        for requests in list(self._requested):
            requests.cancel()
        self.servers.close()
        if self._delivery is not None:
            self._delivery.close()
        if self._own is not None:
            self._own.close()
            self._own = None

    def send_weights(self, version: int) -> None:
        """See `engine.Engine`: sends the weights to all servers, unless they have this version.
        All processes must call it.

        Raises PeerError if no server is there, EngineError if one does not take them.
        """
        self.version = version
        if version == self._last_sent:
            return
        if self._last_sent is not None and version < self._last_sent:
            self._rename()
        self._push()

    def _rename(self) -> None:
        """Give the run another name on the servers: it has gone back to earlier weights, and no
        label may ever mean others than those that a server knows by it.
        """
        self._run = comm.from_first(lambda: secrets.token_hex(4))
        if self._delivery is None:
            return
        self._delivery.close()
        self._delivery = WeightDelivery(self._run, self._transport)
        assert not isinstance(self.servers, Colocated)
        self.servers.begin_anew(self._run)

    def _locate(self, client: Client) -> Published:
        """See `ServerPool.locate`."""
        assert self._delivery is not None
        return self._delivery.locate(client)

    def _push(self) -> None:
        """Send the weights; all processes must call it."""
        if isinstance(self.servers, Colocated):
            self._push_colocated(self.servers)
        else:
            self._push_to_servers(self.servers)
        self._last_sent = self.version

    def _push_colocated(self, colocated: Colocated) -> None:
        """Sharded weights are gathered once, for every process."""

        def send() -> list[None]:
            if not colocated.facts:
                colocated.connect(whole)
            colocated.send(whole, f"{self._run}:{self.version}")
            return []

        with gathered(self.policy) as whole:
            comm.together(send)

    def _push_to_servers(self, pool: ServerPool) -> None:
        """Publish a version; the servers fetch it on their own.

        The first time, and where nothing is sampled meanwhile, one server is waited for.
        """
        assert self._delivery is not None
        if self._last_sent is None:
            comm.together(pool.start)
        self._delivery.publish(self.policy, self.version, pool.dtype, pool.lora_rank)
        pool.announce(self.version, adapter=self._delivery.alone)
        waits = self._last_sent is None or not self._in_flight
        if waits:
            comm.from_first(pool.wait_for_version)
        if comm.from_first(pool.take_unreadable):
            self._delivery.publish_full()
            if waits:
                comm.from_first(pool.wait_for_version)

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int
    ) -> Iterator[tuple[Rollout, ...]]:
        """See `engine.Engine`."""
        check_request(self.policy, prompts, group_size, sampling)
        if self._last_sent is None or self.servers.asleep:
            self._push()
        oldest = self._last_sent or 0
        self._check(prompts, group_size if self.environment is None else 1, sampling)
        if self.environment is not None:
            yield from self._episodes(self.environment, prompts, group_size, sampling, seed, oldest)
            return
        by_id = {prompt.id: prompt for prompt in prompts}
        count, bodies = 1 if sampling.greedy else group_size, {}
        for prompt in prompts:
            drawn = int(
                stream_keys(seed, prompt.id, [0])[0] >> np.uint64(16)
            )  # vLLM adds the index
            limit = completion_limit(self.policy, prompt, sampling)
            bodies[prompt.id] = self._body(prompt.tokens, count, limit, drawn, sampling)
            if prompt.images is not None:
                bodies[prompt.id] |= image_request(prompt.images, self.policy.vision)
        with self._requests(oldest) as requests:
            for name, body in bodies.items():
                requests.put(name, body)
            for who, name, answer in requests:
                try:
                    group = self._group(who, by_id[name], answer, group_size, sampling, oldest)
                except StaleAnswer as error:
                    requests.again(name, error)
                    continue
                requests.finish(name)
                yield group

    def _episodes(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        oldest: int,
    ) -> Iterator[tuple[Rollout, ...]]:
        """Turn by turn, as many at a time as the servers decode."""
        streams = {
            f"{index}/{prompt.id}": Stream(
                prompt, index, completion_limit(self.policy, prompt, sampling)
            )
            for prompt in prompts
            for index in range(group_size)
        }
        groups = Groups(group_size)
        rows = self.servers.rows
        with (
            self._requests(oldest) as requests,
            Conversations(
                self.policy,
                environment,
                sampling,
                seed,
                streams.values(),
                rows=rows,
                replied=requests.wake,
            ) as conversations,
        ):
            while conversations.unfinished:
                conversations.begin()
                who, name, answer = requests.take()
                if who:
                    stream = streams[name]
                    try:
                        (choice,) = self._choices(
                            who, stream.prompt, answer, 1, sampling, stream.left, oldest
                        )
                    except StaleAnswer as error:
                        requests.again(name, error)
                        continue
                    stream.add(choice.tokens, choice.logp, choice.version(self._run).tolist())
                    stream.support += choice.support if sampling.restricts else ()
                    conversations.turn(stream, choice.finish(self.policy.eos_ids))
                for stream, rollout in conversations.heard(self._last_sent or 0):
                    name = f"{stream.index}/{stream.prompt.id}"
                    if rollout is None:
                        requests.put(name, self._turn(stream, sampling, seed))
                    else:
                        requests.finish(name)
                        yield from groups.add(rollout)

    def _turn(self, stream: Stream, sampling: Sampling, seed: int) -> dict[str, Any]:
        """The body of a request for the next turn of a conversation."""
        ids, context = stream.ids(), self.servers.context
        if ids.size + stream.left > context:
            raise EngineError(
                f"a server holds sequences of {context} tokens, but a turn of {stream.prompt.place}"
                f" may have {stream.left} behind {ids.size}: start it with -- --max-model-len"
                f" {ids.size + stream.left}"
            )
        key = stream_keys(seed, f"{stream.prompt.id}/{stream.turn}", [stream.index])
        return self._body(ids, 1, stream.left, int(key[0] >> np.uint64(16)), sampling)

    @contextmanager
    def _requests(self, oldest: int) -> Iterator[RequestPool | LocalRequests]:
        """Requests to what samples, which `close` breaks off.   oldest: see `_group`."""
        if isinstance(self.servers, Colocated):
            requests: RequestPool | LocalRequests = self.servers.requests()
        else:
            requests = RequestPool(self.servers, oldest)
        self._requested.add(requests)
        try:
            with requests:
                yield requests
        finally:
            self._requested.discard(requests)

    def _check(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> None:
        """Raises EngineError for what these servers cannot do."""
        for name, facts in self.servers.known.items():
            if group_size > facts["rows"] and not sampling.greedy:
                raise EngineError(
                    f"{name} decodes {facts['rows']} completions at a time, fewer than a group of"
                    f" {group_size}: start it with more (--rows, rollout.max_rows), or lower"
                    " group.group_size"
                )
            longest = max(
                (p.tokens.size + completion_limit(self.policy, p, sampling) for p in prompts),
                default=0,
            )
            if longest > facts["context"]:
                raise EngineError(
                    f"{name} holds sequences of {facts['context']} tokens, but a prompt and its"
                    f" completion may have {longest}: start it with -- --max-model-len {longest}"
                )
            if sampling.restricts and not 0 < self._candidates(sampling) <= facts["candidates"]:
                raise EngineError(
                    f"vLLM tells what could have been drawn only as the {facts['candidates']}"
                    " likeliest tokens: top_p and min_p need a top_k from 1 to"
                    f" {facts['candidates'] // 2} beside them, got {sampling.top_k}"
                )

    def _candidates(self, sampling: Sampling) -> int:
        """How many of the likeliest tokens are asked for beside each drawn one.  Twice top_k: it
        keeps ties with the k-th.
        """
        return min(2 * sampling.top_k, self.policy.vocabulary) if sampling.restricts else 0

    def _body(
        self, ids: np.ndarray, count: int, limit: int, seed: int, sampling: Sampling
    ) -> dict[str, Any]:
        """The body of a request: every setting that changes what is drawn, said in full."""
        policy = self.policy
        drawn: dict[str, Any] = {
            "n": count,
            "temperature": sampling.temperature,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            "max_tokens": limit,
            "seed": seed,
            "logprobs": self._candidates(sampling),
            # The ids of this policy, and not those that the server's copy of the model names.
            "ignore_eos": True,
            "stop_token_ids": list(policy.eos_ids),
            "stop": list(sampling.stop),
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": False,
        }
        rows = policy.model.config.get_text_config().vocab_size
        if (
            rows > policy.vocabulary
        ):  # the few ids that are no token: a list of those that are would be a megabyte a request
            drawn["logit_bias"] = dict.fromkeys(range(policy.vocabulary, rows), NO_TOKEN)
        return {"model": MODEL, "token_ids": ids.tolist(), "sampling_params": drawn}

    def _group(
        self,
        who: str,
        prompt: Prompt,
        answer: Any,
        group_size: int,
        sampling: Sampling,
        oldest: int,
    ) -> tuple[Rollout, ...]:
        """A prompt's rollouts from a server's answer.  oldest: the version that it may have been
        begun with.
        """
        if prompt.images is not None:
            check_tokens(who, prompt, answer)
        limit = completion_limit(self.policy, prompt, sampling)
        choices = self._choices(
            who, prompt, answer, 1 if sampling.greedy else group_size, sampling, limit, oldest
        )
        if sampling.greedy:  # all completions of a prompt are the same
            choices *= group_size
        return tuple(
            make_rollout(
                self.policy,
                prompt,
                index,
                choice.tokens,
                choice.logp,
                choice.finish(self.policy.eos_ids),
                sampling,
                version=choice.version(self._run),
                support=choice.support if sampling.restricts else None,
            )
            for index, choice in enumerate(choices)
        )

    def _choices(
        self,
        who: str,
        prompt: Prompt,
        answer: Any,
        count: int,
        sampling: Sampling,
        limit: int,
        oldest: int,
    ) -> list[Choice]:
        """What a server has drawn, in order.   limit: most tokens.   oldest: see `_group`.

        Raises EngineError for an answer that cannot be what was asked for.
        """
        where = f"{who}, {prompt.place}"
        try:
            choices = [Choice.read(choice) for choice in answer["choices"]]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise EngineError(
                f"{where}: its answer cannot be read ({type(error).__name__}: {error}); is it"
                " another version?"
            ) from error
        choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(count)):
            raise EngineError(
                f"{where}: {counted(len(choices), 'completion')} came back, {count} were asked for"
            )
        for choice in choices:
            if wrong := choice.wrong(self.policy, sampling, limit):
                wrong = f"{where}, completion {choice.index}: {wrong}"
                if choice.reason == "abort":  # as a server does that goes to another version
                    raise StaleAnswer(wrong)
                raise EngineError(wrong)
            if foreign := choice.foreign(self._run, oldest, self.version):
                raise StaleAnswer(f"{where}, completion {choice.index}: {foreign}")
        return choices


def _dtype(policy: Policy) -> str:
    """The type in which a policy's products run."""
    return "bfloat16" if policy.autocast else str(policy.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion as a server tells it."""

    index: int
    tokens: list[int]
    logp: list[float]
    candidates: list[dict[int, float]]
    """Per token: the likeliest tokens and their log-probs, as far as asked for."""
    reason: str
    stop: int | str | None
    """The id or string that ended it."""
    versions: list[tuple[str, int, int]]
    """(label of the weights, first token, behind the last)."""

    @classmethod
    def read(cls, choice: Mapping[str, Any]) -> Choice:
        """From JSON.  Raises KeyError, TypeError or ValueError if it is something else."""
        logp: list[float] = []
        candidates: list[dict[int, float]] = []
        for entry in choice["logprobs"]["content"]:
            logp.append(float(entry["logprob"]))
            likeliest = entry["top_logprobs"]
            candidates.append({int(top["token_id"]): float(top["logprob"]) for top in likeliest})
        versions: list[tuple[str, int, int]] = []
        for span in choice["weight_versions"] or ():
            versions.append((str(span["version"]), int(span["start"]), int(span["end"])))
        return cls(
            index=int(choice["index"]),
            tokens=[int(token) for token in choice["token_ids"]],
            logp=logp,
            candidates=candidates,
            reason=str(choice["finish_reason"]),
            stop=choice["stop_reason"],
            versions=versions,
        )

    @property
    def support(self) -> tuple[np.ndarray, ...]:
        """For each token the ids that could have been drawn."""
        return tuple(
            np.array([token for token, logp in likeliest.items() if logp > NEVER], dtype=np.int64)
            for likeliest in self.candidates
        )

    def finish(self, eos_ids: Sequence[int]) -> Finish:
        """Why it ended."""
        if self.tokens[-1] in eos_ids:
            return Finish.EOS
        return Finish.STOP if self.reason == "stop" else Finish.LENGTH

    def foreign(self, run: str, oldest: int, newest: int) -> str | None:
        """What is wrong with the weights that drew it, or None: every token is by a version of this
        run, from oldest to newest.
        """
        ends = [end for _, _, end in self.versions]
        whole = [begin for _, begin, _ in self.versions] == [0, *ends[:-1]] and ends[-1:] == [
            len(self.tokens)
        ]
        labels = dict.fromkeys(label for label, _, _ in self.versions)
        if whole and labels.keys() <= {f"{run}:{version}" for version in range(oldest, newest + 1)}:
            return None
        drawn_by = ", ".join(labels) or "weights without a version"
        wanted = f"{run}:{newest}" + (f" or back to {oldest}" if oldest < newest else "")
        why = "the server was restarted, or another run sends weights to it"
        return f"it was drawn by stale or foreign weights ({drawn_by}, not {wanted}): {why}"

    def version(self, run: str) -> np.ndarray:
        """(n,): the version that drew each token, where none is `foreign`."""
        return np.concatenate(
            [
                np.full(end - begin, int(label.removeprefix(f"{run}:")))
                for label, begin, end in self.versions
            ]
        )

    def wrong(self, policy: Policy, sampling: Sampling, limit: int) -> str | None:
        """What cannot be, or None.  limit: most tokens."""
        count = len(self.tokens)
        logp = np.array(self.logp)
        if self.reason not in ("stop", "length"):
            return f"it ended with {self.reason!r}: somebody else stops requests on this server"
        if not 0 < count <= limit or (
            self.reason == "length" and count < limit and self.tokens[-1] not in policy.eos_ids
        ):
            return (
                f"{counted(count, 'token')}, ended by {self.reason!r}, where up to {limit} were"
                " asked for"
            )
        if logp.shape != (count,) or not (np.isfinite(logp) & (logp > NEVER) & (logp < 1e-3)).all():
            return f"its {count} tokens do not have a log-prob each: {self.logp[:8]}"
        if min(self.tokens) < 0 or max(self.tokens) >= policy.vocabulary:
            return (
                f"ids {min(self.tokens)} .. {max(self.tokens)} lie outside of the vocabulary of"
                f" {policy.vocabulary}"
            )
        if any(token in policy.eos_ids for token in self.tokens[:-1]):
            return "it continues after an end of sequence"
        if (
            self.reason == "stop"
            and self.tokens[-1] not in policy.eos_ids
            and self.stop not in sampling.stop
        ):
            return (
                f"it was stopped by {self.stop!r}, which is neither an end of sequence nor one of"
                f" {list(sampling.stop)}"
            )
        if sampling.restricts:
            most = max(len(support) for support in self.support)
            if 2 * sampling.top_k <= most < policy.vocabulary:
                return f"{most} tokens could have been drawn where top_k is {sampling.top_k}"
            widest = max(
                max(likeliest.values()) - min(x for x in likeliest.values() if x > NEVER)
                for likeliest in self.candidates
            )
            if sampling.min_p > 0.0 and widest > 1e-3 - math.log(sampling.min_p):
                return (
                    f"a token {widest:.2f} nats below the likeliest could have been drawn where"
                    f" min_p is {sampling.min_p}"
                )
        return None
