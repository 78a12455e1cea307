"""Megatron-Core's GPT model over packed sequences."""
