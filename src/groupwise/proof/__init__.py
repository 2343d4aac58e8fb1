"""Proof, before anything is trained, that a run computes what the model's own forward and backward
pass gives.

In: the policy that is there, on its device and in its type.  Out: a `ModelProof` for the plan, or
ConfigError with the remedy.

- `prove`: compares the two ways, and says which one is wrong.
- `fp8`: compares blocks in FP8 with torchao's layers, and with blocks without FP8.
- `passes`: the model's own way, and that of a run.
- `texts`: the texts that are compared.
"""
