"""Parts of your own: they are checked when a recipe names them, and what they give where they give
it.

`registered` puts a check around a part that is not built in; an algorithm then calls it like one of
ours.  A check names the part, its file and line, and what to change.  Importing this file does not
import torch.

M trained tokens of one micro-batch   R completions of the optimizer step   n tokens of a completion
"""

from __future__ import annotations

import inspect
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.algorithms.parts import CheckedPart, bare, fact, is_built_in, name_of
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.records import RolloutGroup
from groupwise.utils.spelling import closest, counted

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.algorithms.losses import Terms

INPUTS = {
    "credit": ("groups",),
    "ratio": ("logp_M", "old_logp_M", "segment_M", "segments"),
    "surrogate": ("terms",),
    "weights": ("tokens_R", "prompt_R"),
    "divergence": ("log_q_CV", "log_p_CV"),
    "kl": ("logp_M", "reference_logp_M", "log_ratio_M"),
    "extra": ("terms",),
}
"""The arguments of each kind of part."""
READS = ("value", "teacher_logp", "process")
"""Signals that a credit may read beside rewards; an extra term also `teacher`."""
UNFILLED = (
    ": a field of Terms is None that nothing needs: reference_logp_M without a KL in the loss"
    " (group.beta), value_M and divergence unless an extra term reads `value` or `teacher`"
)
"""A hint for messages about None."""


@dataclass(frozen=True)
class UserPart(CheckedPart):
    """A part of your own, called as one of ours: what it raises and what it gives is checked."""

    kind: str
    part: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        """Call the part.  Raises ConfigError, which names the part, for what it does wrong."""
        with naming(self.kind, self.part):
            output = self.part(*inputs)
        return CHECKS[self.kind](self.part, output, *inputs)


def registered(kind: str, part: Callable[..., Any]) -> Callable[..., Any]:
    """Return a part as an algorithm calls it: ours as it is, yours with its checks.

    Raises ConfigError if it cannot be called with what its kind is called with, or reads a signal
    that there is not.
    """
    if isinstance(part, CheckedPart):
        return part
    check_inputs(kind, part)
    return part if is_built_in(part) else UserPart(kind, part)


def check_inputs(kind: str, part: Callable[..., Any]) -> None:
    """Raise ConfigError if a part cannot be called with what its kind is called with, or reads a
    signal that there is not.
    """
    names, key = INPUTS[kind], _key(kind)
    if not callable(part):
        value = f"an object of {type(part).__name__}, which has no method __call__"
        if isinstance(part, str):
            value = repr(part)
        raise ConfigError(
            f"{key}: the {kind} is {value}: give a function, or an object that can be called",
            key=key,
        )
    try:
        inspect.signature(part).bind(*names)
    except TypeError as error:
        message = (
            f"{key}: {label(kind, part)} is called with {', '.join(names)} and nothing else:"
            f" {error}"
        )
        raise ConfigError(message, key=key) from None
    if kind not in ("credit", "extra"):
        return
    signals = (*READS, "teacher") if kind == "extra" else READS
    for name in fact(part, "reads"):
        if name in ("reference_logp", "scored_logp"):
            raise refused(kind, part, f"reads {name!r}, which needs no declaration: leave it out")
        if name not in signals:
            raise refused(
                kind,
                part,
                f"reads {name!r}, which is no signal{closest(name, signals)}: there are"
                f" {', '.join(signals)}",
            )


# ---------------------------------------------------------------- messages


def label(kind: str, part: Callable[..., Any]) -> str:
    """Return a part as messages name it, with file and line where it is not built in: `the credit
    'rank' (my_adv.py:12)`.
    """
    noun = "extra term" if kind == "extra" else kind
    code, place = _code(part), ""
    if code is not None and not is_built_in(part):
        place = f" ({_near(code.co_filename)}:{code.co_firstlineno})"
    return f"the {noun} {name_of(part)!r}{place}"


def refused(kind: str, part: Callable[..., Any], message: str) -> ConfigError:
    """Return the error about a part, with its key of the recipe.

    message: what the part does wrong, behind its name.
    """
    return ConfigError(f"{label(kind, part)} {message}", key=_key(kind))


def _key(kind: str) -> str:
    """Return the key of a recipe that a kind of part comes from."""
    return "objective" if kind == "extra" else f"group.{kind}"


