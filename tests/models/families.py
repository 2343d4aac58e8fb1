"""Tiny random models of every causal architecture that transformers knows, and what is true of each of them.

`config_of` takes a family's own default configuration and makes it small by the names of its fields; what the defaults cannot
build stands in families.yaml.  Windows, chunks and switches of position encodings become so short that texts of 3 to 64 tokens lie
on both sides of them, dropout is never 0, and multipliers that are 1 by default are not, so that whoever forgets one is noticed.

`examine` loads such a model as a user would and compares every path that a run may take with the model's own forward and backward
pass, one sequence at a time, without the library's proof or any of its code.  A family is proven, or refused in words, or cannot
be built here; one that is accepted and differs raises `Different`.

    export PYTHONPATH=tests/fixtures
    python tests/models/families.py            every family, into families.json, from which families.md and docs/models.md are made
    python tests/models/families.py llama      one, on the screen
    python tests/models/families.py --write llama      and into its row of families.json
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from finer import DRAWS, LOWER, LOWER_GRADIENT, LOWER_PART, finer
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from groupwise.config.settings import ModelSettings
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import GroupwiseError
from groupwise.models.backbone import checkpointing
from groupwise.models.loading import language_class, make_policy
from groupwise.models.policy import Policy
from groupwise.ops.operations import operations
from groupwise.proof.prove import prove
from groupwise.proof.texts import NATIVE, TRANSFORMERS
from groupwise.records import Prompt, Sample, Sampling
from groupwise.rollout.engine import Engine
from groupwise.rollout.native.engine import NativeEngine
from groupwise.rollout.transformers import TransformersEngine
from groupwise.training.offline import token_nll
from groupwise.training.optimizer import StepStats
from groupwise.training.passes import score, update

FAMILIES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every model type that transformers loads as a causal language model."""

WINDOW = 8
"""Tokens: every window, chunk and `original_max_position_embeddings`."""

SHAPES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""What makes their configurations small, by field, by model type and by variant."""


def fields(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The value of each field of groups that have one value each."""
    return {name: group["value"] for group in groups for name in group["names"]}


SMALL, WIDE = fields(SHAPES["small"]), fields(SHAPES["wide"])
OVERRIDES: dict[str, dict[str, Any]] = SHAPES["overrides"]
NOT_BUILT: dict[str, list[str]] = SHAPES["not built"]
VARIANTS: dict[str, dict[str, Any]] = SHAPES["variants"]

DROPOUT = 0.1

LONGER = 10
"""Times as long are their texts."""


def _layers(kinds: Sequence[Any], count: int) -> list[Any]:
    return [kinds[i % len(kinds)] for i in range(count)]


def shrunken(config: PreTrainedConfig, vocabulary: int, eos: int, small: Mapping[str, Any] = SMALL) -> dict[str, Any]:
    """Keyword arguments that make a small configuration of the same class."""
    says = config.to_dict()
    kept: dict[str, Any] = {}
    for name, value in says.items():
        if name in small and not isinstance(value, (dict, bool) if name != "is_decoder" else dict):
            kept[name] = small[name]
        elif "drop" in name and isinstance(value, float) and "path" not in name:
            kept[name] = DROPOUT
        elif name in ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"):
            kept[name] = vocabulary
        elif name == "eos_token_id":
            kept[name] = eos
        elif name.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
            kept[name] = vocabulary - 1
    if "layerdrop" in says or "decoder_layerdrop" in says:  # drops whole layers in training mode
        kept |= {name: DROPOUT for name in ("layerdrop", "decoder_layerdrop") if name in says}
    kinds = {
        name: list(dict.fromkeys(value))
        for name, value in says.items()
        if name.endswith(("layer_types", "layers_block_type")) and isinstance(value, list) and value
    }
    count = max([2, *(len(found) for found in kinds.values())])
    for name, found in kinds.items():
        found.sort(key=lambda kind: kind == "full_attention")  # some families want their last layer to see everything
        kept[name] = _layers(found, count)
    if kinds:
        kept |= {name: count for name in ("num_hidden_layers", "n_layer", "num_layers") if name in says}
    if "kv_lora_rank" in says:  # every head has keys of its own
        kept["num_key_value_heads"] = kept["num_attention_heads"]
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            below = merged(shrunken(value, vocabulary, eos, small), OVERRIDES.get(value.model_type, {}))
            kept[name] = {"model_type": value.model_type} | below
    return kept


