"""Task interface, rows of a file, mixtures, and tiny policies."""
