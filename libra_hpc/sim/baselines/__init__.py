"""Scheduling policies that no live run can use: the clairvoyant oracle, and tail batching, which aborts running trajectories."""
