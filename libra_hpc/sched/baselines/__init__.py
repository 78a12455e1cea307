"""Published scheduling rules behind the same `Policy` protocol, one module each, to measure `cmlfq` against.

Where a rule has no counterpart of something an engine imposes here, all baselines treat it alike (`common.Baseline`):
an engine that is closed, at its cap, or too small for the context is not eligible, and a turn waits only when no engine
is.  Waiting turns go first come, first served unless the rule orders them.
"""
