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
    """Architecture.  Of `qwen3_5` every fourth block, and the last, has attention; the others are gated DeltaNets."""
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
    """`arithmetic` (the project's character tokenizer), `bytes` (256 bytes), `bpe:N` (byte-pair, N tokens, trained on
    the stage's own data), or the path of a tokenizer folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Train a low-rank adapter (peft) and not the weights, which then are the reference.  `final/` holds the merged model,
    `final/adapter/` the adapter alone.  `{}` takes the defaults."""

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
    """A Hugging Face checkpoint folder, a hub name, a GGUF file, a packaged model (`groupwise get`), or `stage:NAME` for the final
    model of an earlier stage."""
    scratch: ScratchSettings | None = None
    """Instead of `path`: start from random weights."""
    dtype: Literal["float32", "bfloat16", "autocast"] = "float32"
    """`float32`; `autocast` (float32 master weights, bfloat16 products); `bfloat16` (bfloat16 weights, float32 optimizer state)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU if there is one."""
    attention: Literal["shared", "packed", "single"] = "shared"
    """How a batch is computed: `shared` (packed, each prompt once per group), `packed` (packed, prompt repeated),
    `single` (one sequence per forward, the model's own attention: for models that cannot be packed)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory; a fifth to a third more compute, with an adapter up to a half."""
    lora: LoraSettings | None = None
    chat_template: str | None = None
    """Replaces the tokenizer's chat template: a Jinja string or the path of a `.jinja` file."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint.  Never implied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Where rows come from and how they become prompts."""

    path: str | None = None
    """A JSONL, JSON or Parquet file, or a hub name.  For pairs also `stage:NAME`: the best and the worst of every group that an
    earlier stage sampled, by its reward, or by one of its reward functions (`stage:NAME:FUNCTION`)."""
    split: str = "train"
    """Split of a hub data set."""
    task: str | None = None
    """Instead of `path`: a built-in task, or one of your own, `file.py:NAME` or `module:NAME`."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Renames columns, ours: yours, e.g. `{prompt: question}`.  A row may lack one, but for those that prompts and answers are
    read from."""
    system: str | None = None
    """System message of every prompt that brings none of its own (chat data)."""
    chat: bool = False
    """Wrap string prompts as user messages and apply the chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for every conversation, `{enable_thinking: false}`; a row's column of the same name goes over
    them.  One that the chat template does not mention is refused."""
    template: str | None = None
    """Python format string that makes the prompt from the row's columns, or `alpaca` for instruction/input rows."""
    limit: Positive | None = None
    """Use only the first rows."""
    control_tokens: ControlTokens = "warn"
    """Text of the tokenizer's special tokens (`<|im_end|>`) in messages that rows bring, other than the assistant's, in their tools
    and in `chat_template_kwargs`: `warn` (encoded as those tokens, counted, said before training), `plain` (encoded as text),
    `drop` (the row is left out), `error`."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt; default: the context less `rollout.max_new_tokens`."""
    too_long: Literal["drop", "truncate_left", "error"] = "drop"
    """What happens to a longer one.  It is counted and reported."""
    retire: Count = 0
    """Online objectives: leave a prompt out for good once so many of its visits in a row were solved (the `verdict` of
    the recipe gave 1 to every completion); 0: never.  When all are left out, all return."""
    curriculum: Fraction = 0.0
    """Online objectives: leave a prompt out of an epoch with this probability times its pass rate, the share of its last group that
    was solved; 0: every epoch visits all."""
    shuffle: bool = True
    """Visit rows in a seeded random order, another one each epoch."""
    eval_path: str | None = None
    """A file or hub name of held-out rows."""
    eval_split: str = "test"
    """Split of a hub data set for evaluation."""
    eval_fraction: Share | Mapping[str, Share] = 0.0
    """Hold out this share of `path` by a hash of the prompt (the same rows whatever the seed).  `{test: 0.2, validation: 0.1}`
    holds out two parts: what is measured while training is measured on `validation`, what is reported at the end on `test`."""
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
    """A built-in function, or one of your own, `module:function` or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor in the sum."""
    name: str | None = None
    """Name in the log; default: the function's."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a built-in, or extra keyword arguments of your own function."""
    timeout: Annotated[float, Gt(0.0)] | None = None
    """Seconds after which a call is stopped and counts as None; more than a tenth of the calls end the run.  Without it a call that
    takes ten minutes (and 10 s for each of its completions) is stopped and ends the run."""


