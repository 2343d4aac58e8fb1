"""What can go wrong, by kind.  Every message names the value and the remedy; the command line prints it without a traceback.

`assert` is for what we believe, these are for what a user can do something about.
"""

from __future__ import annotations


class Ended(BaseException):
    """SIGTERM ended the run; the last whole step is saved.

    It is a BaseException, so that `except Exception` does not catch it: a reward function that calls `sys.exit` has failed, one
    that is running when SIGTERM comes has not.
    """

    exit_code = 143


class GroupwiseError(Exception):
    """Base of every error that Groupwise raises on purpose.  `exit_code` is what the command `groupwise` ends with."""

    exit_code = 1
    everywhere = False
    """True of one that all processes of a run raise at the same point: they can still do things together."""


class ConfigError(GroupwiseError):
    """A recipe, an override or an argument that cannot be carried out."""

    exit_code = 2


class DataError(GroupwiseError):
    """A row, a column, a file or a tokenizer that does not hold what it should."""

    exit_code = 2


class RewardError(GroupwiseError):
    """A reward function that raised, or returned something that is not one number or None per completion."""


class EnvironmentFailure(GroupwiseError):
    """An environment or a tool that cannot be used, or that failed in a way that is not an answer to the policy."""

    exit_code = 10


class EngineError(GroupwiseError):
    """A rollout engine that died, stalled, or returned what cannot be scored."""

    exit_code = 7


class CheckpointError(GroupwiseError):
    """A checkpoint that is missing, incomplete, altered, or made with another configuration."""

    exit_code = 5


class StorageError(GroupwiseError):
    """A disk that is full, read-only or gone, or a file that is in the way: the message names the path."""

    exit_code = 6


class Diverged(GroupwiseError):
    """Numbers that are no longer finite: weights, losses or gradients."""

    exit_code = 4


class MemoryExceeded(GroupwiseError):
    """A step that does not fit into memory, however small its micro-batches."""

    exit_code = 9


class PeerError(GroupwiseError):
    """Another process of the run that ended or does not answer."""

    exit_code = 8
