"""Every setting of a recipe, with its meaning, default and range: the one place to read them.

Plain frozen dataclasses; importing this file imports neither torch nor transformers, so that a
recipe is checked, explained and refused in a fraction of a second.  `recipes.py` turns YAML and
dotted overrides into a `Recipe` and back; the components take the sections they need.  The text
below a field is its documentation: `groupwise config KEY` prints it.

The number of settings is kept small on purpose.  Batch sizes are said in prompts and completions
per prompt; everything else (completions, updates, epochs, micro-batches) is derived and printed as
a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from groupwise.algorithms.losses import Correction
from groupwise.utils.built_in import built_ins

Positive = Annotated[int, Gt(0)]
Count = Annotated[int, Ge(0)]
Siblings = Annotated[int, Gt(0), Le(1_000_000)]
"""Completions of one prompt, which exist at the same time."""
Name = Annotated[str, MinLen(1)]
Seed = Annotated[int, Ge(0), Lt(1 << 63)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]
Share = Annotated[float, Ge(0.0), Lt(1.0)]
Part = str | Mapping[str, Any]
"""A function by name, or a mapping with `name` and its keyword arguments: `{name: clipped, low:
0.2, high: 0.28}`. `file.py:function` or `module:function` names one of your own."""

REWARDS = built_ins("rewards")
"""Built-in reward functions, each with its place."""
TASKS = built_ins("data.tasks")
"""Built-in generated tasks."""
DATA_SUFFIXES = tuple(built_ins("data.sources"))
"""Endings of files of rows."""
FACTORIES = built_ins("environments")
"""Built-in environments."""

BoardName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Where metrics may be sent, by the name of the package that does it, which is also the name of
Groupwise's extra.
"""
ControlTokens = Literal["warn", "plain", "drop", "error"]
"""What becomes of control tokens in the text of messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScratchSettings:
    """A small model with random weights, for tasks that need no pretrained one."""

    family: Literal[
        "llama", "qwen2", "qwen3", "qwen3_5", "qwen3_vl", "gpt2", "gemma2", "mixtral"
    ] = "llama"
    """Architecture.  `qwen3_5` has attention in every fourth block and in the last, gated DeltaNets
    in the others.  `qwen3_vl` reads images: its encoder has one block of the same width, which
    keeps its random weights.
    """
    hidden: Positive = 128
    """Width of the residual stream."""
    layers: Positive = 2
    """Number of blocks."""
    heads: Positive = 4
    """Attention heads, a divisor of `hidden`.  Each has keys and values of its own."""
    context: Positive = 512
    """Longest sequence of prompt and completion."""
    tokenizer: str = "arithmetic"
    """`arithmetic` (characters), `bytes`, `bpe:N` (N tokens, trained on the stage's data), or a
    tokenizer folder.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """Train a low-rank adapter (peft).  The frozen weights are the reference.  `final/` holds the
    merged model, `final/adapter/` the adapter.  `{}` uses the defaults."""

    rank: Positive = 16
    """Columns of the adapter's two factors."""
    alpha: Annotated[float, Gt(0.0)] = 32.0
    """The adapter's product is multiplied by `alpha / rank`."""
    rslora: bool = False
    """Multiply by `alpha / sqrt(rank)` instead (rsLoRA)."""
    dropout: Share = 0.0
    """Share of the numbers that an adapter's layers do not read, drawn anew in every update.
    Sampling, the reference and evaluations have no dropout.
    """
    targets: Name | Annotated[tuple[Name, ...], MinLen(1)] = "all-linear"
    """`all-linear` (all linear layers except the output head), a list of layer names, or a regular
    expression for whole names such as `model.layers.0.self_attn.q_proj`.
    """
    layers: tuple[Count, ...] = ()
    """Numbers of the blocks that get an adapter, from 0.  Default: all."""
    rank_pattern: Mapping[str, Positive] = field(default_factory=dict)
    """Other ranks, by layer names or regular expressions for their ends."""
    alpha_pattern: Mapping[str, Annotated[float, Gt(0.0)]] = field(default_factory=dict)
    """Other alphas, by layer names or regular expressions for their ends."""
    modules_to_save: tuple[Name, ...] = ()
    """Embeddings and linear layers that are trained whole, beside their originals, e.g.
    `[embed_tokens, lm_head]`.  Where embedding and head are one matrix, they become two.
    """
    start: str | None = None
    """An adapter of the same form to go on with, on the same base: a folder in peft's format, a
    folder of a run's merged model (`final/`), beside which its adapter lies, or `stage:NAME`.  The
    reference is still the base without it.  null: a new adapter, which changes nothing at first.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """The policy: its source and its precision."""

    path: str | None = None
    """A Hugging Face checkpoint folder, a hub name, a GGUF file, a packaged model (`groupwise
    get`), or `stage:NAME`, the final model of an earlier stage."""
    scratch: ScratchSettings | None = None
    """Instead of `path`: a model with random weights."""
    dtype: Literal["float32", "bfloat16", "autocast"] = "float32"
    """`float32`; `autocast` (float32 master weights, bfloat16 products); `bfloat16` (bfloat16
    weights, float32 optimizer state).
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses a GPU if there is one."""
    attention: Literal["shared", "packed", "single"] = "shared"
    """`shared`: packed batches, each prompt once per group; `packed`: packed batches with repeated
    prompts; `single`: one sequence per forward pass, for models that cannot be packed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory.  An update takes 12 to 20% longer,
    with an adapter up to 50%.
    """
    compile: Literal["auto", "on", "off"] = "off"
    """Run the blocks of updates as torch.compile makes them: `on` compiles or ends with the reason;
    `auto` compiles where that equals the model's own pass and was measured to be faster, which
    takes minutes when the run starts; `off` runs the library's fused blocks."""
    lora: LoraSettings | None = None
    quantize: Literal["nf4", "int8"] | None = None
    """Hold the linear layers under an adapter in 4 (`nf4`, QLoRA) or 8 bits a number.  nf4 needs
    the package bitsandbytes."""
    fp8: Literal["rowwise", "rowwise_with_gw_hp"] | None = None
    """Multiply the linear layers of the blocks in FP8 in updates and scores, by one of torchao's
    recipes (`rowwise_with_gw_hp`: but for the gradients of weights).  It needs the package torchao.
    Weights, sampling and checkpoints stay as they are."""
    chat_template: str | None = None
    """A Jinja string or a `.jinja` file that replaces the tokenizer's chat template."""
    trust_remote_code: bool = False
    """Run the Python code of a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """Rows, and how they become prompts."""

    path: str | None = None
    """A JSONL, JSON or Parquet file, or a hub name.  For pairs also `stage:NAME`: the best and the
    worst completion of every group of an earlier stage, by its combined reward or by one reward
    function (`stage:NAME:FUNCTION`)."""
    split: str = "train"
    """Split of a hub data set."""
    task: str | None = None
    """Instead of `path`: a built-in task, or your own (`file.py:NAME`, `module:NAME`)."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Renames columns: `{prompt: question}` reads the prompt from the column `question`.  A row may
    lack columns that its prompt and its answer do not need."""
    system: str | None = None
    """System message of chat prompts without one."""
    chat: bool = False
    """Make string prompts user messages and apply the chat template."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, `{enable_thinking: false}`.  A row's column of that name
    overrides them.  A variable that the template does not use is refused."""
    template: str | None = None
    """Python format string that builds the prompt from the row's columns, or `alpaca` for
    instruction/input rows.
    """
    limit: Positive | None = None
    """Use only the first rows."""
    control_tokens: ControlTokens = "warn"
    """Special tokens (`<|im_end|>`) as text in a row's messages (except the assistant's), tools or
    `chat_template_kwargs`: `warn` encodes them as tokens, counts and reports them; `plain` encodes
    them as text; `drop` skips the row; `error` refuses the data."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt; default: the context minus `rollout.max_new_tokens`."""
    max_tokens: Positive | None = None
    """Longest row (prompt and completion) of a data-set objective; default and maximum: the
    context.
    """
    too_long: Literal["drop", "truncate_left", "error"] = "drop"
    """Longer prompts and rows: `drop` skips them, `truncate_left` cuts the prompt's beginning,
    `error` refuses the data.  The plan counts them."""
    retire: Count = 0
    """Online objectives: remove a prompt after this many consecutive solved groups (every
    completion right by `verdict`); 0: never.  When all prompts are removed, all return."""
    curriculum: Fraction = 0.0
    """Online objectives: skip a prompt in an epoch with this probability times the pass rate of its
    last group.
    """
    shuffle: bool = True
    """Visit rows in a new seeded random order each epoch."""
    eval_path: str | None = None
    """File or hub name of held-out rows."""
    eval_split: str = "test"
    """Split of a hub data set for evaluation."""
    eval_fraction: Share | Mapping[str, Share] = 0.0
    """Hold out this share of `path` by a hash of the prompt.  `{test: 0.2, validation: 0.1}` holds
    out two parts: evaluations during training use `validation`, at the end `test`."""
    eval_limit: Positive | None = None
    """Evaluate on the first rows only."""
    train_on: Literal["completion", "all"] = "completion"
    """Tokens that SFT trains: the completion, or the prompt too."""

    @property
    def parts(self) -> dict[str, float]:
        """The held-out shares by name, `test` first: it keeps its rows whatever `validation` is.
        Empty if nothing is held out.

        >>> DataSettings(eval_fraction=0.2).parts
        {'test': 0.2}
        >>> DataSettings(eval_fraction={"validation": 0.1, "test": 0.2}).parts
        {'test': 0.2, 'validation': 0.1}
        """
        shares = (
            self.eval_fraction
            if isinstance(self.eval_fraction, Mapping)
            else {"test": self.eval_fraction}
        )
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
    """Seconds after which a call is stopped and counts as None.  If more than a tenth of the calls
    are stopped, the run ends.
    null: a call of more than ten minutes, or 10 s per completion if that is more, ends the run."""


