"""Rollout scheduling policies: pure, behind one `Policy` protocol."""

from libra_hpc import compiled

compiled.use(__path__)
