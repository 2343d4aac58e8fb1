"""What is good: completions in, one number or None per completion and function out.

In: groups of rollouts. Out: `records.RolloutGroup`. `compose.build_rewards` makes what a recipe names;
    `registry` has the built-in functions; `calls` runs functions that may never return in worker
    processes.  Importing this package imports nothing: worker processes start through it, and a
    start should cost milliseconds.
"""