VERDICTS = tuple(
    name for name, place in REWARDS.items() if place.startswith("groupwise.rewards.accuracy:")
)
"""Built-in reward functions whose 1 says that a completion is right."""


def verdict_of(rewards: Sequence[RewardSettings], named: str | None) -> str | None:
    """The reward that says which completions are right: `verdict` of the recipe, else the first of
    `VERDICTS`, else none.

    >>> tags, exact = RewardSettings(function="tags"), RewardSettings(function="exact", name="word")
    >>> verdict_of([tags, exact], None)
    'word'
    """
    return named or next(
        (one.name or one.function for one in rewards if one.function in VERDICTS), None
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTraits:
    """What a recipe's other settings must know of a rollout engine.  The defaults are those of an
    engine of one's own.
    """

    own_weights: bool = False
    """Samples with the very weights that are trained: unless it is ahead of them, there is nothing
    to correct.
    """
    packed: bool = False
    """Computes packed streams only."""
    prepares: bool = False
    """Decodes with a copy of the weights that is laid out for it."""
    beside: bool = False
    """Samples while training goes on."""
    sends_images: bool = False
    """Sends a prompt's images beside its ids, where its family has as many embeddings as the size
    of an image asks."""
    takes: tuple[str, ...] = ()
    """Keys of `rollout.engine` that are for it alone."""


ENGINE_TRAITS: Mapping[str, EngineTraits] = {
    "native": EngineTraits(own_weights=True, packed=True, prepares=True),
    "transformers": EngineTraits(own_weights=True),
    "vllm": EngineTraits(
        beside=True,
        sends_images=True,
        takes=(
            "servers",
            "patience",
            "colocated",
            "tensor_parallel",
            "dtype",
            "weights_folder",
            "full_every",
        ),
    ),
}
"""Built-in rollout engines; `runs/engines.py` makes them (a test compares the names)."""


def engine_traits(name: str) -> EngineTraits:
    """Return the traits of a built-in engine, or of `module:function`."""
    return ENGINE_TRAITS.get(name, EngineTraits())


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """The sampler.  `engine: vllm` is short for `{name: vllm}`."""

    name: Name = "native"
    """`native` (in the trainer's process), `transformers` (`generate`, slow), `vllm` (a server that
    the run starts), or `file.py:function`, which makes your own engine."""
    servers: str | Mapping[str, str] | tuple[str, ...] = ()
    """vllm: running servers: addresses, `[http://a:8000]`; a file with one a line, which is read
    again; or `{router: http://a:8080}`, a vllm-router."""
    patience: Annotated[float, Gt(0.0)] = 300.0
    """vllm: seconds without any running server after which the run ends."""
    colocated: bool = False
    """vllm: sample in the trainer's processes, in turn with training, in the same environment."""
    tensor_parallel: Positive = 1
    """vllm, colocated: trainer processes that hold one vLLM together."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """vllm: dtype of a server that the run starts; default: the dtype of the policy's products."""
    weights_folder: str | None = None
    """vllm: a folder that the trainer and the servers share under this path, for new weights;
    default: servers fetch them from the trainer by HTTP."""
    full_every: Positive = 10
    """vllm: versions of the weights from one that is written whole to the next; between them only
    changes are written."""
    ahead: Count = 0
    """Steps by which sampling is ahead of training: sampled tokens are at most this many steps old.
    vllm samples while the trainer trains.  Other engines sample before each step and save no time.
    """
    correct: Correction | None = field(default_factory=Correction)
    """Importance weights `exp(trainer's log-prob - sampler's)` for completions of vLLM or older
    weights. null: none.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How completions are sampled in training."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    temperature: Annotated[float, Ge(0.01)] = 1.0
    """Divisor of the logits in sampling and scoring."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Keep the smallest set of most likely tokens with at least this total probability."""
    min_p: Fraction = 0.0
    """Keep tokens at least this fraction as likely as the most likely one."""
    max_new_tokens: Positive = 256
    """Longest completion in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    max_rows: Positive = 256
    """Completions decoded at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """Tools, an environment, or a procedural data set.  With tools or an environment a completion
    is a conversation; `rollout.max_new_tokens` limits all its turns and answers together."""

    tools: tuple[str, ...] = ()
    """Functions that the policy can call, plain or `async`: `file.py:function` or
    `module:function`, with type hints and a docstring that describes every parameter under `Args:`.
    `python` and `shell` are built in, and run in a sandbox.
    """
    sandbox: Mapping[str, Any] = field(default_factory=dict)
    """Limits on a call of `python` or `shell`: `seconds`, `cpu_seconds`, `memory_mb`, `disk_mb`,
    `output_kb`, `processes`; and the `isolation` that they run in.  The same, without `seconds`, of
    an agent with all that it starts."""
    factory: str | Mapping[str, str] | None = None
    """Makes an environment per episode: a built-in one, `file.py:Class` or `module:Class`, in TRL's
    form (`reset(**row)`, public methods as tools, optional `get_reward()`) or, where it has a
    method `step`, with `reset` and `step(text) -> (observation, reward, done)`.  With a mapping
    of names to classes the row's column `environment` selects one."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory, of the procedural data set or of the agent."""
    reasoning_gym: Name | None = None
    """Instead of `data` and `rewards`: a Reasoning Gym data set (`chain_sum`) with its scorer."""
    openenv: Name | None = None
    """Instead of `factory: openenv` with `args: {url: ...}`: the address of an OpenEnv server,
    `ws://host:port`; `args` may name `field` and `seconds`."""
    harness: str | Annotated[tuple[str, ...], MinLen(1)] | None = None
    """Runs an episode with the run's endpoint: a function of `base_url` and `row` that returns the
    reward (`file.py:function` or `module:function`), a program with its arguments, or `outside`:
    processes that fetch episodes."""
    agent: Literal["claude-code", "codex", "mini-swe", "opencode"] | None = None
    """Runs an episode with an installed agent, in a sandbox that reaches the run's endpoint alone.
    `args`: `program`, `prompt` (a column), `system`, `flags`, `variables`; of Claude Code and
    OpenCode `tools`, of mini-swe-agent `light`.  The row's `files` are its working folder."""
    verifiers: Name | None = None
    """Instead of `data` and `rewards`: an installed taskset of verifiers by name; `args` is its
    `[env]`.
    """
    listen: str = "127.0.0.1:0"
    """Address of the endpoint for harnesses; port 0 is any free port.  Other addresses than the
    loopback need the environment variable GROUPWISE_TOKEN, which requests must send."""
    at_once: Positive = 64
    """Harnesses that run at the same time."""
    side_calls: str = "without_tools"
    """Conversations of a harness that are served and not trained.  `without_tools`: those without
    tools in an episode in which another has tools (a title, a summary); `none`; or a function of
    `messages` and `tools` that returns true for one (`file.py:function` or `module:function`)."""
    max_turns: Positive = 16
    """Turns of the policy in an episode."""
    tool_timeout: Annotated[float, Gt(0.0)] = 30.0
    """Seconds of a tool call, `reset` or `step`."""
    episode_timeout: Annotated[float, Gt(0.0)] = 600.0
    """Seconds of an episode, without sampling."""
    max_observation_tokens: Positive = 1024
    """Longest answer to a turn, in tokens; longer ones are cut with a note."""
    max_observation_bytes: Positive = 32768
    """The same in bytes of UTF-8."""
    past: Literal["keep", "split"] = "keep"
    """If the chat template rewrites earlier turns (drops reasoning): `keep` continues after the
    sampled tokens; `split` continues after the template's version, as at inference, and trains each
    part with the context that it was sampled from."""
    runs: Literal["process", "thread"] | None = None
    """Tools and environments run in a worker `process`, which can be killed, or in a `thread` of
    the trainer, which is faster to call. null: `process` for names, `thread` for objects."""

    def named(self, keys: Sequence[str]) -> list[str]:
        """Return the ones of these keys that a recipe sets."""
        return [key for key in keys if getattr(self, key) not in (None, ())]

    @property
    def talks(self) -> bool:
        """True if tools or an environment answer the policy's turns, called by Groupwise."""
        return bool(self.named(ANSWERING))

    @property
    def asks(self) -> bool:
        """True if a harness asks for the policy's turns."""
        return bool(self.named(ASKING))


ANSWERING = ("tools", "factory", "openenv")
"""Keys of `environment` that name what Groupwise calls with the policy's turns."""
ASKING = ("harness", "agent", "verifiers")
"""Keys of `environment` that name what asks for the policy's turns."""
OWNERS = ("factory", "reasoning_gym", "openenv", *ASKING)
"""Keys of `environment` that name what takes `args` and gives rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """A step of reinforcement learning and its loss.

    `objective` names a preset: one row of the algorithm table.  `credit`, `ratio`, `surrogate` and
    `weights` replace parts of it."""

    prompts_per_step: Positive = 16
    """Prompts of one rollout."""
    group_size: Siblings = 8
    """Completions per prompt (G)."""
    updates_per_rollout: Positive = 1
    """Passes over each rollout (mu in the paper)."""
    minibatches: Positive = 1
    """Optimizer steps per pass, each with an equal part of the prompts."""
    beta: Annotated[float, Ge(0.0)] | None = None
    """Weight of the KL to the reference; 0 needs no reference.  Default: the preset's (0 for most).
    """
    kl: Literal["k1", "k2", "k3", "k3_ratio"] | None = None
    """KL estimator in the loss.  Default: the preset's (k3)."""
    credit: Part | None = None
    """Rewards -> advantages.  Default: the preset's."""
    ratio: Part | None = None
    """Level of the importance ratio.  Default: the preset's."""
    surrogate: Part | None = None
    """Policy loss per token.  Default: the preset's."""
    weights: Part | None = None
    """Normalisation.  Default: the preset's."""
    divergence: Part | None = None
    """Distance between the next-token distributions of policy and teacher, added to the loss. jsd
    with `beta` 0 is KL(teacher || policy), with 1, the default, KL(policy || teacher).  `top_k`
    uses the policy's most likely tokens and one bucket for the rest.  Default: the preset's, if it
    has one."""
    dead_groups: Literal["exact", "drop", "refill"] | None = None
    """Groups with equal rewards: `exact` (counted in the denominators), `drop` (not counted),
    `refill` (replaced by groups of other prompts, at most 4 times `prompts_per_step` in a step).
    Default: the preset's."""
    truncated: Literal["keep", "mask"] | None = None
    """Train truncated completions, or mask them in the loss.  Default: the preset's."""
    entropy_bonus: float = 0.0
    """Coefficient of the mean token entropy, subtracted from the loss; with `entropy_target` its
    maximum.
    """
    entropy_target: Annotated[float, Gt(0.0)] | None = None
    """Adaptive entropy bonus (2505.22312), in nats.  If the sampled entropy of an optimizer step is
    at or below it, the coefficient (0 at first) rises by `entropy_step` and is applied.  Otherwise
    it falls by `entropy_step` and is not applied."""
    entropy_step: Annotated[float, Gt(0.0)] = 0.005
    """Change of that coefficient per optimizer step."""
    entropy_quantile: Annotated[float, Ge(0.0), Lt(1.0)] = 0.0
    """Train only tokens whose entropy is at or above this quantile (2506.01939 uses 0.8)."""
    off_policy_delta: Annotated[float, Gt(0.0)] | None = None
    """Drop completions with negative advantage if their mean log-ratio to the sampler exceeds this
    many nats (2512.02556).
    """
    reference_refresh: Count = 0
    """Move the reference to the policy every this many steps; 0: never."""
    reference_mix: Annotated[float, Gt(0.0), Le(1.0)] = 1.0
    """Share of the policy in a refreshed reference (TR-DPO's alpha)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSettings:
    """The value function of `ppo`, or of any other preset with `group.credit: gae`.  Its loss has
    the weight 0.1, and the updates of a step move a value by at most 0.2."""

    path: str | None = None
    """A separate backbone: a checkpoint, a reward model (with its head), or `stage:NAME`. null: a
    new head on the policy's backbone, which both losses train."""
    lr: Annotated[float, Gt(0.0), Lt(1.0)] | None = None
    """Peak learning rate.  Other settings are those of `optimizer`.  Default: 5e-3 for a new head
    on the policy, 1e-5 for a separate backbone."""
    pretrain: Count = 0
    """First steps that train only the critic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherSettings:
    """The teacher of `distill`, `distill_sampled`, `minillm`, or any other preset with
    `group.divergence`.
    """

    path: str | None = None
    """A checkpoint with the policy's vocabulary, or `stage:NAME`.  null: the policy before its
    first step, which then needs a `hint`.
    """
    servers: tuple[str, ...] = ()
    """Instead of `path`: `http://host:port` of vLLM servers of a model with the policy's
    vocabulary.  They return log-probs of sampled tokens at temperature 1, which is enough for
    distill_sampled."""
    hint: str | None = None
    """Text before the prompt for the teacher only: a Python format string over the row's columns,
    e.g. `Answer: {answer}\n`, or one text for all rows.  A row without one of the columns gets no
    hint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW, its schedule, and the size of micro-batches.  A step whose loss or gradient is not
    finite is skipped; the fifth in a row ends the run."""

    lr: Annotated[float, Gt(0.0), Lt(1.0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Last learning rate of linear and cosine, as a share of `lr`."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    betas: tuple[Annotated[float, Ge(0.0), Lt(1.0)], Annotated[float, Ge(0.0), Lt(1.0)]] = (
        0.9,
        0.999,
    )
    """Decay rates of AdamW's moments."""
    eps: Annotated[float, Gt(0.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Ge(0.0)] = 0.0
    """Decoupled weight decay, of matrices only."""
    clip_norm: Annotated[float, Gt(0.0)] | None = 1.0
    """Largest gradient norm; null: no clipping."""
    state: Literal["8bit", "host"] | None = None
    """AdamW's moments between two steps: `8bit`, in 8 bits a number (needs the package
    bitsandbytes); `host`, in the memory of a GPU's host. null: in float32 beside the weights."""
    tokens_per_microbatch: Positive | None = None
    """Packed positions per forward and backward pass.  It changes memory and speed, not the update.
    null: in proportion to the model's size; on a GPU 16,384, or what its memory holds (see the
    plan)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Evaluation on held-out prompts."""

    every: Count = 0
    """Evaluate every this many steps; 0: only before the first and after the last step."""
    at_start: bool = True
    """Evaluate before the first step."""
    prompts: Positive | None = None
    """Number of held-out prompts during training; default: all."""
    k: Siblings = 8
    """Sampled completions per prompt at temperature 1, for pass@k and sampled accuracy."""
    max_new_tokens: Positive | None = None
    """Longest completion; default: `rollout.max_new_tokens`."""
    batches: Positive | None = None
    """Data-set objectives: evaluate over at most this many batches."""
    best: str | None = None
    """Export the model of the best evaluation, by this held-out figure: `greedy`, `sampled`,
    `reward`, `loss` or another NAME of the log's `eval/NAME`.  Losses are minimised.  null: the
    last model."""
    stop_after: Positive | None = None
    """End the run after this many evaluations without a better `best`; null: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSettings:
    """Checkpoints and the log."""

    every: Count = 50
    """Checkpoint every this many steps and after the last; 0: only after the last."""
    keep: Annotated[int, Ge(2)] = 2
    """Number of newest checkpoints to keep."""
    rollouts_every: Count = 1
    """Record the completions of every this many steps in `rollouts/`; 0: never."""
    report_to: tuple[BoardName, ...] = ()
    """Dashboards: TensorBoard, Weights & Biases, MLflow, Trackio.  They read project and server
    from their environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI ...). metrics.jsonl is
    always written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySettings:
    """Old pairs of `path` or `task`, mixed into training on new ones (DeepSeekMath 2402.03300,
    Algorithm 1).
    """

    path: str | None = None
    """A file of older pairs with the same columns as `data.path`."""
    task: str | None = None
    """Instead of `path`: a task that has pairs: `preferences`, or your own."""
    share: Annotated[float, Gt(0.0), Lt(1.0)] = 0.1
    """Share of older pairs in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardModelSettings:
    """`objective: reward`: a Bradley-Terry reward model from pairs."""

    pooling: Literal["last", "mean", "sum"] = "last"
    """The score of a completion: the number at its last token, the mean over its tokens, or their
    sum divided by 32.
    """
    centering: Annotated[float, Ge(0.0)] = 0.0
    """Coefficient of (score_chosen + score_rejected)^2."""
    lm_coefficient: Annotated[float, Ge(0.0)] = 0.0
    """Weight of a language-model loss on both completions of a pair, with the same backbone."""
    replay: ReplaySettings | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """`objective: dpo`: policy against reference on pairs."""

    beta: Annotated[float, Gt(0.0)] = 0.1
    """Weight of the KL to the reference (beta of DPO)."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's logistic loss, or IPO's squared one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSettings:
    """What each of several processes holds (`--nproc`, torchrun).  It does not change the updates.
    `parallel: zero3` is short for `{name: zero3}`."""

    name: Literal["auto", "ddp", "zero2", "zero3"] = "auto"
    """`ddp`: everything; `zero3`: a part of weights, gradients and optimizer state (FSDP2);
    `zero2`: the same, with weights gathered from forward to backward; `auto`: `zero3` from a
    billion parameters on, else `ddp`."""
    shards: Annotated[int, Ge(2)] | None = None
    """Processes that share one copy (HSDP); default: all of them."""
    offload: bool = False
    """Keep the parts in host memory."""
    tensor: Annotated[int, Ge(1)] = 1
    """Processes that split every matrix of a model between them (tensor parallelism), each with its
    attention heads.  They compute the same batches."""
    expert: Annotated[int, Ge(1)] = 1
    """Processes that divide the experts of a mixture between them (expert parallelism); tokens
    travel to them.  A multiple of `tensor`."""
    context: Annotated[int, Ge(1)] = 1
    """Processes that split the positions of every micro-batch between them (context parallelism, by
    Ulysses)."""


BY_NAME = (EngineSettings, ParallelSettings)
"""Sections of which a recipe may say the `name` alone, as text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run: objective, model, data and length."""

    objective: Name
    """A loss on data (`prm`: a process reward model), an online algorithm, or `file.py:NAME`, your
    own `Algorithm`.
    """
    name: str = "run"
    """The run folder is `runs`/`name`."""
    runs: str = "runs"
    """Folder of run folders."""
    seed: Seed = 0
    """Seed of random weights, data order and sampling."""
    threads: Annotated[int, Gt(0), Le(1024)] | None = None
    """CPU threads of torch; default: OMP_NUM_THREADS, else one below a million parameters, else
    torch's default.
    """
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    steps: Positive | None = None
    """Optimizer steps for data-set objectives, rollouts for online ones."""
    epochs: Annotated[float, Gt(0.0)] | None = None
    """Instead of `steps`: passes over the data."""
    batch_size: Positive = 32
    """Rows per optimizer step of a data-set objective.  Online ones use `group.prompts_per_step`.
    """
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    rewards: tuple[RewardSettings, ...] = ()
    verdict: str | None = None
    """Name of the reward that is 1 for right completions, for accuracies, pass@k, solved groups and
    `data.retire`.  Default: the first accuracy, exact or number.  Without one, evaluations report
    only rewards."""
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
