"""Everything that can be known about a run before it is queued, or before a running job is repartitioned."""
