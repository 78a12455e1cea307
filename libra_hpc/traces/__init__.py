"""Traces of trajectories: readers of four formats, a writer, a generator with stated distributions, and an account
of what predicts what in them."""
