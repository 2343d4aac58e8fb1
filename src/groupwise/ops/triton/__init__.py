"""Triton kernels for CUDA devices: what lies between the matrix products of a step.

`groupwise.ops.operations` loads this package where a CUDA device and Triton are there.  Numbers are
read and written in the tensors' types and computed in float32.

- `operations`: offers the kernels behind the names of `groupwise.ops.operations`.
- `norm`, `rotary`, `gate`: RMSNorm, rotary embeddings, activations of an MLP.
- `head`, `draw`: what is read off logits in training, and one token of every row.
- `heads`: queries, keys and values side by side, normed and rotated.
- `decode_attention`: attention of one new token for each row.
- `merge`: the union of two parts of an attention.
- `launch`: which tensors there are kernels for, block sizes and warps.

T positions of a stream   R rows   P prompts   D model width   I inner width of an MLP
H heads   K key-value heads   W head width   V vocabulary   C rows of a chunk of logits
"""
