"""Images in the streams of a policy: the tower's embeddings stand at the placeholders of a prompt,
at the positions that the model's own function gives.

The tower is frozen, so that an image goes through it once, whatever reads it: sampling, scoring,
the update, a reference.  What packs, shares prompts and decodes sees input embeddings and
positions.

T positions of a stream   m tokens of a prompt   N embeddings of an image   D width
B texts of a batch
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.hub import cached_file

from groupwise.data.images import (
    FixedEncoder,
    ImageEncoder,
    NoImages,
    PatchEncoder,
    Picture,
    PromptImages,
    picture_of,
    pillow,
)
from groupwise.errors import ConfigError
from groupwise.models.attention import Attend, plain_attention
from groupwise.models.output_head import backbone_of
from groupwise.models.policy import Policy
from groupwise.models.reach import ATTRIBUTE, Reach
from groupwise.ops.query import Query
from groupwise.records import ImageSpan
from groupwise.utils.files import write

FAMILIES = {
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_5": "Qwen3.5",
    "gemma3": "Gemma 3",
}
"""Types of models whose images are read, and their names."""
FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a checkpoint that say how images are prepared; they are saved with the policy."""
KEPT_BYTES = 1 << 29
"""Bytes of embeddings that are kept: those of the images that were read last."""
PIXELS_AT_ONCE = 1 << 22
"""Pixels that go through the tower together."""


class Features(NamedTuple):
    """What the tower gives of an image."""

    embedding_ND: Tensor
    deep: tuple[Tensor, ...]
    """What is added (N, D) behind each of the first layers, where the model adds anything."""

    @property
    def bytes(self) -> int:
        """Bytes that they take."""
        return sum(tensor.nbytes for tensor in (self.embedding_ND, *self.deep))


class Positions(NamedTuple):
    """Positions of a sequence with images."""

    place_3m: Tensor
    """Time, height and width of the prompt's tokens."""
    offset: int
    """What is added to the place of every token behind the prompt."""


