"""Recipes: every kind of mistake is found, all at once, with its line; what is right is read, merged and written back."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from groupwise.config.bundled import find_recipe, header
from groupwise.config.recipes import (
    WENT,
    WERE,
    changes,
    dump,
    dump_stages,
    load_recipe,
    load_stages,
    make_recipe,
    parse_recorded,
    parse_stages,
    read_environment,
    run_folder,
)
from groupwise.config.schema import knobs
from groupwise.config.settings import (
    EngineSettings,
    GroupSettings,
    ModelSettings,
    OptimizerSettings,
    ParallelSettings,
    Recipe,
    RewardSettings,
    ScratchSettings,
)
from groupwise.errors import ConfigError
from groupwise.utils.secrets import secret_name


@pytest.fixture(autouse=True, scope="module")
def online() -> Iterator[None]:
    """Hub names in these recipes are taken on trust, also where the suite runs offline; nothing is fetched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        yield


GOOD = """\
# Adds numbers.
# Costs a minute.

objective: grpo
name: sums
steps: 3
model:
  scratch: {hidden: 64}
data:
  task: addition
rewards:
- function: accuracy
- {function: think_format, weight: 0.5}
optimizer:
  lr: 1e-4
"""

STAGED = """\
name: demo
model: {scratch: {hidden: 64}}
data: {task: addition, task_args: {digits: 3}}
rewards: [{function: accuracy}]
stages:
  sft: {objective: sft, epochs: 2, optimizer: {lr: 3e-3, betas: [0.9, 0.95]}}
  grpo:
    objective: grpo
    steps: 20
    model: {path: "stage:sft"}
    group: {surrogate: {name: clipped, low: 0.2}}
"""


def one(text: str, *overrides: str) -> Recipe:
    (recipe,) = parse_stages(text, "r.yaml", overrides).values()
    return recipe


def refused(text: str, *overrides: str) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ConfigError) as caught:
        parse_stages(text, "r.yaml", overrides)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    return lines[1:] if lines[0].endswith(" problems in r.yaml:") else lines


def test_a_good_recipe() -> None:
    recipe = one(GOOD)
    assert recipe.optimizer.lr == 1e-4
    assert recipe.model.scratch == ScratchSettings(hidden=64)
    assert recipe.rewards == (RewardSettings(function="accuracy"), RewardSettings(function="think_format", weight=0.5))
    assert recipe.group == GroupSettings()


@pytest.mark.parametrize("said", ["accuracy", "[accuracy]", "[{function: accuracy}]"])
def test_a_reward_may_be_said_by_its_name(said: str) -> None:
    assert one(GOOD, f"rewards={said}").rewards == (RewardSettings(function="accuracy"),)
    text = GOOD.replace("rewards:\n- function: accuracy\n- {function: think_format, weight: 0.5}\n", f"rewards: {said}\n")
    assert one(text, "rewards.0.weight=2").rewards == (RewardSettings(function="accuracy", weight=2.0),)


@pytest.mark.parametrize("name", ["007", "1e5", "1_", "2024_", "0x1f", "5."])
def test_a_number_is_a_text_as_it_is_written_where_a_text_is_meant(name: str) -> None:
    assert one(GOOD.replace("name: sums", f"name: {name}")).name == one(GOOD, f"name={name}").name == name
    assert one(GOOD, "rewards.0.name=1e5").rewards[0].name == "1e5"


def test_a_reward_of_a_list_may_be_replaced_by_its_name() -> None:
    assert one(GOOD, "rewards.0=exact").rewards[0] == RewardSettings(function="exact")


def test_a_column_for_a_reward_function_may_have_any_name() -> None:
    assert one(GOOD, "data.columns={message: text, answers: gold, prompt: question}").data.columns["message"] == "text"


def test_rewards_that_an_environment_brings_can_retire_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").touch()
    for environment in ("{factory: 'env.py:Room'}", "{reasoning_gym: chain_sum}"):
        text = GOOD.replace("rewards:\n- function: accuracy\n- {function: think_format, weight: 0.5}\n", "")
        text = text.replace("data:\n  task: addition\n", "verdict: environment\ndata: {retire: 2, curriculum: 0.5, chat: true%s}\n")
        task = "" if "gym" in environment else ", task: addition"
        assert one(text % task + f"environment: {environment}\n").data.retire == 2


