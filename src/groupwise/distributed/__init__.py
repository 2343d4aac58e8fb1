"""Who the other processes are: ranks, collectives, sharding, heartbeats, and tensors in files that
all ranks write at once.

In: tensors and Python values of this rank. Out: what all ranks agree on. `comm` (collectives),
    `fsdp` (sharded weights) and `sharded_checkpoint` import `torch.distributed`, as nothing else
    does but vLLM's plug-in; `heartbeat` finds a process that died, hangs or lies behind a broken
    network.
"""
