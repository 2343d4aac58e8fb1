"""TRL's arguments are all known, and its configurations become recipes that mean the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from groupwise.cli.commands import main
from groupwise.config.recipes import load_recipe
from groupwise.config.schema import lookup
from groupwise.config.settings import ScratchSettings
from groupwise.config.trl_names import TRL_KEYS
from groupwise.data.tokenizers import make_tokenizer
from groupwise.errors import ConfigError
from groupwise.models.scratch import scratch_model
from groupwise.runs.metrics_log import read_metrics
from groupwise.trl.configuration import DEFAULTS, KINDS, OWN_DEFAULTS, Configuration
from groupwise.trl.recipe import Imported, import_trl, translated
from groupwise.trl.table import FATES, TABLE, explain

FIELDS: dict[str, dict[str, str | None]] = json.loads((Path(__file__).parents[1] / "fixtures" / "trl_fields.json").read_text())[
    "fields"
]
"""Class -> field -> default as source text."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, name: str = "trl.yaml", **keywords: object) -> Imported:
    Path(name).write_text(text)
    return import_trl(name, **keywords)  # type: ignore[arg-type]


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("config", FIELDS)
def test_every_argument_of_trl_is_in_the_table(config: str) -> None:
    assert len(FIELDS[config]) > 4
    assert [name for name in FIELDS[config] if name not in TABLE] == []


def test_every_argument_of_the_installed_transformers_is_in_the_table() -> None:
    public = [field.name for field in dataclasses.fields(TrainingArguments) if not field.name.startswith("_")]
    assert len(public) > 100
    assert [name for name in public if name not in TABLE] == []


def test_every_row_names_a_key_or_says_why_there_is_none() -> None:
    for name, row in TABLE.items():
        assert row.fate in FATES
        assert row.detail if row.key is None or row.fate in ("missing", "unneeded") else lookup(row.key), name
        assert (row.key is not None) == (row.fate in ("same", "changed")), name


@pytest.mark.parametrize("name", TABLE)
def test_groupwise_config_knows_every_name(name: str) -> None:
    shown, row = explain(name), TABLE[name]
    assert shown.startswith(f"{row.key}\n" if row.key else name)
    assert row.detail in shown
    assert row.key is not None or FATES[row.fate] in shown


def test_the_command_explains_a_name_of_trls(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("epsilon", "{name: clipped, low: ..., high: ...}"), ("push_to_hub", "hf upload"), ("seed", "seed")):
        assert main(["config", name]) == 0
        assert text in capsys.readouterr().out


def test_the_defaults_that_are_carried_over_are_trls() -> None:
    base = {**FIELDS["TrainingArguments"], **FIELDS["_BaseConfig"], **FIELDS["ModelConfig"], **FIELDS["ScriptArguments"]}
    for kind in KINDS:
        for name, value in {**DEFAULTS, **OWN_DEFAULTS[kind]}.items():
            source = FIELDS[kind].get(name, base.get(name))
            assert source is not None or name in FIELDS[kind] or name in base, (kind, name)
            expected = [value] if (kind, name) == ("DPOConfig", "loss_type") else value
            assert eval(str(source).removeprefix("lambda: "), {"__builtins__": {}}) == expected, (kind, name)


# ---------------------------------------------------------------- what it comes to


def test_batches_steps_and_schedules_are_multiplied_out() -> None:
    imported = read("""
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 4
num_iterations: 2
max_steps: 100
warmup_ratio: 0.1
save_steps: 20
eval_strategy: steps
eval_steps: 0.5
dataset_name: some/rows
model_name_or_path: some/model
""", devices=2)  # fmt: skip
    tree = imported.tree()
    # a rollout: 4 x 2 devices x 4 = 32 completions, 8 prompts; a pass over it: 4 / 2 = 2 optimizer steps; two passes
    assert tree["group"] == {"group_size": 4, "prompts_per_step": 8, "minibatches": 2, "updates_per_rollout": 2}
    assert tree["steps"] == 25
    assert tree["optimizer"]["warmup_steps"] == 10
    assert (tree["save"]["every"], tree["eval"]["every"]) == (5, 13)
    assert (tree["seed"], tree["optimizer"]["schedule"], tree["rollout"]["max_new_tokens"]) == (42, "linear", 512)
    assert tree["data"] == {"path": "some/rows", "eval_path": "some/rows"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss_type: dapo", {"objective": "bnpo"}),
        ("loss_type: grpo", {"objective": "grpo"}),
        ("loss_type: dr_grpo\nscale_rewards: none", {"objective": "dr_grpo", "group.credit": None}),
        ("loss_type: dr_grpo", {"objective": "dr_grpo", "group.credit": {"name": "standardized", "scale": "group"}}),
        ("scale_rewards: batch", {"group.credit": {"name": "standardized", "scale": "batch"}}),
        ("loss_type: grpo\nscale_rewards: false", {"group.credit": {"name": "standardized", "scale": "none"}}),
        ("loss_type: cispo\nepsilon_high: 5.0", {"objective": "cispo", "group.surrogate": {"name": "cispo", "cap": 5.0}}),
        ("loss_type: sapo\nsapo_temperature_neg: 1.2", {"group.surrogate": {"name": "sapo", "tau_neg": 1.2}}),
        ("loss_type: vespo\nvespo_lambda_pos: 4", {"group.surrogate": {"name": "vespo", "lam_pos": 4.0}}),
        ("epsilon_high: 0.28\ndelta: 4", {"group.surrogate": {"name": "clipped", "low": 0.2, "high": 0.28, "delta": 4.0}}),
        ("importance_sampling_level: sequence\nloss_type: grpo", {"group.ratio": "sequence_mean"}),
        ("multi_objective_aggregation: normalize_then_sum", {"objective": "bnpo", "group.credit": "decoupled"}),
        ("multi_objective_aggregation: normalize_then_sum\nloss_type: cispo\nepsilon_high: 4.0\nscale_rewards: batch",
         {"objective": "cispo", "group.credit": "decoupled", "group.surrogate": {"name": "cispo", "cap": 4.0}}),
        ("loss_type: luspo", {"objective": "luspo", "group.ratio": "token"}),
        ("loss_type: luspo\nimportance_sampling_level: sequence", {"objective": "luspo", "group.ratio": None}),
        ("beta: 0.04", {"group.beta": 0.04, "group.kl": "k3_ratio"}),
        ("beta: 0.04\nuse_bias_correction_kl: false", {"group.kl": "k3"}),
        ("top_entropy_quantile: 0.2", {"group.entropy_quantile": 0.8}),
        ("mask_truncated_completions: true", {"group.truncated": "mask"}),
        ("use_vllm: true",
         {"rollout.engine": {"name": "vllm", "colocated": True,
                             "correct": {"level": "sequence_sum", "mode": "mask", "high": 3.0}}}),
        ("use_vllm: true\nvllm_mode: server\nvllm_importance_sampling_correction: false",
         {"rollout.engine": {"name": "vllm", "servers": ["http://127.0.0.1:8000"], "correct": None}}),
        (
            "use_vllm: true\nvllm_mode: server\nvllm_importance_sampling_mode: token_truncate\n"
            "vllm_importance_sampling_clip_max: 2",
            {"rollout.engine": {"name": "vllm", "servers": ["http://127.0.0.1:8000"],
                                "correct": {"level": "token", "mode": "truncate", "high": 2.0}}},
        ),
        ("sync_ref_model: true\nref_model_sync_steps: 64", {"group.reference_refresh": 64, "group.reference_mix": 0.6}),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-7}\nlearning_rate: 1e-6",
         {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1}),
        ("max_grad_norm: 0", {"optimizer.clip_norm": None}),
        ("fp16: true", {"model.dtype": "autocast"}),
        ("bf16: false", {"model.dtype": "float32"}),
        ("torch_dtype: bfloat16", {"model.dtype": "bfloat16"}),
        ("deepspeed: ds_zero3.json", {"parallel": "zero3"}),
        ("deepspeed: {zero_optimization: {stage: 3, offload_param: {pin_memory: true, device: cpu}}}",
         {"parallel": {"name": "zero3", "offload": True}}),
        ("deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}",
         {"parallel": {"name": "zero2", "offload": True}}),
        ("deepspeed: {zero_optimization: {stage: 3, offload_param: {device: none}}}", {"parallel": "zero3"}),
        ("fsdp: full_shard offload", {"parallel": {"name": "zero3", "offload": True}}),
        ("fsdp: full_shard\nfsdp_config: {fsdp_offload_params: true}", {"parallel": {"name": "zero3", "offload": True}}),
        ("use_adaptive_entropy: true\nentropy_coef_max: 0.02\nentropy_target: 0.3",
         {"group.entropy_target": 0.3, "group.entropy_bonus": 0.02, "group.entropy_step": 0.005}),
        ("use_adaptive_entropy: true", {"group.entropy_target": 0.2, "group.entropy_bonus": 1.0}),
        ("entropy_target: 0.3\nentropy_coef: 0.01", {"group.entropy_target": None, "group.entropy_bonus": 0.01}),
        ("dataset_config: main", {"data.path": "d:main"}),
        ("chat_template_kwargs: {enable_thinking: false}", {"data.chat_template_kwargs": {"enable_thinking": False}}),
        ("use_peft: true\nlora_r: 32", {"model.lora": {"rank": 32, "alpha": 32, "targets": "all-linear"}}),
        ("use_peft: true\nlora_r: 16\nuse_rslora: true", {"model.lora": {"rank": 16, "alpha": 128, "targets": "all-linear"}}),
    ],
)  # fmt: skip
def test_single_arguments(text: str, expected: dict[str, object]) -> None:
    imported = read(
        f"num_generations: 8\nmodel_name_or_path: m/m\ndataset_name: d\nmax_steps: 10\nreward_funcs: accuracy\n{text}\n"
    )
    for key, value in expected.items():
        got = imported.keys.get(key)
        assert got == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize(
    ("kind", "text", "shuffle"),
    [
        ("SFTConfig", "", None),
        ("SFTConfig", "shuffle_dataset: false", None),  # the sampler is random all the same
        ("SFTConfig", "train_sampling_strategy: sequential", False),
        ("SFTConfig", "train_sampling_strategy: sequential\nshuffle_dataset: true", None),
        ("DPOConfig", "train_sampling_strategy: sequential", False),
        ("GRPOConfig", "train_sampling_strategy: sequential", None),  # it has a sampler of its own
        ("GRPOConfig", "shuffle_dataset: false", False),
    ],
)
def test_rows_are_taken_in_their_order_where_trl_does(kind: str, text: str, shuffle: bool | None) -> None:
    assert read(f"max_steps: 5\n{text}\n", kind=kind).keys.get("data.shuffle") is shuffle