def config_of(family: str, vocabulary: int, eos: int, *, wide: bool = False, **changes: Any) -> PreTrainedConfig:
    """A small configuration of a family.  `changes` are laid over it; a mapping over a mapping is merged."""
    kind = CONFIG_MAPPING[family]
    own = OVERRIDES.get(family, {})
    with quiet():
        kept = merged(shrunken(kind(), vocabulary, eos, {**SMALL, **WIDE} if wide else SMALL), own)
        return kind(**merged(kept, changes))


def merged(tree: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `tree`, one mapping into the other."""
    found = dict(tree)
    for name, value in over.items():
        below = found.get(name)
        found[name] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return found


def model_of(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights that are large enough for every part of it to matter."""
    torch.manual_seed(seed)
    with quiet():
        # A copy, because the library names its attention in a model's configuration.
        model = language_class(config).from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager")
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=noise)
            if parameter.ndim >= 2 and float(parameter.std()) < 0.1:
                parameter.copy_(0.2 * drawn)
            else:
                parameter.add_(0.1 * drawn)
    return model.eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says of ids outside of a tiny vocabulary."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)


# ---------------------------------------------------------------- the truth: transformers' own forward pass, one sequence at a time

TOLERANCE = 1e-4
"""Nats.  In float32 another order of the same sums moves log-probs of these models by 1e-6 to 1e-5; whatever is forgotten on the
way (a window, a position, a multiplier, a neighbour) moves them by 1e-2 and more, see `sensitivity`."""
GRADIENT_TOLERANCE = 1e-3
"""Of a parameter's gradient, relative to its norm: rounding gives 1e-6 to 5e-5."""
LEAST_SENSITIVITY = 5e-3
"""Nats by which the last token must hear the first half of the text: a model that hears nothing proves nothing."""

LENGTHS = ((2, (1, 3)), (7, (12, 2)), (21, (18, 9)), (40, (24,)))
"""Prompt and completions of each group, in tokens: on both sides of `WINDOW`, and twice as much, within and beyond the prompt."""
DRAWN, ALONE = 10, 4
"""Tokens of sampled completions: the shortest prompt's end beyond `WINDOW`, the next one's beyond twice as many; and of one that is
sampled alone, behind that one, beyond `WINDOW`."""
TEMPERATURE = 0.8
TEXT = np.arange(5, 10), np.arange(10, 14)
"""A prompt and a completion."""


@dataclass(frozen=True)
class Truth:
    """What a model says itself of samples."""

    logp: list[np.ndarray]
    """Per sample (n_i,), nats, at its temperature, over the tokenizer's vocabulary."""
    gradients: dict[str, Tensor]
    """Of the weighted sum of minus these, by parameter."""


def log_probs(
    model: PreTrainedModel, prompt: np.ndarray, completion: np.ndarray, vocabulary: int, **keywords: Any
) -> tuple[Tensor, Any]:
    """Of a completion's tokens (n,), by an ordinary forward pass over this text alone, differentiable; and what the pass gave.

    As a sampler does, it leaves the last token out, which is drawn and not seen: with it a text may be longer than a length at
    which positions change.
    """
    if "dynamic" in str(getattr(model.config.get_text_config(), "rope_parameters", "")):
        model = _without_memory(model)
    ids = torch.from_numpy(np.concatenate([prompt, completion]))
    outputs = model(input_ids=ids[None, :-1], use_cache=False, **keywords)
    logp_TV = (outputs.logits[0, prompt.size - 1 :, :vocabulary] / TEMPERATURE).log_softmax(-1)
    return logp_TV.gather(1, ids[prompt.size :, None])[:, 0], outputs


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    """The same parameters under fresh modules: dynamic rotary embeddings remember the longest text that they have seen."""
    fresh = model_of(model.config)
    own = dict(model.named_parameters())
    for name, module in fresh.named_modules():
        for key in list(module._parameters):
            module._parameters[key] = own.get(f"{name}.{key}" if name else key, module._parameters[key])
    return fresh


