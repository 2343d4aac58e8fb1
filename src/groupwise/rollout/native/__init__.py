"""The native engine: samples in the trainer's process, on the training weights, with every prompt computed once.

`engine` is the loop over tokens; `kv_cache` holds keys and values; `forward` the specialised forward pass of known models;
`attention` attends to a prompt's keys and a completion's own; `graphs` repeats what draws a token as one CUDA graph.
"""
