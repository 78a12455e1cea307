"""New weights in an engine: staged beside its steps, switched in one pause."""
