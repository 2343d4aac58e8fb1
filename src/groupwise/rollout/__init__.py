"""Who samples: prompts become groups of completions with the log-probs that they were drawn with.

In: prompts and a policy.  Out: groups of `records.Rollout`.  `engine.Engine` is the protocol;
    `native`, `transformers` and `vllm` implement it.  `sampling` draws a token, `stopping` says
    when a completion ends, `episodes` holds the conversations of completions."""