def truth_of(model: PreTrainedModel, samples: Sequence[Sample], vocabulary: int) -> Truth:
    """Log-probs and gradients, one sequence at a time.

    Where the configuration asks for a loss that balances experts, it is transformers' own, of all the sequences of the step.
    """
    config = model.config
    balanced = getattr(config, "output_router_logits", False) and bool(getattr(config, "router_aux_loss_coef", 0.0))
    found, loss, routers = [], torch.zeros(()), []
    for sample in samples:
        options = {"output_router_logits": True} if balanced else {}
        logp, outputs = log_probs(model, sample.prompt, sample.completion, vocabulary, **options)
        loss = loss - (torch.from_numpy(sample.weight) * logp).sum()
        found.append(logp.detach().numpy())
        if balanced:
            routers.append(outputs.router_logits)
    if balanced:
        logits = tuple(torch.cat([layer.flatten(0, -2) for layer in layers]) for layers in zip(*routers, strict=True))
        balance = load_balancing_loss_func(logits, logits[0].shape[-1], config.num_experts_per_tok)
        loss = loss + config.router_aux_loss_coef * balance
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Truth(found, gradients)


@torch.no_grad()
def sensitivity(model: PreTrainedModel) -> float:
    """Nats by which the log-probs of a text's last token move when an earlier half of the text is another."""
    text = torch.arange(5, 29)[None]
    other = text.clone()
    other[0, :12] += 3
    one, two = (model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1) for ids in (text, other))
    return float((one - two).abs().max())


@torch.no_grad()
def foresight(model: PreTrainedModel) -> float:
    """By how much logits move when the token behind them is another: 0 in a causal model."""
    text = torch.arange(5, 29)[None]
    other = text.clone()
    other[0, -1] = 40
    one, two = (model(input_ids=ids, use_cache=False).logits[0, :-1] for ids in (text, other))
    return float((one - two).abs().max())


def samples_of(vocabulary: int, longer: int = 1, seed: int = 0) -> list[Sample]:
    """Groups of all lengths, one of a single member; of all ids, special ones included."""
    rng = np.random.default_rng(seed)
    samples = []
    for group, (prompt, completions) in enumerate(LENGTHS):
        text = rng.integers(0, vocabulary, size=longer * prompt)
        for index, n in enumerate(longer * n for n in completions):
            samples.append(
                Sample(
                    group=str(group),
                    index=index,
                    prompt=text,
                    completion=rng.integers(0, vocabulary, size=n),
                    weight=rng.random(n) + 0.2,
                    advantage=np.ones(n),
                    behavior_logp=np.zeros(n),
                    temperature=TEMPERATURE,
                )
            )
    return samples


# ---------------------------------------------------------------- what the library makes of it


class Different(AssertionError):
    """A path that was accepted gives other numbers than the model's own forward pass."""


@dataclass(frozen=True)
class Finding:
    """What is true of a family.  Exactly one of proven (`uses` is packed or single), refused, and cannot be built."""

    verdict: str
    """`proven`, `refused` or `not built`; or a fault of ours: `different` (accepted and wrong), `untidy` (no refusal in words)."""
    uses: str = ""
    """`packed` or `single`: how it is scored and trained."""
    paths: tuple[str, ...] = ()
    """What was compared with the model's own forward pass."""
    says: tuple[str, ...] = ()
    """Why it is not packed, or not accepted, in the words that a user sees; or why it cannot be built."""
    kind: str = ""
    """Its class."""
    modes: dict[str, str] = field(default_factory=dict)
    """Of a proven one by `MODES`: "", or why the library refuses it, in the words that a user sees."""


