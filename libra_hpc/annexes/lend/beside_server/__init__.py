"""What is put on the path of a server, whose environment is not ours: one file without dependencies."""
