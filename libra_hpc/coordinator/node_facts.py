"""What rank 0 has heard of one node, and when."""

from __future__ import annotations

from libra_hpc.protocol.mesh import Heartbeat


class NodeFacts:
    """Times are epoch seconds."""

    def __init__(self, now: float) -> None:
        self.host = ""
        """Empty until its agent sent `Hello`."""
        self.pid = 0
        """Process id of its agent; 0 until then."""
        self.beat: Heartbeat | None = None
        self.seen = now
        """When its last message came."""
        self.since = now
        """When it took its present state."""
