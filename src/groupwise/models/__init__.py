"""Hugging Face checkpoints in and out, packed attention for them, small models from scratch, heads."""
