"""Log-probs of given tokens from vLLM servers: ids in, one number per token out, by any `vllm
serve`, without our plug-in.

A request is `POST /v1/completions` with the ids of prompt and completion as its prompt, and
`prompt_logprobs: 0`: vLLM answers with the log-prob of every one of them behind those before it, by
the raw logits.  So what was sampled at another temperature, or from a truncated distribution,
cannot be scored this way.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from groupwise.errors import ConfigError, EngineError
from groupwise.rollout.vllm.client import Client

AT_ONCE = 8
"""Requests that are on their way to one server."""
PATIENCE, LONGEST = 20.0, 600.0
"""Seconds for a short question, and for the log-probs of one sequence, behind all those that wait
before it.
"""
ROUNDING = 1e-3
"""How far above 0 rounding may bring a log-prob, nats."""
SEEN = 512
"""Ids whose text is compared, at most: spread over the vocabulary."""

PromptAndCompletion = tuple[np.ndarray, np.ndarray]
"""Prompt (m,) and completion (n,), ids."""


class ScoringServers:
    """Servers of one model, asked for the log-probs of tokens that others have drawn."""

    def __init__(self, urls: Sequence[str]) -> None:
        """urls: `http://host:port`.  Raises ConfigError for anything else."""
        self._urls = [Client(url).url for url in urls]
        self._local = threading.local()
        self._names: dict[str, str] = {}
        """What each server calls its model."""
        self.context = 0
        """Tokens of the longest sequence that all of them hold; 0 until `connect`."""

    def connect(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Ask each server what it serves, and whether its ids mean what the tokenizer's do.

        Raises PeerError for a server that is not there, ConfigError for one whose tokens are
        others.
        """
        lengths = []
        for url in self._urls:
            client = Client(url)
            try:
                served, *_ = client.get("/v1/models", timeout=PATIENCE)["data"]
                self._names[url] = str(served["id"])
                lengths.append(int(served["max_model_len"]))
            except (KeyError, TypeError, ValueError) as error:
                raise EngineError(
                    f"{client.name} does not say what it serves ({type(error).__name__}: {error})"
                ) from error
            self._check_tokens(client, self._names[url], tokenizer)
            client.close()
        self.context = min(lengths)

    def _check_tokens(self, client: Client, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = np.unique(
            np.linspace(0, len(tokenizer) - 1, min(SEEN, len(tokenizer))).round().astype(int)
        ).tolist()
        mine = tokenizer.decode(ids, skip_special_tokens=False)
        theirs = client.post("/detokenize", {"model": name, "tokens": ids}, timeout=PATIENCE)
        if not isinstance(theirs, dict) or theirs.get("prompt") != mine:
            text = str(theirs.get("prompt") if isinstance(theirs, dict) else theirs)
            place = next(
                (i for i, (a, b) in enumerate(zip(mine, text, strict=False)) if a != b),
                min(len(mine), len(text)),
            )
            raise ConfigError(
                f"{client.name} serves a model whose tokens are not the policy's: the same ids mean"
                f" {mine[place : place + 40]!r} to the policy and {text[place : place + 40]!r} to"
                " the server, so that its log-probs would be those of other texts. Serve a model"
                " with the policy's tokenizer, such as one of the same family"
            )

    def logp(self, sequences: Sequence[PromptAndCompletion]) -> list[np.ndarray]:
        """Return the log-probs (float32 (n,), nats) of each completion's tokens at temperature 1.

        They are over the whole vocabulary.

        Raises PeerError if a server is gone or silent, EngineError for an answer that cannot be, or
        a sequence that is too long."""
        longest = max(
            (prompt.size + completion.size for prompt, completion in sequences), default=0
        )
        if longest >= self.context:  # vLLM keeps room for the token that is asked for
            raise EngineError(
                f"a prompt and its completion have {longest} tokens, but {' and '.join(self._urls)}"
                f" hold sequences of {self.context} with one more token behind them: start the"
                f" servers with --max-model-len {longest + 1}"
            )
        with ThreadPoolExecutor(
            AT_ONCE * len(self._urls), thread_name_prefix="teacher-request"
        ) as pool:
            return list(
                pool.map(self._one, cycle(self._urls), sequences)
            )  # the first that fails cancels the others

    def _one(self, url: str, sequence: PromptAndCompletion) -> np.ndarray:
        prompt, completion = sequence
        if not completion.size:
            return np.zeros(0, np.float32)
        clients: dict[str, Client] = vars(self._local).setdefault("clients", {})
        client = clients.setdefault(url, Client(url))
        ids = np.concatenate([prompt, completion]).tolist()
        body: dict[str, Any] = {
            "model": self._names[url],
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = client.post("/v1/completions", body, timeout=LONGEST)
        try:
            (choice,) = answer["choices"]
            entries = choice["prompt_logprobs"]
            if len(entries) != len(ids):
                raise ValueError(f"{len(entries)} log-probs for {len(ids)} tokens")
            chosen = (entries[place][str(ids[place])] for place in range(prompt.size, len(ids)))
            values = np.array([float(entry["logprob"]) for entry in chosen], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{client.name}: its log-probs cannot be read ({type(error).__name__}); is it vLLM?"
            ) from error
        if not all(math.isfinite(value) and value <= ROUNDING for value in values):
            worst = max(values, key=lambda value: value if math.isfinite(value) else math.inf)
            raise EngineError(f"{client.name} gives a token a log-prob of {worst}")
        return np.minimum(values, 0.0)
