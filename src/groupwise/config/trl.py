"""What becomes of every argument of TRL 1.16.

The one table behind `groupwise config OLD_NAME`, docs/from-trl.md, what an unknown key may have meant, and `groupwise recipes
import-trl`.

The arguments are those of GRPOConfig, RLOOConfig, SFTConfig, RewardConfig and DPOConfig, of transformers' TrainingArguments (5.23)
that they inherit, of ModelConfig and ScriptArguments, a few of trainers (`reward_funcs`) and of accelerate's launcher, and older
names that configurations still hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupwise.config import trl_convert as by
from groupwise.config.trl_arguments import Configuration, Fate
from groupwise.config.trl_convert import Outcomes, Value

FATES: dict[Fate, str] = {
    "same": "carried over",
    "changed": "changed in meaning",
    "unneeded": "not needed",
    "missing": "not supported yet",
}
"""What can become of an argument, in words."""

Converter = Callable[[Configuration, str], Outcomes]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of TRL's."""

    fate: Fate
    key: str | None = None
    """Our key."""
    says: str = ""
    """What to write, what differs, or why it is not needed."""
    convert: Converter | Value | None = None
    """From its value, and those of arguments that it goes with, to keys of a recipe; None where none is written."""
    off: Any = None
    """A value that means that it is not used, beside false, 0 and nothing."""


def _same(key: str, convert: Converter | Value | type, says: str = "") -> Argument:
    """convert: the type of a value that is taken as it is, or a converter."""
    return Argument("same", key, says, Value(convert) if isinstance(convert, type) else convert)


def _changed(key: str, says: str, convert: Converter | Value | None = None, off: Any = None) -> Argument:
    return Argument("changed", key, says, convert, off)


def _unneeded(says: str, convert: Converter | None = None) -> Argument:
    return Argument("unneeded", None, says, convert)


def _missing(says: str, convert: Converter | None = None, off: Any = None) -> Argument:
    return Argument("missing", None, says, convert, off)


def _text(value: Any) -> bool:
    return isinstance(value, str)


NO_HUB = _unneeded("nothing is uploaded: `final/` is a plain Hugging Face folder, to be uploaded by its own tools")
NO_PADDING = _unneeded("nothing is ever padded: batches are packed streams")
MEMORY = _unneeded("how a step is cut to fit memory follows from optimizer.tokens_per_microbatch, which cannot change the update")
LOG = _unneeded("every step is a line of metrics.jsonl and of the terminal; dashboards are save.report_to")
LOADER = _unneeded("rows are read once and encoded before the first step: there is no data loader")
LAUNCHED = _unneeded("processes are started by --nproc or torchrun, and what each holds is `parallel`")
KERNELS = _unneeded("kernels are built in: packed attention, and logits of trained tokens only, a chunk at a time")
QUANTIZED = _missing("weights are float32 or bfloat16")
BEST = _missing("the last weights are the final model; save.keep keeps the newest checkpoints")
WHOLE = _unneeded("held-out figures come in one table with intervals; there are no callbacks for metrics")
STEPS = "counts optimizer steps; ours counts rollouts, each of group.updates_per_rollout x group.minibatches optimizer steps"

