"""From the `data` section of a recipe to prompts, demonstrations or pairs, with their held-out part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from groupwise.config.settings import DataSettings
from groupwise.data.demonstrations import Demonstration, encode_demonstrations, read_demonstration
from groupwise.data.messages import Content
from groupwise.data.pairs import Pair, encode_pairs
from groupwise.data.preference_formats import as_pairs, pair_asks
from groupwise.data.prompts import encode_prompts, prompt_limit, visit
from groupwise.data.report import Report
from groupwise.data.sources import SourceRows, first_of, kind_of, none_left, read_rows
from groupwise.data.split import part_of
from groupwise.data.step_labels import Solution, encode_solutions
from groupwise.data.tasks import make_task
from groupwise.data.tasks.base import Paired
from groupwise.data.templates import Template, Tools, Wording
from groupwise.errors import ConfigError, DataError
from groupwise.records import Prompt
from groupwise.utils.imports import demand_attributes, own_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK_ROWS = 20_000
"""Rows that a built-in task generates where `data.limit` does not say."""
TASK_HELD_OUT = 1_000
"""Held-out rows of a built-in task where `data.eval_limit` does not say."""

Asked = Callable[[Wording, Mapping[str, Any], str], Content]
"""(wording, row, where it is) -> what the row asks."""
Item = TypeVar("Item", Prompt, Demonstration, Pair, Solution)


@dataclass(frozen=True, kw_only=True, slots=True)
class Data(Generic[Item]):
    """Training rows, held-out rows, and a report of what was kept and dropped."""

    train: tuple[Item, ...]
    held_out: tuple[Item, ...]
    """Empty if nothing is held out.  No training row has the prompt of one of these."""
    validation: tuple[Item, ...] = ()
    """A second held-out part, to look at while training, where `data.eval_fraction` names one."""
    report: Report
    held_out_report: Report | None
    overlap: int
    """Training rows that were removed because their prompt is held out."""

    @property
    def watched(self) -> tuple[Item, ...]:
        """What is measured while training: the validation part, else what is held out."""
        return self.validation or self.held_out

    def __str__(self) -> str:
        lines = [f"train: {self.report}"]
        if self.overlap:
            lines.append(f"  ({self.overlap} further rows left out of training: their prompts are held out)")
        if self.held_out_report is not None:
            lines.append(f"held out: {self.held_out_report}")
        return "\n".join(lines)


def load_data(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    max_new_tokens: int,
    seed: int,
    tools: Tools | None = None,
    train: bool = True,
) -> Data[Prompt]:
    """Prompts for an online objective.  Training prompts have the id `row`: draw them with `visit(prompt, epoch)`.

    context: tokens of the model, prompt and completion together.  seed: of generated tasks.  tools: that a row's prompt shows.
    train: False leaves the training prompts out: what is held out is wanted, to judge an objective that learns from data.
    Raises DataError or ConfigError: unreadable or missing data, no prompt left, no room for a prompt.
    """
    limit = prompt_limit(context, max_new_tokens, settings.max_prompt_tokens)
    template = Template.build(settings, tokenizer, tools)
    if not train and settings.task is not None:
        settings = replace(settings, limit=1)  # what a task holds out does not depend on how much else it generates

    def encode(rows: SourceRows) -> tuple[list[Prompt], Report]:
        return encode_prompts(rows, template, max_tokens=limit, too_long=settings.too_long)

    data = _load(settings, template, encode, "prompts", seed, read=lambda rows: rows.sifted(template.content), train=train)
    held_out, validation = (tuple(visit(prompt, "eval") for prompt in part) for part in (data.held_out, data.validation))
    return replace(data, held_out=held_out, validation=validation)


def load_demonstrations(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    eos_ids: Sequence[int],
    seed: int,
    tools: Tools | None = None,
) -> Data[Demonstration]:
    """Demonstrations for SFT; each ends with `eos_ids[0]`, or with another of them where the chat template writes it.

    tools: that a row's prompt shows.

    A built-in task holds out prompts without demonstrations: they are judged by sampling, so `held_out` is empty then.
    Raises DataError or ConfigError as `load_data`.
    """
    template = Template.build(settings, tokenizer, tools)

    def encode(rows: SourceRows) -> tuple[list[Demonstration], Report]:
        return encode_demonstrations(rows, template, context=context, eos_ids=eos_ids, too_long=settings.too_long)

    check = partial(read_demonstration, wording=template)
    return _load(settings, template, encode, "demonstrations", seed, read=lambda rows: rows.sifted(check), asked=_asked)


def load_pairs(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, context: int, eos_ids: Sequence[int], seed: int
) -> Data[Pair]:
    """Preference pairs for a reward model or DPO.  Raises DataError or ConfigError as `load_data`, and for a task without pairs."""
    template = Template.build(settings, tokenizer)

    def encode(rows: SourceRows) -> tuple[list[Pair], Report]:
        return encode_pairs(rows, template, context=context, eos_ids=eos_ids, too_long=settings.too_long)

    return _load(settings, template, encode, "pairs", seed, read=lambda rows: as_pairs(rows, template), asked=pair_asks)


def load_solutions(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, *, context: int, eos_ids: Sequence[int]
) -> Data[Solution]:
    """Solutions with labelled steps for a process reward model.  Raises DataError or ConfigError as `load_data`."""
    if settings.task is not None:
        raise ConfigError(f"the task {settings.task!r} has no labelled steps: give data.path with completions and labels columns")
    template = Template.build(settings, tokenizer)

    def encode(rows: SourceRows) -> tuple[list[Solution], Report]:
        return encode_solutions(rows, template, context=context, eos_ids=eos_ids, too_long=settings.too_long)

    return _load(settings, template, encode, "solutions", seed=0, read=lambda rows: rows.sifted(template.content))


def load_texts(settings: DataSettings, seed: int) -> Iterator[str]:
    """Every text of the training rows, for training a tokenizer on them; held-out rows are left out."""
    train, _ = _sources(settings, "demonstrations", seed)
    if settings.parts:
        wording = Wording.of(settings)
        pairs = {"chosen", "rejected"} <= set(train[0])
        if pairs:
            train = _split(as_pairs(train, wording), wording, settings.parts, pair_asks)["train"]
        else:
            train = _split(train.sifted(partial(_asked_if_answered, wording)), wording, settings.parts, _asked_if_answered)["train"]
    for row in train:
        for value in row.values():
            yield from _texts_in(value)


def _load(
    settings: DataSettings,
    template: Template,
    encode: Callable[[SourceRows], tuple[list[Item], Report]],
    kind: str,
    seed: int,
    read: Callable[[SourceRows], SourceRows],
    train: bool = True,
    asked: Asked = Wording.content,
) -> Data[Item]:
    rows, held_out = _sources(settings, kind, seed)
    rows, held_out = read(rows), None if held_out is None else read(held_out)
    for part in (rows, held_out):
        if part is not None and not len(part):
            raise DataError(none_left(part.name, part.left_out))
    watched = None
    if settings.parts:
        parts = _split(rows, template, settings.parts, asked)
        for name, share in settings.parts.items():
            if not len(parts[name]):
                raise DataError(f"data.eval_fraction {share:g} holds out none of the {len(rows)} rows: raise it")
        rows, held_out, watched = parts["train"], parts["test"], parts.get("validation")
    overlap = 0
    if held_out is not None:
        held_out = held_out.first(settings.eval_limit)
    if held_out is not None and settings.eval_path is not None:
        rows, overlap = _without(rows, held_out, template, asked)
        if not len(rows):
            raise DataError(
                f"no row is left to train on: the prompts of all {overlap} rows of {rows.name} are held out by data.eval_path; "
                "give another file, or hold out a part of this one with data.eval_fraction instead"
            )
    items, report = encode(rows) if train else ([], Report(source=rows.name, rows=0, kept=0))
    judged, held_out_report = encode(held_out) if held_out is not None else ([], None)
    validation, _ = encode(watched) if watched is not None else ([], None)
    return Data(
        train=tuple(items),
        held_out=tuple(judged),
        validation=tuple(validation),
        report=report,
        held_out_report=held_out_report,
        overlap=overlap,
    )


def _sources(settings: DataSettings, kind: str, seed: int) -> tuple[SourceRows, SourceRows | None]:
    """Training rows, and held-out rows where the settings name them."""
    if (settings.path is None) == (settings.task is None):
        raise ConfigError("data needs exactly one of path (a file or hub name) and task (a built-in task)")
    if settings.parts and (settings.eval_path or settings.task):
        other = "data.eval_path" if settings.eval_path else "a built-in task (it has a held-out set of its own)"
        raise ConfigError(f"data.eval_fraction cannot be used with {other}: leave one of them out")
    held_out = None
    if settings.eval_path is not None:
        held_out = read_rows(settings.eval_path, settings.eval_split, lenient=True).renamed(settings.columns)
    if settings.path is not None:
        if settings.task_args:
            raise ConfigError("data.task_args are the arguments of a task: set data.task, or leave them out")
        return read_rows(settings.path, settings.split, lenient=True).first(settings.limit).renamed(settings.columns), held_out
    task = make_task(str(settings.task), settings.task_args)
    count = settings.limit or TASK_ROWS
    if kind == "demonstrations":
        return _drawn(settings, task, "demonstrations", count, seed), held_out
    if kind == "pairs":
        if not isinstance(task, Paired):
            given = "data.task: preferences, or data.path with chosen and rejected columns"
            raise ConfigError(f"the task {settings.task!r} has no preference pairs: give {given}")
        if held_out is None:
            held_out = _drawn(settings, task, "held_out_pairs", settings.eval_limit or TASK_HELD_OUT)
        return _drawn(settings, task, "pairs", count, seed), held_out
    if held_out is None:
        held_out = _drawn(settings, task, "held_out", settings.eval_limit or TASK_HELD_OUT)
    return _drawn(settings, task, "prompts", count, seed), held_out


def _drawn(settings: DataSettings, task: object, method: str, *arguments: int) -> SourceRows:
    """The rows that a method of a task draws.   Raises ConfigError for a task of the user's that gives none."""
    demand_attributes(f"the task {settings.task!r}", task, [method])
    with own_code(f"the task {settings.task!r}, {method},"):
        rows = list(getattr(task, method)(*arguments))
    wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
    if wrong is not None:
        raise ConfigError(f"the task {settings.task!r}: {method} gave {kind_of(wrong)}: a row is a mapping, {{'prompt': ...}}")
    return SourceRows(f"task {settings.task}" + ", held out" * method.startswith("held_out"), rows)


