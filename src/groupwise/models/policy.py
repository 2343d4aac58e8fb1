"""A policy: a Hugging Face causal model, its tokenizer, what the library needs to know of them, and passes over batches.

`loading.py` makes policies of checkpoints, and of models that are there.

T positions of a stream   D width   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.data.packing import pack
from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models import rope
from groupwise.models.attention import Attend, PackedAttention, attending, recomputation
from groupwise.models.logit_scale import backbone_of, head_input
from groupwise.ops.linear_cross_entropy import Head
from groupwise.ops.onednn_shapes import tiled
from groupwise.records import Batch, Layout, Routing, Sample
from groupwise.utils.terminal import quiet_transformers

BALANCE = "set output_router_logits to false in its config.json: its experts are then trained without a loss that balances them"


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """What a forward pass over a packed batch gives."""

    hidden_PD: Tensor
    """Final hidden states, before the head."""
    router_loss: Tensor | float
    """A mixture of experts' load-balancing loss, times its coefficient: the batch's part of the step's; else 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Policy:
    """A model with its tokenizer.  In eval mode, because what is scored is what sampled."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Every id that ends a completion."""
    pad_id: int
    """An id inside the vocabulary for callers that must pad (exports, `generate`).  Nothing here depends on it."""
    vocabulary: int
    """Ids at or above it belong to no token of the tokenizer (padded embedding rows): never sampled, never scored."""
    context: int
    """Longest sequence in tokens, prompt and completion together."""
    attention: str = "shared"
    """`shared`, `packed` or `single`: see `settings.ModelSettings.attention`."""
    autocast: bool = False
    """Products in bfloat16 over float32 weights."""
    form: tuple[float, float | None] = (1.0, None)
    """The factor and the soft cap that the model puts on its logits; see `output`."""
    switches: tuple[tuple[int, bool], ...] = ()
    """Lengths above which rotary embeddings have other frequencies, and whether every length above has its own; see `rope`."""
    deep_head: bool = False
    """With `single`: more than one matrix lies behind the backbone; states are those that the last one is given."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return next(self.model.parameters()).dtype

    @property
    def head(self) -> Head:
        """The output head: the checkpoint's own (possibly tied) weights, restricted to the tokenizer's vocabulary.

        A model with a score head has no other; its language-model head is its embedding, where its config ties them.
        """
        config: Any = self.model.config
        output: Any = self.model.get_output_embeddings()
        if output is None:
            if not config.tie_word_embeddings:
                raise ConfigError(f"{type(self.model).__name__} has no language-model head, and its embedding is not tied to one")
            output = self.model.get_input_embeddings()
        bias = getattr(output, "bias", None)  # some heads have one, most have no such attribute
        factor, cap = self.form
        return Head(
            # A slice that keeps everything would cost its backward pass a copy of the whole gradient.
            weight_VD=output.weight if output.weight.shape[0] == self.vocabulary else output.weight[: self.vocabulary],
            bias_V=None if bias is None else bias[: self.vocabulary],
            scale=factor,
            softcap=cap,
        )

    @property
    def sharded(self) -> bool:
        """True if the weights are spread over processes: then all of them must make the same passes together."""
        return False

    @property
    def tiled(self) -> bool:
        """True if products run in oneDNN's tiles."""
        return self.device.type == "cpu" and tiled(torch.bfloat16 if self.autocast else self.dtype)

    @property
    def alike(self) -> Callable[[Sample], Hashable] | None:
        """Which samples may share a prompt: those whose sequences have the same frequencies; None if all have."""
        if not self.switches:
            return None
        return lambda sample: rope.regime(self.switches, sample.prompt.size + sample.completion.size - 1)

    @property
    def backbone(self) -> Callable[..., Any]:
        """The model without its head."""
        return backbone_of(self.model)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[Policy]:
        """This policy with all of its weights on this process, while inside; itself unless it is sharded."""
        yield self

    def merged(self) -> PreTrainedModel:
        """The plain model: adapters, if there are any, are added to its weights."""
        return self.model

    def reshard(self) -> None:
        """End a series of passes: a sharded policy lets go of what it gathered."""

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region in which the model's products run."""
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _set_mode(self) -> None:
        """Eval mode, whatever somebody has set: nothing is dropped."""
        if self.model.training:
            self._recompute_only([layer for layer in self.layers() if layer.gradient_checkpointing])

    def layers(self) -> list[GradientCheckpointingLayer]:
        """The model's blocks that can be computed again."""
        return [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states (T, D) of a flat stream, before the head."""
        self._set_mode()
        with self.precision(), attending(attend, position_T):
            return self.backbone(input_ids=tokens_T[None], position_ids=position_T[None], use_cache=False).last_hidden_state[0]

    def forward(self, batch: Batch) -> ForwardOutput:
        """A packed batch through the model, by whatever attention the policy is set to; differentiable."""
        if self.attention == "single":
            if self.router_coefficient > 0.0 and torch.is_grad_enabled():
                raise ConfigError(f"model.attention 'single' does not know the loss that balances experts; {BALANCE}")
            return ForwardOutput(self._one_by_one(batch.tokens_P, batch.layout), 0.0)
        attend = PackedAttention(batch.layout)
        if not (self.router_coefficient > 0.0 and torch.is_grad_enabled()):
            return ForwardOutput(self.hidden(batch.tokens_P, batch.position_P, attend), 0.0)
        hidden_PD, logits = self._routed(batch)
        routing = batch.routing or self._routing([batch], [logits], lambda parts: parts)
        uses_P = torch.tensor(batch.layout.uses, dtype=torch.float32, device=self.device)
        mass_LE = torch.stack([uses_P @ layer_PE.softmax(-1, dtype=torch.float32) for layer_PE in logits])
        balance = (routing.part_KE * (mass_LE.sum(0) / routing.tokens)).sum() * routing.part_KE.shape[1]
        return ForwardOutput(hidden_PD, self.router_coefficient * balance)

    def _routed(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Hidden states (P, D), and what each layer's router says of its experts (P, E)."""
        self._set_mode()
        with self.precision(), attending(PackedAttention(batch.layout), batch.position_P):
            outputs = self.backbone(
                input_ids=batch.tokens_P[None],
                position_ids=batch.position_P[None],
                use_cache=False,
                output_router_logits=True,
            )
        logits = [layer.view(batch.layout.total, -1) for layer in outputs.router_logits or () if layer is not None]
        if not logits:
            raise ConfigError(f"{type(self.model).__name__} shows no router logits; {BALANCE}")
        return outputs.last_hidden_state[0], logits

    def packed(
        self,
        samples: Sequence[Sample],
        budget: int,
        *,
        whole_groups: bool = False,
        world: comm.World = comm.ALONE,
        even: bool = False,
    ) -> list[Batch]:
        """Samples packed as this policy takes them; see `packing.pack`."""
        return pack(
            samples,
            budget,
            share=self.attention == "shared",
            alike=self.alike,
            whole_groups=whole_groups,
            fill=self.tiled,
            device=self.device,
            dtype=torch.promote_types(self.dtype, torch.float32),
            world=world,
            even=even,
        )

    @torch.no_grad()
    def balanced(self, batches: list[Batch]) -> list[Batch]:
        """Batches of this process that know where the tokens of the whole step are sent, if the loss balances them.

        The load-balancing loss is a product of two means over tokens.  Of the one no gradient is taken: it is counted in a pass
        before, over all batches and processes; the other is then a sum over tokens like every loss.
        """
        if self.router_coefficient == 0.0 or self.attention == "single":
            return batches
        routing = self._routing(batches, (self._routed(batch)[1] for batch in batches), comm.gather)
        return [replace(batch, routing=routing) for batch in batches]

    def _routing(
        self, batches: Sequence[Batch], logits: Iterable[list[Tensor]], gather: Callable[[list[Any]], list[Any]]
    ) -> Routing:
        """As `load_balancing_loss_func` of transformers counts, each sequence for itself.   gather: the counts of all processes."""
        chosen = self.model.config.get_text_config().num_experts_per_tok
        parts = []
        for batch, layers in zip(batches, logits, strict=True):
            uses_P = torch.tensor(batch.layout.uses, dtype=torch.float32, device=self.device)
            count_KE = torch.zeros(chosen, layers[0].shape[1], device=self.device)
            for layer_PE in layers:
                best_PK = layer_PE.detach().softmax(-1, dtype=torch.float32).topk(chosen, -1).indices
                for k in range(chosen):
                    count_KE[k].index_add_(0, best_PK[:, k], uses_P)
            parts.append((count_KE.tolist(), float(uses_P.sum()) * len(layers)))
        parts = gather(parts)
        tokens = max(sum(tokens for _, tokens in parts), 1.0)
        return Routing(torch.tensor([part for part, _ in parts], device=self.device).sum(0) / tokens, tokens)

    @property
    def router_coefficient(self) -> float:
        """Weight of a mixture of experts' load-balancing loss; 0 unless its config asks for `output_router_logits`."""
        config: Any = self.model.config.get_text_config()
        asked = getattr(config, "output_router_logits", False)
        return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if asked else 0.0

    def _one_by_one(self, tokens_P: Tensor, layout: Layout) -> Tensor:
        """Every segment in a forward pass of its own, with the model's own attention: for models that cannot be packed."""
        assert set(layout.prefix) <= {-1}, "segments that are computed one by one hold their own prompt"
        parts = []
        self._set_mode()
        with self.precision():
            for start, length in zip(layout.start, layout.length, strict=True):
                tokens_1T = tokens_P[None, start : start + length]
                given = head_input(self.model, tokens_1T) if self.deep_head else None
                if given is None:
                    given = self.backbone(input_ids=tokens_1T, use_cache=False).last_hidden_state
                parts.append(given[0])
        filler = layout.total - sum(layout.length)
        return torch.cat([*parts, parts[0].new_zeros(filler, parts[0].shape[1])])

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @property
    def recomputes(self) -> bool:
        """True if the model has layers whose activations can be computed again."""
        able = self.model.supports_gradient_checkpointing
        return able and any(isinstance(module, GradientCheckpointingLayer) for module in self.model.modules())

    @contextlib.contextmanager
    def checkpointing(self, on: bool) -> Iterator[None]:
        """Recompute the blocks' activations in the backward pass while inside, but the last one's: its turn comes at once.

        transformers recomputes only in layers that are in training mode.  That flag is set on the layers alone, and taken back
        while they compute: in some families a layer drops units by its own flag.
        """
        layers = self.layers()
        before = {layer: layer.gradient_checkpointing for layer in layers}
        if on and not self.recomputes:
            name = type(self.model).__name__
            raise ConfigError(f"{name} has no layers that can recompute; set model.gradient_checkpointing to false")
        if on:
            # transformers 5.23 renamed it; the old name warns there, the new one is missing before.
            renamed = getattr(self.model, "activation_checkpointing_enable", None)
            (renamed or self.model.gradient_checkpointing_enable)({"use_reentrant": False, "context_fn": recomputation})
            for layer in layers:
                # Set by the call above, and nowhere declared.
                recompute: Callable[..., Any] = vars(layer)["_gradient_checkpointing_func"]
                vars(layer)["_gradient_checkpointing_func"] = partial(_in_eval_mode, layer, recompute)
            # It may leave a hook on the embedding, another every time, which only reentrant recomputation has a use for.
            if hasattr(self.model, "_require_grads_hook"):
                self.model.disable_input_require_grads()
        self._recompute_only(layers[:-1] if on else ())
        try:
            yield
        finally:
            self._recompute_only([layer for layer, again in before.items() if again])

    def _recompute_only(self, chosen: Sequence[GradientCheckpointingLayer]) -> None:
        """Let these layers be computed again, and no others."""
        self.model.eval()
        for layer in self.layers():
            layer.gradient_checkpointing = layer.training = layer in chosen

    def as_fields(self) -> dict[str, Any]:
        """What a policy holds, by name: for one of another kind, which holds more."""
        return {name: getattr(self, name) for name in Policy.__dataclass_fields__}

    def frozen_copy(self) -> Policy:
        """A copy of the weights as they are now, which takes no gradients: the reference.  Never loaded again by name."""
        model = copy.deepcopy(self.model).requires_grad_(False)
        for parameter in model.parameters():
            parameter.grad = None
        return replace(self, model=model.eval())

    @property
    def empty(self) -> bool:
        """True until the model has numbers: it was built to be filled piece by piece."""
        return self.device.type == "meta"

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder: safetensors, config, generation config, tokenizer, chat template."""
        with quiet_transformers():
            self.merged().save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def keep(self, folder: Path) -> None:
        """Write what a run needs to go on from here, which for an adapter is less than `save` writes."""
        self.save(folder)

    def export(self, folder: Path) -> None:
        """`save` by whoever has the weights: all processes call it, for a folder that they all see."""
        if comm.world().first:
            self.save(folder)


def _in_eval_mode(layer: nn.Module, checkpoint: Callable[..., Any], compute: Callable[..., Any], *inputs: Any) -> Any:
    """`checkpoint(compute, *inputs)`, in which the layer drops nothing, also when it is computed again."""

    def in_eval_mode(*inputs: Any) -> Any:
        modes = [(module, module.training) for module in layer.modules()]
        layer.eval()
        try:
            return compute(*inputs)
        finally:
            for module, training in modes:
                module.training = training

    return checkpoint(in_eval_mode, *inputs)
