"""vLLM in the trainer's own process: the same requests and the same checks as with servers, and
none of the network.

Training and sampling share a device in turn: while the trainer computes, vLLM sleeps where its
platform can: it gives up its weights, its keys and its values (level 2).  The policy's weights are
sent into it when it samples again, and only then is its cache made anew, so that the cache never
lies beside gradients.  Both must live in one environment, with vLLM's own torch.

Each of several processes has a vLLM of its own, on its own device, which samples its share of the
prompts and knows nothing of the others (vLLM's `external_launcher`).  With `tensor_parallel`
several of them hold one vLLM together: each gets the prompts of all of them, in one order, computes
its part of every layer, and keeps the answers to its own."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from groupwise.data.images import MOST_IMAGES
from groupwise.distributed import comm
from groupwise.errors import EngineError, GroupwiseError
from groupwise.models.policy import Policy
from groupwise.models.saving import merged
from groupwise.rollout.vllm.images import local_prompt
from groupwise.rollout.vllm.request import Answer
from groupwise.rollout.vllm.server import CANDIDATES, PLUGIN
from groupwise.rollout.vllm.server_fitness import Facts, unfit
from groupwise.utils import files
from groupwise.utils.batching import batch_by_size

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process, and not one below it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set before vLLM is imported."""
SHARE_OF_FREE = 0.95
"""Part of a GPU's free memory that vLLM may take.  Its own default is a share of the whole card,
and it refuses to start where the trainer holds a part of that."""
MEDIA = {"image": MOST_IMAGES, "video": 0}
"""What a prompt may hold, where prompts have images."""
BUCKET_BYTES = 1 << 28
"""Weights that are handed over together."""


