"""What can go wrong, by kind.  Every message names the value and the remedy; the command line
prints it without a traceback.

`assert` is for what we believe, these are for what a user can do something about.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


class Ended(BaseException):
    """A signal ended the run; the last whole step is saved.  SIGPIPE: nobody reads its output any
    more.

    It is a BaseException, so that `except Exception` does not catch it: a reward function that
    calls `sys.exit` has failed, one that is running when SIGTERM comes has not.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        message = signal.Signals(number).name
        if number == signal.SIGPIPE:
            message = "nobody reads the output any more"
        super().__init__(message)
        self.exit_code = 128 + number


class GroupwiseError(Exception):
    """Base of all errors of Groupwise.  `exit_code` is the exit code of the command `groupwise`."""

    exit_code = 1
    everywhere = False
    """True of one that all processes of a run raise at the same point: they can still do things
    together.
    """

    def __init__(self, message: str = "", *, key: str = "") -> None:
        """key: the dotted key of the recipe that is at fault, where that is known; whoever has the
        recipe's file adds the line.
        """
        super().__init__(message)
        self.key = key


class ConfigError(GroupwiseError):
    """A recipe, an override or an argument that cannot be carried out."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Show a notebook the message alone.  IPython calls this."""
        return [f"{type(self).__name__}: {self}"]


class DataError(GroupwiseError):
    """A row, a column, a file or a tokenizer that does not hold what it should."""

    exit_code = 2


class RunError(DataError):
    """A file of a run folder that is not what a run wrote: the message names it."""


class Problems(ConfigError):
    """Several mistakes in one recipe, each an error of its own."""

    def __init__(self, errors: Sequence[GroupwiseError]) -> None:
        self.errors = tuple(errors)
        lines = [f"  {error}" for error in errors]
        super().__init__("\n".join([f"{len(errors)} problems:", *lines]))


class RewardError(GroupwiseError):
    """A reward function that raised, or returned something that is not one number or None per
    completion; or completions of which nothing can be learnt."""

    of_file = False
    """True if a function of a file failed, which can be repaired."""


class EnvironmentFailure(GroupwiseError):
    """An environment or a tool that cannot be used, or that failed in a way that is not an answer
    to the policy.
    """

    exit_code = 10


class EngineError(GroupwiseError):
    """A rollout engine that cannot sample for the policy, or returned what cannot be scored."""

    exit_code = 7


class CheckpointError(GroupwiseError):
    """A checkpoint that is missing, incomplete, altered, or made with another configuration."""

    exit_code = 5


class StorageError(GroupwiseError):
    """A disk that is full, read-only or gone, or a file that is in the way: the message names the
    path.
    """

    exit_code = 6


class Diverged(GroupwiseError):
    """Numbers that are no longer finite: weights, losses or gradients."""

    exit_code = 4


class MemoryExceeded(GroupwiseError):
    """A step that does not fit into memory, however small its micro-batches."""

    exit_code = 9


def out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory does not suffice: CUDA's has a type, that of torch's
    allocator for CPUs only a message.
    """
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


class PeerError(GroupwiseError):
    """Another process of the run, or a vLLM server, that ended or does not answer."""

    exit_code = 8
