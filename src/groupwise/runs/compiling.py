"""Whether the blocks of a run's policy are compiled: `model.compile`.

`on` compiles or ends the run with the reason.  `auto` compiles where that can be done, equals the
model's own pass and is faster here; otherwise the plan says why not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import median
from typing import Literal

import numpy as np
import torch

from groupwise.distributed import comm
from groupwise.errors import ConfigError
from groupwise.models.backbone import checkpointing
from groupwise.models.compiled_blocks import CompiledBlocks, refusal_of
from groupwise.models.policy import Policy
from groupwise.proof.fp8 import prove_fp8
from groupwise.proof.passes import run_pass
from groupwise.proof.prove import prove
from groupwise.proof.texts import FULL, written
from groupwise.runs.plan import Lines

GAIN = 1.05
"""The least ratio of seconds without compiled blocks and with them that `auto` compiles for."""
TIMES = 5
"""Passes that are timed of each kind."""


def with_blocks(
    policy: Policy,
    choice: Literal["auto", "on", "off"],
    *,
    longest: int,
    recompute: bool,
    prompts: Sequence[np.ndarray] = (),
) -> tuple[Policy, Lines]:
    """Return the policy as it is trained, and what the plan says of it.

    The policy is proven without compiled blocks before, and without FP8; blocks in FP8 are proven
    here.   longest, recompute: see `prove`.   prompts: token ids of the run's prompts.
    Raises ConfigError if `on` cannot be, and for FP8 that is not proven.
    """
    if policy.blocks is not None:
        line = prove_fp8(policy, longest=longest, recompute=recompute, prompts=prompts)
        return policy, [line]
    if choice == "off":
        return policy, []
    compiled = policy
    reason = refusal_of(policy)
    if reason is None:
        compiled = replace(policy, blocks=CompiledBlocks())
        reason = _difference_of(compiled, longest, recompute)
    if choice == "on":
        if reason is not None:
            raise ConfigError(f"model.compile is 'on', but {reason}; set model.compile to off")
        return compiled, [("compile", "blocks are compiled, and proven like the others")]
    # One process may lack what the others have, such as a compiler: all must choose alike.
    for here in comm.gather([reason]):
        if here is not None:
            return policy, [("compile", f"off: {here}")]
    gain = gain_of(policy, compiled, longest, recompute)
    if gain < GAIN:
        return policy, [("compile", f"off: passes with compiled blocks are {gain:.2f} x as fast")]
    return compiled, [("compile", f"blocks are compiled: passes are {gain:.2f} x as fast")]


def _difference_of(compiled: Policy, longest: int, recompute: bool) -> str | None:
    """Return what the proof finds wrong with compiled blocks; None where they pass."""
    try:
        prove(compiled, longest=longest, recompute=recompute)
    except ConfigError as error:
        return f"with compiled blocks: {error}. Without them the same model passes"
    return None


def gain_of(policy: Policy, compiled: Policy, longest: int, recompute: bool) -> float:
    """Return the seconds of passes forward and backward without compiled blocks over those with
    them, by turns; the mean of all processes.
    """
    seconds: dict[bool, list[float]] = {False: [], True: []}
    samples = written(policy, FULL, longest)
    with checkpointing(policy, True) if recompute else nullcontext():
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
