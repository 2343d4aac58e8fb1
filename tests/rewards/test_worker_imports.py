"""What a worker process of reward functions imports, and the largest reward."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from groupwise.rewards.user_functions import LARGEST


def test_a_worker_of_plain_functions_imports_neither_numpy_nor_asyncio(tmp_path):
    """From its start to the values that it answers with."""
    (tmp_path / "plain.py").write_text("def f(completions): return [len(c) / 2 for c in completions]")
    code = """
import pickle, sys
from groupwise.rewards.functions import Excerpt, RewardCall, worker
from groupwise.rewards.trainer_state import TrainerState
from groupwise.rewards.user_functions import Reward, Signature
answer = worker(["plain.py:f"])
told = answer("describe", "plain.py:f", "f", {}, ["answer"])
reward = Reward(name="f", weight=1.0, spec="plain.py:f", signature=Signature(**told), arguments={})
given = [pickle.dumps({"completions": text}) for text in ("a", "bc")]
call = RewardCall(reward=reward, labels=["0#0", "0#1"], excerpts=[Excerpt(prompt="", completion="")] * 2, pickled=given,
                  state=TrainerState(), chat=False)
(answered,) = answer("call", call)
print(answered["values"], [module for module in ("numpy", "asyncio") if module in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[0.5, 1.0] []"


def test_the_largest_reward_is_what_single_precision_holds():
    assert float(np.finfo(np.float32).max) == LARGEST
