"""From rows that have been read to records with token ids: the one encoder of prompts,
demonstrations, pairs and solutions.

It asks what each row asks through the chat template, puts its answers behind it, makes both fit,
and counts every row that it leaves out.  What a kind of record is made from, and how, a
`RecordKind` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Literal, TypeVar

import numpy as np

from groupwise.data.images import PromptImages
from groupwise.data.messages import is_blank, unwritten
from groupwise.data.preference_formats import as_pairs
from groupwise.data.rendering import Refusal, unmentioned
from groupwise.data.report import Report
from groupwise.data.sources import SourceRows
from groupwise.data.templates import EncodedAnswer, Question, Template, before_end, ended
from groupwise.data.wording import ReadRow, Wording, read_demonstration, read_pair, read_solution
from groupwise.errors import DataError
from groupwise.records import Prompt
from groupwise.utils.terminal import escaped

Item = TypeVar("Item")
TooLong = Literal["drop", "truncate_left", "error"]

STEP_END = "\n"
"""Between the steps of a solution: it reads as the policy writes it, one step a line, and
`segment_steps` finds the same ends.
"""
SILENT = "of which the chat template writes nothing"
UNKNOWN = "with characters unknown to the tokenizer"
UNWRITTEN = "with a message that the chat template does not write"
UNREAD_MARGIN = "with a margin, which only reward models read"
UNREAD_TOOLS = "with tools that cannot be read"
UNREAD_VARIABLES = "with chat_template_kwargs that the chat template does not mention"
CLOSED = "without the reasoning that the chat template opens: an empty block stands there"
CONTROL = "with control tokens in their messages"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Demonstration:
    """A prompt and a completion that ends with an EOS id.

    >>> row = Demonstration(id="7", prompt=np.array([5, 9]), completion=np.array([4, 1]))
    >>> row.completion.tolist()
    [4, 1]
    """

    id: str
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    completion: np.ndarray
    """int64 (n,), n >= 1; EOS last."""
    images: PromptImages | None = None
    """The images of the prompt."""

    def __post_init__(self) -> None:
        assert self.prompt.dtype == self.completion.dtype == np.int64
        assert self.prompt.size >= 1, f"demonstration {self.id}: no prompt"
        assert self.completion.size >= 1, f"demonstration {self.id}: no completion"

    def __len__(self) -> int:
        return self.prompt.size + self.completion.size

    @property
    def whole(self) -> Demonstration:
        """The same text with every token but the first to be learnt, the prompt's too."""
        text = np.concatenate([self.prompt, self.completion])
        return replace(self, prompt=text[:1], completion=text[1:])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pair:
    """Two completions of one prompt, of which the first is preferred.  Both end with an EOS id, and
    they differ.
    """

    id: str
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    chosen: np.ndarray
    """int64 (n,), EOS last."""
    rejected: np.ndarray
    """int64 (n',), EOS last."""
    margin: float = 0.0
    """The amount by which the score of the chosen completion should exceed the other's; from the
    column `margin`, if the data have it.
    """
    images: PromptImages | None = None
    """The images of the prompt."""

    def __post_init__(self) -> None:
        assert self.prompt.dtype == self.chosen.dtype == self.rejected.dtype == np.int64
        assert self.prompt.size >= 1, f"pair {self.id}: no prompt"
        assert not np.array_equal(self.chosen, self.rejected), (
            f"pair {self.id}: chosen and rejected are the same"
        )

    def __len__(self) -> int:
        return self.prompt.size + self.chosen.size + self.rejected.size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Solution:
    """A completion of a prompt with the label of each of its steps.  It ends with an EOS id, which
    belongs to the last step.
    """

    id: str
    prompt: np.ndarray
    """int64 (m,), m >= 1."""
    completion: np.ndarray
    """int64 (n,), EOS last."""
    ends: np.ndarray
    """int64, index of each step's last token, rising; the last is n - 1."""
    labels: np.ndarray
    """float64, 0 .. 1: probability that the step is right."""

    def __post_init__(self) -> None:
        assert (
            self.prompt.size >= 1 and self.ends.shape == self.labels.shape and self.ends.size >= 1
        )
        assert self.ends[-1] == self.completion.size - 1 and bool((np.diff(self.ends) > 0).all())

    def __len__(self) -> int:
        return self.prompt.size + self.completion.size


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[Item]):
    """A kind of record that rows become."""

    name: str
    """What one is called: `pair`."""
    read: Callable[[SourceRows, Wording], SourceRows[ReadRow]]
    """Rows, read; those that are not of this kind are left out."""
    make: Callable[..., Item]
    """(id, question, *completions) -> the record."""


