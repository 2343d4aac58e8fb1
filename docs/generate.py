"""Makes what is a repetition of the code: `python docs/generate.py` (part of `make docs`).

Whole pages (algorithms.md and one for each row, metrics.md, models.md, settings.md),
the types of `gw.train`'s keywords, and tables between `<!-- made: NAME -->` and `<!-- end -->` in pages that are otherwise written.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from groupwise import errors
from groupwise.algorithms.algorithm import Algorithm
from groupwise.algorithms.losses import TeacherDivergence
from groupwise.algorithms.parts import Part, describe, options
from groupwise.algorithms.table import ALGORITHMS, PARTS
from groupwise.cli.commands import COMMANDS, parsers
from groupwise.config.resolve import resolve
from groupwise.config.schema import reference
from groupwise.config.settings import REWARDS, GroupSettings
from groupwise.inspection.explain import render, work
from groupwise.models import gguf_config, gguf_tokenizer
from groupwise.models.quantized import FORMATS, QuantizedSize
from groupwise.models.shape import Shape
from groupwise.proof.passes import MANY
from groupwise.proof.texts import ACROSS, FULL, LARGE
from groupwise.rewards.registry import builtin_function
from groupwise.runs.plan import Load, prepared_weights, process_memory
from groupwise.training.metric_table import FLAGGED, METRICS
from groupwise.trl.table import FATES, STEPS, TABLE

DOCS = Path(__file__).parent

INTRO = """\
# The algorithms

[Choosing](choosing.md) helps to select one. `groupwise explain --preset NAME` shows one step in numbers.

An online algorithm is a row of a table with four parts: **credit** (rewards -> advantages), **ratio** level, **surrogate** and
**weights** (normalisation). `objective: NAME` selects a row. Keys of `group` replace single parts: `group: {credit: centered,
weights: {name: constant, length: 1024}}`.

"""
NOTATION = """\
## Notation

| symbol | meaning |
|---|---|
| R, N | completions of a step, and their trained tokens |
| r_i, A_i, n_i | reward, advantage and number of tokens of completion i |
| L | the token limit of a completion |
| l, old, ref | log-prob of a token under the policy, the old policy (before the step), and the reference |
| b | log-prob under the behavior policy, which sampled: `old`, unless another engine or older weights sampled |
| rho | exp(l - old) |
| sg | stops the gradient |
| clip(rho) | clip(rho, 0.8, 1.2), unless bounds are given |

With `group.beta` above 0 `beta KL` is added to every token's loss, unless the KL is part of the reward. `group.kl` selects the
estimator (k3).
"""


def algorithms_page() -> str:
    """The table, then the parts."""
    lines = [INTRO + "| preset | credit | ratio | surrogate, extra terms | weights |", "|---|---|---|---|---|"]
    for row in ALGORITHMS.values():
        parts = {name: f"`{short(part)}`" for name, part in parts_of(row).items()}
        parts["surrogate"] = ", ".join(filter(None, [parts["surrogate"], added(row)]))
        cells = [f"[`{row.name}`](algorithms/{row.name}.md)", *parts.values()]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", NOTATION, "## The parts", ""]
    lines += ["The keys of `group` name these. All but `kl` also take a function of your own ([own parts](own-parts.md))."]
    for kind, functions in PARTS.items():
        if functions:
            lines += ["", f"### {kind}", "", "| name | meaning |", "|---|---|"]
            lines += [f"| `{describe(function)}` | {cell(first_paragraph(function))} |" for function in functions.values()]
    return "\n".join(lines) + "\n"


def short(part: Any) -> str:
    """A part with those of its options that differ from their defaults."""
    named = setting(part)
    if isinstance(named, str):
        return named
    return f"{named.pop('name')}({', '.join(f'{key}={value}' for key, value in named.items())})"


def parts_of(row: Algorithm) -> dict[str, Callable[..., Any]]:
    """The four parts by the recipe's names for them."""
    return {"credit": row.credit, "ratio": row.ratio, "surrogate": row.surrogate, "weights": row.weights}


def added(row: Algorithm) -> str:
    """The extra terms of a row's loss."""
    return ", ".join(f"`{describe(term)}`" for term in row.extra)


