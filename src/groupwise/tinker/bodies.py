"""The JSON that the SDK 0.38 sends, checked.  An unknown key, and a value that asks for what is not
offered, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.utils.http import Refused

Count = Annotated[int, Field(ge=0)]
Number = Annotated[int, Field(ge=1)]
MOST_SAMPLES = 4096
"""Completions of one request."""


class TinkerBody(BaseModel):
    """One body.  A key that is null is not there."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)


Form = TypeVar("Form", bound=BaseModel)


def read_body(form: type[Form], data: bytes) -> Form:
    """Return a body in its form.  Raises Refused for the first thing that is wrong."""
    try:
        return form.model_validate_json(data)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False, include_context=False)[0]
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        raise Refused(f"unknown parameter {name!r}: what SDK 0.38 sends is read", param=name)
    if not name:
        raise Refused(f"the body cannot be read: {error['msg']}")
    raise Refused(f"{name}: {error['msg']}", param=name)


def _refuse(name: str, wanted: bool) -> None:
    """Raise Refused if something is wanted that is not offered."""
    if wanted:
        raise Refused(f"{name} is not offered here: leave it out", param=name)


class NumberedBody(BaseModel):
    """What the requests of a model have in common, whatever else is in them."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model_id: str | None = None
    seq_id: Number | None = None


class NamedBody(BaseModel):
    """A body of which one name is read."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class SessionBody(NamedBody):
    """`session_heartbeat`."""

    session_id: str


class ModelBody(NamedBody):
    """`get_info`."""

    model_id: str


class PromiseBody(NamedBody):
    """`retrieve_future`."""

    request_id: str


class LoraBody(TinkerBody):
    """The adapter that a model is to have."""

    rank: Number
    seed: Count | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


def check_optimizer(config: Mapping[str, Any] | None) -> None:
    """Raise Refused for an optimizer that is not AdamW."""
    if config is not None and config != {"type": "adamw"}:
        raise Refused(f"the optimizer {config} is not offered here: use AdamW")


class CreateModelBody(TinkerBody):
    """`create_model`."""

    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None
    type: str = ""


class AdamBody(TinkerBody):
    """The settings of one optimizer step; `grad_clip_norm` 0: no clipping."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStepBody(TinkerBody):
    """`optim_step`."""

    model_id: str
    seq_id: Number
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None
    type: str = ""

    def adam(self) -> AdamBody:
        """Return the settings.  Raises Refused for another optimizer's."""
        if self.adam_params is None:
            raise Refused("optim_step needs adam_params: no optimizer but AdamW is offered here")
        return self.adam_params


class SaveBody(TinkerBody):
    """`save_weights`."""

    model_id: str
    seq_id: Number
    path: str
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: str = ""


class SaveForSamplerBody(TinkerBody):
    """`save_weights_for_sampler`: under a name, or for one sampler."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: str = ""

    def check(self) -> None:
        """Raise Refused for what is not offered."""
        _refuse(f"kind {self.kind!r}", self.kind != "snapshot")
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise Refused("name either a path or a sampling_session_seq_id")


class LoadBody(TinkerBody):
    """`load_weights`: into a model, or as a new one."""

    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None
    type: str = ""

    def check(self) -> None:
        """Raise Refused for what is not offered."""
        _refuse("weights_access_token", self.weights_access_token is not None)
        check_optimizer(self.optimizer_config)
        old = self.model_id is not None and self.seq_id is not None
        new = self.session_id is not None and self.model_seq_id is not None
        if old == new:
            raise Refused("name either model_id and seq_id, or session_id and model_seq_id")


class CreateSamplerBody(TinkerBody):
    """`create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class ChunkBody(BaseModel):
    """A part of a prompt."""

    model_config = ConfigDict(extra="ignore")

    type: str = "encoded_text"
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = []


class PromptBody(TinkerBody):
    """The prompt of a sample."""

    chunks: list[ChunkBody]

    def tokens(self) -> np.ndarray:
        """Return the ids (m,).  Raises Refused for images, and for an empty prompt."""
        tokens: list[int] = []
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise Refused(
                    f"the prompt holds a chunk of type {chunk.type[:80]!r}: only text is read"
                )
            tokens += chunk.tokens
        if not tokens:
            raise Refused("the prompt is empty")
        return np.array(tokens, np.int64)


class SamplingParamsBody(TinkerBody):
    """How a completion is drawn."""

    max_tokens: Number | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0


class SampleBody(TinkerBody):
    """`asample`."""

    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    prompt: PromptBody
    sampling_params: SamplingParamsBody
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str
    seq_id: Count
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Number | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    def check(self) -> None:
        """Raise Refused for what is not offered."""
        _refuse("topk_prompt_logprobs", self.topk_prompt_logprobs != 0)
        _refuse("topk_sample_logprobs", self.topk_sample_logprobs != 0)
        _refuse("target_prompt_logprobs", self.target_prompt_logprobs is not None)
        _refuse("prompt_alt_tokens_k", self.prompt_alt_tokens_k != 0)
        _refuse("record_stability_info", bool(self.record_stability_info))
