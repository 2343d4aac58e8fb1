"""Every argument of TRL 1.16, and what becomes of it.

The arguments are those of GRPOConfig, RLOOConfig, SFTConfig, RewardConfig and DPOConfig, of
transformers' TrainingArguments (5.23) that they inherit, of ModelConfig and ScriptArguments, a few
of trainers (`reward_funcs`) and of accelerate's launcher, and older names that configurations still
hold.  `config/trl_names.py` has the names that are a key of a recipe.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.config.schema import describe
from groupwise.config.trl_names import TRL_KEYS
from groupwise.trl.configuration import Fate

FATES: dict[Fate, str] = {
    "same": "carried over",
    "changed": "changed in meaning",
    "unneeded": "not needed",
    "elsewhere": "not done here",
    "missing": "not supported",
}
"""What can become of an argument, in words."""
SHOWN: tuple[Fate, ...] = ("changed", "elsewhere", "missing")
"""What a summary shows line by line."""
STEPS = (
    "counts optimizer steps; ours counts rollouts, each of group.updates_per_rollout x"
    " group.minibatches optimizer steps"
)
CUT = "gradients are the cut distribution's; TRL's are the whole softmax's"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of TRL's."""

    fate: Fate
    key: str | None = None
    """Our key."""
    detail: str = ""
    """What to write, what differs, or what there is instead."""


