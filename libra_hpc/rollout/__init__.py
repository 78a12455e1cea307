"""The rollout leader: admission, trajectories and batches."""
