"""Data: prompts, demonstrations and preference pairs from files, the hub or built-in tasks; templates, tokenizers, order.

`load.py` is the entry: it turns the `data` section of a recipe into records.
"""
