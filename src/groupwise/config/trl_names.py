"""The names of TRL's arguments, by the key of a recipe that means the same: for "did you mean"."""

from __future__ import annotations

TRL_NAMES = {
    "objective": "loss_type",
    "name": "output_dir run_name",
    "seed": "seed",
    "parallel": "accelerate_config config_file deepspeed fsdp fsdp_config",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "model.path": "model_name_or_path",
    "model.dtype": "bf16 dtype torch_dtype fp16 model_init_kwargs",
    "model.device": "use_cpu",
    "model.gradient_checkpointing": "activation_checkpointing gradient_checkpointing",
    "model.lora": "peft_config use_peft",
    "model.lora.rank": "lora_r r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.rslora": "use_rslora",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules target_modules",
    "model.lora.layers": "layers_to_transform",
    "model.lora.modules_to_save": "lora_modules_to_save",
    "model.chat_template": "chat_template chat_template_path",
    "model.trust_remote_code": "trust_remote_code",
    "data.path": "dataset_name dataset_config train_dataset datasets",
    "data.split": "dataset_train_split",
    "data.columns": "dataset_prompt_column dataset_text_field",
    "data.system": "system_prompt",
    "data.chat_template_kwargs": "chat_template_kwargs",
    "data.max_prompt_tokens": "max_prompt_length",
    "data.max_tokens": "max_length max_seq_length",
    "data.too_long": "truncation_mode",
    "data.shuffle": "shuffle_dataset train_sampling_strategy",
    "data.eval_path": "eval_dataset",
    "data.eval_split": "dataset_test_split",
    "data.eval_fraction": "test_split_size",
    "data.train_on": "assistant_only_loss completion_only_loss",
    "rewards": "reward_funcs reward_model_name_or_path",
    "rewards.N.weight": "reward_weights",
    "rollout.engine": (
        "use_vllm vllm_device vllm_dtype vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_mode "
        "vllm_tensor_parallel_size "
        "vllm_server_base_url vllm_server_host vllm_server_port"
    ),
    "rollout.temperature": "temperature",
    "rollout.top_k": "top_k",
    "rollout.top_p": "top_p",
    "rollout.min_p": "min_p",
    "rollout.max_new_tokens": "max_completion_length",
    "rollout.stop": "stop",
    "environment.tools": "tools",
    "environment.factory": "environment_factory",
    "environment.max_turns": "max_tool_calling_iterations",
    "group.prompts_per_step": (
        "generation_batch_size gradient_accumulation_steps per_device_train_batch_size "
        "per_gpu_train_batch_size"
    ),
    "group.group_size": "num_generations",
    "group.updates_per_rollout": "num_iterations",
    "group.minibatches": "steps_per_generation",
    "group.beta": "beta",
    "group.kl": "use_bias_correction_kl",
    "group.credit": "multi_objective_aggregation normalize_advantages scale_rewards",
    "group.ratio": "importance_sampling_level",
    "group.surrogate": (
        "delta epsilon epsilon_high sapo_temperature_neg sapo_temperature_pos "
        "vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos"
    ),
    "group.truncated": "mask_truncated_completions",
    "group.entropy_bonus": "entropy_coef entropy_coef_max",
    "group.entropy_target": "entropy_target use_adaptive_entropy",
    "group.entropy_step": "entropy_coef_delta",
    "group.entropy_quantile": "top_entropy_quantile",
    "group.off_policy_delta": "off_policy_mask_threshold",
    "group.reference_refresh": "ref_model_sync_steps sync_ref_model",
    "group.reference_mix": "ref_model_mixup_alpha",
    "reward_model.centering": "center_rewards_coefficient",
    "optimizer.lr": "learning_rate",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.min_lr_ratio": "lr_scheduler_kwargs",
    "optimizer.warmup_steps": "warmup_ratio warmup_steps",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.clip_norm": "max_grad_norm",
    "eval.every": "eval_steps eval_strategy evaluation_strategy",
    "eval.at_start": "eval_on_start",
    "eval.k": "num_generations_eval",
    "eval.best": "greater_is_better load_best_model_at_end metric_for_best_model",
    "eval.stop_after": "early_stopping_patience",
    "save.every": "save_steps save_strategy",
    "save.keep": "save_total_limit",
    "save.rollouts_every": "log_completions",
    "save.report_to": "report_to",
}
"""Key -> TRL's arguments of that meaning, apart from each other by blanks."""

TRL_KEYS: dict[str, str] = {}
"""TRL's argument -> the key."""
for _key, _names in TRL_NAMES.items():
    TRL_KEYS.update(dict.fromkeys(_names.split(), _key))

_FIRST_FACTORS = "the first factor begins random and the second at 0: leave it out"
LORA_LACKING = {
    "use_dora": "DoRA is not trained here: leave it out, and raise model.lora.rank",
    "init_lora_weights": _FIRST_FACTORS,
    "eva_config": _FIRST_FACTORS,
    "corda_config": _FIRST_FACTORS,
    "lora_ga_config": _FIRST_FACTORS,
    "loftq_config": _FIRST_FACTORS,
    "bias": "biases stay as they are: leave it out",
    "lora_bias": "the factors have no biases: leave it out",
    "exclude_modules": "model.lora.targets can be a regular expression that leaves them out",
    "layers_pattern": "model.lora.layers counts the model's blocks",
    "target_parameters": "an adapter lies on linear layers: train without model.lora",
    "trainable_token_indices": "model.lora.modules_to_save trains the whole embedding",
    "ensure_weight_tying": "embedding and head become two matrices: leave it out",
}
"""Arguments of peft's LoraConfig that `model.lora` does not have -> what to do."""
