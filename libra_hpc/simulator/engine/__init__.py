"""The simulated engine: batch, caches, requests."""

from libra_hpc import compiled

compiled.use(__path__, "simulator/engine")
