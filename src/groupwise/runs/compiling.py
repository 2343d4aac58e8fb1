"""Whether the blocks of a run's policy are compiled: `model.compile`.

`on` compiles or ends the run with the reason.  `auto` compiles where that can be done, equals the
model's own pass and is faster here; otherwise the plan says why not.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Literal

import torch

from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.compiled_blocks import CompiledBlocks, demand_compiled, refusal_of
from groupwise.models.policy import Policy
from groupwise.proof.passes import run_pass
from groupwise.proof.prove import prove
from groupwise.proof.texts import FULL, written
from groupwise.runs.plan import Lines

GAIN = 1.05
"""The least ratio of seconds without compiled blocks and with them that `auto` compiles for."""
TIMES = 5
"""Passes that are timed of each kind."""


def with_blocks(
    policy: Policy, choice: Literal["auto", "on", "off"], *, longest: int, recompute: bool
) -> tuple[Policy, Lines]:
    """Return the policy as it is trained, and what the plan says of it.

    The policy is proven without compiled blocks before.   longest, recompute: see `prove`.
    Raises ConfigError if `on` cannot be.
    """
    if choice == "off":
        return policy, []
    if choice == "on":
        demand_compiled(policy)
    reason = refusal_of(policy)
    if reason is not None:
        return policy, [("compile", f"off: {reason}")]
    compiled = replace(policy, blocks=CompiledBlocks())
    try:
        prove(compiled, longest=longest, recompute=recompute)
    except ConfigError as error:
        if choice == "on":
            raise ConfigError(
                f"model.compile is 'on', but with compiled blocks: {error}. Without them the same"
                " model passes: set model.compile to off"
            ) from error
        return policy, [("compile", f"off: with compiled blocks, {error}")]
    if choice == "on":
        return compiled, [("compile", "blocks are compiled, and proven like the others")]
    gain = gain_of(policy, compiled, longest)
    if gain < GAIN:
        return policy, [("compile", f"off: passes with compiled blocks are {gain:.2f} x as fast")]
    return compiled, [("compile", f"blocks are compiled: passes are {gain:.2f} x as fast")]


def gain_of(policy: Policy, compiled: Policy, longest: int) -> float:
    """Return the seconds of passes forward and backward without compiled blocks over those with
    them, by turns; the mean of all processes, so that all choose alike.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    samples = written(policy, FULL, longest)
    for number in range(TIMES + 1):
        for kind, one in ((False, policy), (True, compiled)):
            begin = time.perf_counter()
            run_pass(one, samples, gradients=True)
            if policy.device.type == "cuda":
                torch.cuda.synchronize(policy.device)
            if number:  # the first may still compile
                seconds[kind].append(time.perf_counter() - begin)
    gains = comm.gather([median(seconds[False]) / median(seconds[True])])
    return sum(gains) / len(gains)