def _split(rows: SourceRows, wording: Wording, fractions: Mapping[str, float], asked: Asked) -> dict[str, SourceRows]:
    """Rows by part, `train` among them, by a hash of each row's prompt."""
    parts = [part_of(wording.key(asked(wording, row, rows.where(i))), fractions) for i, row in enumerate(rows)]
    found = {name: rows.subset([i for i, part in enumerate(parts) if part == name]) for name in ("train", *fractions)}
    found["train"] = replace(found["train"], left_out=rows.left_out)
    titles = {"test": "held out", "validation": "for validation"}
    return {name: replace(part, name=f"{rows.name}, {titles[name]}") if name in titles else part for name, part in found.items()}


def _without(rows: SourceRows, held_out: SourceRows, wording: Wording, asked: Asked) -> tuple[SourceRows, int]:
    """Rows whose prompts are not held out, and how many others there were."""
    hidden = {wording.key(asked(wording, row, held_out.where(i))) for i, row in enumerate(held_out)}
    kept = rows.subset([i for i, row in enumerate(rows) if wording.key(asked(wording, row, rows.where(i))) not in hidden])
    return replace(kept, left_out=rows.left_out), len(rows) - len(kept)


def _asked(wording: Wording, row: Mapping[str, Any], where: str) -> Content:
    """What a demonstration asks, with the turns before its answer."""
    return read_demonstration(row, where, wording=wording)[0]


def _asked_if_answered(wording: Wording, row: Mapping[str, Any], where: str) -> Content:
    """The same; of a row without an answer its own prompt."""
    answered = first_of(row, ("completion", "messages", "output")) is not None
    return _asked(wording, row, where) if answered else wording.content(row, where)


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in(value.get("content"))
        yield from _texts_in(value.get("text"))
    elif isinstance(value, list):
        for part in value:
            yield from _texts_in(part)
