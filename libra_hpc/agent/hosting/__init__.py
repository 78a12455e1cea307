"""What the rollout leader's agent hosts around it: environment hosts, files, reports."""
