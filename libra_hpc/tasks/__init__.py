"""Task interface, the two toy tasks and their tiny policy."""
