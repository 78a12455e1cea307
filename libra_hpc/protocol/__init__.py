"""Message schemas of everything that crosses a process border, one module per border, and of the trace that a run leaves.  Plain msgspec structs."""
