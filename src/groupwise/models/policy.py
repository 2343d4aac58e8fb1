"""A policy: a Hugging Face causal model, its tokenizer, and what the rest of the library needs to know about them.

`load_policy` reads a checkpoint; `make_policy` wraps a model that is already there.  Both have it proven (`models/probe.py`) that
what a run computes is what the model's own forward pass gives, one sequence at a time.  A model that differs is refused; nothing
is ever silently wrong.

T positions of a stream   D width   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from groupwise.config.live import LIVE, Live, missing, short_digest
from groupwise.config.settings import ModelSettings
from groupwise.data.tokenizers import has_tokenizer, load_tokenizer, with_chat_template
from groupwise.distributed import comm
from groupwise.errors import ConfigError, DataError
from groupwise.models import rope
from groupwise.models.attention import Attend, PackedAttention, attending, recomputation, use_packed_attention
from groupwise.models.dropout import Masks, active, as_before, own_training
from groupwise.models.output import read_form
from groupwise.models.small import CAPS, WINDOWS, backbone_of, language_model
from groupwise.models.streaming import Pieces, check_finite, empty_model
from groupwise.ops.linear_cross_entropy import Head
from groupwise.ops.tiles import tiled
from groupwise.records import Batch, Layout, Routing, Sample, Stretch

log = logging.getLogger(__name__)

transformers_logging.disable_progress_bar()

PROBE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest difference of a logit between packed and ordinary forward, relative to the spread of the logits."""
BALANCE = "set output_router_logits to false in its config.json: its experts are then trained without a loss that balances them"
ALIGNED = 64
"""Bytes: the addresses of tensors that torch makes are multiples of it.  A resumed run must compute as one that went on."""
ADAPTER_CONFIG = "adapter_config.json"
"""Marks a folder as a low-rank adapter in peft's format."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """What a forward pass over a packed batch gives."""

    hidden_PD: Tensor
    """Final hidden states, before the head."""
    router_loss: Tensor | float
    """A mixture of experts' load-balancing loss, times its coefficient: the batch's part of the step's; else 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Policy:
    """A model with its tokenizer.  In eval mode, because what is scored is what sampled; but for passes that drop units."""

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
    dropout: int | None = None
    """Seed of what updates drop, with the probabilities of the model's configuration; None: nothing.  See `dropout`."""

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
        """The model as others know it: without adapters, whose part its weights hold."""
        return self.model

    def reshard(self) -> None:
        """End a series of passes: a sharded policy lets go of what it gathered."""

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region in which the model's products run."""
        if self.autocast:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _set_mode(self) -> None:
        """Training mode where the pass that is running drops units, else eval mode, whatever somebody has set."""
        awake = active() is not None
        if self.model.training == awake:
            return
        self.model.train(awake)
        for layer in self._recomputing():
            layer.training = True

    def _recomputing(self) -> list[nn.Module]:
        """The layers that are computed again: transformers does so with those that it finds in training mode."""
        return [layer for layer in self._layers() if layer.gradient_checkpointing]

    def _layers(self) -> list[GradientCheckpointingLayer]:
        return [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def hidden(self, tokens_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Final hidden states (T, D) of a flat stream, before the head."""
        self._set_mode()
        with self.precision(), attending(attend, position_T):
            return self.backbone(input_ids=tokens_T[None], position_ids=position_T[None], use_cache=False).last_hidden_state[0]

    def forward(self, batch: Batch) -> ForwardOutput:
        """A packed batch through the model, by whatever attention the policy is set to; differentiable.

        Units are dropped where the batch says by what (`Batch.stretches`), and a gradient is taken: scores know no dropout.
        """
        drops = self.dropout is not None and bool(batch.stretches) and torch.is_grad_enabled()
        if self.attention == "single":
            if self.router_coefficient > 0.0 and torch.is_grad_enabled():
                raise ConfigError(f"model.attention 'single' does not know the loss that balances experts; {BALANCE}")
            return ForwardOutput(self._one_by_one(batch.tokens_P, batch.layout, batch.stretches if drops else ()), 0.0)
        attend = PackedAttention(batch.layout)
        if drops:
            if self.router_coefficient > 0.0:
                raise ConfigError(
                    f"model.dropout: the loss that balances experts is counted in a pass that drops nothing; {BALANCE}"
                )
            with Masks(batch.stretches, batch.layout.total, self.device):
                return ForwardOutput(self.hidden(batch.tokens_P, batch.position_P, attend), 0.0)
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

    def _one_by_one(self, tokens_P: Tensor, layout: Layout, stretches: Sequence[Stretch] = ()) -> Tensor:
        """Every segment in a forward pass of its own, with the model's own attention: for models that cannot be packed.

        With stretches in the model's own training mode, torch's random numbers beginning with the seed of what follows the prompt.
        """
        assert set(layout.prefix) <= {-1}, "segments that are computed one by one hold their own prompt"
        ends = {stretch.start + stretch.length: stretch.seed for stretch in stretches}
        parts = []
        with self.precision():
            for start, length in zip(layout.start, layout.length, strict=True):
                with own_training(ends[start + length], self.device) if ends else contextlib.nullcontext():
                    self._set_mode()
                    found = self.backbone(input_ids=tokens_P[None, start : start + length], use_cache=False)
                    parts.append(found.last_hidden_state[0])
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
        while they compute, unless units are dropped: in some families a layer drops them by its own flag.
        """
        layers = self._layers()
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
                vars(layer)["_gradient_checkpointing_func"] = partial(_in_its_mode, layer, recompute)
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
        for layer in self._layers():
            layer.gradient_checkpointing = layer.training = layer in chosen

    def frozen_copy(self) -> Policy:
        """A copy of the weights as they are now, which takes no gradients: the reference.  Never loaded again by name."""
        model = copy.deepcopy(self.model).requires_grad_(False)
        for parameter in model.parameters():
            parameter.grad = None
        return replace(self, model=model.eval(), dropout=None)

    @property
    def empty(self) -> bool:
        """True until the model has numbers: it was built to be filled piece by piece."""
        return self.device.type == "meta"

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder: safetensors, config, generation config, tokenizer, chat template."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def keep(self, folder: Path) -> None:
        """Write what a run needs to go on from here, which for an adapter is less than `save` writes."""
        self.save(folder)

    def export(self, folder: Path) -> None:
        """`save` by whoever has the weights: all processes call it, for a folder that they all see."""
        if comm.world().first:
            self.save(folder)


def _in_its_mode(layer: nn.Module, checkpoint: Callable[..., Any], compute: Callable[..., Any], *inputs: Any) -> Any:
    """`checkpoint(compute, *inputs)`, in which the layer drops what the running pass drops, also when it is computed again."""
    masks = active()
    site = 0 if masks is None else masks.site

    def in_its_mode(*inputs: Any) -> Any:
        modes = [(module, module.training) for module in layer.modules()]
        layer.train(masks is not None)
        try:
            with as_before(masks, site):
                return compute(*inputs)
        finally:
            for module, training in modes:
                module.training = training

    return checkpoint(in_its_mode, *inputs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blueprint:
    """What is known of a model before its weights are loaded: enough to encode data and to plan memory."""

    tokenizer: PreTrainedTokenizerBase
    config: dict[str, Any]
    """transformers' config as a dictionary."""
    eos_ids: tuple[int, ...]
    context: int
    load: Callable[[], PreTrainedModel]
    """Loads (or makes) the weights."""
    empty: Callable[[], PreTrainedModel] | None = None
    """Builds the model without weights; None if it does not come from a checkpoint."""
    pieces: Callable[[], Pieces | None] = lambda: None
    """The checkpoint's tensors, to be read one by one; None if they cannot be."""

    @classmethod
    def of(cls, policy: Policy) -> Blueprint:
        """Of a policy that is loaded already."""
        config = policy.model.config.to_dict()
        eos_ids = tuple(policy.eos_ids)
        return cls(
            tokenizer=policy.tokenizer, config=config, eos_ids=eos_ids, context=policy.context, load=lambda: policy.model
        )  # fmt: skip


def read_blueprint(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None = None) -> Blueprint:
    """Everything about a checkpoint but its weights; its tokenizer has the chat template of the recipe, if that names one.

    Raises ConfigError or DataError with the remedy.

    A folder that holds an adapter in peft's format means its base with the adapter merged into the weights.
    """
    assert settings.path is not None
    path = settings.path
    if isinstance(path, Live):
        return _live_blueprint(settings, *path.value)
    if path.startswith(LIVE):
        raise missing(path, "model.path")
    if (Path(path) / ADAPTER_CONFIG).is_file():
        return _adapted_blueprint(settings, tokenizer)
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise ConfigError(f"model.path: no such folder: {path!r}")
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise ConfigError(f"model.path: {path!r} holds no config.json: it is not a Hugging Face checkpoint")
    if tokenizer is None and Path(path).is_dir() and not has_tokenizer(Path(path)):
        raise ConfigError(
            f"model.path: {path!r} holds no tokenizer (tokenizer.json, tokenizer_config.json): copy the tokenizer files of the "
            "model that it was made from into it"
        )
    try:
        check_config(PreTrainedConfig.get_config_dict(path)[0])
        config = AutoConfig.from_pretrained(path, trust_remote_code=settings.trust_remote_code)
        tokenizer = tokenizer or load_tokenizer(path, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path!r} cannot be read: {str(error).splitlines()[0]}") from error
    except UNBUILDABLE as error:
        raise unbuildable(path, error) from error
    tokenizer = with_chat_template(tokenizer, settings.chat_template)
    check_config(config.to_dict())
    check_vocabulary(len(tokenizer), config.to_dict().get("vocab_size"))
    generation = _read_generation_config(path) or GenerationConfig.from_model_config(config)

    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    kind = AutoModelForSequenceClassification if is_scorer(config.to_dict()) else AutoModelForCausalLM

    def empty() -> PreTrainedModel:
        model = empty_model(kind, config, dtype, trust_remote_code=settings.trust_remote_code)
        if model.can_generate():
            model.generation_config = generation
        return model

    def pieces() -> Pieces | None:
        files = ["*.safetensors", "*.safetensors.index.json"]
        return Pieces.of(Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=files)))

    return Blueprint(
        tokenizer=tokenizer,
        config=config.to_dict(),
        eos_ids=eos_ids(generation, tokenizer),
        context=context_length(config.to_dict()),
        load=lambda: _load(kind, path, dtype, settings.trust_remote_code),
        empty=empty,
        pieces=pieces,
    )


def _read_generation_config(path: str) -> GenerationConfig | None:
    """A checkpoint's generation_config.json, which may name several EOS ids; None if it has none.

    Raises ConfigError if the file is there and cannot be read: without it, completions would end elsewhere.
    """
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(path, GENERATION_CONFIG_NAME, **quiet)
    if file is None:
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path: {file} cannot be read ({said}): it says which tokens end a completion; fetch or copy it again, "
            "or remove it to go by config.json"
        ) from error


