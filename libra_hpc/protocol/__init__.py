"""Message schemas, one module per process boundary, and the schema of a run's trajectories."""
