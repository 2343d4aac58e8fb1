"""The run viewer: what the model says, token by token, beside how the run stands.

In: run folders, also while they are written, and any Parquet or JSONL file of completions. Out: a local web application
(`serve`), or one self-contained page (`export`). It writes nothing but the page it is asked for, and never imports torch.

    sources     run folders and files, as steps of groups of completions
    index       a few numbers of every completion of a run, gathered in the background
    groups      a step and a group, ready to be shown: tokens with everything that is known of them
    health      how the run stands, in plain words
    questions   search, why the reward moved, signs of reward hacking, two steps side by side
    pages       every address of the application, as a function from parameters to JSON
    server      those pages over HTTP, to this machine only
    report      the same pages inside one file
    static/     the application: plain JavaScript, no build step; uPlot draws the curves
"""

from __future__ import annotations

from groupwise.viewer.report import export
from groupwise.viewer.server import serve

__all__ = ["export", "serve"]
