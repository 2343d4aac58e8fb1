"""The reward of IFEval: instructions that a program can check (2311.07911).

The checkers are those of lm-eval, from the extra `ifeval`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import ConfigError, RewardError
from groupwise.rewards.final_message import final_message
from groupwise.utils.built_in import built_in

CHECKERS = "lm_eval.tasks.ifeval.instructions_registry"


@built_in("ifeval")
def ifeval(
    completions: Sequence[str],
    instruction_id_list: Sequence[Sequence[str]],
    kwargs: Sequence[Sequence[Mapping[str, Any]]],
) -> list[float]:
    """1.0 if the completion follows every instruction of its row, else 0.0 (prompt-level strict
    accuracy of IFEval, 2311.07911).

    Reasoning before the final message is not looked at.  Columns, as `google/IFEval` has them:
    `instruction_id_list` names the instructions of a row, `kwargs` holds the arguments of each.
    Needs the extra `ifeval`, and two of its checkers nltk's data `punkt_tab`.
    """
    checkers = _checkers()
    rewards = []
    for text, names, arguments in zip(completions, instruction_id_list, kwargs, strict=True):
        message = final_message(text)
        followed = [
            _follows(checkers, name, given, message)
            for name, given in zip(names, arguments, strict=True)
        ]
        rewards.append(float(all(followed)))
    return rewards


def _checkers() -> Mapping[str, Any]:
    """Import the classes that check, by the names of instructions.  Raises ConfigError."""
    try:
        import langdetect  # type: ignore[import-not-found]

        registry = importlib.import_module(CHECKERS)
    except ImportError as error:
        raise ConfigError(
            f"the reward 'ifeval' needs the checkers of lm-eval ({error}): pip install"
            " 'lm_eval[ifeval]'"
        ) from error
    langdetect.DetectorFactory.seed = 0  # it guesses languages by chance otherwise
    return registry.INSTRUCTION_DICT


def _follows(
    checkers: Mapping[str, Any], name: str, arguments: Mapping[str, Any], message: str
) -> bool:
    """Check one instruction.  Raises RewardError for one that is not known or cannot be checked."""
    if name not in checkers:
        raise RewardError(f"instruction_id_list names {name!r}, which lm-eval does not check")
    # Tables give every row the arguments of all instructions, null where they are not its own.
    own = {key: value for key, value in arguments.items() if value is not None}
    checker = checkers[name](name)
    try:
        checker.build_description(**own)
        return bool(message.strip()) and bool(checker.check_following(message))
    except LookupError as error:
        raise RewardError(
            f"the instruction {name!r} needs nltk's data: python -m nltk.downloader punkt_tab"
        ) from error
