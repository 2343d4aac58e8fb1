"""Policies from checkpoints: what is known before any weights are loaded (`Blueprint`), then the
weights.

`load_policy` reads a checkpoint; `make_policy` wraps a model that is already there.  That a run
computes with it what the model's own forward pass gives is proven by whoever runs it
(`proof/prove.py`).
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from groupwise.config.live_objects import Live, object_of, short_digest
from groupwise.config.settings import ModelSettings
from groupwise.data.images import ImageEncoder, NoImages
from groupwise.data.tokenizers import has_tokenizer, load_tokenizer, with_chat_template
from groupwise.distributed import fsdp
from groupwise.errors import ConfigError, DataError
from groupwise.models import rope_tables
from groupwise.models.attention import plain_attention
from groupwise.models.config_checks import check_config, check_vocabulary
from groupwise.models.gguf import checkpoint_folder
from groupwise.models.head_form import form_of, has_deep_head
from groupwise.models.lora import ADAPTER_CONFIG, adapter_folder, merge_adapter, read_adapter
from groupwise.models.masks import use_packed_attention
from groupwise.models.policy import Policy
from groupwise.models.quantized import (
    FORMATS,
    Format,
    quantize,
    quantized_name,
    read_quantized,
    rounded,
)
from groupwise.models.quiet import quiet_transformers
from groupwise.models.recurrence import use_packed_recurrence
from groupwise.models.shape import language_part
from groupwise.models.streaming import CheckpointReader, check_finite, empty_model
from groupwise.models.vision import encoder_of, read_encoder
from groupwise.utils.files import expanded
from groupwise.utils.terminal import logger

log = logger(__name__)
Read = TypeVar("Read")

ALIGNED = 64
"""Bytes: the addresses of tensors that torch makes are multiples of it.  A resumed run must compute
as one that went on.
"""


LOADED = NoImages("a model that is loaded already reads none: give its folder")
NO_PROCESSOR = (
    "a model that is loaded already needs its processor to read them: give"
    " AutoProcessor.from_pretrained(...) where its tokenizer is, or its folder as the model"
)


class Source:
    """Where the weights of a model come from."""

    def load(self) -> PreTrainedModel:
        """Load or make the model, with all of its weights."""
        raise NotImplementedError

    def empty(self) -> PreTrainedModel:
        """Build the model without weights; only where `reader` gives the tensors for it."""
        raise NotImplementedError

    def reader(self) -> CheckpointReader | None:
        """Open the checkpoint's tensors, to be read one by one; None if they cannot be."""
        return None


@dataclass(frozen=True, slots=True)
class LoadedModel(Source):
    """A model that is there."""

    model: PreTrainedModel

    def load(self) -> PreTrainedModel:
        """The model itself."""
        return self.model


@dataclass(frozen=True, slots=True)
class WithoutWeights(Source):
    """A checkpoint's model that is filled later, tensor by tensor."""

    source: Source

    def load(self) -> PreTrainedModel:
        """Build the model without weights."""
        return self.source.empty()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blueprint:
    """What is known of a model before its weights are loaded: enough to encode data and to plan
    memory.
    """

    tokenizer: PreTrainedTokenizerBase
    config: dict[str, Any]
    """transformers' config as a dictionary."""
    eos_ids: tuple[int, ...]
    context: int
    source: Source
    """Where its weights come from."""
    images: ImageEncoder | NoImages = LOADED
    """Writes images into its prompts, or says why none is read."""

    @classmethod
    def of(cls, policy: Policy) -> Blueprint:
        """Describe a policy that is loaded already."""
        return cls(
            tokenizer=policy.tokenizer,
            config=policy.model.config.to_dict(),
            eos_ids=tuple(policy.eos_ids),
            context=policy.context,
            source=LoadedModel(policy.model),
        )

    def load(self) -> PreTrainedModel:
        """Load or make the model, with all of its weights."""
        return self.source.load()

    def reader(self) -> CheckpointReader | None:
        """Open the checkpoint's tensors, to be read one by one; None if they cannot be."""
        return self.source.reader()

    def without_weights(self) -> Blueprint:
        """The same model, loaded without weights; only where `reader` gives the tensors for it."""
        return replace(self, source=WithoutWeights(self.source))


