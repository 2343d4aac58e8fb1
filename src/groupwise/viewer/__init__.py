"""The run viewer: completions token by token, beside the metrics of the run.

In: run folders, also while they are written, and any Parquet or JSONL file of completions. Out: a
    local web application (`server.serve`), or one self-contained page (`report.export`). It writes
    nothing but the page it is asked for, and never imports torch.

`sources` are steps of groups of completions; `index` gathers a few numbers of all of them;
`groups`, `health` and `questions` are what is asked of them; `pages` are these as addresses,
`server` answers them over HTTP, `report` puts them into one file; `static/`
is the application: plain JavaScript without a build step, with uPlot for the curves.
"""