def read_pairs(rows: SourceRows, wording: Wording) -> SourceRows[ReadRow]:
    """The pairs of a source in any published form (`preference_formats`): each with its chosen and
    its rejected answer.
    """
    return as_pairs(rows, wording).mapped(partial(read_pair, wording=wording))


def read_plain_pairs(rows: SourceRows, wording: Wording) -> SourceRows[ReadRow]:
    """The pairs of a source for an objective that reads no margin: those with one are noted."""

    def noted(example: ReadRow, _where: str) -> ReadRow:
        if not example.extra:
            return example
        return replace(example, notes=(*example.notes, UNREAD_MARGIN))

    return read_pairs(rows, wording).mapped(noted)


def demonstration(id: str, question: Question, answer: EncodedAnswer) -> Demonstration:
    """Make the record of a question and its answer; of a text alone all tokens are learnt."""
    made = Demonstration(
        id=id, prompt=question.tokens, completion=answer.tokens, images=question.images
    )
    if question.example.text_alone:
        return made.whole
    return made


def read_prompts(rows: SourceRows, wording: Wording) -> SourceRows[ReadRow]:
    """The prompts of a source."""
    return rows.mapped(wording.read)


def read_demonstrations(rows: SourceRows, wording: Wording) -> SourceRows[ReadRow]:
    """The prompts of a source, each with its answer."""
    return rows.mapped(partial(read_demonstration, wording=wording))


def read_solutions(rows: SourceRows, wording: Wording) -> SourceRows[ReadRow]:
    """The prompts of a source, each with an answer whose steps have labels."""
    return rows.mapped(partial(read_solution, wording=wording))


def prompt(id: str, question: Question) -> Prompt:
    """Make the record of a question that the policy is asked."""
    messages = None
    if not isinstance(question.content, str):
        messages = tuple(question.content)
    return Prompt(
        id=id,
        tokens=question.tokens,
        text=question.text,
        row=question.example.row,
        messages=messages,
        wrapped=question.example.wrapped,
        cut=question.cut,
        images=question.images,
    )


def pair(id: str, question: Question, chosen: EncodedAnswer, rejected: EncodedAnswer) -> Pair:
    """Make the record of a question and two answers."""
    return Pair(
        id=id,
        prompt=question.tokens,
        chosen=chosen.tokens,
        rejected=rejected.tokens,
        margin=question.example.extra,
        images=question.images,
    )


def solution(id: str, question: Question, solved: EncodedAnswer) -> Solution:
    """Make the record of a question and an answer in steps."""
    assert solved.ends is not None
    return Solution(
        id=id,
        prompt=question.tokens,
        completion=solved.tokens,
        ends=solved.ends,
        labels=question.example.extra,
    )


PROMPTS = RecordKind("prompt", read_prompts, prompt)
DEMONSTRATIONS = RecordKind("demonstration", read_demonstrations, demonstration)
PAIRS = RecordKind("pair", read_pairs, pair)
PLAIN_PAIRS = RecordKind("pair", read_plain_pairs, pair)
"""Pairs of an objective that reads no margin."""
SOLUTIONS = RecordKind("solution", read_solutions, solution)