UNBUILDABLE = (KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)
"""What transformers raises, beside ValueError, for a configuration that it cannot make a model of."""


def unbuildable(path: Any, error: Exception) -> ConfigError:
    """What a user is told of it."""
    said = ((str(error).strip().splitlines() or [""])[-1]).strip()
    return ConfigError(
        f"model.path: the config.json of {path!r} describes no model that can be built ({type(error).__name__}: {said}): "
        "correct it, or fetch it again"
    )


def _load(kind: Any, path: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """A checkpoint's model, every weight of which was read.  Raises ConfigError.   kind: a class of transformers' Auto family."""
    try:
        model, found = kind.from_pretrained(path, trust_remote_code=trust_remote_code, dtype=dtype, output_loading_info=True)
    except torch.OutOfMemoryError:
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"model.path: the weights in {path!r} are a pickle (pytorch_model.bin) that holds more than weights, or is damaged; "
            "nothing of it was run. Take the checkpoint's .safetensors, or save it anew as such where you trust it"
        ) from error
    except UNBUILDABLE as error:
        raise unbuildable(path, error) from error
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model.path: the weights in {path!r} cannot be read: {said}; fetch or copy them again") from error
    if missing := sorted(found["missing_keys"]):  # transformers would leave them random
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"model.path: the weights in {path!r} lack {missing[0]}{more}: fetch or copy them again")
    if unused := sorted(found["unexpected_keys"]):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        log.warning(
            "model.path: nothing uses %s%s of the weights in %r: its config.json describes a model without", unused[0], more, path
        )
    for parameter in model.parameters():  # where the file has it; a product rounds by where its numbers begin
        if parameter.data_ptr() % ALIGNED:
            parameter.data = parameter.data.clone()
    return model