def test_a_reference_of_pairs_that_shall_not_move_is_no_loss() -> None:
    assert "not supported" not in read("beta: 0.1\nsync_ref_model: false\n", kind="DPOConfig").by_fate()
    assert "not supported" in read("beta: 0.1\nsync_ref_model: true\n", kind="DPOConfig").by_fate()


def test_names_with_a_type_are_read() -> None:
    text = script("LR: float = 3e-6\nN: int", 'reward_funcs="a/judge"', "learning_rate=LR")
    assert read(text, "a.py").keys["optimizer.lr"] == 3e-6


def test_what_cannot_be_carried_over_is_said() -> None:
    imported = read(
        "num_generations: 8\nrepetition_penalty: 1.1\nload_in_4bit: true\npacking: true\nlogging_steps: 5\nlerning_rate: 1\n"
    )
    fates = {line.name: line.fate for line in imported.lines}
    assert fates == {"num_generations": "same", "repetition_penalty": "missing", "load_in_4bit": "missing", "packing": "unneeded",
                     "logging_steps": "unneeded", "lerning_rate": None}  # fmt: skip
    assert "did you mean learning_rate?" in imported.render()
    assert [one.partition(":")[0] for one in imported.needed] == ["model.path", "data.path", "steps", "rewards"]
    assert any("num_train_epochs (3) x rows of the data / " in one for one in imported.needed)
    assert read("num_generations: 8\nrepetition_penalty: 1.0\nload_in_4bit: false\n").by_fate().keys() == {
        "carried over",
        "not needed",
    }


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("SFTConfig", "", {"data.max_tokens": 1024, "data.too_long": None}),
        ("DPOConfig", "max_length: 256\ntruncation_mode: keep_end", {"data.max_tokens": 256, "data.too_long": "truncate_left"}),
        ("RewardConfig", "max_length: null", {"data.max_tokens": None}),
        ("GRPOConfig", "", {"data.max_tokens": None}),
        ("SFTConfig", "completion_only_loss: false", {"data.train_on": "all"}),
        ("SFTConfig", "completion_only_loss: false\nassistant_only_loss: true", {"data.train_on": None}),
        ("SFTConfig", "datasets: [{path: a/b, name: c, split: held}]\ndataset_name: d/d",
         {"data.path": "a/b:c", "data.split": "held"}),
        ("SFTConfig", "datasets: [{path: a/b}]\ntest_split_size: 0.1", {"data.path": "a/b", "data.eval_fraction": 0.1}),
        ("SFTConfig", "datasets: [{path: a/b}, {path: c/d}]\ndataset_name: d/d", {"data.path": None}),
    ],
)  # fmt: skip
def test_rows_to_learn_from(kind: str, text: str, expected: dict[str, object]) -> None:
    keys = read(f"max_steps: 3\n{text}\n", kind=kind).keys
    assert {key: keys.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("kind", "name", "value", "key"),
    [("GRPOConfig", "epsilon", 0.2, "group.surrogate"), ("SFTConfig", "dataset_train_split", "train", "data.split")],
)
def test_a_line_of_a_value_that_is_no_other_than_the_default_says_so(kind: str, name: str, value: object, key: str) -> None:
    (line,) = (line for line in read(f"{name}: {value}\n", kind=kind).lines if line.name == name)
    assert line.detail == f"{key}: its default"


@pytest.mark.parametrize("text", ["vllm_mode: server", "vllm_server_base_url: http://host:1", "vllm_mode: colocate"])
def test_servers_are_started_by_groupwise(text: str) -> None:
    needed = read(f"num_generations: 8\nmax_steps: 3\nuse_vllm: true\n{text}\n").needed
    assert any("groupwise serve MODEL" in said for said in needed) == ("colocate" not in text)


def test_what_sft_counts_and_trains_depends_on_rows() -> None:
    """With packing TRL's batch counts packed sequences; of messages it trains every token, unless a flag says otherwise."""
    packed = read("max_steps: 3\npacking: true\nmax_length: 2048\ngradient_accumulation_steps: 2\n")
    assert {line.name: line.fate for line in packed.lines}["packing"] == "changed"
    assert any(said.startswith("batch_size: 16 x 2,048 tokens") for said in packed.needed)
    assert any(said.startswith("data.train_on: all, if") for said in packed.needed)
    for text in ("packing: false", "packing: false\nassistant_only_loss: true", "packing: false\ncompletion_only_loss: true"):
        needed = read(f"max_steps: 3\n{text}\n").needed
        assert not any(said.startswith("batch_size") for said in needed)
        assert any(said.startswith("data.train_on") for said in needed) == (text == "packing: false")


@pytest.mark.parametrize(
    ("kind", "text", "name", "fate"),
    [
        ("SFTConfig", "loss_type: dft", "loss_type", "missing"),
        ("SFTConfig", "loss_type: nll", "loss_type", "unneeded"),
        ("SFTConfig", "dataset_text_field: body", "dataset_text_field", "changed"),
        ("GRPOConfig", "env: {A: b}", "env", "missing"),
        ("GRPOConfig", "datasets: [{path: a}, {path: b}]", "datasets", "missing"),
        ("RewardConfig", "use_peft: true\nlora_modules_to_save: [score]", "lora_modules_to_save", "unneeded"),
        ("RewardConfig", "use_peft: true\nlora_modules_to_save: [score, embed_tokens]", "lora_modules_to_save", "missing"),
        ("GRPOConfig", "use_peft: true\nlora_modules_to_save: [score]", "lora_modules_to_save", "missing"),
    ],
)
def test_what_becomes_of_a_value(kind: str, text: str, name: str, fate: str) -> None:
    lines = read(f"max_steps: 3\n{text}\n", kind=kind).lines
    assert {line.name: line.fate for line in lines}[name] == fate


@pytest.mark.parametrize(
    ("text", "prompts", "parallel"),
    [
        ("", 1, None),
        ("num_processes: 4", 4, None),
        ("accelerate_config: zero2", 8, "zero2"),  # those that come with TRL start 8
        ("accelerate_config: zero2\nnum_processes: 2", 2, "zero2"),
        ("accelerate_config: mine.yaml", 3, "zero3"),
        ("config_file: mine.yaml", 3, "zero3"),
        ("accelerate_config: single_gpu", 1, "auto"),
        ("config_file: alone.yaml", 1, "auto"),  # accelerate starts one process where nothing is distributed
    ],
)
def test_a_launchers_processes_multiply_batches(text: str, prompts: int, parallel: str | None) -> None:
    Path("mine.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 3\n")
    Path("alone.yaml").write_text("distributed_type: 'NO'\nnum_processes: 8\n")
    keys = read(f"num_generations: 8\nmax_steps: 3\n{text}\n").keys
    assert (keys["group.prompts_per_step"], keys.get("parallel")) == (prompts, parallel)