def algorithm_pages() -> dict[str, str]:
    """A page for every row of the table.  Raises KeyError for a row without notes, ValueError for notes without a row."""
    notes = yaml.safe_load((DOCS / "algorithms" / "notes.yaml").read_text(encoding="utf-8"))
    if unknown := notes.keys() - ALGORITHMS.keys():
        raise ValueError(f"docs/algorithms/notes.yaml: there is no algorithm {', '.join(sorted(unknown))}")
    return {f"algorithms/{row.name}.md": algorithm_page(row, notes[row.name]) for row in ALGORITHMS.values()}


def algorithm_page(row: Algorithm, notes: dict[str, str]) -> str:
    """One preset: what it is, its equation, its recipe, and what its paper and others say."""
    source = f" Paper: [{row.paper}](https://arxiv.org/abs/{row.paper})." if row.paper else ""
    lines = [f"# {row.name}", "", f"{row.summary}{source} [Symbols](../algorithms.md#notation).", ""]
    lines += ["```text", f"loss = {row.equation}", "```", ""]
    lines += ["## When to choose it", "", notes["choose"], "", "## Recipe", ""]
    changed = from_grpo(row)
    taught = ["teacher: {path: Qwen/Qwen3-8B}"] if row.needs.teacher else []
    if changed:
        group = yaml.safe_dump({"group": changed}, default_flow_style=None, sort_keys=False, width=120).strip()
        lines += [
            f"`objective: {row.name}`, or part by part:",
            "",
            "```yaml",
            "objective: grpo",
            *group.splitlines(),
            *taught,
            "```",
        ]
    else:
        lines += ["```yaml", f"objective: {row.name}", *taught, "```"]
    if changed is None and row.kl_place == "reward":
        lines += ["", "With `group.beta` above 0 the KL is in the reward. No key of `group` moves it."]
    if row.name != "grpo" and not changed:
        named = [f"{key} `{short(value) if callable(value) else value}`" for key, value in different(row).items() if key != "extra"]
        named += [f"extra terms {added(row)}"] if row.extra else []
        lines += ["", "Differs from [`grpo`](grpo.md) in: " + ", ".join(named) + "."]
    lines += [""]
    lines += ["## Measured", "", notes["measured"].rstrip(), ""] if "measured" in notes else []
    lines += ["## Settings of its paper", "", notes["paper"], ""]
    lines += ["## In other libraries", "", notes["peers"], ""] if notes["peers"] != "-" else []
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric with unit, formula and meaning."""
    lines = [METRICS_INTRO]
    for section in METRICS:
        lines += [f"## {section.title}", "", section.when, "", "| metric | formula (unit) | meaning |", "|---|---|---|"]
        for row in section.metrics:
            meaning = f"{row.meaning} *{row.healthy[0].upper()}{row.healthy[1:]}.*" if row.healthy else row.meaning
            formula = row.formula if row.unit == "-" else f"{row.formula} ({row.unit})"
            lines.append("| " + " | ".join(cell(x) for x in (f"`{row.name}`", formula, meaning)) + " |")
        lines.append("")
    return "\n".join(lines)


METRICS_INTRO = """\
# The metrics

Every step writes a line of `metrics.jsonl` with these keys, an evaluation after it a further line of the same step. A metric that
was not computed has no key. Words in capitals are
placeholders. "Yours" is the unit of your rewards. Italics are rules of thumb for reasoning tasks with a checker. [How to read a
run](monitoring.md) explains which metrics to read first.
"""


def different(row: Algorithm) -> dict[str, Any]:
    """The fields in which a row is not grpo."""
    base = ALGORITHMS["grpo"]
    skipped = ("name", "summary", "paper", "equation")
    names = [field.name for field in dataclasses.fields(Algorithm) if field.name not in skipped]
    return {name: getattr(row, name) for name in names if getattr(row, name) != getattr(base, name)}


def from_grpo(row: Algorithm) -> dict[str, Any] | None:
    """The keys of `group` that turn grpo into this row; None if no keys do."""
    changed: dict[str, Any] = {}
    for name, value in different(row).items():
        if name in ("kl_place", "kl") or (name == "extra" and TeacherDivergence(importance=True) in row.extra):
            return None
        if name == "extra" and row.divergence is not None:
            changed["divergence"] = setting(row.divergence)
        elif name != "extra":
            changed[name] = setting(value) if isinstance(value, Part) else value
    settings = GroupSettings(**changed)
    same_parts = different(resolve("grpo", settings, 256)), different(resolve(row.name, GroupSettings(), 256))
    assert [*same_parts[0]] == [*same_parts[1]], f"{row.name}: {same_parts}"
    return changed


def setting(part: Any) -> Any:
    """A part as a recipe names it."""
    plain = options(type(part))
    changed = {key: option for key, option in options(part).items() if plain[key] != option}
    return {"name": part.name, **changed} if changed else part.name


def first_paragraph(function: Callable[..., Any] | type) -> str:
    """Of its docstring, on one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def cell(text: str) -> str:
    """Text for a table's cell."""
    return text.replace("|", "\\|")


