"""What the rollout leader writes for people."""
