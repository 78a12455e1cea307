"""Rollout scheduling policies behind one `Policy` protocol, without clock, I/O or randomness."""

from libra_hpc import compiled

compiled.use(__path__, "policies/scheduling")
