"""Policies for simulations only: the clairvoyant oracle, and tail batching, which aborts running trajectories."""
