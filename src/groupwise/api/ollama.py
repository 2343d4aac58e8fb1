"""Writes the Modelfile by which Ollama asks a model as its run asked it.

Format: ollama's docs/modelfile.md; templates are Go's, docs/template.md.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from groupwise.config.settings import Recipe
from groupwise.utils.terminal import logger

log = logger(__name__)

HEAD = "# Made by groupwise export."
SYSTEM, QUESTION, ANSWER, AGAIN = "SYSTEM-0", "QUESTION-1", "ANSWER-1", "QUESTION-2"
"""Texts that stand for messages while a chat template is taken apart."""


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """What a chat template writes around messages."""

    before_system: str
    after_system: str
    without_system: str
    """Text in the place of a system message that is not there."""
    before_user: str
    after_user: str
    before_assistant: str
    after_assistant: str
    begin_answer: str
    """Text behind which the model answers."""

    def render(self, *, system: bool, turns: bool) -> str:
        """Write the texts that stand for messages as the chat template should."""
        text = self.without_system
        if system:
            text = f"{self.before_system}{SYSTEM}{self.after_system}"
        text += f"{self.before_user}{QUESTION}{self.after_user}"
        if turns:
            text += f"{self.before_assistant}{ANSWER}{self.after_assistant}"
            text += f"{self.before_user}{AGAIN}{self.after_user}"
        return text + self.begin_answer


def modelfile(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Return the text of a Modelfile for the GGUF file `name` beside it.

    Sampling settings are those of the run's rollouts.  A run with chat prompts gets its chat
    template, any other its prompt as it is, or in the one-column template of `data.template`.
    """
    rollout = recipe.rollout
    lines = [HEAD, f"FROM ./{name}"]
    template = _template(recipe, tokenizer)
    if template is None:
        log.warning(
            "the chat template cannot be taken apart into Ollama's: the Modelfile has no TEMPLATE,"
            " and Ollama chooses one by its likeness to the file's"
        )
    else:
        lines.append(f'TEMPLATE """{template}"""')
    if recipe.data.system:
        lines.append(f'SYSTEM """{recipe.data.system}"""')
    parameters = {
        "temperature": f"{rollout.temperature:g}",
        "top_k": f"{rollout.top_k}",
        "top_p": f"{rollout.top_p:g}",
        "min_p": f"{rollout.min_p:g}",
        "repeat_penalty": "1",
        "num_predict": f"{rollout.max_new_tokens}",
    }
    for parameter, value in parameters.items():
        lines.append(f"PARAMETER {parameter} {value}")
    for stop in rollout.stop:
        written = stop.replace("\n", "\\n").replace('"', '\\"')
        lines.append(f'PARAMETER stop "{written}"')
    return "\n".join([*lines, ""])


def _template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the template in Ollama's language; None if a chat template cannot be written in it."""
    before, after = _around_prompt(recipe.data.template)
    conversed = recipe.environment.talks or recipe.environment.asks
    if not recipe.data.chat and not (conversed and tokenizer.chat_template):
        return f"{before}{{{{ .Prompt }}}}{after}"
    turns = _turns(tokenizer, dict(recipe.data.chat_template_kwargs))
    if turns is None:
        return None
    system = f"{turns.before_system}{{{{ .System }}}}{turns.after_system}"
    user = f"{turns.before_user}{before}{{{{ .Content }}}}{after}{turns.after_user}"
    assistant = f"{turns.before_assistant}{{{{ .Content }}}}{turns.after_assistant}"
    return (
        f"{{{{ if .System }}}}{system}{{{{ else }}}}{turns.without_system}{{{{ end }}}}"
        f'{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}'
        f"{turns.begin_answer}"
    )


def _around_prompt(template: str | None) -> tuple[str, str]:
    """Return what `data.template` writes before and after its only column; nothing for others."""
    if template is None:
        return "", ""
    before, after, columns = "", "", 0
    for literal, column, _, _ in string.Formatter().parse(template):
        if columns:
            after += literal
        else:
            before += literal
        if column is not None:
            columns += 1
    if columns != 1:
        return "", ""
    return before, after


def _turns(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> TemplateParts | None:
    """Take a chat template apart; None if it is not the sum of its parts."""

    def rendered(*texts: str, begin: bool = False) -> str:
        messages = [{"role": ROLES[text], "content": text} for text in texts]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=begin, **variables
        )
        assert isinstance(text, str)
        return text

    try:
        whole = rendered(SYSTEM, QUESTION, ANSWER, AGAIN)
        plain = rendered(QUESTION)
        begun = rendered(QUESTION, begin=True)
        after_user = whole.rpartition(AGAIN)[2]
        after_assistant = rendered(QUESTION, ANSWER).rpartition(ANSWER)[2]
        between = _between(whole, ANSWER, AGAIN)
        before_user = between.removeprefix(after_assistant)
        turns = TemplateParts(
            before_system=_unmarked(tokenizer, whole.partition(SYSTEM)[0]),
            after_system=_between(whole, SYSTEM, QUESTION).removesuffix(before_user),
            without_system=_unmarked(tokenizer, plain.partition(QUESTION)[0]).removesuffix(
                before_user
            ),
            before_user=before_user,
            after_user=after_user,
            before_assistant=_between(whole, QUESTION, ANSWER).removeprefix(after_user),
            after_assistant=after_assistant,
            begin_answer=begun.removeprefix(plain),
        )
        complete = rendered(SYSTEM, QUESTION, ANSWER, AGAIN, begin=True)
    except Exception as error:  # whatever a template raises for messages that it refuses
        log.info("the chat template refuses plain conversations: %s", error)
        return None
    same = (
        turns.render(system=True, turns=True) == _unmarked(tokenizer, complete)
        and turns.render(system=False, turns=False) == _unmarked(tokenizer, begun)
        and "{{" not in complete
        and '"""' not in complete
    )
    return turns if same else None


ROLES = {SYSTEM: "system", QUESTION: "user", ANSWER: "assistant", AGAIN: "user"}


def _between(text: str, first: str, second: str) -> str:
    """Return what stands between two texts."""
    return text.partition(first)[2].partition(second)[0]


def _unmarked(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a text without the BOS that llama.cpp puts before it."""
    if tokenizer.bos_token is None or tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        return text
    return text.removeprefix(str(tokenizer.bos_token))
