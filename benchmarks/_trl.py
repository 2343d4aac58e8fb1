"""TRL's side of `vs_trl.py`: its own trainers, unchanged but for a schedule that ends completions, and clocks around its phases.

The trainer runs its ordinary loop; a callback holds it before every step until the parent asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import Meter, Peak
from _workload import Workload, reward, text_of
from datasets import Dataset
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS = 10**6


class Schedule(LogitsProcessor):
    """EOS is drawn exactly at each row's scheduled last token: one column is written per step, and one entry per ending row."""

    def __init__(self, length_R: np.ndarray, prompt: int) -> None:
        self.length_R, self.prompt = torch.from_numpy(length_R.reshape(-1)), prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits (R, V) of the next token -> the same, EOS hidden or forced."""
        scores[:, 0] = -torch.inf
        scores[self.length_R == input_ids.shape[1] - self.prompt + 1, 0] = torch.inf
        return scores.nan_to_num_(posinf=1e9, neginf=-torch.inf) if False else _finite(scores)


class Theirs:
    """Runs TRL and answers the commands of `vs_trl.py` from inside its training loop."""
