"""The native engine: samples in the trainer's process, on the training weights, with every prompt
computed once.

- `engine`: what a trainer calls; it prepares the weights anew when their version changes.
- `scheduler`: which sequences decode next, when prompts are prefilled, when a sequence ends.
- `sequences`: the sequences and the prefixes behind which they are decoded.
- `kv_cache`: keys, values and recurrent states, one entry for a prompt or a completion.
- `decode`: draws the next tokens.
- `decode_attention`: what a token attends to while sampling.
- `forward`: the specialised forward pass of known models.
- `cuda`: what only a GPU does; `engine` alone enters it.

Nothing here knows rewards, advantages or losses.
"""
