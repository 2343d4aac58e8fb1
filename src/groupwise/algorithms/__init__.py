"""The mathematics: pure functions from rewards to advantages, from log-probs to losses, from
lengths to loss weights.

In: numbers of a group, vectors of a minibatch.  Out: numbers and vectors.

- `algorithm`: what an algorithm is: credit x ratio level x surrogate x weight.
- `table`: the table of algorithms, one row each; a step is given its row.
- `advantages`: credits, from the rewards of a group to an advantage of every token.
- `losses`: ratios, surrogates (the clip is in `Clipped`) and the extra terms of a loss.
- `loss_weights`: what the loss is divided by, as a weight for every token.
- `kl_estimators`: estimators of the KL to the reference.
- `pair_losses`: losses of reward models and of direct preference optimisation.
- `diagnostics`: numbers for the log, read from the same vectors as the loss.
- `parts`: what a part of an algorithm declares.
- `user_parts`: checks of parts that a user wrote.

A group without differences has advantages of 0 (`Algorithm.dead_groups`).  A row with
`kl_place="reward"` has the KL in its credit instead of its loss.  PPO adds the credit `Gae`, which
reads a critic's values, and the term `ValueLoss`, which trains it.  Nothing here knows a model, a
setting, a run or another process.
"""