VALUES: dict[str, object] = {"text": "words", "number": 0.37, "whole": 7, "flag": True, "list": ["a", "b"], "mapping": {"a": 1}}


@pytest.mark.parametrize("kind", KINDS)
def test_no_argument_is_carried_over_that_no_key_is_from(kind: str) -> None:
    """Whatever is not in the recipe is named: as lost, as done elsewhere, as not needed, or because it is TRL's default."""
    always = {"max_completion_length": 8, "max_steps": 5, "reward_funcs": ["accuracy"], "model_name_or_path": "m"}
    for name, value in itertools.product(TRL_KEYS, VALUES.values()):
        trl = Configuration(kind=kind, arguments={**always, name: value})
        try:
            lines = translated(trl).lines
        except ConfigError:
            continue
        (line,) = (line for line in lines if line.name == name)
        written = any(name in one.names for one in trl.keys.values())
        default = value == trl.default(name)
        assert written or default or name in trl.notes or line.fate in ("missing", "elsewhere", "unneeded"), (kind, name, value)
        assert written or default or not line.detail.endswith(": its default") or name in trl.notes, (kind, name, value)


@pytest.mark.parametrize(
    ("kind", "text", "name", "title", "shown"),
    [
        ("DPOConfig", "max_prompt_length: 512", "max_prompt_length", "not supported", "a run of dpo does not take"),
        ("SFTConfig", "num_generations: 4", "num_generations", "not supported", "a run of sft does not take group.group_size"),
        ("GRPOConfig", "run_name: a\noutput_dir: b", "run_name", "not supported", "output_dir names the run"),
        ("GRPOConfig", "eval_strategy: epoch", "eval_strategy", "not supported", "no evaluation every epoch"),
        ("GRPOConfig", "vllm_dtype: half", "vllm_dtype", "not supported", "{name: vllm, dtype: ...}"),
        ("GRPOConfig", "environment_factory: [a:A, b:B]", "environment_factory", "not supported", "a run has one environment"),
        ("GRPOConfig", "environment_factory: {a: a:A}", "environment_factory", "not supported", "a run has one environment"),
        ("GRPOConfig", "report_to: comet_ml", "report_to", "not supported", "there is no dashboard comet_ml"),
        ("GRPOConfig", "generation_kwargs: {stop: a, penalty_alpha: 0.6}", "generation_kwargs", "not supported", "without penalty"),
        ("SFTConfig", "push_to_hub: true", "push_to_hub", "not done here", "`hf upload NAME runs/RUN/final`"),
        ("SFTConfig", "hub_model_id: me/it", "hub_model_id", "not done here", "hf upload"),
        ("SFTConfig", "compute_metrics: f", "compute_metrics", "not done here", "weight 0"),
        ("SFTConfig", "data_collator: f", "data_collator", "not done here", "rows are packed"),
        ("SFTConfig", "load_best_model_at_end: true", "load_best_model_at_end", "not done here", "docs/from-trl.md"),
    ],
)
def test_what_a_run_does_not_do_is_printed(kind: str, text: str, name: str, title: str, shown: str) -> None:
    imported = read(f"max_steps: 3\n{text}\n", kind=kind)
    (line,) = (line for line in imported.summary().splitlines() if line.startswith(f"  {title}: {name}: "))
    assert shown in line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("num_processes: 8", "for one process, not for 8"),
        ("tools: [a:b]", "holds no conversations"),
        ("environment_factory: a:B", "holds no conversations"),
    ],
)
def test_vllm_in_the_trainers_process_is_refused_where_it_cannot_be(text: str, shown: str) -> None:
    imported = read(f"num_generations: 8\nmax_steps: 3\nuse_vllm: true\nvllm_mode: colocate\n{text}\n")
    assert "rollout.engine" not in imported.keys
    lines = [line for line in imported.summary().splitlines() if line.startswith("  not supported: vllm_mode: colocate")]
    assert len(lines) == 1
    assert shown in lines[0]
    assert any(needed.startswith("rollout.engine: servers") for needed in imported.needed)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("accelerate launch --num_processes 8 train_grpo.py", "import-trl train_grpo.py --devices 8"),
        ("torchrun --nproc-per-node=4 code/sft.py --packing", "import-trl code/sft.py --devices 4"),
        ("accelerate launch --num_processes 8 trl grpo --config a/grpo.yaml", "import-trl a/grpo.yaml --devices 8"),
        ("python grpo.py --learning_rate 1e-6", "import-trl grpo.py --devices N"),
        ("trl dpo --beta 0.1", "write the arguments of its command into a YAML file"),
        ("", "write the arguments of its command into a YAML file"),
    ],
)
def test_a_shell_script_is_answered_with_what_it_starts(text: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(shown)):
        read(f"#!/bin/bash\nexport HF_HOME=/data\n{text}\n", "run.sh")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("rpo_alpha", "an argument of TRL before 1.16"),
        ("generate_during_eval", "an argument of TRL before 1.16"),
        ("use_liger_loss", "an argument of TRL before 1.16"),
        ("max_staleness", "TRL's asynchronous trainer: see rollout.ahead"),
        ("lerning_rate", "did you mean learning_rate?"),
        ("code_language", "no argument of TRL 1.16)"),
    ],
)
def test_an_unknown_argument_is_named_for_what_it_is(name: str, shown: str) -> None:
    imported = read(f"num_generations: 8\nmax_steps: 3\n{name}: 1\n")
    (line,) = (line for line in imported.summary().splitlines() if name in line)
    assert shown in line
    assert ("did you mean" in line) == ("did you mean" in shown)


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.py"])
def test_a_byte_order_mark_is_no_character_of_a_file(name: str) -> None:
    texts = {"a.yaml": "max_steps: 3\n", "a.json": '{"max_steps": 3}', "a.py": "GRPOConfig(max_steps=3)\n"}
    Path(name).write_text(texts[name], encoding="utf-8-sig")
    assert import_trl(name, kind="GRPOConfig").keys["steps"] == 3


@pytest.mark.parametrize("value", ["a\x1b[2Jb", "a\u202eb", "a\x9bb", "a\nb\U0001f600"])
def test_values_cannot_steer_a_terminal(value: str) -> None:
    odd = {"stop": [value], "hub_model_id": value, "odd": value, f"odd{value}": 1, "optim": value, "lr_scheduler_type": value}
    Path("a.py").write_text(f"GRPOConfig(max_steps=3, **{odd!r})\n")
    imported = import_trl("a.py")
    for text in (imported.summary(), imported.render()):
        assert not set("\x1b\u202e\x9b") & set(text)
    assert yaml.safe_load(imported.render())["rollout"]["stop"] == [value]


def test_a_file_of_megabytes_is_no_configuration() -> None:
    Path("a.yaml").write_text("".join(f"a{number}: 1\n" for number in range(400_000)))
    with pytest.raises(ConfigError, match=r"a\.yaml has \d,\d+,\d+ bytes: no configuration"):
        import_trl("a.yaml")


def test_a_file_that_tells_no_class_wants_one() -> None:
    with pytest.raises(ConfigError, match="--as GRPOConfig"):
        read("learning_rate: 1e-6\n")
    assert read("learning_rate: 1e-6\n", kind="RewardConfig").keys["objective"] == "reward"
    with pytest.raises(ConfigError, match="did you mean GRPOConfig"):
        read("learning_rate: 1e-6\n", kind="GPROConfig")
    for text in ("", "- 1\n", "3\n"):
        with pytest.raises(ConfigError, match="no arguments by name"):
            read(text)
    with pytest.raises(ConfigError, match="cannot read"):
        import_trl("nosuch.yaml")


SCRIPT = """
import os
raise SystemExit("a script is never run")
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
RATE = 5e-6
LONGEST, ASKED = 1024, 256
longest = 1024

def short(completions, **kwargs):
    return [-abs(20 - len(text)) for text in completions]

data = load_dataset("trl-lib/tldr", split="train")
args = GRPOConfig(
    output_dir="out/run 7", learning_rate=RATE, max_completion_length=longest - 2 * 128, max_steps=50, num_generations=4,
    per_device_train_batch_size=int(os.environ["B"]), report_to=["tensorboard"],
    model_init_kwargs={"dtype": torch.bfloat16}, **more,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=[short, accuracy_reward], args=args, train_dataset=data,
    peft_config=LoraConfig(r=8, lora_alpha=16),
)
"""


