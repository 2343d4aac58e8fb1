"""What the policy reads: rows from files, the hub or built-in tasks -> prompts, demonstrations,
pairs; then packed batches.

In: the `data` section of a recipe. Out: records. `load` is the entry; `templates` knows chat
    templates; `packing` turns samples into `Batch`es without padding.
"""