@contextmanager
def naming(kind: str, part: Callable[..., Any]) -> Iterator[None]:
    """Make what a part raises inside a ConfigError that names the part and the line."""
    try:
        yield
    except GroupwiseError:
        raise
    except Exception as error:  # whatever somebody's function raises
        raised = f"raised {type(error).__name__}: {error}"
        message = f"{raised}{_raised_at(part, error)}{_remedy(kind, part, error)}"
        raise refused(kind, part, message) from error


def _remedy(kind: str, part: Callable[..., Any], error: Exception) -> str:
    """Return a hint for a part that read what was not computed for it, else nothing."""
    if kind in ("surrogate", "extra") and "NoneType" in str(error):
        return UNFILLED
    if isinstance(error, AttributeError) and error.name == "sampler_logp_M":
        return ": the log-probs of the sampler are called behavior_logp_M"
    if kind not in ("credit", "extra") or not isinstance(error, KeyError) or not error.args:
        return ""
    name = str(error.args[0])
    if name == "return":
        name = "value"
    if name in READS and name not in fact(part, "reads"):
        return f": declare that it reads it: {name_of(part)}.reads = ({name!r},)"
    return ""


def _code(part: Callable[..., Any]) -> Any:
    function = inspect.unwrap(bare(part))
    return getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))


def _near(file: str) -> str:
    """Return a file's path from the working directory, if it lies below."""
    path = Path(file)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return str(path)