TABLE: dict[str, Argument] = {
    # ------------------------------------------------------------ ModelConfig, ScriptArguments, arguments of trainers
    "model_name_or_path": _same("model.path", by.to_model_path),
    "model_revision": _missing("the newest revision is loaded; download another one and give its folder", off="main"),
    "attn_implementation": _unneeded("the device chooses the kernel; how a batch is computed is model.attention"),
    "dataset_config": _changed("data.path", "NAME:CONFIG", by.to_data_path),
    "dataset_name": _same("data.path", by.to_data_path),
    "dataset_streaming": _missing("rows are read once, before the first step"),
    "dataset_test_split": _same("data.eval_split", by.to_data_path, "with data.eval_path"),
    "dataset_train_split": _same("data.split", by.to_data_path),
    "dtype": _changed("model.dtype", "float32 or bfloat16; with bf16 and float32 weights autocast", by.to_model_dtype),
    "lora_alpha": _same("model.lora.alpha", by.to_lora),
    "lora_dropout": _missing("adapters have no dropout: what is scored is what was sampled"),
    "lora_modules_to_save": _missing("an adapter trains low-rank factors only"),
    "lora_r": _same("model.lora.rank", by.to_lora),
    "lora_target_modules": _same("model.lora.targets", by.to_lora),
    "lora_target_parameters": _missing("an adapter lies on linear layers"),
    "lora_task_type": _unneeded("it follows from the objective"),
    "config_file": _changed("parallel", "of accelerate: zero2, zero3 or ddp; default: auto", by.to_parallel),
    "num_processes": _unneeded("of accelerate: groupwise train --nproc N says it"),
    "stop": _same("rollout.stop", Value(lambda stop: [stop] if isinstance(stop, str) else list(stop))),
    "use_dora": _missing("adapters are LoRA's"),
    "use_peft": _changed("model.lora", "{}, or with rank, alpha and targets", by.to_lora),
    "use_rslora": _changed("model.lora", "alpha x sqrt(rank): products are scaled by alpha / rank", by.to_lora),
    # ------------------------------------------------------------ TrainingArguments
    "activation_checkpointing": _same("model.gradient_checkpointing", by.to_checkpointing),
    "activation_checkpointing_kwargs": _unneeded("recomputing has no options"),
    "adam_beta1": _changed("optimizer.betas", "[adam_beta1, adam_beta2]", by.to_betas),
    "adam_beta2": _changed("optimizer.betas", "[adam_beta1, adam_beta2]", by.to_betas),
    "adam_epsilon": _same("optimizer.eps", float),
    "average_tokens_across_devices": _unneeded("every normalisation is over the whole step, whatever the number of processes"),
    "bf16": _changed("model.dtype", "autocast", by.to_model_dtype),
    "bf16_full_eval": _unneeded("evaluation computes as training does"),
    "data_seed": _unneeded("one seed decides weights from scratch, order and samples: seed"),
    "ddp_timeout": _unneeded("groupwise train --timeout says it"),
    "debug": _unneeded("steps whose loss is not finite are skipped and counted; `groupwise replay` computes one again"),
    "deepspeed": _changed("parallel", "zero2 or zero3 (FSDP2), {name: zero3, offload: true}; default: auto", by.to_parallel),
    "do_eval": _unneeded("what is held out (data.eval_path, data.eval_fraction) is evaluated"),
    "do_predict": _unneeded("groupwise eval RUN"),
    "do_train": _unneeded("groupwise train RECIPE"),
    "enable_jit_checkpoint": _unneeded("SIGTERM and Ctrl-C save the last whole step"),
    "eval_delay": _missing("evaluations begin before the first step, or with the first that eval.every asks for"),
    "eval_on_start": _same("eval.at_start", by.to_evaluation),
    "eval_steps": _changed("eval.every", STEPS, by.to_evaluation),
    "eval_strategy": _changed(
        "eval.every", "with steps: eval_steps; no and epoch: before the first step and after the last", by.to_evaluation
    ),
    "fp16": _changed("model.dtype", "autocast: bfloat16 in the place of float16, which needs no loss scaling", by.to_model_dtype),
    "fp16_full_eval": _unneeded("evaluation computes as training does"),
    "fsdp": _changed("parallel", "zero2 or zero3 (FSDP2); default: auto", by.to_parallel),
    "fsdp_config": _changed("parallel", "{name: zero3, shards: ..., offload: ...}", by.to_parallel),
    "full_determinism": _unneeded("the same recipe gives the same run; `groupwise replay` checks it"),
    "gradient_accumulation_steps": _changed(
        "group.prompts_per_step",
        "prompts per step (rows: batch_size); micro-batches follow from optimizer.tokens_per_microbatch",
        by.to_batch,
    ),
    "gradient_checkpointing": _same("model.gradient_checkpointing", by.to_checkpointing),
    "gradient_checkpointing_kwargs": _unneeded("recomputing has no options"),
    "ignore_data_skip": _unneeded("a resumed run continues where its data stood"),
    "include_num_input_tokens_seen": _unneeded("tokens/sampled and tokens/trained are in every step's metrics"),
    "label_smoothing_factor": _missing("SFT's targets are the tokens themselves"),
    "learning_rate": _same("optimizer.lr", Value(float, always=True)),
    "logging_nan_inf_filter": _unneeded("what is not finite is shown, and its update skipped"),
    "lr_scheduler_kwargs": _changed("optimizer.min_lr_ratio", "min_lr_rate of cosine_with_min_lr", by.to_schedule),
    "lr_scheduler_type": _changed(
        "optimizer.schedule", "constant, linear or cosine; TRL's default is linear, ours constant", by.to_schedule
    ),
    "max_grad_norm": _same(
        "optimizer.clip_norm",
        Value(lambda norm: float(norm or 0.0) or None, lambda _: True),
        "null where it is 0",
    ),
    "max_steps": _changed("steps", STEPS, by.to_length, off=-1),
    "neftune_noise_alpha": _missing("embeddings are trained without noise"),
    "num_train_epochs": _changed("epochs", "of online objectives steps: epochs x rows / group.prompts_per_step", by.to_length),
    "optim": _unneeded("the optimizer is AdamW with float32 state", by.to_optimizer),
    "optim_args": _unneeded("the optimizer is AdamW with float32 state"),
    "optim_target_modules": _missing("the optimizer is AdamW with float32 state"),
    "output_dir": _changed("name", "the run folder is runs/NAME", by.to_folder_name),
    "parallelism_config": _changed("parallel", "ddp, zero2, zero3 or auto"),
    "per_device_train_batch_size": _changed(
        "group.prompts_per_step",
        "counts prompts; TRL's counts completions, all devices together divide by num_generations (rows: batch_size)",
        by.to_batch,
    ),
    "remove_unused_columns": _unneeded("every column of the data reaches the reward functions that ask for it"),
    "report_to": _changed(
        "save.report_to",
        "tensorboard, wandb, mlflow, trackio; metrics.jsonl is always written",
        Value(by.boards, lambda report: bool(by.boards(report))),
    ),
    "restore_callback_states_from_checkpoint": _unneeded("there are no callbacks"),
    "resume_from_checkpoint": _unneeded("the same command resumes the run"),
    "run_name": _changed("name", "the run folder is runs/NAME", by.to_folder_name),
    "save_only_model": _missing("a checkpoint is whole: `groupwise train` resumes from it"),
    "save_steps": _changed("save.every", STEPS, by.to_saving),
    "save_strategy": _changed(
        "save.every", "with steps: save_steps; no, epoch and best: 0, after the last step only", by.to_saving
    ),
    "save_total_limit": _same("save.keep", by.to_checkpoints, "at least 2"),
    "seed": _same("seed", Value(int, always=True)),
    "skip_memory_metrics": _unneeded("the plan says what a step will need"),
    "tf32": _missing("float32 products are float32's; model.dtype: autocast is the fast way"),
    "train_sampling_strategy": _changed("data.shuffle", "true for random"),
    "use_cache": _unneeded("training has no KV cache, sampling always has one"),
    "use_cpu": _changed("model.device", "cpu", Value(lambda _: "cpu", bool)),
    "warmup_steps": _changed(
        "optimizer.warmup_steps", "optimizer steps, as TRL's; a share below 1 is multiplied out", by.to_warm_up
    ),
    "weight_decay": _same("optimizer.weight_decay", float),
    # ------------------------------------------------------------ GRPOConfig
    "beta": _same("group.beta", by.to_kl, "of DPOConfig: pairs.beta"),
    "cache_implementation": _unneeded("the engine has a KV cache of its own"),
    "cast_lm_head_to_fp32": _unneeded("the softmax over the vocabulary is always taken in float32"),
    "chat_template_kwargs": _same("data.chat_template_kwargs", dict, "a row's column of the same name goes over them"),
    "delta": _changed("group.surrogate", "{name: clipped, delta: ...}", by.to_surrogate),
    "disable_dropout": _unneeded("nothing is ever dropped: what is scored is what was sampled"),
    "entropy_coef": _same("group.entropy_bonus", by.to_entropy),
    "entropy_coef_delta": _changed("group.entropy_step", "with use_adaptive_entropy", by.to_entropy),
    "entropy_coef_max": _changed(
        "group.entropy_bonus", "with use_adaptive_entropy: the most that the coefficient becomes", by.to_entropy
    ),
    "entropy_coef_min": _missing("an adaptive coefficient falls to 0"),
    "entropy_target": _same("group.entropy_target", by.to_entropy, "with use_adaptive_entropy"),
    "epsilon": _changed("group.surrogate", "{name: clipped, low: ..., high: ...}", by.to_surrogate),
    "epsilon_high": _changed(
        "group.surrogate", "{name: clipped, low: ..., high: ...}; with cispo {name: cispo, cap: ...}", by.to_surrogate
    ),
    "generation_batch_size": _changed(
        "group.prompts_per_step", "completions of a rollout: num_generations times the prompts", by.to_batch
    ),
    "generation_kwargs": _missing(
        "only what the scorer reproduces can be sampled: temperature, top_k, top_p, min_p, stop", by.to_generation
    ),
    "importance_sampling_level": _changed("group.ratio", "token, or sequence_mean for sequence", by.to_ratio),
    "log_completions": _changed(
        "save.rollouts_every", "every completion is written every this many steps; `groupwise view` shows them"
    ),
    "log_multimodal": _unneeded("there are no images"),
    "loss_type": _changed(
        "objective",
        "the preset's name, but bnpo for TRL's dapo, which is only its mean over tokens; of DPOConfig: pairs.loss",
        by.to_objective,
    ),
    "mask_truncated_completions": _changed("group.truncated", "keep or mask", Value(lambda _: "mask", bool)),
    "max_completion_length": _same("rollout.max_new_tokens", Value(int, always=True)),
    "max_tool_calling_iterations": _changed(
        "environment.max_turns", "counts turns of the policy: one more than rounds of tool calls", by.to_environment
    ),
    "min_p": _same("rollout.min_p", float),
    "model_init_kwargs": _changed(
        "model.dtype", "its dtype; attn_implementation is not needed; other arguments are not passed on", by.to_model_dtype
    ),
    "multi_objective_aggregation": _changed("objective", "gdpo for normalize_then_sum", by.to_objective),
    "num_generations": _same("group.group_size", by.to_batch),
    "num_generations_eval": _same("eval.k", Value(int, bool)),
    "num_iterations": _same("group.updates_per_rollout", by.to_batch),
    "off_policy_mask_threshold": _same("group.off_policy_delta", Value(float, bool)),
    "ref_model_mixup_alpha": _same("group.reference_mix", by.to_moving_reference),
    "ref_model_sync_steps": _changed("group.reference_refresh", f"with sync_ref_model; {STEPS}", by.to_moving_reference),
    "repetition_penalty": _missing(
        "a penalty makes another distribution, which the scorer does not have: use the reward `repetition`", off=1.0
    ),
    "reward_funcs": _changed("rewards", "a list of {function: ..., weight: ...}", by.to_rewards),
    "reward_model_name_or_path": _changed("rewards", "{function: model, args: {path: ...}}", by.to_rewards),
    "reward_weights": _changed("rewards.N.weight", "one in each entry of rewards", by.to_rewards),
    "router_aux_loss_coef": _missing(
        "the model's config.json says it: output_router_logits switches the balancing loss on, at its router_aux_loss_coef"
    ),
    "sapo_temperature_neg": _changed("group.surrogate", "{name: sapo, tau_neg: ...}", by.to_surrogate),
    "sapo_temperature_pos": _changed("group.surrogate", "{name: sapo, tau_pos: ...}", by.to_surrogate),
    "scale_rewards": _changed("group.credit", "{name: standardized, scale: group, batch or none}", by.to_credit),
    "shuffle_dataset": _same("data.shuffle", by.to_shuffle),
    "steps_per_generation": _changed(
        "group.minibatches", "steps_per_generation / gradient_accumulation_steps: updates per pass", by.to_batch
    ),
    "sync_ref_model": _changed("group.reference_refresh", "the number of steps; 0 for false", by.to_moving_reference),
    "temperature": _same("rollout.temperature", float),
    "top_entropy_quantile": _changed(
        "group.entropy_quantile",
        "1 - top_entropy_quantile",
        Value(lambda upper: round(1.0 - float(upper), 12), lambda upper: float(upper) < 1.0),
    ),
    "top_k": _same("rollout.top_k", Value(lambda k: max(int(k), 0))),
    "top_p": _same("rollout.top_p", float),
    "transformers_continuous_batching_config": _unneeded("rollout.engine: native batches continuously"),
    "trust_remote_code": _same("model.trust_remote_code", Value(bool, bool)),
    "use_adaptive_entropy": _changed(
        "group.entropy_target", "the target, with group.entropy_step and group.entropy_bonus", by.to_entropy
    ),
    "use_bias_correction_kl": _changed("group.kl", "k3_ratio where it is true (TRL's default), k3 where it is false", by.to_kl),
    "use_transformers_continuous_batching": _unneeded("rollout.engine: native batches continuously"),
    "use_transformers_paged": _unneeded("rollout.engine: native has a cache of its own"),
    "use_vllm": _changed("rollout.engine", "vllm; the default, native, samples in the trainer's process", by.to_engine),
    "vespo_k_neg": _changed("group.surrogate", "{name: vespo, k_neg: ...}", by.to_surrogate),
    "vespo_k_pos": _changed("group.surrogate", "{name: vespo, k_pos: ...}", by.to_surrogate),
    "vespo_lambda_neg": _changed("group.surrogate", "{name: vespo, lam_neg: ...}", by.to_surrogate),
    "vespo_lambda_pos": _changed("group.surrogate", "{name: vespo, lam_pos: ...}", by.to_surrogate),
    "vllm_enable_sleep_mode": _unneeded("a colocated vLLM always sleeps while weights are trained"),
    "vllm_gpu_memory_utilization": _unneeded("the plan shares the memory out; of a server: groupwise serve --cache"),
    "vllm_group_port": _unneeded("weights travel through the server's own address"),
    "vllm_importance_sampling_cap": _changed("rollout.engine", "{name: vllm, correct: {high: ...}}", by.to_engine),
    "vllm_importance_sampling_clip_max": _changed("rollout.engine", "{name: vllm, correct: {high: ...}}", by.to_engine),
    "vllm_importance_sampling_clip_min": _changed("rollout.engine", "{name: vllm, correct: {low: ...}}", by.to_engine),
    "vllm_importance_sampling_correction": _changed(
        "rollout.engine", "{name: vllm, correct: {...}}, or correct: null for none", by.to_engine
    ),
    "vllm_importance_sampling_mode": _changed(
        "rollout.engine", "{name: vllm, correct: {level: token or sequence_sum, mode: truncate or mask}}", by.to_engine
    ),
    "vllm_max_model_length": _unneeded("the longest prompt and rollout.max_new_tokens say it"),
    "vllm_mode": _changed("rollout.engine", "{name: vllm, colocated: true} for colocate; servers otherwise", by.to_engine),
    "vllm_model_impl": _unneeded(
        "vLLM's own model, with the trainer's weights, is proven against the trainer before the first step"
    ),
    "vllm_server_base_url": _changed("rollout.engine", "{name: vllm, servers: [...]}", by.to_engine),
    "vllm_server_host": _changed("rollout.engine", "{name: vllm, servers: [http://HOST:PORT]}", by.to_engine),
    "vllm_server_port": _changed("rollout.engine", "{name: vllm, servers: [http://HOST:PORT]}", by.to_engine),
    "vllm_server_timeout": _unneeded("a run waits for its servers, and says which does not answer"),
    "vllm_structured_outputs_regex": _missing("constrained decoding makes another distribution, which the scorer does not have"),
    "vllm_tensor_parallel_size": _unneeded("of a server: groupwise serve MODEL -- --tensor-parallel-size 2"),
    # ------------------------------------------------------------ RLOOConfig
    "normalize_advantages": _changed("group.credit", "{name: leave_one_out, scale: batch}", by.to_credit),
    "reward_clip_range": _missing("rewards are taken as they are: clip in the reward function"),
    # ------------------------------------------------------------ SFTConfig, RewardConfig, DPOConfig
    "activation_offloading": _missing("activations stay on the device: model.gradient_checkpointing keeps fewer of them"),
    "assistant_only_loss": _changed(
        "data.train_on", "completion: the last answer of a conversation is trained, earlier ones are not"
    ),
    "center_rewards_coefficient": _same("reward_model.centering", Value(float, bool)),
    "chat_template_path": _same("model.chat_template", Value(str, _text)),
    "completion_only_loss": _changed("data.train_on", "completion or all", Value(lambda _: "all", lambda value: value is False)),
    "dataset_text_field": _changed(
        "data.columns", "rows are prompt and completion, or messages: {completion: TEXT} with a prompt beside it"
    ),
    "discopop_tau": _missing("pairs.loss is sigmoid or ipo"),
    "eos_token": _unneeded("EOS is what generation_config.json and the tokenizer say; `groupwise check` prints it"),
    "f_alpha_divergence_coef": _missing("pairs are held against the reference by the reverse KL"),
    "f_divergence_type": _missing("pairs are held against the reference by the reverse KL"),
    "label_smoothing": _missing("pairs.loss is sigmoid or ipo, without smoothing"),
    "ld_alpha": _missing("every token of a completion counts in pairs.loss"),
    "loss_weights": _missing("pairs.loss is one loss"),
    "max_length": _changed("data.too_long", "rows longer than the model's context are dropped or cut; there is no shorter limit"),
    "packing": _unneeded("rows are always packed, and never see one another"),
    "packing_strategy": _unneeded("rows are always packed, and never see one another"),
    "precompute_ref_log_probs": _unneeded("the reference's log-probs of pairs are always computed once, before the first step"),
    "truncation_mode": _changed("data.too_long", "drop or truncate_left"),
    "use_weighting": _missing("pairs.loss is sigmoid or ipo"),
    # ------------------------------------------------------------ what trainers take, and peft's LoraConfig
    "args": _unneeded("the arguments of a configuration are keys; `groupwise recipes import-trl` translates a script"),
    "callbacks": _missing("there are no callbacks: a loop of your own over `gw.train(...)` does what they did"),
    "compute_loss_func": _missing("a loss of your own is a part: group.surrogate: file.py:function"),
    "environment_factory": _changed("environment.factory", "file.py:Class; in Python environment=Class", by.to_environment),
    "eval_dataset": _changed(
        "data.eval_path", "a file or hub name; in Python data={'path': ..., 'eval_path': rows}", by.to_data_path
    ),
    "formatting_func": _missing("rows are read as they are: data.template makes the prompt from columns"),
    "optimizer_cls_and_kwargs": _missing("the optimizer is AdamW with float32 state"),
    "optimizers": _missing("the optimizer is AdamW with float32 state, and its schedule optimizer.schedule"),
    "peft_config": _changed("model.lora", "{rank: ..., alpha: ..., targets: ...}", by.to_lora),
    "processing_class": _unneeded("the tokenizer is the checkpoint's; in Python tokenizer=..., beside a loaded model"),
    "r": _same("model.lora.rank", by.to_lora),
    "ref_model": _missing("the reference is the policy as it was before its first step"),
    "reward_processing_classes": _unneeded("a reward model's tokenizer is its checkpoint's"),
    "rollout_func": _missing("who samples for itself is a harness: environment.harness"),
    "target_modules": _same("model.lora.targets", by.to_lora),
    "tools": _changed("environment.tools", "[file.py:function, ...]; in Python tools=[function, ...]", by.to_environment),
    "train_dataset": _changed("data.path", "a file or hub name; in Python data=rows", by.to_data_path),
    # ------------------------------------------------------------ older names, and those of well-known scripts
    "chat_template": _same("model.chat_template", Value(str, _text)),
    "dataset_prompt_column": _changed(
        "data.columns",
        "{prompt: ...}",
        Value(lambda column: {"prompt": column}, lambda column: _text(column) and column != "prompt"),
    ),
    "evaluation_strategy": _changed(
        "eval.every", "with steps: eval_steps; no and epoch: before the first step and after the last", by.to_evaluation
    ),
    "max_prompt_length": _same(
        "data.max_prompt_tokens", by.to_prompt_length, "longer ones are dropped; TRL's cut them: data.too_long: truncate_left"
    ),
    "max_seq_length": _changed(
        "data.too_long", "rows longer than the model's context are dropped or cut; there is no shorter limit"
    ),
    "overwrite_output_dir": _unneeded("the same command resumes the run; --fresh starts anew"),
    "per_gpu_train_batch_size": _changed(
        "group.prompts_per_step", "counts prompts, over all devices (rows: batch_size)", by.to_batch
    ),
    "system_prompt": _changed("data.system", "with data.chat: true", by.to_system_prompt),
    "torch_dtype": _changed("model.dtype", "float32 or bfloat16; with bf16 and float32 weights autocast", by.to_model_dtype),
    "vllm_device": _changed("rollout.engine", "{name: vllm, colocated: true}, or a server: groupwise serve", by.to_engine),
    "vllm_dtype": _changed("rollout.engine", "{name: vllm, dtype: ...}"),
    "vllm_max_model_len": _unneeded("the longest prompt and rollout.max_new_tokens say it"),
    "warmup_ratio": _changed("optimizer.warmup_steps", "optimizer steps: the ratio of all of them", by.to_warm_up),
}
"""TRL's argument -> what becomes of it; those of one answer are added below."""