class Vision:
    """Reads the images of prompts for a policy, and for those that have the same tower."""

    def __init__(self, encoder: ImageEncoder, token: int) -> None:
        """token: the id of a placeholder."""
        self.encoder, self.token = encoder, token
        self.passes = 0
        """Images that have gone through the tower."""
        self._features: OrderedDict[tuple[Any, ...], Features] = OrderedDict()

    def spliced(
        self,
        policy: Policy,
        tokens_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        images: Sequence[ImageSpan],
    ) -> tuple[Callable[..., Any], dict[str, Any], Attend]:
        """What runs a stream with images, its arguments, and its attention."""
        core: Any = backbone_of(policy.model)
        features = self.read(policy, [span.images for span in images])
        embedding_1TD = core.get_input_embeddings()(tokens_T[None])
        places: list[int] = []
        rows: list[Features] = []
        for span in images:
            place_N = np.flatnonzero(span.images.tokens == self.token)
            inside_N = (place_N >= span.place) & (place_N < span.place + span.stop - span.start)
            places += (place_N[inside_N] + span.start - span.place).tolist()
            if inside_N.any():
                rows += self._chosen(span.images, features, inside_N)
        inputs = self.positions(policy, position_T, images)
        if places:
            index_N = torch.tensor(places, device=tokens_T.device)
            image_ND = torch.cat([row.embedding_ND for row in rows]).to(embedding_1TD.dtype)
            embedding_1TD = embedding_1TD.index_copy(1, index_N, image_ND[None])
            inputs |= self.added(index_N, tokens_T.shape[0], rows)
        return core.language_model, inputs | {"inputs_embeds": embedding_1TD}, attend

    def _chosen(
        self, images: PromptImages, features: Mapping[str, Features], inside_N: np.ndarray
    ) -> Iterator[Features]:
        """The features of a prompt's images that stand inside of a segment."""
        begin = 0
        for picture in images.pictures:
            whole = features[picture.digest]
            end = begin + whole.embedding_ND.shape[0]
            part_N = inside_N[begin:end]
            if part_N.all():
                yield whole
            elif part_N.any():
                kept_N = torch.from_numpy(part_N).to(whole.embedding_ND.device)
                deep = tuple(layer_ND[kept_N] for layer_ND in whole.deep)
                yield Features(whole.embedding_ND[kept_N], deep)
            begin = end
        assert begin == inside_N.size, "a placeholder for every embedding"

    def read(self, policy: Policy, prompts: Sequence[PromptImages]) -> dict[str, Features]:
        """Features of all images of prompts, by digest: kept ones, or those of a new pass."""
        parameter = next(policy.model.get_input_embeddings().parameters())
        state = (parameter.dtype, parameter.device, policy.autocast)
        pictures: dict[str, Picture] = {}
        for prompt in prompts:
            pictures |= {picture.digest: picture for picture in prompt.pictures}
        missing = [one for one in pictures.values() if (one.digest, state) not in self._features]
        for some in _at_once(missing):
            for picture, features in zip(some, self._pass(policy, some), strict=True):
                self._features[picture.digest, state] = features
        found = {digest: self._features[digest, state] for digest in pictures}
        for digest in pictures:
            self._features.move_to_end((digest, state))
        size = sum(features.bytes for features in self._features.values())
        while size > KEPT_BYTES and len(self._features) > len(pictures):
            size -= self._features.popitem(last=False)[1].bytes
        return found

    def _pass(self, policy: Policy, pictures: Sequence[Picture]) -> list[Features]:
        """Send images through the tower."""
        self.passes += len(pictures)
        # Out of inference mode, in which engines sample: an update reads the tensors too.
        with torch.inference_mode(False), torch.no_grad(), plain_attention(policy.model):
            arrays = self.encoder.arrays(pictures)
            inputs = {name: array.to(policy.device) for name, array in arrays.items()}
            with policy.precision():
                return self.features(backbone_of(policy.model), inputs)

    def features(self, core: Any, inputs: Mapping[str, Any]) -> list[Features]:
        """What the tower gives of each image."""
        raise NotImplementedError

    def positions(
        self, policy: Policy, position_T: Tensor, images: Sequence[ImageSpan]
    ) -> dict[str, Any]:
        """The positions of a stream, as the model takes them."""
        raise NotImplementedError

    def added(self, index_N: Tensor, total: int, rows: Sequence[Features]) -> dict[str, Any]:
        """Arguments for what is added behind the first layers at the positions `index_N`."""
        return {}

    def arguments(
        self, policy: Policy, ids_BT: Tensor, prompts: Sequence[PromptImages]
    ) -> dict[str, Any]:
        """What the model's own forward pass takes beside the ids (B, T) of prompts with images."""
        pictures: list[Picture] = []
        types_BT = torch.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            pictures += prompt.pictures
            size = prompt.tokens.size
            types_BT[row, :size] = ids_BT[row, :size] == self.token
        arrays = self.encoder.arrays(pictures)
        inputs = {name: array.to(policy.device) for name, array in arrays.items()}
        return inputs | {self.types: types_BT}

    types = "mm_token_type_ids"
    """The model's name for what says which ids are placeholders."""

    def examples(self, policy: Policy, rng: np.random.Generator) -> list[PromptImages]:
        """Two prompts of random ids and images: alike but for the images."""
        ids = rng.integers(0, policy.vocabulary, size=6)
        ids[ids == self.token] = (self.token + 1) % policy.vocabulary
        prompts = []
        for _ in range(2):
            pictures = tuple(_random_picture(rng, *size) for size in ((48, 80), (64, 40)))
            first, second = (
                np.full(self.encoder.embeddings(picture), self.token) for picture in pictures
            )
            tokens = np.concatenate([ids[:2], first, ids[2:3], second, ids[3:]])
            prompts.append(PromptImages(pictures, tokens.astype(np.int64)))
        return prompts