def test_a_script_is_read_and_never_run() -> None:
    imported = read(SCRIPT, "train.py")
    assert imported.keys["name"] == "run-7"
    assert (imported.keys["optimizer.lr"], imported.keys["rollout.max_new_tokens"], imported.keys["steps"]) == (5e-6, 768, 50)
    assert imported.keys["model.path"] == "Qwen/Qwen2-0.5B-Instruct" and imported.keys["model.dtype"] == "bfloat16"
    assert imported.keys["model.lora"] == {"rank": 8, "alpha": 16, "targets": "all-linear"}
    assert imported.keys["data.path"] == "trl-lib/tldr" and imported.keys["save.report_to"] == ["tensorboard"]
    assert imported.keys["rewards"] == [{"function": "rewards.py:short"}, {"function": "accuracy"}]
    assert any("move short into rewards.py: train.py would train when it is imported" in text for text in imported.needed)
    unread = {line.name: line.value for line in imported.lines if line.fate is None}
    assert unread == {"per_device_train_batch_size": "int(os.environ['B'])", "**": "more"}


def rewards_of(imported: Imported) -> list[str]:
    return [entry["function"] for entry in imported.keys["rewards"]]


def script(head: str, trainer: str, config: str = "max_steps=5") -> str:
    return f"""
from trl import GRPOConfig, GRPOTrainer
{head}
if __name__ == "__main__":
    args = GRPOConfig({config})
    trainer = GRPOTrainer(model="m/m", args=args, {trainer})
    trainer.train()
"""


@pytest.mark.parametrize(
    ("adapter", "rank", "alpha", "missing"),
    [
        ("LoraConfig()", 8, 8, []),
        ("LoraConfig(r=16, bias='none', task_type='CAUSAL_LM')", 16, 8, []),
        ("LoraConfig(r=16, lora_alpha=64, use_dora=True)", 16, 64, ["peft_config.use_dora"]),
        ("FastLanguageModel.get_peft_model(model, lora_alpha=4)", 16, 4, []),
    ],
)
def test_an_adapter_has_the_defaults_of_the_call_that_describes_it(adapter: str, rank: int, alpha: int, missing: list[str]) -> None:
    text = script(f"lora = {adapter}", "reward_funcs=[], train_dataset='rows.jsonl', peft_config=lora")
    imported = read(text, "adapter.py")
    assert imported.keys["model.lora"] == {"rank": rank, "alpha": alpha, "targets": "all-linear"}
    assert [line.name for line in imported.lines if line.fate == "missing"] == missing
    assert imported.keys["data.path"] == "rows.jsonl"


@pytest.mark.parametrize("name", ["accuracy_reward", "format_reward", "tag_count", "accuracy", "number", "exact", "regex", "model"])
@pytest.mark.parametrize("kind", ["def {}(completions, **_): return [0.0]", "async def {}(completions): ...", "class {}: ..."])
def test_a_function_of_the_scripts_is_its_own_whatever_it_is_called(name: str, kind: str) -> None:
    imported = read(script(kind.format(name), f"reward_funcs=[{name}], train_dataset=load_dataset('d/d')"), "c.py")
    assert rewards_of(imported) == [f"c.py:{name}"]
    assert yaml.safe_load(imported.render())["rewards"] == [{"function": f"c.py:{name}"}]


@pytest.mark.parametrize(
    ("head", "named", "function"),
    [
        ("from mine import correctness", "correctness", "mine.py:correctness"),
        ("from mine import accuracy_reward", "accuracy_reward", "mine.py:accuracy_reward"),
        ("from mine import correctness as accuracy_reward", "accuracy_reward", "mine.py:correctness"),
        ("from .mine import format_reward", "format_reward", "mine.py:format_reward"),
        ("import mine", "mine.format_reward", "mine.py:format_reward"),
        ("import mine as m", "m.format_reward", "mine.py:format_reward"),
        ("from package.rewards import accuracy_reward", "accuracy_reward", "package/rewards.py:accuracy_reward"),
        ("from package import rewards", "rewards.accuracy_reward", "package/rewards.py:accuracy_reward"),
        ("import package.rewards", "package.rewards.accuracy_reward", "package/rewards.py:accuracy_reward"),
        ("from installed.rewards import accuracy_reward", "accuracy_reward", "installed.rewards:accuracy_reward"),
        ("from trl.rewards import accuracy_reward", "accuracy_reward", "accuracy"),
        ("from trl.rewards import think_format_reward as format", "format", "think_format"),
        ("import trl.rewards", "trl.rewards.accuracy_reward", "accuracy"),
        ("from open_r1.rewards import tag_count_reward", "tag_count_reward", "tags"),
        ("from open_r1.rewards import code_reward", "code_reward", "open_r1.rewards:code_reward"),
    ],
)
def test_an_imported_reward_is_named_where_it_comes_from(head: str, named: str, function: str) -> None:
    Path("mine.py").touch()
    Path("package").mkdir()
    Path("package/rewards.py").touch()
    imported = read(script(head, f"reward_funcs={named}, train_dataset=load_dataset('d/d')"), "c.py")
    assert rewards_of(imported) == [function]
    assert not [text for text in imported.needed if "rewards" in text]


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        ("1024, 128", {"max_tokens": 1024, "cache": 128}),
        ("max_completion_len=LONGEST, soft_punish_cache=256", {"max_tokens": 1024, "cache": 256}),
    ],
)
def test_a_punishment_that_trl_makes_is_built_in(arguments: str, made: dict[str, int]) -> None:
    head = "LONGEST = 1024\nfrom trl.rewards import accuracy_reward, get_soft_overlong_punishment"
    functions = f"reward_funcs=[accuracy_reward, get_soft_overlong_punishment({arguments})], train_dataset=load_dataset('d/d')"
    rewards = read(script(head, functions), "c.py").keys.get("rewards")
    assert rewards == [{"function": "accuracy"}, {"function": "soft_overlong", "args": made}]
    head, functions = (
        f"{head}\npunish = get_soft_overlong_punishment({arguments})",
        "reward_funcs=punish, train_dataset=load_dataset('d/d')",
    )
    assert read(script(head, functions), "c.py").keys.get("rewards") == rewards[1:]


def test_rows_that_a_script_splits_are_split_here() -> None:
    head = "rows = load_dataset('d/d', split='train').train_test_split(test_size=0.1, seed=3)\ndef f(completions): ..."
    imported = read(script(head, "reward_funcs=f, train_dataset=rows['train'], eval_dataset=rows['test']"), "c.py")
    assert (imported.keys["data.path"], imported.keys["data.eval_fraction"]) == ("d/d", 0.1)
    assert "data.eval_path" not in imported.keys and not imported.by_fate().get("not read")
    other = "reward_funcs=f, train_dataset=rows['train'], eval_dataset=other['test']"
    imported = read(script(f"{head}\nother = load_dataset('e/e')", other), "c.py")
    assert (imported.keys["data.path"], imported.keys["data.eval_path"]) == ("d/d", "e/e")
    assert {line.name: line.fate for line in imported.lines}["test_split_size"] == "missing"
    assert "data.eval_fraction" not in imported.keys
    for trained, held in (("rows['test']", "rows['train']"), ("counted['train']", "counted['test']")):
        more = f"{head}\ncounted = load_dataset('d/d').train_test_split(test_size=100)"
        imported = read(script(more, f"reward_funcs=f, train_dataset={trained}, eval_dataset={held}"), "c.py")
        assert not {"data.path", "data.eval_fraction"} & imported.keys.keys()
        assert {line.name for line in imported.lines if line.fate is None} == {"train_dataset", "eval_dataset"}


def test_rewards_of_one_name_are_told_apart() -> None:
    head = "from trl.rewards import accuracy_reward\nimport a, b\ndef accuracy(completions, **_): return [0.0]"
    trainer = "reward_funcs=[accuracy_reward, accuracy, a.same, b.same, 'm/judge', 'm/other'], train_dataset=load_dataset('d/d')"
    imported = read(script(head, trainer), "c.py")
    assert [entry.get("name") for entry in imported.keys["rewards"]] == [None, "accuracy_2", None, "same_4", None, "m/other"]
    Path("r.yaml").write_text(imported.render())
    recipe = load_recipe("r.yaml", ["model.scratch={context: 1024}", "data.task=addition"])
    names = [reward.name or reward.function for reward in recipe.rewards]
    assert len(set(names)) == 6


def test_a_reward_without_a_name_loses_none_of_the_others() -> None:
    head = "import makers\ndef plain(completions): return [0.0]\nlong = makers.longest(8)"
    trainer = "reward_funcs=[plain, long, 'm/judge'], train_dataset=load_dataset('d/d')"
    imported = read(script(head, trainer), "c.py")
    assert rewards_of(imported) == ["c.py:plain", "rewards.py:number_2", "model"]
    assert any("write `number_2 = makers.longest(8)` into rewards.py" in said for said in imported.needed)


