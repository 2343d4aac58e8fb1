"""The mathematics: pure functions from rewards to advantages, from log-probs to losses, from lengths to loss weights.

In: numbers of a group, vectors of a minibatch. Out: numbers, vectors; no model, no setting. `table.ALGORITHMS` is the
table: an algorithm is one row of credit x ratio level x surrogate x weight; `resolve.resolve` makes one of a recipe.
"""