def encode(
    rows: SourceRows[ReadRow],
    template: Template,
    kind: RecordKind[Item],
    *,
    limit: int,
    limited_by: str,
    eos_ids: Sequence[int] = (),
    too_long: TooLong = "drop",
) -> tuple[list[Item], Report]:
    """The records of rows that have been read.   limit: tokens of a prompt and the longest of its
    completions.

    limited_by: the setting that the limit is from, for messages.

    Dropped and counted: rows that ask or answer nothing, hold characters that the tokenizer does
        not know, are refused by the chat template, are too long (unless `truncate_left`, which
        keeps the prompt's end), or have two completions that are the same. Duplicates are kept; of
        the rows that stay they are counted.
    Raises DataError if no record is left, if one is too long and `too_long` is `error`, and for
    control tokens where that is the template's `control_tokens`.
    """
    report = Report.of(rows)
    numbers, questions = _questions_of(rows, template, report)
    answered = _answered(questions, template, eos_ids)
    items: list[Item] = []
    keys: set[str] = set()
    for number, question, answers in zip(numbers, questions, answered, strict=True):
        refused = [one for one in answers if isinstance(one, Refusal)]
        if refused:
            report.drop(refused[0].reason, first=str(refused[0]))
            continue
        completions = [one for one in answers if isinstance(one, EncodedAnswer)]
        if len(answers) == 2 and np.array_equal(completions[0].tokens, completions[1].tokens):
            report.drop("with chosen = rejected")
            continue
        if any(one.unknown for one in completions):
            report.drop(UNKNOWN)
            continue
        if question.example.text_alone:
            if is_blank(before_end(str(question.content), template.end_marks(eos_ids))):
                report.drop("empty")
                continue
            text = ended(question.tokens.tolist(), eos_ids, template.tokenizer)
            question = replace(question, tokens=text[:-1])
            completions = [replace(completions[0], tokens=text[-1:])]
        sizes = [one.tokens.size for one in completions]
        size = question.tokens.size + max(sizes, default=0)
        if size > limit:
            cut = _cut(question, size, limit, limited_by, too_long, report, template)
            if cut is None:
                continue
            question = cut
        if any(not one.stable for one in completions):
            report.note("with a completion encoded apart from its prompt")
        if any(one.closed for one in completions):
            report.note(CLOSED)
        for note in question.example.notes:
            report.note(note, first=question.where)
        key = template.key(question.content)
        if key in keys:
            report.note("duplicate")
        keys.add(key)
        report.lengths.append(question.tokens.size + sum(sizes))
        items.append(kind.make(str(number), question, *completions))
    if not items:
        remedy = ""
        if any(reason.startswith("longer") for reason in report.dropped):
            remedy = "; set data.too_long to truncate_left to keep the ends of prompts"
        raise DataError(f"no {kind.name} is left: {report}{remedy}")
    return items, report


def _answered(
    questions: Sequence[Question], template: Template, eos_ids: Sequence[int]
) -> Iterable[Sequence[EncodedAnswer | Refusal]]:
    """The answers of each question; none of a prompt."""
    if questions and questions[0].example.steps:
        return [(answer,) for answer in template.try_in_steps(questions, STEP_END, eos_ids)]
    sides = zip(*[question.example.answers for question in questions], strict=True)
    completed = [template.try_complete(questions, answers, eos_ids) for answers in sides]
    if not completed:
        return [()] * len(questions)
    return zip(*completed, strict=True)


