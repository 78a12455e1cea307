"""Checks of a run file before it is queued."""
