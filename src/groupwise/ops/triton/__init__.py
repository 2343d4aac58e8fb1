"""Triton kernels for CUDA devices: what lies between the matrix products of a step.

`operations.TritonOperations` offers them behind the names of `groupwise.ops.operations`, which
loads this package where a CUDA device and Triton are there.  Each module holds kernels and the
functions that launch them.  Numbers are read and written in the tensors' types and computed in
float32.

T positions of a stream   R rows   P prompts   D model width   I inner width of an MLP
H heads   K key-value heads   W head width   V vocabulary   C rows of a chunk of logits
"""