def trl_table() -> str:
    """TRL's arguments by what becomes of each.  Those that are not needed are a list, the others rows."""
    lines: list[str] = []
    for fate, title in FATES.items():
        rows: dict[tuple[str | None, str], list[str]] = {}
        for name, argument in sorted(TABLE.items()):
            if argument.fate == fate:
                rows.setdefault((argument.key, argument.detail), []).append(f"`{name}`")
        lines += ["", f"### {title[0].upper()}{title[1:]}", ""]
        if fate == "unneeded":
            lines += [f"{detail}: {', '.join(names)}." for (_, detail), names in rows.items()]
            continue
        lines += ["| TRL | here |", "|---|---|"]
        for (key, detail), names in rows.items():
            here = cell(detail.replace(STEPS, "counts optimizer steps, ours rollouts"))
            if key is not None:
                here = f"`{key}` ({here})" if here else f"`{key}`"
            lines.append(f"| {', '.join(names)} | {here} |")
    return "\n".join(lines[1:])


def rewards_table() -> str:
    """The built-in reward functions."""
    lines = ["| name | arguments | reward |", "|---|---|---|"]
    for name in REWARDS:
        function = builtin_function(name)
        keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        given = ", ".join(f"`{p.name}`" if p.default is p.empty else f"`{p.name}={p.default!r}`" for p in keywords)
        lines.append(f"| `{name}` | {cell(given)} | {cell(first_paragraph(function))} |")
    return "\n".join(lines)


def flags_table() -> str:
    """What a run warns of at its end."""
    lines = ["| metric | bound | warning | what to do |", "|---|---|---|---|"]
    for metric, flag in FLAGGED:
        bounds = {">": flag.above, "<": flag.below}
        bound = next((f"{sign} {value:g}" for sign, value in bounds.items() if value is not None), "NaN")
        lines.append(f"| `{metric.name}` | {bound} | {flag.title} | {cell(flag.remedy)} |")
    return "\n".join(lines)


def explain_block() -> str:
    """What `groupwise explain` prints, up to the advantages and from the first clipped token on."""
    lines = render(work()).splitlines()
    third, fifth = (next(i for i, line in enumerate(lines) if line.startswith(f"{number}. ")) for number in (3, 5))
    return "\n".join(
        ["```console", "$ groupwise explain", *lines[:third], "...", *lines[fifth : fifth + 4], "...", lines[-1], "```"]
    )


LAW = DOCS.parent / "tests" / "arch" / "test_laws.py"
PACKAGE = DOCS.parent / "src" / "groupwise"