@quiet_transformers()
def read_blueprint(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None = None
) -> Blueprint:
    """Read everything about a checkpoint but its weights; its tokenizer has the chat template of
    the recipe, if that names one.

    A folder that holds an adapter in peft's format means its base with the adapter merged into the
    weights.   Raises ConfigError or DataError with the remedy.
    """
    assert settings.path is not None
    blueprint = _exact_blueprint(settings, settings.path, tokenizer)
    if settings.quantize is None:
        return blueprint
    _demand_exact_base(settings.path, settings.quantize)
    format, device = FORMATS[settings.quantize], resolve_device(settings)
    return replace(blueprint, source=QuantizedModel(blueprint.source, format, device))


def _demand_exact_base(path: str, quantize: str) -> None:
    """Refuse to round weights again that an adapter was merged into.  Raises ConfigError."""
    loaded = object_of(path, "model.path")
    origin = path if loaded is None else getattr(loaded[0].config, "name_or_path", "")
    if not origin:  # a live model that was read from nowhere
        return
    folder = adapter_folder(expanded(origin))
    if quantized_name(folder) != quantize:
        return
    saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    raise ConfigError(
        f"model.path: the weights of {origin} are a base that was rounded to {quantize}, with an"
        f" adapter merged into it; model.quantize={quantize} would round them again, which undoes"
        " what the adapter learnt: go on with the adapter on its base,"
        f" model.path={saved['base_model_name_or_path']} model.lora.start={folder}, or leave"
        " model.quantize out",
        key="model.path",
    )


def _exact_blueprint(
    settings: ModelSettings, path: str, tokenizer: PreTrainedTokenizerBase | None
) -> Blueprint:
    """Describe the model of a path, not quantised."""
    loaded = object_of(path, "model.path")
    if loaded is not None:
        return _live_blueprint(settings, path, loaded)
    settings = replace(settings, path=_path_of(path), quantize=None)
    if (Path(str(settings.path)) / ADAPTER_CONFIG).is_file():
        return _adapted_blueprint(settings, tokenizer)
    return Checkpoint(settings, tokenizer).blueprint()


def _path_of(path: str) -> str:
    """The Hugging Face folder or hub name that `model.path` means.  Raises ConfigError."""
    if path.startswith("~"):
        path = str(expanded(path))
    try:
        return checkpoint_folder(path)
    except OSError as error:  # no name of a file, nor of anything on the hub
        shown = path if len(path) <= 200 else f"{path[:200]}... ({len(path)} characters)"
        raise ConfigError(
            f"model.path: {shown!r} cannot be looked for: {error.strerror}"
        ) from error


