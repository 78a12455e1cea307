"""Training: the Megatron-Core worker, GRPO losses, elastic data parallelism, checkpoints."""
