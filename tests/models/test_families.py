"""Every causal architecture of the installed transformers is proven, refused in words, or cannot be built; none differs in silence.

See families.py for what is compared, and families.md for the table.
"""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from groupwise.config.settings import ModelSettings
from groupwise.models.attention import PackedAttention
from groupwise.models.loading import make_policy, read_blueprint
from groupwise.ops.query import EVERYTHING, Query
from groupwise.runs.run_models import shape_of

spec = importlib.util.spec_from_file_location("families", Path(__file__).with_name("families.py"))
assert spec is not None
assert spec.loader is not None
families = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = families  # dataclasses look their module up there
spec.loader.exec_module(families)

VERSION, ROWS = families.read_table()
INSTALLED = transformers.__version__
ALWAYS = {*families.NAMED, "phi3, longrope", "qwen2, windows", "mixtral, router loss", "minicpm3", "whisper"}
ALWAYS |= {"phimoe", "llama, dynamic rope", "bert"}


@pytest.fixture(autouse=True, scope="module")
def modules_are_not_looked_at_for_garbage() -> Iterator[None]:
    """Half of the time of a collection goes into transformers' modules, which stay."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def names() -> list[Any]:
    every = [*families.FAMILIES, *families.VARIANTS]
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in every]


def comparable(row: Any) -> Any:
    """Without numbers that differ between machines, and modes, of which there is a test of their own."""
    return replace(row, says=tuple(families.masked(text) for text in row.says), modes={})


@pytest.mark.parametrize("name", names())
def test_what_is_accepted_equals_its_own_forward(name: str) -> None:
    found = families.row_of(name)  # raises Different
    if VERSION == INSTALLED:
        assert comparable(found) == comparable(ROWS[name]), "run tests/models/families.py and docs/generate.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral", "gpt_oss", "hunyuan_v1_moe", "dots1", "mamba", "mixtral, router loss"])
def test_lower_types_are_what_the_table_says(name: str) -> None:
    """Those whose windows and soft caps round, whose experts are nearly tied, and that are refused."""
    if VERSION != INSTALLED:
        pytest.skip(f"the table is of transformers {VERSION}")
    found = families.modes_of(name, ROWS[name].uses)
    for mode, said in ROWS[name].modes.items():
        assert families.masked(found[mode]) == families.masked(said), mode


def test_the_table_holds_every_architecture() -> None:
    if VERSION != INSTALLED:
        pytest.skip(f"the table is of transformers {VERSION}")
    assert set(ROWS) == {*families.FAMILIES, *families.VARIANTS}
    faults = {name: row.says for name, row in ROWS.items() if row.verdict not in ("proven", "refused", "not built")}
    assert not faults, faults
    for name, row in ROWS.items():
        assert (row.verdict == "proven") == bool(row.paths) == bool(row.uses), name
        assert row.verdict == "proven" or row.says, f"{name}: no reason"
        assert set(row.modes) == (set(families.MODES) if row.verdict == "proven" else set()), name
        for mode, said in row.modes.items():
            assert not said or re.search(r"[;:,] (or )?set |use another model", said), (name, mode)


@pytest.mark.parametrize("name", families.NAMED)
def test_common_families_are_proven_on_every_path(name: str) -> None:
    row = ROWS[name]
    assert row.uses == "packed"
    assert {"scoring", "gradients", "checkpointing", "native"} <= set(row.paths)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("gpt2", "llama", "mistral", "gemma2", "gpt_oss"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mixtral", "olmo3", "deepseek_v3", "glm4")),
    ],
)
def test_wide_heads_and_long_texts_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels take those.  Rounding is larger in wider models: 1e-4 nats in gpt-oss, whose experts score nearly alike."""
    monkeypatch.setattr(families, "TOLERANCE", 3e-4)
    row = families.examine(family, wide=True)
    assert row.uses == "packed"
    assert set(row.paths) == set(ROWS[family].paths)


@pytest.mark.parametrize("name", sorted(families.NOT_BUILT))
def test_a_family_that_cannot_be_built_is_an_error(name: str) -> None:
    with pytest.raises((ImportError, AttributeError, ValueError, StrictDataclassError)):
        families.log_probs(families.model_of(families.config_of(name, 64, 1)), *families.TEXT, 60)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("mistral", "window"),
        ("gemma2", "softcap"),
        ("llama", "scale"),
        ("llama", "neighbour"),
    ],
)
def test_the_family_comparison_finds_planted_differences(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library's own proof off: what is compared here depends on nothing that it believes."""
    right = PackedAttention.__call__

    def wrong(self: Any, query: Query) -> Any:
        if fault == "neighbour" and query.query_THD.shape[0] > 60:
            value_TKE = query.value_TKE.clone()
            value_TKE[50] += value_TKE[0]
            query = query._replace(value_TKE=value_TKE)
        changes = {"softcap": {"cap": None}, "window": {"reach": EVERYTHING}, "scale": {"scale": 1.01 * query.scale}}
        return right(self, query._replace(**changes.get(fault, {})))

    monkeypatch.setattr(PackedAttention, "__call__", wrong)
    with pytest.raises(families.Different, match="differs by"):
        families.examine(family, proof=False)


PROVEN = [name for name in families.FAMILIES if ROWS[name].verdict == "proven"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "nemotron_h" else pytest.mark.slow) for name in PROVEN])
def test_a_saved_checkpoint_of_every_proven_family_is_planned_and_loaded(name: str, tmp_path: Path) -> None:
    tokenizer = families.make_tokenizer("bytes")
    model = families.model_of(families.config_of(name, len(tokenizer), tokenizer.eos_token_id))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    attention = "single" if ROWS[name].uses == "single" else "shared"
    settings = ModelSettings(path=str(tmp_path), attention=attention)
    blueprint = read_blueprint(settings)
    shape = shape_of(blueprint)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    policy = make_policy(blueprint.load(), blueprint.tokenizer, settings)
    assert type(policy.model) is type(model)
