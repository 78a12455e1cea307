"""Checks of a run file before it is queued, and of another rank layout before a running job is repartitioned."""
