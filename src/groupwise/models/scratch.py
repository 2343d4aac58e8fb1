"""Small models with random weights, in the shapes of the families that people train: for tasks that
need no pretrained one.

Every model is an ordinary `transformers` model: it is saved, loaded and served like a downloaded
checkpoint.  Dropout is 0 everywhere, so that scoring in training mode and sampling in evaluation
mode agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.config.settings import ScratchSettings
from groupwise.data.images import ImageEncoder, PatchEncoder
from groupwise.data.tokenizers import IMAGE, IMAGE_MARKS
from groupwise.errors import ConfigError, MemoryExceeded, out_of_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def scratch_model(
    settings: ScratchSettings,
    *,
    vocabulary: int,
    eos_ids: Sequence[int],
    pad_id: int,
    bos_id: int | None = None,
    seed: int = 0,
    inner: int | None = None,
    kv_heads: int | None = None,
    image_ids: Mapping[str, int] | None = None,
) -> PreTrainedModel:
    """A float32 model on the CPU with random weights drawn from `seed`; torch's global generator is
    left as it was.

    Embeddings are tied: at this size an output matrix of its own would be a large share of the
        parameters.  All `eos_ids` stand in the generation config, which is where engines read them.

    vocabulary: number of token ids, rows of the embedding.   inner: width of a gated MLP, if it is
        to be another than 8/3 of the model's.   kv_heads: heads of keys and values that the
        attention heads share; default: each has its own.   image_ids: of a model that reads
        images, the ids of its control tokens by their names in a config; see `image_ids_of`.
    Raises ConfigError if the widths do not divide, or an id lies outside the vocabulary;
    MemoryExceeded.
    """
    import torch
    from transformers import GenerationConfig

    from groupwise.models.loading import language_class

    _check(
        settings,
        vocabulary,
        {"bos": bos_id, "pad": pad_id} | {f"eos[{i}]": eos for i, eos in enumerate(eos_ids)},
    )
    ids = {"bos_token_id": bos_id, "eos_token_id": _one_or_list(eos_ids), "pad_token_id": pad_id}
    common = {"vocab_size": vocabulary, "tie_word_embeddings": True, **ids}
    config = _config(settings, common, image_ids or {})
    text: Any = config.get_text_config()
    if inner is not None:
        text.intermediate_size = inner
    if kv_heads is not None:
        text.num_key_value_heads = kv_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = language_class(config).from_config(config, dtype=torch.float32)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise MemoryExceeded(
                f"a model of {settings.layers} layers that are {settings.hidden} wide does not fit"
                " into memory: lower model.scratch.hidden or model.scratch.layers"
            ) from error
    model.generation_config = GenerationConfig(
        **ids, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
    )
    return model.eval()


def image_ids_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of a tokenizer's control tokens for images, by their names in a config."""
    ids: Any = tokenizer.convert_tokens_to_ids(list(IMAGE_MARKS))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, ids, strict=True))


def image_encoder() -> ImageEncoder:
    """How a scratch model's images are prepared: squares of 8 x 8 pixels, at most 64 of them."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    side = PATCH * MERGE
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=FRAMES,
        size={"shortest_edge": side**2, "longest_edge": MOST_SQUARES * side**2},
    )
    encoder = PatchEncoder(processor, begin="", token=IMAGE, end="", mark=IMAGE)
    encoder.files = {"preprocessor_config.json": processor.to_json_string().encode()}
    return encoder


PATCH, MERGE, FRAMES = 4, 2, 2
"""Pixels of a patch's side, patches of a square's side, and frames of a patch."""
TOWER_RANGE = 0.08
"""Deviation of the tower's random weights, which it keeps.  With transformers' 0.02 a model of the
task `shapes` had learnt to count in 0.3 of the cases after 200 steps of SFT, not in 0.8."""
MOST_SQUARES = 64
"""Squares of an image, each of which is an embedding; larger ones are made smaller."""


def _config(
    settings: ScratchSettings, common: dict[str, Any], image_ids: Mapping[str, int]
) -> PretrainedConfig:
    """The family's configuration.  A gated MLP is 8/3 as wide as the model: as many weights as a
    plain one of 4.
    """
    from transformers import AutoConfig

    family, width, last = settings.family, settings.hidden // settings.heads, settings.layers - 1
    if family == "gpt2":
        shape = {
            "n_embd": settings.hidden,
            "n_layer": settings.layers,
            "n_head": settings.heads,
            "n_positions": settings.context,
        }
        return AutoConfig.for_model(
            family, **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common
        )
    fields = {
        "hidden_size": settings.hidden,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "intermediate_size": 32 * -(-settings.hidden * 8 // (3 * 32)),
        "max_position_embeddings": settings.context,
    }
    match family:
        case "qwen3":
            fields |= {"head_dim": width}
        case "qwen3_5":
            kinds = [
                "full_attention" if i % 4 == 3 or i == last else "linear_attention"
                for i in range(settings.layers)
            ]
            fields |= {"head_dim": width, "layer_types": kinds}
            fields |= {f"linear_num_{part}_heads": settings.heads for part in ("key", "value")}
            fields |= {f"linear_{part}_head_dim": width for part in ("key", "value")}
        case "gemma2":
            fields |= {"head_dim": width, "query_pre_attn_scalar": width}
        case "mixtral":
            fields |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        case "qwen3_vl":
            third = width // 2 // 3
            sections = [width // 2 - 2 * third, third, third]
            rope = {"rope_type": "default", "rope_theta": 1e4}
            rope |= {"mrope_section": sections, "mrope_interleaved": True}
            text = fields | common | {"head_dim": width, "rope_parameters": rope}
            tower = {"hidden_size": settings.hidden, "out_hidden_size": settings.hidden}
            tower |= {"intermediate_size": 2 * settings.hidden, "num_heads": settings.heads}
            tower |= {"patch_size": PATCH, "spatial_merge_size": MERGE}
            tower |= {"temporal_patch_size": FRAMES, "num_position_embeddings": MOST_SQUARES}
            tower |= {"depth": 1, "deepstack_visual_indexes": []}
            tower |= {"initializer_range": TOWER_RANGE}
            parts = {"text_config": text, "vision_config": tower, "tie_word_embeddings": True}
            return AutoConfig.for_model(family, **parts, **image_ids)
    return AutoConfig.for_model(
        "qwen3_5_text" if family == "qwen3_5" else family, **fields, **common
    )


def _check(settings: ScratchSettings, vocabulary: int, ids: dict[str, int | None]) -> None:
    if settings.hidden % settings.heads:
        raise ConfigError(
            f"hidden ({settings.hidden}) must be a multiple of heads ({settings.heads})"
        )
    if settings.family != "gpt2" and settings.hidden // settings.heads % 2:
        raise ConfigError(
            f"rotary positions need an even head width, got {settings.hidden} / {settings.heads}:"
            " change heads"
        )
    if settings.family == "qwen3_vl" and settings.hidden // settings.heads % 4:
        raise ConfigError(
            "positions in images need a head width that is a multiple of 4, got"
            f" {settings.hidden} / {settings.heads}: change heads"
        )
    if "eos[0]" not in ids:
        raise ConfigError(
            "a model needs at least one EOS id: without one a completion can never end"
        )
    for name, token in ids.items():
        if token is not None and not 0 <= token < vocabulary:
            raise ConfigError(
                f"{name} id {token} lies outside the vocabulary of {vocabulary} tokens"
            )


def _one_or_list(ids: Sequence[int]) -> int | list[int]:
    return int(ids[0]) if len(ids) == 1 else [int(token) for token in ids]