TABLE |= {
    name: row
    for row, names in {
        NO_HUB: """hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token log_completions_hub_repo
            push_to_hub""",
        NO_PADDING: "eval_packing pad_to_multiple_of pad_token padding_free",
        MEMORY: """auto_find_batch_size eval_accumulation_steps per_device_eval_batch_size precompute_ref_batch_size
            torch_empty_cache_steps""",
        LOG: """disable_tqdm log_level log_level_replica log_on_each_node log_unique_prompts logging_dir logging_first_step
            logging_steps logging_strategy num_completions_to_print project trackio_bucket_id trackio_space_id
            trackio_static_space_id wandb_entity wandb_project""",
        LOADER: """data_collator dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
            dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_kwargs
            dataset_num_proc label_names length_column_name preprocessing_num_workers""",
        LAUNCHED: """accelerator_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
            ddp_static_graph ds3_gather_for_generation ignore_bias_buffers local_rank save_on_each_node""",
        KERNELS: "liger_kernel_config torch_compile torch_compile_backend torch_compile_mode use_liger use_liger_kernel",
        WHOLE: """batch_eval_metrics compute_metrics eval_do_concat_batches eval_use_gather_object include_for_metrics
            prediction_loss_only preprocess_logits_for_metrics""",
        QUANTIZED: """bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit quantization_config
            use_bnb_nested_quant""",
        BEST: """greater_is_better load_best_model_at_end metric_for_best_model""",
    }.items()
    for name in names.split()
}

CALLS: dict[str, Argument] = {
    "add_callback": TABLE["callbacks"],
    "create_model_card": _unneeded("`final/README.md` is one"),
    "evaluate": _unneeded("what is held out is evaluated after the last step; groupwise eval RUN does it again"),
    "log_metrics": LOG,
    "predict": _unneeded("groupwise eval RUN"),
    "push_to_hub": NO_HUB,
    "save_metrics": LOG,
    "save_model": _unneeded("`final/` is the trained model"),
    "save_state": _unneeded("every checkpoint is whole"),
    "train": _unneeded("the same command resumes the run"),
}
"""What a script calls of a trainer -> what becomes of it."""

NAMES: dict[str, tuple[str, str]] = {
    name: (row.key, row.says) for name, row in TABLE.items() if row.key is not None and row.fate != "missing"
}
"""TRL's argument -> our key, and what to write where the values differ; of those that we have one for."""