PLAIN = (
    "seed chat_template chat_template_path activation_checkpointing gradient_checkpointing"
    " lora_alpha lora_r r lora_target_modules target_modules use_rslora layers_to_transform"
    " model_name_or_path"
    " trust_remote_code dataset_name shuffle_dataset dataset_train_split max_completion_length"
    " stop temperature entropy_coef num_generations off_policy_mask_threshold"
    " ref_model_mixup_alpha num_iterations center_rewards_coefficient adam_epsilon"
    " learning_rate weight_decay eval_on_start num_generations_eval"
)
"""Arguments that are carried over as they are."""
SAME = {
    "beta": "of DPOConfig: pairs.beta",
    "chat_template_kwargs": "a row's column of the same name goes over them",
    "dataset_test_split": "with data.eval_path",
    "entropy_target": "with use_adaptive_entropy",
    "early_stopping_patience": "of EarlyStoppingCallback, with eval.best",
    "greater_is_better": "losses are minimised, every other figure is maximised",
    "lora_dropout": "0 with disable_dropout, which DPO's and reward models' configurations set",
    "lora_modules_to_save": "embeddings and linear layers; the head of a reward model is trained",
    "max_grad_norm": "null where it is 0",
    "max_prompt_length": "longer ones are dropped; TRL's cut them: data.too_long: truncate_left",
    "save_total_limit": "at least 2",
}
"""Arguments that are carried over -> what to know."""
CHANGED = {
    "loss_type": "the preset of that name, but bnpo for dapo; of DPOConfig: pairs.loss",
    "multi_objective_aggregation": "decoupled for normalize_then_sum",
    "output_dir": "the run folder is runs/NAME",
    "run_name": "the run folder is runs/NAME",
    "max_steps": STEPS,
    "num_train_epochs": "of online objectives steps: epochs x rows / group.prompts_per_step",
    "accelerate_config": (
        "of accelerate: zero2, zero3 or ddp; default: auto. Its num_processes multiply batches"
    ),
    "config_file": (
        "of accelerate: zero2, zero3 or ddp; default: auto. Its num_processes multiply batches"
    ),
    "deepspeed": "zero2 or zero3 (FSDP2), {name: zero3, offload: true}; default: auto",
    "fsdp": "zero2 or zero3 (FSDP2); default: auto",
    "fsdp_config": "{name: zero3, shards: ..., offload: ...}",
    "use_cpu": "cpu",
    "bf16": "autocast",
    "dtype": "float32 or bfloat16; with bf16 and float32 weights autocast",
    "torch_dtype": "float32 or bfloat16; with bf16 and float32 weights autocast",
    "fp16": "autocast: bfloat16 in the place of float16, which needs no loss scaling",
    "model_init_kwargs": (
        "its dtype; attn_implementation is not needed; other arguments are not passed on"
    ),
    "peft_config": "{rank: ..., alpha: ..., targets: ...}",
    "use_peft": "{}, or with rank, alpha and targets",
    "dataset_prompt_column": "{prompt: ...}",
    "dataset_text_field": "{text: ...}",
    "eval_dataset": "a file or hub name; in Python data={'path': ..., 'eval_path': rows}",
    "dataset_config": "NAME:CONFIG",
    "train_dataset": "a file or hub name; in Python data=rows",
    "datasets": "one file or hub name: write the rows of several into one",
    "test_split_size": "a share; rows are held out by a hash of the prompt",
    "train_sampling_strategy": "false for sequential, of SFT, reward models and DPO",
    "system_prompt": "with data.chat: true",
    "max_length": "longer rows are dropped; TRL's SFT and DPO cut them",
    "max_seq_length": "longer rows are dropped; TRL's SFT and DPO cut them",
    "truncation_mode": "drop for keep_start, truncate_left for keep_end",
    "assistant_only_loss": "completion: the last answer of a conversation",
    "completion_only_loss": "completion or all; TRL's default is all for messages",
    "reward_funcs": "a list of {function: ..., weight: ...}",
    "reward_model_name_or_path": "{function: model, args: {path: ...}}",
    "reward_weights": "one in each entry of rewards",
    "environment_factory": "file.py:Class; in Python environment=Class",
    "max_tool_calling_iterations": "turns of the policy: one more than rounds of tool calls",
    "tools": "[file.py:function, ...]; in Python tools=[function, ...]",
    "use_vllm": "vllm; the default, native, samples in the trainer's process",
    "vllm_device": "{name: vllm, colocated: true}, or a server: groupwise serve",
    "vllm_dtype": "{name: vllm, dtype: ...}",
    "vllm_importance_sampling_cap": "{name: vllm, correct: {high: ...}}",
    "vllm_importance_sampling_clip_max": "{name: vllm, correct: {high: ...}}",
    "vllm_importance_sampling_clip_min": "{name: vllm, correct: {low: ...}}",
    "vllm_importance_sampling_correction": (
        "{name: vllm, correct: {...}}, or correct: null for none"
    ),
    "vllm_importance_sampling_mode": (
        "{name: vllm, correct: {level: token or sequence_sum, mode: truncate or mask}}"
    ),
    "vllm_mode": "{name: vllm, colocated: true} for colocate; servers otherwise",
    "vllm_server_base_url": "{name: vllm, servers: [...]}",
    "vllm_server_host": "{name: vllm, servers: [http://HOST:PORT]}",
    "vllm_server_port": "{name: vllm, servers: [http://HOST:PORT]}",
    "vllm_tensor_parallel_size": (
        "{name: vllm, colocated: true, tensor_parallel: N}; of a server: groupwise serve MODEL --"
        " --tensor-parallel-size N"
    ),
    "normalize_advantages": "{name: leave_one_out, scale: batch}",
    "scale_rewards": "{name: standardized, scale: group, batch or none}",
    "entropy_coef_max": "with use_adaptive_entropy: the most that the coefficient becomes",
    "top_entropy_quantile": "1 - top_entropy_quantile, of the step's tokens",
    "entropy_coef_delta": "with use_adaptive_entropy",
    "use_adaptive_entropy": "the target, with group.entropy_step and group.entropy_bonus",
    "use_bias_correction_kl": "k3_ratio where it is true (TRL's default), k3 where it is false",
    "steps_per_generation": "steps_per_generation / gradient_accumulation_steps: updates per pass",
    "generation_batch_size": "completions of a rollout: num_generations times the prompts",
    "gradient_accumulation_steps": (
        "prompts per step (rows: batch_size); micro-batches follow from"
        " optimizer.tokens_per_microbatch"
    ),
    "per_device_train_batch_size": (
        "completions of all devices over num_generations (rows: batch_size)"
    ),
    "per_gpu_train_batch_size": "counts prompts, over all devices (rows: batch_size)",
    "importance_sampling_level": "token, or sequence_mean for sequence",
    "ref_model_sync_steps": f"with sync_ref_model; {STEPS}",
    "sync_ref_model": "the number of steps; 0 for false",
    "delta": "{name: clipped, delta: ...}",
    "epsilon": "{name: clipped, low: ..., high: ...}",
    "epsilon_high": "{name: clipped, low: ..., high: ...}; with cispo {name: cispo, cap: ...}",
    "sapo_temperature_neg": "{name: sapo, tau_neg: ..., tau_pos: ...}",
    "sapo_temperature_pos": "{name: sapo, tau_neg: ..., tau_pos: ...}",
    "vespo_k_neg": "{name: vespo, k_neg: ..., k_pos: ...}",
    "vespo_k_pos": "{name: vespo, k_neg: ..., k_pos: ...}",
    "vespo_lambda_neg": "{name: vespo, lam_neg: ..., lam_pos: ...}",
    "vespo_lambda_pos": "{name: vespo, lam_neg: ..., lam_pos: ...}",
    "mask_truncated_completions": "keep or mask",
    "adam_beta1": "[adam_beta1, adam_beta2]",
    "adam_beta2": "[adam_beta1, adam_beta2]",
    "lr_scheduler_kwargs": "min_lr_rate of cosine_with_min_lr",
    "lr_scheduler_type": "constant, linear or cosine; TRL's default is linear, ours constant",
    "warmup_ratio": "optimizer steps: the ratio of all of them",
    "warmup_steps": (
        "optimizer steps (a share below 1 is multiplied out); the first rate is a step of the"
        " rise, TRL's is 0"
    ),
    "eval_steps": STEPS,
    "eval_strategy": "eval_steps for steps; else before the first step and after the last",
    "evaluation_strategy": "eval_steps for steps; else before the first step and after the last",
    "load_best_model_at_end": "the figure of metric_for_best_model; needs eval.every",
    "metric_for_best_model": "with load_best_model_at_end; of online objectives reward for loss",
    "save_steps": STEPS,
    "save_strategy": "save_steps for steps; else 0: after the last step",
    "report_to": "tensorboard, wandb, mlflow, trackio; metrics.jsonl is always written",
    "min_p": CUT,
    "top_k": CUT,
    "top_p": CUT,
    "log_completions": "completions are written every this many steps; `groupwise view` shows them",
}
"""Arguments whose meaning changes -> what to write, or what differs."""
NOT_NEEDED = "Groupwise does it by itself, or has nothing to set there: leave it out"
UNNEEDED = (
    "vllm_gpu_memory_utilization "
    "accelerator_config activation_checkpointing_kwargs args attn_implementation "
    "auto_find_batch_size average_tokens_across_devices bf16_full_eval cache_implementation "
    "cast_lm_head_to_fp32 data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers "
    "dataloader_pin_memory dataloader_prefetch_factor dataset_num_proc ddp_backend "
    "ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph "
    "debug disable_dropout disable_tqdm do_eval do_train ds3_gather_for_generation "
    "enable_jit_checkpoint eos_token eval_accumulation_steps eval_do_concat_batches "
    "eval_packing eval_use_gather_object fp16_full_eval full_determinism "
    "gradient_checkpointing_kwargs ignore_bias_buffers ignore_data_skip "
    "include_num_input_tokens_seen length_column_name liger_kernel_config local_rank "
    "log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts "
    "logging_dir logging_first_step logging_nan_inf_filter logging_steps logging_strategy "
    "lora_task_type num_completions_to_print optim optim_args overwrite_output_dir packing "
    "packing_strategy pad_to_multiple_of pad_token padding_free per_device_eval_batch_size "
    "precompute_ref_batch_size precompute_ref_log_probs prediction_loss_only "
    "preprocessing_num_workers processing_class remove_unused_columns "
    "restore_callback_states_from_checkpoint resume_from_checkpoint reward_processing_classes "
    "save_on_each_node skip_memory_metrics torch_empty_cache_steps "
    "transformers_continuous_batching_config "
    "use_cache use_liger use_liger_kernel use_transformers_continuous_batching "
    "use_transformers_paged vllm_enable_sleep_mode vllm_group_port vllm_max_model_len "
    "vllm_max_model_length vllm_model_impl vllm_server_timeout "
)
"""Arguments that are not needed."""
LACKING = {
    "activations stay on the device: model.gradient_checkpointing keeps fewer of them": (
        "activation_offloading"
    ),
    "model.quantize, nf4 or int8, holds the base of model.lora in few bits: set it in the recipe": (
        "bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit "
        "quantization_config use_bnb_nested_quant"
    ),
    "a loss of your own is a part: group.surrogate: file.py:function": "compute_loss_func",
    "rows are read once, before the first step": "dataset_streaming streaming",
    "variables of the environment are set before the command": "env",
    "pairs.loss is sigmoid or ipo": "discopop_tau use_weighting",
    "an adaptive coefficient falls to 0": "entropy_coef_min",
    "evaluations begin before the first step, or with the first that eval.every asks for": (
        "eval_delay"
    ),
    "pairs are held against the reference by the reverse KL": (
        "f_alpha_divergence_coef f_divergence_type"
    ),
    "rows are read as they are: data.template makes the prompt from columns": "formatting_func",
    "only what the scorer reproduces can be sampled: temperature, top_k, top_p, min_p, stop": (
        "generation_kwargs"
    ),
    "pairs.loss is sigmoid or ipo, without smoothing": "label_smoothing",
    "SFT's targets are the tokens themselves": "label_smoothing_factor",
    "every token of a completion counts in pairs.loss": "ld_alpha",
    "an adapter lies on linear layers": "lora_target_parameters",
    "pairs.loss is one loss": "loss_weights",
    "the newest revision is loaded; download another one and give its folder": "model_revision",
    "embeddings are trained without noise": "neftune_noise_alpha",
    "model.compile: on compiles the blocks of updates: set it in the recipe": (
        "torch_compile torch_compile_backend torch_compile_mode"
    ),
    "parallel has tensor for tp_size and context for cp_size: set them in the recipe": (
        "parallelism_config"
    ),
    "the optimizer is AdamW": "optim_target_modules optimizer_cls_and_kwargs",
    "the optimizer is AdamW, and its schedule optimizer.schedule": "optimizers",
    "the reference is the policy as it was before its first step": "ref_model",
    "the scorer cannot reproduce a penalty: use the reward `repetition`": "repetition_penalty",
    "rewards are taken as they are: clip in the reward function": "reward_clip_range",
    "who samples for itself is a harness: environment.harness": "rollout_func",
    "output_router_logits and router_aux_loss_coef in the model's config.json decide": (
        "router_aux_loss_coef"
    ),
    "a checkpoint is whole: `groupwise train` resumes from it": "save_only_model",
    "model.dtype: autocast is the fast way": "tf32",
    "DoRA is not trained here: leave it out, and raise model.lora.rank": "use_dora",
    "the scorer cannot reproduce constrained decoding": "vllm_structured_outputs_regex",
}
"""What there is instead -> arguments that are not supported."""
ELSEWHERE = {
    "`groupwise push runs/RUN ORG/NAME` uploads the final model": (
        "hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token "
        "log_completions_hub_repo push_to_hub"
    ),
    "a reward function with weight 0 is a metric, also of what is held out: `groupwise eval RUN`": (
        "batch_eval_metrics compute_metrics include_for_metrics preprocess_logits_for_metrics"
    ),
    "rows are packed as they are: change them in the file, or with data.template": (
        "data_collator dataset_kwargs label_names"
    ),
    "`groupwise eval RUN --data FILE`": "do_predict",
    "set WANDB_PROJECT, WANDB_ENTITY or TRACKIO_SPACE_ID": (
        "project trackio_bucket_id trackio_space_id trackio_static_space_id wandb_entity "
        "wandb_project"
    ),
    "a loop over `gw.train(...)` does what callbacks did: docs/from-trl.md": "callbacks",
    "the launcher's: groupwise train --nproc N; batches are multiplied by it": "num_processes",
    "groupwise train --timeout SECONDS": "ddp_timeout",
}
"""The line that does it -> arguments of what a recipe does not do."""
OTHER_VERSIONS = {
    "an argument of TRL before 1.16, which went": (
        "base_model_attribute_name chars_per_token cliprange dataset_batch_size "
        "force_use_ref_model generate_during_eval is_encoder_decoder kl_coef label_pad_token_id "
        "max_target_length missing_eos_penalty model_adapter_name normalize_advantage "
        "normalize_reward num_mini_batches num_of_sequences num_ppo_epochs padding_value "
        "ref_adapter_name ref_model_init_kwargs reference_free response_length rloo_k rpo_alpha "
        "stop_token stop_token_id token_level_kl total_episodes use_liger_loss use_logits_to_keep "
        "use_num_logits_to_keep vllm_enable_prefix_caching vllm_guided_decoding_regex "
        "wandb_log_unique_prompts whiten_rewards"
    ),
    "an argument of TRL's asynchronous trainer: see rollout.engine.ahead": (
        "async_training fork_threshold_tokens heartbeat_stale_after_s max_inflight_tasks "
        "max_staleness queue_maxsize request_timeout token_budget weight_sync_steps "
        "weight_sync_timeout"
    ),
}
"""What to know -> arguments that are none of TRL 1.16's trainers."""


