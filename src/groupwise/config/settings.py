"""Every setting of a recipe, with its meaning, default and range: the one place to read them.

Plain frozen dataclasses; importing this file imports neither torch nor transformers, so that a recipe is checked, explained and
refused in a fraction of a second.  `recipes.py` turns YAML and dotted overrides into a `Recipe` and back; the components take the
sections they need.  The text below a field is its documentation: `groupwise config KEY` prints it.

The number of settings is kept small on purpose.  Batch sizes are said in prompts and completions per prompt; everything else
(completions, updates, epochs, micro-batches) is derived and printed as a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from groupwise.algorithms.losses import Correction
from groupwise.algorithms.table import ALGORITHMS

Positive = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
Siblings = Annotated[int, Gt(0), Le(1_000_000)]
"""Completions of one prompt, which exist at the same time."""
Seed = Annotated[int, Ge(0), Lt(1 << 63)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]
Share = Annotated[float, Ge(0.0), Lt(1.0)]
Part = str | Mapping[str, Any]
"""A function by name, or a mapping with `name` and its keyword arguments: `{name: clipped, low: 0.2, high: 0.28}`.
`file.py:function` or `module:function` names one of your own."""

DATASET = ("sft", "reward", "dpo", "prm")
"""Objectives that learn from a data set."""
OBJECTIVES = (*DATASET, *ALGORITHMS)


def is_online(objective: str) -> bool:
    """True for objectives that sample their own completions; a `module:NAME` of one's own is such a one."""
    return objective in ALGORITHMS or ":" in objective


REWARDS: Mapping[str, str] = {
    "accuracy": "accuracy",
    "exact": "accuracy",
    "number": "accuracy",
    "think_format": "format",
    "tags": "format",
    "soft_overlong": "length",
    "cosine_length": "length",
    "repetition": "length",
    "regex": "format",
    "environment": "environment",
    "model": "model",
}
"""Built-in reward functions, each with the module of `groupwise.rewards` that holds it."""
TASKS: Mapping[str, str] = {
    "addition": "addition:Addition",
    "sums": "addition:Sums",
    "arithmetic": "arithmetic:Arithmetic",
    "gsm8k_arithmetic": "gsm8k:Gsm8kArithmetic",
    "preferences": "preferences:Preferences",
    "calculator": "calculator:Calculator",
    "guessing": "guessing:Guessing",
    "chat_sums": "chat:ChatSums",
    "chat_json": "chat:ChatJson",
    "chat_words": "chat:ChatWords",
}
"""Built-in generated tasks, each with the module of `groupwise.data.tasks` and the class in it."""

DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
"""Endings of files of rows."""

