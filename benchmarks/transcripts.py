"""One environment file in both trainers: what was sampled, what is trained, what it earned, compared token by token.

    python benchmarks/transcripts.py

`_shop.py` is a file in the style of TRL's documentation of `environment_factory`.  It goes unchanged to TRL's GRPOTrainer and to
`gw.train`, with the same model, which knows its part by heart (`_memorised.py`).  The table goes to benchmarks/episodes.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import _shop
from _machine import save
from _memorised import COLD, Messages, call, memorised

from groupwise.data.tokenizers import load_tokenizer

HERE = Path(__file__).parent
BEGIN, CLOSE = "<!-- made by benchmarks/transcripts.py -->", "<!-- end of transcripts -->"


def said(name: str, result: Any) -> dict[str, Any]:
    """A tool's answer as a message."""
    return {"role": "tool", "name": name, "content": str(result)}


def says(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    """A turn of the policy."""
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def cases() -> dict[str, tuple[dict[str, Any], list[list[dict[str, Any]]]]]:
    """By name: the row, and what the policy says in it, turn by turn with the answers that it may hear."""
    # What TRL says of a failure, and what we say.
    raised = ["{'error': \"'jug'\"}", '{"error": "\'jug\'"}']
    missing = ["{'error': 'Tool pay not found.'}", '{"error": "there is no tool \'pay\'; there are: add, price"}']
    return {
        "no call": ({"ask": "Hello?"}, [says("Good day.")]),
        "one call": ({"ask": "Ring up 7.", "right": 7}, [says("", call("add", amount=7)), said("add", 7), says("Done: 7.")]),
        "text beside the call": (
            {"ask": "What is tea?"},
            [says("I look.", call("price", article="tea")), said("price", 4), says("4 it is.")],
        ),
        "two calls in one turn": (
            {"ask": "Tea and cup?"},
            [
                says("", call("price", article="tea"), call("price", article="cup")),
                said("price", 4),
                said("price", 12),
                says("4 and 12."),
            ],
        ),
        "a call after a call": (
            {"ask": "Ring up a pot.", "right": 30},
            [
                says("", call("price", article="pot")),
                said("price", 30),
                says("", call("add", amount=30)),
                said("add", 30),
                says("Sold."),
            ],
        ),
        "a tool that raises": (
            {"ask": "What is a jug?"},
            [says("", call("price", article="jug")), raised, says("No jugs.")],
        ),
        "a tool that is not there": (
            {"ask": "I pay."},
            [says("", call("pay")), missing, says("Sorry.")],
        ),
        "words from reset": (
            {"ask": "Well?", "greeting": " It is late.", "right": 1},
            [says("", call("add", amount=1)), said("add", 1), says("Good night.")],
        ),
    }  # type: ignore[return-value]


def main() -> None:
    """Run both and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows, learnt = [], list[Messages]()
    for row, turns in cases().values():
        asked = {"role": "user", "content": row["ask"]}
        full = {"right": 0, "greeting": "", "seconds": 0.0} | {k: v for k, v in row.items() if k != "ask"}
        rows.append({"prompt": [asked]} | full)
        opening = asked | {"content": row["ask"] + row.get("greeting", "")}
        heard = [[{"role": "tool", "content": text} for text in turn] if isinstance(turn, list) else [turn] for turn in turns]
        versions = max(map(len, heard))
        learnt += [[opening, *(turn[min(i, len(turn) - 1)] for turn in heard)] for i in range(versions)]
    shop = _shop.Shop()
    with tempfile.TemporaryDirectory(prefix="groupwise-transcripts-") as scratch:
        folder = memorised(Path(scratch) / "model", learnt, [shop.add, shop.price])
        theirs, ours = of_trl(folder, rows, Path(scratch)), of_groupwise(folder, rows, Path(scratch))
    lines = [
        "| episode | tokens of the policy | tokens of the answers | prompt | ids | trained | reward |",
        "|---|---|---|---|---|---|---|",
    ]
    found = []
    for name, trl, our in zip(cases(), theirs, ours, strict=True):
        same = {key: trl[key] == our[key] for key in ("prompt", "ids", "trained", "reward")}
        found.append({"name": name, "same": same})
        sides = [(sum(one["trained"]), len(one["trained"]) - sum(one["trained"])) for one in (trl, our)]
        counts = [f"{a}" if a == b else f"{a} (TRL), {b}" for a, b in zip(*sides, strict=True)]
        verdicts = ["same" if same[key] else "differ" for key in ("prompt", "ids", "trained")]
        reward = f"{our['reward']:g}" if same["reward"] else f"{trl['reward']:g} (TRL), {our['reward']:g}"
        lines.append(f"| {name} | {counts[0]} | {counts[1]} | {' | '.join(verdicts)} | {reward} |")
        if not all(same.values()):
            print(name)
            for side, one in (("TRL", trl), ("Groupwise", our)):
                print(f"  {side:9s} {one['pieces']}")
    print("\n".join(lines))
    save("transcripts", {"episodes": found})
    page = HERE / "episodes.md"
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    if rest:
        page.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + CLOSE + rest.partition(CLOSE)[2], encoding="utf-8")
    print(json.dumps({"episodes": len(found), "same": sum(all(one["same"].values()) for one in found)}))


def of_trl(folder: Path, rows: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    """What TRL's GRPOTrainer samples in its first step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=2 * len(rows),
        num_generations=2,
        max_completion_length=200,
        temperature=COLD,
        max_steps=1,
        shuffle_dataset=False,
        learning_rate=1e-9,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    tokenizer = load_tokenizer(str(folder))  # AutoTokenizer would take Qwen's way of cutting numbers for this one's
    trainer = GRPOTrainer(
        model=str(folder),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=_shop.Shop,
    )
    found: list[dict[str, Any]] = []
    generate, judge = trainer._generate, trainer._calculate_rewards

    def seen(*given: Any, **keywords: Any) -> Any:
        outputs = generate(*given, **keywords)
        columns = zip(*outputs[:3], strict=True)
        found.extend({"prompt": list(p), "ids": list(ids), "trained": [bool(x) for x in mask]} for p, ids, mask in columns)
        return outputs

    def judged(*given: Any, **keywords: Any) -> Any:
        rewards = judge(*given, **keywords)
        for one, reward in zip(found, rewards[:, 0].tolist(), strict=True):
            one["reward"] = reward
        return rewards

    trainer._generate, trainer._calculate_rewards = seen, judged
    trainer.train()
    return [one | {"pieces": pieces(tokenizer, one)} for one in found[::2]]


def of_groupwise(folder: Path, rows: list[dict[str, Any]], scratch: Path) -> list[dict[str, Any]]:
    """What `gw.train` samples in its first step."""
    import groupwise as gw

    training = gw.train(
        objective="grpo",
        model={"path": str(folder)},
        data=[{**row, "number": i} for i, row in enumerate(rows)],
        environment={"factory": f"{HERE / '_shop.py'}:Shop"},
        rollout={"max_new_tokens": 200, "temperature": COLD},
        group={"prompts_per_step": len(rows), "group_size": 2},
        optimizer={"lr": 1e-9},
        steps=1,
        runs=str(scratch / "runs"),
        name="shop",
    )
    (step,) = list(training)
    found: dict[int, dict[str, Any]] = {}
    for group in step.groups:
        rollout = group.rollouts[0]
        assert rollout.episode is not None
        begun = [branch.context for branch in rollout.episode.branches if branch.begin == 0]  # behind what `reset` said
        found[int(group.prompt.row["number"])] = {
            "prompt": (begun[0] if begun else rollout.prompt.tokens).tolist(),
            "ids": rollout.tokens.tolist(),
            "trained": rollout.trained.tolist(),
            "reward": float(group.reward[0]),
        }
    tokenizer = load_tokenizer(str(folder))
    return [found[i] | {"pieces": pieces(tokenizer, found[i])} for i in range(len(rows))]


def pieces(tokenizer: Any, one: dict[str, Any]) -> str:
    """The end of the prompt and the episode, token by token."""
    return "|".join(tokenizer.decode([token]) for token in [*one["prompt"][-20:], *one["ids"]])


if __name__ == "__main__":
    main()
