"""The simulator: a discrete-event simulator of the rollout stage that runs the live policies."""
