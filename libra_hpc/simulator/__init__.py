"""The simulator: a discrete-event simulator of the rollout stage that runs the live policies."""

from libra_hpc import compiled

compiled.use(__path__, "simulator")
