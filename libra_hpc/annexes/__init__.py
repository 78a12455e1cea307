"""Rooms that the product does not import: the embedded Slurm, measurements, and servers that lend."""
