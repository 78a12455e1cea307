"""Policies that no run file may name: the clairvoyant oracle, and tail batching, which aborts running trajectories."""