def _raised_at(part: Callable[..., Any], error: Exception) -> str:
    """Return the last line of the part's own file that was reached."""
    code = _code(part)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == code.co_filename]
    if not inside:
        return ""
    last = inside[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f" ({_near(last.filename)}:{last.lineno}: {line})"


def _described(value: Any) -> str:
    """Return a value that a part gave in a few words."""
    if value is None:
        return "None"
    if isinstance(value, np.ndarray):
        return f"an array of shape {tuple(value.shape)}"
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {str(value)[:60]}"


def _numbers(output: Any) -> np.ndarray:
    """Return what a part gave as float64, a tensor too; without a shape that anybody expects if it
    is something else.
    """
    if hasattr(output, "detach"):
        output = output.detach().cpu()
    try:
        return np.asarray(output, dtype=np.float64)
    except (TypeError, ValueError):
        return np.zeros((0, 0))


# ---------------------------------------------------------------- checks of what a part gives


def checked_advantages(
    credit: Callable[..., Any], output: Any, groups: Sequence[RolloutGroup]
) -> list[list[np.ndarray]]:
    """Return what a credit gave as one float64 array (n,) for each completion of each group; a
    number for a completion is broadcast.

    A completion without a reward may have NaN, which is 0.  Raises ConfigError for all else.
    """
    _check_length(credit, output, len(groups), "group", "")
    advantages = []
    for group, row in zip(groups, output, strict=True):
        _check_length(credit, row, len(group.rollouts), "completion", f" of {group.prompt.place}")
        advantages.append([_advantage(credit, value, group, i) for i, value in enumerate(row)])
    return advantages


def _check_length(
    credit: Callable[..., Any], output: Any, count: int, noun: str, where: str
) -> None:
    """Raise ConfigError unless a credit gave so many values."""
    expected = "expected, for each group, a number or an array for each completion"
    if output is None:
        raise refused("credit", credit, f"gave None, {expected}: is there a return?")
    try:
        size = len(output)
    except TypeError:
        raise refused("credit", credit, f"gave {_described(output)}, {expected}") from None
    if size != count:
        values = f"{counted(size, 'value')} for {counted(count, noun)}{where}"
        raise refused("credit", credit, f"gave {values}, {expected}")


def _advantage(credit: Callable[..., Any], output: Any, group: RolloutGroup, i: int) -> np.ndarray:
    """Return the advantages (n,) of completion i of a group."""
    rollout, value_n = group.rollouts[i], _numbers(output)
    whose = f"completion {rollout.place} ({counted(len(rollout), 'token')})"
    if value_n.ndim == 0:
        value_n = np.full(len(rollout), value_n)
    if value_n.shape != (len(rollout),):
        raise refused(
            "credit",
            credit,
            f"gave {_described(output)} for {whose}: give one number, or one for each token",
        )
    if np.isfinite(value_n).all():
        return value_n
    reward = float(group.reward[i])
    if np.isnan(reward) and not np.isinf(value_n).any():
        return np.nan_to_num(value_n)
    wrong = value_n[~np.isfinite(value_n)][0]
    raise refused(
        "credit",
        credit,
        f"gave {wrong:g} for {whose}, whose reward is {reward:g}: give finite numbers",
    )


def checked_weights(
    part: Callable[..., Any], output: Any, tokens_R: np.ndarray, prompt_R: np.ndarray
) -> np.ndarray:
    """Return what weights gave: a finite number for each completion, 0 or more, float64 (R,)."""
    weight_R = _numbers(output)
    if weight_R.shape != (len(tokens_R),):
        hint = ": is there a return?" if output is None else ""
        expected = f"expected a number for each of the {len(tokens_R)} completions"
        raise refused("weights", part, f"gave {_described(output)}, {expected}{hint}")
    wrong_R = ~(np.isfinite(weight_R) & (weight_R >= 0))
    if wrong_R.any():
        place = int(np.flatnonzero(wrong_R)[0])
        raise refused(
            "weights",
            part,
            f"gave {weight_R[place]:g} for completion {place}: give finite numbers, 0 or more",
        )
    return weight_R


def checked_ratio(
    part: Callable[..., Any],
    output: Any,
    logp_M: Tensor,
    old_logp_M: Tensor,
    segment_M: Tensor,
    segments: int,
) -> Tensor:
    """Return the log-ratio of each token (M,) that a ratio level gave."""
    return checked_loss("ratio", part, output, logp_M)


def checked_surrogate(part: Callable[..., Any], output: Any, terms: Terms) -> Tensor:
    """Return the loss of each token (M,) that a surrogate gave."""
    return checked_loss("surrogate", part, output, terms.logp_M)


def checked_kl(
    part: Callable[..., Any],
    output: Any,
    logp_M: Tensor,
    reference_logp_M: Tensor,
    log_ratio_M: Tensor,
) -> Tensor:
    """Return the KL of each token (M,) that an estimator gave."""
    return checked_loss("kl", part, output, logp_M)


def checked_divergence(
    part: Callable[..., Any], output: Any, log_q_CV: Tensor, log_p_CV: Tensor
) -> Tensor:
    """Return the divergence of each row (C,) that a part gave."""
    return checked_loss("divergence", part, output, log_q_CV[:, 0])


def checked_term(part: Callable[..., Any], output: Any, terms: Terms) -> Tensor:
    """Return the loss of each token (M,) that an extra term gave.

    A term that reads the critic's values must depend on them.  One that may depend on entropies
    alone is not asked for a gradient where these are constants.
    """
    constant = terms.entropy_M is not None and not terms.entropy_M.requires_grad
    loss_M = checked_loss("extra", part, output, terms.logp_M, differentiable=not constant)
    if "value" in fact(part, "reads") and _lost_gradient(loss_M, terms.value_M):
        raise refused(
            "extra",
            part,
            "gave numbers without a gradient: compute them from terms.value_M, undetached",
        )
    return loss_M


def checked_loss(
    kind: str,
    part: Callable[..., Any],
    value_M: Any,
    logp_M: Tensor,
    *,
    differentiable: bool = True,
) -> Tensor:
    """Return what a part gave: a number for each token (M,), not NaN where the log-probs are not,
    and with a gradient if it must be `differentiable`.

    An infinite one may be an overflow of any loss: the optimizer leaves such a step out.
    """
    import torch

    if not isinstance(value_M, torch.Tensor) or value_M.shape != logp_M.shape:
        hint = ": is there a return?" if value_M is None else ""
        expected = f"expected a tensor of shape {tuple(logp_M.shape)}, a number for each token"
        raise refused(kind, part, f"gave {_described(value_M)}, {expected}{hint}")
    if differentiable and fact(part, "reads_logp") and _lost_gradient(value_M, logp_M):
        raise refused(
            kind,
            part,
            "gave numbers without a gradient: compute them from the log-probs, undetached",
        )
    wrong_M = value_M.detach().isnan() & ~logp_M.detach().isnan()
    if wrong_M.any():
        logp = float(logp_M.detach()[wrong_M][0])
        raise refused(kind, part, f"gave nan for a token whose log-prob is {logp:g}: give numbers")
    return value_M


def _lost_gradient(output_M: Tensor, input_M: Tensor | None) -> bool:
    """Return True if numbers do not depend on an input that is to get a gradient."""
    import torch

    if input_M is None or not torch.is_grad_enabled():
        return False
    return input_M.requires_grad and not output_M.requires_grad


CHECKS: Mapping[str, Callable[..., Any]] = {
    "credit": checked_advantages,
    "ratio": checked_ratio,
    "surrogate": checked_surrogate,
    "weights": checked_weights,
    "divergence": checked_divergence,
    "kl": checked_kl,
    "extra": checked_term,
}
"""The check of what each kind of part gives: (part, output, inputs) -> what the algorithm gets."""
