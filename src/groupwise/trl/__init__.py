"""TRL's configurations as recipes.  Only commands and `gw.from_trl` import this room.

| module | holds |
|---|---|
| `values` | how values of TRL are read, and shown in one line |
| `configuration` | what a user of TRL wrote, TRL's defaults, and the recipe that is being made |
| `model_keys`, `data_keys`, `schedule_keys` | write keys: model; rows; optimizer and steps |
| `loss_keys`, `rollout_keys` | write keys: what is learnt; how is sampled and judged |
| `table` | every argument, and what becomes of it |
| `recipe` | a configuration as a recipe: `import_trl` |
| `files`, `scripts` | YAML, JSON and Python of TRL users, read without running anything |
| `live` | a run from TRL's own objects: `gw.from_trl` |
"""
