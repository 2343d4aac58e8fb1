"""The mathematics: pure functions from rewards to advantages, from log-probabilities to losses, from lengths to weights."""
