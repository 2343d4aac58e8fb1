"""What the policy reads: rows from files, the hub or built-in tasks become prompts, demonstrations
and pairs, then packed batches.

In: the `data` section of a recipe.  Out: records.

- `load`: the entry, from the section to prompts, demonstrations or pairs.
- `sources`: rows from files and from the hub.
- `benchmarks`: standard evaluations: their rows, prompts, rewards and sampling.
- `wording`: what a row asks and answers, before any tokenizer.
- `messages`: chat messages as rows hold them; `images`: images as rows hold them.
- `preference_formats`: published preference data as prompt, chosen and rejected.
- `templates`: the one place that knows chat templates and BOS.
- `rendering`: chat templates, run in a process of their own.
- `turns`: the next turn of a conversation, as token ids to append.
- `encoding`: the one encoder of prompts, demonstrations, pairs and solutions.
- `split`, `order`, `curriculum`: rows that are held out, their order, rows that come again.
- `packing`: samples become `Batch`es without padding.
- `tokenizers`, `vocabulary`: tokenizers made here, and the text of every token id.
- `report`: how many rows were read, kept and dropped.
- `tasks`: built-in generated tasks.

Nothing here knows a model's weights, a reward or an algorithm.
"""