def rooms() -> list[str]:
    """The packages in the order that the architecture's test holds."""
    tree = ast.parse(LAW.read_text(encoding="utf-8"))
    (value,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOMS")
    return [name for name in ast.literal_eval(value) if (PACKAGE / name / "__init__.py").exists()]


def rooms_table() -> str:
    """Every package with the first sentence of its docstring, upstream first."""
    lines = ["| package | purpose |", "|---|---|"]
    for name in rooms():
        lines.append(f"| `{name}` | {cell(sentence(PACKAGE / name / '__init__.py'))} |")
    return "\n".join(lines)


def sentence(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


# ---------------------------------------------------------------- docs/models.md

MODELS = """\
# Models

This page lists common model families. `groupwise check RECIPE model.path=...` tests your checkpoint. `make docs` makes the
table from `tests/models/families.json`, which `python tests/models/families.py` measures.

| family | `model_type` | passes | sampling |
|---|---|---|---|
{downloaded}

- **packed**: a step is one stream without padding, and a prompt is computed once for all its completions
  ([batches](batches.md)).
- **one by one**: a forward pass for every sequence, and `generate` for sampling. Set `model: {{attention: single}}` and
  `rollout: {{engine: transformers}}`. It is several times slower.
- **specialised**: the engine computes the layers itself, which is fastest. **native**: the engine calls the model's modules.
  Both compute a prompt once and continue conversations. **generate**: transformers' own loop.

Of {count} causal architectures in transformers {transformers}, {packed} train packed, {single} one by one, {refused} are
refused, and {missing} could not be built. `tests/models/families.md` lists each with its proofs.

## Hybrids

Qwen3.5, Qwen3-Next, OLMo-hybrid (gated DeltaNet), Granite 4, Nemotron-H, Falcon-H1, Bamba (Mamba-2) and LFM2 (short
convolutions) carry a state from token to token. The state after a shared prompt is computed once and copied to its completions,
in scoring, training and sampling. On GPUs `flash-linear-attention`, if installed, computes gated DeltaNets in bfloat16.

Processor seconds of an update's forward and backward passes. A hybrid of 24 million parameters computes 2 prompts with 8
completions of up to 64 tokens on one thread (`python benchmarks/sharing.py --shape H --prompts 2 --completion 64`):

| prompt | shared | packed, prompts repeated | one by one |
|---|---|---|---|
| 32 tokens | 1.5 | 2.3 | 3.6 |
| 128 tokens | 1.8 | 5.2 | 6.7 |
| 512 tokens | 3.4 | 17.7 | 18.3 |

## Checkpoints that read images

Groupwise trains the text part of Qwen3.5, Gemma 3 and 4, Mistral 3, Llama 4 and others. The image encoder gets no gradient, no
weight decay and no adapter. `final/` holds it unchanged.

In prompts of online objectives, SFT and DPO the images of **Qwen2.5-VL**, **Qwen3-VL**, **Qwen3.5** and **Gemma 3** are read; those
of other families are refused by name. [Your data](data.md#images) shows the rows. An image goes through the encoder once, for all
completions of its prompt and for everything that a step does: sampling, scoring, the reference and the update. Its embeddings
then stand at the placeholders of the prompt, at the positions that the model's own function gives (M-RoPE), with the features
that Qwen3-VL adds to its first layers. The tokens of an image see one another in Gemma 3. A prompt stands once for its group, as
any other. At load the proof compares prompts with random images with the model's own pass, gradients too. A checkpoint and the
final model hold the files of the image processor. On a CPU the native engine decodes Qwen3-VL and Qwen3.5 by its specialised pass.
Elsewhere it decodes these models through their modules.

## GGUF files

`model: {{path: model.gguf}}` reads a GGUF file of one of these architectures: {gguf_architectures}.
It is converted once into a Hugging Face folder in the user's cache, with float32 weights, tokenizer and chat template. Every tensor
must be used, and every metadata key of the architecture must be known: a file is refused rather than read in part. These keys are
read, behind the architecture's name:

| key | becomes | architectures |
|---|---|---|
{gguf_keys}

The tensor `rope_freqs.weight` of Llama 3.1 to 3.3 becomes `rope_type: llama3`, with the settings that give its numbers.
`rope_factors_long.weight` and `rope_factors_short.weight` of Phi-3 become `longrope`.

These change the model and are refused by name, as is any key that no list here has:

| key | why |
|---|---|
{gguf_refused}

These are accepted with one value alone: {gguf_neutral}.

The tokenizer is made from the keys below `tokenizer.`: SentencePiece, and byte-level BPE by these splitting rules: {gguf_rules}.

Where a file says nothing, llama.cpp's rules hold: SentencePiece vocabularies and {gguf_whole} put BOS before a text.
Completions end at the ids of `eos_token_id`, `eot_token_id` and `eom_token_id`, and at control tokens such as `<|im_end|>`. A
`tokenizer.json` beside the file takes the place of the file's tokenizer; code beside it is never run.

## What is proven when a run begins

Groupwise compares its computation with the model's own forward and backward pass. The comparison uses your weights, and the
device and dtype of the run. A model that differs is refused with the reason. The plan lists what is proven:

```text
proven  Qwen3ForCausalLM: scoring, training, sampling equal its own pass on cpu in float32, at 7 lengths from 2 to 95, to 2e-06 nats
```

- scoring: log-probs, in streams of several prompts and completions, within 0.0002 nats;
- training: the gradient of an update, within 0.002 of each parameter's norm; above {many} parameters only for norms, biases and the
  first block of each kind;
- sampling: the engine's log-probs at temperature 1, in conversations if the run has an environment;
- scores of a reward model or a critic;
- with an adapter all of these, with random numbers in the factor that begins at 0.

The texts are shorter and longer than every window, chunk, convolution and length that the model's configuration names and the
run reaches, up to {across} tokens. Autocast and bfloat16 are compared in float32 first, then in the dtype itself with a wide
tolerance. On a CPU a model of more than {large} parameters gets three texts of up to 8 tokens, or 16 if the run
has an environment. In float32 two of them are compared in their last token only. If the engine is `specialised` for its family, the
first blocks stand for all: two, or as many as include one of every kind.

The proof does not cover:

- differences beyond the run's longest text, beyond {far} tokens at a length that the configuration does not name, or beyond
  {across};
- a soft cap that no score reaches;
- rounding in bfloat16 that is a few times coarser than the model's own: a test compares it for every family;
- above 30,000,000 parameters, differences in the gradient of the embedding or the head alone;
- on a CPU, in a large model, differences that appear only with many rows, long texts, a prompt of one token, or in deep blocks;
- in a reward model run one by one, scores of tokens that depend on later tokens;
- engines in other processes (vLLM), whose log-probs are compared in every step.

Dropout is always off.
"""
DOWNLOADED: dict[str, tuple[str, str]] = {
    "Qwen3.5, 3.6": ("qwen3_5, as published", "qwen3_5"),
    "Qwen3.5, 3.6, experts": ("qwen3_5_moe, as published", "qwen3_5_moe"),
    "Qwen3": ("qwen3", "qwen3"),
    "Qwen3, experts": ("qwen3_moe", "qwen3_moe"),
    "Qwen3-Next": ("qwen3_next", "qwen3_next"),
    "Qwen2.5": ("qwen2", "qwen2"),
    "Llama 3, SmolLM2": ("llama", "llama"),
    "Llama 4": ("llama4, as published", "llama4"),
    "Gemma 3": ("gemma3", "gemma3"),
    "Gemma 4": ("gemma4", "gemma4"),
    "Mistral": ("mistral", "mistral"),
    "Mistral 3": ("mistral3, as published", "mistral3"),
    "Phi-3, Phi-4": ("phi3", "phi3"),
    "gpt-oss": ("gpt_oss", "gpt_oss"),
    "DeepSeek-V3, R1": ("deepseek_v3", "deepseek_v3"),
    "GLM-4.5": ("glm4_moe", "glm4_moe"),
    "SmolLM3": ("smollm3", "smollm3"),
    "OLMo 3": ("olmo3", "olmo3"),
    "Granite 4": ("granitemoehybrid", "granitemoehybrid"),
    "Nemotron-H": ("nemotron_h", "nemotron_h"),
    "LFM2": ("lfm2", "lfm2"),
    "Kimi Linear": ("kimi_linear", "kimi_linear"),
}
"""What people download: its row in the table of families, and its `model_type`."""

FAMILIES = """\
# Families

Made from families.json by `make docs`. It says what a test found, without the proof that loading makes, for a tiny random model
of every causal architecture that transformers {transformers} knows. Windows and chunks have {window} tokens, position encodings
change at {window} or {twice}, texts have 3 to 64 tokens and lie beside others, and every dropout of the configuration is
{dropout}. What is listed as proven equals the model's own pass: the log-prob of every token within {tolerance:g} nats, the
gradient of every parameter within {gradient_tolerance:g} of its norm.

| what | says that |
|---|---|
| packed | batches are streams without padding; a prompt is computed once for its group (`model.attention: shared`, the default) |
| one by one | a forward pass for every sequence (`model: {{attention: single}}`, `rollout: {{engine: transformers}}`) |
| scoring, gradients | log-probs of given tokens, and the gradient that an optimizer step takes |
| fused | blocks run in fewer passes over the activations, to the same numbers |
| checkpointing | `model.gradient_checkpointing: true` gives the same gradients |
| sampling | log-probs of sampled tokens: by the native engine (specialised: without the model's modules) or by `generate` |
| in bfloat16 | in `model.dtype: autocast` or `bfloat16` a run lies hardly farther from float32 than the own pass in that type |

Hardly farther: the median difference of all log-probs is at most {lower:g} times that of the own pass, of those of a part of a
text {lower_part:g} times, of a gradient {lower_gradient:g} times, in one of {draws} draws of texts: a near tie between two
experts, which rounding decides otherwise, is so in one.

Proven packed: {packed}. Proven one by one: {single}. Refused: {refused}. Cannot be built: {missing}. Accepted although
different: {different}. Ending without a refusal in words: {untidy}.
"""


class Sweep:
    """What the sweep over all families found."""

    def __init__(self) -> None:
        self.held = json.loads((DOCS.parent / "tests/models/families.json").read_text(encoding="utf-8"))
        self.rows, self.variants = self.held["rows"], self.held["variants"]
        first = [name for name in self.held["first"] if name in self.rows]
        others = (name for name in self.rows if name not in first and name not in self.variants)
        self.families = {name: self.rows[name] for name in (*first, *others)}

    def those(self, verdict: str, uses: str = "") -> dict[str, Any]:
        """The families of which this was found."""
        return {name: row for name, row in self.families.items() if row["verdict"] == verdict and row["uses"] == uses}

    @property
    def numbers(self) -> dict[str, Any]:
        """What stands in the texts."""
        counts = {"packed": len(self.those("proven", "packed")), "single": len(self.those("proven", "single"))}
        counts |= {"refused": len(self.those("refused")), "missing": len(self.those("not built")), "count": len(self.families)}
        counts |= {verdict: len(self.those(verdict)) for verdict in ("different", "untidy")}
        sizes = {"many": f"{MANY:,}", "large": f"{LARGE:,}", "far": f"{FULL.far:,}", "across": f"{ACROSS:,}"}
        return {**self.held, **counts, **sizes, "twice": 2 * self.held["window"]}


def models_page() -> str:
    """What people download, what hybrids and towers are, and what is proven when a run begins."""
    sweep, lines = Sweep(), []
    for family, (name, kind) in DOWNLOADED.items():
        row = sweep.rows[name]
        engine = next(path for path in ("specialised", "native", "generate") if path in row["paths"])
        lines.append(f"| {family} | `{kind}` | {USES[row['uses']]} | {engine} |")
    return MODELS.format(**sweep.numbers, **gguf_tables(), downloaded="\n".join(lines))


def gguf_tables() -> dict[str, str]:
    """What is read of a GGUF file, and what is refused."""
    keys, refused, neutral = [], [], []
    for key in gguf_config.KEYS:
        everywhere = len(key.architectures) == len(gguf_config.ARCHITECTURES)
        architectures = "all" if everywhere else ", ".join(key.architectures)
        keys.append(f"| `{key.name}` | {key.meaning} | {architectures} |")
    for name, reason in gguf_config.REFUSED.items():
        refused.append(f"| `{name}` | {reason} |")
    for name, value in gguf_config.NEUTRAL.items():
        neutral.append(f"`{name}` {json.dumps(value)}")
    return {
        "gguf_architectures": ", ".join(f"`{name}`" for name in gguf_config.ARCHITECTURES),
        "gguf_keys": "\n".join(keys),
        "gguf_refused": "\n".join(refused),
        "gguf_neutral": ", ".join(neutral),
        "gguf_rules": ", ".join(f"`{rule}`" for rule in gguf_tokenizer.SPLITS),
        "gguf_whole": ", ".join(f"`{rule}`" for rule in gguf_tokenizer.WHOLE_WORDS),
    }


def families_page() -> str:
    """Every architecture: what is proven, what is refused, and what could not be looked at."""
    sweep = Sweep()
    refused, missing = sweep.those("refused"), sweep.those("not built")
    wrong = sweep.those("different") | sweep.those("untidy")
    lines = [FAMILIES.format(**sweep.numbers), "## Packed", "", *proven_table(sweep.those("proven", "packed"))]
    lines += ["", "## One by one", "", "Packed they are refused, each for the reason that stands beside it.", ""]
    lines += [*proven_table(sweep.those("proven", "single")), "", "## Refused", "", "Either way; this is what you read.", ""]
    lines += ["| `model_type` | class | message |", "|---|---|---|"]
    lines += [f"| `{name}` | {row['kind']} | {cell(row['says'][-1])} |" for name, row in refused.items()]
    if wrong:
        lines += [
            "",
            "## Faults",
            "",
            "Not to be trained with this version.",
            "",
            "| `model_type` | class | found |",
            "|---|---|---|",
        ]
        lines += [f"| `{name}` | {row['kind']} | {cell(' '.join(row['says']))} |" for name, row in wrong.items()]
    lines += ["", "## Not looked at", "", "| `model_type` | class | why |", "|---|---|---|"]
    lines += [f"| `{name}` | {row['kind']} | {cell(' '.join(row['says']))} |" for name, row in missing.items()]
    lines += ["", "## Settings of a configuration that change its mathematics", ""]
    lines += ["Each laid over the tiny configuration of its family.", ""]
    lines += ["| family | configuration | runs | proven | in bfloat16 | notes |", "|---|---|---|---|---|---|"]
    for name, variant in sweep.variants.items():
        changes = ", ".join(f"{key}: {json.dumps(value)}" for key, value in variant["changes"].items())
        cells = [f"`{variant['family']}`", f"`{cell(changes)}`", *proof(sweep.rows[name])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


USES = {"packed": "packed", "single": "one by one"}


def proven_table(rows: dict[str, Any]) -> list[str]:
    """A line for each family."""
    lines = ["| `model_type` | class | proven | in bfloat16 | notes |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        _, proven, *modes, notes = proof(row)
        lines.append(f"| `{name}` | {row['kind']} | {proven} | {' | '.join(modes)} | {notes} |")
    return lines


def proof(row: dict[str, Any]) -> list[str]:
    """How a family runs, what is proven, in which lower types, and what was refused of it."""
    paths = [path for path in row["paths"] if path not in ("native", "specialised", "generate")]
    if "native" in row["paths"]:
        paths.append("sampling (native, specialised)" if "specialised" in row["paths"] else "sampling (native)")
    if "generate" in row["paths"]:
        paths.append("sampling (generate)")
    runs = USES.get(row["uses"], row["verdict"])
    if not row["modes"]:
        return [runs, "", "", cell(" ".join(row["says"]))]
    lower = [mode for mode in ("autocast", "bfloat16") if row["modes"][mode] == ""]
    said = [f"{mode}: {text}" for mode, text in row["modes"].items() if text]
    return [runs, ", ".join(paths), " and ".join(lower) or "refused", cell(" ".join([*row["says"], *said]))]


# ---------------------------------------------------------------- docs/commands.md

COMMANDS_INTRO = """\
# Commands

`groupwise COMMAND --help` prints the same. A recipe is a YAML file or the name of a [bundled one](recipes.md). `KEY=VALUE`
overrides a [setting](settings.md). Every command also takes `--debug`, which shows the traceback of an error.
"""


def commands_page() -> str:
    """Every command with its arguments and examples, as its parser has them."""
    _, commands = parsers(list(COMMANDS))
    lines = [COMMANDS_INTRO.rstrip()]
    for name, text in COMMANDS.items():
        lines += ["", f"## {name}", "", f"{text[0].upper()}{text[1:]}.", ""]
        rows = [argument_row(action) for action in commands[name]._actions if action.dest not in ("help", "debug")]
        if rows:
            lines += ["| argument | meaning |", "|---|---|", *rows, ""]
        module = importlib.import_module(f"groupwise.cli.{name.replace('-', '_')}")
        lines += ["```text", *(" ".join(example.split("  ", 1)[0].split()) for example in module.EXAMPLES), "```"]
    return "\n".join(lines) + "\n"


POSITION: dict[Any, str] = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
"""How an argument by position is written that may be left out or repeated."""


def argument_row(action: argparse.Action) -> str:
    """A row of a command's table."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    name = (
        f"{', '.join(action.option_strings)} {value}" if action.option_strings else POSITION.get(action.nargs, "{}").format(value)
    )
    text = (action.help or "") % {"default": action.default, "prog": "groupwise"}
    return f"| `{cell(name.strip())}` | {cell(text)} |"


# ---------------------------------------------------------------- docs/errors.md

ERRORS_INTRO = """\
# Errors

The most frequent messages. `...` is a gap that a message fills. `--debug` shows the traceback. For wrong results without an
error see [what goes wrong](failures.md).

## Exit codes

| code | error | meaning |
|---|---|---|
| 0 | | success |
"""
SIGNALS = """\
| 130 | | Ctrl-C; the same command continues |
| 128 + N | | signal N, for example 143 for SIGTERM; the same command continues |
| 141 | | the reader of the output closed the pipe; the same command continues |
"""


def errors_page() -> str:
    """Exit codes as the classes have them, then messages with cause and cure."""
    kinds: dict[int, list[type]] = {}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.GroupwiseError) and kind is not errors.Problems:
            kinds.setdefault(kind.exit_code, []).append(kind)
    lines = [ERRORS_INTRO.rstrip()]
    for code, classes in sorted(kinds.items()):
        names = ", ".join(f"`{kind.__name__}`" for kind in classes if kind is not errors.GroupwiseError)
        says = " ".join(first_paragraph(kind) for kind in classes if kind is not errors.GroupwiseError)
        lines.append(f"| {code} | {names} | {cell(says)} |")
    lines += [SIGNALS.rstrip()]
    sections = yaml.safe_load((DOCS / "errors.yaml").read_text(encoding="utf-8"))
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", "| message | cause | cure |", "|---|---|---|"]
        lines += [f"| `{cell(row['message'])}` | {cell(row['cause'])} | {cell(row['cure'])} |" for row in rows]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- docs/memory.md

KNOWN_MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SmolLM2-135M", {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                      "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    ("Qwen3-0.6B", {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}),
    ("Qwen3-1.7B", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}),
    ("Qwen3-4B", {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}),
    ("Llama-3.1-8B", {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                      "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}),
    ("Qwen3-8B", {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}),
    ("Qwen3-14B", {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                   "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}),
    ("Qwen3-32B", {"vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                   "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}),
)  # fmt: skip
"""What the table of memory names, with the sizes of their published configurations."""


def memory_table() -> str:
    """The plan's bytes on one GPU, model by model."""
    lines = [
        "| model | full, `float32` | full, `autocast` | full, `bfloat16` | LoRA, `bfloat16` | LoRA, by servers | nf4, by servers |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, config in KNOWN_MODELS:
        cells = [
            planned(config, "float32"), planned(config, "autocast"), planned(config, "bfloat16"),
            planned(config, "bfloat16", rank=16), planned(config, "bfloat16", rank=16, servers=True),
            planned(config, "bfloat16", rank=16, servers=True, quantize="nf4"),
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(f"{need:.0f}" if need >= 10 else f"{need:.1f}" for need in cells) + " |")
    return "\n".join(lines)


def planned(config: dict[str, Any], dtype: str, *, rank: int = 0, servers: bool = False, quantize: str | None = None) -> float:
    """GiB at the peak of one process on a GPU, by the plan's own formula."""
    products = linear_sizes(config)
    outside = config["vocab_size"] * config["hidden_size"] * (1 if config["tie_word_embeddings"] else 2)
    parameters = outside + config["num_hidden_layers"] * sum(one * other for one, other in products)
    shape = Shape.of(config, parameters, dtype=dtype)
    quantized = QuantizedSize()
    if quantize is not None:
        blocks = config["num_hidden_layers"]
        numbers = blocks * sum(one * other for one, other in products)
        held = blocks * sum(FORMATS[quantize].bytes(other, one) for one, other in products)
        quantized = QuantizedSize(numbers, held, max(one * other for one, other in products))
    load = Load(
        prompts=16, group=8, prompt_tokens=256, completion_tokens=512, max_tokens_per_microbatch=8192, recompute=True, cpu=False,
        rows=0 if servers else 128, prepared=0 if servers else prepared_weights(shape, cpu=False),
        adapter=config["num_hidden_layers"] * rank * sum(one + other for one, other in products),
        quantized=quantized,
    )  # fmt: skip
    return process_memory(shape, load, prompts=16).peak / 2**30


def linear_sizes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Inputs and outputs of the linear layers of a block."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), (hidden, inner), (hidden, inner), (inner, hidden)]


# ---------------------------------------------------------------- pages

PAGES: dict[str, Callable[[], str]] = {
    "algorithms.md": algorithms_page,
    "commands.md": commands_page,
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "models.md": models_page,
    "settings.md": reference,
}
TABLES: dict[str, Callable[[], str]] = {
    "flags": flags_table,
    "trl": trl_table,
    "rewards": rewards_table,
    "explain": explain_block,
    "rooms": rooms_table,
    "memory": memory_table,
}


def filled(text: str) -> str:
    """A page with its made tables as they are now."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- made: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page that is made, wholly or in part, as it ought to be."""
    found = {DOCS / name: make() for name, make in PAGES.items()}
    found[DOCS.parent / "tests/models/families.md"] = families_page()
    found |= {DOCS / name: text for name, text in algorithm_pages().items()}
    for path in [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"]:
        text = path.read_text(encoding="utf-8")
        if path not in found and "<!-- made: " in text:
            found[path] = filled(text)
    return found


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.name)
