"""A server for scripts that drive their own training loop with the Tinker SDK: they send batches,
and ask for steps, samples and checkpoints; the model and its optimizer are here.

In: HTTP requests as the SDK 0.38 sends them.  Out: losses, weights that move, samples, checkpoints.

- `server`: the routes, and who may ask.
- `service`: sessions and models; what each route does.
- `promises`: requests that are worked on one after the other, and their results.
- `bodies`: the JSON of requests, checked.
- `wire`: the protocol-buffer messages of batches and samples.
- `batches`: the data of a batch as samples of the packed pass, with their loss.
- `trained`: a model in training: its gradient, its optimizer step, its checkpoints.
- `samplers`: the weights that are sampled from, and the requests for completions of them.
- `sampler`: completions and log-probs of weights that do not change.
- `places`: the folders of checkpoints, and their `tinker://` names.

The pass, the losses, the optimizer and the engine are the trainer's own.  Nothing that trains a
recipe imports this package.
"""
