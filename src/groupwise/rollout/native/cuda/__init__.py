"""What the native engine does on a CUDA device alone.  Nothing here is imported before its policy
lies on one.

- `workspace`: prepared weights, caches and graphs that stay between two calls of `generate`.
- `cuda_graphs`: one draw of all rows, recorded and repeated.
- `recorded_decode`: draws tokens by those graphs.
- `ahead`: the next tokens are launched before the last are read.
"""
