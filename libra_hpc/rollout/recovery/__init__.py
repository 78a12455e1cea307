"""Trajectories that survive a start."""