class Checkpoint(Source):
    """A checkpoint in Hugging Face's format, a folder or a name on the hub."""

    def __init__(
        self, settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Read its config and, unless one is given, its tokenizer.

        Raises ConfigError or DataError.
        """
        self.settings = settings
        self.path = str(settings.path)
        self.dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self._check_folder(needs_tokenizer=tokenizer is None)
        self.config = self._read(self._read_config)
        if tokenizer is None:
            tokenizer = self._read(self._read_tokenizer)
        self.tokenizer = with_chat_template(tokenizer, settings.chat_template)
        keys = self.config.to_dict()
        check_config(keys)
        check_vocabulary(len(self.tokenizer), language_part(keys).get("vocab_size"))
        generation = _read_generation_config(self.path)
        self.generation = generation or GenerationConfig.from_model_config(self.config)
        self.kind = language_class(self.config)
        if is_scorer(keys):
            self.kind = AutoModelForSequenceClassification

    def blueprint(self) -> Blueprint:
        """Describe the model."""
        keys = self.config.to_dict()
        return Blueprint(
            tokenizer=self.tokenizer,
            config=keys,
            eos_ids=eos_ids(self.generation, self.tokenizer),
            context=context_length(keys),
            source=self,
            images=read_encoder(self.path, keys, self.tokenizer),
        )

    def load(self) -> PreTrainedModel:
        """Read all of its weights."""
        return _load(self.kind, self.path, self.dtype, self.settings.trust_remote_code)

    def empty(self) -> PreTrainedModel:
        """Build the model without weights."""
        trusted = self.settings.trust_remote_code
        model = empty_model(self.kind, self.config, self.dtype, trust_remote_code=trusted)
        if model.can_generate():
            model.generation_config = self.generation
        return model

    def reader(self) -> CheckpointReader | None:
        """Open its tensors, to be read one by one; None unless they lie in safetensors files."""
        folder = Path(self.path)
        if not folder.is_dir():
            files = ["*.safetensors", "*.safetensors.index.json"]
            folder = Path(snapshot_download(self.path, allow_patterns=files))
        return CheckpointReader.of(folder)

    def _check_folder(self, *, needs_tokenizer: bool) -> None:
        """Raise ConfigError for a folder that is not there or not a checkpoint."""
        path, folder = self.path, Path(self.path)
        is_local = path.startswith((".", "/", "~")) or path.count("/") != 1
        if not folder.exists() and is_local:
            raise ConfigError(f"model.path: no such folder: {path!r}")
        if not folder.is_dir():
            return
        if not (folder / "config.json").exists():
            raise ConfigError(
                f"model.path: {path!r} holds no config.json: it is not a Hugging Face checkpoint"
            )
        if needs_tokenizer and not has_tokenizer(folder):
            raise ConfigError(
                f"model.path: {path!r} holds no tokenizer (tokenizer.json, tokenizer_config.json):"
                " copy the tokenizer files of the model that it was made from into it"
            )

    def _read_config(self) -> PreTrainedConfig:
        check_config(PreTrainedConfig.get_config_dict(self.path)[0])
        return AutoConfig.from_pretrained(
            self.path, trust_remote_code=self.settings.trust_remote_code
        )

    def _read_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.path, trust_remote_code=self.settings.trust_remote_code)

    def _read(self, read: Callable[[], Read]) -> Read:
        """Read a part of it.  Raises ConfigError for what transformers cannot read."""
        try:
            return read()
        except (OSError, ValueError) as error:
            remedy = ""
            if not Path(self.path).exists():
                remedy = (
                    "; no such folder is here, so it was looked for on the hub: check the name and"
                    " the network, or see `groupwise get`"
                )
            raise ConfigError(
                f"model.path: {self.path!r} cannot be read: {str(error).splitlines()[0]}{remedy}"
            ) from error
        except UNBUILDABLE as error:
            raise unbuildable(self.path, error) from error


def language_class(config: PreTrainedConfig) -> Any:
    """The class that reads a language model's checkpoint: one of transformers' Auto family.

    A checkpoint that reads images too is loaded as the class that it names, so that it is saved as
    it was; see `freeze_towers`. transformers would load some without what reads images (Qwen3.5).
    The text part of one, saved alone, may have a config that no Auto class knows (Emu3, Mllama):
    then it is the class that the config names.
    """
    readers_of_images: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    whole = readers_of_images.get(type(config), None)
    named = config.architectures or ()
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if whole is not None and (not known or whole.__name__ in named):
        return AutoModelForImageTextToText
    if not known and len(named) == 1 and named[0].endswith("ForCausalLM"):
        return getattr(transformers, named[0], AutoModelForCausalLM)
    return AutoModelForCausalLM


def freeze_towers(model: PreTrainedModel) -> None:
    """Freeze all but the text part of a model that reads images or sounds too."""
    config: Any = model.config
    if config.get_text_config() is config:
        return
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and embedding in part.modules()
    ]
    text = min(parts, key=lambda part: sum(1 for _ in part.modules()))
    trained = {
        id(parameter)
        for part in (text, output)
        if part is not None
        for parameter in part.parameters()
    }
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def _read_generation_config(path: str) -> GenerationConfig | None:
    """A checkpoint's generation_config.json, which may name several EOS ids; None if it has none.

    Raises ConfigError if the file is there and cannot be read: without it, completions would end
    elsewhere.
    """
    quiet = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    file = cached_file(path, GENERATION_CONFIG_NAME, **quiet)
    if file is None:
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path: {file} cannot be read ({reason}): it says which tokens end a completion;"
            " fetch or copy it again, or remove it to go by config.json"
        ) from error


UNBUILDABLE = (KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)
"""What transformers raises, beside ValueError, for a configuration that it cannot make a model of.
"""


def unbuildable(path: Any, error: Exception) -> ConfigError:
    """What a user is told of it."""
    reason = ((str(error).strip().splitlines() or [""])[-1]).strip()
    return ConfigError(
        f"model.path: the config.json of {path!r} describes no model that can be built"
        f" ({type(error).__name__}: {reason}): correct it, or fetch it again"
    )


@quiet_transformers()  # it quotes the names of tensors as they are
def _load(kind: Any, path: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """A checkpoint's model, every weight of which was read.  Raises ConfigError.   kind: a class of
    transformers' Auto family.
    """
    try:
        model, report = kind.from_pretrained(
            path, trust_remote_code=trust_remote_code, dtype=dtype, output_loading_info=True
        )
    except torch.OutOfMemoryError:
        raise
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"model.path: the weights in {path!r} are a pickle (pytorch_model.bin) that holds more"
            " than weights, or is damaged; nothing of it was run. Take the checkpoint's"
            " .safetensors, or save it anew as such where you trust it"
        ) from error
    except UNBUILDABLE as error:
        raise unbuildable(path, error) from error
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.path: the weights in {path!r} cannot be read: {reason}; fetch or copy them"
            " again"
        ) from error
    if missing := sorted(report["missing_keys"]):  # transformers would leave them random
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model.path: the weights in {path!r} lack {missing[0]}{more}: fetch or copy them again"
        )
    if unused := sorted(report["unexpected_keys"]):
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        log.warning(
            "model.path: nothing uses %s%s of the weights in %r: its config.json describes a model"
            " without",
            unused[0],
            more,
            path,
        )
    # A parameter lies where the file has it, and a product rounds by where its numbers begin.
    for parameter in model.parameters():
        if parameter.data_ptr() % ALIGNED:
            parameter.data = parameter.data.clone()
    return model


@dataclass(frozen=True, slots=True)
class QuantizedModel(Source):
    """A model that is quantised as it is read."""

    source: Source
    format: Format
    device: torch.device
    """Where it is quantised, and stays."""

    def load(self) -> PreTrainedModel:
        """Read the weights one by one where the source can, else all of them first."""
        reader = self.source.reader()
        if reader is not None:
            model = self.source.empty()
            if reader.fit(model):
                freeze_towers(model)
                return read_quantized(model, reader, self.format, self.device)
        model = self.source.load()
        freeze_towers(model)
        return quantize(model, self.format, self.device)


@dataclass(frozen=True, slots=True)
class AdaptedModel(Source):
    """A base with the adapter of a folder merged into its weights, which are in no file.

    A base that was quantised under its adapter is rounded as it was then.
    """

    base: Source
    folder: str

    def load(self) -> PreTrainedModel:
        """Load the base and merge the adapter."""
        model, name = self.base.load(), quantized_name(Path(self.folder))
        if name is not None:
            freeze_towers(model)
            rounded(model, FORMATS[name])
        return merge_adapter(model, self.folder)


def _adapted_blueprint(
    settings: ModelSettings, tokenizer: PreTrainedTokenizerBase | None
) -> Blueprint:
    """Describe the base of an adapter's folder; its tokenizer is the folder's own, where there is
    one.
    """
    folder = str(settings.path)
    if tokenizer is None and (Path(folder) / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(folder, trust_remote_code=settings.trust_remote_code)
    base = read_blueprint(replace(settings, path=read_adapter(Path(folder))), tokenizer)
    return replace(base, source=AdaptedModel(base.source, folder))


def sampled_weights(model: PreTrainedModel) -> Iterator[bytes]:
    """What a digest of a model's weights is made of: names, shapes and a few numbers of each; of a
    shard its own.
    """
    for name, parameter in model.named_parameters():
        flat = fsdp.own(parameter.detach()).reshape(-1)
        yield f"{name} {tuple(parameter.shape)}".encode()
        yield flat[:: max(flat.numel() // 64, 1)].double().cpu().numpy().tobytes()


def live_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    image_files: Mapping[str, bytes] | None = None,
) -> Live:
    """A loaded model as a name that holds it and its tokenizer.

    The name says its class, where it was loaded from, and a digest of its weights, made of a few
    numbers of each.

    image_files: of the checkpoint, what says how images are prepared.
    """
    origin = getattr(model.config, "name_or_path", "")
    return Live(
        f"{type(model).__name__}{f' of {origin}' if origin else ''}"
        f" ({short_digest(sampled_weights(model))})",
        (model, tokenizer, image_files or {}),
    )


@dataclass(frozen=True, slots=True)
class LiveModel(Source):
    """A copy of a model that the caller has loaded: what is trained is never the caller's."""

    name: str
    """Name of the model when it was given, which holds a digest of its weights."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype

    def load(self) -> PreTrainedModel:
        """Copy the model.  Raises ConfigError if its weights have changed since it was given."""
        now = live_model(self.model, self.tokenizer)
        if now != self.name:
            raise ConfigError(
                "model: the loaded model has changed since `train` was called"
                f" ({self.name} then, {now} now): call `train` again, with the weights that the run"
                " is to begin with"
            )
        trained = copy.deepcopy(self.model).requires_grad_(True)
        for parameter in trained.parameters():
            parameter.grad = None
            # Parameters only, as from_pretrained does.
            parameter.data = parameter.data.to(self.dtype)
        return trained


def _live_blueprint(
    settings: ModelSettings,
    name: str,
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase, Mapping[str, bytes]],
) -> Blueprint:
    """Describe a model that is loaded already; neither the model nor its tokenizer is changed."""
    model, tokenizer, image_files = loaded
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise ConfigError(
            "the model carries an adapter: merge it first (model = model.merge_and_unload()), or"
            " give the model without it and let the run make one: model={'path': model, 'lora': {}}"
        )
    source = LiveModel(
        name, model, tokenizer, torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
    )
    tokenizer = with_chat_template(copy.deepcopy(tokenizer), settings.chat_template)
    check_vocabulary(len(tokenizer), embedding_rows(model))
    keys = model.config.to_dict()
    return Blueprint(
        tokenizer=tokenizer,
        config=keys,
        eos_ids=eos_ids(_generation_of(model), tokenizer),
        context=context_length(keys),
        source=source,
        images=encoder_of(image_files, keys, tokenizer, NO_PROCESSOR),
    )


def _generation_of(model: PreTrainedModel) -> GenerationConfig:
    """The generation config of a model, which a model that cannot generate has none of."""
    if model.can_generate() and model.generation_config is not None:
        return model.generation_config
    return GenerationConfig.from_model_config(model.config)


def is_scorer(config: dict[str, Any]) -> bool:
    """True if a checkpoint is a sequence classifier (a reward model) and not a language model;
    `config` as a dictionary.
    """
    return any(
        name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()
    )


def load_policy(settings: ModelSettings) -> Policy:
    """Read a checkpoint (a folder or a hub name) and wrap it.  Raises ConfigError, DataError or
    Diverged with the remedy.
    """
    blueprint = read_blueprint(settings)
    policy = make_policy(blueprint.load(), blueprint.tokenizer, settings)
    return replace(policy, image_files=blueprint.images.files)


def make_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: ModelSettings | None = None,
    *,
    scores: bool = False,
) -> Policy:
    """Wrap a model and its tokenizer.   scores: the model has a score head; any other with one is
    refused.

    A model without weights (`empty_model`) is asked what it computes once it is filled: see
    `with_facts`.

    Raises DataError if tokenizer and model do not fit (vocabulary, no EOS), Diverged if a weight is
    not finite, ConfigError if the model cannot run packed streams.
    """
    settings = settings or ModelSettings()
    if not scores and is_scorer(model.config.to_dict()):
        raise ConfigError(
            f"{model.config.name_or_path or 'the model'} is a reward model, not a language model:"
            " it cannot be a policy"
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
    freeze_towers(model)
    rope_tables.follow_lengths(model)
    policy = Policy(
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids(_generation_of(model), tokenizer),
        pad_id=_pad_id(tokenizer, size),
        vocabulary=size,
        context=context_length(model.config.to_dict()),
        attention=settings.attention,
        autocast=settings.dtype == "autocast",
        switches=rope_tables.switches(model),
    )
    return policy if empty else with_facts(policy)


def with_facts(policy: Policy) -> Policy:
    """The policy that knows the form of its logits, and what only a model with numbers can be
    asked: what its attention sees.

    Raises ConfigError for a model that cannot be asked.
    """
    model = policy.model
    if policy.attention != "single":
        use_packed_attention(model, backbone=policy.backbone, device=policy.device)
        use_packed_recurrence(model)
    deep = False
    if policy.attention == "single":
        with plain_attention(model):
            deep = has_deep_head(model)
    return replace(policy, form=form_of(model.config), deep_head=deep)


def embedding_rows(model: PreTrainedModel) -> int:
    """How many token ids the model's embedding has rows for; often more than the tokenizer has
    tokens.
    """
    weight_VD = model.get_input_embeddings().weight
    assert isinstance(weight_VD, Tensor)
    return weight_VD.shape[0]


def resolve_device(settings: ModelSettings) -> torch.device:
    """The device that `model.device` names.  Raises ConfigError for `cuda` on a machine without
    one.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch finds no GPU; use 'auto' or 'cpu'")
    return torch.device("cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu")


def eos_ids(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's first, then those of the generation config.

    Raises DataError if there is none, or if one lies outside the vocabulary.
    """
    ids: set[int] = set()
    for value in (generation.eos_token_id if generation else None, tokenizer.eos_token_id):
        ids.update(
            int(token)
            for token in (value if isinstance(value, (list, tuple)) else [value])
            if token is not None
        )
    if not ids:
        raise DataError(
            "neither the tokenizer nor the generation config names an EOS token: no completion"
            " could ever end; set eos_token in the tokenizer or eos_token_id in"
            " generation_config.json"
        )
    outside = sorted(token for token in ids if not 0 <= token < len(tokenizer))
    if outside:
        raise DataError(
            f"EOS id {outside[0]} lies outside the vocabulary of {len(tokenizer)} tokens:"
            " completions could never end"
        )
    return tuple(sorted(ids, key=lambda token: (token != tokenizer.eos_token_id, token)))


def context_length(config: dict[str, Any]) -> int:
    """Longest sequence that the model's positions reach, in tokens; `config` is transformers' as a
    dictionary.
    """
    fields = language_part(config)
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"):
        if fields.get(key):
            return int(fields[key])
    return 1 << 20


def _pad_id(tokenizer: PreTrainedTokenizerBase, size: int) -> int:
    named = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in named if isinstance(token, int) and 0 <= token < size), 0)