VERDICTS = tuple(name for name, module in REWARDS.items() if module == "accuracy")
"""Built-in reward functions whose 1 says that a completion is right."""


def verdict_of(rewards: Sequence[RewardSettings], named: str | None) -> str | None:
    """The reward that says which completions are right: `verdict` of the recipe, else the first of `VERDICTS`, else none.

    >>> verdict_of([RewardSettings(function="tags"), RewardSettings(function="exact", name="word")], None)
    'word'
    """
    return named or next((one.name or one.function for one in rewards if one.function in VERDICTS), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionSettings:
    """Importance weights `exp(trainer's log-prob - sampler's)` for completions that were sampled with other probabilities than the
    trainer computes: by vLLM, or by weights that are some steps older.  null: no correction."""

    level: Literal["token", "sequence_sum", "sequence_mean"] = "token"
    """A weight per token, or per completion: the product of its tokens' or their geometric mean."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Bound the weight to [low, high], or make it 0 outside."""
    low: Annotated[float, Ge(0.0)] = 0.0
    """Smallest weight."""
    high: Annotated[float, Gt(0.0)] = 2.0
    """Largest weight."""


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
    """`native` (in-process, on the training weights), `transformers` (plain `generate`: slow, the reference), `vllm` (a server that
    the run starts for itself), or `file.py:function`, which makes an engine of your own."""
    servers: tuple[str, ...] = ()
    """vllm: addresses of running servers, e.g. `[http://127.0.0.1:8000]`."""
    colocated: bool = False
    """vllm: in the trainer's process, alternating with training (both need one environment)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """vllm: numbers of a server of its own; default: the policy's products'."""
    ahead: Count = 0
    """Sample for the next so many steps while this one is trained, and so with weights that are up to so many steps older.  Engines
    other than vllm do it synchronously, before each training step, which saves no time."""
    correct: CorrectionSettings | None = field(default_factory=CorrectionSettings)
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
    """Who answers the policy: tools, an environment, a procedural data set.  With tools or an environment completions are
    conversations of several turns, through the chat template; `rollout.max_new_tokens` holds for all turns and answers together."""

    tools: tuple[str, ...] = ()
    """Functions that the policy may call: `file.py:function` or `module:function`, with type hints and a docstring whose `Args:`
    describe every parameter, plain or `async`."""
    factory: str | Mapping[str, str] | None = None
    """Makes an environment per episode: `file.py:Class` or `module:Class`, in TRL's form (`reset(**row)`, public methods are tools,
    perhaps `get_reward()`) or with `reset` and `step(text) -> (observation, reward, done)`.  A mapping of names to such classes
    is selected from by the data's column `environment`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, or of the procedural data set."""
    interface: Literal["tools", "step"] | None = None
    """How the policy acts on what the factory makes: by calling its methods, or by what it writes.  null: `step` if it has a
    method `step`."""
    reasoning_gym: str | None = None
    """Instead of `data` and `rewards`: a data set of Reasoning Gym by name (`chain_sum`), with its scorer."""
    openenv: str | None = None
    """Instead of a factory: the address of an OpenEnv server, `ws://host:port`; `args` may name `field` and `seconds`."""
    harness: str | Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Drives the episodes itself, against an endpoint of the run's: a function `file.py:function` or `module:function` of
    `base_url` and `row` that returns the reward, a program with its arguments, or `outside`: processes that fetch episodes."""
    verifiers: str | None = None
    """Instead of `data` and `rewards`: an installed taskset of verifiers by name; `args` is its `[env]`."""
    listen: str = "127.0.0.1:0"
    """Where the endpoint for harnesses listens; port 0 is any.  Other than loopback addresses need the environment variable
    GROUPWISE_TOKEN, which requests must bring."""
    at_once: Positive = 64
    """Harnesses that run at the same time."""
    max_turns: Positive = 16
    """Turns of the policy in an episode."""
    tool_timeout: Annotated[float, Gt(0.0)] = 30.0
    """Seconds of one tool call, or of one `reset` or `step`."""
    episode_timeout: Annotated[float, Gt(0.0)] = 600.0
    """Seconds of an episode, sampling included; of a harness its own, without the time in which it waits for a turn."""
    max_observation_tokens: Positive = 1024
    """Longest answer to a turn, in tokens; what is longer is cut, and says so."""
    max_observation_bytes: Positive = 32768
    """The same in bytes of UTF-8."""
    past: Literal["keep", "split"] = "keep"
    """Where the chat template writes earlier turns otherwise once a conversation continues (drops reasoning): `keep` continues what
    was sampled; `split` continues behind what the template writes, as at inference, and trains each part behind what it saw."""
    runs: Literal["process", "thread"] | None = None
    """Where tools and environments run: `process` (worker processes, which can be killed) or `thread` (in the trainer's process,
    which is quicker to call and cannot be).  null: `process` for what is given by name, `thread` for objects."""

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
    """The reinforcement-learning part: how a step is made up and what its loss is.

    `objective` names a preset: one row of the algorithm table.  `credit`, `ratio`, `surrogate` and `weights` replace single
    parts of it.
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
    preset's; any other preset has none."""
    mix: Share | None = None
    """Share of the teacher in the distribution that completions are drawn from.  Default: the preset's (0 for most)."""
    dead_groups: Literal["exact", "drop", "refill"] | None = None
    """Groups without reward differences: `exact` (skipped, still in the denominators), `drop` (leave the denominators),
    `refill` (sample on until the step is full of live groups).  Default: the preset's."""
    filter: Part | None = None
    """Which groups are worth training, for `dead_groups: refill`: `file.py:function` of your own, from a scored group to true or
    false.  Default: those whose rewards differ."""
    max_refills: Positive = 4
    """`refill` gives up after this many times `prompts_per_step` further prompts."""
    truncated: Literal["keep", "mask"] | None = None
    """Completions that hit the length limit: trained, or left out of the loss.  Default: the preset's."""
    entropy_bonus: float = 0.0
    """Coefficient of the mean token entropy, subtracted from the loss; with `entropy_target` the most that it may become."""
    entropy_target: Annotated[float, Gt(0.0)] | None = None
    """Adaptive bonus (2505.22312): at each optimizer step the coefficient, 0 at first, rises by `entropy_step` where the sampled
    entropy is at most this many nats, and falls by it elsewhere; it counts only in steps of the first kind."""
    entropy_step: Annotated[float, Gt(0.0)] = 0.005
    """How far that coefficient moves."""
    entropy_quantile: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0
    """Train only tokens whose entropy is at or above this quantile (2506.01939 uses 0.8)."""
    off_policy_delta: Annotated[float, Gt(0.0)] | None = None
    """Drop completions with negative advantage whose mean log-ratio to the sampler exceeds it (nats; 2512.02556)."""
    reference_refresh: Count = 0
    """Every this many steps the reference moves to the policy; 0: never."""
    reference_mix: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Share of the policy in a refreshed reference (TR-DPO's alpha)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings:
    """The value function of algorithms that train one (`ppo`, or any other with `group.credit: gae`)."""

    path: str | None = None
    """A backbone of its own: a checkpoint, a reward model whose head it continues with, or `stage:NAME`.  null: a new head on the
    policy's backbone, which then learns from both losses."""
    lr: Annotated[float, Gt(0.0), Lt(1.0)] | None = None
    """Peak learning rate of the head, and of a backbone of its own; all else is as in `optimizer`.  Default: 5e-3 for a new head,
    1e-5 for a backbone of its own."""
    coefficient: Annotated[float, Gt(0.0)] = 0.1
    """Weight of the value loss."""
    clip: Annotated[float, Gt(0.0)] | None = 0.2
    """How far a value may move from what it was when the rollout was scored; null: as far as it wants."""
    pretrain: Count = 0
    """Train only the critic in the first so many steps; the policy stays as it is."""


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
    """Instead of a checkpoint: `http://host:port` of vLLM servers (any `vllm serve`) of a model with the policy's vocabulary, which
    are asked for its log-probs of what was drawn, at temperature 1.  For objectives that ask for no more: distill_sampled."""
    ema: Fraction = 0.0
    """Of a policy that is its own teacher: share of the policy that moves into the teacher after every step; 1: it is the
    policy."""
    hint: str | None = None
    """What only the teacher reads, before the prompt: a Python format string over the row's columns, e.g. `Answer: {answer}\n`, or
    a text for all rows, such as examples.  A row that lacks one of the columns, or has nothing there, gets none."""
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
    """Packed positions per forward and backward.  It cannot change the update, only memory and speed.  null: from the model's size,
    so that what is kept for the backward pass stays in proportion to weights, gradients and moments (see the plan)."""
    max_nonfinite_steps: Positive = 5
    """Stop after this many steps in a row whose loss or gradient was not finite (each such step is skipped)."""


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
    """Dashboards that get the metrics too, and where they have tables the group of each recorded step whose rewards differ most:
    TensorBoard (files in the run folder), Weights & Biases, MLflow, Trackio.  Project and server come from their own environment
    variables (WANDB_PROJECT, MLFLOW_TRACKING_URI ...); metrics.jsonl is always written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Continued training on new pairs with older ones mixed in, of `path` or `task` (DeepSeekMath 2402.03300, Algorithm 1)."""

    path: str | None = None
    """A file of older pairs with the same columns as `data.path`."""
    task: str | None = None
    """Instead of `path`: a task that has pairs, as in `data.task`."""
    share: Annotated[float, Gt(0.0), Lt(1.0)] = 0.1
    """Share of older pairs in all that are trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings:
    """`objective: reward`: a Bradley-Terry reward model from pairs."""

    pooling: Literal["last", "mean", "sum"] = "last"
    """The score is read at the completion's last token, or is the mean over its tokens, or their sum over 32: a word that decides
    then counts as much in a long answer as in a short one."""
    centering: Annotated[float, Ge(0.0)] = 0.0
    """Coefficient of (score_chosen + score_rejected)^2."""
    lm_coefficient: Annotated[float, Ge(0.0)] = 0.0
    """Weight of the language-model loss on both completions of a pair, which shares the backbone: what makes a side worse must be
    known too."""
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
    """What each of several processes holds (`--nproc`, torchrun).  Neither this nor their number changes what is learnt.  A name
    alone (`parallel: zero3`) means `{name: zero3}`."""

    name: Literal["auto", "ddp", "zero2", "zero3"] = "auto"
    """`ddp` everything; `zero3` a part of weights, gradients and optimizer state (FSDP2); `zero2` the same, but weights stay
    gathered from forward to backward; `auto` takes `zero3` from a billion parameters on."""
    shards: Annotated[int, Ge(2)] | None = None
    """So many processes share a copy, of which there are several (HSDP); default: one copy."""
    offload: bool = False
    """The parts live in host memory."""


BY_NAME = (EngineSettings, ParallelSettings)
"""Sections of which a recipe may say the `name` alone, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run: an objective, a model, data, and how long."""

    objective: Annotated[str, MinLen(1)]
    """What is trained on a data set (`prm`: a process reward model), an online algorithm, or `file.py:NAME`, an `Algorithm` of your
    own."""
    name: str = "run"
    """The run folder is `runs`/`name`."""
    runs: str = "runs"
    """Folder of run folders."""
    seed: Seed = 0
    """Of weights from scratch, data order and sampling."""
    threads: Annotated[int, Gt(0), Le(1024)] | None = None
    """CPU threads of torch; default: what OMP_NUM_THREADS says, else one for a model of less than a million parameters, else what
    torch chooses."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    steps: Positive | None = None
    """Optimizer steps for data-set objectives, rollouts for online ones."""
    epochs: Annotated[float, Gt(0.0)] | None = None
    """Instead of `steps`: passes over the data."""
    batch_size: Positive = 32
    """Rows (demonstrations or pairs) per optimizer step of a data-set objective.  Online ones use `group.prompts_per_step`."""
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    rewards: tuple[RewardSettings, ...] = ()
    verdict: str | None = None
    """Name of the reward whose 1 says that a completion is right: accuracies, pass@k, solved groups and `data.retire` go by it.
    Default: the first reward that is the built-in accuracy, exact or number; without one, evaluations report rewards alone."""
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
