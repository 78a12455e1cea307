"""C-MLFQ: remaining work from prompt, siblings and tool outcomes, and the engine that adds least to the late finish."""

from libra_hpc import compiled

compiled.use(__path__, "policies/scheduling/cmlfq")
