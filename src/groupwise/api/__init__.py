"""What `gw.` and the commands offer: runs, evaluations and trained policies, with Python objects
where a recipe has names.

In: keyword arguments, paths, objects. Out: `train`'s `Training`, `evaluate`'s `EvalReport`,
    `load_policy`'s `LoadedPolicy`.
    `stages` trains every stage of a recipe, `progress` is what a terminal shows of it.
"""
