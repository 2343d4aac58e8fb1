"""A policy as a value: a Hugging Face causal model, its tokenizer, and what the library knows of
them.

`loading.py` makes policies of checkpoints, and of models that are there.  Passes over batches are
functions (`passes`, `backbone`, `moe`), and so is what reads and writes weights (`saving`,
`sharded`, `lora`).

D width   V vocabulary
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from groupwise.config.settings import ParallelSettings
from groupwise.distributed import fsdp
from groupwise.errors import ConfigError
from groupwise.models import rope
from groupwise.models.output_head import backbone_of
from groupwise.ops.linear_cross_entropy import Head
from groupwise.ops.onednn_shapes import tiled
from groupwise.ops.operations import operations
from groupwise.records import Sample

if TYPE_CHECKING:
    from groupwise.distributed.ulysses import ContextGroup

METHOD = "run_backbone"
"""Attribute of a sharded model that runs its backbone with weights gathered."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapter:
    """A low-rank adapter in a policy's model: what is trained of it, beside the score head where it
    has one.
    """

    config: Any
    """peft's configuration."""
    trained: tuple[str, ...]
    """Names of the trained parameters."""

    def off(self, model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
        """Return a context manager inside of which the model computes without its adapter."""
        raise NotImplementedError

    def module_in_use(self, module: Any, *, on: bool) -> Any:
        """Return what computes in a module's place: its trained copy or the original, where it has
        both.
        """
        raise NotImplementedError

    def with_dropout(self, loss: Callable[..., Any], samples: Sequence[Sample], step: int) -> Any:
        """Return the loss of an update, computed with the adapter's dropout.

        step: optimizer steps taken before.
        """
        raise NotImplementedError

    def plain_model(self, model: PreTrainedModel, *, on: bool) -> PreTrainedModel:
        """Return the model without the adapter's layers; it shares the weights under them, and
        those that are trained whole.

        on: with modules as they are trained, not as they were.
        """
        raise NotImplementedError

    def added_weights(self, model: PreTrainedModel) -> dict[str, Callable[[], Tensor]]:
        """Return functions that compute what is added to a weight, by names of linear layers."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shards:
    """How a policy's weights are spread over all processes: every process must make the same
    passes, and gather together.
    """

    whole: PreTrainedModel
    """The same modules; their parameters have numbers only while they are gathered
    (`sharded.gathered`).
    """
    parallel: ParallelSettings
    device: torch.device
    """Where products are computed and batches lie; shards may lie in host memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Policy:
    """A model with its tokenizer, in eval mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Every id that ends a completion."""
    pad_id: int
    """An id inside the vocabulary for callers that must pad (exports, `generate`).  Nothing here
    depends on it.
    """
    vocabulary: int
    """Ids at or above it belong to no token of the tokenizer (padded embedding rows): never
    sampled, never scored.
    """
    context: int
    """Longest sequence in tokens, prompt and completion together."""
    attention: str = "shared"
    """`shared`, `packed` or `single`: see `settings.ModelSettings.attention`."""
    autocast: bool = False
    """Products in bfloat16 over float32 weights."""
    form: tuple[float, float | None] = (1.0, None)
    """The factor and the soft cap that the model puts on its logits; see `output`."""
    switches: tuple[tuple[int, bool], ...] = ()
    """Lengths above which rotary embeddings have other frequencies, and whether every length above
    has its own; see `rope`.
    """
    deep_head: bool = False
    """With `single`: more than one matrix lies behind the backbone; states are those that the last
    one is given.
    """
    adapter: Adapter | None = None
    adapter_on: bool = True
    """False: the weights below the adapter, which are the policy's own: the reference that costs no
    memory.
    """
    shards: Shards | None = None
    context_group: ContextGroup | None = None
    """The processes that hold positions of its streams (context parallelism)."""
    vision: Any = None
    """`vision.Vision`: reads the images of prompts; None: there are none."""
    image_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that say how images are prepared for the model: they are saved with it."""
    blocks: Any = None
    """`compiled_blocks.CompiledBlocks` or `fp8_blocks.Fp8Blocks`: runs the blocks of packed passes;
    None: they run fused."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device if self.shards is None else self.shards.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> Head:
        """The output head: the checkpoint's own (possibly tied) weights, restricted to the
        tokenizer's vocabulary.

        A model with a score head has no other; its language-model head is its embedding, where its
        config ties them."""
        config: Any = self.model.config
        output: Any = self.model.get_output_embeddings()
        if output is None:
            if not config.tie_word_embeddings:
                raise ConfigError(
                    f"{type(self.model).__name__} has no language-model head, and its embedding is"
                    " not tied to one"
                )
            output = self.model.get_input_embeddings()
        if self.adapter is not None:
            output = self.adapter.module_in_use(output, on=self.adapter_on)
        bias = getattr(output, "bias", None)  # some heads have one, most have no such attribute
        factor, cap = self.form
        weight_VD = fsdp.whole(output.weight)
        # A slice that keeps everything would cost its backward pass a copy of the whole gradient.
        if weight_VD.shape[0] != self.vocabulary:
            weight_VD = weight_VD[: self.vocabulary]
        return Head(
            weight_VD=weight_VD,
            bias_V=None if bias is None else bias[: self.vocabulary],
            scale=factor,
            softcap=cap,
        )

    @property
    def backbone(self) -> Callable[..., Any]:
        """The model without its head, with its adapter on; of a sharded one as FSDP wraps it."""
        return backbone_of(self.model) if self.shards is None else getattr(self.model, METHOD)

    @property
    def sharded(self) -> bool:
        """True if the weights are spread over processes: then all of them must make the same passes
        together.
        """
        return self.shards is not None

    @property
    def split(self) -> bool:
        """True if processes compute parts of one product, and exchange them."""
        parallel = None if self.shards is None else self.shards.parallel
        return parallel is not None and (parallel.tensor > 1 or parallel.expert > 1)

    @property
    def tiled(self) -> bool:
        """True if products run in oneDNN's tiles."""
        return self.device.type == "cpu" and tiled(torch.bfloat16 if self.autocast else self.dtype)

    @property
    def alike(self) -> Callable[[int], Hashable] | None:
        """Which sequences may share a prompt, by their positions: those with the same frequencies;
        None if all have.
        """
        return partial(rope.regime, self.switches) if self.switches else None

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region in which the model's products run."""
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def fused_modules(self) -> contextlib.AbstractContextManager[None]:
        """The region in which the model's modules run in their faster forms; the weights must not
        change inside.
        """
        if self.blocks is not None:
            return self.blocks.fused_modules(self)
        return operations().fused_modules(self.model, keep=not self.sharded)

    def adapter_state(self) -> contextlib.AbstractContextManager[None]:
        """The region in which the model computes with its adapter, or without it."""
        if self.adapter_on:
            return contextlib.nullcontext()
        assert self.adapter is not None
        return self.adapter.off(self.model)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def without_adapter(policy: Policy) -> Policy:
    """The weights under a policy's adapter: the reference that costs nothing."""
    return replace(policy, adapter_on=False)
