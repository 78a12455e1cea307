"""What survives a start: checkpoint and snapshot folders, and where an attempt starts."""
