"""What only a CUDA device runs.  Nothing here is imported before a tensor lies on one.

- `stream_attention`: which kernel attends, and what it reads of a stream on the device.
- `varlen_attention`: flash attention of a packed stream in two calls.
- `flex_attention`: FlexAttention, for windows, chunks, soft caps and float32.
"""
