"""A rank's state as files: weights, optimizer shards, snapshots."""
