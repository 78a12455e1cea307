"""Traces of trajectories: readers of four formats, a writer, a generator, and statistics."""
