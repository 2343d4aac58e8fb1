"""The run viewer: completions token by token, beside the metrics of the run.

In: run folders, also while they are written, and any Parquet or JSONL file of completions.  Out: a
local web application, or one self-contained page.

- `sources`: steps of groups of completions, from folders and files.
- `completion_files`: the rows of files that other programs wrote.
- `metric_columns`: the metrics of a run, read on as its log grows.
- `index`: a few numbers of every completion, gathered in the background.
- `seeds`, `curves`, `comparison`: groups of runs that differ by their seed, their means with bands,
  and what their held-out prompts show.
- `figures`: curves as SVG and CSV.
- `groups`, `health`, `questions`, `replays`: what is asked of them.
- `pages`: every address of the application, as JSON.
- `server`: the pages over HTTP.
- `report`: the pages in one file.
- `static/`: the application, plain JavaScript without a build step.

It writes nothing but the page it is asked for, and never imports torch.
"""