class PatchVision(Vision):
    """Qwen2.5-VL, Qwen3-VL and Qwen3.5: patches by the image's size, positions in three parts."""

    def __init__(self, encoder: ImageEncoder, token: int) -> None:
        """See `Vision`."""
        super().__init__(encoder, token)
        self._positions: OrderedDict[tuple[Any, ...], Positions] = OrderedDict()

    def features(self, core: Any, inputs: Mapping[str, Any]) -> list[Features]:
        """See `Vision`."""
        seen = core.get_image_features(**inputs, return_dict=True)
        sizes = [len(embedding_ND) for embedding_ND in seen.pooler_output]
        deep = []
        for layer in getattr(seen, "deepstack_features", None) or ():
            if isinstance(layer, Tensor):  # of all images together, up to transformers 5.17
                layer = layer.split(sizes)
            deep.append(layer)
        features = []
        for place, embedding_ND in enumerate(seen.pooler_output):
            features.append(Features(embedding_ND, tuple(layer[place] for layer in deep)))
        return features

    def of_prompt(self, policy: Policy, images: PromptImages) -> Positions:
        """Positions by the model's own function."""
        key = (images.tokens.tobytes(), *images.key)
        if key not in self._positions:
            encoder: Any = self.encoder
            ids_1m = torch.from_numpy(images.tokens)[None]
            core: Any = backbone_of(policy.model)
            place_31m, offset_11 = core.get_rope_index(
                ids_1m,
                mm_token_type_ids=(ids_1m == self.token).int(),
                image_grid_thw=torch.tensor(encoder.grids(images.pictures)),
            )
            self._positions[key] = Positions(place_31m[:, 0], int(offset_11))
            if len(self._positions) > KEPT_PROMPTS:
                self._positions.popitem(last=False)
        return self._positions[key]

    def positions(
        self, policy: Policy, position_T: Tensor, images: Sequence[ImageSpan]
    ) -> dict[str, Any]:
        """See `Vision`.  In front stand the places of tokens in their sequences.

        Rotary attention sees differences of places alone.  So what images take from the places
        behind them is added to those of the prompt instead, and tokens behind a prompt stand at
        their places in the sequence.
        """
        position_4T = position_T.repeat(4, 1)
        for span in images:
            place_3m, offset = self.of_prompt(policy, span.images)
            last = span.place + span.stop - span.start
            place_3n = place_3m[:, span.place : last] - offset
            end = span.start + place_3n.shape[1]
            position_4T[1:, span.start : end] = place_3n.to(position_T.device)
        return {"position_ids": position_4T[:, None]}

    def added(self, index_N: Tensor, total: int, rows: Sequence[Features]) -> dict[str, Any]:
        """See `Vision`: Qwen3-VL adds features of the tower's inner layers (2511.21631)."""
        if not rows[0].deep:
            return {}
        mask_1T = torch.zeros(1, total, dtype=torch.bool, device=index_N.device)
        mask_1T[0, index_N] = True
        order_N = index_N.argsort()
        layers = zip(*(row.deep for row in rows), strict=True)
        deep = [torch.cat(layer)[order_N] for layer in layers]
        return {"visual_pos_masks": mask_1T, "deepstack_visual_embeds": deep}


class BlockVision(Vision):
    """Gemma 3: as many embeddings for every image, which attend to each other in both directions.

    The embeddings of an image see all that stands before them and one another (in layers with a
    window, those inside of it), in training and when a prompt is read.
    """

    types = "token_type_ids"

    def spliced(
        self,
        policy: Policy,
        tokens_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        images: Sequence[ImageSpan],
    ) -> tuple[Callable[..., Any], dict[str, Any], Attend]:
        """See `Vision`."""
        blocks: list[tuple[int, int, int]] = []
        for span in images:
            for begin, end in self._runs(span.images.tokens):
                if begin >= span.place and end <= span.place + span.stop - span.start:
                    shift = span.start - span.place
                    blocks.append((span.start, begin + shift, end + shift))
        run, inputs, attend = super().spliced(policy, tokens_T, position_T, attend, images)
        return run, inputs, BlockAttention(attend, blocks) if blocks else attend

    def _runs(self, tokens: np.ndarray) -> list[tuple[int, int]]:
        """The first placeholder of each image, and the one behind its last."""
        inside = np.concatenate([[0], tokens == self.token, [0]]).astype(np.int8)
        steps = np.diff(inside)
        begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
        return list(zip(begins.tolist(), ends.tolist(), strict=True))

    def features(self, core: Any, inputs: Mapping[str, Any]) -> list[Features]:
        """See `Vision`."""
        seen = core.get_image_features(**inputs, return_dict=True)
        return [Features(embedding_ND, ()) for embedding_ND in seen.pooler_output]

    def positions(
        self, policy: Policy, position_T: Tensor, images: Sequence[ImageSpan]
    ) -> dict[str, Any]:
        """See `Vision`."""
        return {"position_ids": position_T[None]}


class BlockAttention:
    """Attention of a stream in which the tokens of an image see one another."""

    def __init__(self, attend: Attend, blocks: Sequence[tuple[int, int, int]]) -> None:
        """blocks: where each image's segment starts, and its placeholders begin and end."""
        self.attend, self.blocks = attend, blocks

    @property
    def recurrent(self) -> Any:
        """See `Attend`."""
        return self.attend.recurrent

    def sequence_lengths(self, position_T: Tensor) -> Tensor:
        """See `Attend`."""
        return self.attend.sequence_lengths(position_T)

    def __call__(self, query: Query) -> Tensor:
        """See `Attend`: causal attention, and that of the images' tokens in its place."""
        out_THE = self.attend(query)
        places, rows = [], []
        for start, begin, end in self.blocks:
            places.append(torch.arange(begin, end, device=out_THE.device))
            rows.append(_both_ways(query, start, begin, end))
        return out_THE.index_copy(0, torch.cat(places), torch.cat(rows).to(out_THE.dtype))