class Recorder:
    """In an optimizer's place: keeps the gradient and changes nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.gradients: dict[str, Tensor] = {}
        self.taken = 0

    def clear(self) -> None:
        """See `Optimizer`."""
        self.model.zero_grad()

    def step(self) -> StepStats:
        """See `Optimizer`."""
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.clear()
        return StepStats(grad_norm=0.0, lr=0.0, skipped=False)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a parameter's gradient, relative to its norm; where that is almost 0, to the largest one's."""
    least = 1e-3 * max(float(g.norm()) for g in expected.values())
    worst = 0.0
    for name in expected.keys() | found.keys():
        one, other = (tree.get(name, torch.zeros(())) for tree in (found, expected))
        difference = float((one - other).norm()) / (float(other.norm()) + least)
        worst = max(worst, difference if difference == difference else torch.inf)
    return worst


@dataclass(frozen=True)
class Case:
    """A model, the truth about it, and a policy made of another model with the same weights."""

    model: PreTrainedModel
    truth: Truth
    samples: list[Sample]
    policy: Policy

    def scoring(self, max_tokens_per_microbatch: int) -> float:
        """Largest difference of a log-prob."""
        found = score(self.policy, self.samples, max_tokens_per_microbatch=max_tokens_per_microbatch).logp
        return max(_largest(one - other) for one, other in zip(found, self.truth.logp, strict=True))

    def gradients(self, max_tokens_per_microbatch: int, recompute: bool = False) -> float:
        """Largest relative difference of a gradient by the step that trains."""
        recorder: Any = Recorder(self.policy.model)
        with checkpointing(self.policy, recompute):
            update(self.policy, token_nll, self.samples, recorder, max_tokens_per_microbatch=max_tokens_per_microbatch)
        return apart(recorder.gradients, self.truth.gradients)

    def sampling(self, engine: Engine, prompts: Sequence[Prompt], group_size: int, most: int) -> float:
        """Largest difference of a sampled token's log-prob.   most: tokens of a completion."""
        worst = 0.0
        drawing = Sampling(temperature=TEMPERATURE, max_new_tokens=most)
        for group in engine.generate(prompts, group_size=group_size, sampling=drawing, seed=1):
            for rollout in group:
                with torch.no_grad():
                    expected, _ = log_probs(self.model, rollout.prompt.tokens, rollout.tokens, self.policy.vocabulary)
                worst = max(worst, _largest(rollout.behavior_logp - expected.numpy()))
        return worst

    def prompts(self) -> list[Prompt]:
        """The first three that leave room for a completion."""
        texts = {sample.group: sample.prompt for sample in self.samples if sample.prompt.size < self.policy.context}
        return [Prompt(id=group, tokens=tokens, text="?", row={}) for group, tokens in texts.items()][:3]


def _largest(difference: np.ndarray) -> float:
    largest = float(np.abs(difference).max())
    return largest if largest == largest else np.inf


LONGEST = 96
"""Tokens of the longest text that a run could have."""
BUDGETS = 10_000, 64
"""Packed positions at a time: everything beside everything, and a few groups at once."""


