"""Run directory, event log, metrics, status snapshot, summary."""
