"""Keys for how a run goes: the optimizer, batches, steps, evaluations, checkpoints."""

from __future__ import annotations

import math
from fractions import Fraction

from groupwise.trl.configuration import Configuration
from groupwise.trl.data_keys import evaluation_strategy, longest_row
from groupwise.trl.values import boards_of, mapping_of, optional_limit, texts_of
from groupwise.utils.spelling import counted

ADAMW = (
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_torch_xla",
    "paged_adamw_32bit",
    "paged_adamw",
)
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
RISE = "the first rate is a step of the rise, TRL's is 0"
"""How the learning rate's warm-up differs."""


def write_optimizer(trl: Configuration) -> None:
    """Write AdamW's numbers."""
    trl.write("seed", trl.made("seed", int, trl.get("seed")), "seed")
    trl.write("optimizer.lr", trl.number("learning_rate"), "learning_rate")
    for name, key in (("adam_epsilon", "eps"), ("weight_decay", "weight_decay")):
        if trl.arguments.get(name) is not None:
            trl.write(f"optimizer.{key}", trl.number(name), name)
    name = "max_grad_norm"
    if name in trl.arguments:
        limit = trl.made(name, optional_limit, trl.arguments[name])
        trl.write("optimizer.clip_norm", limit, name)
    betas = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    for name in betas.keys() & trl.arguments.keys():
        betas[name] = trl.number(name)
    if betas.keys() & trl.arguments.keys():
        trl.write("optimizer.betas", list(betas.values()), *betas)
    kind = str(trl.arguments.get("optim", "adamw_torch"))
    if kind not in ADAMW:
        related = kind.startswith(("adamw", "paged_adamw"))
        replaced = f"{kind}: AdamW takes its place"
        if kind.endswith("8bit"):
            replaced += "; optimizer.state: 8bit keeps its moments in 8 bits"
        trl.note("optim", "changed" if related else "missing", replaced)


def write_schedule(trl: Configuration) -> None:
    """Write how the learning rate goes."""
    kind, name = str(trl.get("lr_scheduler_type")), "lr_scheduler_kwargs"
    if kind in SCHEDULES:
        trl.write("optimizer.schedule", SCHEDULES[kind], "lr_scheduler_type")
    else:
        detail = f"the nearest to {kind}, which is not there"
        source = "lr_scheduler_type"
        trl.write("optimizer.schedule", "cosine", source, detail=detail, fate="missing")
    options = trl.made(name, mapping_of, trl.arguments.get(name) or {})
    if not options:
        return
    lr = trl.number("learning_rate")
    least = options.get("min_lr_rate")
    if "min_lr" in options and least is None and lr:
        least = trl.made(name, float, options["min_lr"]) / lr
    if least is not None and kind == "cosine_with_min_lr":
        trl.write("optimizer.min_lr_ratio", trl.made(name, float, least), name)
    else:
        trl.note(name, "missing", "only min_lr and min_lr_rate of cosine_with_min_lr are read")


def write_batch(trl: Configuration) -> None:
    """Write `batch_size`, or how a rollout is made up and cut."""
    names = (
        "per_device_train_batch_size",
        "per_gpu_train_batch_size",
        "gradient_accumulation_steps",
    )
    if trl.online:
        write_rollout(trl, names)
        return
    rows, pieces = trl.batch.rows, trl.batch.pieces
    each = rows // trl.devices
    detail = f"{each} x {counted(trl.devices, 'device')} x {counted(pieces, 'step')}"
    if trl.kind == "SFTConfig" and trl.arguments.get("packing"):
        longest = f"{trl.whole(longest_row(trl), 1):,} tokens"
        detail += f" of TRL's packed sequences, {longest} each"
        packed = f"batch_size counts rows, TRL with packing sequences of {longest}"
        trl.note("packing", "changed", packed)
        mean = "the mean tokens of a row, to train on as many a step"
        trl.need(f"batch_size: {rows * pieces} x {longest} / {mean}")
    trl.write("batch_size", rows * pieces, *names, detail=detail)


def write_rollout(trl: Configuration, names: tuple[str, ...]) -> None:
    """Write the prompts and completions of a rollout, and its optimizer steps."""
    count = trl.batch
    uneven = count.completions % count.size
    fate = "changed" if uneven else None
    trl.write("group.group_size", count.size, "num_generations", fate=fate)
    detail = f"{counted(count.completions, 'completion')} of a rollout / {count.size}"
    if uneven:
        detail += f" is {Fraction(count.completions, count.size)}: rounded"
    unread = trl.lost & {"num_generations"}
    sources = (*names, "generation_batch_size", *unread)
    trl.write("group.prompts_per_step", count.prompts, *sources, detail=detail)
    if count.passes != count.pieces:
        cut = f"{count.passes} / {count.pieces}, each of whole groups; TRL shuffles completions"
        sources = ("steps_per_generation", "generation_batch_size")
        trl.write("group.minibatches", count.minibatches, *sources, detail=cut)
    else:
        trl.note("steps_per_generation", "same", "group.minibatches: its default")
    updates = trl.whole("num_iterations")
    if updates > 1:
        trl.write("group.updates_per_rollout", updates, "num_iterations")