def test_a_script_in_another_folder_is_named_from_the_working_directory() -> None:
    Path("sub").mkdir()
    Path("sub/mine.py").touch()
    text = script(
        "from mine import first\ndef second(completions): ...", "reward_funcs=[first, second], train_dataset=load_dataset('d')"
    )
    assert rewards_of(read(text, "sub/c.py")) == ["sub/mine.py:first", "sub/c.py:second"]


def test_a_function_inside_of_a_function_must_move() -> None:
    text = script("def main():\n    def inner(completions): ...\n", "reward_funcs=[inner], train_dataset=load_dataset('d')")
    imported = read(text, "c.py")
    assert rewards_of(imported) == ["rewards.py:inner"]
    assert any("move inner into rewards.py: in c.py it stands inside of a function" in said for said in imported.needed)
    unknown = read(script("", "reward_funcs=[nowhere], train_dataset=load_dataset('d')"), "c.py")
    assert "rewards" not in unknown.keys
    assert [line.name for line in unknown.lines if line.fate is None] == ["reward_funcs"]


def test_every_argument_of_a_trainer_is_carried_over_or_named() -> None:
    Path("my_tools.py").touch()
    head = "from my_tools import search\ndef multiply(a: int, b: int): ...\nclass Room: ...\ndef f(completions): ..."
    trainer = (
        "reward_funcs=[f], train_dataset=load_dataset('d'), tools=[multiply, search], environment_factory=Room, "
        "callbacks=[object()], optimizers=(o, None), rollout_func=drive, processing_class=tokenizer, nonsense=3, eval_dataset=None"
    )
    text = script(head, trainer, "max_steps=5, max_tool_calling_iterations=3") + "    trainer.save_model('out')\n"
    text = text.replace(
        "trainer.train()", "trainer.train(resume_from_checkpoint=True)\n    trainer.push_to_hub()\n    trainer.odd(1)"
    )
    imported = read(text, "c.py")
    assert imported.tree()["environment"] == {
        "tools": ["c.py:multiply", "my_tools.py:search"], "factory": "c.py:Room", "max_turns": 4,
    }  # fmt: skip
    fates = {line.name: line.fate for line in imported.lines}
    assert {name: fates[name] for name in ("tools", "environment_factory", "max_tool_calling_iterations")} == dict.fromkeys(
        ("tools", "environment_factory", "max_tool_calling_iterations"), "changed"
    )
    assert {name for name, fate in fates.items() if fate == "missing"} == {"optimizers", "rollout_func"}
    assert {name for name, fate in fates.items() if fate == "elsewhere"} == {"callbacks", "push_to_hub()"}
    assert {"processing_class", "train()", "save_model()"} <= {name for name, fate in fates.items() if fate == "unneeded"}
    assert {name for name, fate in fates.items() if fate is None} == {"nonsense", "odd()"}
    assert all(name in imported.render() for name in fates)
    assert all(name in imported.summary() for name in ("callbacks", "rollout_func", "nonsense", "odd()", "tools"))
    assert (
        read(script(head, "reward_funcs=[f], train_dataset=d, tools=[lambda x: x]"), "c.py").keys.get("environment.tools") is None
    )


@pytest.mark.parametrize(
    ("evaluation", "path"),
    [
        ("ds.select(range(8))", None),
        ("ds", None),
        ("load_dataset('json', data_files='train.jsonl', split='train')", None),
        ("load_dataset('json', data_files='held.jsonl', split='train')", "held.jsonl"),
        ("load_dataset('some/rows', split='test')", "some/rows"),
    ],
)
def test_what_is_trained_on_is_not_held_out(evaluation: str, path: str | None) -> None:
    head = "ds = load_dataset('json', data_files='train.jsonl', split='train')\ndef f(completions): ..."
    text = script(head, f"reward_funcs=f, train_dataset=ds, eval_dataset={evaluation}", "max_steps=5, eval_strategy='steps'")
    imported = read(text, "c.py")
    assert (imported.keys["data.path"], imported.keys.get("data.eval_path")) == ("train.jsonl", path)
    if path is None:
        assert any(line.name == "eval_dataset" for line in imported.lines) or any(
            "data.eval_path" in one for one in imported.needed
        )
    text = "num_generations: 8\nmax_steps: 3\ndataset_name: rows.jsonl\neval_strategy: steps\n"
    assert "data.eval_path" not in read(text).keys


def test_what_unknown_arguments_may_set_is_not_written_as_trls_default() -> None:
    head = "def f(completions): ...\nknown = dict(learning_rate=2e-6, num_generations=4)"
    trainer = "reward_funcs=f, train_dataset=load_dataset('d')"
    open_ended = read(script(head, trainer, "max_steps=5, seed=3, **cfg"), "c.py")
    assert (open_ended.keys["seed"], open_ended.keys["steps"]) == (3, 5)
    assert not {"optimizer.lr", "group.group_size", "rollout.max_new_tokens", "optimizer.schedule"} & set(open_ended.keys)
    (said,) = (text for text in open_ended.needed if "**" in text)
    assert "optimizer.lr 1.0e-06" in said and "group.group_size 8" in said
    closed = read(script(head, trainer, "max_steps=5, **known"), "c.py").keys
    assert (closed["optimizer.lr"], closed["group.group_size"], closed["rollout.max_new_tokens"]) == (2e-6, 4, 512)


def test_arguments_behind_two_stars_are_read_where_they_are_written_out() -> None:
    head = "def f(completions): ...\nmore = {'reward_funcs': [f], 'tools': tools}\nrest = dict(seed=7, max_steps=steps())"
    text = script(head, "**more, **others, train_dataset=load_dataset('d')", "'out/mine', **rest")
    imported = read(text, "c.py")
    assert (imported.keys["name"], imported.keys["seed"], rewards_of(imported)) == ("mine", 7, ["c.py:f"])
    assert {line.name: line.value for line in imported.lines if line.fate is None} == {
        "max_steps": "steps()", "tools": "tools", "GRPOTrainer(**)": "others",
    }  # fmt: skip
    assert imported.keys["optimizer.lr"] == 1e-6  # the trainer's other arguments are none of the configuration's
    assert read(script("d = dict(**d)", "reward_funcs=[]", "**d"), "c.py").keys["model.path"] == "m/m"


def test_functions_of_a_script_that_trains_only_as_a_program_stay_in_it() -> None:
    for guarded in ("def main():\n", "if __name__ == '__main__':\n"):
        head, call = SCRIPT.split("trainer = ")
        call = "".join(f"    {line}\n" for line in f"trainer = {call}trainer.train()".splitlines())
        imported = read(head + guarded + call, "train.py")
        assert imported.keys["rewards"][0] == {"function": "train.py:short"}
        assert not [text for text in imported.needed if "would train" in text]


@pytest.mark.parametrize(
    ("told", "path"),
    [
        ('"json", data_files="rows/train.jsonl", split="train"', "rows/train.jsonl"),
        ('"parquet", data_files={"train": "a.parquet", "test": "b.parquet"}, split="test"', "b.parquet"),
        ('"json", data_files=FILE', "named.jsonl"),
        ('"json", data_files=glob("*.jsonl")', None),
        ('"json"', None),
    ],
)
def test_rows_in_files_are_the_files(told: str, path: str | None) -> None:
    """`load_dataset("json", ...)` names a format; the file is in `data_files`."""
    imported = read('FILE = "named.jsonl"\n' + SCRIPT.replace('"trl-lib/tldr", split="train"', told), "train.py")
    assert imported.keys.get("data.path") == path
    assert "data.split" not in imported.keys
    assert any(text.startswith("data.path") for text in imported.needed) == (path is None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "makes no GRPOConfig"),
        ("a = GRPOConfig()\nb = SFTConfig()", "makes 2 configurations"),
        ("a = (", "no Python that can be read"),
        ("a = " + "(" * 5000, "no Python that can be read"),
    ],
)
def test_scripts_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(text, "x.py")