BoardName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Where metrics may be sent, by the name of the package that does it, which is also the name of Groupwise's extra."""
ControlTokens = Literal["warn", "plain", "drop", "error"]
"""What becomes of control tokens in the text of messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScratchSettings:
    """A small model with random weights, for tasks that need no pretrained one."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_5", "gpt2", "gemma2", "mixtral"] = "llama"
    """Architecture.  `qwen3_5` has attention in every fourth block and the last one, gated DeltaNets in the others."""
    hidden: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 2
    """Number of blocks."""
    heads: Positive = 4
    """Attention heads; must divide `hidden`."""
    kv_heads: Positive | None = None
    """Key-value heads; default: as many as `heads`."""
    context: Positive = 512
    """Longest sequence, prompt and completion together."""
    tokenizer: str = "arithmetic"
    """`arithmetic` (characters), `bytes`, `bpe:N` (N tokens, trained on the stage's data), or a tokenizer folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Train a low-rank adapter (peft).  The frozen weights are the reference.  `final/` holds the merged model, `final/adapter/`
    the adapter.  `{}` takes the defaults."""

    rank: Positive = 16
    """Columns of the adapter's two factors."""
    alpha: Annotated[float, Gt(0.0)] = 32.0
    """The adapter's product is multiplied by `alpha / rank`."""
    targets: Annotated[str, MinLen(1)] | Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1)] = "all-linear"
    """`all-linear` (every linear layer but the output head), or a list of layer names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The policy: where it comes from and in which precision it computes."""

    path: str | None = None
    """A Hugging Face checkpoint folder, a hub name, a GGUF file, a packaged model (`groupwise get`), or `stage:NAME`: an earlier
    stage's final model."""
    scratch: ScratchSettings | None = None
    """Instead of `path`: start from random weights."""
    dtype: Literal["float32", "bfloat16", "autocast"] = "float32"
    """`float32`; `autocast` (float32 master weights, bfloat16 products); `bfloat16` (bfloat16 weights, float32 optimizer state)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""
    attention: Literal["shared", "packed", "single"] = "shared"
    """How a batch is computed: `shared` (packed, each prompt once per group), `packed` (prompts repeated), `single` (one sequence
    per forward pass: for models that cannot be packed)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory.  An update takes 12 to 20% longer, with an adapter up to half as
    long again."""
    lora: LoraSettings | None = None
    chat_template: str | None = None
    """Replaces the tokenizer's chat template: a Jinja string or the path of a `.jinja` file."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint.  Never implied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Where rows come from and how they become prompts."""

    path: str | None = None
    """A JSONL, JSON or Parquet file, or a hub name.  For pairs also `stage:NAME`: the best and the worst of every group of an
    earlier stage, by its reward or by one reward function (`stage:NAME:FUNCTION`)."""
    split: str = "train"
    """Split of a hub data set."""
    task: str | None = None
    """Instead of `path`: a built-in task, or your own (`file.py:NAME`, `module:NAME`)."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Renames columns, ours: yours, e.g. `{prompt: question}`.  A row may lack columns that neither its prompt nor its answer
    needs."""
    system: str | None = None
    """System message of chat prompts that bring none."""
    chat: bool = False
    """Wrap string prompts as user messages and apply the chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, `{enable_thinking: false}`; a row's column of that name goes over them.  A variable that the
    template does not mention is refused."""
    template: str | None = None
    """Python format string that makes the prompt from the row's columns, or `alpaca` for instruction/input rows."""
    limit: Positive | None = None
    """Use only the first rows."""
    control_tokens: ControlTokens = "warn"
    """What becomes of special tokens (`<|im_end|>`) that stand as text in a row's messages (but the assistant's), tools or
    `chat_template_kwargs`: `warn` (encoded as tokens, counted, reported before training), `plain` (encoded as text), `drop` (the
    row is skipped), `error`."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt; default: the context less `rollout.max_new_tokens`."""
    max_tokens: Positive | None = None
    """Longest row, prompt and completion together, of objectives that learn from data; default, and at most: the context."""
    too_long: Literal["drop", "truncate_left", "error"] = "drop"
    """What happens to longer prompts and rows.  They are counted.  `truncate_left` cuts the prompt's beginning."""
    retire: Count = 0
    """Online objectives: remove a prompt after so many solved visits in a row (`verdict` gave 1 to every completion); 0: never.
    When all prompts are removed, all return."""
    curriculum: Fraction = 0.0
    """Online objectives: skip a prompt in an epoch with this probability times the pass rate of its last group; 0: never."""
    shuffle: bool = True
    """Visit rows in a seeded random order, another one each epoch."""
    eval_path: str | None = None
    """A file or hub name of held-out rows."""
    eval_split: str = "test"
    """Split of a hub data set for evaluation."""
    eval_fraction: Share | Mapping[str, Share] = 0.0
    """Hold out this share of `path` by a hash of the prompt: the same rows for every seed.  `{test: 0.2, validation: 0.1}` holds
    out two parts: evaluations while training use `validation`, those at the end `test`."""
    eval_limit: Positive | None = None
    """Evaluate on the first rows only."""
    train_on: Literal["completion", "all"] = "completion"
    """Tokens that SFT trains: the completion, or the prompt too."""

    @property
    def parts(self) -> dict[str, float]:
        """The held-out shares by name, `test` first: it keeps its rows whatever `validation` is.  Empty if nothing is held out.

        >>> DataSettings(eval_fraction=0.2).parts, DataSettings(eval_fraction={"validation": 0.1, "test": 0.2}).parts
        ({'test': 0.2}, {'test': 0.2, 'validation': 0.1})
        """
        shares = self.eval_fraction if isinstance(self.eval_fraction, Mapping) else {"test": self.eval_fraction}
        return {name: shares[name] for name in sorted(shares) if shares[name]}


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """One reward function."""

    function: str
    """A built-in function, or your own: `module:function` or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor in the sum."""
    name: str | None = None
    """Name in the log; default: the function's."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""
    timeout: Annotated[float, Gt(0.0)] | None = None
    """Seconds after which a call is stopped and counts as None; if more than a tenth of the calls are, the run ends.  null: a call
    that takes more than ten minutes, or 10 s per completion if that is more, ends the run."""


VERDICTS = tuple(name for name, module in REWARDS.items() if module == "accuracy")
"""Built-in reward functions whose 1 says that a completion is right."""


def verdict_of(rewards: Sequence[RewardSettings], named: str | None) -> str | None:
    """The reward that says which completions are right: `verdict` of the recipe, else the first of `VERDICTS`, else none.

    >>> verdict_of([RewardSettings(function="tags"), RewardSettings(function="exact", name="word")], None)
    'word'
    """
    return named or next((one.name or one.function for one in rewards if one.function in VERDICTS), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTraits:
    """What a recipe's other settings must know of a rollout engine.  The defaults are those of an engine of one's own."""

    own_weights: bool = False
    """Samples with the very weights that are trained: unless it is ahead of them, there is nothing to correct."""
    packed: bool = False
    """Computes packed streams only."""
    prepares: bool = False
    """Decodes with a copy of the weights that is laid out for it."""
    beside: bool = False
    """Samples while training goes on."""
    takes: tuple[str, ...] = ()
    """Keys of `rollout.engine` that are for it alone."""


ENGINES: Mapping[str, EngineTraits] = {
    "native": EngineTraits(own_weights=True, packed=True, prepares=True),
    "transformers": EngineTraits(own_weights=True),
    "vllm": EngineTraits(beside=True, takes=("servers", "colocated", "dtype")),
}
"""Built-in rollout engines; `runs/engines.py` makes them (a test compares the names)."""


def engine_traits(name: str) -> EngineTraits:
    """Those of a built-in engine, or of `module:function`."""
    return ENGINES.get(name, EngineTraits())


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Who samples.  A name alone (`engine: vllm`) means `{name: vllm}`."""

    name: Annotated[str, MinLen(1)] = "native"
    """`native` (in-process, on the training weights), `transformers` (`generate`: slow, the reference), `vllm` (a server that the
    run starts), or `file.py:function`, which makes your own engine."""
    servers: tuple[str, ...] = ()
    """vllm: addresses of running servers, e.g. `[http://127.0.0.1:8000]`."""
    colocated: bool = False
    """vllm: in the trainer's process, in turn with training; both need one environment."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """vllm: precision of a server that the run starts; default: that of the policy's products."""
    ahead: Count = 0
    """Steps by which sampling is ahead of training; the weights that sample are up to so many steps old.  vllm samples while the
    trainer trains.  Other engines sample before each step, which saves no time."""
    correct: Correction | None = field(default_factory=Correction)
    """Importance weights `exp(trainer's log-prob - sampler's)` for completions that vLLM or older weights sampled.  null: none."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of an engine of your own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How completions are sampled in training."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    temperature: Annotated[float, Ge(0.01)] = 1.0
    """Logits are divided by it, when sampling and when scoring."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Keep the smallest set of most likely tokens that holds this probability."""
    min_p: Fraction = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    max_new_tokens: Positive = 256
    """Longest completion in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    max_rows: Positive = 256
    """Completions decoded at the same time; finished ones make room for waiting ones."""
    keep_special_tokens: bool = False
    """Show special tokens to the reward functions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """Who answers the policy: tools, an environment, a procedural data set.  With tools or an environment a completion is a
    conversation through the chat template; `rollout.max_new_tokens` bounds all its turns and answers together."""

    tools: tuple[str, ...] = ()
    """Functions that the policy may call, plain or `async`: `file.py:function` or `module:function`, with type hints and a
    docstring whose `Args:` describe every parameter."""
    factory: str | Mapping[str, str] | None = None
    """Makes an environment per episode: `file.py:Class` or `module:Class`, in TRL's form (`reset(**row)`, public methods are tools,
    perhaps `get_reward()`) or with `reset` and `step(text) -> (observation, reward, done)`.  Of a mapping of names to classes the
    row's column `environment` selects."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, or of the procedural data set."""
    interface: Literal["tools", "step"] | None = None
    """How the policy acts: by calling the environment's methods, or by what it writes.  null: `step` if there is a method
    `step`."""
    reasoning_gym: str | None = None
    """Instead of `data` and `rewards`: a Reasoning Gym data set (`chain_sum`), with its scorer."""
    openenv: str | None = None
    """Instead of a factory: the address of an OpenEnv server, `ws://host:port`; `args` may name `field` and `seconds`."""
    harness: str | Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Drives the episodes against the run's endpoint: a function of `base_url` and `row` that returns the reward
    (`file.py:function` or `module:function`), a program with its arguments, or `outside`: processes that fetch episodes."""
    verifiers: str | None = None
    """Instead of `data` and `rewards`: an installed taskset of verifiers by name; `args` is its `[env]`."""
    listen: str = "127.0.0.1:0"
    """Where the endpoint for harnesses listens; port 0 is any.  Beyond the loopback the environment variable GROUPWISE_TOKEN is
    needed, which requests must bring."""
    at_once: Positive = 64
    """Harnesses that run at the same time."""
    max_turns: Positive = 16
    """Turns of the policy in an episode."""
    tool_timeout: Annotated[float, Gt(0.0)] = 30.0
    """Seconds of one tool call, or of one `reset` or `step`."""
    episode_timeout: Annotated[float, Gt(0.0)] = 600.0
    """Seconds of an episode, sampling included; of a harness without its waiting for turns."""
    max_observation_tokens: Positive = 1024
    """Longest answer to a turn, in tokens; a longer one is cut, and says so."""
    max_observation_bytes: Positive = 32768
    """The same in bytes of UTF-8."""
    past: Literal["keep", "split"] = "keep"
    """If the chat template rewrites earlier turns (drops reasoning): `keep` continues behind what was sampled; `split` continues
    behind what the template writes, as at inference, and trains each part behind what it was sampled from."""
    runs: Literal["process", "thread"] | None = None
    """Where tools and environments run: `process` (workers, which can be killed) or `thread` (of the trainer: quicker to call,
    cannot be killed).  null: `process` for names, `thread` for objects."""

    @property
    def talks(self) -> bool:
        """True if tools or an environment answer the policy's turns, called by Groupwise."""
        return bool(self.tools) or self.factory is not None or self.openenv is not None

    @property
    def asks(self) -> bool:
        """True if a harness asks for the policy's turns."""
        return self.harness is not None or self.verifiers is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """A step of reinforcement learning and its loss.

    `objective` names a preset: one row of the algorithm table.  `credit`, `ratio`, `surrogate` and `weights` replace parts of it.
    """

    prompts_per_step: Positive = 16
    """Prompts whose completions make one rollout."""
    group_size: Siblings = 8
    """Completions per prompt (G)."""
    updates_per_rollout: Positive = 1
    """Passes over each rollout (mu in the paper)."""
    minibatches: Positive = 1
    """Optimizer steps per pass: the prompts are cut into this many parts."""
    beta: Annotated[float, Ge(0.0)] | None = None
    """Weight of the KL to the reference; 0: no reference is loaded.  Default: the preset's (0 for most)."""
    kl: Literal["k1", "k2", "k3", "k3_ratio"] | None = None
    """KL estimator in the loss.  Default: the preset's (k3)."""
    credit: Part | None = None
    """Rewards -> advantages.  Default: the preset's."""
    ratio: Part | None = None
    """Level of the importance ratio.  Default: the preset's."""
    surrogate: Part | None = None
    """Per-token policy loss.  Default: the preset's."""
    weights: Part | None = None
    """Normalisation.  Default: the preset's."""
    divergence: Part | None = None
    """Distance of the policy's next token from the teacher's, added to the loss: jsd (`beta` 0: KL(teacher || policy), 1, the
    default: KL(policy || teacher), and between; `top_k`: over the policy's likeliest tokens and one for the rest).  Default: the
    preset's, if it has one."""
    mix: Share | None = None
    """Share of the teacher in the distribution that is sampled from.  Default: the preset's (0 for most)."""
    dead_groups: Literal["exact", "drop", "refill"] | None = None
    """Groups without reward differences: `exact` (skipped, counted in the denominators), `drop` (not counted), `refill` (replaced
    by further prompts until the step is full).  Default: the preset's."""
    filter: Part | None = None
    """Which groups `dead_groups: refill` keeps: your `file.py:function`, from a scored group to true or false.  Default: those
    whose rewards differ."""
    max_refills: Positive = 4
    """`refill` gives up after this many times `prompts_per_step` further prompts."""
    truncated: Literal["keep", "mask"] | None = None
    """Completions that hit the length limit: trained, or left out of the loss.  Default: the preset's."""
    entropy_bonus: float = 0.0
    """Coefficient of the mean token entropy, subtracted from the loss; with `entropy_target` the most that it may become."""
    entropy_target: Annotated[float, Gt(0.0)] | None = None
    """Adaptive bonus (2505.22312): at an optimizer step whose sampled entropy is at most this many nats, the coefficient (0 at
    first) rises by `entropy_step` and is applied; at any other it falls by it and is not."""
    entropy_step: Annotated[float, Gt(0.0)] = 0.005
    """How far that coefficient moves."""
    entropy_quantile: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0
    """Train only tokens whose entropy is at or above this quantile (2506.01939 uses 0.8)."""
    off_policy_delta: Annotated[float, Gt(0.0)] | None = None
    """Drop completions with negative advantage whose mean log-ratio to the sampler exceeds it (nats; 2512.02556)."""
    reference_refresh: Count = 0
    """Steps after which the reference moves to the policy, again and again; 0: never."""
    reference_mix: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Share of the policy in a refreshed reference (TR-DPO's alpha)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings:
    """The value function of `ppo`, or of any other preset with `group.credit: gae`."""

    path: str | None = None
    """A separate backbone: a checkpoint, a reward model (its head is continued), or `stage:NAME`.  null: a new head on the policy's
    backbone, which learns from both losses."""
    lr: Annotated[float, Gt(0.0), Lt(1.0)] | None = None
    """Peak learning rate; all else is as in `optimizer`.  Default: 5e-3 for a new head on the policy, 1e-5 for a separate
    backbone."""
    coefficient: Annotated[float, Gt(0.0)] = 0.1
    """Weight of the value loss."""
    clip: Annotated[float, Gt(0.0)] | None = 0.2
    """How far a value may move from what it was when the rollout was scored; null: any distance."""
    pretrain: Count = 0
    """First steps, in which only the critic is trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationSettings:
    """Demonstrations that are mixed into every optimizer step, with the columns of `data`."""

    path: str
    """A JSONL, JSON or Parquet file, or a hub name."""
    rows: Positive = 8
    """Demonstrations per optimizer step."""
    lm: Annotated[float, Ge(0.0)] = 1.0
    """Weight of their language-model loss."""
    divergence: Annotated[float, Ge(0.0)] = 0.0
    """Weight of the distance from the teacher on them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSettings:
    """Who teaches (`distill`, `distill_sampled`, `minillm`, or any other preset with `group.divergence`)."""

    path: str | None = None
    """A checkpoint with the policy's vocabulary, or `stage:NAME`.  null: the policy itself, as it was before its first step."""
    servers: tuple[str, ...] = ()
    """Instead of a checkpoint: `http://host:port` of vLLM servers of a model with the policy's vocabulary.  They give log-probs of
    the drawn tokens, at temperature 1, which is enough for distill_sampled."""
    ema: Fraction = 0.0
    """If the policy teaches itself: share of the policy that moves into the teacher after every step; 1: the teacher is the
    policy."""
    hint: str | None = None
    """What only the teacher reads, before the prompt: a Python format string over the row's columns, e.g. `Answer: {answer}\n`, or
    a text for all rows.  A row without one of the columns gets no hint."""
    demonstrations: DemonstrationSettings | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW, its schedule, and how a step is cut into micro-batches."""

    lr: Annotated[float, Gt(0.0), Lt(1.0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a share of `lr`."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    betas: tuple[Annotated[float, Ge(0.0), Lt(1.0)], Annotated[float, Ge(0.0), Lt(1.0)]] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    eps: Annotated[float, Gt(0.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Ge(0.0)] = 0.0
    """Decoupled weight decay of matrices; vectors are not decayed."""
    clip_norm: Annotated[float, Gt(0.0)] | None = 1.0
    """Gradient norm above which the gradient is scaled down; null: never."""
    tokens_per_microbatch: Positive | None = None
    """Packed positions per forward and backward pass.  It changes memory and speed, never the update.  null: from the model's size,
    so that activations stay in proportion to weights, gradients and moments (see the plan)."""
    max_nonfinite_steps: Positive = 5
    """Steps in a row with a loss or gradient that is not finite, each skipped, after which the run stops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Evaluation on held-out prompts, inside and outside training."""

    every: Count = 0
    """Evaluate every this many steps; 0: only before the first and after the last."""
    at_start: bool = True
    """Evaluate before the first step."""
    prompts: Positive | None = None
    """Use the first held-out prompts only while training; default: all."""
    k: Siblings = 8
    """Sampled completions per prompt, for pass@k and sampled accuracy."""
    temperature: Annotated[float, Gt(0.0)] = 1.0
    """Temperature of those samples."""
    max_new_tokens: Positive | None = None
    """Longest completion; default: `rollout.max_new_tokens`."""
    batches: Positive | None = None
    """Data-set objectives: evaluate over at most this many batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSettings:
    """Checkpoints and the log."""

    every: Count = 50
    """Checkpoint every this many steps, and after the last; 0: only after the last."""
    keep: Annotated[int, Ge(2)] = 2
    """Newest checkpoints to keep."""
    rollouts_every: Count = 1
    """Write every group of every this many steps to `rollouts/`; 0: never."""
    report_to: tuple[BoardName, ...] = ()
    """Dashboards that get the metrics and, if they have tables, the group of each recorded step whose rewards differ most:
    TensorBoard, Weights & Biases, MLflow, Trackio.  Project and server come from their environment variables (WANDB_PROJECT,
    MLFLOW_TRACKING_URI ...).  metrics.jsonl is always written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Old pairs of `path` or `task`, mixed into training on new ones (DeepSeekMath 2402.03300, Algorithm 1)."""

    path: str | None = None
    """A file of older pairs with the same columns as `data.path`."""
    task: str | None = None
    """Instead of `path`: a task that has pairs: `preferences`, or your own."""
    share: Annotated[float, Gt(0.0), Lt(1.0)] = 0.1
    """Share of older pairs in all that are trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings:
    """`objective: reward`: a Bradley-Terry reward model from pairs."""

    pooling: Literal["last", "mean", "sum"] = "last"
    """The score is read at the completion's last token, or is the mean over its tokens, or their sum divided by 32, in which a word
    counts as much in a long answer as in a short one."""
    centering: Annotated[float, Ge(0.0)] = 0.0
    """Coefficient of (score_chosen + score_rejected)^2."""
    lm_coefficient: Annotated[float, Ge(0.0)] = 0.0
    """Weight of a language-model loss on both completions of a pair, with the same backbone."""
    replay: ReplaySettings | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """`objective: dpo`: policy against reference on pairs."""

    beta: Annotated[float, Gt(0.0)] = 0.1
    """Strength of the tie to the reference."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's logistic loss, or IPO's squared one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSettings:
    """What each of several processes holds (`--nproc`, torchrun).  It does not change what is learnt.  A name alone
    (`parallel: zero3`) means `{name: zero3}`."""

    name: Literal["auto", "ddp", "zero2", "zero3"] = "auto"
    """`ddp`: everything; `zero3`: a part of weights, gradients and optimizer state (FSDP2); `zero2`: the same, but weights stay
    gathered from forward to backward; `auto`: `zero3` from a billion parameters on, else `ddp`."""
    shards: Annotated[int, Ge(2)] | None = None
    """Processes that share one copy (HSDP); default: all of them."""
    offload: bool = False
    """The parts live in host memory."""


BY_NAME = (EngineSettings, ParallelSettings)
"""Sections of which a recipe may say the `name` alone, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run: an objective, a model, data, and how long."""

    objective: Annotated[str, MinLen(1)]
    """A loss on data (`prm`: a process reward model), an online algorithm, or `file.py:NAME`, your own `Algorithm`."""
    name: str = "run"
    """The run folder is `runs`/`name`."""
    runs: str = "runs"
    """Folder of run folders."""
    seed: Seed = 0
    """Of weights from scratch, data order and sampling."""
    threads: Annotated[int, Gt(0), Le(1024)] | None = None
    """CPU threads of torch; default: OMP_NUM_THREADS, else one for a model of less than a million parameters, else torch's
    choice."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    steps: Positive | None = None
    """Optimizer steps for data-set objectives, rollouts for online ones."""
    epochs: Annotated[float, Gt(0.0)] | None = None
    """Instead of `steps`: passes over the data."""
    batch_size: Positive = 32
    """Rows per optimizer step of a data-set objective.  Online ones use `group.prompts_per_step`."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    rewards: tuple[RewardSettings, ...] = ()
    verdict: str | None = None
    """Name of the reward whose 1 says that a completion is right, for accuracies, pass@k, solved groups and `data.retire`.
    Default: the first built-in accuracy, exact or number.  Without one, evaluations report rewards alone."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    group: GroupSettings = field(default_factory=GroupSettings)
    reward_model: RewardModelSettings = field(default_factory=RewardModelSettings)
    pairs: PairSettings = field(default_factory=PairSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    save: SaveSettings = field(default_factory=SaveSettings)


def positions_of(recipe: Recipe) -> int:
    """Positions per forward and backward of a recipe that was `fitted`."""
    size = recipe.optimizer.tokens_per_microbatch
    assert size is not None
    return size
