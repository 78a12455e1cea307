"""Facts for people: the run directory, the event log, metrics, the status snapshot, summaries and pictures."""
