"""Requests that no engine can carry out are refused with their numbers."""

from dataclasses import replace

import numpy as np
import pytest

from groupwise.errors import EngineError
from groupwise.records import Prompt, Sampling
from groupwise.rollout.engine import check_request, completion_limit


def test_refusals_name_the_value(policy_of, prompts_of):
    policy = policy_of(context=16)
    good = prompts_of(3, 15)
    check_request(policy, good, 1, Sampling())
    cases = [
        (prompts_of(3, 16), 1, Sampling(), "p1 has 16 tokens, but the policy's context is 16"),
        ([Prompt(id="x", tokens=np.array([3, 40]), text="")], 1, Sampling(), "vocabulary of 40"),
        ([good[0], replace(good[1], id="p0")], 1, Sampling(), "'p0'"),
        (good, 0, Sampling(), "group_size must be at least 1, got 0"),
        (good, 1, Sampling(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (good, 1, Sampling(temperature=-1.0), "-1.0"),
        (good, 1, Sampling(top_p=0.0), "top_p"),
        (good, 1, Sampling(stop=("a", "")), "empty stop string"),
    ]
    for prompts, group_size, sampling, message in cases:
        with pytest.raises(EngineError, match=message):
            check_request(policy, prompts, group_size, sampling)


def test_the_context_bounds_a_completion(policy_of, prompts_of):
    policy = policy_of(context=16)
    short, long = prompts_of(3, 15)
    assert completion_limit(policy, short, Sampling(max_new_tokens=8)) == 8
    assert completion_limit(policy, short, Sampling(max_new_tokens=99)) == 13
    assert completion_limit(policy, long, Sampling()) == 1
