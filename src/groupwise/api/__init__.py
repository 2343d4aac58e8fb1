"""What `gw.` and the commands offer: runs, evaluations and trained policies, with Python objects
where a recipe has names.

In: keyword arguments, paths, objects.  Out: `Training`, `EvalReport`, `LoadedPolicy`.

- `train`: `gw.train`, training from Python.
- `stages`: every stage of a recipe, with its plan, progress and closing table.
- `planning`: `--dry-run`, the plan of every stage before anything is loaded.
- `progress`: what a terminal shows of a run.
- `sweep`: several runs of one recipe, for seeds and values of keys.
- `evaluate`: evaluation of a trained model on held-out prompts.
- `benchmark`: evaluation on a standard set of problems, by name.
- `loaded_policy`: a trained policy that generates and scores.
- `tool_chat`: a trained policy that talks to tools.
- `tables`: metrics and completions of a run for pandas.
- `publish`: uploads the final model of a run to the hub.
- `export`, `ollama`: the final model as a GGUF file, and the Modelfile for Ollama.
- `objects`: Python objects in the place of names.

No other package but `inspection`, `trl` and `cli` imports this one.
"""
