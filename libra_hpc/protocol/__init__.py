"""Message schemas of everything that crosses a process boundary, one module per boundary, and of the trace that a
run leaves.  Plain msgspec structs."""