def test_yaml_json_and_a_script_are_read_by_the_same_table() -> None:
    arguments = {
        "model_name_or_path": "m/m", "dataset_name": "d/d", "num_generations": 4, "max_steps": 40, "beta": 0.04, "top_p": 0.9,
        "loss_type": "dr_grpo", "warmup_ratio": 0.1, "report_to": ["wandb", "mlflow"], "use_vllm": True,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "lr_scheduler_type": "cosine_with_min_lr",
    }  # fmt: skip
    made = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if name not in ("model_name_or_path", "dataset_name"))
    imports = [
        read(yaml.safe_dump(arguments)),
        read(json.dumps(arguments), "trl.json"),
        read(script("", "train_dataset='d/d'", made), "train.py"),
    ]
    for imported in imports:
        assert imported.keys == imports[0].keys
        assert imported.keys["optimizer.warmup_steps"] == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reward_weights: [1.0]", "reward_weights=[1.0]: no value that TRL takes (1 weight for 2 reward functions)"),
        ("reward_weights: [1.0, 2.0, 3.0]", "3 weights for 2 reward functions"),
        ("num_generations: few", "num_generations='few': no value"),
        ("num_generations: 0", "num_generations=0: no value"),
        ("num_generations: 4.5", "num_generations=4.5: no value that TRL takes (a whole number is needed"),
        ("max_steps: 2.5", "max_steps=2.5: no value that TRL takes (a whole number is needed"),
        ("seed: 1.5", "seed=1.5: no value that TRL takes (a whole number is needed)"),
        ("epsilon: small", "epsilon='small': no value"),
        ("per_device_train_batch_size: [4]", "per_device_train_batch_size=[4]: no value"),
        ("learning_rate: {a: 1}", "learning_rate={'a': 1}: no value"),
        ("top_k: many", "top_k='many': no value that TRL takes (a whole number is needed)"),
        ("top_k: true", "top_k=True: no value that TRL takes (a whole number is needed)"),
        ("max_grad_norm: [1]", "max_grad_norm=[1]: no value that TRL takes (a number is needed)"),
        ("top_entropy_quantile: null", "top_entropy_quantile=None: no value that TRL takes (a number is needed)"),
        ("reward_weights: high", "reward_weights='high': no value that TRL takes (a number is needed)"),
        ("num_iterations: 1.5", "num_iterations=1.5: no value that TRL takes (a whole number is needed, at least 0)"),
        ("sync_ref_model: true\nref_model_mixup_alpha: much", "ref_model_mixup_alpha='much': no value"),
    ],
)
def test_the_argument_with_a_wrong_value_is_named(text: str, says: str) -> None:
    steps = "" if "max_steps" in text else "max_steps: 3\n"
    with pytest.raises(ConfigError, match=re.escape(says)):
        read(f"max_completion_length: 8\n{steps}reward_funcs: [accuracy, think_format]\n{text}\n")


def refusal(trl: Configuration) -> str | None:
    try:
        translated(trl)
    except ConfigError as error:
        return str(error)
    return None


def test_every_argument_takes_any_value_or_refuses_it_by_its_name() -> None:
    values = (None, True, 0, -1, 2.5, "words", ["words"], {"a": 1})
    on = {"use_peft": True, "use_vllm": True, "sync_ref_model": True, "use_adaptive_entropy": True, "tools": ["a:b"]}
    for (name, value), kind in zip(itertools.product(TABLE, values), itertools.cycle(KINDS)):
        arguments = {"reward_funcs": ["accuracy"], "eval_strategy": "steps", **on, name: value}
        error = refusal(Configuration(kind=kind, arguments=arguments))
        assert error is None or error.startswith(f"{name}={value!r}: no value that TRL takes ("), (kind, error)


def test_a_launchers_configuration_is_no_training_and_says_where_it_goes() -> None:
    for text, parallel in [
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\n", "zero3"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\nnum_processes: 8\n", "zero2"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n", "zero3"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", "ddp"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3, offload_param_device: cpu}\nnum_processes: 8\n",
            {"name": "zero3", "offload": True},
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\nnum_processes: 8\n",
            {"name": "zero3", "offload": True},
        ),
    ]:
        written = parallel if isinstance(parallel, str) else f"{{name: {parallel['name']}, offload: true}}"
        with pytest.raises(ConfigError, match=f"`parallel: {re.escape(written)}`.*--nproc 8"):
            read(text, "accelerate.yaml")
        assert read("max_steps: 3\ndeepspeed: accelerate.yaml\n", kind="SFTConfig").keys["parallel"] == parallel
    with pytest.raises(ConfigError, match="`parallel: zero2`"):
        read('{"zero_optimization": {"stage": 2}}', "ds.json")


def test_a_script_whose_arguments_come_from_its_command_line_says_so() -> None:
    with pytest.raises(ConfigError, match=r"reads it from its command line: import the YAML file behind its --config"):
        read("parser = TrlParser((ScriptArguments, GRPOConfig))\n", "grpo.py")


def test_rloo_is_rloo() -> None:
    """The KL is in the reward, two completions and beta 0.05 are TRL's defaults, and its clipping is ours."""
    given = "model_name_or_path: m/m\ndataset_name: d\nmax_steps: 10\nreward_funcs: accuracy\n"
    imported = read(f"{given}normalize_advantages: true\nreward_clip_range: [-1, 1]\nepsilon_high: 0.3\n")
    assert imported.kind == "RLOOConfig"
    assert (imported.keys["objective"], imported.keys["group.beta"], imported.keys["group.group_size"]) == ("rloo", 0.05, 2)
    assert imported.keys["group.credit"] == {"name": "leave_one_out", "scale": "batch"}
    assert imported.keys["group.surrogate"] == {"name": "clipped", "low": 0.2, "high": 0.3}
    assert "group.kl" not in imported.keys
    assert [line.name for line in imported.lines if line.fate == "missing"] == ["reward_clip_range"]
    assert "group.surrogate" not in read(given, kind="RLOOConfig").keys


def test_a_model_that_a_script_loads_is_its_path() -> None:
    loaded = (
        "net = AutoModelForCausalLM.from_pretrained(NAME, torch_dtype=torch.bfloat16, quantization_config=Q(), device_map=None)"
    )
    script = f'NAME = "a/model"\n{loaded}.to("cuda")\nrows = load_dataset("d/d", "main")["train"]\n'
    imported = read(f"{script}DPOTrainer(net, args=DPOConfig(beta=0.2), train_dataset=rows)\n", "dpo.py")
    assert (imported.keys["model.path"], imported.keys["model.dtype"], imported.keys["data.path"]) == (
        "a/model",
        "bfloat16",
        "d/d:main",
    )
    assert {line.name for line in imported.lines if line.fate == "missing"} == {"quantization_config"}
    assert "model.path" not in " ".join(imported.needed)
    made = "rows = load_dataset('d/d').map(f)\nGRPOTrainer('a/model', 'a/judge', args=GRPOConfig(), train_dataset=rows)\n"
    imported = read(made, "grpo.py")
    assert imported.keys["rewards"] == [{"function": "model", "args": {"path": "a/judge"}}]
    assert imported.keys["model.path"] == "a/model"
    assert [line.name for line in imported.lines if line.fate is None] == ["train_dataset"]
    assert "dataset.to_json" in imported.render()


@pytest.mark.parametrize(("reference", "fate"), [("a/model", "unneeded"), ("another/model", "missing")])
def test_a_reference_that_is_the_model_itself_is_no_loss(reference: str, fate: str) -> None:
    text = (
        "net = AutoModelForCausalLM.from_pretrained('a/model')\n"
        f"ref = AutoModelForCausalLM.from_pretrained({reference!r}).to('cuda')\n"
        "DPOTrainer(net, ref, args=DPOConfig(), train_dataset=load_dataset('d/d'))\n"
    )
    assert {line.name: line.fate for line in read(text, "dpo.py").lines}["ref_model"] == fate


# ---------------------------------------------------------------- public configurations, by their keys and values

