"""What computes: the operations that models and objectives are made of, with their gradients.

In: tensors.  Out: tensors.  No module here knows a model, a setting or an algorithm.

- `query`: what an attention layer asks, and how a packed stream is divided.
- `attention`: attention in packed streams, and over one part of the keys.
- `cuda`: attention in packed streams on a GPU, imported there alone.
- `stream_operation`: the same as one operation, for blocks that are compiled.
- `triton`: kernels for CUDA devices.
- `recurrence`: convolutions and delta rules whose states pass from a prompt to its completions.
- `linear_cross_entropy`: log-probs and entropies of chosen tokens, never (tokens, vocabulary).
- `distillation`: divergences over the whole vocabulary.
- `decoding`: products, norms and rotary embeddings as decoding needs them.
- `operations`: the protocol that a package of kernels implements, and torch's own way.
- `fused`, `functional`: blocks that run fused, with gradients written out.
- `joined`: linear layers over one input as one product.
- `adapted`: linear layers with a low-rank adapter.
- `in_place_gradients`: where gradients of matrices are summed.
- `onednn_shapes`: numbers of rows for which a CPU keeps machine code.
- `autograd`: what our backward passes refuse.
"""
