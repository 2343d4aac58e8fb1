"""vLLM in the trainer's own process: the same requests and the same checks as with servers, and
none of the network.

For one GPU, which training and sampling then share in turn: while the trainer computes, vLLM sleeps
where its platform can: it gives up its weights, its keys and its values (level 2).  The policy's
weights are sent into it when it samples again, and only then is its cache made anew, so that the
cache never lies beside gradients.  Both must live in one environment, with vLLM's own torch."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from groupwise.distributed import comm
from groupwise.errors import ConfigError, EngineError
from groupwise.models.policy import Policy
from groupwise.rollout.vllm.server import CANDIDATES, PLUGIN
from groupwise.rollout.vllm.weight_sync import Answer, Facts, buckets, unfit
from groupwise.utils import files

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process, and not one below it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Set before vLLM is imported."""


class Colocated:
    """What `VllmEngine` asks of servers (`weight_sync.Servers`), of a vLLM in this process."""

    names = ("vLLM in this process",)
    clients = ()
    """Nobody is asked over the network."""

    def __init__(
        self, describe: Callable[[Path], None], policy: Policy, rows: int, dtype: str, cache: int
    ) -> None:
        """describe: puts the model's configuration and tokenizer into a folder.   rows: completions
        decoded at the same time.

        cache: bytes of keys and values.   Raises ConfigError where vLLM is not installed beside the
            trainer, or for several processes.
        """
        if comm.world().size > 1:
            raise ConfigError(
                "rollout.engine: a colocated vLLM is for one process; of several, let them share"
                " servers (groupwise serve)"
            )
        os.environ.update(ENVIRONMENT)
        sys.path.append(str(PLUGIN))
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "rollout.engine: colocated needs vLLM in the environment of the trainer"
                f" ({sys.executable}), but {error}: install groupwise and vllm into one, or leave"
                " colocated out: a server has an environment of its own"
            ) from error
        self.facts: list[Facts] = []
        self._model = files.temporary_folder("vllm")
        describe(self._model)
        self._how = {
            "max_model_len": policy.context,
            "max_num_seqs": rows,
            "dtype": dtype,
            "kv_cache_memory_bytes": cache,
        }
        self._label, self._llm, self._sleeps, self._awake = "", None, False, True
        self._policy = policy

    def connect(self, policy: Policy, _: float = 0.0) -> None:
        """Start vLLM.  Raises EngineError if it cannot sample for this policy."""
        from vllm import LLM
        from vllm.platforms import current_platform

        self._sleeps = bool(current_platform.is_sleep_mode_available())
        more: dict[str, Any] = (
            {"enforce_eager": True, "block_size": 32} if policy.device.type == "cpu" else {}
        )
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
            **self._how,
            **more,
        )
        self.facts = self._llm.collective_rpc("groupwise_facts")
        if wrong := unfit(self.facts[0], policy):
            raise EngineError(f"{self.names[0]} cannot sample for this policy: {wrong}")

    def send(self, policy: Policy, label: str, *, keep: bool = False) -> None:
        """Replace the weights; from now on every token that is drawn carries `label`.  Nothing is
        being sampled meanwhile.
        """
        assert self._llm is not None and not keep, "connect first; sampling and training take turns"
        from groupwise_vllm import Bucket

        name = str(self.facts[0]["dtype"])
        if not self._awake:
            self._llm.wake_up(tags=["weights"])
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
        if not self._awake:
            self._llm.wake_up(tags=["kv_cache"])
            self._awake = True
        self._policy, self._label = policy, label

    def answers(self, bodies: Mapping[str, Any]) -> Iterator[Answer]:
        """The answers to requests, each as soon as it is complete.

        A vLLM that slept since the last `send` is sent the same weights again.
        """
        assert self._llm is not None, "connect first"
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not self._awake:
            self.send(self._policy, self._label)
        engine, left = self._llm.llm_engine, set(bodies)
        try:
            for name, body in bodies.items():
                how = SamplingParams(
                    **body["sampling_params"], output_kind=RequestOutputKind.FINAL_ONLY
                )
                engine.add_request(name, {"prompt_token_ids": body["token_ids"]}, how)
            while left:
                for request in engine.step():
                    if request.finished:
                        left.discard(request.request_id)
                        yield (
                            self.names[0],
                            request.request_id,
                            {"choices": [self._choice(one) for one in request.outputs]},
                        )
        finally:
            if left:
                engine.abort_request(list(left))
            if self._sleeps:
                self._llm.sleep(level=2)
                self._awake = False

    def _choice(self, completion: Any) -> dict[str, Any]:
        """A completion as a server would tell it."""
        content = []
        for token, known in zip(completion.token_ids, completion.logprobs, strict=True):
            candidates = [
                {"token_id": other, "logprob": one.logprob} for other, one in known.items()
            ]
            content.append({"logprob": known[token].logprob, "top_logprobs": candidates})
        return {
            "index": completion.index,
            "token_ids": list(completion.token_ids),
            "logprobs": {"content": content},
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "weight_versions": [
                {"version": self._label, "start": 0, "end": len(completion.token_ids)}
            ],
        }

    def close(self) -> None:
        """End it."""
        shutil.rmtree(self._model, ignore_errors=True)
        if self._llm is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            cleanup_dist_env_and_memory()