def _questions_of(
    rows: SourceRows[ReadRow], template: Template, report: Report
) -> tuple[list[int], list[Question]]:
    """Number and question of the rows that ask something the tokenizer can write; the others are
    counted in `report`.
    """
    places: list[int] = []
    filled: list[ReadRow] = []
    for number, example in enumerate(rows):
        if is_blank(example.content):
            report.drop("empty")
        elif not example.text_alone and any(map(is_blank, example.answers)):
            report.drop("with an empty completion")
        else:
            places.append(number)
            filled.append(example)
    numbers: list[int] = []
    questions: list[Question] = []
    for number, question in zip(places, template.try_ask(filled), strict=True):
        if isinstance(question, Refusal):
            first = f"{question}; change the messages, or set model.chat_template"
            report.drop(question.reason, first=first)
        elif not question.tokens.size:
            reason = SILENT
            if question.plain:
                reason = "empty"
            report.drop(reason, first=f"{question.where}; set model.chat_template")
        elif question.unknown:
            report.drop(UNKNOWN)
        elif question.control and template.control_tokens == "drop":
            report.drop(CONTROL, first=question.where)
        else:
            numbers.append(number)
            questions.append(question)
    _tell_control([question for question in questions if question.control], template, report)
    _tell_unwritten(questions, report)
    _tell_unread_tools(questions, report)
    _tell_idle_variables(questions, template, report)
    _tell_unshown(questions, template, report)
    return numbers, questions


def _tell_unwritten(questions: Sequence[Question], report: Report) -> None:
    """Warn about messages that the chat template does not write."""
    lost: list[Question] = []
    for question in questions:
        if not isinstance(question.content, str) and unwritten(question.content, question.text):
            lost.append(question)
    if not lost:
        return
    roles: dict[str, None] = {}
    for message in lost[0].content:
        assert isinstance(message, dict)
        roles[str(message["role"])] = None
    warning = (
        "the chat template does not write what one of its messages says (roles:"
        f" {escaped(', '.join(roles))}), and the policy does not see it; set model.chat_template,"
        " or change the messages"
    )
    _tell(lost, UNWRITTEN, warning, report)


def _tell_unread_tools(questions: Sequence[Question], report: Report) -> None:
    """Warn about tools that cannot be read."""
    warning = (
        "the column tools cannot be read, and the policy does not see it; give a list of JSON"
        " schemas, each with a name, or its JSON text; or rename the column"
    )
    unread = [question for question in questions if question.unread_tools]
    _tell(unread, UNREAD_TOOLS, warning, report)


def _tell_idle_variables(questions: Sequence[Question], template: Template, report: Report) -> None:
    """Warn about variables that the chat template does not mention."""
    names: set[str] = set()
    for question in questions:
        names |= question.variables.keys()
    idle = unmentioned(sorted(names), template.tokenizer)
    ignored: list[Question] = []
    for question in questions:
        if not question.plain and not question.variables.keys().isdisjoint(idle):
            ignored.append(question)
    variables = escaped(", ".join(map(repr, idle)))
    warning = (
        f"the chat template does not mention {variables}, which chat_template_kwargs sets: it"
        " changes nothing; correct its name, or leave it out"
    )
    _tell(ignored, UNREAD_VARIABLES, warning, report)


def _tell_unshown(questions: Sequence[Question], template: Template, report: Report) -> None:
    """Warn about tools and calls that a prompt does not show."""
    lacking: dict[str, list[Question]] = {"tool": [], "call": []}
    for question in questions:
        for kind in template.unshown(question):
            lacking[kind].append(question)
    for kind, some in lacking.items():
        warning = (
            f"its prompt does not show a {kind}, and the policy does not see it; set"
            " model.chat_template to one that shows it"
        )
        _tell(some, f"with a {kind} that the chat template does not write", warning, report)


def _tell(questions: Sequence[Question], remark: str, warning: str, report: Report) -> None:
    """Count questions with a remark, and warn about the first."""
    for question in questions:
        report.note(remark, first=question.where)
    if not questions:
        return
    where = questions[0].where
    if len(questions) > 1:
        where += f" ({len(questions):,} such rows)"
    report.warnings.append(f"{where}: {warning}")


