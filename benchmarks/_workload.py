"""What both sides of a comparison work on: a model with random weights, prompts, a schedule of lengths, a reward.

Everything follows from a `Workload` and its seed, so that two processes that never talk to each other do the same work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _pictures import MARKS, TEMPLATE, embeddings, image_model, save_processor

EOS, PAD = "<eos>", "<pad>"
FIRST = 2
"""Ids below it are EOS and PAD."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One point of the comparison."""

    objective: str = "grpo"
    model: str | None = None
    """Folder of a chat model, which is asked for two-digit sums; None: random weights of the shape below, and random tokens."""
    family: str = "qwen2"
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = 2
    inner: int | None = None
    """Width of the gated MLPs; None: 8/3 of the model's."""
    vocab: int = 512
    prompt: int = 32
    """Tokens of every prompt; with a picture, its placeholders are among them."""
    image: int = 0
    """Pixels of a side of the picture in front of every prompt (family `qwen3_vl`, GRPO); 0: none."""
    completion: int = 64
    """Tokens of the longest completion."""
    group: int = 8
    """Completions per prompt."""
    prompts: int = 8
    """Per step; of a data-set objective: its rows, or pairs of rows."""
    lengths: str = "varied"
    """`varied`: uniform up to the longest; `full`: all the longest; `tail`: most an eighth of it, one in eight the longest."""
    dtype: str = "float32"
    """`float32`, or `bfloat16`: float32 weights and optimizer state, products in bfloat16, on both sides."""
    beta: float = 0.0
    dead: float = 0.0
    """Share of the prompts whose completions all get the same reward."""
    checkpointing: bool = False
    """Both sides compute activations again in the backward pass."""
    threads: int = 1
    device: str = "cpu"
    microbatch: int | None = None
    """Packed positions of a micro-batch of ours; None: the library's default."""
    trl_microbatches: int = 1
    """Micro-batches that TRL cuts a step into: 1 is fastest where it fits."""
    trl_defaults: bool = False
    """TRL as it comes: bfloat16 autocast and gradient checkpointing."""
    seed: int = 0

    @property
    def eos(self) -> int:
        """The token that ends a completion."""
        return 0 if self.model is None else int(tokenizer_of(self.model).eos_token_id)

    def text_of(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text that encodes to exactly these ids."""
        return random_text(ids) if self.model is None else str(tokenizer_of(self.model).decode(ids))

    @property
    def online(self) -> bool:
        """True if completions are sampled."""
        return self.objective not in ("sft", "reward")

    def schedule(self) -> np.ndarray:
        """Length of every completion: (prompts, group) int64, at least one of them the longest."""
        rng = np.random.default_rng(self.seed)
        shape = (self.prompts, self.group)
        match self.lengths:
            case "full":
                found = np.full(shape, self.completion)
            case "varied":
                found = rng.integers(1, self.completion + 1, shape)
            case "tail":
                found = rng.integers(1, max(self.completion // 8, 1) + 1, shape)
                found[rng.random(shape) < 1 / 8] = self.completion
            case other:
                raise SystemExit(f"--lengths must be varied, full or tail, got {other!r}")
        found[0, 0] = self.completion
        return found.astype(np.int64)

    def prompt_ids(self) -> np.ndarray:
        """(prompts, prompt) int64."""
        if self.model is not None:
            return chat_prompts(self.model, self.prompts)
        rng = np.random.default_rng(self.seed + 1)
        if self.image == 0:
            return rng.integers(FIRST, self.vocab, (self.prompts, self.prompt))
        first = FIRST + len(MARKS)
        begin, image, end = range(FIRST, FIRST + 3)
        front = [begin, *[image] * embeddings(self), end]
        words = rng.integers(first, self.vocab, (self.prompts, self.prompt - len(front)))
        return np.concatenate([np.tile(front, (self.prompts, 1)), words], 1)

    def completion_ids(self) -> list[np.ndarray]:
        """Demonstrations, or the two sides of preference pairs (chosen first): of the schedule's lengths, EOS last."""
        rng = np.random.default_rng(self.seed + 2)
        return [np.append(rng.integers(FIRST, self.vocab, int(n) - 1), self.eos) for n in self.schedule().flat]

    def dead_prompts(self) -> np.ndarray:
        """bool (prompts,)."""
        return np.arange(self.prompts) < round(self.dead * self.prompts)


QWEN = Workload(vocab=151936, prompt=256, completion=1024, dtype="bfloat16", device="cuda")
SHAPES: dict[str, Workload] = {
    "S": Workload(),
    "M": Workload(hidden=512, layers=7, heads=8, kv_heads=4, vocab=8192, prompt=128, completion=128, prompts=4),
    "H": Workload(family="qwen3_5", hidden=448, layers=8, heads=7, kv_heads=1, vocab=8192, prompt=128, completion=128, prompts=4),
    "L": Workload(family="gpt2", hidden=768, layers=12, heads=12, kv_heads=None, vocab=50257, prompt=64, completion=128, prompts=2),
    "P": Workload(family="qwen3_vl", prompt=96, prompts=4, image=224),
    "0.5B": replace(QWEN, hidden=896, layers=24, heads=14, inner=4864, trl_microbatches=8),
    "1.5B": replace(QWEN, hidden=1536, layers=28, heads=12, inner=8960, trl_microbatches=16),
}
"""S 3M, M 25M, H 24M (a hybrid: three of four layers are recurrent), L 124M parameters, P 5M with pictures; those
in the shapes of Qwen2.5 are for a GPU, beside whose memory TRL's step has to fit: in one micro-batch it would keep 70 to 220
GB."""


ROWS = 8
"""Rows (or pairs) of a data-set objective's step."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe a workload; what is not given comes from `--shape`."""
    parser.add_argument("--shape", default="S", choices=list(SHAPES), help="what the other options start from (default: S)")
    parser.add_argument("--model", metavar="FOLDER", help="a chat model that is asked for sums, instead of random weights")
    parser.add_argument("--objective", choices=["grpo", "distill", "sft", "reward"])
    parser.add_argument("--family", choices=["llama", "qwen2", "qwen3", "qwen3_5", "qwen3_vl", "gpt2"])
    for name in ("hidden", "layers", "heads", "kv-heads", "inner", "vocab", "prompt", "completion", "group", "prompts", "threads"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--image", type=int, help="pixels of a side of the picture in every prompt (family qwen3_vl)")
    parser.add_argument("--lengths", choices=["varied", "full", "tail"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--beta", type=float, help="weight of the KL to a reference")
    parser.add_argument("--dead", type=float, help="share of prompts whose completions all get the same reward")
    parser.add_argument("--checkpointing", action="store_true", default=None, help="gradient checkpointing on both sides")
    parser.add_argument("--microbatch", type=int, help="packed positions of our micro-batches (default: the library's)")
    parser.add_argument("--trl-microbatches", type=int, help="micro-batches TRL cuts a step into (default: 1, its fastest)")
    parser.add_argument("--trl-defaults", action="store_true", default=None, help="TRL as it comes: bf16, gradient checkpointing")
    parser.add_argument("--seed", type=int)


def workload(options: argparse.Namespace) -> Workload:
    """The workload that the options describe."""
    base = SHAPES[options.shape]
    given = {name: value for name in asdict(base) if (value := getattr(options, name, None)) is not None}
    if (folder := given.get("model")) is not None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder)
        shape = {"family": config.model_type, "hidden": config.hidden_size, "layers": config.num_hidden_layers}
        given = {"prompt": chat_prompts(folder, 1).shape[1], "vocab": config.vocab_size, "completion": 24} | shape | given
    if "heads" in given and "kv_heads" not in given:
        given["kv_heads"] = None
    if given.get("objective") in ("sft", "reward"):
        given = {"prompts": ROWS} | given | {"group": 2 if given["objective"] == "reward" else 1}
    return replace(base, **given)


def model_folder(work: Workload, parent: Path) -> Path:
    """Write the model and its tokenizer as a Hugging Face folder, the one file that both sides load.  Returns the folder."""
    if work.model is not None:
        return Path(work.model)
    shape = [work.family, work.hidden, work.layers, work.heads, work.kv_heads, work.vocab, work.prompt, work.completion, work.seed]
    shape += [work.objective == "reward", work.inner, work.image]
    folder = parent / hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:12]
    if folder.exists():
        return folder
    context = max(1024, work.prompt + work.completion + 1)
    fast = word_tokenizer(work, context)
    if work.image:
        model = image_model(work, fast)
        save_processor(work, folder)
    else:
        model = text_model(work, context)
    if work.objective == "reward":
        from groupwise.models.reward_head import add_head

        model = add_head(model, fast, (0,), "last", work.seed)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def text_model(work: Workload, context: int) -> Any:
    """The model of a workload without pictures."""
    from groupwise.config.settings import ScratchSettings
    from groupwise.models.scratch import scratch_model

    settings = ScratchSettings(
        family=work.family,  # type: ignore[arg-type]
        hidden=work.hidden,
        layers=work.layers,
        heads=work.heads,
        context=context,
    )
    shared = work.kv_heads if work.family != "gpt2" else None
    return scratch_model(settings, vocabulary=work.vocab, eos_ids=(0,), pad_id=1, seed=work.seed, inner=work.inner, kv_heads=shared)


def word_tokenizer(work: Workload, context: int) -> Any:
    """A tokenizer whose words are ids: `w5` is 5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {EOS: 0, PAD: 1, **{f"w{i}": i for i in range(FIRST, work.vocab)}}
    if work.image:
        for i, mark in enumerate(MARKS, FIRST):
            del vocabulary[f"w{i}"]
            vocabulary[mark] = i
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=context)
    if work.image:
        fast.add_special_tokens({"additional_special_tokens": list(MARKS)})
        fast.chat_template = TEMPLATE
    return fast


def teacher_of(work: Workload) -> Workload:
    """A workload whose model is the teacher of a distillation: twice as wide, so with four times the weights per layer."""
    wider = {"hidden": 2 * work.hidden, "heads": 2 * work.heads, "kv_heads": work.kv_heads and 2 * work.kv_heads}
    return replace(work, **wider, inner=work.inner and 2 * work.inner, seed=work.seed + 1)


@cache
def tokenizer_of(folder: str) -> Any:
    """The tokenizer of a model's folder."""
    from groupwise.data.tokenizers import load_tokenizer

    return load_tokenizer(folder)


def chat_prompts(folder: str, count: int) -> np.ndarray:
    """Two-digit sums as the model's chat template asks for them: (count, P) int64, all of one length P."""
    from groupwise.data.tasks.chat import ChatSums

    messages = [[{"role": "user", "content": row["prompt"]}] for row in ChatSums().prompts(count, 0)]
    rows = tokenizer_of(folder).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return np.array(rows, dtype=np.int64)


def random_text(ids: Sequence[int] | np.ndarray) -> str:
    """Text of the random vocabulary that encodes to exactly these ids.

    >>> random_text([5, 0])
    'w5 <eos>'
    """
    return " ".join((EOS, PAD)[i] if i < FIRST else f"w{i}" for i in map(int, ids))


def reward(prompts: list[str], completions: list[str], completion_ids: Any, dead: list[bool], **_: Any) -> list[float]:
    """A number that depends on the tokens alone; 0 for every completion of a dead prompt.  Both sides call this function."""
    return [0.0 if out else (int(sum(ids)) % 101) / 100 for ids, out in zip(completion_ids, dead, strict=True)]
