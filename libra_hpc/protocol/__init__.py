"""Message schemas of everything that crosses a process border, one module per border.  Plain msgspec structs, no behaviour."""
