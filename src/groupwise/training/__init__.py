"""Who learns: the online and the data-set loop, one optimizer step, objectives, metrics and
evaluation.

In: prompts, an engine, rewards and a policy, or rows of a data set.  Out: an iterator of
`records.Step`; logging, saving and stopping are the caller's.

- `online`: GRPO and its family, the whole loop on one screen.
- `offline`: the loop over rows of a data set.
- `groups`: the scored groups of each step, sampled now or ahead of training.
- `recorded_rollouts`: recorded groups as a loop trains on them again.
- `signals`: log-probs and values that credit and loss read, computed before an update.
- `samples`: rollouts become samples with a weight for every token; `branches` takes them apart.
- `loss`, `loss_terms`: the loss of a packed batch, and what it sees.
- `passes`: the packed pass of an update, and of scoring.
- `optimizer`: AdamW, its schedule, and steps that are not finite; `stored_state`: its moments in
  8 bits, or in host memory.
- `critics`, `teachers`: value functions, and models that a policy learns from.
- `objectives`, `preferences`: what learns from data sets.
- `metrics`, `metric_table`, `work`: the figures of a step; `recorded_loss`: what they read.
- `evaluate`: accuracy on held-out prompts with its intervals.

Nothing here knows a run folder, a recipe file or a command.
"""
