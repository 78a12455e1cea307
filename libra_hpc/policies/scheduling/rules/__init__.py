"""Published scheduling rules behind the `Policy` protocol, to measure `cmlfq` against.  More: ``bench/policies``.

Where a rule leaves a case open, all share an answer (`rule.Rule`): an engine that is closed, at its cap or too small
for the context is not eligible.  A turn waits only if no engine is eligible, first come, first served.
"""
