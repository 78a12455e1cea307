"""Devices, model shapes and step-time tables: plain data that the planner and the simulator both read."""