def _adapted_blueprint(settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None) -> Blueprint:
    """Of the base of an adapter's folder; its tokenizer is the folder's own, where there is one."""
    from groupwise.models.lora import merge_adapter, read_adapter

    folder = str(settings.path)
    if tokenizer is None and (Path(folder) / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
    base = read_blueprint(replace(settings, path=read_adapter(Path(folder))), tokenizer)
    # Read whole: its weights are in no file.
    return replace(base, load=lambda: merge_adapter(base.load(), folder), empty=None, pieces=lambda: None)


def live_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Live:
    """A loaded model as a name that holds it and its tokenizer.

    The name says its class, where it was loaded from, and a digest of its weights, made of a few numbers of each.
    """

    def sampled() -> Iterator[bytes]:
        for name, parameter in model.named_parameters():
            flat = parameter.detach().reshape(-1)
            yield f"{name} {tuple(parameter.shape)}".encode()
            yield flat[:: max(flat.numel() // 64, 1)].double().cpu().numpy().tobytes()

    origin = getattr(model.config, "name_or_path", "")
    return Live(f"{type(model).__name__}{f' of {origin}' if origin else ''} ({short_digest(sampled())})", (model, tokenizer))


def _live_blueprint(settings: ModelSettings, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Blueprint:
    """Of a model that is loaded already.  What is trained is a copy: neither the model nor its tokenizer is changed."""
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise ConfigError(
            "the model carries an adapter: merge it first (model = model.merge_and_unload()), or give the model without it and let "
            "the run make one: model={'path': model, 'lora': {}}"
        )
    tokenizer = with_chat_template(copy.deepcopy(tokenizer), settings.chat_template)
    check_vocabulary(len(tokenizer), embedding_rows(model))
    generation = model.generation_config if model.can_generate() else GenerationConfig.from_model_config(model.config)
    dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32

    def load() -> PreTrainedModel:
        trained = copy.deepcopy(model).requires_grad_(True)
        for parameter in trained.parameters():
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)  # parameters only, as from_pretrained does
        return trained

    return Blueprint(
        tokenizer=tokenizer,
        config=model.config.to_dict(),
        eos_ids=eos_ids(generation, tokenizer),
        context=context_length(model.config.to_dict()),
        load=load,
    )


def is_scorer(config: dict[str, Any]) -> bool:
    """True if a checkpoint is a sequence classifier (a reward model) and not a language model; `config` as a dictionary."""
    return any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ())


def load_policy(settings: ModelSettings) -> Policy:
    """Read a checkpoint (a folder or a hub name) and wrap it.  Raises ConfigError, DataError or Diverged with the remedy."""
    blueprint = read_blueprint(settings)
    return make_policy(blueprint.load(), blueprint.tokenizer, settings)


def make_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: ModelSettings | None = None,
    *,
    probe: bool = True,
) -> Policy:
    """Wrap a model and its tokenizer; `probe=False` trusts that the same kind of model was probed before.

    Of a model without weights (`empty_model`) only the kind is probed; the rest is done once it is filled.

    Raises DataError if tokenizer and model do not fit (vocabulary, no EOS), Diverged if a weight is not finite, ConfigError if
    the model cannot run packed streams.
    """
    settings = settings or ModelSettings()
    if probe and is_scorer(model.config.to_dict()):
        raise ConfigError(
            f"{model.config.name_or_path or 'the model'} is a reward model, not a language model: it cannot be a policy"
        )
    check_config(model.config.to_dict())
    tokenizer = with_chat_template(tokenizer, settings.chat_template)
    size = len(tokenizer)
    check_vocabulary(size, embedding_rows(model))
    empty = model.device.type == "meta"
    if not empty:
        check_finite(model)
        model = model.to(resolve_device(settings))  # type: ignore[arg-type]
    model = model.eval()
    rope.follow_lengths(model)
    generation = model.generation_config if model.can_generate() else GenerationConfig.from_model_config(model.config)
    policy = Policy(
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids(generation, tokenizer),
        pad_id=_pad_id(tokenizer, size),
        vocabulary=size,
        context=context_length(model.config.to_dict()),
        attention=settings.attention,
        autocast=settings.dtype == "autocast",
        form=read_form(model, language_model(model)),
        switches=rope.switches(model),
        dropout=0 if settings.dropout else None,
    )
    if settings.attention != "single":
        _pack(policy, settings)
    if probe:
        probe_policy(policy, settings)
    return policy


def _pack(policy: Policy, settings: ModelSettings) -> None:
    """`use_packed_attention`, whose refusal advises only what works."""
    try:
        use_packed_attention(policy.model)
    except ConfigError as error:
        from groupwise.models.probe import advised

        raise advised(error, policy, recompute=settings.gradient_checkpointing, lora=settings.lora) from error


def probe_policy(policy: Policy, settings: ModelSettings) -> None:
    """Prove the policy's kind on a small copy, and a checkpoint that has its numbers on a few sequences.  Raises ConfigError."""
    from groupwise.models.probe import probe_checkpoint, prove_policy

    prove_policy(policy, recompute=settings.gradient_checkpointing, lora=settings.lora)
    if not policy.empty:
        probe_checkpoint(policy)


COUNTS = (
    *("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "head_dim"),
    *("hidden_size", "n_embd", "intermediate_size", "vocab_size", "max_position_embeddings", "n_positions"),
)
"""Fields of a configuration that count something of which there is at least one."""


def check_config(config: dict[str, Any]) -> None:
    """Raises ConfigError for a number that no model can be computed with; `config` is transformers' as a dictionary."""
    text = config.get("text_config")
    fields = text if isinstance(text, dict) else config
    numbers = {k: v for k, v in fields.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}

    def refuse(name: str, value: float, why: str) -> ConfigError:
        return ConfigError(f"model.path: its config.json sets {name} to {value}: {why}")

    rope = fields.get("rope_parameters")
    parts = [rope, *rope.values()] if isinstance(rope, dict) else []
    bases = [part["rope_theta"] for part in parts if isinstance(part, dict) and part.get("rope_theta") is not None]
    for theta in [*bases, *([numbers["rope_theta"]] if "rope_theta" in numbers else [])]:
        if not theta > 0.0:
            raise refuse("rope_theta", theta, "positions have no frequencies; take the checkpoint's own, 10000 in most")
    for name, value in numbers.items():
        if name in COUNTS and value < 1:
            raise refuse(name, value, "it must be at least 1; take the number that the checkpoint was published with")
        if name in WINDOWS and value < 1 and fields.get("use_sliding_window") is not False:
            raise refuse(name, value, "no token would see even itself; set it to null for no window, or to its tokens")
        if name in CAPS and value <= 0.0:
            raise refuse(name, value, "scores cannot be capped at it; set it to null for no cap")
    heads, shared = numbers.get("num_attention_heads"), numbers.get("num_key_value_heads")
    if heads is not None and shared is not None and heads % shared:
        raise refuse("num_key_value_heads", shared, f"its {heads} attention heads cannot share them evenly; take a divisor")


def check_vocabulary(tokens: int, rows: int | None) -> None:
    """Raises DataError if the tokenizer makes ids that the model has no embedding for.  rows: None where that is not known yet."""
    if rows is not None and tokens > rows:
        raise DataError(
            f"the tokenizer has {tokens} tokens but the model's vocabulary has only {rows}: "
            "use the tokenizer that belongs to the checkpoint, or resize the model's embeddings"
        )


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model's embedding has rows for; often more than the tokenizer has tokens."""
    weight_VD = model.get_input_embeddings().weight
    assert isinstance(weight_VD, Tensor)
    return weight_VD.shape[0]


def resolve_device(settings: ModelSettings) -> torch.device:
    """The device that `model.device` names.  Raises ConfigError for `cuda` on a machine without one."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch finds no GPU; use 'auto' or 'cpu'")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


def eos_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a completion: the generation config's (often several) and the tokenizer's.

    Raises DataError if there is none, or if one lies outside the vocabulary.
    """
    found: set[int] = set()
    for value in (generation.eos_token_id if generation else None, tokenizer.eos_token_id):
        found.update(int(token) for token in (value if isinstance(value, (list, tuple)) else [value]) if token is not None)
    if not found:
        raise DataError(
            "neither the tokenizer nor the generation config names an EOS token: no completion could ever end; "
            "set eos_token in the tokenizer or eos_token_id in generation_config.json"
        )
    outside = sorted(token for token in found if not 0 <= token < len(tokenizer))
    if outside:
        raise DataError(f"EOS id {outside[0]} lies outside the vocabulary of {len(tokenizer)} tokens: completions could never end")
    return tuple(sorted(found))


def context_length(config: dict[str, Any]) -> int:
    """Longest sequence that the model's positions reach, in tokens; `config` is transformers' as a dictionary."""
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"):
        if config.get(key):
            return int(config[key])
    return 1 << 20


def _pad_id(tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    named = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in named if isinstance(token, int) and 0 <= token < size), 0)