NO_REWARD = GOOD.replace("rewards:\n- function: accuracy\n- {function: think_format, weight: 0.5}\n", "")


def test_a_rule_about_a_preset_gives_way_to_the_part_that_replaces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    taught = "group: {credit: reverse_kl}\nteacher: {hint: x}\n"
    assert one(NO_REWARD + taught).rewards == ()
    assert one(NO_REWARD + taught.replace("reverse_kl", "mine.py:credit")).rewards == ()
    distilled = NO_REWARD.replace("objective: grpo", "objective: distill") + "group: {credit: standardized}\nteacher: {hint: x}\n"
    assert "rewards is missing: 'distill' needs at least one" in refused(distilled)[0]
    for own in ("group.kl=k1", "group.reference_refresh=2"):  # a row of the user's may have a beta of its own
        assert one(GOOD, "objective=mine.py:ROW", own).objective == "mine.py:ROW"
        assert "group.beta 0" in refused(GOOD, "objective=mine.py:ROW", own, "group.beta=0")[0]


@pytest.mark.parametrize("given", ["group.surrogate.high=0.5", "group.surrogate={high: 0.5}"])
def test_keywords_alone_change_the_presets_own_part(given: str) -> None:
    """As `groupwise replay --set` takes them."""
    assert one(GOOD, given).group.surrogate == {"high": 0.5}
    text = GOOD + "group: {surrogate: clipped, credit: {name: standardized}}\n"
    assert one(text, "group.surrogate.high=0.5").group.surrogate == {"name": "clipped", "high": 0.5}


def test_no_path_is_longer_than_a_system_takes() -> None:
    (line,) = refused(GOOD, "model.chat_template=" + "x/" * 2100 + "y.jinja")
    assert "no file or folder can have a name of 4,207 characters" in line


def test_a_section_that_is_none_is_said_once_also_where_stages_lie_over_it() -> None:
    text = STAGED.replace("name: demo\n", "name: demo\noptimizer: 3\n")
    assert refused(text) == ["r.yaml:2: optimizer must be a section (a mapping); got 3"]
    assert refused(text, "optimizer.lr=1e-3") == [
        "r.yaml:2: optimizer must be a section (a mapping); got 3",
        "override optimizer.lr=1e-3: optimizer is 3, there is no optimizer.lr in it",
    ]


def test_k8_never_says_could_not_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    assert "no such folder 'gpt2'" in refused(GOOD, "model.path=gpt2")[0]
    assert "no such folder 'smollm' (did you mean smollm2?); as a hub name" in refused(GOOD, "model.path=smollm")[0]
    assert "no such file 'openai/gsm8k'" in refused(GOOD, "data.path=openai/gsm8k")[0]
    (tmp_path / "runs" / "sums").mkdir(parents=True)
    assert refused(GOOD, "model.path=runs/sum")[0].endswith("no such folder 'runs/sum' (did you mean runs/sums?)")
    assert "it holds no config.json" in refused(GOOD, "model.path=runs/sums")[0]
    final = tmp_path / "runs" / "done" / "grpo" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    assert refused(GOOD, "model.path=runs/done")[0].endswith("no config.json; did you mean runs/done/grpo/final?")
    (tmp_path / "runs" / "sums" / "config.json").write_text("{}")
    assert one(GOOD, "model.path=runs/sums").model.path == "runs/sums"
    (tmp_path / "hf" / "hub" / "models--gpt2").mkdir(parents=True)
    assert one(GOOD, "model.path=gpt2").model.path == "gpt2"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert one(GOOD, "model.path=Qwen/Qwen3-0.6B").model == ModelSettings(path="Qwen/Qwen3-0.6B")