def _both_ways(query: Query, start: int, begin: int, end: int) -> Tensor:
    """What the tokens (N, H, E) of an image see: all from `start` to `end` within their reach."""
    assert query.cap is None and query.sinks_H is None, "no family with images has these"
    place_N1 = torch.arange(begin, end, device=query.query_THD.device)[:, None]
    place_K = torch.arange(start, end, device=query.query_THD.device)
    out_1HNE = functional.scaled_dot_product_attention(
        query.query_THD[begin:end].transpose(0, 1)[None],
        query.key_TKD[start:end].transpose(0, 1)[None],
        query.value_TKE[start:end].transpose(0, 1)[None],
        attn_mask=place_K >= query.reach.first(place_N1 - start) + start,
        scale=query.scale,
        enable_gqa=True,
    )
    return out_1HNE[0].transpose(0, 1)


KEPT_PROMPTS = 4096
"""Prompts whose positions are kept."""


def _at_once(pictures: Sequence[Picture]) -> Iterator[list[Picture]]:
    """Images in parts that go through the tower together."""
    some: list[Picture] = []
    pixels = 0
    for picture in pictures:
        size = picture.height * picture.width
        if some and pixels + size > PIXELS_AT_ONCE:
            yield some
            some, pixels = [], 0
        some.append(picture)
        pixels += size
    if some:
        yield some


def _random_picture(rng: np.random.Generator, height: int, width: int) -> Picture:
    """An image of random pixels."""
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    pillow().Image.fromarray(pixels).save(file, "PNG")
    return picture_of(file.getvalue(), "a random image")


def read_encoder(
    path: str, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> ImageEncoder | NoImages:
    """How a checkpoint writes images into its prompts, or why none is read."""
    files: dict[str, bytes] = {}
    if "vision_config" in config:
        for name in FILES:
            file = cached_file(path, name, **QUIET)
            if file is not None:
                files[name] = Path(file).read_bytes()
    missing = f"{path!r} has no preprocessor_config.json, which says how to prepare them"
    return encoder_of(files, config, tokenizer, missing)


QUIET = {
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
    "_raise_exceptions_for_gated_repo": False,
}


def encoder_of(
    files: Mapping[str, bytes],
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    missing: str,
) -> ImageEncoder | NoImages:
    """How a model writes images into its prompts, or why none is read.

    files: those of `FILES` that it has.   missing: why there are none.
    """
    kind = str(config.get("model_type"))
    if "vision_config" not in config:
        return NoImages(f"the model ({kind}) reads none")
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES.values())
        return NoImages(f"those of a {kind} model are not read, only of {known}", files)
    if not files:
        return NoImages(missing)
    try:
        pillow()
        with TemporaryDirectory() as folder:
            for name, content in files.items():
                write(Path(folder) / name, content)
            encoder = make_encoder(folder, config, tokenizer)
    except (ConfigError, OSError, ValueError, TypeError, ImportError) as error:
        return NoImages(str(error).splitlines()[0], files)
    encoder.files = files
    return encoder


def make_encoder(
    folder: str, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> ImageEncoder:
    """The encoder of a model in `FAMILIES`.   folder: holds those of `FILES` that it has."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    fields: Any = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    token = str(tokenizer.convert_ids_to_tokens(fields.image_token_id))
    if config["model_type"] != "gemma3":
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return PatchEncoder(processor, begin="", token=token, end="", mark=token)
    processor = Gemma3ImageProcessorPil.from_pretrained(folder)
    if processor.do_pan_and_scan:
        raise ConfigError(
            "its preprocessor_config.json asks for crops (do_pan_and_scan), which are not read"
        )
    first = str(tokenizer.convert_ids_to_tokens(fields.boi_token_index))
    last = str(tokenizer.convert_ids_to_tokens(fields.eoi_token_index))
    return FixedEncoder(
        processor,
        fields.mm_tokens_per_image,
        begin=f"\n\n{first}",
        token=token,
        end=f"{last}\n\n",
        mark=first,
    )


def seeing(policy: Policy, encoder: ImageEncoder | NoImages) -> Policy:
    """The policy, which reads the images of prompts where an encoder writes them.

    Raises ConfigError for texts that are computed one by one.
    """
    if isinstance(encoder, NoImages):
        return policy
    if policy.attention == "single":
        raise ConfigError(
            "model.attention 'single' reads no images: leave it out, or take prompts without images"
        )
    config: Any = policy.model.config
    if isinstance(encoder, FixedEncoder):
        return replace(policy, vision=BlockVision(encoder, int(config.image_token_id)))
    for module in policy.model.modules():
        reach: Reach = vars(module).get(ATTRIBUTE, Reach())
        if reach.window is not None or reach.chunk is not None:
            raise ConfigError(
                f"{type(policy.model).__name__} has attention windows, and places in them that"
                " images move: its images are not read; set use_sliding_window to false in its"
                " config.json if it was trained so"
            )
    return replace(policy, vision=PatchVision(encoder, int(config.image_token_id)))
