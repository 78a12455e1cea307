"""The vLLM engine process: one rollout replica behind a socket, or in the caller's own process.

``settings`` is read without torch or vLLM; every other module needs the ``cpu`` or ``cuda`` extra.
"""