def _table() -> dict[str, Argument]:
    """Every argument by its name."""
    table = {}
    for name in PLAIN.split():
        table[name] = Argument("same", TRL_KEYS[name])
    for name, detail in SAME.items():
        table[name] = Argument("same", TRL_KEYS[name], detail)
    for name, detail in CHANGED.items():
        table[name] = Argument("changed", TRL_KEYS[name], detail)
    for name in UNNEEDED.split():
        table[name] = Argument("unneeded", detail=NOT_NEEDED)
    for detail, names in ELSEWHERE.items():
        table |= dict.fromkeys(names.split(), Argument("elsewhere", detail=detail))
    for detail, names in LACKING.items():
        table |= dict.fromkeys(names.split(), Argument("missing", detail=detail))
    return table


TABLE = _table()
"""TRL's argument -> what becomes of it."""
FOREIGN = {name: detail for detail, names in OTHER_VERSIONS.items() for name in names.split()}
"""Argument of another version or trainer of TRL -> what to know."""
CALLS: dict[str, Argument] = {
    "add_callback": TABLE["callbacks"],
    "create_model_card": Argument("unneeded", detail="`final/README.md` is one"),
    "evaluate": Argument("unneeded", detail="what is held out is evaluated after the last step"),
    "log_metrics": TABLE["logging_steps"],
    "predict": TABLE["do_predict"],
    "push_to_hub": TABLE["push_to_hub"],
    "save_metrics": TABLE["logging_steps"],
    "save_model": Argument("unneeded", detail="`final/` is the trained model"),
    "save_state": Argument("unneeded", detail="every checkpoint is whole"),
    "train": TABLE["resume_from_checkpoint"],
}
"""What a script calls of a trainer -> what becomes of it."""


def explain(name: str) -> str:
    """Explain an argument: the key in its place with what differs, or what becomes of it."""
    if name in FOREIGN:
        return f"{name}: {FOREIGN[name]}"
    row = TABLE[name]
    if row.key is None:
        return f"{name} (an argument of TRL's)\n  {FATES[row.fate]}: {row.detail}"
    detail = f"\n  {name}: {FATES[row.fate]}; {row.detail}" if row.detail else ""
    return describe(row.key) + detail
