"""Who the other processes are: ranks, collectives, sharding and heartbeats.

In: tensors and Python values of this rank.  Out: what all ranks agree on.

- `comm`: who I am, what the others have, gradients summed over all.
- `process_group`: how the processes of a run meet and part.
- `fsdp`: tensors that are spread over processes, and the norm of their gradients.
- `layout`: which processes share a model and which a batch; spreads models over them.
- `ulysses`: context parallelism, positions exchanged for heads around attention.
- `sharded_checkpoint`: sharded tensors in files that all ranks write at once.
- `heartbeat`: finds a process that died, hangs or lies behind a broken network.

Only this package imports `torch.distributed`.
"""