OPEN_R1 = """
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
bf16: true
do_eval: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
hub_strategy: every_save
log_level: info
logging_steps: 1
logging_strategy: steps
max_steps: -1
overwrite_output_dir: true
push_to_hub: true
report_to: [wandb]
save_total_limit: 1
seed: 42
"""
PUBLIC: dict[str, tuple[str, str, dict[str, object]]] = {
    # huggingface/open-r1, recipes/Qwen2.5-1.5B-Instruct/grpo/config_demo.yaml
    "open-r1 demo": (OPEN_R1 + """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: AI-MO/NuminaMath-TIR
dataset_configs: [all]
num_processes: 7
use_vllm: true
vllm_device: auto
vllm_gpu_memory_utilization: 0.7
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 16
learning_rate: 2.0e-05
log_completions: true
lr_scheduler_type: cosine
max_prompt_length: 512
max_completion_length: 1024
num_generations: 7
num_train_epochs: 1
output_dir: data/Qwen2.5-1.5B-Open-R1-GRPO
per_device_eval_batch_size: 32
per_device_train_batch_size: 16
save_strategy: epoch
warmup_ratio: 0.1
""", "GRPOConfig", {"objective": "bnpo", "optimizer.lr": 2e-5, "group.group_size": 7, "rollout.max_new_tokens": 1024,
                    "group.prompts_per_step": 256, "save.every": 0, "data.max_prompt_tokens": 512}),
    # huggingface/open-r1, recipes/DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml (the chat template shortened)
    "open-r1 distill": (OPEN_R1 + """
model_name_or_path: deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B
chat_template: "{% for m in messages %}{{ m['content'] }}{% endfor %}"
dataset_name: AI-MO/NuminaMath-TIR
use_vllm: true
vllm_device: auto
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 16
learning_rate: 1.0e-06
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_prompt_length: 512
max_completion_length: 1024
num_generations: 7
num_train_epochs: 1
output_dir: data/DeepSeek-R1-Distill-Qwen-1.5B-GRPO
per_device_train_batch_size: 16
warmup_ratio: 0.1
""", "GRPOConfig", {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.1,
                    "model.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}),
    # huggingface/open-r1, recipes/Qwen2.5-Math-7B/grpo/config_simple_rl.yaml (the system prompt shortened)
    "open-r1 simple rl": (OPEN_R1 + """
model_name_or_path: aidando73/Qwen-2.5-7B-Simple-RL-v2
dataset_name: DigitalLearningGmbH/MATH-lighteval
dataset_config: default
system_prompt: |-
  You are a helpful math assistant.

  Think first.
output_dir: data/Qwen-2.5-7B-Simple-RL-v4
wandb_project: open-r1-math-rl
learning_rate: 1.5e-06
reward_weights: [1.0, 0.5]
reward_funcs: [accuracy, format]
use_vllm: true
vllm_device: auto
eval_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 8
lr_scheduler_type: cosine
max_prompt_length: 650
max_completion_length: 1024
num_generations: 7
num_train_epochs: 1
per_device_train_batch_size: 16
save_strategy: epoch
warmup_ratio: 0.1
""", "GRPOConfig", {"rewards": [{"function": "accuracy", "weight": 1.0}, {"function": "think_format", "weight": 0.5}],
                    "data.system": "You are a helpful math assistant.\n\nThink first.", "data.chat": True}),
    # huggingface/open-r1, recipes/Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces.yaml (the system prompt shortened)
    "open-r1 codeforces": (OPEN_R1.replace("do_eval: true", "do_eval: false") + """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
dataset_name: open-r1/codeforces-verifiable
dataset_prompt_column: prompt_c++17
system_prompt: "You are a helpful AI Assistant."
callbacks: [push_to_hub_revision]
benchmarks: [lcb_v4]
beta: 0.0
loss_type: dr_grpo
scale_rewards: false
eval_strategy: "no"
use_vllm: true
vllm_device: auto
gradient_accumulation_steps: 16
learning_rate: 1.0e-06
lr_scheduler_type: constant_with_warmup
max_grad_norm: 0.2
max_prompt_length: 2000
max_completion_length: 8192
num_generations: 16
num_train_epochs: 40
output_dir: data/Qwen2.5-Coder-7B-Instruct-Codeforces-GRPO_v01.00
per_device_train_batch_size: 8
reward_funcs: [cf_code, code_format]
reward_weights: [1.0, 0.1]
save_strategy: steps
save_steps: 0.05
temperature: 0.7
warmup_ratio: 0.1
mask_truncated_completions: true
code_language: cpp
""", "GRPOConfig", {"objective": "dr_grpo", "group.credit": None, "group.truncated": "mask", "rollout.temperature": 0.7,
                    "optimizer.clip_norm": 0.2, "data.columns": {"prompt": "prompt_c++17"}, "group.prompts_per_step": 8}),
    # huggingface/open-r1, recipes/OlympicCoder-7B/sft/config_v00.00.yaml
    "open-r1 sft": (OPEN_R1.replace("do_eval: true", "do_eval: false") + """
model_name_or_path: Qwen/Qwen2.5-Coder-7B-Instruct
dataset_name: open-r1/codeforces-cots
dataset_config: solutions_decontaminated
dataset_num_proc: 48
eval_strategy: 'no'
gradient_accumulation_steps: 8
learning_rate: 1.0e-05
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
packing: false
max_grad_norm: 0.2
max_length: 32768
num_train_epochs: 10
output_dir: data/OlympicCoder-7B
per_device_eval_batch_size: 1
per_device_train_batch_size: 2
save_strategy: steps
save_steps: 0.2
use_liger: true
warmup_ratio: 0.03
""", "SFTConfig", {"objective": "sft", "epochs": 10.0, "batch_size": 16, "optimizer.lr": 1e-5, "optimizer.min_lr_ratio": 0.1}),
    # huggingface/alignment-handbook, recipes/zephyr-7b-beta/sft/config_full.yaml (the chat template shortened)
    "zephyr sft": ("""
model_name_or_path: mistralai/Mistral-7B-v0.1
torch_dtype: bfloat16
chat_template: "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"
dataset_mixture:
  datasets:
    - {id: HuggingFaceH4/ultrachat_200k, config: default, split: train_sft, columns: [messages], weight: 1.0}
  test_split_size: 1000
  seed: 0
bf16: true
eval_strategy: epoch
gradient_accumulation_steps: 1
gradient_checkpointing: true
learning_rate: 2.0e-05
lr_scheduler_type: cosine
max_seq_length: 2048
max_steps: -1
num_train_epochs: 1
output_dir: data/zephyr-7b-sft-full
per_device_train_batch_size: 16
remove_unused_columns: true
save_strategy: steps
save_steps: 100
seed: 42
warmup_ratio: 0.1
""", "SFTConfig", {"batch_size": 16, "epochs": 1.0, "save.every": 100, "optimizer.schedule": "cosine"}),
    # huggingface/alignment-handbook, recipes/zephyr-7b-beta/dpo/config_qlora.yaml
    "zephyr dpo qlora": ("""
model_name_or_path: alignment-handbook/zephyr-7b-sft-qlora
torch_dtype: float16
use_peft: true
load_in_4bit: true
lora_r: 16
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
dataset_mixer: {HuggingFaceH4/ultrafeedback_binarized: 1.0}
dataset_splits: [train_prefs, test_prefs]
preprocessing_num_workers: 12
bf16: true
beta: 0.01
do_eval: true
evaluation_strategy: steps
eval_steps: 100
gradient_accumulation_steps: 1
learning_rate: 5.0e-6
lr_scheduler_type: cosine
max_length: 1024
max_prompt_length: 512
num_train_epochs: 1
optim: paged_adamw_32bit
output_dir: data/zephyr-7b-dpo-qlora
per_device_train_batch_size: 4
save_steps: 100
seed: 42
warmup_ratio: 0.1
""", "DPOConfig", {"objective": "dpo", "pairs.beta": 0.01, "pairs.loss": "sigmoid", "eval.every": 100, "batch_size": 4}),
    # huggingface/alignment-handbook, recipes/smollm3/dpo/apo.yaml
    "smollm3 apo": ("""
model_name_or_path: HuggingFaceTB/SmolLM3-3B-checkpoints
model_revision: it-SFT
torch_dtype: bfloat16
trust_remote_code: true
dataset_num_proc: 12
bf16: true
eval_strategy: 'no'
gradient_accumulation_steps: 2
output_dir: data/SmolLM3-DPO
run_name: SmolLM3-DPO
learning_rate: 1.0e-06
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
max_grad_norm: 0.2
beta: 0.05
loss_type: apo_zero
max_length: 24576
num_train_epochs: 1
per_device_train_batch_size: 1
padding_free: true
save_steps: 0.5
seed: 42
use_liger_kernel: true
warmup_ratio: 0.1
""", "DPOConfig", {"pairs.beta": 0.05, "batch_size": 2, "model.trust_remote_code": True}),
    # WhyChaos/TRE-Encouraging-Exploration-in-the-Trust-Region, experiments/hh/reward/train_reward_model_1.5b.py
    "tre reward": ("""
training_args = RewardConfig(
    output_dir="1.5b_reward_model/", report_to="wandb", run_name="1.5b_reward_model", model_init_kwargs={"num_labels": 1},
    num_train_epochs=3, per_device_train_batch_size=8, gradient_accumulation_steps=8, learning_rate=1e-5, warmup_ratio=0.1,
    center_rewards_coefficient=1e-2, bf16=True, max_length=None,
)
trainer = RewardTrainer(model="../model/Qwen/Qwen2.5-1.5B-Instruct", args=training_args,
                        train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"))
""", "RewardConfig", {"objective": "reward", "reward_model.centering": 0.01, "batch_size": 64, "epochs": 3.0}),
    # eliashossain001/efficient-gemma3-finetuning, train_module/train.py
    "gemma3 grpo": ("""
max_prompt_length = 256
max_seq_length = 1024
training_args = GRPOConfig(
    learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.1, warmup_ratio=0.1, lr_scheduler_type="cosine",
    optim="adamw_torch_fused", logging_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=1, num_generations=4,
    max_prompt_length=max_prompt_length, max_completion_length=max_seq_length - max_prompt_length, max_steps=50, save_steps=50,
    max_grad_norm=0.1, report_to="none", output_dir="outputs",
)
trainer = GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=reward_funcs, args=training_args, train_dataset=dataset)
""", "GRPOConfig", {"optimizer.betas": [0.9, 0.99], "optimizer.weight_decay": 0.1, "rollout.max_new_tokens": 768, "steps": 50,
                    "optimizer.warmup_steps": 5, "optimizer.clip_norm": 0.1}),
    # huggingface/trl, docs/source/rloo_trainer.md
    "trl rloo": ("""
dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")
def reward_num_unique_letters(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
training_args = RLOOConfig(output_dir="Qwen2-0.5B-RLOO")
trainer = RLOOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=reward_num_unique_letters, args=training_args,
                      train_dataset=dataset)
""", "RLOOConfig", {"objective": "rloo", "group.beta": 0.05, "group.group_size": 2, "group.prompts_per_step": 4}),
    # minwukim/VRL, trl_new_demo.py
    "tldr grpo": ("""
dataset = load_dataset("trl-lib/tldr", split="train")
def reward_len(completions, **kwargs): return [-abs(20 - len(completion)) for completion in completions]
training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO", logging_steps=1, use_vllm=True, vllm_mode="colocate", vllm_tensor_parallel_size=1,
    vllm_gpu_memory_utilization=0.3, max_prompt_length=512, max_completion_length=1024, max_steps=2, num_generations=4,
    num_train_epochs=1, per_device_train_batch_size=4, push_to_hub=False, report_to=None,
)
trainer = GRPOTrainer(model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=reward_len, args=training_args, train_dataset=dataset)
""", "GRPOConfig", {"model.path": "Qwen/Qwen2-0.5B-Instruct", "data.path": "trl-lib/tldr", "steps": 2, "group.prompts_per_step": 1,
                    "rewards": [{"function": "rewards.py:reward_len"}]}),
}  # fmt: skip
"""Name -> arguments as published, the class, and keys that follow from them."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configurations_become_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, kind, expected = PUBLIC[name]
    script = kind + "(" in text
    imported = read(text, "config.py" if script else "config.yaml")
    assert imported.kind == kind
    given = yaml.safe_load(text) if not script else {line.name for line in imported.lines}
    assert {line.name for line in imported.lines} == set(given)
    for key, value in expected.items():
        assert imported.keys.get(key) == (pytest.approx(value) if isinstance(value, float) else value), key
    # The recipe is whole once the rest is said: models, data and functions of our own in the place of the published ones.
    Path("rows.jsonl").write_text("{}\n")
    for file in {"rewards.py", "config.py"}:
        Path(file).touch()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    Path("recipe.yaml").write_text(imported.render())
    said = ["data.path=rows.jsonl", "data.eval_path=null", "model.path=some/model"]
    said += ["steps=100"] if "steps" not in imported.keys and "epochs" not in imported.keys else []
    said += ["rewards=[{function: accuracy}]"] if kind in ("GRPOConfig", "RLOOConfig") and "rewards" not in imported.keys else []
    said += ["rollout.engine=native"] if "rollout.engine" in imported.keys else []
    recipe = load_recipe("recipe.yaml", said)
    for key, value in expected.items():
        here: object = recipe
        for part in key.split("."):
            here = getattr(here, part)
        if key not in ("data.path", "model.path", "rewards") and not isinstance(value, dict) and value is not None:
            assert here == (
                pytest.approx(value) if isinstance(value, float) else tuple(value) if isinstance(value, list) else value
            ), key


# ---------------------------------------------------------------- and they train


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the place of the published ones: a random Llama that reads bytes and has a chat template."""
    tokenizer = make_tokenizer("bytes")
    model = scratch_model(
        ScratchSettings(family="llama", hidden=32, layers=2, heads=2, context=4096),
        vocabulary=len(tokenizer),
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversation(number: int, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} + 1?"}, {"role": "assistant", "content": answer}]


ROWS: dict[str, Callable[[int], dict[str, object]]] = {
    "GRPOConfig": lambda n: {"prompt": f"What is {n} + 1?", "prompt_c++17": f"Print {n} + 1.", "solution": str(n + 1)},
    "RLOOConfig": lambda n: {"prompt": conversation(n, "")[:1]},
    "SFTConfig": lambda n: {"messages": conversation(n, f"It is {n + 1}.")},
    "RewardConfig": lambda n: {"chosen": conversation(n, f"{n + 1}"), "rejected": conversation(n, f"{n + 2}, sorry")},
    "DPOConfig": lambda n: {"chosen": conversation(n, f"{n + 1}"), "rejected": conversation(n, f"{n + 2}, sorry")},
}  # fmt: skip
"""Rows of the form that the published data sets have, by class."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_imported_recipes_are_planned_and_trained(name: str, tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every key as imported, but for the model, the data, the device's sampler and how much of it is done."""
    text, kind, _ = PUBLIC[name]
    imported = read(text, "config.py" if f"{kind}(" in text else "config.yaml")
    Path("recipe.yaml").write_text(imported.render())
    for rows, numbers in (("rows.jsonl", range(40)), ("held_out.jsonl", range(40, 44))):
        Path(rows).write_text("".join(json.dumps(ROWS[kind](n)) + "\n" for n in numbers))
    functions = "".join(re.findall(r"^def reward_.*(?:\n .*)*\n", text, flags=re.MULTILINE))
    Path("rewards.py").write_text(functions)
    online = kind in ("GRPOConfig", "RLOOConfig")
    said = [f"model.path={tiny}", "data.path=rows.jsonl", "steps=2"]
    said += [f"{key}=null" for key in ("data.subset", "data.split", "data.eval_split") if key in imported.keys]
    said += ["data.eval_path=held_out.jsonl"] if "data.eval_path" in imported.keys else []
    said += ["rollout.max_new_tokens=8", "group.prompts_per_step=2"] if online else ["batch_size=4"]
    said += ["rollout.engine=native"] if "rollout.engine" in imported.keys else []
    said += ["group.truncated=keep"] if "group.truncated" in imported.keys else []  # of 8 tokens all are cut off
    said += ["optimizer.warmup_steps=1"] if "optimizer.warmup_steps" in imported.keys else []
    said += ["save.report_to=[]"] if "save.report_to" in imported.keys else []
    if online and any(text.startswith("rewards") for text in imported.needed) and not functions:
        said += ["rewards=[{function: accuracy}]"]
    assert main(["train", "recipe.yaml", *said, "--dry-run"]) == 0, capfd.readouterr().err
    assert main(["train", "recipe.yaml", *said, "--quiet"]) == 0, capfd.readouterr().err
    (log,) = Path("runs").glob("**/metrics.jsonl")
    steps = read_metrics(log.parent)
    assert max(step["step"] for step in steps) == 2
    assert all(math.isfinite(step["loss"]) for step in steps if step["step"])
    assert (log.parent / "final" / "config.json").is_file()


def test_the_command_writes_a_recipe_and_says_what_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    Path("trl.yaml").write_text("num_generations: 4\nrepetition_penalty: 1.1\nlearning_rate: 2.0e-6\nmax_steps: 3\n")
    assert main(["recipes", "import-trl", "trl.yaml", "new.yaml"]) == 0
    said = capsys.readouterr().out
    assert "not supported: repetition_penalty: 1.1" in said and "still to set: model.path" in said
    assert "lr: 2.0e-06  # learning_rate" in Path("new.yaml").read_text()
    assert main(["recipes", "import-trl", "trl.yaml", "new.yaml"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["recipes", "import-trl", "trl.yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["objective"] == "bnpo"
    assert main(["recipes", "import-trl"]) == 2
    assert main(["recipes", "copy", "x", "--devices", "3"]) == 2


def test_what_could_not_be_read_is_still_to_set_and_no_default_of_trls(tmp_path: Path) -> None:
    script = """
from trl import GRPOConfig
GRPOConfig(learning_rate=float(x), seed=int(x), gradient_accumulation_steps=int(x), num_generations=4, beta=0.1)
"""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    imported = import_trl(tmp_path / "train.py")
    assert imported.keys["group.beta"] == 0.1 and imported.keys["group.group_size"] == 4
    for key in ("optimizer.lr", "seed", "group.prompts_per_step"):
        assert key not in imported.keys
        assert any(need.startswith(f"{key}, which follows from ") for need in imported.needed), key
