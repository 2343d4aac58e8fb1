"""The native engine: samples in the trainer's process, on the training weights, with every prompt
computed once.

A token passes `engine`, the loop over rows; `decode`, which draws it, on a GPU by a CUDA graph;
`forward`, the specialised forward pass of known models; `attention`, which keeps keys and values
and attends to a prompt's and a completion's own.
"""
