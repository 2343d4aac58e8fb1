"""A recipe on many machines: the text that Slurm, SkyPilot or Kubernetes takes, or the processes of
one machine.

In: a recipe with its section `cluster`.  Out: a text that holds only documented commands (torchrun,
`groupwise train`, `groupwise serve`), and the command that submits it.

- `commands`: what runs on the machines, whoever starts it.
- `slurm`: a batch script.
- `skypilot`: a JobGroup.
- `kubernetes`: a Job, or a JobSet with servers.
- `local`: the processes of one machine.
- `submit`: the program that takes the text.

Nothing here imports torch.
"""
