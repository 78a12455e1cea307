"""The Megatron worker process: one rank of a training world."""
