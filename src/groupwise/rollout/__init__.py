"""Who samples: prompts become groups of completions with the log-probs that they were drawn with.

In: prompts and a policy.  Out: groups of `records.Rollout`.

- `engine`: the protocol of every engine, and what all check first.
- `native`: the engine in the trainer's process.
- `transformers`: the reference engine, transformers' own `generate`.
- `vllm`: vLLM's servers, or vLLM in this process.
- `gathered`: an engine for sharded weights, which it gathers first.
- `sampling`: how a token is drawn from logits.
- `stopping`: when a completion ends.
- `episodes`: the conversations and groups of one call.

Nothing here knows rewards or losses.
"""
