"""Rollout engines: prompts in, groups of completions with the log-probabilities that they were drawn with out."""