def _tell_control(questions: Sequence[Question], template: Template, report: Report) -> None:
    """Count questions with control tokens in their messages; say what becomes of them, or raise
    DataError.
    """
    if not questions:
        return
    first = questions[0]
    kind = "which is a control token" if len(first.control) == 1 else "which are control tokens"
    what = escaped(
        f"its messages hold {', '.join(map(repr, first.control))}, {kind} of the tokenizer"
    )
    remedy = "data.control_tokens: plain encodes them as text, drop leaves such rows out"
    if template.control_tokens == "error":
        raise DataError(f"{first.where}: {what}; {remedy}")
    if template.control_tokens != "plain":
        _tell(
            questions,
            CONTROL,
            f"{what}: they can end a turn or begin another, or pass for a call; {remedy}",
            report,
        )
        return
    for question in questions:
        report.note(f"{CONTROL}, encoded as text", first=question.where)


def cut_left(ids: np.ndarray, room: int, bos_id: int | None) -> np.ndarray:
    """The last `room` ids; a BOS at the head stays there."""
    if room > 1 and bos_id is not None and ids[0] == bos_id:
        return np.concatenate([ids[:1], ids[ids.size - room + 1 :]])
    return ids[ids.size - room :]


def _cut(
    question: Question,
    size: int,
    limit: int,
    limited_by: str,
    too_long: TooLong,
    report: Report,
    template: Template,
) -> Question | None:
    """What remains of a prompt that is too long beside its completion; None: the row is dropped.
    size: tokens of both.

    Raises DataError if `too_long` is `error`.
    """
    completion = size - question.tokens.size
    if too_long == "error":
        whole = "prompt and completion have" if completion else "the prompt has"
        raise DataError(
            f"{question.where}: {whole} {size} tokens and the limit is {limit} ({limited_by}); set"
            " data.too_long to drop or truncate_left"
        )
    if too_long == "drop" or limit - completion < 1 or question.images is not None:
        report.drop(f"longer than {limit} tokens ({limited_by})")
        return None
    report.note(f"cut to {limit} tokens ({limited_by})")
    tokens = cut_left(question.tokens, limit - completion, template.bos_id)
    text = str(template.tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
    return replace(question, tokens=tokens, text=text, cut=question.tokens.size - tokens.size)


def prompt_limit(context: int, max_new_tokens: int, max_prompt_tokens: int | None) -> int:
    """Longest prompt in tokens: what the context leaves beside the completion, or the smaller one
    that was asked for.

    Raises DataError, with both numbers, if prompt and completion cannot fit into the context.
    """
    room = context - max_new_tokens
    if room <= 0:
        raise DataError(
            f"max_new_tokens is {max_new_tokens} and the model's context is {context} tokens: no"
            f" room is left for a prompt; lower it below {context} (in an evaluation:"
            " --max-new-tokens)"
        )
    if max_prompt_tokens is not None and max_prompt_tokens > room:
        raise DataError(
            f"max_prompt_tokens ({max_prompt_tokens}) + max_new_tokens ({max_new_tokens}) exceed"
            f" the model's context of {context} tokens: lower one of them, or leave"
            f" max_prompt_tokens out (it is then {room})"
        )
    return max_prompt_tokens or room


def visit(prompt: Prompt, epoch: int | str) -> Prompt:
    """The prompt as drawn in one epoch: its id is `epoch/row`, so that each visit of a row is a
    group of its own.
    """
    return replace(prompt, id=f"{epoch}/{prompt.id}")


def columns_of(prompts: Iterable[Prompt]) -> list[str]:
    """The columns of all rows: rows of several tasks have different ones.

    >>> prompt = Prompt(id="0", tokens=np.array([5]), text="?")
    >>> rows = {"answer": "4"}, {"answer": "5", "tests": "..."}
    >>> columns_of([replace(prompt, row=row) for row in rows])
    ['answer', 'tests']
    """
    columns: dict[str, None] = {}
    for one in prompts:
        columns |= dict.fromkeys(one.row)
    return list(columns)
