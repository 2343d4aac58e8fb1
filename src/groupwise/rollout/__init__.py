"""Who samples: prompts become groups of completions with the log-probs that they were drawn with.

In: prompts and a policy. Out: groups of `records.Rollout`, and of `records.Scored` from `dynamic_sampling`.
`engine.Engine` is the protocol; `native`, `transformers` and `vllm` implement it. `dynamic_sampling` draws prompts, has them
sampled and scored, and replaces groups that teach nothing; `asynchronous` does that some steps ahead of training.
"""
