"""The mathematics: pure functions from rewards to advantages, from log-probs to losses, from
lengths to loss weights.

In: numbers of a group, vectors of a minibatch. Out: numbers, vectors; no model, no setting.
    `table.ALGORITHMS` is the table: an algorithm is one row of credit x ratio level x surrogate x
    weight; `resolve.resolve` makes one of a recipe.

Rewards become advantages in `advantages` (GRPO: `Standardized`).  The clip is in the surrogate
(`losses.Clipped`).  What the loss is divided by is in `loss_weights`: a weight for every token.
`table.Algorithm.loss` puts ratio, surrogate, masks and KL together; a row with `kl_place="reward"`
has the KL in its credit instead.  A group without differences has advantages of 0: see
`table.Algorithm.dead_groups`.  PPO adds the credit `Gae`, which reads a critic's values, and the
term `ValueLoss`, which trains it."""