def examine(family: str, *, proof: bool = True, wide: bool = False, **changes: Any) -> Finding:
    """Build a family's tiny model, load it as a user would, and compare every path.  Raises Different.

    proof: False takes the model unseen, so that the comparison here is all there is.
    wide: with wide heads and long texts.
    """
    if family in NOT_BUILT:
        return Finding("not built", says=tuple(NOT_BUILT[family]), kind=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    tokenizer = make_tokenizer("arithmetic")
    config = config_of(family, len(tokenizer) + 3, tokenizer.eos_token_id, wide=wide, **changes)
    model = model_of(config)
    refused: list[str] = []
    for attention, compare in (("shared", _packed), ("single", _single)):
        policy = _loaded(config, tokenizer, attention, refused, proof)
        if policy is None:
            continue
        if foresight(model) > TOLERANCE:
            raise Different(f"accepted with model.attention {attention}, but its tokens see what comes behind them")
        if (heard := sensitivity(model)) < LEAST_SENSITIVITY:
            raise Different(f"the tiny model moves by only {heard:.1g} nats with its text: it proves nothing")
        samples = samples_of(len(tokenizer), LONGER if wide else 1)
        paths = compare(Case(model, truth_of(model, samples, len(tokenizer)), samples, policy), refused)
        uses = "packed" if attention == "shared" else "single"
        return Finding("proven", uses, tuple(paths), tuple(dict.fromkeys(refused)), type(model).__name__)
    return Finding("refused", says=tuple(refused), kind=type(model).__name__)


def _loaded(config: PreTrainedConfig, tokenizer: Any, attention: Any, refused: list[str], proof: bool) -> Policy | None:
    """A policy as a run that computes activations again loads it; where that is refused, as one that does not."""
    for recompute in (True, False):
        settings = ModelSettings(attention=attention, gradient_checkpointing=recompute, device="cpu")
        try:
            policy = make_policy(model_of(config), tokenizer, settings)
            if proof:
                prove(policy, longest=LONGEST, recompute=recompute)
            return policy
        except GroupwiseError as error:
            refused.append(str(error))
            if "gradient_checkpointing" not in str(error):
                break
    return None


def _packed(case: Case, refused: list[str]) -> Iterator[str]:
    for max_tokens_per_microbatch in BUDGETS:
        _same("scoring", case.scoring(max_tokens_per_microbatch), TOLERANCE)
    yield "scoring"
    _same("gradients", case.gradients(BUDGETS[0]), GRADIENT_TOLERANCE)
    again = list(_recomputed(case, refused, BUDGETS[1]))
    if not again:
        _same("gradients", case.gradients(BUDGETS[1]), GRADIENT_TOLERANCE)
    yield "gradients"
    if _fused(case.policy):
        yield "fused"
    yield from again
    try:
        prove(case.policy, longest=LONGEST, sampler=NATIVE, train=False)
        engine = NativeEngine(case.policy, max_rows=5)
        beside = case.sampling(engine, case.prompts(), 2, DRAWN)
        alone = case.sampling(engine, case.prompts()[1:2], 1, ALONE)
    except GroupwiseError as error:
        refused.append(str(error))
        yield from _generated(case, refused)
        return
    _same("native sampling", beside, TOLERANCE)
    _same("native sampling of one completion", alone, TOLERANCE)
    yield "native"
    if engine.path == "specialised":
        yield "specialised"


def _single(case: Case, refused: list[str]) -> Iterator[str]:
    _same("scoring", case.scoring(BUDGETS[0]), TOLERANCE)
    yield "scoring"
    _same("gradients", case.gradients(BUDGETS[0]), GRADIENT_TOLERANCE)
    yield "gradients"
    yield from _recomputed(case, refused, BUDGETS[0])
    yield from _generated(case, refused)


def _recomputed(case: Case, refused: list[str], max_tokens_per_microbatch: int) -> Iterator[str]:
    try:
        found = case.gradients(max_tokens_per_microbatch, recompute=True)
    except GroupwiseError as error:
        refused.append(str(error))
        return
    _same("checkpointing", found, GRADIENT_TOLERANCE)
    yield "checkpointing"


def _generated(case: Case, refused: list[str]) -> Iterator[str]:
    """transformers' `generate`, several prompts at once."""
    try:
        prove(case.policy, longest=LONGEST, sampler=TRANSFORMERS, train=False)
        found = case.sampling(TransformersEngine(case.policy, max_rows=5), case.prompts(), 2, DRAWN)
    except GroupwiseError as error:
        refused.append(str(error))
        return
    _same("sampling by transformers' generate", found, TOLERANCE)
    yield "generate"


def _fused(policy: Policy) -> bool:
    """True if blocks of the model run in a fused form."""
    plain = [m for m in policy.model.modules() if "forward" not in vars(m) and type(m) not in (torch.nn.Linear, torch.nn.Embedding)]
    with operations().fused_modules(policy.model):
        return any("forward" in vars(module) for module in plain)


def _same(path: str, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:
        raise Different(f"{path} differs by {difference:.2g} from the model's own forward pass (tolerance {tolerance:g})")


MODES = ("autocast", "bfloat16")
"""Types that a run may compute in, compared by `finer.finer`."""


def modes_of(name: str, uses: str) -> dict[str, str]:
    """What is said of them: "" or a refusal.   uses: see `Finding`."""
    family, changes = variant(name)
    tokenizer, attention, found = make_tokenizer("arithmetic"), "shared" if uses == "packed" else uses, {}
    config = config_of(family, len(tokenizer) + 3, tokenizer.eos_token_id, **changes)
    for mode in MODES:
        settings = ModelSettings(attention=attention, device="cpu")  # type: ignore[arg-type]
        try:
            finer(make_policy(model_of(config), tokenizer, settings), mode, LONGEST)
            found[mode] = ""
        except GroupwiseError as error:
            found[mode] = str(error)
    return found


# ---------------------------------------------------------------- the table

NAMED = (
    *(
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
    ),
    *("phi", "phi3", "olmo", "olmo2", "olmo3", "smollm3", "granite", "cohere", "cohere2", "stablelm", "starcoder2", "deepseek_v2"),
    *("deepseek_v3", "glm4", "gpt_oss", "nemotron"),
)
"""What most people train: proven on every path."""


TABLE = Path(__file__).with_suffix(".json")


def masked(text: str) -> str:
    """A message without its measured numbers, which differ between machines."""
    return re.sub(r"\b\d+(\.\d+)?(e[+-]?\d+)?\b", "#", text)


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """The family of a row, and what is laid over its tiny configuration."""
    found = VARIANTS.get(name, {"family": name, "changes": {}})
    return found["family"], found["changes"]


def row_of(name: str) -> Finding:
    """Of a family or a variant."""
    family, changes = variant(name)
    return examine(family, **changes)


def read_table() -> tuple[str, dict[str, Finding]]:
    """The version of transformers that the table is of, and its rows."""
    held = json.loads(TABLE.read_text(encoding="utf-8"))
    rows = {
        name: Finding(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for name, row in held["rows"].items()
    }
    return held["transformers"], rows


def found_of(name: str) -> Finding:
    """`row_of` with its modes, and what is wrong with the library as a finding of its own: the table hides nothing."""
    try:
        row = row_of(name)
        return replace(row, modes=modes_of(name, row.uses)) if row.verdict == "proven" else row
    except Different as error:
        verdict, said = "different", str(error)
    except Exception as error:
        verdict, said = "untidy", f"{type(error).__name__}: {error}"
    family, _ = variant(name)
    return Finding(verdict, says=(said,), kind=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, family))


def main(names: Sequence[str]) -> None:
    """Examine and show; without names all of them, and write the table.   `--write`: the rows that are named."""
    chosen = [name for name in names if name != "--write"]
    rows = {}
    for name in chosen or (*FAMILIES, *VARIANTS):
        rows[name] = found = found_of(name)
        modes = (f"{mode}: {said or 'proven'}" for mode, said in found.modes.items())
        print(f"{name:28} {found.verdict} {found.uses} {' '.join(found.paths)}", *found.says, *modes, sep="\n    ", flush=True)
    print(Counter(row.verdict for row in rows.values()))
    if "--write" in names and chosen:
        version, before = read_table()
        if version != transformers.__version__:
            raise SystemExit(f"the table is of transformers {version}: write all of it")
        known = before | rows
        rows = {name: known[name] for name in (*FAMILIES, *VARIANTS)}
    elif chosen:
        return
    held: dict[str, Any] = {"transformers": transformers.__version__, "tolerance": TOLERANCE}
    held |= {"gradient_tolerance": GRADIENT_TOLERANCE, "window": WINDOW, "dropout": DROPOUT, "first": NAMED}
    held |= {"lower": LOWER, "lower_part": LOWER_PART, "lower_gradient": LOWER_GRADIENT, "draws": DRAWS}
    held["variants"] = VARIANTS
    held["rows"] = {name: asdict(row) for name, row in rows.items()}
    TABLE.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
