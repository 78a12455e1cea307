"""Published scheduling rules behind the `Policy` protocol, one module each, to measure `cmlfq` against.

Where a rule leaves a case open, all baselines share an answer (`common.Baseline`): an engine that is closed, at its cap
or too small for the context is not eligible.  A turn waits only if no engine is eligible, first come, first served.
"""
