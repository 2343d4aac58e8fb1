"""What is trained: Hugging Face checkpoints in and out, packed attention for them, adapters,
sharding, heads, scratch models.

In: a folder or hub name. Out: a `policy.Policy`: a causal model that takes packed `Batch`es, its
    tokenizer and what the rest of the library needs to know of both. `loading` makes it, `passes`
    computes with it, `saving` writes it, `sharded` spreads it over processes.
"""
