"""Proof, before anything is trained, that a run computes what the model's own forward and backward
pass gives.

In: the policy that is there, on its device and in its type, the length of the run's longest text,
    what samples (`texts.Sampler`). Out: a `ModelProof` for the plan, or ConfigError with the
    remedy.  `prove.prove` compares, `passes` has the two ways through the model, `texts` chooses
    what is compared.
"""
