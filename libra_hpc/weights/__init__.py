"""The weight path from training to rollout."""
