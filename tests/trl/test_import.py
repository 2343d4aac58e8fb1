"""TRL's arguments are all known, and its configurations become recipes that mean the same."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
HEAD = {"max_steps": 10}
HEADS = {
    "GRPOConfig": HEAD
    | {
        "num_generations": 8,
        "model_name_or_path": "m/m",
        "dataset_name": "d",
        "reward_funcs": "accuracy",
        "max_completion_length": 512,
    }
}
"""Class -> arguments that stand before those of a case."""


def read_table(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


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
    for name, text in (
        ("epsilon", "{name: clipped, low: ..., high: ...}"),
        ("push_to_hub", "groupwise push"),
        ("seed", "seed"),
        ("async_training", "see rollout.engine.ahead"),
    ):
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


@pytest.mark.parametrize("case", read_table("arguments.yaml"), ids=itertools.count())
def test_single_arguments(case: dict[str, Any]) -> None:
    Path("mine.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 3\n")
    Path("alone.yaml").write_text("distributed_type: 'NO'\nnum_processes: 8\n")
    kind = case.get("kind", "GRPOConfig")
    given = yaml.safe_load(case["text"]) or {}
    head = [f"{name}: {value}\n" for name, value in HEADS.get(kind, HEAD).items() if name not in given]
    text = "".join(head) + case["text"]
    if "refused" in case:
        with pytest.raises(ConfigError, match=re.escape(case["refused"])):
            read(text, kind=kind)
        return
    imported = read(text, kind=kind)
    for key, value in case.get("keys", {}).items():
        assert imported.keys.get(key) == (pytest.approx(value) if isinstance(value, float) else value), key
    lines = {line.name: line for line in imported.lines}
    assert {name: lines[name].fate for name in case.get("fates", ())} == case.get("fates", {})
    assert {name: lines[name].detail for name in case.get("details", ())} == case.get("details", {})
    if "line" in case:
        (line,) = (line for line in imported.summary().splitlines() if case["line"] in line)
        assert case["shown"] in line and ("did you mean" in line) == ("did you mean" in case["shown"])
    needed = "\n".join(imported.needed)
    assert case.get("needed", "") in needed
    assert "unneeded" not in case or case["unneeded"] not in needed
    assert case.get("absent") not in imported.by_fate()


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


@pytest.mark.parametrize(
    ("callback", "patience", "others"),
    [("EarlyStoppingCallback(early_stopping_patience=3)", 3, 0), ("EarlyStoppingCallback(), Own()", 1, 1), ("Own()", None, 1)],
)
def test_early_stopping_of_a_script(callback: str, patience: int | None, others: int) -> None:
    trainer = f"reward_funcs=[f], train_dataset=load_dataset('d'), callbacks=[{callback}]"
    arguments = "max_steps=5, eval_strategy='steps', eval_steps=2, metric_for_best_model='eval_reward', load_best_model_at_end=True"
    imported = read(script("def f(completions): ...", trainer, arguments), "c.py")
    assert (imported.keys["eval.best"], imported.keys.get("eval.stop_after")) == ("reward", patience)
    assert [line.name for line in imported.lines].count("callbacks") == others


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

PUBLISHED = read_table("published.yaml")
PUBLIC = {case["name"]: case for case in PUBLISHED["configurations"]}


def published(name: str) -> tuple[str, str, Imported]:
    """The text of a configuration, its class and what is read from it."""
    case = PUBLIC[name]
    text = PUBLISHED["common"] + case["text"] if "common" in case else case["text"]
    return text, case["kind"], read(text, "config.py" if f"{case['kind']}(" in text else "config.yaml")


@pytest.mark.parametrize("name", PUBLIC)
def test_public_configurations_become_recipes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, kind, imported = published(name)
    expected, script = PUBLIC[name]["keys"], f"{kind}(" in text
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
    text, kind, imported = published(name)
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