def write_length(trl: Configuration) -> None:
    """Write `steps` or `epochs`."""
    epochs = trl.number("num_train_epochs")
    if trl.most_updates is not None:
        detail = f"{trl.updates} optimizer steps each" if trl.updates > 1 else ""
        trl.write("steps", trl.steps, "max_steps", detail=detail)
        trl.unused("max_steps takes its place", "num_train_epochs")
        return
    trl.unused("it is off", "max_steps")
    prompts = counted(trl.batch.prompts, "prompt")
    if not trl.online:
        trl.write("epochs", epochs, "num_train_epochs")
    elif trl.steps is not None:
        detail = f"{epochs:g} x {counted(trl.rows or 0, 'row')} / {prompts}"
        trl.write("steps", trl.steps, "num_train_epochs", detail=detail)
    else:
        unknown = "steps counts rollouts, and how many rows there are is not known here"
        trl.note("num_train_epochs", "changed", unknown)
        trl.need(f"steps: num_train_epochs ({epochs:g}) x rows of the data / {prompts}")


def write_warm_up(trl: Configuration) -> None:
    """Write the warm-up, from a number of steps or a share of them."""
    name = "warmup_ratio" if trl.arguments.get("warmup_ratio") else "warmup_steps"
    warmup = trl.number(name, 0, null=0)
    updates = trl.most_updates
    if updates is None and trl.steps is not None:
        updates = trl.steps * trl.updates
    if warmup >= 1:
        trl.write("optimizer.warmup_steps", int(warmup), name, detail=RISE)
    elif warmup and updates is not None:
        detail = f"{warmup:g} of all optimizer steps; {RISE}"
        trl.write("optimizer.warmup_steps", math.ceil(warmup * updates), name, detail=detail)
    elif warmup:
        unknown = "it counts optimizer steps, and how many there are is not known here"
        trl.note(name, "changed", f"optimizer.warmup_steps: {unknown}; {RISE}")
        trl.need(f"optimizer.warmup_steps: {warmup:g} of all optimizer steps")


def write_every(trl: Configuration, key: str, steps: str, *names: str) -> None:
    """Write how often something is done.   steps: the argument that counts optimizer steps."""
    count = trl.our_steps(steps, trl.steps)
    if count is not None:
        trl.write(key, count, steps, *names)
        return
    for name in (steps, *names):
        unknown = f"{key} counts steps, and how many there are is not known here"
        trl.note(name, "changed", unknown)


def write_evaluation(trl: Configuration) -> None:
    """Write when is evaluated."""
    trl.write("eval.at_start", bool(trl.get("eval_on_start")), "eval_on_start")
    if trl.arguments.get("num_generations_eval"):
        trl.write("eval.k", trl.whole("num_generations_eval"), "num_generations_eval")
    strategy, names = evaluation_strategy(trl), ("eval_strategy", "evaluation_strategy")
    if strategy == "steps":
        # as often as TRL logs, where nothing else is set
        steps = "eval_steps" if trl.get("eval_steps") is not None else "logging_steps"
        write_every(trl, "eval.every", steps, *names)
        return
    trl.unused("eval_strategy is not steps", "eval_steps")
    if strategy not in ("no", None):
        lost = f"no evaluation every {strategy}: eval.every counts steps, and without it held-out"
        lost += " rows are evaluated before the first step and after the last"
        for name in names:
            trl.note(name, "missing", lost)


BEST_FIGURES = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}
"""TRL's figure of a held-out set -> ours."""


def write_best(trl: Configuration) -> None:
    """Write by which figure the exported model is chosen, and when the run ends without a better
    one.
    """
    names = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    stopping = "early_stopping_patience"
    patience = trl.arguments.get(stopping)
    if not trl.get(names[0]) and patience is None:
        trl.unused("load_best_model_at_end is not set", *names[1:])
        return
    if "eval.every" not in trl.keys:
        for name in (*names, stopping):
            trl.note(name, "missing", "eval.best compares evaluations of eval.every, in steps")
        return
    figure = str(trl.get(names[1]) or "loss").removeprefix("eval_")
    figure = BEST_FIGURES.get(figure, figure.removesuffix("/mean"))
    detail = ""
    if trl.online and figure == "loss":
        figure, detail = "reward", "the loss of an online objective does not tell models apart"
    trl.write("eval.best", figure, *names, detail=detail)
    if patience is not None:
        trl.write("eval.stop_after", trl.whole(stopping, 1), stopping)


def write_checkpoints(trl: Configuration) -> None:
    """Write how often is saved, and what is written."""
    strategy = str(trl.get("save_strategy"))
    if strategy == "steps":
        write_every(trl, "save.every", "save_steps", "save_strategy")
    else:
        trl.write("save.every", 0, "save_strategy", detail=f"{strategy}: after the last step")
        trl.unused("save_strategy is not steps", "save_steps")
    name = "save_total_limit"
    if trl.arguments.get(name) is not None:
        keep = trl.whole(name)
        if keep < 2:
            detail = "at least 2: the newest is verified before older ones go"
            trl.write("save.keep", 2, name, detail=detail, fate="changed")
        else:
            trl.write("save.keep", keep, name)
    name = "report_to"
    boards = trl.made(name, boards_of, trl.arguments.get(name))
    if boards:
        trl.write("save.report_to", boards, name)
    lost = set(texts_of(trl.arguments.get(name) or [])) - {*boards, "none"}
    if lost:
        trl.note(name, "missing", f"there is no dashboard {', '.join(sorted(lost))} here")
    if trl.arguments.get("log_completions"):
        always = "completions are always in the run folder; `groupwise view` shows them"
        trl.note("log_completions", "same", always)


CONVERTERS = (
    write_optimizer,
    write_schedule,
    write_batch,
    write_length,
    write_warm_up,
    write_evaluation,
    write_best,
    write_checkpoints,
)
