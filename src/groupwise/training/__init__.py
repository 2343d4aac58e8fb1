"""Who learns: the online and the data-set loop, one optimizer step, objectives, metrics and
evaluation.

In: prompts, an engine, rewards and a policy (or rows of a data set). Out: an iterator of
    `records.Step`; logging, saving and stopping are the caller's. `online.train_online` is GRPO and
    its family on one screen, `offline.train_offline` everything that learns from data;
    `objectives.OBJECTIVES` is the table of the latter.
"""