def test_files_beside_the_recipe_are_named_where_the_working_directory_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "reward.py").write_text("def right(completion):\n    return 1.0\n")
    text = "objective: grpo\nname: r\nsteps: 1\nmodel: {scratch: {}}\ndata: {path: rows.jsonl}\nrewards: [reward.py:right]\n"
    (folder / "r.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe("mine/r.yaml")
    assert str(caught.value).splitlines() == [
        "2 problems in mine/r.yaml:",
        "  mine/r.yaml:5: data.path: no such file 'rows.jsonl'",
        "  mine/r.yaml:6: rewards.0.function: no such file 'reward.py'",
        "  beside the recipe: rows.jsonl, reward.py. Run the command in mine",
    ]
    monkeypatch.chdir(folder)
    assert load_recipe("r.yaml").data.path == "rows.jsonl"


def test_the_recipe_that_a_run_of_the_released_version_recorded_is_read() -> None:
    text = (Path(__file__).parents[1] / "fixtures/config_of_0.3.0.yaml").read_text(encoding="utf-8")
    recipe = parse_recorded(text, "config.yaml")
    assert (recipe.objective, recipe.steps, recipe.group.group_size, recipe.optimizer.lr) == ("grpo", 6, 4, 1e-3)


def test_a_notebook_shows_the_message_of_a_mistake_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_stages(GOOD + "stepz: 3\n", "r.yaml")
    assert caught.value._render_traceback_() == [f"ConfigError: {caught.value}"]  # what IPython asks an error for


ALL_WRONG = """\
objective: gropo
steps: 3
steps: 4
epochs: 1
name: 007
model: {path: /no/such, dtype: fp32}
data: {path: data.jsonl, tpye: 3}
rewards: [{function: acuracy, wait: 3}, 3]
num_generations: 4
group: {group_size: 4.5, minibatches: 99, beta: -1, credit: [3], surrogate: {low: 3}}
optimizer: {lr: .nan, betas: [0.9], eps: true}
save: 3
x: !!python/object/apply:os.system ["touch bomb"]
rollout: {stop: [1], temperature: 0}
"""


def test_k10_all_at_once_and_without_torch(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(ALL_WRONG)
    code = (
        "import sys, groupwise.cli.commands as cli; rc = cli.main(['train', 'r.yaml', 'lerning_rate=1', 'foo']);"
        "print(json.dumps([rc, 'torch' in sys.modules, 'transformers' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", "import json; " + code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == [2, False, False], done.stderr
    said = done.stderr.splitlines()
    assert said[0] == "ConfigError: 19 problems in r.yaml:"
    lines = [int(found) for found in re.findall(r"^  r\.yaml:(\d+): ", done.stderr, re.MULTILINE)]
    assert lines == sorted(lines)
    assert set(lines) == {3, 6, 7, 8, 9, 10, 11, 12, 13, 14}
    assert {line.split(": ")[0].strip() for line in said[-2:]} == {"override foo", "override lerning_rate=1"}
    assert not (tmp_path / "bomb").exists()


def test_mistakes_come_in_two_rounds() -> None:
    both = GOOD.replace("  task: addition\n", "  task: addition\n  path: a/b\n")
    (value,) = refused(both + "batch_size: 0\n")
    assert value == "r.yaml:17: batch_size must be a whole number at least 1; got 0"
    (rule,) = refused(both)
    assert rule.endswith("say data.path (a file or a hub name) or data.task (a generated task), not both")


# ---------------------------------------------------------------- overrides and stages


def test_overrides_win_and_make_sections() -> None:
    recipe = one(
        GOOD, "optimizer.lr=1e-5", "--group.group_size=4", "rewards.1.weight=2", "data.task_args.digits=2", "optimizer.lr=2e-5"
    )
    assert (recipe.optimizer.lr, recipe.group.group_size, recipe.rewards[1].weight) == (2e-5, 4, 2.0)
    assert recipe.data.task_args == {"digits": 2}


def test_an_alternative_takes_the_other_away(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    recipe = one(GOOD, f"data.path={tmp_path / 'rows.jsonl'}", "model.path=gpt2-not-here/x")
    assert recipe.data.task is None
    assert recipe.model.scratch is None
    both = refused(GOOD + "epochs: 2\n")
    assert both == ["r.yaml:16: say steps (3) or epochs (2), not both"]


def test_stages_overlay_the_top() -> None:
    stages = parse_stages(STAGED, "r.yaml")
    assert list(stages) == ["sft", "grpo"]
    sft, grpo = stages.values()
    assert (sft.name, grpo.name) == ("demo/sft", "demo/grpo")
    assert run_folder(grpo) == Path("runs/demo/grpo")
    assert (sft.objective, sft.epochs, sft.steps, sft.optimizer) == (
        "sft",
        2.0,
        None,
        OptimizerSettings(lr=3e-3, betas=(0.9, 0.95)),
    )
    assert grpo.model == ModelSettings(path="stage:sft")  # the stage's path takes the scratch model away
    assert grpo.optimizer == OptimizerSettings()  # nothing flows from stage to stage
    assert grpo.data.task_args == {"digits": 3}


def test_overrides_of_stages() -> None:
    stages = parse_stages(STAGED, "r.yaml", ["steps=5", "stages.sft.steps=7", "model.scratch.hidden=32", "optimizer.lr=1e-3"])
    assert [recipe.steps for recipe in stages.values()] == [7, 5]
    assert [recipe.epochs for recipe in stages.values()] == [None, None]
    assert [recipe.optimizer.lr for recipe in stages.values()] == [1e-3, 1e-3]
    assert stages["sft"].model.scratch == ScratchSettings(hidden=32)
    assert stages["grpo"].model == ModelSettings(path="stage:sft")  # a model of an earlier stage is not taken away by accident
    assert parse_stages(STAGED, "r", ["stages.grpo.model.path=gpt2-not-here/x"])["grpo"].model.path == "gpt2-not-here/x"


def test_data_of_a_stage_of_its_own_is_not_replaced_in_silence(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    own, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    text = STAGED.replace("    steps: 20\n", f"    steps: 20\n    data: {{path: {own}}}\n")
    for override in (f"data.path={other}", "data.task=sums"):
        (line,) = refused(text, override)
        assert f"would replace the data that stages have of their own: grpo ({own})" in line
        assert f"stages.grpo.{override.partition('=')[0]}=" in line
    stages = parse_stages(text, "r", [f"data.path={other}", f"stages.grpo.data.path={tmp_path / 'c.jsonl'}"])
    assert [stage.data.path for stage in stages.values()] == [str(other), str(tmp_path / "c.jsonl")]
    assert parse_stages(text, "r", [f"stages.sft.data.path={other}"])["grpo"].data.path == str(own)


def test_data_from_an_earlier_stage_keep_coming_from_there(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    last = "  dpo: {objective: dpo, steps: 1, model: {path: 'stage:sft'}, data: {path: 'stage:grpo', task: null, task_args: {}}}\n"
    stages = parse_stages(STAGED + last, "r", [f"data.path={tmp_path / 'rows.jsonl'}"])
    assert [stage.data.path for stage in stages.values()] == [str(tmp_path / "rows.jsonl")] * 2 + ["stage:grpo"]


def test_part_mappings_are_replaced_not_merged() -> None:
    text = STAGED.replace("rewards:", "group: {surrogate: {name: cispo, cap: 4.0}}\nrewards:", 1)
    assert parse_stages(text, "r.yaml")["grpo"].group.surrogate == {"name": "clipped", "low": 0.2}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, None),
        ({"tools": ["tools.py:add"]}, "tools.py"),  # the file is not there
        ({"verifiers": "reverse-text"}, None),  # brings rows of its own, and nothing else has any here
        ({"harness": "outside", "past": "split"}, None),
        ({"past": "split"}, "environment.past is about conversations"),
        ({"openenv": "ws://a:1", "args": {"url": "ws://b:2"}}, "the server's address is one of them"),
        ({"max_turns": 0, "at_once": "x"}, "2 problems in the environment:\n  environment.at_once"),
        ({"turns": 3}, "unknown key 'environment.turns'"),
        ({"interface": "gym"}, "environment.interface is no key any more"),
    ],
)
def test_an_environment_alone_is_judged_by_what_it_holds(keys: dict, said: str | None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if said is None:
        settings = read_environment(keys)
        assert {name: getattr(settings, name) for name in keys} == keys
    else:
        with pytest.raises(ConfigError, match=re.escape(said)):
            read_environment(keys)


def test_load_recipe_and_load_stages(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.yaml").write_text(STAGED)
    assert load_recipe(tmp_path / "a.yaml", ["seed=3"]).seed == 3
    assert list(load_stages(tmp_path / "a.yaml")) == ["grpo"]
    with pytest.raises(ConfigError, match="holds the stages sft, grpo"):
        load_recipe(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="no such recipe 'nosuch'"):
        find_recipe("nosuch")
    with pytest.raises(ConfigError, match="is a folder"):
        find_recipe(tmp_path)
    (tmp_path / "c.yaml").write_text(GOOD.replace("name: sums", "name: a/grpo"))
    assert load_recipe(tmp_path / "c.yaml").name == "a/grpo"  # the name of a run, not of a stage
    assert load_stages(tmp_path / "c.yaml") == parse_stages(dump_stages(load_stages(tmp_path / "c.yaml")), "again")
    assert header(tmp_path / "a.yaml") == "Adds numbers.\nCosts a minute."


# ---------------------------------------------------------------- writing


@pytest.mark.slow
@given(
    st.builds(
        Recipe,
        objective=st.just("sft"),
        steps=st.integers(1, 10**9),
        seed=st.integers(0, 2**63 - 1),
        model=st.just(ModelSettings(path="org/name")),
        data=st.sampled_from([one(GOOD).data]),
        optimizer=st.builds(OptimizerSettings, lr=st.floats(1e-300, 0.5), eps=st.floats(1e-300, 1e300)),
        rewards=st.lists(
            st.builds(
                RewardSettings,
                function=st.just("exact"),
                name=st.uuids().map(str),
                weight=st.floats(0.1, 2),
                args=st.dictionaries(
                    st.text("abc ", min_size=1), st.text() | st.integers() | st.booleans() | st.none() | st.lists(st.text())
                ),
            ),
            max_size=3,
        ).map(tuple),
    )
)
def test_print_config_reads_back_as_itself(recipe: Recipe) -> None:
    text = dump(recipe)
    if "[redacted]" not in text:
        again = one(text)
        assert again == recipe
        assert dump(again) == text


def test_stages_are_written_and_read_back() -> None:
    stages = parse_stages(STAGED, "r.yaml")
    assert parse_stages(dump_stages(stages), "again") == stages
    single = parse_stages(GOOD, "r.yaml")
    assert parse_stages(dump_stages(single), "again") == single


def test_a_recipe_made_in_python_is_checked() -> None:
    recipe = one(GOOD)
    assert make_recipe({}, recipe) == recipe
    with pytest.raises(ConfigError, match="2 problems in the recipe"):
        make_recipe({}, dataclasses.replace(recipe, seed=-1, optimizer=OptimizerSettings(lr=3.0)))
    with pytest.raises(ConfigError, match=r"group\.minibatches"):
        make_recipe({}, dataclasses.replace(recipe, group=GroupSettings(minibatches=99)))


def test_c9_changes_on_resume() -> None:
    recipe = one(GOOD)
    saved = dump(recipe)
    assert changes(saved, recipe) == []
    assert changes(saved, one(GOOD, "save.every=3", "threads=1", "steps=99")) == []
    assert changes(saved, one(GOOD, "optimizer.lr=1e-5", "rewards.1.weight=1", "data.task_args.digits=4")) == [
        "data.task_args.digits: null -> 4",
        "optimizer.lr: 0.0001 -> 1e-05",
        "rewards.1.weight: 0.5 -> 1",
    ]
    cosine = one(GOOD, "optimizer.schedule=cosine")
    longer = one(GOOD, "optimizer.schedule=cosine", "steps=99")
    assert changes(dump(cosine), longer) == ["steps: 3 -> 99"]


def test_a_run_begun_with_a_setting_that_did_nothing_goes_on_without_it() -> None:
    """Recipes of online objectives could once name `data.max_tokens`."""
    saved = yaml.safe_load(dump(one(GOOD)))
    saved["data"]["max_tokens"] = 100
    assert changes(yaml.safe_dump(saved), one(GOOD)) == []
    assert changes(yaml.safe_dump(saved | {"seed": 7}), one(GOOD)) == ["seed: 7 -> 0"]


def test_no_setting_is_taken_for_a_secret() -> None:
    """Its value would be written as `[redacted]`, and the run's config.yaml could not be read again."""
    assert not [key for key in knobs() if secret_name(key.rpartition(".")[2])]


# ---------------------------------------------------------------- sections that may be said by a name


def test_a_name_alone_is_a_section_with_that_name() -> None:
    short = "rollout: {engine: transformers}\nparallel: zero3\n"
    assert one(GOOD + short) == one(GOOD + "rollout: {engine: {name: transformers}}\nparallel: {name: zero3}\n")
    assert one(GOOD, "rollout.engine=vllm").rollout.engine == EngineSettings(name="vllm")
    assert one(GOOD, "rollout.engine=vllm", "rollout.engine.ahead=1").rollout.engine == EngineSettings(name="vllm", ahead=1)
    assert make_recipe({"parallel": "ddp"}, one(GOOD)).parallel == ParallelSettings(name="ddp")


def test_a_stage_that_names_an_engine_takes_nothing_of_the_one_above() -> None:
    above = "rollout: {engine: {name: vllm, dtype: bfloat16, ahead: 2}}\n"
    text = GOOD + above + "stages: {first: {rollout: {engine: %s}}, second: {}}\n"
    for engine, expected in {
        "native": EngineSettings(),
        "{name: vllm}": EngineSettings(name="vllm"),
        "{ahead: 1}": EngineSettings(name="vllm", dtype="bfloat16", ahead=1),
    }.items():
        stages = parse_stages(text % engine, "r.yaml")
        assert stages["first"].rollout.engine == expected
        assert stages["second"].rollout.engine == EngineSettings(name="vllm", dtype="bfloat16", ahead=2)


def test_a_run_that_was_begun_with_names_alone_goes_on() -> None:
    """Its config.yaml says `engine: native` and `parallel: auto`, where it now says sections."""
    recipe = one(GOOD)
    saved = yaml.safe_load(dump(recipe))
    saved["rollout"]["engine"] = "native"
    saved["parallel"] = "auto"
    assert changes(yaml.safe_dump(saved), recipe) == []
    assert changes(yaml.safe_dump(saved), one(GOOD, "rollout.engine=vllm")) == ["rollout.engine.name: 'native' -> 'vllm'"]


def test_a_run_that_recorded_keys_which_went_is_read_and_goes_on() -> None:
    """config.yaml holds every key, also those that did nothing."""
    recipe = one(GOOD)
    saved = yaml.safe_load(dump(recipe))
    for key in WENT:
        *sections, last = key.split(".")
        section = saved
        for name in sections:
            section = section[name]
        section[last] = WERE.get(key)
    assert parse_recorded(yaml.safe_dump(saved), "config.yaml") == recipe
    assert changes(yaml.safe_dump(saved), recipe) == []
    saved["group"]["mix"], saved["teacher"]["ema"] = 0.25, 0.05
    saved["critic"]["clip"], saved["optimizer"]["max_nonfinite_steps"] = None, 3
    assert parse_recorded(yaml.safe_dump(saved), "config.yaml") == recipe
    lines = changes(yaml.safe_dump(saved), recipe)
    assert [line.partition(" -> no key")[0] for line in lines] == [
        "group.mix: 0.25",
        "optimizer.max_nonfinite_steps: 3",
        "critic.clip: null",
        "teacher.ema: 0.05",
    ]


@pytest.mark.parametrize("key", WENT)
def test_a_key_that_went_is_refused_with_what_to_do_instead(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{key} is no key any more: {WENT[key]}")):
        one(GOOD, f"{key}=1")


@pytest.mark.parametrize("objective", ["distill", "sft"])
def test_where_no_reward_is_learnt_from_all_may_be_logged_alone(objective: str) -> None:
    keys = {"objective": objective, "steps": 3, "data": {"task": "addition"}, "model": {"scratch": {}}}
    keys |= {"teacher": {"path": "owner/teacher"}} if objective == "distill" else {}
    recipe = make_recipe(keys | {"rewards": [{"function": "accuracy", "weight": 0}]})
    assert recipe.rewards[0].weight == 0


def test_one_dashboard_is_written_as_a_word() -> None:
    keys = {"objective": "sft", "steps": 3, "data": {"task": "sums"}, "model": {"scratch": {}}}
    assert make_recipe(keys | {"save": {"report_to": "wandb"}}).save.report_to == ("wandb",)
    assert make_recipe(keys | {"save": {"report_to": ["wandb", "mlflow"]}}).save.report_to == ("wandb", "mlflow")