class Colocated:
    """What `VllmEngine` asks of servers (`pool.ServerPool`), of a vLLM in this process."""

    names = ("vLLM in this process",)

    def __init__(
        self,
        describe: Callable[[Path], None],
        policy: Policy,
        rows: int,
        dtype: str,
        cache: int,
        tensor_parallel: int = 1,
    ) -> None:
        """describe: puts the model's configuration and tokenizer into a folder.   rows: completions
        decoded at the same time.

        cache: bytes of keys and values.   tensor_parallel: processes that hold one vLLM together.
        """
        os.environ.update(ENVIRONMENT)
        sys.path.append(str(PLUGIN))
        self.facts: list[Facts] = []
        self._model = files.temporary_folder("vllm")
        describe(self._model)
        self._options: dict[str, Any] = {
            "max_model_len": policy.context,
            "max_num_seqs": rows,
            "dtype": dtype,
            "kv_cache_memory_bytes": cache // tensor_parallel,
            "tensor_parallel_size": tensor_parallel,
        }
        if policy.vision is not None:
            self._options["limit_mm_per_prompt"] = MEDIA
            # Random numbers for weights that are still to come would take the place of the mean
            # and the deviation by which the model's own tower normalises pixels.
            self._options["mm_device_do_normalize"] = False
        self._label, self._llm, self._sleeps = "", None, False
        self.asleep = False
        """True after it has given up its weights, until `send`."""

    @property
    def known(self) -> dict[str, Facts]:
        """What it is, by its name."""
        return dict(zip(self.names, self.facts, strict=False))

    @property
    def rows(self) -> int:
        """Completions that it decodes at the same time."""
        return int(self.facts[0]["rows"])

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that it holds."""
        return int(self.facts[0]["context"])

    def connect(self, policy: Policy) -> None:
        """Start vLLM; all processes must call it.  Raises EngineError if it cannot sample for this
        policy.
        """
        from vllm import LLM
        from vllm.platforms import current_platform

        self._sleeps = bool(current_platform.is_sleep_mode_available())
        if policy.device.type == "cpu":
            self._options |= {"enforce_eager": True, "block_size": 32}
            self._use_torch_collectives()
        else:
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            self._options["gpu_memory_utilization"] = SHARE_OF_FREE * free / total
        if comm.world().size > 1:
            self._options["distributed_executor_backend"] = "external_launcher"
        self._llm = LLM(
            str(self._model),
            load_format="dummy",  # the weights are sent before anything is sampled
            logprobs_mode="processed_logprobs",
            max_logprobs=CANDIDATES,
            generation_config="vllm",
            enable_prefix_caching=True,
            enable_sleep_mode=self._sleeps,
            weight_transfer_config={"backend": "groupwise"},
            worker_extension_cls="groupwise_vllm.Extension",
            seed=0,
            **self._options,
        )
        self.facts = self._llm.collective_rpc("groupwise_facts")
        if wrong := unfit(self.facts[0], policy):
            raise EngineError(f"{self.names[0]} cannot sample for this policy: {wrong}")

    def _use_torch_collectives(self) -> None:
        """Keep vLLM's CPU build from its shared memory, which has the same name for all runs of a
        machine and outlives them.
        """
        if self._options["tensor_parallel_size"] > 1:
            from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

            CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False

    def send(self, policy: Policy, label: str) -> None:
        """Replace the weights; from now on every token that is drawn carries `label`.  Nothing is
        being sampled meanwhile.
        """
        assert self._llm is not None, "connect first"
        from groupwise_vllm import Bucket

        name = str(self.facts[0]["dtype"])
        if self.asleep:
            self._wake("weights")
        self._llm.reset_prefix_cache()
        self._llm.collective_rpc("start_weight_update")
        for names, shapes, flat in buckets(policy, getattr(torch, name)):
            bucket = Bucket(names=names, shapes=shapes, dtypes=[name] * len(names))
            self._llm.collective_rpc(
                lambda worker, bucket=bucket, flat=flat: worker.weight_transfer_engine.load(
                    bucket, flat
                )
            )
        self._llm.collective_rpc("finish_weight_update")
        if self.asleep:
            self._wake("kv_cache")
            self.asleep = False
        self._label = label

    def requests(self) -> LocalRequests:
        """The requests of one call of `generate`; vLLM sleeps when they are left."""
        assert self._llm is not None and not self.asleep, "send weights first"
        engine = self._llm.llm_engine
        together = int(self._options["tensor_parallel_size"])
        if together > 1:
            return LockstepRequests(engine, self._answer, self._sleep, together)
        return LocalRequests(engine, self._answer, self._sleep)

    def _wake(self, part: str) -> None:
        """Let vLLM take memory for a part of what it gave up.

        A sleeping vLLM takes it from the card, not from torch, and torch gives back what it keeps
        unused of an update only when it is asked.
        """
        assert self._llm is not None
        torch.cuda.empty_cache()
        self._llm.wake_up(tags=[part])

    def _sleep(self) -> None:
        if self._sleeps:
            assert self._llm is not None
            self._llm.sleep(level=2)
            self.asleep = True

    def _answer(self, request: Any) -> Answer:
        """A request that has ended, as a server would answer it."""
        choices = [self._choice(completion) for completion in request.outputs]
        answer = {"choices": choices, "prompt_token_ids": list(request.prompt_token_ids)}
        return self.names[0], request.request_id, answer

    def _choice(self, completion: Any) -> dict[str, Any]:
        """A completion as a server would tell it."""
        content = []
        for token, known in zip(completion.token_ids, completion.logprobs, strict=True):
            candidates = [
                {"token_id": candidate, "logprob": entry.logprob}
                for candidate, entry in known.items()
            ]
            content.append({"logprob": known[token].logprob, "top_logprobs": candidates})
        length = len(completion.token_ids)
        return {
            "index": completion.index,
            "token_ids": list(completion.token_ids),
            "logprobs": {"content": content},
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "weight_versions": [{"version": self._label, "start": 0, "end": length}],
        }

    def close(self) -> None:
        """End it."""
        shutil.rmtree(self._model, ignore_errors=True)
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        # vLLM's own clean-up ends the process group too, in which the trainers are.
        if comm.world().size == 1:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()
        else:
            from vllm.distributed.parallel_state import destroy_model_parallel

            destroy_model_parallel()


class LocalRequests:
    """Requests to a vLLM in this process: what `RequestPool` is to servers.

    vLLM computes while `take` waits.  Leaving the `with` block drops what is not answered."""

    def __init__(
        self, engine: Any, answer: Callable[[Any], Answer], leave: Callable[[], None]
    ) -> None:
        """engine: vLLM's `LLMEngine`.   answer: makes an answer of a request that has ended.
        leave: called at the end.
        """
        self._engine, self._answer, self._leave = engine, answer, leave
        self._unanswered: set[str] = set()
        self._ended: deque[Answer] = deque()
        self._woken = threading.Event()
        self._cancelled = False

    def __enter__(self) -> LocalRequests:
        return self

    def __exit__(self, *_: object) -> None:
        if self._unanswered:
            self._engine.abort_request(list(self._unanswered))
        self._leave()

    def cancel(self) -> None:
        """Make `take` raise an EngineError; another thread calls this."""
        self._cancelled = True
        self._woken.set()

    def wake(self) -> None:
        """Let `take` return, with nobody's answer.  From any thread."""
        self._woken.set()

    def again(self, name: str, error: GroupwiseError) -> None:
        """Raise `error`: no other weights can have drawn an answer."""
        raise error

    def finish(self, name: str) -> None:
        """Nothing is kept of a conversation."""

    def put(self, name: str, body: Any) -> None:
        """Add a request."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            **body["sampling_params"], output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._engine.add_request(name, local_prompt(body), sampling)
        self._unanswered.add(name)

    def __iter__(self) -> Iterator[Answer]:
        while self._unanswered or self._ended:
            yield self.take()

    def take(self) -> Answer:
        """Compute until a request has ended, or until `wake`."""
        while True:
            if not self._unanswered and not self._ended:
                self._woken.wait()
            if self._cancelled:
                raise EngineError("sampling was broken off: the engine was closed")
            if self._woken.is_set():
                self._woken.clear()
                return "", "", None
            if self._ended:
                return self._ended.popleft()
            for request in self._engine.step():
                if request.finished:
                    self._unanswered.discard(request.request_id)
                    self._ended.append(self._answer(request))


class LockstepRequests(LocalRequests):
    """Requests to a vLLM that several processes hold together.

    All of them must compute the same requests in the same order, so they exchange them first, and
    compute all before the first answer is handed on.  Nothing can be added in between."""

    def __init__(
        self,
        engine: Any,
        answer: Callable[[Any], Answer],
        leave: Callable[[], None],
        together: int,
    ) -> None:
        """engine, answer, leave: see `LocalRequests`.   together: processes that hold it."""
        super().__init__(engine, answer, leave)
        self._together = together
        self._bodies: dict[str, Any] = {}

    def put(self, name: str, body: Any) -> None:
        """Note a request; it is computed by `__iter__`."""
        self._bodies[name] = body

    def __iter__(self) -> Iterator[Answer]:
        rank = comm.world().rank
        first = rank - rank % self._together
        requests: list[Mapping[str, Any]] = comm.gather([self._bodies])
        for member in range(first, first + self._together):
            for name, body in requests[member].items():
                super().put(f"{member}/{name}", body)
        for who, name, answer in list(super().__iter__()):
            member, _, request = name.partition("/")
            if int(member) == rank:
                yield who, request, answer


def buckets(
    policy: Policy, dtype: torch.dtype, limit: int = BUCKET_BYTES
) -> Iterator[tuple[list[str], list[list[int]], Tensor]]:
    """A policy's weights by their checkpoint's names, in runs of up to `limit` bytes: (names,
    shapes, all of them as uint8).

    Adapters are merged into them; a tied head is sent as the embedding that it is.
    """
    model = merged(policy)
    weights = revert_weight_conversion(
        model, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )
    for bucket in batch_by_size(
        weights.items(), lambda named: named[1].numel() * dtype.itemsize, limit
    ):
        names, parts = zip(*bucket, strict=True)
        flat = torch.cat([part.to(dtype).reshape(-1) for part in parts])
        yield list(names), [list(part.shape) for part in parts], flat.view(torch.uint8)
