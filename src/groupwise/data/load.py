"""From the `data` section of a recipe to prompts, demonstrations or pairs, with their held-out
part.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from groupwise.config.settings import DataSettings
from groupwise.data.encoding import (
    PROMPTS,
    Item,
    RecordKind,
    encode,
    prompt_limit,
    read_pairs,
    visit,
)
from groupwise.data.images import NO_MODEL, ImageEncoder, NoImages
from groupwise.data.report import Report
from groupwise.data.sources import SourceRows, kind_of, none_left, read_rows
from groupwise.data.split import part_of
from groupwise.data.tasks import make_task
from groupwise.data.tasks.base import Paired
from groupwise.data.templates import Template, Tools
from groupwise.data.wording import ReadRow, Wording, read_answered_or_not
from groupwise.errors import ConfigError, DataError
from groupwise.records import Prompt
from groupwise.utils.imports import demand_attributes, own_code
from groupwise.utils.spelling import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASK_ROWS = 20_000
"""Rows that a built-in task generates where `data.limit` does not say."""
TASK_HELD_OUT = 1_000
"""Held-out rows of a built-in task where `data.eval_limit` does not say."""


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
            lines.append(
                f"  ({counted(self.overlap, 'further row')} left out of training: their prompts are"
                " held out)"
            )
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
    images: ImageEncoder | NoImages = NO_MODEL,
    train: bool = True,
) -> Data[Prompt]:
    """Prompts for an online objective.  Training prompts have the id `row`: draw them with
    `visit(prompt, epoch)`.

    context: tokens of the model, prompt and completion together.  seed: of generated tasks.  tools:
        that a row's prompt shows.
    images: writes the images of rows into prompts.
    train: False leaves the training prompts out: what is held out is wanted, to judge an objective
        that learns from data.
    Raises DataError or ConfigError: unreadable or missing data, no prompt left, no room for a
    prompt.
    """
    limit = prompt_limit(context, max_new_tokens, settings.max_prompt_tokens)
    template = Template.build(settings, tokenizer, tools, images)
    if not train and settings.task is not None:
        # What a task holds out does not depend on how much else it generates.
        settings = replace(settings, limit=1)
    limited_by = "data.max_prompt_tokens"
    if settings.max_prompt_tokens is None:
        limited_by = f"the model's context of {context} less rollout.max_new_tokens of"
        limited_by += f" {max_new_tokens}"
    data = _load(settings, template, PROMPTS, seed, limit=limit, limited_by=limited_by, train=train)
    held_out = tuple(visit(prompt, "eval") for prompt in data.held_out)
    validation = tuple(visit(prompt, "eval") for prompt in data.validation)
    return replace(data, held_out=held_out, validation=validation)


def load_records(
    kind: RecordKind[Item],
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    eos_ids: Sequence[int],
    seed: int = 0,
    tools: Tools | None = None,
    images: ImageEncoder | NoImages = NO_MODEL,
) -> Data[Item]:
    """Records that an objective learns from: `DEMONSTRATIONS`, `PAIRS` or `SOLUTIONS` of
    `data.encoding`.

    Each answer ends with `eos_ids[0]`, or with another of them where the chat template writes it.
    tools: that a row's prompt shows.   images: writes the images of rows into prompts.
    A built-in task holds out prompts without demonstrations: they are judged by sampling, so
    `held_out` is empty then.
    Raises DataError or ConfigError as `load_data`, and for a task without such records.
    """
    limit = min(context, settings.max_tokens or context)
    limited_by = "the model's context"
    if limit == settings.max_tokens:
        limited_by = "data.max_tokens"
    template = Template.build(settings, tokenizer, tools, images)
    return _load(
        settings, template, kind, seed, limit=limit, limited_by=limited_by, eos_ids=eos_ids
    )


def holds_images(data: Data[Any]) -> bool:
    """True if a prompt of some record has images; solutions have none."""
    for record in (*data.train, *data.held_out, *data.validation):
        if getattr(record, "images", None) is not None:
            return True
    return False


def load_texts(settings: DataSettings, seed: int) -> Iterator[str]:
    """Every text of the training rows, for training a tokenizer on them; held-out rows are left
    out.
    """
    rows, _ = _sources(settings, "demonstration", seed)
    if settings.parts:
        wording = Wording.of(settings)
        if {"chosen", "rejected"} <= set(rows[0]):
            examples = read_pairs(rows, wording)
        else:
            examples = rows.mapped(partial(read_answered_or_not, wording=wording))
        rows = [example.row for example in _split(examples, wording, settings.parts)["train"]]
    for row in rows:
        for value in row.values():
            yield from _texts_in(value)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Without the garbage collector, which would walk over the rows again and again, a fifth of the
    time: all of them stay.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_collector_at_rest()
def _load(
    settings: DataSettings,
    template: Template,
    kind: RecordKind[Item],
    seed: int,
    *,
    limit: int,
    limited_by: str,
    eos_ids: Sequence[int] = (),
    train: bool = True,
) -> Data[Item]:
    """Rows -> examples, once -> parts -> records."""
    train_source, held_out_source = _sources(settings, kind.name, seed)
    rows, held_out = _read(train_source, kind, template), None
    if held_out_source is not None:
        held_out = _read(held_out_source, kind, template)
    watched = None
    if settings.parts:
        parts = _split(rows, template, settings.parts)
        for name, share in settings.parts.items():
            if not len(parts[name]):
                raise DataError(
                    f"data.eval_fraction {share:g} holds out no row of {len(rows)}: raise it, or"
                    " set it to 0"
                )
        rows, held_out, watched = parts["train"], parts["test"], parts.get("validation")
    overlap = 0
    if held_out is not None:
        held_out = held_out.first(settings.eval_limit)
    if train and held_out is not None and settings.eval_path is not None:
        rows, overlap = _without(rows, held_out, template)
        if not len(rows):
            raise DataError(
                f"no row is left to train on: the prompts of all {overlap} rows of {rows.name} are"
                " held out by data.eval_path; give another file, or hold out a part of this one"
                " with data.eval_fraction instead"
            )
    encoded = partial(
        encode,
        template=template,
        kind=kind,
        limit=limit,
        limited_by=limited_by,
        eos_ids=eos_ids,
        too_long=settings.too_long,
    )
    items: list[Item] = []
    judged: list[Item] = []
    validation: list[Item] = []
    report, held_out_report = Report(source=rows.name), None
    if train:
        items, report = encoded(rows)
    if held_out is not None:
        judged, held_out_report = encoded(held_out)
    if watched is not None:
        validation, _ = encoded(watched)
    return Data(
        train=tuple(items),
        held_out=tuple(judged),
        validation=tuple(validation),
        report=report,
        held_out_report=held_out_report,
        overlap=overlap,
    )


def _read(rows: SourceRows, kind: RecordKind[Item], template: Template) -> SourceRows[ReadRow]:
    """Read the rows of a source.  Raises DataError if none is left."""
    read = kind.read(rows, template)
    if not len(read):
        raise DataError(none_left(read.name, read.left_out))
    return read


def _sources(settings: DataSettings, kind: str, seed: int) -> tuple[SourceRows, SourceRows | None]:
    """Training rows, and held-out rows where the settings name them."""
    if (settings.path is None) == (settings.task is None):
        raise ConfigError(
            "data needs exactly one of path (a file or hub name) and task (a built-in task)"
        )
    if settings.parts and settings.eval_path:
        raise ConfigError(
            "data.eval_fraction cannot be used with data.eval_path: leave one of them out"
        )
    if settings.parts and settings.task:
        raise ConfigError(
            "data.eval_fraction cannot be used with a built-in task (it has a held-out set of its"
            " own): leave one of them out"
        )
    held_out = None
    if settings.eval_path is not None:
        read = read_rows(
            settings.eval_path, settings.eval_split, lenient=True, limit=settings.eval_limit
        )
        held_out = read.renamed(settings.columns)
    if settings.path is not None:
        if settings.task_args:
            raise ConfigError(
                "data.task_args are the arguments of a task: set data.task, or leave them out"
            )
        read = read_rows(settings.path, settings.split, lenient=True, limit=settings.limit)
        return read.renamed(settings.columns), held_out
    task = make_task(str(settings.task), settings.task_args)
    count = settings.limit or TASK_ROWS
    if kind == "demonstration":
        return _drawn(settings, task, "demonstrations", count, seed), held_out
    if kind == "solution":
        raise ConfigError(
            f"the task {settings.task!r} has no labelled steps: give data.path with completions and"
            " labels columns"
        )
    if kind == "pair":
        if not isinstance(task, Paired):
            remedy = "data.task: preferences, or data.path with chosen and rejected columns"
            raise ConfigError(f"the task {settings.task!r} has no preference pairs: give {remedy}")
        if held_out is None:
            held_out = _drawn(
                settings, task, "held_out_pairs", settings.eval_limit or TASK_HELD_OUT
            )
        return _drawn(settings, task, "pairs", count, seed), held_out
    if held_out is None:
        held_out = _drawn(settings, task, "held_out", settings.eval_limit or TASK_HELD_OUT)
    return _drawn(settings, task, "prompts", count, seed), held_out


def _drawn(settings: DataSettings, task: object, method: str, *arguments: int) -> SourceRows:
    """The rows that a method of a task draws.   Raises ConfigError for a task of the user's that
    gives none.
    """
    demand_attributes(f"the task {settings.task!r}", task, [method])
    with own_code(f"the task {settings.task!r}, {method},"):
        rows = list(getattr(task, method)(*arguments))
    for row in rows:
        if not isinstance(row, Mapping):
            raise ConfigError(
                f"the task {settings.task!r}: {method} gave {kind_of(row)}: a row is a mapping,"
                " {'prompt': ...}"
            )
    name = f"task {settings.task}"
    if method.startswith("held_out"):
        name += ", held out"
    return SourceRows(name, rows)


def _split(
    rows: SourceRows[ReadRow], wording: Wording, fractions: Mapping[str, float]
) -> dict[str, SourceRows[ReadRow]]:
    """Rows by part, `train` among them, by a hash of each row's prompt."""
    places: dict[str, list[int]] = {name: [] for name in ("train", *fractions)}
    for i, example in enumerate(rows):
        places[part_of(wording.key(example.content), fractions)].append(i)
    parts = {name: rows.subset(chosen) for name, chosen in places.items()}
    parts["train"] = replace(parts["train"], left_out=rows.left_out)
    for name, title in (("test", "held out"), ("validation", "for validation")):
        if name in parts:
            parts[name] = replace(parts[name], name=f"{rows.name}, {title}")
    return parts


def _without(
    rows: SourceRows[ReadRow], held_out: SourceRows[ReadRow], wording: Wording
) -> tuple[SourceRows[ReadRow], int]:
    """Rows whose prompts are not held out, and how many others there were."""
    hidden = {wording.key(example.content) for example in held_out}
    chosen = []
    for i, example in enumerate(rows):
        if wording.key(example.content) not in hidden:
            chosen.append(i)
    left = replace(rows.subset(chosen), left_out=rows.left_out)
    return left, len(rows) - len(left)


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in(value.get("content"))
        yield from _texts_in(value.get("text"))
    elif isinstance(value, list):
        for part in value:
            yield from _texts_in(part)
