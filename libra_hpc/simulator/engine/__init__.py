"""The simulated engine: batch, caches, requests."""
