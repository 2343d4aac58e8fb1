"""Looking into a run, before it and afterwards: nothing that a run does imports this room.

In: recipes, run folders and files of completions.  Out: what `groupwise check`, `score`, `explain`,
`replay` and `compare` print.

- `check`: tries model, tokenizer, data and rewards of a recipe.
- `agents`: says which version of an agent is installed, and lets it take a turn.
- `servers`: whether the servers that a recipe names are there.
- `samplers`: says which sampler is the fastest on this machine.
- `score`: runs reward functions over completions that exist.
- `explain`: works one step through in numbers.
- `closed_form`: the loss of a recorded step and its gradient, without a model.
- `replay`: computes a recorded step again.
- `replay_report`: writes a replay as text and JSON.
- `comparison`: means over seeds of groups of runs, and their paired differences.
"""
