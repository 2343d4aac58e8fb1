"""What runs in vLLM's own environment: `groupwise_vllm.py`, and the lock of that environment."""
